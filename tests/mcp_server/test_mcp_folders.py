"""What lies outside of the named folders is refused, however it is written."""

import pytest

from megatron_lite.errors import UserError
from megatron_lite.mcp_server.calls import FitCall, PlanCall, ReportCall
from megatron_lite.mcp_server.folders import NamedFolders


@pytest.fixture
def folders(tmp_path):
    """Two named folders, a third one outside, and links between them."""
    for name in ("one", "two", "outside"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "train.sh").write_text("")
        (tmp_path / name / "train.py").write_text("")
    (tmp_path / "one" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "one" / "inner").symlink_to(tmp_path / "two" / "run")
    return NamedFolders((tmp_path / "one", tmp_path / "two"))


def test_paths_within_are_found(folders, tmp_path):
    assert folders.find("run") == tmp_path / "one" / "run"
    assert folders.find(str(tmp_path / "two" / "run")) == tmp_path / "two" / "run"
    assert folders.find("run/../run") == tmp_path / "one" / "run"
    assert folders.find("inner") == tmp_path / "two" / "run", "a link into another named folder"
    assert folders.find(".") == tmp_path / "one"


@pytest.mark.parametrize("path", ["/etc", "../outside", "link", "link/run", "run/../../outside", "..", "/", "//etc"])
def test_paths_outside_are_refused(folders, path):
    for call in (ReportCall(paths=(path,)), ReportCall(paths=("run", path))):
        with pytest.raises(UserError, match="outside"):
            call.build_command(folders)


@pytest.mark.parametrize("path", ["none", "run/none", "a\0b", "~", "x" * 5000])
def test_paths_to_nothing_are_refused(folders, path):
    with pytest.raises(UserError) as raised:
        folders.find(path)
    assert len(str(raised.value)) < 500 and "\0" not in str(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        ("--load", "/etc"), ("--load=/etc",), ("--data-path", "0.5", "/etc/a", "0.5", "b"), ("--data-path=1,/etc/a",),
        ("--vocab-file", "link/vocab.json"), ("--tokenizer-model", "../outside/x"), ("--yaml-cfg", "run/../../x"),
        ("/outside/train.sh",), ("link/train.sh",), ("torchrun", "/etc/pretrain_gpt.py"), ("train.sh", "/etc"),
        ("--exact",), ("--lr", "1", "--json=run/x"), ("--page", "x"),
    ],
)  # fmt: skip
def test_words_of_a_launch_command_are_held_to_the_folders(folders, words):
    with pytest.raises(UserError):
        PlanCall(command=words).build_command(folders)
    with pytest.raises(UserError):
        PlanCall(command=("train.sh",), add=words).build_command(folders)


def test_a_launch_command_within_is_planned_in_its_folder(folders, tmp_path):
    call = PlanCall(command=("train.sh", "run", "--load=run", "--lr", "1e-3"), gpu=("H100",), gpus=8, drop=("a", "b"))
    command = call.build_command(folders)
    assert command.folder == tmp_path / "one" and command.confined
    assert command.words == ("--", str(tmp_path / "one" / "train.sh"), "run", "--load=run", "--lr", "1e-3")
    assert command.options == ("--launch=1", "--gpus=8", "--drop=a,b", "--gpu", "H100")


@pytest.mark.parametrize("script", ["../outside/train.py", "link/train.py", "train.sh", "run", "/usr/bin/env"])
def test_only_scripts_within_are_run(folders, script):
    with pytest.raises(UserError):
        FitCall(script=script).build_command(folders)
