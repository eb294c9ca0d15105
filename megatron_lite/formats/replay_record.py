"""What `megatron-lite replay` asks of the ranks that run a step again, and what each of them answers.

The request is `request.json` in the folder that all of them are given; the answer of rank R is `rankR.json` beside it.
A number that is NaN or Inf is null.
"""

import enum

import msgspec

REQUEST_FILE = "request.json"
REPLAYED_RANK_FILE = "rank{}.json"
# beginnings of the names of what a step computes: outputs of modules, and gradients of these outputs
SEEN_FORWARD = "forward"
SEEN_BACKWARD = "backward"


class AttemptKind(enum.Enum):
    """The ways in which a step is run."""

    FIRST = "first"
    # the same once more, from the start
    SECOND = "second"
    # the same again, where the first two differ
    THIRD = "third"
    # the step with weights as before it, in fp32
    FP32 = "fp32"
    # the step with weights as before it, without the sequences that stand out
    WITHOUT = "without"
    # from the start at a lower learning rate
    LOWER_RATE = "lower rate"


class LoggedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step as the run has logged it."""

    iteration: int
    loss: float | None
    grad_norm: float | None
    # no update was made
    skipped: bool = False
    # the loss is one rank's only
    local: bool = False


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks are to do."""

    # the iteration to examine
    step: int
    # what the run has logged up to it, the oldest first
    logged: tuple[LoggedStep, ...] = ()
    # characters of a document's text
    max_text: int = 160


class DocumentPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a document in a sequence."""

    # of the files it is in, without .bin and .idx
    prefix: str
    # in these files, from 0
    number: int
    # tokens of the document before the piece, and of the piece
    offset: int
    tokens: int
    # mean loss of the labels that are in the piece; null: it has none, or it is not finite
    loss: float | None = None
    # the beginning of the piece
    text: str = ""


class SequenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of a step's batch, as one rank saw it."""

    data_rank: int
    micro_batch: int
    row: int
    # in the order of the data set; null: unknown
    sample: int | None = None
    # over the labels that count, and their number; null: not finite
    loss_sum: float | None = None
    labels: float = 0
    # norm of the gradient of its embeddings, times the loss scale; null: this rank has none, or it is not finite
    gradient: float | None = None
    # the gradient or the loss is NaN or Inf
    is_finite: bool = True
    # share of its tokens that are its most frequent one
    top_share: float = 0.0
    # share of different ones among its tokens
    variety: float = 0.0
    pieces: tuple[DocumentPiece, ...] = ()
    # where no piece is known
    text: str = ""


class ModuleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a module computed in a step, over its micro-batches."""

    # the module, as a whole model names it
    module: str
    # SEEN_FORWARD: its output; SEEN_BACKWARD: the gradient of its output
    direction: str
    # largest absolute value of what is finite
    largest: float
    # values that are NaN or Inf, and all of them
    nonfinite: int
    values: int
    # of the first micro-batch with such a value; null: none has
    micro_batch: int | None = None


class ReplayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of an attempt."""

    iteration: int
    # of all ranks
    loss: float | None
    grad_norm: float | None
    loss_scale: float | None = None
    skipped: bool = False
    # this rank's own sum of losses; null: not finite
    own_loss_sum: float | None = None
    # of each tensor that was watched, in the order of AttemptRecord.watched; () where nothing was
    checksums: tuple[int, ...] = ()


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which the step was run."""

    kind: AttemptKind
    # why it could not be; "": it was
    left_out: str = ""
    # by how much the learning rate was lower: 0.5 is half of it
    rate: float = 1.0
    steps: tuple[ReplayedStep, ...] = ()
    # the tensors that were watched, "forward MODULE" or "backward MODULE", in the order in which they were computed
    watched: tuple[str, ...] = ()
    # of the step, and of the one before it
    modules: tuple[ModuleRecord, ...] = ()
    before: tuple[ModuleRecord, ...] = ()
    # of the step's batch that this rank saw
    sequences: tuple[SequenceRecord, ...] = ()
    # by iteration, mean losses of this rank's sequences in the steps before it; not finite ones are left out
    earlier: dict[int, list[float]] = {}


class WeightRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a parameter before the step."""

    name: str
    # root of the mean square of this rank's part; null: not finite
    rms: float | None


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has done."""

    rank: int
    ranks: int
    # where it stands: stages of the pipeline, tensor parallel ranks, ranks that share the batch
    pipeline_rank: int = 0
    tensor_rank: int = 0
    data_rank: int = 0
    context_rank: int = 0
    # why it could not; "": it has
    failure: str = ""
    device: str = "cpu"
    precision: str = "fp32"
    # the loss scale adapts itself to overflows
    scales_dynamically: bool = False
    # operations on this device give the same bits each time
    is_deterministic: bool = True
    # the iteration that attempts began after
    started_at: int = 0
    attempts: tuple[AttemptRecord, ...] = ()
    # (data rank, micro-batch, row) of the sequences of the step that stand out
    suspects: tuple[tuple[int, int, int], ...] = ()
    weights: tuple[WeightRecord, ...] = ()
    # norm of the update before the step, over that of the weights; null: unknown
    update_ratio: float | None = None
    # learning rate of the step
    rate: float | None = None
    versions: dict[str, str] = {}
