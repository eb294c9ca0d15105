"""DeepSeek-V3's layers of further tokens in Hugging Face folders: taken in, computed as DeepSeek does, and given back."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.convert_cases import EXACT, Kept, export, kept, model_of
from support.multi_token_variants import MULTI_TOKEN_VARIANTS

from megatron_lite.convert.families import model_flags
from megatron_lite.convert.folders import import_hf
from megatron_lite.convert.weights_folder import SafetensorsFile
from megatron_lite.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers", reason="equality with Hugging Face needs transformers")

IDS = 125
LENGTH = 16
CONFIG = {
    "vocab_size": IDS,
    "max_position_embeddings": LENGTH,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
FIRST = "model.layers.2."  # what names of the first such layer begin with


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As DeepSeek's own: transformers' model, and behind its layers one that predicts the token after the next one."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("deepseek")
    config = transformers.DeepseekV3Config(**CONFIG, bos_token_id=None, eos_token_id=None, attn_implementation="eager")
    torch.manual_seed(5)
    model = transformers.DeepseekV3ForCausalLM(config)
    # one layer more gives the names and sizes of a layer, as transformers writes them
    larger = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**config.to_dict() | {"num_hidden_layers": 3})
    )
    larger.save_pretrained(path)
    of_layer = {name: one for name, one in load_file(path / "model.safetensors").items() if name.startswith(FIRST)}
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors") | of_layer
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{FIRST}{name}.weight"] = torch.ones(32)
    tensors[f"{FIRST}eh_proj.weight"] = torch.empty(32, 64)
    tensors = {name: 0.2 * torch.randn(one.shape) + (one.dim() == 1) for name, one in tensors.items()}
    tensors[f"{FIRST}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{FIRST}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"num_nextn_predict_layers": 1}))
    return path


@torch.no_grad()
def compute_theirs(folder, tokens, labels) -> torch.Tensor:
    """The loss of the further token, by transformers' modules in the order of DeepSeek's report (2.2)."""
    file = SafetensorsFile(folder / "model.safetensors")
    loaded = {"attn_implementation": "eager", "dtype": torch.float32}
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, **loaded).eval()
    deeper = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, num_hidden_layers=3, **loaded).eval()
    norm = type(model.model.norm)

    def normalize(name, hidden):
        module = norm(32, eps=model.config.rms_norm_eps)
        module.weight.copy_(file.tensor(f"{FIRST}{name}.weight"))
        return module(hidden)

    hidden = model.model(tokens).last_hidden_state
    further = F.pad(tokens[:, 1:], (0, 1))
    both = (normalize("enorm", model.model.embed_tokens(further)), normalize("hnorm", hidden))
    joined = F.linear(torch.cat(both, dim=-1), file.tensor(f"{FIRST}eh_proj.weight"))
    positions = torch.arange(LENGTH)[None]
    blocked = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    rotation = deeper.model.rotary_emb(joined, positions)
    out = deeper.model.layers[2](joined, attention_mask=blocked, position_ids=positions, position_embeddings=rotation)
    out = out[0] if isinstance(out, tuple) else out
    logits = model.lm_head(normalize("shared_head.norm", out))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_the_further_tokens_loss_is_deepseeks(folder):
    record, tensors = import_hf(folder, IDS)
    model = model_of(record, tensors)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(IDS, (2, 3, LENGTH), generator=generator)
    model.train()
    model(tokens, labels).mean().backward()
    expected = compute_theirs(folder, tokens, labels)
    torch.testing.assert_close(model.mtp.state.losses[0], expected, rtol=1e-5, atol=0)
    assert "--mtp-num-layers 1" in " ".join(model_flags(record.model_shape))


def test_the_way_back_is_bitwise(folder, tmp_path):
    export(Kept(*import_hf(folder, 128)), tmp_path)
    before, after = (SafetensorsFile(path / "model.safetensors") for path in (folder, tmp_path))
    assert set(before.names) == set(after.names)
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in before.names)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_several_such_layers_come_back(tmp_path):
    shape = replace(EXACT["deepseek_v3"], mtp_num_layers=2)
    stored = kept(shape)
    export(stored, tmp_path)
    record, tensors = import_hf(tmp_path, 128)
    assert record.shape["mtp_num_layers"] == 2
    written = {name: tensor for name, tensor in stored.tensors.items() if name.startswith("model.mtp.")}
    assert written and all(torch.equal(tensor, tensors[name]) for name, tensor in written.items())


def test_a_folder_that_transformers_has_saved_is_without(folder, tmp_path):
    transformers.DeepseekV3ForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"num_nextn_predict_layers": 1}))
    assert import_hf(tmp_path, 128)[0].shape["mtp_num_layers"] == 0


def test_a_copy_that_is_none_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = f"{FIRST}embed_tokens.weight"
    tensors[name] = tensors[name] + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=name):
        import_hf(tmp_path, 128)


@pytest.mark.parametrize("name", ["one token", "untied"])
def test_other_models_have_no_such_layers_there(name, tmp_path):
    with pytest.raises(ConfigError, match="--mtp-num-layers"):
        export(kept(MULTI_TOKEN_VARIANTS[name]), tmp_path)
