"""Moves of gradients into the buckets in which they are summed, and back."""

import numpy as np

from megatron_lite.analysis.intervals import Cover
from megatron_lite.analysis.trace.columns import Kind, Trace

# as DistributedDataParallel's reducer names them; torch/csrc/distributed/c10d/reducer.cpp
MOVES = (
    "torch::distributed::reducer::mul_out",
    "torch.distributed.ddp.reducer::copy_bucket_to_grad",
)


def find_bucket_moves(trace: Trace) -> dict[int, Cover]:
    """Find when threads move gradients into buckets, or out of them.

    Gradients that are views of their buckets (`gradient_as_bucket_view`) are not moved.

    Args:
        trace: the trace of a rank.

    Returns:
        By thread, index into Trace.threads.
    """
    operators = trace.rows[Kind.OP]
    is_move = trace.matching(lambda name: name in MOVES)
    moves = operators[is_move[operators]]
    found = {}
    for thread in np.unique(trace.events.thread[moves]).tolist():
        found[thread] = trace.cover(trace.on_thread(moves, thread))
    return found
