"""How kernels and profilers spell number formats, and the vocabularies of kernels' names (kernel_words.tsv)."""

import re
from pathlib import Path


def read_tables() -> dict[str, list[tuple[str | None, str]]]:
    """{table: [(key, value)]} of kernel_words.tsv; a key of None stands for all others."""
    tables: dict[str, list[tuple[str | None, str]]] = {}
    for line in (Path(__file__).parent / "kernel_words.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            table, key, value = line.split("\t")
            tables.setdefault(table, []).append((None if key == "(other)" else key, value))
    return tables


TABLES = read_tables()
WORDS = {name: dict(pairs) for name, pairs in TABLES.items()}
FORMATS, ACCUMULATORS = WORDS["formats"], WORDS["accumulators"]
MIXED = ("fp8", "bf16", "fp16")  # what tensor cores are for
# As torch writes the type of an operator's argument -> (format, bytes of an element).
TENSOR_TYPES = {name: (value.split()[0], int(value.split()[1])) for name, value in WORDS["tensor types"].items()}
FORMAT_BYTES = {name: size for name, size in TENSOR_TYPES.values()} | {"fp16/bf16": 2, "tf32": 4}
_CPP_TYPE = re.compile(r"(?<![A-Za-z0-9_])(?:\w+::)*(" + "|".join(WORDS["C++ types"]) + r")(?![A-Za-z0-9_])")


def template_format(name: str) -> str:
    """The narrowest number format among a C++ name's template arguments: what the operands most likely have; '' without any."""
    arguments = name.partition("<")[2]
    formats = [WORDS["C++ types"][one] for one in _CPP_TYPE.findall(arguments.rpartition(">(")[0] or arguments)]
    return next((one for one in (*MIXED, "tf32") if one in formats), formats[0] if formats else "")
