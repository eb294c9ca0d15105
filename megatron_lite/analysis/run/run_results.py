"""What a run folder of this trainer says: run.json and steps.jsonl (formats: megatron_lite/run_folder.py).

A number that the folder does not have is NaN inside a tuple and None elsewhere; never 0.
"""

from dataclasses import dataclass, field
from functools import cached_property

from megatron_lite.phases import Phase
from megatron_lite.thresholds import rank_without_core

RECOVERED = 0.5  # of what the window's steps took more: a smaller rest may be noise


class PhasesOfRanks:
    """What has phases_ms, gpu_phases_ms and own_backward_ms: a number per rank for each phase."""

    def phase_ms(self, name: str) -> tuple[float, ...]:
        """The GPU's own time of a phase where it has one, else the host's; () for a phase that no rank has."""
        return self.gpu_phases_ms.get(name) or self.phases_ms.get(name, ())

    def own_ms(self, name: str) -> tuple[float, ...]:
        """The same without waiting for other ranks, where the trainer could take that off: backward."""
        return self.own_backward_ms if name == Phase.BACKWARD else self.phase_ms(name)


@dataclass(frozen=True)
class Interval(PhasesOfRanks):
    """What all ranks said of the ordinary steps between two console lines; lists have a number per rank."""

    first: int  # iterations
    last: int
    steps: tuple[float, ...]  # how many were ordinary
    step_ms: tuple[float, ...]  # medians, without evaluating and saving
    gpu_ms: tuple[float, ...]
    phases_ms: dict[str, tuple[float, ...]]
    gpu_phases_ms: dict[str, tuple[float, ...]]
    own_backward_ms: tuple[float, ...]  # without waiting for other ranks
    host_memory_bytes: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]
    cpu_ms: tuple[float, ...] = ()
    core_wait_ms: tuple[float, ...] = ()
    involuntary_switches: tuple[float, ...] = ()


@dataclass(frozen=True)
class RankMedians(PhasesOfRanks):
    """Every rank's medians over the run's ordinary steps; lists have a number per rank, NaN for what it has not."""

    step_ms: tuple[float, ...]
    gpu_ms: tuple[float, ...]
    phases_ms: dict[str, tuple[float, ...]]
    gpu_phases_ms: dict[str, tuple[float, ...]]
    own_backward_ms: tuple[float, ...]  # without waiting for other ranks; () if no rank knows it
    host_memory_bytes: tuple[tuple[float, ...], ...]  # [console line][rank], to see growth
    peak_memory_bytes: tuple[tuple[float, ...], ...]
    intervals: tuple[Interval, ...] = ()  # the console lines that the medians are of
    cpu_ms: tuple[float, ...] = ()  # of all threads of the rank's process
    core_wait_ms: tuple[float, ...] = ()  # its training thread was ready and had no core
    involuntary_switches: tuple[float, ...] = ()

    @cached_property
    def without_core(self) -> tuple[int, float | None] | None:
        """(rank that waits longest for a core, ms per step or None for unknown); None where all have their cores."""
        return rank_without_core(self.core_wait_ms, self.involuntary_switches, self.cpu_ms, self.step_ms)


@dataclass(frozen=True)
class Growth:
    """Memory that grew from each quarter of the ordinary steps to the next."""

    rank: int | None  # None: the rank that writes
    num_bytes: int  # from the first quarter's median to the last's
    bytes_per_step: float
    at_end: int


@dataclass(frozen=True)
class Run:
    """One run, as it described itself. Tuples without another word have an entry per step of the last start."""

    folder: str
    plan: dict  # run.json's plan; {} if it has none
    record: dict  # the rest of run.json: versions, hardware, how it ended
    steps: int
    iterations: tuple[int, ...]
    step_ms: tuple[float, ...]  # the whole step on the host, evaluating and saving included
    ordinary: tuple[bool, ...]  # neither the first nor profiled, beside a profile, compiling, evaluating nor saving
    profiled: tuple[bool, ...]
    phases_ms: dict[str, tuple[float, ...]]  # 0 in a step that had none
    loss_scale: tuple[float, ...]
    skipped: tuple[bool, ...]
    host_memory_bytes: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]
    first_step_ms: float | None  # without evaluating and saving, as the three below
    steady_step_ms: float | None  # median of ordinary steps
    profiled_step_ms: float | None  # median inside the window
    tokens_per_second: float | None  # all ranks, over the time of ordinary steps
    mfu_causal: float | None
    mfu_full: float | None
    model_tflops: float | None  # per GPU, causal (Megatron-LM's count)
    ranks: RankMedians | None
    notes: tuple[str, ...]
    training_ms: tuple[float, ...] = ()  # step_ms without evaluating and saving
    evaluating: tuple[bool, ...] = ()
    saving: tuple[bool, ...] = ()
    compiling: tuple[bool, ...] = ()
    compile_ms: tuple[float, ...] = ()  # the part of step_ms in which torch.compile compiled
    undisturbed: tuple[bool, ...] = ()  # neither the first nor profiled, beside a profile or compiling
    gpu_ms: tuple[float, ...] = ()
    gpu_phases_ms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    batch_sizes: tuple[float, ...] = ()  # samples, all ranks
    consumed_samples: tuple[float, ...] = ()  # after the step, all ranks, skipped steps included
    next_lrs: tuple[float, ...] = ()  # learning rate of the step after it
    losses: tuple[float, ...] = ()
    not_finite: tuple[bool, ...] = ()  # an update whose loss was NaN or Inf
    grad_norms: tuple[float, ...] = ()
    step_spread_ms: float | None = None  # interquartile range of ordinary steps: the noise of steady_step_ms
    before_profile_ms: float | None = None  # median of the steps before the window; None of fewer than three
    after_profile_ms: float | None = None  # the same of those after it
    model_tflops_full: float | None = None  # per GPU, all of the attention matrix counted
    growths: tuple[Growth, ...] = ()  # of host memory, by rank
    gpu_growths: tuple[Growth, ...] = ()  # of the most that tensors took, by rank
    verdict_on_ranks: str = ""  # which rank died, hung or failed, as the others found out (ranks.json)
    starts: int = 1  # how often the folder's run was started; all else is of the last one

    @cached_property
    def args(self) -> dict:
        """All flags as resolved, by name (micro_batch_size)."""
        groups = self.plan.get("args")
        groups = groups.values() if isinstance(groups, dict) else ()
        return {name: value for group in groups if isinstance(group, dict) for name, value in group.items()}

    @property
    def status(self) -> str:
        """running, finished, interrupted, failed: ..., killed or lost: ..., or why it left early; "unknown" without run.json."""
        return str(self.record.get("status", "unknown"))

    @property
    def world_size(self) -> int | None:
        world = self.plan.get("world")
        size = world.get("size") if isinstance(world, dict) else None
        return size if isinstance(size, int) and size > 0 else None

    @property
    def on_rank(self) -> str:
        """' on rank 3', whose times the steps are; '' where there is one only, or it is not known."""
        world = self.plan.get("world")
        rank = world.get("rank") if isinstance(world, dict) else None
        return f" on rank {rank}" if isinstance(rank, int) and (self.world_size or 1) > 1 else ""

    @property
    def profiler_slowdown(self) -> float | None:
        """Median step inside the window against before it: 1.39 means that what a trace shows is 39% slower."""
        if self.profiled_step_ms is None or not self.before_profile_ms:
            return None
        return self.profiled_step_ms / self.before_profile_ms

    @property
    def recovered(self) -> bool | None:
        """Were steps after the window again as long as before it? None for unknown."""
        if self.after_profile_ms is None or self.profiler_slowdown is None:
            return None
        return self.after_profile_ms - self.before_profile_ms < RECOVERED * (
            self.profiled_step_ms - self.before_profile_ms
        )

    @property
    def without_core(self) -> tuple[int, float | None] | None:
        """As RankMedians has it."""
        return self.ranks.without_core if self.ranks else None
