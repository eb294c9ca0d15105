"""All rules, and what they find."""

import math
import textwrap
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import ModuleType

from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.run_facts import Facts

# A rule is a module of this folder; of two findings that cost the same, the first named stands first.
NAMES = """
    sync_in_step starved_loader too_many_workers unpinned_copies small_copies exposed_copies launch_bound host_gaps
    tiny_micro_batches gc_pauses allocator_stalls stream_waits log_stalls save_and_eval no_tensor_cores
    fp32_products slow_16_bit_products matmul_shapes below_roofline vocabulary_padding attention_scores
    attention_dropout copy_share unfused_elementwise unfused_optimizer zeroed_gradients all_reduce_tail no_overlap
    small_buckets reduce_every_micro_batch straggler max_connections recompilation graph_breaks first_step
    profiler_overhead debug_switches too_many_threads busy_machine overflow_storm scale_collapse no_learning
    memory_growth out_of_memory fragmentation logits_peak attention_memory recompute_activations
    micro_batch_headroom needless_recompute
"""
RULES: tuple[ModuleType, ...] = tuple(import_module(f"{__package__}.{name}") for name in NAMES.split())
PAGE_WIDTH = 100


def apply_rules(facts: Facts, gap: Callable[[str], object] | None = None) -> tuple[Finding, ...]:
    """What the rules find, most costly first: by milliseconds per step, then by bytes, then what has neither.

    `gap` is told of a rule that failed, in one line; the others still answer.
    """
    findings = []
    for rule in RULES:
        try:
            found = _ask(rule, facts)
        except Exception as error:  # noqa: BLE001  one rule that a foreign file confuses must not silence the others
            found = None
            if gap is not None:
                why = f"could not be asked ({type(error).__name__}: {error}); its cause may be there unseen."
                gap(f"rule {rule.CODE}: {why}")
        if found is not None and math.isfinite(found.cost_ms or 0.0):
            findings.append(replace(found, code=rule.CODE, title=found.title or rule.TITLE))
    return tuple(sorted(findings, key=lambda one: (-(one.cost_ms or 0.0), -(one.cost_bytes or 0))))


def _ask(rule: ModuleType, facts: Facts) -> Finding | None:
    one = facts.critical
    if hasattr(rule, "find"):
        return rule.find(facts)
    if one is None:
        return None
    if hasattr(rule, "find_in_trace"):
        return rule.find_in_trace(facts, one)
    return rule.find_on_gpu(facts, one) if one.time.on_gpu else None


def get_page(code: str) -> str | None:
    """What `explain CODE` prints; None for no rule's code."""
    page = next((rule.__doc__.strip() for rule in RULES if rule.CODE == code), None)
    if page is None:
        return None
    first, parts = page.split("\n\n", 1)
    lines = [first, ""]
    for part in parts.replace("\n    ", " ").split("\n"):
        lines += textwrap.wrap(part, PAGE_WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines)
