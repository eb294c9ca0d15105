"""A preprocessing that is interrupted, and continued: in the end no one can tell."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.data_maker import contents
from support.paths import REPO
from support.waiting import LIMIT_S, full_disk, wait_until
from support.wording import wording

from megatron_lite.data import resume_state, text_files
from megatron_lite.data.preprocess import preprocess
from megatron_lite.data.tokenizers import make_tokenizer
from megatron_lite.errors import DataError

BYTES = make_tokenizer("ByteTokenizer")


class Interrupted(Exception):
    pass


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """Four files of about 30 chunks, with blank and bad lines; the state is saved after each chunk."""
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 200)
    monkeypatch.setattr(resume_state, "SECONDS_BETWEEN_STATES", 0)
    lines = [json.dumps({"text": f"number {i} " * (i % 5), "title": f"{i}"}) for i in range(60)]
    lines[7], lines[31], lines[59] = "", "{", "bad"
    raw = "\n".join(lines).encode()
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(raw[:999])
    return [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "empty.jsonl", "c.jsonl")]


def run(inputs, prefix, stop_after=None, said=None, **options):
    """Preprocess, or raise Interrupted when that many chunks are written."""
    seen = []

    def report(*numbers):
        seen.append(numbers)
        if len(seen) == stop_after:
            raise Interrupted

    arguments = {"json_keys": ("text", "title"), "on_error": "skip", "report": report} | options
    return preprocess(inputs, prefix, BYTES, say=[].append if said is None else said.append, **arguments)


@pytest.fixture
def whole(inputs, tmp_path):
    """The summary and the files of an uninterrupted run."""
    summary = run(inputs, tmp_path / "whole" / "x")
    files = contents(tmp_path / "whole")
    assert sorted(files) == [f"x_{key}_document.{ending}" for key in ("text", "title") for ending in ("bin", "idx")]
    return summary, files


@pytest.mark.parametrize("stop_after", [1, 2, 7, 20])
def test_interrupted_again_and_again_it_gives_the_same_bytes(inputs, whole, tmp_path, stop_after):
    said, runs = [], 0
    while True:
        try:
            summary = run(inputs, tmp_path / "parts" / "x", stop_after, said)
            break
        except Interrupted:
            runs += 1
            assert not [name for name in contents(tmp_path / "parts") if name.endswith((".bin", ".idx"))]
    assert runs >= 25 // stop_after
    assert contents(tmp_path / "parts") == whole[1]
    assert summary == type(summary)(**{**vars(whole[0]), "prefixes": summary.prefixes})
    named = [line for line in said if line.startswith("skipped")]
    assert len(named) == len(set(named)) == summary.skipped


def test_another_number_of_workers_goes_on_and_drops_what_was_written_after_the_last_state(inputs, whole, tmp_path):
    with pytest.raises(Interrupted):
        run(inputs, tmp_path / "parts" / "x", 9, workers=2)
    for path in (tmp_path / "parts").glob("*_document.*.unfinished"):
        with open(path, "ab") as file:
            file.write(b"half a document")
    run(inputs, tmp_path / "parts" / "x")
    assert contents(tmp_path / "parts") == whole[1]


def spoiled(how, inputs, folder):
    """Change what an interrupted run relied on; returns the options of the next one and what is said of it."""
    state = folder / "x.unfinished.json"
    if how == "input":
        os.utime(inputs[0], (1, 1))
        return {}, "--input changed since that run was interrupted"
    if how == "options":
        return {"append_eod": False}, "--append-eod changed since that run was interrupted"
    if how == "files":
        (folder / "x_title_document.marks.unfinished").write_bytes(b"")
        return {}, "the files it names are missing or truncated"
    if how == "version":
        state.write_text(json.dumps(json.loads(state.read_text()) | {"version": 0}))
        return {}, "was written by another version"
    state.write_text({"cut": "{", "foreign": "[1]"}[how])
    return {}, "cannot be read"


@pytest.mark.parametrize("how", ["input", "options", "files", "version", "cut", "foreign"])
def test_otherwise_it_starts_anew_and_says_so(inputs, tmp_path, how):
    folder, said = tmp_path / "parts", []
    with pytest.raises(Interrupted):
        run(inputs, folder / "x", 20)
    options, why = spoiled(how, inputs, folder)
    run(inputs, folder / "x", said=said, **options)
    assert said[0] == f"{folder / 'x.unfinished.json'}: {why}; starting anew"
    run(inputs, tmp_path / "fresh" / "x", **options)
    assert contents(folder) == contents(tmp_path / "fresh")


def test_bad_lines_may_be_skipped_later_but_not_refused_later(inputs, whole, tmp_path):
    said, prefix = [], tmp_path / "parts" / "x"
    with pytest.raises(DataError, match="a.jsonl:32: not JSON"):
        run(inputs, prefix, on_error="stop", said=said)
    assert said == [wording("data/what-is-done-so", prefix)]
    with pytest.raises(Interrupted):
        run(inputs, prefix, 5, said=said)
    assert said[1].startswith(wording("data/goes-on-after", prefix))
    said.clear()
    with pytest.raises(DataError, match="a.jsonl:32: not JSON"):
        run(inputs, prefix, said=said, on_error="stop")
    assert "--on-error changed" in said[0]
    run(inputs, prefix)
    assert contents(tmp_path / "parts") == whole[1]


def test_two_runs_at_once_do_not_mix(inputs, whole, tmp_path):
    refusals = []

    def another(*numbers):
        with pytest.raises(DataError) as refusal:
            run(inputs, tmp_path / "parts" / "x")
        refusals.append(str(refusal.value))

    run(inputs, tmp_path / "parts" / "x", report=another)
    remedy = "wait for that one or choose another output"
    assert set(refusals) == {wording("data/parts-x-text-document", tmp_path, remedy)}
    assert contents(tmp_path / "parts") == whole[1]


def test_what_could_not_be_continued_is_not_kept(inputs, tmp_path, monkeypatch):
    """Where no state was saved yet, or none can be."""

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    message = r"^\S+x\.unfinished\.json: cannot be written \(No space left on device\); free .*$"
    with pytest.raises(DataError, match=message):
        run(inputs, tmp_path / "parts" / "x")
    assert contents(tmp_path / "parts") == {}
    monkeypatch.setattr(resume_state, "SECONDS_BETWEEN_STATES", 1000)
    with pytest.raises(Interrupted):
        run(inputs, tmp_path / "parts" / "x", 9)
    assert contents(tmp_path / "parts") == {}


def test_a_disk_that_fills_up_costs_nothing_that_was_done(inputs, whole, tmp_path):
    message, said = r"^\S+x_text_document: cannot be written \(File too large\); free some space .*$", []
    with full_disk(3000), pytest.raises(DataError, match=message):
        run(inputs, tmp_path / "parts" / "x")
    assert not [name for name in contents(tmp_path / "parts") if name.endswith((".bin", ".idx"))]
    run(inputs, tmp_path / "parts" / "x", said=said)
    assert wording("data/goes-on-after-2") in said[0] and contents(tmp_path / "parts") == whole[1]


SLOWLY = """
import sys, time
from megatron_lite.cli.main import main
from megatron_lite.data import resume_state, text_files, tokenizers
text_files.CHUNK_BYTES, resume_state.SECONDS_BETWEEN_STATES = 2000, 0
encode = tokenizers.ByteTokenizer.encode
def slowly(self, text):
    time.sleep(0.001)
    return encode(self, text)
if sys.argv.pop(1) == "slow":
    tokenizers.ByteTokenizer.encode = slowly
sys.exit(main(sys.argv[1:]))
"""


def test_dying_while_the_state_is_written_leaves_nothing_behind(inputs, whole, tmp_path, monkeypatch):
    replace, times = os.replace, iter(range(9))

    def die(source, target):
        if next(times) == 8:
            raise Interrupted
        replace(source, target)

    monkeypatch.setattr("os.replace", die)
    with pytest.raises(Interrupted):
        run(inputs, tmp_path / "parts" / "x")
    monkeypatch.setattr("os.replace", replace)
    assert ".x.unfinished.json.partial" in contents(tmp_path / "parts")
    run(inputs, tmp_path / "parts" / "x")
    assert contents(tmp_path / "parts") == whole[1]


def test_kill_9_at_any_moment(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"number {i} " * (i % 9)}) + "\n" for i in range(3000)))
    argv = ["preprocess", "--input", str(lines), "--tokenizer-type", "ByteTokenizer", "--append-eod", "--output-prefix"]

    def started(speed, prefix):
        words = [sys.executable, "-c", SLOWLY, speed, *argv, str(prefix)]
        return subprocess.Popen(words, cwd=REPO, stderr=subprocess.PIPE, text=True)

    assert started("fast", tmp_path / "whole" / "x").wait(timeout=LIMIT_S) == 0
    for seconds in (0.05, 0.4, 0.7):
        killed = started("slow", tmp_path / "parts" / "x")
        state = tmp_path / "parts" / "x.unfinished.json"
        wait_until(state.exists)
        time.sleep(seconds)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL and state.exists()
    last = started("fast", tmp_path / "parts" / "x")
    assert wording("data/goes-on-after-2") in last.communicate(timeout=LIMIT_S)[1] and last.returncode == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
