"""Gains of edits, alone and in the order in which they are worth making: there each is on top of those before it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from megatron_lite.analysis.graph.graph import Activities, Edges, Graph
from megatron_lite.analysis.graph.replay import measure_step

MIN_SHARE_SAVED = 0.005  # of the measured step: what saves less is left out
# of a graph, what its replay depends on beside activities and edges
BESIDE_TABLES = ("floor_ns", "beside_ns", "core_wait_ns", "lanes", "boundaries")


@dataclass(frozen=True)
class NamedEdit:
    """A change of a graph that stands for one of the program."""

    name: str  # code of the finding whose remedy it is
    apply: Callable[[Graph], Graph]
    yields: bool = False  # another one that saves as much is made before it


@dataclass(frozen=True)
class Gain:
    """An edit's place in the order."""

    name: str
    alone_ms: float  # what it saves of a step if nothing else is changed
    ms: float  # what it saves on top of those before it: these add up
    step_ms: float  # a step after it and those before it


@dataclass(frozen=True)
class OrderedGains:
    """Gains of edits, each by itself and in their order."""

    before_ms: float  # a step without any edit, as a replay takes it
    # by the edit's name; 0 for one that makes no step shorter; without those that leave the graph as it is
    alone_ms: Mapping[str, float]
    order: tuple[Gain, ...]


def measure_gains(graph: Graph, edits: Sequence[NamedEdit]) -> OrderedGains:
    """Order edits: first the one that saves most alone, then the one that saves most on top of it, and so on.

    Gains add up to the difference between the step as it is and the last step. An edit that saves nothing more on top
    of the others is left out, however much it saves alone.

    Args:
        graph: the measured steps.
        edits: changes to choose from; each is made at most once.
    """
    measured_ms = _replay_ms(graph)
    least_ms = MIN_SHARE_SAVED * measured_ms
    alone_ms: dict[str, float] = {}
    order: list[Gain] = []
    before_ms = measured_ms
    made = [(edit, edit.apply(graph)) for edit in edits]
    # an edit that finds nothing to change says nothing of its remedy
    made = [(edit, one) for edit, one in made if not _is_same(one, graph)]
    left = [edit for edit, _ in made]
    changed = [one for _, one in made]
    while left:
        steps_ms = [_replay_ms(one) for one in changed]
        if not order:
            # nothing is changed yet: this round is each edit alone
            alone_ms = {edit.name: max(measured_ms - ms, 0.0) for edit, ms in zip(left, steps_ms)}
        rated_ms = [ms + least_ms if edit.yields else ms for edit, ms in zip(left, steps_ms)]
        best = min(range(len(left)), key=rated_ms.__getitem__)
        gain_ms = before_ms - steps_ms[best]
        if gain_ms <= 0 or gain_ms < least_ms:
            break
        edit = left.pop(best)
        graph = changed[best]
        before_ms = steps_ms[best]
        order.append(Gain(edit.name, alone_ms[edit.name], gain_ms, before_ms))
        changed = [one.apply(graph) for one in left]
    return OrderedGains(measured_ms, alone_ms, tuple(order))


def _is_same(changed: Graph, graph: Graph) -> bool:
    """Whether an edit left all as it was: it may return a graph of its own for nothing at all."""
    if changed is graph:
        return True
    if any(getattr(changed, name) != getattr(graph, name) for name in BESIDE_TABLES):
        return False
    parts = ((changed.activities, graph.activities), (changed.edges, graph.edges))
    return all(_have_same_columns(one, other) for one, other in parts)


def _have_same_columns(one: Activities | Edges, other: Activities | Edges) -> bool:
    """Whether all columns of two tables are equal."""
    columns = [(getattr(one, column.name), getattr(other, column.name)) for column in fields(one)]
    return all(first is second or np.array_equal(first, second) for first, second in columns)


def _replay_ms(graph: Graph) -> float:
    """The step of a replay, ms; 0 where there is none."""
    return measure_step(graph) / 1e6
