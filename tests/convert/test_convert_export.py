"""Ours to Hugging Face: transformers computes the same logits from the folder."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from support import convert_cases as cases
from support.convert_cases import EXACT, FOLDED, LLAMA, VOCABULARY, Kept, export, kept, our_logits
from support.expert_variants import DEEPSEEK, EXPERT_VARIANTS, PLAIN_EXPERTS, mix
from support.latent_variants import LATENT_VARIANTS
from support.model_variants import PLAIN, VARIANTS
from support.wording import wording

from megatron_lite.convert.folders import import_hf
from megatron_lite.convert.tokenizer_files import describe_no_tokenizer
from megatron_lite.convert.weights_folder import SafetensorsFile
from megatron_lite.errors import CheckpointError, ConfigError, UserError

transformers = pytest.importorskip("transformers", reason="equality with Hugging Face needs transformers")


@torch.no_grad()
def their_logits(folder) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    return model.eval()(cases.some_tokens()).logits


@pytest.mark.parametrize("name", [*EXACT, *FOLDED])
def test_logits_are_equal(name, tmp_path):
    cases.skip_without_twin(transformers, name)
    stored = kept((EXACT | FOLDED)[name])
    export(stored, tmp_path)
    ours, theirs = our_logits(stored), their_logits(tmp_path)
    assert theirs.shape[-1] == VOCABULARY
    difference = (ours - theirs).abs().max().item()
    print(f"{name}: {difference:.1e} of {ours.abs().max():.1f}")
    assert difference < 2e-6 * ours.abs().max()


@pytest.mark.parametrize("name", EXACT)
def test_there_and_back_is_bitwise_the_same(name, tmp_path):
    stored = kept(EXACT[name])
    export(stored, tmp_path)
    record, tensors = import_hf(tmp_path, divisible_by=128)
    assert record.vocab_size == VOCABULARY and record.precision == "fp32"
    same_shape = replace(EXACT[name], seq_length=PLAIN.max_position_embeddings)
    assert record.shape == dataclasses.asdict(same_shape)
    assert tensors.keys() == stored.tensors.keys()
    for key, tensor in tensors.items():
        rows = VOCABULARY if len(tensor) == 128 and "embed" in key or "output" in key else len(tensor)
        assert torch.equal(tensor[:rows], stored.tensors[key][:rows]), key
    again = tmp_path / "again"
    export(Kept(record, tensors), again)
    for file in ("model.safetensors", "config.json"):
        assert (again / file).read_bytes() == (tmp_path / file).read_bytes()


@pytest.mark.parametrize("name", FOLDED)
def test_what_is_folded_comes_back_as_the_same_function(name, tmp_path):
    stored = kept(FOLDED[name])
    said = export(stored, tmp_path)
    back = Kept(*import_hf(tmp_path, divisible_by=8))
    torch.testing.assert_close(our_logits(back), our_logits(stored), rtol=0, atol=2e-5)
    assert len(said) == 1 + any(word in name for word in ("bias", "interleaved"))
    assert said[0] == wording("convert/rows-of-padding-are-left", 8, 120)
    again = tmp_path / "again"
    export(back, again)
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("run", "wanted", "source"),
    [
        ("fp32", "fp32", "model.{}"),
        ("bf16", "bf16", "model.{}"),
        ("bf16", "fp32", "optimizer.{}.master"),
        ("bf16", "fp16", "optimizer.{}.master"),
        ("fp32", "bf16", "model.{}"),
    ],
)
def test_weights_are_the_runs_or_made_of_its_masters(run, wanted, source, tmp_path):
    stored = kept(PLAIN, run)
    stored.tensors["model.decoder.layers.0.mlp.linear_fc1.bias"] += 1  # so that weight and master differ visibly
    export(stored, tmp_path, wanted)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[wanted]
    for theirs, ours in (
        ("wpe.weight", "embedding.position_embeddings.weight"),
        ("h.0.mlp.c_fc.bias", "decoder.layers.0.mlp.linear_fc1.bias"),
    ):
        assert torch.equal(file.tensor(f"transformer.{theirs}"), stored.tensors[source.format(ours)].to(dtype))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_a_weight_beyond_fp16_is_said(tmp_path):
    stored = kept(PLAIN, "bf16")
    stored.tensors["optimizer.decoder.layers.1.mlp.linear_fc2.bias.master"][3] = -7e4
    with pytest.raises(
        UserError,
        match=r"^--dtype fp16: transformer.h.1.mlp.c_proj.bias holds 7e\+04, beyond fp16's "
        "65504; use bf16 or fp32.$",
    ):
        export(stored, tmp_path, "fp16")


@pytest.mark.parametrize(
    ("stated", "tokenizers", "asked", "kept_ids"),
    [
        (120, 0, None, 120),
        (120, 100, None, 120),
        (None, 0, None, 128),
        (None, 100, None, 100),
        (None, 0, 90, 90),
        (120, 0, 90, 90),
    ],
)
def test_whose_word_on_the_vocabulary_counts(stated, tokenizers, asked, kept_ids, tmp_path):
    tokenizer = replace(describe_no_tokenizer(), vocab_size=tokenizers)
    export(kept(PLAIN, vocab_size=stated), tmp_path, tokenizer=tokenizer, true_vocab_size=asked)
    assert SafetensorsFile(tmp_path / "model.safetensors").tensor("transformer.wte.weight").shape == (kept_ids, 32)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == kept_ids


def test_a_vocabulary_that_the_model_does_not_have_is_refused(tmp_path):
    for stated, tokenizers, asked, said in (
        (120, 121, None, "--vocab-file x: has 121 ids, and the model's vocabulary 120; give the files that it was"),
        (None, 129, None, "--vocab-file x: has 129 ids, and the model's vocabulary 128; "),
        (None, 0, 129, "--true-vocab-size 129: the model has 128 rows only; "),
    ):
        tokenizer = replace(describe_no_tokenizer(), flag="--vocab-file x", vocab_size=tokenizers)
        with pytest.raises(UserError) as caught:
            export(kept(PLAIN, vocab_size=stated), tmp_path, tokenizer=tokenizer, true_vocab_size=asked)
        assert str(caught.value).startswith(said)


def test_one_layer_at_a_time_is_read(tmp_path):
    stored = kept(replace(LLAMA, num_layers=6))
    export(stored, tmp_path)
    layer = sum(t.numel() for name, t in stored.tensors.items() if ".layers.3." in name)
    assert stored.largest == layer


def test_large_models_are_written_in_pieces_with_an_index(tmp_path):
    stored, whole, pieces = kept(LLAMA), tmp_path / "whole", tmp_path / "pieces"
    export(stored, whole)
    told = []
    export(stored, pieces, shard_bytes=30_000, progress=lambda done, total: told.append((done, total)))
    assert told == [(i + 1, 21) for i in range(21)]
    files = sorted(path.name for path in pieces.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((pieces / name).stat().st_size < 30_000 + 4096 for name in files)
    index = json.loads((pieces / "model.safetensors.index.json").read_text())
    one = SafetensorsFile(whole / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(one.tensor(name).nbytes for name in one.names)
    assert torch.equal(their_logits(whole), their_logits(pieces))
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(import_hf(whole, 128)[1].values(), import_hf(pieces, 128)[1].values())
    )


def test_old_and_new_spellings_of_the_rotation_are_read_alike(tmp_path):
    export(kept(EXACT["llama_interpolated"]), tmp_path)
    written = transformers.AutoConfig.from_pretrained(tmp_path)
    written.save_pretrained(tmp_path)
    shape = import_hf(tmp_path, 128)[0].shape
    assert (shape["rotary_base"], shape["rotary_seq_len_interpolation_factor"]) == (10000.0, 4.0)


NO_TWIN = [
    (replace(PLAIN, activation="squared_relu"), "--squared-relu: Hugging Face's GPT-2 have GELU; only"),
    (replace(PLAIN, activation="swiglu"), "--swiglu: Hugging Face's GPT-2 have GELU"),
    (replace(PLAIN, normalization="RMSNorm"), "--normalization RMSNorm: Hugging Face's GPT-2 have LayerNorm"),
    (replace(PLAIN, position_embedding="none"), "--position-embedding-type none: "),
    (replace(PLAIN, num_query_groups=2), "--num-query-groups 2: "),
    (replace(PLAIN, kv_channels=16), "--kv-channels 16: "),
    (replace(PLAIN, qk_layernorm=True), "--qk-layernorm: "),
    (
        replace(LLAMA, normalization="LayerNorm"),
        "--normalization LayerNorm: Hugging Face's Llama have ",
    ),
    (replace(LLAMA, activation="squared_relu"), "--squared-relu: "),
    (replace(LLAMA, activation="gelu_erf"), "GELU (no --swiglu): "),
    (replace(LLAMA, rotary_percent=0.5), "--rotary-percent 0.5: "),
    (replace(LLAMA, qk_layernorm=True, qkv_bias=True), "--qk-layernorm with biases: "),
    (replace(LLAMA, num_attention_heads=6), "--num-attention-heads 6: "),
    (EXPERT_VARIANTS["mixtral, gelu, tied"], "GELU (no --swiglu): "),
    (replace(PLAIN, experts=PLAIN_EXPERTS), "--num-experts 4: Hugging Face's GPT-2 have an MLP in each layer; "),
    (EXPERT_VARIANTS["every second layer"], "--moe-layer-freq: Hugging Face's Mixtral have experts in every layer; "),
    (EXPERT_VARIANTS["capacity"], "--moe-expert-capacity-factor 0.5: "),
    (EXPERT_VARIANTS["z loss"], "--moe-router-pre-softmax: "),
    (
        EXPERT_VARIANTS["deepseek"],
        "--moe-router-score-function sigmoid: ",
        "--moe-router-topk-scaling-factor 2.5: ",
        "--moe-router-group-topk 2: Hugging Face's Qwen2-MoE have no groups; ",
        "--moe-router-enable-expert-bias: ",
        "--moe-shared-expert-intermediate-size 32 without --moe-shared-expert-gate: ",
    ),
    (EXPERT_VARIANTS["sinkhorn, two experts"], "--moe-router-load-balancing-type sinkhorn: "),
    (EXPERT_VARIANTS["shares on input"], "--moe-router-pre-softmax: ", "--moe-apply-probs-on-input: "),
    (mix(replace(PLAIN_EXPERTS, forced_balance=True)), "--moe-router-force-load-balancing: "),
    (replace(EXACT["qwen2_moe"], qk_layernorm=True), "--qk-layernorm: Hugging Face's Qwen2-MoE have queries and keys "),
    (replace(EXACT["qwen3_moe"], qkv_bias=True), "--qk-layernorm with biases: "),
    (replace(EXACT["mixtral"], qkv_bias=True), "biases (no --disable-bias-linear): Hugging Face's Mixtral have none; "),
    (replace(EXACT["mixtral"], window=2, window_layers="10"), "--window-attn-skip-freq: "),
    (replace(LLAMA, window=2, window_layers="10"), "--window-attn-skip-freq: Hugging Face's Mistral have the window "),
    (LATENT_VARIANTS["without norms"], "--multi-latent-attention without --qk-layernorm: ", "--norm-epsilon 1e-05: "),
    (
        LATENT_VARIANTS["sharpened without yarn"],
        "--norm-epsilon 1e-05: Hugging Face's DeepSeek-V3 have 1e-06 in norms of latent vectors; ",
        "--mscale-all-dim 1 with --rope-type rope: ",
    ),
    (
        LATENT_VARIANTS["experts"],
        "--norm-epsilon 1e-05: ",
        "a softmax over a token's experts (no --moe-router-pre-softmax): Hugging Face's DeepSeek-V2 have --moe-router-p",
        "--num-experts without --moe-shared-expert-intermediate-size: ",
    ),
    (
        replace(EXACT["deepseek_v3"], experts=replace(DEEPSEEK, group_topk=4, shared_ffn_hidden_size=47)),
        "--moe-router-group-topk 4: Hugging Face's DeepSeek-V3 have groups that are ranked by their best 2 of experts",
        "--moe-shared-expert-intermediate-size 47: Hugging Face's DeepSeek-V3 have a multiple of one expert's width, 48",
    ),
    (
        replace(EXACT["deepseek_v3"], experts=replace(DEEPSEEK, layers=(True, False), shared_gate=True)),
        "--moe-layer-freq: Hugging Face's DeepSeek-V3 have experts in each layer from one on; ",
        "--moe-shared-expert-gate: ",
    ),
    (VARIANTS["window"], "--window-size: "),
]


def test_all_that_has_no_twin_is_named(tmp_path):
    several = replace(LLAMA, activation="gelu_tanh", normalization="LayerNorm", rotary_percent=0.5)
    for shape, *said in (*NO_TWIN, (several, "--normalization", "GELU", "--rotary-percent")):
        with pytest.raises(ConfigError) as caught:
            export(kept(shape), tmp_path)
        assert [line[: len(start)] for line, start in zip(caught.value.lines, said, strict=True)] == said
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_its_shape_is_refused(tmp_path):
    norm, other = "model.decoder.final_layernorm.bias", "model.decoder.layers.2.x"
    lacking, more, newer = kept(PLAIN), kept(PLAIN), kept(PLAIN)
    del lacking.tensors[norm]
    more.tensors[other] = torch.zeros(1)
    newer.record.shape["experts"] = 8
    for stored, said in (
        (lacking, f"lacks 1 weights such as {norm}; "),
        (more, f"holds, beside its model, 1 weights such as {other}; "),
        (newer, "its model cannot be read .*experts"),
    ):
        with pytest.raises(CheckpointError, match=f"^--load SAVE: {said}"):
            export(stored, tmp_path)


def test_what_of_experts_has_no_place_is_noted(tmp_path):
    losses = (("aux_loss", 0.25), ("seq_aux_loss", 0.5))
    experts = replace(PLAIN_EXPERTS, balancing=losses, z_loss_coeff=0.1, input_jitter=0.1, router_dtype="fp64")
    assert export(kept(replace(LLAMA, experts=experts), vocab_size=128), tmp_path) == [
        wording("convert/of-seq-aux-loss", "--moe-aux-loss-coeff", 0.5),
        wording("convert/has-no-place-there", "--moe-z-loss-coeff", 0.1),
        wording("convert/has-no-place-there", "--moe-input-jitter-eps", 0.1),
        wording("convert/fp-transformers-routes-tokens", "--moe-router-dtype"),
    ]
    assert json.loads((tmp_path / "config.json").read_text())["router_aux_loss_coef"] == 0.25
    deepseek = EXACT["deepseek_v3"]
    two_losses = replace(deepseek, experts=replace(deepseek.experts, balancing=losses))
    [note] = export(kept(two_losses, vocab_size=128), tmp_path)
    assert note.startswith(wording("convert/of-seq-aux-loss-has", "--moe-aux-loss-coeff", 0.5))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["aux_loss_alpha"], config["seq_aux"]) == (0.25, False)
    [note] = export(kept(replace(LLAMA, qkv_bias=True, window=2, window_layers="10"), vocab_size=128), tmp_path)
    assert note.startswith("  --window-attn-skip-freq: layer_types has it")


def test_a_bias_of_experts_keeps_its_precision(tmp_path):
    stored = kept(EXACT["deepseek_v3"], "bf16")
    export(stored, tmp_path)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    bias = stored.tensors["model.decoder.layers.1.mlp.router.expert_bias"]
    assert torch.equal(file.tensor("model.layers.1.mlp.gate.e_score_correction_bias"), bias)
    record, tensors = import_hf(tmp_path, divisible_by=128)
    assert record.precision == "bf16" and bias.dtype == torch.float32
    assert torch.equal(tensors["model.decoder.layers.1.mlp.router.expert_bias"], bias)
    assert tensors["model.decoder.layers.1.mlp.router.weight"].dtype == torch.bfloat16


def test_training_settings_stand_in_the_config_or_are_said_to_have_no_place(tmp_path):
    assert export(kept(replace(LLAMA, hidden_dropout=0.25), vocab_size=128), tmp_path / "llama") == [
        wording("convert/they-have-none-and", "--hidden-dropout", 0.25)
    ]
    export(kept(replace(PLAIN, hidden_dropout=0.25, attention_dropout=0.5, init_method_std=0.01)), tmp_path)
    shape = import_hf(tmp_path, 128)[0].shape
    assert (shape["hidden_dropout"], shape["attention_dropout"], shape["init_method_std"]) == (0.25, 0.5, 0.01)
