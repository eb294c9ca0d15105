"""Times and memory of two runs beside each other, with the noise of their steps."""

from megatron_lite.analysis.compare.figures import Pair
from megatron_lite.analysis.compare.noise import exact, paired_samples
from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.findings.seen.headroom import peak
from megatron_lite.units import MIB


def step_times(a: Facts, b: Facts) -> Pair | None:
    """ms of ordinary steps, else of the traces' steady ones; None where the two have not the same."""
    for samples in (_ordinary_ms, _traced_ms):
        found = samples(a), samples(b)
        if all(found):
            return paired_samples(*found)
    return None


def peaks(a: Facts, b: Facts) -> Pair | None:
    """MiB of tensors at the peak, by the allocator or by snapshots; None where the two have not the same."""
    measured = peak(a), peak(b)
    if all(measured):
        return exact(*(one.num_bytes / MIB for one in measured))
    recorded = a.highest_snapshot, b.highest_snapshot
    return exact(*(one.peak_bytes / MIB for one in recorded)) if all(recorded) else None


def _ordinary_ms(facts: Facts) -> list[float]:
    run = facts.run
    return [ms for ms, plain in zip(run.training_ms, run.ordinary) if plain] if run else []


def _traced_ms(facts: Facts) -> list[float]:
    one = facts.critical
    return [step.ms for step in one.time.steps if step.steady] if one is not None else []
