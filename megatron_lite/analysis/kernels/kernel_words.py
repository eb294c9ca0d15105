"""What a kernel or an operator is for, read from its name: the first row of a table that matches decides.

Kernel names are no interface: they change with each release of a library and each compiler. What no row knows is
"other", which a report shows as such. The tables are in kernel_words.tsv.
"""

import re
from functools import lru_cache
from pathlib import Path

from megatron_lite.analysis.kernels.kernel_results import Role

OTHER = "(other)"  # the key of a table's row for what no key names
LONGEST = 2000  # characters of a name that are looked at: C++ names may repeat their template arguments for pages
MAX_NAMES = 2**16  # whose answers are kept: asked again for each step, phase and rank


def read_tables() -> dict[str, list[tuple[str, str]]]:
    """{table: [(key, value)]} of kernel_words.tsv."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for line in (Path(__file__).parent / "kernel_words.tsv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            table, key, value = line.split("\t")
            tables.setdefault(table, []).append((key, value))
    return tables


TABLES = read_tables()
WORDS = {name: dict(pairs) for name, pairs in TABLES.items()}
FORMATS = WORDS["formats"]
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


def _any_of(patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns.split()))


_COMMUNICATION, _COMPILED = (_any_of(WORDS["patterns"][name]) for name in ("communication", "compiled"))
_KERNELS, _OPERATORS = (
    [(Role[role], _any_of(patterns)) for role, patterns in TABLES[name]] for name in ("kernel roles", "operator roles")
)
_COMPOSED = sorted(WORDS["operators"]["composed"].split(), key=len, reverse=True)
_KNOWN_OPERATOR = re.compile(rf"(?:{'|'.join(_COMPOSED)})(?=_|$)")
_ENGINE = "autograd::engine::evaluate_function: "


@lru_cache(maxsize=MAX_NAMES)
def is_communication(name: str) -> bool:
    """Is it a kernel that moves data between processes, or a backend's span for one (gloo:all_reduce)?"""
    lowered = name[:LONGEST].lower()
    return not _COMPILED.search(lowered) and bool(_COMMUNICATION.search(lowered))


def is_wait(name: str) -> bool:
    """Is it an operator in which the host does nothing until a collective is through?"""
    return name in ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")


@lru_cache(maxsize=MAX_NAMES)
def get_kernel_role(name: str) -> Role:
    """The role of device work (kernel, memcpy, memset) by its name as the profiler wrote it."""
    lowered = name[:LONGEST].lower()
    if _COMPILED.search(lowered):
        return Role.FUSED
    if _COMMUNICATION.search(lowered):
        return Role.COMMUNICATION
    return next((role for role, pattern in _KERNELS if pattern.search(lowered)), Role.OTHER)


@lru_cache(maxsize=MAX_NAMES)
def get_operator_role(name: str) -> Role:
    """The role of a host operator or autograd node. Views and bookkeeping are OTHER: they move no data."""
    bare = bare_operator(name)
    return next((role for role, pattern in _OPERATORS if pattern.search(bare)), Role.OTHER)


def bare_operator(name: str) -> str:
    """'aten::add_' -> 'add', 'autograd::engine::evaluate_function: NllLossBackward0' -> 'nll_loss'."""
    bare = name[:LONGEST].removeprefix(_ENGINE)
    bare = re.sub(r"^(aten|prims|torch::autograd)::", "", bare)
    if re.fullmatch(r"\w+Backward\d*", bare):
        bare = re.sub(r"Backward\d*$", "", bare)
        bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare)
    bare = re.sub(r"(?<=\w)_backward(_data|_input|_weight)?$", "", bare.lower())
    return bare.rstrip("_") or bare


def fused_operators(text: str) -> list[str]:
    """'_to_copy_add_native_layer_norm' -> ['_to_copy', 'add', 'native_layer_norm']. Unknown words stand alone."""
    found, rest = [], text
    while rest and (match := _KNOWN_OPERATOR.match(rest) or re.match(r"_?[^_]*", rest)):
        word = match[0]
        found.append(word)
        rest = rest[max(1, len(word)) :].removeprefix("_")
    return [word for word in found if word.strip("_")]
