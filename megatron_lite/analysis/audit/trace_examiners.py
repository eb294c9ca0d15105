"""What traces say about the questions of the audit that no finding answers."""

import math
import re
from collections.abc import Callable
from statistics import median

import numpy as np

from megatron_lite.analysis.audit.answers import (
    GPU_TRACE,
    LONGER_RUN,
    RUN_FOLDER,
    SHAPES,
    TRACE,
    Case,
    Point,
    failed,
    not_seen,
)
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.fp32_products import WITHOUT_TENSOR_CORES
from megatron_lite.analysis.findings.small_copies import ACROSS, MANY, SMALL_BYTES
from megatron_lite.analysis.findings.step_measurements import (
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
from megatron_lite.analysis.findings.sync_in_step import waits_inside
from megatron_lite.analysis.findings.unpinned_copies import is_batch_copy
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase
from megatron_lite.run_folder import STEPS_FILE
from megatron_lite.units import size

MIN_STEPS, MIN_TRACED_STEPS = 3, 2  # for a median of a run; a trace's window is short
MAX_SITES = 2  # shown of waits for the device
NO_COPY = "no copy from the host"
MAX_UNEXPLAINED = 0.10  # of the step: as much as what a verdict begins to name


# --- how the run was timed


def examine_clock(case: Case) -> Point | list[Evidence]:
    """CUDA events of the run, or the device's own times in the trace; on a CPU the host's clock is the device's."""
    run, one, device = case.facts.run, case.facts.critical, case.facts.plan.get("device")
    gpu_ms = [ms for ms, plain in zip(run.gpu_ms, run.ordinary) if plain and not math.isnan(ms)] if run else []
    if gpu_ms:
        text = f"median {in_ms(median(gpu_ms))} between CUDA events (gpu_ms) in {len(gpu_ms)} ordinary steps"
        return [Evidence(text, STEPS_FILE)]
    if one is not None and one.time.on_gpu:
        return _examine_window(one)
    if run is None or not any(run.ordinary) or device not in ("cuda", "cpu"):
        what = "the trace holds no work of a GPU: a CPU's job, or one recorded without CUDA activities"
        return not_seen(TRACE, *([Evidence(what, where(one))] if one is not None else []))
    if device == "cuda":
        text = "only the host's times of a GPU run: how long handing work over took, not the work"
        return failed("leave out --no-step-timeline", Evidence(text, STEPS_FILE))
    text = "a CPU run: no operator outlives its call, so that the host's clock is right"
    return [Evidence(f"{text}; {sum(run.ordinary)} of {run.steps} steps count", STEPS_FILE)]


def _examine_window(one: RankFacts) -> Point | list[Evidence]:
    """The profiler numbers steps from the process's first, 0; without numbers those in the trace count."""
    steady = [(at, step) for at, step in enumerate(one.time.steps) if step.steady]
    if not steady or not one.time.step_ms > 0:
        return []
    at, first = steady[0]
    before = at if first.number is None else first.number
    text = f"times from the GPU's clock, {in_ms(one.time.step_ms)} a step; {before} steps ran before the first that counts, {first.name}"
    seen = Evidence(text, where(one))
    if before > 0:
        return [seen]
    if first.number is None:
        return not_seen("a window that does not begin with the first step", seen)
    return failed("begin the window later: --profile-step-start 10", seen, code="first-step")


def examine_steady_state(case: Case) -> Point | list[Evidence]:
    """The step's time without the first step and other disturbed ones."""
    run, one = case.facts.run, case.facts.critical
    number = sum(run.ordinary) if run else 0
    if number >= MIN_STEPS:
        return [Evidence(f"median {in_ms(run.steady_step_ms)} of {number} ordinary of {run.steps} steps", STEPS_FILE)]
    if run and run.steps >= MIN_STEPS and not number:
        text = f"none of {run.steps} steps counts: the first, profiled ones and those beside a profile are left out"
        return failed(f"{LONGER_RUN}, and a profiler's window that leaves steps beside it", Evidence(text, STEPS_FILE))
    if one is None:
        return []
    steady = sum(step.steady for step in one.time.steps)
    text = f"mean {in_ms(one.time.step_ms)} of {counted(steady, 'steady step')} of {len(one.time.steps)} in the trace"
    seen = Evidence(text, where(one))
    return (
        [seen]
        if steady >= MIN_TRACED_STEPS
        else not_seen(f"{LONGER_RUN}, or a longer window: --profile-step-end", seen)
    )


def examine_profile(case: Case) -> Point | list[Evidence]:
    """Does the trace say where to go, and is it true of the run without a profiler?"""
    one, run = case.facts.critical, case.facts.run
    if one is None or not one.time.step_ms > 0:
        return []
    unexplained = one.time.rows.get("unexplained", 0.0)
    if share(unexplained, one) > MAX_UNEXPLAINED:
        text = f"unexplained: {of_step(unexplained, one)}"
        return not_seen(f"{TRACE}, with --pytorch-profiler-collect-callstack", Evidence(text, where(one)))
    costly = next((found for found in case.findings if found.cost_ms), None)
    text = (
        f"where to begin: {costly.code}, {of_step(costly.cost_ms, one)}"
        if costly
        else "no cause of lost time was found"
    )
    seen, slowdown = Evidence(text, where(one)), run.profiler_slowdown if run else None
    if slowdown is None:
        record = f"how far the profiler slows the step down: {RUN_FOLDER}, with --profile-step-start above 5"
        return not_seen(record, seen)
    text = f"steps inside the window take{run.on_rank} {slowdown:.2f} x as long as those before it"
    return [seen, Evidence(text, STEPS_FILE)]


# --- what the host does


def examine_synchronization(case: Case) -> list[Evidence]:
    """Waits for the device inside steps: the rule measures them; on a CPU no read waits."""
    one = case.facts.critical
    if one is None or not len(one.trace.rows[Kind.RUNTIME if one.time.on_gpu else Kind.OP]):
        return []
    if not one.time.on_gpu:
        return [Evidence("no GPU in the trace, so that no read waits for one", where(one))]
    sites = waits_inside(one)
    text = (
        f"{sum(site.per_step for site in sites):.3g} synchronizations per step in "
        f"{counted(steady_steps(one), 'steady step')}; the device idles after them "
        f"{of_step(sum(site.idle_ms for site in sites), one)}, {MIN_SHARE_SHOWN:.0%} would be much"
    )
    shown = (
        Evidence(
            f"{site.operator or site.call} in {site.phase or 'no phase'}: {site.per_step:.3g} per step", site.frame
        )
        for site in sites[:MAX_SITES]
    )
    return [Evidence(text, where(one)), *shown]


def examine_loader(case: Case) -> list[Evidence]:
    """Does the device, or without a trace the step, wait for the loader?"""
    data, run = Phase.DATA.value, case.facts.run
    seen = [
        one
        for one in case.facts.ranks_seen
        if one.time.step_ms > 0
        and (one.time.loader_host_ms > 0 or any(phase.name == data for phase in one.time.phases))
    ]
    if seen:
        wait_ms, one = max(((one.time.rows.get("data_wait", 0.0), one) for one in seen), key=lambda pair: pair[0])
        text = f"waiting for the loader: {of_step(wait_ms, one)}; {in_ms(one.time.loader_host_ms)} in it, hidden or not"
        return [Evidence(f"{text}; {MATTERS:.0%} would be much", where(one))]
    waits = [ms for ms, plain in zip(run.phases_ms.get(data, ()), run.ordinary) if plain and ms >= 0] if run else []
    if not waits or not run.steady_step_ms:
        return []
    text = f"median {in_ms(median(waits))} in the phase {data} of {in_ms(run.steady_step_ms)}"
    return [Evidence(text, STEPS_FILE)]


def examine_pinned_copies(case: Case) -> Point | list[Evidence]:
    """Bytes of batches from pinned and from pageable memory, as far as the copies' names tell it."""
    one = case.facts.critical
    to_device = _copies(one, re.compile(r"HtoD|HostToDevice", re.IGNORECASE))
    named = [row for row in to_device if re.search("(pageable|pinned) *->", _name(one, row), re.IGNORECASE)]
    if not named:
        if one is None or not one.time.on_gpu:
            return []
        what = f"{len(to_device)} copies that do not say from which memory" if len(to_device) else NO_COPY
        return not_seen(GPU_TRACE, Evidence(f"{what} in {counted(steady_steps(one), 'steady step')}", where(one)))
    pageable = [row for row in named if "ageable" in _name(one, row)]
    num_bytes = one.trace.events.num_bytes.clip(min=1)
    text = (
        f"of {counted(len(named) / steady_steps(one), 'transfer')} per step "
        f"({size(num_bytes[named].sum() / steady_steps(one))}) "
        f"{len(pageable) / steady_steps(one):.3g} ({size(num_bytes[pageable].sum() / steady_steps(one))}) are from "
        "pageable memory"
    )
    seen = Evidence(text, where(one, named[0]))
    if 2 * num_bytes[pageable].sum() > num_bytes[named].sum():
        remedy = "pin host memory (DataLoader(pin_memory=True)) and copy with non_blocking=True"
        return failed(remedy, seen, code="unpinned-copies")
    idle_ms = sum(site.idle_ms for site in one.time.syncs if is_batch_copy(site))
    if share(idle_ms, one) >= MIN_SHARE_SHOWN:
        waited = Evidence(f"the device idles after the host's waits for them {of_step(idle_ms, one)}", where(one))
        return failed("copy with .to(device, non_blocking=True)", seen, waited, code="sync-in-step")
    return [seen]


def examine_number_of_copies(case: Case) -> list[Evidence]:
    one = case.facts.critical
    rows = _copies(one, ACROSS)
    if not len(rows):
        return []
    small = (one.trace.events.num_bytes[rows] <= SMALL_BYTES).sum() / steady_steps(one)
    text = (
        f"per step {counted(len(rows) / steady_steps(one), 'transfer')} between host and device, {small:.3g} of at most "
        f"{size(SMALL_BYTES)}; {MANY} would be many"
    )
    return [Evidence(text, where(one, rows[0]))]


def _copies(one: RankFacts | None, pattern: re.Pattern) -> np.ndarray:
    """Rows of copies of the steady steps; none without a GPU."""
    if one is None or not one.time.on_gpu:
        return np.empty(0, np.int64)
    return rows_named(one, pattern.search, Kind.MEMCPY)


def _name(one: RankFacts, row: int) -> str:
    return one.trace.names[one.trace.events.name[row]]


# --- what the device computes


def examine_role(role: Role, what: str, too_much: float, too_much_on_cpu: float) -> Callable[[Case], list[Evidence]]:
    """An examiner that measures the time of kernels (without a GPU: operators) of one role against its rule's limits."""

    def examine(case: Case) -> list[Evidence]:
        one = case.facts.critical
        if one is None or not one.time.step_ms > 0 or not any(one.kernels.roles.values()):
            return []
        limit = too_much if one.time.on_gpu else too_much_on_cpu
        text = f"{what}: {of_step(one.kernels.roles.get(role, 0.0), one)}; {limit:.0%} would be much"
        return [Evidence(text, where(one))]

    return examine


def examine_tensor_cores(case: Case) -> Point | list[Evidence]:
    """By the kernels' names on a GPU, by shapes elsewhere (matmul-shapes finds those that do not fit)."""
    one = case.facts.critical
    if one is None:
        return []
    if one.time.on_gpu and WITHOUT_TENSOR_CORES.search(one.time.device or ""):
        return not_seen("this GPU has no tensor cores; audit a run on one that has")
    kernels, shapes = one.kernels, [row for row in one.kernels.roofline if row.role is Role.GEMM and row.dims]
    if not one.time.on_gpu or not kernels.matrix_ms:
        text = f"no costly product among {counted(len(shapes), 'shape')} has dimensions that tensor cores do not take"
        return [Evidence(text, where(one))] if shapes else not_seen(SHAPES)
    text = (
        f"tensor cores run {in_ms(kernels.tensor_core_ms)} of {in_ms(kernels.matrix_ms)} of products and attention per "
        f"step; {in_ms(kernels.maybe_tensor_core_ms)} have names that do not say"
    )
    seen = Evidence(text, where(one))
    slow_ms = kernels.matrix_ms - kernels.tensor_core_ms - kernels.maybe_tensor_core_ms
    if share(slow_ms, one) >= MATTERS:
        found = case.found("fp32-products")
        remedy = found[0].advice if found else "make the dimensions of products multiples of 64 (at least 8)"
        return failed(remedy, seen, code=found[0].code if found else "no-tensor-cores")
    if 2 * slow_ms > kernels.matrix_ms:
        return not_seen("a run whose products are in 16 bits, or a larger part of the step", seen)
    return [seen] if kernels.tensor_core_ms >= kernels.maybe_tensor_core_ms or shapes else not_seen(SHAPES, seen)
