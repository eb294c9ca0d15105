"""Protobuf messages of equal form, written by the column: n messages at once, whose fields are arrays."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

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


class Column(abc.ABC):
    """A field of some of n messages, written for all of them at once."""

    number: int
    present: Flags | None  # [n]; None: all have it
    wire: ClassVar[int]  # how the field is written

    @property
    @abc.abstractmethod
    def _sizes(self) -> Integers:
        """Bytes of the field behind its tag: int64 [n]; of an absent one anything."""

    @abc.abstractmethod
    def _write_content(
        self,
        out: NDArray[np.uint8],
        at: Integers,
        rows: Integers,
    ) -> None:
        """Write what stands behind the tags to its places. at, rows: [k], those of the messages that have the field."""

    def measure(self) -> Integers:
        """Measure the field of each message, bytes: int64 [n]; 0 where it is absent."""
        whole = self._sizes + len(tag(self.number, self.wire))
        return whole if self.present is None else np.where(self.present, whole, 0)

    def write(
        self,
        out: NDArray[np.uint8],
        at: Integers,
    ) -> None:
        """Write the field of each message to its place in `out`. at: [n]."""
        count = len(self._sizes)
        rows = np.arange(count) if self.present is None else np.flatnonzero(self.present)
        behind = at[rows]
        for byte in tag(self.number, self.wire):
            out[behind] = byte
            behind = behind + 1
        self._write_content(out, behind, rows)


@dataclass(frozen=True)
class VarintColumn(Column):
    """A field with a whole number in some of n messages."""

    number: int
    values: Integers  # [n], at least 0
    present: Flags | None = None  # [n]; None: all have it
    wire: ClassVar[int] = VARINT

    @cached_property
    def _sizes(self) -> Integers:
        """Bytes of each number: int64 [n]."""
        lengths = np.ones(len(self.values), np.int64)
        for digits in range(1, MAX_DIGITS):
            limit = 1 << (7 * digits)
            lengths += self.values >= limit
        return lengths

    def _write_content(
        self,
        out: NDArray[np.uint8],
        at: Integers,
        rows: Integers,
    ) -> None:
        """Write the numbers in 7 bits per byte."""
        values = self.values[rows].astype(np.int64)
        lengths = self._sizes[rows]
        for place in range(int(lengths.max(initial=0))):
            here = np.flatnonzero(lengths > place)
            shifted = values[here] >> (7 * place)
            low = shifted & LOW_BITS
            goes_on = lengths[here] > place + 1
            out[at[here] + place] = np.where(goes_on, low | GOES_ON, low)


@dataclass(frozen=True)
class Fixed64Column(Column):
    """A field with 8 bytes in some of n messages: a whole number, or a float64."""

    number: int
    values: Integers | Numbers  # [n]
    present: Flags | None = None  # [n]; None: all have it
    wire: ClassVar[int] = FIXED64

    @cached_property
    def _sizes(self) -> Integers:
        """Bytes of each value, 8: int64 [n]."""
        return np.full(len(self.values), 8)

    def _write_content(
        self,
        out: NDArray[np.uint8],
        at: Integers,
        rows: Integers,
    ) -> None:
        """Write the 8 bytes of each value."""
        kind = "<f8" if self.values.dtype.kind == "f" else "<i8"
        values = self.values[rows].astype(kind)
        content = values.view(np.uint8).reshape(-1, 8)
        for place in range(8):
            out[at + place] = content[:, place]


@dataclass(frozen=True)
class MessageColumn(Column):
    """A field with a message in some of n messages."""

    number: int
    fields: Sequence[Column]  # where the message is absent, so are they
    present: Flags | None = None  # [n]; None: all have it
    wire: ClassVar[int] = LENGTH_DELIMITED

    @cached_property
    def _length(self) -> VarintColumn:
        """The lengths of the inner messages, as what stands before them."""
        inner: Integers = np.sum([column.measure() for column in self.fields], axis=0)
        return VarintColumn(self.number, inner)

    @cached_property
    def _sizes(self) -> Integers:
        """Bytes of each inner message and of its length: int64 [n]."""
        return self._length._sizes + self._length.values

    def _write_content(
        self,
        out: NDArray[np.uint8],
        at: Integers,
        rows: Integers,
    ) -> None:
        """Write the length of each inner message, and its fields."""
        self._length._write_content(out, at, rows)
        place = np.zeros(len(self._sizes), np.int64)
        place[rows] = at + self._length._sizes[rows]
        for column in self.fields:
            column.write(out, place)
            place = place + column.measure()


def write_messages(column: MessageColumn) -> NDArray[np.uint8]:
    """Write n messages one after the other, each as the same field of what holds them."""
    sizes = column.measure()
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    out = np.empty(total, np.uint8)
    column.write(out, ends - sizes)
    return out
