"""Two traces beside each other: rows and phases of their steps, each with the noise that it has itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.compare.figures import Pair, PhasePair
from megatron_lite.analysis.compare.noise import band_of, paired
from megatron_lite.analysis.compare.work import Work, roles_by_step, work_of
from megatron_lite.analysis.facts import RankFacts
from megatron_lite.analysis.time.figures import ROW_TITLES, RankTime
from megatron_lite.analysis.time.rank_time import rank_time

MOST_STEPS = 10  # steady steps that are looked at one by one; evenly chosen of more


@dataclass(frozen=True)
class Side:
    """One run's critical rank."""

    time: RankTime  # of all steady steps together
    steps: tuple[RankTime, ...]  # of single ones: how much every number varies
    work: dict[tuple[str, str], Work]
    roles: dict[str, float]
    role_steps: dict[str, np.ndarray]  # ms of each steady step

    def pair_with(self, other: "Side", figure: Callable[[RankTime], float | None]) -> Pair:
        """A figure of both, and its noise from single steps."""
        samples = [[figure(time) or 0.0 for time in side.steps] for side in (self, other)]
        return paired(figure(self.time), figure(other.time), band_of(*samples))


def side_of(one: RankFacts) -> Side:
    """The rank's steps one by one; as many times the work of `rank_time` as there are."""
    steady = [at for at, step in enumerate(one.placing.steps) if step.steady]
    chosen = (
        [steady[len(steady) * at // MOST_STEPS] for at in range(MOST_STEPS)] if len(steady) > MOST_STEPS else steady
    )
    roles = {str(role): ms for role, ms in one.kernels.roles.items()}
    return Side(one.time, tuple(_only(one, at) for at in chosen), work_of(one), roles, roles_by_step(one))


def _only(one: RankFacts, at: int) -> RankTime:
    steps = tuple(replace(step, steady=number == at) for number, step in enumerate(one.placing.steps))
    return rank_time(one.trace, replace(one.placing, steps=steps))


def rows_of(a: Side, b: Side) -> dict[str, Pair]:
    """Where the steps go, in the order of a report."""
    names = [name for name in ROW_TITLES if a.time.rows.get(name) or b.time.rows.get(name)]
    return {name: a.pair_with(b, lambda time, name=name: time.rows.get(name, 0.0)) for name in names}


def phases_of(a: Side, b: Side) -> tuple[PhasePair, ...]:
    """In the order of a step. A phase that one run lacks is None there."""
    names = dict.fromkeys(phase.name for side in (a, b) for phase in side.time.phases)
    on_gpu = a.time.on_gpu or b.time.on_gpu
    return tuple(
        PhasePair(
            name,
            a.pair_with(b, _of_phase(name, "host_ms")),
            a.pair_with(b, _of_phase(name, "device_ms")) if on_gpu else None,
        )
        for name in names
    )


def _of_phase(name: str, what: str) -> Callable[[RankTime], float | None]:
    return lambda time: next((getattr(phase, what) for phase in time.phases if phase.name == name), None)


def roles_of(a: Side, b: Side) -> dict[str, Pair]:
    """ms per step by role, largest first."""
    names = sorted({**a.roles, **b.roles}, key=lambda name: -max(a.roles.get(name, 0.0), b.roles.get(name, 0.0)))
    return {
        name: paired(a.roles.get(name), b.roles.get(name), band_of(*(side.role_steps.get(name, ()) for side in (a, b))))
        for name in names
    }
