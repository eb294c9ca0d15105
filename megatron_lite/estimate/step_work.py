"""What one rank has to do in a training step at least, on any hardware: operations, and bytes to and from memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate import flops, traffic
from megatron_lite.estimate.attention_kernel import attention_of
from megatron_lite.estimate.micro_batch import layers_recomputed
from megatron_lite.estimate.params import parameter_count
from megatron_lite.estimate.sizes import FUSED
from megatron_lite.units import count

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
    return attention_of(plan)[0] != FUSED


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
        per_token = traffic.scores_bytes_per_token(shape, plan.precision)
        yield _moved("attention's scores", layers * tokens, per_token, of_tokens, 3 / 5)
    per_token = traffic.layers_bytes_per_token(shape, plan.precision, plan.compiles_layers)
    again = traffic.forward_bytes_per_token(shape, plan.precision, plan.compiles_layers)
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
    per_token = traffic.logits_bytes_per_token(plan.shape, plan.precision)
    yield _moved("loss", tokens, per_token, f"{count(tokens)} tokens", 2 / 3)


def _recomputed(plan: Plan) -> Iterator[Part]:
    """Time, but no part of the FLOPs by which utilisation is counted."""
    shape, sequences, layers, stored = plan.shape, sequences_of(plan), layers_recomputed(plan), stores_scores(plan)
    selective = stored and plan.args.model.recompute_granularity == "selective"
    attended = shape.num_layers if selective else layers
    tokens = sequences * shape.seq_length
    linear = flops.linear_flops(shape, sequences) - _not_repeated(shape, sequences)
    attention = flops.attention_flops(shape, sequences, causal=not stored)
    again = traffic.forward_bytes_per_token(shape, plan.precision, plan.compiles_layers)
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
        scores = traffic.forward_scores_bytes_per_token(shape, plan.precision)
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
        "gradients' norm, optimizer",
        number,
        traffic.optimizer_bytes_per_parameter(plan),
        f"{count(number)} parameters",
        0.0,
    )


def _moved(name: str, elements: int, num_bytes: int, of_what: str, in_backward: float) -> Part:
    return Part(name, MEMORY, elements * num_bytes, f"{of_what} x {count(num_bytes)} bytes", in_backward)
