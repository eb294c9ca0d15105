"""Layers that predict further tokens in both worlds: DeepSeek-V3's tensors, behind those of the decoder's layers.

transformers passes over them; DeepSeek's own folders have them, and vLLM reads them to draft tokens. The tensors of
embedding and output projection are there once more for each such layer, as copies.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_lite.config.expert_layers import MAX_PATTERN_LAYERS
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.mappings import SAME, Link, WeightForms
from megatron_lite.errors import CheckpointError

KEY = "num_nextn_predict_layers"
EMBEDDING_COPY = "embed_tokens.weight"
OUTPUT_COPY = "shared_head.head.weight"


def name_layer(shape: ModelShape, depth: int) -> str:
    """Build the prefix of a layer's tensors there.

    Args:
        shape: The model's shape.
        depth: The layer's number, from 0.
    """
    return f"model.layers.{shape.num_layers + depth}."


def name_copies(shape: ModelShape, what: str) -> tuple[str, ...]:
    """List the names of a matrix' copies, one for each layer.

    Args:
        shape: The model's shape.
        what: EMBEDDING_COPY or OUTPUT_COPY.
    """
    return tuple(name_layer(shape, depth) + what for depth in range(shape.mtp_num_layers))


def lay_out_copies(layout: WeightForms, names: tuple[str, ...]) -> WeightForms:
    """The same numbers under several names there.

    Args:
        layout: The layout of one copy.
        names: The names of the copies, for the message if one is none.
    """

    def to_hf(ours: Tensor) -> tuple[Tensor, ...]:
        (theirs,) = layout.to_hf(ours)
        return (theirs,) * (1 + len(names))

    def from_hf(theirs: list[Tensor]) -> Tensor:
        first, *copies = theirs
        for name, copy in zip(names, copies):
            if not torch.equal(first, copy):
                raise CheckpointError(
                    f"--load-hf: {name} is no copy of the model's own matrix, and here there is one only; "
                    f"take the layer's tensors out, and set {KEY} to 0 in config.json."
                )
        return layout.from_hf([first])

    return WeightForms(to_hf, from_hf)


def list_links(ours: str, theirs: str, norm: WeightForms) -> Iterator[Link]:
    """Parameters of one layer that a layer of the decoder does not have.

    Args:
        ours: The prefix of the layer's parameters here.
        theirs: The prefix of the layer's tensors there.
        norm: The layout of norms.
    """
    yield Link(f"{ours}enorm.weight", (f"{theirs}enorm.weight",), norm)
    yield Link(f"{ours}hnorm.weight", (f"{theirs}hnorm.weight",), norm)
    yield Link(f"{ours}eh_proj.weight", (f"{theirs}eh_proj.weight",), SAME)
    yield Link(f"{ours}final_layernorm.weight", (f"{theirs}shared_head.norm.weight",), norm)


def read_number(config: ConfigFile) -> int:
    """Read how many such layers a config.json tells of. CheckpointError for what is no number."""
    return config.whole(KEY, most=MAX_PATTERN_LAYERS) if config.get(KEY, 0) else 0


def drop_absent(shape: ModelShape, names: Iterable[str]) -> ModelShape:
    """The shape without such layers if a folder has none of them, as transformers leaves them out when it saves.

    Args:
        shape: The shape that config.json tells of.
        names: The names of the folder's tensors.
    """
    first = name_layer(shape, 0)
    if any(name.startswith(first) for name in names):
        return shape
    return replace(shape, mtp_num_layers=0)
