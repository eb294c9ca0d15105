"""Time of the host that names in the trace explain: what is paid once, graphs, optimizers on the CPU, saving,
clipping."""

import re
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from megatron_lite.analysis.findings.base import (
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    Remedy,
    could_not_look,
    find_lost_time,
    rule,
    saw,
    saw_nothing,
    told_by,
)
from megatron_lite.analysis.findings.machine_rules import measure_recompilation
from megatron_lite.analysis.findings.saved_states import find_read_states, find_saving_copies
from megatron_lite.analysis.findings.sync_edits import drop_sites
from megatron_lite.analysis.findings.update_rules import find_save_and_eval
from megatron_lite.analysis.graph.edits.left_out import leave_out_named, leave_out_phases, leave_out_work
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.rank_facts import MATTERS, RankFacts, in_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.host_names import INSIDE
from megatron_lite.analysis.time.sites import CUSTOM_FUNCTION
from megatron_lite.analysis.time.time_results import NamedWork, SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.phases import NOT_TRAINING, Phase
from megatron_lite.units import counted, significant

MAX_HOST_SITES = 4  # shown of a finding: the host is held up in many places, of which each takes little
HALF_A_STEP = 0.5
EVERY_STEP = 3  # steps: with fewer, nobody can say what comes once


def find_named(one: RankFacts, *causes: str, once: bool = False) -> list[NamedWork]:
    """List the named work of these causes, longest first."""
    return [work for work in one.time.named if work.cause in causes and work.once is once]


def describe_works(one: RankFacts, works: Sequence[NamedWork]) -> list[Evidence]:
    """Describe what each named work takes of the host per step."""
    steps = max(1, len(one.time.steps))
    shown = []
    for work in works[:MAX_HOST_SITES]:
        times = f"{significant(work.calls / steps)} per step"
        took = f"{in_ms(work.step_ms)} of host time, whether or not the device is busy meanwhile"
        shown.append(Evidence(f"{work.what}: {times}, {took}", one.where()))
    return shown


LATER_WINDOW = "--profile-step-start N --profile-step-end M"  # the end must stay behind the start


@rule("one-time-costs", "one-time costs", "step", needs="trace")
def find_one_time_costs(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The trace contains work that a run does only once.

    Meaning: the first steps create CUDA's context, load its modules, open the handles of its libraries, take memory
        from the driver, compile, search for the fastest kernel and capture graphs. Later steps do not.
    Measured: host time of calls, ranges and lines of Python with such names, where they come in few steps or stop
        early. A step with a notable part of it is left out of the figures, unless all steps have it.
    Cost: once, however long the run is. It is not a cost per step.
    Do: profile later steps (torch.profiler.schedule with wait and warmup); keep compiled code for the next run in a
    cache.
    Flags: a later --profile-step-start and --profile-step-end; TORCHINDUCTOR_CACHE_DIR.
    False alarm: work that comes back seldom, such as a graph for each new shape. A longer window shows it.
    """
    works = [work for work in one.time.named if work.once]
    # compilations that the run's other steps repeat are a finding of their own
    if measure_recompilation(facts.run) is not None:
        works = [work for work in works if work.cause != "compile"]
    if not works:
        return _look_without_works(one, "no work once")
    total_ms = sum(work.trace_ms for work in works)
    steps = len(one.time.steps)
    if total_ms < min(MATTERS * steps, HALF_A_STEP) * one.time.step_ms:
        return saw(Evidence(f"{in_ms(total_ms)} of host time in the whole trace is paid once", one.where()))
    text = f"{in_ms(total_ms)} of host time in the whole trace: paid once, not per step"
    evidence = [Evidence(text, one.where())]
    for work in works[:MAX_HOST_SITES]:
        most = f", most of it in {work.step}" if work.step and steps > 1 else ""
        times = counted(work.calls, "time")
        evidence.append(Evidence(f"{work.what}: {times}, {in_ms(work.trace_ms)}{most}", one.where()))
    return Finding(
        evidence=tuple(evidence),
        advice=f"profile later steps: {LATER_WINDOW}",
        flags=(LATER_WINDOW,),
        certain=steps >= EVERY_STEP,
        rank=one.time.rank,
        once_ms=total_ms,
    )


def _look_without_works(one: RankFacts, what: str) -> Observation:
    """Say that the trace names no such work; without stacks it may lack the names. what: what is not there."""
    if not one.trace.with_stack:
        return could_not_look(record=Recording.STACKS)
    return saw_nothing(one, what)


@rule("graph-capture", "graphs captured in each step", "step", needs="gpu")
def find_graph_capture(facts: Facts, one: RankFacts) -> Finding | Observation:
    """CUDA graphs are captured or instantiated again and again.

    Meaning: capturing a graph and instantiating it costs the host more than launching its kernels one by one. It pays
        only if the same graph is replayed many times.
    Measured: idle time of the device from each cudaStreamBeginCapture to its end, and in cudaGraphInstantiate and kin
        (HIP too), where most steps have them.
    Cost: that time in each step.
    Do: capture once, before the loop, and replay; pad inputs to a few sizes with a graph each; with torch.compile's
        reduce-overhead, keep shapes and addresses of inputs constant.
    Flags: none here: this trainer captures no graphs.
    False alarm: a window at the beginning, in which a graph for each shape is captured: see one-time-costs.
    """
    works = find_named(one, "graph_capture")
    if not works:
        return saw_nothing(one, "no graph is captured")
    cost = one.time.rows.get("graph_capture", 0.0)
    text = f"the device idles {one.of_step(cost)} while graphs are captured and instantiated"
    advice = "capture each graph once, before the loop, and replay it; keep the shapes of its inputs constant"
    edit = Edit("capture each graph once", partial(leave_out_named, cause="graph_capture"))
    return find_lost_time(one, cost, text, advice, *describe_works(one, works), cheap=True, edit=edit)


@rule("startup-in-step", "start-up work in each step", "step", needs="trace")
def find_startup_in_step(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Work that belongs to the start of a program comes in each step.

    Meaning: loading modules, creating library handles, streams, communicators or process groups, or importing costs
        milliseconds. Done once it does not matter.
    Measured: the device's idle time (without a GPU the host's time) in calls and lines of Python with such names, where
        most steps have them.
    Cost: that time in each step.
    Do: create these objects before the loop and keep them; warm all kernels up before measuring.
    Flags: none: the lines above name what is created.
    False alarm: a window so early that each step still meets kernels for the first time.
    """
    works = find_named(one, "startup")
    if not works:
        return _look_without_works(one, "no start-up work")
    cost = one.time.rows.get("startup", 0.0)
    text = f"starting up CUDA and libraries takes {one.of_step(cost)}"
    advice = f"create it once, before the loop: {works[0].what}"
    edit = Edit("start up once, before the loop", partial(leave_out_named, cause="startup"))
    return find_lost_time(one, cost, text, advice, *describe_works(one, works), cheap=True, edit=edit)


@rule("cpu-optimizer", "optimizer that computes on the CPU", "step", "phases", needs="gpu")
def find_cpu_optimizer(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The optimizer updates on the CPU, and the GPU waits for it.

    Meaning: an offloaded optimizer (DeepSpeed's CPUAdam, ZeRO-Offload, torchao's CPUOffloadOptimizer) or one whose
        parameters are tensors of the CPU reads and writes all states at the speed of the host's memory, a tenth of the
        GPU's or less. Gradients travel there and weights back.
    Measured: idle time of the device while the host is in such an optimizer, by its name or by operators of the update
        that take long and launch nothing; with the copies of the optimizer's phase that compute does not overlap.
    Cost: that time.
    Do: keep the states on the GPU if they fit: shard them over ranks, or use a smaller state (8-bit, bf16 moments).
        If they must be offloaded, overlap the update with the backward pass and use all cores.
    Flags: --use-distributed-optimizer instead of offloading; OMP_NUM_THREADS for the update's threads.
    False alarm: a model that fits in no other way.
    """
    update_ms = one.time.rows.get("cpu_optimizer", 0.0)
    if not update_ms:
        return saw_nothing(one, "the device does not wait for an update on the CPU")
    works = [work for work in one.time.named if work.cause == "cpu_optimizer"]
    copies = one.rows_named(lambda name: True, Kind.MEMCPY)
    copies_ms = one.exposed_ms(one.in_phases(copies, Phase.OPTIMIZER_STEP.value))
    cost = update_ms + copies_ms
    waits = f"{in_ms(update_ms)} for the update and {in_ms(copies_ms)} for its copies"
    text = f"the device waits {waits}: {one.of_step(cost)}"
    advice = "keep the optimizer's states on the GPU, sharded over ranks (--use-distributed-optimizer), if they fit"
    flags = ("--use-distributed-optimizer",)
    return find_lost_time(one, cost, text, advice, *describe_works(one, works), flags=flags)


LESS_SAVING = Remedy(
    "save and evaluate less often, and write in the background: --save-interval, --eval-interval, --async-save",
    ("--save-interval", "--eval-interval", "--async-save"),
)


@rule("save-in-step", "saving or evaluating in each step", "step", needs="trace")
def find_save_in_step(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The profiled steps save or evaluate.

    Meaning: writing a checkpoint copies all weights to the host and waits for the disk; evaluating runs a forward pass
        on other data. In each step either is a large part of it.
    Measured: idle time of the device (without a GPU the host's time) in ranges and lines of Python that save or
        evaluate, with the device's time of their phases and of the copies that they launch. Steps that save count only
        where all steps do. In a trace without such names: what follows the reading of the whole model's state
        (state_dict() detaches all parameters in a row) without an operator that computes; then it is likely at most.
    Cost: that time, mean over the steps of the window; what comes once in it is no cost of each step.
    Do: save and evaluate every few hundred steps; write in the background from a copy in host memory.
    Flags: --save-interval, --eval-interval, --async-save.
    False alarm: a window around the one step that saves; profile other steps. A state that is read to be sent to
        another process or to be compared.
    """
    if find_save_and_eval(facts) is not None:
        return told_by("save-and-eval", "the run's own record tells what saving and evaluating take")
    phases = [phase for phase in one.time.phases if phase.name in (Phase.SAVE.value, Phase.EVAL.value)]
    works = [work for work in one.time.named if work.cause == "save"]
    names = [work.what for work in works] + [phase.name for phase in phases]
    if not names:
        behind_states = _find_behind_states(one)
        if behind_states is not None or not one.trace.with_stack:
            return behind_states or could_not_look(record=Recording.STACKS)
    steps = len(one.time.steps)
    steps_with_it = max((work.in_steps for work in works), default=0)
    if steps_with_it == 1 and steps >= EVERY_STEP and not phases:
        return _find_single_save(one, works)
    cost = one.time.rows.get("save", 0.0)
    if one.time.on_gpu:
        cost += sum(phase.device_ms for phase in phases)
        copies = find_saving_copies(one)
        of_phases = one.in_phases(copies, *NOT_TRAINING)
        cost += one.exposed_ms(np.setdiff1d(copies, of_phases))
    text = f"saving and evaluating ({_join_once(names)}) takes {one.of_step(cost)}"
    is_in_some = 0 < steps_with_it < steps and not phases
    return find_lost_time(
        one,
        cost,
        text,
        LESS_SAVING.advice,
        *describe_works(one, works),
        flags=LESS_SAVING.flags,
        title="saving or evaluating in some steps" if is_in_some else "",
        # what only some steps do, the steps of the graph may not
        edit=None if is_in_some else _save_rarely(facts),
    )


def _find_behind_states(one: RankFacts) -> Finding | None:
    """Find what follows the reading of the whole model's state, where it is notable."""
    states = find_read_states(one)
    if states is None or one.share(states.ms) < MATTERS:
        return None
    state = f"the state of the model ({counted(states.tensors, 'tensor')})"
    times = f"{counted(states.per_step, 'time')} per step"
    text = f"{state} is read {times}, and nothing computes behind it: {one.of_step(states.ms)}"
    seen = Evidence(text, one.where(states.row))
    doubt = Evidence("whether it is written to a file, sent or compared, only a trace with stacks says")
    return Finding(
        cost_ms=states.ms,
        gain_ms=states.ms,
        evidence=(seen, doubt),
        advice=LESS_SAVING.advice,
        flags=LESS_SAVING.flags,
        certain=False,
        rank=one.time.rank,
    )


def _save_rarely(facts: Facts) -> Edit:
    """Build the edit of steps that neither save nor evaluate."""
    copies = [find_saving_copies(rank) for rank in facts.graph_ranks]
    return Edit("save and evaluate in rare steps", partial(_leave_out_saving, copies=copies))


def _leave_out_saving(graph: Graph, copies: Sequence[Integers]) -> Graph:
    """Leave out what phases and names tell of saving and evaluating.

    Args:
        graph: the graph.
        copies: by rank, rows of what saving copies.
    """
    for rank, rows in enumerate(copies):
        graph = leave_out_work(graph, rank, rows)
    return leave_out_named(leave_out_phases(graph, NOT_TRAINING), "save")


def _join_once(names: Iterable[str]) -> str:
    """Join names with commas, each of them once, in their order."""
    return ", ".join(dict.fromkeys(names))


def _find_single_save(one: RankFacts, works: Sequence[NamedWork]) -> Finding | Observation:
    """Find saving in a single step of the window, if it takes a notable share of it.

    How often it comes, the window does not tell.
    """
    what = _join_once(work.what for work in works)
    trace_ms = sum(work.trace_ms for work in works)
    steps = counted(len(one.time.steps), "step")
    seen = Evidence(f"{what}: once in {steps} of the trace, {in_ms(trace_ms)}", one.where())
    if one.share(trace_ms) < MATTERS:
        return saw(seen)
    return Finding(
        title="saving or evaluating once in the trace",
        once_ms=trace_ms,
        evidence=(seen,),
        advice=LESS_SAVING.advice,
        flags=LESS_SAVING.flags,
        certain=False,
        rank=one.time.rank,
    )


def find_clip_waits(one: RankFacts) -> list[SyncSite]:
    """List the places where clipping waits for the device."""
    clip = Phase.CLIP_GRAD.value
    return [site for site in one.time.syncs if clip in (site.phase, site.cause)]


def measure_clipping(one: RankFacts) -> float:
    """Measure the device's idle ms per step because of clipping; 0 where it does not matter."""
    own_ms = one.time.rows.get("clip_grad", 0.0)
    waited_ms = sum(site.idle_ms for site in find_clip_waits(one))
    cost = own_ms + waited_ms
    return cost if one.share(cost) >= MATTERS else 0.0


@rule("clip-on-host", "gradient clipping that waits for the host", "step", "phases", needs="gpu")
def find_clip_on_host(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Clipping gradients keeps the device waiting.

    Meaning: the norm is read on the host (.item(), error_if_nonfinite=True, an if on its value), or norms are computed
        tensor by tensor. The queue runs empty before the update.
    Measured: idle time of the device in the phase or the lines of Python that clip, with the idle time after their
        synchronizations.
    Cost: that time.
    Do: torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True) without error_if_nonfinite; keep the norm on
        the device and read it when it is logged.
    Flags: none here: this trainer clips on the device.
    False alarm: other waits that happen to lie in that phase.
    """
    sites = find_clip_waits(one)
    waited_ms = sum(site.idle_ms for site in sites)
    own_ms = one.time.rows.get("clip_grad", 0.0)
    cost = own_ms + waited_ms
    waits = counted(sum(site.per_step for site in sites), "wait")
    text = (
        f"clipping gradients: {in_ms(own_ms)} of Python and dispatch, {in_ms(waited_ms)} after {waits}; "
        f"{one.of_step(cost)}"
    )
    advice = (
        "clip on the device: clip_grad_norm_(..., foreach=True) without error_if_nonfinite, the norm read when logged"
    )
    # what Python would do less of is not known
    edit = drop_sites(facts, "clip without waiting", sites) if waited_ms > own_ms else None
    return find_lost_time(one, cost, text, advice, edit=edit)


@rule("process-wait", "host waiting for other processes", "step", needs="trace")
def find_process_wait(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The host waits for another process while nothing runs.

    Meaning: a barrier, a collective of Python objects, one over gloo or a queue keeps the host from launching. It is
        the other process that is late, not this one's Python.
    Measured: idle time of the device (without a GPU time without an operator) in lines of Python and ranges of that
    kind.
    Cost: that time.
    Do: leave barriers out of the step; gather tensors on the device instead of Python objects, seldom; look at what the
        other processes do meanwhile.
    Flags: --log-interval 100 for values that are gathered for the log.
    False alarm: a server that waits for requests has nothing else to do.
    """
    works = [work for work in one.time.named if work.cause == "process_wait"]
    if not works and not one.trace.with_stack:
        return could_not_look(record=Recording.STACKS)
    cost = one.time.rows.get("process_wait", 0.0)
    text = f"waiting for other processes takes {one.of_step(cost)}"
    advice = "leave barriers and collectives of Python objects out of the step"
    return find_lost_time(one, cost, text, advice, *describe_works(one, works), certain=False)


@rule("python-in-function", "Python inside a custom autograd.Function", "step", "phases", needs="trace")
def find_python_in_function(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The device waits for Python inside the program's own autograd.Function.

    Meaning: forward or backward of a class derived from torch.autograd.Function runs in Python. backward() runs on
        autograd's thread, which can launch nothing else meanwhile.
    Measured: idle time of the device while a thread is inside such an operator and in none that it calls; its name is
        that of the class. Without a GPU: time in such an operator that none of the operators which it calls explains.
    Cost: that time.
    Do: write it with few operators, in one fused kernel (torch.compile, Triton) or as a C++ function; move checks,
        prints and loops out of it.
    Flags: --pytorch-profiler-collect-callstack (with_stack=True) names the lines.
    False alarm: a trace with stacks, which slow Python several times.
    """
    if facts.run is not None and not facts.is_watched and facts.run.record.model is None:
        return saw(Evidence("only functions of this trainer, which its user does not write", RUN_FILE))
    if not one.time.on_gpu:
        return _find_python_in_function_on_cpu(one)
    sites = [site for site in one.time.hosts if site.what.startswith(INSIDE)]
    cost = sum(site.idle_ms for site in sites)
    shown = [Evidence(f"{in_ms(site.idle_ms)} in {site.what}", site.phase) for site in sites[:MAX_HOST_SITES]]
    text = f"the device idles {one.of_step(cost)} while custom functions run Python"
    advice = "do less in Python there: fewer operators, or one compiled or Triton kernel"
    flags = () if one.trace.with_stack else ("--pytorch-profiler-collect-callstack",)
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        *shown,
        flags=flags,
        certain=False,
    )


# Functions of torch itself, which wait for other ranks or run what their callers give them
OF_TORCH = re.compile(
    r"(RegisterPostBackwardFunction|_?DDPSink|CheckpointFunction|BackwardHookFunction|record_param_comms)(Backward)?$"
)


def _find_python_in_function_on_cpu(one: RankFacts) -> Finding | Observation:
    """Find Python in custom functions without a GPU, where an operator takes as long as Python in it does."""
    found = [row for row in one.kernels.operators if row.role is Role.OTHER and _is_custom(row.name)]
    cost = sum(row.self_ms for row in found)
    shown = []
    for row in found[:MAX_HOST_SITES]:
        inside = f"{in_ms(row.self_ms)} inside {row.name}, in none of its operators"
        shown.append(Evidence(inside, row.phase))
    text = f"custom functions take {one.of_step(cost)} besides the operators that they call"
    advice = "do less in Python there: fewer operators, or one compiled or C++ function"
    return find_lost_time(one, cost, text, advice, *shown, certain=False)


def _is_custom(name: str) -> bool:
    """Whether an operator is a program's own autograd.Function."""
    return CUSTOM_FUNCTION.fullmatch(name) is not None and OF_TORCH.match(name) is None
