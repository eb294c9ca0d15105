"""Memory of a training step in closed form: an estimate within 3% of what the real step takes, and without torch.

Sums of the few tensors that decide, by flag. The exact answer is megatron_lite/planner/walk, which walks the real model
and step without data; tests hold the two side by side.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_lite.config.cpu_kernel_rules import (
    GELU_BLOCK,
    QUERY_BLOCK,
    count_loss_logits,
    count_scores,
    gelu_works_in_blocks,
)
from megatron_lite.config.layout import count_keys
from megatron_lite.config.loss_rows import MAX_LOGITS, count_rows
from megatron_lite.config.model_size import count_parameters, list_attention_matrices
from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import MIN_WINDOW_BLOCK, LatentShape
from megatron_lite.formats.hardware import Processor, padded
from megatron_lite.formats.run_record import LedgerRow, MemoryPrediction
from megatron_lite.phases import Phase
from megatron_lite.pipeline_schedule import Stage
from megatron_lite.planner.attention_kernel import CAUSAL, FLASH_HEAD_STEP, FUSED, MATH
from megatron_lite.planner.expert_load import compute_expert_share, plan_expert_load
from megatron_lite.planner.expert_memory import (
    EXCHANGED,
    LINEAR_INPUTS,
    count_expert_weights,
    keep_experts,
    list_expert_peaks,
    measure_exchanged,
)
from megatron_lite.planner.micro_batch import MicroBatch, plan_micro_batch
from megatron_lite.planner.prediction import ListedMoment, sum_moment
from megatron_lite.planner.state_size import (
    CACHED_ROWS,
    FP32,
    ShardedParameters,
    element_bytes,
    gradient_bytes,
    group_parameters,
    list_gathered,
    list_groups,
    list_reduced,
    list_states,
    per_parameter,
)
from megatron_lite.units import count

# rows of a ledger; gradients are workspace, the others activations
NORMS = "inputs and statistics of norms"
QKV = "queries, keys and values"
ATTENTION = "results and statistics of attention"
SCORES = "attention scores"
ROTARY = "tables and copies of rotation"
MLP = "MLP's activation function"
MASKS = "dropout masks"
RECOMPUTED = "inputs of recomputed layers"
GRADIENTS = "gradients of activations"
DELAYED = "inputs and gradients of linear layers, for weights"
LOGITS = "logits and loss"
SENT = "hidden states on their way between stages"

# Bytes for each token, by row. What a function here returns is kept for its next call: add to it, never change it.
Held = Counter[str]
CountRecomputed = Callable[[int], int]  # of a chunk of so many layers, how many keep their input only
# Micro-batches whose layers are remembered: a search asks for one of them with many layouts before it goes on.
CACHED_BATCHES = 64


# --- what one micro-batch keeps from forward to backward


@dataclass(frozen=True)
class _Copies:
    """A choice among a layer's queries, keys and values: those that attention's kernel copies."""

    queries: bool
    keys: bool
    values: bool
    num_bytes: int  # of each copy, for each token

    @property
    def number(self) -> int:
        """How many of the three are copied."""
        return [self.queries, self.keys, self.values].count(True)


def _find_copies(batch: MicroBatch) -> _Copies:
    """Find what attention's kernel copies.

    It copies what heads share, and, where a product takes sequences and heads as one dimension, what has tokens between
    them.
    """
    shape = batch.shape
    heads = shape.num_attention_heads
    one_bytes = batch.element_bytes * shape.kernel_width
    grouped = shape.num_query_groups < heads
    between = batch.size > 1 and heads > 1
    values_between = between and not _widens_values(batch)
    if batch.head_ranks > 1:
        # other heads of more positions take the place of this rank's
        return _Copies(True, True, True, 0)
    if batch.context > 1:
        # keys and values of whole sequences take the place of this rank's
        return _Copies(False, True, True, 0)
    if _pads_heads(batch):
        return _Copies(True, True, True, 0)
    if batch.attention == FUSED:
        repeated = grouped and not batch.is_flash
        return _Copies(False, repeated, repeated, one_bytes)
    if batch.attention == MATH:
        # all in fp32, queries and keys scaled each
        values = batch.element_bytes < FP32 or grouped or values_between
        return _Copies(True, True, values, FP32 * shape.kernel_width)
    if batch.recomputes_attention:
        return _Copies(False, False, False, 0)
    moved = between and not _makes_own_queries(batch)
    return _Copies(moved, grouped or moved, grouped or values_between, one_bytes)


def _pads_heads(batch: MicroBatch) -> bool:
    """Whether flash attention copies queries, keys and values into wider heads."""
    if batch.attention != FUSED or not batch.is_flash or batch.on_cpu:
        return False
    return batch.shape.kv_channels % FLASH_HEAD_STEP != 0


def _widens_values(batch: MicroBatch) -> bool:
    """Whether latent attention fills values up to the width of queries, which makes them tensors of their own."""
    latent = batch.shape.latent
    return latent is not None and latent.v_head_dim < latent.head_width


def _makes_own_queries(batch: MicroBatch) -> bool:
    """Whether queries and keys are results of their own, not views of the projection's."""
    return batch.shape.rotates or batch.shape.qk_layernorm


def _count_key_width(batch: MicroBatch) -> int:
    """Width of all keys, or of all values."""
    return batch.shape.num_query_groups * batch.shape.kv_channels


@lru_cache(maxsize=CACHED_BATCHES)
def _keep_until_scores(batch: MicroBatch) -> Held:
    """List what a layer keeps up to attention's result, without scores that are written down."""
    copies = _find_copies(batch)
    held = Held({NORMS: batch.hidden_norm_bytes, LINEAR_INPUTS: batch.saved_input_bytes})
    held.update(_keep_result(batch))
    held.update(_keep_queries_and_keys(batch, copies))
    if batch.shape.latent is not None:
        held.update(_keep_latent_vectors(batch, batch.shape.latent))
        held.update(_keep_values(batch, copies, batch.shape.latent))
        return held
    held.update(_keep_query_norms(batch))
    held.update(_keep_projection(batch, copies))
    return held


def _keep_result(batch: MicroBatch) -> Held:
    """Attention's result, its statistics and the mask."""
    shape = batch.shape
    each = batch.element_bytes
    heads = shape.num_attention_heads
    projected_bytes = each * shape.attention_width
    held = Held({ATTENTION: projected_bytes})
    copies = batch.fp8 is not None and batch.fp8.copies_attention_result
    if batch.attention != FUSED:
        if copies:
            # which the output projection alone keeps
            held[ATTENTION] -= batch.count_fp8_savings(shape.attention_width)
        return held
    if copies:
        held[LINEAR_INPUTS] += batch.count_fp8_copy(shape.attention_width)
    # the kernel keeps what it gives, of which latent attention's projection takes a part
    held[ATTENTION] = each * shape.kernel_width + FP32 * heads
    if _pads_heads(batch):
        wider = each * padded(shape.kv_channels, FLASH_HEAD_STEP)
        held.update({QKV: wider * (heads + 2 * shape.num_query_groups), ATTENTION: wider * heads})
        return held
    if batch.masked and not batch.is_flash:
        # a mask as numbers
        held[SCORES] += each * shape.seq_length * batch.head_ranks**2
    elif batch.masked and batch.on_cpu:
        # documents' results, or those of blocks of a window, are put together
        held[ATTENTION] += projected_bytes
        held[SCORES] += _count_window_mask(batch)
    # where attention is recomputed in fp32, the mask is made again
    mask_bytes = 0 if batch.attends_in_fp32 else each
    held[SCORES] += mask_bytes * batch.masked_chunk_scores // batch.tokens
    exchanges = batch.context > 1 or batch.head_ranks > 1
    if batch.is_flash and (_makes_own_queries(batch) or exchanges):
        # flash's result, whose heads lie outside, is turned for the projection, two chunks' put together, or exchanged
        held[ATTENTION] += projected_bytes
    elif _widens_values(batch):
        held[ATTENTION] += projected_bytes
    return held


def _count_window_mask(batch: MicroBatch) -> int:
    """Bytes, for each token, of the masks of a window's blocks on a CPU, which sequences share."""
    window = batch.shape.window
    length = batch.shape.seq_length * batch.head_ranks
    if window is None or window >= length - 1:
        return 0
    block = min(max(window, MIN_WINDOW_BLOCK), length)
    keys = min(block + window, length)
    mask_bytes = 1 if batch.attends_in_fp32 else batch.element_bytes
    return mask_bytes * keys * batch.head_ranks // batch.size


def _keep_queries_and_keys(batch: MicroBatch, copies: _Copies) -> Held:
    """List what takes the place of parts of the projection's result: copies, rotated ones, whole sequences'."""
    shape = batch.shape
    each = batch.element_bytes
    keys = _count_key_width(batch)
    held = Held({QKV: copies.num_bytes * copies.number})
    if batch.head_ranks > 1:
        held[QKV] += each * (shape.kernel_width + 2 * keys)
    if batch.context > 1:
        held[QKV] += 2 * each * keys * batch.context
    if _makes_own_queries(batch):
        own = ROTARY if shape.rotates else QKV
        if not copies.queries:
            held[own] += each * shape.kernel_width
        if not copies.keys:
            held[own] += each * keys
    if shape.rotates and each < FP32:
        # cosines and sines, for queries and for keys, which sequences share
        rotated = int(shape.rotary_width * shape.rotary_percent)
        held[ROTARY] += 4 * each * rotated // batch.size
    return held


def _keep_latent_vectors(batch: MicroBatch, latent: LatentShape) -> Held:
    """List the vectors from which queries, keys and values of all heads are made, and what norms keep of them."""
    held = Held()
    has_norms = batch.shape.qk_layernorm
    for width in filter(None, (latent.q_lora_rank, latent.kv_lora_rank)):
        held[LINEAR_INPUTS] += batch.element_bytes * width
        held[LINEAR_INPUTS] -= batch.count_fp8_savings(width)
        if has_norms:
            held[NORMS] += batch.norm_bytes(width)
    norms_copy, _ = batch.copies_of_norms
    if not (has_norms and norms_copy):
        # beside the vector in one tensor
        held[QKV] += batch.element_bytes * latent.qk_pos_emb_head_dim
    # ranks that share out the tokens have a part of each
    return Held({name: num_bytes // batch.shares for name, num_bytes in held.items()})


def _keep_values(batch: MicroBatch, copies: _Copies, latent: LatentShape) -> Held:
    """List what latent attention's kernel takes as values: filled up, or where they lie, between keys."""
    if copies.values:
        return Held()
    width = batch.shape.kernel_width
    if not _widens_values(batch):
        width = batch.shape.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    return Held({QKV: batch.element_bytes * width})


def _normalizes_views(batch: MicroBatch) -> bool:
    """Whether norms keep queries and keys where they lie, in the projection's result."""
    return batch.shape.qk_layernorm and not batch.copies_of_norms[0]


def _keep_query_norms(batch: MicroBatch) -> Held:
    """List what norms of queries and keys keep."""
    shape = batch.shape
    if not shape.qk_layernorm:
        return Held()
    width = shape.attention_width + _count_key_width(batch)
    rows = shape.num_attention_heads + shape.num_query_groups
    num_bytes = batch.norm_bytes(width, rows)
    if _normalizes_views(batch):
        num_bytes -= batch.element_bytes * width
    return Held({NORMS: num_bytes})


def _keep_projection(batch: MicroBatch, copies: _Copies) -> Held:
    """The projection's whole result, which lives while one of queries, keys and values lies in it."""
    shape = batch.shape
    each = batch.element_bytes
    queries_lie_in_it = keys_lie_in_it = True
    if not _normalizes_views(batch):
        makes_own = _makes_own_queries(batch)
        queries_lie_in_it = not (makes_own or copies.queries)
        keys_lie_in_it = not (makes_own or copies.keys)
    held = Held()
    # queries of several groups are copied out of it
    several = 1 < shape.num_query_groups < shape.num_attention_heads
    if several and queries_lie_in_it:
        held[QKV] += each * shape.attention_width
    if not copies.values or keys_lie_in_it or (queries_lie_in_it and not several):
        held[QKV] += each * shape.qkv_width
    return held


def _measure_scores(batch: MicroBatch) -> tuple[int, list[int]]:
    """Measure scores that are written down, for each token.

    Returns:
        (bytes of the probabilities; bytes of each tensor that is kept, softmax first).
    """
    if batch.attention == FUSED:
        return 0, []
    shape = batch.shape
    is_math = batch.attention == MATH
    length = shape.seq_length * batch.head_ranks
    keys = count_keys(length, batch.context)
    if batch.attention == CAUSAL:
        keys = count_scores(length) // length
    positions = shape.num_attention_heads * keys
    each = FP32 if is_math or batch.attends_in_fp32 else batch.element_bytes
    wide = FP32 if shape.softmax_in_fp32 or shape.query_key_layer_scaling else each
    kept = [wide * positions]
    if shape.attention_dropout:
        mask = each if batch.on_cpu else 1
        kept += [each * positions, mask * positions]
    elif wide > each:
        kept.append(each * positions)
    if batch.masked and not is_math:
        kept.append(length * batch.head_ranks)
    elif not is_math:
        kept.append(batch.masked_chunk_scores // batch.tokens)
    return each * positions, kept


@lru_cache(maxsize=CACHED_BATCHES)
def _keep_layer(batch: MicroBatch) -> Held:
    """List what one layer's forward keeps; the layer's input belongs to it, its result does not.

    A squared relu keeps relu's result instead of its input; swiglu both halves, silu's result and the product.
    """
    held = _keep_until_scores(batch).copy()
    if not batch.recomputes_attention:
        _, kept_scores = _measure_scores(batch)
        held[SCORES] += sum(kept_scores)
    held.update({NORMS: batch.hidden_norm_bytes, MASKS: 2 * batch.mask_bytes})
    mlp = _keep_mlp(batch)
    if batch.load is None:
        held.update(mlp)
        return held
    # what layers keep on average, where some of them have experts in the place of an MLP
    held.update(_scale(mlp, 1 - batch.expert_share))
    held.update(_scale(keep_experts(batch), batch.expert_share))
    return held


def _keep_mlp(batch: MicroBatch) -> Held:
    """List what an MLP keeps, its input among it."""
    shape = batch.shape
    inner_tensors = 4 if shape.activation == "swiglu" else 2
    num_bytes = batch.element_bytes * inner_tensors * shape.ffn_hidden_size
    num_bytes -= batch.count_fp8_savings(shape.ffn_hidden_size)
    return Held({LINEAR_INPUTS: batch.saved_input_bytes, MLP: num_bytes})


def _scale(held: Held, share: float) -> Held:
    """A share of each row."""
    return Held({name: int(num_bytes * share) for name, num_bytes in held.items()})


def _keep_layers(batch: MicroBatch, number: int, recomputed: int) -> list[tuple[Held, int]]:
    """List what layers keep, by kind: of `number` layers `recomputed` keep their input only.

    Returns:
        (what a layer holds, of how many layers) of each kind.
    """
    kinds = []
    if number > recomputed:
        kinds.append((_keep_layer(batch), number - recomputed))
    if recomputed:
        input_alone = Held({RECOMPUTED: batch.input_bytes})
        kinds.append((input_alone, recomputed))
    return kinds


def _keep_ends(batch: MicroBatch, starts: bool, ends: bool) -> Held:
    """The embedding's dropout, and the last norm up to the output layer's input."""
    held = Held({MASKS: batch.mask_bytes if starts else 0})
    if ends:
        held.update({NORMS: batch.hidden_norm_bytes, LINEAR_INPUTS: batch.input_bytes})
    return held


def _keep_for_weights(batch: MicroBatch, stage: Stage) -> Held:
    """List what a layer's backward leaves where gradients of weights are computed later.

    It leaves what went into its products, and gradients of what came out.
    """
    if not stage.splits_backward:
        return Held()
    shape = batch.shape
    projected = shape.qkv_width
    if shape.latent is not None:
        *before, _ = list_attention_matrices(shape)
        latent_vectors = sum(columns for _, columns in before if columns != shape.hidden_size)
        projected = sum(rows for rows, _ in before) + latent_vectors
    inner = shape.attention_width + shape.ffn_hidden_size + projected + shape.fc1_width
    num_bytes = 4 * batch.whole_input_bytes
    num_bytes += batch.element_bytes * inner
    return Held({DELAYED: num_bytes})


def _list_waiting(
    batch: MicroBatch, stage: Stage, others: list[int], micro_batches: int, count_recomputed: CountRecomputed
) -> Iterator[LedgerRow]:
    """List what a stage holds of micro-batches besides the running one.

    The latest sent and the next asked for are among it, and between chunks another.

    Args:
        batch: Of the rank.
        stage: Of the rank.
        others: Micro-batches that wait for the backward of each chunk.
        micro_batches: Of a step.
        count_recomputed: How many layers of a chunk of so many keep their input only.
    """
    if stage.stages == 1:
        return
    for number, (waiting, chunk) in enumerate(zip(others, stage.chunks)):
        if not waiting:
            continue
        layers = len(chunk)
        yield from _list_kept(batch, layers, count_recomputed(layers), waiting)
        # where chunks are equal, all stand for the first as well
        embeds = stage.is_first if stage.has_equal_chunks else stage.starts(number)
        if embeds:
            yield from _list_rows(batch, Held({MASKS: batch.mask_bytes}), 1, waiting)
    _, delayed = stage.count_held(micro_batches)
    delayed_layers = delayed * len(stage.chunks[-1])
    yield from _list_rows(batch, _keep_for_weights(batch, stage), delayed_layers)
    # the next one asked for, and those on their way
    sent = 1 + stage.sends_ahead
    if len(stage.chunks) > 1:
        # the one between chunks
        sent += 1
    yield from _list_rows(batch, Held({SENT: sent * batch.input_bytes}))


def _list_rows(batch: MicroBatch, held: Held, layers: int = 1, micro_batches: int = 1) -> Iterator[LedgerRow]:
    """Rows of what so many layers of so many micro-batches hold, from what one layer holds for each token."""
    for name, each in held.items():
        if each:
            yield _make_row(name, each, batch.tokens, layers, micro_batches)


@lru_cache(maxsize=CACHED_ROWS)
def _make_row(name: str, each: int, tokens: int, layers: int, micro_batches: int) -> LedgerRow:
    """A row of so many bytes for each token.

    Args:
        name: Of the row.
        each: Bytes for each token.
        tokens: Of a micro-batch.
        layers: How many hold as much.
        micro_batches: Of which they hold as much.
    """
    of_layers = f"{layers} layers x " if layers > 1 else ""
    of_batches = f"{micro_batches} micro-batches x " if micro_batches > 1 else ""
    formula = f"{of_batches}{of_layers}{count(tokens)} tokens x {count(each)} bytes"
    return LedgerRow(
        category="workspace" if name == GRADIENTS else "activations",
        name=name,
        num_bytes=micro_batches * layers * tokens * each,
        formula=formula,
    )


@lru_cache(maxsize=16 * CACHED_BATCHES)
def _list_kept(batch: MicroBatch, number: int, recomputed: int, micro_batches: int = 1) -> tuple[LedgerRow, ...]:
    """Rows of what `number` layers keep of each micro-batch; `recomputed` of the layers keep their input only."""
    rows: list[LedgerRow] = []
    for held, layers in _keep_layers(batch, number, recomputed):
        rows += _list_rows(batch, held, layers, micro_batches)
    return tuple(rows)


@lru_cache(maxsize=CACHED_BATCHES)
def _list_layer_backward(batch: MicroBatch) -> tuple[tuple[str, Held, int], ...]:
    """List (operation, what the layer holds there, its sum) where backward can hold most."""
    found = []
    for operation, held in _find_backward_peaks(batch):
        found.append((operation, held, held.total()))
    return tuple(found)


@lru_cache(maxsize=CACHED_BATCHES)
def _hold_exchanging_experts(batch: MicroBatch) -> Held:
    """List what a layer of experts holds in forward when results of experts are on their way back."""
    return _keep_layer(replace(batch, expert_share=1.0)) + Held({EXCHANGED: measure_exchanged(batch)})


@lru_cache(maxsize=CACHED_BATCHES)
def _list_expert_backward(batch: MicroBatch) -> tuple[tuple[str, Held, int, int], ...]:
    """List the operations of the backward of a layer of experts.

    Returns:
        (operation, what the layer holds there, its sum, elements of new gradients of weights) of each.
    """
    if not batch.expert_share:
        return ()
    layer = replace(batch, expert_share=1.0)
    gradients = batch.element_bytes * (_count_stream(batch) + _count_dropped(batch))
    found = []
    for operation, held, new in list_expert_peaks(layer, gradients, _keep_layer(layer)):
        found.append((operation, held, held.total(), new))
    return tuple(found)


@lru_cache(maxsize=CACHED_BATCHES)
def _recompute_experts(batch: MicroBatch) -> Held:
    """List what a layer of experts holds when backward has computed it again."""
    gradient = Held({GRADIENTS: batch.element_bytes * _count_stream(batch)})
    return _hold_exchanging_experts(batch) + gradient


def _find_backward_peaks(batch: MicroBatch) -> Iterator[tuple[str, Held]]:
    """Backward lets go of what each operation kept: the MLP's share is gone when attention's turn comes."""
    if batch.expert_share < 1:
        yield from _find_mlp_peaks(batch)
    yield "linear_qkv", _hold_at_projection(batch)
    for held in _find_attention_peaks(batch):
        yield "core_attention", held


def _count_stream(batch: MicroBatch) -> int:
    """Elements of the gradient of hidden states, for each token."""
    return batch.shape.hidden_size // batch.shares


def _count_dropped(batch: MicroBatch) -> int:
    """Elements, for each token, of the gradient of hidden states before a dropout; 0 where none drops them."""
    return _count_stream(batch) if batch.shape.hidden_dropout else 0


def _count_gathered(batch: MicroBatch) -> int:
    """Elements, for each token, of a gradient that is gathered where ranks share out the tokens."""
    return batch.shape.hidden_size if batch.shares > 1 else 0


def _find_mlp_peaks(batch: MicroBatch) -> Iterator[tuple[str, Held]]:
    """The MLP's second product, and its activation function where that has more inner tensors than are gone by then."""
    shape = batch.shape
    each = batch.element_bytes
    hidden = shape.hidden_size
    inner = shape.ffn_hidden_size
    kept = _keep_layer(replace(batch, expert_share=0.0))
    stream = _count_stream(batch)
    width = stream + _count_dropped(batch) + _count_gathered(batch) + inner
    in_fp32, _ = batch.describe_wide(hidden, inner)
    gradients = each * width
    gradients += in_fp32 // batch.tokens
    gradients += batch.count_fp8_gradients(hidden)
    yield "linear_fc2", kept + Held({GRADIENTS: gradients})
    # forward's result is one of them
    inner_tensors = {"swiglu": 2, "squared_relu": 3}
    if shape.activation in inner_tensors:
        width = stream + inner_tensors[shape.activation] * inner
        gradients = each * width
        yield shape.activation, kept + Held({GRADIENTS: gradients})


def _hold_at_projection(batch: MicroBatch) -> Held:
    """List what lives at the backward of queries', keys' and values' projection."""
    shape = batch.shape
    heads_width = shape.qkv_width
    kept = Held({NORMS: batch.hidden_norm_bytes, LINEAR_INPUTS: batch.saved_input_bytes})
    if shape.latent is not None:
        kept += _keep_latent_vectors(batch, shape.latent)
        of_head = shape.latent.query_width + shape.latent.qk_head_dim + shape.latent.v_head_dim
        heads_width = shape.num_attention_heads * of_head
    # the whole gradient of the input, and this rank's share of it
    gathered = _count_gathered(batch)
    gathered += gathered // batch.shares
    width = shape.hidden_size + _count_stream(batch) + gathered + heads_width
    gradients = batch.element_bytes * width
    gradients += batch.count_fp8_gradients(heads_width)
    return kept + Held({GRADIENTS: gradients})


def _find_attention_peaks(batch: MicroBatch) -> Iterator[Held]:
    """List what lives where attention's backward can hold most."""
    shape = batch.shape
    each = batch.element_bytes
    stream = _count_stream(batch)
    wide = shape.kernel_width
    keys = _count_key_width(batch)
    kept = _keep_until_scores(replace(batch, recomputes_attention=False))
    probabilities, scores = _measure_scores(batch)
    if not scores:
        gradients = each * (stream + 2 * wide + 2 * keys)
        if batch.attends_in_fp32:
            gradients += _measure_fp32_attention(batch)
        yield kept + Held({GRADIENTS: gradients})
    elif batch.attention == CAUSAL:
        # by blocks of queries, of which the last one comes first and is the largest
        block = each * shape.num_attention_heads * min(QUERY_BLOCK, shape.seq_length)
        gradients = each * (stream + 4 * wide) + block
        yield kept + Held({SCORES: sum(scores), GRADIENTS: gradients})
    else:
        for held in _find_written_scores_peaks(batch, probabilities, scores):
            yield kept + held


def _find_written_scores_peaks(batch: MicroBatch, probabilities: int, scores: list[int]) -> Iterator[Held]:
    """Scores that were written down, at the weighted sum's backward and at the softmax's.

    Args:
        batch: Of the rank.
        probabilities: Bytes for each token.
        scores: Bytes for each token of what forward kept, the softmax's first.
    """
    wide = batch.shape.kernel_width
    vectors = batch.element_bytes * (_count_stream(batch) + 2 * wide)
    if batch.attends_in_fp32:
        # copies of queries, keys and values, and gradients of queries or of values before they are rounded
        keys = _count_key_width(batch)
        vectors += FP32 * (2 * wide + 2 * keys)
    # a chunk of a sequence is computed by itself; scores of the others are kept meanwhile, unless they are recomputed
    share = batch.largest_chunk_share
    others = 0.0 if batch.recomputes_attention else 1 - share
    all_scores = sum(scores)
    softmax = scores[0]

    scores_now = int(all_scores * (share + others))
    gradients = vectors + int(probabilities * share)
    yield Held({SCORES: scores_now, GRADIENTS: gradients})

    softmax_now = int(softmax * share + all_scores * others)
    gradients = vectors + int(2 * softmax * share)
    yield Held({SCORES: softmax_now, GRADIENTS: gradients})


def _measure_fp32_attention(batch: MicroBatch) -> int:
    """Bytes for each token that the backward of a CPU's fused kernel holds in fp32, where it is given 16-bit numbers.

    Queries, result and the gradients of both, of one chunk of the sequence; keys, values and their gradients, of all of
    it; and the chunk's mask.
    """
    chunks = 1 if batch.context == 1 else len(batch.chunks)
    of_queries = 4 * batch.shape.kernel_width // chunks
    of_keys = 4 * _count_key_width(batch) * batch.context
    masked_scores = int(batch.largest_chunk_share * batch.masked_chunk_scores)
    masks = masked_scores // batch.tokens
    return FP32 * (of_queries + of_keys + masks)


def _list_gelu_pieces(batch: MicroBatch) -> list[LedgerRow]:
    """List what GELU holds while it computes in blocks (cpu_kernels/gelu.py); [] where it does not.

    It holds its input, and buffers in fp32.
    """
    shape = batch.shape
    if shape.activation != "gelu_tanh" or not batch.on_cpu or not gelu_works_in_blocks(batch.element_bytes):
        return []
    inputs = batch.tokens * shape.ffn_hidden_size
    piece = min(GELU_BLOCK * batch.threads, inputs)
    buffers = 2 if batch.element_bytes == FP32 else 4
    formula = f"{buffers} buffers x {FP32} bytes x {count(piece)} elements at a time"
    input_formula = f"{count(inputs)} x {batch.element_bytes} bytes"
    return [
        LedgerRow(
            category="workspace",
            name="GELU's input",
            num_bytes=batch.element_bytes * inputs,
            formula=input_formula,
        ),
        LedgerRow(
            category="workspace",
            name="pieces of GELU in fp32",
            num_bytes=buffers * FP32 * piece,
            formula=formula,
        ),
    ]


def _list_loss(batch: MicroBatch) -> list[LedgerRow]:
    """The logits, kept for backward, and what the loss works in.

    In 16 bits, and where ranks split them, it works in an fp32 copy of some rows, which becomes softmax.
    """
    words = batch.shape.padded_vocab_size
    each = batch.element_bytes
    formula = f"{each} bytes x {count(batch.tokens)} tokens x {count(words)} entries"
    logits = LedgerRow(
        category=LOGITS,
        name="logits, later their gradients",
        num_bytes=each * batch.tokens * words,
        formula=formula,
    )
    if batch.precision == "fp32" and not batch.split:
        return [logits]
    max_logits = count_loss_logits(batch.threads) if batch.on_cpu else MAX_LOGITS
    number = min(batch.tokens, count_rows(words, max_logits))
    formula = f"{FP32} bytes x {count(number)} tokens at a time x {count(words)} entries"
    rows = LedgerRow(
        category=LOGITS,
        name="rows of logits in fp32",
        num_bytes=FP32 * number * words,
        formula=formula,
    )
    return [logits, max(rows, _describe_wide_logits(batch), key=lambda row: row.num_bytes)]


def _describe_wide_logits(batch: MicroBatch) -> LedgerRow:
    """Describe what the output layer's products hold in fp32; 0 bytes where the processor multiplies 16-bit numbers."""
    num_bytes, formula = batch.describe_wide(batch.shape.padded_vocab_size, batch.shape.hidden_size)
    return LedgerRow(
        category=LOGITS,
        name="logits and weights in fp32",
        num_bytes=num_bytes,
        formula=formula,
    )


# --- the moments of a step


def predict_memory(plan: Plan, processor: Processor | None = None) -> MemoryPrediction:
    """Predict what tensors of one rank hold at the moments of a step at which that can be most.

    Bytes are as torch's allocator counts them on the plan's device: without what lies outside of it (the CUDA context,
    NCCL), without fragmentation, and for layers that are not compiled.

    Args:
        plan: Of the rank.
        processor: The GPU, whose cuBLAS takes more on newer ones; None: an older one.
    """
    return MemoryPrediction(tuple(sum_moment(listed) for listed in _list_moments(plan, processor, list)))


def measure_peak(plan: Plan, processor: Processor | None = None) -> int:
    """Bytes of predict_memory's peak, in less time: for many plans of which only that is asked."""
    return max(listed.num_bytes for listed in _list_moments(plan, processor, _sum_up))


Gather = Callable[[Iterable[LedgerRow]], list[LedgerRow]]  # rows that are part of several moments


def _sum_up(rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """Add rows up to one, which has the bytes of all."""
    num_bytes = sum(row.num_bytes for row in rows)
    return [LedgerRow(category="", name="", num_bytes=num_bytes, formula="")]


def _list_moments(plan: Plan, processor: Processor | None, gather: Gather) -> Iterator[ListedMoment]:
    always = gather(list_states(plan, processor))
    yield from _list_micro_batch_moments(plan, always, gather)
    yield from _list_update_moments(plan, always)


def _list_update_moments(plan: Plan, always: list[LedgerRow]) -> Iterator[ListedMoment]:
    """The moments of the gradients' norm and of the optimizer.

    The optimizer finds gradients unless they lie in fp32 sums or buckets, and copies those of 16 bits to fp32.
    """
    groups = group_parameters(plan)
    each = element_bytes(plan.precision)
    rows = list(always)
    if plan.sharding:
        rows += list_groups("gradients", "gradients", FP32, groups)
    elif not plan.fp32_gradients:
        # buckets of several ranks hold all but experts'
        own = groups if plan.layout.replicas == 1 else groups[1:]
        rows += list_groups("gradients", "gradients", each, own)
        if plan.precision != "fp32":
            rows += list_groups("gradients", "fp32 copies of gradients", FP32, groups)
    yield ListedMoment(Phase.CLIP_GRAD, "gradient norm", rows)
    decayed: list[LedgerRow] = []
    if plan.args.optimizer.optimizer == "sgd" and plan.learning_rate.weight_decay_style != "constant":
        # SGD's weight decay that changes is added to gradients by hand: weights times decay (optim/optimizer.py)
        decayed += list_groups("workspace", "decayed weights", FP32, groups)
    yield ListedMoment(Phase.OPTIMIZER_STEP, "update of the weights", [*rows, *decayed])


def plan_batch(plan: Plan) -> MicroBatch:
    """The micro-batch of the plan's rank."""
    a = plan.args
    batch = plan_micro_batch(
        plan.shape,
        a.training.micro_batch_size,
        plan.precision,
        plan.device,
        a.model.attention_backend,
        masked=plan.masks_attention,
        recompute=a.model.recompute_granularity,
        threads=plan.world.threads,
        layout=plan.layout,
        head_ranks=plan.min_head_ranks,
        expert_share=compute_expert_share(plan),
        load=plan_expert_load(plan),
    )
    if plan.fp8 is None:
        return batch
    fp8_share = len(plan.fp8_layers) / max(len(plan.stage.layers), 1)
    return replace(batch, fp8=plan.fp8, fp8_share=fp8_share)


@dataclass(frozen=True)
class _ChunkOfLayers:
    """The last micro-batch in one chunk of a stage's layers: what its moments have in common.

    Its backward's gradients are new memory that lives on, unless they are added to fp32 sums or to earlier ones, or are
    copied into a bucket (on a GPU, 16-bit ones wait to be added at once, see parallel/data_parallel.py).
    """

    plan: Plan
    batch: MicroBatch
    always: list[LedgerRow]  # what lives throughout the step
    number: int  # the chunk's

    @property
    def stage(self) -> Stage:
        """The stage that the chunk belongs to."""
        return self.plan.stage

    @property
    def starts(self) -> bool:
        """Whether it has the embedding; where chunks are equal, one stands for all."""
        return self.stage.is_first if self.stage.has_equal_chunks else self.stage.starts(self.number)

    @property
    def ends(self) -> bool:
        """Whether it has the loss."""
        return self.stage.ends(self.number)

    @property
    def layers(self) -> int:
        """Number of the chunk's layers."""
        return len(self.stage.chunks[self.number])

    @property
    def recomputed(self) -> int:
        """Layers that keep their input only."""
        return self.plan.count_recomputed(self.layers)

    @property
    def depths(self) -> int:
        """Layers of multi-token prediction behind the chunk's own."""
        return self.plan.further_layers if self.ends else 0

    @cached_property
    def depth_parameters(self) -> int:
        """Parameters of one such layer, and of what joins hidden states and embeddings for it."""
        shape = self.plan.rank_shape
        without = count_parameters(replace(shape, mtp_num_layers=0), self.stage)
        embedding = 0 if self.stage.is_first or shape.tied_embeddings else self.matrix
        return (self.parameters - without - embedding) // max(self.depths, 1)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the whole stage."""
        return sum(group.number for group in self.groups)

    @cached_property
    def groups(self) -> tuple[ShardedParameters, ...]:
        """Parameters of all of the stage, by the ranks that share out their state."""
        return group_parameters(self.plan)

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer, on average."""
        return sum(group.of_layer for group in self.groups)

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters of this rank's experts in all of the stage's layers."""
        return sum(group.number for group in self.groups[1:])

    @property
    def matrix(self) -> int:
        """Elements of the embedding's or the output layer's weight."""
        return self.plan.rank_shape.padded_vocab_size * self.plan.rank_shape.hidden_size

    @property
    def is_tied(self) -> bool:
        """Whether this stage has both the embedding and an output layer with the same weight."""
        return self.plan.rank_shape.tied_embeddings and self.stage.stages == 1

    @property
    def is_sharded(self) -> bool:
        """Whether ranks shard the model."""
        return self.plan.sharding is not None

    @property
    def accumulates(self) -> bool:
        """Whether earlier micro-batches of the step have left gradients."""
        return self.plan.micro_batches(self.plan.train_samples) > 1

    @property
    def gradients_wait(self) -> bool:
        """Whether 16-bit gradients wait on a GPU to be added at once."""
        return self.plan.device == "cuda" and self.plan.precision != "fp32"

    @property
    def gradients_stay(self) -> bool:
        """Whether a gradient, once made, lives until the update."""
        if self.is_sharded:
            return True
        if self.plan.fp32_gradients or self.plan.layout.replicas > 1:
            return False
        return self.gradients_wait or not self.accumulates

    @property
    def expert_gradients_stay(self) -> bool:
        """Whether a gradient of experts, which no bucket takes, lives until the update."""
        if self.is_sharded or self.plan.fp32_gradients:
            return self.is_sharded
        return self.gradients_wait or not self.accumulates

    @property
    def waiting(self) -> int:
        """Elements of gradients that wait to be added to fp32 sums, a bundle at a time; data_parallel.BUNDLES is 8."""
        if self.gradients_wait and self.plan.fp32_gradients and not self.is_sharded:
            return self.parameters // 16
        return 0

    @property
    def output_gradient(self) -> int:
        """Elements of the output layer's gradient while layers below compute theirs.

        That of a tied one waits for the embedding's.
        """
        if self.stage.is_last and (self.gradients_stay or self.is_tied):
            return self.matrix
        return 0

    @property
    def hidden_gradient(self) -> list[LedgerRow]:
        """The gradient of hidden states."""
        return [*_list_rows(self.batch, Held({GRADIENTS: self.batch.whole_input_bytes}))]

    def make_gradients(self, parameters: int) -> LedgerRow:
        """A row of gradients of so many parameters, in the precision of weights."""
        return per_parameter("gradients", "gradients", self.batch.element_bytes, parameters)

    def keep_below(self, layer: int) -> tuple[LedgerRow, ...]:
        """List what the chunk's layers below this one keep for backward."""
        below = layer - 1
        return _list_kept(self.batch, below, min(below, self.recomputed))

    def hold(self, layer: int) -> list[LedgerRow]:
        """List what lives while `layer` computes, and layers of the micro-batch have no part in."""
        above = max(self.layers - layer, 0)
        rows = [*self.always]
        rows += _list_rows(self.batch, _keep_for_weights(self.batch, self.stage), above)
        if self.is_sharded:
            rows += list_gathered(self.plan, self.groups, layer, self.accumulates)
            return rows
        held = self.parameters if self.accumulates and not self.plan.fp32_gradients else 0
        rows.append(self.make_gradients(held))
        return rows


def _list_micro_batch_moments(plan: Plan, always: list[LedgerRow], gather: Gather) -> Iterator[ListedMoment]:
    """Moments of the last micro-batch's forward and backward, which add to the gradients of those before it."""
    batch = plan_batch(plan)
    micro_batches = plan.micro_batches(plan.train_samples)
    for number, others in plan.stage.list_fullest(micro_batches):
        waiting = _list_waiting(batch, plan.stage, others, micro_batches, plan.count_recomputed)
        throughout = gather([*always, *waiting])
        chunk = _ChunkOfLayers(plan, batch, throughout, number)
        yield from _list_loss_moments(chunk)
        if chunk.depths:
            yield _describe_further_layer(chunk)
        yield from _list_layer_moments(chunk)
        if chunk.starts:
            yield from _list_embedding_moments(chunk)


def _list_loss_moments(chunk: _ChunkOfLayers) -> Iterator[ListedMoment]:
    """The end of forward, and what of the loss's backward can be most."""
    batch = chunk.batch
    layers = chunk.layers
    at_end = chunk.hold(layers + 1)
    at_end += _list_kept(batch, layers, chunk.recomputed)
    at_end += _list_rows(batch, _keep_ends(batch, chunk.starts, chunk.ends))
    at_end += _list_further_layers(chunk, chunk.depths)
    if layers:
        yield from _list_last_layer_moments(chunk)
    if not chunk.ends:
        yield ListedMoment(Phase.FORWARD, "last layer", at_end)
        return
    loss = _list_loss(batch)
    yield ListedMoment(Phase.FORWARD, "cross entropy", [*at_end, *loss])
    if batch.precision == "fp16" or batch.split:
        yield ListedMoment(Phase.BACKWARD, "cross entropy", [*at_end, *loss])
    logits = loss[0]
    of_weight = [chunk.make_gradients(chunk.matrix), _describe_wide_logits(batch)]
    at_output = [*at_end, logits, *chunk.hidden_gradient, *of_weight]
    yield ListedMoment(Phase.BACKWARD, "output layer", at_output)


# --- layers of multi-token prediction, whose losses come before the model's own in forward, and behind it in backward


def _list_further_layers(chunk: _ChunkOfLayers, depths: int) -> list[LedgerRow]:
    """List what so many of them keep for backward, with their logits."""
    if not depths:
        return []
    batch = _plan_further_layer(chunk)
    # inputs of two norms and of the joining product, which is twice as wide; then the last norm's, and the output's
    held = Held({NORMS: 3 * batch.hidden_norm_bytes, LINEAR_INPUTS: 2 * batch.input_bytes, MASKS: batch.mask_bytes})
    norms_copy, _ = batch.copies_of_norms
    if norms_copy:
        held[LINEAR_INPUTS] += batch.input_bytes
    logits, *_ = _list_loss(batch)
    recomputed = depths if chunk.plan.recomputes_further_layers else 0
    return [
        *_list_kept(batch, depths, recomputed),
        *_list_rows(batch, held, depths),
        LedgerRow(
            category=logits.category,
            name="logits of further tokens",
            num_bytes=depths * logits.num_bytes,
            formula=f"{depths} x {logits.formula}",
        ),
    ]


def _plan_further_layer(chunk: _ChunkOfLayers) -> MicroBatch:
    """The micro-batch as such a layer has it, which has experts where the decoder's last one has."""
    return replace(chunk.batch, expert_share=1.0 if chunk.plan.further_expert_layers else 0.0)


def _describe_further_layer(chunk: _ChunkOfLayers) -> ListedMoment:
    """The moment of the last such layer's backward at which tensors hold most: those before it are still whole."""
    batch = _plan_further_layer(chunk)
    of_layer = replace(chunk, batch=batch)
    highest = _find_highest_operation(of_layer, chunk.plan.recomputes_further_layers)
    rows = chunk.hold(chunk.layers)
    rows += _list_kept(chunk.batch, chunk.layers, chunk.recomputed)
    rows += _list_rows(chunk.batch, _keep_ends(chunk.batch, chunk.starts, chunk.ends))
    rows += _list_further_layers(chunk, chunk.depths - 1)
    rows += _list_rows(batch, Held({NORMS: 2 * batch.hidden_norm_bytes, LINEAR_INPUTS: 2 * batch.input_bytes}))
    rows += highest.rows
    made = chunk.output_gradient + chunk.waiting
    rows.append(chunk.make_gradients(made + highest.new_gradients))
    return ListedMoment(Phase.BACKWARD, f"further token {chunk.depths}, {highest.name}", rows)


def _list_last_layer_moments(chunk: _ChunkOfLayers) -> Iterator[ListedMoment]:
    """Moments of forward within a chunk's last layer that can be the highest."""
    batch = chunk.batch
    layers = chunk.layers
    if batch.expert_share:
        exchanging = chunk.hold(layers)
        exchanging += chunk.keep_below(layers)
        exchanging += _list_rows(batch, _hold_exchanging_experts(batch))
        yield ListedMoment(Phase.FORWARD, f"layer {layers}, experts", exchanging)
    pieces = _list_gelu_pieces(batch)
    if pieces:
        in_gelu = [*chunk.hold(layers), *pieces]
        in_gelu += chunk.keep_below(layers)
        in_gelu += _list_rows(batch, _keep_layer(batch))
        yield ListedMoment(Phase.FORWARD, f"layer {layers}, GELU", in_gelu)


def _list_layer_moments(chunk: _ChunkOfLayers) -> Iterator[ListedMoment]:
    """Backward's highest moment in each layer that can have the highest of all.

    Layers of one kind are alike, so that what lives changes evenly: the first and the last of each kind are enough.
    """
    layers = chunk.layers
    recomputed = chunk.recomputed
    candidates = {layers, recomputed + 1, recomputed, 1}
    if chunk.is_sharded:
        # while gradients of one are reduced, or weights of one gathered
        candidates |= {layers - 1, 2}
    of_kinds: dict[bool, _HighestOperation] = {}
    for layer in sorted(candidates & {*range(1, layers + 1)}, reverse=True):
        is_recomputed = layer <= recomputed
        if is_recomputed not in of_kinds:
            of_kinds[is_recomputed] = _find_highest_operation(chunk, is_recomputed)
        yield _describe_layer(chunk, layer, of_kinds[is_recomputed])


def _list_operations(chunk: _ChunkOfLayers, is_recomputed: bool) -> Iterator[tuple[str, Held, int, int]]:
    """List the operations of a layer's backward.

    Returns:
        (operation, what the layer holds there, its sum, elements of its new gradients of weights) of each.
    """
    batch = chunk.batch
    of_mlp = _count_new_mlp_gradients(chunk)
    for operation, held, each in _list_layer_backward(batch):
        new = 0
        if operation == "linear_qkv":
            new = chunk.layer_parameters
        elif chunk.gradients_stay or operation == "linear_fc2":
            new = of_mlp
        yield operation, held, each, new
    yield from _list_expert_backward(batch)
    if batch.expert_share and is_recomputed:
        held = _recompute_experts(batch)
        yield "experts, computed again", held, held.total(), 0


def _count_new_mlp_gradients(chunk: _ChunkOfLayers) -> int:
    """Elements of the gradients of weights that are new when backward is at an MLP, or at experts."""
    if not chunk.batch.expert_share:
        shape = chunk.plan.rank_shape
        return shape.hidden_size * shape.ffn_hidden_size
    if chunk.gradients_stay or chunk.expert_gradients_stay:
        return sum(count_expert_weights(chunk.batch))
    return 0


@dataclass(frozen=True)
class _HighestOperation:
    """The operation of a layer's backward at which tensors of the layer hold most."""

    name: str
    rows: list[LedgerRow]  # what the layer holds then
    new_gradients: int  # elements of gradients of weights that it makes


def _find_highest_operation(chunk: _ChunkOfLayers, is_recomputed: bool) -> _HighestOperation:
    """The highest operation of a layer's backward: what lives outside of the layer is the same for all of them.

    Args:
        chunk: Of the layer.
        is_recomputed: Whether the layer keeps its input only.
    """
    batch = chunk.batch
    highest_bytes = -1
    for operation, held, each, new in _list_operations(chunk, is_recomputed):
        num_bytes = batch.tokens * each
        num_bytes += batch.element_bytes * new
        if num_bytes > highest_bytes:
            highest_bytes = num_bytes
            highest = operation, held, new
    operation, held, new = highest
    own = Held({MASKS: batch.mask_bytes})
    norms_copy, _ = batch.copies_of_norms
    if is_recomputed and norms_copy:
        own[RECOMPUTED] = batch.input_bytes
    rows = list(_list_rows(batch, own + held))
    return _HighestOperation(operation, rows, new)


def _describe_layer(chunk: _ChunkOfLayers, layer: int, highest: _HighestOperation) -> ListedMoment:
    """The moment of one layer's backward at which tensors hold most. highest: of a layer of its kind."""
    rows = chunk.hold(layer)
    rows += chunk.keep_below(layer)
    rows += highest.rows
    made = _count_gradients_above(chunk, layer)
    rows.append(chunk.make_gradients(made + highest.new_gradients))
    return ListedMoment(Phase.BACKWARD, f"layer {layer}, {highest.name}", rows)


def _count_gradients_above(chunk: _ChunkOfLayers, layer: int) -> int:
    """Elements of gradients of weights that backward has made and left when it comes to a layer.

    Where ranks shard the model, those of layers are counted with what is gathered.
    """
    made = chunk.output_gradient + chunk.waiting
    if chunk.depths and (chunk.is_sharded or chunk.gradients_stay):
        # further tokens' embeddings have given a gradient of the embedding, too
        made += chunk.depths * chunk.depth_parameters
        made += 0 if chunk.plan.shape.tied_embeddings else chunk.matrix
    if chunk.is_sharded:
        return made
    above = chunk.layers - layer
    if chunk.gradients_stay:
        return made + chunk.layer_parameters * above
    if chunk.expert_gradients_stay:
        return made + chunk.expert_parameters * above // chunk.layers
    return made


def _list_embedding_moments(chunk: _ChunkOfLayers) -> Iterator[ListedMoment]:
    """The end of the first stage's backward."""
    plan = chunk.plan
    matrix = chunk.matrix
    tied_matrix = matrix if chunk.is_tied else 0
    if plan.sharding is not None:
        ends = chunk.parameters - chunk.layers * chunk.layer_parameters
        added = ends + tied_matrix
        each = gradient_bytes(plan.precision, plan.fp32_gradients)
        rows = [*chunk.always]
        rows += list_reduced(chunk.groups, ends, each)
        rows.append(chunk.make_gradients(matrix))
        yield ListedMoment(Phase.BACKWARD, "reduction of the embedding's gradients", rows)
    elif chunk.gradients_stay:
        added = chunk.parameters + tied_matrix
    else:
        added = chunk.output_gradient + matrix + chunk.waiting
        if chunk.expert_gradients_stay:
            added += chunk.expert_parameters
    # the sum with a tied output layer's is a third matrix where a recorder watches, and in fp16, whose loss holds the
    # first
    is_third = chunk.is_tied and (chunk.batch.on_cpu or chunk.batch.precision == "fp16")
    third = chunk.make_gradients(matrix if is_third else 0)
    last = max([*chunk.hidden_gradient, third], key=lambda row: row.num_bytes)
    at_embedding = [*chunk.hold(0), chunk.make_gradients(added), last]
    yield ListedMoment(Phase.BACKWARD, "embedding", at_embedding)


# --- sums that stand beside a measured snapshot


def keep_everything(layers: int) -> int:
    """How many layers of a chunk keep their input only, without recomputation."""
    return 0


def activation_bytes(
    batch: MicroBatch, stage: Stage, micro_batches: int, count_recomputed: CountRecomputed = keep_everything
) -> int:
    """Most bytes that forward keeps for backward.

    That is when it reaches the logits, or when backward has computed the last recomputed layer again.

    Per layer, with fused attention: 34*s*b*h in 16 bits for the plain GPT with dropout, Korthikanti et al. 2022
    (Reducing Activation Recomputation, equation 2) without its term 5*a*s/h, which only attention that writes its
    scores down has; and statistics of norms and attention. A recomputed layer keeps its input, e*s*b*h.

    Args:
        batch: One micro-batch of the rank.
        stage: Of the rank.
        micro_batches: Of a step.
        count_recomputed: How many layers of a chunk of so many keep their input only.
    """
    highest = 0
    for number, waiting in stage.list_fullest(micro_batches):
        rows = _list_waiting(batch, stage, waiting, micro_batches, count_recomputed)
        others = sum(row.num_bytes for row in rows)
        layers = len(stage.chunks[number])
        starts = stage.is_first if stage.has_equal_chunks else stage.starts(number)
        ends = _keep_ends(batch, starts, stage.ends(number))
        own = batch.tokens * _measure_running_chunk(batch, layers, count_recomputed(layers), ends)
        highest = max(highest, others + own)
    return highest


def _measure_running_chunk(batch: MicroBatch, layers: int, recomputed: int, ends: Held) -> int:
    """Bytes for each token that one micro-batch holds at most in a chunk of so many layers.

    Args:
        batch: Of the rank.
        layers: Of the chunk.
        recomputed: How many of them keep their input only.
        ends: What the chunk keeps besides its layers.
    """
    moments = [_sum_layers(batch, layers, recomputed) + ends.total()]
    if recomputed:
        computed_again = _keep_layer(batch).total()
        if batch.shape.hidden_dropout:
            # of the last dropout computed again: its mask and its result
            computed_again += batch.mask_bytes + batch.input_bytes
        moments.append(recomputed * batch.input_bytes + computed_again)
    if layers and batch.attends_in_fp32 and batch.recomputes_attention:
        below = _sum_layers(batch, layers - 1, max(recomputed - 1, 0))
        moments.append(below + _measure_attention_recomputed_in_fp32(batch))
    return max(moments)


def _sum_layers(batch: MicroBatch, layers: int, recomputed: int) -> int:
    """Bytes for each token that so many layers keep, of which `recomputed` keep their input only."""
    return sum(times * held.total() for held, times in _keep_layers(batch, layers, recomputed))


def _measure_attention_recomputed_in_fp32(batch: MicroBatch) -> int:
    """Bytes for each token that a layer holds when backward has computed its attention again, in fp32.

    Of the layer's forward, what came before attention; of fp32 queries, keys, values, their copies for the products,
    the scores, and what attention keeps.
    """
    before = _keep_until_scores(batch)
    own = sum(before[name] for name in (NORMS, LINEAR_INPUTS, QKV, ROTARY))
    wide = replace(batch, precision="fp32", attends_in_fp32=False, recomputes_attention=False)
    scores, kept_scores = _measure_scores(wide)
    keys = _count_key_width(batch)
    converted = FP32 * (batch.shape.kernel_width + 2 * keys)
    copied = _keep_until_scores(wide)[QKV]
    return own + converted + copied + scores + sum(kept_scores)


def logits_bytes(batch: MicroBatch) -> int:
    """Bytes that the loss holds at its highest.

    They are all logits, and either some rows of them in fp32, or what its backward works with: as much as its input.
    """
    logits, *rows = _list_loss(batch)
    copies = sum(row.num_bytes for row in rows)
    # fp16's products are torch's own
    backward = 0 if batch.precision == "fp16" else batch.tokens * batch.input_bytes
    return logits.num_bytes + max(copies, backward)
