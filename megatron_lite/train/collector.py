"""Python's garbage collector on a schedule, so that all ranks pause in the same step."""

import gc

from megatron_lite.config.plan import Plan
from megatron_lite.phases import Phase
from megatron_lite.train.loop import Progress


class Collector:
    """The chore of --manual-gc: collection is off, but for every --manual-gc-interval iterations."""

    phase = Phase.LOG

    def __init__(self, plan: Plan):
        t = plan.args.training
        self._interval = t.manual_gc_interval if t.manual_gc else 0
        if t.manual_gc:
            gc.collect()
            gc.disable()

    def due(self, progress: Progress) -> bool:
        return self._interval > 0 and progress.iteration % self._interval == 0

    def act(self, progress: Progress):
        gc.collect()
