"""Waiting for data, and its way to the device."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_lite.analysis.findings.base import (
    MAX_SHOWN,
    Edit,
    Evidence,
    Finding,
    Observation,
    Recording,
    Remedy,
    build_time_finding,
    could_not_look,
    find_lost_time,
    rule,
    saw,
    saw_wrong,
    tell_more,
)
from megatron_lite.analysis.findings.saved_states import find_saving_copies
from megatron_lite.analysis.findings.sync_edits import drop_sites
from megatron_lite.analysis.graph.edits.loader import speed_up_loader, use_workers
from megatron_lite.analysis.graph.host_lanes import FROM_WORKERS
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, EventPlace, RankFacts, in_ms
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, measure_ordinary
from megatron_lite.analysis.time.find_phases import TO_DEVICE as TO_GPU
from megatron_lite.analysis.time.time_results import SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.analysis.trace.kineto_kinds import COPY
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.phases import Phase
from megatron_lite.units import counted, significant, size

DATA = Phase.DATA.value


@dataclass(frozen=True)
class LoaderWait:
    """Waiting for the data loader, of the rank that waits most."""

    ms: float  # per step
    busy_ms: float  # the rest of the step
    loading_ms: float | None  # host time in the loader, hidden or not
    text: str
    where: EventPlace | str
    rank: int | None
    loaders: tuple[str, ...] = ()  # by name: "NVIDIA DALI"


def measure_loader_wait(facts: Facts) -> LoaderWait | None:
    """Measure the wait for the data loader, in traces or else by the run's own times.

    The result is None where it does not matter or is unknown.
    """
    if facts.ranks_seen:
        return _measure_traced_wait(facts.ranks_seen)
    return _measure_recorded_wait(facts.run) if facts.run is not None else None


def _measure_traced_wait(ranks: Sequence[RankFacts]) -> LoaderWait | None:
    """Measure the wait of the rank that waits most in its trace; None where it does not matter."""
    one = max(ranks, key=_get_data_wait)
    wait_ms = _get_data_wait(one)
    if one.share(wait_ms) < MATTERS:
        return None
    what = "the device" if one.time.on_gpu else "the step"
    return LoaderWait(
        ms=wait_ms,
        busy_ms=one.time.step_ms - wait_ms,
        loading_ms=one.time.loader_host_ms or None,
        text=f"{what} waits for the data loader {one.of_step(wait_ms)}",
        where=one.where(),
        rank=one.time.rank,
        loaders=tuple(work.what for work in one.time.named if work.cause == "data_wait"),
    )


def _get_data_wait(one: RankFacts) -> float:
    """Waiting for the data loader in a rank's trace, ms per step."""
    return one.time.rows.get("data_wait", 0.0)


def _measure_recorded_wait(run: Run) -> LoaderWait | None:
    """Measure the wait of the slowest rank, or of the one that writes; None where it does not matter."""
    step_ms = run.steady_step_ms
    if not step_ms:
        return None
    waits = run.ranks.phases_ms.get(DATA, ()) if run.ranks else ()
    known = [(ms, rank) for rank, ms in enumerate(waits) if not math.isnan(ms)]
    longest_ms, rank = max(known, default=(0.0, None))
    own_ms = measure_ordinary(run, run.phases_ms.get(DATA, ())) or 0.0
    if longest_ms >= MATTERS * step_ms:
        return _build_recorded_wait(longest_ms, step_ms, rank)
    if own_ms >= MATTERS * step_ms:
        return _build_recorded_wait(own_ms, step_ms, None)
    return None


def _build_recorded_wait(wait_ms: float, step_ms: float, rank: int | None) -> LoaderWait:
    """Describe a wait that a run's own record tells.

    Args:
        wait_ms: Median of the phase that loads, ms.
        step_ms: Median step, ms.
        rank: The rank; None for the one that writes the record.
    """
    of_step = f"{in_ms(wait_ms)} of a step of {in_ms(step_ms)}"
    return LoaderWait(
        ms=wait_ms,
        busy_ms=step_ms - wait_ms,
        loading_ms=None,
        text=f"{of_step} is spent in the phase {DATA} (median of typical steps)",
        where=STEPS_FILE if rank is None else f"rank {rank}, {STEPS_FILE}",
        rank=rank,
    )


@rule("starved-loader", "waiting for the data loader", "step", "phases", "ranks", record=Recording.LOADER)
def find_starved_loader(facts: Facts) -> Finding | Observation:
    """Training waits for the data loader.

    Meaning: the next batch was not ready when the step wanted it: loading takes longer than computing, or is not done
        ahead.
    Measured: the device's idle time while the host was in the data loader; without a trace the host's time in the phase
        "data", of the rank that waits most. Loading that overlaps with compute does not count.
    Cost: a step cannot be shorter than loading one batch divided by the number of workers.
    Do: load ahead with more workers; if all cores are busy, do less per batch: tokenize before training, larger reads,
        a local disk, fewer small tensors in the collate function.
    Flags: --num-workers N (0 loads in the training process, without overlap). megatron-lite preprocess writes
        .bin/.idx files once, so that loading is only reading.
    False alarm: the first steps of a run, while workers start; they are left out of the figures. Other jobs that take
        the loader's cores: likely at most, where what the rank got of them was not recorded.
    """
    wait = measure_loader_wait(facts)
    if wait is None or are_too_many(facts):
        return _look_at_loader(facts)
    seen = [Evidence(wait.text, wait.where)]
    if wait.loading_ms is not None:
        by = f" ({', '.join(wait.loaders)})" if wait.loaders else ""
        text = f"the host spends {in_ms(wait.loading_ms)} per step in the data loader{by}"
        seen.append(Evidence(f"{text}, whether or not the device is busy meanwhile"))
    doubt = facts.doubt_cores([wait.rank])
    if doubt:
        seen.append(Evidence(doubt))
    remedy = _advise_workers(facts, wait)
    return build_time_finding(
        wait.ms,
        seen,
        remedy.advice,
        remedy.flags,
        certain=not doubt,
        rank=wait.rank,
        edit=remedy.edit,
    )


def _look_at_loader(facts: Facts) -> Observation:
    """Tell how long the device, or without a trace the step, waits for the loader; it must be known to be one."""
    traced = [one for one in facts.ranks_seen if one.time.step_ms > 0 and _shows_loader(one)]
    if traced:
        one = max(traced, key=_get_data_wait)
        waits = one.of_step(_get_data_wait(one))
        inside = f"{in_ms(one.time.loader_host_ms)} of it in the loader, whether or not overlapped"
        text = f"waiting for the data loader: {waits}; {inside}; {MATTERS:.0%} would be much"
        return saw(Evidence(text, one.where()))
    run = facts.run
    wait_ms = measure_ordinary(run, run.phases_ms.get(DATA, ())) if run else None
    if run is None or wait_ms is None or not run.steady_step_ms:
        return could_not_look()
    text = f"median {in_ms(wait_ms)} in the phase {DATA} of {in_ms(run.steady_step_ms)}"
    return saw(Evidence(text, STEPS_FILE))


def _shows_loader(one: RankFacts) -> bool:
    """Whether a trace names the loader or a range around it."""
    has_phase = any(part.name == DATA for part in one.time.phases)
    return has_phase or one.time.loader_host_ms > 0


LESS_PER_BATCH = "do less per batch: tokenize before training, larger reads, a local disk"
HALF_PER_BATCH = Edit("make batches twice as fast", partial(speed_up_loader, factor=2.0))


def _advise_workers(facts: Facts, wait: LoaderWait) -> Remedy:
    """Advise as many workers as keep up with the step, and no more than the machine has cores for."""
    workers = facts.loader_workers
    wanted = 2
    if wait.loading_ms and wait.busy_ms:
        # loading time over computing time says how many keep up
        wanted = max(wanted, math.ceil(wait.loading_ms / wait.busy_ms))
    if workers is None:
        edit = HALF_PER_BATCH if _has_workers(facts) else _load_with(wanted)
        return Remedy("load ahead with more worker processes", ("--num-workers N",), edit)
    if workers > 0:
        wanted = 2 * workers
    cores = facts.hardware.cpus
    ranks = facts.local_ranks
    most = max(1, cores // ranks) if cores and ranks else wanted
    if workers >= most:
        advice = f"{LESS_PER_BATCH}; {counted(workers, 'worker')} per rank take all cores already"
        return Remedy(advice, edit=HALF_PER_BATCH)
    chosen = min(wanted, most)
    edit = _load_with(chosen)
    if workers > 0:
        edit = Edit(edit.change, partial(speed_up_loader, factor=chosen / workers))
    flag = f"--num-workers {chosen}"
    more = f"; {LESS_PER_BATCH}" if wanted > most else ""
    return Remedy(f"load ahead with more workers: {flag} (now {workers}){more}", (flag,), edit)


def _has_workers(facts: Facts) -> bool:
    """Whether a trace names a loader with workers of its own, however many they are."""
    return any(FROM_WORKERS.match(name) for trace in facts.traces for name in trace.names)


def _load_with(workers: int) -> Edit:
    """Build the edit of workers that make the batches of a main thread which makes them itself."""
    return Edit(f"load with {counted(workers, 'worker')}", partial(use_workers, workers=workers))


@rule("too-many-workers", "more loader workers than cores", "ranks", "run")
def find_too_many_workers(facts: Facts) -> Finding | Observation:
    """More loader workers than cores, and training still waits for data.

    Meaning: worker processes take the cores from each other and from the training process: switching between them,
        copies of the data set in memory and a disk that seeks cost more than they bring.
    Measured: --num-workers times the ranks of this machine against the cores that a rank may use, and the wait for the
        loader (as in starved-loader) that is left in spite of them.
    Cost: the wait; run with fewer workers to see how much they save. More workers are not always faster.
    Do: halve the number of workers until the wait grows; do less work per batch (tokenize before training).
    Flags: --num-workers N with N x ranks below the number of cores.
    False alarm: workers that mostly wait for a slow network disk may well outnumber the cores.
    """
    workers = facts.loader_workers
    ranks = facts.local_ranks
    cores = facts.hardware.cpus
    if workers is None or not ranks or not cores:
        return could_not_look(record=Recording.RUN_FOLDER)
    text = f"{counted(workers, 'worker')} x {counted(ranks, 'rank')} of this machine on {counted(cores, 'core')}"
    counts = Evidence(text, RUN_FILE)
    wait = measure_loader_wait(facts)
    if wait is None or not are_too_many(facts):
        return saw(counts)
    flag = f"--num-workers {max(1, cores // (2 * ranks))}"
    seen = (Evidence(wait.text, wait.where), counts)
    advice = f"fewer workers than cores: {flag} (now {workers}), and less work per batch"
    return build_time_finding(wait.ms, seen, advice, (flag,), certain=False, rank=wait.rank)


def are_too_many(facts: Facts) -> bool:
    """Whether this machine has more loader workers than cores; False where either is unknown.

    A single worker is never too many.
    """
    workers = facts.loader_workers
    ranks = facts.local_ranks
    cores = facts.hardware.cpus
    if not workers or not ranks or not cores:
        return False
    return workers > 1 and workers * ranks > cores


COPIES = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::cuda", "")
TO_DEVICE = (Phase.DATA.value, Phase.DATA_TO_DEVICE.value)
PAGEABLE = re.compile(r"(HtoD|HostToDevice|Host2Device).*Pageable|Pageable -> Device", re.IGNORECASE)
PINNED_OR_NOT = re.compile(r"(pageable|pinned) *->", re.IGNORECASE)


@rule("unpinned-copies", "copies from pageable memory", "step", "kernels", needs="trace", record=Recording.GPU_TRACE)
def find_unpinned_copies(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Batches are copied to the device from pageable memory.

    Meaning: the source of the copy is ordinary memory. The driver first copies it into a page-locked buffer of its own,
        and the host waits: non_blocking=True has no effect on such a copy.
    Measured: host-to-device copies whose name says Pageable, in steady steps; cost is their time on the device that no
        kernel overlaps, and the idle time after the host's wait.
    Cost: the copy cannot overlap with computing, and the host cannot launch ahead while it waits.
    Do: DataLoader(pin_memory=True) and .to(device, non_blocking=True); keep batches plain tensors, which can be pinned.
    Flags: this trainer pins by itself on a GPU. With --dataloader-type external, yield arrays and let the trainer pin
        them.
    False alarm: copies of a few bytes at a step's end, which cost less than pinning them.
    """
    if not one.time.on_gpu:
        return _look_without_gpu(one)
    rows = pageable_rows(one)
    if not len(rows):
        return _look_at_batch_copies(one)
    exposed_ms = one.exposed_ms(rows)
    stalls = [site for site in one.time.syncs if is_batch_copy(site)]
    stalled_ms = sum(site.idle_ms for site in stalls)
    cost = exposed_ms + stalled_ms
    num_bytes = one.trace.events.num_bytes[rows]
    mean_bytes = float(num_bytes.clip(min=0).mean())
    text = (
        f"{significant(one.per_step(rows))} unpinned per step, of {size(mean_bytes)} on average: "
        f"{in_ms(exposed_ms)} on the device not overlapped with compute, "
        f"{in_ms(stalled_ms)} idle after the host's wait; {one.of_step(cost)}"
    )
    advice = "pin host memory (DataLoader(pin_memory=True)) and copy with .to(device, non_blocking=True)"
    # how long copies from pinned memory take is not known
    is_of_waits = stalled_ms > exposed_ms or one.share(exposed_ms) < MATTERS
    edit = drop_sites(facts, "copy batches without waiting", stalls) if stalls and is_of_waits else None
    found = find_lost_time(one, cost, text, advice, row=rows[0], cheap=True, edit=edit)
    return found if isinstance(found, Finding) else _look_at_batch_copies(one)


def _look_at_batch_copies(one: RankFacts) -> Observation:
    """Tell bytes of batches from pinned and from pageable memory, as far as the copies' names tell them apart."""
    to_device = one.rows_named(TO_GPU.search, Kind.MEMCPY)
    names = {row: one.trace.name_of(row) for row in to_device.tolist()}
    named = [row for row, name in names.items() if PINNED_OR_NOT.search(name)]
    if not named:
        steady = counted(one.steady_steps, "steady step")
        text = _describe_no_copies(one)
        if len(to_device):
            text = f"the events do not say from which memory, {counted(len(to_device), 'copy')} in {steady}"
        return could_not_look(Evidence(text, one.where()))
    pageable = [row for row in named if "ageable" in names[row]]
    num_bytes = one.trace.events.num_bytes.clip(min=0)
    all_bytes = num_bytes[named].sum()
    pageable_bytes = num_bytes[pageable].sum()
    steps = one.steady_steps
    from_pinned = counted((len(named) - len(pageable)) / steps, "transfer")
    from_pageable = significant(len(pageable) / steps)
    text = (
        f"per step {from_pinned} ({size((all_bytes - pageable_bytes) / steps)}) from pinned memory, "
        f"{from_pageable} ({size(pageable_bytes / steps)}) from pageable memory"
    )
    seen = Evidence(text, one.where(named[0]))
    # without sizes the number of copies decides
    is_slow = 2 * len(pageable) > len(named)
    if all_bytes:
        is_slow = 2 * pageable_bytes > all_bytes
    if is_slow:
        remedy = "pin host memory (DataLoader(pin_memory=True)) and copy with non_blocking=True"
        return saw_wrong(remedy, seen, code="unpinned-copies")
    return _look_at_batch_waits(one, seen)


def _look_at_batch_waits(one: RankFacts, seen: Evidence) -> Observation:
    """Tell how long the host waits for copies of batches. seen: what memory they come from."""
    waits = [site for site in one.time.syncs if is_batch_copy(site)]
    number = sum(site.per_step for site in waits)
    idle_ms = sum(site.idle_ms for site in waits)
    idle = f"after which the device idles {one.of_step(idle_ms)}"
    waited = Evidence(f"{counted(number, 'wait')} of the host for them per step, {idle}", one.where())
    if one.share(idle_ms) >= MIN_SHARE_SHOWN:
        return saw_wrong("copy with .to(device, non_blocking=True)", seen, waited, code="sync-in-step")
    return saw(seen, waited)


def _describe_no_copies(one: RankFacts) -> str:
    """Say that no copy from the host is known; Perfetto's packets of torch do not say where copies go."""
    steady = counted(one.steady_steps, "steady step")
    vague = one.rows_named(lambda name: name == COPY, Kind.MEMCPY)
    if len(vague):
        return f"{counted(len(vague), 'copy')} in {steady}, whose direction the trace does not say"
    return f"no copy from the host in {steady}"


def _look_without_gpu(one: RankFacts) -> Observation:
    """Say that a trace without a GPU shows no copies to one."""
    return could_not_look(Evidence("no GPU, so nothing is copied to one", one.where()))


def pageable_rows(one: RankFacts) -> Integers:
    """Rows of the copies from pageable host memory, in steady steps."""
    return one.rows_named(PAGEABLE.search, Kind.MEMCPY)


def is_batch_copy(site: SyncSite) -> bool:
    """Whether the host waits there for a copy from pageable memory. Only meant for a trace that has such copies."""
    if site.operator not in COPIES:
        return False
    return "ageable" in site.call or site.phase in TO_DEVICE


SMALL_COPY_BYTES = 64 * 2**10  # about 2.6 us at 25 GB/s of PCIe 4.0 x16: less than the call takes
MAX_SMALL_COPIES = 32  # per step: a batch's few fields and a logged value are far fewer
ACROSS = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost", re.IGNORECASE)


@rule("small-copies", "many small copies", "step", "kernels", needs="trace", record=Recording.GPU_TRACE)
def find_small_copies(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Many small copies between host and device.

    Meaning: a batch travels as dozens of little tensors, or values are fetched one by one. Each copy is a driver call
        of microseconds, whatever its size.
    Measured: copies to and from the device of at most 64 KiB in steady steps; cost is the host's time inside their
        calls.
    Cost: while the host is inside the calls it launches no kernels. 64 KiB take under 3 us on the bus, less than the
        call.
    Do: put the fields of a batch into one tensor and split it on the device; gather values on the device and fetch them
        together, seldom.
    Flags: --log-interval 100 for values that are only printed.
    False alarm: copies in a process or stream that has nothing else to launch: then the host's time is free.
    """
    if not one.time.on_gpu:
        return _look_without_gpu(one)
    num_bytes = one.trace.events.num_bytes
    copies = one.rows_named(ACROSS.search, Kind.MEMCPY)
    # -1: the trace does not say
    copies = copies[num_bytes[copies] >= 0]
    if not len(copies):
        return could_not_look(Evidence(_describe_no_copies(one), one.where()))
    small = copies[num_bytes[copies] <= SMALL_COPY_BYTES]
    transfers = counted(one.per_step(copies), "transfer")
    of_these = f"{significant(one.per_step(small))} of at most {size(SMALL_COPY_BYTES)}"
    seen = f"per step {transfers} between host and device, {of_these}; {MAX_SMALL_COPIES} would be many"
    look = saw(Evidence(seen, one.where(copies[0])))
    if one.per_step(small) < MAX_SMALL_COPIES:
        return look
    calls = one.trace.launch_of[small]
    cost = one.per_step_ms(calls[calls >= 0])
    median_bytes = float(np.median(num_bytes[small]))
    text = (
        f"{one.per_step(small):,.0f} copies per step, the median one of {size(median_bytes)}; "
        f"their calls take the host {one.of_step(cost)}"
    )
    advice = "copy one tensor per batch and split it on the device; fetch values together and seldom"
    flags = ("--log-interval 100",)
    found = find_lost_time(
        one,
        cost,
        text,
        advice,
        row=small[0],
        flags=flags,
        certain=False,
        cheap=True,
    )
    return tell_more(found, look)


BETWEEN_GPUS = re.compile(r"PtoP|Peer ?To ?Peer", re.IGNORECASE)
FROM_DEVICE = re.compile(r"DtoH|DeviceToHost|Device2Host", re.IGNORECASE)
WITHIN_DEVICE = re.compile(r"DtoD|DeviceToDevice|Device2Device|Memset", re.IGNORECASE)


@rule("exposed-copies", "copies not overlapped with compute", "step", needs="gpu")
def find_exposed_copies(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Copies between host and device are not overlapped with compute.

    Meaning: the device does nothing but copy: batches, offloaded optimizer state or activations, values for the log.
    Measured: time of copies and memsets while no kernel runs, per steady step, by name. Copies from pageable memory are
        counted in unpinned-copies instead, those of saving and evaluating in save-in-step. It is likely only where
        copies go to the host alone and no stacks say what for: a checkpoint is copied like that, too.
    Cost: all of that time: a copy engine runs in parallel with kernels if it has its own stream and pinned memory.
    Do: prefetch the next batch on a side stream; overlap offloading with the layers before and after; keep outputs on
        the device; DistributedDataParallel instead of nn.DataParallel, which copies weights from GPU to GPU.
    Flags: none here: this trainer copies batches on a side stream by itself.
    False alarm: copies within the device at a step's end, if they are part of the algorithm.
    """
    copies = one.rows_named(lambda name: True, Kind.MEMCPY, Kind.MEMSET)
    told = np.union1d(pageable_rows(one), find_saving_copies(one))
    rows = np.setdiff1d(copies, told)
    names = one.trace.events.name[rows]
    groups = [rows[names == name] for name in np.unique(names)]
    groups.sort(key=lambda group: -one.per_step_ms(group))
    shown = []
    for group in groups[:MAX_SHOWN]:
        first = group[0]
        times = f"{significant(one.per_step(group))} per step, {in_ms(one.per_step_ms(group))}"
        shown.append(Evidence(f"{one.trace.name_of(first)}: {times}", one.where(first)))
    cost = one.exposed_ms(rows)
    text = f"the device only copies for {one.of_step(cost)}"
    most = one.trace.name_of(groups[0][0]) if groups else ""
    is_known = one.trace.with_stack or not _go_to_host_only(one, rows)
    return find_lost_time(one, cost, text, _advise_copies(one, most), *shown, certain=is_known)


MOST_FETCHED = 0.9  # of the time that copies take


def _go_to_host_only(one: RankFacts, rows: Integers) -> bool:
    """Tell whether nearly all of the copies' time goes from the device to the host, and nothing as large comes back."""
    names = [one.trace.name_of(row) for row in rows.tolist()]
    is_fetch = np.array([FROM_DEVICE.search(name) is not None for name in names], bool)
    return one.covered_ms(rows[is_fetch]) > MOST_FETCHED * one.covered_ms(rows)


DATA_PARALLEL = "DataParallel.forward"  # the range that torch.nn.DataParallel writes


def _advise_copies(one: RankFacts, name: str) -> str:
    """Choose what to do about the copies that take most, by where they go. name: that of the copies."""
    if BETWEEN_GPUS.search(name):
        if DATA_PARALLEL in one.trace.names:
            return (
                "torch.nn.DataParallel copies all weights to each GPU in each forward pass: "
                "use DistributedDataParallel, a process per GPU"
            )
        return "place what works together on one GPU, or copy between GPUs on a separate stream, ahead of the kernels"
    if FROM_DEVICE.search(name):
        return (
            "keep results on the device and fetch only what is needed (metrics, not outputs, rarely a checkpoint); "
            "copy into pinned memory with non_blocking=True"
        )
    if WITHIN_DEVICE.search(name):
        return "avoid copies within the device: write into the place where the result is needed"
    return "copy from pinned memory on a separate stream, ahead of the kernels that need it"
