"""How fast a training step can be at best: what a named GPU's arithmetic, memory and link allow.

A bound, not a forecast. Each part takes at least the time in which the hardware could do it at its peak, and parts run
one after another, as kernels of one stream do. Not in it: launches and the host, the data loader, clocks other than the
boost clock, products that miss the peak (the best reach four fifths of it), logging, evaluation and checkpoints.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.all_reduce import all_num_bytes, last_num_bytes, route_of
from megatron_lite.estimate.flops import step_flops
from megatron_lite.estimate.hardware import Processor, peak_tflops_of
from megatron_lite.estimate.prediction import TimePrediction, TimeRow
from megatron_lite.estimate.step_work import COMPUTE, LINK, MEMORY, Part, parts_of, sequences_of
from megatron_lite.units import count


def predict_time(plan: Plan, processor: Processor) -> TimePrediction:
    """The shortest step of one rank of `plan` on `processor`, at the final global batch.

    A row whose limit the table of processors does not hold is missing, and a note says so; peak_tflops is then 0.
    """
    plan = replace(plan, device="cuda")  # whatever the machine that plans
    peak = peak_tflops_of(processor, plan.precision)
    rates = {COMPUTE: (peak or 0.0) * 1e12, MEMORY: (processor.memory_gb_s or 0.0) * 1e9}
    parts = parts_of(plan)
    rows = [_row(part, rates[part.bound]) for part in parts if rates[part.bound]]
    rows += _link_row(plan, processor, _backward_ms(plan, parts, rates))
    sequences = sequences_of(plan)
    return TimePrediction(
        gpu=processor.name,
        rows=tuple(rows),
        tokens=plan.batch.final * plan.shape.seq_length,
        flops_causal=step_flops(plan.shape, sequences, causal=True),
        flops_full=step_flops(plan.shape, sequences, causal=False),
        peak_tflops=peak or 0.0,
        notes=tuple(_notes(plan, processor, parts, rates)),
    )


def _row(part: Part, rate: float) -> TimeRow:
    limit = f"{rate / 1e12:g} TFLOP/s" if part.bound == COMPUTE else f"{rate / 1e9:,.0f} GB/s"
    return TimeRow(part.name, 1000 * part.amount / rate, part.bound, f"{part.formula} at {limit}")


def _backward_ms(plan: Plan, parts: list[Part], rates: dict[str, float]) -> float:
    """Of one micro-batch, at best; infinite where a rate is not known: then there is no telling what backward hides."""
    if not all(rates.values()):
        return float("inf")
    step_ms = sum(1000 * part.amount * part.in_backward / rates[part.bound] for part in parts)
    return step_ms * plan.samples_per_pass / plan.batch.final


def _link_row(plan: Plan, processor: Processor, backward_ms: float) -> list[TimeRow]:
    """What the last micro-batch's backward, `backward_ms` long at best, cannot hide of the all-reduce."""
    route = route_of(plan, processor)
    if route is None:
        return []
    whole, last = route.ms(all_num_bytes(plan)), route.ms(last_num_bytes(plan))
    in_all = f"{all_num_bytes(plan) / 1e9:.2f} GB of gradients, {route.words}: {whole:.2f} ms"
    if last >= whole - backward_ms:
        why = f"the word embedding's {last_num_bytes(plan) / 1e6:,.0f} MB are complete only when backward ends"
    else:
        why = f"backward of one micro-batch takes {backward_ms:.2f} ms at best"
    return [TimeRow("all-reduce that nothing hides", max(last, whole - backward_ms), LINK, f"{in_all}; {why}")]


def _notes(plan: Plan, processor: Processor, parts: list[Part], rates: dict[str, float]) -> Iterator[str]:
    missing = {bound: [part.name for part in parts if part.bound == bound] for bound, rate in rates.items() if not rate}
    if missing.get(COMPUTE):
        instead = " (--fp16 has one)" if plan.precision == "bf16" and not processor.bf16 else ""
        parts_left_out = ", ".join(missing[COMPUTE])
        yield f"{processor.name}: no known peak in {plan.precision}{instead}; not in the bound: {parts_left_out}"
    if missing.get(MEMORY):
        yield f"{processor.name}: no known memory bandwidth; not in the bound: {', '.join(missing[MEMORY])}"
    if plan.world.local_size > 1 and route_of(plan, processor) is None:
        yield f"{processor.name}: no known speed between GPUs; not in the bound: the gradients' all-reduce"
    if plan.world.size > plan.world.local_size:
        yield (
            f"{plan.world.size // plan.world.local_size} nodes: the network between them is not known; "
            "not in the bound: the gradients' way over it"
        )
    if plan.batch.start and plan.batch.start != plan.batch.final:
        yield f"--rampup-batch-size: the bound is for the final global batch of {count(plan.batch.final)}"
