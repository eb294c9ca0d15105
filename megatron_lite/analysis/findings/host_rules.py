"""Time that the host loses in the step: waits, late launches, pauses."""

from collections.abc import Iterator, Sequence
from functools import partial

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
    saw_wrong,
    told_by,
)
from megatron_lite.analysis.findings.debug_rules import (
    find_anomaly_checks,
    find_unused_parameter_search,
    is_fetch_of_check,
    measure_exposed_search,
)
from megatron_lite.analysis.findings.host_cause_rules import (
    MAX_HOST_SITES,
    find_clip_on_host,
    find_clip_waits,
    find_python_in_function,
    find_save_in_step,
    measure_clipping,
)
from megatron_lite.analysis.findings.input_rules import is_batch_copy, pageable_rows
from megatron_lite.analysis.findings.reserved_rules import EXPANDABLE_SEGMENTS
from megatron_lite.analysis.findings.saved_states import find_read_states
from megatron_lite.analysis.findings.sync_edits import drop_sites
from megatron_lite.analysis.findings.update_rules import LOG, find_log_stalls
from megatron_lite.analysis.graph.edits.host_work import move_stretches_to_thread
from megatron_lite.analysis.graph.edits.launches import capture_phases
from megatron_lite.analysis.graph.edits.left_out import leave_out_named
from megatron_lite.analysis.rank_facts import MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run.cores import measure_recording_ms
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.time_results import MIN_STRETCH_MS, HostSite, RankTime, ShortGaps, Stretch, SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.phases import PYTHON_GC, Phase
from megatron_lite.units import counted, significant

ONCE = 0.5  # calls per step from which on it is every step's, not that of a log interval
BETWEEN_STEPS = {Phase.LOG.value, Phase.EVAL.value, Phase.SAVE.value}  # there, waiting is meant
MAX_SITES_SEEN = 2
READS = ("aten::item", "aten::is_nonzero", "aten::equal", "aten::_local_scalar_dense")
# an unfused optimizer's step counters are on the host
READS_ON_HOST = BETWEEN_STEPS | {Phase.OPTIMIZER_STEP.value}

EITHER_GOES = "either without the other costs nothing"


@rule("sync-in-step", "synchronization inside the step", "step", needs="trace")
def find_sync_in_step(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The host waits for the device inside a step.

    Meaning: code asked for a value that the device had not computed yet: .item(), print(tensor), .cpu(), bool(tensor),
        nonzero, or an explicit synchronize. Python blocks until all queued work is done, and then the device
        idles until Python has launched new work.
    Measured: calls per step that block the host, with operator and source line; cost is the device's idle time after
        them, not the time that the host waited: waiting while the device computes costs nothing. On a CPU a read
        never waits, because nothing runs ahead of Python.
    Cost: the queue runs empty, and every launch that follows is seen in full. CPU times are misleading: the wait shows
        up in whatever phase comes to ask first, often the copy of the next batch.
    Do: read losses and norms at the log interval only; keep conditions on the device (torch.where); copy with
        non_blocking=True from pinned memory.
        Where the host works for a millisecond or longer behind the wait, without a call to the device, that work is
        as much the cause as the wait: host-gaps tells it, too. If it is most of the cost, the finding is likely only.
    Flags: --log-interval 100; for Megatron-LM itself --no-check-for-nan-in-loss-and-grad. Stacks name the line:
        --pytorch-profiler-collect-callstack.
    False alarm: one wait at a step's end with a full queue behind it, which causes no idle time.
    """
    if not one.time.on_gpu:
        return _look_at_reads(one)
    sites = find_waits(one)
    cost = sum(site.idle_ms for site in sites)
    calls = sum(site.per_step for site in sites)
    shown = [Evidence(_describe_wait(site), site.frame) for site in sites[:MAX_HOST_SITES]]
    work_ms = sum(site.work_ms for site in sites)
    if one.share(work_ms) >= MIN_SHARE_SHOWN:
        shown.insert(0, Evidence(f"{in_ms(work_ms)} of it the host works behind the wait: {EITHER_GOES}", one.where()))
    text = f"{counted(calls, 'wait')} per step, after which the device idles {one.of_step(cost)}"
    advice = "read values (.item(), print, .cpu()) at the log interval only, and keep conditions on the device"
    found = find_lost_time(
        one,
        cost,
        text,
        advice,
        *shown,
        flags=("--log-interval 100",),
        certain=work_ms <= MUCH * cost,
        cheap=True,
        edit=drop_sites(facts, "drop the synchronizations", sites, BETWEEN_STEPS),
    )
    if isinstance(found, Finding):
        return found
    return _look_at_clipping(facts, one) or _look_at_waits(one, sites)


def _describe_wait(site: SyncSite) -> str:
    """Describe where the host waits, how often, and what follows."""
    what = f"{site.operator} -> {site.call}" if site.operator else site.call
    times = f"host waits {in_ms(site.host_ms)}, device idles {in_ms(site.idle_ms)}"
    return f"{what} in {site.phase or 'no phase'}: {significant(site.per_step)} per step, {times}"


def _look_at_clipping(facts: Facts, one: RankFacts) -> Observation | None:
    """Tell the waits of clipping where the device idles after them; None where it does not.

    Their cost is clip-on-host's.
    """
    clipping = find_clip_on_host(facts)
    idle_ms = sum(site.idle_ms for site in find_clip_waits(one))
    if clipping is None or one.share(idle_ms) < MIN_SHARE_SHOWN:
        return None
    return saw_wrong(clipping.advice, *clipping.evidence, code=clipping.code)


def _look_at_waits(one: RankFacts, sites: list[SyncSite]) -> Observation:
    """Tell the waits of a trace whose device hardly idles after them; it may lack the calls that wait."""
    if not len(one.trace.rows[Kind.RUNTIME]):
        return could_not_look()
    calls = significant(sum(site.per_step for site in sites))
    steps = counted(one.steady_steps, "steady step")
    idle = one.of_step(sum(site.idle_ms for site in sites))
    text = (
        f"{calls} synchronizations per step in {steps}; the device idles after them {idle}, "
        f"{MIN_SHARE_SHOWN:.0%} would be much"
    )
    seen = [Evidence(text, one.where())]
    for site in sites[:MAX_SITES_SEEN]:
        what = f"{site.operator or site.call} in {site.phase or 'no phase'}"
        seen.append(Evidence(f"{what}: {significant(site.per_step)} per step", site.frame))
    return saw(*seen)


def _look_at_reads(one: RankFacts) -> Observation:
    """Count the values that Python reads on a CPU, where nothing runs ahead of it, so that no read waits."""
    if not len(one.trace.rows[Kind.OP]):
        return could_not_look()
    rows = one.rows_named(READS.__contains__, Kind.OP)
    # a read inside another operator is that operator's own affair
    rows = rows[one.placing.operator[rows] < 0]
    phases = [*one.placing.phases, ""]
    in_step = [row for row in rows if phases[one.placing.phase[row]] not in READS_ON_HOST]
    number = significant(len(in_step) / one.steady_steps)
    text = (
        f"no GPU in the trace, so reading a value never waits; {number} values read into Python per step, each of "
        "which would wait for a GPU; log, eval, save and the optimizer's step counters left out"
    )
    return saw(Evidence(text, one.where()))


def find_waits(one: RankFacts) -> list[SyncSite]:
    """List where the host waits for the device inside every step, most idle time first.

    Waits that are findings of their own are left out: for copies of batches, checks of gradients, clipping, logging.
    """
    sites = [site for site in one.time.syncs if site.per_step >= ONCE and site.phase not in BETWEEN_STEPS]
    sites = [site for site in sites if site.cause != LOG]
    if len(pageable_rows(one)):
        sites = [site for site in sites if not is_batch_copy(site)]
    if len(find_anomaly_checks(one)):
        sites = [site for site in sites if not is_fetch_of_check(site)]
    clips = find_clip_waits(one) if measure_clipping(one) else []
    return [site for site in sites if site not in clips]


MAX_LAUNCH_SITES = 3
MIN_LAUNCH_SHARE = 0.10  # of the step, without what recording added
# no graph of the device's holds what loads, copies batches, logs, evaluates or saves
NEVER_CAPTURED = BETWEEN_STEPS | {Phase.DATA.value, Phase.DATA_TO_DEVICE.value}
CAPTURED = Edit("capture launches in CUDA graphs", partial(capture_phases, left_out=NEVER_CAPTURED))


@rule("launch-bound", "host too slow to launch small kernels", "step", "kernels", needs="gpu")
def find_launch_bound(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The device waits for the host to launch small kernels.

    Meaning: kernels finish faster than Python and PyTorch's dispatch hand over new ones. The device is idle between
        them, and a faster device would not help.
    Measured: idle time in which the next kernel's launch call had not begun, and gaps under 10 us; with the median
        kernel against the median interval between launches, and how long a launched kernel waits in the queue (hardly
        at all here).
    Cost: all of that idle time, without what recording added where the run's own clock shows it: the profiler itself
        makes the host slower.
    Do: more work per kernel (a larger micro-batch instead of accumulation, if memory allows), fewer kernels
        (torch.compile, fused operators), CUDA graphs, less Python between operators.
    Flags: --torch-compile; a larger --micro-batch-size at the same --global-batch-size; record without
        --pytorch-profiler-collect-callstack, which slows the host most.
    False alarm: a trace with stacks or shapes of a run that is fine without them: compare with the step time outside
        the window. Other jobs on the host's cores: likely at most, where what the rank got of them was not recorded.
    """
    time = one.time
    if not time.launch_bound:
        seen = Evidence(_describe_launches(time), one.where())
        return saw(seen) if time.launches else could_not_look(record=Recording.GPU_TRACE)
    idle_ms = _measure_host_idle(time)
    recording_ms = min(measure_recording_ms(facts.run, time), idle_ms)
    cost = idle_ms - recording_ms
    # without a recording these steps lose too little to call the host too slow
    is_by_recording = recording_ms > 0 and one.share(cost) < MIN_LAUNCH_SHARE
    if is_by_recording:
        text = f"the device idles {one.of_step(idle_ms)}, of which recording may have made {in_ms(recording_ms)}"
        return saw(Evidence(text, one.where()))
    more = _list_sites(one.time.hosts, MAX_LAUNCH_SITES, "while the host is in")
    if recording_ms > 0:
        more.append(Evidence(f"{in_ms(recording_ms)} of the host's time, left out of the cost, may be recording's"))
    doubt = facts.doubt_cores([time.rank])
    if doubt:
        more.append(Evidence(doubt))
    remedy = _advise_larger_launches(facts)
    return find_lost_time(
        one,
        cost,
        f"the device idles {one.of_step(cost)}: {_describe_launches(time)}",
        remedy.advice,
        *more,
        flags=remedy.flags,
        certain=not one.trace.with_stack and not doubt,
        at_least=0.0,
        edit=CAPTURED,
    )


def _measure_host_idle(time: RankTime) -> float:
    """Measure the device's idle time because of the host and of launching, ms per step."""
    return time.rows.get("host", 0.0) + time.rows.get("launch", 0.0)


def _list_sites(sites: Sequence[HostSite], most: int, where: str = "in") -> list[Evidence]:
    """List the places in which the host was late, longest first. most: how many of them."""
    return [Evidence(f"{in_ms(site.idle_ms)} {where} {site.what}", site.phase) for site in sites[:most]]


def _advise_larger_launches(facts: Facts) -> Remedy:
    """Choose what makes kernels fewer and larger: a larger micro-batch where one fits, else compilation."""
    compiling = () if facts.compiles else ("--torch-compile",)
    larger = facts.larger_micro_batch
    if larger:
        flag, how = larger
        return Remedy(f"more work per launch: {how}", (flag, *compiling))
    return Remedy("fewer and larger kernels: torch.compile, fused operators, CUDA graphs", compiling)


def _describe_launches(time: RankTime) -> str:
    """Write how many kernels a step launches, how long they take and wait, and how often they come."""
    kernels = counted(round(time.launches), "kernel")
    duration = f"{time.median_kernel_us:.1f} us per kernel"
    interval = f"{time.median_launch_interval_us:.1f} us from launch to launch"
    return f"{kernels} per step; medians: {duration}, {interval}, {time.median_queue_us:.1f} us in the queue"


TITLE_ON_CPU = "Python between operators"
MAX_LATE_SHARE = 0.10  # of the step; the profiler alone makes a few percent
MAX_CALLING_SHARE = 0.30  # of a CPU's step in short stretches: a small model has no less
STACKS = "--pytorch-profiler-collect-callstack"
MUCH = 0.5  # of the host's lateness
MAX_IN_THREAD = 0.5  # of a step, that a thread can do beside the rest
LARGER_OPERATORS = Remedy(
    "give each operator more to do: a larger --micro-batch-size, or --torch-compile",
    ("--micro-batch-size", "--torch-compile"),
)


@rule("host-gaps", "host delays at some points", "step", "phases", needs="trace")
def find_host_gaps(facts: Facts, one: RankFacts) -> Finding | Observation:
    """The host launches too late at some points.

    Meaning: the device runs out of work at certain points, although kernels are large enough on the whole: Python
        between phases, a slow call, building of inputs. On a CPU the same time passes between operators.
    Measured: idle time in which the next kernel's launch call had not begun, without what other rows explain (loader,
        synchronization, allocator, garbage collector), by what the host did meanwhile. Without a GPU: time in which no
        operator ran, by phase; stretches of a millisecond and more are the program's own, shorter ones are the overhead
        of calling operators.
        What the host does for a millisecond or longer behind a wait for the device counts, too: sync-in-step tells
        the wait, and if either goes, the other costs nothing.
    Cost: that time, without the profiler's overhead where the run's own clock shows it.
    Do: move the host's work out of the step, or into a thread; launch work before waiting for anything; where
        operators are small compared with their overhead, give each more to do.
    Flags: --pytorch-profiler-collect-callstack shows which lines; record once without it for the true size.
    False alarm: a trace with stacks, which slow Python several times; a CPU whose cores other processes use.
    """
    if not one.time.on_gpu:
        return _find_host_gaps_on_cpu(facts, one)
    host_ms = one.time.rows.get("host", 0.0)
    if one.time.launch_bound:
        return told_by("launch-bound", _describe_launches(one.time))
    if find_tiny_micro_batches(facts):
        return told_by("tiny-micro-batches", f"the device idles {one.of_step(host_ms)} because of the host")
    behind_ms = sum(site.work_ms for site in find_waits(one))
    rest_ms = _leave_out_told(facts, one, host_ms) + behind_ms
    text = f"the device idles {one.of_step(rest_ms)} because of the host"
    advice = "move Python work out of the step"
    flags: tuple[str, ...] = ()
    if not one.trace.with_stack:
        text += ": the trace has no stacks, so what the host did is unknown"
        advice = f"record stacks ({STACKS}) to see the lines; move their work out of the step"
        flags = (STACKS,)
    return find_lost_time(
        one,
        rest_ms - measure_recording_ms(facts.run, one.time),
        text,
        advice,
        *_describe_work_behind(one, behind_ms),
        *_list_sites(one.time.hosts, MAX_HOST_SITES),
        *_describe_short_gaps(one),
        flags=flags,
        certain=False,
        at_least=MAX_LATE_SHARE,
    )


def _describe_work_behind(one: RankFacts, behind_ms: float) -> Iterator[Evidence]:
    """Name what the host does behind waits for the device, where it is a notable part of the step.

    Args:
        one: The rank.
        behind_ms: How long the device idles meanwhile, ms per step.
    """
    if one.share(behind_ms) < MIN_SHARE_SHOWN:
        return
    yield Evidence(f"{in_ms(behind_ms)} of it behind waits for the device (sync-in-step): {EITHER_GOES}", one.where())
    yield from _list_sites(one.time.behind_waits, MAX_HOST_SITES)


def _leave_out_told(facts: Facts, one: RankFacts, host_ms: float) -> float:
    """Leave out of the host's lateness what other findings tell.

    Args:
        facts: The run.
        one: The rank.
        host_ms: The lateness, ms per step.

    Returns:
        The rest, ms per step.
    """
    in_functions = find_python_in_function(facts)
    if in_functions:
        host_ms -= in_functions.cost_ms or 0.0
    host_ms -= _measure_told_saving(facts, one)
    if find_unused_parameter_search(facts):
        # its copies are the device's work, which the device's idle time has not
        host_ms -= measure_exposed_search(one)
    return max(host_ms, 0.0)


def _find_host_gaps_on_cpu(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Find Python between operators without a GPU: long stretches in places, else the calls of many operators."""
    between_ms = one.time.rows.get("host", 0.0) - measure_recording_ms(facts.run, one.time)
    in_places = _find_in_places(facts, one, between_ms)
    if in_places is not None:
        return in_places
    return _find_in_calls(facts, one, between_ms)


def _describe_short_gaps(one: RankFacts) -> Iterator[Evidence]:
    """Tell how much of the host's lateness lies in short gaps, where it is much of it."""
    short = one.time.short_gaps
    host_ms = one.time.rows.get("host", 0.0)
    if one.time.on_gpu and short is not None and short.host_ms > MUCH * host_ms > 0:
        gaps = counted(round(short.number), "gap")
        text = f"{in_ms(short.host_ms)} of it in {gaps} below {MIN_STRETCH_MS:.0f} ms"
        yield Evidence(text, one.where())


def _find_in_places(facts: Facts, one: RankFacts, most_ms: float) -> Finding | Observation | None:
    """Find places where Python is at work for long, without a GPU; None where there are none of note.

    Args:
        facts: The run.
        one: The rank.
        most_ms: Time between operators, ms per step: no more can be lost.
    """
    logging = LOG if find_log_stalls(facts) else None  # that has its price there
    stretches = [stretch for stretch in one.time.stretches if stretch.phase != logging]
    saved_ms = _measure_told_saving(facts, one)
    seen_ms = sum(stretch.ms for stretch in stretches) - saved_ms
    cost = min(most_ms - saved_ms, seen_ms)
    if one.share(cost) < MAX_LATE_SHARE:
        return told_by("save-in-step", f"what follows reading states: {in_ms(saved_ms)}") if saved_ms else None
    longest = stretches[0]
    notable = [stretch for stretch in stretches[:MAX_HOST_SITES] if stretch.ms >= MAX_LATE_SHARE * longest.ms]
    shown = [_describe_stretch(stretch) for stretch in notable]
    if saved_ms:
        shown.append(Evidence(f"{in_ms(saved_ms)} of that behind reading the model's state, left out (save-in-step)"))
    advice = f"take that work out of {longest.phase or 'the step'}, or do it in fewer steps"
    flags: tuple[str, ...] = ()
    if not one.trace.with_stack:
        advice = f"{STACKS} names the function; {advice}"
        flags = (STACKS,)
    text = f"Python runs for a millisecond or longer without an operator: {one.of_step(seen_ms)}"
    # a thread that needs longer than the rest of the step would be the step; and all of a phase would go, with what is
    # left out here
    fits = one.share(seen_ms) < MAX_IN_THREAD and not saved_ms
    edit = _move_python_work(notable) if fits else None
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        *shown,
        title=TITLE_ON_CPU,
        flags=flags,
        certain=False,
        at_least=MAX_LATE_SHARE,
        edit=edit,
    )


def _measure_told_saving(facts: Facts, one: RankFacts) -> float:
    """Measure the host's ms per step behind reading the model's state; 0 where save-in-step does not tell it."""
    states = find_read_states(one)
    told = find_save_in_step(facts)
    # what names tell is in no row of the host's
    is_by_states = told is not None and told.cost_ms is not None and not told.certain
    return states.idle_ms if states is not None and is_by_states else 0.0


def _move_python_work(stretches: Sequence[Stretch]) -> Edit:
    """Build the edit of steps without what Python does for long in the phases of these stretches.

    A thread may do it: a step takes at least that long.
    """
    phases = [stretch.phase for stretch in stretches]
    named = " and ".join(dict.fromkeys(phase or "the step" for phase in phases))
    least_ns = MIN_STRETCH_MS * 1e6
    return Edit(
        f"take the Python work out of {named}",
        partial(move_stretches_to_thread, phases=phases, least_ns=least_ns),
    )


def _describe_stretch(stretch: Stretch) -> Evidence:
    """Describe where Python is at work for long, and after which operator."""
    inside = f" in {stretch.line}" if stretch.line else ""
    after = f", the longest stretch of it after {stretch.after}" if stretch.after else ""
    text = f"{in_ms(stretch.ms)} in the median step{inside}{after}"
    return Evidence(text, stretch.phase or "outside of all phases")


def _find_in_calls(facts: Facts, one: RankFacts, most_ms: float) -> Finding | Observation:
    """Find Python that calls so many operators that it takes as long as they do.

    Args:
        facts: The run.
        one: The rank.
        most_ms: Time between operators, ms per step.
    """
    cost = most_ms - sum(stretch.ms for stretch in one.time.stretches)
    between = f"Python between operators takes {one.of_step(cost)}"
    for rule_of_it in (find_tiny_micro_batches, find_short_gaps):
        if rule_of_it(facts):
            return told_by(rule_of_it.code, between)
    operators = sum(phase.kernels for phase in one.time.phases)
    each = "in no phase"
    if operators:
        each = f"{1e3 * one.time.rows.get('compute', 0.0) / operators:,.0f} us each"
    text = f"{counted(round(operators), 'operator')} per step, {each}; Python between them takes {one.of_step(cost)}"
    return find_lost_time(
        one,
        cost,
        text,
        LARGER_OPERATORS.advice,
        *_list_sites(one.time.hosts, MAX_HOST_SITES),
        title=TITLE_ON_CPU,
        flags=LARGER_OPERATORS.flags,
        certain=False,
        at_least=MAX_CALLING_SHARE,
    )


MAX_SHORT_SHARE = 0.10  # of the step
MAX_SHORT_SHARE_ON_CPU = 0.20  # in pieces below a millisecond; other programs on the machine make some


@rule("short-gaps", "many gaps below a millisecond", "step", "phases", needs="trace")
def find_short_gaps(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Many short gaps add up to a large part of the step.

    Meaning: no gap is long enough to be visible in a timeline, but together they cost as much as one large cause:
        launch latency, the space between the kernels of a CUDA graph, a little work of the host before each of many
        launches.
    Measured: idle time of the device in gaps below 1 ms that neither a synchronization, the loader nor another named
        cause explains, by what ends each gap. What launch-bound or host-gaps already count is left out. Without a GPU:
        pieces of 0.1 to 1 ms without an operator, in the median step.
    Cost: their sum, without what recording may have added to the host's part.
    Do: launch-latency and graphs: fewer and larger kernels (torch.compile, fused operators), CUDA graphs. Host: less
        work between operators; stacks name the lines.
    Flags: --torch-compile; a larger --micro-batch-size; --pytorch-profiler-collect-callstack (with_stack=True).
    False alarm: a profiler that makes each launch longer, where no step before the window tells how much.
    """
    short = one.time.short_gaps
    if short is None:
        return could_not_look()
    if not one.time.on_gpu:
        return _find_short_gaps_on_cpu(one, short)
    parts = _name_short_gaps(facts, one, short)
    cost = sum(parts.values())
    text = f"gaps below {MIN_STRETCH_MS:.0f} ms, {short.number:,.0f} per step: {one.of_step(cost)}"
    shown = [Evidence(f"{in_ms(ms)} {what}", one.where()) for what, ms in parts.items() if ms > MUCH_TOO_LITTLE * cost]
    if parts.get(HOST_LATE):
        shown += _list_sites(one.time.hosts, MAX_LAUNCH_SITES)
    advice = "fewer and larger kernels: torch.compile, fused operators, or CUDA graphs around what launches them"
    flags = () if facts.compiles else ("--torch-compile",)
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        *shown,
        flags=flags,
        certain=False,
        at_least=MAX_SHORT_SHARE,
        # launch latency and gaps within CUDA graphs are the device's own, which launching earlier does not shorten
        edit=CAPTURED if parts.get(HOST_LATE, 0.0) > MUCH * cost else None,
    )


def _find_short_gaps_on_cpu(one: RankFacts, short: ShortGaps) -> Finding | Observation:
    """Find short pieces of the step without an operator, where there is no GPU."""
    pieces = counted(round(short.number), "piece")
    text = f"{pieces} of 0.1 to {MIN_STRETCH_MS:.0f} ms without an operator: {one.of_step(short.ms)}"
    return find_lost_time(
        one,
        short.ms,
        text,
        f"record stacks ({STACKS}) to see the lines; move their work out of the step",
        *_list_sites(one.time.hosts, MAX_HOST_SITES),
        flags=(STACKS,),
        certain=False,
        at_least=MAX_SHORT_SHARE_ON_CPU,
    )


HOST_LATE = "while the host was busy between launches"
LAUNCHING = "of launch latency"
MUCH_TOO_LITTLE = 0.05  # of the cost: a part that explains nothing


def _name_short_gaps(facts: Facts, one: RankFacts, short: ShortGaps) -> dict[str, float]:
    """Tell by what ends them how long short gaps are that no other finding counts, ms per step, longest first."""
    parts = {
        HOST_LATE: max(0.0, short.host_ms - measure_recording_ms(facts.run, one.time)),
        LAUNCHING: short.launch_ms,
        "between kernels of a graph that was launched as a whole": short.graph_ms,
        "although the next kernel was launched in time": short.queued_ms,
    }
    if one.time.launch_bound:
        del parts[HOST_LATE]
        del parts[LAUNCHING]
    elif one.share(one.time.rows.get("host", 0.0)) >= MAX_LATE_SHARE or find_tiny_micro_batches(facts):
        del parts[HOST_LATE]
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


MIN_MICRO_BATCHES = 4  # per step: with fewer, little can be saved
FEW_TOKENS = 2048  # per micro-batch: above, a transformer's products fill a device


@rule("tiny-micro-batches", "micro-batches too small for their overhead", "step", "phases", needs="trace")
def find_tiny_micro_batches(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Micro-batches so small that overhead is a large part of them.

    Meaning: a step runs every operator once per micro-batch. With few tokens each, launching, Python and adding
        gradients up take as long as in a large one, and weights are read from memory for little work.
    Measured: micro-batches per step (backward ranges), tokens in each, and what a larger one would not have: gradients
        that are added up, and the host's time between operators (with a GPU: idle time because of the host).
    Cost: that time, times the share of micro-batches that could be saved; products gain on top of it.
    Do: a larger micro-batch at the same global batch, as far as memory allows.
    Flags: --micro-batch-size N at the same --global-batch-size.
    False alarm: memory that allows no more (see micro-batch-headroom), or a single micro-batch.
    """
    number = one.per_step(one.backward_ranges())
    tokens = facts.micro_batch_tokens
    if tokens is None:
        return could_not_look(record=Recording.RUN_FOLDER)
    if number < MIN_MICRO_BATCHES or tokens > FEW_TOKENS:
        return saw_nothing(one, f"{counted(number, 'backward pass')} of {tokens:,} tokens per step")
    if one.time.launch_bound:
        return told_by("launch-bound", _describe_launches(one.time))
    larger = facts.larger_micro_batch
    if facts.device_bytes and not larger:
        return saw(Evidence(f"{counted(number, 'micro-batch')} per step, and a larger one does not fit", RUN_FILE))
    adding_ms = one.accumulation_ms()
    host_ms = max(0.0, _measure_host_idle(one.time) - measure_recording_ms(facts.run, one.time))
    cost = (adding_ms + host_ms) * (1 - 1 / number)
    text = (
        f"{significant(number)} micro-batches per step of {tokens:,} tokens: adding gradients up {in_ms(adding_ms)}, "
        f"the host between operators {in_ms(host_ms)}; saved at most {one.of_step(cost)}"
    )
    flag = "--micro-batch-size"  # no number without the memory that it would take
    now = facts.settings.micro_batch_size
    advice = f"fewer, larger micro-batches as far as memory allows: {flag} above {now}"
    if larger:
        flag, advice = larger
    return find_lost_time(one, cost, text, advice, flags=(flag,), certain=False)


MANY_COLLECTIONS = 2.0  # per step: their number costs, not a single slow one


@rule("gc-pauses", "pauses of Python's garbage collector", "step", needs="trace")
def find_gc_pauses(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Python's garbage collector interrupts steps.

    Meaning: collecting walks through all objects that Python holds, in the thread that launches kernels. Each rank
        pauses in a different step, and all others wait for it.
    Measured: time in gc frames or events of the trace (with a GPU: idle time because of them), per steady step. This
        trainer's traces and those of watched scripts have them always. Others show a gc.collect() of the program with
        stacks, and collections by themselves only with torch.profiler's
        _ExperimentalConfig(record_python_gc_info=True).
    Cost: the pause, on every rank for every rank's pause.
    Do: collect at fixed steps, on all ranks in the same one; move the program's own gc.collect() out of the step,
        which no flag disables.
    Flags: --manual-gc --manual-gc-interval 100.
    False alarm: a single collection in a short window, which this mean makes look like every step's.
    """
    cost = one.time.rows.get("garbage_collector", 0.0)
    collections = one.rows_named(lambda name: name.startswith(PYTHON_GC), Kind.ANNOTATION, Kind.PYTHON)
    # only this trainer and `watch` mark all collections
    is_marked = len(collections) > 0 or facts.run is not None
    if not cost and not is_marked:
        return could_not_look(record=Recording.STACKS)
    text = f"garbage collection takes {one.of_step(cost)}"
    if len(collections):
        text = f"{counted(one.per_step(collections), 'collection')} per step: {one.of_step(cost)}"
    remedy = _advise_on_collections(facts)
    advice = remedy.advice
    if one.per_step(collections) >= MANY_COLLECTIONS:
        advice += "; gc.freeze() once the model is built, and a higher gc.set_threshold"
    edit = Edit("collect garbage in rare steps", partial(leave_out_named, cause="garbage_collector"))
    return find_lost_time(one, cost, text, advice, flags=remedy.flags, cheap=True, edit=edit)


def _advise_on_collections(facts: Facts) -> Remedy:
    """Choose how garbage is collected in fewer steps."""
    if facts.settings.manual_gc:
        flag = "--manual-gc-interval"
        return Remedy(f"--manual-gc is on: a larger {flag}", (flag,))
    together = "in rare steps" if facts.has_one_rank else "on all ranks in the same, rare steps"
    advice = f"collect {together}, without a gc.collect() in each step"
    return Remedy(advice, ("--manual-gc --manual-gc-interval 100",))


ALLOCATOR_CALLS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMem", "hipMalloc", "hipFree", "hipHostMalloc")


@rule("allocator-stalls", "cudaMalloc and cudaFree inside the step", "step", "memory", needs="gpu")
def find_allocator_stalls(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Memory is taken from and given back to the driver inside steps.

    Meaning: PyTorch's allocator keeps memory and hands it out again; a steady step needs nothing new. cudaMalloc and
        cudaFree inside steps mean that it could not: memory is nearly full, sizes change from step to step, or caching
        is off.
    Measured: idle time of the device while the host was inside cudaMalloc, cudaFree, cudaHostAlloc and their kin, and
        their number per steady step.
    Cost: cudaFree waits for all work on the device, and the queue runs empty.
    Do: leave more room (smaller micro-batch, recomputation), keep sizes constant, or let segments grow.
    Flags: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; a smaller --micro-batch-size; --recompute-granularity full
        --recompute-method uniform --recompute-num-layers 1.
    False alarm: a window at the run's beginning, while the allocator still grows; profile later steps.
    """
    cost = one.time.rows.get("allocator", 0.0)
    calls = one.rows_named(lambda name: name.startswith(ALLOCATOR_CALLS), Kind.RUNTIME)
    first = calls[0] if len(calls) else None
    text = f"{counted(one.per_step(calls), 'call')} per step; the device idles because of them {one.of_step(cost)}"
    advice = f"leave the allocator more room, or let its segments grow: {EXPANDABLE_SEGMENTS}"
    return find_lost_time(
        one,
        cost,
        text,
        advice,
        row=first,
        flags=(EXPANDABLE_SEGMENTS,),
        cheap=True,
        edit=Edit("keep memory instead of taking it in steps", partial(leave_out_named, cause="allocator")),
    )


@rule("stream-waits", "kernels waiting for another stream", "step", needs="gpu")
def find_stream_waits(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Kernels wait for another stream.

    Meaning: the next kernel was launched in time but had to wait for an event of another stream (a copy, a collective),
        or for a serialization that the host asked for. The device is idle meanwhile.
    Measured: gaps of 10 us and more in which the next kernel's launch call was already over.
    Cost: all of that idle time.
    Do: look at what the trace shows right before these gaps; start copies and collectives earlier, wait for them later.
    Flags: CUDA_DEVICE_MAX_CONNECTIONS unset (a setting for tensor parallelism) if streams should run beside each other.
    False alarm: gaps that the profiler itself makes while it writes its buffers.
    """
    cost = one.time.rows.get("dependency", 0.0)
    text = f"launched kernels wait while the device idles, {one.of_step(cost)}"
    advice = "start copies and collectives earlier and wait for them later; see the gaps in the trace"
    return find_lost_time(one, cost, text, advice, certain=False)
