"""Checkpoints of mixtures of experts: of Megatron-Core and back, and from one layout of experts to another."""

import contextlib
import io
import json

import pytest
import torch
from layout_table import DEEPSEEK, EXPERTS, LAYOUTS, TRAIN
from support.expert_variants import EXPERT_VARIANTS
from support.launch import alone, checkpoint, flags, losses, on_ranks, same, train, train_all
from support.megatron_core import Ours, Theirs, as_theirs, batches, plan_for, read_all, take_steps
from support.megatron_dist import load_theirs, save_ours, save_theirs
from support.model_variants import build

from megatron_lite.checkpoint.megatron_dist import DistFile

# stacked layers, and layers that are kept apart; with biases that balance experts in "deepseek"
VARIANTS = {
    "mixtral": "",
    "qwen": "",
    "deepseek": "--moe-layer-freq [0,1]",
    "every second layer": "--moe-layer-freq [1,0]",
}
RING = [
    "ep2, zero1",
    "ep2, tp2, sp, etp2",
    "ep2, pp2, chunks, zero1",
    "ep4, zero1",
    "ep2, zero3, 2 x 2",
    "ep2, cp2",
    "alone",
]


@pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_megatron_saved_is_read_by_name(variant, precision, tmp_path):
    plan, shape = plan_for(precision, VARIANTS[variant]), EXPERT_VARIANTS[variant]
    theirs = Theirs(plan, shape)
    theirs.model.load_state_dict(
        as_theirs(build(shape).state_dict(), dict(theirs.model.named_parameters())), strict=False
    )
    take_steps(theirs, range(3))
    file = DistFile(save_theirs(theirs, tmp_path / "iter_0000003", 3, {}))
    assert file.without_optimizer is None
    assert same(read_all(file), theirs.flat())
    assert file.record.model_shape.experts == shape.experts


@pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_megatron_loads_what_was_saved_here_and_goes_on(variant, precision, tmp_path):
    plan, shape = plan_for(precision, VARIANTS[variant]), EXPERT_VARIANTS[variant]
    ours, theirs = Ours(plan, shape), Theirs(plan, shape)
    take_steps(ours, range(3))
    save_ours(ours, tmp_path / "iter_0000003", 3)
    load_theirs(theirs, tmp_path / "iter_0000003")
    assert same(theirs.flat(), ours.flat())
    for batch in batches(shape, 2):
        assert ours.train(batch) == pytest.approx(theirs.train(batch), abs=2e-6 if precision == "fp32" else 2e-2)


def hand_on(folder, words: str):
    """One iteration on each layout of RING, each going on from the one before."""
    (folder / "alone").mkdir(parents=True)
    for layout in RING:
        layout_words, ranks = LAYOUTS.get(layout, ("", 1))
        saved = ("--exit-interval 1 --save-interval 1 --load", folder / "kept", "--save", folder / "kept")
        argv = flags(TRAIN, words, layout_words, "--train-iters 10", *saved)
        if ranks == 1:
            with alone(), contextlib.redirect_stdout(io.StringIO()):
                train(argv, folder / "run")
        else:
            cases = folder / "cases.json"
            cases.write_text(json.dumps({"run": argv}))
            on_ranks(train_all, folder, str(cases), ranks=ranks)


@pytest.mark.slow
def test_a_ring_of_layouts_is_one_training(tmp_path):
    words = f"{EXPERTS} {DEEPSEEK}"
    hand_on(tmp_path, words)
    with alone(), contextlib.redirect_stdout(io.StringIO()):
        length = len(RING)
        intervals = f"--train-iters 10 --exit-interval {length} --save-interval {length}"
        train(flags(TRAIN, words, intervals, "--save", tmp_path / "whole"), tmp_path / "alone")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=0, abs=2e-6)
    whole, handed_on = checkpoint(tmp_path / "whole", length), checkpoint(tmp_path / "kept", length)
    names = [name for name in whole if name != "record" and not name.startswith("random.")]
    assert any("expert_bias" in name for name in names)
    assert not [name for name in names if not torch.allclose(whole[name].float(), handed_on[name].float(), atol=0.02)]
