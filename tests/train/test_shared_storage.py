"""Folders that not all ranks share: --save and --load on a disk that each node has of its own."""

import contextlib
import io
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from support.forks import Fork
from support.launch import environment, flags, free_port, on_ranks, train
from support.paths import REPO
from support.waiting import LIMIT_S
from support.wording import wording

from megatron_lite.checkpoint import shared_storage
from megatron_lite.checkpoint.shared_storage import StorageView, compare_views, describe_views, list_files, list_unseen
from megatron_lite.config.world import World
from megatron_lite.errors import CheckpointError
from megatron_lite.train import checkpoint_checks

SHORT = "--train-iters 4 --lr-decay-iters 4 --save-interval 2"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(shared_storage, "PAUSES_S", (0.01, 0.01))


def test_a_file_that_is_absent_or_short_is_unseen(tmp_path, impatient):
    (tmp_path / "whole").write_bytes(b"1234")
    (tmp_path / "short").write_bytes(b"12")
    assert list_unseen(tmp_path, {"whole": 4}) == []
    assert list_unseen(tmp_path, {"whole": 4, "short": 4, "absent": 4}) == ["short", "absent"]


def test_a_file_that_comes_late_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_storage, "PAUSES_S", (0.01,) * 1000)
    late = threading.Timer(0.05, lambda: (tmp_path / "late").write_bytes(b"1234"))
    late.start()
    assert list_unseen(tmp_path, {"late": 4}) == []
    late.join()


def test_views_are_compared_until_they_agree(impatient):
    lacks_one, lacks_none = StorageView(1, "b:/save", ("x",)), StorageView(1, "b:/save", ())
    first = StorageView(0, "a:/save", ())
    looks = iter([[first, lacks_one], [first, lacks_none]])
    assert compare_views(lambda: next(looks)) == []
    assert compare_views(lambda: [first, lacks_one]) == [lacks_one]
    # what nobody sees is damage, which is told elsewhere
    assert compare_views(lambda: [StorageView(0, "a:/save", ("x",)), lacks_one]) == []


def test_a_message_names_few_of_many_ranks_and_files():
    names = tuple(f"__{number}_0.distcp" for number in range(9))
    text = describe_views([StorageView(rank, f"node{rank}:/save", names) for rank in range(1, 64)])
    assert "node1:/save" in text and "and 5 more" in text and "59 more ranks" in text and "node40" not in text


def test_files_of_a_checkpoint_are_those_of_its_manifest(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").touch()
    assert list_files(tmp_path) == ["mp_rank_00/model_optim_rng.pt"]


def save_on_own_disks(world: World, outcome: str):
    """For on_ranks: each rank in a folder of its own, where a relative --save is another folder. Writes what happened."""
    shared_storage.PAUSES_S = (0.01, 0.01)
    folder = Path(f"node{world.rank}")
    folder.mkdir()
    os.chdir(folder)
    checked_at_the_start = checkpoint_checks._require_shared_save
    told = {}
    for name, words, checks in (
        ("start", "", True),
        ("start_torch", "--ckpt-format torch", True),
        ("start_goes_on", "--no-exit-on-save-failure", True),
        ("save", "", False),
        ("async", "--async-save", False),
        ("goes_on", "--no-exit-on-save-failure", False),
    ):
        checkpoint_checks._require_shared_save = checked_at_the_start if checks else lambda *_: None
        out, error = io.StringIO(), None
        with contextlib.redirect_stdout(out):
            try:
                train(flags(SHORT, words, "--save", name), Path("run"), world)
            except CheckpointError as refusal:
                error = str(refusal)
        left = sorted(path.name for path in Path(name).glob("*"))
        hidden = sorted(path.name for path in Path(name).glob(".iter*"))
        told[name] = {"error": error, "out": out.getvalue(), "left": left, "hidden": hidden}
    Path(f"../{outcome}.{world.rank}").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("disks")
    on_ranks(save_on_own_disks, folder, "told")
    return [json.loads((folder / f"told.{rank}").read_text()) for rank in range(2)]


def test_ranks_with_folders_of_their_own_are_told_before_they_train(told):
    first, second = (one["start"] for one in told)
    assert first["error"] == second["error"] and "rank 1" in first["error"] and "node1/start" in first["error"]
    assert "iteration" not in first["out"] and first["left"] == second["left"] == []


def test_one_file_of_the_first_rank_is_whole_on_its_node(told):
    first, second = (one["start_torch"] for one in told)
    assert first["error"] is None and "node1/start_torch" in first["out"]
    assert "iter_0000004" in first["left"] and second["left"] == []


@pytest.mark.parametrize("name", ["save", "async", "goes_on", "start_goes_on"])
def test_nothing_is_committed_that_the_first_rank_does_not_see(told, name):
    first, second = (one[name] for one in told)
    assert "saved iteration" not in first["out"]
    assert "latest_checkpointed_iteration.txt" not in first["left"] + second["left"]
    assert not [file for file in first["left"] + second["left"] if file.startswith("iter_")]
    assert first["hidden"] == second["hidden"] == []
    says = first["error"] or first["out"]
    assert "__1_0.distcp" in says and "rank 1" in says and f"node1/{name}" in says
    assert (first["error"] is None) == ("goes_on" in name)


def load_from_own_disks(world: World, outcome: str):
    """For on_ranks: the first rank has a checkpoint in its folder; what the second one has is the test's."""
    shared_storage.PAUSES_S = (0.01, 0.01)
    os.chdir(f"node{world.rank}")
    error = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            train(flags(SHORT, "--load save --train-iters 6 --override-opt-param-scheduler"), Path("run"), world)
        except CheckpointError as refusal:
            error = str(refusal)
    Path(f"../{outcome}.{world.rank}").write_text(json.dumps({"error": error, "out": out.getvalue()}))


def save_in_common(world: World):
    """For on_ranks."""
    train(flags(SHORT, "--save save"), Path("run"), world)


def test_a_checkpoint_is_loaded_where_all_ranks_see_it_or_have_copies(tmp_path):
    on_ranks(save_in_common, tmp_path)
    newest = Path("save/iter_0000004")
    for rank in range(2):
        shutil.copytree(tmp_path / "save", tmp_path / f"node{rank}/save")
    on_ranks(load_from_own_disks, tmp_path, "copies")
    copies = json.loads((tmp_path / "copies.0").read_text())
    assert copies["error"] is None and "loaded iteration 4" in copies["out"]
    # as torch leaves them where each node wrote to its own disk
    (tmp_path / "node0" / newest / "__1_0.distcp").unlink()
    for path in (tmp_path / "node1" / newest).iterdir():
        if path.name != "__1_0.distcp":
            path.unlink()
    on_ranks(load_from_own_disks, tmp_path, "parts")
    parts = [json.loads((tmp_path / f"parts.{rank}").read_text()) for rank in range(2)]
    assert parts[0]["error"] == parts[1]["error"]
    assert "rank 0" in parts[0]["error"] and "rank 1" in parts[0]["error"] and "__1_0.distcp" in parts[0]["error"]
    shutil.rmtree(tmp_path / "node1/save")
    on_ranks(load_from_own_disks, tmp_path, "absent")
    absent = json.loads((tmp_path / "absent.1").read_text())
    assert "rank 1" in absent["error"] and "node1/save/iter_0000004" in absent["error"]


IMPATIENT = f"""
import runpy
from megatron_lite.checkpoint import shared_storage
shared_storage.PAUSES_S = (0.01, 0.01)
runpy.run_path({str(REPO / "pretrain_gpt.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_two_nodes_end_with_one_line_and_save_nothing(tmp_path):
    script = tmp_path / "impatient.py"
    script.write_text(IMPATIENT)
    port, processes = str(free_port()), []
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(tmp_path / f"out{rank}", "w") as out:
            words = [str(script), *flags(SHORT, "--save save")]
            processes.append(
                Fork(words, env=environment() | variables, cwd=tmp_path / f"node{rank}", stdout=out, stderr=out)
            )
    assert [process.wait(timeout=LIMIT_S) for process in processes] == [2, 2]
    assert wording("train/error-save-is-not", "--save") in (tmp_path / "out0").read_text()
