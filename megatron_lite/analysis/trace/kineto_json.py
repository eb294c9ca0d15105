"""A Kineto file as lists of typed events, block by block, without parsing or holding it as a whole; and what makes text
readable that the decoder refuses."""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from megatron_lite.analysis.trace.columns import TraceError
from megatron_lite.analysis.trace.file_blocks import BLOCK_BYTES, FileBlocks

Id = int | str | None
Count = int | None


class EventArgs(msgspec.Struct, gc=False, frozen=True):
    """The arguments that the analysis uses; each kind of event has a few of them. -1: not given."""

    device: Count = -1
    stream: Count = -1
    correlation: Count = -1
    bytes: Count = -1
    sequence: Count = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Count = msgspec.field(default=-1, name="Fwd thread id")
    dtypes: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    values: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Concrete Inputs")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: Count = msgspec.field(default=None, name="In msg nelems")
    out_elements: Count = msgspec.field(default=None, name="Out msg nelems")
    group_size: Count = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    collective_sequence: Count = msgspec.field(default=None, name="Seq")
    source: Count = msgspec.field(default=None, name="Src Rank")
    target: Count = msgspec.field(default=None, name="Dst Rank")
    allocated: Count = msgspec.field(default=-1, name="Total Allocated")
    reserved: Count = msgspec.field(default=-1, name="Total Reserved")
    memory_bytes: Count = msgspec.field(default=0, name="Bytes")
    memory_device: Count = msgspec.field(default=-1, name="Device Id")
    memory_device_type: Count = msgspec.field(default=0, name="Device Type")
    connection: Count = msgspec.field(default=-1, name="connection_id")  # of torch_npu: joins a call with its tasks
    task: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Task Type")  # of torch_npu
    label: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="name")  # of metadata
    copy: str | int | None = msgspec.field(default=None, name="copy kind")  # of copies that are named "Memcpy" alone
    source_memory: str | int | None = msgspec.field(default=None, name="src kind")
    target_memory: str | int | None = msgspec.field(default=None, name="dst kind")
    counter: float | None = msgspec.field(default=None, name="")  # the value of a counter's sample


NO_ARGS = EventArgs()


class Entry(msgspec.Struct, gc=False):
    """An entry of traceEvents. Times are microseconds."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: Id = None
    tid: Id = None
    dur: float | None = None
    args: EventArgs | None = NO_ARGS


class FloatEvent(Entry, gc=False):
    """An event whose start fits a double."""

    ts: float | None = None


class ExactEvent(Entry, gc=False):
    """An event whose start has more digits than a double holds."""

    ts: Decimal | None = None


Event = FloatEvent | ExactEvent


@dataclass(frozen=True)
class Metadata:
    """An entry that names a process or a thread."""

    name: str
    pid: Id
    tid: Id
    label: str


def read_metadata(event: Event) -> Metadata:
    """Read the arguments of an entry with phase "M"."""
    return Metadata(event.name, event.pid, event.tid, read_text((event.args or NO_ARGS).label))


def read_text(raw: msgspec.Raw) -> str:
    """Read a JSON text; "" for what is none."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(bytes(raw) or b'""')
        return value if isinstance(value, str) else ""
    return ""


_float_events = msgspec.json.Decoder(list[FloatEvent], strict=False)
_exact_events = msgspec.json.Decoder(list[ExactEvent], strict=False)
ARGUMENTS = {field.encode_name: field for field in msgspec.structs.fields(EventArgs)}
_SAMPLE = "counter"  # the only field that is no whole number
_TEXTS = ("collective", "dtype", "group", "copy", "source_memory", "target_memory")
_NO_NUMBER = re.compile(rb'":(\s*)-?(?:nan|inf|NaN|Infinity)(?:\([a-z0-9]*\))?(?=\s*[,}])')
_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF_CHARACTER = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
_CONTROL_TO_SPACE = bytes(max(code, 32) for code in range(256))
_MAX_LOOKED_AT = 64  # events whose times tell how many digits the others have


def decode_events(text: bytes) -> Sequence[Event] | None:
    """The events of `text`, entries with commas between them; None where it cannot be read so."""
    whole = b"".join((b"[", text, b"]"))
    for mending in (False, True):
        try:
            if mending:
                whole = mend_json(whole)
            events = _float_events.decode(whole)
            if all(map(_fits_double, events[:_MAX_LOOKED_AT])):
                return events
            return _exact_events.decode(whole)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return None


def _fits_double(event: FloatEvent) -> bool:
    """Doubles above 2^43 us have no place for nanoseconds; whole microseconds are exact."""
    return event.ts is None or event.ts < 2**43 or event.ts.is_integer()


def mend_json(text: bytes) -> bytes:
    """`text` without what writers are known to leave in: raw control characters, NaN and inf, lone backslashes (paths
    of Windows), halves of surrogate pairs, bytes that are no UTF-8."""
    text = text.translate(_CONTROL_TO_SPACE)
    text = _NO_NUMBER.sub(rb'":\1null', text)
    if b"\\" in text:
        text = _HALF_CHARACTER.sub(rb"\\ufffd", text)
        text = _ESCAPE.sub(lambda found: found[0] if found[1] else rb"\\", text)
    return text.decode("utf-8", "replace").encode()


def decode_event(text: bytes) -> Event | None:
    """Decode an event whose fields may be of any type.

    A field that does not fit is left out. None for what is no event.
    """
    events = decode_events(text) or ()
    if len(events) == 1 and events[0].ph:
        return events[0]
    try:
        entry = json.loads(mend_json(text), strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "ph" not in entry:
        return None
    args = entry.get("args")
    return FloatEvent(
        ph=str(entry["ph"]),
        cat=str(entry.get("cat", "")),
        name=str(entry.get("name", "")),
        pid=_fit_id(entry.get("pid")),
        tid=_fit_id(entry.get("tid")),
        ts=_number(entry.get("ts")),
        dur=_number(entry.get("dur")),
        args=fit_args(args) if isinstance(args, dict) else EventArgs(),
    )


def _fit_id(value: Any) -> Id:
    """The id; one of another type as a text."""
    if value is None or isinstance(value, (int, str)):
        return value
    return str(value)


def fit_args(args: dict[str, Any]) -> EventArgs:
    """The known ones of the arguments, which may be of any type."""
    fitted = {}
    for key, value in args.items():
        if key in ARGUMENTS:
            fitted[ARGUMENTS[key].name] = _fit_value(value, ARGUMENTS[key])
    return EventArgs(**fitted)


def _fit_value(value: Any, field: msgspec.structs.FieldInfo) -> Any:
    """The value as one of the field's type; its default where that cannot be."""
    if field.type is msgspec.Raw:
        return value if isinstance(value, msgspec.Raw) else msgspec.Raw(json.dumps(value).encode())
    if isinstance(value, msgspec.Raw):
        return field.default
    if field.name in _TEXTS:
        return value if value is None else str(value)
    number = _number(value)
    if number is None:
        return field.default
    return number if field.name == _SAMPLE else int(number)


def _number(value: Any) -> float | None:
    """The value as a finite number; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


# --- the file in blocks of text, and these in chunks of whole events

_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_BARE_ARRAY = re.compile(rb"\s*\[")
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]")
_BLANK = b", \t\r\n"
_LEADING = re.compile(rb"[, \t\r\n]*")
_MAX_HEADER_BYTES = 64 << 20
_NEAR = 64 << 10  # how far before a chunk's end the last border between two events is looked for first
_MAX_EVENT_BYTES = 64 << 20  # no event is that long: what is there is something else
_MAX_ENDS = 8
_MAX_PIECES = 16


class Chunks:
    """Iterates over lists of events.

    After it: `header`, all that stands beside the events; `damage`, a sentence or None; `cut`, whether the events' end
    is missing.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES):
        self.path = path
        self.block_bytes = block_bytes
        self.cut = False
        self.header: dict[str, Any] = {}
        self._file = FileBlocks(path, block_bytes)
        self._damage: str | None = None
        self._unreadable = 0
        self._before = b""
        self._text = b""
        self._at = 0  # place of _text in the file's text

    @property
    def damage(self) -> str | None:
        """A sentence about damage of the file's text, else of its JSON; None for none."""
        return self._file.damage or self._damage

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far, of the file as it lies on the disk."""
        return self._file.bytes_read

    def __iter__(self) -> Iterator[Sequence[Event]]:
        blocks = iter(self._file)
        ended = False
        self._find_array(blocks)
        for block in blocks:
            self._text += block
            if not ended and len(self._text) >= self.block_bytes:
                events, ended = self._next_chunk()
                yield events
                if not ended and len(self._text) > _MAX_EVENT_BYTES:
                    break
        size = None
        while not ended and self._text and size != len(self._text):
            size = len(self._text)
            events, ended = self._next_chunk(last=True)
            yield events
        self.cut = not ended
        self.header = self._read_header(ended)
        if self.damage is None and not ended:
            left = self._text.lstrip(_BLANK)
            place = self._at + len(self._text) - len(left)
            where = f"in the event at byte {place:,}" if left else f"after byte {place:,}"
            self._damage = f"the JSON breaks off {where}; what precedes it was read"
        elif self.damage is None and self._unreadable:
            self._damage = f"events that cannot be read: {self._unreadable:,}, left out"

    def _find_array(self, blocks: Iterator[bytes]) -> None:
        """Stand at the first event."""
        for block in blocks:
            self._text += block
            start = self._text[:4096].lstrip()[:1]
            found = _BARE_ARRAY.match(self._text) if start == b"[" else _ARRAY.search(self._text)
            if found:
                if start == b"{":
                    self._before = self._text[: found.start()]
                self._move(found.end())
                return
            if start not in (b"{", b"[", b"") or len(self._text) > _MAX_HEADER_BYTES:
                break
        if self.damage:
            what = f"{self.damage}, and holds no event."
        elif not self._text.strip():
            what = "empty; a trace holds a JSON object with traceEvents."
        elif self._text.lstrip()[:1] not in (b"{", b"["):
            what = "not a trace: neither JSON nor gzipped JSON."
        else:
            what = "JSON without traceEvents, so no trace of torch.profiler."
        raise TraceError(f"{self.path}: {what}")

    def _next_chunk(self, last: bool = False) -> tuple[Sequence[Event], bool]:
        """The next events, and whether their array ends there. `last`: no more text will come."""
        text = self._text
        leading = _LEADING.match(text)
        start = leading.end() if leading else 0
        if text.startswith(b"]", start):
            return [], True
        border = self._find_last_border()
        if border:
            events = decode_events(text[start:border])
            if events is not None:
                self._move(border)
                return events, False
        for end in itertools.islice(_END.finditer(text), _MAX_ENDS):
            events = decode_events(text[start : end.start() + 1])
            if events is not None:
                self._move(end.end())
                return events, True
        return self._decode_one_by_one(last)

    def _find_last_border(self) -> int:
        """Where the last event ends that another follows in the text; 0 for none."""
        near = max(len(self._text) - _NEAR, 0)
        for search_from in (near, 0):
            borders = [found.start() + 1 for found in _BETWEEN.finditer(self._text, search_from)]
            if borders:
                return borders[-1]
        return 0

    def _decode_one_by_one(self, last: bool) -> tuple[Sequence[Event], bool]:
        """The events of a chunk that holds something unreadable, which is left out."""
        borders = [0, *(found.start() + 1 for found in _BETWEEN.finditer(self._text))]
        events: list[Event] = []
        place = 0
        while place < len(borders) - 1:
            # borders may stand inside of events, which then end at a later one
            for after in range(place + 1, min(place + 1 + _MAX_PIECES, len(borders))):
                piece = self._text[borders[place] : borders[after]].strip(_BLANK)
                in_string = (piece.count(b'"') - piece.count(rb"\"")) % 2 == 1
                is_open = in_string or piece.count(b"[") > piece.count(b"]")
                if not is_open and (event := decode_event(piece)) is not None:
                    events.append(event)
                    place = after
                    break
            else:
                if self._take_end(events, borders[place], borders[place + 1]):
                    return events, True
                if not last and place + _MAX_PIECES >= len(borders):
                    break  # the event may end in what is not read yet
                self._unreadable += 1
                place += 1
        if self._take_end(events, borders[place], len(self._text)):
            return events, True
        if last and (event := decode_event(self._text[borders[place] :].strip(_BLANK))) is not None:
            events.append(event)
            borders[place] = len(self._text)
        self._move(borders[place])
        return events, False

    def _take_end(self, events: list[Event], start: int, stop: int) -> bool:
        """Append the array's last event and go behind the array, if it ends between the two places."""
        for end in _END.finditer(self._text, start, stop):
            if (event := decode_event(self._text[start : end.start() + 1].strip(_BLANK))) is not None:
                events.append(event)
                self._move(end.end())
                return True
        return False

    def _move(self, by: int) -> None:
        self._text = self._text[by:]
        self._at += by

    def _read_header(self, ended: bool) -> dict[str, Any]:
        """Read what stands before and after the events; only what stands before where the end is missing or damaged."""
        whole = [self._before + b'"traceEvents":[]' + self._text] if ended else []
        for text in (*whole, self._before.rstrip(_BLANK) + b"}"):
            with contextlib.suppress(ValueError, RecursionError):
                header = json.loads(mend_json(text), strict=False)
                return header if isinstance(header, dict) else {}
        return {}
