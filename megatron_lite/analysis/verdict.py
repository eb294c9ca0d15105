"""The first line of a report: one sentence with the largest true statements, or INCONCLUSIVE with the reason."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from megatron_lite.analysis.contradictions import (
    find_contradictions,
    measure_whole_graphs,
    missing_gpu_work,
    missing_graph_work,
)
from megatron_lite.analysis.core_use import PROFILED, CoreShortage
from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.findings.order import measure_saved_ms
from megatron_lite.analysis.findings.step_length_rules import doubt_window
from megatron_lite.analysis.gpu_clocks import GpuClock, find_slowed_gpus
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.memory.memory_results import Held, Snapshot
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.calls import POINT_TO_POINT
from megatron_lite.analysis.ranks.rank_results import OTHER_KIND, CollectiveRow, describe_imbalance
from megatron_lite.analysis.report import Verdict
from megatron_lite.analysis.run.cores import MIN_SHARE_OF_CORES, measure_slowdown
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.host_steps import WHOLE_TRACE
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.accelerators import is_accelerator
from megatron_lite.analysis.verdict_word import (
    DECIDES,
    LOSSES,
    MIN_LATE,
    VerdictWord,
    choose_word,
    measure_bounds,
    measure_losses,
)
from megatron_lite.postmortem.postmortem_results import Postmortem
from megatron_lite.units import count, counted, significant, size

MIN_SHARE_SAID = 0.05  # of a step; what is smaller does not decide anything
MIN_COMPUTING = 0.01  # of a step: a loss that is less bounds no run, however little it computes
MAX_LOSSES = 2
MIN_STEADY_STEPS = 2
STEPS_FOR_HIGH = 3
UNSTEADY = 0.15  # spread of step times (standard deviation / mean) that lowers confidence
# profiled step / step without the profiler
DISTORTED = 1.10
UNTRUSTWORTHY = 1.50
MOSTLY_UNEXPLAINED = 0.20
MIN_STEPS_WATCHED = 5  # of a run: the first is never profiled, and three steady ones are needed
# the window of watch, where the run is long enough
DEFAULT_FIRST = 10
DEFAULT_STEPS = 6
MOSTLY_IDLE_BESIDE = 0.1  # of the step: idle time of the GPU shown in which another of the process works
MAX_HELD = 3  # categories of memory that are named
# "other" is what was kept for a reason that no rule of categories knows
WITHOUT_CATEGORY = ("other", "before the record")
MAX_WITHOUT_CATEGORY = 0.20  # of the peak
OF_LATE_RANKS = ("straggler", "late-in-turns", "late-at-times")  # findings about ranks that come late
BUSY_MACHINE = "busy-machine"  # the finding whose words stand before the sentence
ENDED_EARLY = {"failed": "failed", "killed or lost": "was killed or lost"}  # words for a run's status
HOW_TO_TRACE = "Add --profile --use-pytorch-profiler"


def build_verdict(facts: Facts, findings: Sequence[Finding], failure: Postmortem | None = None) -> Verdict:
    """Say what limits this run, as far as the facts carry; before it what makes its speed a minor matter.

    Args:
        facts: the run.
        findings: what the rules found, the one that saves most first.
        failure: why the job failed, where its folder tells; then that is the verdict.
    """
    if failure is not None:
        return _judge_failure(facts, failure)
    snapshot = facts.highest_snapshot
    if facts.critical is not None:
        verdict = _judge_time(facts, facts.critical, findings)
    elif snapshot is not None:
        verdict = _judge_memory(facts, snapshot)
    else:
        verdict = _judge_speed(facts)
    verdict = replace(verdict, word=choose_word(facts, verdict.bound))
    sentences = [f"{said}." for said in _list_first_matters(facts)]
    return replace(verdict, sentence=" ".join([*sentences, verdict.sentence]))


def _judge_failure(facts: Facts, failure: Postmortem) -> Verdict:
    """Say why a job failed: whom the others wait for in its last steps is no matter of speed."""
    sentence = f"{failure.kind.value}: {failure.verdict}"
    if facts.run is not None and facts.run.steps:
        sentence += f". The run had {counted(facts.run.steps, 'step')}"
    why = failure.alternatives[0] if failure.alternatives else "see what shows it"
    confidence = "high" if failure.confidence == "high" else "low"
    return Verdict(sentence, "failure", confidence, why, VerdictWord.FAILED)


def _judge_speed(facts: Facts) -> Verdict:
    """Say how fast a run is that recorded neither a trace nor a snapshot, and how to record one."""
    remedy = _advise_watching(facts.run) if facts.is_watched else HOW_TO_TRACE
    why = f"no steps were profiled, so only the speed is known. {remedy}"
    sentence = f"INCONCLUSIVE: {why}"
    run = facts.run
    if run is not None and run.steady_step_ms is not None:
        parts = [f"{run.steady_step_ms:,.1f} ms per step"]
        if run.tokens_per_second:
            parts.append(f"{count(run.tokens_per_second)} tokens/s")
        if run.mfu_causal:
            parts.append(f"{run.mfu_causal:.0%} of peak")
        speed = ", ".join(parts)
        straggler = _describe_straggler(facts, run.steady_step_ms)
        if straggler:
            speed += f"; {straggler}"
        sentence = f"{speed}. {sentence}"
    return Verdict(sentence, "inconclusive", "low", why)


def _list_first_matters(facts: Facts) -> list[str]:
    """List what matters more than the speed: a failed request for memory, nothing learned, a failed run,
    missing cores."""
    matters = []
    snapshot = facts.highest_snapshot
    # without a trace the failed request is the verdict itself
    if facts.critical is not None and snapshot is not None:
        matters.append(_describe_failed_request(snapshot))
    run = facts.run
    if run is not None:
        nothing = measure_learning(run).nothing
        if nothing:
            matters.append(f"Nothing was learned: {nothing}")
        ended = ENDED_EARLY.get(run.status.partition(":")[0])
        if ended:
            matters.append(f"The run {ended} after {counted(run.steps, 'step')}")
        slowed = find_slowed_gpus(facts.ranks_hardware)
        if slowed:
            matters.append(_describe_slowed_gpu(slowed))
        if facts.core_shortage:
            matters.append(_describe_shortage(facts.core_shortage))
    return [matter for matter in matters if matter]


def _advise_watching(run: Run | None) -> str:
    """Advise a window of watch that lies within the steps that the run had."""
    steps = run.steps if run else 0
    if steps < MIN_STEPS_WATCHED:
        return "Try more steps under `megatron-lite watch`"
    first = max(2, min(DEFAULT_FIRST, steps - DEFAULT_STEPS + 1))
    last = min(first + DEFAULT_STEPS - 1, steps)
    return f"The run had {steps:,} steps: try `megatron-lite watch --steps {first}:{last + 1}`"


def _describe_slowed_gpu(found: Sequence[GpuClock]) -> str:
    """Write whose GPU is slowed down most, and how many others are."""
    first = found[0]
    text = f"Rank {first.rank}'s GPU {first.describe()}"
    if len(found) > 1:
        text += f"; {counted(len(found) - 1, 'other GPU')} slowed down, too"
    return text


def _describe_shortage(found: CoreShortage) -> str:
    """Write which rank lacks CPU cores, and for how much of its steps."""
    if found.share is None:
        return f"Rank {found.rank} waited for CPU cores: other threads preempted it repeatedly"
    kind = "profiled step" if found.kind == PROFILED else "step"
    return f"Rank {found.rank} waits for a CPU core for {found.share:.0%} of each {kind}"


def _judge_memory(facts: Facts, most: Snapshot) -> Verdict:
    """Say what a snapshot tells without a trace: a request that failed, else the peak, and what held memory then."""
    doubts = []
    if not most.has_history:
        doubts.append("the snapshot has no history, so its peak is unknown")
    unknown_bytes = sum(part.num_bytes for part in most.held if part.category in WITHOUT_CATEGORY)
    share = unknown_bytes / max(most.peak_bytes, 1)
    if share > MAX_WITHOUT_CATEGORY:
        doubts.append(f"the purpose of {share:.0%} of the peak is unknown")
    if facts.ranks_without_snapshot and _differ_in_memory(facts):
        doubts.append(f"{counted(len(facts.ranks_without_snapshot), 'rank')} with other parts of the model not read")
    doubts += find_contradictions(facts)
    why = [f"{count(most.events)} events", *dict.fromkeys(doubts)]
    return Verdict(
        sentence=_describe_failed_request(most) or _describe_peak(most),
        bound="memory",
        confidence="low" if doubts else "high",
        why="; ".join(why),
    )


def _differ_in_memory(facts: Facts) -> bool:
    """Whether ranks have layers or experts of their own, so that one may hold much more than another."""
    layout = facts.plan.layout
    return (layout.pipeline or 1) > 1 or (layout.expert or 1) > 1


def _describe_peak(most: Snapshot) -> str:
    """Write how much memory a snapshot holds at its peak, and for what."""
    held = _describe_held(most.held, most.peak_bytes)
    if not most.has_history:
        return f"Memory holds {size(most.peak_bytes)} at the moment of the snapshot{held}"
    when = f" in {most.peak_phase}" if most.peak_phase else ""
    return f"Memory peaks at {size(most.peak_bytes)}{when}{held}"


def _describe_held(held: Sequence[Held], num_bytes: int) -> str:
    """Write ": activations 50%, parameters 20%" of so many bytes; '' where nothing is known."""
    if not held or not num_bytes:
        return ""
    shares = [f"{part.category} {part.num_bytes / num_bytes:.0%}" for part in held[:MAX_HELD]]
    return f": {', '.join(shares)}"


def _describe_failed_request(one: Snapshot) -> str:
    """Write which request for memory ended the program; '' where none did."""
    oom = one.oom
    if oom is None or not one.ran_out:
        return ""
    at = f" at {oom.site}" if oom.site else ""
    where = "" if one.simulated else f" on GPU {one.device}"
    held = _describe_held(oom.held or one.held, oom.held_bytes or one.peak_bytes)
    return f"A request for {size(oom.requested_bytes)} failed{at} with {size(oom.held_bytes)} held{where}{held}"


def _judge_time(facts: Facts, rank: RankFacts, findings: Sequence[Finding]) -> Verdict:
    """Say what limits the steps of a trace.

    Args:
        facts: the run.
        rank: the rank that sets the pace.
        findings: what the rules found, the one that saves most first.
    """
    time = rank.time
    missing = missing_gpu_work(rank, facts.run)
    said = ""
    # without the device's work the host's shares tell nothing of what limits the step
    if time.step_ms > 0 and not missing:
        said = _describe_step(facts, rank, findings)
    why_not = missing or missing_graph_work(rank) or _explain_inconclusive(facts, rank)
    if why_not:
        sentence = f"INCONCLUSIVE: {why_not}"
        if said:
            sentence += f". What the trace shows: {said}"
        return Verdict(sentence, "inconclusive", "low", why_not)
    doubts = _list_doubts(facts, rank)
    reasons = [f"{len(time.steady_steps)} steady steps", *doubts]
    return Verdict(
        sentence=said[:1].upper() + said[1:],
        bound=_find_bound(facts, time),
        confidence="low" if doubts else "high",
        why="; ".join(reasons),
    )


def _list_doubts(facts: Facts, rank: RankFacts) -> list[str]:
    """List what lowers the confidence in a verdict by a trace, each once."""
    run = facts.run
    time = rank.time
    doubts = []
    steps_ms = [step.ms for step in time.steady_steps]
    if len(steps_ms) < STEPS_FOR_HIGH:
        doubts.append(f"profile at least {STEPS_FOR_HIGH} for high confidence")
    spread = _measure_spread(steps_ms)
    if spread > UNSTEADY:
        doubts.append(f"steps differ by {spread:.0%}")
    unexplained = _share(time, "unexplained")
    if unexplained > MOSTLY_UNEXPLAINED:
        doubts.append(f"{unexplained:.0%} of the step is unexplained")
    slower = (run.profiler_slowdown if run else None) or 1.0
    if slower > DISTORTED:
        doubts.append(_describe_longer_steps(run, slower))
    if facts.core_shortage is not None:
        doubts.append("ranks waited for CPU cores")
    # so much waiting may make a late rank the word, whatever this rank's own time is bound by
    waits_long = _share(time, "exposed_communication") >= MIN_LATE
    if waits_long or _find_bound(facts, time) == "communication":
        doubts.append(_describe_missing(facts))
    doubts.append(_doubt_lateness(facts, time))
    doubts.append(doubt_window(facts))
    doubts.extend(find_contradictions(facts))
    mfu = rank.kernels.mfu or 0.0
    if mfu > 1:
        doubts.append(f"{mfu:.0%} of the peak is impossible")
    if time.idle_beside_ms > MOSTLY_IDLE_BESIDE * time.step_ms:
        doubts.append("another GPU of the process works while this one idles")
    return [doubt for doubt in dict.fromkeys(doubts) if doubt]


def _measure_spread(steps_ms: Sequence[float]) -> float:
    """Measure how much steps differ: standard deviation / mean; 0 for fewer than two."""
    if len(steps_ms) < 2:
        return 0.0
    mean_ms = fmean(steps_ms)
    return pstdev(steps_ms) / mean_ms if mean_ms > 0 else 0.0


def _doubt_lateness(facts: Facts, time: RankTime) -> str:
    """Write why a verdict on ranks that wait for others may be one on other jobs; '' for any other verdict."""
    word = choose_word(facts, _find_bound(facts, time))
    if word is VerdictWord.COMMUNICATION_BOUND:
        return facts.doubt_exchange()
    ranks = facts.ranks
    if word is not VerdictWord.STRAGGLER or ranks is None:
        return ""
    doubt = ""
    if ranks.straggler:
        doubt = facts.doubt_straggler(ranks.straggler)
    if ranks.imbalance and not doubt:
        doubt = facts.doubt_imbalance(ranks.imbalance)
    return doubt


def _explain_inconclusive(facts: Facts, rank: RankFacts) -> str:
    """Explain why the trace does not tell what limits the run; '' where it does."""
    time = rank.time
    if not time.steps or time.step_ms <= 0:
        return "no complete step in the trace"
    why_not = _explain_too_few_steps(rank)
    if why_not:
        return why_not
    if _find_bound(facts, time) == "inconclusive":
        return f"{_share(time, 'unexplained'):.0%} of the step is unexplained, more than any cause"
    run = facts.run
    slower = run.profiler_slowdown if run else None
    if run is None or not slower or slower <= UNTRUSTWORTHY:
        return ""
    slowdown = measure_slowdown(run)
    if slowdown is not None and slowdown.is_by_other_jobs and facts.core_shortage is not None:
        return ""  # the shortage of cores is the answer
    return _describe_longer_steps(run, slower)


def _explain_too_few_steps(rank: RankFacts) -> str:
    """Explain why a trace's steps are too few, or none that count; '' where they suffice."""
    time = rank.time
    steady = time.steady_steps
    is_alone = len(time.steps) == 1
    if not steady:
        which = "the only step is not" if is_alone else f"none of the {len(time.steps)} steps is"
        return f"{which} steady ({time.steps[0].why_not or 'all are boundary steps'})"
    unmarked = is_alone and time.steps[0].number is None
    if rank.trace.cut and (unmarked or len(steady) < MIN_STEADY_STEPS):
        whole = "no complete step is" if unmarked else "only one complete step is"
        return f"{whole} in the {len(rank.trace.events):,} events that were read; record less per step"
    if unmarked:
        return f"the trace has no step marks, so {_name_only_step(time)} counts as one step"
    if len(steady) < MIN_STEADY_STEPS:
        return f"only one steady step; profile at least {STEPS_FOR_HIGH}"
    return ""


def _name_only_step(time: RankTime) -> str:
    """Name the only step: "the whole trace", or the range that was measured after a warm-up."""
    name = time.steps[0].name
    return "the whole trace" if name == WHOLE_TRACE else f"'{name}'"


def _describe_longer_steps(run: Run | None, slower: float) -> str:
    """Describe what is known of steps that were longer inside the profiler's window."""
    slowdown = measure_slowdown(run) if run else None
    longer = f"profiled steps took {slower - 1:.0%} longer than those before"
    if slowdown is not None and slowdown.is_by_other_jobs:
        return f"{longer}, because they waited for CPU cores"
    by_profiler_ms = slowdown.by_profiler_ms if slowdown else None
    if slowdown is None or by_profiler_ms is None:
        return f"{longer}; whether by the profiler or by other jobs, no CPU time in steps.jsonl tells"
    is_by_profiler = by_profiler_ms >= MIN_SHARE_OF_CORES * slowdown.lag_ms
    if run and (run.without_core or run.recovered is False or not is_by_profiler):
        return f"{longer}; the profiler explains only part of it"
    return f"the profiler made steps {slower - 1:.0%} longer"


def _describe_missing(facts: Facts) -> str:
    """Write "2 of 8 ranks were read, so the rank that the others wait for may be missing".

    '' where all were read, or their number is unknown.
    """
    ranks = facts.ranks
    if ranks is None or not ranks.missing or not ranks.world_size:
        return ""
    read = ranks.world_size - len(ranks.missing)
    return f"{read} of {ranks.world_size} ranks were read, so the rank that the others wait for may be missing"


def _share(time: RankTime, row: str) -> float:
    """Compute a row's share of the step."""
    return time.rows.get(row, 0.0) / time.step_ms if time.step_ms > 0 else 0.0


def _find_bound(facts: Facts, time: RankTime) -> str:
    """Find what loses most of the step where that decides, else compute."""
    whole_ms = time.step_ms if time.step_ms > 0 else math.inf
    shares = {bound: ms / whole_ms for bound, ms in measure_bounds(facts, time).items()}
    most = max(shares, key=lambda bound: shares[bound])
    # a step that hardly computes is bound by whatever it loses more to
    computing = max(_share(time, "compute"), MIN_COMPUTING)
    return most if shares[most] >= min(DECIDES, computing) else "compute"


def _describe_step(facts: Facts, rank: RankFacts, findings: Sequence[Finding]) -> str:
    """Write one sentence on where a step's time goes.

    Args:
        facts: the run.
        rank: the rank that sets the pace.
        findings: what the rules found, the one that saves most first.

    Returns:
        "31% of peak; 20% of each step is spent waiting for communication, 10% waiting for the host; ...".
    """
    time = rank.time
    straggler = _describe_straggler(facts, time.step_ms)
    parts = [_describe_speed(rank), ", ".join(_list_losses(facts, time)), straggler]
    if _find_bound(facts, time) == "compute":
        parts.append(_describe_compute(rank, findings, straggler_is_named=straggler != ""))
    return "; ".join(part for part in parts if part)


def _describe_speed(rank: RankFacts) -> str:
    """Write the share of the device's peak or, where the peak is not known, how busy the device is."""
    mfu = rank.kernels.mfu
    if mfu is None:
        return _describe_busy(rank)
    return f"{mfu:.0%} of peak" if mfu >= 0.005 else "under 1% of peak"


def _list_losses(facts: Facts, time: RankTime) -> list[str]:
    """List the largest losses of a step: ["20% of each step is spent waiting for communication",
    "10% waiting for the host"]."""
    losses_ms = measure_losses(facts, time)
    large = [row for row, ms in losses_ms.items() if ms >= MIN_SHARE_SAID * time.step_ms]
    large.sort(key=lambda row: -losses_ms[row])
    losses: list[str] = []
    for row in large[:MAX_LOSSES]:
        _, how, _ = LOSSES[row]
        if row == "host" and not time.on_gpu:
            how = "on"
        words = [f"{losses_ms[row] / time.step_ms:.0%}"]
        if not losses:
            words.append("of each step is spent" if how else "of each step is")
        if how:
            words.append(how)
        words.append(_name_loss(facts, time, row))
        losses.append(" ".join(words))
    recording_ms = time.rows.get("host", 0.0) - losses_ms["host"]
    if recording_ms >= MIN_SHARE_SAID * time.step_ms:
        share = f"{recording_ms / time.step_ms:.0%}"
        if not losses:
            share += " of each step"
        losses.append(f"{share} may be recording's own work")
    return losses


def _name_loss(facts: Facts, time: RankTime, row: str) -> str:
    """Name what a step waits for.

    Args:
        facts: the run.
        time: the rank's time, whose most costly synchronization is named.
        row: the row of the step that is lost.
    """
    _, _, name = LOSSES[row]
    if row == "exposed_communication" and facts.ranks and facts.ranks.collectives:
        # nobody waits for what it sends itself
        awaited = [collective for collective in facts.ranks.collectives if collective.name != "send"]
        collective = awaited[0] if awaited else facts.ranks.collectives[0]
        name = _name_collective(facts, collective)
        return f"{name} in {collective.phase}" if collective.phase else name
    if row == "sync" and time.syncs:
        return f"{name} ({time.syncs[0].operator or time.syncs[0].call})"
    if row == "host" and not time.on_gpu:
        return "Python between operators"
    return name


def _describe_compute(rank: RankFacts, findings: Sequence[Finding], straggler_is_named: bool) -> str:
    """Name what makes a step long that nothing holds up: the first cause, else the role that computes most.

    Args:
        rank: the rank that sets the pace.
        findings: what the rules found, the one that saves most first.
        straggler_is_named: the sentence names the ranks that come late already.

    Returns:
        A part of the sentence, or '' where nothing is worth naming.
    """
    costing = [found for found in findings if found.cost_ms and found.code != BUSY_MACHINE]
    if costing:
        first = costing[0]
        if straggler_is_named and first.code in OF_LATE_RANKS:
            return ""
        saving_ms = measure_saved_ms(first)
        if saving_ms >= MIN_SHARE_SAID * rank.time.step_ms:
            return f"{_rank_first(costing)}: {first.title} ({significant(saving_ms)} ms)"
    roles = rank.kernels.roles
    role = max(roles, key=lambda role: roles[role], default=Role.OTHER)
    total_ms = sum(roles.values())
    if role is Role.OTHER or total_ms <= 0:
        return ""
    kind = "device" if rank.time.on_gpu else "operator"
    return f"{roles[role] / total_ms:.0%} of {kind} time is {role}"


def _rank_first(costing: Sequence[Finding]) -> str:
    """Say what the first finding is among all that cost time; one that costs more may save less, by its replay."""
    first = costing[0]
    if not first.gain_is_bound:
        return "largest saving"
    most_ms = max(found.cost_ms or 0.0 for found in costing)
    return "most costly cause" if first.cost_ms == most_ms else "first cause"


def _describe_busy(rank: RankFacts) -> str:
    """Write "the GPU computes 74% of each step"; CUDA graphs recorded as a whole are only known to have run."""
    time = rank.time
    share = f"{_share(time, 'compute'):.0%} of each step"
    if not time.on_gpu:
        return f"operators take {share}"
    device = time.device if time.device and is_accelerator(time.device) else "GPU"
    graphs = measure_whole_graphs(rank)
    if graphs < MIN_SHARE_SAID:
        return f"the {device} computes {share}"
    return f"the {device} is busy {share}, {graphs:.0%} in CUDA graphs whose kernels were not recorded"


def _name_collective(facts: Facts, row: CollectiveRow) -> str:
    """Name a collective for which a step waits."""
    kind = row.name
    if kind in POINT_TO_POINT and row.group == "context":
        return "the exchange of split sequences"
    if kind in POINT_TO_POINT:
        has_stages = "pipeline" in row.group or (facts.plan.layout.pipeline or 1) > 1
        return "another stage" if has_stages else f"data of another rank ({kind})"
    if kind in ("dispatch", "combine"):
        return f"the exchange of tokens among experts ({kind})"
    if kind != OTHER_KIND:
        return kind
    # the kernel's own name, where it does not say what it does
    return f"communication by {facts.exposed[0].kernel}" if facts.exposed else "communication"


def _describe_straggler(facts: Facts, step_ms: float) -> str:
    """Write for which ranks the others wait; '' where they wait for little of a step."""
    if facts.ranks is None:
        return ""
    least_ms = MIN_SHARE_SAID * step_ms
    late = facts.ranks.straggler
    if late is None:
        moving = facts.ranks.imbalance
        return describe_imbalance(moving) if moving is not None and moving.lost_ms >= least_ms else ""
    if late.caused_wait_ms < least_ms:
        return ""
    return f"the other ranks wait {significant(late.caused_wait_ms)} ms per step for rank {late.rank}"
