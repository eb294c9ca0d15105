"""Purposes of kernels and operators, read from their names: the first row of a table that matches decides.

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

OTHER_KEY = "(other)"  # the key of a table's row for what no key names
LONGEST = 2000  # characters of a name that are looked at: C++ names may repeat their template arguments for pages
MAX_KEPT_ANSWERS = 2**16  # whose answers are kept: asked again for each step, phase and rank


def read_tables() -> dict[str, list[tuple[str, str]]]:
    """Read kernel_words.tsv: pairs of key and value, by table."""
    tables: dict[str, list[tuple[str, str]]] = {}
    text = Path(__file__).with_name("kernel_words.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            table, key, value = line.split("\t")
            tables.setdefault(table, []).append((key, value))
    return tables


TABLES = read_tables()
WORDS = {name: dict(pairs) for name, pairs in TABLES.items()}
FORMATS = WORDS["formats"]
MIXED = ("fp4", "fp8", "bf16", "fp16")  # what tensor cores are for, narrowest first
# As torch writes the type of an operator's argument -> (format, bytes of an element).


def _read_tensor_types() -> dict[str, tuple[str, int]]:
    """Read number formats and bytes of an element, by the type as torch writes it."""
    types = {}
    for name, value in WORDS["tensor types"].items():
        number_format, size, *_ = value.split()
        types[name] = (number_format, int(size))
    return types


TENSOR_TYPES = _read_tensor_types()
FORMAT_BYTES = dict(TENSOR_TYPES.values()) | {"fp16/bf16": 2, "tf32": 4}
_CPP_TYPE = re.compile(r"(?<![A-Za-z0-9_])(?:\w+::)*(" + "|".join(WORDS["C++ types"]) + r")(?![A-Za-z0-9_])")


def template_format(name: str) -> str:
    """The narrowest number format among a C++ name's template arguments: what the operands most likely have.

    '' without any.
    """
    _, _, arguments = name.partition("<")
    before_call, _, _ = arguments.rpartition(">(")
    types = _CPP_TYPE.findall(before_call or arguments)
    formats = [WORDS["C++ types"][one] for one in types]
    return _choose_narrowest(formats, (*MIXED, "tf32"))


def _choose_narrowest(formats: list[str], narrow_first: tuple[str, ...]) -> str:
    """The format that stands first in `narrow_first`, else the first one there is; '' without any."""
    for one in narrow_first:
        if one in formats:
            return one
    return formats[0] if formats else ""


_WRITTEN = re.compile(r"(?<![a-z0-9])[aw]?(" + "|".join(sorted(FORMATS, key=len, reverse=True)) + r")(?![0-9])")
_WIDE_OPERAND = re.compile(r"(?<![a-z0-9])(w\d+)?a16(?![0-9])")


def name_format(name: str) -> str:
    """The number format of a product's operands, where the function's own name has it: 'fp8' of "sm90_fp8_gemm".

    '' without any.
    """
    function = _find_head(name).rpartition("::")[2].lower()
    if _WIDE_OPERAND.search(function):
        return "fp16/bf16"
    formats = [FORMATS[one] for one in _WRITTEN.findall(function)]
    if "fp8" in formats and "fp4" in formats:
        # the narrower operand is multiplied at the rate of the wider one
        return "fp8"
    return _choose_narrowest(formats, MIXED)


def _any_of(patterns: str) -> re.Pattern[str]:
    """Join several patterns, with blanks between them, into one."""
    return re.compile("|".join(patterns.split()))


def _read_roles(name: str) -> list[tuple[Role, re.Pattern[str]]]:
    """The rows of a table of roles."""
    return [(Role[role], _any_of(patterns)) for role, patterns in TABLES[name]]


_COMMUNICATION = _any_of(WORDS["patterns"]["communication"])
_COMPILED = _any_of(WORDS["patterns"]["compiled"])
_WRAPPER = _any_of(WORDS["patterns"]["wrapper"])
_FUNCTIONS = _read_roles("function roles")
_KERNELS = _read_roles("kernel roles")
_OPERATORS = _read_roles("operator roles")
_DIGITS = re.compile(r"\d+")
_LENGTH = re.compile(r"\d{1,4}")
_NUMBERS = ("Li", "Lj", "Lb", "Lm")  # before the numbers among mangled template arguments: Li128E
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
    if not outer:
        return name
    inner = _find_inner_identifiers(name, at)
    arguments = f"<{', '.join(inner)}>" if inner else ""
    return "::".join(outer) + arguments


def _find_inner_identifiers(name: str, at: int) -> list[str]:
    """The identifiers of a mangled name from `at` on, those of template arguments."""
    inner = []
    while digits := _DIGITS.search(name, at):
        at = digits.end()
        # Numbers of template arguments (Li128E) stand where the length of an identifier might.
        before = name[digits.start() - 2 : digits.start()]
        found = None if before in _NUMBERS else _identifier(name, digits.start())
        if found:
            word, at = found
            inner.append(word)
    return inner


def _identifier(name: str, at: int) -> tuple[str, int] | None:
    """Read a word and its end if a length and a word of that length stand at `at`.

    The last word of a name that was cut is shorter.
    """
    digits = _LENGTH.match(name, at)
    if not digits:
        return None
    start = digits.end()
    word = name[start : start + int(digits[0])]
    if not re.fullmatch(r"[A-Za-z_]\w*", word):
        return None
    return word, start + len(word)


def _find_head(name: str) -> str:
    """Name a function with its namespaces, without arguments: "ns::f" of "void ns::f<T>(int)"."""
    plain = _NO_MEANING.sub("", _ENABLED.sub("", demangled(name[:LONGEST]).strip()))
    return re.split(r"[<(\[{]", plain, maxsplit=1)[0].strip()


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def is_communication(name: str) -> bool:
    """Tell whether a kernel moves data between processes, or is a backend's span for one (gloo:all_reduce)."""
    return get_kernel_role(name) is Role.COMMUNICATION


def is_wait(name: str) -> bool:
    """Tell whether the host does nothing in an operator until a collective is through."""
    return name in ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
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
    texts = (function, head, lowered) if says else (lowered,)
    for text in texts:
        role = _find_role(_KERNELS, text)
        if role is not Role.OTHER:
            return role
    return Role.OTHER


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
    """The role of the first row that fits."""
    for role, pattern in rows:
        if pattern.search(text):
            return role
    return Role.OTHER


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def get_operator_role(name: str) -> Role:
    """The role of a host operator or autograd node. Views and bookkeeping are OTHER: they move no data."""
    bare = bare_operator(name)
    return _find_role(_OPERATORS, bare)


def bare_operator(name: str) -> str:
    """Shorten an operator's name: "add" of "aten::add_", "nll_loss" of NllLossBackward0."""
    bare = name[:LONGEST].removeprefix(_ENGINE)
    bare = re.sub(r"^(aten|prims|torch::autograd)::", "", bare)
    if re.fullmatch(r"\w+Backward\d*", bare):
        bare = re.sub(r"Backward\d*$", "", bare)
        bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare)
    bare = re.sub(r"(?<=\w)_backward(_data|_input|_weight)?$", "", bare.lower())
    return bare.rstrip("_") or bare


def fused_operators(text: str) -> list[str]:
    """Split "_to_copy_add_native_layer_norm" into "_to_copy", "add", "native_layer_norm". Unknown words stand alone."""
    found = []
    rest = text
    while rest:
        match = _KNOWN_OPERATOR.match(rest) or re.match(r"_?[^_]*", rest)
        word = match[0] if match else ""
        found.append(word)
        rest = rest[max(1, len(word)) :].removeprefix("_")
    return [word for word in found if word.strip("_")]
