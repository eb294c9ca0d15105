"""Puts ranges around layers, attention and MLP, forward and backward, from outside of the modules (--profile-modules).

Nothing is added to the autograd graph: backward ranges begin and end in hooks that nodes call before they run, so that
numbers stay what they are, bit for bit.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import record_function

from megatron_lite.instruments.base import Tell
from megatron_lite.model.gpt import TransformerLayer

PARTS = ("self_attention", "mlp")  # of a layer
EDGE = "megatron_lite.module_ranges"
METADATA = "metadata"  # a dictionary of each autograd node, which torch declares as a method


@dataclass
class Edge:
    """The modules whose backward ranges begin and end at an autograd node, in the order in which forward left them."""

    begins: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class OpenRanges(threading.local):
    """The ranges that are open on a thread: (name of the module, way, range), the innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, str, record_function]] = []


class ModuleRanges:
    """Records ranges of modules between `open` and `close`.

    The first forward pass finds them, below the outermost module.

    Args:
        tell: Called with each line for the console.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._open = False
        self._undo: list[Callable[[], object]] = []
        self._ranges = OpenRanges()  # backward runs in threads of its own on a GPU

    def open(self) -> None:
        self._open = True
        watching = register_module_forward_pre_hook(lambda module, inputs: self._safely(self._watch_all, module))
        self._undo.append(watching.remove)

    def close(self) -> None:
        self._open = False
        while self._undo:
            undo = self._undo.pop()
            undo()

    def _watch_all(self, root: nn.Module) -> None:
        """Put hooks on the modules of interest inside the first module that runs."""
        stop_watching = self._undo.pop()
        stop_watching()
        wanted = find_modules(root)
        if not wanted:
            self._tell("--profile-modules: no layer is visible from outside; is the model compiled as a whole?")
        for name, module in wanted.items():
            if module._compiled_call_impl is not None:  # module.compile(): hooks would be inside what is compiled
                self._wrap_compiled(name, module, module._compiled_call_impl)
            else:
                before = module.register_forward_pre_hook(partial(self._begin_forward, name))
                after = module.register_forward_hook(partial(self._end_forward, name), always_call=True)
                self._undo += [before.remove, after.remove]

    def _begin_forward(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
        self._safely(self._enter, name)

    def _end_forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        self._safely(self._leave, name, inputs, output)

    def _wrap_compiled(self, name: str, module: nn.Module, compiled: Callable[..., object]) -> None:
        """Put the range around the call of a compiled module."""

        def call(*inputs: object, **named: object) -> object:
            self._safely(self._enter, name)
            output = None
            try:
                output = compiled(*inputs, **named)
            finally:
                self._safely(self._leave, name, inputs, output)
            return output

        module._compiled_call_impl = call
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))

    def _safely(self, action: Callable[..., None], *arguments: object) -> None:
        """Run an action of a hook. An error in it must not end training."""
        if not self._open:
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - as for instruments
            self._open = False
            self._tell(f"--profile-modules failed and was switched off; training goes on: {error}")

    def _enter(self, name: str) -> None:
        self._push(name, "recompute" if _in_backward() else "forward")

    def _leave(self, name: str, inputs: tuple[object, ...], output: object) -> None:
        """End a module's range. Recomputation ends modules by an exception once it has what it needs; there is no
        output then."""
        if _in_backward():
            self._pop(name, "recompute")
            return
        self._pop(name, "forward")
        first = _find_node(inputs)
        last = _find_node(output)
        if first is None or last is None or first is last:
            return
        # before a node runs in backward, all its gradients have arrived: the ranges that begin and end then
        self._find_edge(last).begins.append(name)
        self._find_edge(first).ends.append(name)

    def _find_edge(self, node: Node) -> Edge:
        """Return the ranges of a node, which from now on begin and end when the node runs."""
        metadata: dict[str, Edge] = getattr(node, METADATA)
        known = metadata.get(EDGE)
        if known is not None:
            return known
        edge = Edge()
        metadata[EDGE] = edge
        node.register_prehook(lambda gradients: self._safely(self._pass, edge))
        return edge

    def _pass(self, edge: Edge) -> None:
        """End and begin the backward ranges of a node."""
        for name in edge.ends:
            self._pop(name, "backward")
        for name in reversed(edge.begins):  # a layer left after its MLP: the layer's range is the outer one
            self._push(name, "backward")

    def _push(self, name: str, way: str) -> None:
        span = record_function(f"{name} {way}")
        span.__enter__()
        self._ranges.stack.append((name, way, span))

    def _pop(self, name: str, way: str) -> None:
        """End this range, and all ranges that an error left open inside it."""
        stack = self._ranges.stack
        wanted = (name, way)
        if all(entry[:2] != wanted for entry in stack):
            return
        ended = None
        while ended != wanted:
            its_name, its_way, span = stack.pop()
            span.__exit__(None, None, None)
            ended = (its_name, its_way)


def _find_node(value: object) -> Node | None:
    """Find the autograd node of a tensor, or of the first of several; None where there is none."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value.grad_fn if isinstance(value, Tensor) else None


def find_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Find the layers, and their attention and MLP where a layer is not compiled, by the names of their ranges."""
    wanted: dict[str, nn.Module] = {}
    compiled: list[str] = []  # prefixes
    for name, module in root.named_modules():
        if any(name.startswith(prefix) for prefix in compiled):
            continue
        forward = vars(module).get("forward")
        if isinstance(forward, partial):  # recomputation around a compiled layer
            forward = forward.args[0]
        is_compiled = (
            hasattr(module, "_orig_mod")
            or module._compiled_call_impl is not None
            or hasattr(forward, "_torchdynamo_orig_callable")
        )
        inner = getattr(module, "_orig_mod", module)
        if isinstance(inner, TransformerLayer):
            short = name[name.find("layers.") :]  # of module.decoder.layers.3
            wanted[short] = module
            if not is_compiled:
                wanted |= {f"{short}.{part}": getattr(inner, part) for part in PARTS}
        if is_compiled:
            compiled.append(f"{name}." if name else "")
    return wanted


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
