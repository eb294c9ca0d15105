"""A setting of a command: what a finding's remedy changes, and what a variant of a tuned command has."""

from typing import Literal

import msgspec


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A word of a command, or a variable of its environment."""

    # "--num-workers 4"; a variable "OMP_NUM_THREADS=4" before the command; an argument "data.workers=4" behind it
    kind: Literal["flag", "variable", "argument"]
    name: str
    # "" for a flag that takes none, and in a remedy where the user has to choose it; null: the command runs without it
    value: str | None = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"without {self.name}"
        if self.kind == "flag":
            return f"{self.name} {self.value}".strip()
        return f"{self.name}={self.value}"
