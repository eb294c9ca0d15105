"""Find the phase and step of each event of a record: from tags, else from annotations, else from stacks."""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_lite.analysis.memory.record import ALLOC, AllocatorEvents, Ints
from megatron_lite.analysis.memory.stacks import Code
from megatron_lite.phases import RECOMPUTE, SETUP, Phase

UNKNOWN = ""
ZERO_GRAD = "zero_grad"
PHASES = (UNKNOWN, SETUP, *map(str, Phase), RECOMPUTE, ZERO_GRAD)
NUMBER = {name: number for number, name in enumerate(PHASES)}
NOT_SAID = -1
MAX_MODULE_LETTERS = 200  # of a module's name
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
    """Phases of n events.

    `span` rises where a phase begins; recomputation is part of backward, clipping of the optimizer's.
    """

    of_event: Ints  # [n], index into PHASES
    span: Ints  # [n]
    fine_span: Ints  # [n], the same, and rises where recomputation and clipping begin too
    steps: tuple[StepSpan, ...]
    of_stack: Ints  # [stacks], index into PHASES or NOT_SAID
    of_tag: Ints  # [tags], the same
    module_of_tag: tuple[str, ...]


def find_memory_phases(record: AllocatorEvents) -> Phases:
    """Find the phase and the step of each event by tags, else by annotations, else by stacks."""
    of_tag, modules = _read_tags(record)
    of_stack = _read_stacks(record)
    steps, of_time = _read_marks(record)
    found = of_tag[record.tag]
    found = np.where(found == NOT_SAID, of_time, found)
    # a free without a stack may be anybody's; an allocation without one is backward's
    stack_tells = (record.stack > 0) | (record.action == ALLOC)
    found = np.where((found == NOT_SAID) & stack_tells, of_stack[record.stack], found)
    found = _carry_on(found)
    within_optimizer = np.isin(found, [NUMBER["unscale"], NUMBER["clip_grad"]])
    coarse = np.where(within_optimizer, NUMBER["optimizer_step"], found)
    coarse[found == NUMBER[RECOMPUTE]] = NUMBER["backward"]
    return Phases(
        of_event=found,
        span=_count_changes(coarse),
        fine_span=_count_changes(found),
        steps=steps or _find_steps_by_optimizer(coarse),
        of_stack=of_stack,
        of_tag=of_tag,
        module_of_tag=modules,
    )


def _read_tags(record: AllocatorEvents) -> tuple[Ints, tuple[str, ...]]:
    """Read the trainer's tags, such as 'step 10/forward/decoder.layers.0'; tags of others say nothing.

    Returns:
        The phase of each tag (index into PHASES or NOT_SAID), and its module ('' where it names none).
    """
    of_tag = np.full(len(record.tags), NOT_SAID)
    modules = [""] * len(record.tags)
    for number, tag in enumerate(record.tags):
        if not OWN_TAG.match(tag):
            continue
        start, _, rest = tag.partition("/")
        if start == SETUP:
            phase = SETUP
            module = rest
        else:
            phase, _, module = rest.partition("/")
        of_tag[number] = NUMBER.get(phase, NUMBER[UNKNOWN])
        printable = [letter for letter in module[:MAX_MODULE_LETTERS] if letter.isprintable()]
        modules[number] = "".join(printable)
    return of_tag, tuple(modules)


def _carry_on(phase: Ints) -> Ints:
    """Give events of which nothing tells the phase of the event before them; those before all others are unknown."""
    if not len(phase):
        return phase
    # of each event the last one up to it of which something tells; -1 without one
    own = np.where(phase == NOT_SAID, -1, np.arange(len(phase)))
    last = np.maximum.accumulate(own)
    return np.where(last >= 0, phase[last], NUMBER[UNKNOWN])


def _count_changes(phase: Ints) -> Ints:
    """Number the spans of equal phases: [n], 0 for the first span."""
    changes = np.diff(phase, prepend=phase[:1]) != 0
    return np.cumsum(changes)


def _find_steps_by_optimizer(phase: Ints) -> tuple[StepSpan, ...]:
    """Find steps in a record without marks: each ends with the last of its optimizer's events before the next forward
    or backward."""
    passes = [NUMBER["forward"], NUMBER["backward"]]
    rows = np.flatnonzero(np.isin(phase, [*passes, NUMBER["optimizer_step"]]))
    stepping = phase[rows] == NUMBER["optimizer_step"]
    goes_on = np.append(stepping[1:], False)
    spans = []
    first = 0
    for number, last in enumerate(rows[stepping & ~goes_on].tolist(), 1):
        spans.append(StepSpan(f"step {number}", first, last))
        first = last + 1
    return tuple(spans)


def _read_stacks(record: AllocatorEvents) -> Ints:
    """Read the phase that each stack tells: int64 [stacks], an index into PHASES or NOT_SAID.

    The innermost frame decides: a closure inside optimizer.step is forward, a hook inside backward that steps is the
    optimizer.
    """
    every, inner = record.stacks.codes
    phase = np.full(len(every), NOT_SAID)
    # later rows overrule earlier ones
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
    makes_optimizer = (every & Code.OPTIMIZER_SETUP) > 0
    in_optimizer = phase == NUMBER["optimizer_step"]
    phase[makes_optimizer & in_optimizer] = NUMBER[SETUP]
    recomputes = (every & Code.RECOMPUTE) > 0
    phase[recomputes] = NUMBER[RECOMPUTE]
    # a library's own work, such as gathering weights, is part of the phase around it
    by_library = np.array([known is not None for known in record.stacks.known], bool)
    is_unknown = phase == NUMBER[UNKNOWN]
    phase[by_library & is_unknown] = NOT_SAID
    # backward runs on a thread of its own, where Python has no frames
    if np.any(phase == NUMBER["forward"]):
        phase[0] = NUMBER["backward"]
    return phase


def _read_marks(record: AllocatorEvents) -> tuple[tuple[StepSpan, ...], Ints]:
    """Read steps, and per event the phase, from annotations."""
    if not record.marks or not len(record):
        return (), np.full(len(record), NOT_SAID)
    times_us = [np.iinfo(np.int64).min]
    labels = [NOT_SAID]
    open_marks: list[tuple[str, str]] = []
    for time_us, stage, name in record.marks:
        phase = None if STEP_NAME.match(name) else _find_marked_phase(name)
        if phase is None:
            continue
        if stage == "START":
            open_marks.append((name, phase))
        else:
            _close_last(open_marks, (name, phase))
        innermost = NOT_SAID
        if open_marks:
            _, open_phase = open_marks[-1]
            innermost = NUMBER[open_phase]
        times_us.append(time_us)
        labels.append(innermost)
    passed = np.searchsorted(np.array(times_us), record.time_us, side="right")
    of_event = np.array(labels)[passed - 1]
    return _read_steps(record), of_event


def _close_last(open_marks: list[tuple[str, str]], mark: tuple[str, str]) -> None:
    """Remove from the marks that are open the last that equals `mark`; none, if its start was not recorded."""
    for at in reversed(range(len(open_marks))):
        if open_marks[at] == mark:
            del open_marks[at]
            return


def _find_marked_phase(name: str) -> str | None:
    """Find the phase that an annotation names, in this trainer's words or others'; None where it names none."""
    if name in NUMBER:
        return name
    for pattern, phase in FOREIGN_PHASES:
        if pattern.search(name):
            return phase
    return None


def _read_steps(record: AllocatorEvents) -> tuple[StepSpan, ...]:
    """Read the steps that annotations mark, in the order in which they begin; one that goes on ends with the record."""
    began_us: dict[str, int] = {}
    steps = []
    for time_us, stage, name in record.marks:
        if not STEP_NAME.match(name):
            continue
        if stage == "START":
            began_us[name] = time_us
        elif name in began_us:
            steps.append((began_us.pop(name), time_us, name))
    end_of_record_us = int(record.time_us[-1])
    for name, start_us in began_us.items():
        steps.append((start_us, end_of_record_us, name))
    steps.sort(key=lambda step: step[0])
    spans = []
    for start_us, end_us, name in steps:
        first = int(np.searchsorted(record.time_us, start_us))
        after = int(np.searchsorted(record.time_us, end_us, side="right"))
        if after > first:
            spans.append(StepSpan(name, first, after - 1))
    return tuple(spans)
