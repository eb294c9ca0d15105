"""Results of `megatron-lite fit`: the memory of a script, the GPUs it fits into, what one change would give."""

import dataclasses
from dataclasses import dataclass

from megatron_lite.formats.fit_record import ChangeName, FitRecord
from megatron_lite.formats.hardware import Processor
from megatron_lite.planner.what_if import MARGIN


@dataclass(frozen=True)
class GpuRoom:
    """Whether a script fits into one GPU."""

    processor: Processor
    peak_bytes: int  # that torch's allocator takes of the GPU

    @property
    def free_bytes(self) -> int:
        """Memory that stays free at the peak; below 0, the memory that is missing."""
        return self.processor.memory_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0

    @property
    def is_tight(self) -> bool:
        """Whether it fits, and leaves less than CUDA, NCCL and the allocator may need."""
        return self.fits and self.free_bytes < MARGIN * self.processor.memory_bytes


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that was walked and fits, with MARGIN of the memory left."""

    size: int
    peak_bytes: int


@dataclass(frozen=True)
class WalkedChange:
    """The same script with one change."""

    name: ChangeName
    peak_bytes: int


@dataclass(frozen=True)
class FitReport:
    """The memory of a script on GPUs that were not there."""

    command: str
    record: FitRecord
    rooms: tuple[GpuRoom, ...]  # () for a walk as on the CPU
    largest: LargestBatch | None  # None: not asked for, or see why_no_batch
    why_no_batch: str
    changes: tuple[WalkedChange, ...]  # those that hold less, the least first
    seconds: float
    ranks: int = 1  # of the job
    # bytes that the allocator takes of the GPU, by rank, for those that were walked; {}: of one rank there is no other
    rank_peaks: dict[int, int] = dataclasses.field(default_factory=dict)
