"""The first line of a comparison."""

from collections.abc import Sequence

from megatron_lite.analysis.compare.compare_results import Change, Pair, PhasePair, Total
from megatron_lite.analysis.compare.times import PEAK, STEP, TRACED_STEP
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.units import size

MIN_SHARE = 0.15  # of the step's difference that a phase must be to be named
MAX_NAMED = 3
MOSTLY_COMPUTE = 0.5  # of the step's difference: then phases say more than the one row "compute"


def sentence_of(totals: Sequence[Total], rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
    """'B takes 43% less time per step (185 -> 106 ms): backward -50 ms, forward -28 ms; peak memory is 20% less (...)'.

    rows, phases: of the same steps as the first of `totals` that is a step.
    """
    by_name = {total.name: total.pair for total in totals}
    step = by_name.get(STEP) or by_name.get(TRACED_STEP)
    parts = [_time(step) + _where(step, phases, rows)] if step else []
    if PEAK in by_name:
        parts.append(_memory(by_name[PEAK]))
    return "; ".join(parts)


def _time(step: Pair) -> str:
    numbers = f"{_ms(step.a)} -> {_ms(step.b)} ms"
    if step.change is Change.SAME:
        return f"B's steps take as long as A's ({numbers}, noise {_ms(step.band)} ms)"
    if step.change is Change.UNCLEAR:
        return f"whether B's steps take longer cannot be told ({numbers}, " + (
            "too few steps)" if step.band is None else f"noise {_ms(step.band)} ms)"
        )
    return f"B takes {abs(step.ratio - 1):.0%} {step.change} time per step ({numbers})"


def _where(step: Pair, phases: Sequence[PhasePair], rows: dict[str, Pair]) -> str:
    if step.change not in (Change.MORE, Change.LESS):
        return ""
    parts = _parts(step, phases, rows)
    # a phase that takes longer explains no shorter step
    told = [
        (name, pair.difference)
        for name, pair in parts
        if pair.change is step.change and abs(pair.difference) >= MIN_SHARE * abs(step.difference)
    ]
    told = sorted(told, key=lambda part: -abs(part[1]))[:MAX_NAMED]
    return (": " + ", ".join(f"{name} {'+' if by > 0 else '-'}{_ms(abs(by))} ms" for name, by in told)) if told else ""


def _parts(step: Pair, phases: Sequence[PhasePair], rows: dict[str, Pair]) -> list[tuple[str, Pair]]:
    """Phases where computing changed; else the rows, which name the other reasons."""
    compute = rows.get("compute")
    computing = compute is not None and (compute.difference or 0.0) / step.difference >= MOSTLY_COMPUTE
    if rows and not computing:
        return [(ROW_TITLES[name], pair) for name, pair in rows.items()]
    return [
        (phase.name, phase.device if phase.device and phase.device.difference is not None else phase.host)
        for phase in phases
    ]


def _memory(peak: Pair) -> str:
    if peak.change is Change.SAME:
        return f"peak memory is the same ({size(peak.b)})"
    return f"peak memory is {abs(peak.ratio - 1):.0%} {peak.change} ({size(peak.a)} -> {size(peak.b)})"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
