"""Flags that share one answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Flags that share one answer."""

    flags: tuple[str, ...]
    answer: str


def named(words: str) -> tuple[str, ...]:
    """'mtp-num-layers sft' -> ('--mtp-num-layers', '--sft')."""
    return tuple(f"--{word}" for word in words.split())


def answers(families: tuple[Family, ...]) -> dict[str, str]:
    """{flag: answer} of a table."""
    return {name: family.answer for family in families for name in family.flags}
