"""torch.profiler over the profiled window: one trace per profiled rank, where TensorBoard looks for it."""

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
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, _KinetoProfile, record_function

from megatron_lite.config.args import ProfileArgs
from megatron_lite.formats.trace_header import CORES_IN_TRACE, RecordedCores
from megatron_lite.instruments.base import Instrument, Window
from megatron_lite.instruments.module_ranges import ModuleRanges
from megatron_lite.phases import PYTHON_GC
from megatron_lite.process_state import CoreTime
from megatron_lite.units import MIB

# --- writing a trace: whole or not at all, and checked before it gets its name

LARGE = 16 * MIB  # from here on a trace is compressed unless the flags say otherwise: JSON shrinks about 15-fold
CHUNK, OVERLAP = 4 * MIB, 4096
STEP = re.compile(rb'"ProfilerStep#(\d+)"')
KERNEL = re.compile(rb'"cat": ?"kernel"')
ENDING = re.compile(rb"[}\]]\s*\Z")


class LostFile(OSError):
    """A file could not be written; nothing was left in its place."""


class Found(NamedTuple):
    """What a trace file holds."""

    steps: tuple[int, ...]
    kernels: int
    whole: bool


def inspect_trace(path: Path) -> Found:
    """Steps and GPU kernels of a Kineto trace that is not compressed, without parsing it: gigabytes take seconds."""
    steps, kernels, kept = set(), 0, b""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            text = kept + chunk
            steps |= {int(number) for number in STEP.findall(text)}
            kernels += len(KERNEL.findall(text)) - len(KERNEL.findall(kept))  # what was kept was counted before
            kept = text[-OVERLAP:]
    return Found(tuple(sorted(steps)), kernels, bool(ENDING.search(kept)))


def write_whole(path: Path, write, compress: bool | None = False, is_trace: bool = True) -> tuple[Path, Found | None]:
    """Let `write(name)` fill a hidden file, look into it, compress it (None: if it is large), give it its name.

    Returns where it lies (with .gz if compressed) and what is in a trace. LostFile if the disk is full, or the like.
    """
    hidden, found = path.with_name(f".{path.name}.unfinished"), None
    unfinished = hidden.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(hidden))
        if not hidden.exists():  # torch writes to a name of its own first, and says nothing when that fails
            raise LostFile("nothing was written: no room on the disk?")
        if is_trace:
            found = inspect_trace(hidden)
            if not found.whole:
                raise LostFile(f"the file broke off after {hidden.stat().st_size / MIB:.1f} MiB: no room on the disk?")
        if compress or (compress is None and hidden.stat().st_size >= LARGE):
            packed = hidden.with_name(f"{hidden.name}.gz")
            # level 1 is nearly as small as level 9 on traces, and several times faster
            with open(hidden, "rb") as plain, gzip.open(packed, "wb", compresslevel=1) as file:
                shutil.copyfileobj(plain, file, CHUNK)
            hidden.unlink()
            hidden, path = packed, path.with_name(f"{path.name}.gz")
        os.replace(hidden, path)
        return path, found
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch's C++ says that it cannot write
        with contextlib.suppress(OSError):
            for left in [file for file in path.parent.iterdir() if file.name.startswith(unfinished)]:
                left.unlink()  # also what torch itself names .tmp, and what was half compressed
        raise LostFile(f"{path}: {error}") from error


# --- torch's C++ writes notes of its profilers to stderr, whatever the settings; they tell a user nothing

NOISE = re.compile(rb"execution_trace_observer\.cpp|CPUAllocator\.cpp|output_json\.cpp|USDT:|kineto", re.IGNORECASE)


@contextlib.contextmanager
def suppress_notes():
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
                if not NOISE.search(line):
                    os.write(2, line)


class ChakraTrace:
    """A Chakra execution trace of the window: operators as a graph, for simulators and replay.

    torch writes it while it records, so it is recorded under a hidden name, in a folder of its own: readers of Kineto's
    traces take every .json beside them for one. compress: as of `write_whole`.
    """

    def __init__(self, folder: Path, worker: str, compress: bool | None):
        self._path, self._compress = folder / "chakra" / f"{worker}.et.json", compress
        self._recording = self._path.with_name(f".{worker}.recording.json")
        self._recording.parent.mkdir(parents=True, exist_ok=True)
        self.observer = ExecutionTraceObserver().register_callback(str(self._recording))  # the profiler starts it

    def write(self) -> str:
        """Give the trace its name; returns a line about it. Raises LostFile if it cannot be written."""
        with suppress_notes():
            self.observer.unregister_callback()
        path, _ = write_whole(self._path, lambda hidden: os.replace(self._recording, hidden), self._compress)
        return f"Chakra execution trace: {path}"

    def drop(self):
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
KEY, MEGABYTES = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB", 2048  # taken piece by piece, as events come


def enlarge_buffers(environ: MutableMapping[str, str]):
    """To be called before a profiler gets ready. Returns the file, which has to be kept until the profiler is done;
    None if the user named one, or none can be written."""
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


TABLE_ROWS, NAME_WIDTH = 200, 80
# summing up takes tens of microseconds per operator: a huge trace gets a table of its beginning (torch 2.13 can)
HAS_LIMIT = "post_processing_timeout_s" in inspect.signature(_KinetoProfile.__init__).parameters
TABLE_LIMIT = {"post_processing_timeout_s": 60} if HAS_LIMIT else {}
CUDA, CPU = "self_cuda_time_total", "self_cpu_time_total"


class WindowCores:
    """What the training thread and its process get of the cores in the recorded steps, for the trace's header.

    Every rank records its own: whether a late rank was slow or had no core is then known of each.
    """

    def __init__(self):
        self._cores = CoreTime()
        self._steps: list[
            tuple[float | None, ...]
        ] = []  # seconds of the step, CPU seconds, switches, seconds without a core
        self._before: tuple[float | None, ...] | None = None

    def begin(self):
        self._before = (time.perf_counter(), *self._cores.read())

    def end(self):
        if self._before is None:
            return
        after = (time.perf_counter(), *self._cores.read())
        grown = (None if None in (old, new) else new - old for old, new in zip(self._before, after))
        self._before = None
        self._steps.append(tuple(grown))

    def describe(self) -> RecordedCores | None:
        """None where no step was recorded to its end."""
        if not self._steps:
            return None
        seconds, cpu_seconds, switches, wait_seconds = (
            None if None in column else sum(column) / len(column) for column in zip(*self._steps)
        )
        return RecordedCores(
            steps=len(self._steps),
            ms=1000 * seconds,
            cpu_ms=None if cpu_seconds is None else 1000 * cpu_seconds,
            core_wait_ms=None if wait_seconds is None else 1000 * wait_seconds,
            involuntary_switches=switches,
        )

    def close(self):
        self._cores.close()


class TorchProfiler(Instrument):
    """Records the window's steps with torch.profiler. A run that ends inside the window writes what was recorded."""

    def __init__(self, window: Window, options: ProfileArgs, rank: int, cuda: bool, folder: Path, tell):
        self.window, self.folder, self.rank, self._tell = window, folder, rank, tell
        self.options, self.cuda = options, cuda
        self.compress = True if self.options.profile_gzip else False if self.options.no_profile_gzip else None
        self._profiler: _KinetoProfile | None = None
        self._chakra: ChakraTrace | None = None
        self._recording = False
        self._spans: list[record_function] = []  # of the step and of the phases that are open
        self._room = None
        self._full = False  # the record of the GPU was over before the window was
        self._last = 0
        self._cores: WindowCores | None = None  # while recording
        self._collection = None  # the range around a running one of Python's garbage collector
        self._modules = ModuleRanges(tell) if self.options.profile_modules else None

    def begin(self, step: int):
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

    def begin_phase(self, name: str):
        if self._recording:
            self._open_span(name)

    def end_phase(self, name: str, failed: bool):
        if self._spans:
            self._spans.pop().__exit__(None, None, None)

    def end(self, step: int):
        if self._cores is not None:
            self._cores.end()
        self._close_spans()
        if self._recording and self.window.closes(step):
            self._finish()

    def close(self, error: BaseException | None):
        # a profiler that is still on at interpreter exit crashes the process
        broken_off = bool(self._spans)
        self._close_spans()
        if self._recording:
            self._finish(broken_off)
        elif self._profiler is not None:  # prepared, but the run ended before the window began
            if not torch.autograd._profiler_enabled():  # else it was started, and failed in that
                with suppress_notes():
                    self._profiler.start_trace()
            self._stop()
            if self._chakra:
                self._chakra.drop()

    def make_profiler(self) -> _KinetoProfile:
        """A torch profiler that has not started."""
        options = self.options
        return _KinetoProfile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])],
            record_shapes=options.pytorch_profiler_collect_shapes,
            with_stack=options.pytorch_profiler_collect_callstack,
            profile_memory=options.pytorch_profiler_collect_memory,
            with_flops=options.pytorch_profiler_collect_flops,
            # which stream or event a synchronization waits for: critical paths need it
            experimental_config=_ExperimentalConfig(enable_cuda_sync_events=self.cuda),
            execution_trace_observer=self._chakra.observer if self._chakra else None,
            **TABLE_LIMIT,
        )

    def owns(self, profile: torch.autograd.profiler.profile) -> bool:
        """Whether it is this instrument's."""
        return self._profiler is not None and self._profiler.profiler is profile

    def _open_span(self, name: str):
        self._spans.append(record_function(name))
        self._spans[-1].__enter__()

    def _close_spans(self):
        while self._spans:
            self._spans.pop().__exit__(None, None, None)

    def _mark_collection(self, moment: str, info: dict):
        """A range, as torch makes it with stacks only.

        Collections of the youngest objects take microseconds and are left out.
        """
        if moment == "start" and info["generation"] > 0:
            self._collection = record_function(PYTHON_GC)
            self._collection.__enter__()
        elif self._collection is not None:
            left, self._collection = self._collection, None
            left.__exit__(None, None, None)

    def _prepare(self):
        if torch.autograd._profiler_enabled():
            raise RuntimeError("another profiler is on, and torch has one at a time")
        if self.cuda:
            self._room = self._room or enlarge_buffers(os.environ)
        self._worker = f"{socket.gethostname()}_rank{self.rank}.{time.time_ns()}"
        with suppress_notes():
            collects = self.options.pytorch_profiler_collect_chakra
            self._chakra = ChakraTrace(self.folder, self._worker, self.compress) if collects else None
            self._profiler = self.make_profiler()
            self._profiler.prepare_trace()

    def _start(self):
        if self._profiler is None:
            self._prepare()
            if self.cuda:
                torch.ones(1, device="cuda").add_(1)  # CUPTI's first kernel takes milliseconds
        self._synchronize()  # kernels of earlier steps are not the window's
        with suppress_notes():
            older = torch.empty(1)
            self._profiler.start_trace()
            self._recording = True
            self._cores = WindowCores()
            gc.callbacks.append(self._mark_collection)
            del older  # with memory: the first free of something older is warned about, and only the first
        if self._modules:
            self._modules.open()

    def _write_cores(self, profiler: _KinetoProfile):
        """Into the trace's header, while recording: later nothing is added to it."""
        if self._cores is None:
            return
        told = self._cores.describe()
        self._cores.close()
        self._cores = None
        if told is not None:
            profiler.add_metadata_json(CORES_IN_TRACE, msgspec.json.encode(told).decode())

    def _stop(self) -> _KinetoProfile:
        profiler, self._profiler = self._profiler, None
        self._write_cores(profiler)
        if self._recording:
            self._recording = False
            gc.callbacks.remove(self._mark_collection)
        if self._modules:
            self._modules.close()
        try:
            self._synchronize()  # the window's kernels must have run before recording ends
            # whether Kineto has stopped taking the GPU's events; torch 2.11 does not tell
            self._full = self.cuda and getattr(torch.autograd, "_is_kineto_stopped", bool)()
            with suppress_notes():
                profiler.stop_trace()
        finally:
            if torch.autograd._profiler_enabled():  # a GPU after a fatal error: stopping begins with waiting for it
                torch.autograd._disable_profiler()
        return profiler

    def _synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def _finish(self, broken_off: bool = False):
        started = time.perf_counter()
        profiler = self._stop()
        words = self.window.words(self._last) + (" (the last one broken off)" if broken_off else "")
        path = self.folder / f"{self._worker}.pt.trace.json"
        try:
            with suppress_notes():
                path, found = write_whole(path, profiler.export_chrome_trace, self.compress)
        except LostFile as error:
            self._tell(f"profile of {words}, rank {self.rank}, is lost; training goes on: {error}")
            if self._chakra:
                self._chakra.drop()
            return
        self.window.traced_on_demand |= self.window.on_demand
        beside = []
        for write in (lambda: self._write_table(profiler), *([self._chakra.write] if self._chakra else [])):
            try:
                beside.append(f"\n    {write()}")
            except LostFile as error:
                beside.append(f"\n    lost: {error}")
        seconds = time.perf_counter() - started
        self._tell(
            f"profiled {words}, rank {self.rank}: {path} ({path.stat().st_size / MIB:.1f} MiB, "
            f"{seconds:.1f} s between steps){''.join(beside)}"
        )
        meant = range(self.window.steps.start, self._last + 1)
        for fault in find_faults(found, meant, self.cuda, self._full):
            self._tell(f"trace of rank {self.rank}: {fault}")

    def _write_table(self, profiler: _KinetoProfile) -> str:
        """Operators by the time that they spend themselves: on the device, where there is one."""
        rows = profiler.key_averages(group_by_input_shape=self.options.pytorch_profiler_collect_shapes)
        table = rows.table(CUDA if self.cuda else CPU, TABLE_ROWS, max_name_column_width=NAME_WIDTH)
        text = f"{self.window.words(self._last)}, rank {self.rank}\n{table}\n"
        path = self.folder / f"{self._worker}.operators.txt"
        write_whole(path, lambda hidden: Path(hidden).write_text(text, encoding="utf-8"), is_trace=False)
        return f"operators: {path}"


def find_faults(found: Found, meant: range, cuda: bool, full: bool) -> Iterator[str]:
    """What a trace lacks, by itself. meant: the steps to be recorded. full: Kineto's buffers were."""
    if found.steps != tuple(meant):
        held, wanted = (", ".join(map(str, steps)) or "none" for steps in (found.steps, meant))
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
