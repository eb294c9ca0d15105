"""Memory peaks at the logits.

Meaning: the last layer writes a number per token and word of the vocabulary, and the loss copies it, in fp32, more
    than once. With 50,000 words that is more than all layers' activations of a small model.
Measured: bytes of the category "logits and loss" at the snapshot's peak.
Cost: those bytes at the moment that decides how large a micro-batch can be.
Do: compute the loss in chunks of tokens (fused linear cross-entropy), compile logits and loss together, or a smaller
    micro-batch with more of them per step.
Flags: half the --micro-batch-size at the same --global-batch-size; in Megatron-LM --cross-entropy-loss-fusion and
    tensor parallelism, which splits the vocabulary.
False alarm: a peak far below the device's memory.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_memory
from megatron_lite.analysis.findings.run_settings import argument, is_tight, sum_category, whole
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import size

CODE, TITLE = "logits-peak", "logits and loss at the memory peak"
TOO_MUCH = 0.25  # of the peak: less than the layers' activations usually take


def find(facts: Facts) -> Finding | None:
    most = facts.highest_snapshot
    if most is None or not is_tight(facts, most):
        return None
    held = sum_category(most, "logits and loss")
    if held < TOO_MUCH * most.peak_bytes:
        return None
    now = whole(argument(facts, "micro_batch_size"))
    half = f"--micro-batch-size {now // 2}" if now and now > 1 else ""
    text = f"{size(held)} of the peak of {size(most.peak_bytes)} ({held / most.peak_bytes:.0%})"
    advice = "compute the loss in chunks of tokens" + (
        f", or {half} (now {now}) with more micro-batches" if half else ""
    )
    return find_lost_memory(
        most, held, held, f"{text}, in {most.peak_phase or 'an unknown phase'}", advice, flags=(half,) if half else ()
    )
