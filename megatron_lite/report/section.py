"""What a section of a report holds, before anybody draws it: terminal and page show the same words and numbers."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of texts. `align` has a letter per column, l or r."""

    rows: Sequence[Sequence[str]]
    align: str
    head: Sequence[str] = ()  # () for none
    shares: Sequence[float | None] = ()  # a bar behind each row; None for a row without one
    hidden: int = 0  # rows that were left out
    colors: Sequence[str] = ()  # of the rows' bars on a page; () for one color


@dataclass(frozen=True)
class Lines:
    """Sentences."""

    texts: Sequence[str]
    quiet: bool = False  # detail rather than message


@dataclass(frozen=True)
class Hint:
    """What to type next, for readers who have a command line before them."""

    text: str


@dataclass(frozen=True)
class Card:
    """One finding."""

    number: int
    code: str
    title: str
    cost: str
    evidence: Sequence[str]
    advice: str
    in_full: bool


@dataclass(frozen=True)
class Section:
    """A title, at its right what its numbers are of, and what stands below."""

    key: str  # also the place of its chart
    title: str
    of: str
    blocks: Sequence[Table | Lines | Card | Hint]


def first(rows: Sequence, most: int, everything: bool) -> tuple[Sequence, int]:
    """(the rows to show, how many are hidden). One row is not hidden: the line that says so would take its place."""
    if everything or len(rows) <= most + 1:
        return rows, 0
    return rows[:most], len(rows) - most


def with_some_value(table: Table) -> Table:
    """Without the columns in which no row has anything."""
    keep = [at for at in range(len(table.align)) if any(row[at] for row in table.rows)]
    return Table(
        [[row[at] for at in keep] for row in table.rows],
        "".join(table.align[at] for at in keep),
        [table.head[at] for at in keep] if table.head else (),
        table.shares,
        table.hidden,
        table.colors,
    )
