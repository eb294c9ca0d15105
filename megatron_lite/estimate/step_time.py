"""How fast a training step can be at best: what a named GPU's arithmetic, memory and link allow.

A bound, not a forecast. Each part takes at least the time in which the hardware could do it at its peak, and parts run
one after another, as kernels of one stream do. Not in it: launches and the host, the data loader, clocks other than the
boost clock, products that miss the peak (the best reach four fifths of it), logging, evaluation and checkpoints.

Bytes are counted as if all neighboring operations were one kernel: a tensor is written once, and read once by each later
kernel, except by the one right behind its producer, which may find it in the cache. (A model so small that the cache holds
a whole micro-batch can do with less; launches are its limit.) What products and fused attention read and write goes on
under their arithmetic, and is left out.

Letters: N parameters, h hidden, e bytes of one activation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_lite.config import flops
from megatron_lite.config.flops import step_flops
from megatron_lite.config.plan import Plan
from megatron_lite.estimate.hardware import Processor, peak_tflops_of
from megatron_lite.estimate.layer_memory import FP32, element_bytes
from megatron_lite.estimate.memory import count_recomputed_layers
from megatron_lite.estimate.params import parameter_count
from megatron_lite.estimate.prediction import TimePrediction, TimeRow
from megatron_lite.model.kernel_choice import FUSED, predict_attention_kernel
from megatron_lite.units import count

COMPUTE, MEMORY, LINK = "compute", "memory", "link"
# Times forward's work. FlashAttention's backward pass has five products, of which one repeats forward's, where forward
# has two (Dao 2023, FlashAttention-2, algorithm 2); with scores that are kept it has four.
FUSED_ATTENTION, STORED_SCORES = 3.5, 3
SECONDS_PER_HOUR, HOURS_PER_DAY = 3600, 24


@dataclass(frozen=True)
class Part:
    """One part of a step of one rank."""

    name: str
    bound: str  # COMPUTE: amount is FLOPs; MEMORY: bytes
    amount: float
    formula: str  # of the amount, with its numbers
    in_backward: float  # share of it that is backward's


def predict_time(plan: Plan, processor: Processor) -> TimePrediction:
    """The shortest step of one rank of `plan` on `processor`, at the final global batch.

    A row whose limit the table of processors does not hold is missing, and a note says so; peak_tflops is then 0.
    """
    plan = replace(plan, device="cuda")  # whatever the machine that plans
    peak, sequences = peak_tflops_of(processor, plan.precision), plan.batch.final // plan.world.size
    rates = {COMPUTE: (peak or 0.0) * 1e12, MEMORY: (processor.memory_gb_s or 0.0) * 1e9}
    parts = [part for part in (*_train_layers(plan, sequences), *_recompute_layers(plan, sequences)) if part.amount]
    parts.append(_update_weights(plan))
    rows, backward_ms = [], 0.0
    for part in parts:
        rate = rates[part.bound]
        if not rate:  # then there is no telling what backward hides
            backward_ms = float("inf")
            continue
        limit = f"{rate / 1e12:g} TFLOP/s" if part.bound == COMPUTE else f"{rate / 1e9:,.0f} GB/s"
        rows.append(TimeRow(part.name, 1000 * part.amount / rate, part.bound, f"{part.formula} at {limit}"))
        backward_ms += 1000 * part.amount * part.in_backward / rate
    route = _find_route(plan, processor)
    if route:
        rows.append(_reduce_gradients(plan, route, backward_ms * plan.samples_per_pass / plan.batch.final))
    return TimePrediction(
        gpu=processor.name,
        rows=tuple(rows),
        tokens=plan.batch.final * plan.shape.seq_length,
        flops_causal=step_flops(plan.shape, sequences, causal=True),
        flops_full=step_flops(plan.shape, sequences, causal=False),
        peak_tflops=peak or 0.0,
        notes=tuple(_list_notes(plan, processor, parts, rates, route is not None)),
    )


# --- what one rank has to do at least, on any hardware: operations, and bytes to and from memory


def _train_layers(plan: Plan, sequences: int) -> Iterator[Part]:
    """Forward and backward of layers and loss, in the order of a step."""
    shape, layers, each = plan.shape, plan.shape.num_layers, element_bytes(plan.precision)
    tokens, stored = sequences * shape.seq_length, _stores_scores(plan)
    once = layers * flops.linear_flops(shape, sequences) + flops.output_flops(shape, sequences)
    products = flops.FORWARD_AND_BACKWARD * once
    formula = f"6 x {count(tokens)} tokens x {count(products // (6 * tokens))} weights"
    yield Part("matrix products", COMPUTE, products, formula, 2 / 3)
    times = STORED_SCORES if stored else FUSED_ATTENTION
    attention = times * layers * flops.attention_flops(shape, sequences, causal=not stored)
    formula = f"{times} x {layers} layers x {count(sequences)} sequences x {_describe_scores(plan)}"
    yield Part("attention", COMPUTE, attention, formula, 1 - 1 / times)
    of_tokens = f"{layers} layers x {count(tokens)} tokens"
    if stored:  # beside forward, backward reads the probabilities and their gradients, and writes those of the scores
        per_token = _score_bytes(plan) * 5 // 2
        yield _move("attention's scores", layers * tokens, per_token, of_tokens, 3 / 5)
    # backward reads the saved sum and its gradient, and writes the new gradient, twice; reads the activation function's
    # saved input and writes its gradient; and reads the masks
    forward = _forward_bytes(plan)
    per_token = forward + each * (2 * 3 * shape.hidden_size + 2 * shape.fc1_width) + _mask_bytes(plan)
    yield _move("norms, activations, dropout", layers * tokens, per_token, of_tokens, 1 - forward / per_token)
    # forward reads the logits that the product has written; backward reads them again and writes their gradients
    yield _move("loss", tokens, 3 * each * shape.padded_vocab_size, f"{count(tokens)} tokens", 2 / 3)


def _recompute_layers(plan: Plan, sequences: int) -> Iterator[Part]:
    """Time, but no part of the FLOPs by which utilization is counted."""
    shape, layers, stored = plan.shape, count_recomputed_layers(plan), _stores_scores(plan)
    tokens = sequences * shape.seq_length
    selective = stored and plan.args.model.recompute_granularity == "selective"
    attended = shape.num_layers if selective else layers
    # torch.utils.checkpoint stops when it has what backward needs: fc2's result only if a dropout follows
    stopped = 0 if shape.hidden_dropout else flops.fc2_flops(shape, sequences)
    linear = flops.linear_flops(shape, sequences) - stopped
    formula = f"{layers} layers x 2 x {count(tokens)} tokens x {count(linear // (2 * tokens))} weights"
    yield Part("recomputed products", COMPUTE, layers * linear, formula, 1.0)
    attention = flops.attention_flops(shape, sequences, causal=not stored)
    formula = f"{attended} layers x {count(sequences)} sequences x {_describe_scores(plan)}"
    yield Part("recomputed attention", COMPUTE, attended * attention, formula, 1.0)
    if stored:
        of_tokens = f"{attended} layers x {count(tokens)} tokens"
        yield _move("recomputed scores", attended * tokens, _score_bytes(plan), of_tokens, 1.0)
    of_tokens = f"{layers} layers x {count(tokens)} tokens"
    yield _move("recomputed norms, activations, dropout", layers * tokens, _forward_bytes(plan), of_tokens, 1.0)


def _update_weights(plan: Plan) -> Part:
    """One pass over the gradients for their norm and one for the update, which reads and writes masters and moments and
    writes 16-bit weights: Adam in fp32 4 + 28, in fp16 2 + 28, in bf16 with fp32 gradients 4 + 30."""
    number, o = parameter_count(plan.shape), plan.args.optimizer
    moments = 2 if o.optimizer == "adam" else int(bool(o.sgd_momentum))
    weights = 0 if plan.precision == "fp32" else element_bytes(plan.precision)
    num_bytes = 2 * _gradient_bytes(plan) + 2 * FP32 * (1 + moments) + weights
    return _move("gradients' norm, optimizer", number, num_bytes, f"{count(number)} parameters", 0.0)


def _move(name: str, elements: int, num_bytes: int, of_what: str, in_backward: float) -> Part:
    return Part(name, MEMORY, elements * num_bytes, f"{of_what} x {count(num_bytes)} bytes", in_backward)


def _stores_scores(plan: Plan) -> bool:
    """Does attention write its scores down, because it was told to or because no fused kernel fits?"""
    backend, masked = plan.args.model.attention_backend, plan.args.data.reset_attention_mask
    return predict_attention_kernel(plan.shape, plan.precision, plan.device, backend, masked)[0] != FUSED


def _describe_scores(plan: Plan) -> str:
    """The two products of a layer's forward pass; a fused kernel leaves out the half that the mask hides."""
    half = "" if _stores_scores(plan) else "/2"
    return f"4 x {count(plan.shape.seq_length)}^2{half} x {count(plan.shape.attention_width)}"


def _score_bytes(plan: Plan) -> int:
    """Per token of one layer's forward, if scores are written down: the softmax reads them and writes probabilities."""
    return 2 * element_bytes(plan.precision) * plan.shape.num_attention_heads * plan.shape.seq_length


def _forward_bytes(plan: Plan) -> int:
    """Per token of one layer's forward: the residual sum with its norm writes the sum and the norm's result and reads the
    sum before, 3*h*e, twice; the activation function writes its result; masks are written."""
    shape = plan.shape
    return element_bytes(plan.precision) * (2 * 3 * shape.hidden_size + shape.ffn_hidden_size) + _mask_bytes(plan)


def _mask_bytes(plan: Plan) -> int:
    """Per token, of a layer's two dropouts: a byte each; torch.compile draws them again instead."""
    return 0 if plan.compiles_layers or not plan.shape.hidden_dropout else 2 * plan.shape.hidden_size


# --- how long ranks need at least to add up their gradients, and what of it backward cannot hide


@dataclass(frozen=True)
class Route:
    """The way of gradients between the GPUs of one node."""

    gb_s: float  # of one GPU, in one direction
    share: float  # of the gradients' bytes, that each GPU has to send
    words: str  # "2 x 7/8 over NVLink at 450 GB/s"


def _find_route(plan: Plan, processor: Processor) -> Route | None:
    """None where its speed is not known, or a rank has no others on its node.

    Without the help of switches each of n GPUs sends at least 2(n-1)/n of the bytes (Patarasuk and Yuan 2009, Bandwidth
    optimal all-reduce algorithms); to switches that add up it sends all of them once.
    """
    ranks, joined = plan.world.local_size, processor.linked_gpus if processor.link_gb_s else 1
    if ranks < 2:
        return None
    if processor.link_gb_s and ranks <= joined:
        gb_s = processor.link_gb_s / 2 * ((ranks - 1) / (processor.linked_gpus - 1) if processor.mesh else 1)
        over = f"over the link between GPUs at {gb_s:g} GB/s"
        if processor.sums_in_switch:
            return Route(gb_s, 1.0, f"once {over}, whose switches add up")
        return Route(gb_s, 2 * (ranks - 1) / ranks, f"2 x {ranks - 1}/{ranks} {over}")
    if processor.pcie_gb_s is None:
        return None
    groups = -(-ranks // joined)  # the GPUs that a bridge joins share the work of what leaves them
    each = f"2 x {groups - 1}/{groups}{f'/{joined}' if joined > 1 else ''}"
    words = f"{each} over PCIe at {processor.pcie_gb_s:g} GB/s"
    return Route(processor.pcie_gb_s, 2 * (groups - 1) / groups / joined, words)


def _gradient_bytes(plan: Plan) -> int:
    """Of one parameter's gradient, as it is reduced over ranks."""
    return FP32 if plan.fp32_gradients else element_bytes(plan.precision)


def _reduce_gradients(plan: Plan, route: Route, backward_ms: float) -> TimeRow:
    """What the last micro-batch's backward, `backward_ms` long at best, cannot hide of the all-reduce.

    The word embedding's gradient is complete only when backward ends (tied or not): nothing is left to hide its reduction.
    """
    num_bytes = _gradient_bytes(plan) * parameter_count(plan.shape)
    last_bytes = _gradient_bytes(plan) * plan.shape.padded_vocab_size * plan.shape.hidden_size
    whole, last = (some * route.share / route.gb_s / 1e6 for some in (num_bytes, last_bytes))
    in_all = f"{num_bytes / 1e9:.2f} GB of gradients, {route.words}: {whole:.2f} ms"
    if last >= whole - backward_ms:
        why = f"the word embedding's {last_bytes / 1e6:,.0f} MB are complete only when backward ends"
    else:
        why = f"backward of one micro-batch takes {backward_ms:.2f} ms at best"
    return TimeRow("all-reduce that nothing hides", max(last, whole - backward_ms), LINK, f"{in_all}; {why}")


def _list_notes(
    plan: Plan, processor: Processor, parts: list[Part], rates: dict[str, float], has_route: bool
) -> Iterator[str]:
    """What is not in the bound, in words."""
    world = plan.world
    missing = {bound: ", ".join(part.name for part in parts if part.bound == bound) for bound in rates}
    if not rates[COMPUTE] and missing[COMPUTE]:
        instead = " (--fp16 has one)" if plan.precision == "bf16" and not processor.bf16 else ""
        unknown = f"no known peak in {plan.precision}{instead}"
        yield f"{processor.name}: {unknown}; not in the bound: {missing[COMPUTE]}"
    if not rates[MEMORY] and missing[MEMORY]:
        yield f"{processor.name}: no known memory bandwidth; not in the bound: {missing[MEMORY]}"
    if world.local_size > 1 and not has_route:
        yield f"{processor.name}: no known speed between GPUs; not in the bound: the gradients' all-reduce"
    if world.size > world.local_size:
        nodes = f"{world.size // world.local_size} nodes: the network between them is not known"
        yield f"{nodes}; not in the bound: the gradients' way over it"
    if plan.batch.start and plan.batch.start != plan.batch.final:
        yield f"--rampup-batch-size: the bound is for the final global batch of {count(plan.batch.final)}"


# --- how long training to a number of tokens takes, and how much arithmetic that is


@dataclass(frozen=True)
class Duration:
    """Of a whole training without pauses: no evaluation, no checkpoints, no restarts."""

    tokens: int
    gpus: int
    tokens_per_s: float  # of all ranks: a prediction's bound, or what was measured
    flops_causal: int  # of all ranks; conventions as in flops.step_flops
    flops_full: int
    flops_6nd: int  # 6 x parameters x tokens, all parameters counted (Hoffmann et al. 2022, Chinchilla, appendix F)

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.tokens / self.tokens_per_s

    @property
    def days(self) -> float:
        """Wall time."""
        return self.seconds / SECONDS_PER_HOUR / HOURS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        """Wall time times GPUs: what clouds ask money for."""
        return self.gpus * self.seconds / SECONDS_PER_HOUR


def duration_of(plan: Plan, tokens_per_s: float, tokens: int | None = None) -> Duration:
    """To `tokens`, or to the end of the plan (--train-iters, --train-samples), at `tokens_per_s` of all ranks."""
    tokens = plan.train_samples * plan.shape.seq_length if tokens is None else tokens
    return Duration(
        tokens=tokens,
        gpus=plan.world.size,
        tokens_per_s=tokens_per_s,
        flops_causal=tokens * step_flops(plan.shape, 1, causal=True) // plan.shape.seq_length,
        flops_full=tokens * step_flops(plan.shape, 1, causal=False) // plan.shape.seq_length,
        flops_6nd=6 * parameter_count(plan.shape) * tokens,
    )
