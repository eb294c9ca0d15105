"""Ends a run as if a result had been wrong, at --error-injection-rate, to test what a job does about it."""

import random
from collections.abc import Iterator
from typing import NoReturn

from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.errors import InjectedError
from megatron_lite.phases import BeginPhase, Phase
from megatron_lite.train.loop import LoopStep, Progress
from megatron_lite.train.step import StepResult
from megatron_lite.train.step_hooks import SaveHook

EXIT_CODES = {  # Megatron-LM's
    "transient_error": 17,  # another run of the step does not give the result again
    # it does, and another GPU is to judge it after a restart
    "persistent_error": 16,
    "correct_result": 16,
}


class InjectingStep:
    """A training step before which a result may count as wrong: one in --error-injection-rate of each rank's
    micro-batches.

    Megatron-LM runs such a step again and ignores what comes out, since the type says it: it saves the weights before
    the step, and ends with the type's exit code. So does this step, without running. The first iteration of all is
    spared: there is nothing to save before it.
    """

    def __init__(self, step: LoopStep, plan: Plan, saving: SaveHook, progress: Progress):
        """
        Args:
            step: Trains.
            plan: This rank's.
            saving: Saves what the run has come to.
            progress: The run's, which the loop counts on.
        """
        t = plan.args.training
        self._step = step
        self._plan = plan
        self._saving = saving
        self._progress = progress
        self._rate = 0 if t.rerun_mode != "validate_results" else t.error_injection_rate
        self._type = t.error_injection_type
        # the same numbers on all ranks, which need not ask each other, and others in a run that goes on
        self._random = random.Random(f"{t.seed} {progress.started_at}")

    def leaves_out(self, iteration: int) -> bool:
        """Tell whether the step leaves this iteration out; no result of it counts."""
        return self._step.leaves_out(iteration)

    def draw(self, batches: Iterator[Tensor], consumed: int, phase: BeginPhase) -> int:
        """Draw the batch of a step that is left out; returns its samples. The arguments are those of LoopStep.draw."""
        return self._step.draw(batches, consumed, phase)

    def __call__(self, batches: Iterator[Tensor], consumed: int, phase: BeginPhase) -> StepResult:
        """Run the step that starts after `consumed` samples. Raises InjectedError if a result of it is to be wrong."""
        wrong_rank = self.find_wrong_rank(consumed)
        if wrong_rank is not None:
            with phase(Phase.SAVE):
                self._end(wrong_rank)
        return self._step(batches, consumed, phase)

    def find_wrong_rank(self, consumed: int) -> int | None:
        """Draw for the micro-batches of the step after `consumed` samples: the rank of a wrong result, or None."""
        if not self._rate or self._progress.iteration == 0:
            return None
        number = self._plan.micro_batches(consumed)
        for rank in range(self._plan.world.size):
            for _ in range(number):
                if self._random.randrange(self._rate) == 0:
                    return rank
        return None

    def _end(self, wrong_rank: int) -> NoReturn:
        """Save where --save says, wait for it, and raise InjectedError."""
        self._saving.run(self._progress)
        self._saving.checkpoints.finish()
        what = f"iteration {self._progress.iteration + 1}: a result of rank {wrong_rank} counts as wrong"
        given = f"--error-injection-rate {self._rate}, --error-injection-type {self._type}"
        if self._plan.args.checkpoint.save is None:
            remedy = "nothing was saved, as there is no --save; start anew, or drop the flags."
        else:
            remedy = "--save has the weights before it; start again from there, or drop the flags."
        raise InjectedError(f"{what} ({given}); {remedy}", EXIT_CODES[self._type])
