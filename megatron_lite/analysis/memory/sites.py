"""Which source lines hold memory, and which layers hold the activations."""

import re
from collections import Counter, defaultdict

import numpy as np

from megatron_lite.analysis.memory.categories import Lives
from megatron_lite.analysis.memory.memory_results import OUTSIDE, Fragmentation, Layer, SiteBytes
from megatron_lite.analysis.memory.phases import NOT_SAID, PHASES, Phases
from megatron_lite.analysis.memory.record import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, Record
from megatron_lite.estimate.caching_allocator import Allocation, Layout
from megatron_lite.estimate.memory_categories import CATEGORIES

NUMBERED = re.compile(r"^(.*?(?:^|\.)(\d+))(?:\.|$)")
BETWEEN_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
MIN_EXPLAINED = 0.5  # of the activations' bytes, by stacks that come once per layer


def sum_sites(
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


def sum_layers(rows: np.ndarray, lives: Lives, phases: Phases) -> tuple[tuple[Layer, ...], bool]:
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


# --- reserved against allocated, and what expandable segments would have reserved: by replaying the record


MAX_ERROR = 0.05  # of what was reserved: a replay of the allocator as it was must come as near, or nothing is said


def reserved_bytes(record: Record) -> np.ndarray:
    """int64 [n + 1]: bytes of segments before the first event, then after each; backwards from those at the end."""
    grows = np.isin(record.action, (SEGMENT_ALLOC, SEGMENT_MAP))
    shrinks = np.isin(record.action, (SEGMENT_FREE, SEGMENT_UNMAP))
    change = np.where(grows, record.size, 0) - np.where(shrinks, record.size, 0)
    later = np.concatenate([np.cumsum(change[::-1])[::-1], [0]])
    return np.maximum(int(record.segment_bytes.sum()) - later, 0)


def measure_fragmentation(
    record: Record, lives: Lives, allocated: np.ndarray, reserved: np.ndarray
) -> tuple[Fragmentation, str]:
    """(figures, why the record could not be replayed or ''). allocated, reserved: int64 [n + 1]."""
    fullest = np.flatnonzero(reserved == reserved.max())
    at = int(fullest[np.argmax(allocated[fullest])])
    free = record.blocks.size[~record.blocks.live]
    as_it_was, expandable, why = None, None, ""
    was_expandable = _was_expandable(record)
    if reserved[at] > 0 and not record.settings.get("simulated"):
        as_it_was = replayed_peak(record, lives, was_expandable)
        if abs(as_it_was - reserved[at]) <= MAX_ERROR * reserved[at]:
            expandable = replayed_peak(record, lives, True)
        else:
            why = (
                f"a replay of the allocator reserves {as_it_was / reserved[at]:.0%} of what was reserved: what happened before "
                "the record matters, and whether expandable segments would help is unknown"
            )
    elif reserved[at] > 0:
        expandable, as_it_was = replayed_peak(record, lives, True), int(reserved[at])
    return Fragmentation(
        reserved_bytes=int(reserved[at]),
        allocated_bytes=int(allocated[at]),
        largest_free_block=int(free.max(initial=0)),
        expandable=was_expandable,
        replay_reserved_bytes=expandable,
        replay_as_it_was_bytes=as_it_was,
    ), why


def _was_expandable(record: Record) -> bool:
    return record.settings.get("expandable_segments") is True or bool(np.any(record.action == SEGMENT_MAP))


def replayed_peak(record: Record, lives: Lives, expandable: bool) -> int:
    """Most bytes reserved when an empty allocator first takes what was there, then sees the record's events."""
    layout, peak = Layout(expandable), 0
    pieces = [Allocation(size, "", [], stream) for size, stream in zip(lives.requested.tolist(), lives.stream.tolist())]
    old = np.flatnonzero(lives.begin < 0)
    for row in old[np.argsort(lives.address[old], kind="stable")].tolist():
        layout.place(pieces[row])
    peak = layout.reserved
    for kind, row in _events(record, lives):
        if kind == 1:
            layout.place(pieces[row])
            peak = max(peak, layout.reserved)
        elif kind == 0:
            layout.release(pieces[row])
        else:
            layout.give_back()
    return peak


def _events(record: Record, lives: Lives):
    """(0 free | 1 allocation | 2 the allocator gives back, row of the life) in order."""
    n = len(record)
    begins, ends = np.flatnonzero(lives.begin >= 0), np.flatnonzero(lives.end < n)
    given = np.flatnonzero(np.isin(record.action, (SEGMENT_FREE, SEGMENT_UNMAP)))
    given = given[np.diff(given, prepend=-9) > 1]  # once for each run of them
    when = np.concatenate([lives.begin[begins], lives.end[ends], given])
    kind = np.repeat([1, 0, 2], [len(begins), len(ends), len(given)])
    row = np.concatenate([begins, ends, np.zeros(len(given), np.int64)])
    order = np.argsort(when, kind="stable")
    return zip(kind[order].tolist(), row[order].tolist())
