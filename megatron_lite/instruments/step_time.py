"""The times and memory of one step, as the timeline measures them, and as steps.jsonl holds them."""

from dataclasses import dataclass, field

from megatron_lite.formats.step_records import StepRecord
from megatron_lite.phases import NOT_TRAINING, Phase


@dataclass
class StepTime:
    """Times and memory of one step. Phases that happen several times in a step (micro-batches) are added up."""

    step: int
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    profiled: bool = False
    beside_profile: bool = False  # not recorded, but slowed down by what gets ready or writes
    compiling: bool = False  # something was compiled in it
    compile_seconds: float = 0.0  # of it; launching what was compiled for the first time may take longer besides
    gpu_seconds: float | None = None  # None without a GPU, and where the step's end was not seen on it
    gpu_phases: dict[str, float] = field(default_factory=dict)
    reduce_wait: float | None = None  # part of backward: own gradients computed, waiting for their reduction over ranks
    gpu_reduce_wait: float | None = None
    host_bytes: int | None = None  # of memory, at the step's end
    peak_bytes: int | None = None  # of the GPU's memory, within the step
    cpu_seconds: float | None = None  # of all threads of the process
    involuntary_switches: int | None = None  # of all threads: something else got the core
    core_wait_seconds: float | None = None  # the training thread was ready to run and had no core; Linux

    @property
    def own_backward(self) -> float | None:
        """Seconds of backward without waiting for other ranks, on the GPU where there is one; None if not known."""
        if self.gpu_reduce_wait is not None:
            return self.gpu_phases[Phase.BACKWARD.value] - self.gpu_reduce_wait
        return None if self.reduce_wait is None else self.phases[Phase.BACKWARD.value] - self.reduce_wait

    @property
    def disturbed(self) -> bool:
        """A profiler or compilation slowed the step down, so that averages leave it out."""
        return self.profiled or self.beside_profile or self.compiling

    @property
    def training_seconds(self) -> float:
        """Seconds without evaluation and saving, as Megatron's elapsed time per iteration counts."""
        return self.seconds - sum(self.phases.get(name, 0.0) for name in NOT_TRAINING)

    def build_record(self, iteration: int) -> StepRecord:
        """The step's line of steps.jsonl, without what the update says of it.

        Args:
            iteration: the step's number in the whole training, from 1.
        """
        on_gpu = self.gpu_seconds is not None
        return StepRecord(
            iteration=iteration,
            step=self.step,
            ms=round(1000 * self.seconds, 3),
            phases_ms={name: round(1000 * seconds, 3) for name, seconds in self.phases.items()},
            gpu_ms=_to_ms(self.gpu_seconds),
            gpu_phases_ms={name: round(1000 * seconds, 3) for name, seconds in self.gpu_phases.items() if on_gpu},
            reduce_wait_ms=_to_ms(self.reduce_wait),
            gpu_reduce_wait_ms=_to_ms(self.gpu_reduce_wait),
            cpu_ms=_to_ms(self.cpu_seconds),
            core_wait_ms=_to_ms(self.core_wait_seconds),
            involuntary_switches=self.involuntary_switches,
            host_memory_bytes=self.host_bytes,
            peak_memory_bytes=self.peak_bytes,
            compile_ms=_to_ms(self.compile_seconds) if self.compiling else None,
            profiled=self.profiled,
            beside_profile=self.beside_profile,
            compiling=self.compiling,
        )


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
