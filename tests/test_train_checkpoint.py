"""Checkpoints: a resumed run is the uninterrupted one, but for what the flags leave out."""

import json
from pathlib import Path

import pytest
from launch import DROPOUT, alone, checkpoint, flags, losses, on_ranks, quietly, same, steps

from megatron_lite.errors import CheckpointError

WHOLE = "--train-iters 8 --lr-decay-style constant --lr-warmup-iters 3 --lr-decay-iters 8 --eval-interval 3 --eval-iters 1"
PRECISIONS = {"fp32": "", "fp16": "--fp16 --initial-loss-scale 4194304 --loss-scale-window 2 --hysteresis 1",
              "bf16": "--bf16", "sgd": "--optimizer sgd", "cyclic": "--dataloader-type cyclic"}


@pytest.fixture(scope="module", autouse=True)
def group():
    with alone():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoint of iteration 4 of an fp32 run of 8 iterations; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    quietly(flags(WHOLE, *DROPOUT, "--exit-interval 4 --save", folder / "save"), folder / "run")
    return folder / "save"


# --- resuming


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Whole runs on two ranks, and the same in two parts."""
    folder = tmp_path_factory.mktemp("two")
    scenarios = {}
    for name, words in PRECISIONS.items():
        common = flags(WHOLE, *DROPOUT, words)
        scenarios[f"{name} whole"] = [*common, "--save", f"{name} save whole"]
        scenarios[f"{name} first"] = [*common, "--save", f"{name} save", "--exit-interval", "5"]
        scenarios[f"{name} second"] = [*common, "--save", f"{name} save", "--load", f"{name} save"]
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    on_ranks("launch:train_all", folder, str(folder / "scenarios.json"))
    return folder


@pytest.mark.parametrize("name", PRECISIONS)
def test_resuming_is_not_interrupting(two_ranks, name):
    """Bitwise: weights, moments, masters, loss scale and its trackers, every rank's random states, losses."""
    whole, parts = checkpoint(two_ranks / f"{name} save whole", 8), checkpoint(two_ranks / f"{name} save", 8)
    assert whole.keys() == parts.keys()
    for key in whole:
        assert same(whole[key], parts[key]), key
    timeless = [[{k: v for k, v in record.items() if k not in ("ms", "phases_ms", "step")} for record in records]
                for records in (steps(two_ranks / f"{name} whole"),
                                steps(two_ranks / f"{name} first") + steps(two_ranks / f"{name} second"))]
    assert timeless[0] == timeless[1] and len(timeless[0]) == 8


def test_the_loss_scale_moved_on_both_sides_of_the_interruption(two_ranks):
    scales = [record["loss_scale"] for record in steps(two_ranks / "fp16 whole")]
    assert len(set(scales[:5])) > 1 and len(set(scales[5:])) > 1, scales


def test_ranks_save_random_states_of_their_own(two_ranks):
    one, other = checkpoint(two_ranks / "fp32 save", 8)["random_states"]
    assert not same(one["torch"], other["torch"])


def test_what_is_trained_on_is_left_out_after_resuming(saved, tmp_path):
    quietly(flags(WHOLE, *DROPOUT, "--load", saved), tmp_path / "rest")
    records = steps(tmp_path / "rest")
    assert [record["iteration"] for record in records] == [5, 6, 7, 8]
    assert [record["consumed_samples"] for record in records] == [20, 24, 28, 32]


# --- what is left out on request


def resumed(saved, tmp_path, *words) -> list[float]:
    quietly(flags(WHOLE, *DROPOUT, *words, "--load", saved), tmp_path / "resumed")
    return losses(tmp_path / "resumed")


def test_flags_that_leave_something_out(saved, tmp_path):
    everything = resumed(saved, tmp_path / "all")
    no_optimizer = resumed(saved, tmp_path / "optim", "--no-load-optim")
    no_random = resumed(saved, tmp_path / "rng", "--no-load-rng")
    assert no_optimizer[0] == everything[0] and no_optimizer[1:] != everything[1:]
    assert no_random[0] != everything[0] and no_random[0] == pytest.approx(everything[0], abs=0.2)


def test_finetune_takes_weights_only(saved, tmp_path):
    finetuned = resumed(saved, tmp_path, "--finetune")
    records = steps(tmp_path / "resumed")
    assert [record["iteration"] for record in records] == list(range(1, 9)) and records[0]["consumed_samples"] == 4
    quietly(flags(WHOLE, *DROPOUT), tmp_path / "fresh")
    assert finetuned[0] != losses(tmp_path / "fresh")[0]
    quietly(flags(WHOLE, *DROPOUT, "--pretrained-checkpoint", saved), tmp_path / "pretrained")
    assert finetuned == losses(tmp_path / "pretrained")
    quietly(flags(WHOLE, *DROPOUT, "--pretrained-checkpoint", saved, "--load", tmp_path / "none yet"), tmp_path / "both")
    assert finetuned == losses(tmp_path / "both")


def test_no_save_optim_and_no_save_rng(tmp_path):
    quietly(flags(WHOLE, "--exit-interval 4 --no-save-optim --no-save-rng --save", tmp_path / "save"), tmp_path / "a")
    state = checkpoint(tmp_path / "save", 4)
    assert state["optimizer"] is None and state["random_states"] is None
    load = (WHOLE, "--load", tmp_path / "save")
    with pytest.raises(CheckpointError, match="--no-save-optim and holds no optimizer; add --no-load-optim"):
        quietly(flags(*load), tmp_path / "refused")
    with pytest.raises(CheckpointError, match="--no-save-rng and holds no random states; add --no-load-rng"):
        quietly(flags(*load, "--no-load-optim"), tmp_path / "refused")
    quietly(flags(*load, "--no-load-optim --no-load-rng"), tmp_path / "b")
    assert [record["iteration"] for record in steps(tmp_path / "b")] == [5, 6, 7, 8]


def test_without_the_optimizer_the_schedule_starts_over(tmp_path):
    decaying = (WHOLE, "--lr-decay-style linear")
    quietly(flags(*decaying, "--exit-interval 4 --save", tmp_path / "save"), tmp_path / "a")
    quietly(flags(*decaying, "--no-load-optim --load", tmp_path / "save"), tmp_path / "b")
    rates = [[record["next_lr"] for record in steps(tmp_path / run)] for run in "ab"]
    assert rates[0] == rates[1] and rates[0][0] < rates[0][-1]


@pytest.mark.parametrize("before, after", [("", "--bf16"), ("", "--fp16 --initial-loss-scale 4096"), ("--bf16", ""),
                                           ("--fp16 --initial-loss-scale 4096", "--bf16"),
                                           ("--fp16 --initial-loss-scale 4096", "--fp16 --loss-scale 512")])
def test_precision_may_change(tmp_path, before, after):
    quietly(flags(WHOLE, before, "--exit-interval 4 --save", tmp_path / "save"), tmp_path / "a")
    quietly(flags(WHOLE, before, "--load", tmp_path / "save"), tmp_path / "same")
    quietly(flags(WHOLE, after, "--load", tmp_path / "save"), tmp_path / "other")
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "same"), abs=5e-3)
    if "--loss-scale" in after:
        assert {record["loss_scale"] for record in steps(tmp_path / "other")} == {512.0}
