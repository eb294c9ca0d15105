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
from megatron_lite.analysis.memory.categories import assign_categories
from megatron_lite.analysis.memory.layers import sum_layers
from megatron_lite.analysis.memory.lifetimes import INDEX, find_lifetimes
from megatron_lite.analysis.memory.memory_results import (
    CurvePoint,
    Gathered,
    Held,
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

SiteKey = tuple[str, str, str, str]  # site, category, phase and module of a SiteBytes
MAX_UNKNOWN = 0.01  # of the peak, without origin, in a record that counts as complete
NO_PEAK = -2  # a span that neither an event has nor what was there before the record
RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
MIN_STEPS_OF_GROWTH = 3  # to speak of growth
MIN_GROWTH_BYTES = 4096  # of growth per step; counters and log values come and go
MIN_GROWING_SHARE = 0.75  # of the steps must end higher than the one before
BETWEEN_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


# --- the analysis; index 0 of a curve is before the first event


def read_snapshot(path: Path) -> Snapshot:
    """Read and analyze the file at `path`. Raises UserError where it is no memory snapshot."""
    raw, notes = choose_snapshot(read_values(Path(path)))
    found = analyze_snapshot(raw, Path(path))
    return replace(found, notes=(*notes, *found.notes))


def analyze_snapshot(raw: Any, path: Path) -> Snapshot:
    """Analyze what a file at `path` would hold. Raises UserError where that is no memory snapshot."""
    return SnapshotReader(build_record(raw, path)).read(path.name)


class SnapshotReader:
    """The events of a record, what memory they handed out, and what for."""

    def __init__(self, record: AllocatorEvents):
        self.record = record
        self.phases = find_memory_phases(record)
        self.lives = find_lifetimes(record, self.phases)
        self.categories = assign_categories(self.lives)
        self.allocated = self.lives.sum_held()
        self.reserved = measure_reserved(record)

    def read(self, source: str) -> Snapshot:
        """Everything that the record says of memory. source: the file's name."""
        record = self.record
        peak = int(np.argmax(self.allocated)) - 1  # event after which most is held; -1: before the first
        peak_bytes = int(self.allocated[peak + 1])
        rows = self.lives.held_after(peak)
        held = self._sum_held(rows)
        unknown = sum(one.num_bytes for one in held if one.category == "before the record")
        complete = unknown <= MAX_UNKNOWN * peak_bytes
        activations = rows[self.categories[rows] == INDEX["activations"]]
        layers, guessed = sum_layers(self.lives, self.phases, activations)
        fragmentation, unreplayed = measure_fragmentation(record, self.lives)
        steps = self._measure_steps()
        limits = _describe_limits(record, unknown, complete, len(steps))
        notes = [*record.notes, *limits, *unreplayed]
        if guessed and layers:
            notes.append("layers are distinguished by the order in which equal stacks allocate")
        times = np.append(0, record.time_us)
        return Snapshot(
            source=source,
            rank=_find_rank(source),
            simulated=bool(record.settings.get("simulated")),
            peak_bytes=peak_bytes,
            peak_time_us=int(times[peak + 1]),
            peak_phase=self._find_phase(peak),
            held=held,
            sites=self._sum_sites(rows, self.lives.num_bytes[rows]),
            layers=layers,
            curve=self._draw_curve(times),
            steps=steps,
            growth=self._find_growth(),
            fragmentation=fragmentation,
            oom=self._find_failure(),
            events=len(record),
            complete=complete,
            notes=tuple(notes),
            highest=self._find_highest(),
            device=record.device,
            private_pools=measure_private_pools(record, self.lives),
            gathered=self._find_gathered(rows, peak),
        )

    def _find_phase(self, peak: int) -> str:
        """The phase of the event `peak`, or of the first where memory peaks before it; "" without events."""
        if not len(self.record):
            return ""
        number = int(self.phases.of_event[max(peak, 0)])
        return str(PHASES[number])

    def _measure_steps(self) -> tuple[StepMemory, ...]:
        """Times and memory of each step of the record."""
        steps = []
        for name, first, last in self.phases.steps:
            # from before its first event, too
            allocated = self.allocated[first : last + 2]
            step = StepMemory(
                name=name,
                start_us=int(self.record.time_us[first]),
                end_us=int(self.record.time_us[last]),
                allocated_at_end=int(allocated[-1]),
                peak=int(allocated.max()),
            )
            steps.append(step)
        return tuple(steps)

    def _sum_held(self, rows: Integers) -> tuple[Held, ...]:
        """Sum what the lives `rows` hold by category, largest first."""
        category = self.categories[rows]
        blocks = np.bincount(category, minlength=len(CATEGORIES))
        sums = np.bincount(category, self.lives.num_bytes[rows], len(CATEGORIES))
        requested = np.bincount(category, self.lives.requested[rows], len(CATEGORIES))
        held = []
        for number in np.argsort(-sums, kind="stable").tolist():
            if blocks[number]:
                row = Held(
                    category=CATEGORIES[number],
                    num_bytes=int(sums[number]),
                    blocks=int(blocks[number]),
                    requested_bytes=int(requested[number]),
                )
                held.append(row)
        return tuple(held)

    def _find_highest(self) -> tuple[Held, ...]:
        """Each category at its own highest moment, largest first. Gradients that end within the backward that computes
        them, since they are added to others, are left out."""
        lives = self.lives
        ends_in_backward = lives.within("backward") & lives.same_span
        passing = ends_in_backward & (self.categories == INDEX["gradients"])
        found = []
        for number in np.unique(self.categories).tolist():
            mine = (self.categories == number) & ~passing
            highest = Held(
                category=CATEGORIES[number],
                num_bytes=int(lives.sum_held(mine).max()),
                blocks=int(lives.sum_held(mine, 1).max()),
                requested_bytes=int(lives.sum_held(mine, lives.requested).max()),
            )
            found.append(highest)
        return tuple(sorted(found, key=lambda held: -held.num_bytes))

    def _draw_curve(self, times: Integers) -> tuple[CurvePoint, ...]:
        """The memory curve, thinned. times: int64 [n + 1], in us."""
        at = choose_points(self.allocated)
        of_categories = []
        for number in range(len(CATEGORIES)):
            held = self.lives.sum_held(self.categories == number)
            of_categories.append(held[at].tolist())
        columns = [times[at].tolist(), self.allocated[at].tolist(), self.reserved[at].tolist(), zip(*of_categories)]
        return tuple(CurvePoint(*row) for row in zip(*columns))

    def _find_growth(self) -> SnapshotGrowth | None:
        """Find what stays after each step; None where memory does not grow, or too few steps are seen."""
        lives = self.lives
        ends = [step.last for step in self.phases.steps]
        if len(ends) < MIN_STEPS_OF_GROWTH:
            return None
        change = np.diff(self.allocated[np.array(ends) + 1])
        slope = float(np.median(change))
        growing_share = np.mean(change > 0)
        if slope < MIN_GROWTH_BYTES or growing_share < MIN_GROWING_SHARE:
            return None
        # per step: what was held after the last and not after the first, less what the same lines held before
        before = lives.held_after(ends[0])
        after = lives.held_after(ends[-1])
        more = np.setdiff1d(after, before)
        less = np.setdiff1d(before, after)
        changed = np.concatenate([more, less])
        signed_bytes = np.concatenate([lives.num_bytes[more], -lives.num_bytes[less]])
        sites = self._sum_sites(changed, signed_bytes / len(change))
        growing = [site for site in sites if site.num_bytes > 0]
        return SnapshotGrowth(bytes_per_step=slope, steps=len(ends), sites=tuple(growing))

    def _sum_sites(self, rows: Integers, sizes: Integers | Numbers) -> tuple[SiteBytes, ...]:
        """Source lines, largest first. sizes: bytes of each of the lives `rows`,
        negative ones too (memory that went away)."""
        lives = self.lives
        columns = [lives.stack, lives.tag, self.categories, lives.phase]
        origins = np.stack([column[rows] for column in columns])
        distinct, inverse = np.unique(origins, axis=1, return_inverse=True)
        which = inverse.ravel()  # of each row
        count = distinct.shape[1]
        bytes_of_origin = np.bincount(which, weights=sizes, minlength=count)
        blocks_of_origin = np.bincount(which, weights=np.sign(sizes), minlength=count)
        num_bytes: Counter[SiteKey] = Counter()
        blocks: Counter[SiteKey] = Counter()
        # several stacks and tags may lead to one site
        for number, origin in enumerate(distinct.T.tolist()):
            site = self._describe_origin(*origin)
            num_bytes[site] += int(bytes_of_origin[number])
            blocks[site] += int(blocks_of_origin[number])
        return tuple(SiteBytes(*site, total, blocks[site]) for site, total in num_bytes.most_common())

    def _describe_origin(
        self,
        stack: int,  # index into the record's stacks
        tag: int,  # index into its tags
        category: int,  # index into CATEGORIES
        phase_number: int,  # index into PHASES, or NOT_SAID
    ) -> SiteKey:
        """Describe where memory comes from as reports show it."""
        phase = "" if phase_number == NOT_SAID else PHASES[phase_number]
        module = BETWEEN_NUMBERS.sub("*", self.phases.module_of_tag[tag])
        return self._describe_site(stack, phase), CATEGORIES[category], phase, module

    def _describe_site(self, stack: int, phase: str) -> str:
        """The line that allocated, or what is known without one."""
        if site := self.record.stacks.site(stack):
            return site
        if node := self.record.stacks.node(stack):
            return f"{node} (autograd)"
        if phase == "backward":
            return "backward, without Python frames"
        return "made before the record, without a stack"

    def _find_failure(self) -> OutOfMemory | None:
        """The last request that failed; earlier ones were survived."""
        record = self.record
        failed = np.flatnonzero(record.action == OOM)
        if not len(failed):
            return None
        last = int(failed[-1])
        moment = last + 1
        requested = int(record.size[last])
        later = record.action[moment:] == ALLOC
        allocated_later = record.size[moment:][later]
        in_private_pools = self.lives.sum_held(self.lives.pool > 0)
        unused_private = measure_reserved(record, private=True)[moment] - in_private_pools[moment]
        unused = self.reserved[moment] - self.allocated[moment] - unused_private
        return OutOfMemory(
            requested_bytes=requested,
            device_free_bytes=int(record.device_free[last]),
            site=record.stacks.site(int(record.stack[last])),
            held_bytes=int(self.allocated[moment]),
            unused_private_bytes=max(int(unused_private), 0),
            unused_bytes=max(int(unused), 0),
            held=self._sum_held(self.lives.held_after(last)),
            went_on=int(allocated_later.sum()) >= max(requested, 1),
        )

    def _find_gathered(self, rows: Integers, peak: int) -> Gathered | None:
        """Whole weights at the peak of which each rank keeps a part. rows: what is held after the event `peak`."""
        lives = self.lives
        is_gathered = self.categories == INDEX["gathered parameters"]
        gathered = rows[is_gathered[rows]]
        if not len(gathered):
            return None
        span_of_peak = int(self.phases.span[peak]) if peak >= 0 else NO_PEAK
        known = [self.record.stacks.known[stack] for stack in lives.stack[gathered].tolist()]
        libraries = [frame.row.library for frame in known if frame]
        sizes = lives.num_bytes[gathered]
        return Gathered(
            library=libraries[0] if libraries else "",
            num_bytes=int(sizes.sum()),
            blocks=len(gathered),
            kept_blocks=int((lives.span[gathered] != span_of_peak).sum()),
            gathered_in_phase=int((is_gathered & (lives.span == span_of_peak)).sum()),
            site=self._sum_sites(gathered, sizes)[0].site,
        )


def _find_rank(source: str) -> int | None:
    """The rank that a file's name gives; None without one."""
    found = RANK_IN_NAME.search(source)
    return int(found[1]) if found else None


def _describe_limits(
    record: AllocatorEvents,
    unknown: int,  # bytes of the peak without origin
    complete: bool,  # they are few
    steps: int,  # how many the record holds
) -> Iterator[str]:
    """Sentences on what the record cannot tell."""
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
    if steps < MIN_STEPS_OF_GROWTH:
        yield f"growth from step to step needs {counted(MIN_STEPS_OF_GROWTH, 'step')}; the record holds {steps}"
