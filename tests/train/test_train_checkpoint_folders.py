"""Folders of checkpoints as people, other programs and killed runs leave them."""

import contextlib
import io
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.checkpoint_damage import flip, iterations
from support.launch import DROPOUT, Interrupts, checkpoint, flags, losses, on_ranks, quietly, steps, train
from support.wording import wording

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.folder import Background, CheckpointDir, missing, newest
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import TRACKER_FILE, write_atomically
from megatron_lite.train import checkpoint as train_checkpoint

pytestmark = pytest.mark.usefixtures("process_group")

WHOLE = "--train-iters 8 --lr-decay-style constant --lr-decay-iters 8"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoints of iterations 2, 4 and 6 of a run of 8; not to be changed."""
    parent = tmp_path_factory.mktemp("saved")
    quietly(flags(WHOLE, *DROPOUT, "--save-interval 2 --exit-interval 6 --save", parent / "save"), parent / "run")
    return parent / "save"


def resume(tmp_path, *words) -> tuple[list[int], str]:
    """The iterations that a run with these flags does, and its output."""
    _, out = quietly(flags(WHOLE, *DROPOUT, *words), tmp_path / "resumed")
    return [record["iteration"] for record in steps(tmp_path / "resumed")], out


def refusal(tmp_path, *words) -> str:
    with pytest.raises(CheckpointError) as caught:
        quietly(flags(WHOLE, *DROPOUT, *words), tmp_path / "refused")
    [line] = caught.value.lines
    assert "\n" not in line
    return line


def test_an_odd_tracker(copy, tmp_path):
    for text in ("9" * 300, "1_0", "٤", "4 5", "-4", ""):
        (copy / TRACKER_FILE).write_text(text, encoding="utf-8")
        words = "which is not there" if len(text) > 9 else "holds no iteration"
        assert words in refusal(tmp_path, "--load", copy), text


def test_a_tracker_that_cannot_be_read(copy, tmp_path):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        (copy / TRACKER_FILE).unlink()
        make(copy / TRACKER_FILE)
        reason = "Is a directory" if make is os.mkdir else "Not a regular file"
        assert wording("train/cannot-be-read", TRACKER_FILE, reason) in refusal(tmp_path, "--load", copy)


def test_a_tracker_behind_a_link(copy, tmp_path):
    """As in the caches of downloads; and as an editor leaves it."""
    (tmp_path / "blob").write_text(" 4 \n\n")
    (copy / TRACKER_FILE).unlink()
    (copy / TRACKER_FILE).symlink_to(tmp_path / "blob")
    assert resume(tmp_path, "--load", copy)[0] == [5, 6, 7, 8]
    assert wording("train/there-is-no") in refusal(tmp_path, f"--ckpt-step {'9' * 15} --load", copy)


@pytest.mark.parametrize("way", ["", "--ckpt-format torch"])
def test_a_checkpoint_in_place_of_its_folder(tmp_path, way):
    """Random weights instead would go unnoticed."""
    save = tmp_path / "save"
    quietly(flags(WHOLE, way, "--exit-interval 1 --save", save), tmp_path / "run")
    message = refusal(tmp_path, "--load", save / "iter_0000001")
    assert wording("train/is-checkpoint-itself") in message and wording("train/give-folder-around-it", save) in message


def test_what_is_wrong_with_pretrained_weights_names_their_flag(copy, tmp_path):
    (copy / TRACKER_FILE).write_text("5")
    message = refusal(tmp_path, "--pretrained-checkpoint", copy)
    assert (
        message.startswith(f"--pretrained-checkpoint {copy}: ")
        and wording("train/which-is-not-there", "iter_0000005") in message
    )
    (copy / TRACKER_FILE).write_text("2")
    flip(copy / "iter_0000002" / "__0_0.distcp")
    message = refusal(tmp_path, "--pretrained-checkpoint", copy)
    assert message.startswith(f"--pretrained-checkpoint {copy}: iter_0000002 is damaged")


def test_pretrained_weights_are_a_checkpoint_that_does_not_miss(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    words = ("--exit-on-missing-checkpoint --load", tmp_path / "empty", "--pretrained-checkpoint", saved)
    assert wording("train/loaded-weights-of-iteration", 6) in resume(tmp_path, *words)[1]


def test_a_release_is_weights_only(copy, saved, tmp_path):
    """As in Megatron, whatever else it holds."""
    os.replace(copy / "iter_0000006", copy / "release")
    (copy / TRACKER_FILE).write_text("release")
    done, out = resume(tmp_path, "--load", copy)
    assert wording("train/loaded-weights-of-iteration", 6) in out and done == list(range(1, 9))
    released = losses(tmp_path / "resumed")
    resume(tmp_path / "tuned", "--finetune --load", saved)
    assert released == losses(tmp_path / "tuned" / "resumed")


def test_a_folder_copied_and_moved_still_resumes(saved, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    shutil.copytree(saved, tmp_path / "disk" / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "moved")
    monkeypatch.chdir(tmp_path)
    assert resume(tmp_path, "--load link --save disk/moved")[0] == [7, 8]
    assert (tmp_path / "link" / TRACKER_FILE).read_text() == "8"


def leave_committing(save: Path, newer: int, tracked: int):
    """As a run leaves it that is killed after it renamed `newer`, before it named it in the tracker."""
    shutil.copytree(save / f"iter_{newer:07d}", save / f".iter_{newer:07d}.unfinished")
    shutil.rmtree(save / f"iter_{newer:07d}")
    (save / TRACKER_FILE).write_text(str(tracked))

    def die(path, text):
        if path.name == TRACKER_FILE:
            raise KeyboardInterrupt
        write_atomically(path, text)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folder, "write_atomically", die)
        folder.commit(CheckpointDir(save, f"iter_{newer:07d}"))


def test_an_edited_tracker_outweighs_what_a_killed_run_announced(copy, tmp_path):
    leave_committing(copy, 6, 4)
    assert newest(copy).name == "iter_0000006"
    (copy / TRACKER_FILE).write_text("2")
    assert newest(copy).name == "iter_0000002"


def test_a_checkpoint_that_stepped_aside_gets_its_name_back_and_only_remains_are_cleared_away(copy, tmp_path):
    os.replace(copy / "iter_0000006", copy / ".iter_0000006.previous")
    for name in (".iter_0000003.unfinished", ".release.retired", ".hf.unfinished"):
        (copy / name).mkdir()
    resume(tmp_path, "--load", copy, "--save", copy)
    assert iterations(copy) == [2, 4, 6, 8] and checkpoint(copy, 6)["record"].iteration == 6
    assert [path.name for path in copy.glob(".*")] == [".hf.unfinished"]


def test_retention_keeps_links(copy, tmp_path):
    """As in Megatron: what a link names may be all that somebody has of it."""
    os.replace(copy / "iter_0000006", tmp_path / "elsewhere")
    (copy / "iter_0000006").symlink_to(tmp_path / "elsewhere")
    resume(tmp_path, "--save-interval 1 --save-retain-interval 4 --save", copy, "--load", copy)
    assert iterations(copy) == [2, 4, 6, 8] and missing(copy / "iter_0000006") is None


def test_a_checkpoint_that_cannot_be_retired_does_not_stop_the_run(copy, tmp_path, monkeypatch):
    def refuse(slot):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(folder, "delete_checkpoint", refuse)
    resume(tmp_path, "--save-interval 2 --save-retain-interval 8 --save", copy, "--load", copy)
    assert iterations(copy) == [2, 4, 6, 8]


def test_a_progress_log_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "save" / "progress.txt").mkdir(parents=True)
    _, out = resume(tmp_path, "--log-progress --save", tmp_path / "save")
    assert "warning: --log-progress: " in out and "(Is a directory)" in out and iterations(tmp_path / "save") == [8]


def load_from_a_folder_that_looks_older(world, save: str):
    """On rank 1 the tracker is the one of before, as network folders may show it."""
    if world.rank == 1:
        folder.newest = lambda source: CheckpointDir(source, "iter_0000002")
    train(flags(WHOLE, *DROPOUT, "--load", save), Path(f"rank {world.rank}"), world)


def test_all_ranks_load_what_the_first_one_chose(saved, tmp_path):
    """Else each would go on with weights of its own, and nothing would tell."""
    on_ranks(load_from_a_folder_that_looks_older, tmp_path, str(saved))
    assert [record["iteration"] for record in steps(tmp_path / "rank 1")] == [7, 8]


def test_a_save_in_the_background_that_is_given_up_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(train_checkpoint, "SECONDS_TO_FINISH", 0.1)
    monkeypatch.setattr(Background, "_run", lambda self, work: time.sleep(20))

    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(KeyboardInterrupt):
        argv = flags(WHOLE, "--async-save --save-interval 3 --save", tmp_path / "save")
        train(argv, tmp_path / "run", watchers=[Interrupts(4)])
    assert wording("train/checkpoint-in-background-is", 0.1) in out.getvalue()


def test_the_time_limit_holds_for_saves(tmp_path, monkeypatch):
    """gloo's own is 30 minutes: so long would the others wait, in a save, for a rank that hangs."""
    inner, limits = dist.new_group, []

    def new_group(*args, timeout=None, **named):
        limits.append(timeout)
        return inner(*args, timeout=timeout, **named)

    monkeypatch.setattr(dist, "new_group", new_group)
    words = "--train-iters 1 --distributed-timeout-minutes 50 --save"
    quietly(flags(WHOLE, words, tmp_path / "save"), tmp_path / "run")
    assert limits == [timedelta(minutes=50)]


def retire_meanwhile(monkeypatch, save: Path, moment: str):
    """Another run saves on: at its first look, or after it, the loading run finds the newest checkpoint gone."""
    inner, seen = getattr(folder, moment), []

    def look(path, *rest):
        if not seen and path.name == "iter_0000004":
            seen.append(path)
            (save / TRACKER_FILE).write_text("6")
            shutil.rmtree(path)
        return inner(path, *rest)

    monkeypatch.setattr(folder, moment, look)


@pytest.mark.parametrize("moment", ["missing", "damage"])
def test_a_checkpoint_that_another_run_retires_meanwhile(copy, tmp_path, monkeypatch, moment):
    (copy / TRACKER_FILE).write_text("4")
    retire_meanwhile(monkeypatch, copy, moment)
    done, out = resume(tmp_path, "--load", copy)
    assert done == [7, 8] and "damaged" not in out


def test_a_checkpoint_that_vanishes_before_it_is_read(copy, tmp_path, monkeypatch):
    inner = train_checkpoint.open_checkpoint

    def open_late(path):
        shutil.rmtree(path)
        return inner(path)

    monkeypatch.setattr(train_checkpoint, "open_checkpoint", open_late)
    assert wording("checkpoint/there-is-no-such") in refusal(tmp_path, "--load", copy)
