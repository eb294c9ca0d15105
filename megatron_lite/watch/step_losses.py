"""Losses of a training loop that is not known: read from what backward is called on, without making the host wait."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from msgspec import UNSET, UnsetType

from megatron_lite.train.step_metrics import Readback

Outputs = torch.Tensor | Iterable[torch.Tensor]
Scale = Callable[[torch.amp.GradScaler, Outputs], Outputs]


@dataclass
class StepLoss:
    """The loss of one step, as far as it has arrived."""

    total: float = 0.0
    underway: int = 0  # scalars that have not arrived
    in_optimizer: int = 0  # calls of backward within an optimizer's step
    parted: bool = False  # an optimizer has stepped since: a further loss would be another one
    known: bool = True


@dataclass
class Scaled:
    """The last tensor that a GradScaler has scaled; None for several at once, of which none is the loss."""

    made: weakref.ref[torch.Tensor] | None = None
    loss: torch.Tensor | None = None  # that it was made of


class StepLosses:
    """Sums the scalars that backward was called on in each step, before a GradScaler: the loss whose gradients the
    step uses.

    A step has no loss where that is not one number: where backward was given gradients, where a closure was called
    several times, or where several optimizers have losses of their own.
    """

    def __init__(self) -> None:
        self._readback: Readback[int] = Readback()
        self._steps: dict[int, StepLoss] = {}
        self._scaled: Scaled | None = None  # None: no GradScaler has scaled anything

    def forget(self) -> None:
        """Drop what the parent process recorded, in a process that was forked from it."""
        self._readback.forget()
        self._steps.clear()
        self._scaled = None

    def wrap_scale(self, scale: Scale) -> Scale:
        """Wrap GradScaler.scale, so that it notes what it is given."""

        @functools.wraps(scale)
        def call(scaler: torch.amp.GradScaler, outputs: Outputs) -> Outputs:
            made = scale(scaler, outputs)
            if scaler.is_enabled():
                if isinstance(outputs, torch.Tensor) and isinstance(made, torch.Tensor):
                    self._scaled = Scaled(weakref.ref(made), outputs.detach())
                else:
                    self._scaled = Scaled()
            return made

        return call

    def add(self, step: int, tensors: object, in_optimizer: bool) -> None:
        """Record a call of backward.

        Args:
            step: the number of the step in which it is called.
            tensors: the tensors that it is called on; None where these are no loss.
            in_optimizer: whether an optimizer's step() calls it, through a closure.
        """
        # tensors' methods are called as rarely as can be: between a model's operations each costs microseconds
        one = self._steps.setdefault(step, StepLoss())
        if in_optimizer:
            one.in_optimizer += 1
        loss = None if one.parted or one.in_optimizer > 1 else self._find_loss(tensors)
        # others than Tensor, such as DTensor, may have to ask other ranks for the number
        if type(loss) is not torch.Tensor or loss.numel() != 1:
            one.known = False
        elif loss.is_cpu:
            one.total += loss.item()
        elif loss.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._readback.push(step, [loss.detach().reshape(())])
            one.underway += 1
        else:
            one.known = False

    def part(self, step: int) -> None:
        """Note that an optimizer has stepped."""
        if step in self._steps:
            self._steps[step].parted = True

    def take(self, step: int, wait: bool) -> float | None | UnsetType:
        """Return the loss of a step as its record holds it: UNSET if it is not known, None for one that is NaN or Inf.

        Args:
            step: the number of the step.
            wait: whether to wait for what has not arrived.
        """
        with contextlib.suppress(RuntimeError):  # a GPU after a fatal error, which the step itself has raised
            for number, [value] in self._readback.pop(0) if wait else self._readback.arrived():
                if number in self._steps:  # not written without it: a loss may be late, as from a stream of its own
                    self._steps[number].total += value
                    self._steps[number].underway -= 1
        one = self._steps.pop(step, None)
        if one is None or not one.known or one.underway:
            return UNSET
        return one.total if math.isfinite(one.total) else None

    def _find_loss(self, tensors: object) -> object:
        """Find the loss that backward is called on, before it was scaled; None where that is not known."""
        tensor = tensors
        if isinstance(tensors, (tuple, list)) and len(tensors) == 1:
            tensor = tensors[0]
        if self._scaled is None:
            return tensor
        is_scaled_loss = self._scaled.made is not None and self._scaled.made() is tensor
        return self._scaled.loss if is_scaled_loss else None
