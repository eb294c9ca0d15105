"""The answer key: runs with their causes, and the closed list of classes that a cause may have."""

import csv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
NOTHING = "-"
KEY = HERE / "manifest.tsv"
HELD_BACK = HERE / "held_back.tsv"  # the same causes with other sizes and seeds, which no rule was mended by
MIN_SHARE = 0.10  # of the step: what a planted cause takes at least


@dataclass(frozen=True)
class CauseClass:
    """A class of causes.

    Attributes:
        name: Of the class.
        family: Where the time goes; classes of one family have it in common.
        definition: What counts.
    """

    name: str
    family: str
    definition: str


@dataclass(frozen=True)
class Run:
    """A run and its right answer.

    Attributes:
        name: Of the run, and of its folder.
        kind: "made" (simulated traces of GPUs), "program", "trainer" or "public".
        workload: What is trained.
        ranks: How many processes.
        recipe: How it is made, by kind.
        causes: Classes, what costs most first; none: a sound run.
        culprit: Who it is, where there is one: "rank 2".
        accepted: Classes that name the cause as well.
        source: Where the recipe is carried out, or where the files come from.
    """

    name: str
    kind: str
    workload: str
    ranks: int
    recipe: str
    causes: tuple[str, ...]
    culprit: str
    accepted: tuple[str, ...]
    source: str

    @property
    def is_sound(self) -> bool:
        return not self.causes


def read_classes(path: Path = HERE / "classes.tsv") -> dict[str, CauseClass]:
    """Read the list of classes."""
    with path.open() as file:
        rows = [
            CauseClass(row["class"], row["family"], row["definition"]) for row in csv.DictReader(file, delimiter="\t")
        ]
    return {row.name: row for row in rows}


def read_manifest(path: Path = KEY) -> list[Run]:
    """Read the answer key."""
    runs = []
    with path.open() as file:
        for row in csv.DictReader(file, delimiter="\t"):
            causes = tuple(row["causes"].split())
            accepted = tuple(one for one in row["accepted"].split(",") if one)
            recipe = "" if row["recipe"] == NOTHING else row["recipe"]
            ranks = int(row["ranks"])
            runs.append(
                Run(
                    row["run"],
                    row["kind"],
                    row["workload"],
                    ranks,
                    recipe,
                    causes,
                    row["culprit"],
                    accepted,
                    row["source"],
                )
            )
    return runs
