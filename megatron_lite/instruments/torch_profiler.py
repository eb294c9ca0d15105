"""Records the profiled window with torch.profiler: one trace per profiled rank, where TensorBoard looks for it."""

import contextlib
import gc
import gzip
import inspect
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, TypedDict

import msgspec
import torch
from torch._C._autograd import _disable_profiler, _profiler_enabled
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, record_function
from torch.profiler.profiler import _KinetoProfile

from megatron_lite.config.args import ProfileArgs
from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.trace_header import CORES_IN_TRACE, HARDWARE_IN_TRACE, RecordedCores
from megatron_lite.instruments.base import Instrument, Tell, Window
from megatron_lite.instruments.module_ranges import ModuleRanges
from megatron_lite.phases import PYTHON_GC
from megatron_lite.process_state import CoreTime
from megatron_lite.units import MIB

# --- writing a trace: whole or not at all, and checked before it gets its name

COMPRESSED_FROM_BYTES = (
    16 * MIB
)  # from here on a trace is compressed unless the flags say otherwise: JSON shrinks about 15-fold
READ_BYTES = 4 * MIB
OVERLAP = 4096
STEP_RANGE = re.compile(rb'"ProfilerStep#(\d+)"')
KERNEL = re.compile(rb'"cat": ?"kernel"')
TRACE_ENDING = re.compile(rb"[}\]]\s*\Z")


class LostFile(OSError):
    """A file could not be written; nothing was left in its place."""


class Found(NamedTuple):
    """The contents of a trace's file, as far as they were looked for."""

    steps: tuple[int, ...]  # numbers of the recorded steps
    kernels: int  # of a GPU
    whole: bool  # the file does not break off


def inspect_trace(path: Path) -> Found:
    """Find steps and GPU kernels of a Kineto trace that is not compressed, without parsing it: gigabytes take
    seconds."""
    steps: set[int] = set()
    kernels = 0
    kept = b""
    with open(path, "rb") as file:
        while chunk := file.read(READ_BYTES):
            text = kept + chunk
            steps |= {int(number) for number in STEP_RANGE.findall(text)}
            kernels += len(KERNEL.findall(text)) - len(KERNEL.findall(kept))  # what was kept was counted before
            kept = text[-OVERLAP:]
    return Found(tuple(sorted(steps)), kernels, bool(TRACE_ENDING.search(kept)))


def write_trace(path: Path, write: Callable[[str], object], compress: bool | None = False) -> tuple[Path, Found]:
    """Write a trace whole or not at all, and look into it before it gets its name.

    Args:
        path: Where it is to lie.
        write: Fills the file of the name that it is given.
        compress: Whether to compress it; None: if it is large.

    Returns:
        Where it lies, with .gz if it is compressed, and what is in it.

    Raises LostFile if the disk is full, or the like.
    """
    with _unfinished_file(path) as hidden:
        write(str(hidden))
        if not hidden.exists():  # torch writes to a name of its own first, and says nothing when that fails
            raise LostFile("nothing was written: no room on the disk?")
        found = inspect_trace(hidden)
        written_bytes = hidden.stat().st_size
        if not found.whole:
            raise LostFile(f"the file broke off after {written_bytes / MIB:.1f} MiB: no room on the disk?")
        if compress or (compress is None and written_bytes >= COMPRESSED_FROM_BYTES):
            hidden = _compress(hidden)
            path = path.with_name(f"{path.name}.gz")
        os.replace(hidden, path)
    return path, found


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all. Raises LostFile if the disk is full, or the like."""
    with _unfinished_file(path) as hidden:
        hidden.write_text(text, encoding="utf-8")
        os.replace(hidden, path)


@contextlib.contextmanager
def _unfinished_file(path: Path) -> Iterator[Path]:
    """Name a hidden file beside `path`, to be filled and renamed inside. An error inside is a LostFile outside, and
    leaves nothing behind."""
    hidden = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield hidden
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch's C++ says that it cannot write
        with contextlib.suppress(OSError):
            for left in [file for file in path.parent.iterdir() if file.name.startswith(hidden.name)]:
                left.unlink()  # also what torch itself names .tmp, and what was half compressed
        raise LostFile(f"{path}: {error}") from error


def _compress(plain: Path) -> Path:
    """Compress a file; returns the path of the compressed one, in whose place the plain one is removed."""
    packed = plain.with_name(f"{plain.name}.gz")
    # level 1 is nearly as small as level 9 on traces, and several times faster
    with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target, READ_BYTES)
    plain.unlink()
    return packed


# --- torch's C++ writes notes of its profilers to stderr, whatever the settings; they tell a user nothing

KINETO_NOISE = re.compile(
    rb"execution_trace_observer\.cpp|CPUAllocator\.cpp|output_json\.cpp|USDT:|kineto", re.IGNORECASE
)


@contextlib.contextmanager
def suppress_notes() -> Iterator[None]:
    """Hold back what is written to stderr inside, and print it at the end without known noise."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        real = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            for line in held:
                if not KINETO_NOISE.search(line):
                    os.write(2, line)


class ChakraTrace:
    """A Chakra execution trace of the window: operators as a graph, for simulators and replay.

    torch writes it while it records, so it is recorded under a hidden name, in a folder of its own: readers of Kineto's
    traces take every .json beside them for one.

    Args:
        folder: Folder of Kineto's traces.
        worker: Name of this process in the names of files.
        compress: Whether the file is compressed, as `write_trace` takes it.
    """

    def __init__(self, folder: Path, worker: str, compress: bool | None) -> None:
        self._path = folder / "chakra" / f"{worker}.et.json"
        self._compress = compress
        self._recording = self._path.with_name(f".{worker}.recording.json")
        self._recording.parent.mkdir(parents=True, exist_ok=True)
        self.observer = ExecutionTraceObserver().register_callback(str(self._recording))  # the profiler starts it

    def write(self) -> str:
        """Give the trace its name; returns a line about it. Raises LostFile if it cannot be written."""
        with suppress_notes():
            self.observer.unregister_callback()
        path, _ = write_trace(self._path, lambda hidden: os.replace(self._recording, hidden), self._compress)
        return f"Chakra execution trace: {path}"

    def drop(self) -> None:
        """Remove the unfinished trace."""
        with suppress_notes():
            self.observer.unregister_callback()
        with contextlib.suppress(OSError):
            self._recording.unlink()


# --- room for what a GPU reports: Kineto keeps 128 MiB of it, about 1.9 million events,
# and silently drops all that follow
#
# That is some twenty eager steps of 24 layers, or a single one with many micro-batches.

PLACE = "KINETO_CONFIG"  # names the file that Kineto reads; without it SYSTEM_FILE
SYSTEM_FILE = Path("/etc/libkineto.conf")
KEY = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB"
MEGABYTES = 2048  # taken piece by piece, as events come


def enlarge_buffers(environ: MutableMapping[str, str]) -> IO[str] | None:
    """Have Kineto take more room. To be called before a profiler gets ready.

    Args:
        environ: The environment of this process, in which Kineto finds its file.

    Returns:
        The file, which has to be kept until the profiler is done; None if the user named one, or none can be written.
    """
    if PLACE in environ:
        return None
    try:
        given = SYSTEM_FILE.read_text(encoding="utf-8") if SYSTEM_FILE.exists() else ""
        file = tempfile.NamedTemporaryFile("w", prefix="kineto_", suffix=".conf", encoding="utf-8")
        file.write(given if KEY in given else f"{given}\n{KEY}={MEGABYTES}\n")
        file.flush()
    except (OSError, ValueError):
        return None
    environ[PLACE] = file.name
    return file


class TableLimit(TypedDict, total=False):
    """How long torch may sum up, as an argument of its profiler."""

    post_processing_timeout_s: float


TABLE_ROWS = 200
PROFILER_NAME_WIDTH = 80
# summing up takes tens of microseconds per operator: a huge trace gets a table of its beginning (torch 2.13 can)
HAS_LIMIT = "post_processing_timeout_s" in inspect.signature(_KinetoProfile.__init__).parameters
TABLE_LIMIT: TableLimit = {"post_processing_timeout_s": 60} if HAS_LIMIT else {}
CUDA = "self_cuda_time_total"
CPU = "self_cpu_time_total"


@dataclass
class StepCores:
    """The share of the cores that the training thread and its process got in one step."""

    seconds: float  # the whole step
    cpu_seconds: float  # of all threads
    involuntary_switches: int  # of all threads
    core_wait_seconds: float | None = None  # the thread was ready and had no core; None where the system does not tell


class WindowCores:
    """Records what the training thread and its process get of the cores in the recorded steps, for the trace's header.

    Every rank records its own: whether a late rank was slow or had no core is then known of each.
    """

    def __init__(self) -> None:
        self._cores = CoreTime()
        self._steps: list[StepCores] = []
        # when the step began, and what was got of the cores until then
        self._before: tuple[float, tuple[float, int, float | None]] | None = None

    def begin(self) -> None:
        began = time.perf_counter()
        self._before = (began, self._cores.read())

    def end(self) -> None:
        if self._before is None:
            return
        now = time.perf_counter()
        cpu_seconds, switches, core_wait = self._cores.read()
        began, (cpu_seconds_before, switches_before, core_wait_before) = self._before
        self._before = None
        step = StepCores(now - began, cpu_seconds - cpu_seconds_before, switches - switches_before)
        if core_wait is not None and core_wait_before is not None:
            step.core_wait_seconds = core_wait - core_wait_before
        self._steps.append(step)

    def describe(self) -> RecordedCores | None:
        """Average the recorded steps; None where no step was recorded to its end."""
        number = len(self._steps)
        if not number:
            return None
        waits = [step.core_wait_seconds for step in self._steps if step.core_wait_seconds is not None]
        return RecordedCores(
            steps=number,
            ms=1000 * (sum(step.seconds for step in self._steps) / number),
            cpu_ms=1000 * (sum(step.cpu_seconds for step in self._steps) / number),
            core_wait_ms=1000 * (sum(waits) / number) if len(waits) == number else None,
            involuntary_switches=sum(step.involuntary_switches for step in self._steps) / number,
        )

    def close(self) -> None:
        self._cores.close()


class TorchProfiler(Instrument):
    """Records the window's steps with torch.profiler. A run that ends inside the window writes what was recorded.

    Args:
        window: The profiled steps.
        options: The flags of profiling.
        rank: This process's.
        cuda: Whether the run computes on a GPU.
        folder: Where the files are written.
        tell: Called with each line for the console.
        take_hardware: Returns samples of this rank's hardware for the trace's header; None where lines hold them.
    """

    def __init__(
        self,
        window: Window,
        options: ProfileArgs,
        rank: int,
        cuda: bool,
        folder: Path,
        tell: Tell,
        take_hardware: Callable[[], HardwareFigures | None] | None = None,
    ) -> None:
        self.window = window
        self._take_hardware = take_hardware
        self.folder = folder
        self.rank = rank
        self._tell = tell
        self.options = options
        self.cuda = cuda
        self.compress = _choose_compression(options)
        self._profiler: _KinetoProfile | None = None  # from the step before the window on
        self._chakra: ChakraTrace | None = None
        self._recording = False
        self._spans: list[record_function] = []  # of the step and of the phases that are open
        self._room: IO[str] | None = None
        self._full = False  # the record of the GPU was over before the window was
        self._last = 0
        self._cores: WindowCores | None = None  # while recording
        self._collection: record_function | None = None  # around a running one of Python's garbage collector
        self._modules = ModuleRanges(tell) if self.options.profile_modules else None

    def begin(self, step: int) -> None:
        window = self.window
        if not (self.options.use_pytorch_profiler or window.on_demand):
            return
        if self.cuda and window.steps and step == window.steps.start - 1:
            self._prepare()  # this step pays for the start of CUPTI, and is not recorded
        if window.opens(step):
            self._start()
        if self._recording:
            self._last = step
            self._open_span(f"ProfilerStep#{step}")
            if self._cores is not None:
                self._cores.begin()

    def begin_phase(self, name: str) -> None:
        if self._recording:
            self._open_span(name)

    def end_phase(self, name: str, failed: bool) -> None:
        if self._spans:
            self._spans.pop().__exit__(None, None, None)

    def end(self, step: int) -> None:
        if self._cores is not None:
            self._cores.end()
        self._close_spans()
        if self._recording and self._profiler is not None and self.window.closes(step):
            self._finish(self._profiler)

    def close(self, error: BaseException | None) -> None:
        # a profiler that is still on at interpreter exit crashes the process
        broken_off = bool(self._spans)
        self._close_spans()
        if self._profiler is None:
            return
        if self._recording:
            self._finish(self._profiler, broken_off)
            return
        # prepared, but the run ended before the window began
        if not _profiler_enabled():  # else it was started, and failed in that
            with suppress_notes():
                self._profiler.start_trace()
        self._stop(self._profiler)
        if self._chakra is not None:
            self._chakra.drop()

    def make_profiler(self) -> _KinetoProfile:
        """Make a torch profiler that has not started."""
        options = self.options
        return _KinetoProfile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])],
            record_shapes=options.pytorch_profiler_collect_shapes,
            with_stack=options.pytorch_profiler_collect_callstack,
            profile_memory=options.pytorch_profiler_collect_memory,
            with_flops=options.pytorch_profiler_collect_flops,
            # which stream or event a synchronization waits for: critical paths need it
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=self.cuda),
            execution_trace_observer=self._chakra.observer if self._chakra is not None else None,
            **TABLE_LIMIT,
        )

    def owns(self, profile: object) -> bool:
        """Whether a profile of torch is this instrument's."""
        return self._profiler is not None and self._profiler.profiler is profile

    def _open_span(self, name: str) -> None:
        span = record_function(name)
        self._spans.append(span)
        span.__enter__()

    def _close_spans(self) -> None:
        while self._spans:
            self._spans.pop().__exit__(None, None, None)

    def _mark_collection(self, moment: str, info: dict[str, int]) -> None:
        """Put a range around a collection of garbage, as torch makes it with stacks only.

        Collections of the youngest objects take microseconds and are left out.
        """
        if moment == "start" and info["generation"] > 0:
            self._collection = record_function(PYTHON_GC)
            self._collection.__enter__()
        elif self._collection is not None:
            ended = self._collection
            self._collection = None
            ended.__exit__(None, None, None)

    def _prepare(self) -> _KinetoProfile:
        """Make a profiler and get it ready, which takes seconds on a GPU."""
        if _profiler_enabled():
            raise RuntimeError("another profiler is on, and torch has one at a time")
        if self.cuda:
            self._room = self._room or enlarge_buffers(os.environ)
        self._worker = f"{socket.gethostname()}_rank{self.rank}.{time.time_ns()}"
        with suppress_notes():
            collects = self.options.pytorch_profiler_collect_chakra
            self._chakra = ChakraTrace(self.folder, self._worker, self.compress) if collects else None
            profiler = self.make_profiler()
            self._profiler = profiler
            profiler.prepare_trace()
        return profiler

    def _start(self) -> None:
        """Start to record the window."""
        profiler = self._profiler
        if profiler is None:
            profiler = self._prepare()
            if self.cuda:
                torch.ones(1, device="cuda").add_(1)  # CUPTI's first kernel takes milliseconds
        self._synchronize()  # kernels of earlier steps are not the window's
        with suppress_notes():
            older = torch.empty(1)
            profiler.start_trace()
            self._recording = True
            self._cores = WindowCores()
            gc.callbacks.append(self._mark_collection)
            del older  # with memory: the first free of something older is warned about, and only the first
        if self._modules is not None:
            self._modules.open()

    def _write_cores(self, profiler: _KinetoProfile) -> None:
        """Write what was got of the cores, and samples of the hardware, into the trace's header. To be called while
        recording: later nothing is added to it."""
        if self._cores is None:
            return
        told = self._cores.describe()
        self._cores.close()
        self._cores = None
        if told is not None:
            profiler.add_metadata_json(CORES_IN_TRACE, msgspec.json.encode(told).decode())
        figures = self._take_hardware() if self._take_hardware is not None else None
        if figures is not None:
            profiler.add_metadata_json(HARDWARE_IN_TRACE, msgspec.json.encode(figures).decode())

    def _stop(self, profiler: _KinetoProfile) -> None:
        """Stop recording; from here on the profiler is no longer this instrument's."""
        self._profiler = None
        self._write_cores(profiler)
        if self._recording:
            self._recording = False
            gc.callbacks.remove(self._mark_collection)
        if self._modules is not None:
            self._modules.close()
        try:
            self._synchronize()  # the window's kernels must have run before recording ends
            # whether Kineto has stopped taking the GPU's events; torch 2.11 does not tell
            self._full = self.cuda and getattr(torch.autograd, "_is_kineto_stopped", bool)()
            with suppress_notes():
                profiler.stop_trace()
        finally:
            if _profiler_enabled():  # a GPU after a fatal error: stopping begins with waiting for it
                _disable_profiler()

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _finish(self, profiler: _KinetoProfile, broken_off: bool = False) -> None:
        """Stop recording, write what was recorded, and report it.

        Args:
            profiler: The one that records.
            broken_off: The last step was not recorded to its end.
        """
        started = time.perf_counter()
        self._stop(profiler)
        words = self.window.words(self._last) + (" (the last one broken off)" if broken_off else "")
        path = self.folder / f"{self._worker}.pt.trace.json"
        try:
            with suppress_notes():
                path, found = write_trace(path, profiler.export_chrome_trace, self.compress)
        except LostFile as error:
            self._tell(f"profile of {words}, rank {self.rank}, is lost; training goes on: {error}")
            if self._chakra is not None:
                self._chakra.drop()
            return
        self.window.traced_on_demand |= self.window.on_demand
        beside = "".join(f"\n    {line}" for line in self._write_beside(profiler))
        seconds = time.perf_counter() - started
        self._tell(
            f"profiled {words}, rank {self.rank}: {path} ({path.stat().st_size / MIB:.1f} MiB, "
            f"{seconds:.1f} s between steps){beside}"
        )
        meant = range(self.window.steps.start, self._last + 1)
        for fault in find_faults(found, meant, self.cuda, self._full):
            self._tell(f"trace of rank {self.rank}: {fault}")

    def _write_beside(self, profiler: _KinetoProfile) -> list[str]:
        """Write the files beside the trace; returns a line about each."""
        writers: list[Callable[[], str]] = [partial(self._write_table, profiler)]
        if self._chakra is not None:
            writers.append(self._chakra.write)
        lines: list[str] = []
        for write in writers:
            try:
                lines.append(write())
            except LostFile as error:
                lines.append(f"lost: {error}")
        return lines

    def _write_table(self, profiler: _KinetoProfile) -> str:
        """Write operators by the time that they spend themselves: on the device, where there is one."""
        rows = profiler.key_averages(group_by_input_shape=self.options.pytorch_profiler_collect_shapes)
        table = rows.table(CUDA if self.cuda else CPU, TABLE_ROWS, max_name_column_width=PROFILER_NAME_WIDTH)
        path = self.folder / f"{self._worker}.operators.txt"
        write_text(path, f"{self.window.words(self._last)}, rank {self.rank}\n{table}\n")
        return f"operators: {path}"


def _choose_compression(options: ProfileArgs) -> bool | None:
    """Decide whether traces are compressed; None: those that are large."""
    if options.profile_gzip:
        return True
    if options.no_profile_gzip:
        return False
    return None


def find_faults(found: Found, meant: range, cuda: bool, full: bool) -> Iterator[str]:
    """Find what a trace lacks, by itself.

    Args:
        found: What is in it.
        meant: The steps that were to be recorded.
        cuda: Whether the run computes on a GPU.
        full: Kineto's buffers were full before the window was over.
    """
    if found.steps != tuple(meant):
        held = ", ".join(map(str, found.steps)) or "none"
        wanted = ", ".join(map(str, meant)) or "none"
        yield f"holds the steps {held}, not {wanted} as it should."
    if full:
        yield (
            "the record of the GPU ends early: Kineto's room for events was full; profile fewer steps "
            "(--profile-step-end), or fewer micro-batches in each."
        )
    elif cuda and not found.kernels:
        yield (
            "holds no GPU kernel. CUPTI, which reports them, serves one tool per process: Nsight Systems or "
            "Compute, a debugger or monitoring (DCGM's profiling metrics) has it; stop that, and profile again."
        )
