"""The package's files: their syntax trees, imports and places."""

import ast
import functools
import gc
import re
from collections.abc import Iterable
from pathlib import Path

from support.paths import REPO

PACKAGE = REPO / "megatron_lite"


FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parse_file(path: Path) -> ast.Module:
    """The syntax tree of a file, which is parsed once per process.

    Meanwhile nothing is searched for garbage: each search would walk the trees of all files before.
    """
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


def parse_files() -> dict[Path, ast.Module]:
    """The syntax tree of every file of the package."""
    return {path: parse_file(path) for path in FILES}


@functools.cache
def list_nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Every node of a syntax tree, as ast.walk finds them, once per process: the package has more than 800,000."""
    return tuple(ast.walk(tree))


def place(path: Path) -> str:
    """megatron_lite/config/args.py -> config."""
    return find_place(".".join(path.relative_to(PACKAGE).parts).removesuffix(".py"))


def stands_in(path: Path, folder: str) -> bool:
    """Whether a file of the package belongs to a place, or to a folder within one such as analysis/memory.

    "." stands for the files that lie in no folder of the package, "analysis/." for those directly in analysis.
    """
    if folder.endswith("."):
        return path.parent == PACKAGE / folder
    return place(path) == folder or PACKAGE / folder in path.parents


def find_place(name: str) -> str:
    """config.args -> config. The walk is a place of its own: it builds the model, which the rest of the planner does not."""
    return "walk" if name.startswith("planner.walk.") else name.partition(".")[0]


@functools.cache
def imported(tree: ast.AST) -> frozenset[str]:
    """Dotted names of all that is imported, inside functions too; `from a import b` counts as a.b."""
    names = set()
    for node in list_nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return frozenset(names)


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}


def find_module(name: str) -> str | None:
    """The module of the package that `name`, a module or something in one, is or stands in."""
    if name in MODULES:
        return name
    module = name.rpartition(".")[0]
    return module if module in MODULES else None


def reach_modules(starts: Iterable[str]) -> tuple[set[str], set[str]]:
    """Follow imports, late ones within functions included, from some modules on.

    Returns:
        modules of the package, `starts` among them, and dotted names of all else that is imported on the way.
    """
    todo = list(starts)
    seen: set[str] = set()
    outside: set[str] = set()
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imported(parse_files()[MODULES[module]]):
            found = find_module(name)
            if found is not None:
                todo.append(found)
            else:
                outside.add(name)
    return seen, outside


def read_core_files() -> list[Path]:
    """The files of one batch, as docs/architecture.md lists them."""
    text = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## One batch")[1].split("\n## ")[0]
    names = re.findall(r"`([\w/]+\.py)`", table)
    assert len(names) == len(set(names)) > 20
    return [REPO / name if name == "pretrain_gpt.py" else PACKAGE / name for name in names]
