"""From files to a report: what can be read answers, what cannot is named."""

import json
from pathlib import Path

import pytest
from support.finding_cases import CASES
from support.paths import SHARED
from support.trace_maker import cpu_run, gpu_run
from support.wording import wording

from megatron_lite.analysis import analyze as module
from megatron_lite.analysis.analyze import analyze
from megatron_lite.cli.main import main
from megatron_lite.errors import UserError
from megatron_lite.report.html import html_page
from megatron_lite.report.json_file import json_text
from megatron_lite.report.terminal import terminal_lines
from megatron_lite.report.text import WIDTH, Style

REAL = [*sorted(filter(Path.is_dir, (SHARED / "traces").glob("*"))), *sorted((SHARED / "snapshots").glob("*.pickle"))]
QUICK = ("h100_qwen_stacks", "cuda_gpt_24x1024_seq128_fp32.pickle")  # each part's tests read the others


def two_ranks(folder: Path) -> Path:
    for rank in (0, 1):
        gpu_run(steps=5, rank=rank, world_size=2, all_reduce_us=300.0).write(folder)
    return folder


def test_a_trace_becomes_a_report(tmp_path):
    report = analyze([gpu_run(steps=5).write(tmp_path)])
    time = report.facts.critical.time
    assert sum(time.rows.values()) == pytest.approx(time.step_ms)
    assert report.title.endswith("1 rank, NVIDIA A100-SXM4-80GB") and report.read_s > 0
    assert report.verdict.bound != "inconclusive"


def test_ranks_of_a_folder_stand_in_order(tmp_path):
    report = analyze([two_ranks(tmp_path)])
    assert [rank.time.rank for rank in report.facts.ranks_seen] == [0, 1]
    assert report.facts.ranks.present == (0, 1) and ": 2 ranks, " in report.title


def test_memory_events_speak_where_there_is_no_snapshot(tmp_path):
    made = gpu_run(steps=5)
    made.memory(2000, 1000, 5000, 8192)
    [found] = analyze([made.write(tmp_path)]).facts.traced_memory
    assert (found.peak_bytes, found.reserved_bytes) == (5000, 8192)


@pytest.mark.parametrize(
    ("layout", "size", "named", "confidence"),
    [
        ({"pipeline": 2}, 2, True, "low"),
        ({"expert": 2, "data": 2}, 2, True, "low"),
        # near misses: ranks that hold the same, and no other rank
        ({"data": 2}, 2, True, "high"),
        ({"pipeline": 1}, 1, False, "high"),
    ],
)
def test_memory_of_ranks_that_was_not_read_is_named(tmp_path, layout, size, named, confidence):
    trigger, _ = CASES["state-kept-whole"]
    trigger(tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    record["plan"] |= {"layout": layout, "world": {"rank": 0, "size": size}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    report = analyze([tmp_path])
    assert any("1 rank (1)" in gap for gap in report.facts.gaps) is named
    assert (report.verdict.bound, report.verdict.confidence) == ("memory", confidence)


def test_progress_is_told(tmp_path):
    said = []
    analyze([two_ranks(tmp_path)], lambda text, lasting=False: said.append(text))
    told = [(text.split()[0], text[text.index("(") :]) for text in dict.fromkeys(said) if "KiB" in text]
    sizes = ("(1 of 2, 18.9 KiB)", "(2 of 2, 18.9 KiB)")
    assert told == [(what, size) for size in sizes for what in ("reading", "analyzing")]


def test_a_damaged_rank_is_a_gap_beside_the_others(tmp_path):
    two_ranks(tmp_path)
    damaged = next(tmp_path.glob("*rank1*"))
    text = damaged.read_bytes()
    damaged.write_bytes(text[: text.index(b'"traceEvents"')] + b'"traceEvents": [nothing')
    report = analyze([tmp_path])
    assert [rank.time.rank for rank in report.facts.ranks_seen] == [0]
    assert any(damaged.name in gap for gap in report.facts.gaps)


def test_nothing_readable_is_one_line(tmp_path):
    (tmp_path / "a.json").write_text('{"traceEvents": [')
    (tmp_path / "b.json").write_text("not json at all")
    for path in (tmp_path, tmp_path / "a.json", tmp_path / "missing"):
        with pytest.raises(UserError) as raised:
            analyze([path])
        assert "\n" not in str(raised.value) and str(path) in str(raised.value) or path.name in str(raised.value)


def test_a_part_that_fails_is_a_gap_and_the_rest_answers(tmp_path, monkeypatch):
    def fail(*given):
        raise IndexError("of a file that nobody foresaw")

    path = gpu_run(steps=5).write(tmp_path)
    monkeypatch.setattr(module, "rank_kernels", fail)
    monkeypatch.setattr(module, "judge", fail)
    report = analyze([path])
    said = "a bug in megatron_lite (IndexError in test_analysis_analyze.py:"
    told = [gap for gap in report.facts.gaps if said in gap]
    assert len(told) == 2 and report.findings == () and report.facts.critical.kernels.rows == ()
    assert report.verdict.sentence and terminal_lines(report, Style())


def test_a_trace_that_fails_alone_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "rank_time", lambda *given: 1 / 0)
    with pytest.raises(UserError, match="could not be analyzed: a bug in megatron_lite .ZeroDivisionError"):
        analyze([gpu_run().write(tmp_path)])


def test_too_little_memory_is_a_gap(tmp_path, monkeypatch):
    def too_large():
        raise MemoryError

    monkeypatch.setattr(module, "readers", lambda paths, work, say: [too_large for _ in paths])
    with pytest.raises(UserError, match="not enough memory to read it"):
        analyze([gpu_run().write(tmp_path)])


@pytest.mark.parametrize("made", [gpu_run, cpu_run])
def test_all_renderers_take_a_real_analysis(made, tmp_path):
    report = analyze([made(steps=5).write(tmp_path)])
    lines = terminal_lines(report, Style(unicode=True), everything=True)
    assert max(map(len, lines)) <= WIDTH and wording("cli/where-step-goes") in html_page(report)
    assert json.loads(json_text(report))["schema"] == 1


@pytest.mark.skipif(not REAL, reason="no ../shared/traces beside the repository")
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.name, marks=() if path.name in QUICK else pytest.mark.slow) for path in REAL]
)
def test_foreign_files_are_reported_on(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(path)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:-1])) <= WIDTH
    # Two screens: 92 lines of verdict, findings and tables, and the 21 of "Checked" (decision 042).
    assert shown.count("\n") <= 92 + 21
    assert wording("analysis/bug-in-megatron-lite") not in shown and "Traceback" not in shown
    read = json.loads((tmp_path / "report.json").read_text())
    for rank in read["ranks_seen"]:
        assert sum(rank["time"]["rows"].values()) == pytest.approx(rank["time"]["step_ms"], rel=1e-6)
