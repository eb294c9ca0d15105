"""Hugging Face to ours: our model computes transformers' logits from what was taken in."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.convert_cases import EXACT, FOLDED, LLAMA, Kept, export, kept, model_of, skip_without_twin, some_tokens
from support.expert_variants import EXPERT_VARIANTS
from support.latent_variants import LATENT_VARIANTS
from support.launch import ALONE, QUIET
from support.model_variants import PLAIN, VARIANTS

from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.model_size import count_parameters
from megatron_lite.config.plan import resolve
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.config_file import ConfigFile
from megatron_lite.convert.families import family_of_config, model_flags
from megatron_lite.convert.folders import import_hf
from megatron_lite.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="equality with Hugging Face needs transformers")

IDS = 125
GPT2 = {"vocab_size": IDS, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
SIZES = {
    "vocab_size": IDS,
    "max_position_embeddings": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "truncate": False}
SEVEN = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
}
LATENT_YARN = YARN | {"truncate": True, "mscale": 0.7, "mscale_all_dim": 0.4}
MODELS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2_erf_inner": ("GPT2", GPT2 | {"activation_function": "gelu", "n_inner": 80, "layer_norm_epsilon": 1e-3}),
    "gpt2_untied": ("GPT2", GPT2 | {"tie_word_embeddings": False}),
    "llama": ("Llama", SIZES),
    "llama_tied": ("Llama", SIZES | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_biases": ("Llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("Llama", SIZES | {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "llama_linear": ("Llama", SIZES | {"rope_theta": 1000.0, "rope_scaling": LINEAR}),
    "llama_3": ("Llama", SIZES | {"head_dim": 32, "rope_theta": 500000.0, "rope_scaling": LLAMA_3}),
    "llama_yarn": ("Llama", SIZES | {"head_dim": 16, "rope_scaling": YARN}),
    "llama_yarn_mscale": (
        "Llama",
        SIZES | {"head_dim": 16, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.2}},
    ),
    "llama_yarn_factor": ("Llama", SIZES | {"head_dim": 16, "rope_scaling": YARN | {"attention_factor": 1.25}}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2_window": (
        "Qwen2",
        SIZES | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 16}),
    "mistral": ("Mistral", SIZES | {"sliding_window": 3, "head_dim": 16}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "router_aux_loss_coef": 0.02}),
    "mixtral_window": ("Mixtral", SIZES | {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        SIZES | QWEN_EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "qkv_bias": False},
    ),
    "qwen2_moe_normalized": (
        "Qwen2Moe",
        SIZES | QWEN_EXPERTS | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 3},
    ),
    "qwen3_moe": ("Qwen3Moe", SIZES | QWEN_EXPERTS | {"head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe_window": (
        "Qwen3Moe",
        SIZES | QWEN_EXPERTS | {"head_dim": 8, "use_sliding_window": True, "sliding_window": 3},
    ),
    "deepseek_v2": ("DeepseekV2", SIZES | DEEPSEEK | {"q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek_v2_groups": (
        "DeepseekV2",
        SIZES | DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3},
    ),
    "deepseek_v3": ("DeepseekV3", SIZES | DEEPSEEK | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        SIZES | DEEPSEEK | {"n_group": 1, "topk_group": 1, "qk_rope_head_dim": 16, "rope_scaling": LATENT_YARN},
    ),
}


def theirs(name: str):
    """A random model of transformers whose every parameter has an effect that a test can see."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **settings, bos_token_id=None, eos_token_id=None, attn_implementation="eager"
    )
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    torch.manual_seed(3)
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in [*model.parameters(), *biases]:
            parameter.copy_(0.2 * torch.randn_like(parameter) + (parameter.dim() == 1))
    return model.eval()


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(some_tokens()).logits


@torch.no_grad()
def taken_logits(folder) -> torch.Tensor:
    return model_of(*import_hf(folder, 128))(some_tokens())[..., :IDS]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_equal_and_the_way_back_is_bitwise(name, tmp_path):
    skip_without_twin(transformers, name)
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    record, tensors = import_hf(tmp_path / "theirs", 128)
    assert record.shape["padded_vocab_size"] == 128 and record.vocab_size == IDS and record.optimizer is None
    expected = logits_of(model)
    torch.testing.assert_close(
        taken_logits(tmp_path / "theirs"), expected, rtol=0, atol=1e-5 * expected.abs().max().item()
    )

    export(Kept(record, tensors), tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(model)
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    # the last one says the same by mlp_only_layers
    kept_keys = set(MODELS[name][1]) - {"rope_theta", "rope_scaling", "decoder_sparse_step"}
    assert {key: getattr(back.config, key) for key in kept_keys} == {key: MODELS[name][1][key] for key in kept_keys}


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_experts_in_several_files_are_read(name, tmp_path):
    skip_without_twin(transformers, name)
    model = theirs(name)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size=20_000)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    one, several = (import_hf(tmp_path / folder, 128)[1] for folder in ("one", "several"))
    assert one.keys() == several.keys() and all(torch.equal(one[key], several[key]) for key in one)


@pytest.mark.parametrize("pieces", [False, True])
def test_bin_files_with_old_names_are_read(pieces, tmp_path):
    model = theirs("gpt2")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)}  # causal masks of early versions
    assert "lm_head.weight" in weights
    if pieces:
        names = list(weights)
        files = {name: f"pytorch_model-{1 + (i > 9)}-of-2.bin" for i, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({name: weights[name] for name in names if files[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(taken_logits(tmp_path), logits_of(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "wanted", "precision"),
    [
        (torch.bfloat16, None, "bf16"),
        (torch.float16, None, "fp16"),
        (torch.float32, None, "fp32"),
        (torch.bfloat16, "fp32", "fp32"),
        (torch.float32, "bf16", "bf16"),
    ],
)
def test_the_precision_is_the_files_or_the_one_asked_for(dtype, wanted, precision, tmp_path):
    theirs("qwen2").to(dtype).save_pretrained(tmp_path)
    record, tensors = import_hf(tmp_path, 128, wanted)
    assert record.precision == precision
    expected = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert {tensor.dtype for tensor in tensors.values()} == {expected}


def test_of_several_precisions_none_loses_digits(tmp_path):
    model = theirs("llama").to(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    record, tensors = import_hf(tmp_path, 128)
    assert record.precision == "fp32"
    assert torch.equal(tensors["model.decoder.final_layernorm.weight"], model.model.norm.weight)


@pytest.mark.parametrize("name", ["gpt2", "gpt2_untied", "llama"])
def test_padding_costs_at_most_its_share_of_the_probability(name, tmp_path):
    """Also in a model like GPT-2, whose logits all lie far below 0: here they are moved there by a shift of all rows."""
    model = theirs(name)
    output = model.get_output_embeddings().weight
    with torch.no_grad():
        hidden = model.base_model(some_tokens()).last_hidden_state.flatten(0, 1)
        output -= 2 * torch.linalg.lstsq(hidden, torch.full((len(hidden), 1), 20.0)).solution.T
    model.save_pretrained(tmp_path)
    record, tensors = import_hf(tmp_path, 64)
    with torch.no_grad():
        ours = model_of(record, tensors)(some_tokens())
    without, within = ours[..., :IDS].logsumexp(-1), ours.logsumexp(-1)
    assert ours.shape[-1] == 128
    assert (within - without).max() <= math.log(128 / IDS) + 1e-5


# config.json of published models, without keys that are not read, and their parameters in billions, by their model cards
PUBLISHED = {
    "Mistral-7B-v0.1": (7.24, SEVEN | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}),
    "Mixtral-8x7B-v0.1": (
        46.7,
        SEVEN
        | {
            "architectures": ["MixtralForCausalLM"],
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "rope_theta": 1e6,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
    ),
    "Qwen1.5-MoE-A2.7B": (
        14.3,
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rope_theta": 1e6,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": (
        30.5,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rope_scaling": None,
            "rope_theta": 1e6,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "DeepSeek-V2-Lite": (
        15.7,
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "attention_bias": False,
            "aux_loss_alpha": 0.001,
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 1408,
            "moe_layer_freq": 1,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "routed_scaling_factor": 1.0,
            "scoring_func": "softmax",
            "seq_aux": True,
            "topk_group": 1,
            "topk_method": "greedy",
            "v_head_dim": 128,
            "vocab_size": 102400,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_sizes_and_flags(name):
    billions, values = PUBLISHED[name]
    config = ConfigFile(Path(name), values)
    shape = family_of_config(config).read_shape(config, values["vocab_size"])
    assert count_parameters(shape) / 1e9 == pytest.approx(billions, rel=5e-3)
    usual = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
    line = read_command_line([*model_flags(shape), *usual.split(), *QUIET])
    check(line, ALONE)
    assert resolve(line.args, ALONE, 100).shape == shape


def test_the_flags_build_the_shape():
    """Through the trainer's own reading of a command line, for every switch of the model."""
    usual = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 99"
    shapes = VARIANTS | EXPERT_VARIANTS | LATENT_VARIANTS | EXACT | FOLDED
    for name, shape in {**shapes, "base": replace(LLAMA, rotary_base=1e6)}.items():
        if not shape.linear_bias and shape.activation == "gelu_tanh":
            continue  # no command line makes that: without biases GELU is the exact one
        line = read_command_line([*model_flags(shape), *usual.split(), *QUIET])
        check(line, ALONE)
        assert resolve(line.args, ALONE, 100).shape == shape, name
    assert "1000000" in model_flags(shape)


def written(tmp_path, shape: ModelShape = LLAMA):
    export(kept(shape), tmp_path)
    return tmp_path


LLAMAS = [  # what a config.json says instead: how the refusal begins
    ({"architectures": ["MambaForCausalLM"]}, 'architectures is ["MambaForCausalLM"]: known here are GPT2LMHeadMo'),
    (
        {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
        'architectures is ["GptOssForCausalLM"]: experts and routers have no biases here, their gate is SiLU',
    ),
    ({"architectures": [["LlamaForCausalLM"]]}, 'architectures is [["LlamaForCausalLM"]]: known here are '),
    ({"architectures": ...}, "architectures is null: known here are "),
    ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}: quantised weights cannot be train'),
    ({"hidden_size": ...}, "hidden_size is missing; give the folder of a whole model."),
    ({"num_hidden_layers": "two"}, 'num_hidden_layers is "two": must be a whole number above 0'),
    ({"vocab_size": 0}, "vocab_size is 0: must be a whole number above 0"),
    ({"rms_norm_eps": "small"}, 'rms_norm_eps is "small": must be a number'),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1: must be true or false"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu": the gate is SiLU here'),
    ({"use_sliding_window": True}, "use_sliding_window is true: attention always reaches back"),
    ({"layer_types": 5}, "layer_types is 5: "),
    ({"layer_types": ["full_attention", "sliding_attention"]}, 'layer_types is ["full_attention", "sliding_attent'),
    ({"mlp_bias": True}, "mlp_bias is true: attention and MLP both have biases here, or neither"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3: must divide num_attention_heads, which is 4"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, 'rope_scaling is {"rope_type": "dynamic", "factor":'),
    ({"rope_scaling": LLAMA_3 | {"low_freq_factor": 2.0}}, "low_freq_factor is 2.0: only Llama 3.1's own numbers"),
    ({"rope_parameters": {"type": "yarn"}}, "factor is missing"),
    ({"rope_scaling": YARN | {"attention_factor": 0.5}}, "attention_factor is 0.5: it is at least 1 here"),
    ({"rope_scaling": YARN | {"beta_fast": "x"}}, 'beta_fast is "x": must be a number'),
    ({"rope_scaling": YARN | {"factor": 1.0, "attention_factor": 1.5}}, "attention_factor is 1.5: it is 1 here where"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters is "),
    ({"rope_scaling": [2]}, "rope_scaling is [2]: all layers rotate alike here"),
    ({"rope_theta": 1234.5}, "rope_theta is 1234.5: must be a whole number"),
    ({"rope_scaling": {"type": "linear", "factor": 1.5}}, "factor is 1.5: must be a whole number"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5: heads of this architectu"),
    ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias is true: attention and MLP"),
]
MIXTRALS = [
    ({"num_local_experts": 1}, "num_experts_per_tok is 2: must be at most num_local_experts, which is 1"),
    ({"num_local_experts": 0}, "num_local_experts is 0: must be a whole number above 0"),
    ({"num_local_experts": 64}, "tells of 128 experts, and the folder holds 41 tensors; "),
    ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1: the one expert's share would always be 1"),
    ({"norm_topk_prob": False}, "norm_topk_prob is false: a token's shares always add up to 1 here"),
    ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1: tokens are not multiplied by noise here"),
    ({"router_aux_loss_coef": "much"}, 'router_aux_loss_coef is "much": must be a number'),
    ({"output_router_logits": 1}, "output_router_logits is 1: must be true or false"),
    ({"n_group": 4}, "n_group is 4: experts of this architecture have no such thing"),
    ({"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid": experts of this architecture have no such thing'),
    ({"n_shared_experts": 1}, "n_shared_experts is 1: "),
    ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8: this architecture has no shared"),
    ({"sliding_window": 0}, "sliding_window is 0: must be a whole number above 0"),
    ({"layer_types": ["sliding_attention"] * 2}, 'layer_types is ["sliding_attention", "sliding_attention"]: attent'),
    ({"attention_bias": True}, "attention_bias is true: attention and MLP both have biases here, or neither"),
    ({"num_hidden_layers": 200_000}, "num_hidden_layers is 200000: must be at most 100000"),
]
QWENS = [
    ({"norm_topk_prob": 0}, "norm_topk_prob is 0: must be true or false"),
    ({"norm_topk_prob": True, "num_experts_per_tok": 1}, "num_experts_per_tok is 1: the one expert's share would"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: must be a whole number above 0"),
    ({"mlp_only_layers": 1}, "mlp_only_layers is 1: must be a list of layers"),
    ({"mlp_only_layers": [True]}, "mlp_only_layers is [true]: must be a list of layers"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0: must be a whole number above 0"),
    ({"first_k_dense_replace": 1}, "first_k_dense_replace is 1: experts of this architecture have no such thing"),
    (
        {"use_sliding_window": True, "sliding_window": 4},
        "use_sliding_window is true: which layers that is needs layer_types",
    ),
    ({"layer_types": ["full_attention"]}, 'layer_types is ["full_attention"]: must have num_hidden_layers, 2, entr'),
    ({"layer_types": ["full_attention", "chunked"]}, 'layer_types is ["full_attention", "chunked"]: only full_atte'),
    ({"layer_types": ["sliding_attention"] * 2}, 'layer_types is ["sliding_attention", "sliding_attention"]: attent'),
]
DEEPSEEKS = [
    ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05: norms of latent vectors have 1e-06 there, and all norms the same"),
    ({"rope_interleave": False}, "rope_interleave is false: neighboring channels rotate together here"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, 'rope_scaling is {"type": "linear", "factor": 2}: only yarn '),
    ({"rope_scaling": LATENT_YARN | {"mscale": 0}}, "mscale_all_dim is 0.4: needs mscale, and no attention_factor"),
    ({"rope_scaling": LATENT_YARN | {"truncate": False}}, "truncate is false: the channels where blending begins"),
    ({"scoring_func": "softmax"}, 'scoring_func is "softmax": is another architecture\'s'),
    ({"topk_method": "greedy"}, 'topk_method is "greedy": only noaux_tc exist here'),
    ({"norm_topk_prob": False}, "norm_topk_prob is false: shares of several experts add up to 1 here"),
    ({"n_group": 3}, "n_group is 3: must divide n_routed_experts, which is 8"),
    ({"topk_group": 8}, "topk_group is 8: must be at most n_group, which is 4"),
    ({"topk_group": 4}, "topk_group is 4: groups are ranked by the best num_experts_per_tok / topk_group here, as in"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2: experts are in each layer from first_k_dense_replace on here"),
    ({"attention_bias": True}, "attention_bias is true: "),
    ({"n_shared_experts": 0}, "n_shared_experts is 0: must be a whole number above 0"),
]
# those of DeepSeek-V2 with 236B parameters, but for their number
LARGE_DEEPSEEKS = [
    (
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
        "topk_group is 2: groups are ranked by the best num_experts_per_tok / topk_group here, as in Megatron-Core, there by 1",
    ),
]
GPT2S = [
    ({"activation_function": "relu"}, 'activation_function is "relu": only gelu_new, gelu_pytorch_tanh, gelu exis'),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true: "),
    ({"add_cross_attention": True}, "add_cross_attention is true: "),
    ({"scale_attn_weights": False}, "scale_attn_weights is false: "),
    ({"n_head": 5}, "n_head is 5: must divide n_embd, which is 32"),
]
OTHER_TENSORS = [
    ({"num_hidden_layers": 3}, ": lacks 9 tensors such as model.layers.2.input_layernorm.weight; "),
    ({"num_hidden_layers": 1}, ": holds, beside what its config.json tells of, 9 tensors such as model.layers.1.i"),
    ({"intermediate_size": 64}, ": model.layers.0.mlp.gate_proj.weight has the shape [96, 32], and its config.jso"),
    ({"vocab_size": 121}, ": model.embed_tokens.weight has the shape [120, 32], and its config.json makes it [121"),
]


@pytest.mark.parametrize(
    ("shape", "place", "table"),
    [
        (LLAMA, "/config.json: ", LLAMAS),
        (PLAIN, "/config.json: ", GPT2S),
        (EXACT["mixtral"], "/config.json: ", MIXTRALS),
        (EXACT["qwen2_moe"], "/config.json: ", QWENS),
        (EXACT["deepseek_v3"], "/config.json: ", DEEPSEEKS),
        (EXACT["deepseek_v2"], "/config.json: ", LARGE_DEEPSEEKS),
        (LLAMA, "", OTHER_TENSORS),
    ],
    ids=["llama", "gpt2", "mixtral", "qwen2_moe", "deepseek_v3", "deepseek_v2", "tensors"],
)
def test_what_does_not_exist_here_or_is_not_the_configs_is_one_line(shape, place, table, tmp_path):
    path = written(tmp_path, shape) / "config.json"
    config = json.loads(path.read_text())
    for changes, said in table:
        path.write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not ...}))
        refused(tmp_path, f"--load-hf {tmp_path}{place}{said}")


def refused(folder, said: str):
    with pytest.raises(CheckpointError) as caught:
        import_hf(folder, 128)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_missing_or_damaged_config_and_missing_weights_are_one_line(tmp_path):
    path = tmp_path / "config.json"
    refused(tmp_path, f"--load-hf {path}: cannot be read (No such file or directory); give the folder ")
    path.write_text("[1]")
    refused(tmp_path, f"--load-hf {path}: is no JSON object; ")
    (written(tmp_path) / "model.safetensors").unlink()
    refused(tmp_path, f"--load-hf {tmp_path}: holds no model.safetensors, pytorch_model.bin, nor their index.json; ")


def test_a_bin_file_that_would_run_code_does_not(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    (written(tmp_path) / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": Trap()}, path)
    refused(tmp_path, f"--load-hf {path}: holds more than tensors or is damaged (UnpicklingError); ")
    assert not (tmp_path / "sprung").exists()
    for strange in ({"x": 1}, {1: torch.zeros(1)}, [1]):
        torch.save(strange, path)
        refused(tmp_path, f"--load-hf {path}: is no set of tensors; ")
    path.write_bytes(b"")
    refused(tmp_path, f"--load-hf {path}: holds more than tensors or is damaged (UnpicklingError); ")


def test_a_bin_file_that_asks_for_gigabytes(tmp_path, monkeypatch):
    class Bomb:
        def __reduce__(self):
            return (bytearray, (2**31,))  # which the kernel grants at once where nothing limits it

    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    (written(tmp_path) / "model.safetensors").unlink()
    path = tmp_path / "pytorch_model.bin"
    torch.save({"x": Bomb()}, path)
    refused(tmp_path, f"--load-hf {path}: holds more than tensors or is damaged (MemoryError); ")


def test_an_index_is_not_believed(tmp_path):
    export(kept(LLAMA), tmp_path, shard_bytes=30_000)
    path = tmp_path / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    for files in ({**good["weight_map"], "model.norm.weight": "../x.safetensors"}, ["a"], None):
        path.write_text(json.dumps({"weight_map": files}))
        refused(tmp_path, f"--load-hf {path}: its weight_map does not name files of that folder; ")
    first = good["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps({"weight_map": {**good["weight_map"], "model.norm.weight": first}}))
    refused(
        tmp_path, f"--load-hf {tmp_path}/{first}: lacks model.norm.weight, which model.safetensors.index.json says "
    )
    (tmp_path / first).unlink()
    refused(tmp_path, f"--load-hf {tmp_path}/{first}: cannot be read (No such file or directory)")
