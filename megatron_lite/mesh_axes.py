"""Names of the axes along which ranks divide a model's work, and of groups of ranks beside them.

As torchtitan's parallel_dims.py does for its own, this is the one place that fixes them. Imports nothing of the
package: the trainer makes meshes and groups by these names, and planner, walk and explainer say by them which ranks
exchange what. docs/architecture.md has the table.
"""

import re

# Axes of the mesh of ranks, from the outermost to the innermost
PIPELINE = "pipeline"  # ranks that have some of the layers each, and hand hidden states on
REPLICATE = "replicate"  # ranks that hold the same weights, and average their gradients
SHARD = "shard"  # ranks that shard weights, gradients and moments by rows (ZeRO)
TENSOR = "tensor"  # ranks that split each layer
# Axes of the mesh of replicas of experts, in front of REPLICATE and SHARD
STAGE = "stage"  # one for each stage of the pipeline
BLOCK = "block"  # places among the ranks that together have all experts once
# Groups that are no axis of a mesh
CONTEXT = "context"  # ranks that have some of the positions of each sequence
CONTEXT_HEADS = "context, of heads"  # neighbors of CONTEXT that exchange heads for positions
CONTEXT_POSITIONS = "context, of positions"  # ranks of CONTEXT that have the same heads then
EXPERTS = "experts"  # ranks that together have all experts once
EXPERT_REPLICAS = "replicas of experts"  # ranks that hold the same part of the experts
MICRO_BATCH = "tokens of a micro-batch"  # ranks that together have all tokens of a micro-batch
QUERY_GROUP = "tensor, of a query group"  # tensor parallel ranks that share queries' keys and values
ENDS = "ends"  # the first and the last stage, which both have an embedding that is tied, or that further tokens need

# Dimensions of a layout, as plans and reports name them: PIPELINE, TENSOR, CONTEXT and
DATA = "data"  # ranks of REPLICATE, SHARD and CONTEXT, which have other tokens each
EXPERT = "expert"  # ranks of EXPERTS
EXPERT_DATA = "expert data"  # ranks of EXPERT_REPLICAS

# Words of descriptions of process groups that tell of a dimension: by PyTorch's device meshes, Megatron-LM, torchtitan,
# and this trainer, whose older traces say copies and rows
_WORDS = {
    TENSOR: {"tensor", "tp"},
    CONTEXT: {"context", "cp"},
    DATA: {"data", "dp", "fsdp", "hsdp", "ddp", "replicate", "shard", "replicas", "copies", "rows"},
    PIPELINE: {"pipeline", "pp", "embedding", "ends"},
    EXPERT: {"expert", "experts", "ep"},
}
_MODEL = {"model", "parallel", "group"}  # Megatron-LM's group of all ranks that together hold one model


def find_dimension(description: str) -> str:
    """Find the dimensions that a group's name speaks of: "context and data" of "mesh_dp_shard_cp"; "" for none."""
    words = set(re.findall("[a-z]+", description.lower()))
    if words == _MODEL:
        return "tensor and pipeline"
    return " and ".join(dimension for dimension, known in _WORDS.items() if known & words)
