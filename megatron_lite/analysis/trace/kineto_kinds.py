"""What an event of a Chrome trace is, by its category, its process' name or its own; which device and stream it ran on;
and which events with a length nobody reads."""

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
from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Kind
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
ASCEND_CALL, ASCEND_TASK = "Ascend call", "Ascend task "
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
# Events with a length that are no work of anybody, or that say again what other events say
NO_WORK_CATEGORIES = re.compile(
    r"Trace$|cpu_instant_event|fwdbwd|forward_backward|async|ac2g|flow|enqueue|dequeue"
    r"|GC$|cuda_event|external_correlation|"
    r"collective_comm|\w*counters?$|\w*_profiler(_range)?$|mtia_insight|osrt"
)
NO_WORK_PROCESSES = re.compile(r"Overlap Analysis|CANN|HCCL|Communication|Python GC|Traces|Spans|AI Core|MindStudio")
HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON)
MIN_SHARE = 0.05  # of the trace's time, by a track that nobody reads and that may matter
MAX_TEXT = 60
MAX_SENTENCES = 5
HCCL_STREAMS = 1 << 20  # added to the streams of Ascend's communication, whose numbers are others than those of tasks

Columns = dict[str, NDArray[Any]]


def category_of_ascend(event: Event) -> str:
    """torch_npu writes no categories for tasks of the device and for the calls that start them;
    their arguments tell."""
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
    """What a trace shows of devices beside the columns."""

    accelerator: str  # of accelerators.tsv; "" for none
    unread: tuple[str, ...]  # a sentence for each track of work that nobody reads


@dataclass
class Tracks:
    """Names of processes and threads, by the file's metadata entries."""

    processes: dict[Id, str] = field(default_factory=dict)
    threads: dict[tuple[Id, Id], str] = field(default_factory=dict)

    def add(self, entries: Sequence[Metadata]) -> None:
        """Of entries with phase "M"."""
        for entry in entries:
            if entry.name == "process_name":
                self.processes[entry.pid] = entry.label[:MAX_TEXT]
            elif entry.name == "thread_name":
                self.threads[entry.pid, entry.tid] = entry.label[:MAX_TEXT]

    def process(self, pid: Id) -> str:
        """Its name, else its id if that is a text."""
        return self.processes.get(pid) or (pid if isinstance(pid, str) else "")


def find_kinds_and_devices(
    columns: Columns,
    names: tuple[str, ...],
    threads: Sequence[tuple[Id, Id]],
    categories: Sequence[str | None],
    tracks: Tracks,
    memory_types: Iterable[int],
) -> Placed:
    """Kinds in place of categories; device and stream of device work: its arguments, else its pid and tid; -1 for the
    host's events."""
    thread, category = columns["thread"], columns.pop("category")
    kind = kinds_of_categories(categories)[category]
    of_process = np.array([KIND_OF_PROCESS.get(pid, Kind.OTHER) for pid, _ in threads], np.uint8)
    kind = np.where(kind == Kind.OTHER, of_process[thread], kind)
    kind[(kind == Kind.OP) & _ask_names(ANNOTATION, names)[columns["name"]]] = Kind.ANNOTATION
    processes = [tracks.process(pid) for pid, _ in threads]
    if "Ascend Hardware" in processes:
        _place_ascend(columns, kind, names, threads, processes)
    _split_gaudi(kind, category, categories, thread, threads)
    kind[(kind == Kind.KERNEL) & _ask_names(DEVICE_WAIT, names)[columns["name"]]] = Kind.SYNC
    _split_nsys_copies(columns, kind, names, category, categories)
    columns["kind"] = kind
    _find_devices(columns, kind, threads)
    operators = {names[number] for number in np.unique(columns["name"][kind == Kind.OP])}
    used = (categories[number] or "" for number in np.unique(category))
    accelerator = find_accelerator(used, set(processes), operators, memory_types)
    return Placed(accelerator, _find_unread(columns, category, categories, threads, processes, tracks))


def _ask_names(pattern: re.Pattern[str], names: Sequence[str]) -> Flags:
    return np.fromiter((bool(pattern.match(name)) for name in names), bool, len(names))


def _find_devices(columns: Columns, kind: Integers, threads: Sequence[tuple[Id, Id]]) -> None:
    on_device = np.isin(kind, (*DEVICE_KINDS, Kind.GPU_ANNOTATION))
    for name, which, largest, dtype in (("device", 0, 2**15, np.int16), ("stream", 1, 2**31, np.int32)):
        # 7 of 7, "7" and "stream 7"
        found = [re.search(r"\d{1,18}$", str(ids[which])) for ids in threads]
        place = np.array([int(number[0]) if number else -1 for number in found], np.int64)[columns["thread"]]
        value = np.where(on_device & (columns[name] < 0), place, columns[name])
        columns[name] = np.where((value >= 0) & (value < largest), value, -1).astype(dtype)


def _place_ascend(
    columns: Columns, kind: Integers, names: tuple[str, ...], threads: Sequence[tuple[Id, Id]], processes: Sequence[str]
) -> None:
    """Kinds, devices and streams of a trace of torch_npu, whose tracks tell what its categories do not."""
    name = columns["name"]

    def on(*wanted: str) -> Flags:
        """bool per event: is the name of its process one of these?"""
        return np.array([process in wanted for process in processes], bool)[columns["thread"]]

    tasks, talks = on("Ascend Hardware"), on("HCCL", "Communication")
    kind[on("CANN") & (kind == Kind.OTHER)] = Kind.RUNTIME
    kind[tasks & np.isin(kind, (Kind.OTHER, Kind.RUNTIME))] = Kind.KERNEL
    kind[talks] = Kind.OTHER
    collective = _ask_names(re.compile("hcom_"), names)[name]
    # collectives stand on a track of their own; some versions write them among the tasks
    if not (tasks & collective & (kind == Kind.KERNEL)).any():
        kind[talks & collective] = Kind.KERNEL
    kind[(kind == Kind.OP) & ~_ask_names(OPERATOR, names)[name]] = Kind.ANNOTATION
    _place_ascend_streams(columns, tasks, talks, threads, processes)


def _place_ascend_streams(
    columns: Columns, tasks: Flags, talks: Flags, threads: Sequence[tuple[Id, Id]], processes: Sequence[str]
) -> None:
    """A process' number ends in its device's, a thread's is its stream's."""
    hardware = {pid for (pid, _), process in zip(threads, processes) if process == "Ascend Hardware"}
    device = np.array([pid & 31 if isinstance(pid, int) and len(hardware) > 1 else 0 for pid, _ in threads], np.int64)
    stream = np.array([tid if isinstance(tid, int) else -1 for _, tid in threads], np.int64)[columns["thread"]]
    columns["device"] = np.where(tasks | talks, device[columns["thread"]], columns["device"])
    columns["stream"] = np.where(tasks, stream, np.where(talks, stream + HCCL_STREAMS, columns["stream"]))


def _split_gaudi(
    kind: Integers,
    category: Integers,
    categories: Sequence[str | None],
    thread: Integers,
    threads: Sequence[tuple[Id, Id]],
) -> None:
    """Gaudi's profiler writes one category for the device and for the host's calls:
    these stand in the process of operators."""
    if "hpu_op" not in categories:
        return
    hosts = {threads[number][0] for number in np.unique(thread[kind == Kind.OP])}
    on_host = np.array([pid in hosts for pid, _ in threads], bool)[thread]
    kind[(category == categories.index("hpu_op")) & on_host] = Kind.RUNTIME


def _split_nsys_copies(
    columns: Columns, kind: Integers, names: tuple[str, ...], category: Integers, categories: Sequence[str | None]
) -> None:
    """What converters of nsys' exports write as "cuda": kernels, copies and memsets, told apart by name."""
    if "cuda" not in categories:
        return
    mine = (category == categories.index("cuda")) & (kind == Kind.KERNEL)
    for pattern, what in ((r"(?i)\[?(cuda )?memcpy", Kind.MEMCPY), (r"(?i)\[?(cuda )?memset", Kind.MEMSET)):
        kind[mine & _ask_names(re.compile(pattern), names)[columns["name"]]] = what


def _find_unread(
    columns: Columns,
    category: Integers,
    categories: Sequence[str | None],
    threads: Sequence[tuple[Id, Id]],
    processes: Sequence[str],
    tracks: Tracks,
) -> tuple[str, ...]:
    """Tracks of an accelerator, and any long track of its own of which nothing is read: beside device work only those
    of processes that are no host's, whose threads do many things."""
    kind, thread = columns["kind"], columns["thread"]
    read_threads = set(np.unique(thread[~np.isin(kind, (Kind.OTHER, Kind.OVERHEAD))]).tolist())
    has_work = bool(np.isin(kind, DEVICE_KINDS).any())
    host_processes = {threads[number][0] for number in np.unique(thread[np.isin(kind, HOST_KINDS)]).tolist()}
    counted: Counter[str] = Counter()
    for number, of_category, events, share in _count_unread(columns, category):
        said, process = categories[of_category] or "", processes[number]
        if NO_WORK_CATEGORIES.match(said) or NO_WORK_PROCESSES.match(process):
            continue
        owner = find_track_owner(f"{process} {said}")
        pid, tid = threads[number]
        may_matter = not has_work or pid not in host_processes
        matters = may_matter and number not in read_threads and share >= MIN_SHARE
        if owner or matters:
            where = process or tracks.threads.get((pid, tid)) or f"{pid}, {tid}"
            counted[_describe_track(owner, where, said)] += events
    return tuple(f"events of {track} were not read: {events:,}" for track, events in counted.most_common(MAX_SENTENCES))


def _count_unread(columns: Columns, category: Integers) -> Iterator[tuple[int, int, int, float]]:
    """(thread, category, events, share of the trace's time) of events with a length that no reader knows."""
    start, end = columns["start_ns"], columns["end_ns"]
    whole = max(int(end.max() - start.min()), 1)
    rows = np.flatnonzero((columns["kind"] == Kind.OTHER) & (end > start))
    keys, inverse = np.unique(np.stack((columns["thread"][rows], category[rows])), axis=1, return_inverse=True)
    events = np.bincount(inverse.ravel(), minlength=keys.shape[1])
    lengths = np.bincount(inverse.ravel(), (end - start)[rows], keys.shape[1])
    for (thread, of_category), number, length in zip(keys.T.tolist(), events.tolist(), lengths.tolist()):
        yield thread, of_category, number, length / whole


def _describe_track(owner: str, where: str, category: str) -> str:
    """ "the Ascend NPU, track 'NPU 1', category 'npu_task'"."""
    parts = [f"the {owner}, track '{where}'" if owner else f"the track '{where}'"]
    parts += [f"category '{category}'"] if category else []
    return ", ".join(parts)
