"""The tables of kernel names (kernel_families.tsv, kernel_pieces.tsv), and the words that no table can hold.
kernel_names.py applies them.

Names are no interface. cuBLAS of 2017 to 2022, CUTLASS and cuDNN's products follow the CUTLASS profiler guide:
architecture, unit, <accumulator><instruction><operation>, formats, threadblock MxN, K of a slice x stages, layouts,
alignment; with words of their own that nobody documents, as xmma's, nvjet's and Tensile's. What is only seen in use is
marked as inferred.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.analysis.kernels.kernel_results import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_words import FORMATS, OTHER, TABLES, WORDS, fused_operators, template_format

Told = list[tuple[str, str | None]]  # pieces of a name: text, meaning (None: the table says it)
Meaning = str | dict[str, str] | Callable[[str], str | tuple[str, str]]


class Word(str):
    """A piece of a name, which a meaning's {v:TABLE} looks up in a table of kernel_words.tsv."""

    def __format__(self, table: str) -> str:
        return WORDS[table].get(self, str(self)) if table else str(self)


@dataclass(frozen=True)
class Piece:
    """A piece of names.

    where: "=GROUP" of the family's match; a pattern, whose group t (else all of it) is shown and v (else that)
    explained; or a
        function of the match and the name. meaning: a text with {v} or a group, as {v:TABLE} looked up,
        {precision} (no piece where that is unknown) or {any}; a dict
        by v (OTHER: all others; no piece without an entry); or a function of v, of the meaning or (text, meaning).
    """

    where: str | Callable[[re.Match[str], str], Told]
    field: str
    meaning: Meaning
    inferred: bool


@dataclass(frozen=True)
class Family:
    """A row of kernel_families.tsv."""

    pattern: re.Pattern[str]
    name: str | Callable[[str], str]
    role: Role  # only where the table of roles knows nothing
    cores: TensorCores
    find_format: Callable[[re.Match[str], str], str]  # of the match and the name; "" for unknown
    pieces: tuple[Piece, ...]  # in this order
    tail: tuple[Piece, ...]  # behind them, by their place in the match's group "rest"
    alignment: str  # pattern of a number
    why_not: str  # for cores NO: a reason of its own
    in_word: bool


_FUNCTIONS = re.compile(r"\w*(Functor(OnSelf)?(_\w+)?|Ops|_kernel(_cuda|_impl)?|CUDAKernelImpl|_out|_scalar|_functor)")
_WRAPPERS = tuple(WORDS["functors"]["wrappers"].split())
_FORMAT = re.compile(r"(?<![a-z0-9])(" + "|".join(FORMATS) + r")(?![a-z0-9])")
_NCCL_TYPE = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(WORDS['NCCL types'])})(?![A-Za-z0-9])")

# --- meanings of pieces


def _describe_architecture(sm: str) -> tuple[str, str]:
    digits = sm.lower().removeprefix("sm")
    eras = [f" ({era.capitalize()})" for era, number in WORDS["architectures"].items() if number == f"sm{digits}"]
    return f"sm{digits}", f"compiled for compute capability {digits[:-1]}.{digits[-1:]}{''.join(eras)}"


def _describe_layout(letters: str) -> str:
    first, second = (WORDS["layouts"].get(letter, "unknown") for letter in letters[:2].lower())
    return f"first operand {first}, second {second} (BLAS' letters for matrices stored by columns)"


def _describe_tile(tile: str) -> str:
    sizes = tile.split("x")
    slices = f", in slices of {sizes[2]} along K" if len(sizes) > 2 else ""
    return f"a block of threads makes {sizes[0]}x{sizes[1]} of the result{slices}"


def _describe_nvjet(types: str) -> str:
    operands, sums, result = (WORDS["nvjet types"].get(types[at], "an unknown format") for at in (0, -2, -1))
    return f"operands in {'tf32' if operands == 'fp32' else operands}, sums in {sums}, result in {result}"


def _describe_instruction(digits: str) -> str:
    sizes = WORDS["instructions"].get(digits, digits if "x" in digits else WORDS["instructions"][OTHER])
    return f"one instruction of the tensor cores multiplies {sizes} (MxNxK)"


def find_functor(name: str) -> str:
    """What an elementwise or reduction kernel computes: 'MulFunctor', 'silu_kernel'; '' where nothing tells."""
    words: list[str] = re.findall(r"\w+", name.partition("<")[2])
    for word in words:
        if _FUNCTIONS.fullmatch(word) and not word.startswith(_WRAPPERS) and "elementwise" not in word:
            return word
    return ""


def _find_types(found: re.Match[str]) -> list[str]:
    return list(dict.fromkeys(_FORMAT.findall(f"{found['before']}_{found['rest']}")))


def _find_formats(found: re.Match[str], name: str) -> Told:
    """Of a product on tensor cores."""
    types = _find_types(found)
    if not types and found["acc"] == "s" and not found["math"]:
        return [("", "none is named: operands in fp32, rounded to TF32")]
    more = [(one, f"{FORMATS[one]} appears too, sums or result") for one in types[1:]]
    return [*((one, f"operands in {FORMATS[one]}") for one in types[:1]), *more]


def _find_product_format(found: re.Match[str], on_cores: bool = False) -> str:
    """Named formats first; else what the accumulator's letter implies."""
    implied = {"h": "fp16", "s": "tf32", "d": "fp64", "i": "int8"} if on_cores else WORDS["accumulators"]
    named = FORMATS.get(found["math"] or "") or next((FORMATS[one] for one in _find_types(found)), "")
    return "tf32" if on_cores and named == "fp32" else named or implied.get(found["acc"], "")


_NARROW_FIRST = ("fp4", "fp8", "int8", "bf16", "fp16", "fp32")


def _name_format(written: str) -> str:
    """'MxE2m1' -> 'fp4', 'fp8e4nv' -> 'fp8'; '' for unknown."""
    lowered = written.lower()
    return FORMATS.get(lowered) or next((FORMATS[one] for one in FORMATS if lowered.startswith(one)), "")


def _find_operand_format(found: re.Match[str], name: str) -> str:
    """The wider of both operands: narrower ones are widened to it before the tensor cores multiply,
    or run at its rate."""
    groups = found.groupdict()
    formats = [_name_format(groups[one]) for one in ("a", "b") if groups.get(one)]
    known = [one for one in formats if one in _NARROW_FIRST]
    return max(known, key=_NARROW_FIRST.index, default="")


FUNCTIONS: dict[str, Callable[..., Any]] = {  # "by NAME" in the tables
    # meanings, of v
    "architecture": _describe_architecture,
    "era": lambda v: f"written for {v.capitalize()} ({WORDS['architectures'][v]}); newer GPUs run it too",
    "layout": _describe_layout,
    "result format": lambda v: f"stored as {_name_format(v) or 'an unknown format'}",
    "operand formats": lambda v: f"operands in {_name_format(v) or 'an unknown format'}",
    # Tensile's i and j are indices of the result, l is what is summed
    "Tensile layout": lambda v: _describe_layout(
        ("n" if v[1] == "i" else "t") + ("n" if v[v.index("_") + 2] == "l" else "t")
    ),
    "tile": _describe_tile,
    "instruction": _describe_instruction,
    "formats of nvjet": _describe_nvjet,
    "attention tile": lambda v: (
        ", ".join(sizes := re.findall(r"\d+", v)),
        "{} queries times {} keys, heads of {}".format(*sizes),
    ),
    "operation": lambda v: v.replace("_", " "),
    "operators": lambda v: ", ".join(fused_operators(v)) or "none named",
    "product helper": lambda v: next(
        told for pattern, told in TABLES["helpers of products"] if re.fullmatch(pattern, v)
    ),
    "lists": lambda v: f"{v} {'list' if v == '1' else 'lists'} of tensors side by side",
    "alignment": lambda v: (
        f"operands are read {v} element{'s' if v != '1' else ''} at a time"
        + (": some size is odd, so loads are narrow" if int(v) <= 2 else "")
    ),
    # pieces that only the whole match tells, of the match and the name
    "function": lambda found, name: [(functor, None)] if (functor := find_functor(name)) else [],
    "function of a loop": lambda found, name: [
        (text, "how elements are joined" if found["loop"] == "reduce_kernel" else "what is computed for each element")
        for text in [find_functor(name)]
        if text
    ],
    "formats": _find_formats,
    "sums": lambda found, name: [
        (
            found["acc"] + found["kind"],
            f"{WORDS['accumulators'][found['acc']]} on the CUDA cores: the tensor cores are idle",
        )
    ],
    "flash tile": lambda found, name: [
        (
            f"{found['q']}, {found['k']}",
            f"{found['q']} queries times {found['k']} keys at a time; no score ever reaches memory",
        )
    ],
    "flash helper": lambda found, name: [("", f"a helper: {WORDS['FlashAttention helpers'][found['helper'].lower()]}")],
    "direction": lambda found, name: [(found["way"] or "", WORDS["directions"][found["way"] or OTHER])],
    # number formats of operands, of the match and the name; an accumulator's letter tells within CUTLASS' scheme only
    "template": lambda found, name: template_format(name),
    "product": lambda found, name: _find_product_format(found),
    "product on cores": lambda found, name: _find_product_format(found, on_cores=True),
    "operands": _find_operand_format,
    "operands or result": lambda found, name: _find_operand_format(found, name) or _name_format(found["result"]),
    "type": lambda found, name: _name_format(found["type"]),
    "unknown product": lambda found, name: _find_product_format(found) if _find_types(found) else "",
    "collective": lambda found, name: "".join(  # bytes of whatever format are none
        WORDS["NCCL types"][one].replace("bytes", "") for one in _NCCL_TYPE.findall(found["rest"])[-1:]
    ),
    # who wrote a product, of its name
    "library": lambda word: "CUTLASS" if "cutlass" in word else "cuDNN" if "cudnn" in word else "cuBLAS",
}

# --- the tables


def _read_rows(name: str, columns: int) -> Iterator[list[str]]:
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield (line.split("\t") + [""] * columns)[:columns]


def _fill(pattern: str, known: dict[str, str]) -> str:
    return re.sub(r"\{([A-Z_]+)\}", lambda name: known[name[1]], pattern)


def _get_function(text: str) -> Callable[..., Any] | None:
    return FUNCTIONS[text.removeprefix("by ")] if text.startswith("by ") else None


def _read_format(operands: str) -> Callable[[re.Match[str], str], str]:
    """by FUNCTION; GROUP[ in TABLE][, on cores]"""
    place, on_cores, _ = operands.partition(", on cores")
    group, _, table = place.partition(" in ")

    def find_format(found: re.Match[str], name: str) -> str:
        named = WORDS[table or "formats"].get(found[group], "") if group else ""
        return "tf32" if on_cores and named == "fp32" else named

    return _get_function(operands) or find_format


def _read_families() -> tuple[Family, ...]:
    known: dict[str, str] = {}
    pieces: dict[str, tuple[Piece, ...]] = {"": ()}
    families = []
    rows = list(_read_rows("kernel_families.tsv", 10))
    for first, text, *_ in rows:
        if first.startswith("= "):
            known[first.removeprefix("= ")] = _fill(text, known)
    for name, where, field, meaning in _read_rows("kernel_pieces.tsv", 4):
        told = WORDS.get(meaning.removeprefix("in ")) if meaning.startswith("in ") else _get_function(meaning)
        inferred, field = field.endswith(" (*)"), field.removesuffix(" (*)")
        piece = Piece(_get_function(where) or _fill(where, known), field, told or meaning, inferred)
        pieces[name] = (*pieces.get(name, ()), piece)
    for pattern, name, role, cores, operands, names, tail, alignment, why_not, in_word in rows:
        if pattern.startswith("= "):
            continue
        of_family = tuple(piece for one in names.split("; ") for piece in pieces[one])
        regex, called = re.compile(_fill(pattern, known)), _get_function(name) or name
        parts = (_read_format(operands), of_family, pieces[tail])
        families.append(
            Family(regex, called, Role[role], TensorCores[cores], *parts, alignment, why_not, bool(in_word))
        )
    return tuple(families)


FAMILIES = _read_families()
