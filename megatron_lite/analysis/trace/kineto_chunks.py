"""A Kineto file cut into chunks of whole events, without parsing it as a whole."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_lite.analysis.trace.blocks import BLOCK_BYTES, Blocks
from megatron_lite.analysis.trace.kineto_json import Event, decoded, decoded_alone, mended
from megatron_lite.analysis.trace.refused import TraceError

_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_BARE_ARRAY = re.compile(rb"\s*\[")
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]")
_BLANK = b", \t\r\n"
_LEADING = re.compile(rb"[, \t\r\n]*")
_MOST_HEADER_BYTES = 64 << 20
_NEAR = 64 << 10  # how far before a chunk's end the last border between two events is looked for first
_MOST_EVENT_BYTES = 64 << 20  # no event is that long: what is there is something else
_MOST_ENDS, _MOST_PIECES = 8, 16


class Chunks:
    """Iterates over lists of events. After it: `header`, all that stands beside the events, and `damage`, a sentence."""

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES):
        self.path, self.header, self.damage = path, {}, None
        self._blocks, self._unreadable = Blocks(path, block_bytes), 0
        self._before, self._text, self._at = b"", b"", 0  # _at: place of _text in the file's text

    @property
    def bytes_read(self) -> int:
        """Of the file as it lies on the disk, for what shows how far it is read."""
        return self._blocks.bytes_read

    def __iter__(self) -> Iterator[list[Event]]:
        blocks, ended = iter(self._blocks), False
        self._find_array(blocks)
        for block in blocks:
            self._text += block
            if not ended and len(self._text) >= self._blocks.block_bytes:
                events, ended = self._next_chunk()
                yield events
                if not ended and len(self._text) > _MOST_EVENT_BYTES:
                    break
        size = None
        while not ended and self._text and size != len(self._text):
            size = len(self._text)
            events, ended = self._next_chunk(last=True)
            yield events
        self.header = self._header(self._text if ended else None)
        self.damage, self.cut = self._blocks.damage or self._damage(ended), not ended

    def _find_array(self, blocks: Iterator[bytes]):
        """Stand at the first event."""
        for block in blocks:
            self._text += block
            start = self._text[:4096].lstrip()[:1]
            found = (_BARE_ARRAY.match if start == b"[" else _ARRAY.search)(self._text)
            if found:
                self._before = self._text[: found.start()] if start == b"{" else b""
                self._move(found.end())
                return
            if start not in (b"{", b"[", b"") or len(self._text) > _MOST_HEADER_BYTES:
                break
        raise TraceError(f"{self.path}: {_what_it_is(self._text, self._blocks.damage)}")

    def _next_chunk(self, last: bool = False) -> tuple[list[Event], bool]:
        """The next events, and whether their array ends there."""
        start = _LEADING.match(self._text).end()
        if self._text.startswith(b"]", start):
            return [], True
        border = self._last_border()
        if border and (events := decoded(self._text[start:border])) is not None:
            self._move(border)
            return events, False
        for number, end in enumerate(_END.finditer(self._text)):
            if number < _MOST_ENDS and (events := decoded(self._text[start : end.start() + 1])) is not None:
                self._move(end.end())
                return events, True
        return self._one_by_one(last)

    def _last_border(self) -> int:
        """Place after the last event that another one follows; 0: none is seen."""
        for start in (max(len(self._text) - _NEAR, 0), 0):
            if places := [found.start() + 1 for found in _BETWEEN.finditer(self._text, start)]:
                return places[-1]
        return 0

    def _one_by_one(self, last: bool) -> tuple[list[Event], bool]:
        """The events of a chunk that holds something unreadable, which is left out. `last`: no more text will come."""
        borders = [0, *(found.start() + 1 for found in _BETWEEN.finditer(self._text))]
        events, place = [], 0
        while place < len(borders) - 1:
            event, after = self._event_at(borders, place)
            if event is not None:
                events.append(event)
            elif end := self._end_within(borders[place], borders[place + 1]):
                return self._ended(events, *end)
            elif not last and place + _MOST_PIECES >= len(borders):
                break  # the event may end in what is not read yet
            else:
                self._unreadable, after = self._unreadable + 1, place + 1
            place = after
        if end := self._end_within(borders[place], len(self._text)):
            return self._ended(events, *end)
        if last and (event := decoded_alone(self._text[borders[place] :].strip(_BLANK))) is not None:
            events.append(event)
            borders[place] = len(self._text)
        self._move(borders[place])
        return events, False

    def _event_at(self, borders: list[int], place: int) -> tuple[Event | None, int]:
        """The event that begins at a border, and the border where it ends: borders may stand inside of events."""
        for after in range(place + 1, min(place + 1 + _MOST_PIECES, len(borders))):
            piece = self._text[borders[place] : borders[after]].strip(_BLANK)
            event = None if _is_open(piece) else decoded_alone(piece)
            if event is not None:
                return event, after
        return None, place

    def _end_within(self, start: int, stop: int) -> tuple[Event, int] | None:
        """The array's last event and the place after the array, if it ends between the two places."""
        for end in _END.finditer(self._text, start, stop):
            event = decoded_alone(self._text[start : end.start() + 1].strip(_BLANK))
            if event is not None:
                return event, end.end()
        return None

    def _ended(self, events: list[Event], last: Event, end: int) -> tuple[list[Event], bool]:
        self._move(end)
        return [*events, last], True

    def _move(self, by: int):
        self._text = self._text[by:]
        self._at += by

    def _damage(self, ended: bool) -> str | None:
        if not ended:
            left = self._text.lstrip(_BLANK)
            where = self._at + len(self._text) - len(left)
            what = f"in the event at byte {where:,}" if left else f"after byte {where:,}"
            return f"the JSON breaks off {what}; what stands before it was read"
        return f"events that cannot be read: {self._unreadable:,}, left out" if self._unreadable else None

    def _header(self, after: bytes | None) -> dict:
        """What stands before and after the events; only what stands before where the end is missing or damaged."""
        before = self._before.rstrip(_BLANK) + b"}"
        for text in ([] if after is None else [self._before + b'"traceEvents":[]' + after]) + [before]:
            try:
                header = json.loads(mended(text), strict=False)
            except (ValueError, RecursionError):
                continue
            return header if isinstance(header, dict) else {}
        return {}


def _is_open(piece: bytes) -> bool:
    """Does it end inside of a list or a string?"""
    return piece.count(b"[") > piece.count(b"]") or (piece.count(b'"') - piece.count(rb"\"")) % 2 == 1


def _what_it_is(text: bytes, damage: str | None) -> str:
    if damage:
        return f"{damage}, and holds no event."
    if not text.strip():
        return "empty; a trace holds a JSON object with traceEvents."
    if text.lstrip()[:1] not in (b"{", b"["):
        return "not a trace: neither JSON nor gzipped JSON."
    return "JSON without traceEvents, so no trace of torch.profiler."
