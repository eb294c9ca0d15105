"""Megatron-LM's flags that are not settings here: accepted without effect, respelled, or refused. The table is flags.tsv.

Nothing of it is silent: what a command line uses of the table is printed once at the start, or stops the run.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("flags.tsv")
ACCEPTED, RETIRED, RESPELLED, REFUSED, ABSENT = ANSWERS = ("accepted", "retired", "respelled", "refused", "absent")
STOPPING = REFUSED, ABSENT
ABSENT_BEGINS = "is a flag of Megatron-LM that this trainer does not have; leave it out"


@dataclass(frozen=True)
class MegatronFlag:
    """A row of the table.

    text: the reason, or the new spelling of a respelled flag.
    passing: the values with which a flag that stops a run passes; None if there are none.
    """

    name: str
    answer: str
    text: str
    passing: tuple[str, ...] | None


@functools.cache
def read_flags() -> dict[str, MegatronFlag]:
    """All flags of the table by name, in its order."""
    rows = [line.split("\t") for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {row[0]: _build_flag(*row) for row in rows}


def _build_flag(name: str, answer: str, text: str = "", passing: str | None = None) -> MegatronFlag:
    return MegatronFlag(name, answer, text, passing and tuple(passing.split()) if passing != "-" else ())


def find_texts(*answers: str) -> dict[str, str]:
    """{flag: text} of the flags with one of `answers`."""
    return {flag.name: flag.text for flag in read_flags().values() if flag.answer in answers}


def describe_flag(flag: MegatronFlag, values: list[str]) -> tuple[str, bool]:
    """What a command line with this flag and `values` is told, and whether it is a mistake. Not for respelled flags."""
    if flag.answer == ACCEPTED:
        return f"{flag.name} has no effect here: {flag.text}.", False
    if flag.answer == RETIRED:
        return f"{flag.name} was retired by Megatron-LM and has no effect: {flag.text}.", False
    if flag.passing == tuple(values):
        return f"{' '.join((flag.name, *values))} has no effect here: it is so anyway.", False
    if flag.answer == REFUSED:
        return f"{flag.name} is refused: {flag.text}.", True
    joint = "," if flag.text.startswith(("or ", "and ")) else ":"
    return f"{flag.name} {ABSENT_BEGINS}{f'{joint} {flag.text}' if flag.text else ''}.", True
