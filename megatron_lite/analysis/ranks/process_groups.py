"""What a process group is for: tensor, context, data, pipeline or expert parallel.

By its description, else by what calls it.
"""

import itertools
import re
from collections.abc import Sequence

from megatron_lite.analysis.trace.columns import ProcessGroup, Trace
from megatron_lite.mesh_axes import find_dimension
from megatron_lite.phases import Phase
from megatron_lite.units import counted

# A backend without descriptions: the function of the layer that communicates, in this trainer and in Megatron-LM
_CALLERS = (
    (
        "tensor",
        (
            "_ColumnLinear|_SumOverRanks|_GatherQueryGroup|_FusedLosses"
            "|ModelParallelRegion|SequenceParallelRegion|VocabParallel"
        ),
    ),
    ("tensor", "LinearWithGradAccumulationAndAsyncCommunication"),
    ("context", "_GatherSequence"),
    ("data", "FSDP::|DistributedDataParallel"),
)
CALLER = re.compile("|".join(f"(?:{pattern})" for _, pattern in _CALLERS))
_OF_SHARDS = ("reduce_scatter", "all_gather")
_OF_GRADIENTS: dict[str, tuple[str, ...]] = {
    Phase.BACKWARD: (*_OF_SHARDS, "all_reduce"), Phase.GRAD_SYNC: _OF_SHARDS, Phase.OPTIMIZER_STEP: _OF_SHARDS
}  # fmt: skip


# what replicates whole weights, and what shards them
_REPLICATES = re.compile(r"DistributedDataParallel\.forward")
_SHARDS = re.compile(r"FSDP|FullyShard|fully_shard|fsdp::|[Dd]eep[Ss]peed|ZeroRedundancy|\bZeRO\b")


def is_fully_sharded(trace: Trace) -> bool | None:
    """Do ranks share out weights, as far as the names of ranges and operators say? False: they hold whole ones
    (DistributedDataParallel). None: nothing says."""
    if any(map(_SHARDS.search, trace.names)):
        return True
    return False if any(map(_REPLICATES.search, trace.names)) else None


def guess_dimension(kind: str, caller: str, phase: str) -> str:
    """Of a collective whose trace names no group: by its kind, the span of a layer around it, its phase;
    "" if unknown."""
    if kind in ("send", "recv", "send_recv"):
        return "pipeline"
    for dimension, pattern in _CALLERS:
        if re.search(pattern, caller):
            return dimension
    return "data" if kind in _OF_GRADIENTS.get(phase, ()) else ""


def find_group(groups: Sequence[ProcessGroup], dimension: str) -> ProcessGroup:
    """The one among a process' groups that a collective of this dimension uses; one without ranks if several may be."""
    if len(groups) == 1:
        return groups[0]
    found = {group.ranks: group for group in groups if dimension and find_dimension(group.description) == dimension}
    [group] = found.values() if len(found) == 1 else [ProcessGroup("", dimension)]
    return group


def label_group(group: ProcessGroup, world_size: int | None, only: str = "") -> str:
    """For people: its dimension, else which ranks it has; "" if the trace does not say.

    only: the layout's one dimension.
    """
    ranks = group.ranks
    if dimension := find_dimension(group.description) or only:
        return dimension
    if len(ranks) > 1 and len(ranks) == world_size:
        return "all ranks"
    strides = {after - before for before, after in itertools.pairwise(ranks)}
    if len(strides) != 1:
        return counted(len(ranks), "rank") if ranks else ""
    [stride] = strides
    return f"{len(ranks)} adjacent ranks" if stride == 1 else f"{len(ranks)} ranks, {stride} apart"
