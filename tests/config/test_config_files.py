"""Files and folders on the command line: each mistake is one line, before anything is made."""

import os

import pytest
from support.command_lines import mistakes, read_table, yields_missed
from support.paths import REPO
from support.wording import wording


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to stand in: a good pair of data files, a regular file, a folder, data named as Megatron names it."""
    monkeypatch.chdir(tmp_path)
    names = "good.bin good.idx half.bin megatron_text_document.bin megatron_text_document.idx file"
    for name in names.split():
        (tmp_path / name).write_text("x")
    for name in ("folder", "tree.bin", "tree.idx"):
        (tmp_path / name).mkdir()
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    return tmp_path


def make_answer(row, place) -> str:
    """The line that answers a row: changes, key of the sentence, its figures."""
    _, key, *figures = row
    return wording(key, *(figure.format(here=place) for figure in figures))


BPE = "!--tokenizer-type !--vocab-size --merge-file file "
CASES = read_table(
    """
!--mock-data --data-path none | config/there-is-no-bin | --data-path | none | none
!--mock-data --data-path half | config/there-is-no-idx | --data-path | half | half
!--mock-data --data-path good.bin | config/is-file-name-give | --data-path | good.bin
!--mock-data --data-path a/none.idx | config/is-file-name-give-prefix | --data-path | a/none.idx
!--mock-data --data-path megatron | config/there-is-no-bin-did | --data-path | megatron | megatron
!--mock-data --data-path tree | config/bin-is-folder-give | --data-path | tree | tree
!--mock-data --data-path 1 good 2 none | config/there-is-no-bin | --data-path | none | none
!--mock-data --data-path good 3 good | config/there-is-no-bin | --data-path | 3 | 3
!--mock-data --data-path 1 good x good | config/good-x-good-x | --data-path | 1
!--mock-data --data-path 1 good 0 good | config/weights-must-all-be | --data-path | 1.0 | 0.0 | 0
!--mock-data --train-data-path good --valid-data-path none | config/there-is-no-bin | --valid-data-path | none | none
!--mock-data --train-data-path good --test-data-path none | config/there-is-no-bin | --test-data-path | none | none
BPE --vocab-file none.json | config/there-is-no-such | --vocab-file | none.json
BPE --vocab-file folder | config/is-folder-give-file | --vocab-file | folder
BPE --vocab-file file --merge-file none | config/there-is-no-such | --merge-file | none
--save file | config/is-file-give-folder | --save | file | {here}/file
--save file/below/it | config/is-file-give-folder | --save | file/below/it | {here}/file
--save dangling | config/is-file-give-folder | --save | dangling | {here}/dangling
--tensorboard-dir file/tb | config/is-file-give-folder | --tensorboard-dir | file/tb | {here}/file
--run-dir file | config/is-file-give-folder | --run-dir | file | {here}/file
--record-memory-history --memory-snapshot-path file/s.pickle | config/is-file-give-folder | --memory-snapshot-path | file | {here}/file
--load file | config/is-file-give-folder-that | --load | file
--load none --exit-on-missing-checkpoint | config/there-is-no-such-folder | --load | none | --exit-on-missing-checkpoint
--pretrained-checkpoint none | config/there-is-no-such-folder-check | --pretrained-checkpoint | none
""",
    BPE=BPE,
)
FINE = [
    "!--mock-data --data-path good",
    "!--mock-data --data-path 0.3 good 7e-1 good",
    "!--mock-data --data-path good good good",
    "!--mock-data --train-data-path good --valid-data-path good",
    BPE + "--vocab-file file",
    "--save new/and/deep --tensorboard-dir folder --run-dir folder/x --load none",
    "--load folder --exit-on-missing-checkpoint",
    "--load folder --pretrained-checkpoint none",
    "--vocab-file none",
]


@pytest.mark.parametrize("row", CASES, ids=lambda row: row[0])
def test_one_line_names_flag_path_and_remedy(row, place):
    assert mistakes(row[0]) == [make_answer(row, place)]


@pytest.mark.parametrize("changes", FINE)
def test_what_is_there_passes_and_nothing_is_made(changes, place):
    before = sorted(place.rglob("*"))
    assert mistakes(changes) == []
    assert sorted(place.rglob("*")) == before


def test_default_run_folder_must_be_possible(place):
    (place / "runs").write_text("not a folder")
    assert mistakes() == [wording("config/runs-runs-is-file", "--run-dir", place)]
    assert mistakes("--save folder") == mistakes("--run-dir folder") == []


@pytest.fixture
def forbidden(monkeypatch):
    """Make paths with these ends look forbidden; root may do everything, so that real permissions would not do."""

    def forbid(*endings):
        monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(endings))

    return forbid


UNREADABLE = read_table(
    """
!--mock-data --data-path good | config/may-not-be-read | --data-path | good.idx
BPE --vocab-file folder/../half.bin | config/may-not-be-read | --vocab-file | folder/../half.bin
--save folder/new | config/may-not-be-written | --save | folder/new | {here}/folder
""",
    BPE=BPE,
)


@pytest.mark.parametrize("row", UNREADABLE, ids=lambda row: row[0])
def test_permissions(row, place, forbidden):
    forbidden("good.idx", "half.bin", "folder")
    assert mistakes(row[0]) == [make_answer(row, place)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_real_permissions(place):
    (place / "good.idx").chmod(0)
    (place / "folder").chmod(0o500)
    for row in (UNREADABLE[0], UNREADABLE[2]):
        assert mistakes(row[0]) == [make_answer(row, place)]


def test_no_rule_is_left_out_here(place, forbidden, monkeypatch):
    def everything():
        for changes, *_ in CASES:
            mistakes(changes)
        forbidden("good.idx", "half.bin", "folder")
        for changes, *_ in UNREADABLE:
            mistakes(changes)
        monkeypatch.setenv("PATH", "")  # no compiler
        mistakes("--torch-compile")

    assert yields_missed([REPO / "megatron_lite/config/rules/files.py"], everything) == []
