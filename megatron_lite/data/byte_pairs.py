"""Byte-pair merging by ranks, through tiktoken, for texts of any shape."""

from collections.abc import Iterable, Mapping

import regex
import tiktoken

# tiktoken's regular expressions give up, by a panic, on a run of about a million white-space characters. Blocks of
# this many characters are looked at, so that no run of twice as many goes unseen.
BLANK_BLOCK = 250_000


class BytePairs:
    """Text to ids: cut by `pattern`, each piece merged in the order of `ranks` (bytes of a token -> its id).

    special: text of a token -> its id, for tokens that no merge makes.
    """

    def __init__(self, name: str, pattern: str, ranks: Mapping[bytes, int], special: Mapping[str, int]):
        self._pattern, self._special = pattern, dict(special)
        self._encoding = tiktoken.Encoding(
            name=name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=self._special
        )

    def encode(self, text: str) -> list[int]:
        """The text of a special token is text like any other."""
        if _has_long_blank(text):
            return self._encode_by_pieces(text)
        return self._encoding.encode_ordinary(text)

    def encode_with_special(self, text: str) -> list[int]:
        """The text of a special token becomes that token."""
        if not _has_long_blank(text):
            return self._encoding.encode(text, allowed_special="all")
        ids = []
        names = "|".join(map(regex.escape, self._special))
        for part in regex.split(f"({names})", text):
            ids += [self._special[part]] if part in self._special else self._encode_by_pieces(part)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoding.decode([int(i) for i in ids])

    def _encode_by_pieces(self, text: str) -> list[int]:
        ids = []
        for piece in regex.finditer(self._pattern, mended(text)):
            ids += self._encoding._encode_single_piece(piece.group())
        return ids


def mended(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _has_long_blank(text: str) -> bool:
    if len(text) < BLANK_BLOCK:
        return False
    return any(text[i : i + BLANK_BLOCK].isspace() for i in range(0, len(text), BLANK_BLOCK))
