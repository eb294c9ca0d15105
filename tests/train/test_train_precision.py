"""Precisions, seeds and recomputation: what may change a loss curve and what must not."""

import itertools
from pathlib import Path

import pytest
from support.launch import DROPOUT, checkpoint, flags, losses, part, quietly, same, steps, write_documents
from support.optimizer_rules import Rules

from megatron_lite.model.gpt import TransformerLayer

pytestmark = pytest.mark.usefixtures("process_group")

LONG = "--train-iters 60 --global-batch-size 8 --micro-batch-size 4 --lr 3e-3 --lr-decay-style constant"
BF16, FP16 = 6e-3, 2e-3  # nats; measured over these 60 iterations: 1.3e-3 and 3.8e-4
SHORT = "--train-iters 8 --lr-decay-style constant"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_documents(tmp_path_factory.mktemp("data") / "text", [40, 25, 60, 33] * 100)


@pytest.fixture
def trained(tmp_path):
    """Train with the given words; returns (folder, losses)."""
    numbers = itertools.count()

    def go(*words, data=None):
        folder = tmp_path / str(next(numbers))
        quietly(flags(*words, data=data), folder)
        return folder, losses(folder)

    return go


def test_the_three_precisions_agree(trained, data):
    _, fp32 = trained(LONG, data=data)
    assert fp32[-1] < fp32[0] - 1, "it learns"
    for words, tolerance in (("--bf16", BF16), ("--fp16 --initial-loss-scale 4096", FP16)):
        _, curve = trained(LONG, words, data=data)
        worst = max(abs(a - b) for a, b in zip(fp32, curve))
        assert 0 < worst < tolerance, f"{words}: {worst}"


def test_a_run_from_2_to_the_32(trained):
    """Skipped iterations leave weights and schedule alone, consumed samples rise."""
    folder, _ = trained("--fp16 --train-iters 24 --lr-decay-style constant --lr-warmup-iters 4 --lr-decay-iters 40")
    records = steps(folder)
    skipped = [record["skipped"] for record in records]
    leading = skipped.index(False)
    assert leading > 8 and sum(skipped[leading:]) < 4
    rules, good = Rules(2.0**32, 1.0, 1000, 2), 0
    for iteration, record in enumerate(records, 1):
        assert record["loss_scale"] == rules.scale and record["consumed_samples"] == 4 * iteration
        rules.update(record["skipped"])
        good += not record["skipped"]
        assert record["next_lr"] == pytest.approx(min(1e-2, 1e-2 * good / 4))
        assert record["loss"] > 0 and record["skipped"] == (record["grad_norm"] is None)
    # the first overflow is tolerated, every further one halves
    assert records[leading]["loss_scale"] == 2.0 ** (32 - leading + 1)


def test_a_skipped_iteration_leaves_the_checkpoint_as_it_was(trained, tmp_path):
    trained("--fp16 --train-iters 4 --lr-decay-iters 40 --save-interval 2", *DROPOUT, "--save", tmp_path / "save")
    early, late = (checkpoint(tmp_path / "save", iteration) for iteration in (2, 4))
    for prefix in ("model.", "optimizer."):
        assert same(part(early, prefix), part(late, prefix))
    assert early["loss_scale.scale"] == 2.0**31 and late["loss_scale.scale"] == 2.0**29
    assert (early["record"].consumed, late["record"].consumed) == (8, 16)
    assert early["optimizer.good_samples"] == late["optimizer.good_samples"] == 0


def test_a_fixed_loss_scale_stays_and_gives_the_same_curve(trained):
    _, one = trained(SHORT, "--fp16 --loss-scale 256")
    folder, other = trained(SHORT, "--fp16 --loss-scale 4096")
    assert {record["loss_scale"] for record in steps(folder)} == {4096.0}
    assert one == pytest.approx(other, abs=2e-3)


@pytest.mark.parametrize("precision", ["", "--bf16", "--fp16 --initial-loss-scale 4096"])
def test_a_seed_repeats_bit_for_bit(trained, tmp_path, precision):
    curves = [trained(SHORT, precision, *DROPOUT, "--save", tmp_path / name)[1] for name in "ab"]
    assert same(*(checkpoint(tmp_path / name, 8) for name in "ab"))
    assert curves[0] == curves[1] != trained(SHORT, precision, *DROPOUT, "--seed 7")[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_does_not_disturb_training(trained, data, workers):
    common = (SHORT, *DROPOUT, f"--num-workers {workers} --split 80,10,10")
    _, undisturbed = trained(*common, data=data)
    _, evaluated = trained(*common, "--eval-interval 2 --eval-iters 2", data=data)
    assert undisturbed == evaluated


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_recomputation_changes_no_bit(trained, tmp_path, precision):
    common = ("--train-iters 5 --lr-decay-style constant", *DROPOUT, precision)
    _, plain = trained(*common, "--save", tmp_path / "plain")
    for method, layers in itertools.product(("uniform", "block"), (1,) if precision else (1, 2)):
        save = tmp_path / f"{method}{layers}"
        words = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}"
        assert trained(*common, words, "--save", save)[1] == plain
        assert same(checkpoint(tmp_path / "plain", 5), checkpoint(save, 5))


def test_recomputation_runs_layers_again(trained, monkeypatch):
    calls, forward = [], TransformerLayer.forward
    monkeypatch.setattr(TransformerLayer, "forward", lambda self, *inputs: calls.append(1) or forward(self, *inputs))
    counts = []
    full = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
    for words in ("", f"{full} uniform", f"{full} block"):
        calls.clear()
        trained("--train-iters 1 --global-batch-size 1", words)
        counts.append(len(calls))
    assert counts == [2, 4, 3]
