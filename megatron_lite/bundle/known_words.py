"""Words that names in PyTorch, in CUDA's kernels and in this package are made of: what a bundle may keep of a name.

tests/known_words.py makes the list, known_words.txt.
"""

import re
from functools import lru_cache
from pathlib import Path

WORDS_FILE = Path(__file__).with_name("known_words.txt")
# letters and digits of any script, without "_"
RUN = re.compile(r"[^\W_]+")
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|.")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{1,12}")
# more is a number of something: a telephone, an account, an id
MAX_DIGITS_OF_RUN = 9
# random text, as keys are made of, falls into many short parts
MAX_PARTS = 12
MAX_LONE_LETTERS = 3


@lru_cache(maxsize=1)
def read_known_words() -> frozenset[str]:
    """The list, in small letters."""
    return frozenset(WORDS_FILE.read_text(encoding="utf-8").split())


def split_run(run: str) -> list[str]:
    """Split letters and digits into words: "cudaLaunchKernel2" into cuda, Launch, Kernel and 2."""
    return _PARTS.findall(run)


@lru_cache(maxsize=100_000)
def is_known(run: str) -> bool:
    """Whether letters and digits, without anything between them, are known words and short numbers."""
    if _ADDRESS.fullmatch(run):
        return True
    parts = split_run(run)
    digits = sum(len(part) for part in parts if part.isdigit())
    lone = sum(len(part) == 1 and not part.isdigit() for part in parts)
    if digits > MAX_DIGITS_OF_RUN or len(parts) > MAX_PARTS or lone > MAX_LONE_LETTERS:
        return False
    return all(_is_known_part(part) for part in parts)


def _is_known_part(part: str) -> bool:
    if not part.isascii():
        return False
    return part.isdigit() or len(part) == 1 or part.lower() in read_known_words()
