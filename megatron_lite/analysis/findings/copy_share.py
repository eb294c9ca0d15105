"""A large part of the work is copying, casting and reordering tensors.

Meaning: .contiguous(), .to(dtype), cat, clone and their kin read and write memory and compute
    nothing. Autocast casts weights in every forward; a transposed view that the next operator
    cannot read is copied first.
Measured: device time (without a GPU: operators' own time) of kernels whose role is copying or
    casting, by the operator that launched them.
Cost: up to that time; what a layout truly needs stays.
Do: keep weights in the precision they compute in instead of autocast; fix the layout once, before
    the hot path; write into the result (out=) instead of cat; compile, which folds casts into
    their neighbours.
Flags: --bf16 or --fp16 of this trainer hold 16-bit weights and no autocast; --torch-compile.
False alarm: fp32 gradients of 16-bit weights, which are cast by design; without a GPU, copies in
    backward and in the optimizer's step are not counted for that reason.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import in_ms, of_step, share, where
from megatron_lite.analysis.kernels.kernel_results import OperatorRow, Role
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.phases import Phase

CODE = "copy-share"
TITLE = "copying, casting and reordering tensors"
TOO_MUCH = 0.10  # of the step: a transformer with fused kernels and 16-bit weights stays at a few percent
TOO_MUCH_ON_CPU = 0.25  # there the copy of a small tensor costs as much as any small operator
BY_DESIGN = {Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value}  # 16-bit gradients and weights become fp32 and back
MAX_SHOWN = 3


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None:
        return None
    cost = one.kernels.roles.get(Role.CAST_COPY, 0.0) if one.time.on_gpu else sum(row.self_ms for row in _on_cpu(one))
    if share(cost, one) < (TOO_MUCH if one.time.on_gpu else TOO_MUCH_ON_CPU):
        return None
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(f"copies and casts take {of_step(cost, one)}", where(one)), *_operators(one)),
        advice="16-bit weights instead of autocast, one layout from the start, torch.compile to fold casts away",
        flags=("--torch-compile",),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def _on_cpu(one: RankFacts) -> list[OperatorRow]:
    return [row for row in one.kernels.operators if row.role is Role.CAST_COPY and row.phase not in BY_DESIGN]


def _operators(one: RankFacts) -> list[Evidence]:
    rows = [
        (row.ms, f"{row.short} under {row.operator or 'no operator'}", row.phase, row.per_step)
        for row in one.kernels.rows
        if row.role is Role.CAST_COPY
    ]
    rows = rows or [(row.self_ms, row.name, row.phase, row.per_step) for row in _on_cpu(one)]
    return [
        Evidence(f"{name}: {in_ms(ms)}, {per_step:,.3g} per step", phase)
        for ms, name, phase, per_step in sorted(rows, reverse=True)[:MAX_SHOWN]
    ]
