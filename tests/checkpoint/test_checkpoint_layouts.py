"""Checkpoints of experts and of latent attention go from one layout to another. A file of its own: its process groups are not Megatron-Core's."""

import contextlib
import io
import json

import pytest
import torch
from layout_table import DEEPSEEK, EXPERTS, LATENT, LAYOUTS, TRAIN
from support.launch import alone, checkpoint, flags, losses, on_ranks, train, train_all

from megatron_lite.errors import CheckpointError

RING = [
    "ep2, zero1",
    "ep2, tp2, sp, etp2",
    "ep2, pp2, chunks, zero1",
    "ep4, zero1",
    "ep2, zero3, 2 x 2",
    "ep2, cp2",
    "alone",
]


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


def test_layouts_read_each_others_checkpoints(tmp_path):
    """Two iterations on two layouts are the first two of one rank; another model's flags are refused by name."""
    (tmp_path / "alone").mkdir()
    kept = ("--exit-interval 1 --save-interval 1 --load", tmp_path / "kept", "--save", tmp_path / "kept")
    for layout in ("tp2, sp", "pp2, zero bubble"):
        argv = flags(TRAIN, LATENT, LAYOUTS[layout][0], *kept)
        cases = tmp_path / "cases.json"
        cases.write_text(json.dumps({"run": [str(word) for word in argv]}))
        on_ranks(train_all, tmp_path, str(cases), ranks=2)
    with alone(), contextlib.redirect_stdout(io.StringIO()):
        train(flags(TRAIN, LATENT, "--exit-interval 2"), tmp_path / "alone")
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=0, abs=2e-6)
        with pytest.raises(CheckpointError, match="--kv-lora-rank is 8, the checkpoint's 16"):
            train(flags(TRAIN, LATENT, "--kv-lora-rank 8", *kept), tmp_path / "other")
        with pytest.raises(CheckpointError, match="lacks latent attention"):
            train(flags(TRAIN, *kept), tmp_path / "other")
