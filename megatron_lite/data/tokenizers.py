"""Text to token ids and back."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from megatron_lite.config.data_defaults import TOKENIZERS
from megatron_lite.data.byte_level import END_OF_TEXT, SPLIT_PATTERN, byte_alphabet
from megatron_lite.errors import DataError, UserError


class Tokenizer(Protocol):
    """vocab_size counts the end-of-document token, whose id is eod; encode never returns that token."""

    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


def make_tokenizer(
    tokenizer_type: str, *, vocab_file: str | None = None, merge_file: str | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """The tokenizer of Megatron's --tokenizer-type. UserError for one that does not exist here or lacks its files."""
    if tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(vocab_file, merge_file)
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "NullTokenizer":
        return NullTokenizer(vocab_size)
    raise UserError(
        f"--tokenizer-type {tokenizer_type}: not available, only {', '.join(TOKENIZERS)}; tokenize elsewhere and train on "
        "the .bin/.idx files with --tokenizer-type NullTokenizer --vocab-size N"
    )


class GPT2BPETokenizer:
    """Byte-level BPE from GPT-2-style files, OpenAI's or others. UserError if they are missing or do not match."""

    def __init__(self, vocab_file: str | None, merge_file: str | None):
        import tiktoken

        vocab = _read_vocab(vocab_file)
        merges = _read_merges(merge_file)
        special = _check_match(vocab, merges, vocab_file, merge_file)
        alphabet = byte_alphabet()
        ranks = {bytes(alphabet[c] for c in token): i for token, i in vocab.items() if token not in special}
        self.vocab_size = len(vocab)
        self.eod = vocab[END_OF_TEXT]
        self._bpe = tiktoken.Encoding(
            name=str(vocab_file), pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._bpe.decode([int(i) for i in ids])


class ByteTokenizer:
    """One token per byte of UTF-8; needs no files."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        pieces = [END_OF_TEXT.encode() if i == self.eod else bytes([i]) for i in ids]
        return b"".join(pieces).decode("utf-8", errors="replace")


class NullTokenizer:
    """Text that consists of ids already; for files that were tokenized elsewhere. The id after the last one is eod."""

    def __init__(self, vocab_size: int | None):
        if not vocab_size or vocab_size < 1:
            raise UserError(f"--vocab-size {vocab_size}: NullTokenizer needs the number of ids; for example 32000")
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            wrong = str(error).rpartition(": ")[2]
            raise DataError(
                f"--tokenizer-type NullTokenizer: {wrong} in the text is no integer; choose another tokenizer for text"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(i) for i in ids)


def _read(flag: str, path: str | None) -> str:
    if path is None:
        raise UserError(f"{flag}: missing, GPT2BPETokenizer needs it; or use --tokenizer-type ByteTokenizer")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not UTF-8; give GPT-2's vocab.json and merges.txt") from None


def _read_vocab(path: str | None) -> dict[str, int]:
    text = _read("--vocab-file", path)
    try:
        vocab = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"--vocab-file {path}: not JSON; give GPT-2's vocab.json, not merges.txt") from None
    if not isinstance(vocab, dict) or set(vocab.values()) != set(range(len(vocab))):
        raise UserError(f"--vocab-file {path}: not a map from tokens to the ids 0, 1, 2, ...; give GPT-2's vocab.json")
    missing = [token for token in (END_OF_TEXT, *byte_alphabet()) if token not in vocab]
    if missing:
        raise UserError(
            f"--vocab-file {path}: {missing[0]} is missing; a byte-level vocabulary has 256 bytes and {END_OF_TEXT}"
        )
    return vocab


def _read_merges(path: str | None) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_read("--merge-file", path).splitlines(), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"--merge-file {path}: line {number} is not two tokens; give GPT-2's merges.txt")
        merges.append((pair[0], pair[1]))
    return merges


def _check_match(vocab: dict[str, int], merges: list, vocab_file: str, merge_file: str) -> dict[str, int]:
    """The vocabulary's entries that no merge makes: special tokens. UserError unless the rest fits the merges.

    tiktoken merges by the ids' order and has no list of merges, so the ids must rise along that list.
    """
    both = f"--vocab-file {vocab_file} and --merge-file {merge_file}"
    made = dict.fromkeys(byte_alphabet(), -1)
    last = -1
    for left, right in merges:
        token = left + right
        if token not in vocab or left not in made or right not in made or token in made:
            raise UserError(f"{both}: merge '{left} {right}' does not fit the vocabulary; give two files of one model")
        if vocab[token] < last:
            raise UserError(f"{both}: the ids do not follow the order of the merges; write both with one tool")
        made[token] = last = vocab[token]
    special = {token: i for token, i in vocab.items() if token not in made}
    unmade = [token for token in special if not (token[:1] in "<[" and token[-1:] in ">]")]
    if unmade:
        raise UserError(f"{both}: no merge makes {len(unmade)} tokens such as {unmade[0]}; is the merge file complete?")
    return special
