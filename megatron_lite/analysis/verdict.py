"""The first line of a report: one sentence with the largest true statements, or INCONCLUSIVE with the reason."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from megatron_lite.analysis.contradictions import find_contradictions, missing_gpu_work
from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.report import Verdict
from megatron_lite.analysis.run.learning import measure_learning
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.units import count, significant, size

MIN_SHARE_SAID = 0.05  # of a step; what is smaller does not decide anything
DECIDES = 0.20  # a loss of this share is what the run is bound by, even where it computes most of the time
MAX_LOSSES = 2
MIN_STEPS, STEPS_FOR_HIGH = 2, 3
UNSTEADY = 0.15  # spread of step times (standard deviation / mean) that lowers confidence
DISTORTED, UNTRUSTWORTHY = 1.10, 1.50  # profiled step / step without the profiler
MOSTLY_UNEXPLAINED = 0.20
HOW_TO_TRACE = "--profile --use-pytorch-profiler records one"

LOSSES = {  # row of RankTime: (what bounds the run, verb, of what)
    "exposed_communication": ("communication", "waits for", "communication"),
    "exposed_copy": ("copy", "waits for", "copies"),
    "data_wait": ("data", "waits for", "the data loader"),
    "sync": ("sync", "goes to", "synchronisations by the host"),
    "host": ("host", "waits for", "the host"),
    "allocator": ("host", "goes to", "the memory allocator"),
    "garbage_collector": ("host", "goes to", "Python's garbage collector"),
    "launch": ("host", "goes to", "launch latency"),
    "dependency": ("sync", "waits for", "other streams"),
    "save": ("save", "goes to", "saving and evaluating"),
    "unexplained": ("inconclusive", "is", "unexplained"),
}


def build_verdict(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    """What limits this run, as far as the facts carry; before it what makes its speed a minor matter."""
    verdict = _of_time(facts, findings)
    return replace(verdict, sentence=_first_of_all(facts.run) + verdict.sentence) if facts.run else verdict


def _first_of_all(run: Run) -> str:
    """'Nothing was learned: all 14 steps were skipped ... The run failed after 14 steps. '; '' for an ordinary run."""
    how = {"failed": "failed", "killed or lost": "was killed or lost"}.get(run.status.partition(":")[0])
    nothing = measure_learning(run).nothing
    learned = f"Nothing was learned: {nothing}" if nothing else ""
    ended = f"The run {how} after {run.steps:,} steps" if how else ""
    return "".join(f"{one}. " for one in (learned, ended, _busy(run)) if one)


def _busy(run: Run) -> str:
    """'Rank 1 has no core for 33% of each step'; '' where all have theirs."""
    if not run.without_core:
        return ""
    rank, ms = run.without_core
    if ms is None:
        return f"Rank {rank} was not given its cores: other threads take them again and again"
    return f"Rank {rank} is ready and has no core for {ms / run.ranks.step_ms[rank]:.0%} of each step"


def _of_time(facts: Facts, findings: Sequence[Finding]) -> Verdict:
    rank = facts.critical
    if rank is None:
        return _of_memory(facts) if facts.snapshots else _of_run(facts)
    why_not = missing_gpu_work(rank, facts.run) or _why_inconclusive(rank, facts.run)
    said = _sentence(facts, rank, findings) if rank.time.step_ms > 0 else ""
    if why_not:
        return Verdict(
            f"INCONCLUSIVE: {why_not}" + (f". As far as it goes: {said}" if said else ""),
            "inconclusive",
            "low",
            why_not,
        )
    doubts = [*_doubts(rank.time, facts.run), *find_contradictions(facts)]
    if (rank.kernels.mfu or 0.0) > 1:
        impossible = f"{rank.kernels.mfu:.0%} of the peak is impossible"
        doubts.append(f"{impossible}: kernels are missing, or the device is another one")
    seen = f"{len(rank.time.steady_steps)} steady steps"
    return Verdict(
        said[:1].upper() + said[1:], _bound(rank.time), "low" if doubts else "high", "; ".join([seen, *doubts])
    )


def _why_inconclusive(rank: RankFacts, run: Run | None) -> str:
    time = rank.time
    if not time.steps or time.step_ms <= 0:
        return "no complete step in the trace"
    if not time.steady_steps:
        return f"none of the {len(time.steps)} steps is steady ({time.steps[0].why_not or 'all are boundary steps'})"
    if len(time.steps) == 1 and time.steps[0].number is None and rank.trace.cut:
        return f"no whole step stands in the {len(rank.trace.events):,} events that were read; record less of each step"
    if len(time.steps) == 1 and time.steps[0].number is None:
        return "no step marks, so the whole trace counts as one step"
    if len(time.steady_steps) < MIN_STEPS and rank.trace.cut:
        return f"only one whole step stands in the {len(rank.trace.events):,} events that were read; record less of each step"
    if len(time.steady_steps) < MIN_STEPS:
        return f"only one steady step; profile a window of {STEPS_FOR_HIGH} or more"
    if _bound(time) == "inconclusive":
        return f"{_share(time, 'unexplained'):.0%} of the step is unexplained, more than any cause"
    slower = run.profiler_slowdown if run else None
    return _longer(run, slower) if slower and slower > UNTRUSTWORTHY else ""


def _longer(run: Run | None, slower: float) -> str:
    """What is known of steps that were longer inside the window."""
    if run and (run.without_core or run.recovered is False):
        return f"steps inside the window are {slower - 1:.0%} longer than before it, not by the profiler alone"
    return f"the profiler made steps {slower - 1:.0%} longer"


def _doubts(time: RankTime, run: Run | None) -> list[str]:
    steps = [step.ms for step in time.steady_steps]
    spread = pstdev(steps) / fmean(steps) if len(steps) > 1 and fmean(steps) > 0 else 0.0
    slower = (run.profiler_slowdown if run else None) or 1.0
    doubts = {
        f"{STEPS_FOR_HIGH} or more would say it with confidence": len(steps) < STEPS_FOR_HIGH,
        f"steps differ by {spread:.0%}": spread > UNSTEADY,
        f"{_share(time, 'unexplained'):.0%} of the step is unexplained": _share(time, "unexplained")
        > MOSTLY_UNEXPLAINED,
        _longer(run, slower): slower > DISTORTED,
        "ranks were not given their cores": bool(run and run.without_core),
    }
    return [doubt for doubt, holds in doubts.items() if holds]


def _share(time: RankTime, row: str) -> float:
    return time.rows.get(row, 0.0) / time.step_ms if time.step_ms > 0 else 0.0


def _losses(time: RankTime) -> list[str]:
    rows = [row for row in LOSSES if _share(time, row) >= MIN_SHARE_SAID]
    return sorted(rows, key=lambda row: -time.rows[row])[:MAX_LOSSES]


def _bound(time: RankTime) -> str:
    shares: dict[str, float] = {}
    for row, (bound, _, _) in LOSSES.items():
        shares[bound] = shares.get(bound, 0.0) + _share(time, row)
    bound = max(shares, key=shares.get)
    return bound if shares[bound] >= min(DECIDES, max(_share(time, "compute"), 0.01)) else "compute"


def _sentence(facts: Facts, rank: RankFacts, findings: Sequence[Finding]) -> str:
    time, losses = rank.time, []
    for row in _losses(time):
        said = f"{_verb(row, time.on_gpu)} {_object(row, facts, rank)}"
        losses.append(f"{_share(time, row):.0%}{'' if losses else ' of each step'} {said}")
    within = _inside_compute(rank, findings) if _bound(time) == "compute" else ""
    return "; ".join(part for part in (_lead(rank), ", ".join(losses), _straggler(facts, time.step_ms), within) if part)


def _straggler(facts: Facts, step_ms: float) -> str:
    late = facts.ranks.straggler if facts.ranks else None
    if late is None or late.caused_wait_ms < MIN_SHARE_SAID * step_ms:
        return ""
    return f"the other ranks wait {significant(late.caused_wait_ms)} ms per step for rank {late.rank}"


def _lead(rank: RankFacts) -> str:
    time, mfu = rank.time, rank.kernels.mfu
    if mfu is not None:
        return f"{mfu:.0%} of peak" if mfu >= 0.005 else "under 1% of peak"
    computing = f"{_share(time, 'compute'):.0%}"
    if time.on_gpu:
        return f"the GPU computes {computing} of each step"
    return f"operators take {computing} of each step"


def _verb(row: str, on_gpu: bool) -> str:
    return "goes to" if row == "host" and not on_gpu else LOSSES[row][1]


def _object(row: str, facts: Facts, rank: RankFacts) -> str:
    if row == "exposed_communication":
        return _communication(facts)
    if row == "sync" and rank.time.syncs:
        first = rank.time.syncs[0]
        return f"{LOSSES[row][2]} ({first.operator or first.call})"
    if row == "host" and not rank.time.on_gpu:
        return "Python between operators"
    return LOSSES[row][2]


def _communication(facts: Facts) -> str:
    if not facts.ranks or not facts.ranks.collectives:
        return "communication"
    first = facts.ranks.collectives[0]
    return first.name + (f" in {first.phase}" if first.phase else "")


def _inside_compute(rank: RankFacts, findings: Sequence[Finding]) -> str:
    """What a run that mostly computes computes."""
    dear = next((one for one in findings if one.cost_ms), None)
    if dear and dear.cost_ms >= MIN_SHARE_SAID * rank.time.step_ms:
        return f"most costly cause: {dear.title} ({significant(dear.cost_ms)} ms)"
    total = sum(rank.kernels.roles.values())
    role, ms = max(rank.kernels.roles.items(), key=lambda pair: pair[1], default=(Role.OTHER, 0.0))
    if role is Role.OTHER or not total:
        return ""
    return f"{ms / total:.0%} of {'device' if rank.time.on_gpu else 'operator'} time is {role}"


def _of_memory(facts: Facts) -> Verdict:
    most = facts.highest_snapshot
    where = f" in {most.peak_phase}" if most.peak_phase else ""
    held = (
        ", ".join(f"{part.category} {part.num_bytes / most.peak_bytes:.0%}" for part in most.held[:3])
        if most.peak_bytes
        else ""
    )
    sentence = f"Memory peaks at {size(most.peak_bytes)}{where}" + (f": {held}" if held else "")
    doubts = find_contradictions(facts)
    return Verdict(
        sentence, "memory", "low" if doubts else "high", "; ".join([f"{count(most.events)} events", *doubts])
    )


def _of_run(facts: Facts) -> Verdict:
    run, why = facts.run, f"no trace: without one the run says how fast it was, not why; {HOW_TO_TRACE}"
    if run is None or run.steady_step_ms is None:
        return Verdict(f"INCONCLUSIVE: {why}", "inconclusive", "low", why)
    speed = f", {count(run.tokens_per_second)} tokens/s" if run.tokens_per_second else ""
    mfu = f", {run.mfu_causal:.0%} of peak" if run.mfu_causal else ""
    late = _straggler(facts, run.steady_step_ms)
    said = f"{run.steady_step_ms:,.1f} ms per step{speed}{mfu}{f'; {late}' if late else ''}"
    return Verdict(f"{said}. INCONCLUSIVE: {why}", "inconclusive", "low", why)
