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
from megatron_lite.analysis.kernels.kernel_words import (
    FORMATS,
    OTHER_KEY,
    TABLES,
    WORDS,
    fused_operators,
    template_format,
)

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
        explained; or a function of the match and the name.
    meaning: a text with {v} or a group, as {v:TABLE} looked up, {precision} (no piece where that is unknown) or {any};
        a dict by v (OTHER_KEY: all others; no piece without an entry); or a function of v, of the meaning or (text,
        meaning).
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
    """Explain a compute capability: "sm80" is "compiled for compute capability 8.0 (Ampere)"."""
    digits = sm.lower().removeprefix("sm")
    name = f"sm{digits}"
    said = f"compiled for compute capability {digits[:-1]}.{digits[-1:]}"
    for era, architecture in WORDS["architectures"].items():
        if architecture == name:
            said += f" ({era.capitalize()})"
    return name, said


def _describe_era(era: str) -> str:
    """Explain an architecture: "ampere" is "written for Ampere (sm80); newer GPUs run it too"."""
    return f"written for {era.capitalize()} ({WORDS['architectures'][era]}); newer GPUs run it too"


def _describe_layout(letters: str) -> str:
    layouts = WORDS["layouts"]
    first = layouts.get(letters[0].lower(), "unknown")
    second = layouts.get(letters[1].lower(), "unknown")
    return f"first operand {first}, second {second} (BLAS' letters for matrices stored by columns)"


def _describe_tensile_layout(layout: str) -> str:
    """Explain "Alik_Bljk": i and j are indices of the result, l is what is summed."""
    first = "n" if layout[1] == "i" else "t"
    of_second = layout[layout.index("_") + 2]
    second = "n" if of_second == "l" else "t"
    return _describe_layout(first + second)


def _describe_tile(tile: str) -> str:
    """Write "128x64" or "128x64x32" as a sentence."""
    rows, columns, *depth = tile.split("x")
    slices = f", in slices of {depth[0]} along K" if depth else ""
    return f"a block of threads makes {rows}x{columns} of the result{slices}"


def _describe_nvjet(types: str) -> str:
    """The three formats that nvjet's letters name: the first, the last but one, the last."""
    formats = WORDS["nvjet types"]
    operands = formats.get(types[0], "an unknown format")
    sums = formats.get(types[-2], "an unknown format")
    result = formats.get(types[-1], "an unknown format")
    if operands == "fp32":
        # tensor cores take no plain fp32
        operands = "tf32"
    return f"operands in {operands}, sums in {sums}, result in {result}"


def _describe_instruction(digits: str) -> str:
    unknown = digits if "x" in digits else WORDS["instructions"][OTHER_KEY]
    sizes = WORDS["instructions"].get(digits, unknown)
    return f"one instruction of the tensor cores multiplies {sizes} (MxNxK)"


def _describe_attention_tile(tile: str) -> tuple[str, str]:
    """Three numbers of a name -> the text to show, and a sentence."""
    queries, keys, width = re.findall(r"\d+", tile)
    said = f"{queries} queries times {keys} keys, heads of {width}"
    return f"{queries}, {keys}, {width}", said


def _describe_product_helper(name: str) -> str:
    for pattern, said in TABLES["helpers of products"]:
        if re.fullmatch(pattern, name):
            return said
    raise KeyError(name)


def _describe_lists(number: str) -> str:
    lists = "list" if number == "1" else "lists"
    return f"{number} {lists} of tensors side by side"


def _describe_alignment(elements: str) -> str:
    plural = "s" if elements != "1" else ""
    said = f"operands are read {elements} element{plural} at a time"
    if int(elements) <= 2:
        said += ": some size is odd, so loads are narrow"
    return said


def _describe_result_format(written: str) -> str:
    return f"stored as {_name_format(written) or 'an unknown format'}"


def _describe_operand_formats(written: str) -> str:
    return f"operands in {_name_format(written) or 'an unknown format'}"


def find_functor(name: str) -> str:
    """Name what an elementwise or reduction kernel computes: 'MulFunctor', 'silu_kernel'; '' where nothing tells."""
    words: list[str] = re.findall(r"\w+", name.partition("<")[2])
    for word in words:
        is_wrapper = word.startswith(_WRAPPERS) or "elementwise" in word
        if _FUNCTIONS.fullmatch(word) and not is_wrapper:
            return word
    return ""


# --- pieces that only the whole match tells


def _tell_function(found: re.Match[str], name: str) -> Told:
    functor = find_functor(name)
    return [(functor, None)] if functor else []


def _tell_function_of_loop(found: re.Match[str], name: str) -> Told:
    functor = find_functor(name)
    if not functor:
        return []
    if found["loop"] == "reduce_kernel":
        return [(functor, "how elements are joined")]
    return [(functor, "what is computed for each element")]


def _find_types(found: re.Match[str]) -> list[str]:
    """The number formats that stand around the product in a name, each once."""
    types = _FORMAT.findall(f"{found['before']}_{found['rest']}")
    return list(dict.fromkeys(types))


def _tell_formats(found: re.Match[str], name: str) -> Told:
    """Tell the formats of a product on tensor cores."""
    types = _find_types(found)
    if not types:
        is_fp32 = found["acc"] == "s" and not found["math"]
        return [("", "none is named: operands in fp32, rounded to TF32")] if is_fp32 else []
    operands, *others = types
    told: Told = [(operands, f"operands in {FORMATS[operands]}")]
    for other in others:
        told.append((other, f"{FORMATS[other]} appears too, sums or result"))
    return told


def _tell_sums(found: re.Match[str], name: str) -> Told:
    sums = WORDS["accumulators"][found["acc"]]
    return [(found["acc"] + found["kind"], f"{sums} on the CUDA cores: the tensor cores are idle")]


def _tell_flash_tile(found: re.Match[str], name: str) -> Told:
    queries = found["q"]
    keys = found["k"]
    said = f"{queries} queries times {keys} keys at a time; no score ever reaches memory"
    return [(f"{queries}, {keys}", said)]


def _tell_flash_helper(found: re.Match[str], name: str) -> Told:
    helper = found["helper"].lower()
    return [("", f"a helper: {WORDS['FlashAttention helpers'][helper]}")]


def _tell_direction(found: re.Match[str], name: str) -> Told:
    way = found["way"]
    return [(way or "", WORDS["directions"][way or OTHER_KEY])]


# --- number formats of operands


def _find_product_format(found: re.Match[str], implied: dict[str, str]) -> str:
    """Named formats first; else what the accumulator's letter implies."""
    math_format = FORMATS.get(found["math"] or "")
    if math_format:
        return math_format
    types = _find_types(found)
    if types and FORMATS[types[0]]:
        return FORMATS[types[0]]
    return implied.get(found["acc"], "")


def _find_format_off_cores(found: re.Match[str], name: str) -> str:
    return _find_product_format(found, WORDS["accumulators"])


def _find_format_on_cores(found: re.Match[str], name: str) -> str:
    named = _find_product_format(found, {"h": "fp16", "s": "tf32", "d": "fp64", "i": "int8"})
    return _round_to_cores(named)


def _find_named_format(found: re.Match[str], name: str) -> str:
    return _find_format_off_cores(found, name) if _find_types(found) else ""


def _round_to_cores(number_format: str) -> str:
    """The format in which tensor cores multiply: they take no plain fp32."""
    return "tf32" if number_format == "fp32" else number_format


_NARROW_FIRST = ("fp4", "fp8", "int8", "bf16", "fp16", "fp32")


def _name_format(written: str) -> str:
    """Name a number format: "fp4" of "MxE2m1", "fp8" of "fp8e4nv"; '' for unknown."""
    lowered = written.lower()
    if lowered in FORMATS:
        return FORMATS[lowered]
    for known, number_format in FORMATS.items():
        if lowered.startswith(known):
            return number_format
    return ""


def _find_operand_format(found: re.Match[str], name: str) -> str:
    """The wider of both operands: narrower ones are widened to it before the tensor cores multiply, or run at its
    rate."""
    groups = found.groupdict()
    written = [groups[one] for one in ("a", "b") if groups.get(one)]
    formats = map(_name_format, written)
    known = [one for one in formats if one in _NARROW_FIRST]
    return max(known, key=_NARROW_FIRST.index, default="")


def _find_operand_or_result_format(found: re.Match[str], name: str) -> str:
    return _find_operand_format(found, name) or _name_format(found["result"])


def _find_format_of_collective(found: re.Match[str], name: str) -> str:
    types = _NCCL_TYPE.findall(found["rest"])
    if not types:
        return ""
    # bytes of whatever format are none
    return WORDS["NCCL types"][types[-1]].replace("bytes", "")


def _name_library(word: str) -> str:
    """The library that wrote a product, by the product's name."""
    if "cutlass" in word:
        return "CUTLASS"
    return "cuDNN" if "cudnn" in word else "cuBLAS"


FUNCTIONS: dict[str, Callable[..., Any]] = {  # "by NAME" in the tables
    # meanings, of v
    "architecture": _describe_architecture,
    "era": _describe_era,
    "layout": _describe_layout,
    "result format": _describe_result_format,
    "operand formats": _describe_operand_formats,
    "Tensile layout": _describe_tensile_layout,
    "tile": _describe_tile,
    "instruction": _describe_instruction,
    "formats of nvjet": _describe_nvjet,
    "attention tile": _describe_attention_tile,
    "operation": lambda v: v.replace("_", " "),
    "operators": lambda v: ", ".join(fused_operators(v)) or "none named",
    "product helper": _describe_product_helper,
    "lists": _describe_lists,
    "alignment": _describe_alignment,
    # pieces that only the whole match tells, of the match and the name
    "function": _tell_function,
    "function of a loop": _tell_function_of_loop,
    "formats": _tell_formats,
    "sums": _tell_sums,
    "flash tile": _tell_flash_tile,
    "flash helper": _tell_flash_helper,
    "direction": _tell_direction,
    # number formats of operands, of the match and the name; an accumulator's letter tells within CUTLASS' scheme only
    "template": lambda found, name: template_format(name),
    "product": _find_format_off_cores,
    "product on cores": _find_format_on_cores,
    "operands": _find_operand_format,
    "operands or result": _find_operand_or_result_format,
    "type": lambda found, name: _name_format(found["type"]),
    "unknown product": _find_named_format,
    "collective": _find_format_of_collective,
    # who wrote a product, of its name
    "library": _name_library,
}

# --- the tables


def _read_rows(name: str, columns: int) -> Iterator[list[str]]:
    """Rows of a table, each with so many columns."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            fields = line.split("\t") + [""] * columns
            yield fields[:columns]


def _fill(pattern: str, known: dict[str, str]) -> str:
    """The pattern with {NAME} replaced by what the name is known to stand for."""
    return re.sub(r"\{([A-Z_]+)\}", lambda name: known[name[1]], pattern)


def _get_function(text: str) -> Callable[..., Any] | None:
    """The function that "by NAME" means; None for other texts."""
    return FUNCTIONS[text.removeprefix("by ")] if text.startswith("by ") else None


def _read_format(operands: str) -> Callable[[re.Match[str], str], str]:
    """Read how a format is found: by FUNCTION; GROUP[ in TABLE][, on cores]."""
    function = _get_function(operands)
    if function:
        return function
    place, on_cores, _ = operands.partition(", on cores")
    group, _, table = place.partition(" in ")

    def find_format(found: re.Match[str], name: str) -> str:
        if not group:
            return ""
        named = WORDS[table or "formats"].get(found[group], "")
        return _round_to_cores(named) if on_cores else named

    return find_format


def _read_pieces(known: dict[str, str]) -> dict[str, tuple[Piece, ...]]:
    """Read the pieces of each group of kernel_pieces.tsv; '' stands for none. `known` says what {NAME} stands for."""
    pieces: dict[str, tuple[Piece, ...]] = {"": ()}
    for name, where, field, meaning in _read_rows("kernel_pieces.tsv", 4):
        piece = Piece(
            where=_get_function(where) or _fill(where, known),
            field=field.removesuffix(" (*)"),
            meaning=_read_meaning(meaning),
            inferred=field.endswith(" (*)"),
        )
        pieces[name] = (*pieces.get(name, ()), piece)
    return pieces


def _read_meaning(text: str) -> Meaning:
    """Read a meaning: in TABLE; by FUNCTION; a text."""
    if text.startswith("in "):
        return WORDS.get(text.removeprefix("in ")) or text
    return _get_function(text) or text


def _read_families() -> tuple[Family, ...]:
    """The rows of kernel_families.tsv."""
    rows = list(_read_rows("kernel_families.tsv", 10))
    known: dict[str, str] = {}
    for first, text, *_ in rows:
        if first.startswith("= "):
            known[first.removeprefix("= ")] = _fill(text, known)
    pieces = _read_pieces(known)
    families = []
    for pattern, name, role, cores, operands, names, tail, alignment, why_not, in_word in rows:
        if pattern.startswith("= "):
            continue
        of_family: tuple[Piece, ...] = ()
        for one in names.split("; "):
            of_family += pieces[one]
        families.append(
            Family(
                pattern=re.compile(_fill(pattern, known)),
                name=_get_function(name) or name,
                role=Role[role],
                cores=TensorCores[cores],
                find_format=_read_format(operands),
                pieces=of_family,
                tail=pieces[tail],
                alignment=alignment,
                why_not=why_not,
                in_word=bool(in_word),
            )
        )
    return tuple(families)


FAMILIES = _read_families()
