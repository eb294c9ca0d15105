"""megatron-lite report: what is printed, what is written and where."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import REPO
from support.trace_maker import gpu_run
from support.waiting import LIMIT_S
from support.wording import wording

from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.cli.main import main
from megatron_lite.units import size


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A trace in a folder of its own; the user stands in another one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return gpu_run(steps=5).write(tmp_path / "traces")


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_foreign_files_are_reported_where_the_user_stands(trace, capsys):
    assert main(["report", str(trace)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(trace.name) and shown.err == ""
    assert shown.out.endswith("written: report.html, report.json\n")
    assert written(Path()) == {"report.html", "report.json"} and written(trace.parent) == {trace.name}


def test_a_run_is_reported_in_its_own_folder(trace, capsys):
    run = trace.parent
    (run / "run.json").write_text(json.dumps({"schema": 1, "status": "finished"}))
    assert main(["report", str(run)]) == 0
    assert f"written: {run / 'report.html'}, {run / 'report.json'}" in capsys.readouterr().out
    assert written(Path()) == set()


def test_files_are_named_by_flags(trace, capsys):
    assert main(["report", str(trace), "--no-html"]) == 0
    assert written(Path()) == set() and "written" not in capsys.readouterr().out
    assert main(["report", str(trace), "--no-html", "--json", "b.json"]) == 0
    assert written(Path()) == {"b.json"}
    assert main(["report", str(trace), "--html", "a.html", "--json", "b.json"]) == 0
    assert written(Path()) == {"a.html", "b.json"}
    Path("pages").mkdir()
    assert main(["report", str(trace), "--html", "pages/a.html"]) == 0
    assert written(Path("pages")) == {"a.html", "report.json"}, "the numbers lie beside the page"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--html", "a.html", "--no-html"], "--html and --no-html exclude each other; keep one."),
        (["--open", "--no-html"], "--open and --no-html exclude each other; keep one."),
        (["--html", "no/such/a.html"], "--html no/such/a.html: cannot be written (No such file or directory)"),
        (["--json", "no/such/b.json"], "--json no/such/b.json: cannot be written (No such file or directory)"),
        (["--htm", "a.html"], "unrecognized arguments: --htm"),
    ],
)
def test_mistakes_are_one_line(trace, words, said, capsys):
    assert main(["report", str(trace), *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(
    ("variables", "browser", "said"),
    [
        ({"DISPLAY": ":0"}, True, "opened in the browser: "),
        ({"DISPLAY": ":0"}, False, "not opened, no browser was found; the page is /"),
        ({}, None, "not opened, without a display; the page is /"),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "a b"}, None, "not opened, over ssh; the page is /"),
        ({"BROWSER": "code", "SSH_CONNECTION": "a b"}, True, "opened in the browser: "),
    ],
)
def test_open_shows_the_page_or_says_where_it_is(command, variables, browser, said, trace, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or browser)
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([command, *[str(trace)] * (1 + (command == "compare")), "--open"]) == 0
    path = Path({"report": "report.html", "compare": "comparison.html"}[command])
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last.startswith(said) and last.endswith(path.name) and path.read_text(encoding="utf-8").startswith("<!DOCTYPE")
    )
    assert opened == ([] if browser is None else [path.resolve().as_uri()])


@pytest.mark.parametrize("words", [["report"], ["report", "nowhere"]])
def test_nothing_to_report_on_is_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and shown.out == "" and written(tmp_path) == set()


def test_a_folder_that_takes_no_files_still_gets_its_report_printed(trace, capsys):
    Path("report.html").mkdir()
    assert main(["report", str(trace)]) == 0
    shown = capsys.readouterr().out
    assert wording("cli/where-step-goes") in shown and "written: report.json\n" in shown
    assert wording("cli/report-html-cannot-be", "--html", "--json") in shown


def test_a_terminal_without_unicode_is_no_error(trace):
    names = trace.read_text().replace("ampere_sgemm_128x64_tn", "kernel_\\u4e2d_\\u2588")
    trace.write_text(names)
    run = subprocess.run(
        [sys.executable, "-m", "megatron_lite.cli.main", "report", str(trace), "--all"],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPO)},
    )
    assert b"kernel_" in run.stdout and run.stdout.isascii()


def test_a_reader_that_leaves_ends_the_printing_but_the_files_are_written(trace):
    ours, theirs = os.pipe()
    os.close(ours)  # as head does after its lines
    command = [sys.executable, "-m", "megatron_lite.cli.main", "report", str(trace)]
    ended = subprocess.run(
        command, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False,
        env=os.environ | {"PYTHONPATH": str(REPO)},
    )  # fmt: skip
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (141, "")
    assert written(Path()) == {"report.html", "report.json"}


@pytest.mark.parametrize("terminal", [False, True])
def test_the_size_of_a_large_trace_is_said_before_it_is_read(terminal, trace, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    seen = []
    monkeypatch.setattr(
        "megatron_lite.analysis.analyze.read_traces",
        lambda *args: seen.append(capsys.readouterr().err) or read_traces(*args),
    )
    assert main(["report", str(trace), "--no-html"]) == 0
    assert "\n" not in seen[0], "small files need no line of their own"
    monkeypatch.setattr("megatron_lite.analysis.trace.read.MIN_LARGE_BYTES", trace.stat().st_size)
    assert main(["report", str(trace), "--no-html"]) == 0
    assert seen[1].rpartition("\x1b[K")[2] == f"  reading {trace.name} (1 of 1, {size(trace.stat().st_size)})\n"


@pytest.mark.parametrize(("flag", "ending"), [("--perfetto", ".pftrace"), ("--bundle", ".zip")])
@pytest.mark.parametrize("name", ["none/run", "pipe", "folder"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(flag, ending, name, tmp_path, capsys):
    os.mkfifo(tmp_path / f"pipe{ending}")
    (tmp_path / f"folder{ending}").mkdir()
    asked = tmp_path / f"{name}{ending}"
    assert main(["report", "no-trace", "--no-html", flag, str(asked)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{flag} {asked}" in line and "no-trace" not in line


@pytest.mark.parametrize("flag", ["--perfetto", "--bundle"])
def test_a_name_that_no_file_can_have_is_one_line(flag, trace, capsys):
    name = "x" * 300 + (".zip" if flag == "--bundle" else ".pftrace")
    assert main(["report", str(trace), "--no-html", flag, name]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{flag} {name}" in line
