"""The streams of a run: long enough, or refused before ranks meet."""

import contextlib
import io

import pytest
from support.launch import BASE, alone, flags, plan_of, quietly, write_documents
from support.wording import wording

from megatron_lite.errors import DataError
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.loop import Progress


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return [write_documents(folder / name, [40] * 60, seed) for seed, name in enumerate("ab")]


def opened(argv: list[str]) -> DataStreams:
    return DataStreams(plan_of(argv))


def test_data_sets_without_weights_are_not_repeated(corpora):
    argv = flags("--eval-iters 0 --train-iters 5000", data=corpora[0])
    place = argv.index(str(corpora[0]))
    both = [*argv[:place], *map(str, corpora), *argv[place + 1 :]]
    several = "several data sets without weights are read once, and their train share of"
    with pytest.raises(DataError, match=rf"^--data-path: {several} [\d,]+ samples is less than the 20,000 that"):
        opened(both)
    split = [*argv[: place - 1], "--train-data-path", *map(str, corpora), *argv[place + 1 :]]
    with pytest.raises(DataError, match=f"^--train-data-path: {several}"):
        opened(split)
    opened([*argv[:place], "1", str(corpora[0]), "1", str(corpora[1]), *argv[place + 1 :]])
    opened([*both, "--train-iters", "5"])


@pytest.mark.parametrize("words", ["--split 0,50,50", "--split 0,100,0"])
def test_evaluating_only_needs_no_training_data(corpora, tmp_path, words):
    with alone(), contextlib.redirect_stderr(io.StringIO()):
        _, out = quietly(flags("--skip-train --eval-iters 2", words, data=corpora[0]), tmp_path)
    assert "train data: none" in out and "validation loss at iteration 0 on validation set" in out


def test_a_split_that_leaves_nothing_to_evaluate_is_said(tmp_path):
    one = write_documents(tmp_path / "one", [4000], 1)  # as a text file that was not cut into documents
    with alone(), contextlib.redirect_stderr(io.StringIO()):
        _, out = quietly(flags("--train-iters 1 --eval-iters 1 --split 949,50,1", data=one), tmp_path / "run")
        _, quiet = quietly(flags("--train-iters 1 --eval-iters 0 --split 949,50,1", data=one), tmp_path / "quiet")
    assert wording("train/valid-data-none-leaves", "--split", "949,50,1") in out and "  test data: none (" in out
    assert "  valid data: none\n" in quiet


def test_words_of_the_data_flags_may_stand_in_files(tmp_path):
    a, b = (write_documents(tmp_path / name, [40] * 2000, seed) for seed, name in enumerate("ab"))
    (tmp_path / "words").write_text(f"0.3 {a}\n0.7\t{b}\n")
    (tmp_path / "splits.json").write_text(f'{{"train": [0.3, "{a}", "0.7", "{b}"], "valid": ["{b}"], "test": null}}')
    typed = ["--data-path", "0.3", str(a), "0.7", str(b)]
    split = ["--train-data-path", *typed[1:], "--valid-data-path", str(b)]
    for in_file, on_line in (
        (["--data-args-path", f"{tmp_path}/words"], typed),
        (["--per-split-data-args-path", f"{tmp_path}/splits.json"], split),
    ):
        feeds = [opened([*BASE, *words, "--eval-iters", "1"]) for words in (in_file, on_line)]
        streams = [feed.training(Progress(0, 0)) for feed in feeds]
        assert [next(streams[0]).tolist() for _ in range(20)] == [next(streams[1]).tolist() for _ in range(20)]
        assert [feed.has("test") for feed in feeds] == [on_line is typed] * 2


def test_resuming_with_other_flags_may_need_more_than_there_is(tmp_path):
    words = "--train-iters 8 --lr-decay-style constant --eval-iters 1"
    with alone():
        quietly(flags(words, "--eval-interval 2 --exit-interval 4 --save", tmp_path / "save"), tmp_path / "run")
        resume = [words, "--load", tmp_path / "save"]
        _, out = quietly(flags(*resume, "--eval-interval 8"), tmp_path / "sparse")
        few = "valid data: 8 samples are fewer than the 8 consumed so far and 8 to come"
        assert wording("train/after-last-one-evaluations", few) in out
        assert out.count("validation loss at iteration 8") == 3, "at the interval, at the end, and on the test set"
        few = "^train data: 8 samples are fewer than the 16 consumed so far and 4 to come; resume with the"
        smaller = "--eval-interval 8 --global-batch-size 1 --override-opt-param-scheduler"
        with pytest.raises(DataError, match=f"{few} --global-batch-size of the run that was saved, or add --finetune"):
            quietly(flags(*resume, smaller), tmp_path / "small")
