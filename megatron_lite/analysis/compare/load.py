"""Runs that were measured while others used their cores: what of their times is the machine's,
as noise of a comparison."""

from dataclasses import replace

from megatron_lite.analysis.compare.compare_results import Pair
from megatron_lite.analysis.compare.settings import paired
from megatron_lite.analysis.core_use import CoreShortage
from megatron_lite.analysis.run.cores import find_core_shortage
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import significant


def find_load(facts: Facts, kind: str) -> CoreShortage | None:
    """The shortage of cores in steps of that kind, "ordinary" or "profiled"; None where there was none,
    or a GPU hid it."""
    return None if facts.core_shortage is None else find_core_shortage(facts.run, kind, facts.traces)


def describe_unknown_load(name: str, facts: Facts) -> str:
    """'A: no run record: whether other jobs took the cores was not recorded ...'; '' where it was,
    and for times of a GPU."""
    one = facts.critical
    if facts.on_gpu is not False or one is None:
        return ""
    doubt = facts.doubt_cores([one.time.rank])
    return f"{name}: {doubt}" if doubt else ""


def widen_band(pair: Pair, loads: tuple[CoreShortage | None, ...]) -> Pair:
    """The same two times, in ms, of steps that waited so long for a core: by that much each may be shorter on a quiet
    machine.

    Nothing is known of times whose wait the system did not measure.
    """
    short = [load for load in loads if load is not None]
    if not short or pair.band is None:
        return pair
    most = max(pair.a or 0.0, pair.b or 0.0)
    waits = [load.wait_ms for load in short if load.wait_ms is not None]
    if len(waits) < len(short):
        return paired(pair.a, pair.b, None)
    # a phase cannot have waited longer than it took
    return paired(pair.a, pair.b, pair.band + sum(min(wait_ms, most) for wait_ms in waits))


def widen_rate(pair: Pair, loads: tuple[CoreShortage | None, ...]) -> Pair:
    """The same of two rates, which vary as one over the step does."""
    short = [load for load in loads if load is not None]
    most = max(pair.a or 0.0, pair.b or 0.0)
    relative = tuple(
        load and replace(load, wait_ms=None if load.share is None else load.share * most) for load in short
    )
    return widen_band(pair, relative)


def describe_load(name: str, load: CoreShortage) -> str:
    """'A was measured on a busy machine: ...; measure it again on a quiet one'."""
    found = f"{name} was measured on a busy machine: "
    if load.wait_ms is None:
        found += f"rank {load.rank} was preempted repeatedly"
    else:
        waited = f"{significant(load.wait_ms)} of {significant(load.step_ms)} ms per {load.kind} step"
        found += f"rank {load.rank} waited for a CPU core for {waited}"
    return f"{found}; that much counts as noise of its times. Measure it again on a quiet machine"
