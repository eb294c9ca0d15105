"""Which layer a matrix product is, and which flag makes a dimension: by the run's own shape."""

from collections import Counter

from megatron_lite.analysis.findings.seen.planned import argument, part, whole
from megatron_lite.analysis.run_facts import Facts


def layer_of(facts: Facts, dims: tuple[int, ...]) -> str:
    """ "MLP fc1", by two of the product's three dimensions in any order (backward transposes).

    The third should be the micro-batch's tokens: these may number as many as another layer's features.
    """
    size, length = whole(argument(facts, "micro_batch_size")), whole(part(facts, "shape", "seq_length"))
    tokens = size * length if size and length else None
    fitting = [
        (tuple((Counter(dims) - Counter(pair)).elements()) != (tokens,), name)
        for name, pair in _layers(facts)
        if not Counter(pair) - Counter(dims)
    ]
    return min(fitting, key=lambda one: one[0])[1] if fitting else "product"


def meaning_of(facts: Facts, dimension: int, wanted: int) -> str:
    """What to change to turn `dimension` into `wanted`: "--hidden-size 1024 (now 1000)"."""
    for flag, value in _flags(facts):
        if value == dimension:
            return f"{flag} {wanted} (now {dimension})"
    if dimension == whole(part(facts, "shape", "padded_vocab_size")):
        return f"--make-vocab-size-divisible-by 128 (the vocabulary has now {dimension} rows)"
    return f"pad {dimension} to {wanted}"


def _flags(facts: Facts) -> tuple[tuple[str, int | None], ...]:
    shape = {
        name: whole(part(facts, "shape", name))
        for name in ("hidden_size", "ffn_hidden_size", "kv_channels", "seq_length")
    }
    return (
        ("--hidden-size", shape["hidden_size"]),
        ("--ffn-hidden-size", shape["ffn_hidden_size"]),
        ("--kv-channels", shape["kv_channels"]),
        ("--seq-length", shape["seq_length"]),
    )


def _layers(facts: Facts) -> list[tuple[str, tuple[int, int]]]:
    names = (
        "hidden_size",
        "ffn_hidden_size",
        "kv_channels",
        "num_attention_heads",
        "num_query_groups",
        "padded_vocab_size",
    )
    values = [whole(part(facts, "shape", name)) for name in names]
    if None in values:
        return []
    hidden, ffn, width, heads, groups, vocabulary = values
    fc1 = ffn * (2 if argument(facts, "swiglu") else 1)
    mlp = [("MLP", (hidden, ffn))] if fc1 == ffn else [("MLP fc1", (hidden, fc1)), ("MLP fc2", (hidden, ffn))]
    return [
        ("output projection to the vocabulary", (hidden, vocabulary)),
        *mlp,
        ("attention QKV projection", (hidden, (heads + 2 * groups) * width)),
        ("attention output projection", (hidden, heads * width)),
    ]
