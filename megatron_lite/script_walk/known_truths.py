"""What is known of tensors without data: what comparisons answer for ordinary numbers.

`torch.isfinite(loss)` holds in every run that goes well, `torch.isnan(loss)` in none. What a comparison gives remembers
the answer, and so does what is made of it: `~`, `&`, `all()`, `cpu()`, the sum of a mask. Whatever else is computed has
no known value.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

ORDINARY_NUMBER = 1.0  # finite, positive, not zero
KNOWN = "known_value"  # attribute of a tensor: the number or truth that each of its elements is
aten = torch.ops.aten
Operation = OpOverload[..., object]
Rule = Callable[[tuple[object, ...], Tensor], object]  # of arguments and result: what each element is; None: unknown


def read_known(tensor: Tensor) -> bool | float | None:
    """Read what each element of a tensor is.

    Args:
        tensor: One without data.

    Returns:
        A truth or a number; None where it is not known.
    """
    return getattr(tensor, KNOWN, None)


def learn(func: Operation, args: tuple[object, ...], result: object) -> None:
    """Remember what an operation's result is, as far as that follows from what its arguments are.

    Args:
        func: What was called.
        args: What it was given by position.
        result: What it returned.
    """
    if not isinstance(result, FakeTensor):
        return
    packet = func.overloadpacket
    is_mutable = func._schema.is_mutable
    if is_mutable:
        # logical_not_ is a logical_not that changes what it is given
        packet = getattr(aten, packet.__name__.removesuffix("_"), packet)
    rule = RULES.get(packet, _know_nothing)
    known = rule(args, result)
    if is_mutable:
        _forget(args[0])
    if known is not None:
        setattr(result, KNOWN, known)


def _know_nothing(args: tuple[object, ...], result: Tensor) -> None:
    """Apply to all operations without a rule."""


def _forget(tensor: object) -> None:
    """Forget what a tensor was, and what it is a part of: it is being changed."""
    for each in (tensor, getattr(tensor, "_base", None)):
        if isinstance(each, FakeTensor):
            setattr(each, KNOWN, None)


def _read_value(value: object) -> float | None:
    """Read a number to compare with. A tensor of numbers is ordinary; one of truths may be unknown."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, Tensor):
        return None
    known = read_known(value)
    if known is None and value.dtype != torch.bool:
        return ORDINARY_NUMBER
    return known


def _compare_by(compare: Callable[[float, float], bool]) -> Rule:
    """Make the rule of a comparison. Two tensors are compared where they are one, as in `loss == loss`."""

    def decide(args: tuple[object, ...], result: Tensor) -> bool | None:
        first = _read_value(args[0])
        second = _read_value(args[1])
        if first is None or second is None or _are_unlike(args[0], args[1]):
            return None
        return compare(first, second)

    return decide


def _are_unlike(first: object, second: object) -> bool:
    """Whether two values may differ though both are ordinary: tensors of which nothing is known."""
    if first is second or not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return read_known(first) is None and read_known(second) is None


def _combine_by(combine: Callable[[float, float], float]) -> Rule:
    """Make the rule of an operation of two tensors of which both are known."""

    def decide(args: tuple[object, ...], result: Tensor) -> float | None:
        first = _read_known(args[0])
        second = _read_known(args[1])
        if first is None or second is None:
            return None
        return combine(first, second)

    return decide


def _read_known(value: object) -> float | None:
    """Read what each element of a value is, if it is a tensor."""
    return read_known(value) if isinstance(value, Tensor) else None


def _keep(args: tuple[object, ...], result: Tensor) -> float | None:
    """What all elements are, each of them is, and any."""
    return _read_known(args[0])


def _invert(args: tuple[object, ...], result: Tensor) -> bool | None:
    known = _read_known(args[0])
    if known is None or result.dtype != torch.bool:
        return None
    return not known


def _add_up(args: tuple[object, ...], result: Tensor) -> int | None:
    """Nothing adds up to 0. How many elements of a mask hold is data, though each would of an ordinary number."""
    known = _read_known(args[0])
    return 0 if known is not None and not known else None


def _agree(args: tuple[object, ...], result: Tensor) -> float | None:
    """What all of several tensors are."""
    several = args[0]
    if not isinstance(several, (list, tuple)):
        return None
    first = _read_known(several[0])
    if any(_read_known(value) != first for value in several):
        return None
    return first


def _answer(truth: bool) -> Rule:
    """Make the rule of what holds, or does not, for all ordinary numbers."""
    return lambda args, result: truth if result.dtype == torch.bool else None


RULES: dict[OpOverloadPacket[..., object], Rule] = {
    aten.isfinite: _answer(True),
    # of whole numbers, isfinite is that
    aten.ones_like: _answer(True),
    aten.isnan: _answer(False),
    aten.isinf: _answer(False),
    aten.isposinf: _answer(False),
    aten.isneginf: _answer(False),
    aten.eq: _compare_by(operator.eq),
    aten.ne: _compare_by(operator.ne),
    aten.lt: _compare_by(operator.lt),
    aten.le: _compare_by(operator.le),
    aten.gt: _compare_by(operator.gt),
    aten.ge: _compare_by(operator.ge),
    aten.mul: _combine_by(operator.mul),
    aten.logical_and: _combine_by(min),
    aten.bitwise_and: _combine_by(min),
    aten.logical_or: _combine_by(max),
    aten.bitwise_or: _combine_by(max),
    aten.logical_not: _invert,
    aten.bitwise_not: _invert,
    aten.sum: _add_up,
    aten.stack: _agree,
    aten.cat: _agree,
}
VIEWS = "alias detach view reshape _unsafe_view select slice squeeze unsqueeze expand permute t"
KEEPING = f"{VIEWS} clone _to_copy all any mean amax amin"
RULES |= {getattr(aten, name): _keep for name in KEEPING.split()}
