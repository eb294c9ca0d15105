"""What `megatron-lite plan` shows, before anybody draws it."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config.plan import Plan
from megatron_lite.config.simulated_schedule import TimedTurn, TurnTimes, simulate_schedule
from megatron_lite.planner.hardware import Processor
from megatron_lite.planner.inference import InferencePrediction
from megatron_lite.planner.prediction import MemoryPrediction, TimePrediction
from megatron_lite.planner.search import Search
from megatron_lite.planner.step_time import Duration, sum_micro_batches
from megatron_lite.planner.what_if import MARGIN, Fit, Variant
from megatron_lite.units import GIB

PLAN_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong


@dataclass(frozen=True)
class Outlook:
    """The plan on one kind of GPU."""

    processor: Processor
    memory: MemoryPrediction
    time: TimePrediction
    duration: Duration | None  # None where nothing of a step's time is known
    fit: Fit | None = None  # where it does not fit as it is, with the margin
    inference: InferencePrediction | None = None

    @property
    def room_bytes(self) -> int:
        """Of one GPU."""
        return int((self.processor.memory_gib or 0.0) * GIB)


@dataclass(frozen=True)
class Exact:
    """What walking the real model and step under fake tensors gave."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    expandable_reserved_bytes: int
    phase: str
    where: str
    categories: dict[str, int]
    notes: Sequence[str]
    seconds: float
    # (dimension of the group, kind, bytes of the whole tensor, times), of the walked step
    collectives: Sequence[tuple[str, str, int, int]] = ()


@dataclass(frozen=True)
class StageOutlook:
    """What one rank of a pipeline's stage holds and does."""

    plan: Plan
    memory: MemoryPrediction
    time: TimePrediction | None  # of its own work; None without a GPU
    exact: Exact | None = None  # of the first stage of those that are alike


@dataclass(frozen=True)
class PlanReport:
    """One launch command, foretold."""

    title: str  # the script's name
    facts: str  # "GPT 24 x 1024, sequence 2048, fp16, 1 GPU, batch 16 = 4 x 1 x 4"
    plan: Plan
    parts: dict[str, int]  # parameters
    flops_causal: int  # per token
    flops_full: int
    memory: MemoryPrediction
    margin: float = MARGIN
    outlooks: Sequence[Outlook] = ()  # by GPU, in the order in which they were named
    variants: Sequence[Variant] = ()  # what if; on the first GPU
    fit: Fit | None = None
    inference: InferencePrediction | None = None  # without a GPU
    exact: Exact | None = None  # of the rank that holds most
    stages: Sequence[StageOutlook] = ()  # of a pipeline
    search: Search | None = None  # then nothing else is shown
    hints: Sequence[str] | None = None  # None: not asked for
    notes: Sequence[str] = ()  # what was assumed
    everything: bool = False  # all rows of tables are shown


MAX_MICRO_BATCHES = 8  # times the stages, of a schedule that is drawn


def simulate_stages(stages: Sequence[StageOutlook], micro_batches: int) -> list[TimedTurn]:
    """The schedule of so many micro-batches with each stage's least times; [] where these are not known."""
    times = []
    for one in stages:
        if one.time is None or not one.time.peak_tflops:
            return []
        plan, chunks = one.plan, len(one.plan.stage.chunks)
        of_turn = sum_micro_batches(one.time) / (plan.batch.final // plan.samples_per_pass) / chunks
        # backward has two products for each of forward's, and forward's again where layers are recomputed
        again = plan.recomputed_layers / plan.stage.chunk_size
        forward = of_turn / (3 + again)
        weights = forward if plan.stage.splits_backward else 0.0
        times.append(TurnTimes(forward, of_turn - forward - weights, weights))
    return simulate_schedule([one.plan.stage for one in stages], micro_batches, times)
