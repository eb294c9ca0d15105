"""The sizes of a model, with every default filled in."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TypeVar

# values of --moe-router-load-balancing-type
SINKHORN = "sinkhorn"
GLOBAL_AUX_LOSS = "global_aux_loss"
BALANCING_LOSSES = ("aux_loss", "seq_aux_loss", GLOBAL_AUX_LOSS)
BALANCING_KINDS = (*BALANCING_LOSSES, SINKHORN, "none")


def choose_losses(kinds: Iterable[str], coeffs: Iterable[float]) -> tuple[tuple[str, float], ...]:
    """Choose the losses that balance experts, without those that have no effect: (kind, coefficient) of each.

    Args:
        kinds: Values of --moe-router-load-balancing-type.
        coeffs: Values of --moe-aux-loss-coeff, one of each kind.
    """
    return tuple((kind, coeff) for kind, coeff in zip(kinds, coeffs) if kind in BALANCING_LOSSES and coeff)


MIN_WINDOW_BLOCK = 128  # queries of an attention window that a CPU takes at a time


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts in the place of some layers' MLP, and how tokens find theirs."""

    number: int
    layers: tuple[bool, ...]  # which layers have experts
    topk: int  # experts of each token
    ffn_hidden_size: int  # width of one expert
    shared_ffn_hidden_size: int = 0  # width of the expert that all tokens pass; 0: there is none
    shared_gate: bool = False
    score_function: str = "softmax"  # softmax | sigmoid
    pre_softmax: bool = False
    scaling_factor: float | None = None
    groups: int | None = None  # of experts, of which a token's come from `group_topk`
    group_topk: int | None = None
    router_dtype: str | None = None  # fp32 | fp64; None: that of hidden states
    expert_bias: bool = False  # balanced by a bias of scores
    # (kind, coefficient) of each loss that balances experts: aux_loss | seq_aux_loss | global_aux_loss
    balancing: tuple[tuple[str, float], ...] = ()
    sinkhorn: bool = False
    z_loss_coeff: float | None = None
    input_jitter: float | None = None
    forced_balance: bool = False
    capacity_factor: float | None = None  # None: no token is dropped
    drop_policy: str = "probs"  # probs | position
    probs_on_input: bool = False
    ranks: int = 1  # that have some of the experts each

    @property
    def local_number(self) -> int:
        """Experts of one rank."""
        return self.number // self.ranks

    def split(self, experts: int, expert_tensor: int, tensor: int) -> "ExpertShape":
        """The share of one rank.

        Args:
            experts: Ranks that have some of the experts each.
            expert_tensor: Ranks that split each of those.
            tensor: Ranks that split each layer, and with it the shared expert.
        """
        return replace(
            self,
            ranks=experts,
            ffn_hidden_size=self.ffn_hidden_size // expert_tensor,
            shared_ffn_hidden_size=self.shared_ffn_hidden_size // tensor,
        )


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: widths of its vectors, in channels."""

    q_lora_rank: int | None  # of the latent vector of queries; None: they have none
    kv_lora_rank: int  # of that of keys and values
    qk_head_dim: int  # of a head's query and key, without what rotates
    qk_pos_emb_head_dim: int  # of a head's query and key that rotate; of keys these are the same for all heads
    v_head_dim: int  # of a head's value
    scaling_factor: float = 1.0  # --rotary-scaling-factor, which sharpens scores with YaRN's frequencies and without
    mscale_all_dim: float = 0.0  # how much it sharpens them

    @property
    def query_width(self) -> int:
        """Channels of a head's query and key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def head_width(self) -> int:
        """Channels that an attention kernel gets for each head.

        Queries, keys and values are filled up to the widest of them.
        """
        return max(self.query_width, self.v_head_dim)


Nested = TypeVar("Nested", ExpertShape, LatentShape)


def parse_nested(kind: type[Nested], shape: Mapping[str, object], name: str) -> Nested | None:
    """The experts or the latent attention of a model, from its fields as JSON has them; None of a model without.

    Args:
        kind: ExpertShape or LatentShape.
        shape: Fields of the model by name.
        name: Name of the field that holds them: "experts" or "latent".

    Raises:
        TypeError: They are no such fields, or one of them is unknown or missing.
    """
    saved = shape.get(name)
    if saved is None:
        return None
    if not isinstance(saved, Mapping):
        raise TypeError(f"a {type(saved).__name__} in the place of its {name}")
    build: Callable[..., Nested] = kind
    return build(**{key: _freeze(value) for key, value in saved.items()})


def _freeze(value: object) -> object:
    """Lists within lists as tuples: JSON knows lists only."""
    return tuple(_freeze(one) for one in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the parameters and the arithmetic of one GPT. Pure numbers: no device, no precision."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int  # key/value heads; equal to num_attention_heads without grouped-query attention
    kv_channels: int  # width of one head
    ffn_hidden_size: int
    seq_length: int
    max_position_embeddings: int
    padded_vocab_size: int
    position_embedding: str = "learned_absolute"  # learned_absolute | rope | none
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    rotary_interleaved: bool = False
    rotary_seq_len_interpolation_factor: float | None = None
    rope_scaling_factor: float | None = (
        None  # of Llama 3.1's scaling of rotary frequencies; None: they are not scaled so
    )
    yarn_scaling_factor: float | None = None  # of YaRN's; None: they are not scaled so, and what follows has no effect
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0  # turns within that length from which on frequencies stay
    yarn_beta_slow: float = 1.0  # turns below which they are divided by the factor
    yarn_mscale: float = 1.0  # how much attention is sharpened, and that which is taken back from it
    yarn_mscale_all_dim: float = 0.0
    yarn_round_to_int: bool = True  # the channels where blending begins and ends are whole ones
    normalization: str = "LayerNorm"  # LayerNorm | RMSNorm
    norm_epsilon: float = 1e-5
    layernorm_1p: bool = False  # norm weights are stored minus one
    activation: str = "gelu_tanh"  # gelu_tanh | gelu_erf | swiglu | squared_relu
    linear_bias: bool = True  # biases of all linear layers
    qkv_bias: bool = True  # bias of the QKV projection
    qk_layernorm: bool = False
    tied_embeddings: bool = True
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    query_key_layer_scaling: bool = False
    softmax_in_fp32: bool = False
    init_method_std: float = 0.02
    experts: ExpertShape | None = None
    window: int | None = None  # tokens before itself that a token attends to; None: all
    window_layers: str = ""  # a 0 or 1 for each layer: whether it has that window; empty: all of them
    latent: LatentShape | None = None  # kv_channels then is its head_width, and rotary_percent a share of what rotates
    # of --use-mup: how many times as wide the model is as the one that its learning rates are for
    mup_width_mult: float = 1.0
    embedding_scale: float = 1.0  # of the embeddings' output
    logits_scale: float = 1.0
    softmax_scale: float | None = None  # of attention's scores; None: 1 / sqrt(kv_channels)
    softmax_type: str = "vanilla"  # of attention: vanilla | off-by-one | learnable
    mtp_num_layers: int = 0  # tokens after the next one that are predicted, too, by a layer each
    mtp_loss_scaling_factor: float = 0.1  # of the mean of their losses

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, which a search's caches ask for many times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __getstate__(self) -> dict[str, object]:
        """The fields alone: the hash of a text is another one in each process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def split(self, ranks: int, context: int = 1, experts: int = 1, expert_tensor: int | None = None) -> "RankShape":
        """The share of one rank.

        Args:
            ranks: Tensor parallel ranks, which split heads, MLP and vocabulary.
            context: Context parallel ranks, which have some of the positions each.
            experts: Expert parallel ranks, which have some of the experts each.
            expert_tensor: Ranks that split each expert; None: as many as split a layer.
        """
        return _split(self, ranks, context, experts, ranks if expert_tensor is None else expert_tensor)

    def find_window(self, layer: int) -> int | None:
        """How many tokens before itself a token attends to in this layer, counted from 0; None for all."""
        return None if self.window_layers and self.window_layers[layer] == "0" else self.window

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, counted from 0, has experts in the place of its MLP.

        Layers of multi-token prediction, behind those of the decoder, are built as its last one.
        """
        return self.experts is not None and self.experts.layers[min(layer, self.num_layers - 1)]

    @property
    def rotates(self) -> bool:
        """Whether queries and keys turn with the position."""
        return self.position_embedding == "rope" or self.latent is not None

    @property
    def rotary_width(self) -> int:
        """Channels of a head of which rotary_percent rotate."""
        return self.kv_channels if self.latent is None else self.latent.qk_pos_emb_head_dim

    @property
    def adds_biases(self) -> bool:
        """Whether any linear layer adds a bias to its product."""
        return self.linear_bias or self.qkv_bias

    @property
    def qkv_width(self) -> int:
        """Queries plus one key and one value per group."""
        return (self.num_attention_heads + 2 * self.num_query_groups) * self.kv_channels

    @property
    def qkv_rows(self) -> int:
        """Rows of the QKV projection."""
        return self.qkv_width

    @property
    def attention_width(self) -> int:
        """Width of the concatenated heads, the input of the attention's output projection."""
        width = self.kv_channels if self.latent is None else self.latent.v_head_dim
        return self.num_attention_heads * width

    @property
    def kernel_width(self) -> int:
        """Width of the concatenated heads as an attention kernel gets and gives them."""
        return self.num_attention_heads * self.kv_channels

    @property
    def fc1_width(self) -> int:
        """Rows of the MLP's first matrix; a gated MLP holds gate and value in one."""
        return self.count_fc1_rows(self.ffn_hidden_size)

    def count_fc1_rows(self, width: int) -> int:
        """Rows of the first matrix of an MLP, or of an expert, of this width."""
        return width * (2 if self.activation == "swiglu" else 1)


@dataclass(frozen=True)
class RankShape(ModelShape):
    """Sizes of the part of a model that one tensor parallel rank computes."""

    query_group_ranks: int = 1  # that share a query group: each has a part of the rows of its queries, key and value

    # a dataclass makes another one
    __hash__ = ModelShape.__hash__

    def exchange_heads(self, ranks: int) -> "RankShape":
        """The shape as attention sees it where so many ranks exchange heads for positions."""
        if ranks == 1:
            return self
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // ranks,
            num_query_groups=self.num_query_groups // ranks,
            seq_length=self.seq_length * ranks,
        )

    @property
    def qkv_rows(self) -> int:
        keys_and_values = 2 * self.num_query_groups * self.kv_channels
        return self.num_attention_heads * self.kv_channels + keys_and_values // self.query_group_ranks


@lru_cache(maxsize=64)
def _split(shape: ModelShape, ranks: int, context: int, experts: int, expert_tensor: int) -> RankShape:
    whole = {field.name: getattr(shape, field.name) for field in fields(shape)}
    own = {
        "num_attention_heads": shape.num_attention_heads // ranks,
        "num_query_groups": max(shape.num_query_groups // ranks, 1),
        "query_group_ranks": max(ranks // shape.num_query_groups, 1),
        "ffn_hidden_size": shape.ffn_hidden_size // ranks,
        "padded_vocab_size": shape.padded_vocab_size // ranks,
        "seq_length": shape.seq_length // context,
        "experts": None if shape.experts is None else shape.experts.split(experts, expert_tensor, ranks),
    }
    return RankShape(**(whole | own))


def recomputed_layers(granularity: str | None, method: str | None, number: int | None, num_layers: int) -> int:
    """Count the layers, from the first on, that are recomputed by the three --recompute flags.

    Args:
        granularity: full recomputes layers; selective and None recompute none.
        method: uniform recomputes every layer (Megatron keeps one activation per chunk of --recompute-num-layers; here
            one per layer, which costs a little more memory and the same time), block the first `number`.
        number: The value of --recompute-num-layers.
        num_layers: Layers of the model.
    """
    if granularity != "full":
        return 0
    return num_layers if method == "uniform" else min(number or 1, num_layers)
