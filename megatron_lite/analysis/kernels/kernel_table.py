"""All kernels of a rank, one row each: time, role, tensor cores, who launched them."""

import numpy as np

from megatron_lite.analysis.kernels.figures import KernelRow, Role
from megatron_lite.analysis.kernels.kernel_names import KernelName, short_name, taken_apart
from megatron_lite.analysis.kernels.roles import role_of_operator
from megatron_lite.analysis.kernels.selection import Selection, by_weight, heaviest


def kernel_rows(chosen: Selection, known: dict[str, KernelName]) -> tuple[KernelRow, ...]:
    """Most time first. `known` takes up every name that was taken apart."""
    trace, placing, rows = chosen.trace, chosen.placing, chosen.device
    group, weights, size = trace.events.name[rows], chosen.ms[rows], len(trace.names)
    ms, calls = np.bincount(group, weights, size), np.bincount(group, minlength=size)
    phases = heaviest(group, placing.phase[rows].astype(np.int64), weights, size)
    operator = placing.operator[rows]
    launchers = heaviest(group, np.where(operator >= 0, trace.events.name[operator], -1), weights, size)
    total = ms.sum()
    table = []
    for at in by_weight(ms, calls):
        name = trace.names[at]
        launcher = trace.names[launchers[at]] if launchers[at] >= 0 else ""
        known[name] = kernel = taken_apart(name)
        table.append(
            KernelRow(
                name=name,
                short=short_name(name),
                role=_role(kernel, launcher),
                phase=placing.phases[phases[at]] if phases[at] >= 0 else "",
                operator=launcher,
                per_step=float(calls[at] / chosen.steps),
                ms=float(ms[at]),
                share=float(ms[at] / total) if total else 0.0,
                tensor_cores=kernel.tensor_cores,
                precision=kernel.precision,
            )
        )
    return tuple(table)


def _role(kernel: KernelName, launcher: str) -> Role:
    """Where the kernel's name tells nothing, the operator that launched it may."""
    return role_of_operator(launcher) if kernel.role is Role.OTHER and launcher else kernel.role
