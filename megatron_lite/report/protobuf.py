"""Protobuf messages of equal form, written by the column: n messages at once, whose fields are arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.trace.protobuf_fields import FIXED64, LENGTH_DELIMITED, VARINT

MAX_DIGITS = 9  # of 7 bits, of a number below 2**63
LOW_BITS = 127
GOES_ON = 128  # in a byte after which the number goes on


def varint(value: int) -> bytes:
    """Write a whole number in 7 bits per byte, the lowest first; negative ones as 64 bits."""
    left = value % (1 << 64)
    written = bytearray()
    while left > LOW_BITS:
        low = left & LOW_BITS
        written.append(low | GOES_ON)
        left >>= 7
    written.append(left)
    return bytes(written)


def tag(number: int, wire: int) -> bytes:
    """Write what stands before a field: its number and how it is written."""
    return varint(number << 3 | wire)


def number_field(number: int, value: int) -> bytes:
    """Write a field that holds a whole number."""
    return tag(number, VARINT) + varint(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    """Write a field that holds bytes, a text or a message."""
    content = value if isinstance(value, bytes) else value.encode("utf-8", "replace")
    return tag(number, LENGTH_DELIMITED) + varint(len(content)) + content


@dataclass(frozen=True)
class VarintColumn:
    """A field with a whole number in some of n messages."""

    number: int
    values: Integers  # [n], at least 0
    present: Flags | None = None  # [n]; None: all have it

    @cached_property
    def _lengths(self) -> Integers:
        """Bytes of each number: int64 [n]."""
        lengths = np.ones(len(self.values), np.int64)
        for digits in range(1, MAX_DIGITS):
            limit = 1 << (7 * digits)
            lengths += self.values >= limit
        return lengths

    def measure(self) -> Integers:
        """Measure the field of each message, bytes: int64 [n]."""
        before = len(tag(self.number, VARINT))
        return _keep_present(self._lengths + before, self.present)

    def write(
        self,
        out: NDArray[np.uint8],
        at: Integers,
    ) -> None:
        """Write the field of each message to its place in `out`. at: [n]."""
        rows = _list_present(self.present, len(self.values))
        before = tag(self.number, VARINT)
        behind = _write_tag(out, at[rows], before)
        values = self.values[rows].astype(np.int64)
        lengths = self._lengths[rows]
        _write_varints(out, behind, values, lengths)


@dataclass(frozen=True)
class Fixed64Column:
    """A field with 8 bytes in some of n messages: a whole number, or a float64."""

    number: int
    values: Integers | Numbers  # [n]
    present: Flags | None = None  # [n]; None: all have it

    def measure(self) -> Integers:
        """Measure the field of each message, bytes: int64 [n]."""
        before = len(tag(self.number, FIXED64))
        sizes = np.full(len(self.values), before + 8)
        return _keep_present(sizes, self.present)

    def write(
        self,
        out: NDArray[np.uint8],
        at: Integers,
    ) -> None:
        """Write the field of each message to its place in `out`. at: [n]."""
        rows = _list_present(self.present, len(self.values))
        before = tag(self.number, FIXED64)
        behind = _write_tag(out, at[rows], before)
        kind = "<f8" if self.values.dtype.kind == "f" else "<i8"
        values = self.values[rows].astype(kind)
        content = values.view(np.uint8).reshape(-1, 8)
        for place in range(8):
            out[behind + place] = content[:, place]


@dataclass(frozen=True)
class MessageColumn:
    """A field with a message in some of n messages."""

    number: int
    fields: "Sequence[Column]"  # where the message is absent, so are they
    present: Flags | None = None  # [n]; None: all have it

    @cached_property
    def _inner(self) -> Integers:
        """Bytes of each inner message: int64 [n]."""
        sizes = [column.measure() for column in self.fields]
        inner: Integers = np.sum(sizes, axis=0)
        return inner

    @cached_property
    def _length(self) -> VarintColumn:
        """The lengths of the inner messages, as what stands before them."""
        return VarintColumn(self.number, self._inner)

    def measure(self) -> Integers:
        """Measure the field of each message, bytes: int64 [n]."""
        # the tag of a message takes as many bytes as that of a number
        before = self._length.measure()
        return _keep_present(before + self._inner, self.present)

    def write(
        self,
        out: NDArray[np.uint8],
        at: Integers,
    ) -> None:
        """Write the field of each message to its place in `out`. at: [n]."""
        rows = _list_present(self.present, len(self._inner))
        before = tag(self.number, LENGTH_DELIMITED)
        behind = _write_tag(out, at[rows], before)
        digits = self._length.measure()[rows] - len(before)
        _write_varints(out, behind, self._inner[rows], digits)
        place = at.copy()
        place[rows] = behind + digits
        for column in self.fields:
            column.write(out, place)
            place = place + column.measure()


Column = VarintColumn | Fixed64Column | MessageColumn


def write_messages(column: MessageColumn) -> NDArray[np.uint8]:
    """Write n messages one after the other, each as the same field of what holds them."""
    sizes = column.measure()
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    out = np.empty(total, np.uint8)
    column.write(out, ends - sizes)
    return out


def _list_present(present: Flags | None, count: int) -> Integers:
    """List the messages that have a field."""
    if present is None:
        return np.arange(count)
    return np.flatnonzero(present)


def _keep_present(sizes: Integers, present: Flags | None) -> Integers:
    """Set the size of what is absent to 0. sizes, present: [n]."""
    if present is None:
        return sizes
    return np.where(present, sizes, 0)


def _write_tag(
    out: NDArray[np.uint8],
    at: Integers,
    content: bytes,
) -> Integers:
    """Write the same bytes to each place. Returns the places behind them."""
    for place, byte in enumerate(content):
        out[at + place] = byte
    return at + len(content)


def _write_varints(
    out: NDArray[np.uint8],
    at: Integers,  # [k], places
    values: Integers,  # [k], at least 0
    lengths: Integers,  # [k], bytes of each
) -> None:
    """Write whole numbers in 7 bits per byte."""
    for place in range(int(lengths.max(initial=0))):
        here = np.flatnonzero(lengths > place)
        shifted = values[here] >> (7 * place)
        low = shifted & LOW_BITS
        goes_on = lengths[here] > place + 1
        written = np.where(goes_on, low | GOES_ON, low)
        target = at[here] + place
        out[target] = written
