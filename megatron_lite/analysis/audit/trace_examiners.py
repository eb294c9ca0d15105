"""What traces say about the questions of the audit that no finding answers."""

import re

import numpy as np

from megatron_lite.analysis.audit.answers import Case, Point, Record, failed, not_seen
from megatron_lite.analysis.findings import kernel_rules
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.host_rules import BETWEEN_STEPS, find_waits
from megatron_lite.analysis.findings.input_rules import ACROSS, MAX_SMALL_COPIES, SMALL_BYTES, is_batch_copy
from megatron_lite.analysis.findings.product_rules import WITHOUT_TENSOR_CORES, is_off
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import measure_ordinary
from megatron_lite.analysis.time.find_phases import TO_DEVICE
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.phases import Phase
from megatron_lite.thresholds import MIN_BEFORE, MIN_STEPS
from megatron_lite.units import counted, significant, size

MAX_UNEXPLAINED = 0.10  # of the step; the profiler alone makes a few percent
MIN_TRACED_STEPS = 2  # a trace's window is short
MAX_SITES, MAX_REASONS = 2, 3  # shown
READS = ("aten::item", "aten::is_nonzero", "aten::equal", "aten::_local_scalar_dense")
# An unfused optimizer's step counters are on the host.
READS_ON_HOST = BETWEEN_STEPS | {Phase.OPTIMIZER_STEP.value}


# --- how the run was timed


def examine_clock(case: Case) -> Point | list[Evidence]:
    """CUDA events of the run, or the device's own times in the trace; on a CPU the host's clock is the device's."""
    run, one, device = case.facts.run, case.facts.critical, case.facts.plan.device
    gpu_ms = measure_ordinary(run, run.gpu_ms) if run else None
    if run is not None and gpu_ms is not None:
        number = (run.ordinary & ~np.isnan(run.gpu_ms)).sum()
        text = f"median {in_ms(gpu_ms)} between CUDA events (gpu_ms) in {counted(number, 'typical step')}"
        return [Evidence(text, STEPS_FILE), _count_steps(run)]
    if one is not None and one.time.on_gpu:
        # The profiler numbers steps from the process's first, 0; without numbers those in the trace count.
        steady = [(at, step) for at, step in enumerate(one.time.steps) if step.steady]
        if not steady or not one.time.step_ms > 0:
            return []
        at, first = steady[0]
        before = at if first.number is None else first.number
        ran = f"{counted(before, 'step')} ran before the first that counts, {first.name}"
        text = f"times from the GPU's clock, {in_ms(one.time.step_ms)} a step; {ran}"
        seen = [Evidence(text, one.where()), *_list_left_out(one)]
        if before > 0:
            return seen
        if first.number is None:
            return not_seen(*seen, record="a window that does not begin with the first step")
        return failed("begin the window later: --profile-step-start 10 --profile-step-end 15", *seen, code="first-step")
    if run is None or not run.ordinary.any() or device not in ("cuda", "cpu"):
        what = "the trace holds no work of a GPU: a CPU's job, or one recorded without CUDA activities"
        return not_seen(*([Evidence(what, one.where())] if one is not None else []))
    if device == "cuda":
        text = "only the host's times of a GPU run: how long launching took, not the work"
        return failed("leave out --no-step-timeline", Evidence(text, STEPS_FILE))
    text = "a CPU run: operators end with their call, so the host's clock is right"
    return [Evidence(text, "run.json"), _count_steps(run)]


def _count_steps(run: Run) -> Evidence:
    """How many steps count, and why the others do not."""
    stalled = (run.evaluating | run.saving).sum()
    left_out = {"profiled": run.profiled.sum(), "compiling": run.compiling.sum(), "evaluating or saving": stalled}
    text = f"{run.ordinary.sum():,} of {run.steps:,} steps count; left out: the first, steps beside a profile"
    return Evidence(text + "".join(f", {number} {what}" for what, number in left_out.items() if number), STEPS_FILE)


def _list_left_out(one: RankFacts) -> list[Evidence]:
    """The trace's steps that do not count."""
    left_out = [f"{step.name} ({step.why_not or 'not steady'})" for step in one.time.steps if not step.steady]
    return [Evidence(f"left out: {', '.join(left_out)}", one.where())] if left_out else []


def examine_steady_state(case: Case) -> Point | list[Evidence]:
    """The step's time without the first step and other disturbed ones."""
    run, one = case.facts.run, case.facts.critical
    number = run.ordinary.sum() if run else 0
    if run and run.steady_step_ms is not None and number >= MIN_STEPS:
        first = f"; the first step took {in_ms(run.first_step_ms)}" if run.first_step_ms else ""
        text = f"median {in_ms(run.steady_step_ms)} of {counted(number, 'typical step')}{first}"
        return [Evidence(text, STEPS_FILE), _count_steps(run)]
    if run and run.steps >= MIN_STEPS and not number:
        return failed(f"{Record.LONGER_RUN}, and a profiled window that leaves steps outside it", _count_steps(run))
    if one is None:
        return []
    steady = sum(step.steady for step in one.time.steps)
    text = f"mean {in_ms(one.time.step_ms)} of {counted(steady, 'steady step')} of {len(one.time.steps)} in the trace"
    seen = [Evidence(text, one.where()), *_list_left_out(one)]
    return seen if steady >= MIN_TRACED_STEPS else not_seen(*seen)


def examine_profile(case: Case, one: RankFacts) -> Point | list[Evidence]:
    """Does the trace say where to go, and is it true of the run without a profiler?"""
    run = case.facts.run
    if not one.time.step_ms > 0:
        return []
    unexplained = one.time.rows.get("unexplained", 0.0)
    if one.share(unexplained) > MAX_UNEXPLAINED:
        text = f"unexplained: {one.of_step(unexplained)}"
        return not_seen(
            Evidence(text, one.where()), record=f"{Record.TRACE}, with --pytorch-profiler-collect-callstack"
        )
    costly = next((found for found in case.findings if found.cost_ms), None)
    if costly and costly.cost_ms:
        text = f"where to begin: {costly.code}, {one.of_step(costly.cost_ms)}"
    else:
        largest = max(one.time.rows, key=lambda row: one.time.rows[row], default="compute")
        part = f"{ROW_TITLES.get(largest, largest)}, {one.of_step(one.time.rows.get(largest, 0.0))}"
        text = f"no cause of lost time was found; the largest part is {part}"
    seen = [Evidence(text, one.where()), *_list_left_out(one)]
    if run is None or run.profiler_slowdown is None:
        window = f"with --profile-step-start {MIN_BEFORE + 3} --profile-step-end {MIN_BEFORE + 8}"
        return not_seen(*seen, record=f"how far the profiler slows the step down: {Record.RUN_FOLDER}, {window}")
    text = f"profiled steps take{run.on_rank} {run.profiler_slowdown:.2f} x as long as those before it"
    return [*seen, Evidence(text, STEPS_FILE)]


# --- what the host does


def examine_synchronization(case: Case, one: RankFacts) -> list[Evidence]:
    """Waits for the device inside steps: the rule measures them. On a CPU nothing runs ahead of Python, and no read waits."""
    if not len(one.trace.rows[Kind.RUNTIME if one.time.on_gpu else Kind.OP]):
        return []
    if not one.time.on_gpu:
        rows = one.rows_named(READS.__contains__, Kind.OP)
        rows = rows[one.placing.operator[rows] < 0]  # inside another operator it is that one's affair
        phases = [*one.placing.phases, ""]
        number = sum(phases[one.placing.phase[row]] not in READS_ON_HOST for row in rows) / one.steady_steps
        text = (
            f"no GPU in the trace, so reading a value never waits; {significant(number)} values read into Python per step, each of which "
            "would wait for a GPU; log, eval, save and the optimizer's step counters left out"
        )
        return [Evidence(text, one.where())]
    sites = find_waits(one)
    waits = f"{significant(sum(site.per_step for site in sites))} synchronizations per step"
    idle = one.of_step(sum(site.idle_ms for site in sites))
    text = (
        f"{waits} in {counted(one.steady_steps, 'steady step')}; the device idles after them {idle}, "
        f"{MIN_SHARE_SHOWN:.0%} would be much"
    )
    seen = [Evidence(text, one.where())]
    for site in sites[:MAX_SITES]:
        what = f"{site.operator or site.call} in {site.phase or 'no phase'}"
        seen.append(Evidence(f"{what}: {significant(site.per_step)} per step", site.frame))
    return seen


def examine_loader(case: Case) -> list[Evidence]:
    """Does the device, or without a trace the step, wait for the loader?"""
    data, run = Phase.DATA.value, case.facts.run
    seen = [
        one
        for one in case.facts.ranks_seen
        if one.time.step_ms > 0 and (one.time.loader_host_ms > 0 or any(part.name == data for part in one.time.phases))
    ]
    if seen:
        one = max(seen, key=lambda one: one.time.rows.get("data_wait", 0.0))
        waits = one.of_step(one.time.rows.get("data_wait", 0.0))
        text = f"waiting for the data loader: {waits}; {in_ms(one.time.loader_host_ms)} of it in the loader, whether or not overlapped"
        return [Evidence(f"{text}; {MATTERS:.0%} would be much", one.where())]
    wait_ms = measure_ordinary(run, run.phases_ms.get(data, ())) if run else None
    if run is None or wait_ms is None or not run.steady_step_ms:
        return []
    return [Evidence(f"median {in_ms(wait_ms)} in the phase {data} of {in_ms(run.steady_step_ms)}", STEPS_FILE)]


def examine_pinned_copies(case: Case, one: RankFacts) -> Point | list[Evidence]:
    """Bytes of batches from pinned and from pageable memory, as far as the copies' names tell it."""
    to_device = one.rows_named(TO_DEVICE.search, Kind.MEMCPY)
    names = {row: one.trace.name_of(row) for row in to_device.tolist()}
    named = [row for row, name in names.items() if re.search("(pageable|pinned) *->", name, re.IGNORECASE)]
    if not named:
        return _miss_copies(one, len(to_device))
    pageable = [row for row in named if "ageable" in names[row]]
    steps, num_bytes = one.steady_steps, one.trace.events.num_bytes.clip(min=0)
    total, slow = num_bytes[named].sum(), num_bytes[pageable].sum()
    text = (
        f"per step {counted((len(named) - len(pageable)) / steps, 'transfer')} ({size((total - slow) / steps)}) from "
        f"pinned memory, {significant(len(pageable) / steps)} ({size(slow / steps)}) from pageable memory"
    )
    seen = Evidence(text, one.where(named[0]))
    if 2 * slow > total or not total and 2 * len(pageable) > len(named):
        remedy = "pin host memory (DataLoader(pin_memory=True)) and copy with non_blocking=True"
        return failed(remedy, seen, code="unpinned-copies")
    waits = [site for site in one.time.syncs if is_batch_copy(site)]
    number, idle_ms = sum(site.per_step for site in waits), sum(site.idle_ms for site in waits)
    idle = f"after which the device idles {one.of_step(idle_ms)}"
    waited = Evidence(f"{counted(number, 'wait')} of the host for them per step, {idle}", one.where())
    if one.share(idle_ms) >= MIN_SHARE_SHOWN:
        return failed("copy with .to(device, non_blocking=True)", seen, waited, code="sync-in-step")
    return [seen, waited]


def examine_number_of_copies(case: Case, one: RankFacts) -> Point | list[Evidence]:
    rows = one.rows_named(ACROSS.search, Kind.MEMCPY)
    rows = rows[one.trace.events.num_bytes[rows] >= 0]  # -1: the trace does not say
    if not len(rows):
        return _miss_copies(one)
    small = one.per_step(rows[one.trace.events.num_bytes[rows] <= SMALL_BYTES])
    text = (
        f"per step {counted(one.per_step(rows), 'transfer')} between host and device, {significant(small)} of at most "
        f"{size(SMALL_BYTES)}; {MAX_SMALL_COPIES} would be many"
    )
    return [Evidence(text, one.where(rows[0]))]


def _miss_copies(one: RankFacts, unnamed: int = 0) -> Point:
    """Why the trace says nothing about copies. `unnamed`: copies whose names do not tell the memory."""
    if not one.time.on_gpu:
        return not_seen(Evidence("no GPU, so nothing is copied to one", one.where()))
    what = (
        f"the events do not say from which memory, {counted(unnamed, 'copy')}" if unnamed else "no copy from the host"
    )
    return not_seen(Evidence(f"{what} in {counted(one.steady_steps, 'steady step')}", one.where()))


# --- what the device computes


def examine_layout(case: Case, one: RankFacts) -> list[Evidence]:
    """Copies, casts and .contiguous() against the step."""
    if not _has_work(one):
        return []
    ms = one.of_step(one.kernels.roles.get(Role.CAST_COPY, 0.0))
    limit = kernel_rules.MAX_COPY_SHARE if one.time.on_gpu else kernel_rules.MAX_COPY_SHARE_ON_CPU
    return [Evidence(f"copying, casting and reordering tensors: {ms}; {limit:.0%} would be much", one.where())]


def examine_fusion(case: Case, one: RankFacts) -> Point | list[Evidence]:
    """Elementwise operators against the step, compiled or not."""
    limit = kernel_rules.MAX_ELEMENTWISE_SHARE
    if not _has_work(one):
        return []
    ms = one.kernels.roles.get(Role.ELEMENTWISE, 0.0)
    text = f"elementwise operators take {one.of_step(ms)}; {limit:.0%} would be much"
    if one.time.on_gpu:
        text += f"; {counted(round(one.time.launches), 'kernel')} per step, the median one of {one.time.median_kernel_us:.1f} us"
    seen = Evidence(text, one.where())
    if one.share(ms) >= limit:
        return failed("compile the layers: --torch-compile", seen, code="unfused-elementwise")
    return [seen]


def _has_work(one: RankFacts) -> bool:
    return one.time.step_ms > 0 and any(one.kernels.roles.values())


def examine_tensor_cores(case: Case, one: RankFacts) -> Point | list[Evidence]:
    """By the kernels' names on a GPU, by shapes elsewhere."""
    if one.time.on_gpu and WITHOUT_TENSOR_CORES.search(one.time.device or ""):
        return not_seen(record="this GPU has no tensor cores; audit a run on one that has")
    kernels, shapes = one.kernels, _describe_shapes(one)
    if not one.time.on_gpu or not kernels.matrix_ms:
        return shapes or not_seen(record=Record.SHAPES)
    text = (
        f"tensor cores run {in_ms(kernels.tensor_core_ms)} of {in_ms(kernels.matrix_ms)} of products and attention per "
        f"step; {in_ms(kernels.maybe_tensor_core_ms)} are unknown from their names"
    )
    seen = Evidence(text, one.where())
    slow_ms = kernels.matrix_ms - kernels.tensor_core_ms - kernels.maybe_tensor_core_ms
    if one.share(slow_ms) >= MATTERS:
        found = case.found("fp32-products")
        remedy = found[0].advice if found else "make the dimensions of products multiples of 64 (at least 8)"
        reasons = list(kernels.without_tensor_cores.items())[:MAX_REASONS]
        why = [Evidence(f"{reason}: {one.of_step(ms)}") for reason, ms in reasons]
        return failed(remedy, seen, *why, *shapes, code=found[0].code if found else "no-tensor-cores")
    if 2 * slow_ms > kernels.matrix_ms:
        return not_seen(seen, *shapes, record="a run whose products are in 16 bits, or a larger part of the step")
    if kernels.tensor_core_ms >= kernels.maybe_tensor_core_ms or shapes:
        return [seen, *shapes]
    return not_seen(seen, record=Record.SHAPES)


def _describe_shapes(one: RankFacts) -> list[Evidence]:
    """Whether dimensions of products fit the tiles; [] without shapes."""
    rows = [row for row in one.kernels.roofline if row.role is Role.GEMM and row.dims]
    odd = [row for row in rows if any(map(is_off, row.dims))]
    text = f"all dimensions of {counted(len(rows), 'shape')} of products are multiples of 64 (small ones of 8)"
    if odd:
        time = one.of_step(sum(row.ms for row in odd))
        text = f"{len(odd)} of {len(rows)} shapes of products have other dimensions than multiples of 64: {time}"
    return [Evidence(text, one.where())] if rows else []
