"""How long steps wait for the loader, by what there is: a trace, every rank's medians, or one rank's steps."""

import math
from dataclasses import dataclass
from statistics import median

from megatron_lite.analysis.findings.seen.steady import MATTERS, in_ms, of_step, share, where
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.phases import Phase

DATA = Phase.DATA.value


@dataclass(frozen=True)
class LoaderWait:
    """Of the rank that waits most."""

    ms: float  # per step
    busy_ms: float  # the rest of the step
    loading_ms: float | None  # host time in the loader, hidden or not
    text: str
    where: str
    rank: int | None


def loader_wait(facts: Facts) -> LoaderWait | None:
    """None where it does not matter or is unknown."""
    if facts.ranks_seen:
        one = max(facts.ranks_seen, key=lambda seen: seen.time.rows.get("data_wait", 0.0))
        return _of_trace(one)
    if facts.run is None or not facts.run.steady_step_ms:
        return None
    return _of_ranks(facts.run) or _of_steps(facts.run)


def _of_trace(one: RankFacts) -> LoaderWait | None:
    ms = one.time.rows.get("data_wait", 0.0)
    if share(ms, one) < MATTERS:
        return None
    who = "the device" if one.time.on_gpu else "the step"
    return LoaderWait(
        ms,
        one.time.step_ms - ms,
        one.time.loader_host_ms or None,
        f"{who} waits for the loader {of_step(ms, one)}",
        where(one),
        one.time.rank,
    )


def _of_ranks(run: Run) -> LoaderWait | None:
    waits = run.ranks.phases_ms.get(DATA, ()) if run.ranks else ()
    known = [(ms, rank) for rank, ms in enumerate(waits) if not math.isnan(ms)]
    return _of_host(run, *max(known)) if known else None


def _of_steps(run: Run) -> LoaderWait | None:
    waits = [ms for ms, ordinary in zip(run.phases_ms.get(DATA, ()), run.ordinary) if ordinary and not math.isnan(ms)]
    return _of_host(run, median(waits), None) if waits else None


def _of_host(run: Run, ms: float, rank: int | None) -> LoaderWait | None:
    if ms < MATTERS * run.steady_step_ms:
        return None
    text = f"{in_ms(ms)} of a step of {in_ms(run.steady_step_ms)} pass in the phase {DATA} (median of ordinary steps)"
    where_seen = "steps.jsonl" if rank is None else f"rank {rank}, steps.jsonl"
    return LoaderWait(ms, run.steady_step_ms - ms, None, text, where_seen, rank)
