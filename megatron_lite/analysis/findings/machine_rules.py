"""Compilation, and what the machine takes from the run."""

import math
import re
from dataclasses import replace

import numpy as np

from megatron_lite.analysis.core_use import ORDINARY, PROFILED, CoreShortage
from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    build_time_finding,
    could_not_look,
    rule,
    saw,
    saw_nothing,
    told_by,
)
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.rank_facts import MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run.cores import is_set_apart, measure_core_use, measure_slowdown
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import Settings
from megatron_lite.thresholds import is_by_chance
from megatron_lite.units import counted
from megatron_lite.variables import THREADS, fitting_threads

MIN_COMPILING_STEPS = 2  # a single one may be a variant that was due
MAX_STEPS_SHOWN = 6


SEARCH = "search of the fastest algorithm"  # of host_causes.tsv
MOSTLY_SEARCH = 0.5  # of the time of compiling, that is such a search


@rule("recompilation", "recompilation in the middle of training", "run")
def find_recompilation(facts: Facts) -> Finding | Observation:
    """torch.compile recompiles again and again.

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
    run, one = facts.run, facts.critical
    found: tuple[float, Evidence, int | None] | None = measure_recompilation(run)
    if found is None and one is not None:
        works = [work for work in one.time.named if work.cause == "compile" and not work.once]
        cost = sum(work.step_ms for work in works)
        search_ms = sum(work.step_ms for work in works if work.what == SEARCH)
        if search_ms > MOSTLY_SEARCH * cost and one.share(cost) >= MIN_SHARE_SHOWN:
            return _find_searches(one, cost)
        if works and one.share(cost) >= MIN_SHARE_SHOWN:
            what = ", ".join(work.what for work in works)
            found = cost, Evidence(f"compiling ({what}) takes {one.of_step(cost)}", one.where()), one.time.rank
    if found is None:
        return _look_at_compiling(facts)
    cost, seen, rank = found
    advice = "start with TORCH_LOGS=recompiles to see which guard fails, and keep shapes and Python values constant"
    return build_time_finding(cost, [seen], advice, ("TORCH_LOGS=recompiles",), rank=rank)


def _find_searches(one: RankFacts, cost_ms: float) -> Finding:
    """cuDNN or MIOpen try their algorithms again in each step: nothing is compiled, and no guard fails."""
    text = f"the {SEARCH} (cuDNN, MIOpen) takes {one.of_step(cost_ms)}"
    advice = (
        "keep the shapes of convolutions' inputs constant, or set torch.backends.cudnn.benchmark = False: "
        "each new shape is searched for anew"
    )
    found = build_time_finding(cost_ms, [Evidence(text, one.where())], advice, (), certain=False, rank=one.time.rank)
    return replace(found, title="searching for the fastest algorithm again and again")


def _look_at_compiling(facts: Facts) -> Observation:
    """Tell how many steps compiled something after the first, by the run or within a trace."""
    run, one = facts.run, facts.critical
    if run is not None and run.steps:
        number = int((run.compiling & ~run.evaluating)[1:].sum())
        text = f"{number:,} of {run.steps:,} steps compiled something after the first one"
        return saw(Evidence(text, STEPS_FILE))
    if one is not None:
        return saw_nothing(one, "hardly anything is compiled")
    return could_not_look(record=Recording.RUN_FOLDER)


def measure_recompilation(run: Run | None) -> tuple[float, Evidence, None] | None:
    """(cost, evidence, no rank) of steps that compile after the first; None where a run's steps do not tell of any."""
    if run is None:
        return None
    late = np.flatnonzero(run.compiling & ~run.evaluating)
    late = late[late > 0]
    if len(late) < MIN_COMPILING_STEPS:
        return None
    steady_ms = run.steady_step_ms
    if not steady_ms:  # all steps compile: what they take besides
        steady_ms = float(np.median(run.training_ms[late] - run.compile_ms[late]))
    cost = math.fsum(np.maximum(run.training_ms[late] - steady_ms, 0.0)) / run.steps
    if not cost >= MIN_SHARE_SHOWN * steady_ms:
        return None
    shown = ", ".join(str(run.iterations[at]) for at in late[:MAX_STEPS_SHOWN])
    shown += ", ..." if len(late) > MAX_STEPS_SHOWN else ""
    text = (
        f"{len(late):,} of {run.steps:,} steps compiled something, "
        f"after the first one (iterations {shown}); spread over "
        f"all steps {in_ms(cost)} each, beside {in_ms(steady_ms)} without compiling"
    )
    return cost, Evidence(text, "steps.jsonl"), None


REGION = re.compile(r"Torch-Compiled Region: (\d+)/\d+")
RESUME = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")
MAX_BREAKS_SHOWN = 4
FEW = 3  # different regions: here a layer and the loss' two pieces; elsewhere functions compiled apart are seldom more


@rule("graph-breaks", "compiled graphs cut into pieces", "kernels", "operators", needs="trace")
def find_graph_breaks(facts: Facts, one: RankFacts) -> Finding | Observation:
    """torch.compile cut the model into pieces.

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
        breaks = dict.fromkeys(found.groups() for name in _names(one, resumed) if (found := RESUME.search(name)))
        first = list(breaks)[:MAX_BREAKS_SHOWN]
        told = [f"the graph of {function} breaks before line {line}" for function, line in first]
        place = one.where(resumed[0])
    else:
        regions = one.rows_named(REGION.match, Kind.OP, Kind.ANNOTATION)
        number = len({found[1] for name in _names(one, regions) if (found := REGION.match(name))})
        if number <= FEW:
            return saw_nothing(one, f"{counted(number, 'compiled function')}")
        told = [f"{number} different functions were compiled, {one.per_step(regions):,.0f} regions run per step"]
        place = one.where(regions[0])
    seen = tuple(Evidence(text, place) for text in told)
    advice = "start with TORCH_LOGS=graph_breaks to see the lines that break the graph"
    certain, flags = bool(len(resumed)), ("TORCH_LOGS=graph_breaks",)
    return Finding(evidence=seen, advice=advice, flags=flags, certain=certain, rank=one.time.rank)


def _names(one: RankFacts, rows: Integers) -> list[str]:
    """The distinct ones."""
    return [one.trace.names[index] for index in np.unique(one.trace.events.name[rows])]


MAX_START_SHARE = 0.20  # of the run's time
MIN_MS = 10_000.0  # less nobody waits for
MIN_RUN_STEPS = 30  # a shorter run is a trial


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
    extra = run.first_step_ms - run.steady_step_ms
    total = math.fsum(run.step_ms)
    if extra < max(MIN_MS, MAX_START_SHARE * total):
        text = f"the first step took {in_ms(run.first_step_ms)}, typical ones {in_ms(run.steady_step_ms)}"
        return saw(Evidence(text, STEPS_FILE))
    compiling_ms = run.compile_ms[0]
    text = (
        f"the first step took {in_ms(run.first_step_ms)}, typical ones {in_ms(run.steady_step_ms)}: "
        f"{extra / total:.0%} of {run.steps:,} steps"
        + (f", {in_ms(compiling_ms)} of the first for compiling" if compiling_ms > 0 else "")
    )
    compiled, advice = facts.compiles, "exclude the first steps from comparisons; in a longer run they do not matter"
    flags: tuple[str, ...] = ()
    if compiled:
        flags = ("--torch-compile none", "TORCHINDUCTOR_CACHE_DIR")
        advice = (
            "compiling does not pay in so short a run: --torch-compile none, or keep its cache where the next run "
            "finds it (TORCHINDUCTOR_CACHE_DIR)"
        )
    return build_time_finding(extra / run.steps, [Evidence(text, "steps.jsonl")], advice, flags, certain=bool(compiled))


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
        times = found.profiled_ms / found.before_ms
        return saw(Evidence(f"profiled steps take{run.on_rank} {times:.2f} x as long as those before it", STEPS_FILE))
    shortage = facts.core_shortage
    by_profiler_ms = found.by_profiler_ms
    if by_profiler_ms is None:
        without_core = None if shortage is None else (shortage.rank, shortage.wait_ms)
        if is_by_chance(found.lag_ms, without_core):
            return told_by("busy-machine", WITHOUT_CPU_TIME)
    elif by_profiler_ms <= (MAX_SLOWDOWN - 1) * found.before_ms:
        text = f"recording explains {in_ms(by_profiler_ms)} of what profiled steps take longer, by their CPU time"
        return saw(Evidence(text, STEPS_FILE))
    text = (
        f"profiled steps take{run.on_rank} {found.profiled_ms / found.before_ms:.2f} x as long as those before it "
        f"(median {in_ms(found.profiled_ms)})"
    )
    if run.after_profile_ms is not None:
        text += f"; those after them {'again' if run.recovered else 'still'} {in_ms(run.after_profile_ms)}"
    told = [Evidence(text, "steps.jsonl")]
    if found.profiled_cpu_ms is not None and found.before_cpu_ms is not None:
        used = f"the process used {in_ms(found.profiled_cpu_ms)} of CPU time per profiled step"
        told.append(Evidence(f"{used}, {in_ms(found.before_cpu_ms)} before", "steps.jsonl"))
    else:
        told.append(Evidence(WITHOUT_CPU_TIME, "steps.jsonl"))
    on_cpu = facts.on_gpu is False
    used_flags = _list_costly_flags(facts.settings, on_cpu)
    trust = "the unprofiled step time, not the trace" if on_cpu else "device times, not gaps"
    without = f" without {', '.join(used_flags)}" if used_flags else " with larger batches"
    advice = f"rely on {trust}; profile again{without}"
    explained = by_profiler_ms is not None and by_profiler_ms >= BY_PROFILER * found.lag_ms
    certain = explained and bool(run.recovered) and shortage is None and is_set_apart(run)
    return Finding(evidence=tuple(told), advice=advice, certain=certain)


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
    threads, cpus = facts.hardware.threads, facts.hardware.cpus
    ranks = facts.local_ranks
    if facts.on_gpu is not False or not (threads and cpus and ranks):
        return could_not_look(Evidence("no CPU run that says its threads and cores"), record=Recording.RUN_FOLDER)
    fewer = fitting_threads(threads, ranks, cpus)
    text = f"{counted(threads, 'thread')} x {counted(ranks, 'rank')} of this machine on {counted(cpus, 'core')}"
    seen = Evidence(text, RUN_FILE)
    if fewer is None:
        return saw(seen)
    advice = f"divide the cores: {THREADS}={fewer}"
    advice += f", or torch.set_num_threads({fewer}) where the script sets it" if facts.is_foreign else ""
    waited_ms = facts.core_shortage.wait_ms if facts.core_shortage else None
    return build_time_finding(waited_ms, [seen], advice, (f"{THREADS}={fewer}",), certain=False)


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
    found, run, told = facts.core_shortage, facts.run, []
    if found is None:
        return _look_at_cores(facts)
    ranks = run.ranks if run is not None else None
    kind = "profiled step" if found.kind == PROFILED else "step"
    step = f"a {kind} of {in_ms(found.step_ms)}"
    if found.wait_ms is not None:
        wait = f"rank {found.rank} waits for a CPU core for {in_ms(found.wait_ms)} of {step}"
        if ranks is not None and ranks.core_wait_ms and found.kind == ORDINARY:
            pairs = list(zip(ranks.core_wait_ms, ranks.step_ms))[:MAX_RANKS_SHOWN]
            # NaN is no share
            shares = ", ".join(f"{wait_ms / step_ms:.0%}" for wait_ms, step_ms in pairs if wait_ms >= 0)
            wait += f"; ranks from 0 on: {shares}"
        told.append(wait)
    if found.cpu_ms is not None:
        got = f"rank {found.rank} gets {in_ms(found.cpu_ms)} of CPU time in {step}"
        lost = found.switches
        told.append(got if lost is None else f"{got}, and loses a core {counted(round(lost), 'time')}")
    told += _describe_other_steps(run, found) if run is not None else []
    advice = "stop other programs on these cores (top shows them), or give the run cores of its own, and measure again"
    flags: tuple[str, ...] = ()
    cpus, threads, local = facts.hardware.cpus, facts.hardware.threads, facts.local_ranks
    if cpus and threads and local and local * threads > cpus:
        flags = (f"{THREADS}={max(1, cpus // local)}",)
        advice = (
            f"start fewer threads ({flags[0]}): {counted(local, 'rank')} x {counted(threads, 'thread')} share "
            f"{counted(cpus, 'core')}"
        )
    seen = (Evidence(text, found.source or "steps.jsonl") for text in told)
    certain = found.wait_ms is not None and not facts.on_gpu
    return build_time_finding(found.wait_ms, seen, advice, flags, certain=certain, rank=found.rank)


def _look_at_cores(facts: Facts) -> Observation:
    """Say that the ranks had their cores, where that was recorded."""
    ranks = [one.time.rank for one in facts.ranks_seen] or [0]
    doubt = facts.doubt_cores(ranks)
    if doubt:
        return could_not_look(Evidence(doubt), record=Recording.RUN_FOLDER)
    return saw(Evidence("no rank loses a notable part of its step to waiting for a CPU core"))


def _describe_other_steps(run: Run, found: CoreShortage) -> list[str]:
    """The same of the typical steps, where the profiled ones lack a core most; [] where it is not known."""
    ordinary = measure_core_use(run, run.ordinary) if found.kind == PROFILED else None
    if ordinary is None or ordinary.wait_ms is None:
        return []
    return [
        (
            f"outside the profiled window it waits for a CPU core for {in_ms(ordinary.wait_ms)} of "
            f"{in_ms(ordinary.step_ms)}"
        )
    ]
