"""Room for what torch's profiler keeps, apart from the memory of tensors (see parallel/host_memory.py)."""

from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.window import Window
from megatron_lite.parallel.host_memory import SmallBlocks

# Of torch 2.13, 6 layers and 2 micro-batches: 5,700 names of operators per step, and blocks that live as long as one.
PER_LAYER_AND_PASS, PER_STEP = 1_024, 8_192
PER_CHUNK = 24  # of the loss' rows (model/loss.py): 12 operators
WITH_SHAPES = 2  # times as many: --pytorch-profiler-collect-shapes keeps those of each operator
MOST_STEPS = 20  # of a window: room costs 3 MB and 10 ms for each


class RoomForNames(Instrument):
    """On a CPU, on a rank that records: all of it before the first profiled step, since readers of a trace take what lies between
    two steps for the first one's."""

    def __init__(self, window: Window, layers: int, passes: int, chunks: int, shapes: bool):
        """`passes`: micro-batches of a rank per step; `chunks`: of rows that the loss makes of one."""
        self.window, self._blocks = window, SmallBlocks()
        per_pass = PER_LAYER_AND_PASS * layers + PER_CHUNK * chunks
        self.per_step = (PER_STEP + per_pass * passes) * (WITH_SHAPES if shapes else 1)

    def begin(self, step: int):
        if self.window.opens(step):
            self._blocks.add(self.per_step * min(len(self.window), MOST_STEPS))

    def end(self, step: int):
        if self.window.closes(step):
            self._blocks.close()

    def close(self, error: BaseException | None):
        self._blocks.close()
