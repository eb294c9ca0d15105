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


MADE = "check the prefix, or make it with megatron-lite preprocess."
BPE = "!--tokenizer-type !--vocab-size --merge-file file "
CASES = read_table(
    """
!--mock-data --data-path none | --data-path none: there is no none.bin; MADE
!--mock-data --data-path half | --data-path half: there is no half.idx; MADE
!--mock-data --data-path good.bin | --data-path good.bin: is a file's name; give the prefix without its ending: good.
!--mock-data --data-path a/none.idx | --data-path a/none.idx: is a file's name; give the prefix without its ending: a/none.
!--mock-data --data-path megatron | --data-path megatron: there is no megatron.bin; did you mean megatron_text_document?
!--mock-data --data-path tree | --data-path tree: tree.bin is a folder; give the prefix of a .bin/.idx pair of files.
!--mock-data --data-path 1 good 2 none | --data-path none: there is no none.bin; MADE
!--mock-data --data-path good 3 good | --data-path 3: there is no 3.bin; MADE
!--mock-data --data-path 1 good x good | --data-path 1 good x good: 'x' should be a weight; give one for every prefix or none.
!--mock-data --data-path 1 good 0 good | --data-path: weights [1.0, 0.0] must all be above 0; leave out a data set that is unused.
!--mock-data --train-data-path good --valid-data-path none | --valid-data-path none: there is no none.bin; MADE
!--mock-data --train-data-path good --test-data-path none | --test-data-path none: there is no none.bin; MADE
BPE --vocab-file none.json | --vocab-file none.json: there is no such file; check the path.
BPE --vocab-file folder | --vocab-file folder: is a folder; give the file.
BPE --vocab-file file --merge-file none | --merge-file none: there is no such file; check the path.
--save file | --save file: {here}/file is a file; give a folder.
--save file/below/it | --save file/below/it: {here}/file is a file; give a folder.
--save dangling | --save dangling: {here}/dangling is a file; give a folder.
--tensorboard-dir file/tb | --tensorboard-dir file/tb: {here}/file is a file; give a folder.
--run-dir file | --run-dir file: {here}/file is a file; give a folder.
--record-memory-history --memory-snapshot-path file/s.pickle | --memory-snapshot-path file: {here}/file is a file; give a folder.
--load file | --load file: is a file; give the folder that holds latest_checkpointed_iteration.txt.
--load none --exit-on-missing-checkpoint | --load none: there is no such folder, which --exit-on-missing-checkpoint wants; check the path.
--pretrained-checkpoint none | --pretrained-checkpoint none: there is no such folder; check the path, or drop it.
""",
    MADE=MADE,
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


@pytest.mark.parametrize(("changes", "answer"), CASES)
def test_one_line_names_flag_path_and_remedy(changes, answer, place):
    assert mistakes(changes) == [answer.format(here=place)]


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
!--mock-data --data-path good | --data-path good.idx: may not be read; change its permissions.
BPE --vocab-file folder/../half.bin | --vocab-file folder/../half.bin: may not be read; change its permissions.
--save folder/new | --save folder/new: {here}/folder may not be written; choose another folder, or change its permissions.
""",
    BPE=BPE,
)


@pytest.mark.parametrize(("changes", "answer"), UNREADABLE)
def test_permissions(changes, answer, place, forbidden):
    forbidden("good.idx", "half.bin", "folder")
    assert mistakes(changes) == [answer.format(here=place)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_real_permissions(place):
    (place / "good.idx").chmod(0)
    (place / "folder").chmod(0o500)
    assert mistakes(UNREADABLE[0][0]) == [UNREADABLE[0][1]]
    assert mistakes(UNREADABLE[2][0]) == [UNREADABLE[2][1].format(here=place)]


def test_no_rule_is_left_out_here(place, forbidden, monkeypatch):
    def everything():
        for changes, _ in CASES:
            mistakes(changes)
        forbidden("good.idx", "half.bin", "folder")
        for changes, _ in UNREADABLE:
            mistakes(changes)
        monkeypatch.setenv("PATH", "")  # no compiler
        mistakes("--torch-compile")

    assert yields_missed([REPO / "megatron_lite/config/rules/files.py"], everything) == []
