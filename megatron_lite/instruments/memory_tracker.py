"""Every tensor storage that appears and disappears on the CPU, seen at torch's dispatcher.

A dispatch mode sees each operation's results, whoever called it: Python, the autograd engine, DistributedDataParallel.
A weak reference tells when a result's storage is freed. What a kernel takes and gives back within itself stays unseen.
"""

import os
import time
import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.estimate.caching_allocator import Allocation, Layout
from megatron_lite.instruments.memory_oom import asked_bytes
from megatron_lite.instruments.memory_tags import RECOMPUTE, Place
from megatron_lite.instruments.snapshot_format import (
    ALLOC,
    FREE,
    OUT_OF_MEMORY,
    Event,
    Stacks,
    apply_events,
    build_annotations,
    build_snapshot,
)
from megatron_lite.phases import Phase

FORWARD, BACKWARD = Phase.FORWARD.value, Phase.BACKWARD.value
FRESH = ("aten::lift_fresh", "aten::resize_")  # their result is an argument, and its memory may be new all the same


class StorageTracker(TorchDispatchMode):
    """Keeps at least the newest `most` allocations and frees, and all that is alive."""

    def __init__(self, place: Place, most: int):
        super().__init__()
        self.failure: Exception | None = None
        self.out_of_memory = None  # called with (bytes asked for) while the failing operation still stands
        self._place, self._most = place, most
        self._stacks, self._layout = Stacks(), Layout()
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
        """See all from here on. Entered by hand, since it spans calls; on this thread only."""
        if not self._entered and self.failure is None:
            super().__enter__()
            self._entered = self._recording = True
            weak = weakref.ref(self)

            def stop():  # in a forked child, such as a loader's worker: nobody will read what it records
                if (mine := weak()) is not None:
                    mine._recording = False

            os.register_at_fork(after_in_child=stop)

    def stop(self):
        """Operations are theirs alone again; frees of what is known are still noticed."""
        if self._entered:
            self._entered = False
            super().__exit__(None, None, None)

    def forget_history(self):
        """What has happened so far is no longer shown, only what is left of it."""
        apply_events(self._layout, self._events)
        self._events.clear()
        self._bookmark, self.dropped = 0, False

    def begin_step(self):
        self._module_of.clear()

    def add_unseen(self, name: str, size: int):
        """Memory that a library takes outside of torch's operations, and keeps; `name` stands for its stack."""
        allocation = Allocation(size, self._tag(), [{"filename": "??", "line": 0, "name": name}])
        self._add(ALLOC, allocation)

    @property
    def seeing(self) -> bool:
        """Whether everything is seen at this moment."""
        return self._entered and self._recording

    def live_bytes(self) -> int:
        """Of all storages that are known and alive."""
        return sum(watch.allocation.size for watch in list(self._live.values()))

    def remember(self):
        """This moment, for a snapshot of it later on."""
        self._bookmark = len(self._events)

    def snapshot(self, remembered: bool = False) -> dict:
        """Of now or of the remembered moment, in the form of torch.cuda.memory._snapshot(). Recording can go on."""
        events = self._events[: self._bookmark] if remembered else self._events[:]
        layout, surplus = self._layout.copy(), max(len(events) - self._most, 0)
        apply_events(layout, events[:surplus])
        self.dropped = self.dropped or bool(surplus)
        return build_snapshot(layout, events[surplus:], build_annotations(self._place.marks))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            results = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            self._failed_to_allocate(func, error)
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
            if isinstance(result, Tensor) and result.device.type == "cpu" and result.layout is torch.strided:
                storage = result.untyped_storage()
                watch = self._live.get(id(storage))
                if watch is None:
                    self._meet(func, storage)
                elif watch.allocation.size != storage.nbytes():
                    self._lose(watch)
                    self._meet(func, storage)

    def _meet(self, func, storage):
        size = storage.nbytes()
        if not size:
            return
        allocation = Allocation(size, self._tag(), self._stacks.capture(str(func)))
        self._live[id(storage)] = _Watch(storage, self._lose, allocation)
        returns_arguments = self._aliases.get(func)
        if returns_arguments is None:
            schema = func._schema
            aliases = any(value.alias_info is not None for value in schema.returns)
            returns_arguments = self._aliases[func] = schema.name not in FRESH and aliases
        if returns_arguments:
            self._layout.place(allocation)  # it was there before it was first seen
        else:
            self._add(ALLOC, allocation)

    def _lose(self, watch: "_Watch"):
        try:
            if self._live.pop(watch.key, None) is not None:
                self._add(FREE, watch.allocation, (self._stacks.capture() if self._entered else [], self._tag()))
        except Exception as error:  # noqa: BLE001 - nobody hears of what fails in a weak reference's callback
            self.failure, self._recording = error, False

    def _add(self, action: str, allocation: Allocation, where: tuple[list[dict], str] | None = None):
        """`where`: stack and tag, unless they are the allocation's own."""
        frames, tag = where or (allocation.frames, allocation.tag)
        self._events.append(Event(action, allocation, time.time_ns() // 1000, frames, tag))
        if len(self._events) > 2 * self._most:
            apply_events(self._layout, self._events[: self._most])
            del self._events[: self._most]
            self._bookmark, self.dropped = max(self._bookmark - self._most, 0), True

    def _tag(self) -> str:
        place = self._place
        if place.phase_name not in (BACKWARD, RECOMPUTE):
            return place.tag
        node = torch._C._current_autograd_node()
        module = place.module or (self._module_of.get(node._sequence_nr(), "") if node is not None else "")
        # Only a forward that is repeated for its activations records gradients inside backward; inside of a Function of
        # its own it does not, but modules run.
        again = node is not None and (torch.is_grad_enabled() or place.phase_name == RECOMPUTE)
        return place.tag_of(RECOMPUTE if again else BACKWARD, module)

    def _failed_to_allocate(self, func, error: RuntimeError):
        asked = asked_bytes(error)
        if asked is None or not self._recording:
            return
        allocation = Allocation(asked, self._tag(), self._stacks.capture(str(func)))
        self._add(OUT_OF_MEMORY, allocation)
        if self.out_of_memory is not None:
            self.out_of_memory(asked)


class _Watch(weakref.ref):
    """A weak reference that knows what it watched."""

    __slots__ = ("allocation", "key")

    def __new__(cls, storage, callback, allocation: Allocation):
        return super().__new__(cls, storage, callback)

    def __init__(self, storage, callback, allocation: Allocation):
        super().__init__(storage, callback)
        self.key, self.allocation = id(storage), allocation
