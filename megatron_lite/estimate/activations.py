"""What layers keep from forward to backward, and the most that lives while backward goes through one of them."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.core_attention import core_ops
from megatron_lite.estimate.gelu import gelu_op
from megatron_lite.estimate.liveness import Op, Sized, Tape, gradient_of
from megatron_lite.estimate.sizes import FP32, LINEAR_INPUTS, MLP, NORMS, PASSING, QKV, ROTARY, Setting

# --- the operations of LayerNorm and RMSNorm (model/gpt.py) and their memory


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


# --- the operations that make queries, keys and values (model/gpt.py, rotary.py), and their memory


def input_ops(setting: Setting) -> tuple[tuple[Op, ...], tuple[str, str, str]]:
    """From the value "normed"; and the names of queries, keys and values."""
    shape = setting.shape
    queries, keys = setting.rows(QKV, shape.attention_width), setting.rows(QKV, setting.key_width)
    ops = [
        Op(
            "linear_qkv",
            ("normed",),
            (("qkv", setting.rows(QKV, shape.qkv_width)),),
            ("normed",),
            weights=shape.qkv_width * (shape.hidden_size + shape.qkv_bias),
        ),
        Op("split", ("qkv",), (("q", queries),), view=True),
    ]
    q, k = "q", "k"
    if 1 < shape.num_query_groups < shape.num_attention_heads:
        # queries of several groups do not lie side by side, and are copied to do so
        ops.append(Op("split", ("q",), (("q.copied", queries),), passes=True))
        q = "q.copied"
    ops += [Op("split", ("qkv",), ((name, keys),), view=True) for name in ("k", "v")]
    heads = ((q, "q_layernorm", shape.num_attention_heads), (k, "k_layernorm", shape.num_query_groups))
    if shape.qk_layernorm:
        for name, norm, number in heads:
            ops += norm_ops(setting, norm, name, f"{name}.normed", shape.kv_channels, number, QKV)
        heads = tuple((f"{name}.normed", norm, number) for name, norm, number in heads)
    if setting.rotates:
        for name, _, number in heads:
            ops += _rotate(setting, name, f"{name}.rotated", number)
        heads = tuple((f"{name}.rotated", norm, number) for name, norm, number in heads)
    return tuple(ops), (heads[0][0], heads[1][0], "v")


def _rotate(setting: Setting, source: str, result: str, heads: int) -> tuple[Op, ...]:
    """x * cos + quarter_turn(x) * sin for the first channels of each head; the rest is put behind them again.

    Slices have full gradients, with zeros for what was left out, also where nothing is left (aten::slice_backward).
    """
    shape = setting.shape
    width = int(shape.kv_channels * shape.rotary_percent)
    turned, half = setting.rows(ROTARY, heads * width), setting.rows(ROTARY, heads * width // 2)
    whole, rest = (
        setting.rows(ROTARY, heads * shape.kv_channels),
        setting.rows(ROTARY, heads * (shape.kv_channels - width)),
    )
    part = source if width == shape.kv_channels else f"{source}.part"
    ops = [Op("rotate", (source,), ((f"{source}.rest", rest),), view=True)]
    if part != source:
        ops.insert(0, Op("rotate", (source,), ((part, turned),), view=True))
    table = () if setting.element_bytes == FP32 else (_table(setting, width),)
    names = (f"{source}.first", f"{source}.second")
    if shape.rotary_interleaved:
        halves = [Op("rotate", (part,), ((name, half),), view=True) for name in names]
    else:
        halves = [Op("rotate", (part,), tuple((name, half) for name in names), view=True)]
    ops += [
        Op("rotate", (part,), ((f"{source}.cos", turned),), keeps_too=table),
        *halves,
        Op("rotate", (names[1],), ((f"{source}.minus", half),)),
        Op("rotate", (f"{source}.minus", names[0]), ((f"{source}.turn", turned),), passes=True),
        Op("rotate", (f"{source}.turn",), ((f"{source}.sin", turned),), keeps_too=table),
        Op("rotate", (f"{source}.cos", f"{source}.sin"), ((f"{source}.sum", turned),), passes=True),
        Op("rotate", (f"{source}.sum", f"{source}.rest"), ((result, whole),), passes=True, holds=(source,)),
    ]
    return tuple(ops)


def _table(setting: Setting, width: int) -> Sized:
    """Cosines or sines in the activations' type, made anew for queries and keys of each layer."""
    each, length = setting.element_bytes, setting.shape.seq_length
    return Sized("activations", ROTARY, each * length * width, f"{each} bytes x {length:,} positions x {width:,}")


# --- the operations of one transformer layer (model/gpt.py, mlp.py) and their memory


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


# --- what layers keep from forward to backward, and the most that lives while backward goes through one of them


@dataclass(frozen=True)
class Highest:
    """tensors: at the highest point, the layer's kept ones among them. operation: whose forward or backward runs then.
    again: it is a forward that is repeated in backward."""

    tensors: Counter[Sized]
    operation: str
    again: bool = False


def total(tensors: Counter[Sized]) -> int:
    """Bytes of all together."""
    return sum(sized.num_bytes * times for sized, times in tensors.items())


@cache
def kept_by_layer(setting: Setting) -> Counter[Sized]:
    """Of one layer's forward; the layer's input belongs to it, its result does not."""
    return _kept(layer_ops(setting), setting)


def kept_at_ends(setting: Setting) -> Counter[Sized]:
    """By the embedding's dropout, and by the last norm up to the output layer's input."""
    ops = norm_ops(setting, "final_layernorm", "in", "normed", setting.shape.hidden_size)
    output = Op("output_layer", ("normed",), (), ("normed",))
    return kept_by_embedding(setting) + _kept((*ops, output), setting)


def kept_by_embedding(setting: Setting) -> Counter[Sized]:
    """Dropout's mask."""
    return Counter([setting.mask()] if setting.shape.hidden_dropout else [])


def input_of_layer(setting: Setting) -> Counter[Sized]:
    """All that a recomputed layer keeps."""
    return Counter([setting.hidden("inputs of recomputed layers")])


@cache
def forward_of_layer(setting: Setting) -> Highest:
    """Of a layer that is not recomputed."""
    tape = _forward(layer_ops(setting), setting)
    return Highest(tape.live.most, tape.live.most_in)


@cache
def backward_of_layer(setting: Setting, weight: Sized, stays: bool, recomputed: bool) -> Highest:
    """weight: the gradient of one parameter's element, which lives on behind the layer's backward if it `stays`."""
    tape, source = Tape(layer_ops(setting), weight, stays), setting.hidden(NORMS)
    tape.begin("in", source, held=recomputed)
    if recomputed:
        tape.live.add(gradient_of(source), "")  # of the layer's result: it is there before anything is computed again
    tape.forward(again=recomputed)
    again_bytes = tape.live.most_bytes if recomputed else 0
    if not recomputed:
        tape.live.forget_most()
    tape.backward("out", source, counted=not recomputed)
    return Highest(tape.live.most, tape.live.most_in, tape.live.most_bytes == again_bytes)


def _kept(ops: tuple[Op, ...], setting: Setting) -> Counter[Sized]:
    return +_forward(ops, setting).live.tensors


def _forward(ops: tuple[Op, ...], setting: Setting) -> Tape:
    tape = Tape(ops)
    tape.begin("in", setting.hidden(NORMS))
    tape.forward()
    return tape


def layer_parameters(setting: Setting) -> int:
    """Of one layer."""
    return sum(op.weights for op in layer_ops(setting))
