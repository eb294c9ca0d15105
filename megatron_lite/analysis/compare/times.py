"""Steps, rates and peaks of two runs beside each other, the phases of runs without traces, and the first line."""

from collections.abc import Sequence
from statistics import fmean

from megatron_lite.analysis.compare.compare_results import Change, Pair, PhasePair, Total
from megatron_lite.analysis.compare.settings import compute_noise_band, exact, paired, paired_samples
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.units import significant, size

STEP, TRACED_STEP, PEAK = "step", "traced step", "peak memory"


def pair_totals(a: Facts, b: Facts) -> list[Total]:
    """Step, tokens per second, MFU and peak memory, of each source that both have."""
    totals = []
    ordinary = [of_ordinary(facts.run, facts.run.training_ms) if facts.run else [] for facts in (a, b)]
    if all(ordinary):
        of = f"steps.jsonl, {len(ordinary[0])} and {len(ordinary[1])} ordinary steps"
        totals.append(Total(STEP, "ms", of, paired_samples(*ordinary)))
        # rates are of all ordinary time, as a report has them; they vary as one over the step does
        relative = compute_noise_band(*([fmean(ms) / one for one in ms] for ms in ordinary))
        for name, unit, field, factor in (
            ("tokens per second", "tokens/s", "tokens_per_second", 1),
            ("MFU, causal attention", "%", "mfu_causal", 100),
        ):
            rates = [getattr(facts.run, field) for facts in (a, b)]
            if None not in rates:
                mine, theirs = (factor * rate for rate in rates)
                band = None if relative is None else relative * max(mine, theirs)
                totals.append(Total(name, unit, of, paired(mine, theirs, band)))
    # the mean steady step of the critical ranks' traces, as their rows sum to it
    times = [facts.critical.time for facts in (a, b) if facts.critical]
    samples = [[step.ms for step in time.steady_steps] for time in times]
    if len(times) == 2 and all(samples):
        of = f"traces, {len(samples[0])} and {len(samples[1])} steady steps"
        pair = paired(times[0].step_ms, times[1].step_ms, compute_noise_band(*samples))
        totals.append(Total(TRACED_STEP, "ms", of, pair))
    # the most that tensors took: of snapshots, else as the GPU's allocator counted in each step
    peaks = {
        "memory snapshots": [[one.peak_bytes for one in facts.snapshots] for facts in (a, b)],
        "steps.jsonl": [[at for at in facts.run.peak_memory_bytes if at > 0] if facts.run else [] for facts in (a, b)],
    }
    for of, by_side in peaks.items():
        if all(by_side):
            return [*totals, Total(PEAK, "bytes", of, exact(*map(max, by_side)))]
    return totals


def pair_phases_of_runs(a: Run, b: Run) -> tuple[PhasePair, ...]:
    """Medians over ordinary steps: of the host, and where there is a GPU as its stream passed through them."""
    found = []
    for name in {**a.phases_ms, **b.phases_ms}:
        host = paired_samples(*(of_ordinary(run, run.phases_ms.get(name, ())) for run in (a, b)))
        device = None
        if a.gpu_phases_ms or b.gpu_phases_ms:
            device = paired_samples(*(of_ordinary(run, run.gpu_phases_ms.get(name, ())) for run in (a, b)))
        found.append(PhasePair(name, host, device))
    return tuple(found)


def of_ordinary(run: Run, values: Sequence[float]) -> list[float]:
    """A column's values in ordinary steps."""
    return [value for value, plain in zip(values, run.ordinary) if plain]


# --- the first line of a comparison

MIN_SHARE = 0.15  # of the step's difference that a phase must be to be named
MAX_NAMED = 3
MOSTLY_COMPUTE = 0.5  # of the step's difference: then phases say more than the one row "compute"


def build_sentence(totals: Sequence[Total], rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
    """'B takes 43% less time per step (185 -> 106 ms): backward -50 ms, forward -28 ms; peak memory is 20% less (...)'.

    rows, phases: of the same steps as the first of `totals` that is a step.
    """
    by_name = {total.name: total.pair for total in totals}
    step, peak, parts = by_name.get(STEP) or by_name.get(TRACED_STEP), by_name.get(PEAK), []
    if step:
        numbers = f"{_format_ms(step.a)} -> {_format_ms(step.b)} ms"
        noise = "too few steps" if step.band is None else f"noise {_format_ms(step.band)} ms"
        if step.change is Change.SAME:
            parts.append(f"B's steps take as long as A's ({numbers}, {noise})")
        elif step.change is Change.UNCLEAR:
            parts.append(f"whether B's steps take longer cannot be told ({numbers}, {noise})")
        else:
            said = f"B takes {abs(step.ratio - 1):.0%} {step.change} time per step ({numbers})"
            parts.append(said + _describe_reasons(step, rows, phases))
    if peak and peak.change is Change.SAME:
        parts.append(f"peak memory is the same ({size(peak.b)})")
    elif peak:
        by = f"{abs(peak.ratio - 1):.0%} {peak.change}"
        parts.append(f"peak memory is {by} ({size(peak.a)} -> {size(peak.b)})")
    return "; ".join(parts)


def _describe_reasons(step: Pair, rows: dict[str, Pair], phases: Sequence[PhasePair]) -> str:
    """Phases where computing changed; else the rows, which name the other reasons."""
    compute = rows.get("compute")
    computing = compute is not None and (compute.difference or 0.0) / step.difference >= MOSTLY_COMPUTE
    if rows and not computing:
        parts = {ROW_TITLES[name]: pair for name, pair in rows.items()}
    else:
        on_device = (phase.device if phase.device and phase.device.difference is not None else None for phase in phases)
        parts = {phase.name: device or phase.host for phase, device in zip(phases, on_device)}
    # a phase that takes longer explains no shorter step
    least = MIN_SHARE * abs(step.difference)
    told = {
        name: pair.difference
        for name, pair in parts.items()
        if pair.change is step.change and abs(pair.difference) >= least
    }
    largest = sorted(told, key=lambda name: -abs(told[name]))[:MAX_NAMED]
    named = [f"{name} {'+' if told[name] > 0 else '-'}{_format_ms(abs(told[name]))} ms" for name in largest]
    return f": {', '.join(named)}" if named else ""


def _format_ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else significant(value)
