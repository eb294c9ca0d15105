"""Read files that may be traces, and what is made of them; several files at once, in a process each."""

import contextlib
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megatron_lite.analysis.trace.columns import Trace, TraceError
from megatron_lite.analysis.trace.file_blocks import BLOCK_BYTES, GZIP_MAGIC
from megatron_lite.analysis.trace.kineto import MAX_EVENTS, read_kineto
from megatron_lite.analysis.trace.processes import split_processes
from megatron_lite.machine import read_machine
from megatron_lite.shared_files import open_foreign
from megatron_lite.units import size

if TYPE_CHECKING:
    from concurrent.futures import Future

Result = TypeVar("Result")
Work = Callable[[Path, int, Callable[[int], None]], Result]  # as read_traces takes them
Say = Callable[..., None]  # (text, lasting=...)
SQLITE_MAGIC = b"SQLite format 3\0"
NSYS_REPORTS = (".nsys-rep", ".qdstrm")
SECONDS_BETWEEN = 0.5
BYTES_PER_EVENT = 256  # at the peak of reading and analyzing
MIN_EVENTS = 200_000
OVERLAP_BYTES = 256  # of a block that are looked at with the next one: a word may stand in both
MIN_LARGE_BYTES = 128 << 20  # of text: about 5 seconds to read
TEXT_PER_GZIP_BYTE = 8
MIN_BYTES_SAID = 4 << 20  # all files together; below, starting processes takes longer than it saves


def say_nothing(*told: object, lasting: bool = False) -> None:
    """Tells nobody how far work is."""


def read_traces(
    path: Path, max_events: int = MAX_EVENTS, report: Callable[[int], None] = say_nothing
) -> tuple[Trace, ...]:
    """Read the traces in a file: one per process (most files of torch.profiler hold one).

    Args:
        path: The file.
        max_events: Events that are held at most; see read_kineto.
        report: Called with the number of bytes that were read so far.

    Raises:
        TraceError: The file is no trace; one line.
    """
    if path.suffix in NSYS_REPORTS:
        raise TraceError(f"{path}: {export_first(path)}")
    try:
        with open_foreign(path) as file:
            magic = file.read(16)
    except IsADirectoryError:
        raise TraceError(f"{path}: a folder; name a file in it.") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; name a trace that can be read.") from None
    if magic == SQLITE_MAGIC:
        from megatron_lite.analysis.trace.nsys import read_nsys

        traces = read_nsys(path)
        report(file_bytes(path))
        return traces
    return split_processes(read_kineto(path, max_events, report))


def export_first(report: Path) -> str:
    """Say what to do with a report of Nsight Systems."""
    if report.suffix == ".qdstrm":
        return (
            "what nsys recorded, not imported yet; run QdstrmImporter -i on it, then nsys export --type sqlite on its "
            ".nsys-rep"
        )
    return f"a report of Nsight Systems; export it first: nsys export --type sqlite {report.name}"


def any_block(path: Path, test: Callable[[bytes], bool], max_bytes: int = 256 << 20) -> bool:
    """Whether `test` holds for any piece of a file's text; False where it cannot be read.

    Args:
        path: The file.
        test: Asked of each piece.
        max_bytes: Bytes that are read at most, from the beginning.
    """
    read = 0
    with contextlib.suppress(OSError, EOFError, zlib.error), open_foreign(path) as raw:
        file = gzip.open(raw) if raw.peek(2).startswith(GZIP_MAGIC) else raw
        before = b""
        while read < max_bytes and (block := file.read(BLOCK_BYTES)):
            if test(before[-OVERLAP_BYTES:] + block):
                return True
            before = block
            read += len(block)
    return False


def readers(paths: Sequence[Path], work: Work[Result], say: Say = say_nothing) -> Iterator[Callable[[], Result]]:
    """Yield for each path a function that gives what `work` makes of the file, or raises what it raises.

    Of each file so many events are read that all of them take half of this machine's memory at most; a part too small
    says nothing. Several files are read and worked on in a process each, so that `work` must be a module's function.

    Args:
        paths: The files.
        work: What is made of each file's traces.
        say: Told how far reading is; for files that take seconds first told, with lasting=True, what is read.
    """
    max_events = _find_max_events(len(paths))
    workers = min(_count_cores(), len(paths))
    total_bytes = sum(map(file_bytes, paths))
    if workers > 1 and total_bytes >= MIN_BYTES_SAID:
        return _work_in_processes(paths, work, workers, max_events, say)
    return (
        _make_reader(path, work, f"{number} of {len(paths)}", max_events, say) for number, path in enumerate(paths, 1)
    )


def _count_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _find_max_events(files: int) -> int:
    """How many events are read of each of so many files."""
    memory_bytes = read_machine().memory_bytes
    if not memory_bytes:
        return MAX_EVENTS
    fitting = memory_bytes // 2 // BYTES_PER_EVENT // max(files, 1)
    return min(MAX_EVENTS, max(fitting, MIN_EVENTS))


def _make_reader(
    path: Path,
    work: Work[Result],
    which: str,
    max_events: int,
    say: Say,
) -> Callable[[], Result]:
    """Make the function that reads one file; it says how far it is. which: '1 of 3'."""
    num_bytes = file_bytes(path)
    title = f"{path.name} ({which}, {size(num_bytes)})"

    def report(bytes_read: int) -> None:
        read = bytes_read / max(num_bytes, 1)
        say(f"reading {title}: {read:.0%}" if read < 1 else f"analyzing {title}")

    say(f"reading {title}", lasting=are_large([path]))
    return partial(work, path, max_events, report)


def _work_in_processes(
    paths: Sequence[Path], work: Work[Result], workers: int, max_events: int, say: Say
) -> Iterator[Callable[[], Result]]:
    from concurrent.futures import ProcessPoolExecutor, wait  # here: one file needs neither processes nor logging

    title = f"reading {len(paths)} traces ({size(sum(map(file_bytes, paths)))}), {workers} at a time"
    say(title, lasting=are_large(paths))
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(work, path, max_events, say_nothing) for path in paths]
        for path, future in zip(paths, futures):
            while not wait([future], SECONDS_BETWEEN).done:
                say(f"{title}: {sum(other.done() for other in futures)} done")
            yield partial(_take_result, future, partial(work, path, max_events, say_nothing))


def _take_result(future: "Future[Result]", again: Callable[[], Result]) -> Result:
    try:
        return future.result()
    except (RuntimeError, OSError):  # the process was killed, perhaps for memory: one file at a time may do
        return again()


def are_large(paths: Sequence[Path]) -> bool:
    """Whether it takes seconds to read these files."""
    text_bytes = (file_bytes(path) * (TEXT_PER_GZIP_BYTE if path.suffix == ".gz" else 1) for path in paths)
    return sum(text_bytes) >= MIN_LARGE_BYTES


def file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
