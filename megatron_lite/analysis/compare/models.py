"""Do two jobs that have no plan train the same model? By what their optimizers update,
else by the weights in their traces."""

import numpy as np

from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.formats.run_record import Updated

SAME_SHARE = 0.5  # of all shapes of weights; two of one model differ in a head or an adapter
MIN_SHAPES = 3  # fewer say nothing
NEARLY_WHOLE = 0.02  # by padding, a shard of a rank is no exact part
# operators whose weight is an argument of its own, and which one
WEIGHTS = {
    "aten::linear": 1,
    "aten::conv1d": 1,
    "aten::conv2d": 1,
    "aten::conv3d": 1,
    "aten::convolution": 1,
    "aten::embedding": 0,
    "aten::layer_norm": 2,
}


def object_to_models(a: Facts, b: Facts) -> list[str]:
    """Why two jobs train different models, a sentence; [] if they do not, or nothing says."""
    if a.has_plan and b.has_plan:
        return []
    mine, theirs = (_get_updated(facts) for facts in (a, b))
    if mine is not None and theirs is not None:
        return _compare_updated(mine, theirs)
    if a.critical is None or b.critical is None:
        return []
    shapes = [_list_weights(facts.critical) for facts in (a, b) if facts.critical]
    common, all_of_them = shapes[0] & shapes[1], shapes[0] | shapes[1]
    if min(map(len, shapes)) < MIN_SHAPES or len(common) >= SAME_SHARE * len(all_of_them):
        return []
    return [f"of {len(all_of_them)} shapes of weights in the traces {len(common)} are in both: another model"]


def _get_updated(facts: Facts) -> Updated | None:
    return facts.run.record.updated if facts.run else None


def _compare_updated(mine: Updated, theirs: Updated) -> list[str]:
    numbers = [one.parameters for one in (mine, theirs) if one.parameters is not None]
    if len(numbers) < 2:
        return []
    ratio = max(numbers) / min(numbers)
    ranks = [one.ranks or 1 for one in (mine, theirs)]
    # a rank may hold all of the model or its share
    shares = {1.0, *map(float, ranks), max(ranks) / min(ranks)}
    if numbers[0] == numbers[1] or any(abs(ratio / share - 1) < NEARLY_WHOLE for share in shares if share > 1):
        return []
    return [f"the optimizer updates {numbers[0]:,} parameters in A and {numbers[1]:,} in B: another model"]


def _list_weights(one: RankFacts) -> set[tuple[str, tuple[int, ...]]]:
    """Shapes of weights, as far as operators tell them; empty without shapes, or where all of the model is compiled."""
    found = set()
    for operator, place in WEIGHTS.items():
        rows = one.rows_named(operator.__eq__, Kind.OP)
        for index in np.unique(one.trace.events.shapes[rows]):
            dims = one.trace.shapes[index].dims if index >= 0 else ()
            if len(dims) > place and dims[place]:
                found.add((operator, tuple(dims[place])))
    return found
