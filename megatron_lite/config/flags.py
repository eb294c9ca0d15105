"""A dataclass field is a command-line flag: declared once, found by one grep.

`seq_length: int = flag(...)` is `--seq-length`. A switch that is on by default carries the
spelling that turns it off, as Megatron has it: `add_bias_linear = flag(True, off="--disable-bias-linear")`.
"""

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOUNDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


@dataclass(frozen=True)
class Flag:
    """One flag of the trainer."""

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
    must_be: str
    zero_is_off: bool  # 0 is read as None

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def spelling(self) -> str:
        return self.spellings[0]

    def get(self, args: Any) -> Any:
        """Its value in an instance of the root class."""
        return getattr(getattr(args, self.section), self.field)

    def is_in_range(self, value: float) -> bool:
        """Whether a number fulfils every part of `must_be`."""
        return all(holds(value, limit) for holds, limit in _parse_bounds(self.must_be))


@functools.cache
def _parse_bounds(must_be: str) -> tuple[tuple[Callable[[float, float], bool], float], ...]:
    """Comparisons that a number must pass, each with its limit, of the words in `flag`'s must_be."""
    parts = (part.rpartition(" ") for part in must_be.partition(";")[0].split(" and "))
    return tuple((BOUNDS[bound], float(limit)) for bound, _, limit in parts)


def flag(
    default: object,
    help: str,
    must_be: str = "",
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
        must_be: The numbers it takes, and a remedy: "at least 0 and below 1; 0 switches it off". Bounds are those of BOUNDS.
        off: The spelling that switches a default-on bool off.
        value: What help calls its value; the kind's name when empty.
        as_switch: For a knob that may also be used like a switch, the values that this means: (on, off).
        zero_is_off: 0 is the same as leaving it out, which stands for None.
    """
    metadata = {"help": help, "choices": choices, "value": value, "as_switch": as_switch, "must_be": must_be}
    settings = {**metadata, "zero_is_off": zero_is_off}
    return dataclasses.field(default=default, metadata={"off": off, "aliases": aliases, "settings": settings})


def dashed(field_name: str) -> str:
    """profile_step_start -> --profile-step-start."""
    return "--" + field_name.replace("_", "-")


@functools.cache
def list_flags(root_class: type) -> tuple[Flag, ...]:
    """Every flag of `root_class`, a dataclass whose fields are groups of flags."""
    flags = []
    for section, group_class in typing.get_type_hints(root_class).items():
        hints = typing.get_type_hints(group_class)
        title = (group_class.__doc__ or "").splitlines()[0]
        for field in dataclasses.fields(group_class):
            kind = hints[field.name]
            many = False
            is_optional = False
            if typing.get_origin(kind) in (typing.Union, types.UnionType):
                is_optional = True
                kind = next(a for a in typing.get_args(kind) if a is not type(None))
            if typing.get_origin(kind) is tuple:
                many = True
                kind = typing.get_args(kind)[0]
            required = field.default is None and not is_optional
            spellings = (field.metadata["off"] or dashed(field.name), *field.metadata["aliases"])
            settings = field.metadata["settings"]
            flags.append(Flag(field.name, section, title, spellings, kind, many, required, field.default, **settings))
    return tuple(flags)


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
    """The words of a command line that gives an instance of the root class: all flags that differ from their defaults."""
    words: list[str] = []
    root_class: type = type(args)
    for known in list_flags(root_class):
        value = known.get(args)
        if value != known.default and value is not None:
            words.append(known.spelling)
            words += [] if known.is_switch else [str(one) for one in (value if known.many else [value])]
    return words


# --- Megatron-LM's flags that are not settings here

FILE = Path(__file__).with_name("megatron_flags.txt")
ANSWERS = ("accepted", "retired", "respelled", "renamed", "refused", "absent")
ACCEPTED, RETIRED, RESPELLED, RENAMED, REFUSED, ABSENT = ANSWERS
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
        for name, equals, value in (word.partition("=") for word in words.split()):
            flags[name] = MegatronFlag(name, answer, text, tuple(value.split()) if equals else None)
    return flags


@functools.cache
def read_launcher_flags() -> dict[str, str]:
    """{flag with dashes: what to do instead} of launcher_flags.tsv."""
    lines = FILE.with_name("launcher_flags.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if line.startswith("--"))
    return {name: answer for name, answer in rows}


def find_texts(*answers: str) -> dict[str, str]:
    """{flag: text} of the flags with one of `answers`."""
    return {flag.name: flag.text for flag in read_flags().values() if flag.answer in answers}


def describe_flag(flag: MegatronFlag, values: list[str]) -> tuple[str, bool]:
    """(message for a command line with this flag and `values`, whether it is a mistake). Not for respelled flags."""
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
