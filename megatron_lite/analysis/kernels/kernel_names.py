"""Takes the name of a kernel apart, after the table in kernel_families.py,
and says in plain sentences what it tells."""

import re
from dataclasses import dataclass
from functools import lru_cache

from megatron_lite.analysis.kernels.kernel_families import FAMILIES, Family, Meaning, Piece, Word, find_functor
from megatron_lite.analysis.kernels.kernel_results import MATRIX_ROLES, Role, TensorCores
from megatron_lite.analysis.kernels.kernel_words import (
    LONGEST,
    MAX_KEPT_ANSWERS,
    OTHER_KEY,
    TABLES,
    WORDS,
    demangled,
    get_kernel_role,
    name_format,
    template_format,
)

MAX_UNKNOWN_LETTERS = 80  # characters of a name of which nothing is understood
MAX_PART_WIDTH = 32  # of the column of parts
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
    """A piece of a name. `inferred`: its meaning is seen in practice, but no vendor documents it."""

    text: str  # as it stands in the name
    field: str  # "architecture", "instruction tile", "layout" ...
    meaning: str  # a plain clause
    inferred: bool = False


@dataclass(frozen=True)
class KernelName:
    """Meaning of a kernel's name, and how to read it."""

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


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
def taken_apart(name: str) -> KernelName:
    """Explain a kernel's name. Any string is taken; what no family fits has no parts."""
    text = demangled(name[:LONGEST])
    role = get_kernel_role(name)
    word = _find_scheme_word(text)
    for family in FAMILIES:
        found = family.pattern.search(word if family.in_word else text)
        if found:
            # The table of roles decides; a family's own role is for what that one does not know.
            return _read(name, family, found, family.role if role is Role.OTHER else role)
    is_matrix = role in MATRIX_ROLES
    precision = ""
    if is_matrix:
        precision = name_format(text) or template_format(text)
    return KernelName(
        name,
        family=_find_library(text),
        role=role,
        tensor_cores=_guess_cores(text, precision) if is_matrix else TensorCores.NOT_APPLICABLE,
        precision=precision,
    )


def _find_scheme_word(text: str) -> str:
    """The part that follows CUTLASS' scheme: void cutlass::Kernel2<cutlass_80_...>(...) -> cutlass_80_..."""
    inner = re.search(r"Kernel2?<\s*(\w+)", text)
    if inner and "cutlass" in text:
        return inner[1]
    function, *_ = re.split(r"[<(]", text.strip().removeprefix("void "))
    return function


def _find_library(text: str) -> str:
    """The library of a name of no family; '' for unknown."""
    for pattern, library in TABLES["libraries"]:
        if re.search(pattern, text):
            return library
    return ""


def _guess_cores(text: str, precision: str) -> TensorCores:
    """Guess whether matrix work of no known family runs on tensor cores."""
    is_recent_product = "gemm" in text.lower() and _SINCE_AMPERE.search(text)
    if _ON_TENSOR_CORES.search(text) or is_recent_product:
        return TensorCores.YES
    # no other unit multiplies such numbers, but products with a vector widen them on the CUDA cores
    is_narrow = precision in ("fp8", "fp4")
    if is_narrow and _MATRICES.search(text) and not _VECTORS.search(text):
        return TensorCores.YES
    return TensorCores.NOT_APPLICABLE if _HELPERS.search(text) else TensorCores.UNKNOWN


def _read(
    name: str,
    family: Family,
    found: re.Match[str],
    role: Role,
) -> KernelName:
    """Read the name of a kernel of the family, whose pattern was found."""
    text = found.string
    precision = family.find_format(found, text)
    parts = _find_parts(family, found, precision)
    alignment = _find_alignment(family, text)
    without = ""
    if family.cores is TensorCores.NO:
        without = _explain_without_cores(family, found, precision, alignment)
    return KernelName(
        name,
        family=family.name if isinstance(family.name, str) else family.name(text),
        role=role,
        tensor_cores=family.cores,
        precision=precision,
        parts=parts,
        why_not=without,
        alignment=alignment,
        causal=_find_causal(parts),
        note=_find_note(parts),
    )


def _find_parts(family: Family, found: re.Match[str], precision: str) -> tuple[NamePart, ...]:
    """The parts of a family's name: its pieces, and behind them those of the rest, by their place in it."""
    parts = []
    for piece in family.pieces:
        parts += [part for _, part in _find_pieces(piece, found, found.string, precision)]
    if family.tail:
        rest = found.groupdict().get("rest") or ""
        tail = []
        for piece in family.tail:
            tail += _find_pieces(piece, found, rest, precision)
        tail.sort(key=lambda one: one[0])
        parts += [part for _, part in tail]
    return tuple(parts)


def _find_alignment(family: Family, text: str) -> int | None:
    """Elements at which operands are known to be aligned; a pattern without a number means one."""
    if not family.alignment:
        return None
    found = _PATTERNS(family.alignment).search(text)
    if not found:
        return None
    return int(found[1]) if found.groups() else 1


def _find_causal(parts: tuple[NamePart, ...]) -> bool | None:
    """The flag for a causal mask; None where no part is one."""
    for part in parts:
        if part.field == "causal":
            return part.text in ("true", "1")
    return None


def _find_note(parts: tuple[NamePart, ...]) -> str:
    """The trap in reading the first part that has one; '' for none."""
    notes = WORDS["notes"]
    for part in parts:
        if part.field in notes:
            return notes[part.field]
    return ""


def _explain_without_cores(
    family: Family,
    found: re.Match[str],
    precision: str,
    alignment: int | None,
) -> str:
    """The reason, in a few words, that a kernel of the family does without tensor cores."""
    known = precision or "unknown"
    words = found.groupdict() | {"precision": precision, "known": known}
    told = family.why_not.format_map(words)
    if told:
        return told
    if precision == "fp32":
        return "fp32 operands"
    if alignment and alignment <= 2:
        return "odd sizes"
    return f"{known} operands on the CUDA cores"


def _find_pieces(
    piece: Piece,
    found: re.Match[str],
    text: str,
    precision: str,
) -> list[tuple[int, NamePart]]:
    """Find pieces in a text, each with its place; Piece says how it is written."""
    where = piece.where
    groups = found.groupdict()
    if callable(where):
        parts = []
        for shown, told in where(found, text):
            said = told or _explain(piece.meaning, shown, precision, groups)
            parts += _make_part(piece, 0, shown, said)
        return parts
    if where.startswith("="):
        shown = found[where[1:]]
        if shown is None:
            return []
        return _make_part(piece, 0, shown, _explain(piece.meaning, shown, precision, groups))
    match = _PATTERNS(where).search(text)
    if not match:
        return []
    own = match.groupdict()
    shown = own.get("t", match[0].strip("_"))
    if shown is None:
        return []
    explained = own.get("v", shown) or ""
    place = match.start("v") if "v" in own else match.start()
    return _make_part(piece, place, shown, _explain(piece.meaning, explained, precision, groups | own))


def _make_part(
    piece: Piece,
    place: int,
    shown: str,
    said: str | tuple[str, str],
) -> list[tuple[int, NamePart]]:
    """Make parts with their places; none where nothing is said. A meaning may say what to show instead."""
    if isinstance(said, tuple):
        shown, said = said
    if not said:
        return []
    return [(place, NamePart(shown, piece.field, said, piece.inferred))]


def _explain(
    meaning: Meaning,
    v: str,
    precision: str,
    groups: dict[str, str | None],
) -> str | tuple[str, str]:
    """Explain a piece of a name; '' where there is nothing to say.

    Args:
        meaning: as in Piece.
        v: what is explained.
        precision: the format of the operands; "" for unknown.
        groups: of the patterns that were found.
    """
    if isinstance(meaning, dict):
        return meaning.get(v, meaning.get(OTHER_KEY, ""))
    if callable(meaning):
        return meaning(v)
    if "{precision}" in meaning and not precision:
        return ""
    words = {"v": Word(v), "precision": precision, "any": precision or "an unknown format"}
    for name, word in groups.items():
        if word is not None and name not in words:
            words[name] = Word(word)
    return meaning.format_map(words)


@lru_cache(maxsize=MAX_KEPT_ANSWERS)
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
    if function:
        return f"{head}<{function}>"
    return head or text[:MAX_UNKNOWN_LETTERS]


def in_words(name: str) -> list[str]:
    """Lines for the terminal: what it is for, each piece of the name, tensor cores, traps. Never fails."""
    kernel = taken_apart(name)
    purpose = WORDS["purposes"][kernel.role.name]
    by = f" (by {kernel.family})" if kernel.family else ""
    lines = [short_name(name), f"What it is for: {purpose}{by}."]
    longest = max((len(part.text) for part in kernel.parts), default=0)
    width = min(longest, MAX_PART_WIDTH)
    for part in kernel.parts:
        mark = " (*)" if part.inferred else ""
        lines.append(f"  {part.text:<{width}}  {part.field}: {part.meaning}{mark}")
    if any(part.inferred for part in kernel.parts):
        lines.append("(*) inferred from use: not documented.")
    if kernel.role in MATRIX_ROLES:
        lines.append(f"Tensor cores: {_describe_cores(kernel)}.")
    if kernel.note:
        lines.append(f"Beware: {kernel.note}.")
    return lines


def _describe_cores(kernel: KernelName) -> str:
    """Write "yes, with fp16 or bf16 operands"."""
    if kernel.tensor_cores is TensorCores.UNKNOWN:
        return "unknown from the name"
    if kernel.tensor_cores is TensorCores.NOT_APPLICABLE:
        return "not applicable"
    if kernel.tensor_cores is TensorCores.NO:
        remedy = WORDS["remedies"].get(kernel.why_not, "")
        return f"no ({kernel.why_not}){remedy}"
    precision = kernel.precision.replace("/", " or ")
    return f"yes, with {precision} operands" if precision else "yes"
