"""--dataloader-type external: a user's own loader feeds the run, and one line for each that is not as it should be."""

import contextlib
import io

import pytest
from support.launch import BASE, alone, losses, plan_of, quietly

from megatron_lite.config.world import World
from megatron_lite.errors import DataError, UserError
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.loop import Progress

LOADER = '''
"""Sample i is i, i + 1, ... below 100; so one can see which samples a batch has."""
import numpy as np, torch

def numbers(split, *, consumed, micro_batch_size, seq_length, rank, num_ranks, seed):
    with open(__file__ + ".asked", "a") as file:
        print(split, consumed, micro_batch_size, seq_length, rank, num_ranks, seed, file=file)
    return batches(split, consumed, micro_batch_size, seq_length, rank, num_ranks)

def batches(split, consumed, size, length, rank, num_ranks, start={"train": 0, "valid": 1000, "test": 2000}):
    while True:
        first = start[split] + consumed + rank * size
        yield torch.arange(first, first + size)[:, None].add(torch.arange(length + 1)) % 100
        consumed += size * num_ranks

def only_train(split, **place):
    return numbers(split, **place) if split == "train" else None

def empty_valid(split, **place):
    return only_train(split, **place) or iter(())

def uint16_arrays(split, **place):
    return (batch.numpy().astype("u2") for batch in numbers(split, **place))

def uint16_tensors(split, **place):
    return (batch.to(torch.uint16) for batch in numbers(split, **place))

BUFFER = torch.zeros(1, 17, dtype=torch.int64)

def one_buffer(split, **place):
    return (BUFFER.copy_(batch) for batch in numbers(split, **place))

def of(what):
    return lambda split, **place: what(*(place[name] for name in ("micro_batch_size", "seq_length")))

not_iterable = of(lambda size, length: 7)
nothing = of(lambda size, length: None)
lists = of(lambda size, length: [[1, 2]])
floats = of(lambda size, length: [torch.zeros(size, length + 1)])
halves = of(lambda size, length: [np.zeros((size, length + 1), "f2")])
short = of(lambda size, length: [torch.zeros(size, length, dtype=torch.int64)])
large = of(lambda size, length: [torch.full((size, length + 1), 128)])
negative = of(lambda size, length: [torch.full((size, length + 1), -1)])
later_large = of(lambda size, length: [torch.full((size, length + 1), 5), torch.full((size, length + 1), 128)])
three = of(lambda size, length: [torch.zeros(size, length + 1, dtype=torch.int32)] * 3)

def few_arguments(split, consumed):
    return []

def positional(split, consumed, micro_batch_size, seq_length, rank, num_ranks, seed, more):
    return []

def own_error(split, **place):
    raise RuntimeError("out of order")

number = 7
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "loader.py"
    path.write_text(LOADER)
    return path


def argv(file, function: str, words: str = "") -> list[str]:
    return [*BASE, "--dataloader-type", "external", "--external-dataloader", f"{file}:{function}", *words.split()]


def run(argv: list[str], folder) -> str:
    with alone(), contextlib.redirect_stderr(io.StringIO()):
        return quietly(argv, folder)[1]


def asked(file) -> list[str]:
    return (file.parent / "loader.py.asked").read_text().splitlines()


def first_tokens(stream, number: int) -> list[list[int]]:
    return [next(stream)[:, 0].tolist() for _ in range(number)]


def test_streams_begin_where_earlier_ones_ended(file):
    feed = DataStreams(plan_of(argv(file, "numbers", "--eval-iters 2 --eval-interval 3 --micro-batch-size 2 --seed 5")))
    assert feed.has("valid") and feed.has("test")
    assert first_tokens(feed.training(Progress(4, 16)), 2) == [[16, 17], [18, 19]]
    assert first_tokens(feed.validation(Progress(0, 0)), 2) == [[0, 1], [2, 3]]
    # two evaluations of 2 global batches of 4 samples lie before iteration 7
    assert first_tokens(feed.validation(Progress(7, 28)), 1) == [[16, 17]]
    assert first_tokens(feed.test(), 1) == [[0, 1]]
    assert asked(file) == ["valid 0 2 16 0 1 5", "test 0 2 16 0 1 5", "train 16 2 16 0 1 5", "valid 16 2 16 0 1 5"]


def test_a_resumed_run_is_the_uninterrupted_one(file, tmp_path):
    words = "--hidden-dropout 0.1 --eval-iters 1 --eval-interval 2 --lr 1e-3"
    whole = run(argv(file, "numbers", words), tmp_path / "whole")
    half = f"{words} --save {tmp_path}/save --load {tmp_path}/save --save-interval 3"
    run(argv(file, "numbers", f"{half} --exit-interval 3"), tmp_path / "half")
    resumed = run(argv(file, "numbers", half), tmp_path / "half2")
    assert losses(tmp_path / "whole")[3:] == losses(tmp_path / "half2") and len(losses(tmp_path / "half2")) == 3
    assert asked(file)[-1].startswith("train 12 ") and any(line.startswith("valid 4 ") for line in asked(file))
    ends = [[line for line in out.splitlines() if "validation loss at iteration 6" in line] for out in (whole, resumed)]
    assert ends[0] == ends[1] != []


@pytest.mark.parametrize("function", ["only_train", "empty_valid"])
def test_splits_may_be_missing(file, tmp_path, function):
    out = run(argv(file, function, "--eval-iters 1"), tmp_path / "run")
    assert "valid data: none" in out and "test data: none" in out and "validation loss" not in out
    assert len(losses(tmp_path / "run")) == 6


def test_arrays_of_any_integers_will_do(file, tmp_path):
    outcomes = []
    for function in ("numbers", "uint16_arrays", "uint16_tensors"):
        run(argv(file, function), tmp_path / function)
        outcomes.append(losses(tmp_path / function))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_splits_may_share_one_buffer(file):
    """The first batch of validation is read before training begins, and used long after."""
    seen = []
    for function in ("numbers", "one_buffer"):
        feed = DataStreams(plan_of(argv(file, function, "--eval-iters 1 --micro-batch-size 1")))
        training, validation = feed.training(Progress(0, 0)), feed.validation(Progress(0, 0))
        seen.append([first_tokens(stream, 3) for stream in (training, validation, feed.test())])
    assert seen[0] == seen[1]


def test_a_module_is_found_by_its_name(file, tmp_path, monkeypatch):
    (tmp_path / "own_batches.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    line = argv(file, "numbers")
    line[line.index("--external-dataloader") + 1] = "own_batches:numbers"
    feed = DataStreams(plan_of(line))
    assert first_tokens(feed.training(Progress(0, 0)), 3) == [[0], [1], [2]]


def test_each_rank_gets_its_own(file):
    line = argv(file, "numbers", "--micro-batch-size 2")
    feeds = [DataStreams(plan_of(line, World(rank, 2, rank, 2))) for rank in range(2)]
    seen = [first_tokens(feed.training(Progress(0, 0)), 2) for feed in feeds]
    assert seen == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("not_iterable", "for train it gave a int; return an iterable of micro-batches, or None"),
        ("nothing", "for train it gave nothing from sample 0 on; yield more, or train or evaluate less"),
        ("lists", "for train it yields a list; yield tensors or arrays of integers"),
        ("floats", "for train it yields a Tensor of torch.float32; yield tensors or arrays of integers"),
        ("halves", "for train it yields a ndarray of float16; yield tensors or arrays of integers"),
        ("short", "for train it yields the shape [1, 16]; yield [micro-batch size, seq-length + 1] = [1, 17]"),
        ("large", "for train it yields the id 128, outside the vocabulary of 128; give the tokenizer that made its"),
        ("negative", "for train it yields the id -1, outside the vocabulary of 128; give the tokenizer that made its"),
        ("later_large", "for train it yields the id 128, outside the vocabulary of 128; give the tokenizer that made"),
        ("three", "for train it ended after 3 micro-batches and more are wanted; yield more, or train or evaluate"),
        ("number", "FILE has no function number; check its name"),
        ("no_such", "FILE has no function no_such; check its name"),
        ("few_arguments", "cannot be called (got an unexpected keyword argument 'micro_batch_size'); let it take"),
        ("positional", "cannot be called (missing a required argument: 'more'); let it take split, and by name"),
    ],
)
def test_what_is_wrong_is_one_line(file, tmp_path, function, message):
    with pytest.raises(UserError) as caught:
        run(argv(file, function), tmp_path / "run")
    said = str(caught.value)
    assert said.startswith(f"--external-dataloader {file}:{function}: {message.replace('FILE', str(file))}")
    assert "\n" not in said


TAKE = "let it take split, and by name consumed, micro_batch_size, seq_length, rank, num_ranks, seed"


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("loader.py", "names no function; give FILE.py:FUNCTION or MODULE:FUNCTION"),
        ("none.py:f", "there is no file none.py; check the path"),
        ("no_such_module:f", "there is no module no_such_module; give FILE.py:FUNCTION, or set PYTHONPATH"),
        (".own:f", ".own is relative to no package; give the module's whole name, or FILE.py:FUNCTION"),
        ("builtins:max", f"cannot be called (no signature found for builtin {max}); {TAKE}"),
    ],
)
def test_functions_that_are_not_found(spelled, message):
    line = argv("x.py", "f")
    line[line.index("--external-dataloader") + 1] = spelled
    with pytest.raises(UserError) as caught:
        DataStreams(plan_of(line))
    assert str(caught.value) == f"--external-dataloader {spelled}: {message}"


def test_an_early_end_of_validation_is_named_so(file, tmp_path):
    with pytest.raises(DataError, match="for valid it ended after 3 micro-batches and more are wanted; yield more"):
        run(argv(file, "three", "--eval-iters 1 --skip-train"), tmp_path / "run")


def test_an_error_of_the_users_own_keeps_its_traceback(file, tmp_path):
    with pytest.raises(RuntimeError, match="^out of order$"):
        run(argv(file, "own_error"), tmp_path / "run")
