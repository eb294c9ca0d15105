"""Activations are recomputed although memory is plentiful.

Meaning: full recomputation runs every layer's forward once more in backward, to keep only its input. That is worth it
    where memory decides the micro-batch, and a loss everywhere else.
Measured: the run's plan; the sum of all that a step would hold without recomputation, by formula, against the memory
    that the run found at its start (of the GPU, or of the machine, shared by its ranks).
Cost: up to the time of forward, by its share of recomputed layers.
Do: leave recomputation out, or a larger micro-batch with it.
Flags: without --recompute-granularity full; selective costs little.
False alarm: a rehearsal of a larger job, or memory that evaluation or a longer batch still needs.
"""

import math

from megatron_lite.analysis.findings.base import MATTERS, Evidence, Finding, in_ms
from megatron_lite.analysis.findings.run_settings import (
    TIGHT,
    argument,
    device_bytes,
    local_ranks,
    measure_ordinary,
    part,
    whole,
)
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase
from megatron_lite.units import size

CODE, TITLE = "needless-recompute", "recomputation though memory is plentiful"
FORWARD = Phase.FORWARD.value


def find(facts: Facts) -> Finding | None:
    run, one = facts.run, facts.critical
    if argument(facts, "recompute_granularity") != "full":
        return None
    room = device_bytes(facts)
    if facts.plan.get("device") == "cpu":  # a rank's share of what the machine had free at the start
        predicted = run.record.get("prediction")
        free = whole(predicted.get("room_bytes")) if isinstance(predicted, dict) else None
        room = free / (local_ranks(facts) or 1) if free else None
    if not room:
        return None
    # late: formulas and flags, for such runs only
    from megatron_lite.analysis.memory.ledger import bytes_without_recomputation
    from megatron_lite.config.shape import recomputed_layers

    needed = bytes_without_recomputation(facts.plan)
    if needed is None or needed > TIGHT * room or any(one.oom is not None for one in facts.snapshots):
        return None
    layers = part(facts, "shape", "num_layers")
    words = (argument(facts, f"recompute_{name}") for name in ("granularity", "method", "num_layers"))
    recomputed = recomputed_layers(*words, layers)
    traced = [phase.device_ms for phase in one.time.phases if phase.name == FORWARD] if one is not None else []
    if traced:
        forward, step_ms, place = traced[0], one.time.step_ms, f"rank {one.time.rank}"
    else:
        forward, step_ms = measure_ordinary(run, run.phases_ms.get(FORWARD, ())) or 0.0, run.steady_step_ms or math.inf
        place = "steps.jsonl"
    cost = forward * recomputed / layers
    if cost < MATTERS * step_ms:
        return None
    without = f"without that a step would hold at most {size(needed)}, and there are {size(room)}"
    advice = "leave out --recompute-granularity full"
    flags = ("--recompute-granularity selective",)
    return Finding(
        cost_ms=cost,
        evidence=(
            Evidence(f"{recomputed} of {layers} layers are recomputed; {without}", "run.json"),
            Evidence(f"forward takes {in_ms(forward)}, and is run twice", place),
        ),
        advice=advice,
        flags=flags,
        gain_ms=cost,
        certain=False,
    )
