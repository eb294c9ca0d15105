"""Runs that were measured while others used their cores: what of their times is the machine's counts as noise."""

from dataclasses import replace

from megatron_lite.analysis.compare.compare_results import Pair
from megatron_lite.analysis.compare.settings import paired
from megatron_lite.analysis.core_use import CoreShortage
from megatron_lite.analysis.run.cores import find_core_shortage
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import significant


def find_load(facts: Facts, kind: str) -> CoreShortage | None:
    """Find the shortage of cores in steps of that kind, "ordinary" or "profiled".

    None where there was none, or a GPU hid it.
    """
    if facts.core_shortage is None:
        return None
    return find_core_shortage(facts.run, kind, facts.traces)


def describe_unknown_load(name: str, facts: Facts) -> str:
    """Write that nothing tells whether other jobs took the cores of run `name`; '' where it is known, and on a GPU."""
    if facts.on_gpu is not False or facts.critical is None:
        return ""
    rank = facts.critical.time.rank
    doubt = facts.doubt_cores([rank])
    return f"{name}: {doubt}" if doubt else ""


def widen_band(pair: Pair, loads: tuple[CoreShortage | None, ...]) -> Pair:
    """Widen the noise of two times, in ms, by what their steps waited for a core: on a quiet machine each may be so
    much shorter.

    Nothing is known of times whose wait the system did not measure.
    """
    short = [load for load in loads if load is not None]
    if not short or pair.band is None:
        return pair
    longest_ms = max(pair.a or 0.0, pair.b or 0.0)
    band = pair.band
    for load in short:
        if load.wait_ms is None:
            return paired(pair.a, pair.b, None)
        # a phase cannot have waited longer than it took
        band += min(load.wait_ms, longest_ms)
    return paired(pair.a, pair.b, band)


def widen_rate(pair: Pair, loads: tuple[CoreShortage | None, ...]) -> Pair:
    """Widen the noise of two rates, which vary as one over the step does."""
    most = max(pair.a or 0.0, pair.b or 0.0)
    relative = []
    for load in loads:
        if load is not None:
            waited = None if load.share is None else load.share * most
            relative.append(replace(load, wait_ms=waited))
    return widen_band(pair, tuple(relative))


def describe_load(name: str, load: CoreShortage) -> str:
    """Write that run `name` was measured on a busy machine, and what that means for its times."""
    found = f"{name} was measured on a busy machine: "
    if load.wait_ms is None:
        found += f"rank {load.rank} was preempted repeatedly"
    else:
        waited = f"{significant(load.wait_ms)} of {significant(load.step_ms)} ms per {load.kind} step"
        found += f"rank {load.rank} waited for a CPU core for {waited}"
    return f"{found}; that much counts as noise of its times. Measure it again on a quiet machine"
