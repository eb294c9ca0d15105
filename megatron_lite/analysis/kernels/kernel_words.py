"""What a kernel or an operator is for, read from its name: the first row of a table that matches decides.

Kernel names are no interface: they change with each release of a library and each compiler. What no row knows is
"other", which a report shows as such. The tables are in kernel_words.tsv.

The main word of a kernel's name decides. It stands in the function's own name; namespaces and template arguments around
it tell what was fused into the function, or what it works on, and are asked only where the function's name says
nothing.
"""

import os
import re
from functools import cache, lru_cache
from pathlib import Path

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.errors import UserError
from megatron_lite.shared_files import read_foreign_text
from megatron_lite.variables import KERNEL_NAMES

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
MIXED = ("fp4", "fp8", "bf16", "fp16")  # what tensor cores are for, narrowest first
# As torch writes the type of an operator's argument -> (format, bytes of an element).
TENSOR_TYPES = {name: (value.split()[0], int(value.split()[1])) for name, value in WORDS["tensor types"].items()}
FORMAT_BYTES = {name: size for name, size in TENSOR_TYPES.values()} | {"fp16/bf16": 2, "tf32": 4}
_CPP_TYPE = re.compile(r"(?<![A-Za-z0-9_])(?:\w+::)*(" + "|".join(WORDS["C++ types"]) + r")(?![A-Za-z0-9_])")


def template_format(name: str) -> str:
    """The narrowest number format among a C++ name's template arguments: what the operands most likely have;
    '' without any."""
    arguments = name.partition("<")[2]
    formats = [WORDS["C++ types"][one] for one in _CPP_TYPE.findall(arguments.rpartition(">(")[0] or arguments)]
    return next((one for one in (*MIXED, "tf32") if one in formats), formats[0] if formats else "")


_WRITTEN = re.compile(r"(?<![a-z0-9])[aw]?(" + "|".join(sorted(FORMATS, key=len, reverse=True)) + r")(?![0-9])")
_WIDE_OPERAND = re.compile(r"(?<![a-z0-9])(w\d+)?a16(?![0-9])")


def name_format(name: str) -> str:
    """The number format of a product's operands, where the function's own name has it: 'fp8' of "sm90_fp8_gemm";
    '' without any."""
    function = _find_head(name).rpartition("::")[2].lower()
    if _WIDE_OPERAND.search(function):
        return "fp16/bf16"
    formats = [FORMATS[one] for one in _WRITTEN.findall(function)]
    if "fp8" in formats and "fp4" in formats:
        # the narrower operand is multiplied at the rate of the wider one
        return "fp8"
    return next((one for one in MIXED if one in formats), formats[0] if formats else "")


def _any_of(patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns.split()))


_COMMUNICATION, _COMPILED, _WRAPPER = (
    _any_of(WORDS["patterns"][name]) for name in ("communication", "compiled", "wrapper")
)
_FUNCTIONS, _KERNELS, _OPERATORS = (
    [(Role[role], _any_of(patterns)) for role, patterns in TABLES[name]]
    for name in ("function roles", "kernel roles", "operator roles")
)
_NO_MEANING = re.compile(
    r"\(anonymous namespace\)::|<unnamed>::|\{anonymous\}::|\binternal::|^kernel_cutlass_(?:kernel_)?"
    r"|^(?:\[clone [^\]]*\]|void|static|inline|__global__|\s)+"
)
_ENABLED = re.compile(r"std::enable_if<.*?>::type\s+")  # a template's return type
_COMPOSED = sorted(WORDS["operators"]["composed"].split(), key=len, reverse=True)
_KNOWN_OPERATOR = re.compile(rf"(?:{'|'.join(_COMPOSED)})(?=_|$)")
_ENGINE = "autograd::engine::evaluate_function: "


def demangled(name: str) -> str:
    """The identifiers of a mangled C++ name: _ZN7cutlass6KernelINS_4GemmE -> cutlass::Kernel<Gemm>. Else as it is."""
    start = re.match(r"_Z[NLK]*(?=\d)", name)
    if not start:
        return name
    outer = []
    at = start.end()
    while found := _identifier(name, at):
        word, at = found
        outer.append(word)
    inner = []
    while digits := re.compile(r"\d+").search(name, at):
        # Numbers of template arguments (Li128E) stand where the length of an identifier might.
        number = name[digits.start() - 2 : digits.start()] in ("Li", "Lj", "Lb", "Lm")
        word, at = (not number and _identifier(name, digits.start())) or ("", digits.end())
        inner += [word] if word else []
    arguments = f"<{', '.join(inner)}>" if inner else ""
    return "::".join(outer) + arguments if outer else name


def _identifier(name: str, at: int) -> tuple[str, int] | None:
    """(word, its end) if a length and a word of that length stand at `at`;
    the last word of a name that was cut is shorter."""
    digits = re.compile(r"\d{1,4}").match(name, at)
    if not digits:
        return None
    word = name[digits.end() : digits.end() + int(digits[0])]
    return (word, digits.end() + len(word)) if re.fullmatch(r"[A-Za-z_]\w*", word) else None


def _find_head(name: str) -> str:
    """'void ns::f<T>(int)' -> 'ns::f': the function's own name with its namespaces, without arguments."""
    plain = _NO_MEANING.sub("", _ENABLED.sub("", demangled(name[:LONGEST]).strip()))
    return re.split(r"[<(\[{]", plain, maxsplit=1)[0].strip()


@lru_cache(maxsize=MAX_NAMES)
def is_communication(name: str) -> bool:
    """Is it a kernel that moves data between processes, or a backend's span for one (gloo:all_reduce)?"""
    return get_kernel_role(name) is Role.COMMUNICATION


def is_wait(name: str) -> bool:
    """Is it an operator in which the host does nothing until a collective is through?"""
    return name in ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")


@lru_cache(maxsize=MAX_NAMES)
def get_kernel_role(name: str) -> Role:
    """The role of device work (kernel, memcpy, memset) by its name as the profiler wrote it."""
    lowered = name[:LONGEST].lower()
    own = _find_role(_read_own_roles(os.environ.get(KERNEL_NAMES, "")), lowered)
    if own is not Role.OTHER:
        return own
    if _COMPILED.search(lowered):
        return Role.FUSED
    head = _find_head(name).lower()
    function = head.rpartition("::")[2]
    # a wrapper around any function (cutlass::device_kernel, elementwise_kernel) says nothing of its own
    says = not _WRAPPER.search(head)
    role = _find_role(_FUNCTIONS, function) if says else Role.OTHER
    if role is not Role.OTHER:
        return role
    if _COMMUNICATION.search(head):
        return Role.COMMUNICATION
    return next(
        (role for text in ([function, head, lowered] if says else [lowered])
         if (role := _find_role(_KERNELS, text)) is not Role.OTHER),
        Role.OTHER,
    )  # fmt: skip


@cache
def _read_own_roles(path: str) -> list[tuple[Role, re.Pattern[str]]]:
    """The user's own rows of roles: a role (GEMM, ATTENTION, ...), a tab, patterns. Asked before all others."""
    if not path:
        return []
    rows = []
    try:
        lines = read_foreign_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{KERNEL_NAMES}={path}: it cannot be read ({type(error).__name__}); name a text file."
        ) from None
    for number, line in enumerate(lines, 1):
        role, _, patterns = line.partition("\t")
        if not line.strip() or line.startswith("#"):
            continue
        if role not in Role.__members__ or not patterns.strip():
            known = ", ".join(Role.__members__)
            raise UserError(f"{path}, line {number}: write a role, a tab and patterns; roles are {known}.")
        try:
            rows.append((Role[role], _any_of(patterns)))
        except re.error as error:
            raise UserError(f"{path}, line {number}: {patterns!r} is no regular expression ({error}).") from None
    return rows


def _find_role(rows: list[tuple[Role, re.Pattern[str]]], text: str) -> Role:
    return next((role for role, pattern in rows if pattern.search(text)), Role.OTHER)


@lru_cache(maxsize=MAX_NAMES)
def get_operator_role(name: str) -> Role:
    """The role of a host operator or autograd node. Views and bookkeeping are OTHER: they move no data."""
    bare = bare_operator(name)
    return _find_role(_OPERATORS, bare)


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
