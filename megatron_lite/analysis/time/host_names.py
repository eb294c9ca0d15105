"""Tell what calls, ranges and lines of Python of known libraries mean for the host.

Their names stand in the table host_causes.tsv.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# What belongs to two causes counts for the first.
# All of these are causes even where the host also waited for the device.
CAUSES = (
    "save",
    "garbage_collector",  # Python stops on all threads, whichever collects
    "profiler",
    "compile",
    "startup",
    "graph_capture",
    "allocator",
    "data_wait",
    "process_wait",
    "cpu_optimizer",
)
# These name only what neither a cause nor a synchronization explains: reading a value there is a synchronization.
AFTER_SYNCS = ("clip_grad", "log")
INSIDE = "Python inside "  # an operator that a Python class defines: begins the name of a HostSite
SEEN_AS = ("call", "range", "frame", "overhead")
FRAME = re.compile(r"(?P<file>[^()<>]*\.pyx?|<frozen [^>]*>)\(\d+\): (?P<function>.*)")


@dataclass(frozen=True)
class NamePattern:
    """A row of the table."""

    cause: str
    what: str  # for people
    name: re.Pattern[str]  # searched in the name; of a line of Python in its file
    function: re.Pattern[str] | None  # of a line of Python; None: `name` is of the whole name


def read_patterns() -> dict[str, list[NamePattern]]:
    """Read the patterns of host_causes.tsv by what they are seen as, in the order of causes."""
    found: dict[str, list[NamePattern]] = {seen_as: [] for seen_as in SEEN_AS}
    order = (*CAUSES, *AFTER_SYNCS)
    for line in (Path(__file__).parent / "host_causes.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        cause, seen_as, pattern, what = line.split("\t")
        file, colon, functions = pattern.rpartition(": ")
        if seen_as == "frame" and colon:
            begin = "" if file.startswith(("^", "\\.")) else "(^|/)"
            name = re.compile(f"{begin}({file})$")
            found[seen_as].append(NamePattern(cause, what, name, re.compile(f"({functions})$")))
        else:
            found[seen_as].append(NamePattern(cause, what, re.compile(pattern), None))
    return {seen_as: sorted(rows, key=lambda row: order.index(row.cause)) for seen_as, rows in found.items()}


PATTERNS = read_patterns()


@lru_cache(maxsize=2**14)
def _find_rows_of_file(file: str) -> tuple[NamePattern, ...]:
    """Rows of lines of Python in that file. Traces with stacks have 100,000 names, but of few files."""
    return tuple(row for row in PATTERNS["frame"] if row.function is not None and row.name.search(file))


@lru_cache(maxsize=2**17)
def name_cause(name: str, seen_as: str) -> tuple[str, str] | None:
    """Name the cause, and what it is, of a name that is seen as a "call", "range", "frame" or "overhead".

    None if none is known.
    """
    frame = FRAME.match(name) if seen_as == "frame" else None
    if frame is not None:
        rows = (
            row for row in _find_rows_of_file(frame["file"]) if row.function and row.function.match(frame["function"])
        )
    else:
        rows = (row for row in PATTERNS[seen_as] if row.function is None and row.name.search(name))
    first = next(rows, None)
    return None if first is None else (first.cause, first.what)
