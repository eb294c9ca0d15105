"""Callbacks that profile the training loops of other packages, which are imported when a callback is asked for:

    from megatron_lite.watch.callbacks import TransformersCallback

    Trainer(..., callbacks=[TransformersCallback("runs/mine", steps=range(10, 16))])

`TransformersCallback` is for Hugging Face's Trainer, `LightningCallback` for Lightning's. Both take the arguments of
`megatron_lite.Profiler`; a step is one of the optimizer's, evaluation and saving are phases of their own.
"""

import contextlib
import importlib
import sys

from megatron_lite.phases import Phase
from megatron_lite.watch.profiler import Profiler
from megatron_lite.watch.this_process import close_at_exit


class ProfiledTraining:
    """A profiler for each training, and the phase that is open: the part that the callbacks of both libraries share."""

    def __init__(self, folder, **settings):
        self._make = lambda: Profiler(folder, **settings)
        self.profiler: Profiler | None = None  # while training
        self._phase = contextlib.ExitStack()

    def begin(self):
        """Open a profiler at the start of a training."""
        if self.profiler is not None:  # an error ended another one, in a notebook say
            self.end(RuntimeError("training was interrupted"))
        self.profiler = self._make().__enter__()
        close_at_exit(self.profiler)

    def enter(self, phase: str):
        """Be in a phase from now on; "": in none. Outside of training, nothing."""
        self._phase.close()
        if phase and self.profiler is not None:
            self._phase.enter_context(self.profiler.phase(phase))

    def end(self, error: BaseException | None = None):
        """Close the profiler at the end of a training."""
        self.enter("")
        if self.profiler is not None:
            self.profiler.close(error)
        self.profiler = None


class TransformersEvents(ProfiledTraining):
    """The events of transformers.TrainerCallback that concern a profiler."""

    def on_train_begin(self, args, state, control, **others):
        self.begin()

    def on_step_end(self, args, state, control, **others):
        self.profiler.step()
        self._enter_next(control)

    def on_evaluate(self, args, state, control, **others):
        self._enter_next(control, evaluated=True)

    def on_save(self, args, state, control, **others):
        self.enter("")

    def on_train_end(self, args, state, control, **others):
        self.end()

    def _enter_next(self, control, evaluated: bool = False):
        """The Trainer tells no beginning of these two, but what comes next."""
        evaluates = control.should_evaluate and not evaluated
        self.enter(Phase.EVAL.value if evaluates else Phase.SAVE.value if control.should_save else "")


class LightningEvents(ProfiledTraining):
    """The hooks of Lightning's Callback that concern a profiler."""

    def on_train_start(self, trainer, module):
        self._updates = trainer.global_step
        self.begin()

    def on_train_batch_end(self, trainer, module, *others):
        if trainer.global_step != self._updates:  # a batch of several whose gradients are added up ends no step
            self._updates = trainer.global_step
            self.profiler.step()

    def on_validation_start(self, trainer, module):
        self.enter(Phase.EVAL.value)

    def on_validation_end(self, trainer, module):
        self.enter("")

    def on_train_end(self, trainer, module):
        self.end()

    def on_exception(self, trainer, module, exception):
        self.end(exception)


def __getattr__(name: str):
    if name == "TransformersCallback":
        events, base = TransformersEvents, importlib.import_module("transformers").TrainerCallback
    elif name == "LightningCallback":
        # Lightning is installed under two names, whose classes do not know each other
        package = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"
        events, base = LightningEvents, importlib.import_module(package).Callback
    else:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    made = type(name, (events, base), {"__module__": __name__, "__doc__": events.__doc__})
    return globals().setdefault(name, made)
