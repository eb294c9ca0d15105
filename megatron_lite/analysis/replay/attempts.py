"""Compares the attempts at a step with each other, and with what the run has logged."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.formats.replay_record import (
    SEEN_FORWARD,
    AttemptKind,
    AttemptRecord,
    LoggedStep,
    RankRecord,
    ReplayedStep,
)

# where a tensor comes in a step: forward or backward, stage of the pipeline, place on its rank
Order = tuple[int, int, int]


@dataclass(frozen=True)
class ReplayInput:
    """A step that was run again, and all that is known of it.

    Attributes:
        run: Folder of the run.
        step: The iteration.
        logged: The run's steps up to it, the oldest first.
        records: Of the ranks, the first one first.
        started_from: Where the attempts began, in words.
        load: Flags that go on from there; "": from the run's own start.
        other_bits: Why the bits of the run are not to be expected here; "": they are.
        other_order: Why sums may be made in another order than in the run, so that last bits differ; "": they are not.
        notes: What ran.
    """

    run: str
    step: int
    logged: Sequence[LoggedStep]
    records: Sequence[RankRecord]
    started_from: str
    load: str = ""
    other_bits: str = ""
    other_order: str = ""
    notes: tuple[str, ...] = ()

    def find_attempt(self, kind: AttemptKind) -> AttemptRecord | None:
        """Find an attempt, as the first rank has recorded it."""
        return find_own(self.records[0], kind)


@dataclass(frozen=True)
class BitDifference:
    """The first place at which two attempts differ.

    Attributes:
        step: The iteration.
        what: "forward MODULE", "backward MODULE", or what else differs.
        ranks: The ranks that differ there.
    """

    step: int
    what: str
    ranks: tuple[int, ...]


def find_own(record: RankRecord, kind: AttemptKind) -> AttemptRecord | None:
    """Find a rank's attempt of a kind."""
    return next((attempt for attempt in record.attempts if attempt.kind is kind), None)


def find_difference(records: Sequence[RankRecord], one: AttemptKind, other: AttemptKind) -> BitDifference | None:
    """Find the first place at which two attempts differ in any bit; None where all that was looked at is equal.

    Args:
        records: Of all ranks.
        one: An attempt that all of them made.
        other: Another one.
    """
    found: list[tuple[int, Order, str, int]] = []
    for record in records:
        mine = find_own(record, one)
        its = find_own(record, other)
        if mine is None or its is None:
            continue
        for step, again in zip(mine.steps, its.steps):
            if step != again:
                order, what = _find_in_step(record, mine.watched, step, again)
                found.append((step.iteration, order, what, record.rank))
                break
    if not found:
        return None
    first_step, first_order, what, _ = min(found)
    ranks = [rank for step, order, _, rank in found if (step, order) == (first_step, first_order)]
    return BitDifference(first_step, what, tuple(ranks))


def _find_in_step(
    record: RankRecord, watched: Sequence[str], step: ReplayedStep, again: ReplayedStep
) -> tuple[Order, str]:
    """Find the first tensor of a step that differs on a rank, and where it comes in the step.

    Args:
        record: Of the rank.
        watched: The tensors, in the order in which the rank computed them.
        step: The step in one attempt.
        again: The step in the other.
    """
    for place, (name, bits, other_bits) in enumerate(zip(watched, step.checksums, again.checksums)):
        if bits != other_bits:
            return order_tensor(record, name, place), name
    if step.own_loss_sum != again.own_loss_sum:
        return (0, record.ranks, 0), "the rank's own loss"
    return (2, 0, 0), "what ranks add up, or the update"


def order_tensor(record: RankRecord, name: str, place: int) -> Order:
    """Find where a tensor comes in a step over all ranks: backward goes through the stages of a pipeline in reverse.

    Args:
        record: Of the rank that computed it.
        name: "forward MODULE" or "backward MODULE".
        place: Its number on the rank.
    """
    if name.startswith(SEEN_FORWARD):
        return 0, record.pipeline_rank, place
    return 1, -record.pipeline_rank, place


@dataclass(frozen=True)
class Reproduction:
    """How far an attempt gives what the run has logged.

    Attributes:
        compared: Steps that both have.
        equal_before: Steps before the first that differs that are equal in every bit.
        differs_at: The first that differs; None: none does.
        logged: The logged step that differs.
        replayed: The replayed one.
    """

    compared: int
    equal_before: int
    differs_at: int | None = None
    logged: LoggedStep | None = None
    replayed: ReplayedStep | None = None

    @property
    def largest_difference(self) -> float:
        """Relative difference of the losses of the step that differs; infinite where one of them is not finite."""
        if self.logged is None or self.replayed is None:
            return 0.0
        then = self.logged.loss
        now = self.replayed.loss
        if then is None or now is None:
            return 0.0 if then is now else float("inf")
        return abs(then - now) / max(abs(then), abs(now), 1e-30)


def compare_with_log(attempt: AttemptRecord, logged: Sequence[LoggedStep]) -> Reproduction:
    """Compare an attempt's steps with those that the run has logged, bit by bit.

    Args:
        attempt: From its start to the step.
        logged: The run's steps.
    """
    by_iteration = {one.iteration: one for one in logged}
    equal = 0
    compared = 0
    for step in attempt.steps:
        known = by_iteration.get(step.iteration)
        if known is None:
            continue
        compared += 1
        if not _is_equal(step, known):
            return Reproduction(compared, equal, step.iteration, known, step)
        equal += 1
    return Reproduction(compared, equal)


def _is_equal(step: ReplayedStep, logged: LoggedStep) -> bool:
    """Whether a step gave what was logged. A loss of one rank only, and the norm of a skipped step, were not."""
    if logged.skipped != step.skipped:
        return False
    if not logged.local and logged.loss != step.loss:
        return False
    return logged.skipped or logged.grad_norm == step.grad_norm
