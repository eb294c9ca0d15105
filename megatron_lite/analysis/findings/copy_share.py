"""A large part of the work is copying, casting and reordering tensors.

Meaning: .contiguous(), .to(dtype), cat, clone and their kin read and write memory and compute nothing. Autocast casts
    weights in every forward; a transposed view that the next operator cannot read is copied first.
Measured: device time (without a GPU: operators' own time) of kernels whose role is copying or casting, by the
    operator that launched them.
Cost: up to that time; what a layout truly needs stays.
Do: keep weights in the precision they compute in instead of autocast; fix the layout once, before the hot path; write
    into the result (out=) instead of cat; compile, which folds casts into their neighbours.
Flags: --bf16 or --fp16 of this trainer hold 16-bit weights and no autocast; --torch-compile.
False alarm: fp32 gradients of 16-bit weights, which are cast by design; without a GPU, copies in backward and in the
    optimizer's step are not counted for that reason.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_time, in_ms, of_step
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.phases import Phase

CODE, TITLE = "copy-share", "copying, casting and reordering tensors"
TOO_MUCH = 0.10  # of the step: a transformer with fused kernels and 16-bit weights stays at a few percent
TOO_MUCH_ON_CPU = 0.25  # there the copy of a small tensor costs as much as any small operator
BY_DESIGN = {Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value}  # 16-bit gradients and weights become fp32 and back
MAX_SHOWN = 3


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    rows = [
        (row.ms, f"{row.short} under {row.operator or 'no operator'}", row.phase, row.per_step)
        for row in one.kernels.rows
        if row.role is Role.CAST_COPY
    ]
    on_host = [
        (row.self_ms, row.name, row.phase, row.per_step)
        for row in one.kernels.operators
        if row.role is Role.CAST_COPY and row.phase not in BY_DESIGN
    ]
    cost = one.kernels.roles.get(Role.CAST_COPY, 0.0) if one.time.on_gpu else sum(row[0] for row in on_host)
    shown = (
        Evidence(f"{name}: {in_ms(ms)}, {number:,.3g} per step", phase)
        for ms, name, phase, number in sorted(rows or on_host, reverse=True)[:MAX_SHOWN]
    )
    text = f"copies and casts take {of_step(cost, one)}"
    advice = "16-bit weights instead of autocast, one layout from the start, torch.compile to fold casts away"
    limit = TOO_MUCH if one.time.on_gpu else TOO_MUCH_ON_CPU
    flags = ("--torch-compile",)
    return find_lost_time(one, cost, text, advice, *shown, flags=flags, certain=False, at_least=limit)
