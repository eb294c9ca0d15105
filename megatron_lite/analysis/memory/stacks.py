"""Stacks of a snapshot: which code asked for memory, and what that code is, from the names that libraries use."""

import enum
import re
from functools import cached_property

import numpy as np

from megatron_lite import marks

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
    MAIN = enum.auto()  # where a thread of Python's begins; backward's threads have no such frame


OPTIMIZER_FILE = (
    r"(^|/)(optim|optimizers?)/|(^|/)\w*optim\w*\.py$"
    r"|(^|/)([a-z]+_)?(adamw?|lamb|lars|lion|muon|shampoo|adafactor|sgd)(_?8bit)?\.py$"
)
# (what it is, pattern of the file, pattern of the function); both must match. C++ frames have no line.
PYTHON_CODE = (
    (Code.FORWARD, r"", r"^forward$"),
    (Code.BACKWARD, r"", r"^(backward|_engine_run_backward)$"),
    (Code.BACKWARD, r"/torch/autograd/", r"^(grad|apply)$"),
    (
        Code.RECOMPUTE,
        r"(^|/)(checkpoint|activation_checkpoint|recompute)\w*\.py$|/tensor_parallel/random\.py$",
        r"^(recompute_fn|unpack_hook|backward|recompute)$",
    ),
    (Code.OPTIMIZER, OPTIMIZER_FILE, r"^(?!zero_grad)"),
    (Code.OPTIMIZER_SETUP, OPTIMIZER_FILE, r"^(__init__|load_state_dict|_process_value_according_to_param_policy)$"),
    (
        Code.MASTER,
        r"(^|/)(fp16|float16|distrib)_?optimizer\.py$|/fp16_utils/|/apex/amp/",
        r"^(__init__|<listcomp>|_?build_\w+)$",
    ),
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
    (Code.MAIN, r"", r"^(<module>|_bootstrap)$"),
    (Code.COMMUNICATION, r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$", r""),
)
OWN_CODE = {  # by the mark of a function of this trainer
    marks.MASTER_WEIGHTS: Code.MASTER,
    marks.GRADIENT_BUFFER: Code.GRADIENT_BUFFER,
    marks.WEIGHT_GRADIENT: Code.WEIGHT_GRADIENT,
    marks.LOSS: Code.LOSS,
    marks.INPUT: Code.LOADER,
}
NATIVE_CODE = (  # one pattern each, of the function
    (Code.BACKWARD, r"torch::autograd::(Engine|generated::\w+Backward)|Backward\d*::apply"),
    (Code.LOSS, r"log_softmax|LogSoftmaxBackward|nll_loss|NllLoss|cross_entropy"),
    (Code.COMMUNICATION, r"^c10d::|ProcessGroupNCCL|ncclComm"),
    (Code.WORKSPACE, r"[Ww]orkspace|CublasHandle|CUDABlasHandle|CudnnHandle"),
    (Code.GRADIENT_BUFFER, r"c10d::Reducer::initialize_bucket"),
)
PHASE_CODE = Code.FORWARD | Code.BACKWARD | Code.OPTIMIZER | Code.ZERO_GRAD | Code.CLIP | Code.LOADER
SIGN_OF_TORCH, SIGN_OF_PACKAGES = (
    re.compile(r"(^|/)torch/"),
    re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen |^<"),
)
BACKWARD_NODE = re.compile(r"\b(\w+Backward\w*?)::apply")


def _compiled(rows) -> list[tuple]:
    return [(row[0], *map(re.compile, row[1:])) for row in rows]


class Stacks:
    """Distinct stacks, numbered as they are met; 0 is the empty one. A frame is looked at once, however often it is written."""

    def __init__(self):
        self._frame_of_id: dict[int, int] = {}
        self._frame_of: dict[tuple, int] = {}
        self._frames: list[tuple[str, int, str]] = []
        self._number_of_id: dict[int, int] = {}
        self._number_of: dict[tuple[int, ...], int] = {(): 0}
        self._stacks: list[tuple[int, ...]] = [()]

    def number(self, frames) -> int:
        """Of a list of {filename, line, name}, innermost first. The list must stay alive while others are asked for."""
        if not frames:
            return 0
        found = self._number_of_id.get(id(frames))
        if found is None:
            key = tuple(map(self._frame_of_id.get, map(id, frames)))
            if None in key:
                key = tuple(map(self._frame_number, frames))
            found = self._number_of.get(key)
            if found is None:
                found = self._number_of[key] = len(self._stacks)
                self._stacks.append(key)
            self._number_of_id[id(frames)] = found
        return found

    def _frame_number(self, frame: dict) -> int:
        line = frame.get("line")
        key = (str(frame.get("filename")), line if type(line) is int else 0, str(frame.get("name")))
        found = self._frame_of.get(key)
        if found is None:
            found = self._frame_of[key] = len(self._frames)
            self._frames.append(key)
        self._frame_of_id[id(frame)] = found
        return found

    def __len__(self) -> int:
        return len(self._stacks)

    @cached_property
    def _codes(self) -> list[int]:
        """A Code per distinct frame, as plain integers: they are combined often."""
        python, native = _compiled(PYTHON_CODE), _compiled(NATIVE_CODE)
        return [_code_of(frame, python, native) for frame in self._frames]

    @cached_property
    def code(self) -> np.ndarray:
        """int64 [stacks]: what all frames of a stack belong to."""
        return np.array([_union(self._codes, stack) for stack in self._stacks], np.int64)

    @cached_property
    def innermost(self) -> np.ndarray:
        """int64 [stacks]: the part of PHASE_CODE that the innermost frame has which has any."""
        found, wanted = [], int(PHASE_CODE)
        for stack in self._stacks:
            found.append(next((code for number in stack if (code := self._codes[number] & wanted)), 0))
        return np.array(found, np.int64)

    def site(self, number: int) -> str:
        """'gpt.py:81 forward': the innermost frame outside of torch and other packages; '' without one that says anything."""
        frames = [self._frames[frame] for frame in self._stacks[number]]
        python = [frame for frame in frames if frame[1] > 0]
        outside = [frame for frame in python if not SIGN_OF_TORCH.search(frame[0])]
        own = [frame for frame in outside if not SIGN_OF_PACKAGES.search(frame[0])]
        for candidates in (own, outside, python):
            if candidates:
                file, line, name = candidates[0]
                text = f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line} {marks.split_mark(name)[0]}"
                return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_LETTERS])
        return ""

    def node(self, number: int) -> str:
        """'MmBackward0': the autograd node of a stack with C++ frames; '' if it has none."""
        for frame in self._stacks[number]:
            if node := BACKWARD_NODE.search(self._frames[frame][2]):
                return node[1][:MAX_LETTERS]
        return ""


def _code_of(frame: tuple[str, int, str], python, native) -> int:
    file, line, name = frame
    if line > 0:
        name, mark = marks.split_mark(name)
        found = int(Code.PYTHON | OWN_CODE.get(mark, Code.NONE))
        for code, in_file, in_name in python:
            if in_file.search(file) and in_name.search(name):
                found |= int(code)
        return found
    found = 0
    for code, in_name in native:
        if in_name.search(name):
            found |= int(code)
    return found


def _union(codes: list[int], stack: tuple[int, ...]) -> int:
    found = 0
    for number in stack:
        found |= codes[number]
    return found
