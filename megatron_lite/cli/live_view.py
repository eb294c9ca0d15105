"""Collects what `megatron-lite live` shows of a run: figures of its newest steps, and what a report would say now."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

import numpy as np

from megatron_lite.analysis.analyze import describe_run
from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.ranks.from_run import OWN, compare_ranks_of_run
from megatron_lite.analysis.run.hardware import RanksHardware
from megatron_lite.analysis.run.learning import describe_rise
from megatron_lite.analysis.run.read import compute_rank_medians, compute_speed
from megatron_lite.analysis.run.run_results import RankLines, Run, Steps
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.hardware_record import name_limits
from megatron_lite.phases import NOT_TRAINING
from megatron_lite.report.live_screen import GpuNow, LossCurve, PhaseNow, RankNow, View
from megatron_lite.report.text import milliseconds, percent
from megatron_lite.units import count, significant, size

RECENT_STEPS = 50  # that "now" is the median of
MIN_RECENT = 10  # ordinary ones, before they are compared with the run's
MIN_PHASE_SHARE = 0.01  # of a step: phases that take less stand together
REMAINING_PHASES = "others"
OUTSIDE_OF_PHASES = "outside of phases"
MIN_LONGER_SHARE = 0.1  # than the run's median step
BINS = 400  # of the loss curve, at most


def build_view(run: Run, recent: RankLines | None, hardware: RanksHardware) -> View:
    """Collect what the screen shows; nothing of the run's arrays is kept.

    Args:
        run: what the folder says.
        recent: the last console lines of all ranks; None without any.
        hardware: of all ranks, in the last lines.
    """
    last = run.take_last(RECENT_STEPS)
    speed, _ = compute_speed(run.record, last, starts_at_first=False)
    now = replace(run, hardware=hardware)
    if recent:
        now = replace(now, ranks=compute_rank_medians(recent, run.iterations[run.ordinary]))
    facts = Facts(ranks_seen=(), ranks=compare_ranks_of_run(now), snapshots=(), run=now, gaps=())
    phases = tuple(_compare_phases(run, last))
    ranks = tuple(_list_ranks(now))
    now_ms = speed["steady_step_ms"]
    slower = _describe_slowdown(run, last, now_ms, phases)
    return View(
        title=describe_run([run.folder], facts),
        status=run.status,
        started=_read_time(run.record.started),
        ended=_read_time(run.record.ended),
        iteration=_get_iteration(run),
        last_iteration=run.plan.train_iters,
        left_s=_predict_left_s(run, now_ms or run.steady_step_ms),
        figures=tuple(_list_figures(run, last, speed)),
        curve=_shorten_losses(run),
        phases=phases,
        on_gpu=bool(run.gpu_phases_ms),
        ranks=ranks,
        skew=_describe_skew(ranks, run),
        gpus=tuple(_list_gpus(hardware)),
        memory=tuple(_describe_memory(run, recent)),
        warnings=(*_list_failures(run, last), *slower, *_list_damage(run)),
        findings=tuple(map(_describe_finding, apply_rules(facts))),
        slowest_ms=float(last.step_ms.max(initial=0.0)),
    )


def _get_iteration(run: Run) -> int:
    """Get the newest iteration; 0 before the first."""
    return int(run.iterations[-1]) if run.steps else 0


def _predict_left_s(run: Run, step_ms: float | None) -> float | None:
    """Predict the seconds until the run is done, with evaluations and checkpoints as often as so far.

    Args:
        run: what the folder says.
        step_ms: the time of a typical step.

    Returns:
        The seconds; None where the last iteration or the time of a step is not known.
    """
    end = run.plan.train_iters
    if not end or not step_ms:
        return None
    stalls_ms = float(np.mean(run.step_ms - run.training_ms))
    left = max(end - _get_iteration(run), 0)
    return left * (step_ms + stalls_ms) / 1000


def _describe_finding(finding: Finding) -> str:
    """Describe a finding in a line: what it is, on which rank, and its first evidence."""
    doubt = "" if finding.certain else "likely: "
    rank = "" if finding.rank is None else f" (rank {finding.rank})"
    return f"{doubt}{finding.title}{rank}: {finding.evidence[0].text}"


def _read_time(value: object) -> float | None:
    try:
        return datetime.strptime(str(value), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _compare_phases(run: Run, last: Steps) -> Iterator[PhaseNow]:
    """Compare the phases of the last steps with those of the run; phases that take little stand together at the end.

    Yields nothing where either has no step that was timed.
    """
    on_gpu = bool(run.gpu_phases_ms)
    now_ms = _measure_phases(last, on_gpu)
    usual_ms = _measure_phases(run, on_gpu)
    if not now_ms or not usual_ms:
        return
    least_ms = MIN_PHASE_SHARE * math.fsum(now_ms.values())
    small = []
    for name, ms in now_ms.items():
        phase = PhaseNow(name, ms, usual_ms.get(name, 0.0))
        if phase.longer_ms < least_ms:
            small.append(phase)
        else:
            yield phase
    if small:
        sum_now_ms = math.fsum(phase.now_ms for phase in small)
        sum_usual_ms = math.fsum(phase.usual_ms for phase in small)
        yield PhaseNow(REMAINING_PHASES, sum_now_ms, sum_usual_ms)


def _measure_phases(steps: Steps, on_gpu: bool) -> dict[str, float]:
    """Take the median of each phase over typical steps, in ms; with what is outside of phases they add up to a step.

    Args:
        steps: the steps; all of them count where none is typical.
        on_gpu: take the GPU's own times instead of the host's.

    Returns:
        The medians; {} where no step was timed.
    """
    typical = steps.ordinary
    if not typical.any():
        typical = np.ones_like(steps.ordinary)
    phases_ms = steps.gpu_phases_ms if on_gpu else steps.phases_ms
    whole_ms = steps.gpu_ms if on_gpu else steps.training_ms
    known_ms = whole_ms[typical & ~np.isnan(whole_ms)]
    if not len(known_ms):
        return {}
    found = {}
    for name, ms in phases_ms.items():
        if name not in NOT_TRAINING:
            found[name] = float(np.median(ms[typical]))
    outside_ms = float(np.median(known_ms)) - math.fsum(found.values())
    found[OUTSIDE_OF_PHASES] = max(outside_ms, 0.0)
    return found


def _list_figures(run: Run, last: Steps, speed: dict[str, float | None]) -> Iterator[str]:
    """Write the newest figures of a run that are known.

    Args:
        run: what the folder says.
        last: its last steps.
        speed: what compute_speed found of them.
    """
    step_ms = speed["steady_step_ms"]
    if step_ms:
        yield f"{milliseconds(step_ms)} ms per step"
    tokens_per_s = speed["tokens_per_second"]
    if tokens_per_s:
        yield f"{count(tokens_per_s)} tokens/s"
    mfu = speed["mfu_causal"]
    if mfu:
        yield f"MFU {mfu:.1%}"
    losses = last.losses[~np.isnan(last.losses) & ~last.skipped]
    if len(losses):
        yield f"loss {significant(losses[-1], 4)}"
    columns = {"gradient norm": last.grad_norms, "learning rate": last.next_lrs}
    if run.plan.precision == "fp16":
        columns["loss scale"] = last.loss_scale
    for name, values in columns.items():
        known = values[~np.isnan(values)]
        if len(known):
            yield f"{name} {significant(known[-1])}"


def _shorten_losses(run: Run) -> LossCurve:
    """Shorten the losses of a run to the means of at most BINS stretches of iterations that have a loss."""
    known = ~np.isnan(run.losses) & ~run.skipped
    iterations = run.iterations[known]
    losses = run.losses[known]
    if len(iterations) < 2:
        return LossCurve((), ())
    first = iterations[0]
    length = max(float(iterations[-1] - first), 1.0)
    bins = np.clip((iterations - first) / length * BINS, 0, BINS - 1).astype(int)
    members = np.bincount(bins, minlength=BINS)
    filled = members > 0
    mean_iterations = np.bincount(bins, iterations, BINS)[filled] / members[filled]
    mean_losses = np.bincount(bins, losses, BINS)[filled] / members[filled]
    # the curve's ends are those of the run
    mean_iterations[[0, -1]] = iterations[[0, -1]]
    return LossCurve(mean_iterations.tolist(), mean_losses.tolist())


def _list_ranks(run: Run) -> Iterator[RankNow]:
    """List the ranks with their figures; none for a single rank, with which there is nothing to compare."""
    ranks = run.ranks
    if ranks is None or len(ranks.step_ms) < 2:
        return
    unknown = (math.nan,) * len(ranks.step_ms)
    own_phases_ms = [ms for ms in map(ranks.own_ms, OWN) if len(ms)]
    data_ms = ranks.phases_ms.get(OWN[0]) or unknown
    core_wait_ms = ranks.core_wait_ms or unknown
    for rank, step_ms in enumerate(ranks.step_ms):
        own_ms = math.nan
        if own_phases_ms:
            own_ms = math.fsum(ms[rank] for ms in own_phases_ms)
        yield RankNow(rank, step_ms, own_ms, data_ms[rank], core_wait_ms[rank])


def _list_gpus(hardware: RanksHardware) -> Iterator[GpuNow]:
    """List the GPUs whose clock, temperature or power was sampled."""
    shown = [hardware.get(name) for name in ("sm_clock_mhz", "temperature_c", "power_w")]
    is_known = ~np.isnan(shown).all(axis=0)
    highest_mhz = hardware.get("max_sm_clock_mhz")
    for rank in np.flatnonzero(is_known).tolist():
        clock_mhz, temperature_c, power_w = (float(values[rank]) for values in shown)
        limits = hardware.get_limits(rank)
        yield GpuNow(rank, clock_mhz, float(highest_mhz[rank]), temperature_c, power_w, name_limits(limits))


def _describe_skew(ranks: Sequence[RankNow], run: Run) -> str:
    """Describe which rank works longest; '' where the work of fewer than two is known."""
    known = sorted((one.own_ms, one.rank) for one in ranks if one.own_ms > 0)
    if len(known) < 2:
        return ""
    most_ms, slowest = known[-1]
    median_ms, _ = known[(len(known) - 1) // 2]
    text = f"rank {slowest} works longest, {most_ms / median_ms - 1:.0%} above the median rank"
    if len(set(run.stages)) > 1:
        text += "; stages have different work"
    return text


def _describe_memory(run: Run, recent: RankLines | None) -> Iterator[str]:
    """Describe how much memory the ranks hold, of the GPU and of the host, where it is known."""
    tensors_bytes = _find_newest(recent.peak_memory_bytes if recent else None, run.peak_memory_bytes)
    if len(tensors_bytes):
        room_bytes = run.record.hardware.memory_bytes
        yield f"GPU, tensors' peak: {_describe_ranks_memory(tensors_bytes, room_bytes)}"
    host_bytes = _find_newest(recent.host_memory_bytes if recent else None, run.host_memory_bytes)
    if len(host_bytes):
        yield f"host: {_describe_ranks_memory(host_bytes)}"


def _find_newest(of_ranks: Numbers | None, of_run: Numbers) -> Numbers:
    """Find the newest numbers of all ranks, else the newest of the rank that writes the log.

    Args:
        of_ranks: a row per console line, a column per rank; None without console lines of all ranks.
        of_run: a number per step.

    Returns:
        A number per rank, or a single one; none where nothing is known.
    """
    if of_ranks is not None and not np.isnan(of_ranks[-1]).all():
        return np.asarray(of_ranks[-1])
    return of_run[~np.isnan(of_run)][-1:]


def _describe_ranks_memory(of_ranks: Numbers, room_bytes: float | None = None) -> str:
    """Describe the most that a rank holds, and where it is given of how much; then how ranks differ."""
    least = size(float(np.nanmin(of_ranks)))
    most_bytes = float(np.nanmax(of_ranks))
    most = size(most_bytes)
    text = most
    if room_bytes:
        text += f" of {size(room_bytes)} ({percent(most_bytes / room_bytes)})"
    if len(of_ranks) < 2:
        return text
    if least == most:
        return f"{text} on each rank"
    return f"{text} on rank {np.nanargmax(of_ranks)}, {least} on rank {np.nanargmin(of_ranks)}"


def _list_failures(run: Run, last: Steps) -> Iterator[str]:
    """List what goes wrong in the training: ranks that fail, skipped steps, a loss that rises."""
    if run.verdict_on_ranks and run.verdict_on_ranks not in run.status:
        yield run.verdict_on_ranks
    yield from _describe_skipped(run, last)
    if risen := describe_rise(run):
        yield risen


def _list_damage(run: Run) -> Iterator[str]:
    """List what could not be read of the run's files."""
    for note in run.notes:
        if "cannot be" in note or "damaged" in note:
            yield note


def _describe_skipped(run: Run, last: Steps) -> Iterator[str]:
    """Describe how many steps were skipped, but for those before the first good step: by these a loss scale finds its
    size."""
    settled = run.skipped[run.skipped.argmin() :] if run.steps else run.skipped
    skipped = int(settled.sum())
    if not skipped:
        return
    if skipped == len(settled):
        yield f"all {count(skipped)} steps so far were skipped: no gradient was finite"
        return
    recent = int(settled[-len(last.skipped) :].sum())
    of_recent = min(len(last.skipped), len(settled))
    newest = int(run.iterations[np.flatnonzero(run.skipped)[-1]])
    numbers = f"{count(skipped)} of {count(len(settled))} steps were skipped, {recent} of the last {of_recent}"
    yield f"{numbers}; the newest is iteration {count(newest)}"


def _describe_slowdown(run: Run, last: Steps, now_ms: float | None, phases: Sequence[PhaseNow]) -> Iterator[str]:
    """Describe by how much the last steps take longer than the run's, and the phase that grew most.

    Args:
        run: what the folder says.
        last: its last steps.
        now_ms: the time of a typical one of the last steps.
        phases: what _compare_phases found.
    """
    usual_ms = run.steady_step_ms
    are_many = last.ordinary.sum() >= MIN_RECENT and run.steps > 2 * RECENT_STEPS
    if not are_many or not now_ms or not usual_ms:
        return
    noise_ms = max(MIN_LONGER_SHARE * usual_ms, run.step_spread_ms or 0.0)
    if now_ms - usual_ms <= noise_ms:
        return
    longer = f"{now_ms / usual_ms - 1:.0%} longer than the run's median of {milliseconds(usual_ms)} ms"
    yield f"steps take {longer}{_name_grown_phase(phases)}"


def _name_grown_phase(phases: Sequence[PhaseNow]) -> str:
    """Name the phase that grew most and by how much, as the end of a sentence; '' where none grew."""
    growth_ms = {phase.name: phase.now_ms - phase.usual_ms for phase in phases}
    most_ms = max(growth_ms.values(), default=0.0)
    if most_ms <= 0:
        return ""
    name = max(growth_ms, key=lambda name: growth_ms[name])
    return f", {name} by {milliseconds(most_ms)} ms"
