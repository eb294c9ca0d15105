"""What was predicted before the run, row by row beside what was measured."""

from collections.abc import Sequence

from megatron_lite.analysis.predicted.predicted_results import Compared, ComparedMemory, ComparedTime
from megatron_lite.analysis.report import Report
from megatron_lite.report.numbers import milliseconds, percent
from megatron_lite.report.section import Lines, Section, Table
from megatron_lite.units import count, size

SMALL = 0.01  # of the peak: such categories stand together
OTHERS = "others"
MANIFOLD = 1.0  # difference from which on it is told as a factor


def prediction_section(report: Report, everything: bool) -> Section | None:
    """Memory with its categories; the step against the shortest possible one."""
    found = report.facts.predicted
    if found is None:
        return None
    blocks = [
        *_memory(found.memory, everything),
        *_time(found.time),
        *([Lines(found.notes, quiet=True)] if found.notes else []),
    ]
    return (
        Section("prediction", "Predicted against measured", _of(found.memory, found.time), blocks) if blocks else None
    )


def _of(memory: ComparedMemory | None, time: ComparedTime | None) -> str:
    rank = "" if memory is None or memory.rank is None else f"rank {memory.rank}, "
    return ", ".join(part for part in (f"{rank}{memory.source}" if memory else "", time.gpu if time else "") if part)


def _memory(memory: ComparedMemory | None, everything: bool) -> list:
    if memory is None:
        return []
    rows = [_bytes(row) for row in _merged(memory, everything)]
    table = Table([*rows, _bytes(memory.peak)], "lrrr", ["tensors at the peak", "predicted", "measured", "measured is"])
    measured = f", measured in {memory.measured_in}" if memory.measured_in else ""
    return [table, Lines([f"the peak was predicted at {memory.predicted_at}{measured}"], quiet=True)]


def _merged(memory: ComparedMemory, everything: bool) -> Sequence[Compared]:
    """Small categories as one row; all of them on demand."""
    least = 0 if everything else SMALL * memory.peak.measured
    large = [row for row in memory.categories if max(row.predicted, row.measured) >= least]
    small = [row for row in memory.categories if row not in large]
    rest = Compared(OTHERS, sum(row.predicted for row in small), sum(row.measured for row in small))
    return [*large, rest] if small else large


def _bytes(row: Compared) -> list[str]:
    return [row.name, size(row.predicted), size(row.measured), "" if row.name == OTHERS else _difference(row)]


def _difference(row: Compared) -> str:
    """'3.1% more', '2.4 x as much', 'as predicted', 'not predicted'."""
    if row.difference is None:
        return "not predicted" if row.measured else ""
    if abs(row.difference) < 0.0005:
        return "as predicted"
    if row.difference > MANIFOLD:
        return f"{1 + row.difference:,.1f} x as much"
    share = f"{abs(row.difference):.1%}" if abs(row.difference) < 0.0995 else percent(abs(row.difference))
    return f"{share} {'more' if row.difference > 0 else 'less'}"


def _time(time: ComparedTime | None) -> list:
    if time is None:
        return []
    rows = [_ms(row, time.step) for row in (*time.parts, time.step)]
    if time.tokens:
        rows.append(
            [
                time.tokens.name,
                count(time.tokens.predicted),
                count(time.tokens.measured),
                f"{percent(time.tokens.measured / time.tokens.predicted)} of the bound",
            ]
        )
    table = Table(rows, "lrrr", ["ms per step", "at best", "measured", "measured is"])
    told = (
        ["at best: each part at the hardware's peak, nothing in between; real steps take longer"] if time.parts else []
    )
    return [table, Lines([*told, *(f"not in the bound: {text}" for text in time.not_predicted)], quiet=True)]


def _ms(row: Compared, step: Compared) -> list[str]:
    times = f"{row.measured / row.predicted:.2f} x the bound" if row.predicted else ""
    return [row.name, milliseconds(row.predicted, step.measured), milliseconds(row.measured, step.measured), times]
