"""Steps, rates and peaks of two runs beside each other, and the phases of runs without traces."""

from collections.abc import Sequence
from statistics import fmean

from megatron_lite.analysis.compare.compare_results import Change, Pair, PhasePair, Total
from megatron_lite.analysis.compare.settings import compute_noise_band, exact, paired, paired_samples
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.units import size

STEP, TRACED_STEP, TOKENS, MFU, PEAK = (
    "step",
    "traced step",
    "tokens per second",
    "MFU, causal attention",
    "peak memory",
)


def pair_totals(a: Facts, b: Facts) -> list[Total]:
    """Step, tokens per second, MFU and peak memory, of each source that both have."""
    totals = _totals_of_runs(a.run, b.run) if a.run and b.run else []
    traced = traced_step(a, b)
    if traced:
        numbers = (len(facts.critical.time.steady_steps) for facts in (a, b))
        totals.append(Total(TRACED_STEP, "ms", "traces, {} and {} steady steps".format(*numbers), traced))
    return [*totals, *_peak_memory(a, b)]


def _totals_of_runs(a: Run, b: Run) -> list[Total]:
    ordinary = [of_ordinary(run, run.training_ms) for run in (a, b)]
    if not all(ordinary):
        return []
    of = f"steps.jsonl, {len(ordinary[0])} and {len(ordinary[1])} ordinary steps"
    totals = [Total(STEP, "ms", of, paired_samples(*ordinary))]
    # rates are of all ordinary time, as a report has them; they vary as one over the step does
    relative = compute_noise_band(*([fmean(ms) / one for one in ms] for ms in ordinary))
    for name, unit, mine, theirs in (
        (TOKENS, "tokens/s", a.tokens_per_second, b.tokens_per_second),
        (MFU, "%", _percent(a.mfu_causal), _percent(b.mfu_causal)),
    ):
        if mine is not None and theirs is not None:
            totals.append(
                Total(name, unit, of, paired(mine, theirs, None if relative is None else relative * max(mine, theirs)))
            )
    return totals


def traced_step(a: Facts, b: Facts) -> Pair | None:
    """The mean steady step of the critical ranks' traces, as their rows sum to it."""
    if not a.critical or not b.critical:
        return None
    samples = [[step.ms for step in facts.critical.time.steady_steps] for facts in (a, b)]
    return (
        paired(a.critical.time.step_ms, b.critical.time.step_ms, compute_noise_band(*samples)) if all(samples) else None
    )


def pair_phases_of_runs(a: Run, b: Run) -> tuple[PhasePair, ...]:
    """Medians over ordinary steps: of the host, and where there is a GPU as its stream passed through them."""
    with_gpu = bool(a.gpu_phases_ms or b.gpu_phases_ms)
    found = []
    for name in {**a.phases_ms, **b.phases_ms}:
        host = _of_phase(a, b, a.phases_ms, b.phases_ms, name)
        found.append(
            PhasePair(name, host, _of_phase(a, b, a.gpu_phases_ms, b.gpu_phases_ms, name) if with_gpu else None)
        )
    return tuple(found)


def _of_phase(a: Run, b: Run, mine: dict, theirs: dict, name: str) -> Pair:
    return paired_samples(of_ordinary(a, mine.get(name, ())), of_ordinary(b, theirs.get(name, ())))


def of_ordinary(run: Run, values) -> list[float]:
    return [value for value, plain in zip(values, run.ordinary) if plain]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _peak_memory(a: Facts, b: Facts) -> list[Total]:
    """The most that tensors took: of snapshots, else as the GPU's allocator counted in each step."""
    peaks = [max((one.peak_bytes for one in facts.snapshots), default=None) for facts in (a, b)]
    if None not in peaks:
        return [Total(PEAK, "bytes", "memory snapshots", exact(*peaks))]
    peaks = [
        max((size for size in (facts.run.peak_memory_bytes if facts.run else ()) if size > 0), default=None)
        for facts in (a, b)
    ]
    return [Total(PEAK, "bytes", "steps.jsonl", exact(*peaks))] if None not in peaks else []


# --- the first line of a comparison


MIN_SHARE = 0.15  # of the step's difference that a phase must be to be named
MAX_NAMED = 3
MOSTLY_COMPUTE = 0.5  # of the step's difference: then phases say more than the one row "compute"


def build_sentence(totals: Sequence[Total], rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
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
