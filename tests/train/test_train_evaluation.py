"""Which samples iterations and evaluations take: those of skipped iterations, of whole epochs, of micro-batches of their own size."""

import math
import re

import pytest
import torch
from support.launch import flags, losses, on_ranks, plan_of, quietly, steps, train, write_documents

from megatron_lite.data.build import DataSpec, build_datasets
from megatron_lite.data.loader import epoch_batches
from megatron_lite.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("process_group")

VALIDATION = re.compile(r"validation loss at (.+?) \| lm loss value: (\S+)")
EVERY_OTHER = "--train-iters 4 --eval-interval 2"
# where it is split, a document count that gives validation samples for every rank and micro-batch
DOCUMENTS = [50] * 24


def validations(out: str) -> dict[str, float]:
    """{where: loss} of the validation lines."""
    return {where: float(loss) for where, loss in VALIDATION.findall(out)}


# --- iterations whose batches are not trained on


LOADER = """
import numpy as np

def batches(split, *, consumed, micro_batch_size, seq_length, rank, num_ranks, seed):
    assert num_ranks == 1 and micro_batch_size == 1
    for sample in range(consumed, 1000):
        if {keeps}:
            yield np.random.default_rng(sample).integers(127, size=(1, seq_length + 1))
"""


def test_a_skipped_iteration_trains_on_nothing_and_uses_up_its_samples(tmp_path):
    for name, keeps in (("all", "True"), ("some", "not 8 <= sample < 12")):
        (tmp_path / f"{name}.py").write_text(LOADER.format(keeps=keeps))

    def run(name: str, *words: str) -> list[float]:
        loader = f"--dataloader-type external --external-dataloader {tmp_path / name.split()[0]}.py:batches"
        argv = [word for word in flags(loader, *words) if word != "--mock-data"]
        quietly([*argv, "--lr-decay-style", "constant"], tmp_path / name)
        return losses(tmp_path / name)

    without = run("some", "--train-iters 4")
    skipping = run("all", "--train-iters 5 --iterations-to-skip 3 9")
    assert skipping == without
    records = steps(tmp_path / "all")
    assert [record["iteration"] for record in records] == [1, 2, 4, 5]
    assert [record["consumed_samples"] for record in records] == [4, 8, 16, 20]
    assert run("all plain", "--train-iters 4") != without


def test_samples_of_skipped_iterations_outlive_a_checkpoint(tmp_path):
    common = flags("--train-iters 4 --lr-decay-style constant --iterations-to-skip 2 --log-interval 1")
    save = ["--save", str(tmp_path / "save")]
    quietly([*common, *save, "--exit-interval", "3"], tmp_path / "first")
    _, out = quietly([*common, *save, "--load", str(tmp_path / "save")], tmp_path / "rest")
    assert re.search(r"iteration +4/.*consumed samples: +16 \| skipped samples: +4 \|", out)
    quietly(common, tmp_path / "whole")
    assert losses(tmp_path / "first") + losses(tmp_path / "rest") == losses(tmp_path / "whole")


def test_iterations_count_from_1():
    with pytest.raises(ConfigError, match="--iterations-to-skip 0"):
        plan_of(flags("--iterations-to-skip 3 0"))


# --- evaluations


def test_ranks_take_all_samples_in_each_epoch():
    for samples, size, ranks in ((12, 2, 3), (13, 2, 3), (5, 4, 2), (2, 1, 3)):
        streams = [epoch_batches(samples, size, rank, ranks) for rank in range(ranks)]
        passes = math.ceil(math.ceil(samples / ranks) / size)
        for _ in range(2):
            taken = [next(stream) for _ in range(passes) for stream in streams]
            assert all(len(batch) == size for batch in taken)
            numbers = [number for batch in taken for number in batch]
            assert set(numbers) == set(range(samples))
            if samples % (size * ranks) == 0:
                assert len(numbers) == samples


def test_a_full_validation_is_the_mean_over_one_epoch(tmp_path):
    data = write_documents(tmp_path / "data", DOCUMENTS)
    argv = flags("--split 50,50,0 --lr 0 --full-validation", EVERY_OTHER, data=data)
    plan = plan_of(argv)
    samples = build_datasets(DataSpec(plan.args.data, (1, None, 0), 16, plan.args.training.seed, 128)).valid
    assert len(samples) == 38, "of 12 documents of 51 tokens"
    _, out = quietly(argv, tmp_path / "run")
    found = validations(out)
    assert len(found) == 3 and len(set(found.values())) == 1
    assert found["iteration 2"] == pytest.approx(_measure_loss(plan, samples), rel=1e-6)


def _measure_loss(plan, samples) -> float:
    """The mean loss of the untrained model."""
    from support.launch import EOD, build_bare

    from megatron_lite.train.step import BatchMaker, loss_and_tokens

    model, make = build_bare(plan).eval(), BatchMaker(plan.args.data, plan.layout, torch.device("cpu"), EOD)
    sums = [loss_and_tokens(model, make(torch.from_numpy(samples[i])[None])) for i in range(len(samples))]
    return sum(loss.item() for loss, _ in sums) / sum(tokens.item() for _, tokens in sums)


@pytest.mark.parametrize(
    ("words", "needle"),
    [("--mock-data", "--eval-iters"), ("--data-path 0.3 {0} 0.7 {0}", "without weights")],
)
def test_a_full_validation_needs_an_epoch(tmp_path, words, needle):
    data = write_documents(tmp_path / "data", DOCUMENTS)
    argv = [word for word in flags("--full-validation") if word != "--mock-data"]
    with pytest.raises(DataError, match=needle):
        quietly([*argv, *words.format(data).split()], tmp_path / "run")


def test_the_size_of_a_micro_batch_changes_no_evaluation(tmp_path):
    data = write_documents(tmp_path / "data", DOCUMENTS)
    found = []
    for size in (1, 2, 4):
        words = f"--split 50,50,0 --eval-iters 2 --eval-micro-batch-size {size} {EVERY_OTHER}"
        _, out = quietly(flags(words, data=data), tmp_path / f"run {size}")
        found.append(validations(out))
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])


def test_stages_of_a_pipeline_hand_on_micro_batches_of_both_sizes(tmp_path):
    data = write_documents(tmp_path / "data", DOCUMENTS)
    words = flags("--split 50,50,0 --eval-iters 2 --eval-micro-batch-size 2", EVERY_OTHER, data=data)
    _, one = quietly(words, tmp_path / "one")
    argv = [*words, "--pipeline-model-parallel-size", "2"]
    out = on_ranks(train_stages, tmp_path / "two", *argv)[-1]
    assert validations(out) == pytest.approx(validations(one)) and len(validations(one)) == 3
    assert losses(tmp_path / "two" / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def train_stages(world, *argv: str):
    from pathlib import Path

    train(list(argv), Path("run"), world)


def test_an_evaluation_has_whole_micro_batches():
    with pytest.raises(ConfigError, match=r"--eval-micro-batch-size 3.*give --eval-global-batch-size"):
        plan_of(flags("--eval-micro-batch-size 3"))
    plan = plan_of(flags("--eval-micro-batch-size 3 --eval-global-batch-size 6 --eval-iters 2"))
    assert plan.count_evaluation_passes(plan.evaluation_samples) == 4
