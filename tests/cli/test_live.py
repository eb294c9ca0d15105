"""megatron-lite live: what it shows of a run, that it fits, and how it ends with the run."""

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console
from support.launch import environment, flags, start
from support.run_maker import MIB, PLAN, RECORD, folder, ranks, step
from support.waiting import LIMIT_S, wait_until
from support.wording import wording

from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.run.step_lines import StepLines
from megatron_lite.cli import live
from megatron_lite.cli.live_view import OUTSIDE_OF_PHASES, REMAINING_PHASES, build_view
from megatron_lite.cli.main import INTERRUPTED, main
from megatron_lite.errors import UserError
from megatron_lite.process_state import identity, pid_space
from megatron_lite.report.live_screen import describe_progress, draw_view

HOSTILE = "\x1b[2J[bold]\u202e日本語\n"
GOING_ON = RECORD | {"status": "running", "process": identity(), "plan": PLAN | {"train_iters": 200}}


def write_run(path, number=100, record=GOING_ON, **last):
    """Steps of 10 ms, every tenth with a line of two ranks, of which the second works a fifth longer."""
    lines = []
    for at in range(1, number + 1):
        more = last if at > number - 15 else {}
        lines.append(
            step(at, **({"loss": 4 - at / 100, "phases_ms": {"forward": 3.0, "backward": 6.0, "log": 0.01}} | more))
        )
        if at % 10 == 0:
            phases = {"forward": [3.0, 3.6], "data": [0.1, 0.1]}
            own = {
                "own_backward_ms": [5.9, 7.1],
                "core_wait_ms": [0.0, 0.1],
                "host_memory_bytes": [90 * MIB, 100 * MIB],
            }
            lines.append(ranks(at - 9, at, [10.0, 10.0], phases_ms=phases, **own))
    return folder(path, lines, record)


def view_of(path):
    lines = StepLines(path / "steps.jsonl")
    run = read_run(path, lines)
    return build_view(run, lines.read_ranks(recent=True), lines.read_hardware(recent=True))


def draw(view, width=100, height=None, encoding="utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="replace", newline="\n")
    console = Console(file=stream, width=width, color_system=None, markup=False, highlight=False)
    console.print(draw_view(view, "", console, height))
    stream.seek(0)
    return stream.read()


def test_progress_time_left_and_a_step_that_adds_up(tmp_path):
    view = view_of(write_run(tmp_path))
    assert (view.iteration, view.last_iteration, view.status) == (100, 200, "running")
    assert view.left_s == pytest.approx(100 * 0.010)
    assert describe_progress(view, now=view.started + 75) == "100 of 200 iterations (50%), 1m15s gone, 1.0s left"
    assert view.figures[:4] == (wording("cli/ms-per-step", "10.00"), "6,400 tokens/s", "MFU 0.1%", "loss 3")
    assert [(name, round(ms, 6)) for name, ms, _ in view.phases] == [
        ("forward", 3.0), ("backward", 6.0), (OUTSIDE_OF_PHASES, 0.99), (REMAINING_PHASES, 0.01),
    ]  # fmt: skip
    assert (view.curve[0][0], view.curve[0][-1], view.curve[1][0]) == (1, 100, 3.99)
    assert view.skew == wording("cli/rank-works-longest-above", 1, 20)
    assert view.memory == ("host: 100.0 MiB on rank 1, 90.0 MiB on rank 0",)
    assert any(wording("cli/rank-that-others-wait", 1) in text for text in view.findings) and view.warnings == ()


def test_evaluations_count_towards_the_time_left(tmp_path):
    lines = [step(at, **({"ms": 110.0, "phases_ms": {"eval": 100.0}} if at % 10 == 0 else {})) for at in range(1, 101)]
    assert view_of(folder(tmp_path, lines, GOING_ON)).left_s == pytest.approx(100 * 0.020)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (
            {"skipped": True, "loss": None},
            "15 of 100 steps were skipped, 15 of the last 50; the newest is iteration 100",
        ),
        ({"loss": 5.5}, "the loss has risen: 5.5 in the last 10 updates, 3.2"),
        ({"loss": None}, "losses that show no learning: the loss was not finite in 15 of 100 updates"),
        ({}, ""),
    ],
)
def test_warnings(tmp_path, last, said):
    view = view_of(write_run(tmp_path, **last))
    texts = [*view.warnings, *(text for text in view.findings if "learning" in text)]
    assert [text[: len(said)] for text in texts[:1]] == ([said] if said else [])


def test_a_loss_scale_may_look_for_its_size(tmp_path):
    lines = [step(at, loss_scale=2.0 ** (40 - at), skipped=at < 15) for at in range(1, 31)]
    assert view_of(folder(tmp_path, lines, GOING_ON)).warnings == ()
    assert view_of(folder(tmp_path, lines[:14], GOING_ON)).warnings == (wording("cli/all-steps-so-far", 14),)


def test_longer_steps_name_the_phase(tmp_path):
    longer = {"ms": 14.0, "phases_ms": {"forward": 3.0, "backward": 10.0}}
    lines = [step(at, phases_ms={"forward": 3.0, "backward": 6.0}) for at in range(1, 200)]
    lines += [step(at, **longer) for at in range(200, 241)]
    [warning] = view_of(folder(tmp_path, lines, GOING_ON)).warnings
    assert warning == wording("cli/steps-take-longer-than", 40, "10.00", "4.000")


def test_of_many_ranks_the_slowest_the_median_and_the_fastest_are_shown(tmp_path):
    own = [float(ms) for ms in range(100, 164)]
    lines = [step(at) for at in range(1, 11)] + [ranks(1, 10, [200.0] * 64, phases_ms={"forward": own})]
    shown = draw(view_of(folder(tmp_path, lines, GOING_ON)))
    assert re.findall(r"rank (\d+)  +200", shown) == ["63", "62", "61", "31", "0"]


@pytest.mark.parametrize("width", [30, 60, 99, 100, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_and_obeys_nobody(tmp_path, width, encoding):
    path = tmp_path / f"run{HOSTILE}"
    record = GOING_ON | {"status": f"failed: {HOSTILE}"}
    phases = {"forward": 3.0, HOSTILE if encoding == "utf-8" else "\x1b[2J": 7.0}
    if encoding == "ascii":
        path, record = tmp_path / "run", GOING_ON
    view = view_of(write_run(path, record=record, phases_ms=phases))
    for height in (12, 24, 50, None):
        shown = draw(view, width, height, encoding)
        assert max(map(len, shown.split("\n"))) <= width and "\x1b" not in shown and "\u202e" not in shown
        assert height is None or height < 24 or shown.count("\n") <= height
    assert "Loss, iterations 1 to 100" in shown and "Memory" in shown and "Findings" in shown


def test_a_run_without_any_step_or_plan_is_shown(tmp_path):
    assert "0 of 200 iterations" in draw(view_of(folder(tmp_path, None, GOING_ON)))
    watched = {"schema": 1, "status": "running", "command": ["python", "train.py"], "process": identity()}
    bare = {"kind": "step", "iteration": 1, "step": 1, "ms": 3.0, "phases_ms": {"forward": 2.0}}
    assert "1 iterations" in draw(view_of(folder(tmp_path, [bare], watched)))


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl"])
def test_files_cut_anywhere_are_shown_or_refused(tmp_path, name):
    whole = (write_run(tmp_path) / name).read_bytes()
    for length in range(0, len(whole), len(whole) // 25):
        (tmp_path / name).write_bytes(whole[:length])
        with contextlib.suppress(UserError):
            assert draw(view_of(tmp_path), 60, 24)


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(live, "REFRESH_S", 0.01)
    monkeypatch.setattr(live, "MAX_LOAD", 1e9)


@pytest.mark.skipif(pid_space() is None, reason="only Linux tells of processes")
@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({"status": "finished"}, 0, "finished"),
        ({"status": "exiting program at iteration 100"}, 0, "exiting program at iteration 100"),
        ({"status": "failed: ValueError: no"}, 1, "failed: ValueError: no"),
        ({"status": "interrupted"}, 1, "interrupted"),
        ({"process": identity() | {"started_ticks": 1}}, 1, "killed or lost: its process is gone"),
    ],
)
def test_it_ends_with_the_run(tmp_path, hasty, capsys, more, code, said):
    write_run(tmp_path, 50)

    def end_run():
        write_run(tmp_path, 100)
        folder(tmp_path, None, GOING_ON | more)

    end = threading.Timer(0.3, end_run)
    end.start()
    assert main(["live", str(tmp_path)]) == code
    end.join()
    first, *picture, last = capsys.readouterr().out.splitlines()
    assert first.startswith("50 of 200 iterations") and "100 of 200 iterations" in "\n".join(picture)
    assert last == wording("cli/live-run-has-ended", said.partition(":")[0]) and said in "\n".join(picture)


def test_a_run_that_gives_no_sign_is_left(tmp_path, hasty, capsys):
    elsewhere = GOING_ON | {"process": identity() | {"host": "elsewhere"}}
    for name in os.listdir(write_run(tmp_path, record=elsewhere)):
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    follower = live.Follower(tmp_path)
    view = follower.look()
    assert wording("cli/run-has-written-nothing") in live._describe_silence(view, follower.silent_s)
    assert main(["live", str(tmp_path), "--silence", "3000"]) == live.SILENT
    assert wording("cli/live-run-has-written") in capsys.readouterr().out
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write(json.dumps(step(101)) + "\n")
    view = follower.look()
    assert view.iteration == 101 and live._describe_silence(view, follower.silent_s) == ""


def test_a_folder_without_a_run_is_waited_for(tmp_path, hasty, capsys):
    threading.Timer(0.2, lambda: write_run(tmp_path, record=RECORD)).start()
    assert main(["live", str(tmp_path)]) == 0
    assert wording("cli/waiting-for-run-to", tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "megatron-lite live nowhere: no such folder; name the folder that holds the run's run.json"),
        ([".", "--once"], "megatron-lite live .: no run has begun there (run.json is missing)"),
        ([".", "--silence", "nan"], "--silence nan: must be above 0"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["live", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_once_prints_one_picture(tmp_path, capsys):
    assert main(["live", str(write_run(tmp_path)), "--once"]) == 0
    assert "100 of 200 iterations" in capsys.readouterr().out


def test_in_a_terminal_ctrl_c_leaves_quietly(tmp_path):
    """The screen is drawn on the terminal's second page, and the first one is as before."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "megatron_lite.cli.main", "live", str(write_run(tmp_path))]
    variables = environment() | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True)
    os.close(theirs)
    seen = b""

    def read_on() -> bytes:
        nonlocal seen
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the process has ended
            return b"end"
        return seen

    wait_until(lambda: b"100 of 200 iterations" in read_on())
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == INTERRUPTED
    wait_until(lambda: read_on() == b"end")
    os.close(ours)
    _, _, after = seen.rpartition(b"\x1b[?1049l")
    assert b"\x1b[?1049h" in seen and not re.sub(rb"\x1b\[[?\d;]*[a-zA-Z]", b"", after).strip()


@pytest.mark.slow
def test_a_training_of_two_ranks_is_followed_to_its_end(tmp_path, hasty, capsys):
    process = start(flags("--train-iters 400 --log-interval 20 --run-dir", tmp_path), ranks=2)
    try:
        assert main(["live", str(tmp_path)]) == 0
    finally:
        process.communicate(timeout=LIMIT_S)
    shown = capsys.readouterr().out
    assert (
        "400 of 400 iterations (100%)" in shown
        and "Ranks, ms" in shown
        and shown.endswith(wording("cli/live-run-has-ended-finished"))
    )


def test_gpus_show_the_clocks_of_the_last_lines(tmp_path):
    def hardware(clock_mhz, limits):
        clocks = {"sm_clock_mhz": [1980, clock_mhz], "max_sm_clock_mhz": [1980], "clock_limits": [0, limits]}
        return {"samples": [20], "temperature_c": [61, 91], "power_w": [640, None], "slowed": [0, 1]} | clocks

    lines = [step(at, 10.0) for at in range(1, 101)]
    early = [ranks(1, 10, [10.0, 10.0], hardware=hardware(1980, 0))] * 8
    late = [ranks(11, 20, [10.0, 10.0], hardware=hardware(1095, 0x40))] * 8
    view = view_of(folder(tmp_path, [*lines, *early, *late], {"status": "running"}))
    assert [(one.rank, one.clock_mhz, one.temperature_c, one.limits) for one in view.gpus] == [
        (0, 1980, 61, ""),
        (1, 1095, 91, "thermal slowdown"),
    ]
    drawn = draw(view)
    assert "1,095" in drawn and "91" in drawn and "thermal slowdown" in drawn
    assert any("1,095" in text for text in view.findings)
    assert "GPUs" not in draw(view_of(write_run(tmp_path / "without")))
