"""Contents of a run folder: run.json and steps.jsonl (formats/run_record.py and formats/step_records.py).

A number that the folder does not have is NaN among others and None alone; never 0.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Numbers
from megatron_lite.analysis.run.hardware import RanksHardware
from megatron_lite.formats.run_record import PlanRecord, RunRecord, WorldRecord
from megatron_lite.phases import Phase
from megatron_lite.thresholds import rank_without_core

WITHOUT_HARDWARE = RanksHardware()
RECOVERED = 0.5  # of what the window's steps took more: a smaller rest may be noise


class PhasesOfRanks:
    """Figures that have numbers per rank, and for each phase."""

    phases_ms: Mapping[str, Any]
    gpu_phases_ms: Mapping[str, Any]
    own_backward_ms: Any  # without waiting for other ranks

    def own_ms(self, name: str) -> Any:
        """A phase's time on the GPU where it has one, else on the host; of backward without waiting for other ranks,
        where the trainer could take that off. () for a phase that no rank has."""
        found = self.gpu_phases_ms if name in self.gpu_phases_ms else self.phases_ms
        return self.own_backward_ms if name == Phase.BACKWARD else found.get(name, ())


@dataclass(frozen=True)
class RankLines(PhasesOfRanks):
    """Figures of all ranks over typical steps between two console lines: arrays of [line, rank], NaN for unknown."""

    first: NDArray[np.int64]  # [line], iterations
    last: NDArray[np.int64]
    steps: Numbers  # how many were ordinary
    step_ms: Numbers  # medians, without evaluating and saving
    gpu_ms: Numbers
    phases_ms: dict[str, Numbers]
    gpu_phases_ms: dict[str, Numbers]
    own_backward_ms: Numbers
    host_memory_bytes: Numbers
    peak_memory_bytes: Numbers
    cpu_ms: Numbers
    core_wait_ms: Numbers
    involuntary_switches: Numbers

    def take(self, lines: Flags | slice) -> "RankLines":
        """Select some of the lines."""
        taken: dict[str, Any] = {}
        for name, value in vars(self).items():
            taken[name] = {key: of[lines] for key, of in value.items()} if isinstance(value, dict) else value[lines]
        return RankLines(**taken)


@dataclass(frozen=True)
class RankMedians(PhasesOfRanks):
    """Every rank's medians over the run's typical steps; lists have a number per rank, NaN for what it has not."""

    step_ms: tuple[float, ...]
    gpu_ms: tuple[float, ...]
    phases_ms: dict[str, tuple[float, ...]]
    gpu_phases_ms: dict[str, tuple[float, ...]]
    own_backward_ms: tuple[float, ...]  # () if no rank knows it
    host_memory_bytes: Numbers  # [console line, rank], to see growth
    peak_memory_bytes: Numbers
    intervals: RankLines  # the console lines that the medians are of
    cpu_ms: tuple[float, ...]  # of all threads of the rank's process
    core_wait_ms: tuple[float, ...]  # its training thread was ready and had no core
    involuntary_switches: tuple[float, ...]

    @cached_property
    def without_core(self) -> tuple[int, float | None] | None:
        """The rank that waits longest for a core, and ms per step (None: unknown); None where all have their cores."""
        return rank_without_core(self.core_wait_ms, self.involuntary_switches, self.cpu_ms, self.step_ms)


@dataclass(frozen=True)
class CounterGrowth:
    """Memory that grew from each quarter of the typical steps to the next."""

    rank: int | None  # None: the rank that writes
    num_bytes: int  # from the first quarter's median to the last's
    bytes_per_step: float
    at_end: int


class PhaseTimes(Mapping[str, Numbers]):
    """Milliseconds of each step by phase, kept as whole microseconds, as the trainer writes them: in half the room."""

    def __init__(self, microseconds: Mapping[str, NDArray[Any]]):
        self._microseconds = microseconds

    def __getitem__(self, name: str) -> Numbers:
        return self._microseconds[name] / 1000

    def __iter__(self) -> Iterator[str]:
        return iter(self._microseconds)

    def __len__(self) -> int:
        return len(self._microseconds)

    def take(self, steps: slice) -> "PhaseTimes":
        """Select some of the steps."""
        return PhaseTimes({name: values[steps] for name, values in self._microseconds.items()})


@dataclass(frozen=True)
class Steps:
    """The steps of the last start, an entry for each in every array."""

    iterations: NDArray[np.int64]
    step_ms: Numbers  # the whole step on the host, evaluating and saving included
    training_ms: Numbers  # without them
    gpu_ms: Numbers
    phases_ms: Mapping[str, Numbers]  # 0 in a step that had none
    gpu_phases_ms: Mapping[str, Numbers]
    compile_ms: Numbers  # the part of step_ms in which torch.compile compiled
    batch_sizes: Numbers  # samples, all ranks
    consumed_samples: Numbers  # after the step, all ranks, skipped steps included
    next_lrs: Numbers  # learning rate of the step after it
    losses: Numbers
    grad_norms: Numbers
    loss_scale: Numbers
    host_memory_bytes: Numbers
    peak_memory_bytes: Numbers
    cpu_ms: Numbers  # CPU time of all threads of the process
    core_wait_ms: Numbers  # its training thread was ready and had no core
    involuntary_switches: Numbers  # of all threads: something else got the core
    busiest_experts: Numbers  # tokens of the busiest expert over an even share, mean over layers; NaN without experts
    busiest_expert_ranks: Numbers  # the same of the ranks that have some of the experts each
    dropped_shares: Numbers  # of assignments to experts, those that were dropped
    ordinary: Flags  # neither the first nor profiled, beside a profile, compiling, evaluating nor saving
    undisturbed: Flags  # neither the first nor profiled, beside a profile or compiling
    profiled: Flags
    compiling: Flags
    evaluating: Flags
    saving: Flags
    skipped: Flags
    not_finite: Flags  # an update whose loss was NaN or Inf

    def take_last(self, number: int) -> "Steps":
        """The last ones only."""
        last = slice(max(len(self.iterations) - number, 0), None)
        taken: dict[str, Any] = {}
        for field in dataclasses.fields(Steps):
            value: Any = getattr(self, field.name)
            taken[field.name] = value.take(last) if isinstance(value, PhaseTimes) else value[last]
        return Steps(**taken)


@dataclass(frozen=True)
class Run(Steps):
    """A run as it described itself."""

    folder: str
    record: RunRecord  # run.json; without any field where there is none
    steps: int
    first_step_ms: float | None  # without evaluating and saving, as the three below
    steady_step_ms: float | None  # median of typical steps
    profiled_step_ms: float | None  # median inside the window
    tokens_per_second: float | None  # all ranks, over the time of typical steps
    mfu_causal: float | None
    mfu_full: float | None
    model_tflops: float | None  # per GPU, causal (Megatron-LM's count)
    ranks: RankMedians | None
    notes: tuple[str, ...]
    step_spread_ms: float | None = None  # interquartile range of typical steps: the noise of steady_step_ms
    before_profile_ms: float | None = None  # median of the steps before the window; None of fewer than three
    after_profile_ms: float | None = None  # the same of those after it
    model_tflops_full: float | None = None  # per GPU, all of the attention matrix counted
    growths: tuple[CounterGrowth, ...] = ()  # of host memory, by rank
    gpu_growths: tuple[CounterGrowth, ...] = ()  # of the most that tensors took, by rank
    verdict_on_ranks: str = ""  # which rank died, hung or failed, as the others found out (ranks.json)
    hardware: RanksHardware = WITHOUT_HARDWARE  # clocks, temperatures and errors of all ranks, as far as sampled
    starts: int = 1  # how often the folder's run was started; all else is of the last one

    @property
    def counted_peak_bytes(self) -> float:
        """The most that the GPU's allocator counted in any step; 0 where it counted in none."""
        # NaN, of a step that does not say, is not above 0
        is_counted = self.peak_memory_bytes > 0
        return float(self.peak_memory_bytes.max(initial=0.0, where=is_counted))

    @property
    def plan(self) -> PlanRecord:
        """Decisions before the run started; without any field of a watched script."""
        return self.record.plan or PlanRecord()

    @cached_property
    def args(self) -> dict[str, Any]:
        """All flags as resolved, by name (micro_batch_size)."""
        return {name: value for group in self.plan.args.values() for name, value in group.items()}

    @property
    def status(self) -> str:
        """Status: running, finished, interrupted, failed: ..., killed or lost: ..., or why it left early.

        "unknown" without run.json.
        """
        return self.record.status or "unknown"

    @property
    def stages(self) -> list[int]:
        """Stages of a pipeline by rank; [] where there is none."""
        return list(self.plan.stages_of_ranks)

    @property
    def world_size(self) -> int | None:
        """Ranks of the job."""
        return self.plan.world.size

    @property
    def writing_rank(self) -> int | None:
        """Rank whose times the steps are; 0 of a watched script, which has no plan; None: not known."""
        return 0 if self.plan.world == WorldRecord() else self.plan.world.rank

    @property
    def on_rank(self) -> str:
        """The text " on rank 3", whose times the steps are; '' where there is one only, or it is not known."""
        return f" on rank {self.writing_rank}" if self.writing_rank is not None and (self.world_size or 1) > 1 else ""

    @property
    def profiler_slowdown(self) -> float | None:
        """Median step inside the window against before it: 1.39 means that what a trace shows is 39% slower."""
        if self.profiled_step_ms is None or not self.before_profile_ms:
            return None
        return self.profiled_step_ms / self.before_profile_ms

    @property
    def recovered(self) -> bool | None:
        """Were steps after the window again as long as before it? None for unknown."""
        if self.after_profile_ms is None or self.profiled_step_ms is None or not self.before_profile_ms:
            return None
        longer = self.profiled_step_ms - self.before_profile_ms
        return self.after_profile_ms - self.before_profile_ms < RECOVERED * longer

    @property
    def without_core(self) -> tuple[int, float | None] | None:
        """Own time of each rank in a phase, as RankMedians has it."""
        return self.ranks.without_core if self.ranks else None
