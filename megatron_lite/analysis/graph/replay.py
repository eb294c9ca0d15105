"""Replays a graph: when activities begin and end if each takes what the graph says, and what makes a step that long.

With a device the steady steps come again and again, each pass from where the one before it ended, until a pass takes as
long as the one before: a queue that fills or empties in the measured window has settled then. A trace of a single step,
or without a device, whose host runs ahead of nothing, is replayed once.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, ActivityKind, Graph
from megatron_lite.analysis.graph.reduced_window import NEVER, ReducedWindow
from megatron_lite.analysis.intervals import Flags, Integers

MAX_PASSES = 12
SETTLED = 0.001  # of a pass, by which the next one may differ
MAX_CONTRADICTED = 0.05  # of the edges: with more the graph is not that of these steps
MAX_OFF = 0.02  # of the measured steps, by which an unchanged replay may differ
MAX_UNEXPLAINED = 0.05  # of the step, on the critical path
MAX_FILLED = 0.9  # of the step, that host and device each take alone: then one waits for the other, and no edge says so


@dataclass(frozen=True)
class StepWindow:
    """Consecutive steady steps, whose activities are replayed."""

    first: int  # numbers of steps
    last: int
    places: Integers  # [k], the activities, in order
    repeats: bool  # one pass can follow another: there is a device, and a step before the window

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return self.last - self.first + 1

    def find_inside(self, graph: Graph) -> Flags:
        """Tell for each activity of the graph (bool [n]) whether it is replayed."""
        inside = np.zeros(len(graph.activities), bool)
        inside[self.places] = True
        return inside


@dataclass(frozen=True)
class Replay:
    """Times of a graph's activities, in the last pass."""

    graph: Graph
    window: StepWindow
    step_ns: float  # of one step, the mean over ranks
    passes: int
    start_ns: Integers  # [n]; of activities outside of the window as measured
    end_ns: Integers  # [n]
    binding: Integers  # [n], number of the edge that each activity waited for last; -1: none
    # [n], what stands in the pass before for an activity that was measured before the window; -1: nothing
    stand_in: Integers


def find_window(graph: Graph) -> StepWindow | None:
    """Find the longest run of steps that are steady on all ranks and whose ends are known; None without any.

    The first step of a trace is left out where there are others: what comes before it is not known.
    """
    if not graph.boundaries or not len(graph.activities):
        return None
    steady = set(graph.boundaries[0].steady)
    begins = set(graph.boundaries[0].ends)
    for boundary in graph.boundaries:
        steady &= set(boundary.steady) & set(boundary.ends)
        begins &= set(boundary.ends)
    runs: list[list[int]] = []
    for number in sorted(steady):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if not runs:
        return None
    longest = max(runs, key=len)
    repeats = longest[0] - 1 in begins
    if not repeats and len(longest) > 1:
        longest = longest[1:]
        repeats = True
    repeats = repeats and graph.on_device
    step = graph.activities.step
    first = longest[0]
    last = longest[-1]
    places = np.flatnonzero((step >= first) & (step <= last))
    return StepWindow(first, last, places, repeats)


def replay(graph: Graph, window: StepWindow | None = None) -> Replay | None:
    """Replay the steady steps of a graph.

    Args:
        graph: the measured steps, or these after edits.
        window: which steps; None: those of find_window.

    Returns:
        The times; None where the graph has no steady step whose end is known.
    """
    window = window or find_window(graph)
    if window is None:
        return None
    passes = _Passes(graph, window)
    step_ns = passes.settle()
    start_ns = graph.activities.start_ns.copy()
    end_ns = graph.activities.end_ns.copy()
    binding = np.full(len(graph.activities), -1, np.int64)
    ends_ns = passes.find_all_ends()
    end_ns[window.places] = ends_ns[: len(window.places)]
    start_ns[window.places] = end_ns[window.places] - graph.activities.work_ns[window.places]
    binding[window.places] = passes.reduced.find_binding(ends_ns)
    return Replay(
        graph=graph,
        window=window,
        step_ns=step_ns,
        passes=passes.number,
        start_ns=start_ns,
        end_ns=end_ns,
        binding=binding,
        stand_in=passes.list_stand_ins(),
    )


def measure_step(graph: Graph, window: StepWindow | None = None) -> float:
    """Measure a replayed step, ns, without the times of single activities; 0 where there is none.

    Args:
        graph: the measured steps, or these after edits.
        window: which steps; None: those of find_window.
    """
    window = window or find_window(graph)
    return 0.0 if window is None else _Passes(graph, window).settle()


def _find_measured_starts(graph: Graph, window: StepWindow) -> NDArray[np.float64]:
    """When the window begins on each rank, measured."""
    starts = []
    for boundary in graph.boundaries:
        before = boundary.ends.get(window.first - 1)
        start_ns = boundary.start_ns if before is None else graph.activities.end_ns[before]
        starts.append(float(start_ns))
    return np.array(starts)


class _Passes:
    """Passes through a window, each from where the one before it ended.

    Args:
        graph: the graph.
        window: the steps that are replayed.
    """

    def __init__(
        self,
        graph: Graph,
        window: StepWindow,
    ):
        self.graph = graph
        self.window = window
        self.reduced = ReducedWindow(graph, window.places)
        self.number = 0
        self.lengths_ns = np.zeros(len(graph.boundaries))  # of the last pass, by rank
        self._outer_ns = graph.activities.end_ns[self.reduced.outer]
        self._root_ends_ns: Integers = np.empty(0, np.int64)
        last = [boundary.ends[window.last] for boundary in graph.boundaries]
        self._last_places = np.searchsorted(window.places, last)

    def settle(self) -> float:
        """Repeat the window until a pass takes as long as the one before it, and return the step, ns."""
        starts_ns = _find_measured_starts(self.graph, self.window)
        before_ns = starts_ns
        pass_ns = np.zeros(len(starts_ns))
        for number in range(MAX_PASSES if self.window.repeats else 1):
            shift_ns = 0
            if number:
                # an activity that waits for nothing known begins when it did, a pass later each time
                shift_ns = int((before_ns - starts_ns).max())
                self._outer_ns = self._find_repeated_ends()
            self._run(shift_ns)
            ends_ns = self.reduced.find_ends(self._root_ends_ns, self._last_places).astype(np.float64)
            lengths_ns = ends_ns - before_ns
            before_ns = ends_ns
            changed_ns = np.abs(lengths_ns - pass_ns)
            is_settled = changed_ns.max() <= SETTLED * lengths_ns.max()
            pass_ns = lengths_ns
            if is_settled and number:
                break
        self.lengths_ns = pass_ns
        step_ns = max(float(pass_ns.mean()) / self.window.steps, self.graph.floor_ns)
        return step_ns + self.graph.beside_ns

    def _run(self, shift_ns: int) -> None:
        """Run through the window once. shift_ns: how much later it begins than it was measured."""
        self.number += 1
        activities = self.graph.activities
        roots = self.window.places[self.reduced.roots]
        fixed_ns = activities.start_ns[roots] + activities.work_ns[roots] + shift_ns
        self._root_ends_ns = self.reduced.compute(self._outer_ns, fixed_ns)

    def _find_repeated_ends(self) -> Integers:
        """When the stand-ins of the sources outside of the window ended; NEVER where there are none."""
        is_known = self._repeated >= 0
        number = np.where(is_known, self._repeated, self.window.places[0])
        place = np.searchsorted(self.window.places, number)
        ends_ns = self.reduced.find_ends(self._root_ends_ns, place)
        return np.where(is_known, ends_ns, NEVER)

    def find_all_ends(self) -> Integers:
        """When all activities of the window ended in the last pass, and behind them the sources outside."""
        every = np.arange(len(self.window.places) + len(self.reduced.outer))
        return self.reduced.find_ends(self._root_ends_ns, every)

    def list_stand_ins(self) -> Integers:
        """List by activity what stands for it in the pass before: int64 [n]; -1: nothing does."""
        found = np.full(len(self.graph.activities), -1, np.int64)
        if self.window.repeats:
            found[self.reduced.outer] = self._repeated
        return found

    @cached_property
    def _repeated(self) -> Integers:
        """Stand-ins of the sources outside of the window, in the pass before: the q-th last activity of a lane before
        the window is the q-th last of the lane in it; -1: none."""
        outer = self.reduced.outer
        lane = self.graph.activities.lane
        lane_inside = lane[self.window.places]
        found = np.full(len(outer), -1, np.int64)
        for one in np.unique(lane[outer]).tolist():
            here = np.flatnonzero(lane[outer] == one)
            inside = self.window.places[lane_inside == one]
            if not len(inside):
                continue
            earlier = np.flatnonzero(lane[: inside[0]] == one)
            place = np.searchsorted(earlier, outer[here])
            from_end = len(earlier) - place
            is_known = (from_end >= 1) & (from_end <= len(inside))
            at = np.where(is_known, len(inside) - from_end, 0)
            found[here] = np.where(is_known, inside[at], -1)
        return found


# --- is the graph that of the measured steps?


@dataclass(frozen=True)
class Trust:
    """A graph's unchanged replay beside the measured steps."""

    measured_ms: float  # mean of the window's steps and of ranks; 0: there is no steady step
    replayed_ms: float
    contradicted: float  # share of the edges that measured times contradict
    unexplained_ms: float  # of a step, on the critical path: delays of the device and others without a known reason
    passes: int
    why_not: str = ""  # why nothing is to be claimed by the graph; "": it is that of the measured steps
    filled: float = 0.0  # share of the step that host and device take at least, each without the other's work

    @property
    def off(self) -> float:
        """The share of the measured step by which the replay differs."""
        return self.replayed_ms / self.measured_ms - 1 if self.measured_ms else 0.0


NO_STEPS = "the traces have no steady step whose end is known on all ranks"


def check_replay(graph: Graph) -> Trust:
    """Replay a graph unchanged, and say whether it is that of the measured steps."""
    window = find_window(graph)
    if window is None:
        return Trust(0.0, 0.0, graph.contradicted_share, 0.0, 0, NO_STEPS)
    measured_ns = _measure_window(graph, window)
    found = replay(graph, window)
    if found is None:
        return Trust(0.0, 0.0, graph.contradicted_share, 0.0, 0, NO_STEPS)
    path = find_critical_path(found)
    delays_ns = graph.activities.delay_ns[path.places]
    unexplained_ns = int(delays_ns.sum()) / window.steps
    trust = Trust(
        measured_ms=measured_ns / 1e6,
        replayed_ms=found.step_ns / 1e6,
        contradicted=graph.contradicted_share,
        unexplained_ms=unexplained_ns / 1e6,
        passes=found.passes,
        filled=_measure_filled(graph, window) / max(measured_ns, 1.0),
    )
    return replace(trust, why_not=_explain_doubt(trust))


def _measure_filled(graph: Graph, window: StepWindow) -> float:
    """The step of the slowest rank without the device's work, or without the host's, ns: the shorter one; 0 without a
    device."""
    if not graph.on_device:
        return 0.0
    is_device = graph.find_kind(*ON_DEVICE, ActivityKind.TRANSFER)
    is_host = graph.find_kind(*ON_HOST)
    alone_ns = []
    for is_left_out in (is_device, is_host):
        works_ns = np.where(is_left_out, 0, graph.activities.work_ns)
        alone = replace(graph, activities=replace(graph.activities, work_ns=works_ns))
        passes = _Passes(alone, window)
        passes.settle()
        alone_ns.append(float(passes.lengths_ns.max()) / window.steps)
    return min(alone_ns)


def _measure_window(graph: Graph, window: StepWindow) -> float:
    """The mean step of the window and of ranks as measured, ns."""
    last = np.array([boundary.ends[window.last] for boundary in graph.boundaries])
    ends_ns = graph.activities.end_ns[last].astype(np.float64)
    lengths_ns = ends_ns - _find_measured_starts(graph, window)
    return float(lengths_ns.mean()) / window.steps + graph.beside_ns


def _explain_doubt(trust: Trust) -> str:
    """Why nothing is to be claimed; "" where the replay is that of the measured steps."""
    if trust.contradicted > MAX_CONTRADICTED:
        return (
            f"{trust.contradicted:.0%} of what activities seem to wait for ended after they had begun, "
            f"{MAX_CONTRADICTED:.0%} are allowed"
        )
    if abs(trust.off) > MAX_OFF:
        return (
            f"replayed unchanged a step takes {trust.replayed_ms:,.1f} ms instead of the measured "
            f"{trust.measured_ms:,.1f} ms, {MAX_OFF:.0%} are allowed"
        )
    if trust.filled > MAX_FILLED:
        return (
            f"host and device each fill {trust.filled:.0%} of a step of {trust.measured_ms:,.1f} ms without the "
            "other's work: what one of them waits for is not recorded"
        )
    if trust.unexplained_ms > MAX_UNEXPLAINED * trust.measured_ms:
        return (
            f"{trust.unexplained_ms:,.1f} ms of a step of {trust.measured_ms:,.1f} ms are waits without a known "
            f"reason, {MAX_UNEXPLAINED:.0%} are allowed"
        )
    return ""


# --- what makes a step that long


@dataclass(frozen=True)
class CriticalPath:
    """The chain of activities that ends with a window, each begun as soon as the one before it let it."""

    graph: Graph
    steps: int
    places: Integers  # [p], activities, the last one first
    own_ns: Integers  # [p], time of each on the path: its work, its delay and the lag before it


@dataclass(frozen=True)
class PathPart:
    """All of a critical path that is of one kind; one line of a report."""

    rank: int
    kind: str  # "operator", "kernel", "transfer", ...
    phase: str  # "" for none
    name: str  # of the operator or kernel; "" for none
    ms: float  # per step


def find_critical_path(found: Replay) -> CriticalPath:
    """Follow the last pass back from the end of the slowest rank's last step, for as long as the window takes.

    What was before the window stands at the end of the pass before, which is the same again.
    """
    graph = found.graph
    window = found.window
    own_of, source_of = _find_steps_back(found)
    last = [boundary.ends[window.last] for boundary in graph.boundaries]
    place = max(last, key=lambda one: found.end_ns[one])
    places = []
    own_ns = []
    left_ns = int((found.step_ns - graph.beside_ns) * window.steps)
    while place >= 0 and left_ns > 0:
        own = min(int(own_of[place]), left_ns)
        left_ns -= own
        places.append(place)
        own_ns.append(own)
        place = int(source_of[place])
    return CriticalPath(graph, window.steps, np.array(places), np.array(own_ns))


def _find_steps_back(found: Replay) -> tuple[Integers, Integers]:
    """Find how long each activity holds up what waits for it, and what it waited for itself.

    Returns:
        int64 [n], ns: its work and, where it waited, its delay and the lag before it; int64 [n]: what it waited for
        last, in the pass before where that was measured before the window, -1 for nothing.
    """
    graph = found.graph
    has_waited = found.binding >= 0
    # the last entry is for what waited for nothing
    source = np.append(graph.edges.source, -1)[found.binding]
    lag_ns = np.append(graph.edges.lag_ns, 0)[found.binding]
    waited_ns = np.where(has_waited, graph.activities.delay_ns + lag_ns, 0)
    own_ns = found.end_ns - found.start_ns + waited_ns
    is_inside = found.window.find_inside(graph)
    before = np.where(is_inside[source], source, found.stand_in[source])
    return own_ns, np.where(has_waited, before, -1)


def list_path_parts(path: CriticalPath) -> tuple[PathPart, ...]:
    """Sum a critical path up by rank, kind, phase and name, the longest first."""
    graph = path.graph
    activities = graph.activities
    columns = np.stack(
        [
            graph.rank[path.places].astype(np.int64),
            activities.kind[path.places].astype(np.int64),
            activities.phase[path.places].astype(np.int64),
            activities.name[path.places].astype(np.int64),
        ]
    )
    keys, part = np.unique(columns, axis=1, return_inverse=True)
    sums_ns = np.bincount(part.ravel(), path.own_ns)
    phases = (*graph.phases, "")
    names = (*graph.names, "")
    found = []
    for (rank, kind, phase, name), ns in zip(keys.T.tolist(), sums_ns.tolist()):
        word = describe_kind(kind)
        ms = ns / 1e6 / path.steps
        part_of_path = PathPart(rank, word, phases[phase], names[name], ms)
        found.append(part_of_path)
    return tuple(sorted(found, key=lambda one: -one.ms))


def describe_kind(kind: int) -> str:
    """The word for a kind of activity."""
    return ActivityKind(kind).name.lower()
