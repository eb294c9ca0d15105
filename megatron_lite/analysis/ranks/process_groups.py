"""Purposes of process groups: tensor, context, data, pipeline or expert parallel.

A group's description tells its purpose, else what calls it does.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

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
    ("context", "_GatherSequence|_SplitHeads|_JoinHeads|AttnFuncWithCP"),
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
    """Tell whether ranks shard weights, as far as the names of ranges and operators say.

    False where they hold whole ones, as with DistributedDataParallel; None where nothing says.
    """
    if any(map(_SHARDS.search, trace.names)):
        return True
    if any(map(_REPLICATES.search, trace.names)):
        return False
    return None


def guess_dimension(kind: str, caller: str, phase: str) -> str:
    """Guess the dimension of a collective whose trace names no group.

    Args:
        kind: what the collective is.
        caller: the name of the span of a layer around it; "" for none.
        phase: in which it was called; "" for unknown.

    Returns:
        The dimension; "" if unknown.
    """
    if kind in ("send", "recv", "send_recv"):
        return "pipeline"
    for dimension, pattern in _CALLERS:
        if re.search(pattern, caller):
            return dimension
    return "data" if kind in _OF_GRADIENTS.get(phase, ()) else ""


def find_group(groups: Sequence[ProcessGroup], dimension: str) -> ProcessGroup:
    """Find the one among a process' groups that a collective of this dimension uses.

    A group without ranks where several may be the one.
    """
    if len(groups) == 1:
        return groups[0]
    found = {}
    for group in groups:
        if dimension and find_dimension(group.description) == dimension:
            found[group.ranks] = group
    if len(found) != 1:
        return ProcessGroup("", dimension)
    [group] = found.values()
    return group


def drop_name(group: ProcessGroup) -> ProcessGroup:
    """Make a group as all ranks know it: they number their groups differently, and members tell which is which.

    A group whose members are not known keeps its name.
    """
    return replace(group, name="") if group.ranks else group


def label_group(group: ProcessGroup, world_size: int | None, only: str = "") -> str:
    """Name a group for people: its dimension, else which ranks it has.

    Args:
        group: the process group.
        world_size: the number of all ranks; None if unknown.
        only: the dimension of the ranks' layout, if it has one only.

    Returns:
        The name; "" if the trace does not say.
    """
    ranks = group.ranks
    dimension = find_dimension(group.description) or only
    if dimension:
        return dimension
    if len(ranks) > 1 and len(ranks) == world_size:
        return "all ranks"
    if not ranks:
        return ""
    strides = {after - before for before, after in itertools.pairwise(ranks)}
    if len(strides) != 1:
        return counted(len(ranks), "rank")
    [stride] = strides
    if stride == 1:
        return f"{len(ranks)} adjacent ranks"
    return f"{len(ranks)} ranks, {stride} apart"
