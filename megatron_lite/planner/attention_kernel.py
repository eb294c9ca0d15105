"""Predicts which attention kernel a run takes, and so what its memory and time are."""

from megatron_lite.config.args import EXPLICIT_BACKENDS
from megatron_lite.config.cpu_kernel_rules import explicit_is_faster, skips_future_scores
from megatron_lite.config.shape import ModelShape

# How attention is computed.
FUSED = "fused"  # scores stay in registers
UNFUSED = "unfused"  # scores are written down
CAUSAL = "causal"  # the same, but for most of the future ones
# in fp32, with fp32 copies of queries, keys and values, as torch's fallback does
# (aten::_scaled_dot_product_attention_math)
MATH = "math"
MAX_FLASH_HEAD = 256  # channels
FLASH_HEAD_STEP = 8  # channels: flash pads heads of another width
EFFICIENT_HEAD_BYTES = 16  # the memory-efficient kernel's heads are a multiple of it


def predict_attention_kernel(
    shape: ModelShape, precision: str, device: str, backend: str, masked: bool
) -> tuple[str, bool]:
    """Predict which kernel computes attention for --attention-backend on a device.

    The trainer's rule, then torch's own choice on a GPU since Ampere and on a CPU (sdp_utils.cpp, sdp_utils_cpp.cpp of
    torch 2.13). cuDNN's kernel keeps what flash keeps. On a GPU flash knows no fp32, the memory-efficient
    one no groups; a CPU's flash knows no dropout.

    Args:
        shape: What one rank computes.
        precision: fp32, fp16 or bf16.
        device: cuda or cpu.
        backend: The flag's value.
        masked: Whether attention takes a mask.

    Returns:
        (FUSED, UNFUSED, CAUSAL or MATH; whether a fused kernel is flash).
    """
    if device == "cpu":
        return _predict_on_cpu(shape, precision, backend, masked)
    if backend in EXPLICIT_BACKENDS:
        return UNFUSED, False
    width = 4 if precision == "fp32" else 2
    if width == 2 and shape.kv_channels <= MAX_FLASH_HEAD:
        return FUSED, True
    return (MATH, False) if shape.kv_channels * width % EFFICIENT_HEAD_BYTES else (FUSED, False)


def _predict_on_cpu(shape: ModelShape, precision: str, backend: str, masked: bool) -> tuple[str, bool]:
    is_preferred = backend == "auto" and explicit_is_faster(shape, precision, masked)
    if backend in EXPLICIT_BACKENDS or is_preferred:
        return (CAUSAL if skips_future_scores(shape, precision, masked) else UNFUSED), False
    return (MATH, False) if shape.attention_dropout else (FUSED, True)
