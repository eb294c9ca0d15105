"""Remedies for stalls: checkpoints and evaluations at longer intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from megatron_lite.analysis.findings.base import Edit, Remedy
from megatron_lite.analysis.graph.edits.saving import Saving, add_saving, save_every
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase
from megatron_lite.units import counted

MAX_STALLED = 0.01  # of the time, that stalls take at the intervals which are advised
VERBS = {Phase.SAVE.value: "save", Phase.EVAL.value: "evaluate"}


@dataclass(frozen=True)
class _Interval:
    """Another interval for a stall."""

    stall: Saving
    steps: int

    @property
    def change(self) -> str:
        """Write what is done to the program: "save every 500 steps"."""
        return f"{VERBS[self.stall.phase]} every {counted(self.steps, 'step')}"


def advise_on_stalls(facts: Facts, stalls: Sequence[Saving], training_ns: float) -> Remedy:
    """Advise intervals with which stalls take a hundredth of the time.

    Args:
        facts: the run.
        stalls: how it saves, and evaluates.
        training_ns: of a step, without stalls.
    """
    intervals = [_Interval(stall, _choose_interval(stall, training_ns)) for stall in stalls]
    # what takes less already may come more often, which is no remedy
    rarer = [one for one in intervals if one.steps > one.stall.every]
    chosen = [_advise_on(facts, one) for one in rarer]
    change = " and ".join(one.change for one in rarer)
    return Remedy(
        advice=f"reduce stalls: {' and '.join(remedy.advice for remedy in chosen)}",
        flags=tuple(flag for remedy in chosen for flag in remedy.flags),
        edit=Edit(change, partial(_make_rarer, intervals=rarer), partial(_add_stalls, stalls=stalls)),
    )


def _choose_interval(stall: Saving, training_ns: float) -> int:
    """Choose a round number of steps from one stall to the next.

    Args:
        stall: how the run saves or evaluates.
        training_ns: of a step, without stalls.
    """
    least = max(stall.stop_ns / (MAX_STALLED * max(training_ns, 1.0)), 1.0)
    tens = round(10.0 ** math.floor(math.log10(least)))
    return next(first * tens for first in (1, 2, 5, 10) if first * tens >= least)


def _advise_on(facts: Facts, one: _Interval) -> Remedy:
    """Advise how a run is to save, or to evaluate."""
    if one.stall.phase == Phase.EVAL.value:
        return Remedy(f"{one.change} (--eval-interval) or on less (--eval-iters)", ("--eval-interval",))
    if facts.settings.async_save:
        return Remedy(f"{one.change} (--save-interval)", ("--save-interval",))
    advice = f"write in the background (--async-save) or {one.change} (--save-interval)"
    return Remedy(advice, ("--async-save", "--save-interval"))


def _add_stalls(graph: Graph, stalls: Sequence[Saving]) -> Graph:
    """Add to the mean step what stalls take."""
    for stall in stalls:
        graph = add_saving(graph, stall)
    return graph


def _make_rarer(graph: Graph, intervals: Sequence[_Interval]) -> Graph:
    """Let stalls come at other intervals."""
    for one in intervals:
        graph = save_every(graph, one.stall, one.steps)
    return graph
