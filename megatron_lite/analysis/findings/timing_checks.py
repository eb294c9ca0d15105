"""Checks of how a run was timed, and of what its profile is worth. No rule looks for a cause there."""

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Observation, Recording, could_not_look, saw, saw_wrong
from megatron_lite.analysis.findings.check_case import CheckCase
from megatron_lite.analysis.rank_facts import RankFacts, in_ms
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import measure_ordinary
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.thresholds import MIN_BEFORE, MIN_RANK_STEPS
from megatron_lite.units import counted

MAX_UNEXPLAINED_SHARE = 0.10  # of the step; the profiler alone makes a few percent
MIN_TRACED_STEPS = 2  # a trace's window is short
WINDOW = "--profile-step-start 10 --profile-step-end 15"


def look_at_clock(case: CheckCase) -> Observation:
    """Tell whose clock the times are from.

    These may be CUDA events, a trace of a GPU, or on a CPU the host's clock, which is the device's.
    """
    run = case.facts.run
    one = case.facts.critical
    gpu_ms = measure_ordinary(run, run.gpu_ms) if run else None
    if run is not None and gpu_ms is not None:
        is_timed = run.ordinary & ~np.isnan(run.gpu_ms)
        steps = counted(is_timed.sum(), "typical step")
        text = f"median {in_ms(gpu_ms)} between CUDA events (gpu_ms) in {steps}"
        return saw(Evidence(text, STEPS_FILE), _count_steps(run))
    if one is not None and one.time.on_gpu:
        return _look_at_traced_clock(one)
    device = case.facts.plan.device
    if run is not None and run.ordinary.any() and device in ("cuda", "cpu"):
        return _look_at_host_clock(run, device)
    if one is None:
        return could_not_look()
    what = "the trace holds no work of a GPU: a CPU's job, or one recorded without CUDA activities"
    return could_not_look(Evidence(what, one.where()))


def _look_at_traced_clock(one: RankFacts) -> Observation:
    """Tell the times of a GPU's trace and how many steps ran before those that count."""
    steady = [place for place, step in enumerate(one.time.steps) if step.steady]
    if not steady or not one.time.step_ms > 0:
        return could_not_look()
    first = one.time.steps[steady[0]]
    # The profiler numbers steps from the process's first, 0; without numbers those in the trace count.
    before = steady[0] if first.number is None else first.number
    ran = f"{counted(before, 'step')} ran before the first that counts, {first.name}"
    text = f"times from the GPU's clock, {in_ms(one.time.step_ms)} a step; {ran}"
    seen = [Evidence(text, one.where()), *_list_left_out(one)]
    if before > 0:
        return saw(*seen)
    if first.number is None:
        return could_not_look(*seen, record="a window that does not begin with the first step")
    return saw_wrong(f"begin the window later: {WINDOW}", *seen, code="first-step")


def _look_at_host_clock(run: Run, device: str) -> Observation:
    """Tell the times of the host's clock, which is the device's on a CPU only."""
    if device == "cuda":
        text = "only the host's times of a GPU run: how long launching took, not the work"
        return saw_wrong("leave out --no-step-timeline", Evidence(text, STEPS_FILE))
    text = "a CPU run: operators end with their call, so the host's clock is right"
    return saw(Evidence(text, RUN_FILE), _count_steps(run))


def _count_steps(run: Run) -> Evidence:
    """Tell how many steps count, and why the others do not."""
    reasons = {
        "profiled": run.profiled.sum(),
        "compiling": run.compiling.sum(),
        "evaluating or saving": (run.evaluating | run.saving).sum(),
    }
    number = run.ordinary.sum()
    text = f"{number:,} of {run.steps:,} steps count; left out: the first, steps beside a profile"
    for what, number in reasons.items():
        if number:
            text += f", {number} {what}"
    return Evidence(text, STEPS_FILE)


def _list_left_out(one: RankFacts) -> list[Evidence]:
    """Name the trace's steps that do not count; [] where all do."""
    steps = [step for step in one.time.steps if not step.steady]
    if not steps:
        return []
    names = [f"{step.name} ({step.why_not or 'not steady'})" for step in steps]
    return [Evidence(f"left out: {', '.join(names)}", one.where())]


def look_at_steady_state(case: CheckCase) -> Observation:
    """Tell the step's time without the first step and other disturbed ones."""
    run = case.facts.run
    one = case.facts.critical
    number = run.ordinary.sum() if run else 0
    if run and run.steady_step_ms is not None and number >= MIN_RANK_STEPS:
        text = f"median {in_ms(run.steady_step_ms)} of {counted(number, 'typical step')}"
        if run.first_step_ms:
            text += f"; the first step took {in_ms(run.first_step_ms)}"
        return saw(Evidence(text, STEPS_FILE), _count_steps(run))
    if run and run.steps >= MIN_RANK_STEPS and not number:
        remedy = f"{Recording.LONGER_RUN}, and a profiled window that leaves steps outside it"
        return saw_wrong(remedy, _count_steps(run))
    if one is None:
        return could_not_look()
    steps = one.time.steps
    steady = sum(step.steady for step in steps)
    of_steps = f"{counted(steady, 'steady step')} of {len(steps)} in the trace"
    text = f"mean {in_ms(one.time.step_ms)} of {of_steps}"
    seen = [Evidence(text, one.where()), *_list_left_out(one)]
    return saw(*seen) if steady >= MIN_TRACED_STEPS else could_not_look(*seen)


def look_at_profile(case: CheckCase) -> Observation:
    """Tell where the trace says to begin, and whether that is true of the run without a profiler."""
    run = case.facts.run
    one = case.facts.critical
    if one is None or not one.time.step_ms > 0:
        return could_not_look()
    unexplained_ms = one.time.rows.get("unexplained", 0.0)
    if one.share(unexplained_ms) > MAX_UNEXPLAINED_SHARE:
        seen = Evidence(f"unexplained: {one.of_step(unexplained_ms)}", one.where())
        return could_not_look(seen, record=f"{Recording.TRACE}, with --pytorch-profiler-collect-callstack")
    where_to_begin = Evidence(_say_where_to_begin(case, one), one.where())
    begin = [where_to_begin, *_list_left_out(one)]
    if run is None or run.profiler_slowdown is None:
        window = f"--profile-step-start {MIN_BEFORE + 3} --profile-step-end {MIN_BEFORE + 8}"
        record = f"how far the profiler slows the step down: {Recording.RUN_FOLDER}, with {window}"
        return could_not_look(*begin, record=record)
    text = f"profiled steps take{run.on_rank} {run.profiler_slowdown:.2f} x as long as those before it"
    return saw(*begin, Evidence(text, STEPS_FILE))


def _say_where_to_begin(case: CheckCase, one: RankFacts) -> str:
    """Name the most costly finding, or the largest part of the step where none costs time."""
    for found in case.findings:
        if found.cost_ms:
            return f"where to begin: {found.code}, {one.of_step(found.cost_ms)}"
    rows = one.time.rows
    largest = max(rows, key=lambda row: rows[row], default="compute")
    title = ROW_TITLES.get(largest, largest)
    part = f"{title}, {one.of_step(rows.get(largest, 0.0))}"
    return f"no cause of lost time was found; the largest part is {part}"
