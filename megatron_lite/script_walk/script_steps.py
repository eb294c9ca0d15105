"""Sees the steps of a training script in what it calls of torch, and ends the script when it has trained two."""

import weakref
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.instruments.replacing import get_function, put_in_place
from megatron_lite.instruments.training_calls import TrainingCalls
from megatron_lite.phases import SETUP, Phase
from megatron_lite.watch.stand_ins import add_calls

# memory repeats from then on: the first step makes gradients and the optimizer's state, the second finds them
STEPS_WALKED = 2
BETWEEN = ("", SETUP)  # no phase is open


class ScriptEnded(BaseException):
    """Ends the script where enough was seen. No script catches it as an error of its own."""


class ScriptSteps:
    """The steps of this process' script.

    A step ends where the optimizer that stepped first has stepped again. The script ends where every optimizer that has
    stepped has stepped twice, so that a script with several trains with each.

    Args:
        place: Is told where the script is.
        begin_step: Called where a step begins.
        finish: Called where the script has trained enough.
    """

    def __init__(self, place: StepMarks, begin_step: Callable[[], object], finish: Callable[[], object]) -> None:
        self._place = place
        self._begin_step = begin_step
        self._finish = finish
        self._updates: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._calls = TrainingCalls()

    def attach(self) -> None:
        """Start watching, for the rest of the process."""
        register_module_forward_pre_hook(self._enter_module)
        register_optimizer_step_pre_hook(self._begin_update)
        register_optimizer_step_post_hook(self._end_update)
        backward = get_function(torch.autograd, "backward")
        put_in_place(torch.autograd, "backward", add_calls(backward, self._begin_backward, self._end_backward))

    def _enter_module(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        """Begin the forward phase with the first module that is called to learn."""
        if self._calls.in_backward or self._place.phase_name not in BETWEEN or not torch.is_grad_enabled():
            return
        if not self._place.step:
            self._begin_step()
            self._place.begin(1)
        self._place.begin_phase(Phase.FORWARD.value)

    def _begin_backward(self, *arguments: object, **named: object) -> None:
        if not self._calls.begin_backward():
            return
        if self._place.phase_name == Phase.FORWARD.value:
            self._place.end_phase(Phase.FORWARD.value, failed=False)
        self._place.begin_phase(Phase.BACKWARD.value)

    def _end_backward(self) -> None:
        if self._calls.end_backward():
            self._place.end_phase(Phase.BACKWARD.value, failed=False)

    def _begin_update(self, optimizer: Optimizer, *arguments: object) -> None:
        self._place.begin_phase(Phase.OPTIMIZER_STEP.value)

    def _end_update(self, optimizer: Optimizer, *arguments: object) -> None:
        self._place.end_phase(Phase.OPTIMIZER_STEP.value, failed=False)
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        self._calls.begin_leading(optimizer)
        if min(self._updates.values()) >= STEPS_WALKED:
            self._end()
        if self._calls.leads(optimizer):
            self._place.end(self._place.step)
            self._begin_step()
            self._place.begin(self._place.step + 1)

    def _end(self) -> NoReturn:
        self._finish()
        raise ScriptEnded
