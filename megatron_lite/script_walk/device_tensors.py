"""Gives tensors of the device no data, and those of the host theirs.

What a script computes on the host, such as its batches and their order, is computed. What it moves to the device, and
what comes of that, has a shape, a type and a place, and no values: torch's FakeTensor. Weights are made without values
wherever they are made, since nobody reads them.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from types import FrameType
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_lite.instruments.memory_tracker import RECORDERS
from megatron_lite.instruments.replacing import get_function, put_in_place
from megatron_lite.planner.walk.recording import WithoutData
from megatron_lite.script_walk.known_truths import ORDINARY_NUMBER, learn
from megatron_lite.script_walk.unknown_values import Branches, refuse_operation, refuse_values

# files whose empty tensors are weights, or are gathered to be
WEIGHT_FILES = ("/torch/nn/modules/", "/torch/distributed/fsdp/")
OF_MODES = (*RECORDERS, "/torch/utils/_device.py")  # frames between such a file and a mode
OF_HOST = torch.device("cpu")
MAKE_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)
READ_VALUE = torch.ops.aten._local_scalar_dense.default
MOVE = torch.ops.aten._to_copy.default
ASK_DEVICE = torch.ops.prim.device.default
SUPPORTED = "_foreach_supported_types"  # torch's lists of classes of tensors that it computes with in lists
ORIGINAL = "original"  # attribute of a tensor without data: that of the host which it stands for
Operation = OpOverload[..., object]


class MovedBatch:
    """The leading size of what a script moves to the GPU: its batch.

    Args:
        original: That of the script, where it is to be changed; 0: it stays.
        wanted: What it becomes.

    Attributes:
        size: That of the first tensor that moved; 0: none has.
    """

    def __init__(self, original: int = 0, wanted: int = 0) -> None:
        self.size = 0
        self._original = original
        self._wanted = wanted

    def resize(self, tensor: object) -> object:
        """Give a tensor that moves to the GPU the size that is wanted.

        Args:
            tensor: Without data.
        """
        if not isinstance(tensor, Tensor) or not tensor.dim():
            return tensor
        self.size = self.size or tensor.shape[0]
        if not self._original or tensor.shape[0] != self._original:
            return tensor
        return tensor.new_empty((self._wanted, *tensor.shape[1:]))


class DeviceTensors(TorchDispatchMode):
    """Runs operations without data, if one of their tensors has none or is to be on the GPU.

    Args:
        without_data: torch's mode for such operations.
        batch: Is told of tensors that the script moves to the GPU, and may change their size.
        branches: Is told of lines that copy unknown values to the host.
    """

    def __init__(self, without_data: WithoutData, batch: "MovedBatch", branches: Branches) -> None:
        TorchDispatchMode.__init__(self)
        self._without_data = without_data
        self._batch = batch
        self._branches = branches
        self._is_child = False
        self._moving_state = 0  # calls that move weights, buffers or moments and are open

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch that this mode has nothing to do with compiled code."""
        return True

    def prepare_torch(self) -> None:
        """Prepare torch for this mode, for the rest of the process.

        Children of the process, such as workers of loaders, compute as ever.
        """
        # a tensor that is made of numbers is made on the host and then moved, so that its move is seen
        torch._C._set_only_lift_cpu_tensors(True)
        os.register_at_fork(after_in_child=self._become_child)
        # Module.to and its kin
        self._see_moving_state(nn.Module, "_apply")
        self._see_moving_state(Optimizer, "load_state_dict")

    def _see_moving_state(self, place: type, name: str) -> None:
        """Tell weights, buffers and moments that move to the GPU from batches that do.

        Args:
            place: The class of what holds them.
            name: The name of its method that moves them.
        """
        move = get_function(place, name)

        def move_state(*arguments: object, **named: object) -> object:
            self._moving_state += 1
            try:
                return move(*arguments, **named)
            finally:
                self._moving_state -= 1

        put_in_place(place, name, move_state)

    def _become_child(self) -> None:
        self._is_child = True

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        if named.get("pin_memory"):
            # memory of the host that a GPU reads directly is memory of the host
            named = named | {"pin_memory": False}
        device = named.get("device")
        if isinstance(device, torch.device) and device.type == OF_HOST.type:
            # torch gives the host's tensors no number, but takes one
            named = named | {"device": OF_HOST}
        if func is ASK_DEVICE or self._is_child or not self._is_without_data(func, args, named):
            return func(*args, **named)
        if func is READ_VALUE:
            refuse_values("values")
        if func._schema.is_mutable and args and _has_data(args[0]):
            return self._fill(args[0])
        is_moved = func is MOVE and not isinstance(args[0], FakeTensor) and not self._moving_state
        args, named = tree_map_only(Tensor, self.drop_data, (args, named))
        if is_moved:
            args = (self._batch.resize(args[0]), *args[1:])
        result = self._run(func, args, named)
        learn(func, args, result)
        return result

    def _run(self, func: Operation, args: tuple[object, ...], named: dict[str, object]) -> object:
        """Run an operation without data. UserError where its results depend on data, or torch has no rule for it."""
        try:
            with self._without_data:
                return func(*args, **named)
        except (DynamicOutputShapeException, DataDependentOutputException):
            refuse_values(f"sizes of what {func} returns", "choose elements by torch.where, or a fixed number of them")
        except (UnsupportedOperatorException, NotImplementedError):
            refuse_operation(str(func))

    def drop_data(self, tensor: Tensor) -> Tensor:
        """Make a tensor without data of one that has them; the memory of the latter is held as long as the former is.

        Args:
            tensor: Any. One without data is returned as it is.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        converted = self._without_data.from_tensor(tensor.detach())
        setattr(converted, ORIGINAL, tensor)
        return converted

    def _fill(self, changed: Tensor) -> Tensor:
        """Change a tensor of the host in place, by values that nobody knows: ordinary ones are put there."""
        self._branches.note_copy()
        ordinary = 0 if changed.dtype is torch.bool else ORDINARY_NUMBER
        return changed.fill_(ordinary)

    def _is_without_data(self, func: Operation, args: tuple[object, ...], named: dict[str, object]) -> bool:
        """Whether an operation takes or gives a tensor without data."""
        device = named.get("device")
        if isinstance(device, torch.device) and device.type == "cuda":
            return True
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, named))):
            return True
        return func in MAKE_EMPTY and _makes_weights()


def _has_data(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _makes_weights() -> bool:
    """Whether torch calls for weights of its own modules, or of FSDP."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in OF_MODES):
        frame = frame.f_back
    return frame is not None and any(part in frame.f_code.co_filename for part in WEIGHT_FILES)


def let_torch_compute_in_lists() -> None:
    """Let optimizers and clipping take tensors without data for plain ones, which they compute with in lists on a GPU.

    A list of results holds as much as all weights, where one after the other would hold one.
    """
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        kinds: list[type] = getattr(importlib.import_module(name), SUPPORTED)
        if FakeTensor not in kinds:
            kinds.append(FakeTensor)


def make_weights_without_data(without_data: WithoutData) -> None:
    """Let parameters have no data whatever they are made of, and stay the same objects when they move to the device.

    For the rest of the process.

    Args:
        without_data: torch's mode for tensors without data.
    """
    make = get_function(nn.Parameter, "__new__")
    swap = get_function(torch.utils, "swap_tensors")
    converter = without_data.fake_tensor_converter.meta_converter

    def make_parameter(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Tensor:
        if data is not None and type(data) in (Tensor, nn.Parameter):
            data = without_data.from_tensor(data.detach())
        made: Tensor = make(cls, data, requires_grad)
        return made

    def swap_tensors(first: Tensor, second: Tensor) -> None:
        # torch refuses to swap what a weak reference points to
        converter.tensor_memo.clear()
        converter.describer.lookup_tensor.clear()
        swap(first, second)

    put_in_place(nn.Parameter, "__new__", staticmethod(make_parameter))
    put_in_place(torch.utils, "swap_tensors", swap_tensors)
