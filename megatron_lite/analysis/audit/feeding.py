"""Points about the host: what makes it wait, and whether batches arrive in time."""

import re

import numpy as np

from megatron_lite.analysis.audit.audit_results import Case, Outcome, blamed, failed, not_seen, passed
from megatron_lite.analysis.audit.recording import GPU_TRACE, TRACE
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.seen.steady import (
    MATTERS,
    MIN_SHARE_SHOWN,
    counted,
    in_ms,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.findings.small_copies import ACROSS, MANY, SMALL_BYTES
from megatron_lite.analysis.findings.sync_in_step import BETWEEN_STEPS, waits_inside
from megatron_lite.analysis.findings.unpinned_copies import is_batch_copy
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase
from megatron_lite.units import size

TO_DEVICE = re.compile(r"HtoD|HostToDevice", re.IGNORECASE)
SAYS_MEMORY = re.compile(r"(pageable|pinned) *->", re.IGNORECASE)
DATA = Phase.DATA.value
READS = ("aten::item", "aten::is_nonzero", "aten::equal", "aten::_local_scalar_dense")
# an unfused optimizer's step counters are on the host
READS_ON_HOST = BETWEEN_STEPS | {Phase.OPTIMIZER_STEP.value}
MAX_SHOWN = 2


def no_synchronisation(case: Case) -> Outcome:
    """.item(), print and copies to the host inside a step, those at log, eval and save left out."""
    one = case.facts.critical
    if found := case.found("sync-in-step"):
        return blamed(found)
    if one is None or not len(one.trace.rows[Kind.RUNTIME if one.time.on_gpu else Kind.OP]):
        return not_seen(TRACE)
    return passed(*(_synchronisations(one) if one.time.on_gpu else _reads(one)))


def batches_in_time(case: Case) -> Outcome:
    """Does the device, or without a trace the step, wait for the loader?"""
    if found := case.found("starved-loader", "too-many-workers"):
        return blamed(found)
    seen = [one for one in case.facts.ranks_seen if _names_its_loader(one)]
    if seen:
        most = max(seen, key=lambda one: share(one.time.rows.get("data_wait", 0.0), one))
        return passed(
            Evidence(
                f"waiting for the loader: {of_step(most.time.rows.get('data_wait', 0.0), most)}; "
                f"{in_ms(most.time.loader_host_ms)} in the loader, hidden or not; {MATTERS:.0%} would be much",
                where(most),
            )
        )
    waited = _loader_ms(case.facts.run)
    if waited:
        text = f"median {in_ms(float(np.median(waited)))} in the phase {DATA} of {in_ms(case.facts.run.steady_step_ms)}"
        return passed(Evidence(f"{text}, {len(waited)} ordinary steps", "steps.jsonl"))
    return not_seen(
        f'a trace that names the loader (a DataLoader does; else record_function("{DATA}")), '
        "or steps.jsonl of this trainer"
    )


def pinned_copies(case: Case) -> Outcome:
    """Most bytes of batches from pinned memory, and no host that waits for them."""
    one = case.facts.critical
    if found := case.found("unpinned-copies"):
        return blamed(found)
    rows = (
        rows_named(one, TO_DEVICE.search, Kind.MEMCPY) if one is not None and one.time.on_gpu else np.empty(0, np.int64)
    )
    told = rows[one.trace.matching(SAYS_MEMORY.search)[rows]] if len(rows) else rows
    if not len(told):
        return not_seen(GPU_TRACE, *_no_copies(one, len(rows)))
    pageable = told[one.trace.matching(lambda name: "ageable" in name)[told]]
    seen, most_pageable = _pinned_share(one, told, pageable)
    if most_pageable:
        return failed(
            "pin host memory (DataLoader(pin_memory=True)) and copy with non_blocking=True",
            seen,
            code="unpinned-copies",
        )
    waits = [site for site in one.time.syncs if is_batch_copy(site)]
    idle = sum(site.idle_ms for site in waits)
    waited = Evidence(
        f"{counted(sum(site.per_step for site in waits), 'wait')} of the host for them per step, after which "
        f"the device idles {of_step(idle, one)}",
        where(one),
    )
    if share(idle, one) >= MIN_SHARE_SHOWN:
        return failed("copy with .to(device, non_blocking=True)", seen, waited, code="sync-in-step")
    return passed(seen, waited)


def few_copies(case: Case) -> Outcome:
    """A batch in a few tensors rather than dozens."""
    one = case.facts.critical
    if found := case.found("small-copies"):
        return blamed(found)
    rows = rows_named(one, ACROSS.search, Kind.MEMCPY) if one is not None and one.time.on_gpu else np.empty(0, np.int64)
    rows = rows[one.trace.events.num_bytes[rows] >= 0] if len(rows) else rows
    if not len(rows):
        return not_seen(GPU_TRACE, *_no_copies(one, 0))
    small = int((one.trace.events.num_bytes[rows] <= SMALL_BYTES).sum())
    number = steady_steps(one)
    return passed(
        Evidence(
            f"per step {counted(len(rows) / number, 'transfer')} between host and device, "
            f"{small / number:.3g} of at most "
            f"{size(SMALL_BYTES)}; {MANY} would be many",
            where(one, rows[0]),
        )
    )


def _synchronisations(one: RankFacts) -> list[Evidence]:
    sites = waits_inside(one)
    idle = sum(site.idle_ms for site in sites)
    text = (
        f"{sum(site.per_step for site in sites):.3g} synchronisations per step in "
        f"{counted(steady_steps(one), 'steady step')}; the "
        f"device idles after them {of_step(idle, one)}, {MIN_SHARE_SHOWN:.0%} would be much"
    )
    shown = [
        Evidence(
            f"{site.operator or site.call} in {site.phase or 'no phase'}: {site.per_step:.3g} per step", site.frame
        )
        for site in sites[:MAX_SHOWN]
    ]
    return [Evidence(text, where(one)), *shown]


def _reads(one: RankFacts) -> list[Evidence]:
    """Without a GPU: what one would have to be waited for. On a CPU nothing runs ahead of Python, and no read waits."""
    rows = rows_named(one, lambda name: name in READS, Kind.OP)
    rows = rows[one.placing.operator[rows] < 0]  # inside another operator, a fused optimizer, it is that one's affair
    phases = [*one.placing.phases, ""]
    inside = [row for row in rows if phases[one.placing.phase[row]] not in READS_ON_HOST]
    text = (
        f"no GPU in the trace, so that no read waits; {len(inside) / steady_steps(one):.3g} values read into Python per step, "
        "each of which a GPU would have to be waited for; log, eval, save and the optimizer's step counters left out"
    )
    return [Evidence(text, where(one))]


def _no_copies(one: RankFacts | None, unnamed: int) -> list[Evidence]:
    """Why a point about copies cannot be seen in the trace that there is."""
    if one is None:
        return []
    if not one.time.on_gpu:
        return [Evidence("no GPU, so that nothing is copied to one", where(one))]
    what = f"{unnamed} copies that do not say from which memory" if unnamed else "no copy from the host"
    return [Evidence(f"{what} in {counted(steady_steps(one), 'steady step')}", where(one))]


def _names_its_loader(one: RankFacts) -> bool:
    return one.time.step_ms > 0 and (
        one.time.loader_host_ms > 0 or any(phase.name == DATA for phase in one.time.phases)
    )


def _loader_ms(run: Run | None) -> list[float]:
    if run is None or not run.steady_step_ms:
        return []
    return [ms for ms, plain in zip(run.phases_ms.get(DATA, ()), run.ordinary) if plain and ms >= 0]


def _pinned_share(one: RankFacts, told: np.ndarray, pageable: np.ndarray) -> tuple[Evidence, bool]:
    """(what was seen, whether most bytes come from pageable memory)."""
    num_bytes, number = one.trace.events.num_bytes.clip(min=0), steady_steps(one)
    total, slow = int(num_bytes[told].sum()), int(num_bytes[pageable].sum())
    text = (
        f"per step {counted((len(told) - len(pageable)) / number, 'transfer')} "
        f"({size((total - slow) / number)}) from pinned memory, "
        f"{len(pageable) / number:.3g} ({size(slow / number)}) from pageable memory"
    )
    return Evidence(text, where(one, told[0])), 2 * slow > total or total == 0 and 2 * len(pageable) > len(told)
