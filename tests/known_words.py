"""Makes megatron_lite/bundle/known_words.txt: words that names in PyTorch, CUDA's kernels and this package are made of.

    python tests/known_words.py TRACES

A word counts if it is part of an identifier in at least three files of the installed PyTorch, in five of other public
packages, of an identifier or text in this package, of its tables, of the kernels' names that its tests know, or of the
names of operators and kernels in public traces under the folder TRACES. Comments and documentation are not looked at:
people's names stand in them.
"""

import argparse
import ast
import gzip
import importlib.util
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.paths import REPO, TESTS

from megatron_lite.bundle.known_words import MANGLED, RUN, WORDS_FILE, is_known, is_plain, read_known_words, split_run

IDENTIFIER = re.compile(r"[A-Za-z0-9_]+")
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
C_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"')
# package: in how many of its files a word has to be
MIN_FILES = {"torch": 3, "transformers": 5, "accelerate": 3, "lightning": 3, "megatron": 3, "numpy": 3}
MIN_FILES |= {"torch.utils": 1, "torch.nn": 1, "torch.optim": 1}
SOURCES = (".py", ".pyi", ".h", ".hpp", ".cuh")
OF_LIBRARIES = ("cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver")
# as torch 1.8 to 1.10 call them
OF_LIBRARIES += ("Operator", "Kernel", "Memcpy", "Memset", "Runtime")
LINE_LETTERS = 118
TABLES = ("*.tsv", "*.txt")


def list_identifiers(path: Path) -> Iterator[str]:
    """The identifiers of a file of Python or C++."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix not in (".py", ".pyi"):
        yield from IDENTIFIER.findall(C_TEXT.sub(" ", C_COMMENT.sub(" ", text)))
        return
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.string
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return


def list_texts(path: Path) -> Iterator[str]:
    """The texts of a Python file that are no documentation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def split_words(texts: Iterator[str]) -> set[str]:
    """The words of identifiers and texts, in small letters."""
    return {
        word.lower()
        for text in texts
        for run in re.findall(r"[A-Za-z0-9]+", text)
        for word in split_run(run)
        if word.isalpha() and len(word) > 1
    }


def list_package_words(package: str, min_files: int) -> Iterator[str]:
    """Words of an installed package's identifiers and files."""
    spec = importlib.util.find_spec(package)
    counted: Counter[str] = Counter()
    for folder in spec.submodule_search_locations if spec else ():
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in SOURCES:
                counted.update(split_words(list_identifiers(path)) | split_words(iter([path.stem])))
    yield from (word for word, files in counted.items() if files >= min_files)


def list_trace_names(folder: Path) -> Iterator[str]:
    """Names of operators, kernels and calls in traces."""
    for path in sorted(folder.rglob("*.pt.trace.json.gz")):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            if event.get("cat") in OF_LIBRARIES:
                yield event["name"]


def collect_words(traces: Path) -> list[str]:
    """All words, sorted."""
    words = split_words(list_trace_names(traces))
    for package_name, min_files in MIN_FILES.items():
        words |= set(list_package_words(package_name, min_files))
    package = REPO / "megatron_lite"
    for path in package.rglob("*.py"):
        words |= split_words(list_identifiers(path)) | split_words(list_texts(path))
    tables = [path for pattern in TABLES for path in package.rglob(pattern) if path != WORDS_FILE]
    for path in [*tables, TESTS / "analysis/kernel_names.tsv"]:
        lines = path.read_text(encoding="utf-8").splitlines()
        words |= split_words(line for line in lines if not line.startswith("#"))
    # what is known without the runs that an earlier list had
    WORDS_FILE.write_text(fold(sorted(words)), encoding="utf-8")
    for cached in (read_known_words, is_known, is_plain):
        cached.cache_clear()
    names = [*list_trace_names(traces), *read_kernel_names(), *list_looked_for(), *read_processors()]
    return sorted(words | list_other_runs(names))


def list_other_runs(names: list[str]) -> set[str]:
    """Letters and digits in names of kernels that are of no known form, as they are."""
    runs = {run for name in names if not MANGLED.match(name) for run in RUN.findall(name)}
    return {run for run in runs if run.isascii() and not is_known(run)}


def read_kernel_names() -> Iterator[str]:
    """The kernels' names that tests know."""
    for line in (TESTS / "analysis/kernel_names.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        yield line.partition("\t")[0].encode().decode("unicode_escape")


def list_looked_for() -> Iterator[str]:
    """What the reader of kernels' names looks for in them."""
    folder = REPO / "megatron_lite/analysis/kernels"
    for path in folder.glob("*.py"):
        yield from list_texts(path)
    for path in folder.glob("*.tsv"):
        yield from (line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))


def read_processors() -> Iterator[str]:
    """The names of GPUs in the package's table."""
    for line in (REPO / "megatron_lite/formats/processors.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield line.partition("\t")[0]


def fold(words: list[str]) -> str:
    """The words in lines."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > LINE_LETTERS:
            lines.append("")
        lines[-1] += f"{word} "
    return "".join(f"{line.strip()}\n" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    WORDS_FILE.write_text(fold(collect_words(parser.parse_args().traces)), encoding="utf-8")
