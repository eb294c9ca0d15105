"""Compilation, and what the machine takes from the run."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.core_use import ORDINARY, PROFILED, CoreShortage
from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    Remedy,
    build_time_finding,
    could_not_look,
    rule,
    saw,
    saw_nothing,
    told_by,
)
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.rank_facts import MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run.cores import Slowdown, is_set_apart, measure_core_use, measure_slowdown
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import Settings
from megatron_lite.thresholds import MIN_QUOTA_SHARE, MIN_STOLEN, is_by_chance
from megatron_lite.units import counted
from megatron_lite.variables import THREADS, fitting_threads

MIN_COMPILING_STEPS = 2  # a single one may be a variant that was due
MAX_STEPS_SHOWN = 6
SEARCH = "search of the fastest algorithm"  # of host_causes.tsv
MOSTLY_SEARCH = 0.5  # of the time of compiling, that is such a search


@rule("recompilation", "recompilation in the middle of training", "run")
def find_recompilation(facts: Facts) -> Finding | Observation:
    """The model is recompiled again and again.

    Meaning: compiled code holds for the shapes, types and values it was made for. When they change, the guard fails and
        the code is compiled anew: seconds in which nothing is computed. Past a limit torch gives up and runs eagerly.
    Measured: steps that the run marked as compiling, the first step and those with an evaluation left out; without a
        run, compilations within the steady steps of a trace. The cost is the extra time of these steps, spread over
        all.
    Cost: all of it, as long as new variants keep coming.
    Do: TORCH_LOGS=recompiles names the failing guard. Keep shapes constant (fixed length, padding to few lengths), mark
        a changing dimension (torch._dynamo.mark_dynamic), keep Python numbers that change out of compiled functions.
    Flags: --torch-compile; constant --micro-batch-size and --seq-length, no --rampup-batch-size that changes the last
        batch.
        Where cuDNN searches for its fastest algorithm again (torch.backends.cudnn.benchmark), the finding says so.
    False alarm: a second variant for evaluation, and one per distinct layer, at the beginning.
    """
    found = measure_recompilation(facts.run)
    one = facts.critical
    if found is None and one is not None:
        works = [work for work in one.time.named if work.cause == "compile" and not work.once]
        cost = sum(work.step_ms for work in works)
        search_ms = sum(work.step_ms for work in works if work.what == SEARCH)
        is_notable = one.share(cost) >= MIN_SHARE_SHOWN
        if is_notable and search_ms > MOSTLY_SEARCH * cost:
            return _find_searches(one, cost)
        if is_notable and works:
            what = ", ".join(work.what for work in works)
            seen = Evidence(f"compiling ({what}) takes {one.of_step(cost)}", one.where())
            found = Recompilation(cost, seen, one.time.rank)
    if found is None:
        return _look_at_compiling(facts)
    advice = "start with TORCH_LOGS=recompiles to see which guard fails, and keep shapes and Python values constant"
    return build_time_finding(found.cost_ms, [found.seen], advice, ("TORCH_LOGS=recompiles",), rank=found.rank)


def _find_searches(one: RankFacts, cost_ms: float) -> Finding:
    """Build the finding of libraries (cuDNN, MIOpen) that try their algorithms again in each step.

    Nothing is compiled then, and no guard fails.
    """
    text = f"the {SEARCH} (cuDNN, MIOpen) takes {one.of_step(cost_ms)}"
    return Finding(
        title="searching for the fastest algorithm again and again",
        cost_ms=cost_ms,
        gain_ms=cost_ms,
        evidence=(Evidence(text, one.where()),),
        advice=(
            "keep the shapes of convolutions' inputs constant, or set torch.backends.cudnn.benchmark = False: "
            "each new shape is searched for anew"
        ),
        certain=False,
        rank=one.time.rank,
    )


def _look_at_compiling(facts: Facts) -> Observation:
    """Tell how many steps compiled something after the first, by the run or within a trace."""
    run = facts.run
    if run is not None and run.steps:
        number = int((run.compiling & ~run.evaluating)[1:].sum())
        text = f"{number:,} of {run.steps:,} steps compiled something after the first one"
        return saw(Evidence(text, STEPS_FILE))
    if facts.critical is not None:
        return saw_nothing(facts.critical, "hardly anything is compiled")
    return could_not_look(record=Recording.RUN_FOLDER)


@dataclass(frozen=True)
class Recompilation:
    """Compilation in the middle of training."""

    cost_ms: float  # per step
    seen: Evidence
    rank: int | None = None  # whose trace shows it; None where the run's steps do


def measure_recompilation(run: Run | None) -> Recompilation | None:
    """Measure the steps that compile after the first; None where a run's steps do not tell of any."""
    if run is None:
        return None
    late = np.flatnonzero(run.compiling & ~run.evaluating)
    late = late[late > 0]
    if len(late) < MIN_COMPILING_STEPS:
        return None
    steady_ms = run.steady_step_ms
    if not steady_ms:  # all steps compile: what they take besides
        steady_ms = float(np.median(run.training_ms[late] - run.compile_ms[late]))
    cost_ms = math.fsum(np.maximum(run.training_ms[late] - steady_ms, 0.0)) / run.steps
    if not cost_ms >= MIN_SHARE_SHOWN * steady_ms:
        return None
    shown = ", ".join(str(run.iterations[at]) for at in late[:MAX_STEPS_SHOWN])
    if len(late) > MAX_STEPS_SHOWN:
        shown += ", ..."
    text = (
        f"{len(late):,} of {run.steps:,} steps compiled something, after the first one (iterations {shown}); "
        f"spread over all steps {in_ms(cost_ms)} each, beside {in_ms(steady_ms)} without compiling"
    )
    return Recompilation(cost_ms, Evidence(text, STEPS_FILE))


REGION = re.compile(r"Torch-Compiled Region: (\d+)/\d+")
RESUME = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")
MAX_BREAKS_SHOWN = 4
FEW = 3  # different regions: here a layer and the loss' two pieces; elsewhere functions compiled apart are seldom more


@rule("graph-breaks", "compiled graphs cut into pieces", "kernels", "operators", needs="trace")
def find_graph_breaks(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Graphs of torch.compile are cut into pieces.

    Meaning: where the compiler meets Python that it cannot follow (print, .item(), a branch on a tensor's value, an
        unknown extension) it ends the graph, lets Python run that line, and begins another graph. Nothing is fused
        across the cut.
    Measured: frames that torch names torch_dynamo_resume_in_... (they exist only behind a break); without stacks, more
        different compiled regions per step than a layer and a loss explain.
    Cost: not measured by itself: the launches and memory traffic between the pieces. See launch-bound and
        unfused-elementwise.
    Do: TORCH_LOGS=graph_breaks names the lines; fullgraph=True turns them into errors.
    Flags: --torch-compile compiles each layer by itself and the loss, so that what stands between them cannot break a
        graph.
    False alarm: a model with several functions that are compiled apart on purpose.
    """
    resumed = one.rows_named(RESUME.search, Kind.PYTHON, Kind.OP, Kind.ANNOTATION)
    if len(resumed):
        told = _describe_breaks(one, resumed)
        place = one.where(resumed[0])
    else:
        regions = one.rows_named(REGION.match, Kind.OP, Kind.ANNOTATION)
        number = _count_regions(one, regions)
        if number <= FEW:
            return saw_nothing(one, f"{counted(number, 'compiled function')}")
        told = [f"{number} different functions were compiled, {one.per_step(regions):,.0f} regions run per step"]
        place = one.where(regions[0])
    return Finding(
        evidence=tuple(Evidence(text, place) for text in told),
        advice="start with TORCH_LOGS=graph_breaks to see the lines that break the graph",
        flags=("TORCH_LOGS=graph_breaks",),
        certain=bool(len(resumed)),
        rank=one.time.rank,
    )


def _describe_breaks(one: RankFacts, resumed: Integers) -> list[str]:
    """Name the lines that break graphs. resumed: rows of frames that exist only behind a break."""
    matches = [RESUME.search(name) for name in _list_names(one, resumed)]
    breaks = dict.fromkeys(found.groups() for found in matches if found)
    first = list(breaks)[:MAX_BREAKS_SHOWN]
    return [f"the graph of {function} breaks before line {line}" for function, line in first]


def _count_regions(one: RankFacts, rows: Integers) -> int:
    """Count the different compiled functions whose ranges stand in these rows."""
    numbers = set()
    for name in _list_names(one, rows):
        found = REGION.match(name)
        if found:
            numbers.add(found[1])
    return len(numbers)


def _list_names(one: RankFacts, rows: Integers) -> list[str]:
    """List the names of these events, each of them once."""
    return [one.trace.names[index] for index in np.unique(one.trace.events.name[rows])]


MAX_START_SHARE = 0.20  # of the run's time
MIN_MS = 10_000.0  # less nobody waits for
MIN_RUN_STEPS = 30  # a shorter run is a trial
WITHOUT_FIRST_STEP = Remedy("exclude the first steps from comparisons; in a longer run they do not matter")
WITHOUT_COMPILING = Remedy(
    "compiling does not pay in so short a run: --torch-compile none, or keep its cache where the next run "
    "finds it (TORCHINDUCTOR_CACHE_DIR)",
    ("--torch-compile none", "TORCHINDUCTOR_CACHE_DIR"),
)


@rule("first-step", "long first step of a short run", "run", needs="run")
def find_first_step(facts: Facts, run: Run) -> Finding | Observation:
    """The first step takes a large part of a short run.

    Meaning: the first step creates the CUDA context, picks kernels, fills the allocator and, with torch.compile,
        compiles. None of it comes again.
    Measured: the first step against the median of typical steps, in steps.jsonl, with the time in which torch.compile
        compiled.
    Cost: the difference, spread over the run's steps; in a long run it vanishes. It is no part of steady throughput.
    Do: for short runs, disable compilation, or keep a compile cache between runs; exclude warm-up from comparisons.
    Flags: --torch-compile none in short runs; TORCHINDUCTOR_CACHE_DIR on a disk that stays.
    False alarm: a trial of a few steps of what will be a long run.
    """
    if not run.first_step_ms or not run.steady_step_ms or run.steps < MIN_RUN_STEPS:
        return could_not_look(record=Recording.LONGER_RUN)
    extra_ms = run.first_step_ms - run.steady_step_ms
    total_ms = math.fsum(run.step_ms)
    text = f"the first step took {in_ms(run.first_step_ms)}, typical ones {in_ms(run.steady_step_ms)}"
    if extra_ms < max(MIN_MS, MAX_START_SHARE * total_ms):
        return saw(Evidence(text, STEPS_FILE))
    text += f": {extra_ms / total_ms:.0%} of {run.steps:,} steps"
    compiling_ms = run.compile_ms[0]
    if compiling_ms > 0:
        text += f", {in_ms(compiling_ms)} of the first for compiling"
    remedy = WITHOUT_COMPILING if facts.compiles else WITHOUT_FIRST_STEP
    return build_time_finding(
        extra_ms / run.steps,
        [Evidence(text, STEPS_FILE)],
        remedy.advice,
        remedy.flags,
        certain=bool(facts.compiles),
    )


PROFILED_RUN = f"a run with typical steps before a profiled window: {Recording.RUN_FOLDER}"
MAX_SLOWDOWN = 1.25  # a quarter more: a cause of a tenth of the step can then be the profiler's own
BY_PROFILER = 0.75  # of the longer steps, which the process' own CPU time must explain for a certain finding
WITHOUT_CPU_TIME = "no CPU time was recorded, so that other jobs may have made these steps longer"


@rule("profiler-overhead", "profiler overhead", "run", needs="run")
def find_profiler_overhead(facts: Facts, run: Run) -> Finding | Observation:
    """The profiler slowed its steps down so much that the trace is not representative.

    Meaning: recording costs host time per operator (about half a microsecond, with shapes and stacks several), and none
        on the device. A step that was bound by the device looks bound by the host.
    Measured: the median profiled step against the median of the steps before, on the run's own clock, and
        the CPU time of the process in both: recording is work of its own threads, so that it explains no more than the
        CPU time grew. Waiting for a core is busy-machine, not the profiler. Without CPU times the steps alone decide.
        It is certain only if the CPU time explains nearly all of it, each profiled step is longer than the steps on
        both sides, those after the window are short again, and the run had its cores throughout.
    Cost: none in the unprofiled run. Trust device times of the trace, but not host times, gaps and launch-bound.
    Do: record less, once without stacks and shapes for comparison; a larger micro-batch reduces the overhead.
    Flags: leave out --pytorch-profiler-collect-callstack, --pytorch-profiler-collect-shapes and
        --pytorch-profiler-collect-memory, on CPUs --record-memory-history too; more steps between --profile-step-start
        and --profile-step-end do not help.
    False alarm: steps before the window that were not alike, as in a ramp-up of the batch. Other jobs on the machine
        make the same work take more CPU time, too.
    """
    found = measure_slowdown(run)
    if found is None:
        return could_not_look(record=PROFILED_RUN)
    if found.profiled_ms <= MAX_SLOWDOWN * found.before_ms:
        return saw(Evidence(_describe_slowdown(run, found), STEPS_FILE))
    by_another = _look_for_other_cause(facts, found)
    if by_another is not None:
        return by_another
    text = f"{_describe_slowdown(run, found)} (median {in_ms(found.profiled_ms)})"
    if run.after_profile_ms is not None:
        again = "again" if run.recovered else "still"
        text += f"; those after them {again} {in_ms(run.after_profile_ms)}"
    return Finding(
        evidence=(Evidence(text, STEPS_FILE), Evidence(_describe_cpu_time(found), STEPS_FILE)),
        advice=_advise_on_recording(facts),
        certain=_is_profilers_own(facts, run, found),
    )


def _describe_slowdown(run: Run, found: Slowdown) -> str:
    """Describe how many times as long profiled steps take."""
    times = found.profiled_ms / found.before_ms
    return f"profiled steps take{run.on_rank} {times:.2f} x as long as those before it"


def _look_for_other_cause(facts: Facts, found: Slowdown) -> Observation | None:
    """Say why profiled steps are longer for another reason than the profiler; None where it can be the profiler."""
    by_profiler_ms = found.by_profiler_ms
    if by_profiler_ms is None:
        shortage = facts.core_shortage
        without_core = None if shortage is None else (shortage.rank, shortage.wait_ms)
        return told_by("busy-machine", WITHOUT_CPU_TIME) if is_by_chance(found.lag_ms, without_core) else None
    if by_profiler_ms > (MAX_SLOWDOWN - 1) * found.before_ms:
        return None
    text = f"recording explains {in_ms(by_profiler_ms)} of what profiled steps take longer, by their CPU time"
    return saw(Evidence(text, STEPS_FILE))


def _describe_cpu_time(found: Slowdown) -> str:
    """Describe what the process used of the CPUs in profiled steps and before."""
    if found.profiled_cpu_ms is None or found.before_cpu_ms is None:
        return WITHOUT_CPU_TIME
    used = f"the process used {in_ms(found.profiled_cpu_ms)} of CPU time per profiled step"
    return f"{used}, {in_ms(found.before_cpu_ms)} before"


def _advise_on_recording(facts: Facts) -> str:
    """Advise what to rely on in a trace that recording has distorted, and what not to record next time."""
    on_cpu = facts.on_gpu is False
    used = _list_costly_flags(facts.settings, on_cpu)
    trust = "the unprofiled step time, not the trace" if on_cpu else "device times, not gaps"
    less = f"without {', '.join(used)}" if used else "with larger batches"
    return f"rely on {trust}; profile again {less}"


def _is_profilers_own(facts: Facts, run: Run, found: Slowdown) -> bool:
    """Whether nothing but the profiler can have made its steps longer."""
    by_profiler_ms = found.by_profiler_ms
    if by_profiler_ms is None or by_profiler_ms < BY_PROFILER * found.lag_ms:
        return False
    return bool(run.recovered) and facts.core_shortage is None and is_set_apart(run)


def _list_costly_flags(settings: Settings, on_cpu: bool) -> list[str]:
    """List the flags that this run has on, and that make recording costly."""
    costly = {
        "--record-memory-history": on_cpu and settings.record_memory_history,
        "--pytorch-profiler-collect-callstack": settings.pytorch_profiler_collect_callstack,
        "--pytorch-profiler-collect-memory": settings.pytorch_profiler_collect_memory,
        "--pytorch-profiler-collect-shapes": settings.pytorch_profiler_collect_shapes,
    }
    return [flag for flag, is_on in costly.items() if is_on]


@rule("too-many-threads", "more computing threads than cores", "ranks", "run")
def find_too_many_threads(facts: Facts) -> Finding | Observation:
    """More computing threads than cores.

    Meaning: every rank computes with as many threads as it sees cores by default. Several ranks on one
        machine then run several threads per core, which wait for each other at the end of every operator.
    Measured: threads per rank times the ranks of this machine against its cores, as recorded by the run (CPU runs;
        of watched scripts too).
    Cost: at most the time that the training thread waited for a core; other jobs may have a part in it. Not measured
        where nothing tells of that: often more than half of the speed.
    Do: cores divided by ranks, a thread left for the loader.
    Flags: OMP_NUM_THREADS=N before the command (torchrun sets 1 by itself with several ranks).
    False alarm: cores that the run does not see because others use them: then even fewer threads are right.
    """
    threads = facts.hardware.threads
    cores = facts.hardware.cpus
    ranks = facts.local_ranks
    if facts.on_gpu is not False or not threads or not cores or not ranks:
        return could_not_look(Evidence("no CPU run that says its threads and cores"), record=Recording.RUN_FOLDER)
    text = f"{counted(threads, 'thread')} x {counted(ranks, 'rank')} of this machine on {counted(cores, 'core')}"
    seen = Evidence(text, RUN_FILE)
    fewer = fitting_threads(threads, ranks, cores)
    if fewer is None:
        return saw(seen)
    setting = f"{THREADS}={fewer}"
    advice = f"divide the cores: {setting}"
    if facts.is_foreign:
        advice += f", or torch.set_num_threads({fewer}) where the script sets it"
    waited_ms = facts.core_shortage.wait_ms if facts.core_shortage else None
    return build_time_finding(waited_ms, [seen], advice, (setting,), certain=False)


MAX_RANKS_SHOWN = 8  # ranks


@rule("busy-machine", "ranks that wait for CPU cores", "ranks", "run")
def find_busy_machine(facts: Facts) -> Finding | Observation:
    """Ranks were ready to compute but waited for a CPU core.

    Meaning: other programs, or more threads than cores, take the cores that the ranks want. Steps get longer by chance,
        now on one rank, now on another; all times depend on the machine as much as on the run.
    Measured: how long the training thread was ready but had no CPU core, from Linux's scheduler (schedstat), per
        step in steps.jsonl, and of each rank in the header of its trace; elsewhere how often its threads lost their
        cores without having asked (involuntary context switches per second of CPU time).
    Cost: the wait of the rank that waits longest; the others wait for it in the next collective.
    Do: look for other programs (top), fewer threads or loader workers, a cgroup's limit of CPU time; give the run cores
        of its own; measure again on a quiet machine.
    Flags: OMP_NUM_THREADS times the ranks, plus --num-workers, at most the number of cores.
    False alarm: none of the wait; on a GPU it overlaps with compute as long as the device has work in its queue.
    """
    found = facts.core_shortage
    if found is None:
        return _look_at_cores(facts)
    told = list(_describe_shortage(facts.run, found))
    told[1:1] = _describe_host(facts, found.rank)
    if facts.run is not None:
        told += _describe_other_steps(facts.run, found)
    remedy = _advise_on_cores(facts)
    return build_time_finding(
        found.wait_ms,
        [Evidence(text, found.source or STEPS_FILE) for text in told],
        remedy.advice,
        remedy.flags,
        certain=found.wait_ms is not None and not facts.on_gpu,
        rank=found.rank,
    )


def _describe_shortage(run: Run | None, found: CoreShortage) -> Iterator[str]:
    """Describe how long the rank waits for a core, and what it gets of CPU time."""
    kind = "profiled step" if found.kind == PROFILED else "step"
    step = f"a {kind} of {in_ms(found.step_ms)}"
    if found.wait_ms is not None:
        wait = f"rank {found.rank} waits for a CPU core for {in_ms(found.wait_ms)} of {step}"
        shares = _list_waiting_shares(run) if run is not None and found.kind == ORDINARY else ""
        yield f"{wait}; ranks from 0 on: {shares}" if shares else wait
    if found.cpu_ms is not None:
        got = f"rank {found.rank} gets {in_ms(found.cpu_ms)} of CPU time in {step}"
        lost = found.switches
        yield got if lost is None else f"{got}, and loses a core {counted(round(lost), 'time')}"


def _describe_host(facts: Facts, rank: int) -> Iterator[str]:
    """Describe what of the machine is known to take cores from a rank: a quota, and other virtual machines."""
    used_up = facts.ranks_hardware.get_one("quota_used_up", rank) or 0.0
    if used_up >= MIN_QUOTA_SHARE:
        yield f"the CPU quota of its container was used up in {used_up:.0%} of its periods (cpu-quota)"
    stolen = facts.ranks_hardware.get_one("stolen", rank) or 0.0
    if stolen >= MIN_STOLEN:
        yield f"other virtual machines took {stolen:.0%} of the machine's CPU time (stolen-time)"


def _list_waiting_shares(run: Run) -> str:
    """List what share of its step each of the first ranks waits for a core; "" where it was not recorded."""
    ranks = run.ranks
    if ranks is None or not ranks.core_wait_ms:
        return ""
    pairs = list(zip(ranks.core_wait_ms, ranks.step_ms))[:MAX_RANKS_SHOWN]
    # NaN is no share
    return ", ".join(f"{wait_ms / step_ms:.0%}" for wait_ms, step_ms in pairs if wait_ms >= 0)


def _advise_on_cores(facts: Facts) -> Remedy:
    """Choose fewer threads where the run's own take more than its cores; else another machine, or fewer programs."""
    cores = facts.hardware.cpus
    threads = facts.hardware.threads
    ranks = facts.local_ranks
    if cores and threads and ranks and ranks * threads > cores:
        flag = f"{THREADS}={max(1, cores // ranks)}"
        counts = f"{counted(ranks, 'rank')} x {counted(threads, 'thread')} share {counted(cores, 'core')}"
        return Remedy(f"start fewer threads ({flag}): {counts}", (flag,))
    return Remedy(
        "stop other programs on these cores (top shows them), or give the run cores of its own, and measure again"
    )


def _look_at_cores(facts: Facts) -> Observation:
    """Say that the ranks had their cores, where that was recorded."""
    ranks = [one.time.rank for one in facts.ranks_seen] or [0]
    doubt = facts.doubt_cores(ranks)
    if doubt:
        return could_not_look(Evidence(doubt), record=Recording.RUN_FOLDER)
    return saw(Evidence("no rank loses a notable part of its step to waiting for a CPU core"))


def _describe_other_steps(run: Run, found: CoreShortage) -> list[str]:
    """Describe waits in typical steps, where the profiled ones lack a core most; [] where they are not known."""
    ordinary = measure_core_use(run, run.ordinary) if found.kind == PROFILED else None
    if ordinary is None or ordinary.wait_ms is None:
        return []
    wait = f"{in_ms(ordinary.wait_ms)} of {in_ms(ordinary.step_ms)}"
    return [f"outside the profiled window it waits for a CPU core for {wait}"]
