"""Facts of one run, all that was found out about it, for the rules and the renderers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_lite.analysis.core_use import CoreShortage
from megatron_lite.analysis.gpu_clocks import GpuClock, list_gpu_clocks
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.memory.memory_results import MeasuredCategory, Snapshot, TraceMemory
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.exposed import Exposed, measure_exposed
from megatron_lite.analysis.ranks.rank_results import Imbalance, RankComparison, Straggler
from megatron_lite.analysis.run.cores import find_core_shortage, find_core_use
from megatron_lite.analysis.run.every_step import EveryStep, measure_every_step
from megatron_lite.analysis.run.hardware import RanksHardware, complete_hardware
from megatron_lite.analysis.run.learning import Learning, measure_learning
from megatron_lite.analysis.run.pipeline_times import PipelineTimes, measure_pipeline
from megatron_lite.analysis.run.run_results import WITHOUT_HARDWARE, Run
from megatron_lite.analysis.torch_words import in_torch_words
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.run_record import (
    CategoryPrediction,
    Hardware,
    PlanRecord,
    Settings,
    Shape,
    ShardingRecord,
    Watched,
)
from megatron_lite.thresholds import WITHOUT_CORE
from megatron_lite.units import GIB, size

USABLE = 0.92  # of the device's memory: the CUDA context, NCCL and the allocator's gaps take the rest
TIGHT = 0.60  # of the device's memory: below, a larger micro-batch is the better use of what is left
MAX_WITHOUT_CORE = 0.2  # of a lag: what waiting for a core may be of it, if the lag is to be certain
HOW_TO_RECORD_CORES = "megatron-lite watch records it"
LARGE_BYTES = 4 * GIB  # where the device is not known: less fits on any that trains


@dataclass(frozen=True)
class Compared:
    """A figure beside its prediction: bytes, ms per step or tokens per second."""

    name: str
    predicted: float
    measured: float

    @property
    def difference(self) -> float | None:
        """0.03: measured 3% more than predicted; None where nothing was predicted."""
        return self.measured / self.predicted - 1 if self.predicted else None


@dataclass(frozen=True)
class ComparedMemory:
    """Tensors of one rank at the highest moment of a step, in bytes without the allocator's rounding."""

    peak: Compared
    categories: tuple[Compared, ...]  # add up to the peak; () where the measurement does not tell them apart
    source: str  # the snapshot's name, or "steps.jsonl": the allocator's own count, with rounding
    rank: int | None
    predicted_at: str  # "cross entropy (forward)"
    measured_in: str  # phase; "" for unknown


@dataclass(frozen=True)
class ComparedTime:
    """A step against the shortest that the hardware allows. A bound: measured is more."""

    gpu: str
    step: Compared  # ms, outside of the profiler
    tokens: Compared | None  # per second, all ranks
    parts: tuple[Compared, ...]  # ms of step time in the trace, to which they add up; () without a trace of a GPU
    not_predicted: tuple[str, ...]  # what is not in the bound, in words


@dataclass(frozen=True)
class Predicted:
    """Predictions beside measurements. Each part may be missing, for a reason among the notes."""

    memory: ComparedMemory | None
    time: ComparedTime | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Peak:
    """The most that tensors took on one device."""

    num_bytes: int
    grows_bytes: int  # the part that is proportional to the micro-batch; all of it, where that is not known
    where: str


def sum_category(one: Snapshot, category: str) -> int:
    """Sum the bytes of one category at the peak."""
    return sum(held.num_bytes for held in one.held if held.category == category)


def measure_ordinary(run: Run | None, values: Numbers | tuple[()]) -> float | None:
    """Measure the median over the typical steps that have a value; None where none has."""
    if run is None or not len(values):
        return None
    is_known = run.ordinary & ~np.isnan(values)
    known = values[is_known]
    return float(np.median(known)) if len(known) else None


@dataclass(frozen=True)
class Facts:
    """Facts of one run. Every part may be absent; a rule that needs it then has nothing to say."""

    ranks_seen: tuple[RankFacts, ...]  # by rank
    ranks: RankComparison | None
    snapshots: tuple[Snapshot, ...]  # by rank
    run: Run | None
    gaps: tuple[str, ...]  # what could not be seen and why, a sentence each
    ledger: tuple[
        MeasuredCategory, ...
    ] = ()  # of the snapshot with the highest peak; () without a plan of this trainer
    traced_memory: tuple[TraceMemory, ...] = ()  # by rank, from the traces; () where there are snapshots
    predicted: Predicted | None = None  # what the run said of itself before it started, beside what was measured

    @property
    def critical(self) -> RankFacts | None:
        """The rank whose time is the run's: the one that waits least for others (not simply rank 0)."""
        if not self.ranks_seen:
            return None
        wanted = self.ranks.critical_rank if self.ranks else None
        for one in self.ranks_seen:
            if one.time.rank == wanted:
                return one
        return self.ranks_seen[0]

    @cached_property
    def graph_ranks(self) -> tuple[RankFacts, ...]:
        """The ranks whose steps become one dependency graph.

        All whose traces say which rank they are of, else the one whose time is the run's.
        """
        numbers = {one.time.rank for one in self.ranks_seen}
        is_each_named = None not in numbers and len(numbers) == len(self.ranks_seen)
        if is_each_named:
            return self.ranks_seen
        return () if self.critical is None else (self.critical,)

    def find_graph_place(self, rank: int | None) -> int | None:
        """Find a rank's place among those of the graph; None where it is not among them."""
        ranks = [one.time.rank for one in self.graph_ranks]
        return ranks.index(rank) if rank in ranks else None

    @cached_property
    def exposed(self) -> tuple[Exposed, ...]:
        """Communication of the critical rank that no compute runs beside, by purpose, most exposed first."""
        if self.critical is None:
            return ()
        world_size = self.ranks.world_size if self.ranks else None
        return measure_exposed(self.critical, world_size)

    @cached_property
    def learning(self) -> Learning | None:
        """Updates, losses and clipping, as the run's steps tell of them; None without a run."""
        return measure_learning(self.run) if self.run is not None else None

    @property
    def highest_snapshot(self) -> Snapshot | None:
        """The snapshot that decides whether the run fits: whose memory ran out, else with the highest peak."""
        return max(self.snapshots, key=lambda one: (one.ran_out, one.peak_bytes), default=None)

    @property
    def ranks_without_snapshot(self) -> tuple[int, ...]:
        """Ranks of the run whose memory was not read; none where there is no snapshot, or it names no rank."""
        world_size = self.run.world_size if self.run else None
        read = {snapshot.rank for snapshot in self.snapshots}
        if not world_size or not read or None in read:
            return ()
        return tuple(rank for rank in range(world_size) if rank not in read)

    @property
    def plan(self) -> PlanRecord:
        """Decisions before the run started; without any field for foreign runs."""
        return self.run.plan if self.run else PlanRecord()

    @property
    def has_plan(self) -> bool:
        """Whether the run says what it was asked to do."""
        return self.plan != PlanRecord()

    @property
    def shape(self) -> Shape:
        """The model's sizes; without any field where they are not known."""
        return self.plan.shape or Shape()

    @property
    def predicted_categories(self) -> CategoryPrediction | None:
        """Memory of each category by the formulas, before the first step; None where the run does not tell."""
        if self.run is None or self.run.record.prediction is None:
            return None
        return self.run.record.prediction.categories

    @property
    def sharding(self) -> ShardingRecord:
        """How replicas share the model's state; without any field where each keeps all of it, or nothing tells."""
        return self.plan.sharding or ShardingRecord()

    @property
    def hardware(self) -> Hardware:
        """Hardware on which the run was; without any field where it does not say."""
        return self.run.record.hardware if self.run else Hardware()

    @property
    def is_watched(self) -> bool:
        """The run is of a script that is not this trainer's: its flags are unknown."""
        return self.run is not None and self.run.record.command is not None

    @property
    def is_foreign(self) -> bool:
        """The job is not known to be this trainer's, so that its flags mean nothing to whoever runs it."""
        return self.run is None or self.is_watched

    def in_words(self, text: str) -> str:
        """Translate this trainer's flags in a text into PyTorch's words where the job is not this trainer's."""
        return in_torch_words(text, self.is_watched) if self.is_foreign else text

    @cached_property
    def pipeline(self) -> PipelineTimes | None:
        """Times of the stages of a pipeline; None for a run without several, or where some are not known."""
        return measure_pipeline(self.run) if self.run else None

    @cached_property
    def ranks_hardware(self) -> RanksHardware:
        """Clocks, temperatures and errors of the ranks' hardware; without any figure where none was sampled."""
        of_ranks = {trace.rank or 0: trace.hardware for trace in self.traces if trace.hardware is not None}
        by_lines = self.run.hardware if self.run else WITHOUT_HARDWARE
        return complete_hardware(by_lines, of_ranks)

    @cached_property
    def gpu_clocks(self) -> tuple[GpuClock, ...]:
        """Clocks of the ranks' GPUs, the lowest first; none where they were not sampled."""
        return tuple(sorted(list_gpu_clocks(self.ranks_hardware), key=lambda one: (one.mhz or math.inf, one.rank)))

    @cached_property
    def every_step(self) -> EveryStep | None:
        """Where all steps go, beside the profiled ones."""
        return measure_every_step(self.run) if self.run else None

    @cached_property
    def core_shortage(self) -> CoreShortage | None:
        """A rank that was ready and had no core, as far as its step could show it.

        A GPU with work in its queue hides the wait.
        """
        found = find_core_shortage(self.run, traces=self.traces)
        one = self.critical
        if found is None or found.wait_ms is None or one is None or not one.time.on_gpu:
            return found
        # the ranks wait for the one whose launches come late, whose own step may not show it
        if self.ranks is not None and len(self.ranks.rows) > 1:
            return found
        idle_ms = max(one.time.step_ms - one.time.rows.get("compute", 0.0), 0.0)
        shown = replace(found, wait_ms=min(found.wait_ms, idle_ms))
        share = shown.share or 0.0
        return shown if share >= WITHOUT_CORE else None

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Traces of the run by rank."""
        return tuple(one.trace for one in self.ranks_seen)

    def doubt_cores(self, ranks: Sequence[int | None], lag_ms: float | None = None) -> str:
        """Explain why other jobs may have made these ranks' hosts slow; '' where it is known that they had their cores.

        Args:
            ranks: whose times of the host matter.
            lag_ms: per step, what is said of them; None for what a notable shortage of cores alone would cast doubt on.
        """
        uses = {rank: find_core_use(rank, self.run, self.traces) for rank in ranks}
        unknown = sorted(rank or 0 for rank, use in uses.items() if use is None)
        if unknown and self.run is None:
            return f"no run record: whether other jobs took the cores was not recorded; {HOW_TO_RECORD_CORES}"
        if unknown:
            whose = "the rank's" if self.has_one_rank else f"rank {unknown[0]}'s"
            return f"whether other jobs took {whose} cores was not recorded; {HOW_TO_RECORD_CORES}"
        if lag_ms is None:
            return ""
        for rank, use in uses.items():
            waited_ms = use.wait_ms if use is not None else None
            if waited_ms is not None and waited_ms > MAX_WITHOUT_CORE * lag_ms:
                return f"rank {rank or 0} waited for a CPU core for {waited_ms:,.1f} ms per step"
        return ""

    def doubt_straggler(self, found: Straggler) -> str:
        """Explain why other jobs may have made a straggler late; '' where they have not.

        What a GPU computes longer is seen on the GPU; all else may be a host that had no core.
        """
        if self.on_gpu and found.cause == "compute":
            return ""
        return self.doubt_cores([found.rank], found.caused_wait_ms)

    def doubt_imbalance(self, found: Imbalance) -> str:
        """Explain why other jobs may have made ranks late that are so in turns, or the one that is at times."""
        if self.on_gpu and found.computes:
            return ""
        late = [found.rank]
        if found.rank is None:
            late = [rank for rank, _ in found.ranks]
        return self.doubt_cores(late, found.lost_ms)

    def doubt_exchange(self) -> str:
        """Explain why other jobs may have slowed ranks that were read and exchange data from the CPU.

        The kernels of GPUs wait and send by themselves.
        """
        if self.on_gpu:
            return ""
        return self.doubt_cores([one.time.rank for one in self.ranks_seen])

    # --- the run's own record; None where it does not say

    @property
    def settings(self) -> Settings:
        """The run's flags as resolved; without any field for foreign runs."""
        return self.plan.settings

    @property
    def watched(self) -> Watched:
        """The script as `megatron-lite watch` saw it; without any field of other runs."""
        watched = self.run.record.watched if self.run else None
        return watched or Watched()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the run wrote down."""
        return self.run.record.environment if self.run else {}

    @property
    def compiles(self) -> bool | None:
        """Whether layers go through torch.compile, as the run decided."""
        return self.plan.compilation.layers

    @property
    def loader_workers(self) -> int | None:
        """Processes per rank, as the run decided."""
        planned = self.plan.loader_workers
        return self.watched.loader_workers if planned is None else planned

    @property
    def on_gpu(self) -> bool | None:
        """Whether the run was on a GPU: by its plan or its traces; None where neither tells."""
        device = self.plan.device
        if not device and self.hardware.device == "cpu":
            device = "cpu"
        rank = self.critical
        if rank is not None and (rank.time.on_gpu or not device):
            return rank.time.on_gpu
        return device == "cuda" if device else None

    @property
    def local_ranks(self) -> int | None:
        """Number of ranks on one machine."""
        return self.plan.world.local_size or self.watched.local_ranks

    @property
    def has_one_rank(self) -> bool:
        """Whether nothing that was read speaks of a rank but 0: then its number says nothing."""
        ranks = {trace.rank for trace in self.traces}
        ranks.update(snapshot.rank for snapshot in self.snapshots)
        ranks.update(memory.rank for memory in self.traced_memory)
        if not ranks <= {0, None}:
            return False
        sizes = [one.world_size for one in self.traces]
        sizes += [self.plan.world.size, len(self.ranks_seen)]
        if self.ranks:
            sizes.append(self.ranks.world_size)
        return all((size or 0) <= 1 for size in sizes)

    @property
    def parameters(self) -> int | None:
        """Number of the model's parameters; None where the run does not say."""
        return self.run.record.parameters if self.run else None

    @property
    def splits_model(self) -> bool:
        """Whether ranks have parts of layers or some of them, and so exchange hidden states besides gradients."""
        layout = self.plan.layout
        return (layout.tensor or 1) > 1 or (layout.pipeline or 1) > 1

    @property
    def micro_batches(self) -> int | None:
        """Number of micro-batches per rank and step, after a ramp-up."""
        return self.plan.micro_batches

    @property
    def micro_batch_tokens(self) -> int | None:
        """Number of tokens of one micro-batch on a rank; None where the run does not say."""
        num_samples = self.settings.micro_batch_size
        length = self.shape.seq_length
        context = self.plan.layout.context or 1
        return num_samples * length // context if num_samples and length else None

    # --- memory: how much is left, whether a larger micro-batch fits into it, and whether it is short at all

    @property
    def device_bytes(self) -> int | None:
        """Memory of the run's GPU, by its own record."""
        return self.hardware.memory_bytes

    @property
    def peak(self) -> Peak | None:
        """The peak of memory: by a snapshot that is no simulation, else by the allocator's own counter."""
        real = [one for one in self.snapshots if not one.simulated and one.complete]
        if real:
            most = max(real, key=lambda one: one.peak_bytes)
            return Peak(most.peak_bytes, most.grows_bytes or most.peak_bytes, most.source)
        most_bytes = int(self.run.counted_peak_bytes) if self.run else 0
        return Peak(most_bytes, most_bytes, STEPS_FILE) if most_bytes > 0 else None

    @property
    def larger_micro_batch(self) -> tuple[str, str] | None:
        """Twice the micro-batch (or more) at the same global batch, if the peak then still fits: flag and sentence."""
        now = self.settings.micro_batch_size
        number = self.micro_batches
        held = self.peak
        room = self.device_bytes
        if not (now and number and held and room):
            return None
        fixed = held.num_bytes - held.grows_bytes
        factor = 1
        while number % (2 * factor) == 0 and fixed + 2 * factor * held.grows_bytes <= USABLE * room:
            factor *= 2
        if factor == 1:
            return None
        flag = f"--micro-batch-size {factor * now}"
        then = size(fixed + factor * held.grows_bytes)
        return flag, f"{flag} (now {now}): the peak of {size(held.num_bytes)} would be at most {then} of {size(room)}"

    @property
    def smaller_micro_batch(self) -> int | None:
        """Half the micro-batch, or the largest part of it below that divides it.

        Any global batch of whole micro-batches stays one.
        """
        now = self.settings.micro_batch_size or 0
        parts = [part for part in range(1, now // 2 + 1) if now % part == 0]
        return max(parts, default=None)

    def is_tight(self, one: Snapshot) -> bool:
        """Tell whether memory ran out, filled most of the device, or (the device unknown) took gigabytes."""
        room = self.device_bytes
        tight_bytes = TIGHT * room if room else LARGE_BYTES
        return one.ran_out or one.peak_bytes >= tight_bytes
