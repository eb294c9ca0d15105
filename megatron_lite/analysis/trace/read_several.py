"""Several trace files at once: a process per file, as many as there are cores."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.kineto_columns import MAX_EVENTS
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.config.machine import read_machine
from megatron_lite.units import size

SECONDS_BETWEEN = 0.5
BYTES_PER_EVENT = 256  # at the peak of reading and analysing
MIN_EVENTS = 200_000
MIN_LARGE_BYTES = 128 << 20  # of text: about 5 seconds to read
TEXT_PER_GZIP_BYTE = 8
MIN_BYTES_SAID = 4 << 20  # all files together; below, starting processes takes longer than it saves


def say_nothing(text: str, lasting: bool = False):
    """Tells nobody how far reading is."""


def readers(paths: Sequence[Path], say: Callable = say_nothing) -> Iterator[Callable[[], tuple[Trace, ...]]]:
    """For each path a function that gives its traces, or raises what read_traces raises. say(how far it is) meanwhile; for
    files that take seconds say(what is read, lasting=True) before anything else."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    several, max_events = (
        min(cores, len(paths)) > 1 and sum(map(file_bytes, paths)) >= MIN_BYTES_SAID,
        _max_events(len(paths)),
    )
    if several:
        return _in_processes(paths, min(cores, len(paths)), max_events, say)
    return (
        partial(read_traces, path, max_events, _progress(path, number, len(paths), say))
        for number, path in enumerate(paths, 1)
    )


def _max_events(files: int) -> int:
    """Of each file, so that all of them take half of this machine's memory at most; a part too small says nothing."""
    memory = read_machine().memory_bytes
    return min(MAX_EVENTS, max(memory // 2 // BYTES_PER_EVENT // max(files, 1), MIN_EVENTS)) if memory else MAX_EVENTS


def are_large(paths: Sequence[Path]) -> bool:
    """Does it take seconds to read them?"""
    return (
        sum(file_bytes(path) * (TEXT_PER_GZIP_BYTE if path.suffix == ".gz" else 1) for path in paths) >= MIN_LARGE_BYTES
    )


def _progress(path: Path, number: int, files: int, say: Callable) -> Callable[[int], None]:
    num_bytes = file_bytes(path)
    title = f"reading {path.name} ({number} of {files}, {size(num_bytes)})"
    say(title, lasting=are_large([path]))
    return lambda bytes_read: say(f"{title}: {bytes_read / max(num_bytes, 1):.0%}")


def _in_processes(
    paths: Sequence[Path], workers: int, max_events: int, say: Callable
) -> Iterator[Callable[[], tuple[Trace, ...]]]:
    from concurrent.futures import ProcessPoolExecutor

    title = f"reading {len(paths)} traces ({size(sum(map(file_bytes, paths)))}), {workers} at a time"
    say(title, lasting=are_large(paths))
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(read_traces, path, max_events) for path in paths]
        for path, future in zip(paths, futures):
            while not wait([future], SECONDS_BETWEEN).done:
                say(f"{title}: {sum(other.done() for other in futures)} done")
            yield partial(_result, future, path, max_events)


def _result(future, path: Path, max_events: int = MAX_EVENTS) -> tuple[Trace, ...]:
    try:
        return future.result()
    except (RuntimeError, OSError):  # the process was killed, perhaps for memory: one file at a time may do
        return read_traces(path, max_events)


def file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
