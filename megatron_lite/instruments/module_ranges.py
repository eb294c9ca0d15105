"""--profile-modules: ranges of layers, attention and MLP, forward and backward, put around modules from outside.

Nothing is added to the autograd graph: backward ranges begin and end in hooks that nodes call before they run, so that
numbers stay what they are, bit for bit.
"""

import threading
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.profiler import record_function

from megatron_lite.model.gpt import TransformerLayer

PARTS = ("self_attention", "mlp")  # of a layer
EDGE = "megatron_lite.module_ranges"


class ModuleRanges:
    """Records ranges of modules between `open` and `close`.

    The first forward pass finds them, below the outermost module.
    """

    def __init__(self, tell):
        self._tell = tell
        self._open = False
        self._undo = []
        self._ranges = threading.local()  # backward runs in threads of its own on a GPU

    def open(self):
        self._open = True
        watching = register_module_forward_pre_hook(lambda module, inputs: self._safely(self._watch_all, module))
        self._undo.append(watching.remove)

    def close(self):
        self._open = False
        while self._undo:
            self._undo.pop()()

    def _watch_all(self, root: nn.Module):
        """Put hooks on the modules of interest inside the first module that runs."""
        self._undo.pop()()
        wanted = find_modules(root)
        if not wanted:
            self._tell("--profile-modules: no layer is visible from outside; is the model compiled as a whole?")
        for name, module in wanted.items():
            if module._compiled_call_impl is not None:  # module.compile(): hooks would be inside what is compiled
                self._wrap_compiled(name, module)
            else:
                before = module.register_forward_pre_hook(lambda _, inputs, name=name: self._safely(self._enter, name))
                after = module.register_forward_hook(
                    lambda _, inputs, output, name=name: self._safely(self._leave, name, inputs, output),
                    always_call=True,
                )
                self._undo += [before.remove, after.remove]

    def _wrap_compiled(self, name: str, module: nn.Module):
        compiled = module._compiled_call_impl

        def call(*inputs, **named):
            self._safely(self._enter, name)
            output = None
            try:
                output = compiled(*inputs, **named)
            finally:
                self._safely(self._leave, name, inputs, output)
            return output

        module._compiled_call_impl = call
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))

    def _safely(self, action, *arguments):
        """Run an action of a hook. An error in it must not end training."""
        if not self._open:
            return
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - as for instruments
            self._open = False
            self._tell(f"--profile-modules failed and was switched off; training goes on: {error}")

    def _enter(self, name: str):
        self._push(name, "recompute" if _in_backward() else "forward")

    def _leave(self, name: str, inputs, output):
        """A module ends. Recomputation ends modules by an exception once it has what it needs;
        there is no output then."""
        if _in_backward():
            self._pop(name, "recompute")
            return
        self._pop(name, "forward")
        first, last = (
            value.grad_fn if isinstance(value, Tensor) else None
            for value in (part[0] if isinstance(part, (tuple, list)) and part else part for part in (inputs, output))
        )
        if first is None or last is None or first is last:
            return
        for node, what in ((last, "begins"), (first, "ends")):
            # before a node runs in backward, all its gradients have arrived: the ranges that begin and end then
            if EDGE not in node.metadata:
                node.metadata[EDGE] = edge = {"ends": [], "begins": []}
                node.register_prehook(lambda gradients, edge=edge: self._safely(self._pass, edge))
            node.metadata[EDGE][what].append(name)

    def _pass(self, edge: dict[str, list[str]]):
        for name in edge["ends"]:
            self._pop(name, "backward")
        for name in reversed(edge["begins"]):  # a layer left after its MLP: the layer's range is the outer one
            self._push(name, "backward")

    def _push(self, name: str, way: str):
        span = record_function(f"{name} {way}")
        span.__enter__()
        if not hasattr(self._ranges, "stack"):
            self._ranges.stack = []
        self._ranges.stack.append((name, way, span))

    def _pop(self, name: str, way: str):
        """End this range, and all ranges that an error left open inside it."""
        stack = getattr(self._ranges, "stack", [])
        if any(entry[:2] == (name, way) for entry in stack):
            entry = None
            while entry != [name, way]:
                *entry, span = stack.pop()
                span.__exit__(None, None, None)


def find_modules(root: nn.Module) -> dict[str, nn.Module]:
    """{range's name: module} of the layers, and of their attention and MLP where a layer is not compiled."""
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
