"""What a model's flags must satisfy."""

from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.world import World

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
OPTIONAL = ("ffn_hidden_size", "kv_channels", "padded_vocab_size", "max_position_embeddings")
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 100_000
MAX_ELEMENTS = 2**58  # of one tensor; its bytes must have 63 bits


def model_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among the model's flags."""
    wrong_sizes = list(_sizes(args))
    yield from wrong_sizes
    if not wrong_sizes:
        yield from _tensors(args)
    yield from _heads(args)
    yield from _positions(args)
    yield from _switches(args)
    yield from _attention(args, bool(world.gpus))
    yield from _recompute(args)


def _sizes(args: Args) -> Iterator[str]:
    for name in REQUIRED:
        flag, value = "--" + name.replace("_", "-"), getattr(args.model, name)
        if value is None:
            yield f"{flag} is missing; every model needs it."
        elif value < 1:
            yield f"{flag} {value}: must be at least 1."
    for name in OPTIONAL:
        value = getattr(args.model, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} {value}: must be at least 1, or leave it out."
    if args.model.make_vocab_size_divisible_by < 1:
        yield f"--make-vocab-size-divisible-by {args.model.make_vocab_size_divisible_by}: must be at least 1."
    for name in (*REQUIRED, *OPTIONAL, "num_query_groups", "make_vocab_size_divisible_by", "recompute_num_layers"):
        value, most = getattr(args.model, name), MAX_LAYERS if name == "num_layers" else MAX_SIZE
        if value is not None and value > most:
            yield f"--{name.replace('_', '-')} {value}: must be at most {most}."


def _tensors(args: Args) -> Iterator[str]:
    """Sizes that are well each by itself, and too much together."""
    m, hidden, heads = args.model, args.model.hidden_size, args.model.num_attention_heads
    vocabulary = m.padded_vocab_size or max(args.data.vocab_size or 1, m.make_vocab_size_divisible_by)
    widths = {
        "--ffn-hidden-size": 2 * (m.ffn_hidden_size or 4 * hidden), "--kv-channels": 3 * heads * (m.kv_channels or max(hidden // heads, 1)),
        "--max-position-embeddings": m.max_position_embeddings or 1, "--padded-vocab-size": vocabulary,
    }  # fmt: skip
    samples = f"--micro-batch-size {args.training.micro_batch_size} times --seq-length {m.seq_length}"
    tokens = max(args.training.micro_batch_size or 1, 1) * m.seq_length
    for name, width in widths.items():
        for words, rows in ((f"--hidden-size {hidden}", hidden), (samples, tokens)):
            if rows * width > MAX_ELEMENTS:
                yield f"{words} needs a tensor of {rows} x {width} numbers, by {name}, which no machine holds; lower one of them."
                return


def _heads(args: Args) -> Iterator[str]:
    m = args.model
    if not m.hidden_size or not m.num_attention_heads or m.num_attention_heads < 1:
        return
    if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        yield (
            f"--hidden-size {m.hidden_size} is not divisible by --num-attention-heads {m.num_attention_heads}; "
            "change one, or give --kv-channels."
        )
    if m.group_query_attention and (m.num_query_groups < 1 or m.num_attention_heads % m.num_query_groups):
        yield (
            f"--num-query-groups {m.num_query_groups} does not divide --num-attention-heads "
            f"{m.num_attention_heads}; choose a divisor."
        )


def _positions(args: Args) -> Iterator[str]:
    m = args.model
    learned = m.position_embedding_type == "learned_absolute" and m.add_position_embedding
    if learned and m.max_position_embeddings is None:
        yield "--max-position-embeddings is missing; give it --seq-length's value."
    if learned and m.seq_length and m.max_position_embeddings and m.max_position_embeddings < m.seq_length:
        yield (
            f"--max-position-embeddings {m.max_position_embeddings} is smaller than --seq-length {m.seq_length}; "
            "raise it to at least that."
        )
    if not 0 < m.rotary_percent <= 1:
        yield f"--rotary-percent {m.rotary_percent}: must be above 0 and at most 1."
    elif m.position_embedding_type == "rope":
        yield from _rotated(args)
    if m.rotary_base < 1:
        yield f"--rotary-base {m.rotary_base}: must be at least 1; 10000 is usual."
    if m.rotary_seq_len_interpolation_factor is not None and m.rotary_seq_len_interpolation_factor < 1:
        yield (
            f"--rotary-seq-len-interpolation-factor {m.rotary_seq_len_interpolation_factor}: must be at least 1, "
            "or leave it out."
        )


def _rotated(args: Args) -> Iterator[str]:
    """Channels rotate in pairs."""
    m = args.model
    heads = m.num_attention_heads or 0
    width = m.kv_channels or (m.hidden_size // heads if m.hidden_size and heads > 0 else 2)
    rotated = int(width * m.rotary_percent)
    if width > 0 and (rotated < 2 or rotated % 2):
        yield (
            f"--rotary-percent {m.rotary_percent:g} rotates {rotated} of a head's {width} channels, but they rotate "
            "in pairs; change it, or --kv-channels."
        )


def _switches(args: Args) -> Iterator[str]:
    m = args.model
    if m.swiglu and m.squared_relu:
        yield "--swiglu and --squared-relu exclude each other; keep one."
    if m.swiglu and m.ffn_hidden_size is None and 0 < (m.hidden_size or 0) < 24:
        yield (
            f"--swiglu with --hidden-size {m.hidden_size} gives an MLP of width 0, because it is a multiple of 64; "
            "give --ffn-hidden-size."
        )
    for name in ("hidden_dropout", "attention_dropout"):
        if not 0 <= getattr(m, name) < 1:
            yield f"--{name.replace('_', '-')} {getattr(m, name)}: must be at least 0 and below 1."
    for name in ("norm_epsilon", "init_method_std"):
        if getattr(m, name) <= 0:
            yield f"--{name.replace('_', '-')} {getattr(m, name)}: must be above 0."


def _attention(args: Args, gpu: bool) -> Iterator[str]:
    """What torch's kernels cannot do whatever the sizes; the rest shows when torch is asked."""
    m, p = args.model, args.precision
    name = f"--attention-backend {m.attention_backend}"
    if m.attention_backend == "fused" and not gpu:
        yield f"{name} is cuDNN's, which needs a GPU and this machine shows none; use --attention-backend auto."
    elif m.attention_backend in ("flash", "fused") and gpu and not (p.fp16 or p.bf16):
        yield f"{name} needs --bf16 or --fp16 on a GPU; add one, or use --attention-backend auto."
    elif m.attention_backend == "flash" and gpu and args.data.reset_attention_mask:
        yield f"{name} has no masks on a GPU, which --reset-attention-mask needs; use --attention-backend auto."
    elif m.attention_backend == "flash" and not gpu and m.attention_dropout:
        yield f"{name} has no dropout on a CPU; add --attention-dropout 0, or use --attention-backend auto."


def _recompute(args: Args) -> Iterator[str]:
    m = args.model
    if m.recompute_granularity == "full":
        if m.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block."
        if m.recompute_num_layers is not None and m.recompute_num_layers < 1:
            yield f"--recompute-num-layers {m.recompute_num_layers}: must be at least 1."
    elif m.recompute_method is not None:
        yield (
            f"--recompute-method {m.recompute_method} works with --recompute-granularity full only; "
            "add that, or drop it."
        )
    elif m.recompute_granularity == "selective" and m.recompute_num_layers is not None:
        yield (
            f"--recompute-num-layers {m.recompute_num_layers} does not go with --recompute-granularity selective, "
            "which concerns all layers; drop it, or use full."
        )
