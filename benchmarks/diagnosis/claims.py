"""What a tool said of a run, in the classes of the answer key."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

HIGH, LOW = "high", "low"


class NotReadError(Exception):
    """A tool that cannot read a run, with its reason."""


@dataclass(frozen=True)
class Claim:
    """A cause that a tool names.

    Attributes:
        classes: Classes that it may mean; none where it says only where the time goes.
        families: Families that it may mean; those of the classes count as well.
        culprit: Who it is, as in the answer key: "rank 2"; "" if it does not say.
        confidence: "high" for what is said without reservation.
        text: What the tool said.
    """

    classes: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    culprit: str = ""
    confidence: str = HIGH
    text: str = ""


@dataclass(frozen=True)
class Answer:
    """All that a tool said of a run.

    Attributes:
        run: Name of the run.
        claims: What counts most first.
        not_read: Why the tool could not read the run; "" if it could.
    """

    run: str
    claims: tuple[Claim, ...] = field(default=())
    not_read: str = ""


def write_answer(answer: Answer, path: Path) -> None:
    """Write an answer as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(answer), indent=1) + "\n")


def read_answer(path: Path) -> Answer:
    """Read an answer."""
    data = json.loads(path.read_text())
    claims = []
    for row in data["claims"]:
        named = {"classes": tuple(row["classes"]), "families": tuple(row["families"])}
        claims.append(Claim(**(row | named)))
    return Answer(data["run"], tuple(claims), data["not_read"])
