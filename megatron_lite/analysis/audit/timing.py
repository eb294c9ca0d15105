"""Points about how the run was timed: on the device's clock, after warm-up, by a profiler that did not disturb."""

import math
from statistics import median

from megatron_lite.analysis.audit.audit_results import Case, Outcome, blamed, failed, not_seen, passed
from megatron_lite.analysis.audit.recording import LONGER_RUN, RUN_FOLDER, TRACE
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.seen.steady import counted, in_ms, of_step, share, steady_steps, where
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.thresholds import MIN_BEFORE

MIN_STEPS = 3  # of a run, for a median; a trace's window is short, there it is 2
MIN_TRACED = 2
MAX_UNEXPLAINED = 0.10  # of the step: as much as what a verdict begins to name


def timed_on_the_device(case: Case) -> Outcome:
    """CUDA events of the run, or the device's own times in the trace; on a CPU the host's clock is the device's."""
    run, one = case.facts.run, case.facts.critical
    measured = _gpu_ms(run)
    if measured:
        text = f"median {in_ms(median(measured))} between CUDA events (gpu_ms) in {len(measured)} ordinary steps"
        return passed(Evidence(text, "steps.jsonl"), _counted(run))
    if one is not None and one.time.on_gpu:
        return _by_trace(one)
    device = case.facts.plan.get("device")
    if run is None or not any(run.ordinary) or device not in ("cuda", "cpu"):
        what = "the trace holds no work of a GPU: a CPU's job, or one recorded without CUDA activities"
        return not_seen(TRACE, *([Evidence(what, where(one))] if one is not None else []))
    if device == "cuda":
        text = "only the host's times of a GPU run: how long handing work over took, not the work"
        return failed("leave out --no-step-timeline", Evidence(text, "steps.jsonl"))
    return passed(
        Evidence("a CPU run: no operator outlives its call, so that the host's clock is right", "run.json"),
        _counted(run),
    )


def steady_state(case: Case) -> Outcome:
    """The step's time without the first step and other disturbed ones."""
    run, one = case.facts.run, case.facts.critical
    number = sum(run.ordinary) if run else 0
    if number >= MIN_STEPS:
        first = f"; the first step took {in_ms(run.first_step_ms)}" if run.first_step_ms else ""
        return passed(
            Evidence(f"median {in_ms(run.steady_step_ms)} of {number} ordinary steps{first}", "steps.jsonl"),
            _counted(run),
        )
    if run and run.steps >= MIN_STEPS and not number:
        return failed(f"{LONGER_RUN}, and a profiler's window that leaves steps beside it", _counted(run))
    if one is not None and sum(step.steady for step in one.time.steps) >= MIN_TRACED:
        return passed(
            Evidence(f"mean {in_ms(one.time.step_ms)} of {steady_steps(one)} steady steps in the trace", where(one)),
            *_left_out(one),
        )
    few = (
        [Evidence(f"{counted(steady_steps(one), 'step')} of {len(one.time.steps)} in the trace counts", where(one))]
        if one is not None
        else []
    )
    return not_seen(f"{LONGER_RUN}, or a longer window: --profile-step-end", *few)


def undisturbed_profile(case: Case) -> Outcome:
    """Does the trace say where to go, and is it true of the run without a profiler?"""
    one, run = case.facts.critical, case.facts.run
    if found := case.found("profiler-overhead"):
        return blamed(found)
    if one is None or not one.time.step_ms > 0:
        return not_seen(TRACE)
    seen = (_direction(case, one), *_left_out(one))
    unexplained = one.time.rows.get("unexplained", 0.0)
    if share(unexplained, one) > MAX_UNEXPLAINED:
        return not_seen(
            f"{TRACE}, with --pytorch-profiler-collect-callstack",
            Evidence(f"unexplained: {of_step(unexplained, one)}", where(one)),
        )
    slowdown = run.profiler_slowdown if run else None
    if slowdown is None:
        return not_seen(
            f"how far the profiler slows the step down: {RUN_FOLDER}, with --profile-step-start above {MIN_BEFORE + 2}",
            *seen,
        )
    text = f"steps inside the window take{run.on_rank} {slowdown:.2f} x as long as those before it"
    return passed(*seen, Evidence(text, "steps.jsonl"))


def _gpu_ms(run: Run | None) -> list[float]:
    return [ms for ms, plain in zip(run.gpu_ms, run.ordinary) if plain and not math.isnan(ms)] if run else []


def _by_trace(one: RankFacts) -> Outcome:
    """The profiler numbers steps from the process's first, 0; without numbers those in the trace count."""
    steady = [
        (at if step.number is None else step.number, step) for at, step in enumerate(one.time.steps) if step.steady
    ]
    if not steady or not one.time.step_ms > 0:
        return not_seen(TRACE)
    before, first = steady[0]
    text = (
        f"times from the GPU's clock, {in_ms(one.time.step_ms)} a step; "
        f"{before} steps ran before the first that counts, {first.name}"
    )
    seen = (Evidence(text, where(one)), *_left_out(one))
    if before > 0:
        return passed(*seen)
    if first.number is None:
        return not_seen("a window that does not begin with the first step", *seen)
    return failed("begin the window later: --profile-step-start 10", *seen, code="first-step")


def _counted(run: Run) -> Evidence:
    """Which steps count, and why the others do not."""
    left = {
        "profiled": sum(run.profiled),
        "compiling": sum(run.compiling),
        "evaluating or saving": sum(map(any, zip(run.evaluating, run.saving))),
    }
    told = [f"{number} {what}" for what, number in left.items() if number]
    return Evidence(
        f"{sum(run.ordinary)} of {run.steps} steps count; left out: the first, steps beside a profile"
        + "".join(f", {one}" for one in told),
        "steps.jsonl",
    )


def _left_out(one: RankFacts) -> tuple[Evidence, ...]:
    left = [f"{step.name} ({step.why_not or 'not steady'})" for step in one.time.steps if not step.steady]
    return (Evidence(f"left out: {', '.join(left)}", where(one)),) if left else ()


def _direction(case: Case, one: RankFacts) -> Evidence:
    """The most costly cause, else the largest part of the step."""
    dear = [found for found in case.findings if found.cost_ms]
    if dear:
        return Evidence(f"where to begin: {dear[0].code}, {of_step(dear[0].cost_ms, one)}", where(one))
    most = max(one.time.rows, key=one.time.rows.get, default="compute")
    return Evidence(
        f"no cause of lost time was found; the largest part is {ROW_TITLES.get(most, most)}, "
        f"{of_step(one.time.rows.get(most, 0.0), one)}",
        where(one),
    )
