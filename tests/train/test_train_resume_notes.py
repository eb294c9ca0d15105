"""A run that goes on with other data, or with flags that choose nothing, says so in a line each."""

import pytest
from support.launch import flags, plan_of, quietly, write_documents
from support.wording import wording

from megatron_lite.config.args import Args
from megatron_lite.train.resume_checks import compare_data, describe_idle_flags

pytestmark = pytest.mark.usefixtures("process_group")

LENGTH = "--train-iters 6 --lr-decay-iters 6 --seq-length 16"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two data sets, and a checkpoint of iteration 2 of a run on the first."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("first", "second")):
        write_documents(folder / name, [40] * 60, seed=number)
    words = flags(LENGTH, "--exit-interval 2 --save", folder / "save", data=folder / "first")
    quietly(words, folder / "run")
    return folder


def notes(data, *words, source="first") -> list[str]:
    """Of a run that goes on from the checkpoint."""
    given = flags(LENGTH, "--load", data / "save", *words, data=data / source if source else None)
    _, out = quietly(given, data / "again")
    assert "loaded" in out
    return [line for line in out.splitlines() if "note: --load" in line]


def test_the_same_data_is_not_mentioned(data):
    assert notes(data, "--split 9690,300,10") == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--seed 99", ["--seed was 1234 and is 99"]),
        ("--split 900,50,50", ["--split was 969,30,1 and is 900,50,50"]),
        ("--eod-mask-loss", ["--eod-mask-loss was False and is True"]),
        ("--dataloader-type cyclic", ["--dataloader-type was single and is cyclic"]),
        ("--seq-length 8", ["--seq-length was 16 and is 8"]),
        (
            "--global-batch-size 8 --override-opt-param-scheduler",
            ["--global-batch-size was 4 and is 8"],
        ),
        ("--seed 99 --seq-length 8", ["--seed", "--seq-length"]),
    ],
)
def test_each_difference_is_a_line(data, words, named):
    found = notes(data, words)
    assert len(found) == len(named) and all(text in line for text, line in zip(named, found)), found


def test_another_data_set_or_blend_is_a_line(data):
    [other] = notes(data, source="second")
    assert "first" in other and "second" in other and "8 samples" in other
    [mock] = notes(data, source=None)
    assert "--mock-data" in mock


def test_a_fresh_start_counts_from_the_first_sample(data):
    assert notes(data, "--finetune --seed 99", source="second") == []


def test_what_a_checkpoint_does_not_say_is_not_compared(data):
    assert list(compare_data({}, plan_of(flags(LENGTH)), 8)) == []


@pytest.mark.parametrize("flag", ["--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler"])
def test_a_choice_without_a_checkpoint_s_schedule_is_told(data, flag):
    [line] = notes(data, f"--finetune {flag}")
    assert wording("train/opt-param-scheduler-has") in line
    assert notes(data, flag) == []


def test_flags_that_were_not_given_are_not_told():
    assert list(describe_idle_flags(Args().optimizer, "x")) == []
