"""steps.jsonl: a line for every step of the rank that writes, and one of all ranks for every console line.

A watched script has no lines of ranks. It, and a run that fails, has lines of the writing rank's hardware.

Times are milliseconds, memory is bytes, losses are nats. A field that is not known is absent from its line. Lines are
told apart by their field "kind". In pandas: pandas.read_json("steps.jsonl", lines=True).query("kind == 'step'")

With --no-step-timeline there are no lines of ranks, and of a step only its whole time.
"""

import json
from typing import Annotated, BinaryIO, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from megatron_lite.formats.hardware_record import HardwareFigures

MAX_NUMBER = 10**18  # no count, time or size of a run is larger; beyond it a file is damaged
MAX_STEP_LINE_BYTES = 2**26  # of a line of steps.jsonl; a longer one is damage

Ordinal = Annotated[int, msgspec.Meta(gt=0, lt=MAX_NUMBER)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
Number = Annotated[float, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
Positive = Annotated[float, msgspec.Meta(gt=0, lt=MAX_NUMBER)]
Nats = Annotated[float, msgspec.Meta(gt=-MAX_NUMBER, lt=MAX_NUMBER)]
RankNumbers = list[Number | None]  # a number for each rank; null for a rank that has none


class RoutingRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the tokens of a step were routed to experts, of all ranks."""

    # assignments of tokens to each expert, summed over layers
    expert_tokens: list[Count] = []
    # of each layer with experts, the assignments of its busiest expert over their even share: 1 is balanced
    busiest: list[Number] = []
    # the assignments of the rank whose experts have most over their even share, mean over layers with experts;
    # 1 where each rank has all experts
    busiest_ranks: Number = 1.0
    # assignments that were dropped beyond --moe-expert-capacity-factor
    dropped: Count = 0
    # balancing losses without their coefficients, means over layers and micro-batches, by Megatron-LM's names
    losses: dict[str, Nats] = {}


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="step"):
    """One step of the rank that writes, which is the last one.

    Steps since the last console line are written every few seconds. They are written once more, with all that is known,
    in their place when the next console line or an error comes.
    """

    # number of the step in the whole training, from 1
    iteration: Ordinal
    # number of the step in this start of the run, from 1
    step: Ordinal
    # samples of all ranks up to the step's end, those of skipped steps included
    consumed_samples: Count | None = None
    # samples of all ranks in the step
    batch_size: Count | None = None
    # the whole step on the host, evaluating and saving included
    ms: Positive
    # host time by phase. On a GPU that is the time of handing work over; "data" is waiting for the data loader
    phases_ms: dict[str, Number]
    # the step as the GPU passed through its stream, idle moments included; on a GPU only
    gpu_ms: Number | None = None
    # gpu_ms by phase. Gradients are reduced beside backward: what of it backward does not hide is a part of backward's
    # time, and "grad_sync" is what is left after it
    gpu_phases_ms: dict[str, Number] = {}
    # the part of backward in which this rank had its own gradients and waited for their reduction, and so for slower
    # ranks; with several ranks only
    reduce_wait_ms: Number | None = None
    # reduce_wait_ms on the GPU
    gpu_reduce_wait_ms: Number | None = None
    # CPU time of all threads of this process
    cpu_ms: Number | None = None
    # for how long the thread that trains was ready and had no core; Linux
    core_wait_ms: Number | None = None
    # how often something else took a thread of this process off its core
    involuntary_switches: Count | None = None
    # memory of this process at the step's end; Linux
    host_memory_bytes: Count | None = None
    # most that tensors took on the GPU within the step
    peak_memory_bytes: Count | None = None
    # the part of `ms` in which torch.compile compiled, or read from its cache; of compiling steps only
    compile_ms: Number | None = None
    # torch.profiler recorded the step
    profiled: bool = False
    # the step was not recorded, but a profiler prepared or wrote within it
    beside_profile: bool = False
    # something was compiled in the step
    compiling: bool = False
    # mean loss per token; null for NaN and Inf. Of a watched script it is the sum of the scalars that backward was
    # called on, where that is one loss
    loss: Nats | None | UnsetType = UNSET
    # norm of the gradients before clipping; null of a skipped step, and for NaN and Inf
    grad_norm: Number | None | UnsetType = UNSET
    # that the loss was multiplied by; 1 without scaling
    loss_scale: Number | None = None
    # the optimizer did not update the weights
    skipped: bool | UnsetType = UNSET
    # learning rate of the step after it
    next_lr: Number | None = None
    # of a mixture of experts only
    routing: RoutingRecord | None = None
    # mean loss of the tokens after the next one, by how far they are; of multi-token prediction only
    prediction_losses: list[float] | None = None
    # the loss is the writing rank's only: of a run that failed or was killed, and of a watched script on several ranks
    local: bool = False


class RankInterval(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The ordinary steps between two console lines, of all ranks.

    Steps that a profiler or compilation slowed down are left out.
    """

    # the first and the last iteration
    iterations: tuple[Ordinal, Ordinal]
    # how many steps were ordinary
    steps: RankNumbers = []
    # medians of the step's time on the host, without evaluating and saving
    step_ms: RankNumbers
    # medians of each phase's time on the host, over the steps that had the phase
    phases_ms: dict[str, RankNumbers] = {}
    # medians of gpu_ms
    gpu_ms: RankNumbers = []
    # medians of gpu_phases_ms, over the steps that had the phase
    gpu_phases_ms: dict[str, RankNumbers] = {}
    # medians of backward without waiting for other ranks, on the GPU where there is one; with several ranks only
    own_backward_ms: RankNumbers = []
    # medians of host_memory_bytes
    host_memory_bytes: RankNumbers = []
    # maxima of peak_memory_bytes
    peak_memory_bytes: RankNumbers = []
    # medians of cpu_ms
    cpu_ms: RankNumbers = []
    # medians of core_wait_ms
    core_wait_ms: RankNumbers = []
    # medians of involuntary_switches
    involuntary_switches: RankNumbers = []
    # figures of HardwareFigures by name, over all samples since the console line before; one number alone where all
    # ranks have the same
    hardware: dict[str, RankNumbers] = {}


class HardwareRecord(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag="hardware"):
    """Samples of one rank's hardware that no line of ranks holds."""

    # the first and the last iteration beside which they were taken
    iterations: tuple[Ordinal, Ordinal]
    rank: Count
    figures: HardwareFigures


Interval = TypeVar("Interval", RankInterval, msgspec.Raw)


class RanksRecord(msgspec.Struct, Generic[Interval], tag_field="kind", tag="ranks"):
    """One console line's interval. Readers take it as msgspec.Raw where not every interval is wanted."""

    # figures of the steps since the console line before, with a number for each rank
    ranks: Interval


_encoder = msgspec.json.Encoder()


def append_record(file: BinaryIO, record: StepRecord | RanksRecord[RankInterval] | HardwareRecord) -> None:
    """Append a line to an open steps.jsonl."""
    try:
        text = _encoder.encode(record)
    except UnicodeEncodeError:  # half a character, in a phase's name of somebody else's loop
        text = json.dumps(msgspec.to_builtins(record)).encode()
    file.write(text + b"\n")
