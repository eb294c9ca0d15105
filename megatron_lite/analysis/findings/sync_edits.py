"""Edits of steps in which the host does not wait for the device: at lines of the program, where the trace has stacks,
else in operators."""

from collections.abc import Collection, Sequence
from functools import cached_property, partial

from megatron_lite.analysis.findings.base import Edit
from megatron_lite.analysis.graph.edits.syncs import drop_syncs_ending, drop_syncs_of
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.kernels.kernel_names import short_name
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.idle_gaps import find_host_activity
from megatron_lite.analysis.time.sites import CallSites
from megatron_lite.analysis.time.time_results import SyncSite


def drop_sites(
    facts: Facts,
    change: str,
    sites: Sequence[SyncSite],
    left_out: Collection[str] = (),
) -> Edit:
    """Build the edit of steps in which the host does not wait for the device at some places.

    Args:
        facts: the run.
        change: what is done to the program.
        sites: the places.
        left_out: phases in which the same operators may wait, where no lines are known.
    """
    if sites and all(site.frame for site in sites):
        return Edit(change, _WaitsAtLines(facts.graph_ranks, sites).drop)
    operators = {short_name(site.operator) for site in sites if site.operator}
    phases = {site.phase for site in sites if not site.operator}
    return Edit(change, partial(drop_syncs_of, operators=operators, phases=phases, left_out=left_out))


class _WaitsAtLines:
    """Waits for the device at lines of the program, which are looked up when a graph is edited.

    Args:
        ranks: those of the graph.
        sites: the lines, each in a phase.
    """

    def __init__(
        self,
        ranks: Sequence[RankFacts],
        sites: Sequence[SyncSite],
    ):
        self._ranks = ranks
        self._places = {(site.frame, site.phase) for site in sites}

    def drop(self, graph: Graph) -> Graph:
        """Leave the waits out of a graph."""
        return drop_syncs_ending(graph, self._ends_ns)

    @cached_property
    def _ends_ns(self) -> list[Integers]:
        """When the waits of each rank end, on the clock of its trace."""
        return [self._find_ends(one) for one in self._ranks]

    def _find_ends(self, one: RankFacts) -> Integers:
        """When a rank's waits at these lines end; int64 [w]."""
        trace = one.trace
        events = trace.events
        calls = find_host_activity(trace, one.placing).waits
        called_ns = events.start_ns[calls]
        places = CallSites(trace, one.placing)
        frames = places.frame(called_ns, events.thread[calls]).tolist()
        phases = one.placing.phase[calls].tolist()
        pairs = [(places.text(frame), places.phase_text(phase)) for frame, phase in zip(frames, phases)]
        meant = [pair in self._places for pair in pairs]
        found: Integers = events.end_ns[calls[meant]] if len(calls) else calls
        return found
