"""A rank that dies or hangs: the others end in time, and one line tells which rank it is and what they waited for."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import environment, flags, pretrain, ranks_of, start, steps
from support.paths import REPO, TESTS
from support.waiting import LIMIT_S, wait_for, wait_until
from support.wording import wording

from megatron_lite import rank_errors
from megatron_lite.checkpoint.folder import newest, wrong
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.postmortem_results import FailureKind
from megatron_lite.process_state import process_state

FAULTY = TESTS / "faulty.py"
SUMMARY = "Root Cause (first observed failure)"
CAUSES = {
    "exception": ["ZeroDivisionError: a mistake in this rank only", r"exitcode +: 1 "],
    "user": ["--data-path x: only this rank's file is damaged; mend it.", r"exitcode +: 2 "],
    "killed": [r"Signal 9 \(SIGKILL\)", r"exitcode +: -9 "],
}
OPERATION = r"\w+ #\d+ of "


def run_faulty(how: str, folder: Path, words: str = "", limit_s: float = 60):
    argv = [how, str(limit_s), *flags(f"--train-iters 1000000 --log-interval 1 {words} --run-dir", folder)]
    return pretrain(argv, ranks=2, script=FAULTY)


def verdict_of(ended) -> str:
    """The one line for people, before the launcher's summary."""
    [line] = re.findall(r"^error: Rank 1 .*$", ended.err[: ended.err.index(SUMMARY)], re.MULTILINE)
    return line


def status(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["status"]


@pytest.mark.parametrize(
    "how", ["exception", *(pytest.param(how, marks=pytest.mark.slow) for how in ("user", "killed"))]
)
def test_a_dying_rank_ends_all_and_says_why(tmp_path, how):
    ended = run_faulty(how, tmp_path / "run", "--num-workers 1" if how == "exception" else "")
    assert ended.code != 0 and ended.seconds < 500, "600 s would be a collective's time limit"
    root = ended.err[ended.err.index(SUMMARY) :]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root), root
    for cause in CAUSES[how]:
        assert re.search(cause, root), root
    said = {
        "exception": "ended with ZeroDivisionError: a mistake in this rank only",
        "user": "ended with DataError: --data-path x: ",
        "killed": "died",
    }[how]
    line = verdict_of(ended)
    assert re.match(f"error: Rank 1 {said}", line), line
    # a killed rank was heard up to a second before
    place = "" if how == "killed" else "iteration 3"
    assert re.search(rf"heard last in {place}.*\(process \d+ on \S+\)", line), line
    assert re.search(r"Rank 0 \w+ in iteration 3, phase ", line), line
    assert "RuntimeError" not in ended.err, "no second traceback"
    assert len(steps(tmp_path / "run")) >= 1 and status(tmp_path / "run").startswith("failed: ")
    if how == "user":
        assert wording("train/rank-error-x-only", 1, "--data-path") in ended.err
    if how != "killed":  # run.json is the last rank's
        assert wording("train/rank-has-group-false", 1) in ended.out
    else:
        assert status(tmp_path / "run").startswith("failed: RanksError: Rank 1 died")


@pytest.mark.slow
def test_steps_since_the_last_console_line_outlive_their_writer(tmp_path):
    ended = run_faulty("killed late", tmp_path / "run", "--log-interval 1000")
    assert re.match(r"error: Rank 1 died", verdict_of(ended))
    written = steps(tmp_path / "run")  # results are read when they are two steps old
    assert [record["iteration"] for record in written] == list(range(1, 9))
    assert [record.get("local", False) for record in written] == [False] + [True] * 7
    assert all(record["loss"] > 0 and record["next_lr"] > 0 for record in written)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_with_its_place_in_the_code(tmp_path):
    ended = run_faulty("loop", tmp_path / "run", limit_s=3)
    line = verdict_of(ended)
    told = f"error: Rank 1 did not enter {OPERATION}.*, in which rank 0 waits"
    assert re.match(told, line), line
    assert re.search(r": it .* faulty.py:\d+ in never_ends", line), line
    assert re.search(r"heard last in iteration 3, phase data, since [34].[0-9]s, after collective #\d+ ", line), line
    assert line.removeprefix("error: ") in ended.err[ended.err.index(SUMMARY) :], "the launcher's summary tells it too"
    assert status(tmp_path / "run") == "failed: RanksError: " + line.removeprefix("error: ")
    told = json.loads((tmp_path / "run" / "ranks.json").read_text())
    assert told["verdict"] == line.removeprefix("error: ")
    behind, asking = told["ranks"]["1"], told["ranks"]["0"]
    assert behind["begun"] < asking["begun"] and behind["stack"][0].startswith("never_ends (")


STAGES = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2"
SEQUENCES = "--context-parallel-size 2 --use-distributed-optimizer"
NOTICED = r"Rank \d noticed( for the forward of micro-batch 1 from rank [01])? in iteration 3"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "layout"),
    [
        *((how, STAGES) for how in ("loop", "stopped", "killed", "exception")),
        ("loop", SEQUENCES),
        ("killed", SEQUENCES),
    ],
)
def test_a_rank_of_any_group_is_named(tmp_path, how, layout):
    """Rank 1, with its place and what the others wait for: of stages, ranks 2 and 3 wait for what ranks 0 and 1 compute together."""
    argv = [how, "5", *flags(f"--train-iters 1000000 --log-interval 1 {layout} --run-dir", tmp_path / "run")]
    line = verdict_of(pretrain(argv, ranks=4, script=FAULTY))
    places = ["pp 0, tp 0", "pp 0, tp 1", "pp 1, tp 0", "pp 1, tp 1"]
    if layout == SEQUENCES:
        places = ["dp 0, cp 0", "dp 0, cp 1", "dp 1, cp 0", "dp 1, cp 1"]
    assert line.startswith(f"error: Rank 1 ({places[1]}) ") and re.search(NOTICED, line), line
    told = json.loads((tmp_path / "run" / "ranks.json").read_text())["ranks"]
    assert {int(rank): post["place"] for rank, post in told.items()}.items() <= dict(enumerate(places)).items()


@pytest.mark.slow
def test_a_stopped_rank_is_named(tmp_path):
    ended = run_faulty("stopped", tmp_path / "run", limit_s=5)
    line = verdict_of(ended)
    assert re.match("error: Rank 1 is stopped", line) and re.search(r"heard last in .*\(process \d+ on \S+\)", line), (
        line
    )
    assert status(tmp_path / "run").startswith("failed: RanksError: Rank 1 is stopped"), "its own writer is stopped"
    found = conclude(collect_evidence([tmp_path / "run"]))
    assert (found.kind, found.ranks, found.confidence) == (FailureKind.STOPPED, (1,), "high"), (
        "the folder tells it, too"
    )


@pytest.mark.slow
def test_a_data_loader_that_hangs_is_named(tmp_path):
    line = verdict_of(run_faulty("data loader", tmp_path / "run", "--num-workers 1", limit_s=5))
    assert re.search(r"Rank 1 did not enter .*: it loads data at .*loader.py:\d+ in \w+", line), line


@pytest.mark.slow
@pytest.mark.parametrize("words", ["", "--exit-signal-handler"])
def test_a_death_is_told_though_the_launcher_ends_the_others_first(tmp_path, words):
    """Workers of a killed rank keep its connections open for seconds: the launcher's SIGTERM comes before gloo's error."""
    line = verdict_of(run_faulty("killed", tmp_path / "run", f"--num-workers 2 {words}"))
    assert re.match("error: Rank 1 died", line)
    assert status(tmp_path / "run").startswith("failed: RanksError: Rank 1 died")


@pytest.mark.slow
def test_the_launcher_starts_again_from_the_checkpoint(tmp_path):
    """Bit for bit the losses of a run without a fault. The killed rank takes its line of the last step with it."""
    words = "--train-iters 6 --log-interval 1 --save-interval 1 --hidden-dropout 0.1 --save"
    outcome = {}
    for name, how in (("whole", "none"), ("broken", "killed once")):
        save = tmp_path / name
        ended = pretrain([how, "60", *flags(words, save, "--load", save)], ranks=2, script=FAULTY, restarts=1)
        assert ended.code == 0, ended.err
        outcome[name] = {record["iteration"]: record["loss"] for record in steps(save)}
        if how != "none":
            assert "Rank 1 died" in ended.err and "loaded iteration 2" in ended.out, ended.out
    assert list(outcome["whole"]) == [1, 2, 3, 4, 5, 6]
    assert outcome["broken"].keys() >= {3, 4, 5, 6} and outcome["broken"].items() <= outcome["whole"].items()


@pytest.mark.slow
def test_a_mistake_that_all_ranks_have_is_told_once(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    ended = pretrain(flags("--exit-on-missing-checkpoint --load", empty, "--run-dir", tmp_path / "run"), ranks=2)
    assert ended.code != 0
    assert len(re.findall(r"^(?:rank \d: )?error: ", ended.err, re.MULTILINE)) == 1
    assert str(empty) in ended.err[ended.err.index(SUMMARY) :]


def test_ranks_of_a_node_print_the_same_error_once_whoever_comes_first(tmp_path, monkeypatch, capfd):
    """On a busy machine rank 1 may come first, or the launcher be late in ending it."""
    monkeypatch.setattr(rank_errors, "SECONDS_FOR_RANK_0", 0)
    for local_rank, line in ((1, "--load x: is empty."), (0, "--load x: is empty."), (1, "--data-path y: is damaged.")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(local_rank) / "error.json"))
        (tmp_path / str(local_rank)).mkdir(exist_ok=True)
        rank_errors.end_with_error(ConfigError([line]), World(local_rank, 2, local_rank, 2))
    assert capfd.readouterr().err == "rank 1: error: --load x: is empty.\nrank 1: error: --data-path y: is damaged.\n"
    assert "--load x: is empty." in (tmp_path / "0" / "error.json").read_text(), "for the launcher's summary"


def test_ranks_end_with_a_killed_launcher(tmp_path):
    """kill -9 of torchrun: nobody is left to end them. One says so, and the last checkpoint is whole."""
    argv = flags("--train-iters 1000000 --log-interval 20 --save-interval 10 --num-workers 1 --save", tmp_path / "save")
    with start(argv, ranks=2) as launcher:
        try:
            wait_for(launcher, " iteration       20/")
            ranks = ranks_of(launcher)
            launcher.kill()
            _, err = launcher.communicate(timeout=LIMIT_S)  # the pipes close with the last rank, or worker
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    for pid in ranks:  # a process closes its pipes a moment before it is gone
        wait_until(lambda pid=pid: process_state(pid) == "dead")
    line = f"torchrun's agent (process {launcher.pid} on {socket.gethostname()}) is gone, so its ranks end: "
    assert err.count(f"error: {line}") == 1 and "Traceback" not in err, err
    told = "failed: RanksError: .*torchrun's agent.*, died|failed: RanksError: " + re.escape(line)
    assert re.match(told, status(tmp_path / "save"))
    assert wrong(newest(tmp_path / "save").folder) is None


RANK = """
import os, sys, time
sys.path.insert(0, {repo!r})
from megatron_lite.process_state import find_launcher, is_there
while {orphan} and str(os.getppid()) == os.environ["STARTED_BY"]:
    time.sleep(0.01)
found = find_launcher(os.environ)
print(found and (found["pid"], is_there(found)), flush=True)
"""
AGENT = """
import os, subprocess, sys
print(os.getpid(), flush=True)
rank = subprocess.Popen({command!r}, env={{**os.environ, **{variables!r}, "STARTED_BY": str(os.getpid())}})
{wait} or rank.wait()
"""
VARIABLES = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/tmp/0/error.json", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "variables, wrapper, orphan, found",
    [
        (VARIABLES, [], False, True),
        (VARIABLES, ["bash", "-c", '"$@"; exit $?', "wrapper"], False, True),  # torchrun --no-python wrapper.sh
        ({}, [], False, False),  # a shell, nohup, a batch system
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, [], False, False),  # srun with variables set by hand
        (VARIABLES, ["setsid"], False, True),
        (VARIABLES, [], True, False),  # adopted before it looked
    ],
)
def test_the_launcher_is_found_above_wrappers_and_nowhere_else(variables, wrapper, orphan, found):
    command = [*wrapper, sys.executable, "-c", RANK.format(repo=str(REPO), orphan=orphan)]
    agent = AGENT.format(command=command, variables=variables, wait=orphan)
    for environ in (environment(), environment() | VARIABLES | {"TORCHELASTIC_ERROR_FILE": "/tmp/outer"}):
        if environ.get("LOCAL_RANK") and not variables.get("TORCHELASTIC_RUN_ID"):
            continue  # inherited from an outer torchrun: its rank in all but name
        command = [sys.executable, "-c", agent]
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        pid, answer = ended.stdout.splitlines()
        assert answer == (f"({pid}, True)" if found else "None"), ended
