"""Norms of the gradients of a training loop that is not known: as torch.nn.utils.clip_grad_norm_ returns them,
without a wait."""

import contextlib
import functools
import math

import torch
from msgspec import UNSET, UnsetType

from megatron_lite.train.step_metrics import Readback


class StepNorms:
    """Records the gradient norm that clipping found in each step, and the limit that it was given.

    Nothing is known of a step that clips several times, as with one limit for each optimizer.
    """

    def __init__(self):
        self._readback = Readback()
        self._norms: dict[int, float | None] = {}  # None: underway, or not one number
        self._clips: dict[int, int] = {}  # calls by step
        self._limits: set[float] = set()

    def forget(self):
        """Drop what the parent process recorded, in a process that was forked from it."""
        self._readback.forget()
        self._norms.clear()
        self._clips.clear()

    @property
    def limit(self) -> float | None:
        """The limit of all calls; None for none, or several."""
        return next(iter(self._limits)) if len(self._limits) == 1 else None

    def wrap(self, clip, get_step, guard):
        """`clip`, which notes what it returns.

        Args:
            clip: torch.nn.utils.clip_grad_norm_.
            get_step: returns the running step; None for what is not recorded.
            guard: makes of a function one that does not fail.
        """
        add = guard(self._add)

        @functools.wraps(clip)
        def call(parameters, max_norm, *others, **named):
            norm = clip(parameters, max_norm, *others, **named)
            if not torch.compiler.is_compiling() and (step := get_step()) is not None:
                add(step, norm, max_norm)
            return norm

        return call

    def _add(self, step: int, norm, limit):
        self._clips[step] = self._clips.get(step, 0) + 1
        is_number = isinstance(limit, (int, float)) and math.isfinite(limit)
        self._limits.add(float(limit) if is_number else math.nan)
        self._norms[step] = None
        # others than Tensor, such as DTensor, may have to ask other ranks for the number
        if type(norm) is not torch.Tensor or norm.numel() != 1:
            return
        if norm.is_cpu:
            self._norms[step] = norm.item()
        elif norm.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._readback.push(step, [norm.detach().reshape(())])

    def take(self, step: int, wait: bool) -> float | None | UnsetType:
        """The norm of a step as its record holds it: UNSET if it is not known, None for one that is NaN or Inf."""
        with contextlib.suppress(RuntimeError):  # a GPU after a fatal error, which the step itself has raised
            for of, [value] in self._readback.pop(0) if wait else self._readback.arrived():
                if of in self._norms:
                    self._norms[of] = value
        norm, clips = self._norms.pop(step, None), self._clips.pop(step, 0)
        if norm is None or clips != 1:
            return UNSET
        return norm if math.isfinite(norm) else None
