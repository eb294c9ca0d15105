"""Megatron-LM's own functional tests of pretraining, as tests/config/megatron_functional.txt has them."""

import shlex
from dataclasses import dataclass

from support.paths import REPO

FILE = REPO / "tests" / "config" / "megatron_functional.txt"
NEW = "-"  # in place of the configuration that another is like


@dataclass(frozen=True)
class Configuration:
    """One functional test."""

    name: str
    ranks: int
    mode: str
    flags: dict[str, list[str]]  # each with its values

    @property
    def words(self) -> list[str]:
        """Its command line."""
        return write_words(self.flags)


def write_words(flags: dict[str, list[str]]) -> list[str]:
    """Flags with their values as the words of a command line."""
    return [word for name, values in flags.items() for word in (name, *values)]


def read_configurations() -> dict[str, Configuration]:
    """All configurations by name."""
    found: dict[str, Configuration] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        name, ranks, mode, like, changes = (part.strip() for part in line.split("|", 4))
        flags = {} if like == NEW else dict(found[like].flags)
        last = ""
        for word in shlex.split(changes):
            if word.startswith("!--"):
                del flags[word[1:]]
            elif word.startswith("--"):
                last = word
                flags[last] = []
            else:
                flags[last].append(word)
        found[name] = Configuration(name, int(ranks), mode, flags)
    return found
