"""Checkpoints: a resumed run is the uninterrupted one, but for what the flags leave out."""

import functools
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.launch import (
    DROPOUT,
    EOD,
    VOCABULARY,
    build_bare,
    checkpoint,
    flags,
    losses,
    on_ranks,
    part,
    plan_of,
    quietly,
    same,
    steps,
    train_all,
    write_documents,
)

from megatron_lite.data.build import DataSpec, build_datasets
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import TRACKER_FILE
from megatron_lite.train.step import BatchMaker, loss_and_tokens

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")

WHOLE = (
    "--train-iters 8 --lr-decay-style constant --lr-warmup-iters 3 --lr-decay-iters 8 --eval-interval 3 --eval-iters 1"
)
PRECISIONS = {
    "fp32": "",
    "fp16": "--fp16 --initial-loss-scale 4194304 --loss-scale-window 2 --hysteresis 1",
    "sgd": "--optimizer sgd --dataloader-type cyclic",
    "async": "--async-save --bf16",
    "torch": "--ckpt-format torch --bf16",
}

# of a step, and its number in its run
MEASURED = {"ms", "cpu_ms", "core_wait_ms", "involuntary_switches", "phases_ms", "reduce_wait_ms", "step"}
MEASURED |= {"host_memory_bytes", "peak_memory_bytes"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoint of iteration 4 of an fp32 run of 8 iterations; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    quietly(flags(WHOLE, *DROPOUT, "--exit-interval 4 --save", folder / "save"), folder / "run")
    return folder / "save"


# --- resuming


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Whole runs on two ranks, which save at iteration 5 too, and the same from there."""
    folder = tmp_path_factory.mktemp("two")
    scenarios = {}
    for name, words in PRECISIONS.items():
        common = flags(WHOLE, *DROPOUT, words)
        whole, save = f"{name} save whole", f"{name} save"
        scenarios[f"{name} whole"] = [*common, "--save", whole, "--save-interval", "5"]
        scenarios[f"{name} rest"] = [*common, "--save", save, "--load", whole, "--ckpt-step", "5"]
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    on_ranks(train_all, folder, str(folder / "scenarios.json"))
    return folder


@pytest.mark.parametrize("name", PRECISIONS)
def test_resuming_is_not_interrupting(two_ranks, name):
    """Bitwise: weights, moments, masters, loss scale and its trackers, every rank's random states, losses."""
    whole, parts = checkpoint(two_ranks / f"{name} save whole", 8), checkpoint(two_ranks / f"{name} save", 8)
    assert whole.keys() == parts.keys()
    for key in whole:
        assert same(whole[key], parts[key]), key
    records = [steps(two_ranks / f"{name} {run}") for run in ("whole", "rest")]
    for record in itertools.chain(*records):
        for key in MEASURED & record.keys():
            del record[key]
    assert len(records[0]) == 8 and records[0][5:] == records[1]


def test_formats_hold_the_same(two_ranks):
    sharded, one_file = (checkpoint(two_ranks / f"{name} save", 8) for name in ("async", "torch"))
    assert sharded.keys() == one_file.keys() and all(same(sharded[key], one_file[key]) for key in sharded)
    files = {
        name: {path.name for path in (two_ranks / f"{name} save" / "iter_0000008").rglob("*") if path.is_file()}
        for name in ("async", "torch")
    }
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} < files["async"] and "model_optim_rng.pt" in files["torch"]


def test_ranks_write_about_as_much_each_and_random_states_of_their_own(two_ranks):
    sizes = [(two_ranks / "async save" / "iter_0000008" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.2 * min(sizes)
    saved = checkpoint(two_ranks / "fp32 save", 8)
    assert saved["record"].ranks == 2 and not same(saved["random.0.torch"], saved["random.1.torch"])


@pytest.fixture(scope="module")
def changing_ranks(tmp_path_factory) -> Path:
    """2 -> 1 -> 2 ranks, and 2 all the while; the global batch is the same."""
    folder = tmp_path_factory.mktemp("changing")
    common = flags(WHOLE, "--fp16 --initial-loss-scale 4096 --train-iters 9 --lr-decay-iters 9")

    def two(**runs: list[str]):
        scenarios = {name: [*common, *map(str, words)] for name, words in runs.items()}
        (folder / "scenarios.json").write_text(json.dumps(scenarios))
        on_ranks(train_all, folder, str(folder / "scenarios.json"))

    save, load = ["--save", folder / "save"], ["--load", folder / "save"]
    two(whole=["--save", folder / "save whole"], first=[*save, "--exit-interval", "3"])
    quietly([*common, *map(str, [*save, *load]), "--exit-interval", "6"], folder / "second")
    two(third=[*save, *load])
    return folder


@pytest.mark.slow
def test_the_number_of_ranks_may_change(changing_ranks):
    """Bitwise what does not depend on the order of sums; the data goes on unbroken; the rest to float rounding."""
    parts = [record for name in ("first", "second", "third") for record in steps(changing_ranks / name)]
    whole = steps(changing_ranks / "whole")
    assert [record["iteration"] for record in parts] == list(range(1, 10))
    for key in ("consumed_samples", "loss_scale", "next_lr", "skipped"):
        assert [record[key] for record in parts] == [record[key] for record in whole], key
    assert [r["loss"] for r in parts[:3]] == [r["loss"] for r in whole[:3]]
    assert [r["loss"] for r in parts] == pytest.approx([r["loss"] for r in whole], rel=2e-4)


def test_the_loss_scale_moved_on_both_sides_of_the_interruption(two_ranks):
    scales = [record["loss_scale"] for record in steps(two_ranks / "fp16 whole")]
    assert len(set(scales[:5])) > 1 and len(set(scales[5:])) > 1, scales


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
    records = steps(tmp_path / "all" / "resumed")  # what was trained on before is left out
    assert [(r["iteration"], r["consumed_samples"]) for r in records] == [(5, 20), (6, 24), (7, 28), (8, 32)]


def test_finetune_takes_weights_only(saved, tmp_path):
    finetuned = resumed(saved, tmp_path, "--finetune")
    records = steps(tmp_path / "resumed")
    assert [record["iteration"] for record in records] == list(range(1, 9)) and records[0]["consumed_samples"] == 4
    quietly(flags(WHOLE, *DROPOUT), tmp_path / "fresh")
    assert finetuned[0] != losses(tmp_path / "fresh")[0]
    quietly(flags(WHOLE, *DROPOUT, "--pretrained-checkpoint", saved), tmp_path / "pretrained")
    assert finetuned == losses(tmp_path / "pretrained")
    not_yet = ("--pretrained-checkpoint", saved, "--load", tmp_path / "none yet")
    quietly(flags(WHOLE, *DROPOUT, *not_yet), tmp_path / "both")
    assert finetuned == losses(tmp_path / "both")


@pytest.mark.parametrize("words", ["--finetune", "--no-load-optim"])
def test_weights_are_rounded_whether_or_not_the_optimizer_is_sharded(saved, tmp_path, words):
    """Megatron-LM reloads masters from the model's 16-bit weights; fp32 weights lose their last digits."""
    begun = {}
    for name, sharded in (("whole", ""), ("sharded", "--use-distributed-optimizer")):
        run = ["--bf16 --lr 0 --min-lr 0 --override-opt-param-scheduler", words, sharded, "--exit-interval 5 --save"]
        quietly(flags(WHOLE, *run, tmp_path / name, "--load", saved), tmp_path / "run")
        kept = checkpoint(tmp_path / name, 5)
        begun[name] = {key: kept[f"optimizer.{key}.master"] for key in part(kept, "model.")}
    assert same(begun["whole"], begun["sharded"])
    assert all(torch.equal(master, master.bfloat16().float()) for master in begun["sharded"].values())


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
@pytest.mark.parametrize("words", ["", "--finetune"])
def test_masters_get_the_stored_weights_before_rounding_on_request(saved, tmp_path, precision, words):
    frozen = f"{precision} --use-distributed-optimizer --lr 0 --min-lr 0 --override-opt-param-scheduler"
    run = [frozen, words, "--load-main-params-from-ckpt --no-load-optim --exit-interval 5"]
    quietly(flags(WHOLE, *run, "--save", tmp_path / "kept", "--load", saved), tmp_path / "run")
    before = part(checkpoint(saved, 4), "model.")
    kept = checkpoint(tmp_path / "kept", 5)
    half = torch.bfloat16 if precision == "--bf16" else torch.float16
    assert any(not torch.equal(weight, weight.to(half).float()) for weight in before.values())
    for name, weight in before.items():
        assert torch.equal(kept[f"optimizer.{name}.master"], weight)
        assert torch.equal(kept[f"model.{name}"], weight.to(half))


def test_another_padding_is_the_same_vocabulary(saved, tmp_path):
    """More rows begin as zeros, fewer leave only padding out, and the loss of what is stored does not change."""
    more = ["--padded-vocab-size 256 --exit-interval 5 --save", tmp_path / "more"]
    fewer = ["--exit-interval 6 --load", tmp_path / "more", "--save", tmp_path / "fewer"]
    _, said = quietly(flags(WHOLE, *more, "--load", saved), tmp_path / "a")
    rows = part(checkpoint(saved, 4), "model.")["embedding.word_embeddings.weight"].shape[0]
    assert f"padded to {rows:,} rows" in said and "to 256;" in said
    table = checkpoint(tmp_path / "more", 5)["model.embedding.word_embeddings.weight"]
    assert table.shape[0] == 256
    quietly(flags(WHOLE, *fewer), tmp_path / "b")
    assert checkpoint(tmp_path / "fewer", 6)["model.embedding.word_embeddings.weight"].shape[0] == rows
    with pytest.raises(CheckpointError, match="padded --vocab-size"):
        quietly(flags(WHOLE, "--vocab-size 200 --load", saved), tmp_path / "c")


def test_no_save_optim_and_no_save_rng(tmp_path):
    decaying = (WHOLE, "--lr-decay-style linear")
    leaving_out = "--exit-interval 4 --no-save-optim --no-save-rng --save"
    quietly(flags(*decaying, leaving_out, tmp_path / "save"), tmp_path / "a")
    state = checkpoint(tmp_path / "save", 4)
    assert state["record"].optimizer is None and state["record"].ranks == 0
    assert {name.partition(".")[0] for name in state} == {"record", "model"}
    load = (*decaying, "--load", tmp_path / "save")
    with pytest.raises(CheckpointError, match="its optimizer was not saved .--no-save-optim.*; add --no-load-optim"):
        quietly(flags(*load), tmp_path / "refused")
    with pytest.raises(CheckpointError, match="--no-save-rng and holds no random states; add --no-load-rng"):
        quietly(flags(*load, "--no-load-optim"), tmp_path / "refused")
    quietly(flags(*load, "--no-load-optim --no-load-rng"), tmp_path / "b")
    assert [record["iteration"] for record in steps(tmp_path / "b")] == [5, 6, 7, 8]
    rates = [[record["next_lr"] for record in steps(tmp_path / run)] for run in "ab"]
    assert rates[0] == rates[1] and rates[0][0] < rates[0][-1]  # without the optimizer the schedule starts over


FP16 = "--fp16 --initial-loss-scale 4096"


@pytest.fixture(scope="module")
def saved_in(tmp_path_factory):
    """The checkpoint of iteration 4 of a run in a precision, and the losses of its going on; made once."""

    @functools.cache
    def make(precision: str) -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("saved_in")
        quietly(flags(WHOLE, precision, "--save-interval 4 --save", folder / "save"), folder / "run")
        (folder / "save" / TRACKER_FILE).write_text("4")
        return folder / "save", losses(folder / "run")[4:]

    return make


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "--bf16"), ("", FP16), ("--bf16", ""), ("--bf16", FP16), (FP16, "--bf16"), (FP16, "--fp16 --loss-scale 512")],
)
def test_precision_may_change(saved_in, tmp_path, before, after):
    """Masters and moments pass whole; the losses are about those of before."""
    save, expected = saved_in(before)
    words = "--use-checkpoint-opt-param-scheduler --load"
    quietly(flags(WHOLE, after, words, save), tmp_path / "other")
    assert losses(tmp_path / "other") == pytest.approx(expected, abs=5e-3)
    if "--loss-scale" in after:
        assert {record["loss_scale"] for record in steps(tmp_path / "other")} == {512.0}
    quietly(flags(WHOLE, after, "--train-iters 4", words, save, "--save", tmp_path / "again"), tmp_path / "b")
    one, other = checkpoint(save, 4), checkpoint(tmp_path / "again", 4)
    names = list(part(one, "model."))
    exact, moments = [], []
    for saved in (one, other):
        exact.append({name: saved.get(f"optimizer.{name}.master", saved[f"model.{name}"]) for name in names})
        moments.append({name: saved[name] for name in saved if name.endswith((".exp_avg", ".exp_avg_sq", ".step"))})
    assert same(*exact) and all(tensor.dtype == torch.float32 for tensor in exact[0].values())
    assert same(*moments) and len(moments[0]) == 3 * len(names)
    rounded = part(other, "model.")
    assert all(torch.equal(rounded[name], exact[1][name].to(rounded[name].dtype)) for name in names)


# --- validation continues where Megatron's does


class MegatronsEvaluations:
    """Which validation samples Megatron-LM's pretrain() draws, and their loss with the weights of a checkpoint.

    Source: build_train_valid_test_data_loaders, get_train_valid_test_num_samples and evaluate of megatron/training/training.py.
    """

    def __init__(self, argv: list[str], iteration: int, consumed_valid_samples: int):
        self.plan = plan_of(argv)
        t, w, batch = self.plan.args.training, self.plan.args.watch, self.plan.batch.final
        if iteration > 0 and consumed_valid_samples == 0 and t.train_samples is None:
            consumed_valid_samples = (iteration // w.eval_interval) * w.eval_iters * batch
        self.next = 0 if t.skip_train else consumed_valid_samples
        self.per_evaluation = w.eval_iters * batch
        eval_iters = w.eval_iters if t.skip_train else (t.train_iters // w.eval_interval + 1) * w.eval_iters
        data = replace(self.plan.args.data, split="100,100,0")
        spec = DataSpec(data, (0, eval_iters * batch, 0), 16, t.seed, VOCABULARY + 1)
        self.samples = build_datasets(spec).valid

    def loss(self, saved: dict) -> float:
        """Of the next evaluation."""
        model = build_bare(self.plan).eval()
        model.load_state_dict({name: value for name, value in part(saved, "model.").items()}, strict=False)
        drawn = range(self.next, self.next + self.per_evaluation)
        self.next += self.per_evaluation
        raw_BT1 = torch.stack([torch.as_tensor(self.samples[index].astype("int64")) for index in drawn])
        loss_sum, tokens = loss_and_tokens(model, BatchMaker(self.plan.args.data, self.plan.layout, CPU, EOD)(raw_BT1))
        return float(loss_sum / tokens)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """(data, checkpoints) of a run that has evaluated on 16 samples when it is saved at iteration 4."""
    folder = tmp_path_factory.mktemp("evaluated")
    data = write_documents(folder / "data", range(20, 140))
    words = "--split 100,100,0 --eval-interval 2 --eval-iters 2 --exit-interval 4 --save"
    quietly(flags(WHOLE, words, folder / "save", data=data), folder / "run")
    return data, folder / "save"


@pytest.mark.parametrize("words", ["--skip-train", "--eval-interval 4", "--eval-iters 1"])
def test_validation_sees_the_samples_that_megatrons_sees(evaluated, tmp_path, words):
    data, save = evaluated
    argv = flags(WHOLE, "--split 100,100,0 --eval-interval 2 --eval-iters 2", words, data=data)
    more = ["--load", str(save), "--save", str(tmp_path / "save"), "--save-interval", "2"]
    _, out = quietly([*argv, *more], tmp_path / "run")
    lines = re.findall(r"validation loss at iteration (\d+).*?value: (\S+)", out)
    found = [(int(at), float(loss)) for at, loss in lines]
    theirs = MegatronsEvaluations(argv, 4, 16)
    expected = {"--skip-train": [4], "--eval-interval 4": [8, 8], "--eval-iters 1": [6, 8, 8]}
    assert [at for at, _ in found] == expected[words]
    for at, loss in found:  # at the end the next samples, even where an interval has just ended
        weights = checkpoint(save if at == 4 else tmp_path / "save", at)
        assert loss == pytest.approx(theirs.loss(weights), rel=2e-6), f"{words}: iteration {at}"
    if words != "--skip-train":
        assert checkpoint(tmp_path / "save", 8)["record"].consumed_valid_samples == 24
