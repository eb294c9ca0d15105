"""English that tests pin: sentences in the text of asserts, which a pass over the program's wording would break."""

import ast
import re
from collections.abc import Iterator

from support.package_files import list_nodes

THREE_WORDS = re.compile(r"(?<![\w/.=<-])[A-Za-z][a-z']*,? [a-z']+,? [a-z']+(?![\w/=-])")
# Methods that compare a text with their argument; arguments of other calls are what the test hands in.
COMPARING = {"startswith", "endswith", "count", "index", "find", "split", "partition"}


def holds_english(node: ast.AST) -> bool:
    """Whether a text, or one with values in it, has three English words in a row."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return any(THREE_WORDS.search(text) for text in texts)


def find_texts(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Texts of an expression that are compared, rather than keys of a table or arguments of what is tested."""
    if isinstance(node, (ast.Constant, ast.JoinedStr)):
        yield node
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Subscript):
        children = [node.value]
    if isinstance(node, ast.Dict):
        children = node.values
    if isinstance(node, ast.Call):
        is_comparing = isinstance(node.func, ast.Attribute) and node.func.attr in COMPARING
        inner = [each for each in node.args if is_comparing or not isinstance(each, (ast.Constant, ast.JoinedStr))]
        children = [node.func, *inner]
    for child in children:
        yield from find_texts(child)


def find_pinned(tree: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Texts with three English words in a row that the asserts of a file compare with."""
    for node in list_nodes(tree):
        if isinstance(node, ast.Assert):
            yield from filter(holds_english, find_texts(node.test))


def count_pinned(tree: ast.AST) -> int:
    """The asserts of a file that compare with English of three or more words."""
    asserts = (node for node in list_nodes(tree) if isinstance(node, ast.Assert))
    return sum(any(map(holds_english, find_texts(node.test))) for node in asserts)
