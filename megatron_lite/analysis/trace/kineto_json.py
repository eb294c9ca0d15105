"""Events of a Kineto file as typed objects: a fast decoder, and what makes text readable that it refuses."""

import json
import math
import re
from decimal import Decimal

import msgspec

Id = int | str | None
Count = int | None


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments that the analysis uses; each kind of event has a few of them. -1: not given."""

    device: Count = -1
    stream: Count = -1
    correlation: Count = -1
    bytes: Count = -1
    sequence: Count = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Count = msgspec.field(default=-1, name="Fwd thread id")
    dtypes: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: Count = msgspec.field(default=None, name="In msg nelems")
    out_elements: Count = msgspec.field(default=None, name="Out msg nelems")
    group_size: Count = msgspec.field(default=None, name="Group size")
    dtype: str | None = None
    group: str | None = msgspec.field(default=None, name="Process Group Name")
    collective_sequence: Count = msgspec.field(default=None, name="Seq")
    allocated: Count = msgspec.field(default=-1, name="Total Allocated")
    reserved: Count = msgspec.field(default=-1, name="Total Reserved")
    memory_bytes: Count = msgspec.field(default=0, name="Bytes")
    memory_device: Count = msgspec.field(default=-1, name="Device Id")
    memory_device_type: Count = msgspec.field(default=0, name="Device Type")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One entry of traceEvents. Times are microseconds."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: Id = None
    tid: Id = None
    ts: float | None = None
    dur: float | None = None
    args: Args | None = NO_ARGS


class ExactEvent(Event, gc=False):
    """Its start has more digits than a double holds."""

    ts: Decimal | None = None


_decoders = {kind: msgspec.json.Decoder(list[kind], strict=False) for kind in (Event, ExactEvent)}
_ARGS = {field.encode_name: field for field in msgspec.structs.fields(Args)}
_TEXTS = ("collective", "dtype", "group")
_NO_NUMBER = re.compile(rb'":(\s*)-?(?:nan|inf|NaN|Infinity)(?:\([a-z0-9]*\))?(?=\s*[,}])')
_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF_CHARACTER = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
_CONTROL_TO_SPACE = bytes(max(code, 32) for code in range(256))


def decoded(text: bytes) -> list[Event] | None:
    """The events of `text`, entries with commas between them; None where it cannot be read so."""
    whole = b"".join((b"[", text, b"]"))
    for attempt in (lambda: whole, lambda: mended(whole)):
        try:
            events = _decoders[Event].decode(attempt())
            return events if _are_exact(events) else _decoders[ExactEvent].decode(attempt())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return None


def _are_exact(events: list[Event]) -> bool:
    """Do doubles hold the starts? Doubles above 2^43 us have no place for nanoseconds; whole microseconds are exact."""
    return all(event.ts is None or event.ts < 2**43 or event.ts.is_integer() for event in events[:64])


def mended(text: bytes) -> bytes:
    """`text` without what writers are known to leave in: raw control characters, NaN and inf, lone backslashes (paths of
    Windows), halves of surrogate pairs, bytes that are no UTF-8."""
    text = text.translate(_CONTROL_TO_SPACE)
    text = _NO_NUMBER.sub(rb'":\1null', text)
    if b"\\" in text:
        text = _HALF_CHARACTER.sub(rb"\\ufffd", text)
        text = _ESCAPE.sub(lambda found: found[0] if found[1] else rb"\\", text)
    return text.decode("utf-8", "replace").encode()


def decoded_alone(text: bytes) -> Event | None:
    """One event whose fields may be of any type: what does not fit is left out; None for what is no event."""
    if (events := decoded(text)) and len(events) == 1 and events[0].ph:
        return events[0]
    try:
        entry = json.loads(mended(text), strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or "ph" not in entry:
        return None
    args = entry.get("args")
    kept = (
        {_ARGS[key].name: _fitting(value, _ARGS[key]) for key, value in args.items() if key in _ARGS}
        if (isinstance(args, dict))
        else {}
    )
    return Event(
        ph=str(entry.get("ph", "")), cat=str(entry.get("cat", "")), name=str(entry.get("name", "")),
        pid=_id(entry.get("pid")), tid=_id(entry.get("tid")), ts=_number(entry.get("ts")), dur=_number(entry.get("dur")),
        args=Args(**kept) if kept else NO_ARGS,
    )  # fmt: skip


def _fitting(value, field):
    if field.type is msgspec.Raw:
        return msgspec.Raw(json.dumps(value).encode())
    if field.name in _TEXTS:
        return value if value is None else str(value)
    number = _number(value)
    return field.default if number is None else int(number)


def _number(value) -> float | None:
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _id(value) -> Id:
    return value if value is None or isinstance(value, (int, str)) else str(value)
