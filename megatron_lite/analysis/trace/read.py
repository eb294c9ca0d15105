"""Any file that may be a trace -> its traces."""

from collections.abc import Callable
from pathlib import Path

from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.kineto import read_kineto
from megatron_lite.analysis.trace.kineto_columns import MAX_EVENTS
from megatron_lite.analysis.trace.refused import TraceError

SQLITE_MAGIC = b"SQLite format 3\0"
NSYS_REPORTS = (".nsys-rep", ".qdstrm")


def read_traces(
    path: Path, max_events: int = MAX_EVENTS, report: Callable[[int], None] = lambda bytes_read: None
) -> tuple[Trace, ...]:
    """The traces in the file `path`: one of a torch.profiler file, one per process of an Nsight Systems .sqlite.
    Raises TraceError, one line, for what is no trace. max_events, report: as of read_kineto."""
    if path.suffix in NSYS_REPORTS:
        raise TraceError(f"{path}: {export_first(path)}")
    try:
        with open(path, "rb") as file:
            magic = file.read(16)
    except IsADirectoryError:
        raise TraceError(f"{path}: a folder; name a file in it.") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; name a trace that can be read.") from None
    if magic == SQLITE_MAGIC:
        from megatron_lite.analysis.trace.nsys import read_nsys

        return read_nsys(path)
    return (read_kineto(path, max_events, report),)


def export_first(report: Path) -> str:
    """What to do with a report of Nsight Systems."""
    if report.suffix == ".qdstrm":
        return (
            "what nsys recorded, not imported yet; run QdstrmImporter -i on it, then nsys export --type sqlite on its "
            ".nsys-rep"
        )
    return f"a report of Nsight Systems; export it first: nsys export --type sqlite {report.name}"
