"""The operations of one transformer layer (model/gpt.py, mlp.py) and their memory."""

from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.attention_inputs import input_ops
from megatron_lite.estimate.core_attention import core_ops
from megatron_lite.estimate.gelu import gelu_op
from megatron_lite.estimate.norms import norm_ops
from megatron_lite.estimate.sizes import MLP, NORMS, PASSING, Setting
from megatron_lite.estimate.tape import Op, gradient_of


def layer_ops(setting: Setting) -> tuple[Op, ...]:
    """From the value "in" to the value "out", both of one hidden vector per token."""
    shape, after = setting.shape, setting.hidden(NORMS)
    attended, changed = _dropped(shape, "attended"), _dropped(shape, "changed")
    return (
        *norm_ops(setting, "input_layernorm", "in", "normed", shape.hidden_size),
        *_attention(setting),
        *_dropout(setting, "attended"),
        Op("residual", ("in", attended), (("middle", after),), passes=True),
        *norm_ops(setting, "pre_mlp_layernorm", "middle", "mlp.normed", shape.hidden_size),
        *_mlp(setting),
        *_dropout(setting, "changed"),
        # the attention's result has a variable until the layer's end
        Op("residual", ("middle", changed), (("out", after),), passes=True, holds=("attended",)),
    )


def _dropped(shape: ModelShape, name: str) -> str:
    return f"{name}.dropped" if shape.hidden_dropout else name


def _dropout(setting: Setting, name: str) -> tuple[Op, ...]:
    if not setting.shape.hidden_dropout:
        return ()
    return (Op("dropout", (name,), ((f"{name}.dropped", setting.hidden(PASSING)),), keeps_too=(setting.mask(),)),)


def _attention(setting: Setting) -> tuple[Op, ...]:
    shape = setting.shape
    ops, inputs = input_ops(setting)
    projection = Op(
        "linear_proj",
        ("heads",),
        (("attended", setting.hidden(PASSING)),),
        ("heads",),
        weights=shape.hidden_size * (shape.attention_width + shape.linear_bias),
        holds=inputs,
    )
    return *ops, *core_ops(setting, inputs, "heads"), projection


def _mlp(setting: Setting) -> tuple[Op, ...]:
    """Linear layers keep their inputs, and activation functions too, but for the squared relu, which keeps relu's result, and
    for GELU on a CPU."""
    shape, width = setting.shape, setting.shape.ffn_hidden_size
    inner, outer = setting.rows(MLP, width), setting.rows(MLP, shape.fc1_width)
    middle = {
        "swiglu": (
            Op("swiglu", ("fc1",), (("gate", inner), ("value", inner)), view=True),
            Op("swiglu", ("gate",), (("silu", inner),), ("gate",)),
            Op("swiglu", ("silu", "value"), (("activated", inner),), ("silu", "value"), holds=("fc1",)),
        ),
        "squared_relu": (
            Op("squared_relu", ("fc1",), (("relu", inner),), ("relu",)),
            # backward takes the relu to the power of one, doubles it, multiplies: three tensors
            Op(
                "squared_relu",
                ("relu",),
                (("activated", inner),),
                ("relu",),
                holds=("fc1",),
                backward_scratch=(gradient_of(inner), gradient_of(inner)),
            ),
        ),
    }.get(shape.activation, (gelu_op(setting, inner),))
    return (
        Op(
            "linear_fc1",
            ("mlp.normed",),
            (("fc1", outer),),
            ("mlp.normed",),
            weights=shape.fc1_width * (shape.hidden_size + shape.linear_bias),
        ),
        *middle,
        Op(
            "linear_fc2",
            ("activated",),
            (("changed", setting.hidden(PASSING)),),
            ("activated",),
            weights=shape.hidden_size * (width + shape.linear_bias),
        ),
    )
