"""Settings of a finding's remedy, read from the flags that its sentence names."""

import re
import shlex
from dataclasses import dataclass

WITHOUT = "without "  # before a flag that the remedy leaves out
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*(=|$)")
OPEN_VALUES = ("N", "M")  # stand for a value that the user chooses


@dataclass(frozen=True)
class Setting:
    """A flag of the trainer, or a variable of the environment, as a remedy has it."""

    name: str  # "--num-workers", "OMP_NUM_THREADS"
    value: str = ""  # "4"; "" for a flag that takes none, and where the user has to choose the value
    is_left_out: bool = False  # the remedy is to run without it

    @property
    def is_variable(self) -> bool:
        """Whether it is a variable of the environment."""
        return not self.name.startswith("-")


def read_settings(words: str) -> tuple[Setting, ...]:
    """Read what is set together by a finding's flag.

    Args:
        words: the flag as findings name it: "--num-workers 4", "--manual-gc --manual-gc-interval 100",
            "without --log-params-norm", "OMP_NUM_THREADS=2".
    """
    is_left_out = words.startswith(WITHOUT)
    names: list[str] = []
    values: dict[str, list[str]] = {}
    for word in shlex.split(words.removeprefix(WITHOUT)):
        if word.startswith("--"):
            names.append(word)
        elif VARIABLE.match(word) and word not in OPEN_VALUES:
            name, _, value = word.partition("=")
            names.append(name)
            values[name] = [value] if value else []
        elif word not in OPEN_VALUES:
            values.setdefault(names[-1], []).append(word)
    return tuple(Setting(name, " ".join(values.get(name, [])), is_left_out) for name in names)
