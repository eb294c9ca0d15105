"""Rules for the flags of latent attention."""

from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.world import World

NAME = "--multi-latent-attention"


def latent_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among the flags of latent attention."""
    m = args.model
    latent = args.latent
    if not latent.multi_latent_attention:
        if latent.rope_type == "yarn":
            yield f"--rope-type yarn needs {NAME}, as in Megatron-LM; give --position-embedding-type yarn instead."
        return
    turns_itself = "it turns channels of its own, by --rope-type"
    excluded = {
        f"--model {m.model}": (m.model is not None, "the former is not the built-in GPT"),
        "--group-query-attention": (m.group_query_attention, "all heads have keys of their own"),
        "--position-embedding-type yarn": (m.position_embedding_type == "yarn", turns_itself),
        "--use-rope-scaling": (m.use_rope_scaling, turns_itself),
        "--rotary-interleaved": (m.rotary_interleaved, "its channels turn as neighbors already"),
        "--rotary-seq-len-interpolation-factor": (
            m.rotary_seq_len_interpolation_factor is not None,
            turns_itself,
        ),
        "--window-size": (m.window_size is not None, "windows of it are not built"),
        f"--softmax-type {m.softmax_type}": (m.softmax_type != "vanilla", "offsets of its softmax are not built"),
        "--use-mup": (m.use_mup, "its rules for latent vectors are not built"),
        "--ckpt-format torch": (
            args.checkpoint.ckpt_format == "torch",
            "latent attention is saved as torch_dist",
        ),
    }
    for flag, (is_given, reason) in excluded.items():
        if is_given:
            yield f"{flag} and {NAME} exclude each other: {reason}; drop one of them."
    yield from _check_rotation(args)


def _check_rotation(args: Args) -> Iterator[str]:
    """Mistakes among the channels that rotate."""
    share = args.model.rotary_percent
    width = args.latent.qk_pos_emb_head_dim
    given = f"--rotary-percent {share:g}"
    if args.latent.rope_type != "rope" and share != 1:
        yield f"{given} with {NAME} needs --rope-type rope: YaRN turns all of its channels; change one of them."
        return
    rotated = int(width * share)
    if width > 0 and (rotated < 2 or rotated % 2):
        in_pairs = f"{rotated} channels rotate, but they do so in pairs"
        yield f"--qk-pos-emb-head-dim {width}: {in_pairs}; change it, or --rotary-percent."
