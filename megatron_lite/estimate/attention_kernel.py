"""Which kernel attention gets, as far as its memory depends on it, and with it the sizes of a plan's tensors."""

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.memory import element_bytes
from megatron_lite.estimate.sizes import FUSED, MATH, UNFUSED, Setting

EXPLICIT = ("unfused", "local")
SHORT = 512  # positions
WIDEST_FLASH_HEAD = 256  # channels
EFFICIENT_HEAD_BYTES = 16  # the memory-efficient kernel's heads are a multiple of it


def setting_of(plan: Plan) -> Setting:
    """What the sizes of one micro-batch's tensors depend on."""
    a = plan.args
    return setting_from(
        plan.shape,
        a.training.micro_batch_size,
        plan.precision,
        plan.device,
        a.model.attention_backend,
        a.data.reset_attention_mask,
        a.model.recompute_granularity,
        plan.world.threads,
    )


def setting_from(
    shape: ModelShape,
    micro_batch: int,
    precision: str,
    device: str,
    backend: str,
    masked: bool = False,
    recompute: str | None = None,
    threads: int = 1,
) -> Setting:
    """The same from the plan's parts: --attention-backend, --reset-attention-mask, --recompute-granularity, threads of a rank."""
    width = element_bytes(precision)
    kernel, flash = kernel_of(shape, precision, device, backend, masked)
    return Setting(
        shape,
        micro_batch,
        width,
        kernel,
        on_cpu=device == "cpu",
        threads=threads,
        is_flash=flash,
        masked=masked,
        recomputes_attention=kernel == UNFUSED and recompute == "selective",
        in_fp16=precision == "fp16",
    )


def attention_of(plan: Plan) -> tuple[str, bool]:
    """(fused, unfused or math; whether a fused one is flash) of a plan."""
    return kernel_of(
        plan.shape, plan.precision, plan.device, plan.args.model.attention_backend, plan.args.data.reset_attention_mask
    )


def explicit_is_faster(shape: ModelShape, precision: str, device: str, masked: bool) -> bool:
    """Than torch's fused kernel, whose backward is slow on a CPU in bf16: twice up to 256 positions, 1.4 to 1.7
    times at 512, alike at 1,024; in fp32 never (docs/benchmarks.md)."""
    return device == "cpu" and precision == "bf16" and shape.seq_length <= SHORT and not masked


def kernel_of(shape: ModelShape, precision: str, device: str, backend: str, masked: bool) -> tuple[str, bool]:
    """The trainer's rule, then torch's own choice on a GPU since Ampere and on a CPU (sdp_utils.cpp, sdp_utils_cpp.cpp of
    torch 2.13). cuDNN's kernel keeps what flash keeps.

    On a GPU flash knows no mask and no fp32, the memory-efficient one no groups; a CPU's flash knows no dropout.
    """
    if backend in EXPLICIT or backend == "auto" and explicit_is_faster(shape, precision, device, masked):
        return UNFUSED, False
    width = element_bytes(precision)
    if device == "cpu":
        return (MATH, False) if shape.attention_dropout else (FUSED, True)
    if width == 2 and not masked and shape.kv_channels <= WIDEST_FLASH_HEAD:
        return FUSED, True
    return (MATH, False) if shape.kv_channels * width % EFFICIENT_HEAD_BYTES else (FUSED, False)
