"""The operations of LayerNorm and RMSNorm (model/norms.py) and their memory."""

from megatron_lite.estimate.sizes import FP32, LINEAR_INPUTS, NORMS, PASSING, Setting
from megatron_lite.estimate.tape import Op, Sized


def norm_ops(
    setting: Setting,
    name: str,
    source: str,
    result: str,
    width: int,
    rows_per_token: int = 1,
    kind: str = LINEAR_INPUTS,
) -> tuple[Op, ...]:
    """Over the last `width` elements, `rows_per_token` of which a token has. Kept are the input, and for each row two fp32
    numbers by LayerNorm, one by RMSNorm (aten::native_layer_norm, aten::_fused_rms_norm)."""
    layer_norm, elements = setting.shape.normalization == "LayerNorm", width * rows_per_token
    weights = width * (2 if layer_norm else 1)
    kept = [setting.rows(NORMS, rows_per_token * (2 if layer_norm else 1), FP32)]
    if setting.shape.layernorm_1p and setting.element_bytes < FP32:
        return _in_fp32(setting, name, source, (result, setting.rows(kind, elements)), elements, weights, kept)
    if setting.on_cpu and not layer_norm:
        return _in_parts(
            setting, name, source, (result, setting.rows(kind, elements)), elements, weights, rows_per_token
        )
    return (Op(name, (source,), ((result, setting.rows(kind, elements)),), (source,), tuple(kept), weights),)


def _in_fp32(
    setting: Setting, name: str, source: str, result: tuple[str, Sized], elements: int, weights: int, kept: list[Sized]
) -> tuple[Op, ...]:
    """Weights that are stored minus one are added to one in fp32, and so all is calculated there."""
    wide, there, back = setting.rows(NORMS, elements, FP32), f"{source}.fp32", f"{result[0]}.fp32"
    return (
        Op(name, (source,), ((there, wide),)),
        Op(name, (there,), ((back, setting.rows(PASSING, elements, FP32)),), (there,), tuple(kept), weights),
        Op(name, (back,), (result,), holds=(source,)),
    )


def _in_parts(
    setting: Setting,
    name: str,
    source: str,
    result: tuple[str, Sized],
    elements: int,
    weights: int,
    rows_per_token: int,
) -> tuple[Op, ...]:
    """RMSNorm on CPUs, where torch 2.13 takes it apart: in fp32, with the normalised input kept beside the input."""
    wide, rows = setting.rows(NORMS, elements, FP32), setting.rows(NORMS, rows_per_token, FP32)
    passing, casts = setting.rows(PASSING, elements, FP32), setting.element_bytes < FP32
    there, scale, normal, scaled = (f"{result[0]}.{part}" for part in ("fp32", "scale", "normal", "scaled"))
    there, scaled = (there, (scaled, passing)) if casts else (source, result)
    ops = (
        Op(name, (there,), ((scale, rows),), (there, scale), scratch=(passing,), backward_scratch=(passing, passing)),
        Op(name, (there, scale), ((normal, wide),), (there, scale), backward_scratch=(passing,)),
        Op(name, (normal,), (scaled,), (normal,), weights=weights, backward_scratch=(passing,)),
    )
    if not casts:
        return ops
    return Op(name, (source,), ((there, wide),)), *ops, Op(name, (scaled[0],), (result,), holds=(source,))
