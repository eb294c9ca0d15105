"""What a kernel or an operator is for, read from its name: the first row of a table that matches decides.

Kernel names are no interface: they change with each release of a library and each compiler. What no row knows is
"other", which a report shows as such. The tables are in kernel_words.tsv.
"""

import re
from functools import lru_cache

from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.kernels.number_formats import TABLES, WORDS

LONGEST = 2000  # characters of a name that are looked at: C++ names may repeat their template arguments for pages


def _any_of(patterns: str) -> re.Pattern:
    return re.compile("|".join(patterns.split()))


_COMMUNICATION, _COMPILED = (_any_of(WORDS["patterns"][name]) for name in ("communication", "compiled"))
_KERNELS, _OPERATORS = (
    [(Role[role], _any_of(patterns)) for role, patterns in TABLES[name]] for name in ("kernel roles", "operator roles")
)
_COMPOSED = sorted(WORDS["operators"]["composed"].split(), key=len, reverse=True)
_KNOWN_OPERATOR = re.compile(rf"(?:{'|'.join(_COMPOSED)})(?=_|$)")
_ENGINE = "autograd::engine::evaluate_function: "


@lru_cache(maxsize=1 << 16)  # asked again for each step, phase and rank
def is_communication(name: str) -> bool:
    """Is it a kernel that moves data between processes, or a backend's span for one (gloo:all_reduce)?"""
    lowered = name[:LONGEST].lower()
    return not _COMPILED.search(lowered) and bool(_COMMUNICATION.search(lowered))


def is_wait(name: str) -> bool:
    """Is it an operator in which the host does nothing until a collective is through?"""
    return name in ("_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")


def get_kernel_role(name: str) -> Role:
    """The role of device work (kernel, memcpy, memset) by its name as the profiler wrote it."""
    lowered = name[:LONGEST].lower()
    if _COMPILED.search(lowered):
        return Role.FUSED
    if _COMMUNICATION.search(lowered):
        return Role.COMMUNICATION
    return next((role for role, pattern in _KERNELS if pattern.search(lowered)), Role.OTHER)


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
    while rest:
        word = (_KNOWN_OPERATOR.match(rest) or re.match(r"_?[^_]*", rest))[0]
        found.append(word)
        rest = rest[max(1, len(word)) :].removeprefix("_")
    return [word for word in found if word.strip("_")]
