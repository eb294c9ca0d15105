"""Activations are recomputed although memory is plentiful.

Meaning: full recomputation runs every layer's forward once more in backward, to keep only its
    input. That is worth it where memory decides the micro-batch, and a loss everywhere else.
Measured: the run's plan; the sum of all that a step would hold without recomputation, by formula,
    against the memory that the run found at its start (of the GPU, or of the machine, shared by
    its ranks).
Cost: up to the time of forward, by its share of recomputed layers.
Do: leave recomputation out, or a larger micro-batch with it.
Flags: without --recompute-granularity full; selective costs little.
False alarm: a rehearsal of a larger job, or memory that evaluation or a longer batch still needs.
"""

import math
from statistics import median

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import TIGHT, argument, device_bytes, part, whole
from megatron_lite.analysis.findings.step_measurements import MATTERS, in_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase
from megatron_lite.units import size

CODE = "needless-recompute"
TITLE = "recomputation though memory is plentiful"
FORWARD = Phase.FORWARD.value


def find(facts: Facts) -> Finding | None:
    room = _room(facts)
    if argument(facts, "recompute_granularity") != "full" or not room:
        return None
    from megatron_lite.analysis.memory.ledger import (
        bytes_without_recomputation,  # late: formulas and flags, for such runs only
    )
    from megatron_lite.config.shape import recomputed_layers

    needed = bytes_without_recomputation(facts.plan)
    if needed is None or needed > TIGHT * room:
        return None
    layers = part(facts, "shape", "num_layers")
    words = (argument(facts, f"recompute_{name}") for name in ("granularity", "method", "num_layers"))
    recomputed = recomputed_layers(*words, layers)
    forward, step_ms, where = _forward_ms(facts)
    cost = forward * recomputed / layers
    if cost < MATTERS * step_ms or any(one.oom is not None for one in facts.snapshots):
        return None
    text = (
        f"{recomputed} of {layers} layers are recomputed; without that a step would hold at most {size(needed)}, and "
        f"there are {size(room)}"
    )
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, "run.json"), Evidence(f"forward takes {in_ms(forward)}, and is run twice", where)),
        advice="leave out --recompute-granularity full",
        flags=("--recompute-granularity selective",),
        gain_ms=cost,
        certain=False,
    )


def _room(facts: Facts) -> float | None:
    """Bytes for one rank: of its GPU, or its share of what the machine had free at the start."""
    if facts.plan.get("device") != "cpu":
        return device_bytes(facts)
    predicted = facts.run.record.get("prediction")
    room = whole(predicted.get("room_bytes")) if isinstance(predicted, dict) else None
    return room / (whole(part(facts, "world", "local_size")) or 1) if room else None


def _forward_ms(facts: Facts) -> tuple[float, float, str]:
    """(forward, the step, where from): of the trace, else the run's own clock."""
    one = facts.critical
    traced = [phase.device_ms for phase in one.time.phases if phase.name == FORWARD] if one is not None else []
    if traced:
        return traced[0], one.time.step_ms, f"rank {one.time.rank}"
    run = facts.run
    known = [ms for ms, plain in zip(run.phases_ms.get(FORWARD, ()), run.ordinary) if plain and not math.isnan(ms)]
    return (median(known) if known else 0.0), run.steady_step_ms or math.inf, "steps.jsonl"
