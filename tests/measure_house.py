"""Measures the package's size and shape, as a table: python tests/measure_house.py [CHECKOUT] [OTHER CHECKOUT ...]."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean

PACKAGE = "megatron_lite"
ENTRIES = {"training": f"{PACKAGE}.app", "a report": f"{PACKAGE}.cli.report", "a plan": f"{PACKAGE}.cli.plan"}
VERBS = """
    add analyze apply append assert attribute begin build call cast check choose clear clip close collect
    compare compute convert copy count create decode describe end estimate evaluate explain export fill find
    finish fold format forward gather get give guess has import init is iterate join judge keep leave limit list
    load log look make map mark match measure merge name note open order parse pick place plan plot predict
    prepare print put raise read record reduce refuse register release remove render repair report require reset
    resolve restore round run save say scale scan search select send set share show shorten sort split start
    stop store sum take tell to train trim unpack update use validate wait walk warn watch write
"""
MAX_FUNCTION_LINES = 60
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class House:
    """The modules of one checkout, their trees and what each imports of the package, in functions too."""

    def __init__(self, root: Path):
        self.root = root
        self.paths = {self._name(path): path for path in sorted((root / PACKAGE).rglob("*.py"))}
        self.texts = {module: path.read_text(encoding="utf-8") for module, path in self.paths.items()}
        self.trees = {module: ast.parse(text) for module, text in self.texts.items()}
        self.imports = {module: self._find_imports(module) for module in self.trees}
        self.importers = defaultdict(set)
        for module, others in self.imports.items():
            for other in others:
                self.importers[other].add(module)

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def _find_imports(self, module: str) -> set[str]:
        names = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return (names & set(self.paths)) - {module}

    def functions(self) -> list[tuple[str, ast.AST]]:
        nodes = ((module, node) for module, tree in self.trees.items() for node in ast.walk(tree))
        return [(module, node) for module, node in nodes if isinstance(node, FUNCTIONS)]

    def find_reached(self, start: str) -> set[str]:
        """All modules that importing `start` leads to, but empty ones."""
        reached, todo = set(), [start]
        while todo:
            module = todo.pop()
            if module not in reached:
                reached.add(module)
                todo += self.imports.get(module, ())
        return {module for module in reached if self.texts.get(module, "").strip()}

    def find_cycles(self) -> int:
        """Modules that reach themselves."""
        return sum(any(module in self.find_reached(other) for other in self.imports[module]) for module in self.trees)

    def measure_chain(self) -> int:
        """Modules on the longest path of imports."""
        lengths: dict[str, int] = {}

        def measure(module: str, above: frozenset) -> int:
            if module not in lengths:
                below = [measure(other, above | {module}) for other in self.imports[module] if other not in above]
                lengths[module] = 1 + max(below, default=0)
            return lengths[module]

        return max(measure(module, frozenset()) for module in self.trees)

    def count_distant_callers(self) -> tuple[int, int]:
        """Top-level functions that exactly one other file uses and their own does not; and all top-level functions."""
        used = {module: Counter(self._find_names(tree)) for module, tree in self.trees.items()}
        nodes = ((module, node) for module, tree in self.trees.items() for node in tree.body)
        top = [(module, node.name) for module, node in nodes if isinstance(node, FUNCTIONS)]
        once = 0
        for module, name in top:
            others = [other for other in self.importers[module] if used[other][name]]
            once += len(others) == 1 and not used[module][name]
        return once, len(top)

    @staticmethod
    def _find_names(tree: ast.AST) -> list[str]:
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        return names + [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]


def count_lines(paths) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def count_code_and_comments(texts) -> tuple[int, int]:
    """Lines with code (docstrings count as text), and lines with nothing but a comment."""
    code, comments = 0, 0
    for text in texts:
        tree = ast.parse(text)
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        texts = [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        documented = {row for value in texts for row in range(value.lineno, value.end_lineno + 1)}
        rows = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            comments += token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
            if token.type not in NO_CODE:
                rows |= set(range(token.start[0], token.end[0] + 1))
        code += len(rows - documented)
    return code, comments


def measure(root: Path) -> dict[str, str]:
    house, verbs = House(root), set(VERBS.split())
    full = [module for module in house.paths if house.texts[module].strip()]
    functions = house.functions()
    lengths = [node.end_lineno - node.lineno + 1 for _, node in functions]
    code, comments = count_code_and_comments(house.texts.values())
    lines = count_lines(house.paths.values())
    single = [module for module in full if len(house.importers[module]) == 1]
    near = [module for module in single if min(house.importers[module]).rpartition(".")[0] == module.rpartition(".")[0]]
    named = [node.name.strip("_") for _, node in functions if not node.name.startswith("__")]
    once, top = house.count_distant_callers()
    stems = Counter(path.name for path in house.paths.values() if path.name != "__init__.py")
    plans = sum(
        isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Plan"
        for _, node in functions
        for argument in (*node.args.args, *node.args.kwonlyargs)
    )
    ruff = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--check", "."], cwd=root, capture_output=True, text=True, check=False
    )
    return {
        "files": f"{len(house.paths)}",
        "lines (code)": f"{lines:,} ({code:,})",
        "lines of tests": f"{count_lines((root / 'tests').rglob('*.py')):,}",
        "mean file / mean function, lines": f"{lines / len(full):.0f} / {fmean(lengths):.1f}",
        f"functions over {MAX_FUNCTION_LINES} lines": f"{sum(length > MAX_FUNCTION_LINES for length in lengths)}",
        "modules in import cycles": f"{house.find_cycles()}",
        "modules with one importer (in their folder)": f"{len(single)} of {len(full)} ({len(near)})",
        "functions with one caller, in another file": f"{once / top:.0%}",
        "longest chain of imports": f"{house.measure_chain()}",
        "files to read for " + " / ".join(ENTRIES): " / ".join(
            str(len(house.find_reached(e))) for e in ENTRIES.values()
        ),
        "file names in two or more folders": f"{sum(count > 1 for count in stems.values())}",
        "functions that begin with a verb": f"{sum(name.partition('_')[0] in verbs for name in named) / len(named):.0%}",
        "comments on lines of their own": f"{comments:,} ({comments / lines:.1%})",
        "parameters that take the whole Plan": f"{plans}",
        "files that ruff format would change": re.search(r"(\d+) files? would|$", ruff.stdout)[1] or "0",
        "lines and files by folder": "",
        **measure_folders(house),
    }


def measure_folders(house: House) -> dict[str, str]:
    folders = defaultdict(list)
    for path in house.paths.values():
        inside = path.relative_to(house.root / PACKAGE).parts
        folders[inside[0] if len(inside) > 1 else "."].append(path)
    return {f"  {folder}": f"{count_lines(paths):,} in {len(paths)}" for folder, paths in sorted(folders.items())}


if __name__ == "__main__":
    columns = [measure(Path(root).resolve()) for root in sys.argv[1:] or [Path(__file__).parent.parent]]
    rows = dict.fromkeys(name for column in columns for name in column)
    for row in rows:
        print(f"{row:<52}", *(f"{column.get(row, ''):>22}" for column in columns))
