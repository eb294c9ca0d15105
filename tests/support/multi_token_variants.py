"""Small shapes that predict further tokens, shared by the tests that hold them against Megatron-Core."""

from dataclasses import replace

from megatron_lite.config.shape import ModelShape
from support.expert_variants import EXPERT_VARIANTS
from support.latent_variants import LATENT_VARIANTS
from support.model_variants import PLAIN, ROPE

LLAMA = {"activation": "swiglu", "normalization": "RMSNorm", "linear_bias": False, "qkv_bias": False}

MULTI_TOKEN_VARIANTS: dict[str, ModelShape] = {
    "one token": replace(PLAIN, mtp_num_layers=1),
    "two tokens": replace(PLAIN, mtp_num_layers=2, mtp_loss_scaling_factor=0.3),
    "untied": replace(PLAIN, mtp_num_layers=2, tied_embeddings=False, **ROPE, **LLAMA, num_query_groups=2),
    "experts": replace(next(iter(EXPERT_VARIANTS.values())), mtp_num_layers=1),
    "latent": replace(next(iter(LATENT_VARIANTS.values())), mtp_num_layers=1),
}
