"""What a run's record predicted, held against all that was measured of the run."""

from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.predicted.figures import Predicted
from megatron_lite.analysis.predicted.memory import compared_memory
from megatron_lite.analysis.predicted.read import predicted_memory, predicted_time
from megatron_lite.analysis.predicted.time import compared_time


def predicted_of(facts: Facts) -> Predicted | None:
    """None for a run that predicted nothing, as those of older versions and other trainers."""
    record = facts.run.record if facts.run else {}
    memory, time = predicted_memory(record), predicted_time(record)
    if memory is None and time is None:
        return None
    of_memory, notes = compared_memory(facts, memory) if memory else (None, [])
    of_time, more = compared_time(facts, time) if time else (None, [])
    return Predicted(memory=of_memory, time=of_time, notes=(*notes, *more))
