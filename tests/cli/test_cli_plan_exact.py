"""plan --exact: formula and walk beside each other, and the walk's snapshot in the report's own words."""

import io
import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.command_lines import argv, plan
from support.paths import REPO
from support.wording import wording

from megatron_lite.cli import plan as command
from megatron_lite.cli.main import main
from megatron_lite.planner import run_walk


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """The walk as a function of this process, which may have imported torch already."""
    monkeypatch.chdir(tmp_path)
    from megatron_lite.rehearsal import main as walk

    def run(rehearse, input, **_):
        assert rehearse[1:] == ["-m", run_walk.MODULE]
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdin", io.StringIO(input))
            patched.setattr(sys, "stdout", out)
            patched.setattr(sys, "stderr", err)
            code = walk()
        return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())

    monkeypatch.setattr(run_walk.subprocess, "run", run)


def test_formula_and_walk_stand_beside_each_other(in_process, capsys):
    words = ["--gpu", "H200", "--exact", "--snapshot", "s.pickle", "--json", "p.json", "--all", *argv("--bf16")]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    found = json.loads(Path("p.json").read_text())
    walked = found["exact"]
    assert sum(walked["categories"].values()) == walked["allocated_peak_bytes"]
    assert walked["allocated_peak_bytes"] == pytest.approx(found["memory"]["peak_bytes"], rel=0.05)
    assert walked["allocated_peak_bytes"] <= walked["reserved_peak_bytes"]
    assert "\n\nExact  " in shown and "difference" in shown and wording("cli/reserved-by-caching-allocator") in shown
    section = ("\n\nMemory  ", "s.pickle, simulated", "allocated by")  # the report's own
    assert all(text in shown for text in section)
    assert "written: s.pickle" in shown and "written: p.json" in shown
    assert set(pickle.loads(Path("s.pickle").read_bytes())) >= {"segments", "device_traces"}


def test_a_mistake_that_only_the_walk_sees_is_the_trainers_line(in_process, capsys, monkeypatch):
    from megatron_lite import rehearsal
    from megatron_lite.errors import UserError

    def refuse(plan, workspace):
        raise UserError("--attention-backend flash: no.")

    monkeypatch.setattr(rehearsal, "rehearse", refuse)
    assert main(["plan", "--exact", *argv()]) == 2
    assert capsys.readouterr().err == "error: --attention-backend flash: no.\n"


def test_a_machine_without_torch_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(run_walk, "MODULE", "megatron_lite.no_such_module")
    assert main(["plan", "--exact", *argv()]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(wording("cli/error-walk-failed", "--exact")) and "no_such_module" in shown
    assert shown.count("\n") == 1


@pytest.mark.slow
def test_the_whole_of_it_as_processes(tmp_path):
    """Also: the process that prints has no torch."""
    code = "import sys\nfrom megatron_lite.cli.main import main\nassert main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    words = ["plan", "--gpu", "H200", "--exact", *argv("--fp16")]
    done = subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=REPO, capture_output=True, text=True)
    shown = done.stdout
    assert "\n\nExact  " in shown and "predicted.pickle, simulated" in shown


@pytest.fixture
def on_terminal(monkeypatch):
    """Somebody looks on."""
    monkeypatch.setattr(command, "can_walk_unasked", lambda stream: True)


def test_an_estimate_on_a_terminal_is_checked_by_the_walk(in_process, on_terminal, capsys):
    assert main(["plan", "--gpu", "H200", *argv("--bf16")]) == 0
    answer, _, check = capsys.readouterr().out.rpartition("\n\n")
    assert "estimated" in answer and "exact peak" not in answer
    assert "exact peak" in check and "% off" in check and wording("cli/fits-in-one-h-2") not in check


def test_a_verdict_that_the_walk_changes_is_given_again(in_process, on_terminal, capsys, monkeypatch):
    from megatron_lite import rehearsal

    walked = replace(rehearsal.rehearse(plan()), allocated_peak_bytes=20 * 2**30)
    monkeypatch.setattr(rehearsal, "rehearse", lambda plan, workspace: walked)
    assert main(["plan", "--gpu", "T4", *argv("--bf16")]) == 0
    assert wording("cli/does-not-fit-in-one", 20.0) in capsys.readouterr().out


def test_what_a_search_puts_first_is_checked_by_the_walk(in_process, on_terminal, capsys):
    assert main(["plan", "--search", "--gpu", "H200", "--gpus", "2", *argv("--bf16")]) == 0
    answer, _, check = capsys.readouterr().out.rpartition("\n\n")
    assert wording("cli/time-against-memory") in answer
    [off] = re.findall(r"exact peak .* is ([+-][\d.]+)% off", check)
    assert abs(float(off)) < 5 and wording("cli/does-not-fit") not in check


def test_a_search_waits_for_the_walk_where_it_is_asked_for(in_process, capsys, monkeypatch):
    from megatron_lite import rehearsal

    seen = []
    walked = replace(rehearsal.rehearse(plan()), allocated_peak_bytes=200 * 2**30)
    monkeypatch.setattr(rehearsal, "rehearse", lambda plan, workspace: seen.append(plan) or walked)
    assert (
        main(["plan", "--search", "--exact", "--gpu", "H200", "--gpus", "2", "--json", "p.json", *argv("--bf16")]) == 0
    )
    found = json.loads(Path("p.json").read_text())
    assert found["exact"]["allocated_peak_bytes"] == 200 * 2**30
    best = found["search"]["layouts"][0]
    layout = seen[0].layout
    assert (layout.tensor, layout.context, layout.pipeline) == (best["tensor"], best["context"], best["pipeline"])
    assert wording("cli/it-does-not-fit", 71.4) in capsys.readouterr().out


def test_a_walk_that_takes_too_long_is_left(on_terminal, capsys, monkeypatch):
    def wait(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(run_walk.subprocess, "run", wait)
    assert main(["plan", *argv()]) == 0
    assert capsys.readouterr().out.endswith(wording("cli/not-checked-walk-of", 10, "--exact"))


def test_nothing_is_walked_unasked_without_torch_or_a_terminal(monkeypatch):
    piped, shown = SimpleNamespace(isatty=lambda: False), SimpleNamespace(isatty=lambda: True)
    assert not command.can_walk_unasked(piped) and command.can_walk_unasked(shown)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert not command.can_walk_unasked(shown)
