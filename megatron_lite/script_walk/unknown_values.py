"""What a script gets when it reads a value of a tensor without data.

Such a value has no digits. It can be printed, stored and computed with. A branch that depends on one is noted with its
line, and taken as for an ordinary number. Where a script needs whole numbers or arrays, there is nothing to give.
"""

import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_lite.errors import UserError
from megatron_lite.script_walk.known_truths import ORDINARY_NUMBER, read_known

OVERFLOWED = 0.0  # what a gradient scaler counts
SCALER = "/torch/amp/grad_scaler.py"
HERE = ("/megatron_lite/script_walk/", "<frozen ")
OURS = ("/torch/", "/megatron_lite/", "<frozen ")
SHOWN = "unknown"
COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


class Branches:
    """The lines at which a script decided by a value that it cannot have.

    Attributes:
        lines: 'train.py:88: if loss < best:' with the number of times, in the order of first use.
        copies: Likewise those at which it copied such values to the host, where decisions by them are not seen.
    """

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.copies: dict[str, int] = {}

    def note_copy(self) -> None:
        """Note the line of the script that copies values now."""
        line = find_line_of_script()
        self.copies[line] = self.copies.get(line, 0) + 1

    def note(self) -> None:
        """Note the line of the script that decides now."""
        line = find_line_of_script()
        self.lines[line] = self.lines.get(line, 0) + 1


def find_line_of_script() -> str:
    """Find the innermost line that is neither torch's nor of this package: 'train.py:88: if loss < best:'.

    Where all are, as in this package's own trainer, the innermost one that is not of this folder.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    foreign = [each for each in frames if not _has_part(each, OURS)]
    found = next(iter(foreign), None) or next(each for each in frames if not _has_part(each, HERE))
    return _describe_line(found)


def _describe_line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    text = linecache.getline(path, frame.f_lineno).strip()
    return f"{Path(path).name}:{frame.f_lineno}: {text}"


def _has_part(frame: FrameType, parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in parts)


def refuse_values(asked: str, remedy: str = "replace it for the walk by a number of its kind") -> NoReturn:
    """Stop at a line that cannot go on without values.

    Args:
        asked: What the line asks for.
        remedy: What to do instead.

    Raises:
        UserError: Always.
    """
    raise UserError(f"{find_line_of_script()}: {asked} exist only where tensors have data; {remedy}, or leave it out.")


def refuse_operation(name: str) -> NoReturn:
    """Stop at a line that calls an operation which torch cannot run without data.

    Args:
        name: The operation's.

    Raises:
        UserError: Always.
    """
    remedy = "give it one by torch.library.register_fake, or leave it out for the walk"
    raise UserError(f"{find_line_of_script()}: {name} has no rule for the shapes of its results; {remedy}.")


def describe_error(error: BaseException) -> str:
    """Describe an error of the script with the line of the script at which it happened.

    Args:
        error: What was raised.
    """
    text = f"{type(error).__name__}: {error}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if not _has_part(frame, OURS)]
    return f"{_describe_line(frames[-1])}: {text}" if frames else text


class UnknownFloat(float):
    """A number that only a run with data would know."""

    branches: Branches

    def __new__(cls, branches: Branches) -> "UnknownFloat":  # noqa: PYI034 - Self came with Python 3.11
        made = super().__new__(cls, ORDINARY_NUMBER)
        made.branches = branches
        return made

    def __repr__(self) -> str:
        return SHOWN

    def __str__(self) -> str:
        return SHOWN

    def __format__(self, specification: str) -> str:
        return SHOWN

    def __hash__(self) -> int:
        return float.__hash__(self)


def _compute(value: UnknownFloat, *others: object) -> UnknownFloat:
    """Stand in for arithmetic: what is computed with an unknown number is unknown."""
    return UnknownFloat(value.branches)


def _decide(name: str) -> Callable[..., object]:
    """Make the method of that name, which decides as for an ordinary number and notes the line."""
    decide: Callable[..., object] = getattr(float, name)

    def decide_and_note(value: UnknownFloat, *others: object) -> object:
        value.branches.note()
        return decide(value, *others)

    return decide_and_note


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(UnknownFloat, f"__{_name}__", _compute)
    setattr(UnknownFloat, f"__r{_name}__", _compute)
for _name in ("neg", "pos", "abs"):
    setattr(UnknownFloat, f"__{_name}__", _compute)
for _name in (*COMPARISONS, "__bool__", "__int__"):
    setattr(UnknownFloat, _name, _decide(_name))


def give_unknown_values(branches: Branches) -> None:
    """Let tensors without data answer a script that reads them, for the rest of the process.

    Args:
        branches: Where lines are noted that decide by such an answer.
    """

    def item(tensor: Tensor) -> float:
        if tensor.dtype == torch.bool:
            return is_true(tensor)
        if not tensor.dtype.is_floating_point:
            return read_whole_number(tensor)
        caller = sys._getframe(1).f_code.co_filename
        if caller.endswith(SCALER):
            return OVERFLOWED
        return UnknownFloat(branches)

    def is_true(tensor: Tensor) -> bool:
        branches.note()
        return bool(read_known(tensor))

    def read_whole_number(tensor: Tensor) -> int:
        known = read_known(tensor)
        if known is None:
            refuse_values("whole numbers")
        branches.note()
        return int(known)

    answers: dict[str, Callable[..., object]] = {
        "item": item,
        "__float__": lambda tensor: float(ORDINARY_NUMBER),
        "__bool__": is_true,
        "__format__": lambda tensor, specification: SHOWN,
        "__int__": read_whole_number,
        "__index__": read_whole_number,
        "tolist": lambda tensor: refuse_values("numbers"),
        "numpy": lambda tensor, **named: refuse_values("arrays"),
        "__array__": lambda tensor, *arguments, **named: refuse_values("arrays"),
    }
    for name, answer in answers.items():
        setattr(FakeTensor, name, answer)
