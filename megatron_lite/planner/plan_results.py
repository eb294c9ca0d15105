"""Results of `megatron-lite plan`, before anybody draws them.

They are about a training, about generating, or about a search for layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.config.model_size import count_parameter_parts, step_flops, weigh_chunks
from megatron_lite.config.plan import Plan
from megatron_lite.formats.hardware import Processor
from megatron_lite.formats.run_record import MemoryPrediction, TimePrediction
from megatron_lite.pipeline_schedule import ActionTimes, TimedAction, simulate_schedule
from megatron_lite.planner.inference import InferencePrediction
from megatron_lite.planner.search import Search
from megatron_lite.planner.step_time import Duration, sum_micro_batches
from megatron_lite.planner.what_if import MARGIN, Fit, Variant

MAX_MICRO_BATCHES = 8  # times the stages, of a schedule that is drawn
PLAN_SCHEMA = 1  # of the JSON; raised when a reader of the old form would be wrong


@dataclass(frozen=True)
class Subject:
    """The launch command that was asked about, and what holds of it whatever was asked."""

    title: str  # the script's name
    facts: str  # "GPT 24 x 1024, sequence 2048, fp16, 1 GPU, batch 16 = 4 x 1 x 4"
    plan: Plan
    margin: float = MARGIN
    hints: Sequence[str] | None = None  # flags and variables that can cost speed; None: not asked for
    notes: Sequence[str] = ()  # what was assumed
    everything: bool = False  # all rows of tables are shown

    @property
    def parts(self) -> dict[str, int]:
        """Parameters by part of the model."""
        return count_parameter_parts(self.plan.shape)

    def count_flops(self, causal: bool) -> int:
        """FLOPs of forward and backward per token. causal: half of attention counted, as Megatron-LM does."""
        return step_flops(self.plan.shape, 1, causal=causal) // self.plan.shape.seq_length


@dataclass(frozen=True)
class Exact:
    """Figures of walking the real model and step under fake tensors."""

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
class Outlook:
    """A training on one kind of GPU."""

    processor: Processor
    memory: MemoryPrediction
    time: TimePrediction
    duration: Duration | None  # None where nothing of a step's time is known
    fit: Fit | None = None  # where it does not fit as it is, with the margin

    @property
    def room_bytes(self) -> int:
        """Memory of one GPU."""
        return self.processor.memory_bytes


@dataclass(frozen=True)
class StageOutlook:
    """Memory and work of one rank of a pipeline's stage."""

    plan: Plan
    memory: MemoryPrediction
    time: TimePrediction | None  # of its own work; None without a GPU
    exact: Exact | None = None  # of the first stage of those that are alike


@dataclass(frozen=True)
class Training:
    """A training as its command says it: `plan`, and `plan --exact`."""

    memory: MemoryPrediction  # of the rank that holds most, on the first GPU
    outlooks: Sequence[Outlook] = ()  # by GPU, in the order in which they were named
    variants: Sequence[Variant] = ()  # what if; on the first GPU
    fit: Fit | None = None  # into the GPU of --fit
    exact: Exact | None = None  # of the rank that holds most
    stages: Sequence[StageOutlook] = ()  # of a pipeline

    def simulate_stages(self, micro_batches: int) -> list[TimedAction]:
        """The schedule of so many micro-batches with each stage's least times; [] where these are not known."""
        times = []
        for one in self.stages:
            if one.time is None or not one.time.peak_tflops:
                return []
            plan = one.plan
            chunks = len(one.plan.stage.chunks)
            of_action = sum_micro_batches(one.time) / (plan.final_micro_batches) / chunks
            # backward has two products for each of forward's, and forward's again where layers are recomputed
            again = plan.recomputed_layers / max(len(plan.stage.layers), 1)
            forward = of_action / (3 + again)
            weights = forward if plan.stage.splits_backward else 0.0
            times.append(
                ActionTimes(forward, of_action - forward - weights, weights, weigh_chunks(plan.shape, plan.stage))
            )
        stages = [one.plan.stage for one in self.stages]
        return simulate_schedule(stages, micro_batches, times)


@dataclass(frozen=True)
class Generating:
    """The trained model when it generates: `plan --inference`."""

    prediction: InferencePrediction  # of memory, without a GPU
    on_gpus: Sequence[tuple[Processor, InferencePrediction]] = ()


@dataclass(frozen=True)
class PlanReport:
    """The answers on one launch command; None for what was not asked."""

    subject: Subject
    training: Training | None = None
    generating: Generating | None = None
    search: Search | None = None
    fastest: Exact | None = None  # of what the search puts first: what the walk of its heaviest stage gave
