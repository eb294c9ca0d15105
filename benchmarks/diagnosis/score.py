"""Scores of tools: what they name first, what they name at all, how often they are right, and what they say of sound runs.

A claim is right where one of its classes is a planted cause of the run, or one that the answer key accepts; its family is right where
one of its families is that of a planted or accepted cause. Where the recorder measured that the process waited for a core for more
than 10% of the recorded steps, a claim of the class "cores" is true but not what was planted: it counts neither for nor against, and
the next claim is the first. A claim that says only where the time goes has no class: it is right or wrong by its family.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.diagnosis.claims import HIGH, Answer, Claim
from benchmarks.diagnosis.manifest import CauseClass, Run

MAX_CORE_WAIT = 0.10
CORES = "cores"


@dataclass(frozen=True)
class RunScore:
    """How a tool did on a run.

    Attributes:
        run: The run.
        is_read: Whether the tool could read it.
        first_class: Whether the first claim names a cause's class.
        first_family: Whether the first claim names a cause's family.
        named_class: Whether any claim names a cause's class.
        named_family: Whether any claim names a cause's family.
        named_all: Whether every planted cause is named by class.
        culprit: Whether a claim of the right class names the culprit; None where the key has none.
        high: Claims of high confidence.
        high_right: Those of them that are right.
        said_first: The first claim, as it was said.
    """

    run: Run
    is_read: bool
    first_class: bool = False
    first_family: bool = False
    named_class: bool = False
    named_family: bool = False
    named_all: bool = False
    culprit: bool | None = None
    high: int = 0
    high_right: int = 0
    said_first: str = ""


def score_run(run: Run, answer: Answer, classes: dict[str, CauseClass], core_wait: float = 0.0) -> RunScore:
    """Score an answer.

    Args:
        run: The run with its causes.
        answer: What the tool said.
        classes: The list of classes.
        core_wait: Share of the recorded steps for which the process waited for a core.
    """
    if answer.not_read:
        return RunScore(run, is_read=False)
    right = {*run.causes, *run.accepted}
    families = {classes[name].family for name in right}
    is_disturbed = core_wait > MAX_CORE_WAIT and CORES not in right
    claims = [claim for claim in answer.claims if not (is_disturbed and claim.classes == (CORES,))]
    by_class = [bool(right.intersection(claim.classes)) for claim in claims]
    by_family = [bool(families & list_families(claim, classes)) for claim in claims]
    culprit = None
    if run.culprit:
        culprit = any(named and claim.culprit == run.culprit for named, claim in zip(by_class, claims, strict=True))
    high = [place for place, claim in enumerate(claims) if claim.confidence == HIGH]
    is_right = [
        named if claim.classes else by_family[place]
        for place, (named, claim) in enumerate(zip(by_class, claims, strict=True))
    ]
    named = {name for claim in claims for name in claim.classes}
    return RunScore(
        run,
        is_read=True,
        first_class=by_class[0] if claims else False,
        first_family=by_family[0] if claims else False,
        named_class=any(by_class),
        named_family=any(by_family),
        named_all=bool(run.causes) and named.issuperset(run.causes),
        culprit=culprit,
        high=len(high),
        high_right=sum(is_right[place] for place in high),
        said_first=claims[0].text if claims else "",
    )


def list_families(claim: Claim, classes: dict[str, CauseClass]) -> set[str]:
    """List the families that a claim may mean."""
    return {*claim.families, *(classes[name].family for name in claim.classes if name in classes)}


@dataclass(frozen=True)
class ToolScore:
    """How a tool did on all runs: counts, each beside what it is out of.

    Attributes:
        causes: Runs with a cause.
        causes_read: Those that the tool could read.
        first_class: First claim right by class.
        first_family: First claim right by family.
        named_class: Named at all by class.
        named_family: Named at all by family.
        two_causes: Runs with two causes that it could read.
        two_named: Of them with both named.
        culprits: Runs with a culprit that it could read.
        culprits_named: Of them with the culprit named.
        high: Claims of high confidence on all runs.
        high_right: Of them right.
        sound: Sound runs.
        sound_read: Those that it could read.
        alarms: Of them with a claim of high confidence.
    """

    causes: int
    causes_read: int
    first_class: int
    first_family: int
    named_class: int
    named_family: int
    two_causes: int
    two_named: int
    culprits: int
    culprits_named: int
    high: int
    high_right: int
    sound: int
    sound_read: int
    alarms: int


def sum_scores(scores: Sequence[RunScore]) -> ToolScore:
    """Sum the scores of runs."""
    planted = [score for score in scores if not score.run.is_sound]
    read = [score for score in planted if score.is_read]
    two = [score for score in read if len(score.run.causes) > 1]
    blamed = [score for score in read if score.culprit is not None]
    sound = [score for score in scores if score.run.is_sound]
    return ToolScore(
        causes=len(planted),
        causes_read=len(read),
        first_class=sum(score.first_class for score in read),
        first_family=sum(score.first_family for score in read),
        named_class=sum(score.named_class for score in read),
        named_family=sum(score.named_family for score in read),
        two_causes=len(two),
        two_named=sum(score.named_all for score in two),
        culprits=len(blamed),
        culprits_named=sum(bool(score.culprit) for score in blamed),
        high=sum(score.high for score in scores),
        high_right=sum(score.high_right for score in scores),
        sound=len(sound),
        sound_read=sum(score.is_read for score in sound),
        alarms=sum(score.high > 0 for score in sound if score.is_read),
    )


def group_by_class(scores: Sequence[RunScore]) -> dict[str, list[RunScore]]:
    """Group runs by their first cause, in the order in which classes come first."""
    groups: dict[str, list[RunScore]] = defaultdict(list)
    for score in scores:
        if not score.run.is_sound:
            groups[score.run.causes[0]].append(score)
    return dict(groups)


TOOL_COLUMNS = (
    "tool", "read, with a cause", "first: class", "first: where", "named: class", "named: where", "both of two", "culprit",
    "precision of what is said for certain", "false alarms on sound runs",
)  # fmt: skip


def render_tools(tools: dict[str, list[RunScore]]) -> list[str]:
    """Render the table of tools."""
    lines = ["| " + " | ".join(TOOL_COLUMNS) + " |", "|" + " --- |" * len(TOOL_COLUMNS)]
    for tool, scores in tools.items():
        total = sum_scores(scores)
        read = total.causes_read
        precision = f"{total.high_right} of {total.high}"
        if total.high:
            precision += f" ({total.high_right / total.high:.0%})"
        cells = [
            tool,
            f"{read} of {total.causes}",
            *(f"{count} of {read}" for count in (total.first_class, total.first_family)),
            *(f"{count} of {read}" for count in (total.named_class, total.named_family)),
            f"{total.two_named} of {total.two_causes}",
            f"{total.culprits_named} of {total.culprits}",
            precision,
            f"{total.alarms} of {total.sound_read}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def render_classes(tools: dict[str, list[RunScore]]) -> list[str]:
    """Render what each tool names first, by class of the run's first cause: right by class / right by family / read."""
    grouped = {tool: group_by_class(scores) for tool, scores in tools.items()}
    names = list(dict.fromkeys(name for groups in grouped.values() for name in groups))
    lines = ["| cause | runs | " + " | ".join(tools) + " |", "|" + " --- |" * (len(tools) + 2)]
    for name in names:
        cells = []
        runs = max(len(groups.get(name, [])) for groups in grouped.values())
        for groups in grouped.values():
            read = [score for score in groups.get(name, []) if score.is_read]
            first = sum(score.first_class for score in read)
            where = sum(score.first_family for score in read)
            cells.append(f"{first}, {where} of {len(read)}" if read else "-")
        lines.append(f"| {name} | {runs} | " + " | ".join(cells) + " |")
    return lines


def render_mistakes(scores: Sequence[RunScore]) -> list[str]:
    """Render the runs of a tool whose cause is not named first, and the sound ones with an alarm."""
    lines = []
    for score in scores:
        if not score.is_read:
            continue
        is_wrong = score.high > 0 if score.run.is_sound else not score.first_class
        if is_wrong:
            planted = " ".join(score.run.causes) or "sound"
            place = "named later" if score.named_class else "not named"
            verdict = "false alarm" if score.run.is_sound else place
            said = score.said_first or "nothing"
            lines.append(
                f"| {score.run.name} | {score.run.recipe or score.run.workload} | {planted} | {said} | {verdict} |"
            )
    return lines
