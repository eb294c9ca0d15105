"""The parts of a training step: the trainer emits these names, the analysis looks for them."""

import enum
from contextlib import AbstractContextManager
from typing import Protocol

PYTHON_GC = "Python GC"  # a collection of the garbage collector inside any phase, as torch names it too


class Phase(str, enum.Enum):
    """Names of the spans inside one step, in the order in which they happen."""

    DATA = "data"
    DATA_TO_DEVICE = "data_to_device"
    PIPELINE_WAIT = "pipeline_wait"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRAD_SYNC = "grad_sync"
    UNSCALE = "unscale"
    CLIP_GRAD = "clip_grad"
    OPTIMIZER_STEP = "optimizer_step"
    LOG = "log"
    EVAL = "eval"
    SAVE = "save"

    def __str__(self) -> str:
        return self.value


class BeginPhase(Protocol):
    """Marks the parts of a step: `with phase(Phase.FORWARD): ...`."""

    def __call__(self, phase: Phase, /) -> AbstractContextManager[object]:
        """Called where the part begins; the context that it returns is left where the part ends."""


# beside the phases, in the tags of memory snapshots
SETUP = "setup"  # all before the first step: weights, optimizer state, what a checkpoint is read into
RECOMPUTE = "recompute"  # forward once more, inside backward
NOT_TRAINING = (Phase.EVAL.value, Phase.SAVE.value)
