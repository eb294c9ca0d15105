"""Spares a walk the forwards that it has walked before: a validation of hundreds of batches holds no more than one."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from megatron_lite.instruments.replacing import get_function, put_in_place

MIN_WALKED = 2  # of one kind: the first one may fill caches
PLAIN = (int, float, str, bool, type(None))
Kind = tuple[object, ...]
NO_KIND: Kind = ()


@dataclass(frozen=True)
class Form:
    """All of a tensor but its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> Tensor:
        """Make a tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def describe_tensor(tensor: Tensor) -> Form:
    """Describe a tensor by all but its values."""
    return Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class RepeatedForwards:
    """Answers calls of modules that compute no gradients, do not train and were called alike before.

    The answer has the shapes of the last one that was walked.
    """

    def __init__(self) -> None:
        self._calls = Counter[Kind]()
        self._answers: dict[Kind, object] = {}
        self._depth = 0  # of calls that are open: only the outermost is answered
        self._compute = get_function(nn.Module, "__call__")

    def attach(self) -> None:
        """Start, for the rest of the process."""
        put_in_place(nn.Module, "__call__", lambda module, *inputs, **named: self._call(module, inputs, named))

    def begin_step(self) -> None:
        """Walk all kinds again: more is held beside them than in the step before."""
        self._calls.clear()

    def _call(self, module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> object:
        kind = NO_KIND
        if not self._depth and not torch.is_grad_enabled() and not module.training:
            kind = describe_call(module, inputs, named)
        if kind != NO_KIND and self._calls[kind] >= MIN_WALKED:
            return tree_map_only(Form, Form.make, self._answers[kind])
        self._depth += 1
        try:
            result = self._compute(module, *inputs, **named)
        finally:
            self._depth -= 1
        if kind != NO_KIND and _has_no_data(result):
            self._calls[kind] += 1
            self._answers[kind] = tree_map_only(Tensor, describe_tensor, result)
        return result


def _has_no_data(result: object) -> bool:
    """Whether a result holds no value that the script could read."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(isinstance(tensor, FakeTensor) for tensor in tensors)


def describe_call(module: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> Kind:
    """Describe a call by module and by the shapes and numbers that it is given; NO_KIND where it is given more."""
    leaves, structure = tree_flatten((inputs, named))
    described: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            described.append((leaf.shape, leaf.dtype, leaf.device))
        elif isinstance(leaf, PLAIN):
            described.append(leaf)
        else:
            return NO_KIND
    return (id(module), str(structure), *described)
