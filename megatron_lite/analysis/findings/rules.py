"""All rules, and what they find."""

import math
from collections.abc import Callable
from types import ModuleType

from megatron_lite.analysis.findings import (
    all_reduce_tail,
    allocator_stalls,
    attention_dropout,
    attention_memory,
    attention_scores,
    below_roofline,
    busy_machine,
    copy_share,
    debug_switches,
    exposed_copies,
    first_step,
    fp32_products,
    fragmentation,
    gc_pauses,
    graph_breaks,
    host_gaps,
    launch_bound,
    log_stalls,
    logits_peak,
    matmul_shapes,
    max_connections,
    memory_growth,
    micro_batch_headroom,
    needless_recompute,
    no_learning,
    no_overlap,
    no_tensor_cores,
    out_of_memory,
    overflow_storm,
    profiler_overhead,
    recompilation,
    recompute_activations,
    reduce_every_micro_batch,
    save_and_eval,
    scale_collapse,
    slow_16_bit_products,
    small_buckets,
    small_copies,
    starved_loader,
    straggler,
    stream_waits,
    sync_in_step,
    tiny_micro_batches,
    too_many_threads,
    too_many_workers,
    unfused_elementwise,
    unfused_optimizer,
    unpinned_copies,
    vocabulary_padding,
    zeroed_gradients,
)
from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.run_facts import Facts

RULES: tuple[ModuleType, ...] = (
    sync_in_step,
    starved_loader,
    too_many_workers,
    unpinned_copies,
    small_copies,
    exposed_copies,
    launch_bound,
    host_gaps,
    tiny_micro_batches,
    gc_pauses,
    allocator_stalls,
    stream_waits,
    log_stalls,
    save_and_eval,
    no_tensor_cores,
    fp32_products,
    slow_16_bit_products,
    matmul_shapes,
    below_roofline,
    vocabulary_padding,
    attention_scores,
    attention_dropout,
    copy_share,
    unfused_elementwise,
    unfused_optimizer,
    zeroed_gradients,
    all_reduce_tail,
    no_overlap,
    small_buckets,
    reduce_every_micro_batch,
    straggler,
    max_connections,
    recompilation,
    graph_breaks,
    first_step,
    profiler_overhead,
    debug_switches,
    too_many_threads,
    busy_machine,
    overflow_storm,
    scale_collapse,
    no_learning,
    memory_growth,
    out_of_memory,
    fragmentation,
    logits_peak,
    attention_memory,
    recompute_activations,
    micro_batch_headroom,
    needless_recompute,
)


def findings_of(facts: Facts, gap: Callable[[str], object] | None = None) -> tuple[Finding, ...]:
    """What the rules find, most costly first: by milliseconds per step, then by bytes, then what has neither.

    `gap` is told of a rule that failed, in one line; the others still answer.
    """
    found = [finding for rule in RULES if (finding := _asked(rule, facts, gap)) is not None]
    return tuple(sorted(found, key=lambda one: (-(one.cost_ms or 0.0), -(one.cost_bytes or 0))))


def page_of(code: str) -> str | None:
    """What `explain CODE` prints; None for no rule's code."""
    return next((rule.__doc__.strip() for rule in RULES if rule.CODE == code), None)


def _asked(rule: ModuleType, facts: Facts, gap: Callable[[str], object] | None) -> Finding | None:
    try:
        found = rule.find(facts)
    except Exception as error:  # noqa: BLE001  one rule that a foreign file confuses must not silence the others
        if gap is not None:
            gap(
                f"rule {rule.CODE}: could not be asked ({type(error).__name__}: {error}); its cause may be there "
                "unseen."
            )
        return None
    return found if found is None or found.cost_ms is None or math.isfinite(found.cost_ms) else None
