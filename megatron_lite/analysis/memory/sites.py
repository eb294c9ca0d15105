"""Which source lines hold memory, which layers hold the activations, and what is reserved without being allocated."""

import re
from collections import Counter

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
MAX_ERROR = 0.05  # of what was reserved: a replay of the allocator as it was must come as near, or nothing is said


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
    sums = np.bincount(where.ravel(), weights=sizes, minlength=distinct.shape[1])
    counts = np.bincount(where.ravel(), weights=np.sign(sizes), minlength=distinct.shape[1])
    num_bytes, blocks = Counter(), Counter()
    for (stack, tag, category, number), total, count in zip(distinct.T.tolist(), sums.tolist(), counts.tolist()):
        phase = "" if number == NOT_SAID else PHASES[number]
        site = record.stacks.site(stack)
        if not site and (node := record.stacks.node(stack)):
            site = f"{node} (autograd)"
        without = (
            "backward, without Python frames" if phase == "backward" else "made before the record, without a stack"
        )
        key = (site or without, CATEGORIES[category], phase, BETWEEN_NUMBERS.sub("*", phases.module_of_tag[tag]))
        num_bytes[key] += int(total)
        blocks[key] += int(count)
    return tuple(SiteBytes(*key, total, blocks[key]) for key, total in num_bytes.most_common())


def sum_layers(rows: np.ndarray, lives: Lives, phases: Phases) -> tuple[tuple[Layer, ...], bool]:
    """(activations `rows` by layer in the model's order, whether that order was worked out from equal stacks)."""
    modules = [phases.module_of_tag[tag] for tag in lives.tag[rows].tolist()]
    if not any(modules):
        return _sum_by_repetition(rows, lives, phases), True
    totals, places = Counter(), {}
    for module, num_bytes in zip(modules, lives.num_bytes[rows].tolist()):
        match = NUMBERED.match(module)
        name, place = (match[1], (int(match[2]), match[1])) if match else (OUTSIDE, (-1, ""))
        places[name] = place
        totals[name] += num_bytes
    return tuple(Layer(name, totals[name]) for name in sorted(totals, key=places.get)), False


def _sum_by_repetition(rows: np.ndarray, lives: Lives, phases: Phases) -> tuple[Layer, ...]:
    """A line that runs once per layer allocates in the order of the layers: its k-th allocation within one forward is the
    k-th layer's. The number of layers is the count of repetitions that explains most bytes."""
    with_stack = (lives.begin >= 0) & (lives.stack > 0)
    rows, fresh = rows[with_stack[rows]], np.flatnonzero(with_stack)
    if not len(rows):
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
    inside = repeated % max(layers, 1) == 0
    if layers < 2 or sizes[inside].sum() < MIN_EXPLAINED * sizes.sum():
        return ()
    layer = occurrence[rows] * layers // repeated
    totals = np.bincount(layer[inside], weights=sizes[inside], minlength=layers)
    found = [Layer(f"layer {number}", int(total)) for number, total in enumerate(totals)]
    rest = int(sizes[~inside].sum())
    return ((Layer(OUTSIDE, rest),) if rest else ()) + tuple(found)


# --- reserved against allocated, and what expandable segments would have reserved: by replaying the record


def measure_fragmentation(
    record: Record, lives: Lives, allocated: np.ndarray, reserved: np.ndarray
) -> tuple[Fragmentation, str]:
    """(figures, why the record could not be replayed or ''). allocated, reserved: int64 [n + 1]."""
    fullest = np.flatnonzero(reserved == reserved.max())
    at = int(fullest[np.argmax(allocated[fullest])])
    as_it_was, expandable, why, most = None, None, "", int(reserved[at])
    was_expandable = record.settings.get("expandable_segments") is True or bool(np.any(record.action == SEGMENT_MAP))
    if most > 0 and record.settings.get("simulated"):
        as_it_was, expandable = most, replay_peak(record, lives, True)
    elif most > 0:
        as_it_was = replay_peak(record, lives, was_expandable)
        if abs(as_it_was - most) <= MAX_ERROR * most:
            expandable = replay_peak(record, lives, True)
        else:
            why = (
                f"a replay of the allocator reserves {as_it_was / most:.0%} of what was reserved: what happened before "
                "the record matters, and whether expandable segments would help is unknown"
            )
    free = record.blocks.size[~record.blocks.live]
    return Fragmentation(most, int(allocated[at]), int(free.max(initial=0)), was_expandable, expandable, as_it_was), why


def replay_peak(record: Record, lives: Lives, expandable: bool) -> int:
    """Most bytes reserved when an empty allocator first takes what was there, then sees the record's events."""
    n, layout = len(record), Layout(expandable)
    pieces = [Allocation(size, "", [], stream) for size, stream in zip(lives.requested.tolist(), lives.stream.tolist())]
    old = np.flatnonzero(lives.begin < 0)
    for row in old[np.argsort(lives.address[old], kind="stable")].tolist():
        layout.place(pieces[row])
    peak = layout.reserved
    begins, ends = np.flatnonzero(lives.begin >= 0), np.flatnonzero(lives.end < n)
    given = np.flatnonzero(np.isin(record.action, (SEGMENT_FREE, SEGMENT_UNMAP)))
    given = given[np.diff(given, prepend=-9) > 1]  # once for each run of them
    order = np.argsort(np.concatenate([lives.begin[begins], lives.end[ends], given]), kind="stable")
    what = np.repeat(["allocate", "free", "give back"], [len(begins), len(ends), len(given)])[order]
    row = np.concatenate([begins, ends, given])[order]
    for action, number in zip(what.tolist(), row.tolist()):
        if action == "allocate":
            layout.place(pieces[number])
            peak = max(peak, layout.reserved)
        elif action == "free":
            layout.release(pieces[number])
        else:
            layout.give_back()
    return peak


def measure_reserved(record: Record) -> np.ndarray:
    """int64 [n + 1]: bytes of segments before the first event, then after each; backwards from those at the end."""
    grows = np.isin(record.action, (SEGMENT_ALLOC, SEGMENT_MAP))
    shrinks = np.isin(record.action, (SEGMENT_FREE, SEGMENT_UNMAP))
    change = np.where(grows, record.size, 0) - np.where(shrinks, record.size, 0)
    later = np.concatenate([np.cumsum(change[::-1])[::-1], [0]])
    return np.maximum(record.reserved_bytes - later, 0)
