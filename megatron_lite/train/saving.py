"""The chore of saving at --save-interval."""

from pathlib import Path

from megatron_lite.config.plan import Plan
from megatron_lite.phases import Phase
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress


class Saving:
    """Saves when it is due, and at the end what has not been saved yet."""

    phase = Phase.SAVE

    def __init__(self, plan: Plan, checkpoints: Checkpoints, log, loaded: int):
        self.plan, self.checkpoints, self.log = plan, checkpoints, log
        c = plan.args.checkpoint
        here = c.save is not None and c.load is not None and Path(c.save).resolve() == Path(c.load).resolve()
        self.saved = loaded if here and loaded else None  # the newest iteration that the folder holds

    def due(self, progress: Progress) -> bool:
        interval = self.plan.args.checkpoint.save_interval
        return interval is not None and progress.iteration % interval == 0

    def act(self, progress: Progress):
        """Save, unless this iteration is saved already."""
        if self.plan.args.checkpoint.save is None or self.saved == progress.iteration:
            return
        self.log.meter.settle()  # weights of a run that diverged must not be called a checkpoint
        self.checkpoints.save(progress)
        self.saved = progress.iteration
