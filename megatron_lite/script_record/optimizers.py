"""Sees the optimizers of a script: parameters that no model holds, and updates that are left out."""

from collections.abc import Callable, Collection, Iterator

from torch import nn
from torch.optim import Optimizer

from megatron_lite.instruments.replacing import get_function, put_in_place
from megatron_lite.script_record.held_parameters import ModuleParameter

OUTSIDE = "optimizer"  # beginning of the names of parameters that no model holds


class SeenOptimizers:
    """The optimizers of this process, in the order in which they were made."""

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []

    def attach(self, clear: Callable[[Optimizer], object]) -> None:
        """Start, for the rest of the process.

        Args:
            clear: Called before an optimizer clears its gradients.
        """
        prepare = get_function(Optimizer, "__init__")
        zero = get_function(Optimizer, "zero_grad")

        def prepare_and_note(optimizer: Optimizer, *arguments: object, **named: object) -> None:
            prepare(optimizer, *arguments, **named)
            self._optimizers.append(optimizer)

        def note_and_zero(optimizer: Optimizer, *arguments: object, **named: object) -> None:
            clear(optimizer)
            zero(optimizer, *arguments, **named)

        put_in_place(Optimizer, "__init__", prepare_and_note)
        put_in_place(Optimizer, "zero_grad", note_and_zero)

    def list_outside(self, optimizer: Optimizer, known: Collection[int]) -> Iterator[ModuleParameter]:
        """List the parameters of an optimizer that no model holds. What it updates in their stead, such as copies of
        another precision, is none.

        Args:
            optimizer: One of this process.
            known: Ids of parameters of models.
        """
        for held in self._list(optimizer):
            if id(held.parameter) in known:
                continue
            if isinstance(held.parameter, nn.Parameter):
                yield held

    def list_all(self) -> Iterator[ModuleParameter]:
        """List the parameters of all optimizers, by the names that they have where no model holds them."""
        for optimizer in self._optimizers:
            yield from self._list(optimizer)

    def _list(self, optimizer: Optimizer) -> Iterator[ModuleParameter]:
        first = OUTSIDE
        for number, known in enumerate(self._optimizers[1:], start=2):
            if known is optimizer:
                first = f"{OUTSIDE}{number}"
        for at, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                name = f"{first}.{at}.{place}"
                yield ModuleParameter(name, parameter)
