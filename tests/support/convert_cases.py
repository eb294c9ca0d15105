"""Checkpoints in memory and the shapes that have a Hugging Face twin, for the tests of the conversions."""

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.folders import Export
from megatron_lite.convert.tokenizer_files import describe_no_tokenizer
from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.experts import list_expert_biases, list_mixtures
from megatron_lite.model.gpt import GPT, list_weights
from support.expert_variants import DEEPSEEK, PLAIN_EXPERTS
from support.latent_variants import OF_YARN, PLAIN_LATENT, WITH_QUERIES, YARN_POSITIONS, make_latent
from support.model_variants import PLAIN, YARN, build, tokens

SHARED = replace(PLAIN_EXPERTS, pre_softmax=True, shared_ffn_hidden_size=40, shared_gate=True)
VOCABULARY = 120  # of 128 rows
LLAMA = replace(
    PLAIN,
    position_embedding="rope",
    normalization="RMSNorm",
    activation="swiglu",
    linear_bias=False,
    qkv_bias=False,
    tied_embeddings=False,
    num_query_groups=2,
    norm_epsilon=1e-6,
)
EXACT = {  # whose weights are the same numbers on both sides
    "gpt2": PLAIN,
    "gpt2_erf": replace(PLAIN, activation="gelu_erf"),
    "gpt2_untied": replace(PLAIN, tied_embeddings=False),
    "gpt2_epsilon": replace(PLAIN, norm_epsilon=1e-2),
    "llama": LLAMA,
    "llama_tied_one_group": replace(LLAMA, tied_embeddings=True, num_query_groups=1),
    "llama_no_groups": replace(LLAMA, num_query_groups=4),
    "llama_kv_channels": replace(LLAMA, kv_channels=16),
    "llama_biases": replace(LLAMA, linear_bias=True, qkv_bias=True),
    "llama_base": replace(LLAMA, rotary_base=500.0, norm_epsilon=1e-2),
    "llama_interpolated": replace(LLAMA, rotary_seq_len_interpolation_factor=4.0),
    "llama_scaled": replace(LLAMA, kv_channels=32, rotary_base=500000.0, rope_scaling_factor=8.0),
    "llama_yarn": replace(LLAMA, **YARN),
    "llama_yarn_fractions": replace(LLAMA, **YARN | {"yarn_round_to_int": False, "yarn_mscale": 1.0}),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_layernorm=True, kv_channels=16),
    "mistral": replace(LLAMA, window=3),
    "qwen2_window": replace(LLAMA, qkv_bias=True, window=3),
    "qwen3_late_window": replace(LLAMA, qk_layernorm=True, window=3, window_layers="01"),
    "mixtral": replace(LLAMA, experts=replace(PLAIN_EXPERTS, ffn_hidden_size=96, balancing=(("aux_loss", 0.02),))),
    "mixtral_window": replace(
        LLAMA, window=0, num_query_groups=1, experts=replace(PLAIN_EXPERTS, number=8, topk=3, ffn_hidden_size=96)
    ),
    "qwen2_moe": replace(LLAMA, qkv_bias=True, experts=SHARED),
    "qwen2_moe_dense_first": replace(
        LLAMA, window=4, window_layers="10", experts=replace(SHARED, pre_softmax=False, layers=(False, True))
    ),
    "qwen3_moe": replace(LLAMA, qk_layernorm=True, kv_channels=16, experts=replace(PLAIN_EXPERTS, number=8, topk=3)),
    "qwen3_moe_one": replace(
        LLAMA,
        qk_layernorm=True,
        window=5,
        experts=replace(PLAIN_EXPERTS, topk=1, pre_softmax=True, layers=(True, False)),
    ),
    "deepseek_v2": make_latent(
        PLAIN_LATENT,
        LLAMA,
        num_query_groups=4,
        experts=replace(
            PLAIN_EXPERTS, pre_softmax=True, shared_ffn_hidden_size=96, router_dtype="fp32", scaling_factor=1.5
        ),
    ),
    "deepseek_v2_groups": make_latent(
        WITH_QUERIES,
        LLAMA,
        num_query_groups=4,
        experts=replace(
            PLAIN_EXPERTS,
            number=8,
            pre_softmax=True,
            shared_ffn_hidden_size=48,
            router_dtype="fp32",
            groups=4,
            group_topk=2,
            balancing=(("aux_loss", 0.02),),
        ),
    ),
    "deepseek_v3": make_latent(
        OF_YARN,
        LLAMA,
        num_query_groups=4,
        experts=replace(DEEPSEEK, router_dtype="fp32", shared_ffn_hidden_size=48),
        **YARN_POSITIONS,
    ),
    "deepseek_v3_dense": make_latent(WITH_QUERIES, LLAMA, num_query_groups=4),
}
FOLDED = {  # whose twin says the same with other numbers
    "gpt2_1p": replace(PLAIN, layernorm_1p=True),
    "gpt2_no_biases": replace(PLAIN, activation="gelu_erf", linear_bias=False, qkv_bias=False),
    "gpt2_qkv_bias": replace(PLAIN, activation="gelu_erf", linear_bias=False),
    "gpt2_scaling": replace(PLAIN, query_key_layer_scaling=True, softmax_in_fp32=True),
    "llama_1p": replace(LLAMA, layernorm_1p=True),
    "llama_interleaved": replace(LLAMA, rotary_interleaved=True),
    "qwen3_interleaved_1p": replace(LLAMA, rotary_interleaved=True, qk_layernorm=True, layernorm_1p=True),
    "mixtral_interleaved_1p": replace(EXACT["mixtral"], rotary_interleaved=True, layernorm_1p=True),
    "deepseek_v3_without_bias": replace(
        EXACT["deepseek_v3"],
        layernorm_1p=True,
        experts=replace(EXACT["deepseek_v3"].experts, expert_bias=False, groups=None, group_topk=None),
    ),
}

YOUNG = {
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen3": "Qwen3Config",
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
}


def skip_without_twin(transformers, name: str):
    """Some models are younger than the oldest transformers that is supported."""
    for start, config in YOUNG.items():
        if name.startswith(start) and not hasattr(transformers, config):
            pytest.skip(f"transformers {transformers.__version__} has no {config}")


class Kept:
    """A checkpoint in memory. `largest` is the most numbers that were read at once."""

    def __init__(self, record: CheckpointRecord, tensors: dict):
        self.record, self.tensors, self.largest = record, tensors, 0

    def names(self):
        return set(self.tensors)

    def read_into(self, targets):
        self.largest = max(self.largest, sum(target.numel() for target in targets.values()))
        for name, target in targets.items():
            assert target.shape == self.tensors[name].shape
            target.copy_(self.tensors[name])


def kept(shape: ModelShape, precision: str = "fp32", vocab_size: int | None = VOCABULARY, seed: int = 0) -> Kept:
    """A random model of `shape` as its run would save it."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    tensors = {}
    for name, parameter in build(shape, seed=seed).named_parameters():
        tensors[f"model.{name}"] = parameter.detach().to(dtype)
        if precision != "fp32":
            tensors[f"optimizer.{name}.master"] = parameter.detach()
    generator = torch.Generator().manual_seed(seed)
    for name, size in list_weights(shape).items():
        if name.endswith("expert_bias"):
            tensors[f"model.{name}"] = 0.2 * torch.randn(size, generator=generator)
    return Kept(CheckpointRecord(7, 28, dataclasses.asdict(shape), precision, vocab_size), tensors)


def export(stored: Kept, folder, precision: str | None = None, **how):
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    Export(
        Path("SAVE"),
        stored,
        precision or stored.record.precision,
        how.pop("tokenizer", describe_no_tokenizer()),
        say=said.append,
        **how,
    ).write(folder)
    return said


def model_of(record: CheckpointRecord, tensors: dict) -> GPT:
    """The model that a checkpoint's weights make, in fp32."""
    shape = record.model_shape
    masked = shape.window is not None
    attend = choose_attention("unfused", shape, batch=2, device="cpu", dtype=torch.float32, masked=masked)
    model = GPT(shape, attend)
    weights = {name.removeprefix("model."): t.float() for name, t in tensors.items() if name.startswith("model.")}
    for name, bias in list_expert_biases(list_mixtures(model), "cpu").items():
        bias.copy_(weights.pop(name))
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def our_logits(stored: Kept) -> torch.Tensor:
    return model_of(stored.record, stored.tensors)(some_tokens())[..., :VOCABULARY]


def some_tokens() -> torch.Tensor:
    return tokens(PLAIN) % VOCABULARY
