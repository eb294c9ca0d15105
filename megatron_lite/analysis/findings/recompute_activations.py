"""Recomputing activations would take most of the memory peak away.

Meaning: every layer keeps its activations for backward. Recomputing keeps only each layer's input and runs the
    layer's forward once more in backward, one layer at a time.
Measured: activations by layer at the snapshot's peak; with recomputation the largest one and the inputs of all would
    be left. The gain is what that takes off the peak, as long as nothing else then becomes the peak.
Cost: memory. Recomputing costs a second forward: a third more of the matrix products.
Do: recompute if memory is what keeps the micro-batch small; selective recomputation first if attention writes its
    scores.
Flags: --recompute-granularity full --recompute-method uniform --recompute-num-layers 1; or --recompute-granularity
    selective.
False alarm: a run that fits and whose micro-batch need not grow: then it only costs time.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_memory
from megatron_lite.analysis.findings.run_settings import argument, is_tight, micro_batch_tokens, part, whole
from megatron_lite.analysis.memory.memory_results import OUTSIDE
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import size

CODE, TITLE = "recompute-activations", "activations that could be recomputed"
MIN_GAIN = 0.40  # of the peak, that it must save to be worth a second forward
MIN_LAYERS = 4  # with fewer, the one being recomputed is most of it
FLAG = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SIXTEEN_BITS = ("fp16", "bf16")


def find(facts: Facts) -> Finding | None:
    most = facts.highest_snapshot
    if most is None or argument(facts, "recompute_granularity") or not is_tight(facts, most):
        return None
    layers = [layer.num_bytes for layer in most.layers if layer.name != OUTSIDE]
    if len(layers) < MIN_LAYERS:
        return None
    # Of all layers: micro-batch x sequence x hidden each; unknown without a plan.
    tokens, hidden = micro_batch_tokens(facts), whole(part(facts, "shape", "hidden_size"))
    width = 2 if facts.plan.get("precision") in SIXTEEN_BITS else 4
    inputs = len(layers) * tokens * hidden * width if tokens and hidden else 0
    held = sum(layers)
    gain = held - max(layers) - inputs
    if gain < MIN_GAIN * most.peak_bytes:
        return None
    text = (
        f"{len(layers)} layers hold {size(held)} of the peak of {size(most.peak_bytes)}; with recomputation one layer's "
        f"{size(held / len(layers))} and the layers' inputs{f' of {size(inputs)}' if inputs else ''}"
    )
    advice = f"if memory keeps the micro-batch small: {FLAG} (costs a second forward)"
    return find_lost_memory(most, held, int(gain), text, advice, flags=(FLAG,), certain=inputs > 0)
