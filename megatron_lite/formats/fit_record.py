"""What `megatron-lite fit` asks of the process that runs a script, and what that process answers: JSON each."""

import enum

import msgspec

ENDED_EARLY = "the script ended before an optimizer had stepped twice"  # a failure of a walk

NOT_ON_GPU = (
    'nothing was computed on the GPU that torch.cuda shows: put model and batches on "cuda" (a flag of the script, '
    "such as --device=cuda), or walk it as on the CPU by --cpu"
)


class ChangeName(str, enum.Enum):
    """What can be changed of a script for a walk."""

    # activations of each block are computed again in backward
    RECOMPUTE = "recompute"
    # forward computes in bf16
    BF16 = "bf16"
    # one kernel updates all weights
    FUSED = "fused"
    # weights are updated one after another
    ONE_BY_ONE = "one by one"
    # each rank updates its share of the weights, and keeps the optimizer's state of that
    SHARED_STATE = "shared state"


class FitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One walk of a script."""

    # the file in which the answer is written
    answer: str
    # the GPU as PyTorch names it; "": the CPU
    gpu: str = ""
    # its compute capability
    capability: tuple[int, int] = (0, 0)
    # its memory, in bytes
    total_bytes: int = 0
    # of one of cuBLAS' workspaces, in bytes
    workspace_bytes: int = 0
    # the file in which the memory snapshot is written; "": none
    snapshot: str = ""
    # the script's leading size of batches, where it is to be changed; 0: it stays
    batch: int = 0
    # what it becomes
    wanted_batch: int = 0
    # what is changed for the walk; null: nothing
    change: ChangeName | None = None
    # the script computes with data, on the CPU; what its memory is then is recorded
    with_data: bool = False


class FitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a script until every optimizer has stepped twice."""

    # the most that tensors held, in bytes as CUDA's allocator rounds them
    allocated_peak_bytes: int = 0
    # what the allocator had taken of the device for it, in bytes
    reserved_peak_bytes: int = 0
    # of the peak: forward, backward, recompute, optimizer_step or setup
    phase: str = ""
    # of the peak: step, module, operation and line
    where: str = ""
    # bytes at the peak by category, largest first; they add up to the peak
    categories: dict[str, int] = {}
    # lines of the script that decided by a value which only data has, and how often
    branches: dict[str, int] = {}
    # lines that copied such values to the host, where decisions by them are not seen, and how often
    copies: dict[str, int] = {}
    # what the walk left out, in sentences
    notes: tuple[str, ...] = ()
    # the leading size of the tensors that were moved to the device in steps; 0: none was
    batch: int = 0
    # why there are no figures; "": there are
    failure: str = ""
