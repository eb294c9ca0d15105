"""Summarizes a memory snapshot: the peak and where it was, what held memory then, and which code allocated it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_lite import marks
from megatron_lite.formats.memory_snapshot import Frame, MemorySnapshot, TraceEvent
from megatron_lite.phases import RECOMPUTE, SETUP, Phase

HELD_ACTIVATIONS = "activations"
HELD_GRADIENTS = "gradients and what backward computes"
HELD_WEIGHTS = "weights"
HELD_OPTIMIZER = "optimizer"
HELD_INPUT = "input"
HELD_EVALUATION = "evaluation"
HELD_OTHER = "other"
CATEGORY_OF_PHASE: dict[str, str] = {
    Phase.DATA: HELD_INPUT,
    Phase.DATA_TO_DEVICE: HELD_INPUT,
    Phase.FORWARD: HELD_ACTIVATIONS,
    RECOMPUTE: HELD_ACTIVATIONS,
    Phase.BACKWARD: HELD_GRADIENTS,
    Phase.GRAD_SYNC: HELD_GRADIENTS,
    Phase.UNSCALE: HELD_OPTIMIZER,
    Phase.CLIP_GRAD: HELD_OPTIMIZER,
    Phase.OPTIMIZER_STEP: HELD_OPTIMIZER,
    Phase.EVAL: HELD_EVALUATION,
}
# (part of a file, mark, phase): whose stack a memory has that was allocated outside of phases, or whose tag has fallen
# out of the ring
CATEGORY_OF_CODE = (
    ("megatron_lite/optim/", "", HELD_OPTIMIZER),
    ("torch/optim/", "", HELD_OPTIMIZER),
    ("megatron_lite/parallel/", "", HELD_GRADIENTS),
    ("torch/nn/parallel/", "", HELD_GRADIENTS),
    ("torch/autograd/", "", HELD_GRADIENTS),
    ("", marks.EVALUATION, HELD_EVALUATION),
    ("", marks.STEP, HELD_ACTIVATIONS),
    ("megatron_lite/model/", "", HELD_WEIGHTS),
    ("", marks.WEIGHTS, HELD_WEIGHTS),
)
PACKAGE = "megatron_lite/"
TORCH = "/torch/"
ALLOCATED = "alloc"
FREED = "free_completed"


@dataclass(frozen=True)
class HeldMemory:
    """A piece of memory that tensors hold, and where it comes from."""

    size: int  # bytes
    tag: str = ""  # where in the run it was allocated; "" if unknown
    frames: list[Frame] = field(default_factory=list, repr=False)  # the Python stack of its allocation


def list_held_memory(snapshot: MemorySnapshot, device: int = 0) -> list[HeldMemory]:
    """List all memory that tensors hold on a device when the snapshot was taken."""
    tags: dict[int, str] = {}
    for event in _read_trace(snapshot, device):
        if event["action"] == ALLOCATED:
            tags[event["addr"]] = event.get("user_metadata", "")
    held: list[HeldMemory] = []
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]  # old snapshots give no address of a block
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                size = block.get("requested_size") or block["size"]
                tag = block.get("user_metadata") or tags.get(address, "")
                held.append(HeldMemory(size, tag, block.get("frames") or []))
            address += block["size"]
    return held


def peak(snapshot: MemorySnapshot, device: int = 0) -> HeldMemory:
    """Find the largest sum of requested bytes in the time that a trace covers, and the allocation that reached it.

    Found backwards from the end, which the segments give: a trace's first events may have been dropped.
    """
    now = sum(held.size for held in list_held_memory(snapshot, device))
    found = HeldMemory(now)
    for event in reversed(_read_trace(snapshot, device)):
        if event["action"] == ALLOCATED:
            is_highest = now > found.size
            is_as_high = now == found.size and not found.frames
            if is_highest or is_as_high:
                found = HeldMemory(now, event.get("user_metadata", ""), event.get("frames") or [])
            now -= event["size"]
        elif event["action"] == FREED:
            now += event["size"]
    return found if now <= found.size else HeldMemory(now)


def sum_by_category(held: Iterable[HeldMemory]) -> dict[str, int]:
    """Sum memory by what it is for: {category: bytes}, largest first."""
    sizes: Counter[str] = Counter()
    for piece in held:
        sizes[category(piece)] += piece.size
    return dict(sizes.most_common())


def sum_by_site(held: Iterable[HeldMemory]) -> list[tuple[str, int, int]]:
    """Sum memory by the code that allocated it: (where in the code, bytes, pieces), largest first."""
    sizes: Counter[str] = Counter()
    pieces: Counter[str] = Counter()
    for piece in held:
        name = site(piece.frames)
        sizes[name] += piece.size
        pieces[name] += 1
    return [(name, size, pieces[name]) for name, size in sizes.most_common()]


def category(piece: HeldMemory) -> str:
    """Decide what memory is for, from where the run was, else from the code that asked for it."""
    step, _, rest = piece.tag.partition("/")
    if rest:
        phase, _, _ = rest.partition("/")
        return CATEGORY_OF_PHASE.get(phase, HELD_OTHER)
    if step not in ("", SETUP):
        return HELD_OTHER  # between the phases of a step
    for part, mark, name in CATEGORY_OF_CODE:
        if any(_is_of_code(frame, part, mark) for frame in piece.frames):
            return name
    # a GPU's backward runs on a thread without Python frames
    return HELD_OTHER if piece.frames or step == SETUP else HELD_GRADIENTS


def _is_of_code(frame: Frame, part: str, mark: str) -> bool:
    """Whether a frame has the part of a file's path, and the mark in its function's name if there is one."""
    if part not in frame["filename"]:
        return False
    _, own_mark = marks.split_mark(frame["name"])
    return mark in ("", own_mark)


def site(frames: list[Frame]) -> str:
    """Name the place that asked for memory, as 'attend (model/attend.py:50)'.

    It is the trainer's innermost frame, else the innermost outside of torch.
    """
    python = [frame for frame in frames if frame["line"]]
    own = [frame for frame in frames if PACKAGE in frame["filename"]]
    foreign = [frame for frame in python if TORCH not in frame["filename"]]
    innermost = next(iter(own or foreign or python), None)
    if innermost is None:
        return "code without Python frames, such as backward"
    if own:
        file = innermost["filename"].rpartition(PACKAGE)[2]
    else:
        file = "/".join(innermost["filename"].split("/")[-2:])
    function, _ = marks.split_mark(innermost["name"])
    return f"{function} ({file}:{innermost['line']})"


def operation(frames: list[Frame]) -> str:
    """Return 'aten.mm.default from ' where the stack begins with what a CPU's tracker saw; else ''."""
    if not frames:
        return ""
    innermost = frames[0]
    is_operation = not innermost["line"] and innermost["name"].startswith("aten.")
    return f"{innermost['name']} from " if is_operation else ""


def describe_place(tag: str) -> str:
    """Describe where in the run a tag is: 'step 10/forward/decoder.layers.0' as 'forward of step 10 in
    decoder.layers.0'."""
    step, _, rest = tag.partition("/")
    phase, _, module = rest.partition("/")
    words = f"{phase} of {step}" if phase else step
    return f"{words} in {module}" if module else words


def _read_trace(snapshot: MemorySnapshot, device: int) -> list[TraceEvent]:
    traces = snapshot["device_traces"]
    return traces[device] if device < len(traces) else []
