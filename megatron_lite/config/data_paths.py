"""What the words of --data-path and --split mean."""

import math
import re

from megatron_lite.errors import DataError
from megatron_lite.units import is_number


def parse_blend(words: tuple[str, ...] | list[str], flag: str) -> tuple[list[str], list[float] | None]:
    """('0.3', 'a', '0.7', 'b') -> (['a', 'b'], [0.3, 0.7]); one or several bare prefixes have the weights None.

    As in Megatron, an odd number of words means prefixes only. DataError for a mixture of weights and none, and for
    weights that are not above 0.
    """
    words = [word.strip() for word in words]
    if len(words) % 2 or not any(is_number(word) for word in words[::2]):
        return words, None
    for word in words[::2]:
        if not is_number(word):
            raise DataError(f"{flag} {' '.join(words)}: '{word}' should be a weight; give one for every prefix or none")
    weights = [float(word) for word in words[::2]]
    if not all(0 < weight < math.inf for weight in weights):
        raise DataError(f"{flag}: weights {weights} must all be above 0; leave out a data set that is unused")
    return words[1::2], weights


def split_shares(split: str) -> list[float]:
    """'949,50,1' -> [949.0, 50.0, 1.0]; missing ones are 0. DataError if that is not what it says."""
    words = [word for word in re.split(r"[,/\s]+", split.strip()) if word]
    shares = [float(word) if is_number(word) else math.nan for word in words]
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise DataError(f"--split {split}: needs one to three numbers, none negative, not all 0; for example 969,30,1")
    return shares + [0.0] * (3 - len(shares))
