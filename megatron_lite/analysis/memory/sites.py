"""Which source lines hold memory, and which layers hold the activations."""

import re
from collections import Counter, defaultdict

import numpy as np

from megatron_lite.analysis.memory.allocation_lifetimes import Lives
from megatron_lite.analysis.memory.memory_results import OUTSIDE, Layer, SiteBytes
from megatron_lite.analysis.memory.phases import NOT_SAID, PHASES, Phases
from megatron_lite.analysis.memory.record import Record
from megatron_lite.estimate.memory_categories import CATEGORIES

NUMBERED = re.compile(r"^(.*?(?:^|\.)(\d+))(?:\.|$)")
BETWEEN_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
MIN_EXPLAINED = 0.5  # of the activations' bytes, by stacks that come once per layer


def sites_of(
    rows: np.ndarray,
    sizes: np.ndarray,
    record: Record,
    lives: Lives,
    phases: Phases,
    categories: np.ndarray,
    phase_of_life: np.ndarray,
) -> tuple[SiteBytes, ...]:
    """Largest first. rows: of `lives`; sizes: bytes of each row, negative ones too (memory that went away)."""
    columns = np.stack([lives.stack[rows], lives.tag[rows], categories[rows], phase_of_life[rows]])
    distinct, where = np.unique(columns, axis=1, return_inverse=True)
    where = where.ravel()
    sums = np.bincount(where, weights=sizes, minlength=distinct.shape[1])
    blocks = np.bincount(where, weights=np.sign(sizes), minlength=distinct.shape[1])
    found: dict[tuple, list[int]] = defaultdict(lambda: [0, 0])
    for (stack, tag, category, phase), num_bytes, count in zip(distinct.T.tolist(), sums.tolist(), blocks.tolist()):
        name = "" if phase == NOT_SAID else PHASES[phase]
        key = (
            _site(record, stack, name),
            CATEGORIES[category],
            name,
            BETWEEN_NUMBERS.sub("*", phases.module_of_tag[tag]),
        )
        found[key][0] += int(num_bytes)
        found[key][1] += int(count)
    return tuple(
        SiteBytes(*key, num_bytes=total, blocks=count)
        for key, (total, count) in sorted(found.items(), key=lambda item: -item[1][0])
    )


def _site(record: Record, stack: int, phase: str) -> str:
    if site := record.stacks.site(stack):
        return site
    node = record.stacks.node(stack)
    if node:
        return f"{node} (autograd)"
    return "backward, without Python frames" if phase == "backward" else "made before the record, without a stack"


def layers_of(rows: np.ndarray, lives: Lives, phases: Phases) -> tuple[tuple[Layer, ...], bool]:
    """(activations `rows` by layer in the model's order, whether that order was worked out from equal stacks)."""
    modules = [phases.module_of_tag[tag] for tag in lives.tag[rows].tolist()]
    if any(modules):
        return _by_module(modules, lives.num_bytes[rows].tolist()), False
    return _by_repetition(rows, lives, phases), True


def _by_module(modules: list[str], sizes: list[int]) -> tuple[Layer, ...]:
    totals, numbers = Counter(), {}
    for module, num_bytes in zip(modules, sizes):
        match = NUMBERED.match(module)
        name = match[1] if match else OUTSIDE
        numbers[name] = (int(match[2]) if match else -1, match[1] if match else "")
        totals[name] += num_bytes
    return tuple(Layer(name, totals[name]) for name in sorted(totals, key=numbers.get))


def _by_repetition(rows: np.ndarray, lives: Lives, phases: Phases) -> tuple[Layer, ...]:
    """A line that runs once per layer allocates in the order of the layers: its k-th allocation within one forward is the
    k-th layer's. The number of layers is the count of repetitions that explains most bytes."""
    rows = rows[(lives.begin[rows] >= 0) & (lives.stack[rows] > 0)]
    fresh = np.flatnonzero((lives.begin >= 0) & (lives.stack > 0))
    if not len(rows) or not len(fresh):
        return ()
    key = phases.fine_span[lives.begin[fresh]] * (int(lives.stack.max()) + 1) + lives.stack[fresh]
    order = np.argsort(key, kind="stable")
    _, first, counts = np.unique(key[order], return_index=True, return_counts=True)
    count, occurrence = np.zeros((2, len(lives)), np.int64)
    count[fresh[order]] = np.repeat(counts, counts)
    occurrence[fresh[order]] = np.arange(len(order)) - np.repeat(first, counts)
    sizes, repeated = lives.num_bytes[rows], count[rows]
    by_count = np.bincount(repeated, weights=sizes)
    by_count[:2] = 0
    layers = int(np.argmax(by_count))
    inside = (repeated % max(layers, 1) == 0) & (repeated > 0)
    if layers < 2 or sizes[inside].sum() < MIN_EXPLAINED * sizes.sum():
        return ()
    layer = occurrence[rows] * layers // np.maximum(repeated, 1)
    totals = np.bincount(layer[inside], weights=sizes[inside], minlength=layers)
    found = [Layer(f"layer {number}", int(total)) for number, total in enumerate(totals)]
    rest = int(sizes[~inside].sum())
    return ((Layer(OUTSIDE, rest),) if rest else ()) + tuple(found)
