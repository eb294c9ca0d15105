"""Hugging Face to ours: our model computes transformers' logits from what was taken in."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch
from support.convert_cases import EXACT, FOLDED, LLAMA, Kept, export, kept, model_of, skip_without_twin, some_tokens
from support.expert_variants import EXPERT_VARIANTS
from support.latent_variants import LATENT_VARIANTS
from support.launch import ALONE, QUIET
from support.model_variants import PLAIN, VARIANTS

from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import resolve
from megatron_lite.config.shape import ModelShape
from megatron_lite.convert.families import model_flags
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
    "qwen3": ("Qwen3", SIZES | {"head_dim": 16}),
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
        for parameter in model.parameters():
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
    kept_keys = set(MODELS[name][1]) - {"rope_theta", "rope_scaling"}
    assert {key: getattr(back.config, key) for key in kept_keys} == {key: MODELS[name][1][key] for key in kept_keys}


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
    [(LLAMA, "/config.json: ", LLAMAS), (PLAIN, "/config.json: ", GPT2S), (LLAMA, "", OTHER_TENSORS)],
    ids=["llama", "gpt2", "tensors"],
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
