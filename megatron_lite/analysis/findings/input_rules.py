"""Waiting for data, and its way to the device."""

import math
import re
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    Recording,
    build_time_finding,
    could_not_look,
    find_lost_time,
    rule,
    saw,
    saw_wrong,
    tell_more,
)
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.rank_facts import MATTERS, MIN_SHARE_SHOWN, RankFacts, in_ms
from megatron_lite.analysis.run_facts import Facts, measure_ordinary
from megatron_lite.analysis.time.find_phases import TO_DEVICE as TO_GPU
from megatron_lite.analysis.time.time_results import SyncSite
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.phases import Phase
from megatron_lite.units import counted, significant, size

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
    loaders: tuple[str, ...] = ()  # by name: "NVIDIA DALI"


def measure_loader_wait(facts: Facts) -> LoaderWait | None:
    """None where it does not matter or is unknown."""
    run = facts.run
    if facts.ranks_seen:
        one = max(facts.ranks_seen, key=lambda seen: seen.time.rows.get("data_wait", 0.0))
        ms = one.time.rows.get("data_wait", 0.0)
        if one.share(ms) < MATTERS:
            return None
        text = f"{'the device' if one.time.on_gpu else 'the step'} waits for the data loader {one.of_step(ms)}"
        loading_ms = one.time.loader_host_ms or None
        loaders = tuple(work.what for work in one.time.named if work.cause == "data_wait")
        return LoaderWait(ms, one.time.step_ms - ms, loading_ms, text, one.where(), one.time.rank, loaders)
    if run is None or not run.steady_step_ms:
        return None
    waits = run.ranks.phases_ms.get(DATA, ()) if run.ranks else ()
    known = [(ms, rank) for rank, ms in enumerate(waits) if not math.isnan(ms)]
    seen: list[tuple[float | None, int | None]] = [max(known)] if known else []
    seen.append((measure_ordinary(run, run.phases_ms.get(DATA, ())), None))
    wait_ms, rank = next((one for one in seen if (one[0] or 0.0) >= MATTERS * run.steady_step_ms), (None, None))
    if wait_ms is None:
        return None
    text = (
        f"{in_ms(wait_ms)} of a step of {in_ms(run.steady_step_ms)} is spent in the phase {DATA} (median of "
        "typical steps)"
    )
    place = "steps.jsonl" if rank is None else f"rank {rank}, steps.jsonl"
    return LoaderWait(wait_ms, run.steady_step_ms - wait_ms, None, text, place, rank)


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
    wait, workers = measure_loader_wait(facts), facts.loader_workers
    if wait is None or are_too_many(facts):
        return _look_at_loader(facts)
    advice, flags = _advise_workers(facts, wait, workers)
    seen = [Evidence(wait.text, wait.where)]
    if wait.loading_ms is not None:
        by = f" ({', '.join(wait.loaders)})" if wait.loaders else ""
        text = f"the host spends {in_ms(wait.loading_ms)} per step in the data loader{by}"
        seen.append(Evidence(f"{text}, whether or not the device is busy meanwhile"))
    doubt = facts.doubt_cores([wait.rank])
    seen += [Evidence(doubt)] if doubt else []
    return build_time_finding(wait.ms, seen, advice, flags, not doubt, wait.rank)


def _look_at_loader(facts: Facts) -> Observation:
    """Tell how long the device, or without a trace the step, waits for the loader; it must be known to be one."""
    run = facts.run
    traced = [one for one in facts.ranks_seen if one.time.step_ms > 0 and _shows_loader(one)]
    if traced:
        one = max(traced, key=lambda seen: seen.time.rows.get("data_wait", 0.0))
        waits = one.of_step(one.time.rows.get("data_wait", 0.0))
        inside = f"{in_ms(one.time.loader_host_ms)} of it in the loader, whether or not overlapped"
        text = f"waiting for the data loader: {waits}; {inside}; {MATTERS:.0%} would be much"
        return saw(Evidence(text, one.where()))
    wait_ms = measure_ordinary(run, run.phases_ms.get(DATA, ())) if run else None
    if run is None or wait_ms is None or not run.steady_step_ms:
        return could_not_look()
    return saw(Evidence(f"median {in_ms(wait_ms)} in the phase {DATA} of {in_ms(run.steady_step_ms)}", STEPS_FILE))


def _shows_loader(one: RankFacts) -> bool:
    """Whether a trace names the loader or a range around it."""
    return one.time.loader_host_ms > 0 or any(part.name == DATA for part in one.time.phases)


LESS_PER_BATCH = "do less per batch: tokenize before training, larger reads, a local disk"


def _advise_workers(facts: Facts, wait: LoaderWait, workers: int | None) -> tuple[str, tuple[str, ...]]:
    """What to try, and its flag: as many workers as keep up with the step, and no more than the machine has cores for.

    workers: those that the run has; None for unknown.
    """
    if workers is None:
        return "load ahead with more worker processes", ("--num-workers N",)
    wanted = 2 * workers
    if workers <= 0:
        # loading time over computing time says how many keep up
        wanted = max(2, math.ceil(wait.loading_ms / wait.busy_ms)) if wait.loading_ms and wait.busy_ms else 2
    _, ranks, cpus = _count(facts)
    most = max(1, cpus // ranks) if cpus and ranks else wanted
    if workers >= most:
        return f"{LESS_PER_BATCH}; {counted(workers, 'worker')} per rank take all cores already", ()
    flag = f"--num-workers {min(wanted, most)}"
    more = f"; {LESS_PER_BATCH}" if wanted > most else ""
    return f"load ahead with more workers: {flag} (now {workers}){more}", (flag,)


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
    wait, (workers, ranks, cpus) = measure_loader_wait(facts), _count(facts)
    if workers is None or not ranks or not cpus:
        return could_not_look(record=Recording.RUN_FOLDER)
    text = f"{counted(workers, 'worker')} x {counted(ranks, 'rank')} of this machine on {counted(cpus, 'core')}"
    counts = Evidence(text, RUN_FILE)
    if wait is None or not are_too_many(facts):
        return saw(counts)
    fewer = max(1, cpus // (2 * ranks))
    seen = (Evidence(wait.text, wait.where), counts)
    advice = f"fewer workers than cores: --num-workers {fewer} (now {workers}), and less work per batch"
    return build_time_finding(wait.ms, seen, advice, (f"--num-workers {fewer}",), certain=False, rank=wait.rank)


def are_too_many(facts: Facts) -> bool:
    """More workers on this machine than cores; False where either is unknown. One worker is never too many."""
    workers, ranks, cpus = _count(facts)
    return bool(workers and ranks and cpus and workers > 1 and workers * ranks > cpus)


def _count(facts: Facts) -> tuple[int | None, int | None, int | None]:
    return facts.loader_workers, facts.local_ranks, facts.hardware.cpus


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
    exposed = one.exposed_ms(rows)
    stalled = sum(site.idle_ms for site in one.time.syncs if is_batch_copy(site))
    each = float(one.trace.events.num_bytes[rows].clip(min=0).mean())
    text = (
        f"{significant(one.per_step(rows))} unpinned per step, of {size(each)} on average: "
        f"{in_ms(exposed)} on the device "
        f"not overlapped with compute, {in_ms(stalled)} idle after the host's wait; {one.of_step(exposed + stalled)}"
    )
    advice = "pin host memory (DataLoader(pin_memory=True)) and copy with .to(device, non_blocking=True)"
    found = find_lost_time(one, exposed + stalled, text, advice, row=rows[0], cheap=True)
    return found if isinstance(found, Finding) else _look_at_batch_copies(one)


def _look_at_batch_copies(one: RankFacts) -> Observation:
    """Tell bytes of batches from pinned and from pageable memory, as far as the copies' names tell them apart."""
    to_device = one.rows_named(TO_GPU.search, Kind.MEMCPY)
    names = {row: one.trace.name_of(row) for row in to_device.tolist()}
    named = [row for row, name in names.items() if PINNED_OR_NOT.search(name)]
    steady = counted(one.steady_steps, "steady step")
    if not named and len(to_device):
        text = f"the events do not say from which memory, {counted(len(to_device), 'copy')} in {steady}"
        return could_not_look(Evidence(text, one.where()))
    if not named:
        return could_not_look(Evidence(f"no copy from the host in {steady}", one.where()))
    pageable = [row for row in named if "ageable" in names[row]]
    num_bytes = one.trace.events.num_bytes.clip(min=0)
    total = num_bytes[named].sum()
    slow = num_bytes[pageable].sum()
    pinned = counted((len(named) - len(pageable)) / one.steady_steps, "transfer")
    text = (
        f"per step {pinned} ({size((total - slow) / one.steady_steps)}) from pinned memory, "
        f"{significant(len(pageable) / one.steady_steps)} ({size(slow / one.steady_steps)}) from pageable memory"
    )
    seen = Evidence(text, one.where(named[0]))
    # without sizes the number of copies decides
    is_slow = 2 * slow > total if total else 2 * len(pageable) > len(named)
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


def _look_without_gpu(one: RankFacts) -> Observation:
    """Say that a trace without a GPU shows no copies to one."""
    return could_not_look(Evidence("no GPU, so nothing is copied to one", one.where()))


def pageable_rows(one: RankFacts) -> Integers:
    """Copies from pageable host memory in steady steps."""
    return one.rows_named(PAGEABLE.search, Kind.MEMCPY)


def is_batch_copy(site: SyncSite) -> bool:
    """Does the host wait there for a copy from pageable memory? To be asked only where the trace has such copies."""
    return site.operator in COPIES and ("ageable" in site.call or site.phase in TO_DEVICE)


SMALL_BYTES = 64 * 2**10  # about 2.6 us at 25 GB/s of PCIe 4.0 x16: less than the call takes
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
        steady = counted(one.steady_steps, "steady step")
        return could_not_look(Evidence(f"no copy from the host in {steady}", one.where()))
    rows = copies[num_bytes[copies] <= SMALL_BYTES]
    seen = (
        f"per step {counted(one.per_step(copies), 'transfer')} between host and device, "
        f"{significant(one.per_step(rows))} "
        f"of at most {size(SMALL_BYTES)}; {MAX_SMALL_COPIES} would be many"
    )
    look = saw(Evidence(seen, one.where(copies[0])))
    if one.per_step(rows) < MAX_SMALL_COPIES:
        return look
    calls = one.trace.launch_of[rows]
    cost, median = one.per_step_ms(calls[calls >= 0]), size(float(np.median(num_bytes[rows])))
    text = f"{one.per_step(rows):,.0f} copies per step, the median one of {median}; their calls take the host"
    text += f" {one.of_step(cost)}"
    advice = "copy one tensor per batch and split it on the device; fetch values together and seldom"
    flags = ("--log-interval 100",)
    found = find_lost_time(one, cost, text, advice, row=rows[0], flags=flags, certain=False, cheap=True)
    return tell_more(found, look)


MAX_SHOWN = 3
BETWEEN_GPUS = re.compile(r"PtoP|Peer ?To ?Peer", re.IGNORECASE)
FROM_DEVICE = re.compile(r"DtoH|DeviceToHost|Device2Host", re.IGNORECASE)
WITHIN_DEVICE = re.compile(r"DtoD|DeviceToDevice|Device2Device|Memset", re.IGNORECASE)


@rule("exposed-copies", "copies not overlapped with compute", "step", needs="gpu")
def find_exposed_copies(facts: Facts, one: RankFacts) -> Finding | Observation:
    """Copies between host and device are not overlapped with compute.

    Meaning: the device does nothing but copy: batches, offloaded optimizer state or activations, values for the log.
    Measured: time of copies and memsets while no kernel runs, per steady step, by name. Copies from pageable memory are
        counted in unpinned-copies instead.
    Cost: all of that time: a copy engine runs in parallel with kernels if it has its own stream and pinned memory.
    Do: prefetch the next batch on a side stream; overlap offloading with the layers before and after; keep outputs on
        the device; DistributedDataParallel instead of nn.DataParallel, which copies weights from GPU to GPU.
    Flags: none here: this trainer copies batches on a side stream by itself.
    False alarm: copies within the device at a step's end, if they are part of the algorithm.
    """
    rows = np.setdiff1d(one.rows_named(lambda name: True, Kind.MEMCPY, Kind.MEMSET), pageable_rows(one))
    names = one.trace.events.name[rows]
    groups = [rows[names == name] for name in np.unique(names)]
    groups.sort(key=lambda group: -one.per_step_ms(group))
    shown = []
    for group in groups[:MAX_SHOWN]:
        times = f"{significant(one.per_step(group))} per step, {in_ms(one.per_step_ms(group))}"
        shown.append(Evidence(f"{one.trace.name_of(group[0])}: {times}", one.where(group[0])))
    cost = one.exposed_ms(rows)
    text = f"the device only copies for {one.of_step(cost)}"
    first = one.trace.name_of(groups[0][0]) if groups else ""
    return find_lost_time(one, cost, text, _advise_copies(one, first), *shown)


DATA_PARALLEL = "DataParallel.forward"  # the range that torch.nn.DataParallel writes


def _advise_copies(one: RankFacts, name: str) -> str:
    """What to do about the copies that take most, by where they go. name: of the copies."""
    if BETWEEN_GPUS.search(name):
        if DATA_PARALLEL in one.trace.names:
            return (
                "torch.nn.DataParallel copies all weights to each GPU in each forward pass: "
                "use DistributedDataParallel, a process per GPU"
            )
        return "place what works together on one GPU, or copy between GPUs on a separate stream, ahead of the kernels"
    if FROM_DEVICE.search(name):
        return (
            "keep results on the device and fetch only what is needed (metrics, not outputs); "
            "copy into pinned memory with non_blocking=True"
        )
    if WITHIN_DEVICE.search(name):
        return "avoid copies within the device: write into the place where the result is needed"
    return "copy from pinned memory on a separate stream, ahead of the kernels that need it"
