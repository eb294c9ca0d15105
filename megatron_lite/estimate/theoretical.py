"""Megatron-LM's own estimate for the same flags, to hold beside ours.

Source: megatron/training/theoretical_memory_usage.py of Megatron-LM 0.16, as its trainer prints it without sequence
parallelism ("Theoretical memory footprints"), for one tensor-parallel rank and one pipeline stage.

Letters: N parameters, L layers, b micro-batch, s sequence, h hidden, f MLP width, V padded vocabulary.
"""

from dataclasses import dataclass

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.units import count

BYTES_PER_PARAMETER = 18  # bf16 weights, fp32 gradients, fp32 masters, two fp32 moments, whatever the flags say
BYTES_PER_LAYER = 34  # for each of the s*b*h elements of a hidden state
MARGIN_PERCENT = 5  # "optimizer and miscellaneous temporaries", on activations


@dataclass(frozen=True)
class TheoreticalMemory:
    """Bytes of one GPU as Megatron-LM adds them up, and what that leaves out."""

    states_bytes: int  # weights, gradients and optimizer
    activations_bytes: int
    formula: str
    leaves_out: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return self.states_bytes + self.activations_bytes


def megatron_theoretical_bytes(plan: Plan) -> TheoreticalMemory:
    """18*N + 1.05 * (34*s*b*h*L + 2*s*b*V + 3*s*b*h + 8*s*b)."""
    shape, micro_batch = plan.shape, plan.args.training.micro_batch_size
    number, tokens = counted_parameters(shape), micro_batch * shape.seq_length
    hidden, layers, words = shape.hidden_size, shape.num_layers, shape.padded_vocab_size
    at_ends = tokens * (2 * words + 3 * hidden + 8)
    formula = (
        f"{BYTES_PER_PARAMETER} bytes x {count(number)} parameters + 1.{MARGIN_PERCENT:02} x ({layers} layers x "
        f"{BYTES_PER_LAYER} bytes x {count(tokens)} tokens x {count(hidden)} + {count(tokens)} tokens x "
        f"(2 bytes x {count(words)} words + 3 bytes x {count(hidden)} + 8 bytes))"
    )
    return TheoreticalMemory(
        states_bytes=BYTES_PER_PARAMETER * number,
        activations_bytes=(100 + MARGIN_PERCENT) * (layers * BYTES_PER_LAYER * tokens * hidden + at_ends) // 100,
        formula=formula,
        leaves_out=tuple(_left_out(plan)),
    )


def counted_parameters(shape: ModelShape) -> int:
    """Without biases of linear layers, learned positions and norms of heads."""
    norm = (2 if shape.normalization == "LayerNorm" else 1) * shape.hidden_size
    matrices = shape.qkv_width + shape.attention_width + shape.fc1_width + shape.ffn_hidden_size
    words = shape.padded_vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return shape.num_layers * (matrices * shape.hidden_size + 2 * norm) + norm + words


def _left_out(plan: Plan) -> list[str]:
    shape, model = plan.shape, plan.args.model
    found = ["the loss in fp32 (12 bytes per logit here, 2 there)", "in which phase memory is highest"]
    if not plan.fp32_gradients or plan.precision == "fp32" or plan.args.optimizer.optimizer != "adam":
        found.append("that these flags do not take 18 bytes per parameter")
    if shape.linear_bias or shape.position_embedding == "learned_absolute":
        found.append("biases and learned positions")
    if model.recompute_granularity:
        found.append("recomputation")
    if plan.precision == "fp32":
        found.append("fp32 activations")
    if model.attention_backend in ("unfused", "local"):
        found.append("attention scores that are written down")
    if shape.fc1_width + shape.ffn_hidden_size != 8 * shape.hidden_size or shape.qkv_width != 3 * shape.hidden_size:
        found.append("what the widths of MLP and attention do to activations")
    if plan.world.size > 1:
        found.append("DistributedDataParallel's buckets")
    return found
