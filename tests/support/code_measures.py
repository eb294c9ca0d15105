"""How hard code is to read, counted on its syntax tree: what tests/house limits and tests/measure_house.py prints."""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from support.package_files import list_nodes, parse_file

MAX_COLUMNS = 120
LARGE_NODES = 400  # a function with more is hard to review
HUGE_NODES = 600  # and nobody reviews one with more
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

NESTED_CONDITION = "nested conditional expression"
SEVERAL_VALUES = "assignment of several values"
BOOLEAN_ARITHMETIC = "arithmetic with booleans"


@dataclass
class Measures:
    """Counts over one or more files.

    code_lines are those with code: neither blank, nor with only a comment, nor part of a docstring. comment_lines hold
    nothing but a comment.
    """

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    long_lines: int = 0
    nodes: int = 0
    functions: int = 0
    nested_conditions: int = 0
    several_values: int = 0
    boolean_arithmetic: int = 0
    large_functions: list[tuple[int, str]] = field(default_factory=list)  # (nodes, file:line: name)

    def add(self, other: "Measures") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def nodes_per_code_line(self) -> float:
        return self.nodes / max(self.code_lines, 1)

    @property
    def huge_functions(self) -> list[tuple[int, str]]:
        return [function for function in self.large_functions if function[0] > HUGE_NODES]

    @property
    def comment_share(self) -> float:
        return self.comment_lines / max(self.lines, 1)


def count_nodes(tree: ast.AST) -> int:
    return sum(1 for _ in ast.walk(tree))


def find_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, those inside functions too."""
    return (node for node in list_nodes(tree) if isinstance(node, FUNCTIONS))


def find_folded(tree: ast.AST) -> list[str]:
    """Statements that hold several ideas: conditions within conditions, two assignments in one, sums of truths."""
    found = []
    for node in list_nodes(tree):
        if isinstance(node, ast.IfExp):
            inner = [other for other in ast.walk(node) if isinstance(other, ast.IfExp) and other is not node]
            found += [NESTED_CONDITION] if inner else []
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            found += [SEVERAL_VALUES] if isinstance(node.targets[0], ast.Tuple) else []
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            terms = [node.left, node.right]
            found += [BOOLEAN_ARITHMETIC] if any(isinstance(term, ast.Compare) for term in terms) else []
    return found


def find_docstring_rows(tree: ast.AST) -> set[int]:
    """Numbers of the lines that texts which stand alone take, docstrings above all."""
    rows = set()
    for node in list_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            rows.update(range(node.lineno, node.end_lineno + 1))
    return rows


def count_code_and_comments(text: str, tree: ast.AST) -> tuple[int, int]:
    """(lines with code, lines with nothing but a comment) of a file; a docstring is neither."""
    comments = 0
    rows = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            comments += 1
        if token.type not in NO_CODE:
            rows.update(range(token.start[0], token.end[0] + 1))
    return len(rows - find_docstring_rows(tree)), comments


def measure_file(path: Path, name: str) -> Measures:
    """Counts of one file; `name` is what its large functions are listed under."""
    text = path.read_text(encoding="utf-8")
    tree = parse_file(path)
    lines = text.splitlines()
    code_lines, comment_lines = count_code_and_comments(text, tree)
    folded = find_folded(tree)
    functions = list(find_functions(tree))
    sizes = [(count_nodes(function), f"{name}:{function.lineno}: {function.name}") for function in functions]
    return Measures(
        files=1,
        lines=len(lines),
        code_lines=code_lines,
        comment_lines=comment_lines,
        long_lines=sum(len(line) > MAX_COLUMNS for line in lines),
        nodes=len(list_nodes(tree)),
        functions=len(functions),
        nested_conditions=folded.count(NESTED_CONDITION),
        several_values=folded.count(SEVERAL_VALUES),
        boolean_arithmetic=folded.count(BOOLEAN_ARITHMETIC),
        large_functions=[size for size in sizes if size[0] > LARGE_NODES],
    )


def measure_folders(package: Path) -> dict[str, Measures]:
    """Counts of each folder of a package, subfolders included; its own files stand under "."."""
    folders: dict[str, Measures] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        folder = inside.parts[0] if len(inside.parts) > 1 else "."
        folders.setdefault(folder, Measures()).add(measure_file(path, inside.as_posix()))
    return dict(sorted(folders.items()))
