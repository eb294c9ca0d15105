"""Steps that take far longer than the others, and steps that get slower; a window of a few steps shows neither."""

from collections.abc import Sequence

from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    Rule,
    build_time_finding,
    could_not_look,
    rule,
    saw,
    told_by,
)
from megatron_lite.analysis.findings.imbalance_rules import find_late_at_times, find_late_in_turns
from megatron_lite.analysis.findings.input_rules import find_starved_loader
from megatron_lite.analysis.findings.machine_rules import find_busy_machine
from megatron_lite.analysis.rank_facts import MATTERS, in_ms
from megatron_lite.analysis.run.every_step import OTHER_TIME
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run.step_lengths import (
    MIN_TYPICAL_STEPS,
    SlowSteps,
    find_slow_steps,
    find_slowing_steps,
    has_slow_profiled_step,
)
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.phases import Phase
from megatron_lite.units import significant

MAX_NAMED_STEPS = 5
TOLD = 0.5  # of what these steps cost, that another finding must tell to be the same
COMPUTING = (Phase.FORWARD.value, Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value, "")
ADVICE = {
    Phase.DATA.value: (
        "keep the loader ahead: DataLoader(persistent_workers=True) where workers start again at each epoch, "
        "more workers or a larger prefetch_factor where they fall behind"
    ),
    OTHER_TIME: "look at what the loop does in these steps between its phases: logging, saving, evaluating, gc",
}


@rule("slow-steps", "some steps that take far longer", "run", "step", needs="run", record=Recording.LONGER_RUN)
def find_some_slow_steps(facts: Facts, run: Run) -> Finding | Observation:
    """A few steps take far longer than the typical one, again and again.

    Meaning: what comes in every n-th step (a loader that refills, workers that start again at each epoch, logging,
        garbage collection, work of the loop's own) costs little of the median step and much of the run. A trace of a
        few steps shows it only by chance.
    Measured: the lengths of all typical steps in steps.jsonl, without evaluating, saving, compiling, the first steps
        and waiting for CPU cores, with a GPU by its own clock: those above 1.5 medians and far above the spread. The
        phase is the one that takes most of what they take more, wherever they waited for a core.
    Cost: what they take more than the median step, mean over all steps.
    Do: look at what happens in these steps; do it less often, ahead, or in a thread.
    Flags: --num-workers N; profile such a step: --profile-step-start N --profile-step-end N+1.
    False alarm: batches of very unequal size, and on a CPU other jobs whose load was not recorded: without a GPU only
        what comes at equal distances, or in a phase that does not compute, is told.
    """
    found = find_slow_steps(run, bool(facts.on_gpu))
    if found is None:
        return _look_at_steps(run)
    mean_ms = found.typical_ms + found.lost_ms
    text = _describe_slow_steps(found)
    if found.lost_ms < MATTERS * mean_ms:
        return saw(Evidence(text, STEPS_FILE))
    causes = [find_busy_machine, find_late_at_times, find_late_in_turns]
    causes += [find_starved_loader] if found.phase == Phase.DATA.value else []
    by_another = _find_same(facts, causes, found.lost_ms)
    if by_another is not None:
        return told_by(by_another.code, text)
    is_by_chance = found.every is None and found.phase in COMPUTING
    if is_by_chance and not facts.on_gpu:
        return saw(Evidence(f"{text}: at unequal distances, while computing on a CPU", STEPS_FILE))
    seen = [Evidence(f"{text}: {in_ms(found.lost_ms)} of the mean step of {in_ms(mean_ms)}", STEPS_FILE)]
    if found.phase:
        seen.append(Evidence(f"{_name_phase(found.phase)} takes {in_ms(found.phase_ms)} more in them"))
    doubt = facts.doubt_cores([run.writing_rank], found.lost_ms)
    seen += [Evidence(doubt)] if doubt else []
    advice = ADVICE.get(found.phase) or (
        f"profile one of these steps (--profile-step-start {found.iterations[0]}): what comes only in some steps "
        "is not in other traces"
    )
    certain = bool(found.phase) and not is_by_chance and not doubt
    return build_time_finding(found.lost_ms, seen, advice, (), certain)


@rule("slowing-steps", "steps that get slower", "run", "step", needs="run", record=Recording.LONGER_RUN)
def find_steps_that_get_slower(facts: Facts, run: Run) -> Finding | Observation:
    """Steps take longer from each quarter of the run to the next.

    Meaning: something grows with the run: a list that is never cleared, a graph that is kept, a cache that no longer
        fits, more hooks at each step, a file that is rewritten as a whole; or a device that gets hot and lowers its
        clock. The profiled steps show the speed of one moment.
    Measured: the medians of four quarters of all typical steps in steps.jsonl, without waiting for CPU cores, with a
        GPU by its own clock, each longer than the one before, by a tenth in all and by more than steps of one quarter
        differ. The phase is the one that takes most of it.
    Cost: what steps take more than those of the first quarter, mean over all steps.
    Do: look at what grows (host memory, loader, logging), and profile a late step beside an early one.
    Flags: --profile-step-start late in the run; megatron-lite compare of both windows.
    False alarm: batches that grow by a schedule (not told, where their sizes are recorded), sequences that get longer.
    """
    found = find_slowing_steps(run, bool(facts.on_gpu))
    if found is None:
        return _look_at_steps(run)
    text = (
        f"the median step takes {in_ms(found.first_ms)} in the first quarter of the run and {in_ms(found.last_ms)} in"
    )
    seen = [Evidence(f"{text} the last, longer in each", STEPS_FILE)]
    by_another = _find_same(facts, [find_busy_machine], found.lost_ms)
    if by_another is not None:
        return told_by(by_another.code, seen[0].text)
    if found.lost_ms < MATTERS * found.first_ms:
        return saw(*seen)
    if found.phase:
        seen.append(Evidence(f"{_name_phase(found.phase)} takes {in_ms(found.phase_ms)} more in the last"))
    doubt = facts.doubt_cores([run.writing_rank], found.lost_ms)
    seen += [Evidence(doubt)] if doubt else []
    advice = "look for what grows with each step (lists, graphs, hooks, files); profile a late step beside an early one"
    return build_time_finding(found.lost_ms, seen, advice, (), certain=False)


def _look_at_steps(run: Run) -> Observation:
    """Tell how many typical steps are alike."""
    typical = int(run.ordinary.sum())
    if typical < MIN_TYPICAL_STEPS or run.steady_step_ms is None:
        return could_not_look()
    return saw(Evidence(f"{typical:,} typical steps around {in_ms(run.steady_step_ms)}", STEPS_FILE))


def _describe_slow_steps(found: SlowSteps) -> str:
    """Describe them as in "4 of 35 steps take 90 ms, every 13 steps (the median: 10 ms)"."""
    if found.every is not None:
        when = f"every {found.every} steps"
    elif found.in_a_row:
        when = f"in a row from step {found.iterations[0]} to {found.iterations[-1]}"
    else:
        more = ", ..." if len(found.iterations) > MAX_NAMED_STEPS else ""
        when = f"at steps {', '.join(map(str, found.iterations[:MAX_NAMED_STEPS]))}{more}"
    take = f"{len(found.iterations)} of {found.steps} steps take {significant(found.slow_ms)} ms"
    return f"{take}, {when} (the median: {significant(found.typical_ms)} ms)"


def _name_phase(phase: str) -> str:
    """Name a phase, or the time that lies in none."""
    return "what is in no phase" if phase == OTHER_TIME else f"the phase {phase}"


def _find_same(facts: Facts, causes: Sequence[Rule], lost_ms: float) -> Finding | None:
    """Find the first of these causes whose finding tells of `lost_ms` per step, or most of it; None without one."""
    for cause in causes:
        told = cause(facts)
        if told is not None and (told.cost_ms or 0.0) >= TOLD * lost_ms:
            return told
    return None


def doubt_window(facts: Facts) -> str:
    """Say why the window of a trace does not speak for the run; "" where it does.

    It may hold none of the slow steps, or steps may get slower.
    """
    run = facts.run
    if run is None:
        return ""
    if find_some_slow_steps(facts) is not None:
        on_gpu = bool(facts.on_gpu)
        found = find_slow_steps(run, on_gpu)
        if found is not None and not has_slow_profiled_step(run, on_gpu, found.limit_ms):
            return f"{_describe_slow_steps(found)}, none of them in the trace"
    if find_steps_that_get_slower(facts) is not None:
        return "steps get slower over the run"
    return ""
