"""The arithmetic that launch scripts ask `python -c` for, computed without running anything."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

OPERATORS: dict[type[ast.operator], Callable[[float, float], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _calculate_power(base, exponent),
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    "int": int,
    "float": float,
    "round": round,
    "max": max,
    "min": min,
    "abs": abs,
    "sum": sum,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
    "math.log": math.log,
    "ceil": math.ceil,
    "floor": math.floor,
    "sqrt": math.sqrt,
}
MAX_RESULT = 1e30
MAX_EXPONENT = 64


def calculate(program: str, arguments: list[str]) -> str:
    """Calculate what a program of assignments and print(...) of arithmetic prints. ValueError for any other."""
    names: dict[str, object] = {}
    lines = []
    for statement in ast.parse(program.strip()).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            names[statement.targets[0].id] = _evaluate(statement.value, names, arguments)
            continue
        values = [_evaluate(value, names, arguments) for value in _read_print(statement)]
        lines.append(" ".join(map(str, values)) + "\n")
    return "".join(lines)


def _read_print(statement: ast.stmt) -> list[ast.expr]:
    """The arguments of a statement that is print(...). ValueError for any other."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.keywords:
        raise ValueError
    if not isinstance(call.func, ast.Name) or call.func.id != "print":
        raise ValueError
    return call.args


def _evaluate(node: ast.expr, names: Mapping[str, object], arguments: list[str]) -> object:
    def inner(part: ast.expr) -> object:
        return _evaluate(part, names, arguments)

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str)):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_check_number(inner(node.operand))
    if isinstance(node, ast.BinOp):
        left = _check_number(inner(node.left))
        right = _check_number(inner(node.right))
        return _check_number(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and not node.keywords:
        return FUNCTIONS[ast.unparse(node.func)](*map(inner, node.args))
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.argv":
        at = inner(node.slice)
        return arguments[at - 1] if isinstance(at, int) and 0 < at <= len(arguments) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(str, map(inner, node.values)))
    if isinstance(node, ast.FormattedValue):
        specification = str(inner(node.format_spec)) if node.format_spec else ""
        return _format(inner(node.value), specification)
    raise ValueError


def _format(value: object, specification: str) -> str:
    """ValueError for a width that could fill memory."""
    if re.search(r"\d{3}", specification):
        raise ValueError
    return format(value, specification)


def _calculate_power(base: float, exponent: float) -> object:
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError
    return operator.pow(base, exponent)


def _check_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > MAX_RESULT:
        raise ValueError
    return value
