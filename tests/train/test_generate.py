"""Generation: kept keys and values change nothing, prompts do not disturb each other, draws are those that were asked for."""

import json
import re
from dataclasses import replace

import pytest
import torch
from support.command_lines import plan
from support.convert_cases import EXACT, VOCABULARY, export, kept
from support.expert_variants import EXPERT_VARIANTS
from support.latent_variants import LATENT_VARIANTS
from support.launch import alone, flags, on_ranks, train, train_all
from support.megatron_folders import rewrite
from support.model_variants import VARIANTS, build
from support.wording import wording

from megatron_lite.checkpoint.megatron_file import write_megatron_file
from megatron_lite.checkpoint.write import write_alone
from megatron_lite.cli.main import main
from megatron_lite.generate import Generator, Sampling, draw, generate, load_generator
from megatron_lite.model.gpt import GPT
from megatron_lite.planner.inference import CACHE_BYTES, count_kv_cache_bytes

# what is dropped beyond a capacity depends on how many tokens there are
SHAPES = VARIANTS | {name: shape for name, shape in EXPERT_VARIANTS.items() if name != "capacity"} | LATENT_VARIANTS
SHAPES["muP"] = replace(VARIANTS["rope"], mup_width_mult=4.0, logits_scale=0.25, softmax_scale=0.125)
PROMPTS = [[5, 17, 3, 60, 2, 9, 33], [7], [11, 4, 90]]


def build_pair(variant: str) -> tuple[GPT, Generator]:
    """The model as training has it, and as generation has it, with the same weights."""
    whole = build(SHAPES[variant]).eval()
    model = Generator(SHAPES[variant]).eval()
    model.load_state_dict(whole.state_dict())
    return whole, model


@pytest.mark.parametrize("variant", SHAPES)
def test_greedy_text_is_what_the_whole_model_finds_most_probable(variant):
    whole, model = build_pair(variant)
    found = generate(model, PROMPTS, 6, Sampling(temperature=0.0), 100, None)
    for prompt, continuation in zip(PROMPTS, found.continuations, strict=True):
        assert len(continuation) == 6
        sequence = prompt + continuation
        logits_TV = whole(torch.tensor([sequence]))[0, :, :100]
        assert logits_TV.argmax(-1)[len(prompt) - 1 : -1].tolist() == continuation
    assert found.cache_tokens == max(map(len, PROMPTS)) + 6
    if model.shape.latent is None:  # the closed form predicts no latent attention
        expected = count_kv_cache_bytes(model.shape, len(PROMPTS), found.cache_tokens, CACHE_BYTES["fp32"])
        assert found.cache_bytes == expected


def test_logits_are_scaled_as_in_training():
    whole, model = build_pair("muP")
    tokens_BT = torch.tensor([PROMPTS[0]])
    model.reset(1, len(PROMPTS[0]))
    with torch.inference_mode():
        torch.testing.assert_close(model.advance(tokens_BT), whole(tokens_BT)[:, -1])


def test_experts_are_chosen_with_the_checkpoints_biases(tmp_path):
    stored = kept(EXPERT_VARIANTS["deepseek"])
    name = "model.decoder.layers.1.mlp.router.expert_bias"
    texts = []
    for bias in (0.0, 10.0):
        stored.tensors[name] = torch.zeros(8)
        stored.tensors[name][-4:] = bias
        write_alone(tmp_path / f"{bias}", stored.record, stored.tensors)
        model, _, _ = load_generator(tmp_path / f"{bias}", False, None, "cpu", print)
        assert torch.equal(model.get_submodule("decoder.layers.1.mlp.router").state.bias_E, stored.tensors[name])
        texts.append(generate(model, PROMPTS, 5, Sampling(temperature=0.0), VOCABULARY, None).continuations)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_the_text_is_the_same_from_every_kind_of_folder(tmp_path, family):
    stored = kept(EXACT[family])
    write_alone(tmp_path / "torch_dist", stored.record, stored.tensors)
    for name in ("torch", "Megatron-LM"):
        path = tmp_path / name / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        with open(path, "wb") as file:
            write_megatron_file(file, stored.record, stored.tensors, plan("").args)
        (tmp_path / name / "latest_checkpointed_iteration.txt").write_text("7")
    rewrite(path)
    export(stored, tmp_path / "hf")
    texts = []
    for is_hugging_face, name in ((False, "torch_dist"), (False, "torch"), (False, "Megatron-LM"), (True, "hf")):
        model, _, _ = load_generator(tmp_path / name, is_hugging_face, None, "cpu", print)
        found = generate(model, PROMPTS, 5, Sampling(seed=2, top_k=20), VOCABULARY, None)
        texts.append(found.continuations)
    assert texts == [texts[0]] * 4


@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_the_text_of_experts_and_windows_is_the_same_from_both_folders(tmp_path, family):
    stored = kept(EXACT[family])
    write_alone(tmp_path / "ours", stored.record, stored.tensors)
    export(stored, tmp_path / "hf")
    texts = []
    for is_hugging_face, name in ((False, "ours"), (True, "hf")):
        model, _, _ = load_generator(tmp_path / name, is_hugging_face, None, "cpu", print)
        texts.append(generate(model, PROMPTS, 5, Sampling(seed=2, top_k=20), VOCABULARY, None).continuations)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_model_that_ranks_split_speaks(tmp_path):
    words = "--train-iters 1 --save-interval 1 --make-vocab-size-divisible-by 64 --save"
    with alone():
        train(flags(words, tmp_path / "one"), tmp_path / "run")
    split = flags(words, tmp_path / "four", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    (tmp_path / "runs.json").write_text(json.dumps({"run_of_four": split}))
    on_ranks(train_all, tmp_path, str(tmp_path / "runs.json"), ranks=4)
    models = [load_generator(tmp_path / name, False, None, "cpu", print)[0].state_dict() for name in ("one", "four")]
    for name, weight in models[0].items():
        torch.testing.assert_close(
            models[1][name][: len(weight)], weight, atol=2e-2, rtol=0
        )  # more ranks, more padding


def test_a_prompt_is_continued_alike_in_any_company_and_ends_with_the_text():
    _, model = build_pair("qk_rmsnorm_rope")
    together = generate(model, PROMPTS, 8, Sampling(seed=5), 100, None).continuations
    heard = []
    alone_ = [
        generate(model, [prompt], 8, Sampling(seed=5 + row), 100, None, lambda at, ids: heard.append((at, *ids)))
        for row, prompt in enumerate(PROMPTS)
    ]
    assert [one.continuations[0] for one in alone_] == together
    assert heard[7] == (0, *together[0]) and len(heard) == 24
    end = together[0][3]
    stopped = generate(model, PROMPTS, 8, Sampling(seed=5), 100, end).continuations
    assert stopped[0] == together[0][: together[0].index(end)]


def test_draws_keep_to_the_most_probable():
    logits_BV = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]))

    def count(**asked) -> list[set[int]]:
        generators = [torch.Generator().manual_seed(row) for row in range(2)]
        drawn = [draw(logits_BV, Sampling(**asked), generators).tolist() for _ in range(200)]
        return [set(row) for row in zip(*drawn)]

    assert count() == [{0, 1, 2, 3}, {0, 1, 2, 3}]
    assert count(top_k=2) == [{0, 1}, {2, 3}]
    assert count(top_p=0.7) == [{0, 1}, {2, 3}]
    assert count(top_p=0.5) == count(top_k=1) == count(temperature=0.0) == [{0}, {3}]


def test_a_checkpoint_speaks(tmp_path, capsys):
    words = "--tokenizer-type ByteTokenizer --train-iters 2 --save-interval 2 --save"
    with alone():
        train(flags(words, tmp_path / "ckpt"), tmp_path / "run")
    load = ["generate", "--load", str(tmp_path / "ckpt"), "--cpu"]
    capsys.readouterr()
    assert main([*load, "--prompt", "To be", "--max-new-tokens", "8"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("To be") and shown.out.endswith("\n") and "\x1b" not in shown.out
    assert (
        "prefill 5 tokens at " in shown.err
        and "decode 8 tokens at " in shown.err
        and wording("train/on-cpu") in shown.err
    )
    assert main([*load, "--prompt", "To be", "or", "--max-new-tokens", "8", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert "To be" in shown.out and "\n\nor" in shown.out
    [cache] = re.findall(r"KV cache (.*): 2 x 13 tokens", shown.err)
    assert (
        main(["plan", *["--inference", "--batch", "2", "--context", "13"], *flags("--tokenizer-type ByteTokenizer")])
        == 0
    )
    assert f"KV cache: {cache} = " in capsys.readouterr().out
    for more, said in {
        "--max-new-tokens 40": "more than the model's 16 positions; give at most 11",
        "--max-new-tokens 0": "--max-new-tokens 0: must be at least 1",
        "--top-p 2": "--top-p 2.0: must be at least 0 and at most 1.",
        "--tokenizer-type NullTokenizer": "error: ",
    }.items():
        assert main([*load, "--prompt", "To be", *more.split()]) == 2
        assert said in capsys.readouterr().err
