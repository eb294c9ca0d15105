"""Linear layers in FP8 as Megatron-LM's flags ask for them.

A plan knows them on paper; a run here stops at --fp8-format.

What Transformer Engine does then is taken from its main branch of 2026-08-22 (transformer_engine/pytorch) and from
Megatron-LM's of the same day (megatron/core/fp8_utils.py): both are named where a rule follows them.
"""

from dataclasses import dataclass

from megatron_lite.config.args import AT_LEAST_0, Args
from megatron_lite.config.flags import flag

DELAYED = "delayed"
TENSORWISE = "tensorwise"
MXFP8 = "mxfp8"
BLOCKWISE = "blockwise"
# Bytes of one number with its share of scales: one for the whole tensor; one byte for 32 numbers (Open Compute Project,
# Microscaling Formats 1.0, 2023-09); four bytes for 128 numbers of an activation (quantizers of Transformer Engine).
NUMBER_BYTES = {DELAYED: 1.0, TENSORWISE: 1.0, MXFP8: 1 + 1 / 32, BLOCKWISE: 1 + 4 / 128}
ONE_SCALE = (DELAYED, TENSORWISE)


@dataclass(frozen=True)
class Fp8:
    """FP8 of linear layers"""

    fp8_format: str | None = flag(None, "Format of what is multiplied.", choices=("e4m3", "hybrid"))
    fp8_recipe: str = flag(DELAYED, "How numbers are scaled.", choices=(TENSORWISE, DELAYED, MXFP8, BLOCKWISE))
    fp8_param_gather: bool = flag(False, "Keep weights in fp8, and gather them so.")
    fp8_wgrad: bool = flag(True, "Gradients of weights too.", off="--no-fp8-wgrad", aliases=("--disable-fp8-wgrad",))
    first_last_layers_bf16: bool = flag(False, "The first and the last layers stay in 16 bits.")
    num_layers_at_start_in_bf16: int = flag(1, "With that: how many of the first.", AT_LEAST_0)
    num_layers_at_end_in_bf16: int = flag(1, "With that: how many of the last.", AT_LEAST_0)

    @property
    def multiplies_for_weights(self) -> bool:
        """Whether gradients of weights are products in fp8. Only delayed scaling knows another way (get_fp8_recipe in
        fp8_utils.py)."""
        return self.fp8_wgrad or self.fp8_recipe != DELAYED

    @property
    def copies_attention_result(self) -> bool:
        """Whether attention's output projection keeps its input in fp8 beside the 16-bit result that attention keeps.
        Megatron-LM avoids it but with delayed scaling (set_save_original_input in core/transformer/attention.py)."""
        return self.fp8_recipe == DELAYED and self.multiplies_for_weights

    @property
    def number_bytes(self) -> float:
        """Bytes of one number with its share of scales."""
        return NUMBER_BYTES[self.fp8_recipe]

    def covers(self, layer: int, num_layers: int) -> bool:
        """Whether the linear layers of this layer, counted from 0, multiply in fp8."""
        if not self.first_last_layers_bf16:
            return True
        return self.num_layers_at_start_in_bf16 <= layer < num_layers - self.num_layers_at_end_in_bf16

    def count_weight_copies(self, multiplies_any_layout: bool) -> int:
        """Copies of a weight in fp8 that Transformer Engine keeps from a step's first micro-batch to the next step's.

        Forward multiplies the weight and backward its transpose, of which a GPU that multiplies rows by rows only needs
        a copy; scales of blocks differ between the two on any GPU (nvte_is_non_tn_fp8_gemm_supported in
        csrc/quantizer.cpp).

        Args:
            multiplies_any_layout: Whether the GPU does without the transpose.
        """
        return 1 if multiplies_any_layout and self.fp8_recipe in ONE_SCALE else 2


@dataclass(frozen=True)
class PaperArgs:
    """Flags that only a plan knows."""

    fp8: Fp8 = Fp8()


def list_fp8_mistakes(fp8: Fp8, args: Args) -> list[str]:
    """List the mistakes of flags for FP8, by Megatron-LM's rules and those of a plan: a line each."""
    mistakes = []
    precision = args.precision
    parallel = args.parallel
    if not (precision.fp16 or precision.bf16):
        mistakes.append(f"--fp8-format {fp8.fp8_format}: is planned beside 16 bits only; add --bf16.")
    if fp8.first_last_layers_bf16 and fp8.fp8_recipe == DELAYED:
        mistakes.append(
            f"--first-last-layers-bf16: Megatron-LM does not take it with --fp8-recipe {DELAYED}; give {TENSORWISE}."
        )
    if fp8.fp8_param_gather and not parallel.shards_state:
        mistakes.append("--fp8-param-gather: needs ranks that share out weights; add --use-distributed-optimizer.")
    return mistakes


def describe_fp8(fp8: Fp8, num_layers: int) -> list[str]:
    """Lines on what is assumed of a run in fp8."""
    covered = sum(fp8.covers(layer, num_layers) for layer in range(num_layers))
    products = "gradients of weights too" if fp8.multiplies_for_weights else "not for gradients of weights"
    kept = "in fp8 only" if fp8.fp8_param_gather else "in 16 bits, with copies in fp8 beside them"
    multiplied = f"linear layers of {covered} of {num_layers} layers multiply in fp8, {products}"
    inputs = "inputs of linear layers kept in fp8 for backward"
    others = "gradients and what norms, attention and activation functions keep in 16 bits"
    return [
        f"fp8 on paper only: a run here stops at --fp8-format. Format {fp8.fp8_format}, {fp8.fp8_recipe} scales.",
        f"assumed: {multiplied}; attention's scores, embedding, output layer and routers do not.",
        f"assumed, as Transformer Engine does: weights {kept}, {inputs}, {others}.",
    ]
