"""Pickles of any origin, read within bounds: none takes more time than its size explains, or overflows the stack of C.

A few bytes are enough for either. Python computes a tuple's hash from its parts each time: a tuple of twice the same
tuple, of twice the same, and so on, takes years as a key, and one inside of a hundred thousand others ends the process.
Integers may be made so that all of them fall into one place of a dict. Neither can be seen while C code reads the
pickle; so an opcode that calls persistent_load is put behind each one that makes a tuple, and that weighs it.
"""

import pickle
import pickletools
import re
from io import BytesIO
from typing import Any

MAX_HASHED = 128  # parts of a key, with the parts of its parts
# of any tuple, for a pickle of that size
MAX_PARTS_PER_BYTE = 64
MIN_PARTS = 2**20
MAX_INT_BYTES = 9  # a whole number below 2**64, with its sign
MAX_TEXT_INT_BYTES = len("I-18446744073709551616L\n")
MAX_LONG_INTS = 16  # longer ones, such as the mark at the beginning of a file by an old torch
MAX_LONG_INT_BYTES = 256


class PickleBoundError(pickle.UnpicklingError):
    """A pickle that takes more time or memory than its size explains; the text says why."""


class OutsideError(PickleBoundError):
    """A pickle that refers to objects outside of itself."""


# opcodes without an argument, but for those of tuples, persistent ids and the end
ONE_BYTE = re.escape(b"]})(lde0asubR12N\x81\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98o")
SHORT_INTS = b"|".join(b"\\x8a\\x%02x.{%d}" % (count, count) for count in range(MAX_INT_BYTES + 1))
# a bounded repetition: the pattern remembers each round of it
PLAIN = re.compile(b"(?s:[" + ONE_BYTE + b"]+|[Kqh].|M..|[Jjr].{4}|G.{8}|" + SHORT_INTS + b"){1,1000}")
TUPLES = frozenset(b"t\x85\x86\x87")
STOP, FRAME, SHORT_TEXT = b".\x95\x8c"
PERSISTENT = frozenset(b"PQ")
WEIGH = b"Q"
FRAME_BYTES = 9  # of the opcode and the length
LONG_INTS = {0x8A: 1, 0x8B: 4}  # bytes of their length
TEXT_INTS = frozenset(b"IL")
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _describe_argument(code: pickletools.OpcodeInfo) -> tuple[str, int]:
    """How an opcode's argument is written: (fixed, bytes), (length, bytes of the length), (lines, how many)."""
    if code.arg is None:
        return "fixed", 0
    if code.arg.n == pickletools.UP_TO_NEWLINE:
        return "lines", 2 if code.name in ("GLOBAL", "INST") else 1
    if code.arg.n in _LENGTHS:
        return "length", _LENGTHS[code.arg.n]
    return "fixed", code.arg.n


ARGUMENTS = {ord(code.code): _describe_argument(code) for code in pickletools.opcodes}


class _Places:
    """Where a pickle that begins at `start` ends, and where something stands in it that is not plain."""

    def __init__(self, data: bytes, start: int):
        self.behind_tuples: list[int] = []
        self.frames: list[int] = []
        self.has_persistent = False
        self._long_ints = 0
        at = start
        while True:
            while plain := PLAIN.match(data, at):
                at = plain.end()
            code = data[at] if at < len(data) else None
            if code == STOP:
                break
            if code == SHORT_TEXT and at + 1 < len(data):  # most of what is not plain
                at += 2 + data[at + 1]
                continue
            at = self._note(data, at)
        self.end = at + 1

    def _note(self, data: bytes, at: int) -> int:
        """Behind the opcode at `at`."""
        end = _skip(data, at)
        code = data[at]
        if code in TUPLES:
            self.behind_tuples.append(end)
        elif code == FRAME:
            self.frames.append(at)
        elif code in PERSISTENT:
            self.has_persistent = True
        elif (code in LONG_INTS or code in TEXT_INTS) and _is_long_int(data, at, end):
            self._long_ints += 1
            if self._long_ints > MAX_LONG_INTS or end - at > MAX_LONG_INT_BYTES:
                raise PickleBoundError("it holds integers of more than 64 bits")
        return end


def _is_long_int(data: bytes, at: int, end: int) -> bool:
    if data[at] in LONG_INTS:
        return end - at - 1 - LONG_INTS[data[at]] > MAX_INT_BYTES
    return end - at > MAX_TEXT_INT_BYTES


def _skip(data: bytes, at: int) -> int:
    """Behind the opcode at `at` and its argument."""
    if at >= len(data):
        raise pickle.UnpicklingError("pickle data was truncated")
    kind, count = ARGUMENTS.get(data[at], ("", 0))
    if not kind:
        raise pickle.UnpicklingError(f"invalid load key, {data[at : at + 1]!r}.")
    end = at + 1
    if kind == "fixed":
        end += count
    elif kind == "length":
        end += count + int.from_bytes(data[end : end + count], "little")
    else:
        for _ in range(count):
            end = data.find(b"\n", end) + 1
            if not end:
                raise pickle.UnpicklingError("pickle data was truncated")
    if end > len(data):
        raise pickle.UnpicklingError("pickle data was truncated")
    return end


def _put_weighing(data: bytes, start: int, places: _Places) -> bytes:
    """The pickle as one frame, which is read faster, and with WEIGH behind each tuple."""
    behind_tuples = [(at, at) for at in places.behind_tuples]
    frames = [(at, at + FRAME_BYTES) for at in places.frames]
    cuts = sorted(behind_tuples + frames)
    pieces = []
    at = start
    for before, behind_cut in cuts:
        pieces.append(data[at:before])
        if before == behind_cut:
            pieces.append(WEIGH)
        at = behind_cut
    pieces.append(data[at : places.end])
    length = sum(map(len, pieces))
    return b"".join([bytes([FRAME]), length.to_bytes(FRAME_BYTES - 1, "little"), *pieces])


class _LongTuple(tuple):  # type: ignore[type-arg]
    """A tuple that takes too long as a key."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise PickleBoundError(f"a key is a tuple of more than {MAX_HASHED} parts")


class BoundedUnpickler(pickle.Unpickler):
    """Reads the pickle in `data` that begins at `start`; what it may name is what the subclass's find_class returns.

    `end` is behind it. pickle.UnpicklingError for one that breaks off; PickleBoundError, by this or by load, for one
    that costs too much.
    """

    def __init__(self, data: bytes, start: int = 0, *, may_refer: bool = False):
        """
        Args:
            data: The pickle, among others.
            start: Where it begins.
            may_refer: Whether it may refer to objects outside of itself, each of which is then its own id.
        """
        places = _Places(data, start)
        if places.has_persistent and not may_refer:
            raise OutsideError("refers to objects outside of itself")
        self.end = places.end
        self._weights: dict[int, int] = {}  # of tuples, by their ids: another one of that id was weighed anew
        self._max_parts = MIN_PARTS + MAX_PARTS_PER_BYTE * (self.end - start)
        super().__init__(BytesIO(_put_weighing(data, start, places)))

    def persistent_load(self, made: Any) -> Any:
        """`made`, which cannot be a key if it is a tuple with many parts."""
        if type(made) is not tuple:
            return made
        weight = 1 + len(made)
        for part in made:
            if isinstance(part, tuple):
                weight += self._weights.get(id(part), len(part))
        if weight > self._max_parts:
            raise PickleBoundError("tuples in tuples hold more than its size explains")
        kept = _LongTuple(made) if weight > MAX_HASHED else made
        self._weights[id(kept)] = weight
        return kept


class _Call:
    """Stands for whatever a pickle makes by a call, and counts what such a call may have to walk through."""

    __slots__ = ("trial",)
    trial: "_Trial"

    def __setstate__(self, state: Any) -> None:
        self.trial.count(state if isinstance(state, tuple) else (state,))

    def __setitem__(self, key: Any, value: Any) -> None:
        """An entry of an OrderedDict or another mapping: the reader will hash the key."""
        hash(key)

    def append(self, value: Any) -> None:
        """An entry of a list of some class of its own; nothing is walked through."""

    def extend(self, values: list[Any]) -> None:
        """Entries of such a list."""

    def add(self, value: Any) -> None:
        """An entry of such a set: the reader will hash it."""
        hash(value)


class _Trial(BoundedUnpickler):
    """Reads without naming anything: whether a reader that makes dicts and sets of lists will come to an end."""

    def __init__(self, data: bytes, start: int):
        super().__init__(data, start, may_refer=True)
        self._walked = 0
        self._class = type("Call", (_Call,), {"__new__": self._make})

    def _make(self, cls: type[_Call], *arguments: object, **named: object) -> _Call:
        made = object.__new__(cls)
        made.trial = self
        self.count(arguments)
        return made

    def count(self, given: tuple[object, ...]) -> None:
        """PickleBoundError if all calls together are given too much."""
        self._walked += len(given)
        for part in given:
            if isinstance(part, list | dict | set | frozenset | tuple):
                self._walked += len(part)
        if self._walked > self._max_parts:
            raise PickleBoundError("it asks for more calls than its size explains")

    def find_class(self, module: str, name: str) -> Any:
        return self._class


def check_pickle(data: bytes, start: int = 0) -> int:
    """Where the pickle ends that begins at `start`, for readers other than BoundedUnpickler.

    PickleBoundError for one that costs too much to read; what pickle raises for one that is damaged.
    """
    trial = _Trial(data, start)
    trial.load()
    return trial.end
