"""How large the tensors of a layer are.

Letters: b micro-batch, s sequence, n = b*s tokens, a heads, e bytes of one activation.
"""

from dataclasses import dataclass

from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.liveness import Sized
from megatron_lite.model.kernel_choice import FUSED
from megatron_lite.units import count

FP32 = 4

# rows of a ledger
NORMS, LINEAR_INPUTS, QKV = "inputs and statistics of norms", "inputs of linear layers", "queries, keys and values"
ATTENTION, SCORES, ROTARY = "results and statistics of attention", "attention scores", "tables and copies of rotation"
MLP, MASKS, PASSING = "MLP's activation function", "dropout masks", "results that the next operation uses up"


@dataclass(frozen=True)
class Setting:
    """What the sizes depend on."""

    shape: ModelShape
    micro_batch: int
    element_bytes: int  # of activations
    attention: str = FUSED
    on_cpu: bool = False
    threads: int = 1  # of a CPU, for one rank
    is_flash: bool = True  # which fused kernel: flash, or the memory-efficient one
    masked: bool = False  # attention stays within documents
    recomputes_attention: bool = False  # core attention alone
    in_fp16: bool = False

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.shape.seq_length

    @property
    def key_width(self) -> int:
        """Of the concatenated keys, or values."""
        return self.shape.num_query_groups * self.shape.kv_channels

    @property
    def is_grouped(self) -> bool:
        """Whether query heads share keys and values."""
        return self.shape.num_query_groups < self.shape.num_attention_heads

    @property
    def rotates(self) -> bool:
        return self.shape.position_embedding == "rope"

    @property
    def heads_come_first(self) -> bool:
        """Rotation and norms of heads leave queries and keys in the order heads, tokens instead of tokens, heads."""
        return self.rotates or self.shape.qk_layernorm

    def rows(self, name: str, width: int, num_bytes: int | None = None) -> Sized:
        """A tensor of `width` elements for each token."""
        each = self.element_bytes if num_bytes is None else num_bytes
        formula = f"{bytes_of(each)} x {count(self.tokens)} tokens x {count(width)}"
        return Sized("activations", name, each * self.tokens * width, formula)

    def hidden(self, name: str, num_bytes: int | None = None) -> Sized:
        return self.rows(name, self.shape.hidden_size, num_bytes)

    def mask(self) -> Sized:
        """Of dropout: one byte for each element, on CPUs a number of the activations' type."""
        return self.hidden(MASKS, self.element_bytes if self.on_cpu else 1)

    def scores(self, num_bytes: int) -> Sized:
        """A matrix of tokens by tokens for each head of each sequence."""
        return self.matrices(SCORES, self.micro_batch * self.shape.num_attention_heads, num_bytes, "heads")

    def matrices(self, name: str, number: int, num_bytes: int, of: str) -> Sized:
        """`number` matrices of tokens by tokens."""
        formula = f"{bytes_of(num_bytes)} x {count(number)} {of} x {count(self.shape.seq_length)}^2 tokens"
        return Sized("activations", name, num_bytes * number * self.shape.seq_length**2, formula)


def bytes_of(number: int) -> str:
    """1 -> '1 byte', 2 -> '2 bytes'."""
    return f"{number} byte{'s' if number > 1 else ''}"
