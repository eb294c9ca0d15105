"""A file with a memory snapshot as plain values, read without running anything that the file names.

A snapshot is pickled (any protocol), saved by torch.save, or written as JSON; the file may be packed. It may lie in a
dict or list of the program that wrote it.
"""

import base64
import contextlib
import re
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from megatron_lite.analysis.memory.snapshot_forms import PAGE, CannotUnpackError, find_packing, open_unpacked
from megatron_lite.errors import UserError
from megatron_lite.plain_pickles import JSON, MAX_DESCRIBED_LETTERS, PICKLE, PlainFile, PlainUnpickler, parse_json
from megatron_lite.process_state import limit_memory
from megatron_lite.shared_files import open_foreign
from megatron_lite.terminal import make_printable
from megatron_lite.units import size

MAX_MEMORY_PER_BYTE = 60  # a snapshot takes 10 to 30 times its file's size
MAX_UNPACKED_PER_BYTE = 400  # real snapshots are packed to a third or a sixth; equal events pack better
MIN_UNPACKED_LIMIT = 2**26  # bytes
MAX_UNPACKED = 2**32
CHUNK = 2**20
FROM_TORCH = "write it again with torch.cuda.memory._dump_snapshot or --record-memory-history"

# --- unpacking


def _unpack(path: Path, packing: str) -> bytes:
    """The whole content, as far as a file of that size can explain it."""
    limit = min(MAX_UNPACKED, max(MIN_UNPACKED_LIMIT, MAX_UNPACKED_PER_BYTE * path.stat().st_size))
    content = bytearray()
    with open_unpacked(path, packing) as file:
        while chunk := file.read(CHUNK):
            content += chunk
            if len(content) > limit:
                raise CannotUnpackError(f"unpacks to more than {size(limit)}, far more than a file of its size should")
    return bytes(content)


# --- pickles that may be hostile: plain values only

LEGACY_TORCH_SAVE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # before torch 1.6: three pickles before the value
LEGACY_PICKLES_BEFORE = 3
IN_PAGE = re.compile(rb'"base64":\s*"([A-Za-z0-9+/=]+)"')
SNAPSHOT_FILE = PlainFile("memory snapshot", "snapshot", FROM_TORCH)


def _parse(file: IO[bytes]) -> Any:
    """The values in an unpacked file: a page with a snapshot in it, JSON, or a pickle. None for a page without one."""
    head = file.read(CHUNK)
    file.seek(0)
    if PAGE.match(head):
        found = IN_PAGE.search(file.read())
        return _parse(BytesIO(base64.b64decode(found[1]))) if found else None
    if JSON.match(head) and not PICKLE.match(head):
        return parse_json(file.read())
    data = file.read()
    start = 0
    if head.startswith(LEGACY_TORCH_SAVE):
        for _ in range(LEGACY_PICKLES_BEFORE):
            start = PlainUnpickler(data, start).end
    return PlainUnpickler(data, start).load()


def _describe_failure(error: Exception) -> str:
    """Describe what was seen of a file that could not be read."""
    if isinstance(error, CannotUnpackError):
        return f"is {make_printable(str(error), MAX_DESCRIBED_LETTERS)}."
    return SNAPSHOT_FILE.describe_failure(error)


def read_values(path: Path) -> Any:
    """Read what the file at `path` holds, as plain values. Raises UserError, one line, for one that cannot be read."""
    try:
        with open_foreign(path) as file:
            packing = find_packing(file.read(8))
            file.seek(0)
            if not packing:
                with limit_memory(path.stat().st_size, MAX_MEMORY_PER_BYTE):
                    return _parse(file)
        content = _unpack(path, packing)
        with limit_memory(len(content), MAX_MEMORY_PER_BYTE):
            return _parse(BytesIO(content))
    except Exception as error:  # noqa: BLE001 - damaged files make the readers raise errors of many kinds
        raise UserError(f"{path}: {_describe_failure(error)}") from None


# --- a snapshot inside of other values

MAX_NESTING = 4  # of dicts and lists in each other
MAX_LOOKED_AT = 4096  # values, and of each value what it holds
CONTAINERS = (list, tuple, dict)


def find_snapshots(values: Any) -> list[Any]:
    """The snapshots among plain values: dicts with segments or events, and lists of segments."""
    found: list[Any] = []
    waiting = [(values, 0)]
    looked_at = 0
    while waiting and looked_at < MAX_LOOKED_AT:
        value, depth = waiting.pop(0)
        looked_at += 1
        if _is_snapshot(value):
            found.append(value)
        elif depth < MAX_NESTING and type(value) in CONTAINERS:
            inside = list(value.values() if type(value) is dict else value)
            waiting += [(one, depth + 1) for one in inside[:MAX_LOOKED_AT] if type(one) in CONTAINERS]
    return found


def _is_snapshot(value: Any) -> bool:
    """Whether a value is a dict with segments or events, or a list of segments."""
    if type(value) is dict:
        return any(type(value.get(name)) in (list, tuple) for name in ("segments", "device_traces"))
    if type(value) not in (list, tuple) or not value:
        return False
    first = value[0]
    return type(first) is dict and "blocks" in first and "total_size" in first


def choose_snapshot(values: Any) -> tuple[Any, list[str]]:
    """Choose the snapshot with the most memory, or one whose request failed; `values` if it holds none.

    Returns:
        The snapshot, and a note about the others.
    """
    found = find_snapshots(values)
    if not found:
        return values, []
    if len(found) == 1:
        return found[0], []
    # the first of equal ones
    number = max(range(len(found)), key=lambda at: (*_measure(found[at]), -at))
    failed, _ = _measure(found[number])
    why = "in which a request failed" if failed else "which has the most memory"
    return found[number], [f"the file holds {len(found)} snapshots; number {number + 1} is shown, {why}"]


def _measure(snapshot: Any) -> tuple[bool, int]:
    """Measure a snapshot: whether a request failed, and the bytes of all segments."""
    segments: Any = snapshot
    traces: Any = []
    if type(snapshot) is dict:
        segments = snapshot.get("segments") or []
        traces = snapshot.get("device_traces") or []
    with contextlib.suppress(TypeError, AttributeError):  # reading it says what is wrong with it
        failed = any(event.get("action") == "oom" for trace in traces for event in trace)
        return failed, sum(segment.get("total_size", 0) for segment in segments)
    return False, 0
