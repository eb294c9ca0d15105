"""plan --exact: formula and walk beside each other, and the walk's snapshot in the report's own words."""

import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_lines import argv

from megatron_lite.cli import exact_plan
from megatron_lite.cli.main import main

ROOT = Path(__file__).parent.parent


@pytest.fixture
def in_process(monkeypatch, tmp_path):
    """The walk as a function of this process, which may have imported torch already."""
    monkeypatch.chdir(tmp_path)
    from megatron_lite.rehearsal.rehearse import main as walk

    def run(rehearse, input, **_):
        assert rehearse[1:] == ["-m", exact_plan.MODULE]
        out, err = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdin", io.StringIO(input))
            patched.setattr(sys, "stdout", out)
            patched.setattr(sys, "stderr", err)
            code = walk()
        return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())

    monkeypatch.setattr(exact_plan.subprocess, "run", run)


def test_formula_and_walk_stand_beside_each_other(in_process, capsys):
    words = ["--gpu", "H200", "--exact", "--snapshot", "s.pickle", "--json", "p.json", "--all", *argv("--bf16")]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    found = json.loads(Path("p.json").read_text())
    walked = found["exact"]
    assert sum(walked["categories"].values()) == walked["allocated_peak_bytes"]
    assert walked["allocated_peak_bytes"] == pytest.approx(found["memory"]["peak_bytes"], rel=0.05)
    assert walked["allocated_peak_bytes"] <= walked["reserved_peak_bytes"]
    assert "\n\nExact  " in shown and "difference" in shown and "reserved by the caching allocator" in shown
    assert (
        "\n\nMemory  " in shown and "s.pickle, simulated" in shown and "allocated by" in shown
    )  # the report's own section
    assert "written: s.pickle" in shown and "written: p.json" in shown
    assert set(pickle.loads(Path("s.pickle").read_bytes())) >= {"segments", "device_traces"}


def test_a_mistake_that_only_the_walk_sees_is_the_trainers_line(in_process, capsys, monkeypatch):
    from megatron_lite.errors import UserError
    from megatron_lite.rehearsal import rehearse

    def refuse(plan, workspace):
        raise UserError("--attention-backend flash: no.")

    monkeypatch.setattr(rehearse, "rehearse", refuse)
    assert main(["plan", "--exact", *argv()]) == 2
    assert capsys.readouterr().err == "error: --attention-backend flash: no.\n"


def test_a_machine_without_torch_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(exact_plan, "MODULE", "megatron_lite.no_such_module")
    assert main(["plan", "--exact", *argv()]) == 2
    shown = capsys.readouterr().err
    assert (
        shown.startswith("error: --exact: the walk failed (") and "no_such_module" in shown and shown.count("\n") == 1
    )


@pytest.mark.slow
def test_the_whole_of_it_as_processes(tmp_path):
    """Also: the process that prints has no torch."""
    code = "import sys\nfrom megatron_lite.cli.main import main\nassert main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    words = ["plan", "--gpu", "H200", "--exact", *argv("--fp16")]
    shown = subprocess.run(
        [sys.executable, "-c", code, *words], check=True, cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert "\n\nExact  " in shown and "predicted.pickle, simulated" in shown
