"""What running a step of a training again gave: what `megatron-lite replay` prints and writes as JSON."""

import enum

import msgspec


class ReplayCause(enum.Enum):
    """What a step went wrong by."""

    NOTHING = "nothing wrong"
    DATA = "data"
    NUMERICS = "numerics"
    RATE = "learning rate"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


class ReplayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The step's figures in one way of running it; null: NaN or Inf, or not computed."""

    # logged, first replay, in fp32, ...
    name: str
    loss: float | None
    grad_norm: float | None
    # what went wrong; "": nothing
    failure: str = ""
    # why it was not run; "": it was
    left_out: str = ""


class ReplayPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The first module that shows something in the step."""

    # what it shows
    what: str
    module: str
    ranks: tuple[int, ...]
    # its figures
    evidence: str


class ReplayDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a document in a sequence."""

    # the files, the document's number in them, and tokens before the piece and of it; "": unknown
    where: str
    # mean loss of its labels; null: unknown, or not finite
    loss: float | None
    # its beginning
    text: str


class ReplaySequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of the step's batch."""

    # data parallel rank, micro-batch, and row in it
    data_rank: int
    micro_batch: int
    row: int
    # number in the order of the data set; null: unknown
    sample: int | None
    # mean loss of its labels; null: not finite, or unknown
    loss: float | None
    # norm of the gradient of its embeddings over the median of the batch; null: not finite, or unknown
    gradient: float | None
    # share of its tokens that are its most frequent one
    top_share: float
    # it stands out from the others
    is_suspect: bool
    documents: tuple[ReplayDocument, ...] = ()


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `megatron-lite replay`."""

    # folder of the run
    run: str
    step: int
    cause: ReplayCause
    # of the cause: high, medium or low
    confidence: str
    # one sentence: what went wrong, and by what
    sentence: str
    # what speaks for it, with figures
    evidence: tuple[str, ...] = ()
    # what else could have made this, and why it is not excluded
    alternatives: tuple[str, ...] = ()
    # what to do
    remedies: tuple[str, ...] = ()
    # where attempts began
    started_from: str = ""
    figures: tuple[ReplayFigures, ...] = ()
    places: tuple[ReplayPlace, ...] = ()
    # those that stand out, or the ones with the largest losses
    sequences: tuple[ReplaySequence, ...] = ()
    # sequences of the whole batch
    batch: int = 0
    # what was not found out, and why: each lowers what the cause says
    not_tested: tuple[str, ...] = ()
    # what ran
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
