"""Small shapes that between them turn every switch of the model, shared by the model's tests."""

from dataclasses import replace

import torch

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT, initialize

PLAIN = ModelShape(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=96,
    seq_length=12,
    max_position_embeddings=16,
    padded_vocab_size=128,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
ROPE = {"position_embedding": "rope"}
# positions that the small samples go beyond, so that every part of the blending is seen
YARN = {
    "kv_channels": 16,
    "yarn_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 64,
    "yarn_beta_fast": 8.0,
    "yarn_mscale": 0.8,
}

VARIANTS = {
    "gelu_tanh": PLAIN,
    "gelu_erf": replace(PLAIN, activation="gelu_erf"),
    "untied": replace(PLAIN, tied_embeddings=False),
    "rope": replace(PLAIN, **ROPE),
    "rope_partial_interleaved": replace(PLAIN, **ROPE, rotary_percent=0.5, rotary_interleaved=True, rotary_base=500.0),
    "rope_interpolated": replace(PLAIN, **ROPE, rotary_seq_len_interpolation_factor=4.0),
    "rope_scaled": replace(PLAIN, **ROPE, kv_channels=32, rotary_base=500000.0, rope_scaling_factor=8.0),
    "yarn": replace(PLAIN, **ROPE, **YARN),
    "window": replace(PLAIN, window=3),
    "window_of_some_layers": replace(PLAIN, num_layers=4, window=2, window_layers="1101", **ROPE),
    "no_positions": replace(PLAIN, position_embedding="none"),
    "gqa_swiglu_rmsnorm": replace(PLAIN, num_query_groups=2, activation="swiglu", normalization="RMSNorm"),
    "four_layers": replace(PLAIN, num_layers=4),
    "one_query_group": replace(PLAIN, num_query_groups=1),
    "qk_layernorm": replace(PLAIN, qk_layernorm=True),
    "qk_rmsnorm_rope": replace(PLAIN, **ROPE, qk_layernorm=True, normalization="RMSNorm", num_query_groups=1),
    "squared_relu": replace(PLAIN, activation="squared_relu"),
    "no_bias": replace(PLAIN, linear_bias=False, qkv_bias=False),
    "qkv_bias_only": replace(PLAIN, linear_bias=False),
    "kv_channels": replace(PLAIN, kv_channels=16),
    "layernorm_1p": replace(PLAIN, layernorm_1p=True),
    "norm_epsilon": replace(PLAIN, norm_epsilon=1e-2),
    "layer_scaling": replace(PLAIN, query_key_layer_scaling=True),
    "softmax_in_fp32": replace(PLAIN, softmax_in_fp32=True),
}


def build(shape: ModelShape, backend: str = "unfused", masked: bool = False, seed: int = 0) -> GPT:
    """A model on the CPU whose every parameter, also biases and norms, has an effect that a test can see."""
    attend = choose_attention(backend, shape, batch=2, device="cpu", dtype=torch.float32, masked=masked)
    model = GPT(shape, attend)
    torch.manual_seed(seed)
    initialize(dict(model.named_parameters()), replace(shape, init_method_std=0.2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def tokens(shape: ModelShape, batch: int = 2, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.padded_vocab_size, (batch, shape.seq_length), generator=generator)
