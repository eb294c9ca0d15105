"""Where all steps of a run go, by phase, beside the few steps that a trace shows."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Flags, Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.phases import Phase

OTHER_TIME = "other"  # of a step that is in no phase
NO_CORE = "no core"
ORDER = (*map(str, Phase), OTHER_TIME)
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
    """Measure the phases of typical steps beside the profiled ones; None where no typical step has phases."""
    host_ms = {name: ms for name, ms in run.phases_ms.items() if name not in NOT_OF_A_STEP}
    if not run.ordinary.any() or not host_ms:
        return None
    in_phases_ms = np.sum(list(host_ms.values()), axis=0)
    host_ms[OTHER_TIME] = np.maximum(run.training_ms - in_phases_ms, 0.0)
    rows = [_build_row(run, name, host_ms[name]) for name in sorted(host_ms, key=_find_place)]
    # what a thread waits between two steps is no part of either
    waits_ms = np.minimum(run.core_wait_ms, run.training_ms)
    rows.append(_build_row(run, NO_CORE, waits_ms))
    return EveryStep(
        steps=int(run.ordinary.sum()),
        profiled_steps=int(run.profiled.sum()),
        step_ms=_compute_median(run.training_ms, run.ordinary) or 0.0,
        profiled_step_ms=_compute_median(run.training_ms, run.profiled),
        rows=tuple(row for row in rows if row is not None),
    )


def _find_place(name: str) -> int:
    """Where a phase stands in a step; the trainer's own phases first."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _build_row(run: Run, name: str, host_ms: Numbers) -> EveryStepRow | None:
    """The row of a phase; None where no typical step has it."""
    ms = _compute_median(host_ms, run.ordinary)
    if ms is None:
        return None
    gpu_ms = run.gpu_phases_ms.get(name)
    return EveryStepRow(
        name=name,
        ms=ms,
        profiled_ms=_compute_median(host_ms, run.profiled),
        gpu_ms=_compute_median(gpu_ms, run.ordinary),
        profiled_gpu_ms=_compute_median(gpu_ms, run.profiled),
    )


def _compute_median(values: Numbers | None, chosen: Flags) -> float | None:
    """The median of the chosen steps that have a value; None without any."""
    if values is None:
        return None
    known = values[chosen & ~np.isnan(values)]
    return float(np.median(known)) if len(known) else None
