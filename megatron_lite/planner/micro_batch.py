"""Describes what the sizes of one micro-batch's activations depend on, from the flags of a run."""

from dataclasses import dataclass, fields
from functools import cached_property

from megatron_lite.config.cpu_kernel_rules import WIDENED_BLOCK, find_slow_precisions
from megatron_lite.config.fp8 import Fp8
from megatron_lite.config.layout import Layout
from megatron_lite.config.shape import ModelShape
from megatron_lite.planner.attention_kernel import CAUSAL, FUSED, MATH, UNFUSED, predict_attention_kernel
from megatron_lite.planner.expert_load import ExpertLoad
from megatron_lite.planner.state_size import FP32, element_bytes
from megatron_lite.units import count


@dataclass(frozen=True)
class MicroBatch:
    """Numbers and switches on which the sizes of a micro-batch's activations depend."""

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
    context: int = 1  # ranks that share out the positions of each sequence while attention computes
    head_ranks: int = 1  # ranks that share out heads then, and positions elsewhere
    # positions of a sequence of which this rank computes attention; () or one range: all of them
    chunks: tuple[range, ...] = ()
    masks_chunks: bool = False  # the kernel takes a mask for queries that see keys before their own chunk
    attends_in_fp32: bool = False  # a CPU's kernel converts 16-bit queries, keys and values
    expert_share: float = 0.0  # of the stage's layers, which have experts in the place of an MLP
    load: ExpertLoad | None = None  # how many tokens its experts have; None: there are none
    fp8: Fp8 | None = None  # of linear layers; None: these multiply in the precision of activations
    fp8_share: float = 0.0  # of the stage's layers, whose linear layers multiply in fp8

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, which caches of what layers keep ask for many times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def masked_chunk_scores(self) -> int:
        """Queries x keys of the masks of all chunks that do not begin the sequence; sequences share them."""
        if not self.masks_chunks:
            return 0
        return sum(len(chunk) * chunk.stop for chunk in self.chunks if chunk.start > 0)

    @property
    def largest_chunk_share(self) -> float:
        """Share of a rank's attention scores that its largest chunk has.

        The attention of each chunk is a computation of its own.
        """
        if self.context == 1:
            return 1.0
        scores = [len(chunk) * chunk.stop for chunk in self.chunks]
        return max(scores) / sum(scores)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the micro-batch that this rank has."""
        return self.size * self.shape.seq_length

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of one activation."""
        return element_bytes(self.precision)

    @property
    def input_bytes(self) -> int:
        """Bytes of a rank's hidden states for each token: all that a recomputed layer keeps."""
        return self.whole_input_bytes // self.shares

    @property
    def whole_input_bytes(self) -> int:
        """Bytes of a linear layer's input for each token, gathered where ranks share out the tokens."""
        return self.element_bytes * self.shape.hidden_size

    def count_fp8_savings(self, width: int) -> int:
        """Bytes, for each token, by which an input of a linear layer of this width is smaller as backward needs it.

        In fp8, Transformer Engine keeps what the gradient of the weight multiplies, once: the transpose, or what ranks
        gather again (update_usage in _linear_forward_impl of module/linear.py, and in module/layernorm_linear.py).
        """
        if self.fp8 is None or not self.fp8.multiplies_for_weights:
            return 0
        return int(self.fp8_share * width * (self.element_bytes - self.fp8.number_bytes))

    def count_fp8_copy(self, width: int) -> int:
        """Bytes, for each token, of an input of a linear layer that backward needs in fp8.

        It is there beside what others keep of it.
        """
        if self.fp8 is None or not self.fp8.multiplies_for_weights:
            return 0
        return int(self.fp8_share * self.fp8.number_bytes * width)

    @property
    def saved_input_bytes(self) -> int:
        """Bytes that a linear layer keeps of hidden states for each token."""
        return (self.whole_input_bytes - self.count_fp8_savings(self.shape.hidden_size)) // self.shares

    def count_fp8_gradients(self, width: int) -> int:
        """Bytes, for each token, of the two copies in fp8 of the gradient of a linear layer's result of this width.

        One is for the gradient of its input, one for that of its weight (grad_output_preprocess in module/base.py of
        Transformer Engine).
        """
        if self.fp8 is None or not self.fp8_share:
            return 0
        return int((2 if self.fp8.multiplies_for_weights else 1) * self.fp8.number_bytes * width)

    @property
    def mask_bytes(self) -> int:
        """Bytes of one dropout's mask for each token: a byte per element, on CPUs a number of the activations' type."""
        width = self.shape.hidden_size // self.shares if self.shape.hidden_dropout else 0
        return width * (self.element_bytes if self.on_cpu else 1)

    @property
    def copies_of_norms(self) -> tuple[bool, bool]:
        """Copies that norms keep of their input.

        The first answer is whether they keep an fp32 copy instead of their 16-bit input, the second whether they keep
        the normalized input, too. That is RMSNorm on a CPU, which torch 2.13 takes apart, but not where 16-bit weights
        are stored minus one.
        """
        in_16_bits = self.element_bytes < FP32
        one_less = self.shape.layernorm_1p
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
        """Describe what a linear layer of 16-bit numbers holds in fp32 in backward.

        Args:
            outputs: Output channels.
            inputs: Input channels.

        Returns:
            (bytes, their formula); 0 bytes where the processor multiplies 16-bit numbers.
        """
        if not (self.on_cpu and self.precision in find_slow_precisions()):
            return 0, ""
        at_once = min(outputs, WIDENED_BLOCK)
        # of several blocks, one more to add up in
        sums = 2 if outputs > WIDENED_BLOCK else 1
        tokens = self.tokens
        each = f"{FP32} bytes x {count(at_once)} outputs at a time x"
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
    layout: Layout | None = None,
    head_ranks: int = 1,
    expert_share: float = 0.0,
    load: ExpertLoad | None = None,
) -> MicroBatch:
    """The MicroBatch of these flags.

    Args:
        shape: The whole model's.
        size: Sequences.
        precision: fp32, fp16 or bf16.
        device: cuda or cpu.
        backend: The value of --attention-backend.
        masked: Whether attention stays within documents.
        recompute: The value of --recompute-granularity.
        threads: Of a CPU, for one rank.
        layout: With this rank's coordinates; None: it is the only one.
        head_ranks: Context parallel ranks that share out heads while attention computes.
        expert_share: Of the layers of the rank's stage.
        load: Of the rank's experts.
    """
    layout = layout or Layout()
    rank_shape = shape.split(layout.tensor, layout.context, layout.expert, layout.expert_tensor)
    in_attention = layout.join_context(head_ranks)
    on_cpu = device == "cpu"
    # as train/choose_kernels.py asks: on CPUs, ranks that have parts of a sequence pass masks
    kernel, flash = predict_attention_kernel(
        rank_shape.exchange_heads(head_ranks),
        precision,
        device,
        backend,
        masked or (on_cpu and in_attention.context > 1),
    )
    writes_scores = kernel in (UNFUSED, CAUSAL)
    # torch's own attention with dropout converts by itself
    attends_in_fp32 = on_cpu and precision in find_slow_precisions() and kernel != MATH
    # what is computed in fp32 is recomputed rather than kept
    recomputes = writes_scores and (recompute == "selective" or attends_in_fp32)
    return MicroBatch(
        rank_shape,
        size,
        precision,
        on_cpu,
        attention=kernel,
        is_flash=flash,
        masked=masked,
        recomputes_attention=recomputes,
        threads=threads,
        split=layout.tensor > 1,
        shares=layout.tensor if layout.sequence_parallel else 1,
        context=in_attention.context,
        head_ranks=head_ranks,
        chunks=in_attention.find_chunks(shape.seq_length),
        # a CPU's kernels and scores that are written down (parallel/context_parallel.py)
        masks_chunks=on_cpu or writes_scores,
        attends_in_fp32=attends_in_fp32,
        expert_share=expert_share,
        load=load,
    )
