"""--window-size: a token attends to so many before it, in the layers that --window-attn-skip-freq leaves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.launch import alone, checkpoint, flags, losses, on_ranks, plan_of, quietly, train
from support.model_variants import PLAIN, VARIANTS, build, tokens

from megatron_lite.checkpoint.find import open_checkpoint
from megatron_lite.config.expert_layers import parse_window_layers
from megatron_lite.errors import ConfigError
from megatron_lite.generate import Generator

ONE_LAYER = replace(PLAIN, num_layers=1, window=2)


@pytest.mark.parametrize("backend", ["unfused", "auto"])
def test_a_token_sees_no_further_back_than_the_window(backend):
    model = build(ONE_LAYER, backend, masked=True)
    inputs = tokens(PLAIN)
    changed = inputs.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 128
    differs = (model(inputs) - model(changed)).abs().amax(dim=(0, 2)) > 1e-6
    assert differs.tolist() == [4 <= position <= 6 for position in range(PLAIN.seq_length)]


def test_documents_narrow_a_window():
    model = build(ONE_LAYER, "auto", masked=True)
    inputs = tokens(PLAIN)
    documents = (torch.arange(PLAIN.seq_length) >= 5).long().expand_as(inputs)
    alone = model(inputs[:, 5:], positions_BT=torch.arange(5, PLAIN.seq_length).expand(2, -1))
    torch.testing.assert_close(model(inputs, documents_BT=documents)[:, 5:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "window_of_some_layers"])
def test_a_generator_keeps_the_window(name):
    shape = VARIANTS[name]
    whole, generator = build(shape, "auto", masked=True).eval(), Generator(shape).eval()
    generator.load_state_dict(whole.state_dict())
    inputs = tokens(shape)
    with torch.no_grad():
        generator.reset(2, shape.seq_length)
        found = [generator.advance(inputs[:, :5])]
        found += [generator.advance(inputs[:, i : i + 1]) for i in range(5, shape.seq_length)]
        expected = whole(inputs)[:, 4:]
    torch.testing.assert_close(torch.stack(found, dim=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [(None, "111111"), ("3", "110110"), ("1", "000000"), ("[1,0]*3", "101010"), ("([1]*2+[0])*2", "110110")],
)
def test_layers_with_a_window_are_megatrons(frequency, layers):
    assert parse_window_layers(frequency, 6) == tuple(one == "1" for one in layers)


def test_flags_become_a_shape():
    def shape_of(words):
        return plan_of(flags("--num-layers 4", words)).shape

    assert (shape_of("--window-size 127,0").window, shape_of("--window-size 127,0").window_layers) == (127, "")
    assert shape_of("--window-size 3,0 --window-attn-skip-freq 2").window_layers == "1010"
    assert shape_of("--window-size=-1,0").window is None and shape_of("").window is None
    for words in ("--window-size 3,1", "--window-size 3", "--window-size 3,0 --window-attn-skip-freq [1,0]"):
        with pytest.raises(ConfigError, match=r"--window-(size|attn-skip-freq)"):
            shape_of(words)


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_checkpoint_knows_the_window(form, tmp_path):
    common = flags("--window-size 3,0 --window-attn-skip-freq 2 --train-iters 4 --save-interval 2 --ckpt-format", form)
    with alone():
        quietly([*common, "--save", str(tmp_path / "save")], tmp_path / "whole")
        quietly([*common, "--load", str(tmp_path / "save"), "--ckpt-step", "2"], tmp_path / "rest")
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[2:]
    assert open_checkpoint(tmp_path / "save" / "iter_0000004").record.model_shape == plan_of(common).shape
    assert checkpoint(tmp_path / "save", 4)["record"].shape["window_layers"] == "10"


def test_ranks_are_one_rank(tmp_path):
    words = flags("--window-size 3,0 --window-attn-skip-freq 2 --train-iters 3 --make-vocab-size-divisible-by 64")
    with alone():
        quietly(words, tmp_path / "one")
    on_ranks(train_split, tmp_path / "two", *words)
    for kind in ("tensor", "stages", "context"):
        assert losses(tmp_path / "two" / kind) == pytest.approx(losses(tmp_path / "one"), rel=2e-6)


def train_split(world, *argv: str):
    train([*argv, "--tensor-model-parallel-size", "2", "--sequence-parallel"], Path("tensor"), world)
    train([*argv, "--pipeline-model-parallel-size", "2"], Path("stages"), world)
    train([*argv, "--context-parallel-size", "2"], Path("context"), world)
