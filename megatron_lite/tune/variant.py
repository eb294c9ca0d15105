"""A command, and what other settings make of it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_lite.formats.setting import Setting
from megatron_lite.formats.tune_ledger import Settings


@dataclass(frozen=True)
class TunedCommand:
    """A command that trains.

    Attributes:
        words: As they were given.
        first_argument: Where the script's own arguments begin.
        is_trainer: Whether it is this package's trainer, whose flags are known.
        switches: Names of flags that take no value.
        environment: Variables that the command gets.
    """

    words: tuple[str, ...]
    first_argument: int
    is_trainer: bool
    switches: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)

    def get(self, kind: str, name: str) -> str | None:
        """Get the value that a knob has in the command; "" for a switch, None where it is not given.

        Args:
            kind: Of the knob: flag, variable or argument.
            name: The flag, variable or argument.
        """
        if kind == "variable":
            return self.environment.get(name)
        arguments = self.words[self.first_argument :]
        found = None
        for at, word in enumerate(arguments):
            spelled, equals, value = word.partition("=")
            if spelled != name:
                continue
            if equals:
                found = value
            elif kind == "flag":
                found = " ".join(arguments[at + 1 : at + 1 + self._count_values(arguments, at)])
        return found

    def has(self, setting: Setting) -> bool:
        """Whether the command has that setting as it is."""
        return self.get(setting.kind, setting.name) == setting.value

    def write_words(self, settings: Settings) -> list[str]:
        """Write the words of the command with other settings.

        Args:
            settings: What differs from the command as it was given; variables make no words.
        """
        arguments = list(self.words[self.first_argument :])
        for setting in settings:
            if setting.kind != "variable":
                arguments = self._set(arguments, setting)
        return [*self.words[: self.first_argument], *arguments]

    def get_variables(self, settings: Settings) -> dict[str, str | None]:
        """Get the variables that settings give to the command; None for one that it runs without."""
        return {setting.name: setting.value for setting in settings if setting.kind == "variable"}

    def write(self, settings: Settings) -> str:
        """Write the command with other settings, as typed in a shell."""
        variables = self.get_variables(settings)
        left_out = [name for name, value in variables.items() if value is None]
        given = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if value is not None]
        before = [word for name in left_out for word in ("-u", name)]
        before = ["env", *before] if before else []
        return " ".join([*before, *given, shlex.join(self.write_words(settings))])

    def _set(self, arguments: list[str], setting: Setting) -> list[str]:
        """Give a flag or an argument its value, in its place where it stands already."""
        kept: list[str] = []
        place = None
        skipped = 0
        for at, word in enumerate(arguments):
            if skipped:
                skipped -= 1
                continue
            if word.partition("=")[0] != setting.name:
                kept.append(word)
                continue
            place = len(kept)
            if "=" not in word and setting.kind == "flag":
                skipped = self._count_values(arguments, at)
        if setting.value is None:
            return kept
        at_end = len(kept) if place is None else place
        return [*kept[:at_end], *_write_setting(setting), *kept[at_end:]]

    def _count_values(self, arguments: list[str] | tuple[str, ...], at: int) -> int:
        """Count the words behind a flag that are its value."""
        if arguments[at] in self.switches or at + 1 == len(arguments):
            return 0
        return 0 if arguments[at + 1].startswith("--") else 1


def _write_setting(setting: Setting) -> list[str]:
    """Write a flag or an argument that has a value as words of a command."""
    assert setting.value is not None
    if setting.kind == "flag":
        return [setting.name, setting.value] if setting.value else [setting.name]
    return [f"{setting.name}={setting.value}"]


def add_settings(kept: Settings, change: Settings) -> Settings:
    """Add a change to what was kept before; of one knob the later value counts."""
    names = {(setting.kind, setting.name) for setting in change}
    return (*(setting for setting in kept if (setting.kind, setting.name) not in names), *change)
