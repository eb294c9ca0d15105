"""Public functions with several parameters say what each of them is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.package_files import PACKAGE, list_nodes, parse_files, stands_in
from support.paths import REPO

MANY = 3  # parameters: of fewer, names and types say enough
# Folders whose functions do. The list only grows: document a folder's, then add it.
DONE = (
    "analysis/.",
    "analysis/compare",
    "analysis/equality",
    "analysis/findings",
    "analysis/graph",
    "analysis/kernels",
    "analysis/memory",
    "analysis/ranks",
    "analysis/run",
    "analysis/time",
    "analysis/timeline",
    "analysis/trace",
    "checkpoint",
    "cli",
    "config",
    "convert",
    "cpu_kernels",
    "data",
    "instruments",
    "model",
    "optim",
    "parallel",
    "train",
    "watch",
)
SAME = re.compile(r"arguments(?: and result)? are those of|arguments are \w+'", re.IGNORECASE)
ENTRY = re.compile(r"^ {4}\*{0,2}(\w+): \S", re.MULTILINE)  # of a parameter in "Args:"
FRAGMENT = re.compile(  # a description that continues the name before it
    r"^ {4}\w+: (?:Of|That|Those|As|Its|It|They|Their|With|By|For|From|On|In|To|Which|See|The same)\b", re.MULTILINE
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def list_parameters(function: Function) -> list[str]:
    """Names of a function's parameters, without self and cls, and those that it ignores."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def is_public(function: Function) -> bool:
    """Whether others call it; an overload has its docstring where its code is."""
    is_overload = any(ast.unparse(decorator).endswith("overload") for decorator in function.decorator_list)
    return not is_overload and (function.name == "__init__" or not function.name.startswith("_"))


def find_public(tree: ast.AST, owner: ast.ClassDef | None = None) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Public functions, and methods of public classes, with their class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from find_public(node, node)
        if isinstance(node, Function) and is_public(node):
            yield node, owner


def read_section(docstring: str) -> str:
    """What stands under "Args:"."""
    _, _, rest = docstring.partition("Args:\n")
    return re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)[0]


def read_arguments(docstring: str) -> set[str]:
    """Names under "Args:"."""
    return set(ENTRY.findall(read_section(docstring)))


def find_undocumented(tree: ast.AST) -> list[str]:
    """Public functions of a file that leave a parameter out, as "line: function: parameters"."""
    wrong = []
    for function, owner in find_public(tree):
        names = list_parameters(function)
        if len(names) < MANY:
            continue
        docstring = ast.get_docstring(function) or ""
        if owner is not None and function.name == "__init__":
            docstring += "\n\n" + (ast.get_docstring(owner) or "")
        if SAME.search(docstring):
            continue
        missing = [name for name in names if name not in read_arguments(docstring)]
        if missing:
            wrong.append(f"{function.lineno}: {function.name}: {', '.join(missing)}")
    return wrong


def find_fragments(tree: ast.AST) -> list[str]:
    """Descriptions of parameters that do not stand alone."""
    kinds = (ast.ClassDef, *Function.__args__)
    docstrings = [ast.get_docstring(node) or "" for node in list_nodes(tree) if isinstance(node, kinds)]
    return [found.strip() for docstring in docstrings for found in FRAGMENT.findall(read_section(docstring))]


def parse_done() -> dict[Path, ast.Module]:
    """The files of the folders that are done, and those in no folder."""
    return {
        path: tree
        for path, tree in parse_files().items()
        if path.parent == PACKAGE or any(stands_in(path, folder) for folder in DONE)
    }


def test_parameters_are_documented():
    files = parse_done().items()
    assert [f"{path.relative_to(REPO)}:{line}" for path, tree in files for line in find_undocumented(tree)] == []


def test_descriptions_of_parameters_stand_alone():
    files = parse_done().items()
    assert [f"{path.relative_to(REPO)}: {line}" for path, tree in files for line in find_fragments(tree)] == []


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("path: Of the file.", True),
        ("rank: Its number.", True),
        ("path: Path of the file.", False),
        ("of: Offset of the first row.", False),
    ],
)
def test_each_kind_of_fragment_would_be_seen(entry, wrong):
    code = f'def f(a):\n  """Does it.\n\n  Args:\n      {entry}\n  """'
    assert bool(find_fragments(ast.parse(code))) is wrong


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("def f(a, b, c):\n  '''Does it.'''", ["1: f: a, b, c"]),
        ("def f(a, b, c): pass", ["1: f: a, b, c"]),
        ("def f(a, b, *, c):\n  '''Does it.\n\n  Args:\n      a: One.\n      b: Two,\n          in lines.\n  '''", ["1: f: c"]),
        ("class A:\n  def __init__(self, a, b, c): pass", ["2: __init__: a, b, c"]),
        ("def f(a, b): pass", []),
        ("def f(a, b, _c): pass", []),
        ("def _f(a, b, c): pass", []),
        ("class _A:\n  def f(self, a, b, c): pass", []),
        ("def f(a, b, c):\n  '''Does it. The arguments are those of g.'''", []),
        ("def f(a, b, c):\n  '''Does it.\n\n  Args:\n      a: One.\n      b: Two.\n      c: Three.\n  '''", []),
        ("class A:\n  '''Is it.\n\n  Args:\n      a: 1\n      b: 2\n      c: 3\n  '''\n  def __init__(self, a, b, c): pass", []),
    ],
)  # fmt: skip
def test_each_kind_of_function_would_be_seen(code, wrong):
    assert find_undocumented(ast.parse(code)) == wrong
