"""One meaning for each name: a constant is defined once, and has a name that no other constant has."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from support.package_files import PACKAGE, parse_files

CONSTANT = re.compile(r"[A-Z][A-Z0-9_]+")


def is_number(value: ast.expr) -> bool:
    """Whether an expression is a number, or arithmetic of numbers and of units such as MIB."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return all(is_number(side) or isinstance(side, ast.Name) for side in (value.left, value.right))
    return False


def list_constants() -> dict[str, dict[Path, ast.expr]]:
    """The value of each constant at the top of a file, by name and file."""
    found: dict[str, dict[Path, ast.expr]] = defaultdict(dict)
    for path, tree in parse_files().items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id) and getattr(node, "value", None):
                    found[target.id][path.relative_to(PACKAGE)] = node.value
    return found


def find_ambiguous(constants: dict[str, dict[Path, ast.expr]]) -> dict[str, list[str]]:
    """Names in several files of which one is a number, as limits are, or two have the same value. {name: files}"""
    ambiguous = {}
    for name, values in constants.items():
        texts = [ast.unparse(value) for value in values.values()]
        is_said_twice = len(set(texts)) < len(texts)
        if len(values) > 1 and (is_said_twice or any(map(is_number, values.values()))):
            ambiguous[name] = sorted(map(str, values))
    return ambiguous


def test_a_constant_is_defined_once():
    assert find_ambiguous(list_constants()) == {}


def test_both_kinds_of_ambiguity_would_be_seen():
    def value(text: str) -> ast.expr:
        return ast.parse(text, mode="eval").body

    constants = {
        "MIN_STEPS": {Path("a.py"): value("3"), Path("b.py"): value("2 * MIB")},
        "END": {Path("a.py"): value("'--'"), Path("b.py"): value("'--'")},
        "KINDS": {Path("a.py"): value("('a',)"), Path("b.py"): value("{'b': 1}")},
    }
    assert set(find_ambiguous(constants)) == {"MIN_STEPS", "END"}


def list_classes() -> dict[str, list[str]]:
    """The files of each class at the top of a file that others may import, by name."""
    found = defaultdict(list)
    for path, tree in parse_files().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    return found


def test_a_class_name_has_one_meaning():
    assert {name: files for name, files in list_classes().items() if len(files) > 1} == {}
