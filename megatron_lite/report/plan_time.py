"""How fast a planned run can be, as a section: parts of a step, tokens/s, days."""

from collections.abc import Callable, Sequence

from megatron_lite.report.numbers import milliseconds, percent, share
from megatron_lite.report.plan_figures import Outlook, PlanReport
from megatron_lite.report.plan_verdict import span
from megatron_lite.report.section import Lines, Section, Table
from megatron_lite.units import count, short_count

CAVEAT = "real steps take longer: kernels miss the peak, and launches and the host take time"


def time(report: PlanReport, why: bool) -> Section:
    """The parts of a step at best: with limits and bars for one GPU, a column for each of several."""
    outlooks = report.outlooks
    table = _one(outlooks[0]) if len(outlooks) == 1 else _several(outlooks)
    formulas = [f"{row.name} = {row.formula}" for outlook in outlooks for row in outlook.time.rows]
    notes = dict.fromkeys(note for outlook in outlooks for note in outlook.time.notes)
    blocks = [table, *([Lines(formulas, quiet=True)] if why else []), Lines([CAVEAT, *notes], quiet=True)]
    of = f"{outlooks[0].processor.name}, a lower bound" if len(outlooks) == 1 else "lower bounds"
    return Section("time", "Time of a step at best", of, blocks)


def _one(outlook: Outlook) -> Table:
    parts = outlook.time.rows
    rows = [[row.name, _ms(row.ms, outlook), row.bound] for row in parts]
    rows += [[name, text(outlook), ""] for name, text in _sums([outlook])]
    return Table(rows, "lrl", shares=[share(row.ms, outlook.time.step_ms) for row in parts])


def _several(outlooks: Sequence[Outlook]) -> Table:
    names = dict.fromkeys(row.name for outlook in outlooks for row in outlook.time.rows)
    rows = [[name, *(_part(name, outlook) for outlook in outlooks)] for name in names]
    rows += [[name, *map(text, outlooks)] for name, text in _sums(outlooks)]
    return Table(rows, "l" + "r" * len(outlooks), ["", *(outlook.processor.name for outlook in outlooks)])


def _part(name: str, outlook: Outlook) -> str:
    found = next((row for row in outlook.time.rows if row.name == name), None)
    return _ms(found.ms, outlook) if found else "not known"


def _ms(value: float, outlook: Outlook) -> str:
    return f"{milliseconds(value, outlook.time.step_ms)} ms"


def _sums(outlooks: Sequence[Outlook]) -> list[tuple[str, Callable[[Outlook], str]]]:
    lengths = [outlook.duration.tokens for outlook in outlooks if outlook.duration]
    return [
        ("step", lambda one: _ms(one.time.step_ms, one) if one.time.peak_tflops else "not known"),
        ("tokens/s", lambda one: count(one.time.tokens_per_s) if one.time.peak_tflops else ""),
        ("of peak at best", lambda one: percent(utilisation(one))),
        (
            f"{short_count(lengths[0])} tokens" if lengths else "whole training",
            lambda one: span(one.duration) if one.duration else "",
        ),
        ("GPU hours", lambda one: f"{one.duration.gpu_hours:,.1f}" if one.duration else ""),
    ]


def utilisation(outlook: Outlook) -> float | None:
    """Of the peak, half of attention counted (Megatron-LM's convention), if the bound were reached."""
    time = outlook.time
    if not time.peak_tflops:
        return None
    return time.flops_causal / (time.step_ms / 1000) / (time.peak_tflops * 1e12)
