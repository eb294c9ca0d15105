"""Sees the calls of a script's models: what they are given, and what each of their modules returns."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from megatron_lite.instruments.replacing import get_function, put_in_place
from megatron_lite.script_record.model_names import list_modules, list_parameters, unwrap

HASH_BYTES = 8
PIPELINE_STAGE = "torch/distributed/pipelining/stage.py"
MAX_FRAMES_OF_A_STAGE = 8  # between a stage and the call of its module
CALL = "__call__"


@dataclass(frozen=True)
class SeenModel:
    """A model that a script trains.

    Attributes:
        module: Without wrappers.
        prefix: Before the names of its parts.
        called: What the script calls: the module, or a wrapper of it.
    """

    module: nn.Module
    prefix: str
    called: nn.Module


class ModelCalls:
    """The calls of this process' models while they learn.

    A model is the outermost module of a call that has parameters.

    Args:
        begin: Called with a model and its arguments before it computes; returns the arguments to take.
        returned: Called with the name, the module and what it returned, for each module within.
    """

    def __init__(
        self,
        begin: Callable[
            [SeenModel, tuple[object, ...], dict[str, object]], tuple[tuple[object, ...], dict[str, object]]
        ],
        returned: Callable[[str, nn.Module, object], object],
    ) -> None:
        self.models: list[SeenModel] = []
        # open calls within which no forward is the script's: backward, which computes activations again, and a
        # pipeline's search for the shapes that it will send
        self.ignored = 0
        self._begin = begin
        self._returned = returned
        self._depth = 0
        self._names: dict[int, str] = {}
        self._parameter_names: set[str] = set()

    def attach(self) -> None:
        """Start, for the rest of the process."""
        call = get_function(nn.Module, CALL)

        def call_module(module: nn.Module, *arguments: object, **named: object) -> object:
            if not self._is_model(module):
                return call(module, *arguments, **named)
            if _infers_shapes():
                self.ignored += 1
                try:
                    return call(module, *arguments, **named)
                finally:
                    self.ignored -= 1
            self._depth += 1
            try:
                arguments, named = self._begin(self._find_model(module), arguments, named)
                return call(module, *arguments, **named)
            finally:
                self._depth -= 1

        put_in_place(nn.Module, CALL, call_module)
        register_module_forward_hook(self._note_output)

    def _is_model(self, module: nn.Module) -> bool:
        """Whether this call is one of a model that learns."""
        if self._depth or self.ignored or not torch.is_grad_enabled() or not module.training:
            return False
        if torch.compiler.is_compiling() or active_fake_mode() is not None:
            return False
        return next(module.parameters(), None) is not None

    def _find_model(self, called: nn.Module) -> SeenModel:
        module = unwrap(called)
        for model in self.models:
            if model.module is module:
                return model
        # chunks of a stage have the names of the whole model; other models, such as a second network, have their own
        names = {name for name, _ in list_parameters(module, "")}
        is_clear = names.isdisjoint(self._parameter_names)
        prefix = "" if is_clear else f"model{len(self.models) + 1}."
        self._parameter_names |= names
        model = SeenModel(module, prefix, called)
        self.models.append(model)
        self._names |= {id(each): name for name, each in list_modules(module, prefix)}
        return model

    def _note_output(self, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if not self._depth or self.ignored:
            return
        name = self._names.get(id(module))
        if name is not None:
            self._returned(name, module, output)


def _infers_shapes() -> bool:
    """Whether a stage of torch's pipelines calls its module to find out what it will send: on no data of the script."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES_OF_A_STAGE):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(PIPELINE_STAGE) and frame.f_code.co_name.endswith("_inference"):
            return True
        frame = frame.f_back
    return False


def list_tensors(value: object) -> Iterator[Tensor]:
    """List the tensors of what a module was given or returned.

    Args:
        value: Tensors in tuples, lists and dictionaries.
    """
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def hash_rows(tensors: list[Tensor]) -> tuple[str, ...]:
    """Hash the rows of a model's inputs.

    Args:
        tensors: Those without a gradient, of which the first tells the number of rows. Others with as many rows take
            part.

    Returns:
        A hash of each row; () where no tensor has rows.
    """
    with_rows = [tensor for tensor in tensors if tensor.dim()]
    if not with_rows:
        return ()
    rows = with_rows[0].shape[0]
    hashes = [hashlib.blake2b(digest_size=HASH_BYTES) for _ in range(rows)]
    for tensor in with_rows:
        if tensor.shape[0] != rows:
            continue
        host = tensor.detach().cpu()
        if host.dtype in (torch.bfloat16, torch.float16):
            host = host.float()
        for row, value in zip(hashes, host.numpy(), strict=True):
            row.update(value.tobytes())
    return tuple(each.hexdigest() for each in hashes)


def hash_random_state() -> str:
    """Hash the state of torch's default random generator."""
    return hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=HASH_BYTES).hexdigest()
