"""The packets of a Perfetto trace, some megabytes at a time."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.file_blocks import FileBlocks
from megatron_lite.analysis.trace.protobuf_fields import (
    LENGTH_DELIMITED,
    MAX_VARINT_BYTES,
    WireError,
    WireText,
    build_text,
    iterate_fields,
    read_fields,
    read_varint,
)
from megatron_lite.formats.perfetto_trace import PacketField, TraceField

_PACKET_TAG = TraceField.PACKET << 3 | LENGTH_DELIMITED
_COMPRESSED_TAG = b"\x92\x03"  # PacketField.COMPRESSED_PACKETS
PACKET_BLOCK_BYTES = 1 << 22
MAX_PACKET_BYTES = 64 << 20  # the packet of all names in a trace with Python's frames has some megabytes
_MAX_INFLATED_BYTES = 64 << 20  # of all compressed packets of a block

# messages in packets that are read
MESSAGES = (
    PacketField.CLOCK_SNAPSHOT,
    PacketField.TRACK_EVENT,
    PacketField.INTERNED_DATA,
    PacketField.GPU_COUNTER_EVENT,
    PacketField.GPU_RENDER_STAGE_EVENT,
    PacketField.TRACK_DESCRIPTOR,
)
_FIRST_PACKETS = 16  # that tell what a file is
_MIN_OWN_FIELD = 8  # what other messages of messages have (XSpace of XLA, GraphDef of TensorFlow) ends before it


@dataclass(frozen=True)
class Packets:
    """Packets of a trace, n in the file's order."""

    text: WireText
    time_ns: Integers  # int64 [n]; 0 for one without a time
    sequence: Integers  # int64 [n], which writer's they are
    flags: Integers  # int64 [n]
    messages: dict[PacketField, tuple[Integers, Integers]]  # starts and ends, int64 [n]; -1: not in the packet

    def __len__(self) -> int:
        return len(self.time_ns)


class PacketFile:
    """Iterates over the packets of a file.

    After it: `damage`, a sentence or None; `cut`, whether the file's end is missing.
    """

    def __init__(self, path: Path, block_bytes: int = PACKET_BLOCK_BYTES):
        self.path = path
        self.cut = False
        self._file = FileBlocks(path, block_bytes)
        self._damage: str | None = None
        self._unreadable = 0
        self._at = 0  # place in the file's text behind the packets that were read

    @property
    def damage(self) -> str | None:
        """A sentence about damage of the file's text, else of its packets; None for none."""
        if self._unreadable and not (self._file.damage or self._damage):
            return f"packets that cannot be read: {self._unreadable:,}, left out"
        return self._file.damage or self._damage

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far, of the file as it lies on the disk."""
        return self._file.bytes_read

    def __iter__(self) -> Iterator[Packets]:
        content = b""
        for block in self._file:
            content += block
            starts, ends = find_packets(content)
            if ends:
                yield self._read_packets(content, starts, ends)
                content = content[ends[-1] :]
                self._at += ends[-1]
            if content and not _may_begin_packet(content):
                break
        self.cut = bool(content) or self._file.damage is not None
        if content:
            self._damage = f"the packets break off at byte {self._at:,}; what precedes them was read"

    def _read_packets(self, content: bytes, starts: list[int], ends: list[int]) -> Packets:
        """Read the fields of whole packets, those in compressed ones among them."""
        if any(content.startswith(_COMPRESSED_TAG, start) for start in starts):
            content = self._inflate_packets(content, starts, ends)
            starts, ends = find_packets(content)
        text = build_text(content)
        fields = read_fields(text, np.array(starts, np.int64), np.array(ends, np.int64))
        self._unreadable += int(np.count_nonzero(fields.unreadable))
        messages = {}
        for number in MESSAGES:
            messages[number] = fields.places(number)
        return Packets(
            text=text,
            time_ns=fields.values(PacketField.TIMESTAMP),
            sequence=fields.values(PacketField.SEQUENCE_ID),
            flags=fields.values(PacketField.SEQUENCE_FLAGS),
            messages=messages,
        )

    def _inflate_packets(self, content: bytes, starts: list[int], ends: list[int]) -> bytes:
        """Put the packets that compressed ones hold in the place of these."""
        pieces = []
        before = 0
        left = _MAX_INFLATED_BYTES
        for start, end in zip(starts, ends):
            if content.startswith(_COMPRESSED_TAG, start):
                inflated = self._inflate(content[start:end], left)
                left -= len(inflated)
                pieces.append(inflated)
            else:
                pieces.append(content[before:end])
            before = end
        return b"".join(pieces)

    def _inflate(self, packet: bytes, max_bytes: int) -> bytes:
        """Unpack one compressed packet, as far as it becomes no larger; nothing for a damaged one."""
        try:
            [packed] = iterate_fields(packet, 0, len(packet))
            stream = zlib.decompressobj()
            # 0 would mean without a limit
            text = stream.decompress(packet[packed.start : packed.end], max(max_bytes, 1))
        except (WireError, ValueError, zlib.error):
            self._unreadable += 1
            return b""
        if not stream.eof:
            self._unreadable += 1
        _, ends = find_packets(text)
        return text[: ends[-1]] if ends else b""


def find_packets(content: bytes) -> tuple[list[int], list[int]]:
    """Find the whole packets at the beginning of `content`: where each one's fields begin, and where they end."""
    starts: list[int] = []
    ends: list[int] = []
    at = 0
    size = len(content)
    while at < size and content[at] == _PACKET_TAG:
        try:
            length, start = read_varint(content, at + 1, size)
        except WireError:
            break
        at = start + length
        if at > size or length > MAX_PACKET_BYTES:
            break
        starts.append(start)
        ends.append(at)
    return starts, ends


def _may_begin_packet(content: bytes) -> bool:
    """Whether more text may make a packet of what these bytes begin."""
    if content[0] != _PACKET_TAG:
        return False
    try:
        length, _ = read_varint(content, 1, len(content))
    except WireError:
        return len(content) <= MAX_VARINT_BYTES
    return length <= MAX_PACKET_BYTES


def is_perfetto(head: bytes) -> bool:
    """Whether a file that begins with `head` is a Perfetto trace.

    Messages of other programs begin with the same byte; one of the first packets holds a field that those have not.
    """
    starts, ends = find_packets(head)
    numbers = [0]
    try:
        for start, end in zip(starts[:_FIRST_PACKETS], ends):
            numbers += [field.number for field in iterate_fields(head, start, end)]
    except WireError:
        return False
    return max(numbers) >= _MIN_OWN_FIELD
