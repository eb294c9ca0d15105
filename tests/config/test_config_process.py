"""A command line with mistakes, as its user meets it: a few lines, exit code 2, and nothing made."""

import pytest
from support.command_lines import argv, read_table
from support.launch import pretrain
from support.paths import REPO

from megatron_lite import process_state
from megatron_lite.__main__ import train

OUTPUTS = ["--save", "out/ckpt", "--tensorboard-dir", "out/tb", "--run-dir", "out/run"]
FOUR_MISTAKES = argv(["--num-layer", "2", "--fp16", "--bf16", "--lr", "fast", "--global-batch-size", "9", *OUTPUTS])
ANSWERS = [
    "--num-layer is not a flag; did you mean --num-layers?",
    "--lr fast: needs a number.",
    "--global-batch-size 9 is not divisible by --micro-batch-size 2 times data parallel size {0} = {1}; try {2}.",
    "--fp16 and --bf16 exclude each other; keep one.",
]


def test_one_process(tmp_path):
    done = pretrain(FOUR_MISTAKES, cwd=tmp_path)
    assert done.code == 2
    assert done.err.splitlines() == ["error: " + answer.format(1, 2, 8) for answer in ANSWERS]
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_say_it_once_and_torchrun_names_the_cause(tmp_path):
    done = pretrain(FOUR_MISTAKES, ranks=2, cwd=tmp_path)
    assert done.code == 1  # torchrun's for any failed rank
    answers = ["error: " + answer.format(2, 4, 8) for answer in ANSWERS]
    lines = done.err.splitlines()
    assert [line for line in lines if "error: --" in line] == answers
    summary = done.err[done.err.index("Root Cause") :]
    assert "; ".join(answer.removeprefix("error: ") for answer in answers) in summary
    assert "exitcode  : 2" in summary and "rank      : 0" in summary
    for ours in ("megatron_lite", "pretrain_gpt.py"):  # no traceback of ours
        assert f'File "{REPO / ours}' not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "not.json").write_text("no vocabulary")
    (tmp_path / "settings.yaml").write_text("optimiser: adam\n")
    return tmp_path


BPE = "!--tokenizer-type !--vocab-size --merge-file merges.txt --vocab-file "


EARLY = read_table("""
--yaml-cfg settings.yaml | settings.yaml: --optimiser is not a flag; did you mean --optimizer?
--save settings.yaml/below --tensorboard-dir not.json | --save settings.yaml/below: | --tensorboard-dir not.json:
BPE none.json | --vocab-file none.json: there is no such file; check the path.
BPE not.json | --vocab-file not.json:
--padded-vocab-size 64 | --padded-vocab-size 64 is smaller than the vocabulary of 100; raise or drop it.
!--train-iters --train-samples 3 | --train-samples 3 is less than one global batch of 8; raise it.
""", BPE=BPE.strip())  # fmt: skip


@pytest.mark.parametrize("row", EARLY)
def test_found_before_a_process_group_or_a_file_is_made(row, folder, capsys):
    changes, *starts = row
    before = sorted(folder.rglob("*"))
    outputs = [] if "--save" in changes else OUTPUTS
    assert train(argv([*changes.split(), *outputs])) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(f"error: {start}") for line, start in zip(lines, starts)), lines
    assert sorted(folder.rglob("*")) == before


def test_a_c_library_that_is_not_glibc_keeps_its_allocator(monkeypatch):
    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(process_state.os, "confstr", unknown)
    assert not process_state.keep_freed_memory()
