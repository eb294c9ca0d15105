"""The names of weights in Megatron's files, of all its ages, and the order in which Megatron registers them.

Ours are those of Megatron-Core's local layer specification. Transformer Engine's holds the two norms of a layer inside
the linear module that follows; the files before Megatron-Core nest dicts and speak of query_key_value.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_lite.config.shape import ModelShape

LEGACY = [  # (pattern, ours), of the names below language_model
    (r"^(?:encoder|transformer)\.(layers\.)", r"decoder.\1"),
    (r"^(?:encoder|transformer)\.final_(?:layer)?norm\.", "decoder.final_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."),
    (r"\.(?:self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
]
FUSED_NORMS = [
    (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
    (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
    (r"\.self_attention\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".self_attention.\1_layernorm.\2"),
]
ENDS = [
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "decoder.layers",
    "decoder.final_layernorm",
    "output_layer",
]
IN_A_LAYER = [
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
]
IN_A_FUSED_LAYER = [*IN_A_LAYER[1:3], IN_A_LAYER[0], *IN_A_LAYER[3:]]  # the first norm stands inside linear_qkv
# in the names of experts' weights, ours and a torch_dist folder's
EXPERTS_HERE = ".mlp.experts.linear_fc"
EXPERTS_THERE = ".mlp.experts.experts.linear_fc"
NORM_BEFORE_EXPERTS = ".pre_mlp_layernorm."
NORM_IN_FC1 = ".mlp.linear_fc1.layer_norm_"
OF_LAYER = re.compile(r"\.layers\.(\d+)\.")
# of the decoder's layers, and of those of multi-token prediction
NORM_OF_ATTENTION = re.compile(r"(\.layers\.\d+(?:\.transformer_layer)?)\.input_layernorm\.")
NORM_OF_MLP = re.compile(r"(\.layers\.\d+(?:\.transformer_layer)?)\.pre_mlp_layernorm\.")
FURTHER = "mtp.layers."  # how names of multi-token prediction begin
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")


def read_names(model: Mapping[str, object]) -> dict[str, Tensor]:
    """Weights by our name of a file's "model", in the file's order, which is the order of its parameters."""
    weights: dict[str, Tensor] = {}
    for name, value in _flatten(model, "").items():
        if isinstance(value, Tensor) and not name.endswith(("_extra_state", "inv_freq")):
            weights[ours(name)] = value
    return weights


def read_chunks(state: Mapping[str, object], chunks: int) -> dict[str, Tensor]:
    """Weights by our name of all chunks of a file, whose layers are numbered on from one chunk to the next.

    Args:
        state: The file's contents: "model", or "model0", "model1", ... of several chunks.
        chunks: How many there are.
    """
    weights: dict[str, Tensor] = {}
    for model in _list_models(state, chunks):
        before = count_layers(weights)
        for name, weight in read_names(model).items():
            match = LAYER.match(name)
            if match:
                name = f"decoder.layers.{int(match[1]) + before}.{match[2]}"
            weights[name] = weight
    return weights


def count_chunk_layers(state: Mapping[str, object], chunks: int) -> list[int]:
    """Layers of each chunk of a file, which may differ."""
    return [count_layers(read_names(model)) for model in _list_models(state, chunks)]


def _list_models(state: Mapping[str, object], chunks: int) -> list[Mapping[str, object]]:
    """The models of a file, one per chunk. KeyError or TypeError for one that is missing or is no dict."""
    keys = ["model"] if chunks == 1 else [f"model{chunk}" for chunk in range(chunks)]
    models: list[Mapping[str, object]] = []
    for key in keys:
        model = state[key]
        if not isinstance(model, dict):
            raise TypeError(f"{key} is a {type(model).__name__}")
        models.append(model)
    return models


def count_layers(weights: Iterable[str]) -> int:
    """How many layers the names of weights, or of their states in the optimizer, belong to."""
    matches = [OF_LAYER.search(name) for name in weights]
    return len({match[1] for match in matches if match})


def ours(name: str) -> str:
    """Our name for a file's; one that is not known stays as it is."""
    name = name.replace(EXPERTS_THERE, EXPERTS_HERE)
    rest = name.removeprefix("language_model.")
    rules = FUSED_NORMS if rest == name else LEGACY
    for pattern, replacement in rules:
        rest = re.sub(pattern, replacement, rest)
    return rest


def in_file_order(names: Iterable[str], fused: bool) -> list[str]:
    """Sort our names into the order of Megatron's named_parameters.

    Args:
        names: Names of weights. ValueError for one that a GPT does not have.
        fused: Whether the layers are Transformer Engine's, which have the first norm inside linear_qkv.
    """
    in_a_layer = IN_A_FUSED_LAYER if fused else IN_A_LAYER

    def place(name: str) -> tuple[int, int, int, bool]:
        """The key to sort by: (part of the model, layer, module of the layer, whether it is a bias)."""
        module, _, kind = name.rpartition(".")
        is_bias = kind == "bias"
        layer = LAYER.match(module)
        if layer:
            return ENDS.index("decoder.layers"), int(layer[1]), in_a_layer.index(layer[2]), is_bias
        return ENDS.index(module), 0, 0, is_bias

    return sorted(names, key=place)


def file_name(name: str, fused: bool) -> str:
    """The file's name for one of ours."""
    if not fused:
        return name
    name = NORM_OF_ATTENTION.sub(r"\1.self_attention.linear_qkv.layer_norm_", name)
    return NORM_OF_MLP.sub(r"\1.mlp.linear_fc1.layer_norm_", name)


def latent_file_name(name: str) -> str:
    """The file's name for one of ours, in a model of latent attention by Transformer Engine.

    There the norms of latent vectors stand inside the projections that follow, and a layer's first norm by itself.
    """
    name = re.sub(r"\.self_attention\.(q|kv)_layernorm\.", r".self_attention.linear_\1_up_proj.layer_norm_", name)
    return NORM_OF_MLP.sub(r"\1.mlp.linear_fc1.layer_norm_", name)


def list_local_names(key: str) -> list[str]:
    """Name a norm that Transformer Engine has inside a linear module as local layers of latent attention do.

    Returns:
        The name; nothing for any other key.
    """
    found = ours(key)
    return [] if found == key or found.endswith("_extra_state") or is_of_experts(key) else [found]


def extra_states(names: Iterable[str]) -> list[str]:
    """The keys of Megatron's linear modules' own (empty) state: it misses them in a strict load."""
    modules = {name.rpartition(".")[0] for name in names}
    linear = sorted(module for module in modules if module.rpartition(".")[2].startswith("linear_"))
    return [f"{module}._extra_state" for module in [*linear, "output_layer"]]


@dataclass(frozen=True)
class FolderNames:
    """How a torch_dist folder has the layers of a model."""

    shape: ModelShape
    # a weight of all layers is one tensor, with the layers as its first dimension; but for those of multi-token
    # prediction
    stacks: bool = True

    @property
    def experts(self) -> int:
        """How many experts a layer has that has any."""
        return 0 if self.shape.experts is None else self.shape.experts.number

    def find_key(self, name: str) -> tuple[str, int | None]:
        """Where the folder has one of our names.

        Returns:
            Its key there, and the number of its layer, by which the first dimension is indexed; None for a weight of
            no layer, and where weights are not stacked.
        """
        if self._is_of_experts(name) and NORM_BEFORE_EXPERTS in name:
            key = name  # no linear module follows that could have it
        elif self.shape.latent is not None:
            key = latent_file_name(name)
        else:
            key = file_name(name, fused=True)
        key = key.replace(EXPERTS_HERE, EXPERTS_THERE)
        match = LAYER.match(key)
        if match is None or not self.stacks:
            return key, None
        return f"decoder.layers.{match[2]}", int(match[1])

    def _is_of_experts(self, name: str) -> bool:
        """Whether the layer of a weight has experts."""
        if name.startswith(FURTHER):
            return self.shape.has_experts(self.shape.num_layers)
        match = LAYER.match(name)
        return match is not None and self.shape.has_experts(int(match[1]))

    def list_layers_with_experts(self) -> list[int]:
        """Numbers of the layers that have experts, from 0."""
        return [layer for layer in range(self.shape.num_layers) if self.shape.has_experts(layer)]

    def find_state_key(self, module: str, layer: int, expert: int | None = None) -> str:
        """Where the folder has the (empty) state of a linear module.

        Args:
            module: Name of the module within the layer.
            layer: Number of the layer, from 0.
            expert: Number of the expert; None for a module of the whole layer.
        """
        places = [] if expert is None else [(expert, self.experts)]
        if self.stacks:
            places.insert(0, (layer, self.shape.num_layers))
            owner = f"decoder.layers.{module}"
        else:
            owner = f"decoder.layers.{layer}.{module}"
        places = places or [(0, 1)]
        offsets = ".".join(str(place) for place, _ in places)
        sizes = ".".join(str(size) for _, size in places)
        return f"{owner}._extra_state/shard_{offsets}_{sizes}"

    def list_further_state_keys(self, modules: Iterable[str], modules_of_an_expert: Iterable[str]) -> list[str]:
        """List where the folder has the (empty) states of the linear modules of multi-token prediction.

        Args:
            modules: Names within a layer.
            modules_of_an_expert: Names of each expert's modules, within a layer.
        """
        keys = []
        for depth in range(self.shape.mtp_num_layers):
            owner = f"{FURTHER}{depth}"
            keys.append(f"{owner}.eh_proj._extra_state/shard_0_1")
            keys += [f"{owner}.transformer_layer.{module}._extra_state/shard_0_1" for module in modules]
            for module, expert in itertools.product(modules_of_an_expert, range(self.experts)):
                keys.append(f"{owner}.transformer_layer.{module}._extra_state/shard_{expert}_{self.experts}")
        return keys


def is_of_experts(key: str) -> bool:
    """Whether a key of a torch_dist folder has the weights of experts, which are one of its dimensions.

    Folders of this trainer with latent attention have had them under our name, too.
    """
    return EXPERTS_THERE in key or EXPERTS_HERE in key


def unstacked_name(key: str, layer: int) -> str:
    """Our name for a layer's part of a stacked weight."""
    return ours(key.replace("decoder.layers.", f"decoder.layers.{layer}.", 1))


def is_stacked(key: str) -> bool:
    """Whether a key of a torch_dist folder has the weights of all layers."""
    return key.startswith("decoder.layers.") and LAYER.match(key) is None


def in_todays_order(qkv: Tensor, version: float, heads: int) -> Tensor:
    """Sort the rows of a QKV projection (or of its moments) of a file of any checkpoint_version.

    Version 0 has all queries, all keys, all values; version 1 has the three of each channel side by side.

    Args:
        qkv: (rows, ...), of a model without query groups.
        version: The file's checkpoint_version.
        heads: Query heads in these rows.

    Returns:
        The same rows as the file's later versions have them: per head its query, its key and its value.
    """
    if version >= 2:
        return qkv
    if version == 0:
        by_kind: Tensor = qkv.unflatten(0, (3, heads, -1))
        return by_kind.transpose(0, 1).flatten(0, 2)
    by_channel: Tensor = qkv.unflatten(0, (heads, -1, 3))
    return by_channel.transpose(1, 2).flatten(0, 2)


def _flatten(model: Mapping[str, object], prefix: str) -> dict[str, object]:
    """Turn dicts within dicts into one, whose keys are such as "a.b"."""
    flat: dict[str, object] = {}
    for key, value in model.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
