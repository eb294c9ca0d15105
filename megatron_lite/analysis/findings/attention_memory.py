"""Attention scores of all layers wait in memory for backward.

Meaning: softmax's result, batch x heads x T x T, is kept by every layer until its backward. It grows with the square
    of the sequence length; fused attention keeps none of it.
Measured: activations at the snapshot's peak that were made in a function named softmax, one per layer or more; those
    that the loss makes are counted as logits. What masking and dropout keep beside it comes on top.
Cost: those bytes at the moment that decides how large a micro-batch can be.
Do: torch.nn.functional.scaled_dot_product_attention with a causal flag instead of softmax by hand; if it must be by
    hand, recompute it.
Flags: --attention-backend auto (or flash); --recompute-granularity selective recomputes only this.
False alarm: a softmax that is no attention, such as a router's, is small.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_memory
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import size

CODE, TITLE = "attention-memory", "attention scores kept for backward"
TOO_MUCH = 0.10  # of the peak: less changes no micro-batch
MIN_BLOCKS = 4  # one per layer; a loss has one or two
MAX_SHOWN = 3


def find(facts: Facts) -> Finding | None:
    most = facts.highest_snapshot
    sites = [
        site
        for site in (most.sites if most is not None else ())
        if site.category == "activations" and "softmax" in site.site.lower() and site.blocks >= MIN_BLOCKS
    ]
    held = sum(site.num_bytes for site in sites)
    if not sites or held < TOO_MUCH * most.peak_bytes:
        return None
    text = f"{size(held)} of the peak of {size(most.peak_bytes)} ({held / most.peak_bytes:.0%})"
    shown = (Evidence(f"{size(site.num_bytes)} in {site.blocks} pieces", site.site) for site in sites[:MAX_SHOWN])
    advice = "fused attention, which keeps no scores: --attention-backend auto, or scaled_dot_product_attention"
    return find_lost_memory(most, held, held, text, advice, *shown, flags=("--attention-backend auto",))
