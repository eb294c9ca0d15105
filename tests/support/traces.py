"""Reading Kineto's traces in tests."""

import gzip
import json
import re
from pathlib import Path


def trace_files(folder: Path, rank: int = 0) -> list[Path]:
    return sorted(folder.glob(f"*_rank{rank}.*.pt.trace.json*"))


def trace(folder: Path, rank: int = 0) -> list[dict]:
    """The events of the only trace of a rank."""
    [path] = trace_files(folder, rank)
    return events(path)


def events(path: Path) -> list[dict]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)["traceEvents"]


def spans(events: list[dict], pattern: str) -> list[dict]:
    """User annotations with such names, in the order of time."""
    annotations = [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    found = [event for event in annotations if re.fullmatch(pattern, event["name"])]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def steps_in(events: list[dict]) -> list[int]:
    return [int(span["name"].partition("#")[2]) for span in spans(events, r"ProfilerStep#\d+")]


def steps_of(folder: Path, rank: int = 0) -> list[int]:
    """Profiled steps, by the trace of a rank."""
    return steps_in(trace(folder, rank))


def nested(events: list[dict]) -> list[tuple[int, str]]:
    """(depth, name) of spans in order; fails where one ends after the span that it began in."""
    open_until, found = [], []
    for event in events:
        while open_until and event["ts"] >= open_until[-1] - 1e-3:
            open_until.pop()
        ends = event["ts"] + event["dur"]
        assert not open_until or ends <= open_until[-1] + 1e-2, event["name"]
        found.append((len(open_until), event["name"]))
        open_until.append(ends)
    return found
