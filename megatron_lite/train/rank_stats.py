"""What each rank says of the steps since the last console line, put side by side."""

import math
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
import torch.distributed as dist

from megatron_lite.phases import Phase, StepTime

PHASES = tuple(phase.value for phase in Phase)
CORES = ("cpu_ms", "core_wait_ms", "involuntary_switches")
OWN = (
    "steps",
    "step_ms",
    "gpu_ms",
    "own_backward_ms",
    "host_memory_bytes",
    "peak_memory_bytes",
    *CORES,
)  # of a rank, beside its phases'
OF_PHASE = ("mean", "host", "gpu")
NONE = math.nan


@dataclass(frozen=True)
class RankFigures:
    """An interval's ordinary steps; every list has a number for each rank, NaN for what a rank has not.

    step_ms, host_ms and gpu_ms are medians over steps; mean_ms is over all of them, the GPU's own time where there is one.
    """

    first: int  # iterations
    last: int
    steps: list[float]
    step_ms: list[float]
    gpu_step_ms: list[float]
    own_backward_ms: list[float]  # of backward, without waiting for other ranks
    host_memory_bytes: list[float]
    peak_memory_bytes: list[float]
    mean_ms: dict[str, list[float]]  # by phase, in the order of a step
    host_ms: dict[str, list[float]]
    gpu_ms: dict[str, list[float]]
    cores: dict[str, list[float]] = field(default_factory=dict)  # by the names of CORES

    def own_ms(self, name: str) -> list[float]:
        """A rank's own time of a phase, without waiting for others: the GPU's where it has one, else the host's."""
        if name == Phase.BACKWARD.value:
            return self.own_backward_ms
        return self.gpu_ms.get(name) or self.host_ms[name]

    def record(self) -> dict:
        """For steps.jsonl; see run_folder."""
        named = {
            "iterations": [self.first, self.last],
            "steps": _plain(self.steps, 0),
            "step_ms": _plain(self.step_ms),
            "phases_ms": {name: _plain(ms) for name, ms in self.host_ms.items()},
            "gpu_ms": _plain(self.gpu_step_ms),
            "gpu_phases_ms": {name: _plain(ms) for name, ms in self.gpu_ms.items()},
            "own_backward_ms": _plain(self.own_backward_ms),
            "host_memory_bytes": _plain(self.host_memory_bytes, 0),
            "peak_memory_bytes": _plain(self.peak_memory_bytes, 0),
            **{name: _plain(values) for name, values in self.cores.items()},
        }
        return {name: value for name, value in named.items() if value}


def gather(times: list[StepTime], started_at: int, device: torch.device, ranks: int) -> RankFigures:
    """Collective. `times` are this rank's; `started_at` is the iteration that this run began from.

    Raises nothing for a rank that has no steps to tell of: all its numbers are NaN.
    """
    columns = list(zip(*_of_all_ranks(_row(times), device, ranks)))
    own = dict(zip(OWN, map(list, columns)))
    phases = {what: {} for what in OF_PHASE}
    for i, name in enumerate(PHASES):
        for j, what in enumerate(OF_PHASE):
            values = list(columns[len(OWN) + len(OF_PHASE) * i + j])
            if not all(map(math.isnan, values)):
                phases[what][name] = values
    return RankFigures(
        first=started_at + min((t.step for t in times), default=0),
        last=started_at + max((t.step for t in times), default=0),
        steps=own["steps"],
        step_ms=own["step_ms"],
        gpu_step_ms=own["gpu_ms"],
        own_backward_ms=own["own_backward_ms"],
        host_memory_bytes=own["host_memory_bytes"],
        peak_memory_bytes=own["peak_memory_bytes"],
        mean_ms=phases["mean"],
        host_ms=phases["host"],
        gpu_ms=phases["gpu"],
        cores={name: own[name] for name in CORES},
    )


def _of_all_ranks(row: list[float], device: torch.device, ranks: int) -> list[list[float]]:
    if ranks == 1:
        return [row]
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(rows, mine)
    return torch.stack(rows).tolist()


def ordinary(times: list[StepTime]) -> list[StepTime]:
    """Without what profiles and compilation slowed down; all, if there are no others."""
    return [t for t in times if not t.disturbed] or times


def _row(times: list[StepTime]) -> list[float]:
    times = ordinary(times)
    row = [
        float(len(times)),
        _median([1000 * t.training_seconds for t in times]),
        _median([1000 * t.gpu_seconds for t in times if t.gpu_seconds is not None]),
        _median([1000 * t.own_backward for t in _by_one_clock(times) if t.own_backward is not None]),
        _median([float(t.host_bytes) for t in times if t.host_bytes is not None]),
        max((float(t.peak_bytes) for t in times if t.peak_bytes is not None), default=NONE),
        _median([1000 * t.cpu_seconds for t in times if t.cpu_seconds is not None]),
        _median([1000 * t.core_wait_seconds for t in times if t.core_wait_seconds is not None]),
        _median([float(t.involuntary_switches) for t in times if t.involuntary_switches is not None]),
    ]
    for name in PHASES:
        host = [1000 * t.phases[name] for t in times if name in t.phases]
        gpu = [1000 * t.gpu_phases[name] for t in times if name in t.gpu_phases]
        own = [1000 * t.gpu_phases.get(name, t.phases.get(name, 0.0)) for t in times]
        row += [fmean(own) if host else NONE, _median(host), _median(gpu)]
    return row


def _by_one_clock(times: list[StepTime]) -> list[StepTime]:
    """On a GPU, only steps whose times have arrived from it."""
    return [t for t in times if t.gpu_reduce_wait is not None] or times


def _median(values: list[float]) -> float:
    return median(values) if values else NONE


def _plain(values: list[float], digits: int = 3) -> list[float | int | None] | None:
    """JSON has no NaN; None if there is nothing else."""
    if all(map(math.isnan, values)):
        return None
    return [None if math.isnan(v) else round(v, digits) if digits else round(v) for v in values]
