"""Steps of loops that no optimizer of torch updates:
found by what becomes of gradients and weights between two backward passes."""

import weakref

import torch

from megatron_lite.units import counted

MAX_NODES = 500  # of the graph, which are looked at for a weight
MIN_PASSES = 3  # before it is said that no step was seen
State = tuple[object, ...]  # what an update changes of a weight
NOT_FOUND: State = ()  # nothing is known of the weights of a pass
PLAIN = (torch.Tensor, torch.nn.Parameter)  # others, such as DTensor, may have to ask other ranks for a value


class HandUpdates:
    """Knows whether a loop has updated its weights since the last backward pass.

    Gradients that are added up over several passes stay as backward left them. An update that is written by hand drops
    or zeroes them, or makes other weights of them. One weight stands for all; it is found in the graph of what backward
    is called on.
    """

    def __init__(self) -> None:
        self._weight: weakref.ref[torch.Tensor] | None = None
        # what the last pass left of the weight and its gradient; None before the first pass
        self._left: State | None = None
        self._before: State | None = None  # the same as the running pass found it
        self._are_new = False  # each pass has weights of its own: it left those of the one before as they were

    def is_updated(self) -> bool:
        """Have weights been updated since the last pass? False before the first one."""
        if self._left is None or self._left == NOT_FOUND:
            return False
        weight = self._get_weight()
        return self._are_new or weight is None or _describe(weight) != self._left

    def begin_step(self) -> None:
        """Forget what the passes before it left: it tells nothing of the step that begins."""
        self._left = None

    def begin_pass(self, tensors: object, inputs: object = None) -> None:
        """Find the weight that stands for all, and note its state before the pass.

        Args:
            tensors: what backward is called on.
            inputs: the weights, where the loop names them.
        """
        weight = self._get_weight()
        given = _flatten(inputs)
        if given:
            weight = given[0]
        elif weight is None or self._are_new:
            weight = _find_weight(_flatten(tensors))
        self._weight = None if weight is None else weakref.ref(weight)
        self._before = None if weight is None else _describe(weight)

    def end_pass(self, gives_gradients: bool = False) -> None:
        """Note the state of the weight after a pass.

        Args:
            gives_gradients: the pass returned them, so that the weight itself stays as it was.
        """
        weight = self._get_weight()
        self._left = NOT_FOUND if weight is None else _describe(weight)
        if weight is not None and not gives_gradients and self._left == self._before:
            self._are_new = True

    def _get_weight(self) -> torch.Tensor | None:
        return None if self._weight is None else self._weight()


def describe_counting(passes: int, steps: int) -> str:
    """Describe how steps were counted in a loop in which no optimizer of torch stepped; '' where too little was seen.

    Args:
        passes: calls of backward.
        steps: steps that ended where weights were updated by hand.
    """
    if max(passes, steps) < MIN_PASSES:
        return ""
    if steps:
        return (
            f"no torch.optim optimizer stepped: {counted(steps, 'step')} counted from the weight updates between "
            "backward passes"
        )
    by_calls = "call megatron_lite.Profiler's step() to count steps"
    return f"no torch.optim optimizer stepped, and no weight update was seen in {passes} backward passes; {by_calls}"


def _flatten(tensors: object) -> list[torch.Tensor]:
    """List the tensors among what a loop hands to torch.autograd: one, or several."""
    given = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    return [one for one in given if isinstance(one, torch.Tensor)]


def _find_weight(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Find the first parameter of a module in the graph, else the first leaf; None within MAX_NODES for neither."""
    waiting = [one.grad_fn for one in tensors if one.grad_fn is not None]
    seen = set(waiting)
    leaf = None
    for _ in range(MAX_NODES):
        if not waiting:
            break
        node = waiting.pop()
        found: object = getattr(node, "variable", None)
        if isinstance(found, torch.nn.Parameter):
            return found
        if leaf is None and isinstance(found, torch.Tensor) and found.is_leaf:
            leaf = found
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return leaf


def _describe(weight: torch.Tensor) -> State:
    """Describe the state of a weight that an update changes. A `.data` counts no versions: on CPUs an entry of the
    values is compared, too."""
    gradient = weight.grad
    of_weight = (weight._version, _get_entry(weight), id(gradient))
    if gradient is None:
        return of_weight
    return (*of_weight, gradient._version, _get_entry(gradient))


def _get_entry(tensor: torch.Tensor) -> str:
    """Read one value as text; "" where reading it costs more than a look, or where its memory is released."""
    is_readable = tensor.is_cpu and tensor.layout is torch.strided and tensor.numel() > 0 and type(tensor) in PLAIN
    if not is_readable:
        return ""
    # fully_shard releases gathered weights after each layer: the tensor remains, without memory
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + 1) * tensor.element_size():
        return ""
    # as text: NaN equals itself
    first = (0,) * tensor.dim()
    return str(tensor.detach()[first].item())
