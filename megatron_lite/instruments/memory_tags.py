"""The tags of recorded allocations, which say where in a run they happened: 'step 10/forward/decoder.layers.0.mlp'."""

import time
import weakref
from collections import deque
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.instruments.base import Instrument
from megatron_lite.phases import Phase

SETUP = "setup"  # all before the first step: weights, optimizer state, what a checkpoint is read into
RECOMPUTE = "recompute"  # forward once more, inside backward
BACKWARD = Phase.BACKWARD.value
MAX_MARKS, MAX_STEPS = 20_000, 1_000


class StepMarks(Instrument):
    """The current step, phase and innermost module of a run. `told` is called with each new tag."""

    def __init__(self, told=None):
        self.step, self.phase_name, self.module = 0, SETUP, ""
        self.tag = SETUP
        self.marks: deque[tuple[int, str, str]] = deque(maxlen=MAX_MARKS)  # (time in us, START or END, name)
        self.begun: dict[int, int] = {}  # the newest steps and when they began, in us
        self._told = told

    def begin(self, step: int):
        self.step = step
        self._mark("START", f"step {step}")
        self.begun[step] = self.marks[-1][0]
        self.begun.pop(step - MAX_STEPS, None)
        self.move("", "")

    def begin_phase(self, name: str):
        self._mark("START", name)
        self.move(name, "")

    def end_phase(self, name: str, failed: bool):
        self._mark("END", name)
        if not failed:  # keep the place where a step failed
            self.move("", "")

    def end(self, step: int):
        self._mark("END", f"step {step}")

    def move(self, phase_name: str, module: str):
        """Set the current phase and module; empty names mean none."""
        self.phase_name, self.module = phase_name, module
        self.tag = self.make_tag(phase_name, module)
        if self._told is not None:
            self._told(self.tag)

    def make_tag(self, phase_name: str, module: str) -> str:
        """The tag of allocations in this phase and module."""
        parts = (f"step {self.step}", phase_name, module) if self.step else (SETUP, module)
        return "/".join(part for part in parts if part)

    def _mark(self, stage: str, name: str):
        self.marks.append((time.time_ns() // 1000, stage, name))


class ModuleHooks:
    """Hooks that tell a Place which module runs. No module and no graph is changed.

    Args:
        in_backward: Also tell when gradients of a module's output arrive. A GPU's backward runs on a thread of its own,
            where the tag has to be set again.
    """

    def __init__(self, place: StepMarks, in_backward: bool):
        self.place, self._in_backward = place, in_backward
        self._running: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._handles = []

    def attach(self):
        """Start watching every module of the process."""
        if not self._handles:
            leaving = register_module_forward_hook(self._leave, always_call=True)
            self._handles = [register_module_forward_pre_hook(self._enter), leaving]

    def detach(self):
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running.clear()

    def _enter(self, module: nn.Module, inputs):
        if torch.compiler.is_compiling():
            return
        if module not in self._names:  # it is called for the first time: names of all inside it
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            for name, one in [("", module), *inner.named_modules()]:
                self._names.setdefault(one, name or type(inner).__name__)
        self._running.append(self._names[module])
        self._move(self._running[-1])

    def _leave(self, module: nn.Module, inputs, output):
        if torch.compiler.is_compiling() or not self._running:
            return
        name = self._running.pop()
        node = output.grad_fn if self._in_backward and isinstance(output, Tensor) else None
        if node is not None and not any(
            output is given for given in inputs
        ):  # an Identity returns another module's output
            node.register_prehook(partial(self._gradient_arrives, name))
        self._move(self._running[-1] if self._running else "")

    def _move(self, name: str):
        phase_name = self.place.phase_name
        if phase_name in (BACKWARD, RECOMPUTE):
            phase_name = RECOMPUTE if self._running else BACKWARD
        self.place.move(phase_name, name)

    def _gradient_arrives(self, name: str, gradients):
        if self.place.phase_name in (BACKWARD, RECOMPUTE):
            self.place.move(BACKWARD, name)
