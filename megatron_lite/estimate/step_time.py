"""How fast a training step can be at best: what a named GPU's arithmetic, memory and link allow.

A bound, not a forecast. Each part takes at least the time in which the hardware could do it at its peak, and parts run
one after another, as kernels of one stream do. Not in it: launches and the host, the data loader, clocks other than the
boost clock, products that miss the peak (the best reach four fifths of it), logging, evaluation and checkpoints.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_lite.config import flops
from megatron_lite.config.flops import step_flops
from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.hardware import Processor, peak_tflops_of
from megatron_lite.estimate.layer_memory import FP32, element_bytes
from megatron_lite.estimate.memory import count_recomputed_layers
from megatron_lite.estimate.params import parameter_count
from megatron_lite.estimate.prediction import TimePrediction, TimeRow
from megatron_lite.model.kernel_choice import FUSED, predict_attention_kernel
from megatron_lite.units import count

# --- what one rank has to do in a training step at least, on any hardware: operations, and bytes to and from memory

COMPUTE, MEMORY, LINK = "compute", "memory", "link"
# Times forward's work. FlashAttention's backward pass has five products, of which one repeats forward's, where forward
# has two (Dao 2023, FlashAttention-2, algorithm 2); with scores that are kept it has four.
FUSED_ATTENTION, STORED_SCORES = 3.5, 3


@dataclass(frozen=True)
class Part:
    """One part of a step."""

    name: str
    bound: str  # COMPUTE: amount is FLOPs; MEMORY: bytes
    amount: float
    formula: str  # of the amount, with its numbers
    in_backward: float  # share of it that is backward's


def parts_of(plan: Plan) -> list[Part]:
    """In the order of a step, at the final global batch; parts without work are left out."""
    found = [*_layers(plan), *_loss(plan), *_recomputed(plan), _optimizer(plan)]
    return [part for part in found if part.amount]


def sequences_of(plan: Plan) -> int:
    """Of one rank in a step at the final global batch."""
    return plan.batch.final // plan.world.size


def stores_scores(plan: Plan) -> bool:
    """Does attention write its scores down, because it was told to or because no fused kernel fits?"""
    backend, masked = plan.args.model.attention_backend, plan.args.data.reset_attention_mask
    return predict_attention_kernel(plan.shape, plan.precision, plan.device, backend, masked)[0] != FUSED


def _layers(plan: Plan) -> Iterator[Part]:
    shape, sequences, layers = plan.shape, sequences_of(plan), plan.shape.num_layers
    tokens = sequences * shape.seq_length
    products = flops.FORWARD_AND_BACKWARD * (
        layers * flops.linear_flops(shape, sequences) + flops.output_flops(shape, sequences)
    )
    weights = products // (6 * tokens)
    yield Part("matrix products", COMPUTE, products, f"6 x {count(tokens)} tokens x {count(weights)} weights", 2 / 3)
    yield _attention(plan)
    of_tokens = f"{layers} layers x {count(tokens)} tokens"
    if stores_scores(plan):
        per_token = scores_bytes_per_token(shape, plan.precision)
        yield _moved("attention's scores", layers * tokens, per_token, of_tokens, 3 / 5)
    per_token = layers_bytes_per_token(shape, plan.precision, plan.compiles_layers)
    again = forward_bytes_per_token(shape, plan.precision, plan.compiles_layers)
    yield _moved("norms, activations, dropout", layers * tokens, per_token, of_tokens, 1 - again / per_token)


def _attention(plan: Plan) -> Part:
    shape, sequences, stored = plan.shape, sequences_of(plan), stores_scores(plan)
    times = STORED_SCORES if stored else FUSED_ATTENTION
    amount = times * shape.num_layers * flops.attention_flops(shape, sequences, causal=not stored)
    words = f"{times} x {shape.num_layers} layers x {count(sequences)} sequences x {_scores(shape, stored)}"
    return Part("attention", COMPUTE, amount, words, 1 - 1 / times)


def _scores(shape: ModelShape, stored: bool) -> str:
    """The two products of a layer's forward pass; a fused kernel leaves out the half that the mask hides."""
    return f"4 x {count(shape.seq_length)}^2{'' if stored else '/2'} x {count(shape.attention_width)}"


def _loss(plan: Plan) -> Iterator[Part]:
    tokens = sequences_of(plan) * plan.shape.seq_length
    per_token = logits_bytes_per_token(plan.shape, plan.precision)
    yield _moved("loss", tokens, per_token, f"{count(tokens)} tokens", 2 / 3)


def _recomputed(plan: Plan) -> Iterator[Part]:
    """Time, but no part of the FLOPs by which utilisation is counted."""
    shape, sequences, layers, stored = (
        plan.shape,
        sequences_of(plan),
        count_recomputed_layers(plan),
        stores_scores(plan),
    )
    selective = stored and plan.args.model.recompute_granularity == "selective"
    attended = shape.num_layers if selective else layers
    tokens = sequences * shape.seq_length
    linear = flops.linear_flops(shape, sequences) - _not_repeated(shape, sequences)
    attention = flops.attention_flops(shape, sequences, causal=not stored)
    again = forward_bytes_per_token(shape, plan.precision, plan.compiles_layers)
    yield Part(
        "recomputed products",
        COMPUTE,
        layers * linear,
        f"{layers} layers x 2 x {count(tokens)} tokens x {count(linear // (2 * tokens))} weights",
        1.0,
    )
    yield Part(
        "recomputed attention",
        COMPUTE,
        attended * attention,
        f"{attended} layers x {count(sequences)} sequences x {_scores(shape, stored)}",
        1.0,
    )
    if stored:
        scores = forward_scores_bytes_per_token(shape, plan.precision)
        yield _moved("recomputed scores", attended * tokens, scores, f"{attended} layers x {count(tokens)} tokens", 1.0)
    yield _moved(
        "recomputed norms, activations, dropout",
        layers * tokens,
        again,
        f"{layers} layers x {count(tokens)} tokens",
        1.0,
    )


def _not_repeated(shape: ModelShape, sequences: int) -> int:
    """FLOPs. torch.utils.checkpoint stops when it has what backward needs: fc2's result only if a dropout follows."""
    return 0 if shape.hidden_dropout else flops.fc2_flops(shape, sequences)


def _optimizer(plan: Plan) -> Part:
    number = parameter_count(plan.shape)
    return _moved(
        "gradients' norm, optimizer", number, optimizer_bytes_per_parameter(plan), f"{count(number)} parameters", 0.0
    )


def _moved(name: str, elements: int, num_bytes: int, of_what: str, in_backward: float) -> Part:
    return Part(name, MEMORY, elements * num_bytes, f"{of_what} x {count(num_bytes)} bytes", in_backward)


# --- the least bytes between a GPU and its memory in a step, beside those of matrix products
#
# Counted as if all neighboring operations were one kernel: a tensor is written once, and read once by each later kernel,
# except by the one right behind its producer, which may find it in the cache. (A model so small that the cache holds a
# whole micro-batch can do with less; launches are its limit.) What products and fused attention read and write goes on
# under their arithmetic, and is left out.
#
# Letters: N parameters, h hidden, e bytes of one activation.


def layers_bytes_per_token(shape: ModelShape, precision: str, compiled: bool) -> int:
    """Of one layer, forward and backward: residual sum with norm (twice), activation function, dropout masks.

    Forward writes the sum and the norm's result, and reads the sum before; backward reads the saved sum and its
    gradient, and writes the new gradient: 6*h*e, twice. The activation function writes its result; backward reads its
    saved input and writes its gradient. A mask is a byte, written and read; torch.compile draws it again instead.
    """
    backward = element_bytes(precision) * (2 * 3 * shape.hidden_size + 2 * shape.fc1_width)
    return forward_bytes_per_token(shape, precision, compiled) + backward + _masks(shape, compiled)


def forward_bytes_per_token(shape: ModelShape, precision: str, compiled: bool) -> int:
    """Of one layer's forward pass alone, as when it is computed again."""
    return element_bytes(precision) * (2 * 3 * shape.hidden_size + shape.ffn_hidden_size) + _masks(shape, compiled)


def logits_bytes_per_token(shape: ModelShape, precision: str) -> int:
    """Forward reads the logits that the product has written; backward reads them again and writes their gradients."""
    return 3 * element_bytes(precision) * shape.padded_vocab_size


def scores_bytes_per_token(shape: ModelShape, precision: str) -> int:
    """Of one layer, if attention writes its scores down: beside forward, backward reads the probabilities and their
    gradients, and writes those of the scores."""
    return forward_scores_bytes_per_token(shape, precision) * 5 // 2


def forward_scores_bytes_per_token(shape: ModelShape, precision: str) -> int:
    """The softmax reads scores and writes probabilities."""
    return 2 * element_bytes(precision) * shape.num_attention_heads * shape.seq_length


def optimizer_bytes_per_parameter(plan: Plan) -> int:
    """One pass over the gradients for their norm and one for the update, which reads and writes masters and moments and
    writes 16-bit weights: Adam in fp32 4 + 28, in fp16 2 + 28, in bf16 with fp32 gradients 4 + 30."""
    o = plan.args.optimizer
    moments = 2 if o.optimizer == "adam" else int(bool(o.sgd_momentum))
    weights = 0 if plan.precision == "fp32" else element_bytes(plan.precision)
    return 2 * gradient_bytes(plan) + 2 * FP32 * (1 + moments) + weights


def gradient_bytes(plan: Plan) -> int:
    """Of one parameter's gradient, as it is reduced over ranks."""
    return FP32 if plan.fp32_gradients else element_bytes(plan.precision)


def _masks(shape: ModelShape, compiled: bool) -> int:
    """Of a layer's two dropouts."""
    return 0 if compiled or not shape.hidden_dropout else 2 * shape.hidden_size


# --- how long ranks need at least to add up their gradients, and what of it backward cannot hide


@dataclass(frozen=True)
class Route:
    """The way of gradients between the GPUs of one node."""

    gb_s: float  # of one GPU, in one direction
    share: float  # of the gradients' bytes, that each GPU has to send
    words: str  # "2 x 7/8 over NVLink at 450 GB/s"

    def ms(self, num_bytes: int) -> float:
        """At least."""
        return num_bytes * self.share / self.gb_s / 1e6


def all_num_bytes(plan: Plan) -> int:
    """What one rank's gradients hold."""
    return gradient_bytes(plan) * parameter_count(plan.shape)


def last_num_bytes(plan: Plan) -> int:
    """Of the word embedding's gradient: it is complete only when backward ends (tied or not), so that no computation is
    left to hide its reduction."""
    return gradient_bytes(plan) * plan.shape.padded_vocab_size * plan.shape.hidden_size


def route_of(plan: Plan, processor: Processor) -> Route | None:
    """None where its speed is not known, or a rank has no others on its node.

    Without the help of switches each of n GPUs sends at least 2(n-1)/n of the bytes (Patarasuk and Yuan 2009, Bandwidth
    optimal all-reduce algorithms); to switches that add up it sends all of them once.
    """
    ranks = plan.world.local_size
    if ranks < 2:
        return None
    joined = processor.linked_gpus if processor.link_gb_s else 1
    return _linked(ranks, processor) if ranks <= joined else _over_pcie(ranks, joined, processor)


def _linked(ranks: int, processor: Processor) -> Route:
    gb_s = processor.link_gb_s / 2 * ((ranks - 1) / (processor.linked_gpus - 1) if processor.mesh else 1)
    over = f"over the link between GPUs at {gb_s:g} GB/s"
    if processor.sums_in_switch:
        return Route(gb_s, 1.0, f"once {over}, whose switches add up")
    return Route(gb_s, 2 * (ranks - 1) / ranks, f"2 x {ranks - 1}/{ranks} {over}")


def _over_pcie(ranks: int, joined: int, processor: Processor) -> Route | None:
    """The GPUs that a bridge joins share the work of what leaves them."""
    if processor.pcie_gb_s is None:
        return None
    groups = -(-ranks // joined)
    share = 2 * (groups - 1) / groups / joined
    words = f"2 x {groups - 1}/{groups}{f'/{joined}' if joined > 1 else ''} over PCIe at {processor.pcie_gb_s:g} GB/s"
    return Route(processor.pcie_gb_s, share, words)


# --- how fast a training step can be at best: what a named GPU's arithmetic, memory and link allow


def predict_time(plan: Plan, processor: Processor) -> TimePrediction:
    """The shortest step of one rank of `plan` on `processor`, at the final global batch.

    A row whose limit the table of processors does not hold is missing, and a note says so; peak_tflops is then 0.
    """
    plan = replace(plan, device="cuda")  # whatever the machine that plans
    peak = peak_tflops_of(processor, plan.precision)
    rates = {COMPUTE: (peak or 0.0) * 1e12, MEMORY: (processor.memory_gb_s or 0.0) * 1e9}
    parts = parts_of(plan)
    rows = [_row(part, rates[part.bound]) for part in parts if rates[part.bound]]
    rows += _link_row(plan, processor, _backward_ms(plan, parts, rates))
    sequences = sequences_of(plan)
    return TimePrediction(
        gpu=processor.name,
        rows=tuple(rows),
        tokens=plan.batch.final * plan.shape.seq_length,
        flops_causal=step_flops(plan.shape, sequences, causal=True),
        flops_full=step_flops(plan.shape, sequences, causal=False),
        peak_tflops=peak or 0.0,
        notes=tuple(_notes(plan, processor, parts, rates)),
    )


def _row(part: Part, rate: float) -> TimeRow:
    limit = f"{rate / 1e12:g} TFLOP/s" if part.bound == COMPUTE else f"{rate / 1e9:,.0f} GB/s"
    return TimeRow(part.name, 1000 * part.amount / rate, part.bound, f"{part.formula} at {limit}")


def _backward_ms(plan: Plan, parts: list[Part], rates: dict[str, float]) -> float:
    """Of one micro-batch, at best; infinite where a rate is not known: then there is no telling what backward hides."""
    if not all(rates.values()):
        return float("inf")
    step_ms = sum(1000 * part.amount * part.in_backward / rates[part.bound] for part in parts)
    return step_ms * plan.samples_per_pass / plan.batch.final


def _link_row(plan: Plan, processor: Processor, backward_ms: float) -> list[TimeRow]:
    """What the last micro-batch's backward, `backward_ms` long at best, cannot hide of the all-reduce."""
    route = route_of(plan, processor)
    if route is None:
        return []
    whole, last = route.ms(all_num_bytes(plan)), route.ms(last_num_bytes(plan))
    in_all = f"{all_num_bytes(plan) / 1e9:.2f} GB of gradients, {route.words}: {whole:.2f} ms"
    if last >= whole - backward_ms:
        why = f"the word embedding's {last_num_bytes(plan) / 1e6:,.0f} MB are complete only when backward ends"
    else:
        why = f"backward of one micro-batch takes {backward_ms:.2f} ms at best"
    return [TimeRow("all-reduce that nothing hides", max(last, whole - backward_ms), LINK, f"{in_all}; {why}")]


def _notes(plan: Plan, processor: Processor, parts: list[Part], rates: dict[str, float]) -> Iterator[str]:
    missing = {bound: [part.name for part in parts if part.bound == bound] for bound, rate in rates.items() if not rate}
    if missing.get(COMPUTE):
        instead = " (--fp16 has one)" if plan.precision == "bf16" and not processor.bf16 else ""
        parts_left_out = ", ".join(missing[COMPUTE])
        yield f"{processor.name}: no known peak in {plan.precision}{instead}; not in the bound: {parts_left_out}"
    if missing.get(MEMORY):
        yield f"{processor.name}: no known memory bandwidth; not in the bound: {', '.join(missing[MEMORY])}"
    if plan.world.local_size > 1 and route_of(plan, processor) is None:
        yield f"{processor.name}: no known speed between GPUs; not in the bound: the gradients' all-reduce"
    if plan.world.size > plan.world.local_size:
        yield (
            f"{plan.world.size // plan.world.local_size} nodes: the network between them is not known; "
            "not in the bound: the gradients' way over it"
        )
    if plan.batch.start and plan.batch.start != plan.batch.final:
        yield f"--rampup-batch-size: the bound is for the final global batch of {count(plan.batch.final)}"


# --- how long training to a number of tokens takes, and how much arithmetic that is

SECONDS_PER_HOUR, HOURS_PER_DAY = 3600, 24


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
