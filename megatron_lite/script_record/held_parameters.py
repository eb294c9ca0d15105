"""The parameters of a model that a rank holds, with their gradients and their places in the whole."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_lite.script_record.megatron_core import find_buffers, gather_sums
from megatron_lite.script_record.model_calls import SeenModel
from megatron_lite.script_record.model_names import list_parameters
from megatron_lite.script_record.tensor_places import HeldBlock, find_blocks

SUMS = "main_grad"  # attribute in which Megatron-Core's data parallelism adds gradients up


class HeldParameter(Protocol):
    """A parameter of which this rank holds all or a part."""

    @property
    def name(self) -> str:
        """As a model on one rank has it."""

    @property
    def parameter(self) -> Tensor:
        """What this rank holds."""

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient now; None where it has none."""

    @property
    def is_whole(self) -> bool:
        """Whether autograd computes its gradient as a plain tensor, which a hook of it sees."""

    def find_blocks(self, tensor: Tensor) -> Iterable[HeldBlock]:
        """Find where a tensor that lies as the parameter does, such as its gradient, lies in the whole.

        Args:
            tensor: Of the parameter's local shape.
        """


@dataclass(frozen=True)
class ModuleParameter:
    """A parameter of any module. Its fields are HeldParameter's."""

    name: str
    parameter: Tensor
    buffer: Any = None  # Megatron-Core's, of which each rank has a shard

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient now."""
        sums = getattr(self.parameter, SUMS, None)
        if not isinstance(sums, Tensor):
            return self.parameter.grad
        return sums if self.buffer is None else gather_sums(self.parameter, self.buffer)

    @property
    def is_whole(self) -> bool:
        """Whether it is no DTensor."""
        return type(self.parameter.data) is Tensor

    def find_blocks(self, tensor: Tensor) -> Iterator[HeldBlock]:
        """Find where a tensor lies. The argument is that of HeldParameter."""
        return find_blocks(tensor, self.parameter)


class ParameterSource(Protocol):
    """Lists the parameters of models."""

    def list(self, model: SeenModel) -> Iterator[HeldParameter]:
        """List a model's parameters; one that has several names comes with each.

        Args:
            model: A model that learns.
        """


class ModuleParameters:
    """The parameters of any module, by their names in it."""

    def list(self, model: SeenModel) -> Iterator[HeldParameter]:
        """List a model's parameters. The argument is that of ParameterSource."""
        buffers = dict(find_buffers(model.called))
        for name, parameter in list_parameters(model.module, model.prefix):
            yield ModuleParameter(name, parameter, buffers.get(id(parameter)))
