"""What one rank spends on each purpose, step by step: device work by the operator that launched it and the phase, on a CPU
the operators' own time."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.facts import RankFacts
from megatron_lite.analysis.kernels.kernel_names import short_name
from megatron_lite.analysis.kernels.operator_table import own_ms
from megatron_lite.analysis.kernels.roles import role_of_kernel, role_of_operator
from megatron_lite.analysis.kernels.selection import Selection

NAMES_KEPT = 4  # kernels of one purpose, most time first


@dataclass(frozen=True)
class Work:
    """One purpose."""

    role: str
    ms: np.ndarray  # float [S], of each steady step
    per_step: float
    names: tuple[str, ...]  # kernels, most time first; () on a CPU, where the operator is all


@dataclass(frozen=True)
class _Timed:
    """m events that count, of S steady steps."""

    rows: np.ndarray  # of the trace
    ms: np.ndarray  # float [m]
    step: np.ndarray  # int [m], 0 to S - 1
    steps: int

    def table(self, group: np.ndarray, size: int) -> np.ndarray:
        """ms [size, S]"""
        table = np.zeros((size, self.steps))
        np.add.at(table, (group, self.step), self.ms)
        return table


def _timed(one: RankFacts) -> _Timed | None:
    chosen = Selection(one.trace, one.placing)
    if not chosen.steps:
        return None
    rows = chosen.device if one.time.on_gpu else np.concatenate([chosen.operators, chosen.spans])
    ms = (chosen.ms if one.time.on_gpu else own_ms(chosen))[rows] * chosen.steps
    order = np.cumsum([step.steady for step in one.placing.steps]) - 1
    return _Timed(rows, ms, order[one.placing.step[rows]], chosen.steps)


def work_of(one: RankFacts) -> dict[tuple[str, str], Work]:
    """By (operator, phase); device work without an operator goes by its own name."""
    timed = _timed(one)
    if timed is None:
        return {}
    trace, placing, name, on_gpu = one.trace, one.placing, one.trace.events.name, one.time.on_gpu
    operator = placing.operator[timed.rows] if on_gpu else timed.rows
    purpose = np.where(operator >= 0, name[operator], name[timed.rows]).astype(np.int64)
    phases = len(placing.phases) + 1
    keys, group = np.unique(purpose * phases + placing.phase[timed.rows] + 1, return_inverse=True)
    table, calls = timed.table(group, len(keys)), np.bincount(group, minlength=len(keys)) / timed.steps
    names = _names(name[timed.rows], group, timed.ms, len(keys))
    return {
        (_bare(trace.names[key // phases]), placing.phases[key % phases - 1] if key % phases else ""): _work(
            trace.names, names[at], table[at], float(calls[at]), on_gpu
        )
        for at, key in enumerate(keys.tolist())
    }


def roles_by_step(one: RankFacts) -> dict[str, np.ndarray]:
    """ms of each steady step by role, as the rank's kernel figures assign it."""
    timed = _timed(one)
    if timed is None:
        return {}
    role_of = {row.name: str(row.role) for row in (one.kernels.rows if one.time.on_gpu else one.kernels.operators)}
    names, group = np.unique(one.trace.events.name[timed.rows], return_inverse=True)
    sums: dict[str, np.ndarray] = {}
    for name, ms in zip(names.tolist(), timed.table(group, len(names))):
        role = role_of.get(one.trace.names[name], "")
        sums[role] = sums.get(role, 0.0) + ms
    return sums


def _names(name: np.ndarray, group: np.ndarray, ms: np.ndarray, size: int) -> list[list[int]]:
    """Of each group its names, most time first."""
    pairs, where = np.unique(np.stack([group, name.astype(np.int64)]), axis=1, return_inverse=True)
    sums = np.bincount(where.ravel(), ms, pairs.shape[1])
    found: list[list[int]] = [[] for _ in range(size)]
    for at in np.argsort(-sums, kind="stable").tolist():
        found[pairs[0, at]].append(int(pairs[1, at]))
    return found


def _work(all_names: tuple[str, ...], names: list[int], ms: np.ndarray, per_step: float, on_gpu: bool) -> Work:
    role = (role_of_kernel if on_gpu else role_of_operator)(all_names[names[0]])
    kernels = dict.fromkeys(short_name(all_names[name]) for name in names[:NAMES_KEPT]) if on_gpu else ()
    return Work(str(role), ms, per_step, tuple(kernels))


def _bare(name: str) -> str:
    """'autograd::engine::evaluate_function: X' and long C++ names as people call them."""
    return name if name.startswith("aten::") else short_name(name)
