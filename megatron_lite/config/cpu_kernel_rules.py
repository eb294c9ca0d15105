"""Rules by which a CPU gets faster ways to the same numbers: from the model's shape and the processor alone.

Without torch: the planner asks, too. The processor decides, not a race: a resumed run computes the same bits.
"""

from megatron_lite.config.shape import ModelShape
from megatron_lite.machine import read_processor

# --- attention

MAX_EXPLICIT_POSITIONS = 512
QUERY_BLOCK = 128  # queries that the explicit kernel takes at a time where it skips future scores


def skips_future_scores(shape: ModelShape, precision: str, masked: bool) -> bool:
    """Whether the explicit kernel goes by blocks of queries, which only meet the keys up to their end.

    Args:
        shape: The shape of this rank's part of the model.
        precision: fp32, fp16 or bf16.
        masked: Whether attention takes a mask.
    """
    if masked or precision != "fp32":
        return False
    has_window = shape.window is not None
    has_offset = shape.softmax_type != "vanilla"
    changes_scores = shape.query_key_layer_scaling or has_offset
    drops_scores = shape.attention_dropout > 0
    return not (has_window or changes_scores or drops_scores)


def count_scores(length: int) -> int:
    """Number of scores that one head holds for a sequence, where future ones are skipped."""
    scores = 0
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        scores += (end - start) * end
    return scores


def explicit_is_faster(shape: ModelShape, precision: str, masked: bool) -> bool:
    """Whether the explicit kernel beats torch's fused one, whose backward is slow on a CPU (docs/benchmarks.md).

    In bf16 it is twice as fast up to 256 positions, 1.4 to 1.7 times at 512, alike at 1,024; in fp32, without future
    scores, 1.2 to 1.5 times.

    Args:
        shape: The shape of this rank's part of the model.
        precision: fp32, fp16 or bf16.
        masked: Whether attention takes a mask.
    """
    if masked or shape.window is not None or shape.seq_length > MAX_EXPLICIT_POSITIONS:
        return False
    return precision == "bf16" or skips_future_scores(shape, precision, masked)


# --- GELU and the loss in blocks that stay in a processor's cache

GELU_BLOCK = 2**17  # elements per thread: of fewer, starting operations takes longer than reading caches
LOGITS_PER_THREAD = 2**18  # in fp32 1 MB, which fits a core's second-level cache
VOCAB_BLOCK = 2048  # vocabulary entries whose 16-bit logits are computed at a time


def gelu_works_in_blocks(element_bytes: int) -> bool:
    """Whether GELU is computed in blocks.

    It is in 16 bits; in fp32 on AMD's processors or without AVX-512, where torch's tanh is slow.
    """
    return element_bytes == 2 or not has_avx512() or mkl_lacks_avx512()


def count_loss_logits(threads: int) -> int:
    """How many logits the loss works on in fp32 at a time."""
    return threads * LOGITS_PER_THREAD


# --- matrix products

WIDENED_BLOCK = 2048  # output channels that are held in fp32 beside 16-bit ones


def has_avx512() -> bool:
    """Whether this machine's processor has AVX-512, as Linux tells; True where nothing tells."""
    flags = read_processor().get("flags")
    return flags is None or "avx512f" in flags.split()


def mkl_lacks_avx512() -> bool:
    """Whether MKL leaves this processor's AVX-512 unused, as it does on AMD's.

    torch multiplies fp32 matrices and computes exp by it.
    """
    return read_processor().get("vendor_id") == "AuthenticAMD" and has_avx512()


def find_slow_precisions() -> tuple[str, ...]:
    """The 16-bit formats that this processor has no instructions for, so that torch multiplies them in plain loops."""
    flags = set(read_processor().get("flags", "").split())
    needed = {"fp16": {"avx512_fp16", "amx_fp16"}, "bf16": {"avx512bw", "avx_ne_convert"}}
    return tuple(name for name, any_of in needed.items() if flags and not flags & any_of)
