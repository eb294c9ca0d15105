"""Layers that have experts, or a window of attention: --moe-layer-freq, --window-attn-skip-freq."""

import ast
import itertools
from collections.abc import Iterable

MAX_PATTERN_LAYERS = 100_000


def parse_expert_layers(frequency: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts.

    Args:
        frequency: A number N, for the first of every N layers, or a pattern with a 0 or 1 for each layer, as a Python
            expression of lists: "([0]*3+[1]*13)".
        num_layers: Number of layers of the model.

    Raises:
        ValueError: It is neither, or its pattern has another number of layers; the text says which.
    """
    value = _read(frequency)
    if isinstance(value, int):
        return tuple(layer % value == 0 for layer in range(num_layers))
    return _read_pattern(value, num_layers)


def write_layer_pattern(layers: Iterable[bool]) -> str:
    """The pattern of layers, as above: "([0]*3+[1]*13)"."""
    runs = [f"[{int(value)}]*{len(list(run))}" for value, run in itertools.groupby(layers)]
    return f"({'+'.join(runs)})"


def parse_window_layers(frequency: str | None, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer attends to a window only.

    Args:
        frequency: A number N, for all but the last of every N layers, or a pattern as above; None for all layers.
        num_layers: Number of layers of the model.

    Raises:
        ValueError: As above.
    """
    if frequency is None:
        return (True,) * num_layers
    value = _read(frequency)
    if isinstance(value, int):
        return tuple(number % value != 0 for number in range(1, num_layers + 1))
    return _read_pattern(value, num_layers)


def _read(frequency: str) -> int | list[int]:
    """A number, at least 1, or a list of numbers."""
    try:
        value = _evaluate(ast.parse(frequency.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("is neither a number nor a pattern such as ([0]*3+[1]*13)") from None
    if isinstance(value, int) and value < 1:
        raise ValueError("must be at least 1")
    return value


def _read_pattern(value: list[int], num_layers: int) -> tuple[bool, ...]:
    """Read a pattern of zeros and ones. ValueError unless it has one for each layer."""
    if set(value) - {0, 1}:
        raise ValueError("has other numbers than 0 and 1")
    if len(value) != num_layers:
        raise ValueError(f"has {len(value)} layers, not those of --num-layers {num_layers}")
    return tuple(one == 1 for one in value)


def _evaluate(node: ast.expr) -> int | list[int]:
    """The value of an expression of numbers, lists of numbers, their sums and multiples; nothing else is evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        elements = [_evaluate(element) for element in node.elts]
        return [element for element in elements if isinstance(element, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            if len(left) * right > MAX_PATTERN_LAYERS:
                raise ValueError(f"has more than {MAX_PATTERN_LAYERS} layers")
            return left * right
    raise ValueError("is neither a number nor a pattern such as ([0]*3+[1]*13)")
