"""What each rank says of the steps since the last console line, put side by side."""

import itertools
import math
from dataclasses import dataclass, field
from statistics import fmean, median

import torch
import torch.distributed as dist

from megatron_lite.phases import Phase, StepTime

PHASES = tuple(phase.value for phase in Phase)
CORES = ("cpu_ms", "core_wait_ms", "involuntary_switches")
# a rank's medians over steps, beside its phases': by name, what of a StepTime, times what
MEDIANS = {
    "step_ms": ("training_seconds", 1000),
    "gpu_step_ms": ("gpu_seconds", 1000),
    "host_memory_bytes": ("host_bytes", 1),
    "cpu_ms": ("cpu_seconds", 1000),
    "core_wait_ms": ("core_wait_seconds", 1000),
    "involuntary_switches": ("involuntary_switches", 1),
}
OWN = ("steps", "own_backward_ms", "peak_memory_bytes", *MEDIANS)
OF_PHASE = ("mean_ms", "host_ms", "gpu_ms")
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
    rows = [_describe_own(ordinary(times))]
    if ranks > 1:
        mine = torch.tensor(rows[0], dtype=torch.float64, device=device)
        of_ranks = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(of_ranks, mine)
        rows = torch.stack(of_ranks).tolist()
    columns = [list(column) for column in zip(*rows)]
    own = dict(zip(OWN, columns))
    phases: dict[str, dict[str, list[float]]] = {what: {} for what in OF_PHASE}
    for at, (name, what) in enumerate(itertools.product(PHASES, OF_PHASE), start=len(OWN)):
        if not all(map(math.isnan, columns[at])):
            phases[what][name] = columns[at]
    cores = {name: own.pop(name) for name in CORES}
    steps = [t.step for t in times] or [0]
    return RankFigures(started_at + min(steps), started_at + max(steps), **own, **phases, cores=cores)


def ordinary(times: list[StepTime]) -> list[StepTime]:
    """Without what profiles and compilation slowed down; all, if there are no others."""
    return [t for t in times if not t.disturbed] or times


def _describe_own(times: list[StepTime]) -> list[float]:
    """This rank's numbers: OWN, then OF_PHASE of each phase; NaN for what it has not."""

    def take_median(values) -> float:
        known = [value for value in values if value is not None]
        return float(median(known)) if known else NONE

    arrived = [t for t in times if t.gpu_reduce_wait is not None] or times  # on a GPU, one clock for all
    own = {
        "steps": float(len(times)),
        "own_backward_ms": take_median(t.own_backward and 1000 * t.own_backward for t in arrived),
        "peak_memory_bytes": max((float(t.peak_bytes) for t in times if t.peak_bytes is not None), default=NONE),
    }
    for name, (field_name, factor) in MEDIANS.items():
        values = [getattr(t, field_name) for t in times]
        own[name] = take_median(None if value is None else factor * value for value in values)
    row = [own[name] for name in OWN]
    for name in PHASES:
        host = [1000 * t.phases[name] for t in times if name in t.phases]
        gpu = [1000 * t.gpu_phases[name] for t in times if name in t.gpu_phases]
        both = [1000 * t.gpu_phases.get(name, t.phases.get(name, 0.0)) for t in times]
        row += [fmean(both) if host else NONE, take_median(host), take_median(gpu)]
    return row


def _plain(values: list[float], digits: int = 3) -> list[float | int | None] | None:
    """JSON has no NaN; None if there is nothing else."""
    if all(map(math.isnan, values)):
        return None
    return [None if math.isnan(v) else round(v, digits) if digits else round(v) for v in values]
