"""The host waits for the device inside a step.

Meaning: code asked for a value that the device had not computed yet: .item(), print(tensor),
    .cpu(), bool(tensor), nonzero, or an explicit synchronize. Python stands still until all
    queued work is done, and then the device stands still until Python has launched new work.
Measured: calls per step that block the host, with operator and source line; cost is the device's
    idle time after them, not the time that the host waited: waiting while the device computes
    costs nothing. Without a GPU nothing runs ahead of Python, so that only the reading itself is
    counted; on a GPU each would cost more.
Cost: the queue runs empty, and every launch that follows is seen in full. CPU times lie about it:
    the wait shows up in whatever phase comes to ask first, often the copy of the next batch.
Do: read losses and norms at the log interval only; keep conditions on the device (torch.where);
    copy with non_blocking=True from pinned memory.
Flags: --log-interval 100; for Megatron-LM itself --no-check-for-nan-in-loss-and-grad. Stacks name
    the line: --pytorch-profiler-collect-callstack.
False alarm: one wait at a step's end with a full queue behind it, which idle time shows as
    nothing.
"""

from megatron_lite.analysis.facts import Facts, RankFacts
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.seen.steady import (
    WORTH_A_LINE,
    counted,
    in_ms,
    of_step,
    per_step_ms,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.findings.unpinned_copies import is_batch_copy, pageable_rows
from megatron_lite.analysis.time.figures import SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase

CODE = "sync-in-step"
TITLE = "synchronisation inside the step"
ONCE = 0.5  # calls per step from which on it is every step's, not that of a log interval
BETWEEN_STEPS = {Phase.LOG.value, Phase.EVAL.value, Phase.SAVE.value}  # there, waiting is meant
ON_HOST_ANYWAY = BETWEEN_STEPS | {Phase.OPTIMIZER_STEP.value}  # an unfused optimizer's step counters are on the host
READS = ("aten::item", "aten::is_nonzero", "aten::equal", "aten::_local_scalar_dense")
MOST_SHOWN = 4


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None:
        return None
    return _on_gpu(one) if one.time.on_gpu else _on_cpu(one)


def _on_gpu(one: RankFacts) -> Finding | None:
    sites = waits_inside(one)
    cost = sum(site.idle_ms for site in sites)
    if share(cost, one) < WORTH_A_LINE:
        return None
    calls = sum(site.per_step for site in sites)
    text = f"{counted(calls, 'wait')} per step, after which the device idles {of_step(cost, one)}"
    first = Evidence(text, where(one))
    return _finding(one, cost, (first, *map(_seen, sites[:MOST_SHOWN])), certain=True)


def _on_cpu(one: RankFacts) -> Finding | None:
    reads, phases = reads_inside(one), [*one.placing.phases, ""]
    calls = len(reads) / steady_steps(one)
    if calls < ONCE:
        return None
    cost = per_step_ms(one, reads)
    row = reads[0]
    evidence = Evidence(f"{calls:.3g} times per step {one.trace.name_of(row)} reads a tensor's value into Python, in "
                        f"{phases[one.placing.phase[row]] or 'no phase'} ({in_ms(cost)}; on a GPU each waits for all "
                        "queued work)",
                        where(one, row))
    return _finding(one, cost, (evidence,), certain=False)


def waits_inside(one: RankFacts) -> list[SyncSite]:
    """Where the host waits for the device inside every step; most idle time first."""
    unpinned = len(pageable_rows(one)) > 0  # they are a finding of their own
    return [site for site in one.time.syncs
            if site.per_step >= ONCE and site.phase not in BETWEEN_STEPS and not (unpinned and is_batch_copy(site))]


def reads_inside(one: RankFacts) -> list[int]:
    """Rows of operators that read a value into Python inside a step."""
    rows = rows_named(one, lambda name: name in READS, Kind.OP)
    rows = rows[one.placing.operator[rows] < 0]  # inside another operator, a fused optimizer, it is that one's affair
    phases = [*one.placing.phases, ""]
    return [int(row) for row in rows if phases[one.placing.phase[row]] not in ON_HOST_ANYWAY]


def _finding(one: RankFacts, cost: float, evidence: tuple[Evidence, ...], certain: bool) -> Finding:
    return Finding(
        code=CODE, title=TITLE, cost_ms=cost, evidence=evidence,
        advice="read values (.item(), print, .cpu()) at the log interval only, and keep conditions on the device",
        flags=("--log-interval 100",), gain_ms=cost, certain=certain, rank=one.time.rank,
    )


def _seen(site: SyncSite) -> Evidence:
    what = f"{site.operator} -> {site.call}" if site.operator else site.call
    return Evidence(f"{what} in {site.phase or 'no phase'}: {site.per_step:.3g} per step, host waits "
                    f"{in_ms(site.host_ms)}, "
                    f"device idles {in_ms(site.idle_ms)}", site.frame)

