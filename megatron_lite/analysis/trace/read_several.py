"""Several trace files at once: a process per file, as many as there are cores."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.read import read_traces

WORTH_BYTES = 4 << 20  # all files together; below, starting processes takes longer than it saves


def readers(paths: Sequence[Path]) -> Iterator[Callable[[], tuple[Trace, ...]]]:
    """For each path a function that gives its traces, or raises what read_traces raises."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    several = min(cores, len(paths)) > 1 and sum(map(_size, paths)) >= WORTH_BYTES
    return _in_processes(paths, min(cores, len(paths))) if several else (partial(read_traces, path) for path in paths)


def _in_processes(paths: Sequence[Path], workers: int) -> Iterator[Callable[[], tuple[Trace, ...]]]:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(workers) as pool:
        for path, future in [(path, pool.submit(read_traces, path)) for path in paths]:
            yield partial(_result, future, path)


def _result(future, path: Path) -> tuple[Trace, ...]:
    try:
        return future.result()
    except (RuntimeError, OSError):  # the process was killed, perhaps for memory: one file at a time may do
        return read_traces(path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
