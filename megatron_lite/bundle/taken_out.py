"""The list of what was taken out of a bundle: kinds, numbers and places, never the contents."""

from collections import Counter, defaultdict

from megatron_lite.bundle.clean_folder import CleanFolder
from megatron_lite.bundle.names import MEANINGS, Secret
from megatron_lite.units import counted

MAX_PLACES = 6


def describe_taken_out(made: CleanFolder) -> list[str]:
    """The lines of the list."""
    lines = ["Taken out, or replaced by a name that is the same in all files:"]
    places = defaultdict[Secret, Counter[str]](Counter)
    distinct = defaultdict[Secret, set[str]](set)
    for (kind, where), texts in made.names.taken.items():
        places[kind][where] += len(texts)
        distinct[kind] |= texts
    for kind in Secret:
        if distinct[kind]:
            number = len(distinct[kind])
            lines.append(f"  {MEANINGS[kind]}: {number:,} ({_name_places(places[kind])})")
    dropped = defaultdict[str, Counter[str]](Counter)
    for (what, where), number in made.names.dropped.items():
        dropped[what][where] += number
    for what, counts in dropped.items():
        lines.append(f"  {what}: {counts.total():,} ({_name_places(counts)})")
    if len(lines) == 1:
        lines.append("  nothing: all texts are of known forms")
    lines += [f"  left out: {text}" for text in made.left_out]
    return lines


def _name_places(counts: Counter[str]) -> str:
    """ "run.json 3, trace of rank 0 12"."""
    named = [f"{where} {number:,}" for where, number in list(counts.items())[:MAX_PLACES]]
    more = len(counts) - MAX_PLACES
    if more > 0:
        named.append(f"and {counted(more, 'more file')}")
    return ", ".join(named)
