import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.paths import REPO
from support.waiting import Terminal
from support.wording import wording

from megatron_lite.cli.datasets import PreprocessLine
from megatron_lite.cli.main import main
from megatron_lite.data import resume_state, text_files
from megatron_lite.data.indexed import IndexedDataset

BYTES = ["--tokenizer-type", "ByteTokenizer"]
PUBLIC_DATA = REPO.parent / "shared" / "data"


def test_a_text_file_becomes_one_document(tmp_path, capsys):
    text, prefix = tmp_path / "a text.txt", f"{tmp_path}/out_text_document"
    text.write_text("7 0 31")
    argv = ["preprocess", "--input", str(text), "--output-prefix", f"{tmp_path}/out"]
    assert main([*argv, "--tokenizer-type", "NullTokenizer", "--vocab-size", "32", "--append-eod"]) == 0
    output = capsys.readouterr()
    assert "1 documents (6 B): 4 tokens in" in output.out and f"--data-path {prefix}" in output.out
    assert output.err == ""  # progress is for terminals
    assert IndexedDataset(prefix).tokens(0).tolist() == [7, 0, 31, 32]
    assert main([*argv, *BYTES]) == 0
    assert IndexedDataset(prefix).tokens(0).tolist() == [*b"7 0 31"]


def test_each_json_key_gets_its_files_and_skipped_lines_are_named_and_counted(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"title": "one", "body": "1 1"}\n{"title"}\n{"title": "", "body": "2"}\n[1]\n')
    argv = ["preprocess", "--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/out", *BYTES]
    argv += ["--json-keys", "title", "body"]
    assert main([*argv, "--on-error", "skip"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(wording("cli/documents-b-empty-ones", 3, 7, 1, 2, 7))
    skipped = [f"skipped {tmp_path}/a.jsonl:{n}" for n in (2, 4)]
    assert [line.split(": ")[0] for line in output.err.splitlines()] == skipped
    assert [len(IndexedDataset(f"{tmp_path}/out_{key}_document")) for key in ("title", "body")] == [1, 2]
    assert main([*argv, "--on-error", "stop"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/a.jsonl:2: not JSON")


def test_megatrons_older_tokenizers(tmp_path, capsys):
    """GPT-2's gave the same files (7,222 documents of Shakespeare); for others nobody has looked."""
    (tmp_path / "a.txt").write_text("ab")
    argv = ["preprocess", "--input", f"{tmp_path}/a.txt", "--legacy-tokenizer", "--output-prefix", f"{tmp_path}/out"]
    assert main([*argv, *BYTES]) == 0
    assert IndexedDataset(f"{tmp_path}/out_text_document").tokens(0).tolist() == [*b"ab"]
    capsys.readouterr()
    assert main([*argv, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "x"]) == 2
    assert wording("cli/megatron-older-huggingfacetokenizer-may", "--legacy-tokenizer") in capsys.readouterr().err


MEGATRONS = """--log-interval 1000 --partitions 2 --chunk-size=25 --keep-sequential-samples --dataset-impl mmap --lang english
--workers-to-check 16 32"""


def test_options_of_megatrons_tool_are_taken_with_a_word_each(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab")
    argv = ["--input", f"{tmp_path}/a.txt", *MEGATRONS.split(), "--output-prefix", f"{tmp_path}/out", *BYTES]
    assert main(["preprocess", *argv]) == 0
    told = capsys.readouterr().err.splitlines()
    flags = [word.partition("=")[0] for word in MEGATRONS.split() if word.startswith("--")]
    assert [line.split(": ")[1] for line in told] == [wording("cli/has-no-effect-here", flag) for flag in flags]
    assert IndexedDataset(f"{tmp_path}/out_text_document").tokens(0).tolist() == [*b"ab"]


LOST = {
    "--split-sentences --keep-newlines": "--split-sentences: a GPT reads documents whole; leave it out",
    "--find-optimal-num-workers": "--find-optimal-num-workers: leave it out, try a few values of --workers, and compare",
    "--dataset-impl lazy": "--dataset-impl lazy: all data sets are memory-mapped ones; give mmap, or leave it out",
    "--dataset-impl": "--dataset-impl: all data sets are memory-mapped ones; give mmap, or leave it out",
}
MISTAKES = [
    (None, "", BYTES, "does not exist"),
    ("a.txt", "x", [], "--vocab-file: missing, GPT2BPETokenizer needs it"),
    ("a.txt", "x", ["--tokenizer-type", "NullTokenizer"], "--vocab-size None: NullTokenizer needs the number of ids"),
    ("a.txt", "x", ["--tokenizer-type", "SFTTokenizer"], "--tokenizer-type SFTTokenizer: not available"),
    ("a.txt", "x", [*BYTES, "--on-error", "ignore"], "argument --on-error: invalid choice: 'ignore'"),
]


def test_options_of_megatrons_tool_that_would_be_lost_are_answered(capsys):
    for words, said in LOST.items():
        assert main(["preprocess", *words.split(), "--input", "a", "--output-prefix", "b"]) == 2
        message = capsys.readouterr().err
        assert f"error: megatron-lite preprocess {said}" in message and message.count("\n") == 1


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    for name, content, argv, said in MISTAKES:
        path = tmp_path / (name or "missing.txt")
        if name:
            path.write_text(content)
        assert main(["preprocess", "--input", str(path), "--output-prefix", f"{tmp_path}/out", *argv]) == 2
        message = capsys.readouterr().err
        assert said in message and message.count("\n") == 1


def test_progress_on_a_terminal_is_wiped_before_the_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    (tmp_path / "a.txt").write_text("ab")
    main(["preprocess", "--input", f"{tmp_path}/a.txt", "--output-prefix", f"{tmp_path}/out", *BYTES])
    assert sys.stderr.getvalue() == "\r\033[K1 documents, 2 B, 100%\r\033[K"
    assert capsys.readouterr().out.startswith("1 documents")


def test_the_line_tells_rates_and_the_time_left_of_this_process(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = PreprocessLine()
    line(5000, 2**20, 0.5)  # an interrupted run had come so far
    now = 110.0
    line(5100, 3 * 2**20, 0.6)
    first, second = sys.stderr.getvalue().split("\r\033[K")[1:]
    assert first == "5,000 documents, 1.0 MiB, 50%"
    assert second == "5,100 documents, 3.0 MiB, 60%, 10 documents/s, 204.8 KiB/s, 40.0s left"


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(resume_state, "SECONDS_BETWEEN_STATES", 0)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(60_000)))
    argv = ["preprocess", "--input", f"{tmp_path}/a.jsonl", *BYTES, "--output-prefix"]
    state = tmp_path / "out.unfinished.json"

    def interrupt():
        while not state.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    # a shell starts what runs in its background with this signal ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hand = threading.Thread(target=interrupt)
    hand.start()
    code = main([*argv, f"{tmp_path}/out"])
    hand.join()
    signal.signal(signal.SIGINT, before)
    assert code == 130
    said = capsys.readouterr().err
    assert said == wording("cli/out-what-is-done", tmp_path)
    monkeypatch.undo()
    assert main([*argv, f"{tmp_path}/out", "--workers", "2"]) == main([*argv, f"{tmp_path}/whole"]) == 0
    assert wording("cli/out-goes-on-after", tmp_path) in capsys.readouterr().err
    for ending in (".bin", ".idx"):
        same = [(tmp_path / f"{name}_text_document{ending}").read_bytes() for name in ("out", "whole")]
        assert same[0] == same[1]
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_does_not_grow_with_the_input(tmp_path):
    line = json.dumps({"text": "some words " * 30}) + "\n"
    peaks = []
    for repeats in (20_000, 60_000):  # 6 and 20 MB
        (tmp_path / "a.jsonl").write_text(line * repeats)
        code = "import sys; from megatron_lite.cli.main import main; main(sys.argv[1:])\n"
        code += "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
        argv = ["preprocess", "--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/x", *BYTES]
        run = subprocess.run([sys.executable, "-c", code, *argv], check=True, cwd=REPO, capture_output=True, text=True)
        peaks.append(int(run.stdout.split()[-1]))
    assert abs(peaks[1] - peaks[0]) < 8 * 1024  # KiB


@pytest.mark.skipif(not PUBLIC_DATA.is_dir(), reason="no ../shared/data beside the repository")
def test_same_bytes_as_megatrons_preprocess_data_for_tinyshakespeare(tmp_path, capsys):
    blocks = (PUBLIC_DATA / "tinyshakespeare.txt").read_text().split("\n\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": block}) + "\n" for block in blocks))
    gpt2 = ["--vocab-file", f"{PUBLIC_DATA}/gpt2/vocab.json", "--merge-file", f"{PUBLIC_DATA}/gpt2/merges.txt"]
    argv = ["preprocess", "--input", f"{tmp_path}/a.jsonl", "--output-prefix", f"{tmp_path}/x", *gpt2]
    assert main([*argv, "--append-eod", "--workers", "2"]) == 0
    files = [tmp_path / f"x_text_document{ending}" for ending in (".bin", ".idx")]
    assert [hashlib.sha256(path.read_bytes()).hexdigest()[:8] for path in files] == ["4bbfe2d7", "c0d001bf"]
    assert main(["inspect", f"{tmp_path}/x_text_document", *gpt2]) == 0
    shown = capsys.readouterr().out
    assert "7,222 sequences" in shown and "330,807 as uint16" in shown and "to 50256" in shown
