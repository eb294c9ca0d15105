"""The GPT model. Parameter names and layouts are those of Megatron-Core's local layer specification.

Letters: B batch, T positions, H hidden, V padded vocabulary, N query heads, G query groups (key/value heads), D width
of one head, R rotated part of D, E edges of documents (see Scope in attention.py).
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.layout import Part, take_part
from megatron_lite.config.parameter_groups import EMBEDDINGS
from megatron_lite.config.shape import ModelShape
from megatron_lite.model.attention import Attend, Scope, find_document_edges, sdpa_attention
from megatron_lite.model.experts import MixtureOfExperts, list_expert_biases, list_mixtures
from megatron_lite.model.latent_attention import LatentAttention
from megatron_lite.model.loss import token_losses
from megatron_lite.model.mlp import MLP
from megatron_lite.model.multi_token import MultiTokenPrediction, Targets
from megatron_lite.model.norm import Norm
from megatron_lite.model.rotary import make_rotary_tables, rotate

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class CoreAttention(nn.Module):
    """Parameters of attention's kernel itself: with --softmax-type learnable, the offset of each head."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.softmax_offset = nn.Parameter(torch.empty(shape.num_attention_heads))


class SelfAttention(nn.Module):
    """Attention of a layer, hidden_BTH -> BTH.

    The rows of linear_qkv are grouped: [queries of the group, its key, its value], per group.
    """

    def __init__(self, shape: ModelShape, layer_number: int, attend: Attend):
        """
        Args:
            shape: The model's shape.
            layer_number: The layer's number, from 1 over the whole model, not over a pipeline stage.
            attend: The attention kernel.
        """
        super().__init__()
        # the same for all layers where it is not used, so that a compiled layer serves all
        self.layer_number = layer_number if shape.query_key_layer_scaling else 1
        self.attend = attend
        self.window = shape.find_window(layer_number - 1)
        self.heads_per_group = shape.num_attention_heads // shape.num_query_groups
        self.kv_channels = shape.kv_channels
        self.dropout = shape.attention_dropout
        self.rotary_interleaved = shape.rotary_interleaved
        # kernels scale scores by 1 / sqrt(D); queries make up for another scale
        self.query_scale = 1.0 if shape.softmax_scale is None else shape.softmax_scale * math.sqrt(shape.kv_channels)
        self.softmax_type = shape.softmax_type
        self.core_attention = CoreAttention(shape) if shape.softmax_type == "learnable" else None
        self.linear_qkv = nn.Linear(shape.hidden_size, shape.qkv_rows, bias=shape.qkv_bias)
        self.linear_proj = nn.Linear(shape.attention_width, shape.hidden_size, bias=shape.linear_bias)
        self.q_layernorm = Norm(shape.kv_channels, shape) if shape.qk_layernorm else None
        self.k_layernorm = Norm(shape.kv_channels, shape) if shape.qk_layernorm else None

    @property
    def columns(self) -> list[nn.Linear]:
        """Linear layers of whose rows, heads, tensor parallel ranks have some each."""
        return [self.linear_qkv]

    @property
    def replicated(self) -> list[nn.Linear]:
        """Linear layers that every tensor parallel rank has whole."""
        return []

    def forward(
        self,
        hidden_BTH: Tensor,
        edges_E: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        """Attend: (B, T, H) -> (B, T, H).

        Args:
            hidden_BTH: The input.
            edges_E: Where documents begin and end, as in Scope; None: each sequence is one.
            cos_B1TR: Cosines of the rotation, by make_rotary_tables; None: nothing rotates.
            sin_B1TR: Sines of the rotation.
        """
        q_BNTD, k_BGTD, v_BGTD = self._project(hidden_BTH)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_BNTD = self.q_layernorm(q_BNTD)
            k_BGTD = self.k_layernorm(k_BGTD)
        if cos_B1TR is not None and sin_B1TR is not None:
            q_BNTD = rotate(q_BNTD, cos_B1TR, sin_B1TR, self.rotary_interleaved)
            k_BGTD = rotate(k_BGTD, cos_B1TR, sin_B1TR, self.rotary_interleaved)
        if self.query_scale != 1:
            q_BNTD = q_BNTD * self.query_scale
        dropout = self.dropout if self.training else 0.0
        scope = Scope(edges_E, self.window, self._find_offset(q_BNTD))
        out_BNTD = self.attend.function(q_BNTD, k_BGTD, v_BGTD, scope, dropout, self.layer_number)
        projected_BTH: Tensor = self.linear_proj(out_BNTD.transpose(1, 2).flatten(2))
        return projected_BTH

    def _find_offset(self, q_BNTD: Tensor) -> Tensor | None:
        """The offset of each head's softmax, offset_N; None: there is none."""
        if self.core_attention is not None:
            return self.core_attention.softmax_offset
        # exp(0) = 1
        return q_BNTD.new_zeros(q_BNTD.shape[1]) if self.softmax_type == "off-by-one" else None

    def _project(self, hidden_BTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values: (q_BNTD, k_BGTD, v_BGTD)."""
        # the number of groups is left to the tensor: a tensor parallel rank holds only its share of them
        grouped = self.linear_qkv(hidden_BTH).unflatten(-1, (-1, self.heads_per_group + 2, self.kv_channels))
        # one split, whose backward is one copy; a slice each would fill a whole tensor with zeros and add it
        queries, keys, values = grouped.split((self.heads_per_group, 1, 1), dim=-2)
        q_BNTD = queries.flatten(2, 3).transpose(1, 2)
        return q_BNTD, keys.flatten(2, 3).transpose(1, 2), values.flatten(2, 3).transpose(1, 2)


# --- layers


class Embedding(nn.Module):
    """Input of the first layer, dropout(word vectors + position vectors); the latter only for learned positions."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.position_embeddings = None
        if shape.position_embedding == "learned_absolute":
            self.position_embeddings = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.scale = shape.embedding_scale
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        hidden_BTH: Tensor = self.word_embeddings(tokens_BT)
        if self.position_embeddings is not None:
            hidden_BTH = hidden_BTH + self.position_embeddings(positions_BT)
        if self.scale != 1:
            hidden_BTH = hidden_BTH * self.scale
        hidden_BTH = self.dropout(hidden_BTH)
        return hidden_BTH


def build_attention(shape: ModelShape, layer_number: int, attend: Attend) -> SelfAttention | LatentAttention:
    """Build the attention of a layer.

    Args:
        shape: The model's shape.
        layer_number: The layer's number, from 1.
        attend: The attention kernel.
    """
    if shape.latent is not None:
        return LatentAttention(shape, shape.latent, layer_number, attend)
    return SelfAttention(shape, layer_number, attend)


def build_mlp(shape: ModelShape, layer_number: int) -> MLP | MixtureOfExperts:
    """Build what follows attention in a layer, whose number counts from 1."""
    if shape.experts is not None and shape.has_experts(layer_number - 1):
        return MixtureOfExperts(shape, shape.experts)
    return MLP(shape)


class TransformerLayer(nn.Module):
    """Pre-norm block: hidden + dropout(attention(norm(hidden))), then the same with the MLP."""

    def __init__(self, shape: ModelShape, layer_number: int, attend: Attend):
        """
        Args:
            shape: The model's shape.
            layer_number: The layer's number, from 1 over the whole model, not over a pipeline stage.
            attend: The attention kernel.
        """
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape)
        self.self_attention = build_attention(shape, layer_number, attend)
        self.pre_mlp_layernorm = Norm(shape.hidden_size, shape)
        self.mlp = build_mlp(shape, layer_number)
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else nn.Identity()

    @property
    def dense_mlp(self) -> MLP | None:
        """The MLP that all tokens pass: the layer's, or the shared expert; None if there are routed experts only."""
        return self.mlp.shared_experts if isinstance(self.mlp, MixtureOfExperts) else self.mlp

    def forward(
        self,
        hidden_BTH: Tensor,
        edges_E: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer: (B, T, H) -> (B, T, H). It takes and returns tensors only.

        Args:
            hidden_BTH: The input.
            edges_E: Where documents begin and end, as in Scope; None: each sequence is one.
            cos_B1TR: Cosines of the rotation, by make_rotary_tables; None: nothing rotates.
            sin_B1TR: Sines of the rotation.
        """
        attended_BTH = self.self_attention(self.input_layernorm(hidden_BTH), edges_E, cos_B1TR, sin_B1TR)
        hidden_BTH = hidden_BTH + self.dropout(attended_BTH)
        hidden_BTH = hidden_BTH + self.dropout(self.mlp(self.pre_mlp_layernorm(hidden_BTH)))
        return hidden_BTH


class Decoder(nn.Module):
    """All layers and the final norm, BTH -> BTH."""

    def __init__(self, shape: ModelShape, attend: Attend):
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(shape, i + 1, attend) for i in range(shape.num_layers))
        self.final_layernorm = Norm(shape.hidden_size, shape)

    def forward(
        self,
        hidden_BTH: Tensor,
        edges_E: Tensor | None = None,
        cos_B1TR: Tensor | None = None,
        sin_B1TR: Tensor | None = None,
    ) -> Tensor:
        """Compute all layers: (B, T, H) -> (B, T, H).

        Args:
            hidden_BTH: The input.
            edges_E: Where documents begin and end, as in Scope; None: each sequence is one.
            cos_B1TR: Cosines of the rotation, by make_rotary_tables; None: nothing rotates.
            sin_B1TR: Sines of the rotation.
        """
        for layer in self.layers:
            hidden_BTH = layer(hidden_BTH, edges_E, cos_B1TR, sin_B1TR)
        hidden_BTH = self.final_layernorm(hidden_BTH)
        return hidden_BTH


class GPT(nn.Module):
    """Model that makes logits of tokens, or losses of tokens and labels."""

    def __init__(self, shape: ModelShape, attend: Attend, losses: Callable[..., Tensor] = token_losses):
        """
        Args:
            shape: The model's shape.
            attend: The attention kernel, as choose_attention returns it.
            losses: Maps (hidden_BTH, weight_VH, labels_BT) to losses_BT.
        """
        super().__init__()
        self.shape = shape
        self.losses = losses
        self.embedding = Embedding(shape)
        self.decoder = Decoder(shape, attend)
        self.mtp: MultiTokenPrediction | None = None
        if shape.mtp_num_layers:
            self.mtp = MultiTokenPrediction(shape, lambda number: TransformerLayer(shape, number, attend))
        self.output_layer = None
        if not shape.tied_embeddings:
            self.output_layer = nn.Linear(shape.hidden_size, shape.padded_vocab_size, bias=False)

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        loss_mask_BT: Tensor | None = None,
    ) -> Tensor:
        """Compute logits_BTV without labels, else the fp32 loss of each token, losses_BT (nats).

        Args:
            tokens_BT: The inputs.
            labels_BT: What each token is to predict.
            positions_BT: Learned positions count by it; None: they are those of the sequence.
            documents_BT: A token attends only within its own document number (and causally); None: to all before it.
                Where this rank has a part of each sequence, it is that of whole ones; on the host, or a GPU is waited
                for.
            loss_mask_BT: 1 where a label counts in multi-token prediction, else 0; None: all count.
        """
        # rotations count from the start of the sequence, as in Megatron: only learned positions can be reset
        sequence_1T = self.number_positions(tokens_BT.shape[1], tokens_BT.device)[None]
        positions_BT = sequence_1T if positions_BT is None else positions_BT
        edges_E = None if documents_BT is None else find_document_edges(documents_BT, tokens_BT.device)
        cos_B1TR = sin_B1TR = None
        if self.shape.rotates:
            cos_B1TR, sin_B1TR = make_rotary_tables(sequence_1T, self.shape)
        hidden_BTH = self.embed(tokens_BT, positions_BT)
        hidden_BTH = self.decoder(hidden_BTH, edges_E, cos_B1TR, sin_B1TR)
        # only gradients need the losses of further tokens
        if self.mtp is not None and labels_BT is not None and torch.is_grad_enabled():
            targets = Targets(tokens_BT, labels_BT, positions_BT, loss_mask_BT)
            hidden_BTH = self.mtp(hidden_BTH, targets, self.embedding, self.finish, edges_E, cos_B1TR, sin_B1TR)
        return self.finish(hidden_BTH, labels_BT)

    def list_layers(self) -> list[TransformerLayer]:
        """List the transformer layers, those of multi-token prediction after the decoder's."""
        layers = list(self.decoder.layers)
        if self.mtp is not None:
            layers += self.mtp.list_layers()
        found = []
        for layer in layers:
            assert isinstance(layer, TransformerLayer)
            found.append(layer)
        return found

    def embed(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Embed tokens: hidden_BTH, the first layer's input."""
        hidden_BTH: Tensor = self.embedding(tokens_BT, positions_BT)
        return hidden_BTH

    def finish(self, hidden_BTH: Tensor, labels_BT: Tensor | None) -> Tensor:
        """Logits or losses from the last layer's output."""
        if self.shape.logits_scale != 1:
            hidden_BTH = hidden_BTH * self.shape.logits_scale
        if labels_BT is None:
            return F.linear(hidden_BTH, self.output_weight)
        return self.losses(hidden_BTH, self.output_weight, labels_BT)

    def number_positions(self, length: int, device: torch.device) -> Tensor:
        """The position of each token in its sequence. Context parallel ranks replace this."""
        return torch.arange(length, device=device)

    @property
    def output_weight(self) -> Tensor:
        """The output projection's weight_VH, which is the word embeddings' own when tied."""
        return self.embedding.word_embeddings.weight if self.output_layer is None else self.output_layer.weight


# --- how parameters start: normal with Megatron's standard deviations

# Their outputs are summed over 2L residual additions; the smaller start keeps that sum's variance independent of L
# (Radford et al. 2019, section 2.3).
RESIDUAL_OUTPUTS = ("linear_proj", "linear_fc2")


@torch.no_grad()
def initialize(
    parameters: Mapping[str, Tensor],
    shape: ModelShape,
    parts: Mapping[str, Part] = MappingProxyType({}),
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
) -> None:
    """Fill parameters in place; torch.manual_seed decides the numbers.

    All of the model's are drawn in its order. Those of which this rank has a part, or nothing, are drawn whole, and
    cut, so that all ranks together begin as one would.

    Args:
        parameters: This rank's parameters by name.
        shape: The model's shape.
        parts: The part of each parameter of which this rank has not all.
        dtype: The precision to which such a part is rounded.
        device: Where whole parameters are drawn that this rank has a part of; None: where the parameters are.
    """
    first = next(iter(parameters.values()))
    for name, sizes in list_parameters(shape).items():
        if name in parameters and name not in parts:
            _draw(name, parameters[name], shape)
            continue
        whole = torch.empty(sizes, dtype=torch.float32, device=device or first.device)
        _draw(name, whole, shape)
        if name in parameters:
            take_part(parameters[name], whole, parts[name])
            parameters[name].copy_(parameters[name].to(dtype))


def list_parameters(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """List a whole model's parameters, {name: size}, in their order; a matrix is [out, in], the embeddings [rows,
    hidden]."""
    return {name: tuple(parameter.shape) for name, parameter in _build_on_meta(shape).named_parameters()}


def list_weights(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """List all that a checkpoint holds of a model, {name: size}: its parameters, and the biases by which routers
    balance experts."""
    biases = list_expert_biases(list_mixtures(_build_on_meta(shape)), "meta")
    return list_parameters(shape) | {name: tuple(bias.shape) for name, bias in biases.items()}


def _build_on_meta(shape: ModelShape) -> GPT:
    """A model without numbers."""
    with torch.device("meta"):
        return GPT(shape, Attend(sdpa_attention, "sdpa"))  # of any kernel: nothing is computed


def _draw(name: str, parameter: Tensor, shape: ModelShape) -> None:
    """Matrices normal(0, std), those that write into the residual stream std/sqrt(2L); biases 0; norm weights 1
    (0 with layernorm_1p, which stores them minus 1).

    Under muP, matrices but embeddings and output have std/sqrt(width) in the place of std.
    """
    owner, kind = name.split(".")[-2:]
    of_width = shape.init_method_std / math.sqrt(shape.mup_width_mult)
    if kind == "bias":
        nn.init.zeros_(parameter)
    elif owner.endswith("norm"):
        nn.init.constant_(parameter, 0.0 if shape.layernorm_1p else 1.0)
    elif owner in RESIDUAL_OUTPUTS:
        nn.init.normal_(parameter, std=of_width / math.sqrt(2 * shape.num_layers))
    elif name.startswith(EMBEDDINGS):
        nn.init.normal_(parameter, std=shape.init_method_std)
    else:
        nn.init.normal_(parameter, std=of_width)
