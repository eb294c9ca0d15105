"""Use of the machine's cores by a rank, by whoever recorded it: a line of steps.jsonl, or the header of a trace."""

from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_lite.formats.trace_header import RecordedCores
from megatron_lite.thresholds import SWITCHES_PER_CPU_SECOND, WITHOUT_CORE

ORDINARY = "ordinary"
PROFILED = "profiled"


@dataclass(frozen=True)
class CoreUse:
    """Means per step over some steps of one rank; None for what the system did not tell."""

    steps: int
    step_ms: float
    cpu_ms: float | None  # of all threads of the process
    wait_ms: float | None  # the training thread was ready and had no core
    switches: float | None  # involuntary, of all threads

    @property
    def wait_share(self) -> float | None:
        """Part of a step in which the training thread was ready and had no core."""
        return None if self.wait_ms is None else self.wait_ms / self.step_ms

    @property
    def is_known(self) -> bool:
        """Whether the figures tell if the rank had its cores."""
        return self.wait_ms is not None or (self.switches is not None and bool(self.cpu_ms))

    @property
    def is_short(self) -> bool:
        """Whether the training thread lacks a core for a notable part of the time.

        Where only switches are counted, it may be any thread.
        """
        if self.wait_share is not None:
            return self.wait_share >= WITHOUT_CORE
        if self.switches is None or not self.cpu_ms:
            return False
        return 1000 * self.switches / self.cpu_ms >= SWITCHES_PER_CPU_SECOND


@dataclass(frozen=True)
class CoreShortage:
    """A rank that was ready to compute and had no core."""

    rank: int
    kind: str  # of the steps: "ordinary" or "profiled"
    step_ms: float
    wait_ms: float | None  # per step; None where the system counts involuntary switches only
    cpu_ms: float | None
    switches: float | None
    source: str = ""  # the trace whose header tells it; "" for steps.jsonl

    @property
    def share(self) -> float | None:
        """Part of a step without a core; None for unknown."""
        return None if self.wait_ms is None else self.wait_ms / self.step_ms


def read_core_use(written: Any) -> CoreUse | None:
    """Read what the header of a trace says of its recorded steps; None for nothing, or for what makes no sense."""
    try:
        told = msgspec.convert(written, RecordedCores)
    except msgspec.ValidationError:
        return None
    return CoreUse(told.steps, told.ms, told.cpu_ms, told.core_wait_ms, told.involuntary_switches)
