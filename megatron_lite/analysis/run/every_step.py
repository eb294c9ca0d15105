"""Where all steps of a run go, by phase, beside the few steps that a trace shows."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Flags, Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.phases import Phase

OTHER = "other"  # of a step that is in no phase
NO_CORE = "no core"
ORDER = (*map(str, Phase), OTHER)
NOT_OF_A_STEP = (Phase.EVAL.value, Phase.SAVE.value)


@dataclass(frozen=True)
class EveryStepRow:
    """Medians per step of one phase on the host, over all typical steps and over the profiled ones."""

    name: str  # a phase; "other": in none; "no core": within the others, the training thread was ready and had no core
    ms: float
    profiled_ms: float | None  # None without a profiled window
    gpu_ms: float | None  # as the GPU passed through the phase; None where it was not timed
    profiled_gpu_ms: float | None


@dataclass(frozen=True)
class EveryStep:
    """A run's steps outside and inside of the profiled window.

    Medians of parts need not add up to the median of the whole.
    """

    steps: int  # ordinary ones
    profiled_steps: int
    step_ms: float
    profiled_step_ms: float | None
    rows: tuple[EveryStepRow, ...]  # in the order of a step, "no core" last


def measure_every_step(run: Run) -> EveryStep | None:
    """None where no typical step has phases."""
    ordinary, profiled = run.ordinary, run.profiled
    names = [name for name in run.phases_ms if name not in NOT_OF_A_STEP]
    if not ordinary.any() or not names:
        return None
    host = {name: run.phases_ms[name] for name in names}
    host[OTHER] = np.maximum(run.training_ms - np.sum(list(host.values()), axis=0), 0.0)
    rows = []
    for name in sorted(host, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
        gpu = _get_gpu(run.gpu_phases_ms, name)
        gpu_ms, profiled_gpu_ms = _compute_median(gpu, ordinary), _compute_median(gpu, profiled)
        ms = _compute_median(host[name], ordinary)
        if ms is not None:
            rows.append(EveryStepRow(name, ms, _compute_median(host[name], profiled), gpu_ms, profiled_gpu_ms))
    # what a thread waits between two steps is no part of either
    waits_ms = np.minimum(run.core_wait_ms, run.training_ms)
    waited_ms = _compute_median(waits_ms, ordinary)
    if waited_ms is not None:
        rows.append(EveryStepRow(NO_CORE, waited_ms, _compute_median(waits_ms, profiled), None, None))
    step_ms = _compute_median(run.training_ms, ordinary) or 0.0
    profiled_step_ms = _compute_median(run.training_ms, profiled)
    return EveryStep(int(ordinary.sum()), int(profiled.sum()), step_ms, profiled_step_ms, tuple(rows))


def _get_gpu(phases_ms: Mapping[str, Numbers], name: str) -> Numbers:
    return phases_ms[name] if name in phases_ms else np.array([])


def _compute_median(values: Numbers, chosen: Flags) -> float | None:
    """Of the chosen steps that have a value; None of none."""
    if not len(values):
        return None
    known = values[chosen & ~np.isnan(values)]
    return float(np.median(known)) if len(known) else None
