"""A dataclass field is a command-line flag: declared once, found by one grep.

`seq_length: int = flag(...)` is `--seq-length`. A switch that is on by default carries the
spelling that turns it off, as Megatron has it: `add_bias_linear = flag(True, off="--disable-bias-linear")`.
"""

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Range:
    """The numbers that a flag takes. A bound that is None does not hold."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    remedy: str = ""  # what the message on a number outside says beside the bounds

    def holds(self, value: float) -> bool:
        """Whether a number lies within all bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def describe(self) -> str:
        """Range(at_least=1, at_most=9, remedy="4 is usual") -> 'at least 1 and at most 9; 4 is usual'."""
        bounds = {
            "at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        text = " and ".join(f"{name} {bound}" for name, bound in bounds.items() if bound is not None)
        return f"{text}; {self.remedy}" if self.remedy else text


@dataclass(frozen=True)
class Flag:
    """A flag of the trainer, as help, command line and rules see it."""

    field: str
    section: str  # the field of Args that holds its group
    group: str  # the group's title
    spellings: tuple[str, ...]  # the usual one first
    kind: type  # bool | int | float | str
    many: bool  # takes a list of values
    required: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    value: str
    as_switch: tuple[str, ...]
    must_be: Range | None
    zero_is_off: bool  # 0 is read as None

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def spelling(self) -> str:
        return self.spellings[0]

    def get(self, args: Any) -> Any:
        """Read the flag's value in an instance of the root class."""
        return getattr(getattr(args, self.section), self.field)


def flag(
    default: object,
    help: str,
    must_be: Range | None = None,
    *,
    choices: tuple[str, ...] = (),
    off: str | None = None,
    aliases: tuple[str, ...] = (),
    value: str = "",
    as_switch: tuple[str, ...] = (),
    zero_is_off: bool = False,
) -> Any:
    """Declare one knob. One whose default is None, which its type does not allow, must be given.

    Args:
        default: Value where the flag is not given.
        help: What it does, for --help.
        must_be: The numbers it takes; None for all, and for what is no number.
        choices: The words it takes; () for all.
        off: The spelling that switches a default-on bool off.
        aliases: Other spellings.
        value: What help calls its value; the kind's name when empty.
        as_switch: Values that a knob which may also be used like a switch then has: (on, off).
        zero_is_off: 0 is the same as leaving it out, which stands for None.
    """
    metadata = {"help": help, "choices": choices, "value": value, "as_switch": as_switch, "must_be": must_be}
    settings = {**metadata, "zero_is_off": zero_is_off}
    return dataclasses.field(default=default, metadata={"off": off, "aliases": aliases, "settings": settings})


def dashed(field_name: str) -> str:
    """Spell a field as a flag: profile_step_start -> --profile-step-start."""
    return "--" + field_name.replace("_", "-")


@functools.cache
def list_flags(root_class: type) -> tuple[Flag, ...]:
    """Every flag of `root_class`, a dataclass whose fields are groups of flags."""
    flags = []
    classes = typing.get_type_hints(root_class)
    for section in dataclasses.fields(root_class):
        group_class = classes[section.name]
        hints = typing.get_type_hints(group_class)
        for field in dataclasses.fields(group_class):
            hint = _read_hint(hints[field.name])
            flags.append(
                Flag(
                    field=field.name,
                    section=section.name,
                    group=section.metadata.get("title", ""),
                    spellings=(field.metadata["off"] or dashed(field.name), *field.metadata["aliases"]),
                    kind=hint.kind,
                    many=hint.many,
                    required=field.default is None and not hint.is_optional,
                    default=field.default,
                    **field.metadata["settings"],
                )
            )
    return tuple(flags)


@dataclass(frozen=True)
class Hint:
    """The kind of a flag's value, as the type of its field says it."""

    kind: type  # bool | int | float | str
    many: bool  # a tuple of them
    is_optional: bool


def _read_hint(hint: Any) -> Hint:
    """Read int, int | None or tuple[int, ...]."""
    is_optional = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if is_optional:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    many = typing.get_origin(hint) is tuple
    if many:
        hint = typing.get_args(hint)[0]
    return Hint(kind=hint, many=many, is_optional=is_optional)


def build(root_class: Any, values: dict[str, object]) -> Any:
    """An instance of `root_class` from {field name: value}; what is missing keeps its default."""
    groups: dict[str, dict[str, object]] = {}
    for known in list_flags(root_class):
        group = groups.setdefault(known.section, {})
        if known.field in values:
            group[known.field] = values[known.field]
    classes = typing.get_type_hints(root_class)
    return root_class(**{section: classes[section](**group) for section, group in groups.items()})


def replace_fields(args: Any, changes: dict[str, Any]) -> Any:
    """An instance of the root class with some fields of its groups changed.

    Args:
        args: An instance of the root class. It stays as it is.
        changes: New values by the names of fields, which no two groups share.
    """
    root_class: type = type(args)
    sections = {known.field: known.section for known in list_flags(root_class)}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        groups.setdefault(sections[name], {})[name] = value
    changed = {section: dataclasses.replace(getattr(args, section), **values) for section, values in groups.items()}
    return dataclasses.replace(args, **changed)


def write_flags(args: Any) -> list[str]:
    """The words of a command line that gives an instance of the root class.

    They are all flags whose values differ from their defaults.
    """
    words: list[str] = []
    root_class: type = type(args)
    for known in list_flags(root_class):
        value = known.get(args)
        if value == known.default or value is None:
            continue
        words.append(known.spelling)
        if known.many:
            words += map(str, value)
        elif not known.is_switch:
            words.append(str(value))
    return words


# --- Megatron-LM's flags that are not settings here

FILE = Path(__file__).with_name("megatron_flags.txt")
ACCEPTED = "accepted"
RETIRED = "retired"
RESPELLED = "respelled"
RENAMED = "renamed"
REFUSED = "refused"
ABSENT = "absent"
ANSWERS = (ACCEPTED, RETIRED, RESPELLED, RENAMED, REFUSED, ABSENT)
STOPPING = REFUSED, ABSENT
OUTDATED = RETIRED, RENAMED  # flags that older versions of Megatron-LM took
ABSENT_BEGINS = "is a flag of Megatron-LM that this trainer does not have; leave it out"


@dataclass(frozen=True)
class MegatronFlag:
    """A flag of Megatron-LM that is no field of Args, and what it leads to here."""

    name: str
    answer: str
    text: str  # the reason, or the new spelling of a respelled or renamed flag
    passing: tuple[str, ...] | None  # the values with which a flag that stops a run passes; None if there are none


@functools.cache
def read_flags() -> dict[str, MegatronFlag]:
    """All flags of megatron_flags.txt by name, in the order of the file."""
    flags = {}
    answer = ""
    text = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        words = line
        if not line.startswith("  "):
            answer, text, words = (part.strip() for part in line.split("|"))
        for word in words.split():
            name, equals, value = word.partition("=")
            passing = tuple(value.split()) if equals else None
            flags[name] = MegatronFlag(name, answer, text, passing)
    return flags


@functools.cache
def read_launcher_flags() -> dict[str, str]:
    """Read launcher_flags.tsv: what to do instead of each flag of a launcher, spelled with its dashes."""
    lines = FILE.with_name("launcher_flags.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if line.startswith("--"))
    return {name: answer for name, answer in rows}


def find_texts(*answers: str) -> dict[str, str]:
    """Find the flags of Megatron-LM that have one of these answers: their texts by name."""
    return {flag.name: flag.text for flag in read_flags().values() if flag.answer in answers}


def describe_flag(flag: MegatronFlag, values: list[str]) -> tuple[str, bool]:
    """Describe what becomes of a flag of Megatron-LM with these values; not for respelled flags.

    Returns:
        A line, and whether the flag is a mistake.
    """
    if flag.answer == ACCEPTED:
        return f"{flag.name} has no effect here: {flag.text}.", False
    if flag.answer == RETIRED:
        return f"{flag.name} is a flag that Megatron-LM no longer takes: {flag.text}; drop it.", True
    if flag.answer == RENAMED:
        return f"{flag.name} is a flag that Megatron-LM no longer takes; write {flag.text} instead.", True
    if flag.passing == tuple(values):
        return f"{' '.join((flag.name, *values))} has no effect here: it is so anyway.", False
    if flag.answer == REFUSED:
        return f"{flag.name} is refused: {flag.text}.", True
    joint = "," if flag.text.startswith(("or ", "and ")) else ":"
    return f"{flag.name} {ABSENT_BEGINS}{f'{joint} {flag.text}' if flag.text else ''}.", True
