"""A dataclass field is a command-line flag: declared once, found by one grep.

`seq_length: int = flag(...)` is `--seq-length`. A switch that is on by default carries the
spelling that turns it off, as Megatron has it: `add_bias_linear = flag(True, off="--disable-bias-linear")`.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Flag:
    """One knob as the command line knows it."""

    field: str
    spelling: str
    aliases: tuple[str, ...]
    group: str
    help: str
    kind: type  # bool | int | float | str
    default: Any
    many: bool  # takes a list of values
    choices: tuple[str, ...]
    value: str  # what help calls the value; empty for the kind's name
    as_switch: tuple[str, ...]  # values that true (and the spelling alone) and false stand for; () for none

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.spelling, *self.aliases)


def flag(
    default: object,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    off: str | None = None,
    aliases: tuple[str, ...] = (),
    value: str = "",
    as_switch: tuple[str, ...] = (),
) -> Any:
    """Declare one knob. `off`: the spelling that switches a default-on bool off. `value`: what help calls its value.

    A knob that a command line must give has None here and another type: check.py refuses a command line without it.
    `as_switch`: for a knob that may also be used like a switch, the values that this means: (on, off).
    """
    meta = {"help": help, "choices": choices, "off": off, "aliases": aliases, "value": value, "as_switch": as_switch}
    return dataclasses.field(default=default, metadata=meta)


def dashed(field_name: str) -> str:
    """profile_step_start -> --profile-step-start."""
    return "--" + field_name.replace("_", "-")


def list_flags(root_class: type) -> Iterator[Flag]:
    """Every flag of `root_class`, a dataclass whose fields are groups of flags."""
    for group_class in typing.get_type_hints(root_class).values():
        hints = typing.get_type_hints(group_class)
        title = (group_class.__doc__ or "").splitlines()[0]
        for field in dataclasses.fields(group_class):
            kind, many = _kind(hints[field.name])
            meta = field.metadata
            yield Flag(
                field.name,
                meta["off"] or dashed(field.name),
                meta["aliases"],
                title,
                meta["help"],
                kind,
                field.default,
                many,
                meta["choices"],
                meta["value"],
                meta["as_switch"],
            )


def build(root_class: type[T], values: dict[str, object]) -> T:
    """An instance of `root_class` from {field name: value}; what is missing keeps its default."""
    groups = {}
    for name, group_class in typing.get_type_hints(root_class).items():
        mine = {f.name for f in dataclasses.fields(group_class)}
        groups[name] = group_class(**{k: v for k, v in values.items() if k in mine})
    return root_class(**groups)


def _kind(annotation: Any) -> tuple[type, bool]:
    """int | None -> (int, False); tuple[int, ...] -> (int, True)."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _kind(next(a for a in typing.get_args(annotation) if a is not type(None)))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


# --- Megatron-LM's flags that are not settings here

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
    values = () if passing == "-" else tuple(passing.split()) if passing else None
    return MegatronFlag(name, answer, text, values)


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
