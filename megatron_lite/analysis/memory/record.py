"""The raw snapshot of one device as columns: events of the allocator, blocks at the end, stacks and tags told apart once.

Form: torch.cuda.memory._snapshot() of torch 1.13 to 2.13 {segments, device_traces, allocator_settings,
external_annotations}, and the bare list of segments of torch.cuda.memory_snapshot().
"""

import enum
import functools
import operator
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_lite import marks as own_marks
from megatron_lite.analysis.trace.columns import Numbered
from megatron_lite.errors import UserError

# --- stacks: which code asked for memory, and what that code is, from the names that libraries use

MAX_LETTERS = 120


class Code(enum.IntFlag):
    """What a frame belongs to."""

    NONE = 0
    PYTHON = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    RECOMPUTE = enum.auto()
    OPTIMIZER = enum.auto()
    OPTIMIZER_SETUP = enum.auto()
    MASTER = enum.auto()
    ZERO_GRAD = enum.auto()
    CLIP = enum.auto()
    LOADER = enum.auto()
    LOSS = enum.auto()
    SETUP = enum.auto()
    GRADIENT_BUFFER = enum.auto()
    COMMUNICATION = enum.auto()
    WORKSPACE = enum.auto()
    WEIGHT_GRADIENT = enum.auto()
    GATHERED = enum.auto()  # weights that ranks share out, whole for a while
    MAIN = enum.auto()  # where a thread of Python's begins; backward's threads have no such frame


OPTIMIZER_FILE = (
    r"(^|/)(optim|optimizers?)/|(^|/)\w*optim\w*\.py$"
    r"|(^|/)([a-z]+_)?(adamw?|lamb|lars|lion|muon|shampoo|adafactor|sgd)(_?8bit)?\.py$"
)
RECOMPUTE_FILE = r"(^|/)(checkpoint|activation_checkpoint|recompute)\w*\.py$|/tensor_parallel/random\.py$"
MASTER_FILE = r"(^|/)(fp16|float16|distrib)_?optimizer\.py$|/fp16_utils/|/apex/amp/"
OPTIMIZER_SETUP_NAME = r"^(__init__|load_state_dict|_process_value_according_to_param_policy)$"
# (what it is, pattern of the file, pattern of the function); both must match
PYTHON_CODE = [
    (code, re.compile(in_file), re.compile(in_name))
    for code, in_file, in_name in (
        (Code.FORWARD, r"", r"^forward$"),
        (Code.BACKWARD, r"", r"^(backward|_engine_run_backward)$"),
        (Code.BACKWARD, r"/torch/autograd/", r"^(grad|apply)$"),
        (Code.RECOMPUTE, RECOMPUTE_FILE, r"^(recompute_fn|unpack_hook|backward|recompute)$"),
        (Code.OPTIMIZER, OPTIMIZER_FILE, r"^(?!zero_grad)"),
        (Code.OPTIMIZER_SETUP, OPTIMIZER_FILE, OPTIMIZER_SETUP_NAME),
        (Code.MASTER, MASTER_FILE, r"^(__init__|<listcomp>|_?build_\w+)$"),
        (Code.MASTER, r"", r"master|main_param"),
        (Code.ZERO_GRAD, r"", r"^zero_grad|^zero_grad_buffer$"),
        (Code.CLIP, r"", r"clip_grad|get_total_norm|get_grad_norm"),
        (Code.LOADER, r"/torch/utils/data/|(^|/)(dataloader|loader)\.py$", r""),
        (Code.LOSS, r"", r"cross_entropy|log_softmax|logsumexp|nll_loss|lm_head|logits|token_losses"),
        (Code.LOSS, r"cross_entropy\w*\.py$|(^|/)loss\w*\.py$", r""),
        (Code.WEIGHT_GRADIENT, r"", r"weight_gradient|wgrad"),
        (Code.SETUP, r"", r"^(__init__|_apply|to|to_empty|cuda|from_pretrained|load_state_dict|reset_parameters)$"),
        (Code.GRADIENT_BUFFER, r"param_and_grad_buffer", r""),
        (Code.GRADIENT_BUFFER, r"/torch/nn/parallel/distributed\.py$", r"^(__init__|_ddp_init_helper)$"),
        (Code.GATHERED, r"/fsdp/.*param\.py$", r"all_gather_outputs|unsharded"),
        (Code.COMMUNICATION, r"/fsdp/", r"^foreach_all_gather$"),
        (Code.MAIN, r"", r"^(<module>|_bootstrap)$"),
        (Code.COMMUNICATION, r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$", r""),
    )
]
OWN_CODE = {  # by the mark of a function of this trainer
    own_marks.MASTER_WEIGHTS: Code.MASTER,
    own_marks.GRADIENT_BUFFER: Code.GRADIENT_BUFFER,
    own_marks.WEIGHT_GRADIENT: Code.WEIGHT_GRADIENT,
    own_marks.LOSS: Code.LOSS,
    own_marks.INPUT: Code.LOADER,
}
NATIVE_CODE = [  # of C++ frames, which have no line
    (Code.BACKWARD, re.compile(r"torch::autograd::(Engine|generated::\w+Backward)|Backward\d*::apply")),
    (Code.LOSS, re.compile(r"log_softmax|LogSoftmaxBackward|nll_loss|NllLoss|cross_entropy")),
    (Code.COMMUNICATION, re.compile(r"^c10d::|ProcessGroupNCCL|ncclComm")),
    (Code.WORKSPACE, re.compile(r"[Ww]orkspace|CublasHandle|CUDABlasHandle|CudnnHandle")),
    (Code.GRADIENT_BUFFER, re.compile(r"c10d::Reducer::initialize_bucket")),
]
PHASE_CODE = int(Code.FORWARD | Code.BACKWARD | Code.OPTIMIZER | Code.ZERO_GRAD | Code.CLIP | Code.LOADER)
SIGN_OF_TORCH = re.compile(r"(^|/)torch/")
SIGN_OF_PACKAGES = re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen |^<")
BACKWARD_NODE = re.compile(r"\b(\w+Backward\w*?)::apply")


def find_code(file: str, line: int, name: str) -> int:
    """The Code of one frame, as a plain integer: they are combined often."""
    if line <= 0:
        codes = [code for code, in_name in NATIVE_CODE if in_name.search(name)]
    else:
        name, mark = own_marks.split_mark(name)
        codes = [Code.PYTHON, OWN_CODE.get(mark, Code.NONE)]
        codes += [code for code, in_file, in_name in PYTHON_CODE if in_file.search(file) and in_name.search(name)]
    return int(functools.reduce(operator.or_, codes, Code.NONE))


class Stacks:
    """Distinct stacks, numbered as they are met; 0 is the empty one. A frame is looked at once, however often it is written."""

    def __init__(self):
        self._frame_of_id: dict[int, int] = {}
        self._number_of_id: dict[int, int] = {}
        self._frames = Numbered()  # (file, line, name)
        self._stacks = Numbered({(): 0})  # tuples of numbers of frames

    def number(self, frames) -> int:
        """Of a list of {filename, line, name}, innermost first. The list must stay alive while others are asked for."""
        if not frames:
            return 0
        found = self._number_of_id.get(id(frames))
        if found is None:
            key = tuple(map(self._frame_of_id.get, map(id, frames)))
            if None in key:
                key = tuple(map(self._number_frame, frames))
            found = self._number_of_id[id(frames)] = self._stacks[key]
        return found

    def _number_frame(self, frame: dict) -> int:
        line = frame.get("line")
        key = (str(frame.get("filename")), line if type(line) is int else 0, str(frame.get("name")))
        number = self._frame_of_id[id(frame)] = self._frames[key]
        return number

    @cached_property
    def frames_of(self) -> list[list[tuple[str, int, str]]]:
        """The frames of each stack."""
        frames = list(self._frames)
        return [[frames[number] for number in stack] for stack in self._stacks]

    @cached_property
    def codes(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [stacks] each: what all frames of a stack belong to; and the part of PHASE_CODE that the innermost frame
        has which has any."""
        of_frame = [find_code(*frame) for frame in self._frames]
        every = [functools.reduce(operator.or_, map(of_frame.__getitem__, stack), 0) for stack in self._stacks]
        phases = ((of_frame[number] & PHASE_CODE for number in stack) for stack in self._stacks)
        inner = [next(filter(None, codes), 0) for codes in phases]
        return np.array(every, np.int64), np.array(inner, np.int64)

    def site(self, number: int) -> str:
        """'gpt.py:81 forward': the innermost frame outside of torch and other packages; '' without one that says anything."""
        python = [frame for frame in self.frames_of[number] if frame[1] > 0]
        outside = [frame for frame in python if not SIGN_OF_TORCH.search(frame[0])]
        own = [frame for frame in outside if not SIGN_OF_PACKAGES.search(frame[0])]
        for file, line, name in (own or outside or python)[:1]:
            text = f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line} {own_marks.split_mark(name)[0]}"
            return make_printable(text, MAX_LETTERS)
        return ""

    def node(self, number: int) -> str:
        """'MmBackward0': the autograd node of a stack with C++ frames; '' if it has none."""
        nodes = (BACKWARD_NODE.search(name) for _, _, name in self.frames_of[number])
        return next((node[1][:MAX_LETTERS] for node in nodes if node), "")


def make_printable(text: str, most: int) -> str:
    """At most that many letters of a text that a hostile file may hold."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


# --- the record

ACTIONS = (
    "alloc", "free_completed", "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip
ALLOC, FREE, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(len(ACTIONS))
MORE_RESERVED, LESS_RESERVED = (SEGMENT_ALLOC, SEGMENT_MAP), (SEGMENT_FREE, SEGMENT_UNMAP)
UNKNOWN_ACTION = 255
MAX_BYTES = 2**50  # no device has as much
# size: as the allocator cut it; stack, tag: indices into Record.stacks and Record.tags, 0 for none
BLOCK = np.dtype([
    ("address", "i8"), ("size", "i8"), ("requested", "i8"), ("live", "?"), ("stack", "i8"), ("tag", "i8"), ("stream", "i8"),
])  # fmt: skip


@dataclass(frozen=True)
class Record:
    """n events of one device in order, and its state after them."""

    action: np.ndarray  # uint8 [n], one of the constants above
    address: np.ndarray  # int64 [n]
    size: np.ndarray  # int64 [n], as requested
    device_free: np.ndarray  # int64 [n], of OOM events; 0 elsewhere
    time_us: np.ndarray  # int64 [n], since the first event; the event's number in files without times
    stack: np.ndarray  # int32 [n]
    tag: np.ndarray  # int32 [n]
    stream: np.ndarray  # int64 [n]
    blocks: np.ndarray  # BLOCK [m], those at the end in order of address; free ones too
    reserved_bytes: int  # of all segments
    stacks: Stacks
    tags: tuple[str, ...]
    marks: tuple[tuple[int, str, str], ...]  # (time_us as above, "START" or "END", name)
    settings: dict
    timed: bool
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.action)


def build_record(raw, path: Path) -> Record:
    """Raises UserError for values that are no snapshot."""
    try:
        return _build(raw)
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError, IndexError) as error:
        reason = make_printable(f"it lacks {error}" if isinstance(error, KeyError) else str(error), 120)
        raise UserError(
            f"{path}: is no memory snapshot ({reason}); one is written by "
            "torch.cuda.memory._dump_snapshot or --record-memory-history."
        ) from None


def _build(raw) -> Record:
    raw = {"segments": raw, "device_traces": []} if type(raw) is list else raw
    if type(raw) is not dict:
        raise TypeError(f"it holds a {type(raw).__name__}")
    segments, traces = raw["segments"], raw.get("device_traces") or []
    for part, name in ((segments, "segments"), (traces, "device_traces")):
        if type(part) not in (list, tuple):
            raise TypeError(f"{name} is a {type(part).__name__}")
    device, notes = _choose_device(segments, traces)
    events = traces[device] if device < len(traces) else []
    if any(type(event) is not dict for event in events):
        raise TypeError("an event is no dictionary")
    numbers, stacks, tags = {name: number for number, name in enumerate(ACTIONS)}, Stacks(), Numbered({"": 0, None: 0})

    def column(key: str, default: int) -> np.ndarray:
        return np.fromiter((event.get(key, default) for event in events), np.int64)

    times = column("time_us", -1)
    timed = bool(len(times)) and times[0] >= 0
    mine = [segment for segment in segments if segment.get("device", 0) == device]
    marks = [
        (int(mark["time_us"]) - int(times[0]), str(mark["stage"]), str(mark["name"]))
        for mark in (raw.get("external_annotations") or () if timed else ())
        if mark.get("device", device) in (device, -1)
    ]
    return Record(
        action=np.array([numbers.get(event["action"], UNKNOWN_ACTION) for event in events], np.uint8),
        address=column("addr", 0),
        size=_check_sizes(column("size", 0)),
        device_free=column("device_free", 0),
        time_us=times - times[0] if timed else np.arange(len(events)),
        stack=np.array([stacks.number(event.get("frames")) for event in events], np.int32),
        tag=np.array([tags[event.get("user_metadata")] for event in events], np.int32),
        stream=column("stream", 0),
        blocks=_build_blocks(mine, stacks, tags),
        reserved_bytes=int(_check_sizes(np.array([segment["total_size"] for segment in mine], np.int64)).sum()),
        stacks=stacks,
        tags=tuple(map(str, tags)),
        marks=tuple(sorted(marks)),
        settings=raw["allocator_settings"] if type(raw.get("allocator_settings")) is dict else {},
        timed=timed,
        notes=tuple(notes),
    )


def _choose_device(segments, traces) -> tuple[int, list[str]]:
    """The device with the most events, else with the most memory, and a note about the others."""
    sizes = Counter()
    for segment in segments:
        sizes[segment.get("device", 0)] += segment["total_size"]
    seen = {number for number, trace in enumerate(traces) if len(trace)} | set(sizes)
    if not seen:
        raise ValueError("it has neither segments nor events")
    if any(type(number) is not int or not 0 <= number < 1024 for number in seen):
        raise ValueError("a device's number is none")
    best = max(seen, key=lambda number: (len(traces[number]) if number < len(traces) else 0, sizes[number], -number))
    others = ", ".join(map(str, sorted(seen - {best})))
    return best, [f"only device {best} is looked at; the file holds {others} too"] if others else []


def _check_sizes(found: np.ndarray) -> np.ndarray:
    if len(found) and not 0 <= found.min() <= found.max() < MAX_BYTES:
        raise ValueError(f"a size of {found.min() if found.min() < 0 else found.max()} bytes")
    return found


def _build_blocks(segments, stacks: Stacks, tags: Numbered) -> np.ndarray:
    rows = []
    for segment in segments:
        address, stream = segment["address"], segment.get("stream", 0)
        for block in segment["blocks"]:
            size, history = block["size"], block.get("history") or [{}]  # torch 1.13 and 2.0 kept stacks there
            address, live = block.get("address", address), block["state"] != "inactive"
            asked, stack, tag = 0, 0, 0
            if live:
                asked = min(block.get("requested_size") or history[0].get("real_size") or size, size)
                stack = stacks.number(block.get("frames") or history[0].get("frames"))
                tag = tags[block.get("user_metadata")]
            rows.append((address, size, asked, live, stack, tag, stream))
            address += size
    blocks = np.array(sorted(rows, key=lambda row: row[0]), BLOCK)
    _check_sizes(blocks["size"])
    return blocks
