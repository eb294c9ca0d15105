"""Megatron's TikTokenizer: byte pairs from its JSON file, special tokens before them.

The file is a list of {"rank": 0, "token_bytes": "AA==", "token_str": "..."}, rank by rank; the first 256 are the single
bytes. Ids: special tokens 0 ... n - 1, then the ranks, shifted by n; all in all --vocab-size of them.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_lite.data.byte_pairs import BytePairs
from megatron_lite.errors import UserError

VOCAB_SIZE = 1 << 17  # Megatron's, without --vocab-size
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
FORMAT = 'a list of {"rank", "token_bytes", "token_str"}, rank 0, 1, 2, ..., which starts with the 256 bytes'

_V1_WORD = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "v1": _V1_WORD,
    # as v1, but words are cut where lower case turns to upper, and more line ends stay together
    "v2": (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


class TikTokenizer:
    """As in Megatron, a special token's text in a document becomes that token; "</s>" is the end of document.

    pattern: v1 or v2. special_tokens: names of the first ones, all of SPECIAL_TOKENS among them; the others, up to
    num_special_tokens, are called <SPECIAL_i>. UserError for a file or numbers that do not fit.
    """

    def __init__(
        self,
        model: str,
        pattern: str = "v2",
        vocab_size: int | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = (),
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
        self.eod = names.index("</s>")
        ranks = {token: rank + num_special_tokens for rank, token in enumerate(tokens)}
        self._pairs = BytePairs(model, PATTERNS[pattern], ranks, {name: i for i, name in enumerate(names)})

    def encode(self, text: str) -> list[int]:
        return self._pairs.encode_with_special(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._pairs.decode(ids)


def _special_names(given: tuple[str, ...], number: int, vocab_size: int) -> list[str]:
    missing = [name for name in SPECIAL_TOKENS if name not in given]
    if missing:
        raise UserError(
            f"--tokenizer-special-tokens {' '.join(given)}: {missing[0]} is missing; name all of "
            f"{' '.join(SPECIAL_TOKENS)}, or leave the flag out"
        )
    names = [*given, *(f"<SPECIAL_{i}>" for i in range(len(given), number))]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"--tokenizer-special-tokens {' '.join(given)}: {twice} is there twice; name each token once")
    if not len(given) <= number < vocab_size:
        raise UserError(
            f"--tiktoken-num-special-tokens {number}: must be at least the {len(given)} named ones and "
            f"less than the vocabulary of {vocab_size}; 1000 is usual"
        )
    return names


def _read_tokens(path: str) -> list[bytes]:
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--tokenizer-model {path}: cannot be read ({error.strerror}); check the path") from None
    except (ValueError, RecursionError):
        raise UserError(f"--tokenizer-model {path}: not JSON; give {FORMAT}") from None
    if not isinstance(entries, list):
        raise UserError(f"--tokenizer-model {path}: a {type(entries).__name__}; give {FORMAT}")
    tokens = [_token_bytes(path, rank, entry) for rank, entry in enumerate(entries)]
    if tokens[:256] != [bytes([byte]) for byte in range(256)] or len(set(tokens)) < len(tokens):
        raise UserError(
            f"--tokenizer-model {path}: does not start with the 256 bytes, or repeats a token; give {FORMAT}"
        )
    return tokens


def _token_bytes(path: str, rank: int, entry) -> bytes:
    try:
        token = base64.b64decode(entry["token_bytes"], validate=True) if entry["rank"] == rank else None
    except (TypeError, KeyError, binascii.Error, ValueError):
        token = None
    if token is None:
        raise UserError(f"--tokenizer-model {path}: entry {rank} is not that rank's token; give {FORMAT}")
    return token
