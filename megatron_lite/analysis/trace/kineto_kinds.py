"""Tell what an event of a Chrome trace is, by its category, its process' name or its own.

Also which device and stream it ran on, and which events with a length nobody reads.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.trace.accelerators import find_accelerator, find_track_owner
from megatron_lite.analysis.trace.columns import DEVICE_KINDS, HOST_KINDS, Kind
from megatron_lite.analysis.trace.kineto_json import NO_ARGS, Event, Id, Metadata, read_text

# libkineto/src/ActivityType.cpp, and those of its first releases (2021), which were capitalized; then those of tools
# that turn exports of nsys into Chrome traces
CATEGORIES_OF_KIND = {
    Kind.OP: "cpu_op Operator operator",
    Kind.ANNOTATION: "user_annotation nvtx",
    Kind.RUNTIME: "cuda_runtime cuda_driver Runtime runtime cuda_api",
    Kind.KERNEL: "kernel Kernel concurrent_kernel hpu_op mtia_ccp_events cuda",
    Kind.MEMCPY: "gpu_memcpy Memcpy memcpy",
    Kind.MEMSET: "gpu_memset Memset memset",
    Kind.GPU_ANNOTATION: "gpu_user_annotation nvtx-kernel",
    Kind.PYTHON: "python_function PythonFunction Python",
    Kind.SYNC: "cuda_sync",
    Kind.OVERHEAD: "overhead",
}
KIND_OF_CATEGORY = {name: kind for kind, names in CATEGORIES_OF_KIND.items() for name in names.split()}
# kineto and its forks put the device's name in front: xpu_runtime, mlu_memcpy, musa_user_annotation
KIND_OF_ENDING = {
    "runtime": Kind.RUNTIME,
    "driver": Kind.RUNTIME,
    "memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET,
    "user_annotation": Kind.GPU_ANNOTATION,
    "sync": Kind.SYNC,
}
OF_A_DEVICE = re.compile(r"[a-z][a-z0-9]*_(runtime|driver|memcpy|memset|user_annotation|sync)$")
# of 2020, without categories
KIND_OF_PROCESS: dict[Id, Kind] = {"CPU functions": Kind.OP, "CUDA functions": Kind.KERNEL}
# Of torch_npu, which writes no categories for what runs on the device and what called it:
# kineto_json.py makes these of arguments.
ASCEND_CALL = "Ascend call"
ASCEND_TASK = "Ascend task "
ASCEND_WAIT = re.compile(r"WAIT|RECORD|NOTIFY|WRITE_VALUE|PLACE_HOLDER|CMO|MAINTENANCE")
ASCEND_COPY = re.compile(r"SDMA|DMA_SQE|MEMCPY")
# Waiting that some devices record as work of a stream: MTIA's event_wait, Ascend's EVENT_WAIT and NOTIFY_WAIT.
DEVICE_WAIT = re.compile(r"((event|notify|stream)_?(wait|record)(_sqe)?|wait_?event)\Z", re.IGNORECASE)
# Annotations that are written as operators by PyTorch of 2021 and by torch_npu:
ANNOTATION = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.(step|zero_grad)#"
    r"|(nccl|gloo|mpi|ucc|hccl):|DistributedDataParallel\.|## "
)
OPERATOR = re.compile(r"\w+::\w|.*Backward\d*\Z|(Enqueue|Dequeue)")
NSYS_COPY = re.compile(r"\[?(cuda )?memcpy", re.IGNORECASE)
NSYS_MEMSET = re.compile(r"\[?(cuda )?memset", re.IGNORECASE)
# Events with a length that are no work of anybody, or that say again what other events say
NO_WORK_CATEGORIES = re.compile(
    r"Trace$|cpu_instant_event|fwdbwd|forward_backward|async|ac2g|flow|enqueue|dequeue"
    r"|GC$|cuda_event|external_correlation|"
    r"collective_comm|\w*counters?$|\w*_profiler(_range)?$|mtia_insight|osrt"
)
NO_WORK_PROCESSES = re.compile(r"Overlap Analysis|CANN|HCCL|Communication|Python GC|Traces|Spans|AI Core|MindStudio")
MIN_UNREAD_SHARE = 0.05  # of the trace's time, by a track that nobody reads and that may matter
MAX_TEXT = 60
MAX_SENTENCES = 5
COPY = "Memcpy"
HCCL_STREAMS = 1 << 20  # added to the streams of Ascend's communication, whose numbers are others than those of tasks

Columns = dict[str, NDArray[Any]]


def name_copy(event: Event) -> str:
    """Name a copy as kineto does, "Memcpy HtoD (Pageable -> Device)", by its arguments.

    torch's CUPTI monitor (2.14 and later) calls all copies "Memcpy": torch/profiler/_cupti/monitor_trace.py.
    """
    args = event.args or NO_ARGS
    if not isinstance(args.copy, str):
        return event.name
    source = _name_memory(args.source_memory)
    target = _name_memory(args.target_memory)
    return f"{COPY} {args.copy} ({source} -> {target})"


def _name_memory(memory: str | int | None) -> str:
    """Name a kind of memory, "device_static" as "Device Static"; "Unknown" where only a number is given."""
    return memory.replace("_", " ").title() if isinstance(memory, str) else "Unknown"


def category_of_ascend(event: Event) -> str:
    """Find the category of tasks of an Ascend device and of the calls that start them, by their arguments.

    Its profiler, torch_npu, writes none for them.
    """
    args = event.args or NO_ARGS
    if args.task:
        return ASCEND_TASK + read_text(args.task)
    return ASCEND_CALL if args.connection is not None and args.connection >= 0 else ""


@lru_cache(maxsize=4096)
def kind_of_category(category: str | None) -> Kind:
    """OTHER for a category that nobody reads."""
    if category in KIND_OF_CATEGORY:
        return KIND_OF_CATEGORY[category]
    if category == ASCEND_CALL:
        return Kind.RUNTIME
    if category and category.startswith(ASCEND_TASK):
        task = category.removeprefix(ASCEND_TASK)
        if ASCEND_COPY.search(task):
            return Kind.MEMCPY
        return Kind.SYNC if ASCEND_WAIT.search(task) else Kind.KERNEL
    ending = OF_A_DEVICE.match(category or "")
    return KIND_OF_ENDING[ending[1]] if ending else Kind.OTHER


def kinds_of_categories(categories: Iterable[str | None]) -> Integers:
    """A Kind for each."""
    return np.array([kind_of_category(category) for category in categories], np.uint8)


@dataclass(frozen=True)
class Placed:
    """Devices of a trace, as far as they are not in its columns."""

    accelerator: str  # of accelerators.tsv; "" for none
    unread: tuple[str, ...]  # a sentence for each track of work that nobody reads


@dataclass
class Tracks:
    """Names of processes and threads, by the file's metadata entries."""

    processes: dict[Id, str] = field(default_factory=dict)
    threads: dict[tuple[Id, Id], str] = field(default_factory=dict)

    def add(self, entries: Sequence[Metadata]) -> None:
        """Add the processes' names of entries with phase "M"."""
        for entry in entries:
            if entry.name == "process_name":
                self.processes[entry.pid] = entry.label[:MAX_TEXT]
            elif entry.name == "thread_name":
                self.threads[entry.pid, entry.tid] = entry.label[:MAX_TEXT]

    def process(self, pid: Id) -> str:
        """Name a process, or give its id if that is a text."""
        return self.processes.get(pid) or (pid if isinstance(pid, str) else "")


def find_kinds_and_devices(
    columns: Columns,
    names: tuple[str, ...],
    threads: Sequence[tuple[Id, Id]],
    categories: Sequence[str | None],
    tracks: Tracks,
    memory_types: Iterable[int],
) -> Placed:
    """Find the kind, device and stream of every event.

    Device and stream of device work are those of its arguments, else its pid and tid; -1 for the host's events.

    Args:
        columns: of all events; kinds take the place of categories.
        names: of events.
        threads: (process, thread) by number.
        categories: by number.
        tracks: names of processes and threads.
        memory_types: types of the devices that memory was allocated on.
    """
    category = columns.pop("category")
    processes = [tracks.process(pid) for pid, _ in threads]
    kind = _find_kinds(columns, threads, kinds_of_categories(categories)[category])
    is_operator = kind == Kind.OP
    kind[is_operator & _is_named(ANNOTATION, names, columns)] = Kind.ANNOTATION
    if "Ascend Hardware" in processes:
        _place_ascend(columns, kind, names, threads, processes)
    if "hpu_op" in categories:
        is_hpu = category == categories.index("hpu_op")
        _split_gaudi(kind, is_hpu, columns["thread"], threads)
    is_kernel = kind == Kind.KERNEL
    kind[is_kernel & _is_named(DEVICE_WAIT, names, columns)] = Kind.SYNC
    if "cuda" in categories:
        is_cuda = category == categories.index("cuda")
        _split_nsys_copies(columns, kind, names, is_cuda)
    columns["kind"] = kind
    _find_devices(columns, threads)
    numbers = np.unique(columns["name"][kind == Kind.OP])
    operators = {names[number] for number in numbers}
    used = [categories[number] or "" for number in np.unique(category)]
    return Placed(
        accelerator=find_accelerator(used, set(processes), operators, memory_types),
        unread=_find_unread(columns, category, categories, threads, processes, tracks),
    )


def _find_kinds(
    columns: Columns,
    threads: Sequence[tuple[Id, Id]],
    kind: Integers,
) -> Integers:
    """Find the kind of each event by its category, else by its process: uint8 [n]. kind: by category."""
    kinds = [KIND_OF_PROCESS.get(pid, Kind.OTHER) for pid, _ in threads]
    kind_of_thread = np.array(kinds, np.uint8)
    kind_by_process = kind_of_thread[columns["thread"]]
    return np.where(kind == Kind.OTHER, kind_by_process, kind)


def _is_named(pattern: re.Pattern[str], names: Sequence[str], columns: Columns) -> Flags:
    """Tell for each event (bool [n]) whether the pattern fits its name; each distinct name is asked once."""
    answers = (bool(pattern.match(name)) for name in names)
    fits = np.fromiter(answers, bool, len(names))
    return fits[columns["name"]]


def _find_devices(columns: Columns, threads: Sequence[tuple[Id, Id]]) -> None:
    """Complete the devices and streams of device work by its process' and thread's ids, and limit them."""
    on_device = np.isin(columns["kind"], (*DEVICE_KINDS, Kind.GPU_ANNOTATION))
    processes = _read_last_numbers(pid for pid, _ in threads)
    device = _complete(columns["device"], on_device, processes[columns["thread"]])
    columns["device"] = _limit(device, 2**15).astype(np.int16)
    streams = _read_last_numbers(tid for _, tid in threads)
    stream = _complete(columns["stream"], on_device, streams[columns["thread"]])
    columns["stream"] = _limit(stream, 2**31).astype(np.int32)


def _complete(given: Integers, chosen: Flags, others: Integers) -> Integers:
    """The numbers; where none is given for a chosen event, the other's."""
    is_missing = chosen & (given < 0)
    return np.where(is_missing, others, given)


def _limit(numbers: Integers, limit: int) -> Integers:
    """The numbers below the limit; -1 for others."""
    is_sound = (numbers >= 0) & (numbers < limit)
    return np.where(is_sound, numbers, -1)


def _read_last_numbers(ids: Iterable[Id]) -> Integers:
    """Read the number at the end of each id: int64 [k], 7 for 7, "7" and "stream 7"; -1 for an id without one."""
    numbers = []
    for one in ids:
        found = re.search(r"\d{1,18}$", str(one))
        numbers.append(int(found[0]) if found else -1)
    return np.array(numbers, np.int64)


def _place_ascend(
    columns: Columns,
    kind: Integers,
    names: tuple[str, ...],
    threads: Sequence[tuple[Id, Id]],
    processes: Sequence[str],
) -> None:
    """Find kinds, devices and streams of a trace of torch_npu, whose tracks tell what its categories do not.

    Args:
        columns: of all events; devices and streams are changed.
        kind: [n], by category; is changed.
        names: of events.
        threads: (process, thread) by number.
        processes: names of their processes.
    """

    def is_on(*wanted: str) -> Flags:
        """Tell for each event (bool [n]) whether the name of its process is one of these."""
        is_wanted = np.array([process in wanted for process in processes], bool)
        return is_wanted[columns["thread"]]

    is_task = is_on("Ascend Hardware")
    talks = is_on("HCCL", "Communication")
    is_unknown = kind == Kind.OTHER
    kind[is_unknown & is_on("CANN")] = Kind.RUNTIME
    may_be_work = np.isin(kind, (Kind.OTHER, Kind.RUNTIME))
    kind[is_task & may_be_work] = Kind.KERNEL
    kind[talks] = Kind.OTHER
    is_collective = _is_named(re.compile("hcom_"), names, columns)
    is_kernel = kind == Kind.KERNEL
    # collectives stand on a track of their own; some versions write them among the tasks
    if not (is_kernel & is_task & is_collective).any():
        kind[talks & is_collective] = Kind.KERNEL
    is_operator = kind == Kind.OP
    kind[is_operator & ~_is_named(OPERATOR, names, columns)] = Kind.ANNOTATION
    hardware = set()
    for (pid, _), process in zip(threads, processes):
        if process == "Ascend Hardware":
            hardware.add(pid)
    _place_ascend_streams(columns, is_task, talks, threads, has_devices=len(hardware) > 1)


def _place_ascend_streams(
    columns: Columns,
    is_task: Flags,
    talks: Flags,
    threads: Sequence[tuple[Id, Id]],
    has_devices: bool,
) -> None:
    """Find devices and streams: a process' number ends in its device's, a thread's is its stream's.

    has_devices: several processes of devices are in the trace; else all work is device 0's.
    """
    devices = []
    streams = []
    for pid, tid in threads:
        devices.append(pid & 31 if has_devices and isinstance(pid, int) else 0)
        streams.append(tid if isinstance(tid, int) else -1)
    device = np.array(devices, np.int64)[columns["thread"]]
    stream = np.array(streams, np.int64)[columns["thread"]]
    columns["device"] = np.where(is_task | talks, device, columns["device"])
    of_others = np.where(talks, stream + HCCL_STREAMS, columns["stream"])
    columns["stream"] = np.where(is_task, stream, of_others)


def _split_gaudi(
    kind: Integers,
    is_hpu: Flags,
    thread: Integers,
    threads: Sequence[tuple[Id, Id]],
) -> None:
    """Tell apart what Gaudi's profiler writes as one category: the device's work and the host's calls.

    The calls stand in the process of operators. kind: [n], is changed.
    """
    numbers = np.unique(thread[kind == Kind.OP])
    hosts = {threads[number][0] for number in numbers}
    is_host = np.array([pid in hosts for pid, _ in threads], bool)
    kind[is_hpu & is_host[thread]] = Kind.RUNTIME


def _split_nsys_copies(
    columns: Columns,
    kind: Integers,
    names: tuple[str, ...],
    is_cuda: Flags,
) -> None:
    """Tell apart by name what converters of nsys' exports write as "cuda": kernels, copies and memsets.

    kind: [n], is changed.
    """
    mine = is_cuda & (kind == Kind.KERNEL)
    kind[mine & _is_named(NSYS_COPY, names, columns)] = Kind.MEMCPY
    kind[mine & _is_named(NSYS_MEMSET, names, columns)] = Kind.MEMSET


def _find_unread(
    columns: Columns,
    category: Integers,
    categories: Sequence[str | None],
    threads: Sequence[tuple[Id, Id]],
    processes: Sequence[str],
    tracks: Tracks,
) -> tuple[str, ...]:
    """Describe tracks of which nothing is read.

    They are those of an accelerator, and any long track of its own: beside device work only those of processes that are
    no host's, whose threads do many things. The arguments are find_kinds_and_devices'; category: [n].
    """
    read = _find_read_tracks(columns, threads)
    counted: Counter[str] = Counter()
    for unread in _count_unread(columns, category):
        said = categories[unread.category] or ""
        process = processes[unread.thread]
        if NO_WORK_CATEGORIES.match(said) or NO_WORK_PROCESSES.match(process):
            continue
        owner = find_track_owner(f"{process} {said}")
        pid, tid = threads[unread.thread]
        is_long = unread.share >= MIN_UNREAD_SHARE
        if owner or (is_long and read.leaves_out(unread.thread, pid)):
            where = process or tracks.threads.get((pid, tid)) or f"{pid}, {tid}"
            counted[_describe_track(owner, where, said)] += unread.events
    return tuple(f"events of {track} were not read: {events:,}" for track, events in counted.most_common(MAX_SENTENCES))


@dataclass(frozen=True)
class _ReadTracks:
    """Tracks of a trace from which events are read."""

    threads: frozenset[int]  # by number
    host_processes: frozenset[Id]
    has_device_work: bool

    def leaves_out(self, thread: int, process: Id) -> bool:
        """Whether a track is one of its own, and may hold work that is missing.

        Beside device work a host's other threads do not matter.
        """
        may_matter = not self.has_device_work or process not in self.host_processes
        return may_matter and thread not in self.threads


def _find_read_tracks(columns: Columns, threads: Sequence[tuple[Id, Id]]) -> _ReadTracks:
    """Find the tracks from which events are read. threads: process and id of each thread."""
    kind = columns["kind"]
    thread = columns["thread"]
    is_read = ~np.isin(kind, (Kind.OTHER, Kind.OVERHEAD))
    of_host = np.unique(thread[np.isin(kind, HOST_KINDS)])
    return _ReadTracks(
        threads=frozenset(np.unique(thread[is_read]).tolist()),
        host_processes=frozenset(threads[number][0] for number in of_host.tolist()),
        has_device_work=bool(np.isin(kind, DEVICE_KINDS).any()),
    )


@dataclass(frozen=True)
class _Unread:
    """Events with a length that no reader knows, of one thread and category."""

    thread: int
    category: int
    events: int
    share: float  # of the trace's time


def _count_unread(columns: Columns, category: Integers) -> Iterator[_Unread]:
    """Count the events with a length that no reader knows."""
    start = columns["start_ns"]
    lengths = columns["end_ns"] - start
    whole = max(int(columns["end_ns"].max() - start.min()), 1)
    is_unknown = columns["kind"] == Kind.OTHER
    rows = np.flatnonzero(is_unknown & (lengths > 0))
    pairs = np.stack((columns["thread"][rows], category[rows]))
    keys, key_of_row = np.unique(pairs, axis=1, return_inverse=True)
    # older versions of numpy give the inverse the shape of the pairs
    key_of_row = key_of_row.ravel()
    events = np.bincount(key_of_row, minlength=keys.shape[1])
    sums = np.bincount(key_of_row, lengths[rows], keys.shape[1])
    for at, (thread, of_category) in enumerate(keys.T.tolist()):
        yield _Unread(
            thread=thread,
            category=of_category,
            events=int(events[at]),
            share=float(sums[at]) / whole,
        )


def _describe_track(owner: str, where: str, category: str) -> str:
    """ "the Ascend NPU, track 'NPU 1', category 'npu_task'"."""
    said = f"the {owner}, track '{where}'" if owner else f"the track '{where}'"
    if category:
        said += f", category '{category}'"
    return said
