"""Latent attention in both worlds: DeepSeek's tensors, and their part of config.json."""

from collections.abc import Iterator

from megatron_lite.config.shape import LatentShape, ModelShape
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.mappings import SAME, Link, lay_out_norm
from megatron_lite.convert.rotary_config import Rotation
from megatron_lite.model.rotary_frequencies import compute_score_factor

LATENT_NORM_EPSILON = 1e-6  # of the norms of latent vectors, which no key of config.json tells
# ours: theirs, of a layer's attention
MATRICES = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
NORMS = {"q_layernorm": "q_a_layernorm", "kv_layernorm": "kv_a_layernorm"}
OF_QUERIES = {"linear_q_down_proj", "linear_q_up_proj", "q_layernorm"}  # where queries have a latent vector


def list_objections(shape: ModelShape, latent: LatentShape) -> Iterator[tuple[str, str]]:
    """List what latent attention cannot be: a flag, and what it has instead.

    Args:
        shape: Shape of the model.
        latent: Shape of the model's attention.
    """
    if not shape.qk_layernorm:
        yield "--multi-latent-attention without --qk-layernorm", "norms of latent vectors"
    if shape.norm_epsilon != LATENT_NORM_EPSILON:
        yield f"--norm-epsilon {shape.norm_epsilon:g}", f"{LATENT_NORM_EPSILON:g} in norms of latent vectors"
    if shape.yarn_scaling_factor is None and compute_score_factor(latent) != 1:
        yield f"--mscale-all-dim {latent.mscale_all_dim:g} with --rope-type rope", "scores that only YaRN sharpens"


def list_links(ours: str, theirs: str, shape: ModelShape, latent: LatentShape) -> Iterator[Link]:
    """Parameters of one layer's attention.

    Args:
        ours: What names of the layer's parameters begin with here.
        theirs: Beginning of the layer's names there.
        shape: Shape of the model.
        latent: Shape of the model's attention.
    """
    absent = {"linear_q_proj"} if latent.q_lora_rank is not None else OF_QUERIES
    norm = lay_out_norm(shape)
    for table, layout in ((MATRICES, SAME), (NORMS, norm)):
        for name, their_name in table.items():
            if name not in absent:
                names = (f"{theirs}self_attn.{their_name}.weight",)
                yield Link(f"{ours}self_attention.{name}.weight", names, layout)


def build_latent(shape: ModelShape, latent: LatentShape) -> dict[str, object]:
    """Make config.json's part on latent attention.

    Args:
        shape: Shape of the model.
        latent: Shape of the model's attention.
    """
    values: dict[str, object] = {
        "num_key_value_heads": shape.num_attention_heads,
        "head_dim": latent.qk_pos_emb_head_dim,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_head_dim,
        "qk_rope_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_interleave": True,
    }
    if shape.experts is None:
        values["first_k_dense_replace"] = shape.num_layers
    return values


def read_latent(config: ConfigFile, rotation: Rotation) -> LatentShape:
    """Read the latent attention of a config.json.

    Args:
        config: Config of the model.
        rotation: Rotary frequencies of the model.

    Raises:
        CheckpointError: A value does not exist here.
    """
    config.refuse_unless("rope_interleave", (True, None), "neighboring channels rotate together here")
    if config.number("rms_norm_eps", LATENT_NORM_EPSILON) != LATENT_NORM_EPSILON:
        which = f"norms of latent vectors have {LATENT_NORM_EPSILON:g} there, and all norms the same here"
        raise config.wrong("rms_norm_eps", config.values["rms_norm_eps"], which)
    factor = rotation.get("yarn_scaling_factor")
    if factor is None and set(rotation) != {"rotary_base"}:
        raise config.wrong("rope_scaling", config.values.get("rope_scaling"), "only yarn exists for this attention")
    sharpened = rotation.get("yarn_mscale_all_dim", 0.0)
    if factor is not None:
        rope = config.values.get("rope_parameters") or config.values.get("rope_scaling")
        given = rope.get("mscale_all_dim") if isinstance(rope, dict) else None
        if (given or 0.0) != sharpened:
            raise config.wrong("mscale_all_dim", given, "needs mscale, and no attention_factor")
        if not rotation.get("yarn_round_to_int", True):
            raise config.wrong("truncate", False, "the channels where blending begins and ends are whole ones here")
    return LatentShape(
        q_lora_rank=config.whole("q_lora_rank", None),
        kv_lora_rank=config.whole("kv_lora_rank", 512),
        qk_head_dim=config.whole("qk_nope_head_dim", 128),
        qk_pos_emb_head_dim=config.whole("qk_rope_head_dim", 64),
        v_head_dim=config.whole("v_head_dim", 128),
        scaling_factor=1.0 if factor is None else factor,
        mscale_all_dim=sharpened,
    )
