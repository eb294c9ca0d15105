"""Elementwise kernels that a compiler would join.

Meaning: bias, activation, dropout, residual and scaling each read a tensor from memory and write one back, at one or
    two operations per number: memory is the limit, not arithmetic, so that half precision alone does not halve them.
Measured: device time of elementwise kernels outside of compiled regions, per steady step.
Cost: up to that time. Joined, a chain of them costs one read and one write.
Do: compile the layers; use fused operators (fused bias + activation, fused dropout + residual).
Flags: --torch-compile here; in Megatron-LM its fusions are on unless a --no-...-fusion flag turns them off.
False alarm: a model whose own work is elementwise.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.run_settings import compiles
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "unfused-elementwise", "elementwise kernels one by one"
TOO_MUCH = 0.15  # of the step: below, compiling saves less than a run's noise against what it costs at the start
MAX_SHOWN = 3


def find_on_gpu(facts: Facts, one: RankFacts) -> Finding | None:
    cost = one.kernels.roles.get(Role.ELEMENTWISE, 0.0)
    if compiles(facts):
        return None
    rows = [row for row in one.kernels.rows if row.role is Role.ELEMENTWISE]
    shown = (
        Evidence(f"{row.short}: {in_ms(row.ms)}, {row.per_step:,.3g} per step", row.phase) for row in rows[:MAX_SHOWN]
    )
    text = f"{sum(row.per_step for row in rows):,.0f} elementwise kernels take {of_step(cost, one)}"
    advice = "compile the layers, so that chains of elementwise operators become one kernel"
    return find_lost_time(one, cost, text, advice, *shown, flags=("--torch-compile",), certain=False, at_least=TOO_MUCH)
