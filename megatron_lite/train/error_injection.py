"""Ends a run as if a result had been wrong, at --error-injection-rate, to test what a job does about it."""

import random

from megatron_lite.config.plan import Plan
from megatron_lite.errors import InjectedError
from megatron_lite.phases import Phase
from megatron_lite.train.loop import Progress
from megatron_lite.train.step_hooks import SaveHook

TRANSIENT = "transient_error"
TRANSIENT_EXIT_CODE = 17  # Megatron-LM's for a result that another run of the step does not give again
SAVED_EXIT_CODE = 16  # its own for one that is given again, which another GPU is to judge after a restart


class ErrorInjection:
    """The hook that counts a result as wrong: one in --error-injection-rate of each rank's micro-batches.

    Megatron-LM runs such a step again and ignores what comes out, since the type says it: a transient error ends the
    run with exit code 17, the other two after a checkpoint of the weights before the step with 16. So does this hook,
    without running the step. The first iteration of a run is spared, as there.
    """

    phase = Phase.SAVE

    def __init__(self, plan: Plan, saving: SaveHook, started_at: int):
        """
        Args:
            plan: This rank's.
            saving: Saves what the run has come to.
            started_at: The iteration that this run began from, so that another run has other errors.
        """
        t = plan.args.training
        self._plan = plan
        self._saving = saving
        self._rate = 0 if t.rerun_mode != "validate_results" else t.error_injection_rate
        self._type = t.error_injection_type
        # of all ranks on each of them, which need not ask each other
        self._random = random.Random(f"{t.seed} {started_at}")
        self._rank: int | None = None

    def due(self, progress: Progress) -> bool:
        """Draw for the micro-batches of the iteration that comes next: tell whether one of them is wrong."""
        if not self._rate or progress.iteration >= self._plan.train_iters:
            return False
        number = self._plan.micro_batches(progress.consumed)
        for rank in range(self._plan.world.size):
            for _ in range(number):
                if self._random.randrange(self._rate) == 0:
                    self._rank = rank
                    return True
        return False

    def run(self, progress: Progress) -> None:
        """Raise InjectedError; before it, save unless the error is transient."""
        what = f"iteration {progress.iteration + 1}: a result of rank {self._rank} counts as wrong"
        given = f"--error-injection-rate {self._rate}, --error-injection-type {self._type}"
        if self._type == TRANSIENT:
            remedy = "nothing was saved; start again from the newest checkpoint, or drop the flags."
            raise InjectedError(f"{what} ({given}); {remedy}", TRANSIENT_EXIT_CODE)
        self._saving.run(progress)
        remedy = "the weights before it are what --save has; start again from there, or drop the flags."
        raise InjectedError(f"{what} ({given}); {remedy}", SAVED_EXIT_CODE)
