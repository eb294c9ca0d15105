"""The tags of recorded allocations, which say where in a run they happened: 'step 10/forward/decoder.layers.0.mlp'."""

import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from megatron_lite.instruments.base import Instrument
from megatron_lite.phases import RECOMPUTE, SETUP, Phase

MAX_MARKS = 20_000
MAX_MARKED_STEPS = 1_000


class StepMarks(Instrument):
    """The current step, phase and innermost module of a run, and when steps and phases began and ended.

    Args:
        told: Called with each new tag, where somebody asks.
    """

    def __init__(self, told: Callable[[str], object] | None = None) -> None:
        self.step = 0
        self.phase_name = SETUP
        self.module = ""
        self.tag = SETUP
        self.marks: deque[tuple[int, str, str]] = deque(maxlen=MAX_MARKS)  # (time in us, START or END, name)
        self.begun: dict[int, int] = {}  # the newest steps and when they began, in us
        self._told = told

    def begin(self, step: int) -> None:
        self.step = step
        self._mark("START", f"step {step}")
        began_us, _, _ = self.marks[-1]
        self.begun[step] = began_us
        self.begun.pop(step - MAX_MARKED_STEPS, None)
        self.move("", "")

    def begin_phase(self, name: str) -> None:
        self._mark("START", name)
        self.move(name, "")

    def end_phase(self, name: str, failed: bool) -> None:
        self._mark("END", name)
        if not failed:  # keep the place where a step failed
            self.move("", "")

    def end(self, step: int) -> None:
        self._mark("END", f"step {step}")

    def move(self, phase_name: str, module: str) -> None:
        """Set the current phase and module; empty names mean none."""
        self.phase_name = phase_name
        self.module = module
        self.tag = self.make_tag(phase_name, module)
        if self._told is not None:
            self._told(self.tag)

    def make_tag(self, phase_name: str, module: str) -> str:
        """Make the tag of allocations in this phase and module."""
        parts = (f"step {self.step}", phase_name, module) if self.step else (SETUP, module)
        return "/".join(part for part in parts if part)

    def _mark(self, stage: str, name: str) -> None:
        self.marks.append((time.time_ns() // 1000, stage, name))


class ModuleHooks:
    """Hooks that tell a StepMarks which module runs. No module and no graph is changed.

    Args:
        place: What is told.
        in_backward: Also tell when gradients of a module's output arrive. A GPU's backward runs on a thread of its own,
            where the tag has to be set again.
    """

    def __init__(self, place: StepMarks, in_backward: bool) -> None:
        self.place = place
        self._in_backward = in_backward
        self._running: list[str] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Start watching every module of the process."""
        if not self._handles:
            leaving = register_module_forward_hook(self._leave, always_call=True)
            self._handles = [register_module_forward_pre_hook(self._enter), leaving]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running.clear()

    def _enter(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in self._names:  # it is called for the first time: names of all inside it
            inner = module.module if isinstance(module, DistributedDataParallel) else module
            self._names.setdefault(module, type(inner).__name__)
            for name, one in inner.named_modules():
                self._names.setdefault(one, name or type(inner).__name__)
        name = self._names[module]
        self._running.append(name)
        self._move(name)

    def _leave(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if torch.compiler.is_compiling() or not self._running:
            return
        name = self._running.pop()
        if self._in_backward and isinstance(output, Tensor):
            node = output.grad_fn
            # an Identity returns another module's output
            if node is not None and not any(output is given for given in inputs):
                node.register_prehook(partial(self._gradient_arrives, name))
        self._move(self._running[-1] if self._running else "")

    def _move(self, name: str) -> None:
        phase_name = self.place.phase_name
        if phase_name in (Phase.BACKWARD.value, RECOMPUTE):
            phase_name = RECOMPUTE if self._running else Phase.BACKWARD.value
        self.place.move(phase_name, name)

    def _gradient_arrives(self, name: str, gradients: tuple[Tensor, ...]) -> None:
        if self.place.phase_name in (Phase.BACKWARD.value, RECOMPUTE):
            self.place.move(Phase.BACKWARD.value, name)
