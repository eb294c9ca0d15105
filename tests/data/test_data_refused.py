"""Data that cannot be trained on: one line, exit code 2, and not a file made or changed. All kinds of damage: test_data_indexed."""

import os
import re
from pathlib import Path

import pytest
from support.launch import flags, write_documents

from megatron_lite.__main__ import train


@pytest.fixture
def prefix(tmp_path):
    return write_documents(tmp_path / "corpus", [40] * 30)


def tree(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


TWICE = "--data-path {prefix} {prefix} --split 1,29,0"
REFUSED = [  # flags; what is said
    ("--data-cache-path {prefix}.bin/x", r"--data-cache-path \S+: cannot be written \(Not a .*"),
    (
        f"{TWICE} --dataloader-type cyclic --micro-batch-size 8 --global-batch-size 8",
        "--micro-batch-size 8: 4 samples are too few for one micro-batch on each of 1 data-parallel ranks; .*",
    ),
    (TWICE, r"--data-path: .* their train share of 4 samples is less than the .*"),
    ("--data-cache-path {prefix}-cache", r"\S+\.bin: token id \d+ is outside the vocabulary of 128; .*"),
]


def test_data_that_cannot_be_trained_on(prefix, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    path = Path(f"{prefix}.bin")
    for words, message in REFUSED:
        if "outside" in message:
            raw = path.read_bytes()
            path.write_bytes(raw[:1] + bytes([raw[1] ^ 1]) + raw[2:])
        before = tree(tmp_path)
        assert train([str(word) for word in flags(words.format(prefix=prefix), data=prefix)]) == 2
        assert tree(tmp_path) == before
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and re.fullmatch(f"error: {message}", error.rstrip("\n")), error


def test_a_run_uses_its_cache_and_says_what_was_wrong_with_it(prefix, tmp_path, capfd):
    argv = flags("--train-iters 2 --run-dir", tmp_path / "run", "--data-cache-path", tmp_path / "cache", data=prefix)
    assert train(argv) == 0
    assert "index cache" not in capfd.readouterr().out
    files = sorted(os.listdir(tmp_path / "cache"))
    assert len(files) == 4
    with open(tmp_path / "cache" / files[1], "ab") as file:
        file.write(b"x")
    assert train(argv) == 0
    out = capfd.readouterr().out
    assert out.count("index cache") == out.count("built again") == 1
    assert sorted(os.listdir(tmp_path / "cache")) == files
