"""Activations at the peak by layer of the model: by the modules that tags name, else by the order of allocations."""

import re
from collections import Counter

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.memory.lifetimes import Lives
from megatron_lite.analysis.memory.memory_results import OUTSIDE, Layer
from megatron_lite.analysis.memory.phases import Phases

NUMBERED = re.compile(r"^(.*?(?:^|\.)(\d+))(?:\.|$)")
MIN_EXPLAINED = 0.5  # of the activations' bytes, by stacks that come once per layer
MIN_REPEATED_LAYERS = 2  # fewer do not repeat


def sum_layers(lives: Lives, phases: Phases, rows: Integers) -> tuple[tuple[Layer, ...], bool]:
    """Sum activations by layer.

    Args:
        lives: All lives.
        phases: The phases of the record.
        rows: Indices [k] of the activations.

    Returns:
        The layers in the model's order, and whether that order was worked out from equal stacks.
    """
    modules = [phases.module_of_tag[tag] for tag in lives.tag[rows].tolist()]
    if any(modules):
        return _sum_by_module(modules, lives.num_bytes[rows].tolist()), False
    return _sum_by_repetition(lives, rows), True


def _sum_by_module(modules: list[str], sizes: list[int]) -> tuple[Layer, ...]:
    """Layers by the numbers in the names of modules, such as decoder.layers.0; what has none comes first."""
    totals: Counter[str] = Counter()
    order = {}
    for module, num_bytes in zip(modules, sizes):
        name = OUTSIDE
        place = (-1, "")
        if match := NUMBERED.match(module):
            name = match[1]
            place = (int(match[2]), name)
        order[name] = place
        totals[name] += num_bytes
    names = sorted(totals, key=order.__getitem__)
    return tuple(Layer(name, totals[name]) for name in names)


def _sum_by_repetition(lives: Lives, rows: Integers) -> tuple[Layer, ...]:
    """Layers without names, by the lines that run once in each of them.

    Such a line allocates in the order of the layers: its k-th allocation within one forward is the k-th layer's. The
    number of layers is the count of repetitions that explains most bytes; () where none explains enough.
    """
    has_stack = lives.stack > 0
    tellable = has_stack & (lives.begin >= 0) & ~lives.awaiting
    rows = rows[tellable[rows]]
    if not len(rows):
        return ()
    # also those that are given back before the peak: the k-th is the k-th layer's all the same
    counted = np.flatnonzero(tellable)
    equal, before = lives.count_equal_stacks(counted)
    at = np.searchsorted(counted, rows)
    repeated = equal[at]
    sizes = lives.num_bytes[rows]
    bytes_of_count = np.bincount(repeated, weights=sizes)
    bytes_of_count[:MIN_REPEATED_LAYERS] = 0
    layers = int(np.argmax(bytes_of_count))
    if layers < MIN_REPEATED_LAYERS:
        return ()
    inside = repeated % layers == 0
    explained = sizes[inside].sum()
    if explained < MIN_EXPLAINED * sizes.sum():
        return ()
    # a line that runs several times in each layer has as many allocations one after the other
    layer = before[at] * layers // repeated
    totals = np.bincount(layer[inside], weights=sizes[inside], minlength=layers)
    found = []
    rest = int(sizes[~inside].sum())
    if rest:
        found.append(Layer(OUTSIDE, rest))
    for number, total in enumerate(totals):
        found.append(Layer(f"layer {number}", int(total)))
    return tuple(found)
