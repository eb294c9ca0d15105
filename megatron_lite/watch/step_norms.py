"""Norms of the gradients of a training loop that is not known: as torch.nn.utils.clip_grad_norm_ returns them,
without a wait."""

import contextlib
import functools
import math
from collections.abc import Callable

import torch
from msgspec import UNSET, UnsetType

from megatron_lite.train.step_metrics import Readback

Clip = Callable[..., torch.Tensor]  # torch.nn.utils.clip_grad_norm_, or what stands in its place
Add = Callable[[int, object, object], object]  # (step, norm, limit)


class StepNorms:
    """Records the gradient norm that clipping found in each step, and the limit that it was given.

    Nothing is known of a step that clips several times, as with one limit for each optimizer.
    """

    def __init__(self) -> None:
        self._readback: Readback[int] = Readback()
        self._norms: dict[int, float | None] = {}  # None: underway, or not one number
        self._clips: dict[int, int] = {}  # calls by step
        self._limits: set[float] = set()

    def forget(self) -> None:
        """Drop what the parent process recorded, in a process that was forked from it."""
        self._readback.forget()
        self._norms.clear()
        self._clips.clear()

    @property
    def limit(self) -> float | None:
        """The limit of all calls; None for none, or several."""
        return next(iter(self._limits)) if len(self._limits) == 1 else None

    def wrap(self, clip: Clip, get_step: Callable[[], int | None], guard: Callable[[Add], Add]) -> Clip:
        """Wrap a function that clips gradients, so that what it returns is noted.

        Args:
            clip: torch.nn.utils.clip_grad_norm_.
            get_step: returns the running step; None for what is not recorded.
            guard: makes of a function one that does not fail.
        """
        add = guard(self._add)

        @functools.wraps(clip)
        def call(parameters: object, max_norm: object, *others: object, **named: object) -> torch.Tensor:
            norm = clip(parameters, max_norm, *others, **named)
            if not torch.compiler.is_compiling():
                step = get_step()
                if step is not None:
                    add(step, norm, max_norm)
            return norm

        return call

    def _add(self, step: int, norm: object, limit: object) -> None:
        """Record a call that has clipped.

        Args:
            step: the number of the step in which it is called.
            norm: what it returned.
            limit: what it was given.
        """
        self._clips[step] = self._clips.get(step, 0) + 1
        if isinstance(limit, (int, float)) and math.isfinite(limit):
            self._limits.add(float(limit))
        else:
            self._limits.add(math.nan)
        self._norms[step] = None
        # others than Tensor, such as DTensor, may have to ask other ranks for the number
        if type(norm) is not torch.Tensor or norm.numel() != 1:
            return
        if norm.is_cpu:
            self._norms[step] = norm.item()
        elif norm.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._readback.push(step, [norm.detach().reshape(())])

    def take(self, step: int, wait: bool) -> float | None | UnsetType:
        """Return the norm of a step as its record holds it: UNSET if it is not known, None for one that is NaN or Inf.

        Args:
            step: the number of the step.
            wait: whether to wait for what has not arrived.
        """
        with contextlib.suppress(RuntimeError):  # a GPU after a fatal error, which the step itself has raised
            for number, [value] in self._readback.pop(0) if wait else self._readback.arrived():
                if number in self._norms:
                    self._norms[number] = value
        norm = self._norms.pop(step, None)
        clips = self._clips.pop(step, 0)
        if norm is None or clips != 1:
            return UNSET
        return norm if math.isfinite(norm) else None
