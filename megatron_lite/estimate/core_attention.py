"""The operations of core attention (model/attend.py) by kernel, and their memory."""

from megatron_lite.estimate.liveness import Op, Sized, Tape
from megatron_lite.estimate.sizes import ATTENTION, FP32, PASSING, QKV, SCORES, Setting
from megatron_lite.model.kernel_choice import MATH, UNFUSED

NAME = "core_attention"
FLASH_HEAD_STEP = 8  # channels: heads of another width are padded


def core_ops(setting: Setting, inputs: tuple[str, str, str], result: str) -> tuple[Op, ...]:
    """From queries, keys and values to the input of the output projection."""
    if setting.attention not in (UNFUSED, MATH):
        return _fused(setting, inputs, result)
    ops = _explicit(setting, inputs) if setting.attention == UNFUSED else _math(setting, inputs)
    if setting.recomputes_attention:
        ops = (_recomputed(setting, ops, inputs),)
    # the product has the order heads, tokens; the projection wants tokens, heads
    return *ops, Op(NAME, ("out",), ((result, _queries(setting, ATTENTION)),), passes=True)


def _queries(setting: Setting, name: str, num_bytes: int | None = None) -> Sized:
    return setting.rows(name, setting.shape.attention_width, num_bytes)


def _fused(setting: Setting, inputs: tuple[str, str, str], result: str) -> tuple[Op, ...]:
    """Flash, memory-efficient, cuDNN: scores stay in registers. Kept are inputs, result and one fp32 number per row."""
    shape, ops = setting.shape, ()
    if setting.is_grouped and not setting.is_flash:  # the memory-efficient kernel knows no groups
        ops, inputs = _repeated(setting, inputs, setting.element_bytes)
    kept = [setting.rows(ATTENTION, shape.num_attention_heads, FP32)]
    if setting.is_flash and not setting.on_cpu and shape.kv_channels % FLASH_HEAD_STEP:
        return _padded(setting, inputs, kept, result)
    if setting.masked:  # as numbers that are added to scores
        kept.append(setting.matrices(SCORES, setting.micro_batch, setting.element_bytes, "sequences"))
    out = (result, _queries(setting, ATTENTION))
    if not (setting.is_flash and setting.heads_come_first):
        return *ops, Op(NAME, inputs, (out,), (*inputs, result), tuple(kept))
    # flash gives its result the order of the queries (at::empty_like); the projection wants tokens, heads: a copy
    there = ("out", _queries(setting, ATTENTION))
    return *ops, Op(NAME, inputs, (there,), (*inputs, "out"), tuple(kept)), Op(NAME, ("out",), (out,), passes=True)


def _padded(setting: Setting, inputs: tuple[str, str, str], kept: list[Sized], result: str) -> tuple[Op, ...]:
    """Flash with heads of odd width: copies of all with wider heads, and the result cut back to size."""
    shape = setting.shape
    width = -(-shape.kv_channels // FLASH_HEAD_STEP) * FLASH_HEAD_STEP
    heads = (shape.num_attention_heads, shape.num_query_groups, shape.num_query_groups)
    wide = tuple(f"{name}.padded" for name in inputs)
    pads = (
        Op(NAME, (name,), ((copy, setting.rows(QKV, number * width)),))
        for name, copy, number in zip(inputs, wide, heads)
    )
    out = setting.rows(ATTENTION, shape.num_attention_heads * width)
    return (
        *pads,
        Op(NAME, wide, (("out", out),), (*wide, "out"), tuple(kept)),
        Op(NAME, ("out",), (("out.cut", _queries(setting, ATTENTION)),), view=True),
        Op(NAME, ("out.cut",), ((result, _queries(setting, ATTENTION)),), passes=True),
    )


def _explicit(setting: Setting, inputs: tuple[str, str, str]) -> tuple[Op, ...]:
    """model/attend.explicit_attention."""
    repeat, (q, k, v) = _repeated(setting, inputs, setting.element_bytes)
    narrow, each, held = setting.scores(setting.element_bytes), setting.element_bytes, "scores"
    ops, names = _scores(setting, (q, k, v), bool(repeat), narrow)
    if setting.shape.softmax_in_fp32 or setting.shape.query_key_layer_scaling:
        ops, each, held = [*ops, *_in_fp32(setting)], FP32, "scores.damped"
    ops.append(Op(NAME, (held,), (("softmax", setting.scores(each)),), ("softmax",)))
    probabilities = "softmax"
    if each > setting.element_bytes:
        ops.append(Op(NAME, ("softmax",), (("probabilities", narrow),)))
        probabilities = "probabilities"
    return *repeat, *ops, *_weighted(setting, probabilities, names[2], narrow, (held, *inputs))


def _scores(setting: Setting, inputs: tuple[str, str, str], repeated: bool, narrow: Sized):
    """(operations up to masked scores, names of queries, keys and values as products take them). Without documents' masks
    the product itself scales and adds the mask; its backward scales the queries' and the keys' gradients afterwards."""
    q, k, v = inputs
    if not setting.masked:
        order, names = _in_rows(setting, (q, k, v), repeated, setting.element_bytes)
        future = setting.matrices(SCORES, 1, setting.element_bytes, "mask")
        product = Op(
            NAME,
            names[:2],
            (("scores", narrow),),
            names[:2],
            scratch=(future,),
            backward_scratch=(_queries(setting, PASSING),),
        )
        return [*order, product], names
    order, names = _in_rows(setting, ("q.scaled", k, v), repeated, setting.element_bytes)
    mask = setting.matrices(SCORES, setting.micro_batch, 1, "masks")
    return [
        Op(NAME, (q,), (("q.scaled", _queries(setting, QKV)),)),
        *order,
        Op(NAME, names[:2], (("scores.unmasked", narrow),), names[:2]),
        Op(NAME, ("scores.unmasked",), (("scores", narrow),), keeps_too=(mask,)),
    ], names


def _in_fp32(setting: Setting) -> tuple[Op, ...]:
    """Scores times the layer's number, or times one."""
    damped = ("scores.damped", setting.scores(FP32))
    if setting.element_bytes == FP32:
        return (Op(NAME, ("scores",), (damped,)),)
    return (
        Op(NAME, ("scores",), (("scores.fp32", setting.scores(FP32)),)),
        Op(NAME, ("scores.fp32",), (damped,), holds=("scores",)),
    )


def _math(setting: Setting, inputs: tuple[str, str, str]) -> tuple[Op, ...]:
    """aten::_scaled_dot_product_attention_math: all in fp32, queries and keys scaled each."""
    scores, wide, keys = setting.scores(FP32), _queries(setting, QKV, FP32), setting.rows(QKV, setting.key_width, FP32)
    casts, names = (), inputs
    if setting.element_bytes < FP32:
        names = tuple(f"{name}.fp32" for name in inputs)
        casts = (Op(NAME, (name,), ((copy, size),)) for name, copy, size in zip(inputs, names, (wide, keys, keys)))
    repeat, (q, k, v) = _repeated(setting, names, FP32)
    scale = (Op(NAME, (name,), ((scaled, wide),)) for name, scaled in ((q, "q.scaled"), (k, "k.scaled")))
    order, (q, k, v) = _in_rows(setting, ("q.scaled", "k.scaled", v), bool(repeat), FP32)
    return (
        *casts,
        *repeat,
        *scale,
        *order,
        Op(NAME, (q, k), (("scores", scores),), (q, k)),
        Op(NAME, ("scores",), (("softmax", scores),), ("softmax",)),
        *_weighted(setting, "softmax", v, scores, inputs, FP32),
    )


def _weighted(
    setting: Setting, probabilities: str, v: str, scores: Sized, held: tuple[str, ...], num_bytes: int | None = None
) -> tuple[Op, ...]:
    """Dropout of the probabilities and their product with the values, as "out"."""
    each, ops = num_bytes or setting.element_bytes, []
    if setting.shape.attention_dropout:
        mask = setting.scores(each if setting.on_cpu else 1)
        ops.append(Op(NAME, (probabilities,), (("dropped", scores),), keeps_too=(mask,)))
        probabilities = "dropped"
    out = _queries(setting, PASSING, each)
    if each == setting.element_bytes:
        return *ops, Op(NAME, (probabilities, v), (("out", out),), (probabilities, v), holds=held)
    return (
        *ops,
        Op(NAME, (probabilities, v), (("out.fp32", out),), (probabilities, v), holds=held),
        Op(NAME, ("out.fp32",), (("out", _queries(setting, PASSING)),)),
    )


def _repeated(
    setting: Setting, inputs: tuple[str, str, str], num_bytes: int
) -> tuple[tuple[Op, ...], tuple[str, str, str]]:
    """Keys and values once for each head."""
    q, k, v = inputs
    if not setting.is_grouped:
        return (), inputs
    wide = _queries(setting, QKV, num_bytes)
    return tuple(Op(NAME, (name,), ((f"{name}.repeated", wide),)) for name in (k, v)), (
        q,
        f"{k}.repeated",
        f"{v}.repeated",
    )


def _in_rows(setting: Setting, inputs: tuple[str, str, str], repeated: bool, num_bytes: int):
    """A batched product takes sequences and heads as one dimension: what has tokens between them is copied."""
    between = setting.micro_batch > 1 and setting.shape.num_attention_heads > 1
    copied = (
        between and not setting.heads_come_first,
        between and not setting.heads_come_first and not repeated,
        between and not repeated,
    )
    wide = _queries(setting, QKV, num_bytes)
    ops = tuple(Op(NAME, (name,), ((f"{name}.rows", wide),), passes=True) for name, copy in zip(inputs, copied) if copy)
    return ops, tuple(f"{name}.rows" if copy else name for name, copy in zip(inputs, copied))


def _recomputed(setting: Setting, ops: tuple[Op, ...], inputs: tuple[str, str, str]) -> Op:
    """Keeps its inputs only; backward does all again first."""
    shape = setting.shape
    sizes = (shape.attention_width, setting.key_width, setting.key_width)
    tape = Tape(ops)
    for name, width in zip(inputs, sizes):
        tape.begin(name, setting.rows(QKV, width), counted=False)
    tape.forward(again=True)
    tape.backward("out", _queries(setting, PASSING), counted=False)
    scratch = tuple(sized for sized, times in tape.live.most.items() for _ in range(times))
    return Op(NAME, inputs, (("out", _queries(setting, PASSING)),), inputs, scratch=scratch)
