"""Memory of a training step in closed form: an estimate within 3% of what the real step takes, and without torch.

The exact answer is megatron_lite/rehearsal, which walks the real model and step without data; tests hold the two side by side.

Letters: N parameters, L layers, n tokens of a micro-batch, h hidden, V padded vocabulary, e bytes of one activation.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import recomputed_layers
from megatron_lite.estimate.hardware import CUBLAS_THREADS, Processor, cublas_workspace_bytes
from megatron_lite.estimate.layer_memory import (
    FP32,
    GRADIENTS,
    RECOMPUTED,
    MicroBatch,
    element_bytes,
    kept_by_layer,
    layer_backward,
    plan_micro_batch,
)
from megatron_lite.estimate.params import parameter_count, parameter_parts
from megatron_lite.estimate.prediction import LedgerRow, MemoryPrediction, Moment
from megatron_lite.model.kernel_choice import rows_at_once
from megatron_lite.phases import Phase
from megatron_lite.units import count

Rows = Sequence[LedgerRow | tuple[LedgerRow, int]]  # a pair is a row and how often it stands there

INT64 = 8
LOGITS = "logits and loss"


def predict_memory(plan: Plan, processor: Processor | None = None) -> MemoryPrediction:
    """What tensors of one rank hold at the moments of a step at which that can be most.

    As torch's allocator counts them on the plan's device; without what lies outside of it (the CUDA context, NCCL),
    without fragmentation, and for layers that are not compiled.
    processor: the GPU, whose cuBLAS takes more on newer ones; None: an older one.
    """
    number, optimizer = parameter_count(plan.shape), plan.args.optimizer
    always = _states(plan)
    if plan.device == "cuda":  # from the first step on
        each = cublas_workspace_bytes(processor, plan.args.training.deterministic_mode)
        formula = f"{CUBLAS_THREADS} x {count(each)} bytes"
        always.append(LedgerRow("workspace", "cuBLAS workspaces", CUBLAS_THREADS * each, formula))
    # the optimizer finds gradients unless they lie in fp32 sums or buckets, and copies those of 16 bits to fp32
    updating = list(always)
    if not plan.fp32_gradients and plan.world.size == 1:
        updating += _gradients(plan, number)
    if not plan.fp32_gradients and plan.precision != "fp32":
        updating.append(_per_parameter("gradients", "fp32 copies of gradients", FP32, number))
    decayed = []
    if optimizer.optimizer == "sgd" and plan.learning_rate.weight_decay_style != "constant":
        # SGD's weight decay that changes is added to gradients by hand: weights times decay (optim/optimizer.py)
        decayed.append(_per_parameter("workspace", "decayed weights", FP32, number))
    return MemoryPrediction(
        (
            *_forward_and_backward(plan, always),
            _moment(Phase.CLIP_GRAD, "gradient norm", updating),
            _moment(Phase.OPTIMIZER_STEP, "update of the weights", [*updating, *decayed]),
        )
    )


def count_recomputed_layers(plan: Plan) -> int:
    """The first so many layers forget their activations."""
    m = plan.args.model
    return recomputed_layers(m.recompute_granularity, m.recompute_method, m.recompute_num_layers, plan.shape.num_layers)


# --- what lives from step to step


def state_bytes(
    parameters: int, precision: str, fp32_gradients: bool, optimizer: str, momentum: bool = True
) -> dict[str, int]:
    """Bytes that live from step to step on every rank: weights, gradients, fp32 masters of 16-bit weights, Adam's two
    moments or SGD's one. 16 bytes per parameter for fp16 with Adam: 2 + 2 + 4 + 4 + 4 (Rajbhandari et al. 2020, ZeRO,
    section 3.1); 18 with gradients in fp32; 16 in fp32: 4 + 4 + 8.
    """
    width = element_bytes(precision)
    return {
        "parameters": parameters * width,
        "gradients": parameters * (FP32 if fp32_gradients else width),
        "master weights": parameters * FP32 if precision != "fp32" else 0,
        "moments": parameters * FP32 * (2 if optimizer == "adam" else int(momentum)),
    }


def _states(plan: Plan) -> list[LedgerRow]:
    """With the buffers of gradients, and the batch."""
    number, optimizer, data = parameter_count(plan.shape), plan.args.optimizer, plan.args.data
    found = state_bytes(number, plan.precision, plan.fp32_gradients, optimizer.optimizer, optimizer.sgd_momentum > 0)
    names = {"parameters": "weights", "master weights": "fp32 masters", "moments": f"moments of {optimizer.optimizer}"}
    rows = [_per_parameter(category, name, found[category] // number, number) for category, name in names.items()]
    if plan.fp32_gradients:
        rows.append(_per_parameter("gradients", "fp32 sums of gradients", FP32, number))
    if plan.world.size > 1:
        name, each = "DistributedDataParallel's buckets", element_bytes(plan.precision)
        rows.append(_per_parameter("gradients", name, each, number))
    tokens = plan.args.training.micro_batch_size * plan.shape.seq_length
    tensors = 2 + data.reset_position_ids + data.reset_attention_mask
    formula = f"{tensors} x {INT64} bytes x {count(tokens)} tokens"
    return [*rows, LedgerRow("other", "tokens, labels and their positions", tensors * INT64 * tokens, formula)]


def _gradients(plan: Plan, number: int) -> list[LedgerRow]:
    """As backward computes them."""
    return [_per_parameter("gradients", "gradients", element_bytes(plan.precision), number)]


def _per_parameter(category: str, name: str, each: int, number: int) -> LedgerRow:
    return LedgerRow(category, name, each * number, f"{each} bytes x {count(number)} parameters")


# --- forward and backward of the last micro-batch, which finds the gradients of those before it


def _forward_and_backward(plan: Plan, always: list[LedgerRow]) -> list[Moment]:
    shape, a = plan.shape, plan.args
    batch = plan_micro_batch(
        shape, a.training.micro_batch_size, plan.precision, plan.device, a.model.attention_backend,
        a.data.reset_attention_mask, a.model.recompute_granularity, plan.world.threads,
    )  # fmt: skip
    recomputed, parts = count_recomputed_layers(plan), parameter_parts(shape)
    accumulates = plan.micro_batches(plan.train_samples) > 1
    # backward's gradients are new memory that lives on, unless added to fp32 sums or earlier ones, or copied into a bucket
    stay = not (plan.fp32_gradients or accumulates or plan.world.size > 1)
    earlier = _gradients(plan, parameter_count(shape)) if accumulates and not plan.fp32_gradients else []
    base = [*always, *earlier]
    matrix = _gradients(plan, shape.padded_vocab_size * shape.hidden_size)  # of the output layer
    made = matrix if stay or shape.tied_embeddings else []  # a tied one waits for the embedding's
    layer_parameters = (parts["attention"] + parts["MLP"] + parts["norms"]) // shape.num_layers

    def backward(number: int) -> Moment:
        below = _kept_by_layers(batch, number - 1, min(number - 1, recomputed))
        outside: list[LedgerRow | tuple[LedgerRow, int]] = [*base, *below, *batch.dropout_masks(), *made]
        if stay:
            outside += _gradients(plan, (shape.num_layers - number) * layer_parameters)
        if number <= recomputed and batch.norms_copy_to_fp32:
            outside.append(batch.row(RECOMPUTED, shape.hidden_size))
        moments = []
        for operation, weights, held in layer_backward(batch):
            new = shape.hidden_size * shape.ffn_hidden_size if weights or stay else 0
            where = f"layer {number}, {operation}"
            moments.append(_moment(Phase.BACKWARD, where, [*outside, *held, *_gradients(plan, new)]))
        return max(moments, key=lambda moment: moment.num_bytes)

    at_loss: Rows = [*base, *_kept_by_layers(batch, shape.num_layers, recomputed), *_kept_at_ends(batch)]
    hidden = batch.row(GRADIENTS, shape.hidden_size, category="workspace")
    losses = [Phase.FORWARD, *([Phase.BACKWARD] if batch.precision == "fp16" else [])]
    # layers of one kind are alike, so that what lives changes evenly: the first and the last of each kind are enough
    turns = sorted({shape.num_layers, recomputed + 1, recomputed, 1} - {0, shape.num_layers + 1}, reverse=True)
    whole = [*_gradients(plan, parameter_count(shape)), *(matrix if shape.tied_embeddings else [])]
    # the sum with a tied output layer's is a third matrix where a recorder watches, and in fp16, whose loss holds the first
    is_third = shape.tied_embeddings and (batch.on_cpu or batch.precision == "fp16")
    last = max([hidden, *(matrix if is_third else [])], key=lambda row: row.num_bytes)
    return [
        *(_moment(phase, "cross entropy", [*at_loss, *_cross_entropy(batch)]) for phase in losses),
        _moment(Phase.BACKWARD, "output layer", [*at_loss, _logits(batch), hidden, *matrix]),
        *map(backward, turns),
        _moment(Phase.BACKWARD, "embedding", [*base, *(whole if stay else [*made, *matrix]), last]),
    ]


def _kept_by_layers(batch: MicroBatch, number: int, recomputed: int) -> list[tuple[LedgerRow, int]]:
    """`number` layers, of which `recomputed` keep their input only."""
    whole = [(row, number - recomputed) for row in kept_by_layer(batch)]
    return [*whole, (batch.row(RECOMPUTED, batch.shape.hidden_size), recomputed)]


def _kept_at_ends(batch: MicroBatch) -> list[LedgerRow]:
    """The embedding's dropout, and the last norm up to the output layer's input."""
    hidden = batch.shape.hidden_size
    return [*batch.dropout_masks(), *batch.kept_by_norm(hidden), batch.row("inputs of linear layers", hidden)]


def _logits(batch: MicroBatch) -> LedgerRow:
    row = batch.row("logits, later their gradients", batch.shape.padded_vocab_size, category=LOGITS)
    return replace(row, formula=f"{row.formula} words")


def _cross_entropy(batch: MicroBatch) -> Rows:
    """The logits, kept for backward; in 16 bits an fp32 copy of some rows, which becomes softmax; in fp16 the copy and its softmax."""
    if batch.precision == "fp32":
        return [_logits(batch)]
    words = batch.shape.padded_vocab_size
    number = min(batch.tokens, rows_at_once(words, batch.threads if batch.on_cpu else 0))
    formula = f"{FP32} bytes x {count(number)} tokens at a time x {count(words)} words"
    rows = LedgerRow(LOGITS, "rows of logits in fp32", FP32 * number * words, formula)
    return [_logits(batch), (rows, 2 if batch.precision == "fp16" else 1)]


# --- sums that stand beside a measured snapshot


def activation_bytes(batch: MicroBatch, recomputed: int = 0) -> int:
    """Most bytes that forward keeps for backward: when it reaches the logits, or when backward has computed the last
    recomputed layer again.

    Per layer, with fused attention: 34*s*b*h in 16 bits for the plain GPT with dropout, Korthikanti et al. 2022
    (Reducing Activation Recomputation, equation 2) without its term 5*a*s/h, which only attention that writes its scores
    down has; and statistics of norms and attention. A recomputed layer keeps its input, e*s*b*h.
    """
    at_logits: Rows = [*_kept_by_layers(batch, batch.shape.num_layers, recomputed), *_kept_at_ends(batch)]
    if not recomputed:
        return _sum(at_logits)
    result = batch.shape.hidden_size if batch.shape.hidden_dropout else 0  # of the last dropout computed again
    again: Rows = [*_kept_by_layers(batch, recomputed, recomputed), *kept_by_layer(batch), *batch.dropout_masks()]
    return max(_sum(at_logits), _sum([*again, batch.row(GRADIENTS, result)]))


def logits_bytes(batch: MicroBatch) -> int:
    """The loss at its highest: all logits in the model's precision, e*s*b*V, and either some rows of them in fp32, or what its
    backward works with: as much as its input, e*s*b*h."""
    forward = _sum(_cross_entropy(batch))
    backward = _sum([_logits(batch), batch.row(GRADIENTS, batch.shape.hidden_size)])
    return forward if batch.precision == "fp16" else max(forward, backward)  # fp16's products are torch's own


def _count(rows: Rows) -> Counter[LedgerRow]:
    """How often each row stands there."""
    counts: Counter[LedgerRow] = Counter()
    for item in rows:
        row, times = item if isinstance(item, tuple) else (item, 1)
        counts[row] += times
    return counts


def _sum(rows: Rows) -> int:
    return sum(row.num_bytes * times for row, times in _count(rows).items())


def _moment(phase: Phase, where: str, rows: Rows) -> Moment:
    """One row for each name, largest first."""
    merged: dict[tuple[str, str], LedgerRow] = {}
    for row, times in _count(rows).items():
        if not row.num_bytes * times:
            continue
        formula = row.formula if times == 1 else f"{count(times)} x {row.formula}"
        known = merged.get((row.category, row.name), LedgerRow(row.category, row.name, 0, ""))
        formula = f"{known.formula} + {formula}" if known.formula else formula
        num_bytes = known.num_bytes + row.num_bytes * times
        merged[row.category, row.name] = replace(known, num_bytes=num_bytes, formula=formula)
    return Moment(phase.value, where, tuple(sorted(merged.values(), key=lambda row: -row.num_bytes)))
