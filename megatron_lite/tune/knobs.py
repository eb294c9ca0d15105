"""Settings that tune may change: the table of this trainer's flags and variables, and knobs that a file declares."""

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import yaml

from megatron_lite.errors import UserError, describe_io_error, first_line
from megatron_lite.formats.setting import Setting
from megatron_lite.shared_files import read_foreign_text

TABLE = Path(__file__).with_name("trainer_knobs.tsv")
MAX_FILE_BYTES = 2**20
KnobValue: TypeAlias = bool | int | float | str


class LossEffect(str, enum.Enum):
    """The effect of a knob on the losses."""

    BIT_EQUAL = "bit-equal"
    ROUNDING = "rounding"  # another order of sums
    CHANGED = "changed"  # the file's author says so: losses are not compared

    def __str__(self) -> str:
        return self.value


class Target(str, enum.Enum):
    """The value to which a flag of the trainer is set; other targets are a value itself, or a factor such as "x 10"."""

    OF_FINDING = "the finding's"
    LEFT_OUT = "left out"
    ON = "on"


@dataclass(frozen=True)
class TrainerKnob:
    """A row of the table: a flag of the trainer, or a variable of the environment."""

    name: str
    before: str  # what it may be before: "any", "on", "off", "below 100"
    targets: tuple[str, ...]  # to which value it may be set
    losses: LossEffect
    needs: str  # where it can bring something, and what it changes besides time


@functools.cache
def read_trainer_knobs() -> Mapping[str, TrainerKnob]:
    """Read the table of what tune may set of this trainer, by name."""
    lines = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    knobs = {}
    for name, before, targets, losses, needs in lines[1:]:
        knobs[name] = TrainerKnob(name, before, tuple(targets.split(" or ")), LossEffect(losses), needs)
    return knobs


class DeclaredKnob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A knob of a script, as its author declares it in a file."""

    # "--workers", "OMP_NUM_THREADS", "data.workers"
    name: str
    # "--workers 4"; a variable of the environment; "data.workers=4"
    kind: Literal["flag", "variable", "argument"] = "flag"
    # in the order in which they are tried; true is a flag without a value, false the command without it
    values: tuple[KnobValue, ...]
    # codes of the findings that it answers
    answers: tuple[str, ...]
    # what it leaves of the losses; "changed": it is tried although it trains something else
    losses: LossEffect = LossEffect.ROUNDING

    @property
    def is_switch(self) -> bool:
        """Whether it is a flag that takes no value."""
        return self.kind == "flag" and all(isinstance(value, bool) for value in self.values)

    def list_settings(self) -> tuple[Setting, ...]:
        """List its values as settings, in their order."""
        return tuple(Setting(kind=self.kind, name=self.name, value=_write(value)) for value in self.values)


def list_variables(declared: Sequence[DeclaredKnob]) -> list[str]:
    """List the variables of the environment that tune may set.

    Args:
        declared: knobs of the user's file.
    """
    of_table = [name for name in read_trainer_knobs() if not name.startswith("-")]
    return of_table + [knob.name for knob in declared if knob.kind == "variable"]


class KnobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of knobs."""

    knobs: tuple[DeclaredKnob, ...] = ()
    # words behind the command by which it trains no longer than tune needs; without them it is ended
    short: tuple[str, ...] = ()


NO_KNOBS = KnobFile()


def read_knobs(path: str, known_findings: frozenset[str]) -> tuple[KnobFile, str]:
    """Read a file of knobs.

    Args:
        path: the file, YAML or JSON.
        known_findings: codes that a knob may answer.

    Returns:
        The knobs, and the text of the file.

    Raises:
        UserError: the file cannot be read, or declares something that is no knob.
    """
    remedy = "docs/tune.md shows what a knob declares"
    try:
        text = read_foreign_text(path, MAX_FILE_BYTES)
        found = msgspec.convert(yaml.safe_load(text) or {}, KnobFile)
    except OSError as error:
        raise UserError(f"--knobs {path}: cannot be read ({describe_io_error(error)}); name another file.") from None
    except (msgspec.ValidationError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"--knobs {path}: {first_line(error)}; {remedy}.") from None
    for knob in found.knobs:
        unknown = [code for code in knob.answers if code not in known_findings]
        if unknown:
            raise UserError(
                f"--knobs {path}: {knob.name} answers {unknown[0]}, which is no finding; "
                "megatron-lite explain lists them."
            )
    return found, text


def _write(value: KnobValue) -> str | None:
    """Write a value as a command line has it; "" for a switch that is on, None for one that is off."""
    if isinstance(value, bool):
        return "" if value else None
    return str(value)
