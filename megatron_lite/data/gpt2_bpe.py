"""GPT-2's tokenizer from vocab.json and merges.txt."""

import json
from collections.abc import Iterable
from pathlib import Path

from megatron_lite.data.byte_level import END_OF_TEXT, SPLIT_PATTERN, byte_alphabet
from megatron_lite.data.byte_pairs import BytePairs
from megatron_lite.errors import UserError


class GPT2BPETokenizer:
    """Byte-level BPE from GPT-2-style files, OpenAI's or others. UserError if they are missing or do not match."""

    def __init__(self, vocab_file: str | None, merge_file: str | None):
        vocab = _read_vocab(vocab_file)
        merges = _read_merges(merge_file)
        special = _check_match(vocab, merges, vocab_file, merge_file)
        alphabet = byte_alphabet()
        ranks = {bytes(alphabet[c] for c in token): i for token, i in vocab.items() if token not in special}
        self.vocab_size = len(vocab)
        self.eod = vocab[END_OF_TEXT]
        self._pairs = BytePairs(str(vocab_file), SPLIT_PATTERN, ranks, special)

    def encode(self, text: str) -> list[int]:
        return self._pairs.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._pairs.decode(ids)


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
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if not ids or not all(isinstance(i, int) for i in ids) or set(ids) != set(range(len(ids))):
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
