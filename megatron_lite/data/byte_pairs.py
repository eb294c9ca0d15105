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
    alphabet: dict[str, int] = {}
    for first, last in ("!~", "¡¬", "®ÿ"):
        for byte in range(ord(first), ord(last) + 1):
            alphabet[chr(byte)] = byte
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    for number, byte in enumerate(others):
        alphabet[chr(256 + number)] = byte
    return alphabet


class BytePairs:
    """Byte-pair encoding: a text is cut by a pattern, and each piece merged in the order of ranks."""

    def __init__(self, name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]):
        """
        Args:
            name: Name of the encoding, for messages.
            pattern: The regular expression that cuts texts.
            ranks: Ids by the bytes of a token; the smaller one is merged first.
            special: Ids by the text of a token that no merge makes.
        """
        self._pattern = pattern
        self._special = dict(special)
        self._encoding = tiktoken.Encoding(
            name=name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=self._special
        )

    def find_token(self, token: str) -> int | None:
        """The id of a token by its name; None for one that is not in the vocabulary."""
        try:
            return int(self._encoding.encode_single_token(token))
        except KeyError:
            return None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        return self._encoding.decode([int(i) for i in ids])

    def encode_by_pieces(self, text: str) -> list[int]:
        """The ids of a text that tiktoken would die of; special tokens are text."""
        ids: list[int] = []
        for piece in regex.finditer(self._pattern, replace_lone_surrogates(text)):
            ids += self._encoding._encode_single_piece(piece.group())
        return ids


def _has_long_blank(text: str) -> bool:
    """Whether a text has a run of white space that tiktoken may die of."""
    if len(text) < BLANK_BLOCK:
        return False
    starts = range(0, len(text), BLANK_BLOCK)
    return any(text[start : start + BLANK_BLOCK].isspace() for start in starts)


# --- GPT-2's vocab.json and merges.txt


class GPT2BPETokenizer(BytePairs):
    """Byte-level BPE from GPT-2-style files, OpenAI's or others. UserError if they are missing or do not match."""

    def __init__(self, vocab_file: str | None, merge_file: str | None):
        alphabet = byte_alphabet()
        vocab = _read_vocab(vocab_file)
        special = _find_special(vocab, vocab_file, merge_file)
        ranks: dict[bytes, int] = {}
        for token, token_id in vocab.items():
            if token not in special:
                ranks[bytes(alphabet[character] for character in token)] = token_id
        super().__init__(str(vocab_file), SPLIT_PATTERN, ranks, special)
        self.vocab_size = len(vocab)
        self.eod = vocab[END_OF_TEXT]
        self.unknown = self.eod  # Hugging Face's GPT-2, which Megatron-LM uses, has no other

    def decode_text(self, ids: Iterable[int]) -> str:
        """The text without special tokens."""
        return self.decode(token for token in ids if token != self.eod)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; that of a special token is text like any other."""
        if _has_long_blank(text):
            return self.encode_by_pieces(text)
        return self._encoding.encode_ordinary(text)


def _read(flag: str, path: str | None) -> str:
    """The text of one of GPT-2's files. UserError if it cannot be read. flag: that names it."""
    if path is None:
        raise UserError(f"{flag}: missing, GPT2BPETokenizer needs it; or use --tokenizer-type ByteTokenizer")
    try:
        return read_foreign_text(path)
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not UTF-8; give GPT-2's vocab.json and merges.txt") from None


def _read_vocab(path: str | None) -> dict[str, int]:
    """The ids of vocab.json by token. UserError for any other file."""
    text = _read("--vocab-file", path)
    try:
        vocab = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"--vocab-file {path}: not JSON; give GPT-2's vocab.json, not merges.txt") from None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    are_ids = bool(ids) and all(isinstance(token_id, int) for token_id in ids)
    if not are_ids or set(ids) != set(range(len(ids))):
        raise UserError(f"--vocab-file {path}: not a map from tokens to the ids 0, 1, 2, ...; give GPT-2's vocab.json")
    known: dict[str, int] = vocab
    missing = [token for token in (END_OF_TEXT, *byte_alphabet()) if token not in known]
    if missing:
        raise UserError(
            f"--vocab-file {path}: {missing[0]} is missing; a byte-level vocabulary has 256 bytes and {END_OF_TEXT}"
        )
    return known


def _find_special(vocab: dict[str, int], vocab_file: str | None, merge_file: str | None) -> dict[str, int]:
    """The vocabulary's entries that no merge makes: special tokens.

    tiktoken merges by the ids' order and has no list of merges, so the ids must rise along that list.

    Args:
        vocab: Ids by token.
        vocab_file: Path of the file that they are from, for messages.
        merge_file: The file of merges.

    Raises:
        UserError: The rest of the vocabulary does not fit the merges.
    """
    both = f"--vocab-file {vocab_file} and --merge-file {merge_file}"
    made = set(byte_alphabet())
    last = -1  # the id that the merge before made
    for number, line in enumerate(_read("--merge-file", merge_file).splitlines(), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"--merge-file {merge_file}: line {number} is not two tokens; give GPT-2's merges.txt")
        token = "".join(pair)
        can_be_made = token in vocab and token not in made
        if not can_be_made or pair[0] not in made or pair[1] not in made:
            raise UserError(f"{both}: merge '{line}' does not fit the vocabulary; give two files of one model")
        if vocab[token] < last:
            raise UserError(f"{both}: the ids do not follow the order of the merges; write both with one tool")
        made.add(token)
        last = vocab[token]
    special = {token: token_id for token, token_id in vocab.items() if token not in made}
    unmade = [token for token in special if not (token[:1] in "<[" and token[-1:] in ">]")]
    if unmade:
        raise UserError(f"{both}: no merge makes {len(unmade)} tokens such as {unmade[0]}; is the merge file complete?")
    return special


# --- Megatron's TikTokenizer

VOCAB_SIZE = 1 << 17  # Megatron's, without --vocab-size
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
VOCABULARY_FORMAT = 'a list of {"rank", "token_bytes", "token_str"}, rank 0, 1, 2, ..., which starts with the 256 bytes'

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
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
    """Megatron's tokenizer: a special token's text in a document becomes that token; "</s>" is the end of document."""

    def __init__(
        self, model: str, pattern: str, vocab_size: int | None, num_special_tokens: int, special_tokens: Sequence[str]
    ):
        """
        Args:
            model: Path of the file of tokens.
            pattern: v1 or v2.
            vocab_size: Special tokens and others together; None: VOCAB_SIZE.
            num_special_tokens: Number of special tokens. Those that are not named are called <SPECIAL_i>.
            special_tokens: Names of the first ones, all of SPECIAL_TOKENS among them; empty: those.

        Raises:
            UserError: The file or the numbers do not fit.
        """
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
        special = {name: number for number, name in enumerate(names)}
        super().__init__(model, PATTERNS[pattern], ranks, special)
        self.eod = names.index("</s>")
        self.unknown = None
        self._first_text = num_special_tokens  # id of the first token that is not special

    def decode_text(self, ids: Iterable[int]) -> str:
        """The text without special tokens."""
        return self.decode(token for token in ids if token >= self._first_text)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; that of a special token becomes that token."""
        if not _has_long_blank(text):
            return self._encoding.encode(text, allowed_special="all")
        ids: list[int] = []
        names = "|".join(map(regex.escape, self._special))
        for part in regex.split(f"({names})", text):
            if part in self._special:
                ids.append(self._special[part])
            else:
                ids += self.encode_by_pieces(part)
        return ids


def _special_names(given: tuple[str, ...], number: int, vocab_size: int) -> list[str]:
    """The names of all special tokens, by id.

    Args:
        given: Names of the first ones.
        number: How many there are.
        vocab_size: Number of all tokens.

    Raises:
        UserError: A name is missing or there twice, or the numbers do not fit.
    """
    flag = f"--tokenizer-special-tokens {' '.join(given)}"
    missing = [name for name in SPECIAL_TOKENS if name not in given]
    if missing:
        everything = " ".join(SPECIAL_TOKENS)
        raise UserError(f"{flag}: {missing[0]} is missing; name all of {everything}, or leave the flag out")
    unnamed = [f"<SPECIAL_{place}>" for place in range(len(given), number)]
    names = [*given, *unnamed]
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
    """The tokens of a file, by rank. UserError unless it is VOCABULARY_FORMAT."""
    tokens: list[bytes] = []
    why = ""
    try:
        entries = json.loads(read_foreign_text(path))
        if isinstance(entries, list):
            for rank, entry in enumerate(entries):
                why = f"entry {rank} is not that rank's token"
                if entry["rank"] != rank:
                    break
                tokens.append(base64.b64decode(entry["token_bytes"], validate=True))
                why = ""
        else:
            why = f"a {type(entries).__name__}"
    except OSError as error:
        raise UserError(f"--tokenizer-model {path}: cannot be read ({error.strerror}); check the path") from None
    except (ValueError, RecursionError, TypeError, KeyError):
        why = why or "not JSON"
    first_bytes = [bytes([byte]) for byte in range(256)]
    is_sound = tokens[:256] == first_bytes and len(set(tokens)) == len(tokens)
    if not why and not is_sound:
        why = "does not start with the 256 bytes, or repeats a token"
    if why:
        raise UserError(f"--tokenizer-model {path}: {why}; give {VOCABULARY_FORMAT}")
    return tokens


# --- Training

MIN_VOCABULARY = 257  # the bytes and the end-of-text token


def train_bpe(texts: Iterable[str | bytes], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Learn byte pairs, the most frequent first; ties go to the pair with the smaller ids.

    Args:
        texts: Texts to learn from; bytes are read as UTF-8.
        vocab_size: Tokens that are wanted; there are fewer if no pair occurs twice any more.

    Returns:
        The vocabulary, ids by token, and the merges, in their order.

    Raises:
        DataError: The vocabulary is below MIN_VOCABULARY.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCABULARY:
        raise DataError(f"--vocab-size {vocab_size}: 256 bytes and {END_OF_TEXT} need {MIN_VOCABULARY} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, show_progress=False, initial_alphabet=list(byte_alphabet())
    )
    tokenizer.train_from_iterator(map(_to_unicode, texts), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    learned: dict[str, int] = model["vocab"]
    vocab = dict(sorted(learned.items(), key=lambda item: item[1]))
    vocab[END_OF_TEXT] = len(vocab)
    merges = [(left, right) for left, right in model["merges"]]
    return vocab, merges


def _to_unicode(text: str | bytes) -> str:
    """A text that UTF-8 can hold."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return replace_lone_surrogates(text)


def write_bpe(
    folder: str | Path,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
) -> None:
    """Write vocab.json and merges.txt.

    Args:
        folder: The folder to write into, which is made if need be.
        vocab: The id of each token, spelled in the alphabet of bytes.
        merges: Pairs of tokens in the order in which they are joined.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(vocab, ensure_ascii=False)
    (folder / "vocab.json").write_text(text, encoding="utf-8")
    lines = ["#version: 0.2"]
    for left, right in merges:
        lines.append(f"{left} {right}")
    text = "\n".join(lines) + "\n"
    (folder / "merges.txt").write_text(text, encoding="utf-8")
