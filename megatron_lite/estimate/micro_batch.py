"""What the sizes of one micro-batch's activations depend on, from the flags of a run."""

from dataclasses import dataclass

from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.model_size import FP32, element_bytes
from megatron_lite.model.kernel_choice import (
    CAUSAL,
    FUSED,
    UNFUSED,
    WIDENED_AT_ONCE,
    find_slow_precisions,
    predict_attention_kernel,
)
from megatron_lite.units import count


@dataclass(frozen=True)
class MicroBatch:
    """What the sizes of a micro-batch's activations depend on."""

    shape: ModelShape  # what one rank computes
    size: int  # sequences
    precision: str = "bf16"
    on_cpu: bool = False
    attention: str = FUSED
    is_flash: bool = True  # which fused kernel: flash, or the memory-efficient one
    masked: bool = False  # attention stays within documents
    recomputes_attention: bool = False  # core attention alone
    threads: int = 1  # of a CPU, for one rank
    split: bool = False  # ranks have a part of the vocabulary each
    shares: int = 1  # ranks that share out the tokens between attention and MLP
    context: int = 1  # ranks that share out the positions of each sequence

    @property
    def tokens(self) -> int:
        return self.size * self.shape.seq_length

    @property
    def element_bytes(self) -> int:
        return element_bytes(self.precision)

    @property
    def input_bytes(self) -> int:
        """Bytes of a rank's hidden states for each token: all that a recomputed layer keeps."""
        return self.whole_input_bytes // self.shares

    @property
    def whole_input_bytes(self) -> int:
        """Bytes of a linear layer's input for each token, gathered where ranks share out the tokens."""
        return self.element_bytes * self.shape.hidden_size

    @property
    def mask_bytes(self) -> int:
        """Bytes of one dropout's mask for each token: a byte per element, on CPUs a number of the activations' type."""
        width = self.shape.hidden_size // self.shares if self.shape.hidden_dropout else 0
        return width * (self.element_bytes if self.on_cpu else 1)

    @property
    def copies_of_norms(self) -> tuple[bool, bool]:
        """(whether norms keep an fp32 copy instead of their 16-bit input, whether they keep the normalized input too).

        The second is RMSNorm on a CPU, which torch 2.13 takes apart, but not where 16-bit weights are stored minus one.
        """
        in_16_bits, one_less = self.element_bytes < FP32, self.shape.layernorm_1p
        apart = self.on_cpu and self.shape.normalization == "RMSNorm" and not (one_less and in_16_bits)
        return in_16_bits and (one_less or apart), apart

    @property
    def hidden_norm_bytes(self) -> int:
        """Bytes that a norm of hidden states keeps for each token."""
        return self.norm_bytes(self.shape.hidden_size) // self.shares

    def norm_bytes(self, width: int, rows: int = 1) -> int:
        """Bytes that a norm keeps for each token: its input or copies of it, and fp32 statistics of each row."""
        statistics = rows * (1 if self.shape.normalization == "RMSNorm" else 2)
        own = 0 if self.copies_of_norms[0] else self.element_bytes * width
        return own + FP32 * (sum(self.copies_of_norms) * width + statistics)

    def describe_wide(self, outputs: int, inputs: int) -> tuple[int, str]:
        """Bytes and formula of what a linear layer of 16-bit numbers holds in fp32 in backward, where the processor multiplies only that."""
        if not (self.on_cpu and self.precision in find_slow_precisions()):
            return 0, ""
        at_once, sums = min(outputs, WIDENED_AT_ONCE), 1 + (outputs > WIDENED_AT_ONCE)
        tokens, each = self.tokens, f"{FP32} bytes x {count(at_once)} outputs at a time x"
        terms = f"{each} {count(tokens)} tokens", f"{each} {count(inputs)} inputs"
        formula = " + ".join((*terms, f"{sums} x {FP32} bytes x {count(tokens)} tokens x {count(inputs)} inputs"))
        return FP32 * (at_once * (tokens + inputs) + sums * tokens * inputs), formula


def plan_micro_batch(
    shape: ModelShape,
    size: int,
    precision: str,
    device: str,
    backend: str,
    masked: bool,
    recompute: str | None,
    threads: int,
    ranks: int = 1,
    sequence_parallel: bool = False,
    context: int = 1,
) -> MicroBatch:
    """The MicroBatch of these flags. ranks, context: numbers of tensor and context parallel ranks."""
    shape, shares = shape.split(ranks, context), ranks if sequence_parallel else 1
    kernel, flash = predict_attention_kernel(shape, precision, device, backend, masked)
    on_cpu = device == "cpu"
    in_fp32 = on_cpu and precision in find_slow_precisions()  # what is not kept in fp32 is recomputed
    selective = kernel in (UNFUSED, CAUSAL) and (recompute == "selective" or in_fp32)
    return MicroBatch(
        shape, size, precision, on_cpu, kernel, flash, masked, selective, threads, ranks > 1, shares, context
    )
