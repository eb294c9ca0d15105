"""Tell which code asked for memory, and what that code is, from the names that libraries use."""

import enum
import functools
import operator
import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite import marks as own_marks
from megatron_lite.analysis.trace.columns import Numbered
from megatron_lite.terminal import make_printable

Frame = tuple[str, int, str]  # file, line, function
MAX_FRAME_LETTERS = 120


class Code(enum.IntFlag):
    """Kinds of code that a frame may belong to."""

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
    FUNCTION = enum.auto()  # torch.autograd.Function runs: its forward where it is called, its backward by the engine
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
        (Code.BACKWARD, r"/torch/autograd/", r"^grad$"),
        (Code.FUNCTION, r"/torch/autograd/function\.py$", r"^apply$"),
        (Code.RECOMPUTE, RECOMPUTE_FILE, r"^(recompute_fn|unpack_hook|backward|recompute)$"),
        (Code.OPTIMIZER, OPTIMIZER_FILE, r"^(?!zero_grad)"),
        (Code.OPTIMIZER, r"/deepspeed/runtime/", r"^(step|_take_model_step|_optimizer_step)$"),
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
OPTIMIZER_ITSELF = int(Code.OPTIMIZER)
IN_NAME = re.compile(r"(.+?)\((\d{1,9})\): (.+)")
QUALIFIED = re.compile(r"[\w<>]+(\.[\w<>]+)+")
SIGN_OF_TORCH = re.compile(r"(^|/)torch/")
SIGN_OF_PACKAGES = re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen |^<|/torchinductor_")
NATIVE_FILE = re.compile(
    r"\.(c|cc|cpp|cxx|h|hh|hpp|hxx|cu|cuh|hip|inl|inc|ipp|tcc|rs|mm)$|^/usr/include/", re.IGNORECASE
)
UNKNOWN_FILES = ("", "??", "None", "none")
BACKWARD_NODE = re.compile(r"\b(\w+Backward\w*?)::apply")


def is_python(file: str, line: int, name: str) -> bool:
    """Whether a frame is one of Python's.

    Args:
        file: The frame's file. Those of C and C++ have lines, too, where debug symbols are installed.
        line: The number of the line; 0 without one.
        name: The function.
    """
    if line <= 0 or file in UNKNOWN_FILES:
        return False
    return not NATIVE_FILE.search(file) and "::" not in name


def find_code(file: str, line: int, name: str) -> int:
    """The Code of one frame, as a plain integer: they are combined often.

    Args:
        file: The frame's file.
        line: The number of the line; 0 without one.
        name: The function, as the snapshot names it.
    """
    if is_python(file, line, name):
        codes = _find_python_codes(file, name)
    else:
        codes = [code for code, in_name in NATIVE_CODE if in_name.search(name)]
    return int(functools.reduce(operator.or_, codes, Code.NONE))


def _find_python_codes(file: str, name: str) -> list[Code]:
    """Find what a frame of Python's belongs to, one for each row of the tables that fits."""
    function, mark = own_marks.split_mark(name)
    function = drop_qualifiers(function)
    codes = [Code.PYTHON, OWN_CODE.get(mark, Code.NONE)]
    for code, in_file, in_name in PYTHON_CODE:
        if in_file.search(file) and in_name.search(function):
            codes.append(code)
    return codes


def drop_qualifiers(name: str) -> str:
    """The function's own name: 'GPT.forward' -> 'forward', 'Init.convert.<locals>.gather' -> 'gather'."""
    return name.rpartition(".")[2] if QUALIFIED.fullmatch(name) else name


# --- frames of libraries that say what the memory is for


class LibraryFrame(NamedTuple):
    """A row of library_frames.tsv."""

    library: str
    holds: str  # a category of formats.memory_categories.CATEGORIES
    in_file: re.Pattern[str]
    in_function: re.Pattern[str]  # of "function < caller"

    def matches(self, file: str, function: str, caller: str) -> bool:
        """Whether a frame is of this row.

        Args:
            file: The frame's file.
            function: Function of the frame, without qualifiers.
            caller: The function of the frame of Python's around it; "" without one.
        """
        if not self.in_file.search(file):
            return False
        return self.in_function.search(f"{function} < {caller}") is not None


def read_library_frames() -> list[LibraryFrame]:
    """The rows of library_frames.tsv, in its order."""
    table = Path(__file__).parent / "library_frames.tsv"
    rows = []
    for line in table.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        library, holds, in_file, in_function = line.split("\t")
        row = LibraryFrame(
            library=library,
            holds=holds,
            in_file=re.compile(in_file),
            in_function=re.compile(in_function),
        )
        rows.append(row)
    return rows


LIBRARY_FRAMES = read_library_frames()
LIBRARY_FILES = re.compile("|".join(dict.fromkeys(f"(?:{row.in_file.pattern})" for row in LIBRARY_FRAMES)))


class Known(NamedTuple):
    """Facts that a frame of a library tells of a stack."""

    row: LibraryFrame
    at: int  # index of the frame in its stack


class Stacks:
    """Distinct stacks, numbered as they are met; 0 is the empty one.

    A frame is looked at once, however often it is written.
    """

    def __init__(self) -> None:
        self._frame_of_id: dict[int, int] = {}
        self._number_of_id: dict[int, int] = {}
        self._frames: Numbered[Frame] = Numbered()
        self._stacks: Numbered[tuple[int, ...]] = Numbered({(): 0})  # numbers of frames

    def number(self, frames: Any) -> int:
        """The number of a list of {filename, line, name}, innermost first.

        The list must stay alive while others are asked for.
        """
        if not frames:
            return 0
        found = self._number_of_id.get(id(frames))
        if found is None:
            try:
                key = tuple(map(self._frame_of_id.__getitem__, map(id, frames)))
            except KeyError:
                key = tuple(map(self._number_frame, frames))
            found = self._number_of_id[id(frames)] = self._stacks[key]
        return found

    def _number_frame(self, frame: dict[str, Any]) -> int:
        """The number of a frame that is met for the first time; kept by the frame's identity."""
        number = self._frames[_read_frame(frame)]
        self._frame_of_id[id(frame)] = number
        return number

    @cached_property
    def frames_of(self) -> list[list[Frame]]:
        """The frames of each stack."""
        frames = list(self._frames)
        return [[frames[number] for number in stack] for stack in self._stacks]

    @cached_property
    def _code_of_frame(self) -> list[int]:
        """The Code of each frame."""
        return [find_code(*frame) for frame in self._frames]

    @cached_property
    def codes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Two arrays int64 [stacks].

        The first is what all frames of a stack belong to, the second the part of PHASE_CODE that the innermost frame
        has which has any.
        """
        every = []
        innermost = []
        code_of_frame = self._code_of_frame
        for stack in self._stacks:
            codes = [code_of_frame[number] for number in stack]
            code = functools.reduce(operator.or_, codes, 0)
            phase = next((code & PHASE_CODE for code in codes if code & PHASE_CODE), 0)
            if code & Code.FUNCTION and not phase:
                # No frame around the function's tells whether it runs forward. Backward's own threads begin in C++.
                phase = int(Code.FORWARD if code & Code.MAIN else Code.BACKWARD)
                code |= phase
            every.append(code)
            innermost.append(phase)
        return np.array(every, np.int64), np.array(innermost, np.int64)

    @cached_property
    def known(self) -> list[Known | None]:
        """Tell for each stack what the innermost frame of a library says.

        None where no frame does, or an optimizer works inside.
        """
        return [self._find_known(frames, numbers) for frames, numbers in zip(self.frames_of, self._stacks)]

    def _find_known(self, frames: list[Frame], numbers: tuple[int, ...]) -> Known | None:
        """Find what the innermost frame of a library says of a stack. numbers: of its frames."""
        for at, frame in enumerate(frames):
            if not is_python(*frame):
                continue
            row = _find_library_row(frame, frames[at + 1 :])
            if row is not None:
                return Known(row, at)
            if self._code_of_frame[numbers[at]] & OPTIMIZER_ITSELF:
                return None
        return None

    def site(self, number: int) -> str:
        """The line that a stack is shown as, such as 'gpt.py:81 forward'; '' without one that says anything.

        It is the innermost frame outside of torch and other packages; of what a library is known to hold it is the
        library's line.
        """
        frames = self.frames_of[number]
        if known := self.known[number]:
            return _describe_frame(frames[known.at])
        python = [frame for frame in frames if is_python(*frame)]
        outside = [frame for frame in python if not SIGN_OF_TORCH.search(frame[0])]
        own = [frame for frame in outside if not SIGN_OF_PACKAGES.search(frame[0])]
        best = own or outside or python
        return _describe_frame(best[0]) if best else ""

    def node(self, number: int) -> str:
        """The autograd node of a stack with C++ frames, such as 'MmBackward0'; '' if it has none."""
        for _, _, name in self.frames_of[number]:
            if node := BACKWARD_NODE.search(name):
                return node[1][:MAX_FRAME_LETTERS]
        return ""


def _read_frame(frame: dict[str, Any]) -> Frame:
    """Read file, line and function of a frame as a snapshot holds it."""
    file = str(frame.get("filename"))
    line = frame.get("line")
    name = str(frame.get("name"))
    if type(line) is not int:
        line = 0
    # torch.profiler's export to snapshots writes all of it into the name
    if line <= 0 and file in UNKNOWN_FILES and (found := IN_NAME.fullmatch(name)):
        file = found[1]
        line = int(found[2])
        name = found[3]
    return file.replace("\\", "/"), line, name


def _find_library_row(
    frame: Frame,  # one of Python's
    outer: list[Frame],  # those around it
) -> LibraryFrame | None:
    """The row of library_frames.tsv for a frame."""
    file, _, name = frame
    if not LIBRARY_FILES.search(file):
        return None
    function = drop_qualifiers(name)
    callers = (drop_qualifiers(one[2]) for one in outer if is_python(*one))
    caller = next(callers, "")
    return next((row for row in LIBRARY_FRAMES if row.matches(file, function, caller)), None)


def _describe_frame(frame: Frame) -> str:
    """A frame as reports show it, such as 'gpt.py:81 forward'."""
    file, line, name = frame
    function, _ = own_marks.split_mark(name)
    return make_printable(f"{file.rpartition('/')[2]}:{line} {function}", MAX_FRAME_LETTERS)
