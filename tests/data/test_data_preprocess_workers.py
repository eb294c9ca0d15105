"""Worker processes: the same bytes for any number of them, and an end in one line when one dies."""

import contextlib
import gzip
import json
import math
import multiprocessing
import os
import signal
from itertools import chain, repeat
from unittest.mock import Mock, PropertyMock

import pytest
from support.data_maker import contents

from megatron_lite.data import resume_state, text_files
from megatron_lite.data.preprocess import AHEAD, WorkerDied, _describe_death, in_order, preprocess
from megatron_lite.data.tokenizers import ByteTokenizer, make_tokenizer
from megatron_lite.errors import DataError

BYTES = make_tokenizer("ByteTokenizer")


class FailingTokenizer(ByteTokenizer):
    def encode(self, text: str) -> list[int]:
        raise ZeroDivisionError("a mistake in a tokenizer")


def square(number: int) -> int:
    return number * number


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 500)
    # A run that ends early leaves what can be continued, if it was slow enough to have saved a state.
    monkeypatch.setattr(resume_state, "SECONDS_BETWEEN_STATES", math.inf)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i} " * (i % 9)}) + "\n" for i in range(500)))
    return path


def test_the_same_bytes_for_any_number_of_workers(lines, tmp_path):
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    summaries = [preprocess([lines, packed], tmp_path / f"{n}" / "x", BYTES, workers=n) for n in (1, 2, 3)]
    assert len({summary.tokens for summary in summaries}) == 1
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")
    assert multiprocessing.active_children() == []


def test_results_come_in_order_and_few_tasks_are_read_ahead():
    read = []

    def tasks():
        for number in range(50):
            read.append(number)
            yield number

    for number, (task, result) in enumerate(in_order(square, tasks(), 2)):
        assert (task, result) == (number, number**2)
        assert len(read) - number <= 2 * AHEAD + 1
    assert number == 49
    assert list(in_order(square, [], 2)) == []


def test_how_the_first_one_died_may_be_told_late():
    """The pool's own thread has waited for it, and has not yet kept its exit code."""
    first, second = Mock(), Mock(exitcode=-signal.SIGTERM)
    type(first).exitcode = PropertyMock(side_effect=chain([None] * 5, repeat(-signal.SIGKILL)))
    assert "died (SIGKILL)" in str(_describe_death({first, second}))


def test_whatever_ends_a_run_ends_its_workers_and_leaves_no_file(lines, tmp_path, capfd):
    def kill(*numbers):
        for child in multiprocessing.active_children()[:1]:
            with contextlib.suppress(ProcessLookupError):  # killed before, and waited for by another thread just now
                os.kill(child.pid, signal.SIGKILL)

    killed = r"^--workers: a worker process died \(SIGKILL\), mostly for lack of memory; .*$"
    failed = r"^--workers: a worker process died \(exit code 1\), its own message .* processes$"
    bad = tmp_path / "bad.jsonl"
    bad.write_text(lines.read_text() + "{\n")
    for path, tokenizer, report, kind, message in (
        (bad, BYTES, lambda *numbers: None, DataError, r"bad\.jsonl:501: not JSON"),
        (lines, BYTES, kill, WorkerDied, killed),
        (lines, FailingTokenizer(), lambda *numbers: None, WorkerDied, failed),
    ):
        with pytest.raises(kind, match=message):
            preprocess([path], tmp_path / "out" / "x", tokenizer, workers=2, report=report)
        assert kind is DataError or kind.exit_code == 1
        assert contents(tmp_path / "out") == {} and multiprocessing.active_children() == []
    assert "ZeroDivisionError: a mistake in a tokenizer" in capfd.readouterr().err
