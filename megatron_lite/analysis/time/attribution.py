"""Which step, phase and operator each event of a trace belongs to. Device work belongs where its launch call stands."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.time.time_results import Step


@dataclass(frozen=True)
class Placing:
    """n = number of events of the trace."""

    steps: tuple[Step, ...]
    step: np.ndarray  # int32 [n], index into steps; -1: outside all
    phases: tuple[str, ...]
    phase: np.ndarray  # int16 [n], index into phases; -1: none
    operator: np.ndarray  # int64 [n], row of the innermost OP around the event (or around its launch); -1: none;
    # an OP's own is its parent
    main_thread: int = -1  # index into Trace.threads of the one that drives the steps; -1: no host event at all
    notes: tuple[str, ...] = ()  # named gaps: how steps were found if not by the profiler's marks
