"""Generation: kept keys and values change nothing, prompts do not disturb each other, draws are those that were asked for."""

import dataclasses

import pytest
import torch
from command_lines import plan
from launch import alone, flags, train

from megatron_lite.cli.main import main
from megatron_lite.generate import Generator, Sampling, draw, generate
from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT, initialize

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
PROMPTS = [[5, 17, 3, 60, 2, 9, 33], [7], [11, 4, 90]]


def build(words: str) -> tuple[GPT, Generator]:
    """The model as training has it, and as generation has it, with the same weights."""
    shape = plan(words).shape
    attend = choose_attention("local", shape, batch=1, device="cpu", dtype=torch.float32, masked=False)
    whole, model = GPT(shape, attend).eval(), Generator(shape).eval()
    torch.manual_seed(3)
    initialize(dict(whole.named_parameters()), dataclasses.replace(shape, init_method_std=0.3))
    model.load_state_dict(whole.state_dict())
    return whole, model


@pytest.mark.parametrize("words", ["", LLAMA, "--attention-softmax-in-fp32 --squared-relu"])
def test_greedy_text_is_what_the_whole_model_finds_most_probable(words):
    whole, model = build(words)
    found = generate(model, PROMPTS, 6, Sampling(temperature=0.0), 100, None)
    for prompt, continuation in zip(PROMPTS, found.continuations, strict=True):
        assert len(continuation) == 6
        sequence = prompt + continuation
        logits_TV = whole(torch.tensor([sequence]))[0, :, :100]
        assert logits_TV.argmax(-1)[len(prompt) - 1 : -1].tolist() == continuation
    shape = model.shape
    tokens = max(map(len, PROMPTS)) + 6
    assert found.cache_bytes == 2 * shape.num_layers * shape.num_query_groups * shape.kv_channels * tokens * 3 * 4


def test_a_prompt_is_continued_alike_in_any_company_and_ends_with_the_text():
    _, model = build(LLAMA)
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
    assert "5 tokens of prompts" in shown.err and "on the cpu" in shown.err
    assert main([*load, "--prompt", "To be", "or", "--max-new-tokens", "8", "--temperature", "0"]) == 0
    assert "To be" in (out := capsys.readouterr().out) and "\n\nor" in out
    for more, said in {
        "--max-new-tokens 40": "more than the model's 16 positions; give at most 11",
        "--max-new-tokens 0": "--max-new-tokens 0: must be at least 1",
        "--top-p 2": "--top-p 2.0: must be at least 0 and at most 1.",
        "--tokenizer-type NullTokenizer": "error: ",
    }.items():
        assert main([*load, "--prompt", "To be", *more.split()]) == 2
        assert said in capsys.readouterr().err
