"""In which phase and step each event of a record happened: from tags, else from annotations, else from stacks."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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


class StepSpan(NamedTuple):
    """Events [first, last] of one step."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Phases:
    """n events. span rises where a phase begins; recomputation is part of backward, clipping of the optimizer's."""

    of_event: NDArray[np.int64]  # [n], index into PHASES
    span: NDArray[np.int64]  # [n]
    fine_span: NDArray[np.int64]  # [n], the same, and rises where recomputation and clipping begin too
    steps: tuple[StepSpan, ...]
    of_stack: NDArray[np.int64]  # [stacks], index into PHASES or NOT_SAID
    of_tag: NDArray[np.int64]  # [tags], the same
    module_of_tag: tuple[str, ...]


def find_memory_phases(record: Record) -> Phases:
    of_tag, modules = np.full(len(record.tags), NOT_SAID), [""] * len(record.tags)
    for number, tag in enumerate(record.tags):
        if OWN_TAG.match(tag):  # 'step 10/forward/decoder.layers.0'; tags of others say nothing
            start, _, rest = tag.partition("/")
            phase, _, module = (SETUP, "", rest) if start == SETUP else rest.partition("/")
            of_tag[number] = NUMBER.get(phase, NUMBER[UNKNOWN])
            modules[number] = "".join(letter for letter in module[:200] if letter.isprintable())
    of_stack = _read_stacks(record)
    steps, of_time = _read_marks(record)
    found = of_tag[record.tag]
    found = np.where(found == NOT_SAID, of_time, found)
    # a free without a stack may be anybody's; an allocation without one is backward's
    speaks = (record.stack > 0) | (record.action == ALLOC)
    found = np.where((found == NOT_SAID) & speaks, of_stack[record.stack], found)
    said = np.maximum.accumulate(np.where(found == NOT_SAID, -1, np.arange(len(found))))
    found = np.where(said >= 0, found[said], NUMBER[UNKNOWN]) if len(found) else found
    coarse = np.where(found == NUMBER[RECOMPUTE], NUMBER["backward"], found)
    coarse = np.where(np.isin(coarse, [NUMBER["unscale"], NUMBER["clip_grad"]]), NUMBER["optimizer_step"], coarse)
    span, fine_span = (np.cumsum(np.diff(phase, prepend=phase[:1]) != 0) for phase in (coarse, found))
    if not steps:  # a step ends with the last of its optimizer's events before the next forward or backward
        stepping = coarse == NUMBER["optimizer_step"]
        rows = np.flatnonzero(stepping | (coarse == NUMBER["forward"]) | (coarse == NUMBER["backward"]))
        ends = rows[stepping[rows] & ~np.append(stepping[rows[1:]], False)].tolist()
        starts = [0, *(end + 1 for end in ends)]
        steps = tuple(StepSpan(f"step {number}", *of_step) for number, of_step in enumerate(zip(starts, ends), 1))
    return Phases(found, span, fine_span, steps, of_stack, of_tag, tuple(modules))


def _read_stacks(record: Record) -> NDArray[np.int64]:
    """Innermost first: a closure inside optimizer.step is forward, a hook inside backward that steps is the optimizer."""
    every, inner = record.stacks.codes
    phase = np.full(len(every), NOT_SAID)
    for code, part, name in (
        (every, Code.MAIN, UNKNOWN),
        (every, Code.SETUP, SETUP),
        (every, Code.LOSS, "forward"),
        (inner, Code.LOADER, "data"),
        (inner, Code.FORWARD, "forward"),
        (inner, Code.BACKWARD, "backward"),
        (inner, Code.OPTIMIZER, "optimizer_step"),
        (inner, Code.CLIP, "clip_grad"),
        (inner, Code.ZERO_GRAD, ZERO_GRAD),
    ):
        phase[(code & part) > 0] = NUMBER[name]
    phase[(phase == NUMBER["optimizer_step"]) & ((every & Code.OPTIMIZER_SETUP) > 0)] = NUMBER[SETUP]
    phase[(every & Code.RECOMPUTE) > 0] = NUMBER[RECOMPUTE]
    # a library's own work, such as gathering weights, is part of the phase around it
    by_library = np.array([known is not None for known in record.stacks.known], bool)
    phase[by_library & (phase == NUMBER[UNKNOWN])] = NOT_SAID
    # backward runs on a thread of its own, where Python has no frames
    if np.any(phase == NUMBER["forward"]):
        phase[0] = NUMBER["backward"]
    return phase


def _read_marks(record: Record) -> tuple[tuple[StepSpan, ...], NDArray[np.int64]]:
    """Steps, and per event the phase by annotations."""
    if not record.marks or not len(record):
        return (), np.full(len(record), NOT_SAID)
    times, labels, steps, open_marks, began = [np.iinfo(np.int64).min], [NOT_SAID], [], [], {}
    for time_us, stage, name in record.marks:
        if STEP_NAME.match(name):
            if stage == "START":
                began[name] = time_us
            elif name in began:
                steps.append((name, began.pop(name), time_us))
            continue
        known = (phase for pattern, phase in FOREIGN_PHASES if pattern.search(name))
        phase = name if name in NUMBER else next(known, None)
        if phase is None:
            continue
        if stage == "START":
            open_marks.append((name, phase))
        elif (name, phase) in open_marks:  # it ends the last of its name
            del open_marks[len(open_marks) - 1 - open_marks[::-1].index((name, phase))]
        times.append(time_us)
        labels.append(NUMBER[open_marks[-1][1]] if open_marks else NOT_SAID)
    steps += [(name, start, int(record.time_us[-1])) for name, start in began.items()]  # the record ends inside
    spans = []
    for name, start, end in sorted(steps, key=lambda step: step[1]):
        first = int(np.searchsorted(record.time_us, start))
        last = int(np.searchsorted(record.time_us, end, side="right")) - 1
        if last >= first:
            spans.append(StepSpan(name, first, last))
    at = np.searchsorted(np.array(times), record.time_us, side="right") - 1
    return tuple(spans), np.array(labels)[at]
