"""Checkpoints that must not be loaded, and saves that fail: one line, and no earlier checkpoint is lost."""

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import xxhash
from support.checkpoint_damage import flip, iterations
from support.data_maker import contents
from support.launch import (
    DROPOUT,
    checkpoint,
    environment,
    flags,
    on_ranks,
    plan_of,
    pretrain,
    quietly,
    steps,
    train,
)
from support.paths import TESTS
from support.wording import wording

from megatron_lite.checkpoint.folder import missing, newest, reserved, wrong
from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.errors import CheckpointError
from megatron_lite.instruments.base import Instrument
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.run_folder import TRACKER_FILE
from megatron_lite.train import checkpoint_checks
from megatron_lite.train.checkpoint_checks import require_shape, warn_of_rotary

pytestmark = pytest.mark.usefixtures("process_group")

WHOLE = (
    "--train-iters 8 --lr-decay-style constant --lr-warmup-iters 3 --lr-decay-iters 8 --eval-interval 3 --eval-iters 1"
)

CPU = torch.device("cpu")


def file_of(save: Path, iteration: int, name: str = "__0_0.distcp") -> Path:
    return save / f"iter_{iteration:07d}" / name


def save_until(folder: Path, words: str) -> Path:
    quietly(flags(WHOLE, *DROPOUT, words, "--save", folder / "save"), folder / "run")
    return folder / "save"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The checkpoint of iteration 4 of an fp32 run of 8 iterations; not to be changed."""
    return save_until(tmp_path_factory.mktemp("saved"), "--exit-interval 4")


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory) -> Path:
    """Those of iterations 2, 4 and 6."""
    return save_until(tmp_path_factory.mktemp("two"), "--save-interval 2 --exit-interval 6")


def resume(saved, folder, *words):
    """Train to the end from a copy of `saved`; what was printed."""
    return quietly(flags(WHOLE, *DROPOUT, *words, "--load", saved), folder)[1]


# --- what is refused


def refusal(load, tmp_path, *words) -> str:
    with pytest.raises(CheckpointError) as caught:
        resume(load, tmp_path / "refused", *words)
    assert len(caught.value.lines) == 1 and "\n" not in caught.value.lines[0]
    assert str(load) in str(caught.value)
    return str(caught.value)


OTHER_SCHEDULE = "--lr 5e-3 --lr-decay-style cosine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hidden-size 64 --num-layers 3", "--hidden-size is 64, the checkpoint's 32|--num-layers is 3, the"),
        ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights|False|True"),
        ("--swiglu --vocab-size 200", "--swiglu|gelu_tanh|--vocab-size|256|128"),
        ("--optimizer sgd", "--optimizer is sgd, the checkpoint's adam|--no-load-optim"),
        (OTHER_SCHEDULE, "--lr is 0.005, the checkpoint's 0.01|--lr-decay-style is cosine, the checkpoint's constant"),
        (OTHER_SCHEDULE, "--override-opt-param-scheduler|--use-checkpoint-opt-param-scheduler"),
    ],
)
def test_what_differs_is_refused(saved, tmp_path, words, said):
    message = refusal(saved, tmp_path, words)
    assert all(fragment in message for fragment in said.split("|")), message


def test_what_differs_needs_a_word(saved, tmp_path):
    resume(saved, tmp_path / "sgd", "--optimizer sgd --no-load-optim")
    resume(saved, tmp_path / "no optimizer", OTHER_SCHEDULE, "--no-load-optim")
    rates = {}
    for word in ("", "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        resume(saved, tmp_path / (word or "same"), *([OTHER_SCHEDULE, word] if word else []))
        rates[word] = [record["next_lr"] for record in steps(tmp_path / (word or "same"))]
    assert rates["--use-checkpoint-opt-param-scheduler"] == rates[""] == [1e-2] * 4
    assert rates["--override-opt-param-scheduler"][0] == pytest.approx(5e-3 * 0.5 * 1.3090169943749475)


def test_megatrons_interpolation_factor_is_noted(logged):
    """Megatron-LM 0.16.1 keeps the flag in its arguments and trains without it."""
    rope = "--position-embedding-type rope"
    without, factor = (plan_of(flags(rope, more)) for more in ("", "--rotary-seq-len-interpolation-factor 4"))
    made = CheckpointRecord(0, 0, dataclasses.asdict(factor.shape), "fp32")
    theirs, ours = (dataclasses.replace(made, trainer=trainer) for trainer in ("Megatron-LM", "megatron_lite"))
    for record, plan in ((theirs, factor), (ours, factor), (theirs, without)):
        require_shape(Path("X"), record, plan.shape, plan.vocab_size, None)
    with pytest.raises(CheckpointError, match="--rotary-seq-len-interpolation-factor"):
        require_shape(Path("X"), ours, without.shape, without.vocab_size, None)
    for record, given in ((theirs, None), (ours, None), (ours, 4.0), (theirs, 4.0)):
        assert logged.text == ""
        warn_of_rotary(Path("X"), record, given)
    assert wording("train/leave-flag-out-if") in logged.text


def test_the_checkpoints_schedule_brings_its_weight_decay(saved):
    """Constant or growing: what the matrices lose in a step is what the followed schedule says."""
    plan = plan_of(flags(WHOLE, "--weight-decay 0"))
    growing = plan_of(flags(WHOLE, "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5"))
    constant = plan_of(flags(WHOLE, "--weight-decay 0.5"))
    for followed, in_engine, changes in ((constant, 0.5, False), (growing, 0.0, True), (plan, 0.0, False)):
        for start in (plan, growing, constant):
            optimizer = Optimizer(start, [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))], CPU)
            optimizer.follow(followed.learning_rate)
            assert [group["weight_decay"] for group in optimizer.engine.param_groups] == [in_engine, 0.0]
            assert optimizer._decay_changes == changes


def test_no_checkpoint_yet(tmp_path):
    _, out = quietly(flags(WHOLE, "--load", tmp_path / "nothing"), tmp_path / "run")
    assert wording("train/no-checkpoint-yet") in out and len(steps(tmp_path / "run")) == 8
    (tmp_path / "nothing").mkdir(exist_ok=True)
    message = refusal(tmp_path / "nothing", tmp_path, "--exit-on-missing-checkpoint")
    assert "--exit-on-missing-checkpoint" in message


@pytest.mark.parametrize(
    "tracker, words, said",
    [
        ("soon", "", f"{TRACKER_FILE} holds no iteration"),
        ("6", "", "iter_0000006, which is not there; give --ckpt-step, there are complete ones of iteration 4"),
        ("4", "--ckpt-step 3", "--ckpt-step 3: there is no"),
    ],
)
def test_a_tracker_or_step_that_names_nothing(copy, tmp_path, tracker, words, said):
    (copy / TRACKER_FILE).write_text(tracker)
    assert said in refusal(copy, tmp_path, words)


def test_a_lost_tracker(copy, tmp_path):
    """Starting from random weights beside weeks of work would be the worst answer."""
    (copy / TRACKER_FILE).unlink()
    message = refusal(copy, tmp_path)
    assert f"no {TRACKER_FILE}" in message and "--ckpt-step" in message and "iteration 4" in message
    resume(copy, tmp_path / "resumed", "--ckpt-step 4")


DAMAGES = {
    "cut": (lambda folder: os.truncate(folder / "__0_0.distcp", 5000), "__0_0.distcp has 5000 bytes instead of"),
    "emptied": (lambda folder: os.truncate(folder / "__0_0.distcp", 0), "__0_0.distcp has 0 bytes instead of"),
    "bit": (lambda folder: flip(folder / "__0_0.distcp"), "__0_0.distcp does not have the contents that were written"),
    "lost": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "metadata": (lambda folder: flip(folder / ".metadata"), ".metadata does not have the contents"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "record": (lambda folder: flip(folder / "training_state.json"), "training_state.json does not have the contents"),
    "manifest": (lambda folder: os.truncate(folder / "manifest.json", 20), "manifest.json is damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "no file": (lambda folder: [path.unlink() for path in folder.iterdir()], "manifest.json is missing"),
}


@pytest.mark.parametrize("kind", ["bit", "no manifest"])
def test_a_damaged_checkpoint_without_an_earlier_one(copy, tmp_path, kind):
    act, words = DAMAGES[kind]
    act(copy / "iter_0000004")
    before = contents(copy)
    message = refusal(copy, tmp_path)
    assert words in message and wording("train/no-earlier-one") in message
    assert words in refusal(copy, tmp_path, "--ckpt-step 4")
    assert contents(copy) == before, "nothing is changed on disk"


def test_two_damaged_checkpoints_are_passed_over_and_a_step_can_be_named(two_saved, tmp_path):
    copy = Path(shutil.copytree(two_saved, tmp_path / "copy"))
    flip(file_of(copy, 6))
    assert "loaded iteration 4" in resume(copy, tmp_path / "named", "--ckpt-step 4")
    flip(file_of(copy, 4))
    out = resume(copy, tmp_path / "run")
    assert (
        wording("train/going-back-to", "iter_0000004") in out
        and wording("train/going-back-to", "iter_0000002") in out
        and "loaded iteration 2" in out
    )


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_word(two_saved, tmp_path, kind):
    copy = Path(shutil.copytree(two_saved, tmp_path / "copy"))
    act, words = DAMAGES[kind]
    act(copy / "iter_0000006")
    out = resume(copy, tmp_path / "run", "--save", copy)
    assert words in out and "iter_0000006 is damaged" in out and wording("train/going-back-to", "iter_0000004") in out
    assert [record["iteration"] for record in steps(tmp_path / "run")] == [5, 6, 7, 8]
    assert newest(copy).name == "iter_0000008" and wrong(copy / "iter_0000008") is None


def test_without_our_own_files_it_is_a_folder_of_megatrons(copy, tmp_path):
    file_of(copy, 4, "training_state.json").unlink()
    file_of(copy, 4, "manifest.json").unlink()
    out = resume(copy, tmp_path / "run")
    assert "loaded iteration 4" in out and wording("train/random-states-of-megatron") in out
    file_of(copy, 4, "common.pt").write_bytes(b"")
    assert wording("train/common-pt-cannot-be") in refusal(copy, tmp_path)
    file_of(copy, 4, "common.pt").unlink()
    assert wording("train/common-pt-there-is") in refusal(copy, tmp_path)
    file_of(copy, 4, "metadata.json").unlink()
    assert "manifest.json is missing" in refusal(copy, tmp_path)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def forge(folder: Path, name: str, data: bytes):
    """A file of an attacker, who can also write the manifest."""
    (folder / name).write_bytes(data)
    manifest = folder / "manifest.json"
    files = json.loads(manifest.read_text())
    files["files"][name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
    manifest.write_text(json.dumps(files))


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_that_would_run_code(copy, tmp_path, name):
    trap = tmp_path / "ran"
    data = io.BytesIO()
    if name == ".metadata":
        pickle.dump(Evil(trap), data)
    else:
        torch.save(Evil(trap), data)
    if name == "__0_0.distcp":  # every tensor is said to be where the trap is
        metadata = pickle.loads(file_of(copy, 4, ".metadata").read_bytes())
        for place in metadata.storage_data.values():
            place.offset, place.length = 0, len(data.getvalue())
        forge(copy / "iter_0000004", ".metadata", pickle.dumps(metadata))
    forge(copy / "iter_0000004", name, data.getvalue())
    assert wording("checkpoint/cannot-be-read") in refusal(copy, tmp_path)
    assert not trap.exists()
    data.seek(0)
    torch.load(data, weights_only=False) if name == "__0_0.distcp" else pickle.load(data)
    assert trap.exists(), "the trap works where code is run"


def test_files_that_point_elsewhere(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "metadata")) / "iter_0000004"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{place.relative_path}"
    forge(folder, ".metadata", pickle.dumps(metadata))
    assert wording("checkpoint/cannot-be-read") in refusal(folder.parent, tmp_path)
    folder = Path(shutil.copytree(saved, tmp_path / "manifest")) / "iter_0000004"
    forge(folder, "../secret", b"x")
    assert "manifest.json is damaged" in refusal(folder.parent, tmp_path)


# --- saving that fails


def save_by(act):
    """torch.save for a checkpoint's file replaced by `act`; torch pickles messages between ranks with it too."""
    inner = torch.save

    def save(state, file, **named):
        return inner(state, file, **named) if named or isinstance(file, io.BytesIO) else act(state, file)

    return save


WAYS = ["", "--async-save", "--ckpt-format torch"]


@pytest.fixture
def limit():
    """limit(SIZE): files of this process become no longer than so many bytes; limit(): as before."""
    usual, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes=usual: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (usual, hard))


def full_disk(state, file):
    file.write(b"some of it")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk(copy, tmp_path, limit, way):
    before = contents(copy)
    limit(100_000)
    with pytest.raises(CheckpointError) as caught:
        resume(copy, tmp_path / "run", way, "--save", copy)
    limit()
    [line] = caught.value.lines
    assert "\n" not in line and f"--save {copy}" in line and "iter_0000008" in line and "untouched" in line
    why = "File too large|a file could not be written to its end"
    assert re.search(rf"\((rank 0: )({why}), [0-9.]+ [KMGT]iB free there\)", line)
    assert contents(copy) == before, "nothing half-written stays"
    resume(copy, tmp_path / "resumed")


@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_need_not_stop_the_run(copy, tmp_path, limit, way):
    """The checkpoint of iteration 6 cannot be written; that of 8 can."""

    class Room(Instrument):
        def begin(self, step):
            limit(100_000) if step == 2 else limit()

    words = f"{way} --save-interval 2 --no-exit-on-save-failure --log-interval {1 if way == '--async-save' else 1000} --load"
    _, out = quietly(flags(WHOLE, *DROPOUT, words, copy, "--save", copy), tmp_path / "run", [Room()])
    if way != "--async-save":  # whose thread may well write after the room is back
        assert "warning: --save" in out and "iter_0000006" in out and wording("train/training-goes-on") in out
        assert not (copy / "iter_0000006").exists()
    assert (copy / TRACKER_FILE).read_text() == "8" and checkpoint(copy, 8)["record"].iteration == 8


def test_a_save_that_fails_in_torch(copy, tmp_path, monkeypatch):
    """What torch makes of a disk that took no more; and retention spares what such a save would leave alone."""
    before = contents(copy)

    def fail(state, file):
        file.write(b"some of it")
        raise RuntimeError("[enforce fail] unexpected pos\nmore")

    for act in (fail, full_disk):
        monkeypatch.setattr(torch, "save", save_by(act))
        words = "--save-interval 1 --save-retain-interval 3"
        with pytest.raises(CheckpointError, match="could not be written") as caught:
            resume(copy, tmp_path / act.__name__, words, "--save", copy)
        assert "\n" not in str(caught.value) and contents(copy) == before
        monkeypatch.undo()


class Slow(Instrument):
    """Time for a thread."""

    def begin(self, step):
        if step > 20:
            time.sleep(0.02)


def test_a_save_in_the_background_that_failed_stops_the_run(tmp_path, monkeypatch):
    """Soon, not at the next save; and the state was that of the step when it began."""
    monkeypatch.setattr(torch, "save", save_by(full_disk))
    words = "--train-iters 120 --async-save --save-interval 20 --save"
    with pytest.raises(CheckpointError, match="No space left"):
        quietly(flags(words, tmp_path / "save"), tmp_path / "run", [Slow()])
    assert 20 < len(steps(tmp_path / "run")) < 110


def test_saving_the_same_iteration_again_never_leaves_a_gap(copy, tmp_path, monkeypatch):
    """The tracker names iteration 4 all the while; after every rename it must be there, complete."""
    inner, seen = os.replace, []

    def watch(source, target):
        inner(source, target)
        slot = newest(copy)
        seen.append((slot.name, missing(slot.folder)))

    monkeypatch.setattr(os, "replace", watch)
    quietly(flags(WHOLE, *DROPOUT, "--train-iters 4 --lr-decay-iters 8", "--save", copy), tmp_path / "run")
    assert len(seen) >= 5 and set(seen) == {("iter_0000004", None)}


def test_a_finished_run_that_is_started_again_keeps_its_checkpoint(copy, tmp_path):
    """With --no-load-optim it would else replace the moments by fresh ones."""
    before = file_of(copy, 4).stat()
    resume(copy, tmp_path / "run", "--train-iters 4 --no-load-optim --save", copy)
    after = file_of(copy, 4).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


# --- Ctrl-C


def interrupt_in(save: Path, iteration: int):
    """torch.save that gets Ctrl-C while it writes that checkpoint: torch takes it for a failure to write."""
    inner, done = torch.save, []

    def write(state, file):
        file.write(b"some of it")
        if (save / f".iter_{iteration:07d}.unfinished").exists() and not done:
            done.append(iteration)
            os.kill(os.getpid(), signal.SIGINT)
        inner(state, file)

    return save_by(write)


@pytest.mark.parametrize("way", ["", "--ckpt-format torch", "--no-exit-on-save-failure"])
def test_ctrl_c_during_a_save_is_an_interruption(copy, tmp_path, monkeypatch, way):
    before, handler = contents(copy), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(torch, "save", interrupt_in(copy, 8))
    with pytest.raises(KeyboardInterrupt):
        resume(copy, tmp_path / "run", way, "--save", copy)
    assert contents(copy) == before and signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_during_a_load_is_an_interruption(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", lambda *_, **named: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        resume(copy, tmp_path / "run")


def interrupt_all(world, save: str):
    """For on_ranks: Ctrl-C on a terminal, which all ranks get, while the second checkpoint is written."""
    torch.save = interrupt_in(Path(save), 4)
    try:
        train(flags(WHOLE, "--save-interval 2 --save", Path(save)), Path(f"rank {world.rank}"), world)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        os._exit(0)


def test_ctrl_c_during_a_save_on_two_ranks(tmp_path):
    outputs = on_ranks(interrupt_all, tmp_path, str(tmp_path / "save"))
    assert [output.splitlines()[-1] for output in outputs] == ["interrupted"] * 2
    assert newest(tmp_path / "save").name == "iter_0000002" and iterations(tmp_path / "save") == [2]


def test_ctrl_c_during_a_save_names_the_checkpoint_before_and_exits_130(tmp_path):
    save = tmp_path / "save"
    (tmp_path / "driver.py").write_text(
        f"import sys\nsys.path[:0] = {[str(TESTS), str(Path(__file__).parent)]!r}\nimport torch\nfrom megatron_lite.__main__ import train\n"
        "from test_train_checkpoint_safety import Path, interrupt_in\n"
        f"torch.save = interrupt_in(Path({str(save)!r}), 4)\nsys.exit(train(sys.argv[1:]))\n"
    )
    ended = pretrain(flags(WHOLE, "--save-interval 2 --save", save), script=tmp_path / "driver.py")
    assert ended.code == 130 and ended.err == "", ended.err
    assert wording("train/interrupted-goes-on-from", "--load", save, "iter_0000002") in ended.out
    assert json.loads((save / "run.json").read_text())["status"] == "interrupted"
    assert [path.name for path in save.glob(".*")] == []


# --- two runs on one folder


def test_a_second_run_on_the_folder_is_refused(tmp_path, monkeypatch):
    """It begins while the first one saves, and would clear that unfinished checkpoint away."""
    monkeypatch.setattr(checkpoint_checks, "MAX_SAVE_WAIT_S", 0)
    inner, argv, refused = torch.save, flags(WHOLE, "--save-interval 4 --save", tmp_path / "save"), []

    def second(state, file):
        if not refused:
            refused.append(None)
            with contextlib.suppress(CheckpointError):
                refused[0] = quietly(argv, tmp_path / "second")
        inner(state, file)

    monkeypatch.setattr(torch, "save", save_by(second))
    quietly(argv, tmp_path / "first")
    assert refused == [None] and iterations(tmp_path / "save") == [4, 8]
    assert [path.name for path in (tmp_path / "save").glob(".*")] == []


HOLDER = """
import os, sys, time
from pathlib import Path
from megatron_lite.checkpoint.folder import reserved
with reserved(Path(sys.argv[1]), 0, print):
    if os.fork() == 0:  # as a loader's worker that outlives its trainer
        os.close(1)
    else:
        print("held", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has reserved tmp_path/save, in a group of its own, together with a child."""
    command, pipe = [sys.executable, "-c", HOLDER, str(tmp_path / "save")], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, env=environment(), start_new_session=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_the_lock_ends_with_its_holder(tmp_path, holder):
    """kill -9; its child lives on. Said once: who is waited for, and that it has ended."""
    said = []

    def say(text):
        said.append(text)
        holder.kill()

    with reserved(tmp_path / "save", 100, say):
        assert len(said) == 2, said
        since = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+"
        who = (
            rf"\({re.escape(socket.gethostname())}, process {holder.pid}, {since}\); waiting for its end, 100 s at most"
        )
        assert re.fullmatch(rf"  --save \S+/save: another run saves there {who}", said[0])
        assert re.fullmatch(r"  --save \S+/save: that run has ended; going on after \d+ s", said[1])
        assert f"process {os.getpid()}," in (tmp_path / "save" / ".lock").read_text()
    assert list((tmp_path / "save").iterdir()) == []


CANNOT_SAVE = {  # the rank that cannot write, if it is not the folder
    "first": (0, ""),
    "second": (1, ""),
    "background": (1, "--async-save"),
    "one file": (0, "--ckpt-format torch"),
    "save": (None, ""),
}


def fail_to_save(world, folder: str):
    """For on_ranks."""
    checkpoint_checks.MAX_SAVE_WAIT_S = 0.5
    for name, (failing, words) in CANNOT_SAVE.items():
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == failing:
                patch.setattr(torch, "save", save_by(full_disk))
            try:
                train(flags(WHOLE, words, "--save", Path(folder, name)), Path(f"{name} of {world.rank}"), world)
            except CheckpointError as error:
                print(f"{name} refused: {error}")


def test_all_ranks_hear_of_a_failed_save_and_of_another_run(tmp_path, holder):
    for output in on_ranks(fail_to_save, tmp_path, str(tmp_path)):
        for name, (failing, _) in CANNOT_SAVE.items():
            [said] = re.findall(f"^{name} refused: --save (.*)", output, re.MULTILINE)
            if failing is None:
                assert f"process {holder.pid}, since " in said
                assert said.endswith(wording("train/still-after-s-end", 0))
            else:
                assert "No space left on device" in said and f"rank {failing}" in said
                assert list((tmp_path / name).iterdir()) == []
    assert list((tmp_path / "save").iterdir()) == [tmp_path / "save" / ".lock"]


@pytest.mark.slow
def test_a_refused_run_leaves_no_trace_and_exits_2(tmp_path, holder):
    """Its run folder is the save folder here, and holds the other run's run.json."""
    (tmp_path / "save" / "run.json").write_text("the other's")
    (tmp_path / "driver.py").write_text(
        "import sys\nfrom megatron_lite.__main__ import train\nfrom megatron_lite.train import checkpoint_checks\ncheckpoint_checks.MAX_SAVE_WAIT_S = 0.5\n"
        "sys.exit(train(sys.argv[1:]))\n"
    )
    ended = pretrain(flags(WHOLE, "--save", tmp_path / "save"), script=tmp_path / "driver.py")
    assert ended.code == 2 and ended.out.count(wording("train/waiting-for-its-end", 0)) == 1
    [line] = ended.err.splitlines()
    assert line.startswith(wording("train/error-save-another-run", "--save", tmp_path))
    assert f"process {holder.pid}," in line
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == [".lock", "run.json"]
    assert (tmp_path / "save" / "run.json").read_text() == "the other's"


@pytest.mark.parametrize("words", ["--load", "--skip-train --save"])
def test_what_saves_nothing_needs_no_lock(tmp_path, monkeypatch, holder, words):
    monkeypatch.setattr(checkpoint_checks, "MAX_SAVE_WAIT_S", 0)
    _, out = quietly(flags(WHOLE, words, tmp_path / "save"), tmp_path / "run")
    assert "another run" not in out


def test_locks_that_do_not_reach_are_told_of(tmp_path, monkeypatch):
    """Of a run on another machine, which may have been killed; and on a file system without them."""
    (tmp_path / ".lock").write_text("elsewhere, process 7, since long ago\x1b[2J")
    said = []
    with reserved(tmp_path, 0, said.append):
        who = "(elsewhere, process 7, since long ago[2J)"
        assert len(said) == 1 and wording("train/run-on-another-machine", who) in said[0]
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(38, "Function not implemented")))
    with reserved(tmp_path / "save", 0, said.append):
        assert len(said) == 2 and wording("train/has-no-locks-second") in said[1]


@pytest.mark.parametrize(
    "make, reason",
    [
        (os.mkfifo, "Not a regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("victim"), "Not a regular file"),
    ],
)
def test_a_lock_that_is_no_file(tmp_path, make, reason):
    make(tmp_path / ".lock")
    with pytest.raises(CheckpointError) as caught, reserved(tmp_path, 0, print):
        pass
    message = str(caught.value)
    assert message.startswith(wording("train/cannot-be-written", "--save", tmp_path, reason)) and ".lock" in message
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# --- which ones stay


def test_retention(saved, tmp_path):
    save, words = tmp_path / "save", "--save-interval 1 --save-retain-interval 3"
    quietly(flags(WHOLE, words, "--exit-interval 5 --save", save), tmp_path / "a")
    assert iterations(save) == [3, 5]
    quietly(flags(WHOLE, words, "--save", save, "--load", save), tmp_path / "b")
    assert iterations(save) == [3, 6, 8] and list(save.glob(".*")) == []
    resume(saved, tmp_path / "run", words, "--save", tmp_path / "new")  # another folder keeps what was loaded
    assert iterations(saved) == [4] and iterations(tmp_path / "new") == [6, 8]
