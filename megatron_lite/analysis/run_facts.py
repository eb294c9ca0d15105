"""All that was found out about one run, for the rules and the renderers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_lite.analysis.core_use import CoreShortage
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.memory.memory_results import LedgerRow, Snapshot, TraceMemory
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.exposed import Exposed, measure_exposed
from megatron_lite.analysis.ranks.rank_results import Imbalance, RankComparison, Straggler
from megatron_lite.analysis.run.cores import find_core_shortage, find_core_use
from megatron_lite.analysis.run.every_step import EveryStep, measure_every_step
from megatron_lite.analysis.run.learning import Learning, measure_learning
from megatron_lite.analysis.run.pipeline_times import PipelineTimes, measure_pipeline
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.torch_words import in_torch_words
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.run_record import CategoryPrediction, Hardware, Plan, Settings, Shape, Sharding, Watched
from megatron_lite.thresholds import WITHOUT_CORE
from megatron_lite.units import GIB, size

USABLE = 0.92  # of the device's memory: the CUDA context, NCCL and the allocator's gaps take the rest
TIGHT = 0.60  # of the device's memory: below, a larger micro-batch is the better use of what is left
MAX_WITHOUT_CORE = 0.2  # of a lag: what waiting for a core may be of it, if the lag is to be certain
HOW_TO_RECORD_CORES = "megatron-lite watch records it"
LARGE_BYTES = 4 * GIB  # where the device is not known: less fits on any that trains


@dataclass(frozen=True)
class Compared:
    """One figure: bytes, ms per step or tokens per second."""

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
    """Each part may be missing, for a reason among the notes."""

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
    """Bytes of one category at the peak."""
    return sum(held.num_bytes for held in one.held if held.category == category)


def measure_ordinary(run: Run | None, values: Numbers | tuple[()]) -> float | None:
    """Median over the typical steps that have a value."""
    if run is None or not len(values):
        return None
    known = values[run.ordinary & ~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


@dataclass(frozen=True)
class Facts:
    """One run. Every part may be absent; a rule that needs it then has nothing to say."""

    ranks_seen: tuple[RankFacts, ...]  # by rank
    ranks: RankComparison | None
    snapshots: tuple[Snapshot, ...]  # by rank
    run: Run | None
    gaps: tuple[str, ...]  # what could not be seen and why, a sentence each
    ledger: tuple[LedgerRow, ...] = ()  # of the snapshot with the highest peak; () without a plan of this trainer
    traced_memory: tuple[TraceMemory, ...] = ()  # by rank, from the traces; () where there are snapshots
    predicted: Predicted | None = None  # what the run said of itself before it started, beside what was measured

    @property
    def critical(self) -> RankFacts | None:
        """The rank whose time is the run's: the one that waits least for others (not simply rank 0)."""
        if not self.ranks_seen:
            return None
        wanted = self.ranks.critical_rank if self.ranks else None
        return next((one for one in self.ranks_seen if one.time.rank == wanted), self.ranks_seen[0])

    @cached_property
    def exposed(self) -> tuple[Exposed, ...]:
        """Communication of the critical rank that no compute runs beside, by purpose, most exposed first."""
        one, ranks = self.critical, self.ranks
        return measure_exposed(one, ranks.world_size if ranks else None) if one is not None else ()

    @cached_property
    def learning(self) -> Learning | None:
        """What the run's steps say of updates, losses and clipping; None without a run."""
        return measure_learning(self.run) if self.run is not None else None

    @property
    def highest_snapshot(self) -> Snapshot | None:
        """The one that decides whether the run fits: whose memory ran out, else with the highest peak."""
        return max(self.snapshots, key=lambda one: (one.ran_out, one.peak_bytes), default=None)

    @property
    def plan(self) -> Plan:
        """What was decided before the run started; without any field for foreign runs."""
        return self.run.plan if self.run else Plan()

    @property
    def has_plan(self) -> bool:
        """Whether the run says what it was asked to do."""
        return self.plan != Plan()

    @property
    def shape(self) -> Shape:
        """The model's sizes; without any field where they are not known."""
        return self.plan.shape or Shape()

    @property
    def predicted_categories(self) -> CategoryPrediction | None:
        """What formulas said before the first step that categories of memory take; None where the run does not tell."""
        prediction = self.run.record.prediction if self.run is not None else None
        return prediction.categories if prediction is not None else None

    @property
    def sharding(self) -> Sharding:
        """How replicas share the model's state; without any field where each keeps all of it,
        or where that is not known."""
        return self.plan.sharding or Sharding()

    @property
    def hardware(self) -> Hardware:
        """What the run was on; without any field where it does not say."""
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
        """A text that may name this trainer's flags, in PyTorch's words where the job is not this trainer's."""
        return in_torch_words(text, self.is_watched) if self.is_foreign else text

    @cached_property
    def pipeline(self) -> PipelineTimes | None:
        """Of a run with several stages, where the times of all are known."""
        return measure_pipeline(self.run) if self.run else None

    @cached_property
    def every_step(self) -> EveryStep | None:
        """Where all steps go, beside the profiled ones."""
        return measure_every_step(self.run) if self.run else None

    @cached_property
    def core_shortage(self) -> CoreShortage | None:
        """A rank that was ready and had no core, as far as its step could show it:
        a GPU with work in its queue hides the wait."""
        found = find_core_shortage(self.run, traces=self.traces)
        one = self.critical
        if found is None or found.wait_ms is None or one is None or not one.time.on_gpu:
            return found
        if self.ranks is not None and len(self.ranks.rows) > 1:
            return found  # the ranks wait for the one whose launches come late, whose own step may not show it
        idle_ms = max(one.time.step_ms - one.time.rows.get("compute", 0.0), 0.0)
        shown = replace(found, wait_ms=min(found.wait_ms, idle_ms))
        return shown if (shown.share or 0.0) >= WITHOUT_CORE else None

    @property
    def traces(self) -> tuple[Trace, ...]:
        """By rank."""
        return tuple(one.trace for one in self.ranks_seen)

    def doubt_cores(self, ranks: Sequence[int | None], lag_ms: float | None = None) -> str:
        """Why other jobs may have made these ranks' hosts slow; '' where it is known that they had their cores.

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
        for rank, use in uses.items():
            waited_ms = use.wait_ms if use is not None else None
            if waited_ms is not None and lag_ms is not None and waited_ms > MAX_WITHOUT_CORE * lag_ms:
                return f"rank {rank or 0} waited for a CPU core for {waited_ms:,.1f} ms per step"
        return ""

    def doubt_straggler(self, found: Straggler) -> str:
        """As doubt_cores. What a GPU computes longer is seen on the GPU; all else may be a host that had no core."""
        is_on_device = self.on_gpu and found.cause == "compute"
        return "" if is_on_device else self.doubt_cores([found.rank], found.caused_wait_ms)

    def doubt_imbalance(self, found: Imbalance) -> str:
        """As doubt_straggler, of all ranks that are late in their turns, or of the one that is late at times."""
        is_on_device = self.on_gpu and found.computes
        late = [rank for rank, _ in found.ranks] if found.rank is None else [found.rank]
        return "" if is_on_device else self.doubt_cores(late, found.lost_ms)

    def doubt_exchange(self) -> str:
        """As doubt_cores, of all ranks that were read and exchange data from the CPU.

        The kernels of GPUs wait and send by themselves.
        """
        return "" if self.on_gpu else self.doubt_cores([one.time.rank for one in self.ranks_seen])

    # --- the run's own record; None where it does not say

    @property
    def settings(self) -> Settings:
        """The run's flags as resolved; without any field for foreign runs."""
        return self.plan.settings

    @property
    def watched(self) -> Watched:
        """What `megatron-lite watch` saw of the script; without any field of other runs."""
        return (self.run.record.watched if self.run else None) or Watched()

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
        device, one = self.plan.device, self.critical
        device = device or ("cpu" if self.hardware.device == "cpu" else None)
        if one is not None and (one.time.on_gpu or not device):
            return one.time.on_gpu
        return device == "cuda" if device else None

    @property
    def local_ranks(self) -> int | None:
        """Ranks of one machine."""
        return self.plan.world.local_size or self.watched.local_ranks

    @property
    def has_one_rank(self) -> bool:
        """Whether nothing that was read speaks of a rank but 0: then its number says nothing."""
        traces = [one.trace for one in self.ranks_seen]
        seen = {one.rank for one in traces}
        seen |= {one.rank for one in self.snapshots} | {one.rank for one in self.traced_memory}
        sizes = [one.world_size for one in traces] + [self.ranks.world_size if self.ranks else None]
        sizes += [self.plan.world.size, len(self.ranks_seen)]
        return seen <= {0, None} and max(size or 0 for size in sizes) <= 1

    @property
    def parameters(self) -> int | None:
        return self.run.record.parameters if self.run else None

    @property
    def splits_model(self) -> bool:
        """Whether ranks have parts of layers or some of them, and so exchange hidden states besides gradients."""
        layout = self.plan.layout
        return (layout.tensor or 1) > 1 or (layout.pipeline or 1) > 1

    @property
    def micro_batches(self) -> int | None:
        """Per rank and step, after a ramp-up."""
        return self.plan.micro_batches

    @property
    def micro_batch_tokens(self) -> int | None:
        """Of a rank."""
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
        """By a snapshot if there is one that is no simulation, else by the allocator's own counter."""
        real = [one for one in self.snapshots if not one.simulated and one.complete]
        if real:
            most = max(real, key=lambda one: one.peak_bytes)
            return Peak(most.peak_bytes, most.grows_bytes or most.peak_bytes, most.source)
        values = self.run.peak_memory_bytes if self.run else np.array([])
        most_bytes = int(values.max(initial=0, where=values > 0))  # NaN is not
        return Peak(most_bytes, most_bytes, STEPS_FILE) if most_bytes > 0 else None

    @property
    def larger_micro_batch(self) -> tuple[str, str] | None:
        """(flag, sentence) of twice the micro-batch (or more) at the same global batch, if the peak then still fits."""
        now = self.settings.micro_batch_size
        number = self.micro_batches
        held, room = self.peak, self.device_bytes
        if not (now and number and held and room) or number < 2:
            return None
        fixed, factor = held.num_bytes - held.grows_bytes, 1
        while number % (2 * factor) == 0 and fixed + 2 * factor * held.grows_bytes <= USABLE * room:
            factor *= 2
        if factor == 1:
            return None
        flag, then = f"--micro-batch-size {factor * now}", size(fixed + factor * held.grows_bytes)
        return flag, f"{flag} (now {now}): the peak of {size(held.num_bytes)} would be at most {then} of {size(room)}"

    @property
    def smaller_micro_batch(self) -> int | None:
        """Half the micro-batch, or the largest part of it below that divides it:
        any global batch of whole micro-batches stays one."""
        now = self.settings.micro_batch_size or 0
        parts = [part for part in range(1, now // 2 + 1) if now % part == 0]
        return max(parts, default=None)

    def is_tight(self, one: Snapshot) -> bool:
        """Did it run out, fill most of the device, or (the device unknown) take gigabytes?"""
        room = self.device_bytes
        return one.ran_out or one.peak_bytes >= (TIGHT * room if room else LARGE_BYTES)
