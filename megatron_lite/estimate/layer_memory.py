"""What one layer keeps from forward to backward, and what else lives while backward goes through it: sums by flag.

An estimate of the few tensors that decide. megatron_lite/rehearsal walks the real operations.

Letters: n tokens, s positions, h hidden, e bytes of one activation.
"""

from dataclasses import dataclass, replace

from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.prediction import LedgerRow
from megatron_lite.model.kernel_choice import FUSED, MATH, UNFUSED, predict_attention_kernel
from megatron_lite.units import count

FP32 = 4
FLASH_HEAD_STEP = 8  # channels: flash pads heads of another width

# rows of a ledger
NORMS, LINEAR_INPUTS, QKV = "inputs and statistics of norms", "inputs of linear layers", "queries, keys and values"
ATTENTION, SCORES, ROTARY = "results and statistics of attention", "attention scores", "tables and copies of rotation"
MLP, MASKS, RECOMPUTED = "MLP's activation function", "dropout masks", "inputs of recomputed layers"
GRADIENTS = "gradients of activations"


def element_bytes(precision: str) -> int:
    """Size of one weight or activation in fp32, fp16 or bf16."""
    return 4 if precision == "fp32" else 2


@dataclass(frozen=True)
class MicroBatch:
    """What the sizes of activations depend on."""

    shape: ModelShape
    size: int  # sequences
    precision: str = "bf16"
    on_cpu: bool = False
    attention: str = FUSED
    is_flash: bool = True  # which fused kernel: flash, or the memory-efficient one
    masked: bool = False  # attention stays within documents
    recomputes_attention: bool = False  # core attention alone
    threads: int = 1  # of a CPU, for one rank

    @property
    def tokens(self) -> int:
        return self.size * self.shape.seq_length

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.precision)

    @property
    def key_width(self) -> int:
        """Width of the concatenated keys, or values."""
        return self.shape.num_query_groups * self.shape.kv_channels

    @property
    def rotates(self) -> bool:
        return self.shape.position_embedding == "rope"

    @property
    def pads_heads(self) -> bool:
        """Whether flash pads heads to a multiple of FLASH_HEAD_STEP channels."""
        return self.is_flash and not self.on_cpu and self.shape.kv_channels % FLASH_HEAD_STEP > 0

    @property
    def norms_copy_to_fp32(self) -> bool:
        """Whether norms keep an fp32 copy instead of their 16-bit input."""
        return self.element_bytes < FP32 and (self.shape.layernorm_1p or self._splits_norms)

    @property
    def _splits_norms(self) -> bool:
        """RMSNorm on a CPU: torch 2.13 takes it apart and keeps the normalized input too. Not where weights are stored minus one."""
        adds_one = self.shape.layernorm_1p and self.element_bytes < FP32
        return self.on_cpu and self.shape.normalization == "RMSNorm" and not adds_one

    def row(self, name: str, width: int, each: int | None = None, category: str = "activations") -> LedgerRow:
        """`width` elements of `each` bytes for every token."""
        each = each or self.element_bytes
        formula = f"{_name_bytes(each)} x {count(self.tokens)} tokens x {count(width)}"
        return LedgerRow(category, name, each * self.tokens * width, formula)

    def squares(self, number: int, each: int, of: str, name: str = SCORES, category: str = "activations") -> LedgerRow:
        """`number` matrices of positions by positions."""
        length = self.shape.seq_length
        formula = f"{_name_bytes(each)} x {count(number)} {of} x {count(length)}^2 tokens"
        return LedgerRow(category, name, each * number * length**2, formula)

    def kept_by_norm(self, width: int, rows_per_token: int = 1) -> list[LedgerRow]:
        """The input or its fp32 copy, and fp32 statistics of each row: two by LayerNorm, one by RMSNorm."""
        inputs = [] if self.norms_copy_to_fp32 else [self.row(NORMS, width)]
        return [*inputs, *self.added_by_norm(width, rows_per_token)]

    def added_by_norm(self, width: int, rows_per_token: int) -> list[LedgerRow]:
        """The same beside the input."""
        copies = self.norms_copy_to_fp32 + self._splits_norms
        statistics = rows_per_token * (1 if self.shape.normalization == "RMSNorm" else 2)
        return [self.row(NORMS, copies * width + statistics, FP32)]

    def dropout_masks(self) -> list[LedgerRow]:
        """Of one dropout: a byte for each hidden element, on CPUs a number of the activations' type."""
        each = self.element_bytes if self.on_cpu else 1
        return [self.row(MASKS, self.shape.hidden_size, each)] if self.shape.hidden_dropout else []


def plan_micro_batch(
    shape: ModelShape,
    size: int,
    precision: str,
    device: str,
    backend: str,
    masked: bool = False,
    recompute: str | None = None,
    threads: int = 1,
) -> MicroBatch:
    """From --attention-backend, --reset-attention-mask, --recompute-granularity and the threads of a rank."""
    kernel, flash = predict_attention_kernel(shape, precision, device, backend, masked)
    selective = kernel == UNFUSED and recompute == "selective"
    return MicroBatch(shape, size, precision, device == "cpu", kernel, flash, masked, selective, threads)


def kept_by_layer(batch: MicroBatch) -> list[LedgerRow]:
    """One layer's forward; the layer's input belongs to it, its result does not.

    A squared relu keeps relu's result instead of its input; swiglu both halves, silu's result and the product.
    """
    shape, hidden = batch.shape, batch.shape.hidden_size
    scores = [] if batch.recomputes_attention else _score_bytes(batch)[1]
    inner = (4 if shape.activation == "swiglu" else 2) * shape.ffn_hidden_size
    return [
        *_kept_before_core_attention(batch),
        *_fused_results(batch),
        *scores,
        *batch.kept_by_norm(hidden),
        batch.row(LINEAR_INPUTS, hidden),
        batch.row(MLP, inner),
        *batch.dropout_masks(),
        *batch.dropout_masks(),
    ]


def _kept_before_core_attention(batch: MicroBatch) -> list[LedgerRow]:
    """The first norm, the projection, attention's inputs, and the output projection's input."""
    hidden = batch.shape.hidden_size
    result = batch.row(ATTENTION, batch.shape.attention_width)
    return [*batch.kept_by_norm(hidden), batch.row(LINEAR_INPUTS, hidden), *_attention_inputs(batch), result]


def layer_backward(batch: MicroBatch) -> list[tuple[str, str, list[LedgerRow]]]:
    """(operation, matrix whose weights get gradients, what the layer holds): the points at which that can be most.

    Backward lets go of what each operation kept: the MLP's share is gone when attention's turn comes.
    """
    shape, kept = batch.shape, kept_by_layer(batch)
    hidden, inner, wide = shape.hidden_size, shape.ffn_hidden_size, shape.attention_width

    def gradients(width: int) -> LedgerRow:
        return batch.row(GRADIENTS, width, category="workspace")

    points = [("linear_fc2", "fc2", [*kept, gradients(hidden * (1 + bool(shape.hidden_dropout)) + inner)])]
    # more inner tensors than gone are: forward's result is
    curve = {"swiglu": 2, "squared_relu": 3}.get(shape.activation)
    if curve:
        points.append((shape.activation, "", [*kept, gradients(hidden + curve * inner)]))
    first_half = _kept_before_core_attention(replace(batch, recomputes_attention=False))
    each, scores = _score_bytes(batch)
    if not scores:
        width = hidden + 2 * wide + 2 * batch.key_width
        return [*points, ("core_attention", "", [*first_half, *_fused_results(batch), gradients(width)])]
    softmax, vectors = scores[0], gradients(hidden + 2 * wide)
    matrix = replace(_score_matrix(batch, each), category="workspace", name=GRADIENTS)
    of_softmax = replace(softmax, category="workspace", name=GRADIENTS)
    for stage in (
        [*scores, matrix],
        [softmax, of_softmax, of_softmax],
    ):  # the weighted sum's backward, then the softmax's
        points.append(("core_attention", "", [*first_half, vectors, *stage]))
    return points


def _fused_results(batch: MicroBatch) -> list[LedgerRow]:
    """Scores stay in registers: one fp32 number per row, a mask as numbers, the result in the order that the kernel gives it."""
    if batch.attention != FUSED:
        return []
    shape, heads = batch.shape, batch.shape.num_attention_heads
    rows = [batch.row(ATTENTION, heads, FP32)]
    if batch.pads_heads:
        return [*rows, batch.row(ATTENTION, heads * _pad_width(shape))]
    if batch.masked:
        rows.append(batch.squares(batch.size, batch.element_bytes, "sequences"))
    if batch.is_flash and (batch.rotates or shape.qk_layernorm):  # heads, tokens; the projection wants tokens, heads
        rows.append(batch.row(ATTENTION, shape.attention_width))
    return rows


def _score_matrix(batch: MicroBatch, each: int) -> LedgerRow:
    return batch.squares(batch.size * batch.shape.num_attention_heads, each, "heads")


def _score_bytes(batch: MicroBatch) -> tuple[int, list[LedgerRow]]:
    """(bytes of a probability, what is kept of scores that are written down: the softmax first)."""
    if batch.attention == FUSED:
        return 0, []
    shape, is_math = batch.shape, batch.attention == MATH
    each = FP32 if is_math else batch.element_bytes
    wide = FP32 if shape.softmax_in_fp32 or shape.query_key_layer_scaling else each
    rows = [_score_matrix(batch, wide)]
    if shape.attention_dropout:
        rows += [_score_matrix(batch, each), _score_matrix(batch, each if batch.on_cpu else 1)]
    elif wide > each:
        rows.append(_score_matrix(batch, each))
    if batch.masked and not is_math:
        rows.append(batch.squares(batch.size, 1, "masks"))
    return each, rows


def _attention_inputs(batch: MicroBatch) -> list[LedgerRow]:
    """Queries, keys and values as attention takes them; the projection's whole result lives while one of them lies in it."""
    shape, wide = batch.shape, batch.shape.attention_width
    copies, each = _copies_for_kernel(batch)
    rows = [batch.row(QKV, width, each) for width in copies.values()]
    reordered = batch.rotates or shape.qk_layernorm
    if reordered:  # results of their own, which attention keeps unless it copies them
        name = ROTARY if batch.rotates else QKV
        rows += [batch.row(name, width) for one, width in (("q", wide), ("k", batch.key_width)) if one not in copies]
    if batch.rotates and batch.element_bytes < FP32:  # cosines and sines, for queries and for keys
        small, length, width = batch.element_bytes, shape.seq_length, int(shape.kv_channels * shape.rotary_percent)
        formula = f"4 x {_name_bytes(small)} x {count(length)} positions x {count(width)}"
        rows.append(LedgerRow("activations", ROTARY, 4 * small * length * width, formula))
    norm_keeps_views = shape.qk_layernorm and not batch.norms_copy_to_fp32
    if shape.qk_layernorm:
        rows += batch.added_by_norm(wide + batch.key_width, shape.num_attention_heads + shape.num_query_groups)
    # then queries are copied to lie side by side
    several_groups = 1 < shape.num_query_groups < shape.num_attention_heads
    q_is_kept = norm_keeps_views or not reordered and "q" not in copies
    k_is_kept = norm_keeps_views or not reordered and "k" not in copies
    if several_groups and q_is_kept:
        rows.append(batch.row(QKV, wide))
    if "v" not in copies or k_is_kept or q_is_kept and not several_groups:
        rows.append(batch.row(QKV, shape.qkv_width))
    return rows


def _copies_for_kernel(batch: MicroBatch) -> tuple[dict[str, int], int]:
    """({which of q, k, v the kernel keeps a copy of: width per token}, bytes of an element)."""
    shape, wide, each = batch.shape, batch.shape.attention_width, batch.element_bytes
    grouped = shape.num_query_groups < shape.num_attention_heads
    if batch.pads_heads and batch.attention == FUSED:
        keys = shape.num_query_groups * _pad_width(shape)
        return {"q": shape.num_attention_heads * _pad_width(shape), "k": keys, "v": keys}, each
    if batch.attention == FUSED:
        return {"k": wide, "v": wide} if grouped and not batch.is_flash else {}, each
    if batch.recomputes_attention:
        return {}, each
    # a batched product takes sequences and heads as one dimension: what has tokens between them is copied
    between = batch.size > 1 and shape.num_attention_heads > 1
    if batch.attention == MATH:  # all in fp32, queries and keys scaled each
        return {"q": wide, "k": wide, **({"v": wide} if each < FP32 or grouped or between else {})}, FP32
    moved = between and not (batch.rotates or shape.qk_layernorm)
    copied = {"q": moved, "k": grouped or moved, "v": grouped or between}
    return {name: wide for name, is_copy in copied.items() if is_copy}, each


def _pad_width(shape: ModelShape) -> int:
    return -(-shape.kv_channels // FLASH_HEAD_STEP) * FLASH_HEAD_STEP


def _name_bytes(number: int) -> str:
    """1 -> '1 byte', 2 -> '2 bytes'."""
    return f"{number} byte{'s' if number > 1 else ''}"
