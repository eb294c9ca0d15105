"""Fields of Protocol Buffers messages, read without a schema: of many messages at a time, or of one after another.

The wire format: https://protobuf.dev/programming-guides/encoding. Nothing here trusts a length: a message that does not
fit its bounds is left out as a whole, and counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers, Numbers

# wire types: how a field's value is written
VARINT = 0
FIXED64 = 1
LENGTH_DELIMITED = 2  # its length, then the bytes: a text, or another message
FIXED32 = 5
MAX_VARINT_BYTES = 10
MAX_FIELDS = 512  # of one message among many; a longer one is read alone, by iterate_fields
_PADDING = 32  # zero bytes behind a text, so that a value that begins in it can be read whole
_FAR = np.int64(1 << 60)  # the end of what has none
_Unsigned = NDArray[np.uint64]


@dataclass(frozen=True)
class WireText:
    """The bytes that messages stand in."""

    content: bytes
    codes: NDArray[np.uint8]  # the same with zeros behind

    def __getitem__(self, place: slice) -> bytes:
        return self.content[place]


def build_text(content: bytes) -> WireText:
    """Prepare bytes for reading."""
    return WireText(content, np.frombuffer(content + bytes(_PADDING), np.uint8))


class WireError(ValueError):
    """The bytes are no message."""


# --- one message, field by field


@dataclass(frozen=True, slots=True)
class Field:
    """A field of one message."""

    number: int
    value: int  # of a varint, as its 64 bits with a sign; 0 for what is none
    start: int  # of its bytes in the text
    end: int


def iterate_fields(content: bytes, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of a message.

    Args:
        content: The bytes that hold it.
        start: Place of the message's first byte.
        end: Place behind the message's last byte.

    Raises:
        WireError: It is no message; what precedes the error was yielded.
    """
    at = start
    while at < end:
        tag, at = read_varint(content, at, end)
        number = tag >> 3
        wire = tag & 7
        value = 0
        begin = at
        if wire == VARINT:
            value, at = read_varint(content, at, end)
            value -= (value >> 63) << 64
        elif wire == LENGTH_DELIMITED:
            length, begin = read_varint(content, at, end)
            at = begin + length
        elif wire in (FIXED32, FIXED64):
            at += 8 if wire == FIXED64 else 4
        else:
            raise WireError(f"wire type {wire}")
        if not number or at > end:
            raise WireError(f"field {number} reaches beyond its message")
        yield Field(number, value, begin, at)


def read_varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a number.

    Args:
        content: The bytes.
        at: Where it begins.
        end: Where the message ends.

    Returns:
        The number, of 64 bits at most, and the place behind it.

    Raises:
        WireError: It does not end before `end`.
    """
    value = 0
    last = min(end, at + MAX_VARINT_BYTES)
    for place in range(at, last):
        byte = content[place]
        value |= (byte & 0x7F) << 7 * (place - at)
        if byte < 0x80:
            return value & (1 << 64) - 1, place + 1
    raise WireError("a number without an end")


# --- many messages at a time, a step for each of their fields


@dataclass(frozen=True)
class Fields:
    """Fields of many messages, k in the order of the messages, those of one in its own order."""

    message: Integers  # int64 [k], which of the messages
    number: Integers  # int64 [k]
    value: Integers  # int64 [k], of a varint, as its 64 bits with a sign; 0 for what is none
    start: Integers  # int64 [k], of its bytes in the text
    end: Integers  # int64 [k]
    unreadable: Flags  # bool [messages], True for those that are left out

    def __len__(self) -> int:
        return len(self.message)

    def choose(self, number: int) -> "Fields":
        """Choose the fields with this number."""
        rows = self.number == number
        return Fields(
            message=self.message[rows],
            number=self.number[rows],
            value=self.value[rows],
            start=self.start[rows],
            end=self.end[rows],
            unreadable=self.unreadable,
        )

    def values(self, number: int, default: int = 0) -> Integers:
        """Read a number of each message: int64 [messages]; `default` where it has none. The last one counts."""
        values = np.full(len(self.unreadable), default, np.int64)
        rows = self.number == number
        values[self.message[rows]] = self.value[rows]
        return values

    def places(self, number: int) -> tuple[Integers, Integers]:
        """Find the bytes of a field of each message: starts and ends, int64 [messages]; -1 where it has none."""
        starts = np.full(len(self.unreadable), -1, np.int64)
        ends = starts.copy()
        rows = self.number == number
        starts[self.message[rows]] = self.start[rows]
        ends[self.message[rows]] = self.end[rows]
        return starts, ends


def read_fields(text: WireText, start: Integers, end: Integers) -> Fields:
    """Read the fields of many messages.

    Args:
        text: The bytes that hold them.
        start: Places of the messages' first bytes, int64 [messages].
        end: Places behind the messages' last bytes, int64 [messages]; an empty message has no fields.
    """
    unreadable = np.zeros(len(start), bool)
    rows = np.flatnonzero(end > start)
    at = start[rows]
    steps: list[Fields] = []
    for _ in range(MAX_FIELDS):
        if not len(rows):
            break
        step = _read_step(text.codes, rows, at, end[rows])
        unreadable[rows[step.unreadable]] = True
        is_sound = ~step.unreadable
        goes_on = is_sound & (step.end < end[rows])
        steps.append(_keep_sound(step, is_sound))
        rows = rows[goes_on]
        at = step.end[goes_on]
    unreadable[rows] = True
    return _join_steps(steps, unreadable)


def _read_step(codes: NDArray[np.uint8], rows: Integers, at: Integers, limit: Integers) -> Fields:
    """Read the next field of each message.

    Args:
        codes: The text.
        rows: The messages.
        at: Where their next fields begin.
        limit: Where the messages end.

    Returns:
        A field for each of `rows`, of which `unreadable` says which are none.
    """
    tag, at = _read_varints(codes, at)
    wire = tag & np.uint64(7)
    number = (tag >> np.uint64(3)).astype(np.int64)
    value, behind = _read_varints(codes, np.minimum(at, limit))
    is_varint = wire == VARINT
    is_bytes = wire == LENGTH_DELIMITED
    length = np.minimum(value, np.uint64(_FAR)).astype(np.int64)
    end = np.full(len(rows), _FAR)
    end[is_varint] = behind[is_varint]
    end[is_bytes] = (behind + length)[is_bytes]
    for fixed, num_bytes in ((FIXED64, 8), (FIXED32, 4)):
        end[wire == fixed] = at[wire == fixed] + num_bytes
    return Fields(
        message=rows,
        number=number,
        value=np.where(is_varint, value, np.uint64(0)).astype(np.int64),
        start=np.where(is_bytes, behind, at),
        end=end,
        unreadable=(end > limit) | (number == 0),
    )


def _read_varints(codes: NDArray[np.uint8], at: Integers) -> tuple[_Unsigned, Integers]:
    """Read the numbers that begin at `at`, inside of the text: uint64, and the places behind them; far for no end."""
    byte = codes[at]
    value = (byte & 0x7F).astype(np.uint64)
    behind = at + 1
    going = np.flatnonzero(byte >= 0x80)
    for place in range(1, MAX_VARINT_BYTES):
        if not len(going):
            break
        byte = codes[at[going] + place]
        value[going] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        behind[going] += 1
        going = going[byte >= 0x80]
    behind[going] = _FAR
    return value, behind


def _keep_sound(step: Fields, is_sound: Flags) -> Fields:
    """The fields of a step without those that are none."""
    return Fields(
        message=step.message[is_sound],
        number=step.number[is_sound],
        value=step.value[is_sound],
        start=step.start[is_sound],
        end=step.end[is_sound],
        unreadable=step.unreadable,
    )


def _join_steps(steps: list[Fields], unreadable: Flags) -> Fields:
    """Join the first fields of all messages, their second ones, ... in the order of the messages."""
    none = np.empty(0, np.int64)

    def join(columns: list[Integers]) -> Integers:
        return np.concatenate([none, *columns])

    message = join([step.message for step in steps])
    order = np.argsort(message, kind="stable")
    order = order[~unreadable[message[order]]]
    return Fields(
        message=message[order],
        number=join([step.number for step in steps])[order],
        value=join([step.value for step in steps])[order],
        start=join([step.start for step in steps])[order],
        end=join([step.end for step in steps])[order],
        unreadable=unreadable,
    )


def read_doubles(text: WireText, start: Integers) -> Numbers:
    """Read the FIXED64 values that begin at `start` as doubles: float64 [k]."""
    places = start[:, np.newaxis] + np.arange(8)
    doubles: Numbers = text.codes[places].view("<f8")[:, 0].astype(np.float64)
    return doubles
