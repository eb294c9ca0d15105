"""Words that names in PyTorch, in CUDA's kernels and in this package are made of: what a bundle may keep of a name.

tests/known_words.py makes the list, known_words.txt.
"""

import re
from functools import lru_cache
from pathlib import Path

WORDS_FILE = Path(__file__).with_name("known_words.txt")
# letters and digits of any script, without "_"
RUN = re.compile(r"[^\W_]+")
# sizes such as 128x64, and formats of floats such as E4m3, are one part
_SIZES = re.compile(r"\d{1,5}(?:x\d{1,5})+|[eE]\d[mM]\d")
_PARTS = re.compile(rf"{_SIZES.pattern}|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|.")
# symbols as compilers write them: between names stand codes of a few letters
_CODES = re.compile(r"[A-Z]{1,6}|[A-Z]?[a-z]{1,2}")
_PLAIN = re.compile(
    r"\d{1,9}|\d{1,4}[eExXkKmMgGbB]|[A-Za-z]\d{0,4}|[A-Za-z]{2}\d{0,3}|[A-Za-z]{3,}\d{0,4}|\d{1,4}[A-Za-z]{3,}"
)
_QUANTITY = re.compile(r"\d{1,5}(?:[KMGT]i?B|kB|[kMG]Hz|[mun]?s|bit|W)|1[fF]1[bB]")
# types and sizes in names of kernels: bf16f32, s64x128x16, t128x16x256u2
_CODES_OF_KERNELS = re.compile(
    r"(?:(?:tf|bf|fp|f|s|u|i)(?:8|16|32|64)){1,4}|[a-z]{0,2}\d{1,4}(?:x\d{1,4})+(?:[a-z]{1,2}\d?)?"
)
MANGLED = re.compile(r"_ZN?[KLS\d][\w.$]*\Z", re.ASCII)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{1,12}")
# more is a number of something: a telephone, an account, an id
MAX_DIGITS_OF_RUN = 9
# random text, as keys are made of, falls into many short parts
MAX_PARTS = 24
MIN_WORD_LETTERS = 4
MIN_SHARE_OF_WORDS = 0.3
# so short that it tells nothing
MAX_LETTERS_OF_CODE = 4


@lru_cache(maxsize=1)
def read_known_words() -> frozenset[str]:
    """The list, in small letters."""
    return frozenset(WORDS_FILE.read_text(encoding="utf-8").split())


def split_run(run: str) -> list[str]:
    """Split letters and digits into words: "cudaLaunchKernel2" into cuda, Launch, Kernel and 2."""
    return _PARTS.findall(run)


@lru_cache(maxsize=100_000)
def is_known(run: str) -> bool:
    """Whether letters and digits, without anything between them, are known words, short numbers and types or sizes.

    Ids and keys have letters and digits, too: with digits, either a word of some length is among them, or the whole is
    of a form that kernels' names have, or in the list.
    """
    if is_plain(run) or _ADDRESS.fullmatch(run) or _CODES_OF_KERNELS.fullmatch(run) or run in read_known_words():
        return True
    parts = split_run(run)
    longest_number = max((len(part) for part in parts if part.isdigit()), default=0)
    in_words = sum(len(part) for part in parts if part.isalpha() and len(part) >= MIN_WORD_LETTERS)
    if longest_number > MAX_DIGITS_OF_RUN or len(parts) > MAX_PARTS or in_words < MIN_SHARE_OF_WORDS * len(run):
        return False
    return all(map(_is_known_part, parts))


@lru_cache(maxsize=100_000)
def is_plain(run: str) -> bool:
    """Whether letters and digits are a number, or known words with a number before or behind: no id of a run is."""
    if _QUANTITY.fullmatch(run):
        return True
    parts = split_run(run)
    if _PLAIN.fullmatch(run) is None or not all(map(_is_known_part, parts)):
        return False
    # letters at random are short parts, once capitals begin them
    in_words = sum(len(part) for part in parts if len(part) > MAX_LETTERS_OF_CODE - 2)
    return len(run) <= MAX_LETTERS_OF_CODE or 2 * in_words >= len(run)


@lru_cache(maxsize=100_000)
def is_known_in_symbol(run: str) -> bool:
    """Whether letters and digits in a symbol that a compiler has mangled are known words, numbers and its codes."""
    return all(_is_known_part(part) or _CODES.fullmatch(part) for part in split_run(run))


def _is_known_part(part: str) -> bool:
    if not part.isascii():
        return False
    is_plain = part.isdigit() or len(part) == 1 or _SIZES.fullmatch(part) is not None
    return is_plain or part.lower() in read_known_words()
