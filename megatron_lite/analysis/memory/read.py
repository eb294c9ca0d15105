"""A memory snapshot, read: the curve worked out from the state at the end and the events before it, the peak, and what
held memory then."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.analysis.intervals import Integers, Numbers
from megatron_lite.analysis.memory.categories import INDEX, assign_categories, find_lifetimes
from megatron_lite.analysis.memory.memory_results import (
    OUTSIDE,
    Gathered,
    Held,
    Layer,
    Moment,
    OutOfMemory,
    SiteBytes,
    Snapshot,
    SnapshotGrowth,
    StepMemory,
    choose_points,
)
from megatron_lite.analysis.memory.phases import NOT_SAID, PHASES, find_memory_phases
from megatron_lite.analysis.memory.record import ALLOC, OOM, AllocatorEvents, build_record
from megatron_lite.analysis.memory.reserved import measure_fragmentation, measure_private_pools, measure_reserved
from megatron_lite.analysis.memory.snapshot_file import choose_snapshot, read_values
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.units import counted, size

MAX_UNKNOWN = 0.01  # of the peak, without origin, in a record that counts as complete
RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
MIN_STEPS = 3  # to speak of growth
MIN_BYTES = 4096  # of growth per step; counters and log values come and go
MOSTLY = 0.75  # of the steps must end higher than the one before
NUMBERED = re.compile(r"^(.*?(?:^|\.)(\d+))(?:\.|$)")
BETWEEN_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
MIN_EXPLAINED = 0.5  # of the activations' bytes, by stacks that come once per layer


# --- the analysis; index 0 of a curve is before the first event


def read_snapshot(path: Path) -> Snapshot:
    """Raises UserError where `path` is no memory snapshot."""
    raw, notes = choose_snapshot(read_values(Path(path)))
    found = analyze_snapshot(raw, Path(path))
    return replace(found, notes=(*notes, *found.notes))


def analyze_snapshot(raw: Any, path: Path) -> Snapshot:
    """The same of what a file at `path` would hold. Raises UserError where that is no memory snapshot."""
    return SnapshotReader(build_record(raw, path)).read(path.name)


class SnapshotReader:
    """The events of a record, what memory they handed out, and what for."""

    def __init__(self, record: AllocatorEvents):
        self.record, self.phases = record, find_memory_phases(record)
        self.lives = find_lifetimes(record, self.phases)
        self.categories = assign_categories(self.lives, self.phases)
        self.allocated = self.lives.sum_held(len(record))
        self.reserved = measure_reserved(record)

    def read(self, source: str) -> Snapshot:
        record, lives, allocated = self.record, self.lives, self.allocated
        peak = int(np.argmax(allocated)) - 1  # event after which most is held; -1: before the first
        rows, peak_bytes = lives.held_after(peak), int(allocated[peak + 1])
        held = self._sum_held(rows)
        unknown = sum(one.num_bytes for one in held if one.category == "before the record")
        complete = unknown <= MAX_UNKNOWN * peak_bytes
        layers, guessed = self._sum_layers(rows[self.categories[rows] == INDEX["activations"]])
        fragmentation, unreplayed = measure_fragmentation(record, lives)
        steps = []
        for name, first, last in self.phases.steps:
            figures = (
                record.time_us[first],
                record.time_us[last],
                allocated[last + 1],
                allocated[first : last + 2].max(),
            )
            steps.append(StepMemory(name, *map(int, figures)))
        notes = [*record.notes, *_describe_limits(record, unknown, complete, len(steps)), *unreplayed]
        if guessed and layers:
            notes.append("layers are distinguished by the order in which equal stacks allocate")
        rank, times = RANK_IN_NAME.search(source), np.append(0, record.time_us)
        return Snapshot(
            source=source,
            rank=int(rank[1]) if rank else None,
            simulated=bool(record.settings.get("simulated")),
            peak_bytes=peak_bytes,
            peak_time_us=int(times[peak + 1]),
            peak_phase=PHASES[self.phases.of_event[max(peak, 0)]] if len(record) else "",
            held=held,
            sites=self._sum_sites(rows, lives.num_bytes[rows]),
            layers=layers,
            curve=self._draw_curve(times),
            steps=tuple(steps),
            growth=self._find_growth(),
            fragmentation=fragmentation,
            oom=self._find_failure(),
            events=len(record),
            complete=complete,
            notes=tuple(notes),
            highest=self._find_highest(),
            device=record.device,
            private_pools=measure_private_pools(record, lives),
            gathered=self._find_gathered(rows, peak),
        )

    def _sum_held(self, rows: Integers) -> tuple[Held, ...]:
        """What the lives `rows` hold by category, largest first."""
        category, number = self.categories[rows], len(CATEGORIES)
        blocks = np.bincount(category, minlength=number)
        sums = np.bincount(category, self.lives.num_bytes[rows], number)
        requested = np.bincount(category, self.lives.requested[rows], number)
        order = [at for at in np.argsort(-sums, kind="stable") if blocks[at]]
        return tuple(Held(CATEGORIES[at], int(sums[at]), int(blocks[at]), int(requested[at])) for at in order)

    def _find_highest(self) -> tuple[Held, ...]:
        """Each category at its own highest moment, largest first. Gradients that end within the backward that computes
        them, since they are added to others, are left out."""
        lives, found = self.lives, []
        passing = (self.categories == INDEX["gradients"]) & lives.within("backward") & lives.same_span
        for number in np.unique(self.categories).tolist():
            mine = (self.categories == number) & ~passing
            num_bytes, blocks, requested = (
                int(lives.sum_held(len(self.record), np.where(mine, amounts, 0)).max())
                for amounts in (lives.num_bytes, 1, lives.requested)
            )
            found.append(Held(CATEGORIES[number], num_bytes, blocks, requested))
        return tuple(sorted(found, key=lambda one: -one.num_bytes))

    def _draw_curve(self, times: Integers) -> tuple[Moment, ...]:
        at, lives = choose_points(self.allocated), self.lives
        by_category = [
            lives.sum_held(len(self.record), np.where(self.categories == number, lives.num_bytes, 0))[at].tolist()
            for number in range(len(CATEGORIES))
        ]
        columns = (times[at].tolist(), self.allocated[at].tolist(), self.reserved[at].tolist(), zip(*by_category))
        return tuple(Moment(*point) for point in zip(*columns))

    def _find_growth(self) -> SnapshotGrowth | None:
        """None where memory does not grow from step to step, or too few steps are seen."""
        ends, lives = [step.last for step in self.phases.steps], self.lives
        if len(ends) < MIN_STEPS:
            return None
        change = np.diff(self.allocated[np.array(ends) + 1])
        slope = float(np.median(change))
        if slope < MIN_BYTES or np.mean(change > 0) < MOSTLY:
            return None
        # per step: what was held after the last and not after the first, less what the same lines held before
        before, after = lives.held_after(ends[0]), lives.held_after(ends[-1])
        more, less = np.setdiff1d(after, before), np.setdiff1d(before, after)
        signed = np.concatenate([lives.num_bytes[more], -lives.num_bytes[less]])
        sites = self._sum_sites(np.concatenate([more, less]), signed / len(change))
        return SnapshotGrowth(slope, len(ends), tuple(site for site in sites if site.num_bytes > 0))

    def _sum_sites(self, rows: Integers, sizes: Integers | Numbers) -> tuple[SiteBytes, ...]:
        """Source lines, largest first. sizes: bytes of each of the lives `rows`,
        negative ones too (memory that went away)."""
        lives, stacks = self.lives, self.record.stacks
        columns = np.stack([lives.stack[rows], lives.tag[rows], self.categories[rows], lives.phase[rows]])
        distinct, where = np.unique(columns, axis=1, return_inverse=True)
        sums = np.bincount(where.ravel(), weights=sizes, minlength=distinct.shape[1])
        counts = np.bincount(where.ravel(), weights=np.sign(sizes), minlength=distinct.shape[1])
        num_bytes: Counter[tuple[str, str, str, str]] = Counter()
        blocks: Counter[tuple[str, str, str, str]] = Counter()
        for (stack, tag, category, number), total, count in zip(distinct.T.tolist(), sums.tolist(), counts.tolist()):
            phase = "" if number == NOT_SAID else PHASES[number]
            site = stacks.site(stack)
            if not site and (node := stacks.node(stack)):
                site = f"{node} (autograd)"
            elif not site:
                in_backward = phase == "backward"
                site = "backward, without Python frames" if in_backward else "made before the record, without a stack"
            module = BETWEEN_NUMBERS.sub("*", self.phases.module_of_tag[tag])
            key = (site, CATEGORIES[category], phase, module)
            num_bytes[key] += int(total)
            blocks[key] += int(count)
        return tuple(SiteBytes(*key, total, blocks[key]) for key, total in num_bytes.most_common())

    def _sum_layers(self, rows: Integers) -> tuple[tuple[Layer, ...], bool]:
        """(activations `rows` by layer in the model's order, whether that order was worked out from equal stacks)."""
        modules = [self.phases.module_of_tag[tag] for tag in self.lives.tag[rows].tolist()]
        if not any(modules):
            return self._sum_layers_by_repetition(rows), True
        totals: Counter[str] = Counter()
        places: dict[str, tuple[int, str]] = {}
        for module, num_bytes in zip(modules, self.lives.num_bytes[rows].tolist()):
            match = NUMBERED.match(module)
            name, places[name] = (match[1], (int(match[2]), match[1])) if match else (OUTSIDE, (-1, ""))
            totals[name] += num_bytes
        return tuple(Layer(name, totals[name]) for name in sorted(totals, key=places.__getitem__)), False

    def _sum_layers_by_repetition(self, rows: Integers) -> tuple[Layer, ...]:
        """A line that runs once per layer allocates in the order of the layers: its k-th allocation within one forward
        is the k-th layer's. The number of layers is the count of repetitions that explains most bytes."""
        lives = self.lives
        with_stack = (lives.begin >= 0) & (lives.stack > 0) & ~lives.awaiting
        rows, fresh = rows[with_stack[rows]], np.flatnonzero(with_stack)
        if not len(rows):
            return ()
        key = self.phases.fine_span[lives.begin[fresh]] * (int(lives.stack.max()) + 1) + lives.stack[fresh]
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

    def _find_failure(self) -> OutOfMemory | None:
        """The last request that failed; earlier ones were survived."""
        record, failed = self.record, np.flatnonzero(self.record.action == OOM)
        if not len(failed):
            return None
        last = int(failed[-1])
        requested = int(record.size[last])
        after = record.size[last + 1 :][record.action[last + 1 :] == ALLOC]
        private = self.lives.pool > 0
        allocated = self.lives.sum_held(len(record), np.where(private, self.lives.num_bytes, 0))[last + 1]
        unused_private = measure_reserved(record, private=True)[last + 1] - allocated
        unused = self.reserved[last + 1] - self.allocated[last + 1] - unused_private
        return OutOfMemory(
            requested_bytes=requested,
            device_free_bytes=int(record.device_free[last]),
            site=record.stacks.site(int(record.stack[last])),
            held_bytes=int(self.allocated[last + 1]),
            unused_private_bytes=max(int(unused_private), 0),
            unused_bytes=max(int(unused), 0),
            held=self._sum_held(self.lives.held_after(last)),
            went_on=int(after.sum()) >= max(requested, 1),
        )

    def _find_gathered(self, rows: Integers, peak: int) -> Gathered | None:
        """Of the lives `rows` at the event `peak` the whole weights."""
        lives, spans = self.lives, self.phases.span
        gathered = rows[self.categories[rows] == INDEX["gathered parameters"]]
        if not len(gathered):
            return None
        ours = np.flatnonzero((self.categories == INDEX["gathered parameters"]) & (lives.begin >= 0))
        in_phase = int((spans[lives.begin[ours]] == spans[peak]).sum()) if peak >= 0 else 0
        kept = lives.begin[gathered] < 0
        if peak >= 0:
            kept = kept | (spans[np.maximum(lives.begin[gathered], 0)] != spans[peak])
        sites = self._sum_sites(gathered, lives.num_bytes[gathered])
        known = (self.record.stacks.known[stack] for stack in lives.stack[gathered].tolist())
        library = next((one.row.library for one in known if one), "")
        total = int(lives.num_bytes[gathered].sum())
        return Gathered(library, total, len(gathered), int(kept.sum()), in_phase, sites[0].site)


def _describe_limits(record: AllocatorEvents, unknown: int, complete: bool, steps: int) -> Iterator[str]:
    if not len(record):
        yield (
            "no history was recorded: this is the state at the moment of the dump, not the peak; call "
            "torch.cuda.memory._record_memory_history first"
        )
        return
    if not record.timed:
        yield "the file has no timestamps: time is counted in events"
    if not complete:
        yield (
            f"{size(unknown)} of the peak was allocated before recording began, for an unknown purpose: start "
            "recording before the model is created"
        )
    if steps < MIN_STEPS:
        yield f"growth from step to step needs {counted(MIN_STEPS, 'step')}; the record holds {steps}"
