"""In which phase and step each event of a record happened: from tags, else from annotations, else from stacks."""

import re
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.memory.record import ALLOC, Record
from megatron_lite.analysis.memory.stacks import Code
from megatron_lite.phases import Phase

UNKNOWN, SETUP, RECOMPUTE, ZERO_GRAD = "", "setup", "recompute", "zero_grad"
PHASES = (UNKNOWN, SETUP, *map(str, Phase), RECOMPUTE, ZERO_GRAD)
NUMBER = {name: number for number, name in enumerate(PHASES)}
NOT_SAID = -1
OWN_TAG = re.compile(r"^(setup|step \d+)(/|$)")
STEP_NAME = re.compile(r"^(ProfilerStep#|(train_)?(step|iteration|iter)[ _#:]*)\d+$", re.IGNORECASE)
FOREIGN_PHASES = (
    (re.compile(r"zero_grad"), ZERO_GRAD),  # before the next: PyTorch calls it Optimizer.zero_grad#AdamW.zero_grad
    (re.compile(r"^Optimizer\.step#|optimizer", re.IGNORECASE), str(Phase.OPTIMIZER_STEP)),
    (re.compile(r"backward|\bbwd\b", re.IGNORECASE), str(Phase.BACKWARD)),
    (re.compile(r"forward|\bfwd\b", re.IGNORECASE), str(Phase.FORWARD)),
)


@dataclass(frozen=True)
class StepSpan:
    """Events [first, last] of one step."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Phases:
    """n events."""

    of_event: np.ndarray  # int64 [n], index into PHASES
    span: (
        np.ndarray
    )  # int64 [n], rises where a phase begins; recomputation is part of backward, clipping of the optimizer's
    fine_span: np.ndarray  # int64 [n], the same, and recomputation does
    steps: tuple[StepSpan, ...]
    of_stack: np.ndarray  # int64 [stacks], index into PHASES or NOT_SAID
    of_tag: np.ndarray  # int64 [tags], the same
    module_of_tag: tuple[str, ...]


def find_memory_phases(record: Record) -> Phases:
    of_tag, modules = _tags(record.tags)
    of_stack = _stacks(record)
    steps, of_time = _marks(record)
    found = of_tag[record.tag]
    found = np.where(found == NOT_SAID, of_time, found)
    # a free without a stack may be anybody's; an allocation without one is backward's
    speaks = (record.stack > 0) | (record.action == ALLOC)
    found = np.where((found == NOT_SAID) & speaks, of_stack[record.stack], found)
    said = np.maximum.accumulate(np.where(found == NOT_SAID, -1, np.arange(len(found))))
    found = np.where(said >= 0, found[said], NUMBER[UNKNOWN]) if len(found) else found
    coarse = np.where(found == NUMBER[RECOMPUTE], NUMBER[str(Phase.BACKWARD)], found)
    parts = [NUMBER[str(part)] for part in (Phase.UNSCALE, Phase.CLIP_GRAD)]
    coarse = np.where(np.isin(coarse, parts), NUMBER[str(Phase.OPTIMIZER_STEP)], coarse)
    return Phases(found, _spans(coarse), _spans(found), steps or _steps_by_optimizer(coarse), of_stack, of_tag, modules)


def _spans(phase: np.ndarray) -> np.ndarray:
    return np.cumsum(np.diff(phase, prepend=phase[:1]) != 0)


def _tags(tags: tuple[str, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Of 'step 10/forward/decoder.layers.0'; tags of others say nothing."""
    phases, modules = [], []
    for tag in tags:
        if not OWN_TAG.match(tag):
            phases.append(NOT_SAID)
            modules.append("")
            continue
        start, _, rest = tag.partition("/")
        phase, _, module = rest.partition("/")
        if start == SETUP:
            phase, module = SETUP, rest
        phases.append(NUMBER.get(phase, NUMBER[UNKNOWN]))
        modules.append("".join(letter for letter in module[:200] if letter.isprintable()))
    return np.array(phases, np.int64), tuple(modules)


def _stacks(record: Record) -> np.ndarray:
    """Innermost first: a closure inside optimizer.step is forward, a hook inside backward that steps is the optimizer."""
    code, inner = record.stacks.code, record.stacks.innermost
    phase = np.full(len(code), NOT_SAID)
    for part, name in ((Code.MAIN, UNKNOWN), (Code.SETUP, SETUP), (Code.LOSS, "forward")):
        phase[(code & part) > 0] = NUMBER[name]
    for part, name in (
        (Code.LOADER, "data"),
        (Code.FORWARD, "forward"),
        (Code.BACKWARD, "backward"),
        (Code.OPTIMIZER, "optimizer_step"),
        (Code.CLIP, "clip_grad"),
        (Code.ZERO_GRAD, ZERO_GRAD),
    ):
        phase[(inner & part) > 0] = NUMBER[name]
    phase[(phase == NUMBER["optimizer_step"]) & ((code & Code.OPTIMIZER_SETUP) > 0)] = NUMBER[SETUP]
    phase[(code & Code.RECOMPUTE) > 0] = NUMBER[RECOMPUTE]
    # backward runs on a thread of its own, where Python has no frames
    if np.any(phase == NUMBER["forward"]):
        phase[0] = NUMBER["backward"]
    return phase


def _marks(record: Record) -> tuple[tuple[StepSpan, ...], np.ndarray]:
    """Steps, and per event the phase by annotations."""
    nothing = np.full(len(record), NOT_SAID)
    if not record.marks or not len(record):
        return (), nothing
    times, labels, steps, open_marks, began = [np.iinfo(np.int64).min], [NOT_SAID], [], [], {}
    for time_us, stage, name in record.marks:
        if STEP_NAME.match(name):
            if stage == "START":
                began[name] = time_us
            elif name in began:
                steps.append((name, began.pop(name), time_us))
            continue
        if (phase := _phase_of_mark(name)) is None:
            continue
        if stage == "START":
            open_marks.append((name, phase))
        else:
            at = next((i for i in reversed(range(len(open_marks))) if open_marks[i][0] == name), None)
            if at is not None:
                del open_marks[at]
        times.append(time_us)
        labels.append(NUMBER[open_marks[-1][1]] if open_marks else NOT_SAID)
    steps += [(name, start, int(record.time_us[-1])) for name, start in began.items()]  # the record ends inside
    at = np.searchsorted(np.array(times), record.time_us, side="right") - 1
    return _step_spans(record.time_us, steps), np.array(labels)[at]


def _phase_of_mark(name: str) -> str | None:
    if name in NUMBER:
        return name
    return next((phase for pattern, phase in FOREIGN_PHASES if pattern.search(name)), None)


def _step_spans(time_us: np.ndarray, steps) -> tuple[StepSpan, ...]:
    found = []
    for name, start, end in sorted(steps, key=lambda step: step[1]):
        first, last = np.searchsorted(time_us, start), np.searchsorted(time_us, end, side="right") - 1
        if last >= first:
            found.append(StepSpan(name, int(first), int(last)))
    return tuple(found)


def _steps_by_optimizer(phase: np.ndarray) -> tuple[StepSpan, ...]:
    """A step ends with the last of its optimizer's events before the next forward or backward."""
    stepping = phase == NUMBER["optimizer_step"]
    rows = np.flatnonzero(stepping | (phase == NUMBER["forward"]) | (phase == NUMBER["backward"]))
    ends = rows[stepping[rows] & ~np.append(stepping[rows[1:]], False)]
    starts = np.concatenate([[-1], ends[:-1]]) + 1
    return tuple(
        StepSpan(f"step {number}", int(start), int(end)) for number, (start, end) in enumerate(zip(starts, ends), 1)
    )
