"""Records every tensor storage that is allocated and freed on the CPU, at torch's dispatcher.

A dispatch mode sees each operation's results, whoever called it: Python, the autograd engine, DistributedDataParallel.
A weak reference tells when a result's storage is freed. What a kernel takes and gives back within itself stays unseen.
"""

import os
import sys
import time
import weakref
from types import CodeType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from megatron_lite.formats.caching_allocator import Allocation, SegmentMap
from megatron_lite.instruments.memory_oom import read_asked_bytes
from megatron_lite.instruments.memory_tags import RECOMPUTE, StepMarks
from megatron_lite.instruments.snapshot_format import (
    ALLOC,
    FREE,
    OUT_OF_MEMORY,
    Event,
    apply_events,
    build_annotations,
    build_snapshot,
)
from megatron_lite.phases import Phase

FORWARD, BACKWARD = Phase.FORWARD.value, Phase.BACKWARD.value
FRESH = ("aten::lift_fresh", "aten::resize_")  # their result is an argument, and its memory may be new all the same
# code that records, or calls what records, is left out of stacks
RECORDERS = (
    "megatron_lite/instruments/",
    "megatron_lite/planner/walk/tracker.py",
    "/torch/utils/_python_dispatch.py",
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
)
COMMUNICATION = "/torch/distributed/distributed_c10d.py"
MAX_DEPTH = 100


class Stacks:
    """Captures calling stacks as lists of {filename, line, name}, innermost first; equal stacks are one list object."""

    def __init__(self):
        self._known: dict[tuple, list[dict]] = {}
        self._frames: dict[tuple[int, int], dict] = {}
        self._codes: dict[int, CodeType] = {}  # keeps them alive: a code's id must stay its own

    def capture(self, operation: str = "") -> list[dict]:
        """The calling stack without those who record; `operation` stands before it like a C++ frame.

        Empty on a thread of torch's own, where Python has no frames but the recorders'.
        """
        frame, key = sys._getframe(1), [operation]
        add = key.append  # most of the time of recording is spent in this loop
        while frame is not None:
            add(id(frame.f_code))
            add(frame.f_lasti)
            frame = frame.f_back
        key = tuple(key)
        if key in self._known:
            return self._known[key]
        frames, frame, began = [], sys._getframe(1), False
        for _ in range(MAX_DEPTH):
            if frame is None:
                break
            code = frame.f_code
            self._codes[id(code)] = code
            began = began or not any(part in code.co_filename for part in RECORDERS)
            if began:
                found = {"filename": code.co_filename, "line": frame.f_lineno or 0, "name": code.co_name}
                frames.append(self._frames.setdefault((id(code), frame.f_lasti), found))
            frame = frame.f_back
        self._known[key] = [{"filename": "??", "line": 0, "name": operation}, *frames] if operation else frames
        return self._known[key]


class StorageTracker(TorchDispatchMode):
    """Records allocations and frees: at least the newest `most` of them, and everything that is still allocated."""

    STORAGES = "cpu"  # the device of those that are watched

    def __init__(self, place: StepMarks, most: int):
        super().__init__()
        self.failure: Exception | None = None
        self.out_of_memory = None  # called with (bytes asked for) while the failing operation still stands
        self._place, self._most = place, most
        self._stacks, self._layout = Stacks(), SegmentMap()
        self._events: list[Event] = []
        self._live: dict[int, _Watch] = {}
        self._aliases: dict[object, bool] = {}  # of an operation: its results are arguments
        self._module_of: dict[int, str] = {}  # of the autograd nodes of this step, by sequence number
        self._entered = self._recording = False
        self._bookmark = 0
        self.dropped = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What torch.compile made stays compiled: a mode that looked into it would change its numbers."""
        return True

    def start(self):
        """Start recording, on this thread only."""
        if not self._entered and self.failure is None:
            super().__enter__()
            self._entered = self._recording = True
            torch.UntypedStorage.resize_ = lambda storage, size: self._resize(storage, size)
            weak = weakref.ref(self)

            def stop():  # a forked child, such as a loader's worker, must not record
                if (mine := weak()) is not None:
                    mine._recording = False

            os.register_at_fork(after_in_child=stop)

    def stop(self):
        """Stop recording allocations. Frees of recorded ones are still noticed."""
        if self._entered:
            self._entered = False
            del torch.UntypedStorage.resize_
            super().__exit__(None, None, None)

    def forget_history(self):
        """Drop all recorded events; what is still allocated stays."""
        self._drop_events(len(self._events))
        self._bookmark, self.dropped = 0, False

    def begin_step(self):
        self._module_of.clear()

    def add_unseen(self, name: str, size: int):
        """Record memory that a library takes outside of torch's operations and keeps.

        name: shown in place of a stack.
        """
        self._add(ALLOC, Allocation(size, self._tag(), [{"filename": "??", "line": 0, "name": name}]))

    @property
    def seeing(self) -> bool:
        """Whether allocations are being recorded."""
        return self._entered and self._recording

    def remember(self):
        """The state at this moment, of which `snapshot` can be taken later."""
        self._bookmark = len(self._events)

    def snapshot(self, remembered: bool = False) -> dict:
        """A snapshot of now or of the remembered moment, in the form of torch.cuda.memory._snapshot().

        Recording can go on.
        """
        events = self._events[: self._bookmark] if remembered else self._events[:]
        layout, surplus = self._layout.copy(), max(len(events) - self._most, 0)
        apply_events(layout, events[:surplus])
        self.dropped = self.dropped or bool(surplus)
        return build_snapshot(layout, events[surplus:], build_annotations(self._place.marks))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            results = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            asked = read_asked_bytes(error)
            if asked is not None and self._recording:
                self._add(OUT_OF_MEMORY, Allocation(asked, self._tag(), self._stacks.capture(str(func))))
                if self.out_of_memory is not None:
                    self.out_of_memory(asked)
            raise
        if self._recording:
            try:
                self._look_at(func, results)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong in here is not the training's failure
                self.failure, self._recording = error, False
        return results

    def _look_at(self, func, results):
        if self._place.phase_name == FORWARD:
            # a node is numbered right before its operation is dispatched: the first one seen after it is its own
            self._module_of.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._place.module)
        for result in results if type(results) in (tuple, list) else (results,):
            if not isinstance(result, Tensor) or result.device.type != "cpu" or result.layout is not torch.strided:
                continue
            if is_traceable_wrapper_subclass(result):  # such as a DTensor, whose own storage holds nothing
                continue
            if func not in self._aliases:
                is_alias = any(value.alias_info is not None for value in func._schema.returns)
                self._aliases[func] = is_alias and func._schema.name not in FRESH
            self._look_at_storage(result.untyped_storage(), str(func), self._aliases[func])

    def _look_at_storage(self, storage: torch.UntypedStorage, operation: str, was_there: bool = False):
        watch, size = self._live.get(id(storage)), storage.nbytes()
        if watch is not None:
            if watch.allocation.size == size:
                return
            self._lose(watch)
        if not size or was_there and _is_communicating():
            return
        allocation = Allocation(size, self._tag(), self._stacks.capture(operation))
        self._live[id(storage)] = _Watch(storage, self._lose, allocation)
        if was_there:
            self._layout.place(allocation)  # before it was first seen
        else:
            self._add(ALLOC, allocation)

    def _resize(self, storage: torch.UntypedStorage, size: int):
        """torch.UntypedStorage.resize_, by which fully_shard frees and takes memory past the dispatcher."""
        torch._C.StorageBase.resize_(storage, size)
        try:
            if self._recording and storage.device.type == self.STORAGES:
                self._look_at_storage(storage, "storage.resize_")
        except Exception as error:  # noqa: BLE001 - as above
            self.failure, self._recording = error, False

    def _lose(self, watch: "_Watch"):
        try:
            if self._live.pop(watch.key, None) is not None:
                self._add(FREE, watch.allocation, (self._stacks.capture() if self._entered else [], self._tag()))
        except Exception as error:  # noqa: BLE001 - errors in a weak reference's callback are not raised
            self.failure, self._recording = error, False

    def _add(self, action: str, allocation: Allocation, where: tuple[list[dict], str] | None = None):
        """Record an event. where: its stack and tag, if they are not the allocation's own."""
        frames, tag = where or (allocation.frames, allocation.tag)
        self._events.append(Event(action, allocation, time.time_ns() // 1000, frames, tag))
        if len(self._events) > 2 * self._most:
            self._drop_events(self._most)

    def _drop_events(self, number: int):
        """Apply the oldest events to the layout, and drop them from the trace."""
        apply_events(self._layout, self._events[:number])
        del self._events[:number]
        self._bookmark, self.dropped = max(self._bookmark - number, 0), True

    def _tag(self) -> str:
        place = self._place
        if place.phase_name not in (BACKWARD, RECOMPUTE):
            return place.tag
        node = torch._C._current_autograd_node()
        module = place.module or (self._module_of.get(node._sequence_nr(), "") if node is not None else "")
        # Only a forward that is repeated for its activations records gradients inside backward; inside of a Function of
        # its own it does not, but modules run.
        again = node is not None and (torch.is_grad_enabled() or place.phase_name == RECOMPUTE)
        return place.make_tag(RECOMPUTE if again else BACKWARD, module)


def _is_communicating() -> bool:
    """Whether torch.distributed calls.

    Memory that gloo takes and returns within a call is not recorded, as a kernel's is not.
    """
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(COMMUNICATION):
        frame = frame.f_back
    return frame is not None


class _Watch(weakref.ref):
    """A weak reference to a storage, with what was recorded of it."""

    __slots__ = ("allocation", "key")

    def __new__(cls, storage, callback, allocation: Allocation):
        return super().__new__(cls, storage, callback)

    def __init__(self, storage, callback, allocation: Allocation):
        super().__init__(storage, callback)
        self.key, self.allocation = id(storage), allocation
