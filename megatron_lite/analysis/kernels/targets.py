"""Which operator's shapes explain a piece of device work."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.kernels.selection import Selection
from megatron_lite.analysis.kernels.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTIONS,
    CONVOLUTIONS_BACKWARD,
    PRODUCTS,
)
from megatron_lite.analysis.trace.columns import Kind

DEEPEST = 12  # from a kernel's operator up to the one with a formula: three or four in real traces
_INNERMOST = {*PRODUCTS, *CONVOLUTIONS, *CONVOLUTIONS_BACKWARD}  # aten::addmm rather than aten::linear around it
_OUTERMOST = {
    *ATTENTION,
    *ATTENTION_BACKWARD,
}  # its arguments tell heads from tokens, those of the operators inside do not
_ENGINE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Targets:
    """Pieces of work: device events where there are any, else operators themselves."""

    rows: np.ndarray  # int64 [p], the pieces
    operator: np.ndarray  # int64 [p], row of the operator whose shapes count; -1: none


def device_targets(chosen: Selection) -> Targets:
    """For each device event the operator whose shapes count: products' innermost, attention's outermost, or its own."""
    events, operator = chosen.trace.events, chosen.placing.operator
    inner, outer = (_named(chosen, names) for names in (_INNERMOST, _OUTERMOST))
    rows = operator[chosen.device]
    target, current = np.full(len(rows), -1, np.int64), rows
    for _ in range(DEEPEST):
        here = current >= 0
        if not here.any():
            break
        names = np.where(here, events.name[current], 0)
        target = np.where(here & inner[names] & (target < 0) | here & outer[names], current, target)
        current = np.where(here, operator[current], -1)
    return Targets(chosen.device, _with_shapes(chosen, np.where(target < 0, rows, target)))


def host_targets(chosen: Selection) -> Targets:
    """Operators with shapes that no other formula covers: without a GPU their own duration is the time of the work."""
    events, operator = chosen.trace.events, chosen.placing.operator
    rows = chosen.operators
    covering = _named(chosen, _INNERMOST | _OUTERMOST)
    covered, current = np.zeros(len(rows), bool), operator[rows]
    for _ in range(DEEPEST):
        here = current >= 0
        covered |= here & covering[np.where(here, events.name[current], 0)]
        current = np.where(here, operator[current], -1)
    leaf = np.ones(len(events), bool)
    leaf[operator[rows][operator[rows] >= 0]] = False
    rows = rows[~covered & (leaf[rows] | covering[events.name[rows]])]
    return Targets(rows, _with_shapes(chosen, rows))


def is_recomputed(chosen: Selection, rows: np.ndarray) -> np.ndarray:
    """bool per operator row: a forward operator within the backward pass, which is activation recomputation.

    It has a sequence number of its own (gradients are recorded) and no forward thread, unlike the backward pass itself.
    """
    events, operator = chosen.trace.events, chosen.placing.operator
    engine = chosen.trace.matching(lambda name: name.startswith(_ENGINE))
    own = (events.sequence >= 0) & (events.forward_thread <= 0) & (events.kind == Kind.OP) & ~engine
    asked, within, recorded = np.zeros((3, len(events)), bool)
    asked[rows] = True
    start = current = np.flatnonzero(asked)
    for _ in range(DEEPEST):
        within[start] |= engine[current]
        recorded[start] |= own[current]
        above = operator[current]
        start, current = start[above >= 0], above[above >= 0]
        if not len(current):
            break
    return within[rows] & recorded[rows]


def _named(chosen: Selection, wanted: set[str]) -> np.ndarray:
    return np.array([name in wanted for name in chosen.trace.names] or [False], bool)


def _with_shapes(chosen: Selection, rows: np.ndarray) -> np.ndarray:
    return np.where((rows >= 0) & (chosen.trace.events.shapes[rows] >= 0), rows, -1)
