"""Data that cannot be trained on: one line, exit code 2, and not a file made or changed."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from launch import flags, write_documents

from megatron_lite.app import main


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "corpus", [40] * 30)


def tree(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def flipped(raw, place):
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


FILES = {
    "short .idx": (".idx", lambda raw: raw[:-8], r"\S+\.idx: \S+ bytes, but its .*"),
    "short .bin": (".bin", lambda raw: raw[: len(raw) // 2], r"\S+\.bin: \S+ bytes, but its \.idx needs .*"),
    "empty .idx": (".idx", lambda raw: b"", r"\S+\.idx: 0 bytes is too short for a header of 34; .*"),
    "empty .bin": (".bin", lambda raw: b"", r"\S+\.bin: 0 bytes, but its \.idx needs .*"),
    "foreign .idx": (".idx", lambda raw: b"\x93NUMPY" + raw, r"\S+\.idx: starts with .*; not an indexed data set: .*"),
    "flipped magic": (".idx", lambda raw: flipped(raw, 3), r"\S+\.idx: starts with .*"),
    "flipped length": (
        ".idx",
        lambda raw: flipped(raw, 34),
        r"\S+\.idx: sequence 0 does not start where .*|.*sequence 1 .*",
    ),
    "flipped id": (".bin", lambda raw: flipped(raw, 1), r"\S+\.bin: token id \d+ is outside the vocabulary of 128; .*"),
    "noise as .bin": (
        ".bin",
        lambda raw: np.random.default_rng(1).bytes(len(raw)),
        r"\S+\.bin: token id \d+ is outside .*",
    ),
}
COMMANDS = {
    "no documents for training": (
        "--split 1,999,0",
        r"--split 1,999,0: the training share of \S+ is none of its 30 .*",
    ),
    "an unwritable cache": (
        "--data-cache-path {prefix}.bin/x",
        r"--data-cache-path \S+: cannot be written \(Not a .*\); .*",
    ),
    "fewer samples than a batch": (
        "--data-path {prefix} {prefix} --split 1,29,0 --dataloader-type cyclic --micro-batch-size 8 --global-batch-size 8",
        "--micro-batch-size 8: 4 samples are too few for one micro-batch on each of 1 data-parallel ranks; .*",
    ),
    "fewer samples than the run takes": (
        "--data-path {prefix} {prefix} --split 1,29,0",
        r"--data-path: .* their train share of 4 samples is less than the .*",
    ),
}


def refusal(argv, tmp_path, monkeypatch, capfd):
    """The one line that is said."""
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    assert main([str(word) for word in argv]) == 2
    assert tree(tmp_path) == before
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return error.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(prefix, kind, tmp_path, monkeypatch, capfd):
    ending, change, message = FILES[kind]
    path = Path(f"{prefix}{ending}")
    path.write_bytes(change(path.read_bytes()))
    line = refusal(flags("--data-cache-path", tmp_path / "cache", data=prefix), tmp_path, monkeypatch, capfd)
    assert re.fullmatch(message, line), line


@pytest.mark.parametrize("kind", COMMANDS)
def test_data_that_do_not_fit_the_flags(prefix, kind, tmp_path, monkeypatch, capfd):
    words, message = COMMANDS[kind]
    line = refusal(flags(words.format(prefix=prefix), data=prefix), tmp_path, monkeypatch, capfd)
    assert re.fullmatch(message, line), line


def test_a_run_uses_its_cache_and_says_what_was_wrong_with_it(prefix, tmp_path, capfd):
    argv = flags("--train-iters 2 --run-dir", tmp_path / "run", "--data-cache-path", tmp_path / "cache", data=prefix)
    assert main(argv) == 0
    assert "index cache" not in capfd.readouterr().out
    files = sorted(os.listdir(tmp_path / "cache"))
    assert len(files) == 4
    with open(tmp_path / "cache" / files[1], "ab") as file:
        file.write(b"x")
    assert main(argv) == 0
    out = capfd.readouterr().out
    assert out.count("index cache") == out.count("built again") == 1
    assert sorted(os.listdir(tmp_path / "cache")) == files
