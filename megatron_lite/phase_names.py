"""Names that trainers, profilers and servers give to the phases of a step, and to steps: phase_names.tsv.

Imports nothing of the package: analysis places time by these names, and reports color it.
"""

import re
from functools import lru_cache
from pathlib import Path

MEANS_STEP = "step"
NO_PHASE_OF_ITS_OWN = "-"
DECORATION_BUT_BRACKETS = " \t#=-*<>"
DECORATION = DECORATION_BUT_BRACKETS + "[]"
MAX_NAME_LENGTH = 500  # characters of a name that are looked at
MAX_CACHED = 2**16


def _read_table() -> list[tuple[str, re.Pattern[str]]]:
    """Read (meaning, names) of each row of phase_names.tsv."""
    rows = []
    text = Path(__file__).with_name("phase_names.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            meaning, names, _ = line.split("	")
            any_of = "|".join(names.split())
            rows.append((meaning, re.compile(any_of, re.IGNORECASE)))
    return rows


_TABLE = _read_table()
_PHASES = [row for row in _TABLE if row[0] != MEANS_STEP]
_STEPS = [names for meaning, names in _TABLE if meaning == MEANS_STEP]


def _spell(name: str) -> tuple[str, ...]:
    """The name as the table spells it, and without the decoration at its ends."""
    name = name[:MAX_NAME_LENGTH]
    return tuple(re.sub(r"[-_\s]+", "_", text) for text in (name, name.strip(DECORATION)))


@lru_cache(maxsize=MAX_CACHED)
def find_meaning(name: str) -> str:
    """The phase that a range with this name is, "-" for one that is never a phase;
    "" for what the table does not know."""
    spellings = _spell(name)
    for meaning, names in _PHASES:
        if any(names.fullmatch(spelling) for spelling in spellings):
            return meaning
    return ""


@lru_cache(maxsize=MAX_CACHED)
def find_step_family(name: str) -> int:
    """The place of the name among the table's families of steps; -1 for a name of none."""
    spellings = _spell(name)
    for place, names in enumerate(_STEPS):
        if any(names.fullmatch(spelling) for spelling in spellings):
            return place
    return -1
