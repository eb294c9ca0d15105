"""Who gets how much of the time."""

from collections.abc import Sequence

from gpu_checks.parts import Part

MIN_S = 15  # importing torch and waking a GPU alone can take that long
TO_THE_END_S = 5  # for the table and the files


def limit_s(part: Part, later: Sequence[Part], left_s: float) -> float:
    """Seconds that `part` may take: its share of what is left for it and all `later` ones."""
    shares = part.share + sum(one.share for one in later)
    return max(left_s - TO_THE_END_S, 0) * part.share / shares


def is_enough(seconds: float) -> bool:
    """Is it worth starting a part?"""
    return seconds >= MIN_S
