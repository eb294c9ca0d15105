"""Where tensors are held: the attributes, variables and containers through which an object leads to them."""

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

# what lies in these packages is not the user's, and leads everywhere
LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
MAX_OBJECTS = 2_000_000
CONTAINERS: tuple[type[Any], ...] = (list, tuple, deque, set, frozenset)
# of a module of torch: what its dictionaries hold has the name of an attribute
DICTIONARIES_OF_MODULES = ("._parameters", "._buffers", "._modules")
Edges = Iterator[tuple[str, object]]


@dataclass(frozen=True)
class HeldTensor:
    """A tensor, and one of the shortest ways to it."""

    tensor: Tensor
    # "training.logged"; of a tensor in a container, the container's
    holder: str
    # "training.logged[3]"
    path: str


def find_held_tensors(root: object, name: str = "") -> list[HeldTensor]:
    """Find the tensors that an object leads to: by attributes, containers, closures and the globals that functions use.

    No code of these objects runs. Libraries' own globals are not entered.

    Args:
        root: An object, or a function.
        name: What paths begin with; "": with the names of the root's own variables.

    Returns:
        Each tensor once.
    """
    seen = {id(root)}
    waiting: deque[tuple[Any, str, str]] = deque([(root, name, name)])
    found = []
    while waiting and len(seen) < MAX_OBJECTS:
        here, holder, path = waiting.popleft()
        if issubclass(type(here), Tensor):
            found.append(HeldTensor(here, holder, path))
        for edge, child in _list_edges(here):
            if id(child) in seen or _is_opaque(child):
                continue
            seen.add(id(child))
            longer = _join_path(path, edge)
            is_item = edge.startswith("[") and longer.endswith(edge)
            waiting.append((child, holder if is_item else longer, longer))
    return found


def count_nodes(tensors: Iterable[Tensor]) -> int:
    """Count the nodes of autograd's graphs that tensors keep."""
    nodes: set[Node] = set()
    waiting = [one.grad_fn for one in tensors if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return len(nodes)


def _join_path(path: str, edge: str) -> str:
    for dictionary in DICTIONARIES_OF_MODULES:
        if path.endswith(dictionary) and edge.startswith("['"):
            return f"{path.removesuffix(dictionary)}.{edge[2:-2]}"
    return (path + edge).removeprefix(".")


def _is_opaque(child: Any) -> bool:
    """Whether an object leads to no tensor of the user's, or to everything."""
    kind = type(child)
    if kind in (str, bytes, int, float, bool, complex, type(None), types.FrameType, types.CodeType):
        return True
    if issubclass(kind, types.ModuleType):
        return _is_of_library(object.__getattribute__(child, "__dict__").get("__name__"))
    return issubclass(kind, type) and _is_of_library(type.__getattribute__(child, "__dict__").get("__module__"))


def _is_of_library(module: object) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in LIBRARIES


def _list_edges(here: Any) -> Edges:
    """List what an object holds, each with the words by which a program reaches it from there."""
    # by type: asking an object for its class may run code of its own
    kind = type(here)
    if issubclass(kind, dict):
        yield from ((f"[{_name_key(key)}]", value) for key, value in list(dict.items(here)))
    for container in CONTAINERS:
        if issubclass(kind, container):
            yield from ((f"[{place}]", value) for place, value in enumerate(list(container.__iter__(here))))
    if issubclass(kind, types.FunctionType):
        yield from _list_variables(here)
    elif issubclass(kind, types.MethodType):
        yield f".{type(here.__self__).__name__}", here.__self__
        yield "", here.__func__
    elif issubclass(kind, partial):
        yield "", here.func
        yield "", here.args
        yield "", here.keywords
    elif issubclass(kind, types.GeneratorType) and here.gi_frame is not None:
        yield from _name_attributes(here.gi_frame.f_locals)
    elif issubclass(kind, type):
        yield from _name_attributes(type.__getattribute__(here, "__dict__"))
    else:
        yield from _list_attributes(here)


def _name_key(key: object) -> str:
    return repr(key) if type(key) in (str, int, bool) else type(key).__name__


def _name_attributes(values: Mapping[str, object]) -> Edges:
    return ((f".{name}", value) for name, value in list(values.items()))


def _list_variables(function: types.FunctionType) -> Edges:
    """List what a function holds: variables around it, defaults, its attributes, and the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "'s default", default
    yield from ((f".{function.__name__}.{name}", value) for name, value in list(vars(function).items()))
    if _is_of_library(function.__module__):
        return
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        named = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        yield from _name_attributes(named)


def _list_attributes(here: Any) -> Edges:
    """List the attributes of an object, those in slots too, and its class."""
    try:
        attributes = object.__getattribute__(here, "__dict__")
    except AttributeError:
        attributes = {}
    if isinstance(attributes, dict):
        yield from _name_attributes(attributes)
    kind = type(here)
    for parent in kind.__mro__:
        if _is_of_library(parent.__module__):
            continue
        for name, member in list(parent.__dict__.items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(here, kind)
                except AttributeError:  # not assigned yet
                    continue
    yield "", kind
