"""Rules for the flags of a model."""

from collections.abc import Iterator

from megatron_lite.config.args import Args, LatentArgs, ModelArgs
from megatron_lite.config.expert_layers import parse_window_layers
from megatron_lite.config.plan import parse_window
from megatron_lite.config.world import World

MAX_ELEMENTS = 2**58  # of one tensor; its bytes must have 63 bits


def model_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among the model's flags."""
    yield from _check_tensors(args)
    yield from _check_custom_model(args)
    if args.model.use_mup and args.experts.num_experts is not None:
        yield "--use-mup and --num-experts exclude each other: its rules for experts are not built; drop one of them."
    m = args.model
    yield from _check_heads(m)
    yield from _check_positions(args)
    yield from _check_window(args)
    yield from _check_attention_kernel(args, bool(world.gpus))
    if m.swiglu and m.squared_relu:
        yield "--swiglu and --squared-relu exclude each other; keep one."
    if m.swiglu and m.ffn_hidden_size is None and 0 < (m.hidden_size or 0) < 24:
        width = f"--swiglu with --hidden-size {m.hidden_size} gives an MLP of width 0"
        yield f"{width}, because it is a multiple of 64; give --ffn-hidden-size."
    yield from _check_recomputation(m)


def _check_heads(m: ModelArgs) -> Iterator[str]:
    """Mistakes among the heads of attention and their groups."""
    heads = m.num_attention_heads
    if not m.hidden_size or not heads or heads < 1:
        return  # another rule says it
    given = f"--num-attention-heads {heads}"
    if m.kv_channels is None and m.hidden_size % heads:
        yield f"--hidden-size {m.hidden_size} is not divisible by {given}; change one, or give --kv-channels."
    if m.group_query_attention and (m.num_query_groups < 1 or heads % m.num_query_groups):
        yield f"--num-query-groups {m.num_query_groups} does not divide {given}; choose a divisor."


def _check_attention_kernel(args: Args, on_gpu: bool) -> Iterator[str]:
    """Attention kernels of torch run on some devices and precisions only; the rest shows when torch is asked."""
    m = args.model
    kind = m.attention_backend
    backend = f"--attention-backend {kind}"
    in_16_bits = args.precision.fp16 or args.precision.bf16
    if kind == "fused" and not on_gpu:
        yield f"{backend} is cuDNN's, which needs a GPU and this machine shows none; use --attention-backend auto."
    elif kind in ("flash", "fused") and on_gpu and not in_16_bits:
        yield f"{backend} needs --bf16 or --fp16 on a GPU; add one, or use --attention-backend auto."
    elif kind == "fused" and m.softmax_type != "vanilla":
        yield f"{backend} has no offsets of --softmax-type {m.softmax_type}; use --attention-backend auto."
    elif kind == "flash" and not on_gpu and m.attention_dropout:
        yield f"{backend} has no dropout on a CPU; add --attention-dropout 0, or use --attention-backend auto."


def _check_recomputation(m: ModelArgs) -> Iterator[str]:
    """Mistakes among what is recomputed in backward."""
    number = f"--recompute-num-layers {m.recompute_num_layers}"
    if m.recompute_granularity == "full":
        if m.recompute_method is None:
            yield "--recompute-granularity full needs --recompute-method uniform or block."
        if m.recompute_num_layers is not None and m.recompute_num_layers < 1:
            yield f"{number}: must be at least 1."
    elif m.recompute_granularity == "selective" and m.recompute_method is not None:
        method = f"--recompute-method {m.recompute_method}"
        yield f"{method} works with --recompute-granularity full only; use that, or drop it."
    elif m.recompute_granularity == "selective" and m.recompute_num_layers is not None:
        without = "--recompute-granularity selective, which concerns all layers"
        yield f"{number} does not go with {without}; drop it, or use full."


def _check_tensors(args: Args) -> Iterator[str]:
    """Tensors that would have too many elements."""
    m = args.model
    micro_batch = max(args.training.micro_batch_size or 1, 1)
    needed = (m.hidden_size, m.num_attention_heads, m.seq_length, m.make_vocab_size_divisible_by)
    if any(size is None or size < 1 for size in needed):
        return
    hidden = m.hidden_size
    heads = m.num_attention_heads
    vocabulary = m.padded_vocab_size or max(args.data.vocab_size or 1, m.make_vocab_size_divisible_by)
    widths = {
        "--ffn-hidden-size": 2 * (m.ffn_hidden_size or 4 * hidden),
        "--kv-channels": 3 * heads * (m.kv_channels or max(hidden // heads, 1)),
        "--max-position-embeddings": m.max_position_embeddings or 1,
        "--padded-vocab-size": vocabulary,
    }
    if args.latent.multi_latent_attention:
        widths |= _list_latent_widths(args.latent, heads)
    samples = f"--micro-batch-size {args.training.micro_batch_size} times --seq-length {m.seq_length}"
    for name, width in widths.items():
        for words, rows in ((f"--hidden-size {hidden}", hidden), (samples, micro_batch * m.seq_length)):
            if rows * width > MAX_ELEMENTS:
                needs = f"needs a tensor of {rows} x {width} numbers, by {name}, which no machine holds"
                yield f"{words} {needs}; lower one of them."
                return


def _check_window(args: Args) -> Iterator[str]:
    """Mistakes among windows of attention."""
    m = args.model
    if m.window_size is None:
        return
    shown = f"--window-size {m.window_size}"
    try:
        parse_window(m.window_size)
    except ValueError:
        yield f"{shown}: needs the number of tokens before and 0, since none after is attended to, such as 127,0."
    try:
        parse_window_layers(m.window_attn_skip_freq, m.num_layers or 1)
    except ValueError as error:
        yield f"--window-attn-skip-freq {m.window_attn_skip_freq}: {error}; correct it."


def _list_latent_widths(latent: LatentArgs, heads: int) -> dict[str, int]:
    """Columns of latent attention's tensors, by the flag that decides them."""
    own = latent.qk_head_dim
    rotated = latent.qk_pos_emb_head_dim
    return {
        "--q-lora-rank": latent.q_lora_rank or 0,
        "--kv-lora-rank": latent.kv_lora_rank + rotated,
        "--qk-pos-emb-head-dim": heads * rotated,
        "--v-head-dim": heads * latent.v_head_dim,
        "--qk-head-dim": heads * (own + max(rotated, latent.v_head_dim)),
    }


def _check_positions(args: Args) -> Iterator[str]:
    m = args.model
    positions = m.max_position_embeddings
    if not m.add_position_embedding and m.position_embedding_type not in ("rope", "yarn"):
        taken = "is taken with rope only, as in Megatron-LM"
        yield f"--no-position-embedding {taken}; write --position-embedding-type none instead."
        return
    learned = m.position_embedding_type == "learned_absolute"
    if learned and positions is None:
        yield "--max-position-embeddings is missing; give it --seq-length's value."
    elif learned and m.seq_length and positions and positions < m.seq_length:
        smaller = f"is smaller than --seq-length {m.seq_length}"
        yield f"--max-position-embeddings {positions} {smaller}; raise it to at least that."
    if m.position_embedding_type == "yarn":
        unsuitable = _find_unsuitable_for_yarn(m)
        if unsuitable is not None:
            whole = "--position-embedding-type yarn rotates whole heads, in halves, by its own factor"
            yield f"{unsuitable}: {whole}; drop one of them."
            return
    # latent attention has rules of its own
    if m.position_embedding_type in ("rope", "yarn") and not args.latent.multi_latent_attention:
        yield from _check_rotated_channels(m)


def _find_unsuitable_for_yarn(m: ModelArgs) -> str | None:
    """A flag of rotary embeddings that YaRN leaves no choice of; None if none is given."""
    flags = {
        f"--rotary-percent {m.rotary_percent:g}": m.rotary_percent != 1,
        "--rotary-interleaved": m.rotary_interleaved,
        "--rotary-seq-len-interpolation-factor": m.rotary_seq_len_interpolation_factor is not None,
    }
    return next((flag for flag, is_given in flags.items() if is_given), None)


def _check_rotated_channels(m: ModelArgs) -> Iterator[str]:
    """Channels of a head rotate in pairs."""
    heads = m.num_attention_heads or 0
    usual = m.hidden_size // heads if m.hidden_size and heads > 0 else 2
    width = m.kv_channels or usual
    rotated = int(width * m.rotary_percent)
    if width > 0 and (rotated < 2 or rotated % 2):
        yield (
            f"--rotary-percent {m.rotary_percent:g} rotates {rotated} of a head's {width} channels, but they rotate "
            "in pairs; change it, or --kv-channels."
        )


def _check_custom_model(args: Args) -> Iterator[str]:
    """Flags that --model rules out, as they are made for the built-in GPT."""
    m = args.model
    p = args.parallel
    given = {
        f"--tensor-model-parallel-size {p.tensor_model_parallel_size}": p.tensor_model_parallel_size > 1,
        f"--context-parallel-size {p.context_parallel_size}": p.context_parallel_size > 1,
        f"--pipeline-model-parallel-size {p.pipeline_model_parallel_size}": p.pipeline_model_parallel_size > 1,
        "--use-torch-fsdp2": p.use_torch_fsdp2,
        "--use-megatron-fsdp": p.use_megatron_fsdp and p.shards_weights,
        f"--recompute-granularity {m.recompute_granularity}": m.recompute_granularity,
        "--torch-compile layers": args.training.torch_compile == "layers",
        "--use-mup": m.use_mup,
        "--window-size": m.window_size is not None,
        f"--softmax-type {m.softmax_type}": m.softmax_type != "vanilla",
        "--optimizer muon": args.optimizer.optimizer == "muon",
        "--log-throughput": args.watch.log_throughput,
        "--decoupled-lr": args.optimizer.decoupled_lr is not None,
        "--ckpt-format torch": args.checkpoint.ckpt_format == "torch",
    }
    for flag in (flag for flag, is_given in given.items() if is_given and m.model is not None):
        remedy = "; give --use-distributed-optimizer instead" if "fsdp2" in flag else "; drop one of them"
        yield f"--model {m.model} and {flag} exclude each other: the latter knows the built-in GPT only{remedy}."
