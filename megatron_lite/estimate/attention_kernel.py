"""Which kernel attention gets, as far as its memory depends on it, and with it the sizes of a plan's tensors."""

from megatron_lite.config.plan import Plan
from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.memory import element_bytes
from megatron_lite.estimate.sizes import Setting
from megatron_lite.model.kernel_choice import UNFUSED, predict_attention_kernel


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
    kernel, flash = predict_attention_kernel(shape, precision, device, backend, masked)
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
    return predict_attention_kernel(
        plan.shape, plan.precision, plan.device, plan.args.model.attention_backend, plan.args.data.reset_attention_mask
    )
