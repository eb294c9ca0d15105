"""What `megatron-lite prove` asks of the processes of a command, and what each of them answers.

The request is JSON in an environment variable. The answer of rank R is `rankR.json`, a ProveRecord; the tensors that it
names lie beside it, in `rankR.npz`, as float32, or float64 where the script computes in it.
"""

import msgspec

RANK_FILE = "rank{}.json"
TENSORS_FILE = "rank{}.npz"
FED_INPUTS = "inputs"  # beginnings of the names of tensors that a run can be fed
FED_TARGETS = "targets"
WEIGHTS_FILE = "weights.npz"  # whole weights by name, for a run that is to start from them
FED_FILE = "feed.npz"  # tensors for a run that is to take them


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    """What a run takes from another one, so that both train on the same."""

    # the file with the weights to start from, by name; "": the script's own
    weights: str = ""
    # by data loader in the order of their first use, then by batch: the indices of the samples; []: the script's own
    indices: list[list[list[int]]] = []
    # the file with tensors that forwards of the model and losses take instead of their own, named
    # inputs/MICRO_BATCH/ARGUMENT and targets/MICRO_BATCH/NUMBER, over all steps; "": the script's own
    tensors: str = ""


class ProveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a command are to record."""

    # where each of them writes its answer
    folder: str
    # updates of the weights to record, after which the script ends
    steps: int = 2
    # what is taken from another run
    feed: Feed = Feed()
    # the command is this package's own trainer
    is_own_trainer: bool = False
    # weights are multiplied by 1 + this times a random number from -1 to 1, to see what rounding does; 0: they stay
    perturbation: float = 0.0


class TensorPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a named tensor that a rank holds."""

    # of the parameter, or of the module whose output it is, as a model on one rank names it
    name: str
    # of the array in the rank's npz file; "": the rank has none, as where a gradient is missing
    key: str
    # of the script's tensor, such as bfloat16
    dtype: str = ""
    # shape of the whole tensor, of which this part is a block; that of the part where nothing tells
    whole: tuple[int, ...] = ()
    # where the block begins in each dimension of the whole
    starts: tuple[int, ...] = ()
    # whether the rank told where its part lies: DTensor, Megatron-Core's attributes, this package's trainer. Else the
    # part is taken for the whole, of which each rank has a replica
    is_placed: bool = False
    # whether it is to be added to the parts of other ranks (DTensor's Partial)
    is_partial: bool = False


class SeenMicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One forward of the model, with what it was given."""

    # a hash of each row (first dimension) of the inputs, over all tensors that the model is called with
    rows: tuple[str, ...] = ()
    # loaders' indices of its samples; (): no loader was seen
    indices: tuple[int, ...] = ()
    # a hash of the state of the default random generator when the model was called
    random_state: str = ""
    # what backward was called on; null: no number
    loss: float | None = None


class ModuleOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a module returned, in the first step."""

    # the module's name and class, and its number in the order of the calls, from 0
    module: str
    class_name: str
    call: int
    # number of the forward of the model within the step, from 0
    micro_batch: int
    # its parts: the tensors of what it returned, named module#NUMBER
    parts: tuple[TensorPart, ...]
    # whether torch normalizes by statistics of this rank's batch (BatchNorm in training, not SyncBatchNorm)
    has_local_statistics: bool = False


class Clipping(msgspec.Struct, frozen=True, kw_only=True):
    """The norm of the whole gradient as the script computes it: torch's clip_grad_norm_, or this package's trainer."""

    # L2 norm before clipping, as the call returned it
    norm: float
    # that it clipped to; 0: it did not
    max_norm: float


class ProvedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step: everything until the weights were updated."""

    # forwards of the model, in order
    micro_batches: tuple[SeenMicroBatch, ...] = ()
    # as they were before clipping, or at the update where nothing clips
    gradients: tuple[TensorPart, ...] = ()
    # what autograd alone added up for plain parameters, before any rank had its say
    local_gradients: tuple[TensorPart, ...] = ()
    # null: torch's clip_grad_norm_ was not called
    clipping: Clipping | None = None
    # L2 norms over this rank's parts: of gradients as above, and of the same ones at the update, after clipping; 0
    # where what is updated are copies
    kept_norm: float = 0.0
    updated_norm: float = 0.0
    # after the update
    weights: tuple[TensorPart, ...] = ()


class LoaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A data loader, in the order of first use."""

    # samples of its dataset; 0: unknown
    samples: int
    # indices of each batch that was drawn, in order
    batches: list[list[int]]
    # class of its sampler
    sampler: str = ""
    # indices of the whole epoch, where the sampler tells them without being used up (DistributedSampler)
    epoch: list[int] = []


class ProveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank recorded."""

    rank: int
    ranks: int
    # when the model was first called, before anything was fed
    weights: tuple[TensorPart, ...] = ()
    # names of parameters that are one and the same tensor, to the name that is used here
    aliases: dict[str, str] = {}
    steps: tuple[ProvedStep, ...] = ()
    # of the first step, in the order of the calls
    outputs: tuple[ModuleOutput, ...] = ()
    loaders: tuple[LoaderRecord, ...] = ()
    # dropout was switched off in these modules, or functions, with the probability that they had
    dropouts: dict[str, float] = {}
    # how gradients were brought together, in words: DistributedDataParallel, fully_shard, DTensor, by hand ...
    engines: tuple[str, ...] = ()
    # what was not recorded, and why
    notes: tuple[str, ...] = ()
    # why there is no record; "": there is one
    failure: str = ""
