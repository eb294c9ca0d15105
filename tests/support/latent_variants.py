"""Small models with latent attention that between them turn each of its switches."""

from dataclasses import replace

from megatron_lite.config.shape import LatentShape, ModelShape
from support.expert_variants import DEEPSEEK, DENSE, PLAIN_EXPERTS
from support.model_variants import PLAIN, YARN

PLAIN_LATENT = LatentShape(q_lora_rank=None, kv_lora_rank=12, qk_head_dim=10, qk_pos_emb_head_dim=6, v_head_dim=8)
WITH_QUERIES = replace(PLAIN_LATENT, q_lora_rank=20)
# rotary frequencies change with the position that they are for, and scores are sharpened
OF_YARN = replace(WITH_QUERIES, qk_pos_emb_head_dim=16, scaling_factor=4.0, mscale_all_dim=0.7)
YARN_POSITIONS = {name: value for name, value in YARN.items() if name.startswith("yarn")} | {"yarn_mscale_all_dim": 0.7}


def make_latent(latent: LatentShape, of: ModelShape = DENSE, **changes) -> ModelShape:
    """A small model with this attention. changes: to its other sizes."""
    whole = {"kv_channels": latent.head_width, "rotary_interleaved": True, "qk_layernorm": True, "qkv_bias": False}
    return replace(of, latent=latent, **whole | changes)


LATENT_VARIANTS = {
    "queries of hidden states": make_latent(PLAIN_LATENT),
    "queries of a latent vector": make_latent(WITH_QUERIES),
    "without norms": make_latent(WITH_QUERIES, qk_layernorm=False),
    "gpt": make_latent(WITH_QUERIES, of=PLAIN, rotary_percent=2 / 3),
    "wide values": make_latent(replace(WITH_QUERIES, v_head_dim=24)),
    "yarn": make_latent(OF_YARN, **YARN_POSITIONS),
    "sharpened without yarn": make_latent(
        replace(WITH_QUERIES, scaling_factor=4.0, mscale_all_dim=1.0), yarn_mscale_all_dim=1.0
    ),
    "deepseek": make_latent(OF_YARN, experts=DEEPSEEK, **YARN_POSITIONS),
    "experts": make_latent(PLAIN_LATENT, experts=replace(PLAIN_EXPERTS, balancing=(("aux_loss", 0.1),))),
}
