"""Simulates a pipeline's schedule: when each stage computes each turn, if only earlier turns delay it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config.layout import Stage, Turn, find_source, order_turns


@dataclass(frozen=True)
class TimedTurn:
    """What a stage computes, milliseconds from the schedule's start."""

    stage: int  # from 0
    kind: str  # forward | backward | weights
    micro_batch: int  # from 0
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class TurnTimes:
    """How long one turn of a stage takes, of one chunk and one micro-batch, ms."""

    forward: float
    backward: float
    weights: float = 0.0  # that part of backward which comes later, where it is split
    # how long a turn of each chunk takes, beside the mean of all; (): all take as long
    of_chunks: tuple[float, ...] = ()

    def find(self, turn: Turn) -> float:
        """How long this turn takes, ms."""
        longer = self.of_chunks[turn.chunk] if self.of_chunks else 1.0
        if turn.is_forward:
            return self.forward * longer
        return (self.weights if turn.of_weights else self.backward) * longer


def simulate_schedule(stages: Sequence[Stage], micro_batches: int, times: Sequence[TurnTimes]) -> list[TimedTurn]:
    """All turns of all stages, in the order of their starts. Sends between stages take no time."""
    orders = [order_turns(stage, micro_batches) for stage in stages]
    done: list[dict[Turn, float]] = [{} for _ in stages]
    free, at = [0.0] * len(stages), [0] * len(stages)
    found: list[TimedTurn] = []
    goes_on = True
    while goes_on:
        goes_on = False
        for number, stage in enumerate(stages):
            while at[number] < len(orders[number]):
                turn = orders[number][at[number]]
                source = find_source(stage, turn)
                if source is not None and source[1] not in done[source[0]]:
                    break
                arrived = done[source[0]][source[1]] if source is not None else 0.0
                start = max(free[number], arrived)
                kind = "forward" if turn.is_forward else "weights" if turn.of_weights else "backward"
                end = start + times[number].find(turn)
                found.append(TimedTurn(number, kind, turn.micro_batch, start, end))
                done[number][turn] = free[number] = end
                at[number], goes_on = at[number] + 1, True
    return sorted(found, key=lambda one: (one.start_ms, one.stage))
