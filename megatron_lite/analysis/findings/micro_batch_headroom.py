"""Memory is left for a larger micro-batch.

Meaning: the step accumulates several small micro-batches although fewer, larger ones would fit. Larger products use
    the device better, and gradients are accumulated and launched fewer times.
Measured: the peak (by a real snapshot, or the allocator's counter in steps.jsonl) against the device's memory as the
    run wrote it down. The peak of a larger micro-batch is bounded by scaling what depends on it (all of the peak,
    where the parts are not known).
Cost: the time of adding up gradients in all micro-batches but the first, as far as the trace shows it; larger
    products may gain more, which only a run tells.
Do: raise the micro-batch, keep the global batch: the result of training stays the same.
Flags: --micro-batch-size N at the same --global-batch-size.
False alarm: memory that evaluation, a checkpoint or a longer batch still needs.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import device_bytes, measure_peak, micro_batches, suggest_micro_batch
from megatron_lite.analysis.findings.step_measurements import accumulation_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import size

CODE, TITLE = "micro-batch-headroom", "memory left for a larger micro-batch"


def find(facts: Facts) -> Finding | None:
    larger, one = suggest_micro_batch(facts), facts.critical
    if larger is None or one is not None and one.time.launch_bound:  # there it is the remedy, and said there
        return None
    held = measure_peak(facts)
    cost = accumulation_ms(one) or None if one is not None else None
    peak = f"the peak is {size(held.num_bytes)} of {size(device_bytes(facts))}"
    seen = Evidence(f"{peak}, with {micro_batches(facts)} micro-batches per step", held.where)
    return Finding(cost_ms=cost, evidence=(seen,), advice=larger[1], flags=larger[:1], gain_ms=cost, certain=False)
