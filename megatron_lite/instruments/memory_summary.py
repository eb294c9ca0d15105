"""Summarizes a memory snapshot: the peak and where it was, what held memory then, and which code allocated it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_lite import marks
from megatron_lite.instruments.memory_tags import RECOMPUTE, SETUP
from megatron_lite.phases import Phase

ACTIVATIONS, GRADIENTS, WEIGHTS = "activations", "gradients and what backward computes", "weights"
OPTIMIZER, INPUT, EVALUATION, OTHER = "optimizer", "input", "evaluation", "other"
CATEGORY_OF_PHASE = {
    Phase.DATA: INPUT,
    Phase.DATA_TO_DEVICE: INPUT,
    Phase.FORWARD: ACTIVATIONS,
    RECOMPUTE: ACTIVATIONS,
    Phase.BACKWARD: GRADIENTS,
    Phase.GRAD_SYNC: GRADIENTS,
    Phase.UNSCALE: OPTIMIZER,
    Phase.CLIP_GRAD: OPTIMIZER,
    Phase.OPTIMIZER_STEP: OPTIMIZER,
    Phase.EVAL: EVALUATION,
}
# (part of a file, mark, phase): whose stack a memory has that was allocated outside of phases, or whose tag has fallen
# out of the ring
CATEGORY_OF_CODE = (
    ("megatron_lite/optim/", "", OPTIMIZER),
    ("torch/optim/", "", OPTIMIZER),
    ("megatron_lite/parallel/", "", GRADIENTS),
    ("torch/nn/parallel/", "", GRADIENTS),
    ("torch/autograd/", "", GRADIENTS),
    ("", marks.EVALUATION, EVALUATION),
    ("", marks.STEP, ACTIVATIONS),
    ("megatron_lite/model/", "", WEIGHTS),
    ("", marks.WEIGHTS, WEIGHTS),
)
PACKAGE, TORCH = "megatron_lite/", "/torch/"
ALLOCATED, FREED = "alloc", "free_completed"


@dataclass(frozen=True)
class Held:
    """A piece of memory, with the run's tag ("" if unknown) and the Python stack of its allocation."""

    size: int
    tag: str = ""
    frames: list[dict] = field(default_factory=list, repr=False)


def list_held_memory(snapshot: dict, device: int = 0) -> list[Held]:
    """All memory that tensors hold when the snapshot was taken."""
    tags = {e["addr"]: e.get("user_metadata", "") for e in _read_trace(snapshot, device) if e["action"] == ALLOCATED}
    held = []
    for segment in snapshot["segments"]:
        address = segment["address"]  # old snapshots give no address of a block
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] != "inactive":
                tag = block.get("user_metadata") or tags.get(address, "")
                held.append(Held(block.get("requested_size") or block["size"], tag, block.get("frames") or []))
            address += block["size"]
    return held


def peak(snapshot: dict, device: int = 0) -> Held:
    """The largest sum of requested bytes in the time that a trace covers, and the allocation that reached it.

    Found backwards from the end, which the segments give: a trace's first events may have been dropped.
    """
    now = sum(held.size for held in list_held_memory(snapshot, device))
    found = Held(now)
    for entry in reversed(_read_trace(snapshot, device)):
        if entry["action"] == ALLOCATED:
            if now > found.size or now == found.size and not found.frames:
                found = Held(now, entry.get("user_metadata", ""), entry.get("frames") or [])
            now -= entry["size"]
        elif entry["action"] == FREED:
            now += entry["size"]
    return found if now <= found.size else Held(now)


def sum_by_category(held: Iterable[Held]) -> dict[str, int]:
    """{category: bytes}, largest first."""
    sizes = Counter()
    for piece in held:
        sizes[category(piece)] += piece.size
    return dict(sizes.most_common())


def sum_by_site(held: Iterable[Held]) -> list[tuple[str, int, int]]:
    """(where in the code, bytes, pieces), largest first."""
    sizes, pieces = Counter(), Counter()
    for piece in held:
        name = site(piece.frames)
        sizes[name] += piece.size
        pieces[name] += 1
    return [(name, size, pieces[name]) for name, size in sizes.most_common()]


def category(piece: Held) -> str:
    """What memory is for, from where the run was, else from the code that asked for it."""
    step, _, rest = piece.tag.partition("/")
    if rest:
        return CATEGORY_OF_PHASE.get(rest.partition("/")[0], OTHER)
    if step not in ("", SETUP):
        return OTHER  # between the phases of a step
    for part, mark, name in CATEGORY_OF_CODE:
        if any(part in f["filename"] and mark in ("", marks.split_mark(f["name"])[1]) for f in piece.frames):
            return name
    # a GPU's backward runs on a thread without Python frames
    return OTHER if piece.frames or step == SETUP else GRADIENTS


def site(frames: list[dict]) -> str:
    """'attend (model/attend.py:50)': the trainer's innermost frame, else the innermost outside of torch."""
    python = [frame for frame in frames if frame["line"]]
    own = [frame for frame in frames if PACKAGE in frame["filename"]]
    foreign = [frame for frame in python if TORCH not in frame["filename"]]
    innermost = next(iter(own or foreign or python), None)
    if innermost is None:
        return "code without Python frames, such as backward"
    file = innermost["filename"].rpartition(PACKAGE)[2] if own else "/".join(innermost["filename"].split("/")[-2:])
    return f"{marks.split_mark(innermost['name'])[0]} ({file}:{innermost['line']})"


def operation(frames: list[dict]) -> str:
    """'aten.mm.default from ', where the stack begins with what a CPU's tracker saw."""
    seen = frames and not frames[0]["line"] and frames[0]["name"].startswith("aten.")
    return f"{frames[0]['name']} from " if seen else ""


def describe_place(tag: str) -> str:
    """'step 10/forward/decoder.layers.0' -> 'forward of step 10 in decoder.layers.0'."""
    step, _, rest = tag.partition("/")
    phase, _, module = rest.partition("/")
    words = f"{phase} of {step}" if phase else step
    return f"{words} in {module}" if module else words


def _read_trace(snapshot: dict, device: int) -> list[dict]:
    traces = snapshot["device_traces"]
    return traces[device] if device < len(traces) else []
