"""Choices between kernels that depend on the plan alone. Without torch, as the estimators use them too."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from megatron_lite.config.shape import ModelShape

PROCESSORS = Path("/proc/cpuinfo")

# --- attention

# How attention is computed: scores stay in registers; are written down; are written down, but for most of the future ones; are
# written down in fp32, with fp32 copies of queries, keys and values, as torch's fallback does
# (aten::_scaled_dot_product_attention_math).
FUSED, UNFUSED, CAUSAL, MATH = "fused", "unfused", "causal", "math"
EXPLICIT = ("unfused", "local")  # values of --attention-backend
MAX_EXPLICIT_POSITIONS = 512
MAX_FLASH_HEAD = 256  # channels
FLASH_HEAD_STEP = 8  # channels: flash pads heads of another width
EFFICIENT_HEAD_BYTES = 16  # the memory-efficient kernel's heads are a multiple of it
QUERIES_AT_ONCE = 128  # of the explicit kernel where it skips future scores


def skips_future_scores(shape: ModelShape, precision: str, device: str, masked: bool) -> bool:
    """Whether the explicit kernel goes by blocks of queries, which only meet the keys up to their end."""
    plain = not (masked or shape.attention_dropout or shape.query_key_layer_scaling)
    return device == "cpu" and precision == "fp32" and plain


def count_scores(length: int) -> int:
    """Number of scores that one head holds for a sequence, where future ones are skipped."""
    ends = (min(start + QUERIES_AT_ONCE, length) for start in range(0, length, QUERIES_AT_ONCE))
    return sum(
        min(QUERIES_AT_ONCE, length - start) * end for start, end in zip(range(0, length, QUERIES_AT_ONCE), ends)
    )


def explicit_is_faster(shape: ModelShape, precision: str, device: str, masked: bool) -> bool:
    """Whether the explicit kernel beats torch's fused one, whose backward is slow on a CPU (docs/benchmarks.md).

    In bf16 twice up to 256 positions, 1.4 to 1.7 times at 512, alike at 1,024; in fp32, without future scores, 1.2 to 1.5 times.
    """
    if device != "cpu" or masked or shape.seq_length > MAX_EXPLICIT_POSITIONS:
        return False
    return precision == "bf16" or skips_future_scores(shape, precision, device, masked)


def predict_attention_kernel(
    shape: ModelShape, precision: str, device: str, backend: str, masked: bool
) -> tuple[str, bool]:
    """(FUSED, UNFUSED, CAUSAL or MATH; whether a fused kernel is flash) for --attention-backend on a device.

    The trainer's rule, then torch's own choice on a GPU since Ampere and on a CPU (sdp_utils.cpp, sdp_utils_cpp.cpp of
    torch 2.13). cuDNN's kernel keeps what flash keeps. On a GPU flash knows no mask and no fp32, the memory-efficient
    one no groups; a CPU's flash knows no dropout.
    """
    if backend in EXPLICIT or backend == "auto" and explicit_is_faster(shape, precision, device, masked):
        return (CAUSAL if skips_future_scores(shape, precision, device, masked) else UNFUSED), False
    width = 4 if precision == "fp32" else 2
    if device == "cpu":
        return (MATH, False) if shape.attention_dropout else (FUSED, True)
    if width == 2 and not masked and shape.kv_channels <= MAX_FLASH_HEAD:
        return FUSED, True
    return (MATH, False) if shape.kv_channels * width % EFFICIENT_HEAD_BYTES else (FUSED, False)


# --- GELU and the loss in pieces that stay in a processor's cache

PIECE = 2**17  # elements of GELU per thread: of fewer, starting operations takes longer than reading caches


def works_in_pieces(on_cpu: bool, element_bytes: int) -> bool:
    """Whether the logits' product is computed in pieces: on a CPU in 16 bits, where it is slower whole (docs/benchmarks.md)."""
    return on_cpu and element_bytes == 2


def gelu_works_in_pieces(on_cpu: bool, element_bytes: int) -> bool:
    """Whether GELU is computed in pieces: on CPUs; in fp32 on AMD's or without AVX-512, where torch's tanh is slow."""
    return on_cpu and (element_bytes == 2 or not has_avx512() or mkl_lacks_avx512())


def has_avx512() -> bool:
    """Whether this machine's processor has AVX-512, as Linux tells; True where nothing tells."""
    flags = read_processor().get("flags")
    return flags is None or "avx512f" in flags.split()


# --- matrix products

WIDENED_AT_ONCE = 2048  # output channels that are held in fp32 beside 16-bit ones


def mkl_lacks_avx512() -> bool:
    """Whether MKL, by which torch multiplies fp32 matrices and computes exp, leaves this processor's AVX-512 unused: on AMD's."""
    return read_processor().get("vendor_id") == "AuthenticAMD" and has_avx512()


def find_slow_precisions() -> tuple[str, ...]:
    """The 16-bit formats that this processor has no instructions for, so that torch multiplies them in plain loops."""
    flags = set(read_processor().get("flags", "").split())
    needed = {"fp16": {"avx512_fp16", "amx_fp16"}, "bf16": {"avx512bw", "avx_ne_convert"}}
    return tuple(name for name, any_of in needed.items() if flags and not flags & any_of)


@cache
def read_processor() -> Mapping[str, str]:
    """What Linux tells of this machine's first processor, by field of /proc/cpuinfo; {} where nothing tells."""
    try:
        text = PROCESSORS.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def rows_at_once(vocabulary: int, threads: int) -> int:
    """How many tokens' logits the loss works on in fp32 at a time: 1 MB for each thread of a CPU, which fits a core's second-level
    cache, or enough to fill a GPU (`threads` 0)."""
    return max(1, (threads * 2**18 or 2**24) // vocabulary)
