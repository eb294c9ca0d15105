"""A profiled run ends with its report, which can neither fail nor delay it."""

import subprocess

import pytest
from support.launch import flags, plan_of, pretrain
from support.waiting import LIMIT_S, wait_until
from support.wording import wording

from megatron_lite.process_state import process_state
from megatron_lite.train import post_run_report
from megatron_lite.train.post_run_report import end_with_report, wants_report

PROFILED = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4"


@pytest.fixture
def instead(monkeypatch):
    """Runs other Python code in place of the report's command."""
    return lambda code: monkeypatch.setattr(post_run_report, "REPORT", ("-c", code))


@pytest.fixture
def said_of(logged):
    """(run folder, seconds) to what is logged when its report is made."""

    def said(run_dir, seconds=LIMIT_S) -> list[str]:
        logged.messages.clear()
        end_with_report(run_dir, seconds)
        return list(logged.messages)

    return said


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", False),
        (PROFILED, True),
        (f"{PROFILED} --no-report", False),
        ("--record-memory-history", True),
        ("--profile --profile-step-start 2 --profile-step-end 4", False),  # Nsight Systems: no file yet
    ],
)
def test_a_report_is_made_of_what_it_can_read(words, wanted):
    assert wants_report(plan_of(flags(words))) is wanted
    assert wants_report(plan_of(flags(words)), traced_on_demand=True) is ("--no-report" not in words)


def test_its_lines_are_printed(instead, said_of, tmp_path):
    instead("print('a verdict'); print('a step')")
    assert said_of(tmp_path) == ["\na verdict\na step"]


def test_a_report_that_takes_too_long_is_given_up_with_all_that_it_started(instead, said_of, tmp_path):
    started = tmp_path / "started"
    instead(
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    for seconds in (1, 4, 16, 64):  # long enough for a busy machine to start the report
        given_up = f"  no report within {seconds} s; megatron-lite report {tmp_path} makes it"
        assert said_of(tmp_path, seconds) == [given_up]
        if started.exists():
            break
    wait_until(lambda: process_state(int(started.read_text())) == "dead")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('error: nothing in it can be read')", "nothing in it can be read"),
        ("import sys; sys.exit(7)", "exit code 7"),
        ("raise ValueError('odd')", "ValueError: odd"),
    ],
)
def test_a_report_that_fails_is_one_line(instead, said_of, tmp_path, code, said):
    instead(code)
    assert said_of(tmp_path) == [f"  no report: {said}; megatron-lite report {tmp_path} tries again"]


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch, said_of, tmp_path):
    def refuse(*command, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert said_of(tmp_path) == [wording("train/no-report-another-process", tmp_path)]


def test_a_folder_without_anything_is_said_by_the_real_command(said_of, tmp_path):
    assert said_of(tmp_path)[0].startswith("  no report: ") and str(tmp_path) in said_of(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_profiled_run_ends_with_its_report(tmp_path, ranks):
    run = tmp_path / "run"
    words = f"--train-iters 6 {PROFILED} --profile-step-end 6 --profile-ranks -1 --run-dir"
    ended = pretrain(flags(words, run), ranks=ranks)
    done, report = ended.out.split(f"  done: {run}\n")
    assert ended.code == 0 and wording("cli/where-step-goes") in report and "Where" not in done
    assert f"{max(ranks, 1)} rank" in report
    assert report.rstrip().endswith(f"written: {run / 'report.html'}, {run / 'report.json'}")


@pytest.mark.slow
def test_no_report_is_made_where_none_is_wanted(tmp_path):
    ended = pretrain(flags(f"--train-iters 6 {PROFILED} --no-report --run-dir", tmp_path))
    assert ended.code == 0 and wording("cli/where-step-goes") not in ended.out
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_run_whose_window_on_demand_left_a_trace_ends_with_its_report(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile.now").touch()
    ended = pretrain(flags("--train-iters 400 --run-dir", tmp_path / "run"))
    assert ended.code == 0 and "profile.now taken" in ended.out
    assert wording("cli/where-step-goes") in ended.out.split(f"  done: {tmp_path / 'run'}\n")[1]
