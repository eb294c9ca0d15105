"""Takes the name of a kernel apart, after the table in kernel_families.py,
and says in plain sentences what it tells."""

import re
from dataclasses import dataclass
from functools import lru_cache

from megatron_lite.analysis.kernels.kernel_families import FAMILIES, Family, Meaning, Piece, Word, find_functor
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES, Role, TensorCores
from megatron_lite.analysis.kernels.kernel_words import (
    LONGEST,
    MAX_NAMES,
    OTHER,
    TABLES,
    WORDS,
    demangled,
    get_kernel_role,
    name_format,
    template_format,
)

Seen = tuple[int, str | None, str | None, str | None]  # place, text to show and to explain, what is said of it
SHORTEST = 80  # characters of a name of which nothing is understood
_PATTERNS = lru_cache(maxsize=None)(re.compile)  # of the pieces: more than re keeps
_ON_TENSOR_CORES = re.compile(r"tensorop|mma_sync|wgmma|tfloat32_t|warpspecialized|mfma|tcgen05", re.IGNORECASE)
_SINCE_AMPERE = re.compile(r"sm(8|9|10|12)\d", re.IGNORECASE)
_MATRICES = re.compile(r"gemm|matmul|b?mm_", re.IGNORECASE)
_VECTORS = re.compile(r"gemv|wvsplit|mat_vec", re.IGNORECASE)
_HELPERS = re.compile(r"offsets|nchw|nhwc|scalepacked|im2col|reduc|merge_?(attn_?)?states?", re.IGNORECASE)
_RETURN_TYPES = re.compile(r"^(?:static |inline |void |__global__ )+")
_SAYING = re.compile(r"Flash(?:Attn|Attention)\w+|ImplicitGemm\w+|GemmUniversal\w*|ReduceSplitK|ReduceOp\w*|Gemm\w*")


@dataclass(frozen=True)
class NamePart:
    """One piece of a name. `inferred`: its meaning is seen in practice, but no vendor documents it."""

    text: str  # as it stands in the name
    field: str  # "architecture", "instruction tile", "layout" ...
    meaning: str  # a plain clause
    inferred: bool = False


@dataclass(frozen=True)
class KernelName:
    """What a name says, and how to read it."""

    name: str
    family: str  # "cuBLAS", "FlashAttention", ... "" where nobody is recognized
    role: Role
    tensor_cores: TensorCores
    precision: str  # of the operands: "fp16", "bf16", "fp16/bf16" (16 bits: not said which), "tf32", ...; "" unknown
    parts: tuple[NamePart, ...] = ()  # in the order of the name
    why_not: str = ""  # where tensor_cores is NO: the reason, a few words
    alignment: int | None = None  # elements at which operands are known to be aligned; 1 and 2 tell of odd sizes
    causal: bool | None = None  # attention: is half of the scores skipped? None: the name does not say
    note: str = ""  # a trap in reading it


@lru_cache(maxsize=MAX_NAMES)
def taken_apart(name: str) -> KernelName:
    """What the name says. Any string is taken; what no family fits has no parts."""
    text, role = demangled(name[:LONGEST]), get_kernel_role(name)
    # The part that follows CUTLASS' scheme: void cutlass::Kernel2<cutlass_80_...>(...) -> cutlass_80_...
    inner = re.search(r"Kernel2?<\s*(\w+)", text)
    word = inner[1] if inner and "cutlass" in text else re.split(r"[<(]", text.strip().removeprefix("void "))[0]
    for family in FAMILIES:
        if found := family.pattern.search(word if family.in_word else text):
            # The table of roles decides; a family's own role is for what that one does not know.
            return _read(name, family, found, family.role if role is Role.OTHER else role)
    library = next((library for pattern, library in TABLES["libraries"] if re.search(pattern, text)), "")
    if role not in MATRIX_ROLES:
        return KernelName(name, library, role, TensorCores.NOT_APPLICABLE, "")
    precision = name_format(text) or template_format(text)
    cores = TensorCores.NOT_APPLICABLE if _HELPERS.search(text) else TensorCores.UNKNOWN
    if _ON_TENSOR_CORES.search(text) or ("gemm" in text.lower() and _SINCE_AMPERE.search(text)):
        cores = TensorCores.YES
    # no other unit multiplies such numbers, but products with a vector widen them on the CUDA cores
    if precision in ("fp8", "fp4") and _MATRICES.search(text) and not _VECTORS.search(text):
        cores = TensorCores.YES
    return KernelName(name, library, role, cores, precision)


def _read(name: str, family: Family, found: re.Match[str], role: Role) -> KernelName:
    text = found.string
    precision = family.find_format(found, text)
    head = [part for piece in family.pieces for _, part in _find_pieces(piece, found, text, precision)]
    rest = (found.groupdict().get("rest") or "") if family.tail else ""
    tail = [one for piece in family.tail for one in _find_pieces(piece, found, rest, precision)]
    parts = (*head, *(part for _, part in sorted(tail, key=lambda one: one[0])))
    alignment = _PATTERNS(family.alignment).search(text) if family.alignment else None
    aligned = int(alignment[1]) if alignment and alignment.groups() else 1 if alignment else None
    causal = next((part.text in ("true", "1") for part in parts if part.field == "causal"), None)
    without = ""  # the reason, in a few words, that it does without tensor cores
    if family.cores is TensorCores.NO:
        without = "odd sizes" if (aligned or 8) <= 2 else f"{precision or 'unknown'} operands on the CUDA cores"
        without = "fp32 operands" if precision == "fp32" else without
        words = {**found.groupdict(), "precision": precision, "known": precision or "unknown"}
        without = family.why_not.format(**words) or without
    note = next((WORDS["notes"][part.field] for part in parts if part.field in WORDS["notes"]), "")
    by = family.name if isinstance(family.name, str) else family.name(text)
    return KernelName(name, by, role, family.cores, precision, parts, without, aligned, causal, note)


def _find_pieces(piece: Piece, found: re.Match[str], text: str, precision: str) -> list[tuple[int, NamePart]]:
    """(place in the text, the part) of each that is found; Piece says how it is written."""
    where, groups = piece.where, found.groupdict()
    if callable(where):
        seen: list[Seen] = [(0, shown, shown, told) for shown, told in where(found, text)]
    elif where.startswith("="):
        seen = [(0, found[where[1:]], found[where[1:]], None)]
    elif match := _PATTERNS(where).search(text):
        own = match.groupdict()
        groups |= own
        shown = own.get("t", match[0].strip("_"))
        seen = [(match.start("v") if "v" in own else match.start(), shown, own.get("v", shown), None)]
    else:
        return []
    parts = []
    for place, shown, v, told in seen:
        said = told or ("" if shown is None else _explain(piece.meaning, v or "", precision, groups))
        if said and shown is not None:
            shown, said = said if isinstance(said, tuple) else (shown, said)
            parts.append((place, NamePart(shown, piece.field, said, piece.inferred)))
    return parts


def _explain(meaning: Meaning, v: str, precision: str, groups: dict[str, str | None]) -> str | tuple[str, str]:
    """'' where there is nothing to say."""
    if isinstance(meaning, dict):
        return meaning.get(v, meaning.get(OTHER, ""))
    if callable(meaning):
        return meaning(v)
    if "{precision}" in meaning and not precision:
        return ""
    words = {name: Word(word) for name, word in (groups | {"v": v}).items() if word is not None}
    return meaning.format_map(words | {"precision": precision, "any": precision or "an unknown format"})


@lru_cache(maxsize=MAX_NAMES)
def short_name(name: str) -> str:
    """No return type, no arguments; of the template arguments only what says what the kernel does."""
    text = re.sub(r"\(anonymous namespace\)::|<unnamed>::", "", demangled(name[:LONGEST]))
    text = _RETURN_TYPES.sub("", text.strip())
    scheme = re.match(r"cutlass\w*::Kernel2?<\s*(\w+)\s*>", text)
    if scheme:
        return scheme[1]
    if re.match(r"\[?(CUDA )?mem(cpy|set)", text, re.IGNORECASE):
        return text
    head = re.split(r"[<(]", text)[0].strip()
    if head.startswith(("at::", "c10::", "at_cuda_detail::")):
        head = head.rpartition("::")[2]
    function = find_functor(text) if "<" in text else ""
    if not function and "cutlass" in head:
        saying = _SAYING.search(text)
        function = saying[0] if saying else ""
    return f"{head}<{function}>" if function else head or text[:SHORTEST]


def in_words(name: str) -> list[str]:
    """Lines for the terminal: what it is for, each piece of the name, tensor cores, traps. Never fails."""
    kernel = taken_apart(name)
    by = f" (by {kernel.family})" if kernel.family else ""
    lines = [short_name(name), f"What it is for: {WORDS['purposes'][kernel.role.name]}{by}."]
    width = min(max((len(part.text) for part in kernel.parts), default=0), 32)
    for part in kernel.parts:
        lines.append(f"  {part.text:<{width}}  {part.field}: {part.meaning}{' (*)' if part.inferred else ''}")
    if any(part.inferred for part in kernel.parts):
        lines.append("(*) inferred from use: not documented.")
    if kernel.role in MATRIX_ROLES:
        precision = kernel.precision.replace("/", " or ")
        told = {
            TensorCores.YES: f"yes{f', with {precision} operands' if precision else ''}",
            TensorCores.UNKNOWN: "unknown from the name",
            TensorCores.NOT_APPLICABLE: "not applicable",
            TensorCores.NO: f"no ({kernel.why_not}){WORDS['remedies'].get(kernel.why_not, '')}",
        }
        lines.append(f"Tensor cores: {told[kernel.tensor_cores]}.")
    return [*lines, f"Beware: {kernel.note}."] if kernel.note else lines
