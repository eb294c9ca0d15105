"""Byte-level byte-pair encoding: GPT-2's files, Megatron's TikTokenizer, and training a vocabulary of one's own.

GPT-2's files are vocab.json and merges.txt. TikTokenizer's is a list of {"rank": 0, "token_bytes": "AA==", "token_str":
"..."}, rank by rank; the first 256 are the single bytes. Its ids: special tokens 0 ... n - 1, then the ranks, shifted
by n; all in all --vocab-size of them.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import regex
import tiktoken

from megatron_lite.data.text_files import END_OF_TEXT, replace_lone_surrogates
from megatron_lite.errors import DataError, UserError
from megatron_lite.shared_files import read_foreign_text

# Contractions, letters, digits, other signs (each with one space before it), white space. A run of white space
# leaves its last character to the word behind it.
SPLIT_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

# tiktoken's regular expressions give up, by a panic, on a run of about a million white-space characters. Blocks of
# this many characters are looked at, so that no run of twice as many goes unseen.
BLANK_BLOCK = 250_000


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in vocab.json and merges.txt, in the order of GPT-2's first 256 ids.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return alphabet


class BytePairs:
    """A text is cut by `pattern`, and each piece merged in the order of `ranks` (bytes of a token -> its id).

    special: text of a token -> its id, for tokens that no merge makes.
    """

    def __init__(self, name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]):
        self._pattern, self._special = pattern, dict(special)
        self._encoding = tiktoken.Encoding(
            name=name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=self._special
        )

    def find_token(self, token: str) -> int | None:
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(i) for i in ids])

    def encode_by_pieces(self, text: str) -> list[int]:
        """The ids of a text that tiktoken would die of; special tokens are text."""
        ids = []
        for piece in regex.finditer(self._pattern, replace_lone_surrogates(text)):
            ids += self._encoding._encode_single_piece(piece.group())
        return ids


def _has_long_blank(text: str) -> bool:
    starts = range(0, len(text), BLANK_BLOCK) if len(text) >= BLANK_BLOCK else ()
    return any(text[start : start + BLANK_BLOCK].isspace() for start in starts)


# --- GPT-2's vocab.json and merges.txt


class GPT2BPETokenizer(BytePairs):
    """Byte-level BPE from GPT-2-style files, OpenAI's or others. UserError if they are missing or do not match."""

    def __init__(self, vocab_file: str | None, merge_file: str | None):
        vocab, alphabet = _read_vocab(vocab_file), byte_alphabet()
        special = _find_special(vocab, vocab_file, merge_file)
        ranks = {bytes(alphabet[c] for c in token): i for token, i in vocab.items() if token not in special}
        super().__init__(str(vocab_file), SPLIT_PATTERN, ranks, special)
        self.vocab_size, self.eod = len(vocab), vocab[END_OF_TEXT]
        self.unknown = self.eod  # Hugging Face's GPT-2, which Megatron-LM uses, has no other

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.decode(i for i in ids if i != self.eod)

    def encode(self, text: str) -> list[int]:
        """The text of a special token is text like any other."""
        return self.encode_by_pieces(text) if _has_long_blank(text) else self._encoding.encode_ordinary(text)


def _read(flag: str, path: str | None) -> str:
    if path is None:
        raise UserError(f"{flag}: missing, GPT2BPETokenizer needs it; or use --tokenizer-type ByteTokenizer")
    try:
        return read_foreign_text(path)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not UTF-8; give GPT-2's vocab.json and merges.txt") from None


def _read_vocab(path: str | None) -> dict[str, int]:
    text, wrong = _read("--vocab-file", path), None
    try:
        vocab = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"--vocab-file {path}: not JSON; give GPT-2's vocab.json, not merges.txt") from None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if not ids or not all(isinstance(i, int) for i in ids) or set(ids) != set(range(len(ids))):
        wrong = "not a map from tokens to the ids 0, 1, 2, ...; give GPT-2's vocab.json"
    elif missing := [token for token in (END_OF_TEXT, *byte_alphabet()) if token not in vocab]:
        wrong = f"{missing[0]} is missing; a byte-level vocabulary has 256 bytes and {END_OF_TEXT}"
    if wrong:
        raise UserError(f"--vocab-file {path}: {wrong}")
    return vocab


def _find_special(vocab: dict[str, int], vocab_file: str, merge_file: str | None) -> dict[str, int]:
    """The vocabulary's entries that no merge makes: special tokens. UserError unless the rest fits the merges.

    tiktoken merges by the ids' order and has no list of merges, so the ids must rise along that list.
    """
    both = f"--vocab-file {vocab_file} and --merge-file {merge_file}"
    made, last = dict.fromkeys(byte_alphabet(), -1), -1
    for number, line in enumerate(_read("--merge-file", merge_file).splitlines(), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"--merge-file {merge_file}: line {number} is not two tokens; give GPT-2's merges.txt")
        token = "".join(pair)
        if token not in vocab or pair[0] not in made or pair[1] not in made or token in made:
            raise UserError(f"{both}: merge '{line}' does not fit the vocabulary; give two files of one model")
        if vocab[token] < last:
            raise UserError(f"{both}: the ids do not follow the order of the merges; write both with one tool")
        made[token] = last = vocab[token]
    special = {token: i for token, i in vocab.items() if token not in made}
    unmade = [token for token in special if not (token[:1] in "<[" and token[-1:] in ">]")]
    if unmade:
        raise UserError(f"{both}: no merge makes {len(unmade)} tokens such as {unmade[0]}; is the merge file complete?")
    return special


# --- Megatron's TikTokenizer

VOCAB_SIZE = 1 << 17  # Megatron's, without --vocab-size
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
FORMAT = 'a list of {"rank", "token_bytes", "token_str"}, rank 0, 1, 2, ..., which starts with the 256 bytes'

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    # as v1, but words are cut where lower case turns to upper, and more line ends stay together
    "v2": (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class TikTokenizer(BytePairs):
    """As in Megatron, a special token's text in a document becomes that token; "</s>" is the end of document.

    pattern: v1 or v2. special_tokens: names of the first ones, all of SPECIAL_TOKENS among them; the others, up to
    num_special_tokens, are called <SPECIAL_i>. UserError for a file or numbers that do not fit.
    """

    def __init__(
        self, model: str, pattern: str, vocab_size: int | None, num_special_tokens: int, special_tokens: Sequence[str]
    ):
        self.vocab_size = vocab_size or VOCAB_SIZE
        names = _special_names(tuple(special_tokens) or SPECIAL_TOKENS, num_special_tokens, self.vocab_size)
        tokens = _read_tokens(model)[: self.vocab_size - num_special_tokens]
        real_size = num_special_tokens + len(tokens)
        if real_size < self.vocab_size:
            raise UserError(
                f"--vocab-size {self.vocab_size}: {model} holds {len(tokens)} tokens, with the special "
                f"ones {real_size}; give --vocab-size {real_size}"
            )
        ranks = {token: rank + num_special_tokens for rank, token in enumerate(tokens)}
        super().__init__(model, PATTERNS[pattern], ranks, {name: i for i, name in enumerate(names)})
        self.eod = names.index("</s>")
        self.unknown = None
        self._first_text = num_special_tokens

    def decode_text(self, ids: Iterable[int]) -> str:
        return self.decode(i for i in ids if i >= self._first_text)

    def encode(self, text: str) -> list[int]:
        """The text of a special token becomes that token."""
        if not _has_long_blank(text):
            return self._encoding.encode(text, allowed_special="all")
        ids = []
        names = "|".join(map(regex.escape, self._special))
        for part in regex.split(f"({names})", text):
            ids += [self._special[part]] if part in self._special else self.encode_by_pieces(part)
        return ids


def _special_names(given: tuple[str, ...], number: int, vocab_size: int) -> list[str]:
    flag = f"--tokenizer-special-tokens {' '.join(given)}"
    missing = [name for name in SPECIAL_TOKENS if name not in given]
    if missing:
        everything = " ".join(SPECIAL_TOKENS)
        raise UserError(f"{flag}: {missing[0]} is missing; name all of {everything}, or leave the flag out")
    names = [*given, *(f"<SPECIAL_{i}>" for i in range(len(given), number))]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{flag}: {twice} is there twice; name each token once")
    if not len(given) <= number < vocab_size:
        raise UserError(
            f"--tiktoken-num-special-tokens {number}: must be at least the {len(given)} named ones and "
            f"less than the vocabulary of {vocab_size}; 1000 is usual"
        )
    return names


def _read_tokens(path: str) -> list[bytes]:
    tokens, why = [], None
    try:
        entries = json.loads(read_foreign_text(path))
        if not isinstance(entries, list):
            why = f"a {type(entries).__name__}"
        for rank, entry in enumerate(entries if why is None else ()):
            why = f"entry {rank} is not that rank's token"
            if entry["rank"] != rank:
                break
            tokens.append(base64.b64decode(entry["token_bytes"], validate=True))
            why = None
    except OSError as error:
        raise UserError(f"--tokenizer-model {path}: cannot be read ({error.strerror}); check the path") from None
    except (ValueError, RecursionError, TypeError, KeyError):
        why = why or "not JSON"
    if why is None and (tokens[:256] != [bytes([byte]) for byte in range(256)] or len(set(tokens)) < len(tokens)):
        why = "does not start with the 256 bytes, or repeats a token"
    if why:
        raise UserError(f"--tokenizer-model {path}: {why}; give {FORMAT}")
    return tokens


# --- Training

MIN_VOCABULARY = 257  # the bytes and the end-of-text token


def train_bpe(texts: Iterable[str | bytes], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges, most frequent pair first; ties go to the pair with the smaller ids.

    Bytes are read as UTF-8. The vocabulary stays below `vocab_size` if no pair occurs twice any more.
    DataError if vocab_size is below 257.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCABULARY:
        raise DataError(f"--vocab-size {vocab_size}: 256 bytes and {END_OF_TEXT} need {MIN_VOCABULARY} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, show_progress=False, initial_alphabet=list(byte_alphabet())
    )
    decoded = (text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text for text in texts)
    tokenizer.train_from_iterator(map(replace_lone_surrogates, decoded), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    return vocab | {END_OF_TEXT: len(vocab)}, [(left, right) for left, right in model["merges"]]


def write_bpe(folder: str | Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Writes vocab.json and merges.txt into `folder`, which is made if need be."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
