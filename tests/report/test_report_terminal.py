"""The report on a terminal: it fits, it adds up, it obeys no foreign name."""

import dataclasses
import io
import re

import pytest
from support import report_cases as cases
from support.waiting import Terminal
from support.wording import wording

from megatron_lite.analysis.findings.checks import QUESTIONS
from megatron_lite.report.section import Table, table_lines
from megatron_lite.report.sections.all import build_limitations, build_sections
from megatron_lite.report.terminal import MAX_LINES, terminal_lines
from megatron_lite.report.text import (
    WIDTH,
    Style,
    fit,
    flops,
    get_style,
    milliseconds,
    percent,
    shorten,
    wrapped,
)

PLAIN = Style(colour=False, unicode=False)
CHECK_LINES = 2 + len(QUESTIONS) + 1  # an empty line, the title, and a hint at the end


def text(report=None, style=PLAIN, everything=False) -> str:
    return "\n".join(terminal_lines(report or cases.report(), style, everything))


@pytest.mark.parametrize("name", [None, cases.HOSTILE, "x" * 5000, "a b " * 500])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("device", [None, "NVIDIA H100 80GB HBM3"])
def test_every_line_fits(name, everything, device):
    lines = terminal_lines(cases.report(device, name), PLAIN, everything)
    assert max(map(len, lines)) <= WIDTH
    if not everything and (name is None or len(name) < 1000):
        assert len(lines) <= MAX_LINES + 2 + CHECK_LINES


def test_the_order_is_verdict_step_findings_tables():
    shown = text(everything=True)
    titles = (
        "run-1: 2 ranks,31% of peak,Where a step goes,Findings,Phases,Kernels,Speed of light,Memory,Ranks,Collectives"
    )
    places = [shown.index(title) for title in (*titles.split(","), "The whole run")]
    assert places == sorted(places)


def test_changes_stand_in_their_order_with_the_step_after_each():
    report = cases.report()
    [table] = [section.blocks[0] for section in build_sections(report, False) if section.key == "gains"]
    assert [row[2] for row in table.rows] == [change.code for change in report.gains.order]
    step_ms = report.gains.step_ms
    for row in table.rows:
        step_ms -= float(row[-2])
        assert float(row[-1]) == pytest.approx(step_ms, abs=0.1)
    assert " ".join(report.verdict.next_steps.split()) in " ".join(text(report).split())


def test_where_nothing_is_claimed_a_line_says_why():
    why_not = "the clocks differ"
    report = cases.report()
    unclaimed = dataclasses.replace(report, gains=dataclasses.replace(report.gains, order=(), why_not=why_not))
    assert why_not in text(unclaimed) and "gains" not in {section.key for section in build_sections(unclaimed, False)}


def test_a_finding_says_whether_its_gain_is_a_bound():
    assert wording("report/at-most", "2.000") in text_of_gain(2.0, is_bound=True)
    assert wording("report/by-itself", "2.000") in text_of_gain(2.0, is_bound=False)
    assert wording("report/nothing-by-itself") in text_of_gain(0.001, is_bound=False)


def text_of_gain(gain_ms: float, is_bound: bool) -> str:
    report = cases.report()
    first = dataclasses.replace(report.findings[0], gain_ms=gain_ms, gain_is_bound=is_bound)
    return " ".join(text(dataclasses.replace(report, findings=(first,))).split())


def test_rows_of_a_step_sum_to_it():
    table = next(section for section in build_sections(cases.report(), False) if section.key == "step").blocks[0]
    *rows, total = [float(row[1]) for row in table.rows]
    assert sum(rows) == pytest.approx(total) == 100.0
    assert table.rows[0][0] == "compute" and table.rows[-2][0] == "unexplained"
    assert rows[1:-1] == sorted(rows[1:-1], reverse=True)
    # the host's time stands beside the device's
    assert re.search(r"data_to_device +28\.0 +0\.03 ", text()) and re.search(r"forward +7\.0 +26\.0 ", text())


def test_a_cpu_report_speaks_of_no_device():
    shown = text(cases.report(None))
    for word in ("device idle", "Kernels", "queue lag", "tensor cores", "GPU"):
        assert word not in shown.split("Memory")[0].replace("cost per step", ""), word
    assert wording("report/python-between-operators") in shown and wording("report/waiting-for-communication") in shown


def test_a_finding_shows_evidence_advice_cost_and_bound():
    lines = text().splitlines()
    at = next(at for at, line in enumerate(lines) if " 1. sync-in-step" in line)
    assert lines[at].endswith("6.000 ms") and "train.py(12): forward" in lines[at + 1]
    assert lines[at + 2].strip() == wording("report/try-read-loss-every", 100, "--log-interval", 100, "6.000")
    assert any(wording("report/likely-logits-are-peak") in line and line.endswith("3.00 GiB") for line in lines)
    assert wording("report/no-rule-found-cause") in text(dataclasses.replace(cases.report(), findings=()))


def test_everything_shows_all_rows():
    short, long = text(), text(everything=True)
    assert "and 4 more with --all" in short and "with --all" not in long.lower()
    assert wording("report/with-collectives-speed-of", "--all") in short and "\nCollectives" not in short
    assert long.count("ampere_bf16_s16816gemm_") == 12


def test_the_report_ends_with_the_checks_in_their_order():
    lines = text().splitlines()[-CHECK_LINES:]
    assert lines[0] == "" and lines[1].startswith("Checked") and lines[-1].startswith("  megatron-lite audit")
    names = [question.name for question in QUESTIONS]
    for number, (name, line) in enumerate(zip(names, lines[2:-1], strict=True), 1):
        assert re.match(rf"  (passed     |FAILED     |not visible)  {number:>2} {re.escape(name)} +\S", line), line
    shown = text(everything=True)
    places = [shown.index(f"{number:>2} {one.text}") for number, one in enumerate(QUESTIONS, 1)]
    assert places == sorted(places) and places[0] > shown.index(wording("report/whole-run"))


@pytest.mark.parametrize(
    ("sentence", "short"),
    [
        ("10.0 ms of 39 steps", "10.0 ms of 39 steps"),
        ("times from its clock, 35.2 ms a step", "times from its clock"),
        ("a trace (shapes on) of some steps", "a trace (shapes on) .."),
        ("the run's record (run.json, steps.jsonl)", "the run's record"),
        ("one, and much more that follows", "one, and much more .."),
        ("x" * 40, "x" * 14 + ".." + "x" * 7),
        ("", ""),
    ],
)
def test_a_sentence_is_shortened_to_clauses_or_words(sentence, short):
    assert shorten(sentence, 23) == short


def test_a_report_whose_checks_failed_has_no_such_section():
    report = dataclasses.replace(cases.report(), checks=())
    assert "Checked" not in text(report)


def test_only_parts_that_exist_are_shown():
    report = cases.report(ranks_seen=(), snapshots=(), ranks=None)
    assert [section.key for section in build_sections(report, True)] == ["run", "checked"]
    report = cases.report(ranks_seen=(), run=None, ranks=None)
    assert [section.key for section in build_sections(report, True)] == ["memory", "checked"]


def test_gaps_are_said_once_before_the_checks():
    one = cases.report(gaps=("the trace broke off at byte 12",))
    assert text(one).partition("\nChecked")[0].rstrip().endswith(wording("report/trace-broke-off-at", 12))
    broken = cases.trace(0, notes=("the trace broke off at byte 12",))
    twice = dataclasses.replace(one.facts.ranks_seen[0], trace=broken)
    facts = dataclasses.replace(one.facts, ranks_seen=(twice, twice), ranks=None)
    assert build_limitations(dataclasses.replace(one, facts=facts)) == [wording("report/trace-broke-off-at-byte", 12)]


def test_colour_is_for_terminals_only(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert get_style(Terminal()) == Style(colour=True, unicode=True)
    assert "\x1b[1m" in text(style=Style(colour=True)) and "\x1b" not in text()
    bare = re.sub(r"\x1b\[\d+m", "", text(style=Style(colour=True)))
    assert bare == text()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not get_style(Terminal()).colour
    assert get_style(io.StringIO()) == Style(colour=False, unicode=False)


def test_bars_tables_names_and_numbers_fit():
    assert PLAIN.bar(0.5, 10) == "#####" and Style(unicode=True).bar(0.5, 10) == "█████"
    assert PLAIN.bar(0.001, 10) == "#" and PLAIN.bar(0.0, 10) == "" and PLAIN.bar(7.0, 10) == "#" * 10
    assert text().isascii() and not text(style=Style(unicode=True)).isascii()
    lines = table_lines(Table([["k" * 300, "forward", "1"]], "llr", ["kernel", "phase", "ms"]), PLAIN)
    assert len(lines[1]) == WIDTH and lines[1].endswith("kkk  forward   1") and ".." in lines[1]
    assert all(len(line) <= WIDTH + 60 for line in table_lines(Table([["x"] * 40], "l" * 40), PLAIN))
    assert [fit("abcdefghijkl", 8), fit("abc", 8), fit("abcdef", 1)] == ["abcd..kl", "abc", "."]
    lines = wrapped("word " * 40, "  - ", "    ")
    assert lines[0].startswith("  - word") and all(line.startswith("    word") for line in lines[1:]) and len(lines) > 1
    shown = [milliseconds(value) for value in (1234.5, 12.345, 0.12345, None, float("nan"))]
    assert shown == ["1,234.5", "12.35", "0.123", "", ""] and milliseconds(0.5, largest=200) == "0.5"
    small = [milliseconds(value, largest=200) for value in (0.0, 1e-12, -1e-12, 0.05, 0.049, 0.0123, 0.0004, -0.02)]
    assert small == ["0.0", "0.0", "0.0", "0.1", "0.05", "0.01", "<0.001", "-0.02"]
    assert [percent(share) for share in (0.0, 0.001, 0.126, None)] == ["0%", "<1%", "13%", ""]
    assert [flops(value) for value in (31e12, 5e9, 12, 2e18)] == ["31 TFLOP", "5 GFLOP", "12 FLOP", "2,000 PFLOP"]


def test_memory_is_measured_beside_the_formula():
    shown = text().split("\nMemory")[1].split("\nRanks")[0]
    assert re.search(r"activations +12\.00 GiB +8\.00 GiB\n", shown)
    assert wording("report/formula-and-measurement-agree", 10) in shown
    layers = "activations of 24 layers: 12.00 GiB, outside of layers 256.0 MiB; most in layers.0 512.0 MiB"
    assert layers in " ".join(shown.split()), "what lies outside of layers is no layer"
    assert re.search(r"parameters +2\.00 GiB +2\.00 GiB +2 bytes x", text(everything=True))


def test_without_a_snapshot_the_trace_tells_the_peak():
    alone = {"snapshots": (), "ledger": ()}
    shown = text(cases.report(**alone, traced_memory=(cases.traced_memory(),)))
    assert re.search(r"0 +GPU 0 +3\.00 GiB +4\.00 GiB +forward +aten::log_softmax\n", shown)
    assert "--record-memory-history" in shown and wording("report/before-window") not in shown
    shown = text(cases.report(**alone, traced_memory=(cases.traced_memory(given=False),)))
    assert " + 3.00 GiB " in shown and wording("report/in-addition-to-memory") in shown


@pytest.mark.parametrize(
    ("status", "how", "why"),
    [
        ("failed: OutOfMemoryError: " + "long " * 40 + "end", "failed", " end\n"),
        ("killed or lost: its process is gone", "killed or lost", "its process is gone\n"),
    ],
)
def test_a_failed_or_killed_run_says_so_first_and_why(status, how, why):
    run = dataclasses.replace(cases.run_of(), record=cases.record_of(status=status))
    shown = text(cases.report(ranks_seen=(), snapshots=(), ranks=None, ledger=(), run=run))
    assert re.search(rf"  The run (was )?{how} after 3 steps. 95.5 ms per step", shown)
    assert f"3 steps, {how}\n" in shown and why in shown


def test_which_rank_died_is_told_once():
    line = "rank 1 died (process 7 on there is gone)"
    for status in ("failed: RanksError: " + line, "failed: ZeroDivisionError: by zero", "running"):
        failed = dataclasses.replace(cases.run_of(), record=cases.record_of(status=status), verdict_on_ranks=line)
        assert text(cases.report(run=failed)).count(line) == 1


def test_a_file_without_ranks_is_called_by_its_name():
    traces = [cases.trace(None, source=f"job.sqlite (process {at})") for at in (0, 1)]
    seen = [dataclasses.replace(one, time=cases.rank_time(None)) for one in cases.report().facts.ranks_seen]
    seen = tuple(dataclasses.replace(one, trace=trace) for one, trace in zip(seen, traces))
    shown = text(cases.report(ranks_seen=seen, ranks=None))
    assert wording("report/job-sqlite-process-ms", 0) in shown and wording("report/one-that-waits-least") not in shown
