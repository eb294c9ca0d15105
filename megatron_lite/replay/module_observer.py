"""Watches what the modules of a replica compute in a step: how large, whether finite, and a checksum of the bits."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron_lite.formats.replay_record import SEEN_BACKWARD, SEEN_FORWARD, ModuleRecord

# integers as wide as the numbers whose bits are added up
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
EMBEDDING = "embedding"


@dataclass
class WatchedTensor:
    """Figures of what a module computed in one direction, over the micro-batches of a step."""

    module: str
    direction: str
    largest: list[Tensor] = field(default_factory=list)
    nonfinite: list[Tensor] = field(default_factory=list)
    checksums: list[Tensor] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    values: int = 0

    def add(self, tensor: Tensor, micro_batch: int) -> None:
        """Add what was computed in a micro-batch."""
        found = tensor.detach()
        finite = torch.isfinite(found)
        kept = torch.where(finite, found, 0)
        largest = kept.abs().amax()
        nonfinite = (~finite).sum()
        checksum = add_bits(found)
        self.largest.append(largest.double())
        self.nonfinite.append(nonfinite)
        self.checksums.append(checksum)
        self.micro_batches.append(micro_batch)
        self.values += found.numel()

    def build_record(self) -> ModuleRecord:
        """Read the figures, which waits for the device."""
        nonfinite = torch.stack(self.nonfinite).tolist()
        largest = torch.stack(self.largest).max()
        broken = [at for at, number in zip(self.micro_batches, nonfinite, strict=True) if number]
        first = None
        if broken:
            first = broken[0]
        return ModuleRecord(
            module=self.module,
            direction=self.direction,
            largest=float(largest),
            nonfinite=sum(nonfinite),
            values=self.values,
            micro_batch=first,
        )

    def read_checksum(self) -> int:
        """Read the checksum over all micro-batches, which waits for the device."""
        total = torch.stack(self.checksums).sum()
        return int(total)


def add_bits(tensor: Tensor) -> Tensor:
    """Add up the bits of numbers as integers, in which any order gives the same sum; an int64 scalar."""
    kind = INTEGERS[tensor.element_size()]
    bits = tensor.contiguous().view(kind)
    return bits.sum(dtype=torch.int64)


class ModuleObserver:
    """Watches the modules of a replica's chunks. Nothing that it does changes what they compute.

    Modules inside of a compiled one are not seen: hooks in them would change what is compiled.

    Args:
        chunks: The chunks of this rank's model.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.is_on = False
        self._tensors: dict[tuple[str, str], WatchedTensor] = {}
        # of a module that is called several times in a forward, how often it was in the running one
        self._calls: Counter[str] = Counter()
        # by chunk, how many forwards of the step have begun
        self._begun: list[int] = [0] * len(chunks)
        # of each micro-batch, the norm of the gradient of each row of the embedding's output
        self.row_gradients: dict[int, Tensor] = {}
        # of each micro-batch, what the last chunk returned: losses_BT
        self.losses: dict[int, Tensor] = {}
        self._undo: list[Callable[[], None]] = []
        for number, chunk in enumerate(chunks):
            self._watch_chunk(number, chunk)

    def _watch_chunk(self, number: int, chunk: nn.Module) -> None:
        """Put hooks on a chunk and the modules within it."""
        before = chunk.register_forward_pre_hook(lambda module, inputs: self._begin(number))
        self._undo.append(before.remove)
        compiled: list[str] = []
        for name, module in chunk.named_modules():
            is_inside = any(name.startswith(prefix) for prefix in compiled)
            # what returns its input has nothing of its own to show
            if is_inside or isinstance(module, nn.Identity):
                continue
            note = partial(self._note_output, name, number)
            inner = module._compiled_call_impl
            if inner is None:
                after = module.register_forward_hook(_call_with_output(note))
                self._undo.append(after.remove)
                continue
            compiled.append(f"{name}.")
            module._compiled_call_impl = _note_after(inner, note)
            self._undo.append(partial(setattr, module, "_compiled_call_impl", inner))

    def detach(self) -> None:
        """Stop watching for good."""
        while self._undo:
            undo = self._undo.pop()
            undo()

    def begin_step(self) -> None:
        """Forget the step before, and watch the one that comes."""
        self.is_on = True
        self._tensors = {}
        self._begun = [0] * len(self._begun)
        self.row_gradients = {}
        self.losses = {}

    def end_step(self) -> None:
        """Watch no more, and keep what was seen."""
        self.is_on = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what was watched, in the order in which it was computed first."""
        return tuple(f"{one.direction} {one.module}" for one in self._tensors.values())

    def list_checksums(self) -> tuple[int, ...]:
        """List the checksum of each tensor that was watched."""
        return tuple(one.read_checksum() for one in self._tensors.values())

    def list_modules(self) -> tuple[ModuleRecord, ...]:
        """List what was seen, in the order in which it was computed."""
        return tuple(one.build_record() for one in self._tensors.values())

    def _begin(self, chunk: int) -> None:
        if self.is_on and not _is_in_backward():
            self._begun[chunk] += 1
            self._calls.clear()

    def _note_output(self, name: str, chunk: int, output: object) -> None:
        """Note what a module returned, and have autograd call when the gradient of it is there."""
        if not self.is_on or _is_in_backward():
            return
        micro_batch = self._begun[chunk] - 1
        self._calls[name] += 1
        number = self._calls[name]
        if number > 1:
            name = f"{name} (call {number})"
        leaves: list[Tensor] = tree_leaves(output)
        for tensor in leaves:
            if not _holds_numbers(tensor):
                continue
            if not name and tensor.dim() == 2:
                self.losses[micro_batch] = tensor.detach()
            self._add(name, SEEN_FORWARD, tensor, micro_batch)
            if tensor.requires_grad:
                note = partial(self._note_gradient, name, micro_batch)
                tensor.register_hook(note)

    def _note_gradient(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        if not self.is_on:
            return
        self._add(name, SEEN_BACKWARD, gradient, micro_batch)
        if name == EMBEDDING and gradient.dim() == 3:
            wide = gradient.detach().double()
            norms = torch.linalg.vector_norm(wide, dim=(1, 2))
            self.row_gradients[micro_batch] = norms

    def _add(self, name: str, direction: str, tensor: Tensor, micro_batch: int) -> None:
        key = (name, direction)
        if key not in self._tensors:
            self._tensors[key] = WatchedTensor(name or "the whole model", direction)
        self._tensors[key].add(tensor, micro_batch)


def _holds_numbers(leaf: object) -> bool:
    """Whether a part of an output is a tensor with floating-point numbers."""
    if not isinstance(leaf, Tensor):
        return False
    return leaf.is_floating_point() and leaf.numel() > 0


def _call_with_output(note: Callable[[object], None]) -> Callable[[nn.Module, object, object], None]:
    """Make a forward hook that hands on what a module returned."""

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        note(output)

    return hook


def _note_after(compiled: Callable[..., object], note: Callable[[object], None]) -> Callable[..., object]:
    """Make a function that calls a compiled module, and notes what it returned."""

    def call(*inputs: object, **named: object) -> object:
        output = compiled(*inputs, **named)
        note(output)
        return output

    return call


def _is_in_backward() -> bool:
    """Whether a forward is one that recomputes activations."""
    return torch._C._current_graph_task_id() != -1
