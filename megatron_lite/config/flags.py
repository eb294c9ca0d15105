"""A dataclass field is a command-line flag: declared once, found by one grep.

`seq_length: int = flag(...)` is `--seq-length`. A switch that is on by default carries the
spelling that turns it off, as Megatron has it: `add_bias_linear = flag(True, off="--disable-bias-linear")`.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Flag:
    """One knob as the command line knows it."""

    field: str
    spelling: str
    aliases: tuple[str, ...]
    group: str
    help: str
    kind: type  # bool | int | float | str
    default: object
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
    default,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    off: str | None = None,
    aliases: tuple[str, ...] = (),
    value: str = "",
    as_switch: tuple[str, ...] = (),
):
    """Declare one knob. `off`: the spelling that switches a default-on bool off. `value`: what help calls its value.

    `as_switch`: for a knob that may also be used like a switch, the values that this means: (on, off).
    """
    meta = {"help": help, "choices": choices, "off": off, "aliases": aliases, "value": value, "as_switch": as_switch}
    return dataclasses.field(default=default, metadata=meta)


def dashed(field_name: str) -> str:
    """profile_step_start -> --profile-step-start."""
    return "--" + field_name.replace("_", "-")


def flags_of(root_class: type) -> Iterator[Flag]:
    """Every flag of `root_class`, a dataclass whose fields are groups of flags."""
    for group_class in typing.get_type_hints(root_class).values():
        hints = typing.get_type_hints(group_class)
        title = group_class.__doc__.splitlines()[0]
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


def build(root_class: type, values: dict[str, object]):
    """An instance of `root_class` from {field name: value}; what is missing keeps its default."""
    groups = {}
    for name, group_class in typing.get_type_hints(root_class).items():
        mine = {f.name for f in dataclasses.fields(group_class)}
        groups[name] = group_class(**{k: v for k, v in values.items() if k in mine})
    return root_class(**groups)


def _kind(annotation) -> tuple[type, bool]:
    """int | None -> (int, False); tuple[int, ...] -> (int, True)."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _kind(next(a for a in typing.get_args(annotation) if a is not type(None)))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False
