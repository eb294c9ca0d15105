"""Callbacks that profile the training loops of other packages, which are imported when a callback is asked for:

    from megatron_lite.watch.callbacks import TransformersCallback

    Trainer(..., callbacks=[TransformersCallback("runs/mine", steps=range(10, 16))])

`TransformersCallback` is for Hugging Face's Trainer, `LightningCallback` for Lightning's. Both take the arguments of
`megatron_lite.Profiler`; a step is one of the optimizer's, evaluation and saving are phases of their own.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Protocol

from megatron_lite.phases import Phase
from megatron_lite.watch.profiler import PROFILED_STEPS, Profiler
from megatron_lite.watch.this_process import close_at_exit


class ProfiledTraining:
    """A profiler for each training, and the phase that is open: the part that the callbacks of both libraries share.

    Args:
        folder: for what is recorded.
        steps: to profile with torch.profiler, counted from 1; the first step is none of them.
        memory: record a memory snapshot of these steps, too.
        command: of the script, for run.json; None: this process's.
    """

    def __init__(
        self,
        folder: str | Path,
        steps: range = PROFILED_STEPS,
        memory: bool = False,
        command: list[str] | None = None,
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._memory = memory
        self._command = command
        self.profiler: Profiler | None = None  # while training
        self._phase = contextlib.ExitStack()

    def begin(self) -> None:
        """Open a profiler at the start of a training."""
        if self.profiler is not None:  # an error ended another one, in a notebook say
            self.end(RuntimeError("training was interrupted"))
        self.profiler = Profiler(self._folder, self._steps, self._memory, self._command).__enter__()
        close_at_exit(self.profiler)

    def end_step(self) -> None:
        """End a step of the training. Outside of training, nothing."""
        if self.profiler is not None:
            self.profiler.step()

    def enter(self, phase: str) -> None:
        """Be in a phase from now on; "": in none. Outside of training, nothing."""
        self._phase.close()
        if phase and self.profiler is not None:
            self._phase.enter_context(self.profiler.phase(phase))

    def end(self, error: BaseException | None = None) -> None:
        """Close the profiler at the end of a training."""
        self.enter("")
        if self.profiler is not None:
            self.profiler.close(error)
        self.profiler = None


class Control(Protocol):
    """A transformers.TrainerControl, as far as it says what comes next."""

    should_evaluate: bool
    should_save: bool


class TransformersEvents(ProfiledTraining):
    """The events of transformers.TrainerCallback that concern a profiler."""

    def on_train_begin(self, args: object, state: object, control: Control, **others: object) -> None:
        """Begin to watch. The arguments are those of transformers.TrainerCallback."""
        self.begin()

    def on_step_end(self, args: object, state: object, control: Control, **others: object) -> None:
        """End a step. The arguments are those of transformers.TrainerCallback."""
        self.end_step()
        self._enter_next(control)

    def on_evaluate(self, args: object, state: object, control: Control, **others: object) -> None:
        """Note that an evaluation is over. The arguments are those of transformers.TrainerCallback."""
        self._enter_next(control, evaluated=True)

    def on_save(self, args: object, state: object, control: Control, **others: object) -> None:
        """Note that a checkpoint was saved. The arguments are those of transformers.TrainerCallback."""
        self.enter("")

    def on_train_end(self, args: object, state: object, control: Control, **others: object) -> None:
        """End the watching. The arguments are those of transformers.TrainerCallback."""
        self.end()

    def _enter_next(self, control: Control, evaluated: bool = False) -> None:
        """Enter the phase that comes next: the Trainer tells no beginning of evaluating and saving, but that they will
        come.

        Args:
            control: what the Trainer is going to do.
            evaluated: whether it has evaluated already.
        """
        if control.should_evaluate and not evaluated:
            self.enter(Phase.EVAL.value)
        elif control.should_save:
            self.enter(Phase.SAVE.value)
        else:
            self.enter("")


class LightningTrainer(Protocol):
    """A Trainer of Lightning, as far as its callbacks ask it."""

    global_step: int  # updates of the weights so far


class LightningEvents(ProfiledTraining):
    """The hooks of Lightning's Callback that concern a profiler."""

    def on_train_start(self, trainer: LightningTrainer, module: object) -> None:
        self._updates = trainer.global_step
        self.begin()

    def on_train_batch_end(self, trainer: LightningTrainer, module: object, *others: object) -> None:
        if trainer.global_step != self._updates:  # a batch of several whose gradients are added up ends no step
            self._updates = trainer.global_step
            self.end_step()

    def on_validation_start(self, trainer: LightningTrainer, module: object) -> None:
        self.enter(Phase.EVAL.value)

    def on_validation_end(self, trainer: LightningTrainer, module: object) -> None:
        self.enter("")

    def on_train_end(self, trainer: LightningTrainer, module: object) -> None:
        self.end()

    def on_exception(self, trainer: LightningTrainer, module: object, exception: BaseException) -> None:
        """End the watching with an error. The arguments are those of lightning.Callback."""
        self.end(exception)


def __getattr__(name: str) -> type[ProfiledTraining]:
    events: type[ProfiledTraining]
    if name == "TransformersCallback":
        events = TransformersEvents
        base = importlib.import_module("transformers").TrainerCallback
    elif name == "LightningCallback":
        # Lightning is installed under two names, whose classes do not know each other
        package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
        events = LightningEvents
        base = importlib.import_module(package).Callback
    else:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    made: type[ProfiledTraining] = type(name, (events, base), {"__module__": __name__, "__doc__": events.__doc__})
    kept: type[ProfiledTraining] = globals().setdefault(name, made)
    return kept
