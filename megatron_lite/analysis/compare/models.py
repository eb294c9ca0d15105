"""Check whether two jobs that have no plan train the same model.

Their optimizers tell by what they update, else the weights in their traces do.
"""

import numpy as np

from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.run_record import Updated

SAME_SHARE = 0.5  # of all shapes of weights; two of one model differ in a head or an adapter
MIN_SHAPES = 3  # fewer say nothing
NEARLY_WHOLE = 0.02  # by padding, a shard of a rank is no exact part
# operators whose weight is an argument of its own, and which one
WEIGHT_ARGUMENTS = {
    "aten::linear": 1,
    "aten::conv1d": 1,
    "aten::conv2d": 1,
    "aten::conv3d": 1,
    "aten::convolution": 1,
    "aten::embedding": 0,
    "aten::layer_norm": 2,
}


def object_to_models(a: Facts, b: Facts) -> list[str]:
    """Write why two jobs train different models, a sentence; [] if they do not, or nothing says."""
    if a.has_plan and b.has_plan:
        return []
    updated_a = _get_updated(a)
    updated_b = _get_updated(b)
    if updated_a is not None and updated_b is not None:
        return _compare_updated(updated_a, updated_b)
    if a.critical is None or b.critical is None:
        return []
    shapes_a = _list_weights(a.critical)
    shapes_b = _list_weights(b.critical)
    if min(len(shapes_a), len(shapes_b)) < MIN_SHAPES:
        return []
    common = shapes_a & shapes_b
    either = shapes_a | shapes_b
    if len(common) >= SAME_SHARE * len(either):
        return []
    return [f"of {len(either)} shapes of weights in the traces {len(common)} are in both: another model"]


def _get_updated(facts: Facts) -> Updated | None:
    """Find what a watched optimizer updates; None where the run has no record of it."""
    return facts.run.record.updated if facts.run else None


def _compare_updated(a: Updated, b: Updated) -> list[str]:
    """Write why the optimizers of A and B update different models, a sentence; [] if they may update the same."""
    if a.parameters is None or b.parameters is None or a.parameters == b.parameters:
        return []
    ratio = max(a.parameters, b.parameters) / min(a.parameters, b.parameters)
    ranks_a = float(a.ranks or 1)
    ranks_b = float(b.ranks or 1)
    # a rank may hold all of the model or its share
    for share in (ranks_a, ranks_b, max(ranks_a, ranks_b) / min(ranks_a, ranks_b)):
        if share > 1 and abs(ratio / share - 1) < NEARLY_WHOLE:
            return []
    return [f"the optimizer updates {a.parameters:,} parameters in A and {b.parameters:,} in B: another model"]


def _list_weights(one: RankFacts) -> set[tuple[str, tuple[int, ...]]]:
    """List operators and the shapes of their weights, as far as operators tell.

    Empty without shapes, or where the model is compiled.
    """
    found = set()
    for operator, place in WEIGHT_ARGUMENTS.items():
        rows = one.rows_named(operator.__eq__, Kind.OP)
        for index in np.unique(one.trace.events.shapes[rows]):
            if index < 0:
                continue
            dims = one.trace.shapes[index].dims
            if len(dims) > place and dims[place]:
                found.add((operator, tuple(dims[place])))
    return found
