"""Stacks of a snapshot: which code asked for memory, and what that code is, from the names that libraries use."""

import enum
import functools
import operator
import re
from functools import cached_property

import numpy as np

from megatron_lite import marks
from megatron_lite.analysis.trace.columns import Numbered

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
        (Code.MAIN, r"", r"^(<module>|_bootstrap)$"),
        (Code.COMMUNICATION, r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$", r""),
    )
]
OWN_CODE = {  # by the mark of a function of this trainer
    marks.MASTER_WEIGHTS: Code.MASTER,
    marks.GRADIENT_BUFFER: Code.GRADIENT_BUFFER,
    marks.WEIGHT_GRADIENT: Code.WEIGHT_GRADIENT,
    marks.LOSS: Code.LOSS,
    marks.INPUT: Code.LOADER,
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
        name, mark = marks.split_mark(name)
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
        inner = [
            next((code for number in stack if (code := of_frame[number] & PHASE_CODE)), 0) for stack in self._stacks
        ]
        return np.array(every, np.int64), np.array(inner, np.int64)

    def site(self, number: int) -> str:
        """'gpt.py:81 forward': the innermost frame outside of torch and other packages; '' without one that says anything."""
        python = [frame for frame in self.frames_of[number] if frame[1] > 0]
        outside = [frame for frame in python if not SIGN_OF_TORCH.search(frame[0])]
        own = [frame for frame in outside if not SIGN_OF_PACKAGES.search(frame[0])]
        for file, line, name in (own or outside or python)[:1]:
            text = f"{file.replace(chr(92), '/').rpartition('/')[2]}:{line} {marks.split_mark(name)[0]}"
            return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_LETTERS])
        return ""

    def node(self, number: int) -> str:
        """'MmBackward0': the autograd node of a stack with C++ frames; '' if it has none."""
        for _, _, name in self.frames_of[number]:
            if node := BACKWARD_NODE.search(name):
                return node[1][:MAX_LETTERS]
        return ""
