"""--use-mup: scales, initial weights and learning rates are those that Megatron-LM's main branch sets (August 2026)."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.launch import build_bare, flags, losses, on_ranks, plan_of, quietly, train
from support.model_variants import PLAIN, tokens

from megatron_lite.checkpoint.find import open_checkpoint
from megatron_lite.config.parameter_groups import OF_WIDTH, OWN, USUAL, find_group
from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT, initialize
from megatron_lite.optim.optimizer import Optimizer

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
WIDTH = 4  # of hidden size 32 over a base of 8
MUP = "--use-mup --mup-base-hidden-size 8"
CONSTANT = "--lr-decay-style constant --min-lr 1e-3"


def no_phase(name):
    return nullcontext()


def model_of(shape) -> GPT:
    attend = choose_attention("unfused", shape, batch=2, device="cpu", dtype=torch.float32, masked=False)
    model = GPT(shape, attend)
    torch.manual_seed(3)
    initialize(dict(model.named_parameters()), shape)
    return model


def test_flags_become_megatrons_scales():
    shape = plan_of(flags(MUP)).shape
    assert (shape.mup_width_mult, shape.logits_scale, shape.softmax_scale) == (WIDTH, 1 / WIDTH, 1 / 8)
    own = plan_of(
        flags(MUP, "--mup-output-mult 3 --mup-embedding-mult 2 --mup-base-head-dim 16 --mup-attn-scale-power .5")
    )
    assert (own.shape.logits_scale, own.shape.embedding_scale) == (3, 2)
    assert own.shape.softmax_scale == pytest.approx(4 / math.sqrt(8))
    alone = plan_of(flags("--use-mup")).shape
    assert (alone.mup_width_mult, alone.logits_scale, alone.softmax_scale) == (1, 1, 1 / 8)
    assert plan_of(flags("")).shape.softmax_scale is None


def test_scales_are_where_megatron_has_them():
    """Scores, embeddings and logits, each against a model whose weights carry the same factor."""
    scaled = replace(PLAIN, softmax_scale=0.7, embedding_scale=1.5, logits_scale=0.25, tied_embeddings=False)
    ours, plain = model_of(scaled), model_of(replace(PLAIN, tied_embeddings=False))
    plain.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for embedding in (plain.embedding.word_embeddings, plain.embedding.position_embeddings):
            embedding.weight *= 1.5
        plain.output_layer.weight *= 0.25
        for layer in plain.decoder.layers:
            for parameter in (layer.self_attention.linear_qkv.weight, layer.self_attention.linear_qkv.bias):
                queries = parameter.unflatten(0, (PLAIN.num_query_groups, 3, PLAIN.kv_channels))[:, 0]
                queries *= 0.7 * math.sqrt(PLAIN.kv_channels)
    torch.testing.assert_close(ours(tokens(PLAIN)), plain(tokens(PLAIN)), rtol=1e-5, atol=1e-6)


def test_matrices_begin_smaller_and_tables_do_not():
    base = replace(PLAIN, tied_embeddings=False)
    usual = dict(model_of(base).named_parameters())
    for name, parameter in model_of(replace(base, mup_width_mult=float(WIDTH))).named_parameters():
        is_table = name.startswith(("embedding.", "output_layer."))
        factor = 1.0 if is_table or parameter.ndim == 1 else 1 / math.sqrt(WIDTH)
        torch.testing.assert_close(parameter, usual[name] * factor)


NAMES = {
    "embedding.word_embeddings.weight": 2,
    "embedding.position_embeddings.weight": 2,
    "output_layer.weight": 2,
    "decoder.layers.0.mlp.linear_fc1.weight": 2,
    "decoder.layers.0.mlp.linear_fc1.bias": 1,
    "decoder.final_layernorm.weight": 1,
}


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ("", [USUAL, USUAL, USUAL, OF_WIDTH, USUAL, USUAL]),
        ("--decoupled-lr 1", [OWN, USUAL, OWN, OF_WIDTH, USUAL, USUAL]),
        ("--optimizer sgd", [OF_WIDTH, OF_WIDTH, OF_WIDTH, USUAL, OF_WIDTH, OF_WIDTH]),
        ("--optimizer sgd --decoupled-lr 1", [OWN, OF_WIDTH, OWN, USUAL, OF_WIDTH, OF_WIDTH]),
    ],
)
def test_who_learns_at_which_rate(words, rates):
    o = plan_of(flags(MUP, words)).args.optimizer
    assert [find_group(name, dimensions, o, WIDTH).rate for name, dimensions in NAMES.items()] == rates
    assert all(find_group(name, dimensions, o).rate != OF_WIDTH for name, dimensions in NAMES.items())


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_step_is_that_of_groups_with_scaled_rates(kind):
    """Ten steps against torch's optimizer with Megatron's groups written out."""
    plan = plan_of(flags(MUP, f"--optimizer {kind} --lr 1e-2 --weight-decay 0.1 --clip-grad 0", CONSTANT))
    ours, theirs = build_bare(plan), build_bare(plan)
    names = [name for name, _ in ours.named_parameters()]
    optimizer = Optimizer(plan, list(ours.parameters()), CPU, names=names)
    groups = []
    for name, parameter in theirs.named_parameters():
        is_hidden = parameter.ndim > 1 and "embedding" not in name
        decay = 0.1 if parameter.ndim > 1 else 0.0
        if kind == "adam":
            factor = 1 / WIDTH if is_hidden else 1
            groups.append({"params": [parameter], "lr": 1e-2 * factor, "eps": 1e-8 * factor, "weight_decay": decay})
        else:
            groups.append({"params": [parameter], "lr": 1e-2 * (1 if is_hidden else WIDTH), "weight_decay": decay})
    reference = torch.optim.AdamW(groups) if kind == "adam" else torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    for step in range(10):
        inputs = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            model.zero_grad()
            model(inputs, inputs.roll(-1, 1)).mean().backward()
        optimizer.step([parameter.grad for parameter in ours.parameters()], 4, no_phase)
        reference.step()
        for name, mine, plain in zip(names, ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("words", ["", "--ckpt-format torch", "--ckpt-format torch --optimizer sgd"])
def test_a_resumed_run_is_an_uninterrupted_one_and_its_checkpoint_knows_the_scales(words, tmp_path):
    common = flags(MUP, CONSTANT, words, "--train-iters 4 --save-interval 2", "--save", tmp_path / "save")
    quietly(common, tmp_path / "whole")
    quietly([*common, "--load", str(tmp_path / "save"), "--ckpt-step", "2"], tmp_path / "rest")
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[2:]
    stored = open_checkpoint(tmp_path / "save" / "iter_0000004")
    assert stored.record.model_shape == plan_of(common).shape


def test_ranks_are_one_rank(tmp_path):
    words = flags(MUP, CONSTANT, "--train-iters 3 --make-vocab-size-divisible-by 64")
    quietly(words, tmp_path / "one")
    on_ranks(train_split, tmp_path / "two", *words)
    for kind in ("tensor", "stages"):
        assert losses(tmp_path / "two" / kind) == pytest.approx(losses(tmp_path / "one"), rel=2e-6)


def train_split(world, *argv: str):
    train([*argv, "--tensor-model-parallel-size", "2", "--use-distributed-optimizer"], Path("tensor"), world)
    train([*argv, "--pipeline-model-parallel-size", "2"], Path("stages"), world)
