"""All operators of a rank, one row each: the host's own time, and the device work that they launched."""

import numpy as np

from megatron_lite.analysis.kernels.kernel_results import OperatorRow
from megatron_lite.analysis.kernels.roles import role_of_operator
from megatron_lite.analysis.kernels.selection import Selection, by_weight, heaviest

DEEPEST = 64  # operators within operators; real traces have about ten


def operator_rows(chosen: Selection, on_gpu: bool) -> tuple[OperatorRow, ...]:
    """Most time first: on the device where there is one, else on the host, where collectives' spans are rows too."""
    trace, placing = chosen.trace, chosen.placing
    own = own_ms(chosen)
    device = _device_ms(chosen) if on_gpu else np.zeros(len(own))
    rows = chosen.operators if on_gpu else np.concatenate([chosen.operators, chosen.spans])
    group, size, weights = trace.events.name[rows], len(trace.names), (device if on_gpu else own)[rows]
    host, launched = np.bincount(group, own[rows], size), np.bincount(group, device[rows], size)
    calls = np.bincount(group, minlength=size)
    phases = heaviest(group, placing.phase[rows].astype(np.int64), weights, size)
    return tuple(
        OperatorRow(
            name=trace.names[at],
            role=role_of_operator(trace.names[at]),
            per_step=float(calls[at] / chosen.steps),
            self_ms=float(host[at]),
            device_ms=float(launched[at]),
            phase=placing.phases[phases[at]] if phases[at] >= 0 else "",
        )
        for at in by_weight(launched, calls, host)
    )


def own_ms(chosen: Selection) -> np.ndarray:
    """float [n]: each event's time without the operators inside it, per steady step."""
    rows = chosen.operators
    parents = chosen.placing.operator[rows]
    inner = rows[parents >= 0]
    inside = np.bincount(parents[parents >= 0], chosen.ms[inner], len(chosen.trace.events))
    return np.maximum(chosen.ms - inside, 0.0)


def _device_ms(chosen: Selection) -> np.ndarray:
    """float [n]: device time of what an operator launched, itself or through operators inside it, per steady step.

    An operator inside another of the same name adds to the inner one only, so that a name's sum counts nothing twice.
    """
    names, operator = chosen.trace.events.name, chosen.placing.operator
    sums, rows, ms = np.zeros(len(names)), operator[chosen.device], chosen.ms[chosen.device]
    last = np.full(len(rows), -1)
    for _ in range(DEEPEST):
        here = rows >= 0
        if not here.any():
            break
        rows, ms, last = rows[here], ms[here], last[here]
        fresh = names[rows] != last
        sums += np.bincount(rows[fresh], ms[fresh], len(sums))
        rows, last = operator[rows], names[rows]
    return sums
