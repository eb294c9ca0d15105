"""The tables of kernel names (kernel_families.tsv, kernel_pieces.tsv), and the words that no table can hold. kernel_names.py applies them.

Names are no interface. cuBLAS of 2017 to 2022, CUTLASS and cuDNN's products follow the CUTLASS profiler guide: architecture, unit,
<accumulator><instruction><operation>, formats, threadblock MxN, K of a slice x stages, layouts, alignment; with words of their own that
nobody documents, as xmma's, nvjet's and Tensile's. What is only seen in use is marked as inferred.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.analysis.kernels.kernel_results import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_words import FORMATS, TABLES, WORDS, fused_operators, template_format

Told = list[tuple[str, str | None]]  # pieces of a name: text, meaning (None: the table says it)


@dataclass(frozen=True)
class Piece:
    """A piece of names.

    where: "=GROUP" of the family's match; a pattern, whose group t (else all of it) is shown and v (else that) explained; or a
        function of the match and the name. meaning: a text with {v}, {precision} (no piece where that is unknown) or {any}; a dict
        by v (None: all others; no piece without an entry); or a function of v, of the meaning or (text, meaning).
    """

    where: str | Callable[[re.Match, str], Told]
    field: str
    meaning: str | dict | Callable[[str], str | tuple[str, str]]
    inferred: bool


@dataclass(frozen=True)
class Family:
    """A row of kernel_families.tsv."""

    pattern: re.Pattern
    name: str | Callable[[str], str]
    role: Role  # only where the table of roles knows nothing
    cores: TensorCores
    find_format: Callable[[re.Match, str], str]  # of the match and the name; "" for unknown
    pieces: tuple[Piece, ...]  # in this order
    tail: tuple[Piece, ...]  # behind them, by their place in the match's group "rest"
    alignment: str  # pattern of a number
    why_not: str  # for cores NO: a reason of its own
    in_word: bool


# --- meanings of pieces


def describe_architecture(sm: str) -> tuple[str, str]:
    digits = sm.lower().removeprefix("sm")
    era = next(
        (f" ({era.capitalize()})" for era, number in WORDS["architectures"].items() if number == f"sm{digits}"), ""
    )
    return f"sm{digits}", f"compiled for compute capability {digits[:-1]}.{digits[-1:]}{era}"


def describe_tile(tile: str) -> str:
    sizes = tile.split("x")
    slices = f", in slices of {sizes[2]} along K" if len(sizes) > 2 else ""
    return f"a block of threads makes {sizes[0]}x{sizes[1]} of the result{slices}"


def describe_stages(text: str) -> str:
    depth, stages = text.split("x")
    return f"slices of {depth} along K, {stages} of them in flight"


def describe_layout(letters: str) -> str:
    first, second = (WORDS["layouts"].get(letter, "unknown") for letter in letters[:2].lower())
    return f"first operand {first}, second {second} (BLAS' letters for matrices stored by columns)"


def describe_alignment(elements: str) -> str:
    odd = ": some size is odd, so loads are narrow" if int(elements) <= 2 else ""
    return f"operands are read {elements} element{'s' if elements != '1' else ''} at a time{odd}"


def describe_instruction(digits: str) -> str:
    sizes = WORDS["instructions"].get(digits, digits if "x" in digits else WORDS["instructions"][None])
    return f"one instruction of the tensor cores multiplies {sizes} (MxNxK)"


def describe_pair(tile: str) -> str:
    return "{} queries times {} keys at a time".format(*tile.split("x"))


def describe_attention_tile(tile: str) -> str:
    queries, keys, width = re.findall(r"\d+", tile)
    return f"{queries} queries times {keys} keys, heads of {width}"


def describe_nvjet(types: str) -> str:
    operands, sums, result = (WORDS["nvjet types"].get(types[at], "an unknown format") for at in (0, -2, -1))
    return f"operands in {'tf32' if operands == 'fp32' else operands}, sums in {sums}, result in {result}"


def show_attention_tile(tile: str) -> tuple[str, str]:
    return ", ".join(re.findall(r"\d+", tile)), describe_attention_tile(tile)


def describe_era(era: str) -> str:
    return f"written for {era.capitalize()} ({WORDS['architectures'][era]}); newer GPUs run it too"


def describe_operation(words: str) -> str:
    return words.replace("_", " ")


def describe_operands(formats: str) -> str:
    return " times ".join(FORMATS.get(one, one) for one in _XMMA_FORMAT.findall(formats))


def describe_result(formats: str) -> str:
    first = _XMMA_FORMAT.match(formats)[0]
    return f"stored as {FORMATS.get(first, first)}"


def describe_sums(name: str) -> str:
    return f"sums are kept in {WORDS['accumulators'].get(name) or FORMATS.get(name, name)}"


def describe_operators(words: str) -> str:
    return ", ".join(fused_operators(words)) or "none named"


def describe_product_helper(name: str) -> str:
    return next(meaning for pattern, meaning in TABLES["helpers of products"] if re.fullmatch(pattern, name))


def describe_lists(number: str) -> str:
    return f"{number} list{'s' if number != '1' else ''} of tensors side by side"


def describe_tensile_layout(text: str) -> str:
    """i, j: of the result; l: what is summed."""
    first, second = text.split("_")
    return describe_layout(("n" if first[1] == "i" else "t") + ("n" if second[1] == "l" else "t"))


def find_functor(name: str) -> str:
    """What an elementwise or reduction kernel computes: 'MulFunctor', 'silu_kernel'; '' where nothing tells."""
    for word in re.findall(r"\w+", name.partition("<")[2]):
        if _FUNCTIONS.fullmatch(word) and not word.startswith(_WRAPPERS) and "elementwise" not in word:
            return word
    return ""


# --- pieces whose place and meaning only the whole match tells


def find_function(found: re.Match, name: str) -> Told:
    return [(functor, None)] if (functor := find_functor(name)) else []


def find_loop_function(found: re.Match, name: str) -> Told:
    meaning = "how elements are joined" if found["loop"] == "reduce_kernel" else "what is computed for each element"
    return [(text, meaning) for text, _ in find_function(found, name)]


def find_formats(found: re.Match, name: str) -> Told:
    """Of a product on tensor cores."""
    types = _find_types(found)
    if not types and found["acc"] == "s" and not found["math"]:
        return [("", "none is named: operands in fp32, rounded to TF32")]
    return [
        (one, f"operands in {FORMATS[one]}" if at == 0 else f"{FORMATS[one]} appears too, sums or result")
        for at, one in enumerate(types)
    ]


def find_sums(found: re.Match, name: str) -> Told:
    meaning = f"{WORDS['accumulators'][found['acc']]} on the CUDA cores: the tensor cores stand idle"
    return [(found["acc"] + found["kind"], meaning)]


def find_flash_tile(found: re.Match, name: str) -> Told:
    meaning = f"{found['q']} queries times {found['k']} keys at a time; no score ever reaches memory"
    return [(f"{found['q']}, {found['k']}", meaning)]


def find_flash_helper(found: re.Match, name: str) -> Told:
    return [("", f"a helper: {WORDS['FlashAttention helpers'][found['helper'].lower()]}")]


def find_pass(found: re.Match, name: str) -> Told:
    return [(found[0], f"attention, {'backward' if found['way'].startswith('B') else 'forward'} pass")]


def find_direction(found: re.Match, name: str) -> Told:
    return [(found["way"] or "", WORDS["directions"][found["way"]])]


# --- number formats of operands, and who wrote a product


def find_product_format(found: re.Match, name: str, on_cores: bool = False) -> str:
    """Named formats first; else what the accumulator's letter implies."""
    implied = {"h": "fp16", "s": "tf32", "d": "fp64", "i": "int8"} if on_cores else WORDS["accumulators"]
    named = FORMATS.get(found["math"] or "") or next((FORMATS[one] for one in _find_types(found)), "")
    return "tf32" if on_cores and named == "fp32" else named or implied.get(found["acc"], "")


def find_product_format_on_cores(found: re.Match, name: str) -> str:
    return find_product_format(found, name, on_cores=True)


def find_unknown_product_format(found: re.Match, name: str) -> str:
    """An accumulator's letter means what it means within the scheme only."""
    return find_product_format(found, name) if _find_types(found) else ""


def find_collective_format(found: re.Match, name: str) -> str:
    """Bytes of whatever format are none."""
    types = _NCCL_TYPE.findall(found["rest"])
    return WORDS["NCCL types"][types[-1]].replace("bytes", "") if types else ""


def name_library(word: str) -> str:
    return "CUTLASS" if "cutlass" in word else "cuDNN" if "cudnn" in word else "cuBLAS"


def _find_types(found: re.Match) -> list[str]:
    return list(dict.fromkeys(_FORMAT.findall(f"{found['before']}_{found['rest']}")))


_FUNCTIONS = re.compile(r"\w*(Functor(OnSelf)?(_\w+)?|Ops|_kernel(_cuda|_impl)?|CUDAKernelImpl|_out|_scalar|_functor)")
_WRAPPERS = tuple(WORDS["functors"]["wrappers"].split())
_FORMAT = re.compile(r"(?<![a-z0-9])(" + "|".join(FORMATS) + r")(?![a-z0-9])")
_NCCL_TYPE = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(WORDS['NCCL types'])})(?![A-Za-z0-9])")
_XMMA_FORMAT = re.compile(r"bf16|tf32|e4m3|e5m2|f\d+|i\d+|u\d+|s8")

# --- the tables


def _read_rows(name: str, columns: int) -> Iterator[list[str]]:
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield (line.split("\t") + [""] * columns)[:columns]


def _fill(pattern: str, known: dict[str, str]) -> str:
    return re.sub(r"\{([A-Z_]+)\}", lambda name: known[name[1]], pattern)


def _get_function(text: str) -> Callable | None:
    """Of "by NAME", a function of this module."""
    return globals()[text.removeprefix("by ")] if text.startswith("by ") else None


def _read_format(operands: str) -> Callable[[re.Match, str], str]:
    """template; by FUNCTION; GROUP[ in TABLE][, on cores]"""
    place, on_cores, _ = operands.partition(", on cores")
    group, _, table = place.partition(" in ")

    def find_format(found: re.Match, name: str) -> str:
        named = WORDS[table or "formats"].get(found[group], "") if group else ""
        return "tf32" if on_cores and named == "fp32" else named

    return (lambda found, name: template_format(name)) if group == "template" else _get_function(group) or find_format


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
        compiled, by, find_format = (
            re.compile(_fill(pattern, known)),
            _get_function(name) or name,
            _read_format(operands),
        )
        told = (Role[role], TensorCores[cores], find_format, of_family, pieces[tail], alignment, why_not, bool(in_word))
        families.append(Family(compiled, by, *told))
    return tuple(families)


FAMILIES = _read_families()
