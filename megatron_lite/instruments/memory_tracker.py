"""Records every tensor storage that is allocated and freed on the CPU, at torch's dispatcher.

A dispatch mode sees each operation's results, whoever called it: Python, the autograd engine, DistributedDataParallel.
A weak reference tells when a result's storage is freed. What a kernel takes and gives back within itself stays unseen.
"""

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from megatron_lite.caching_allocator import Allocation, SegmentMap
from megatron_lite.formats.memory_snapshot import Frame, MemorySnapshot
from megatron_lite.instruments.memory_oom import read_asked_bytes
from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.instruments.snapshot_format import (
    ALLOC,
    FREE,
    OUT_OF_MEMORY,
    Event,
    apply_events,
    build_annotations,
    build_snapshot,
)
from megatron_lite.phases import RECOMPUTE, Phase

BACKWARD = Phase.BACKWARD.value
FRESH = ("aten::lift_fresh", "aten::resize_")  # their result is an argument, and its memory may be new all the same
STAND_INS = "megatron_lite/script_walk/"  # files whose functions stand in the place of torch's: no stack shows them
# code that records, or calls what records, is left out of stacks
RECORDERS = (
    "megatron_lite/instruments/",
    STAND_INS,
    "megatron_lite/planner/walk/kernels.py",
    "megatron_lite/planner/walk/tracker.py",
    "/torch/_ops.py",
    "/torch/utils/_python_dispatch.py",
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
)
COMMUNICATION = "/torch/distributed/distributed_c10d.py"
MAX_STACK_FRAMES = 100
RESIZE = "resize_"  # the method of torch.UntypedStorage that is replaced while recording
# the one that it inherits, which torch's stubs leave out
TORCH_RESIZE: Callable[[torch.UntypedStorage, int], object] = getattr(torch._C.StorageBase, RESIZE)


class StackRecorder:
    """Captures calling stacks as lists of frames, innermost first; equal stacks are one list object."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | int, ...], list[Frame]] = {}
        self._frames: dict[tuple[int, int], Frame] = {}
        self._codes: dict[int, CodeType] = {}  # keeps them alive: a code's id must stay its own

    def capture(self, operation: str = "") -> list[Frame]:
        """Capture the calling stack without those who record; `operation` stands before it like a C++ frame.

        Empty on a thread of torch's own, where Python has no frames but the recorders'.
        """
        caller = sys._getframe(1)
        calls: list[str | int] = [operation]
        add = calls.append  # most of the time of recording is spent in this loop
        frame: FrameType | None = caller
        while frame is not None:
            add(id(frame.f_code))
            add(frame.f_lasti)
            frame = frame.f_back
        key = tuple(calls)
        if key in self._known:
            return self._known[key]
        frames = self._list_frames(caller)
        if operation:
            frames.insert(0, {"filename": "??", "line": 0, "name": operation})
        self._known[key] = frames
        return frames

    def _list_frames(self, innermost: FrameType) -> list[Frame]:
        """List the frames of a stack from the first one on that does not record."""
        frames: list[Frame] = []
        began = False
        frame: FrameType | None = innermost
        for _ in range(MAX_STACK_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            self._codes[id(code)] = code
            began = began or not any(part in code.co_filename for part in RECORDERS)
            if began and STAND_INS not in code.co_filename:
                found: Frame = {"filename": code.co_filename, "line": frame.f_lineno or 0, "name": code.co_name}
                frames.append(self._frames.setdefault((id(code), frame.f_lasti), found))
            frame = frame.f_back
        return frames


class StorageTracker(TorchDispatchMode):
    """Records allocations and frees: at least the newest `most` of them, and everything that is still allocated.

    Args:
        place: Where in the run this process is.
        most: Events that are kept.
    """

    DEVICE = "cpu"  # of the tensors that are watched
    STORAGES: tuple[str, ...] = ("cpu",)  # the devices that their storages name

    def __init__(self, place: StepMarks, most: int) -> None:
        TorchDispatchMode.__init__(self)
        self.failure: Exception | None = None
        # called with the bytes that were asked for, while the operation that failed still stands
        self.out_of_memory: Callable[[int], object] | None = None
        self._place = place
        self._most = most
        self._stacks = StackRecorder()
        self._layout = SegmentMap()
        self._events: list[Event] = []
        self._live: dict[int, _Watch] = {}
        self._aliases: dict[object, bool] = {}  # of an operation: its results are arguments
        self._module_of: dict[int, str] = {}  # of the autograd nodes of this step, by sequence number
        self._entered = False
        self._recording = False
        self._bookmark = 0
        self.dropped = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that this mode leaves compiled code as it is: looking into it would change its numbers."""
        return True

    def start(self) -> None:
        """Start recording, on this thread only."""
        if self._entered or self.failure is not None:
            return
        TorchDispatchMode.__enter__(self)
        self._entered = True
        self._recording = True
        setattr(torch.UntypedStorage, RESIZE, lambda storage, size: self._resize(storage, size))
        weak = weakref.ref(self)

        def stop() -> None:  # a forked child, such as a loader's worker, must not record
            mine = weak()
            if mine is not None:
                mine._recording = False

        os.register_at_fork(after_in_child=stop)

    def stop(self) -> None:
        """Stop recording allocations. Frees of recorded ones are still noticed."""
        if self._entered:
            self._entered = False
            delattr(torch.UntypedStorage, RESIZE)
            TorchDispatchMode.__exit__(self, None, None, None)

    def forget_history(self) -> None:
        """Drop all recorded events; what is still allocated stays."""
        self._drop_events(len(self._events))
        self._bookmark = 0
        self.dropped = False

    def begin_step(self) -> None:
        self._module_of.clear()

    def add_unseen(self, name: str, size: int) -> None:
        """Record memory that a library takes outside of torch's operations and keeps.

        Args:
            name: Shown in place of a stack.
            size: Bytes.
        """
        self._add(ALLOC, Allocation(size, self._tag(), [{"filename": "??", "line": 0, "name": name}]))

    @property
    def seeing(self) -> bool:
        """Whether allocations are being recorded."""
        return self._entered and self._recording

    def remember(self) -> None:
        """Remember this moment, of which `snapshot` can be taken later."""
        self._bookmark = len(self._events)

    def snapshot(self, remembered: bool = False) -> MemorySnapshot:
        """Take a snapshot of now or of the remembered moment. Recording can go on."""
        events = self._events[: self._bookmark] if remembered else self._events[:]
        layout = self._layout.copy()
        surplus = max(len(events) - self._most, 0)
        apply_events(layout, events[:surplus])
        self.dropped = self.dropped or bool(surplus)
        return build_snapshot(layout, events[surplus:], build_annotations(self._place.marks))

    def __torch_dispatch__(
        self,
        func: "OpOverload[..., object]",
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
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
                self._give_up(error)
        return results

    def _give_up(self, error: Exception) -> None:
        """Stop recording for good."""
        self.failure = error
        self._recording = False

    def _look_at(self, func: "OpOverload[..., object]", results: object) -> None:
        """Record the memory of an operation's results."""
        if self._place.phase_name == Phase.FORWARD:
            # a node is numbered right before its operation is dispatched: the first one seen after it is its own
            self._module_of.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._place.module)
        several = results if type(results) is tuple or type(results) is list else (results,)
        for result in several:
            if (
                not isinstance(result, Tensor)
                or result.device.type != self.DEVICE
                or result.layout is not torch.strided
            ):
                continue
            if is_traceable_wrapper_subclass(result):  # such as a DTensor, whose own storage holds nothing
                continue
            if func not in self._aliases:
                is_alias = any(value.alias_info is not None for value in func._schema.returns)
                self._aliases[func] = is_alias and func._schema.name not in FRESH
            self._look_at_storage(result.untyped_storage(), str(func), self._aliases[func])

    def _look_at_storage(self, storage: torch.UntypedStorage, operation: str, was_there: bool = False) -> None:
        """Record a storage whose memory is new.

        Args:
            storage: The memory of one of the operation's results.
            operation: The name of what was called.
            was_there: The result is an argument, so that its memory is no new allocation.
        """
        watch = self._live.get(id(storage))
        size = storage.nbytes()
        if watch is not None:
            if watch.allocation.size == size:
                return
            self._lose(watch)
        if not size or (was_there and _is_communicating()):
            return
        allocation = Allocation(size, self._tag(), self._stacks.capture(operation))
        watch = _Watch(storage, self._lose)
        watch.key = id(storage)
        watch.allocation = allocation
        self._live[watch.key] = watch
        if was_there:
            self._layout.place(allocation)  # before it was first seen
        else:
            self._add(ALLOC, allocation)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Stand in for torch.UntypedStorage.resize_, by which fully_shard frees and takes memory past the
        dispatcher."""
        TORCH_RESIZE(storage, size)
        try:
            if self._recording and storage.device.type in self.STORAGES:
                self._look_at_storage(storage, "storage.resize_")
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)

    def _lose(self, watch: "_Watch") -> None:
        """Record that a storage's memory was freed."""
        try:
            if self._live.pop(watch.key, None) is not None:
                frames = self._stacks.capture() if self._entered else []
                self._add(FREE, watch.allocation, (frames, self._tag()))
        except Exception as error:  # noqa: BLE001 - errors in a weak reference's callback are not raised
            self._give_up(error)

    def _add(self, action: str, allocation: Allocation, where: tuple[list[Frame], str] | None = None) -> None:
        """Record an event.

        Args:
            action: One of those of Event.
            allocation: The memory that it concerns.
            where: Stack and tag of the moment, if they are not the allocation's own.
        """
        frames, tag = where or (allocation.frames, allocation.tag)
        self._events.append(Event(action, allocation, time.time_ns() // 1000, frames, tag))
        if len(self._events) > 2 * self._most:
            self._drop_events(self._most)

    def _drop_events(self, number: int) -> None:
        """Apply the oldest events to the layout, and drop them from the trace."""
        apply_events(self._layout, self._events[:number])
        del self._events[:number]
        self._bookmark = max(self._bookmark - number, 0)
        self.dropped = True

    def _tag(self) -> str:
        """Make the tag of an allocation that happens now."""
        place = self._place
        if place.phase_name not in (BACKWARD, RECOMPUTE):
            return place.tag
        node = torch._C._current_autograd_node()
        module = place.module
        if not module and node is not None:
            module = self._module_of.get(node._sequence_nr(), "")
        # Only a forward that is repeated for its activations records gradients inside backward; inside of a Function of
        # its own it does not, but modules run.
        again = node is not None and (torch.is_grad_enabled() or place.phase_name == RECOMPUTE)
        return place.make_tag(RECOMPUTE if again else BACKWARD, module)


def _is_communicating() -> bool:
    """Whether torch.distributed calls.

    Memory that gloo takes and returns within a call is not recorded, as a kernel's is not.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(COMMUNICATION):
        frame = frame.f_back
    return frame is not None


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage, with what was recorded of it."""

    __slots__ = ("allocation", "key")
    allocation: Allocation
    key: int  # the storage's id
