"""The operations that make queries, keys and values (model/attention.py, rotary.py), and their memory."""

from megatron_lite.estimate.norms import norm_ops
from megatron_lite.estimate.sizes import FP32, QKV, ROTARY, Setting
from megatron_lite.estimate.tape import Op, Sized


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
