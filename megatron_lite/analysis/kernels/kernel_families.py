"""The table of kernel names: a row per family of names, which the first row that fits decides. kernel_names.py applies it.

Names are no interface. cuBLAS of 2017 to 2022, CUTLASS and cuDNN's products follow the CUTLASS profiler guide: architecture, unit,
<accumulator><instruction><operation>, formats, threadblock MxN, K of a slice x stages, layouts, alignment; with words of their own that
nobody documents, as xmma's, nvjet's and Tensile's. What is only seen in use is marked as inferred.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.analysis.kernels.kernel_results import Role, TensorCores
from megatron_lite.analysis.kernels.number_formats import ACCUMULATORS, FORMATS, TABLES, WORDS, template_format
from megatron_lite.analysis.kernels.roles import fused_operators

YES, NO, UNKNOWN, NONE = TensorCores.YES, TensorCores.NO, TensorCores.UNKNOWN, TensorCores.NOT_APPLICABLE
INFERRED = True  # behind a piece


@dataclass(frozen=True)
class Family:
    """A row.

    pattern: searched in the whole name; with in_word in the word that follows CUTLASS' scheme.
    precision: (the match, the name) -> number format of the operands, "" for unknown.
    pieces, tail: (where, field, meaning[, INFERRED]), in this order, and behind them by their place in the match's group "rest".
        where: "=GROUP" of the match; a pattern, whose group t (else all of it) is shown and v (else that) explained; or a function of the
        match and the name that gives (text, meaning or None) of each piece. meaning: a text with {v}, {precision} (no piece where that is
        unknown) or {any}; a dict by v (None: all others; no piece without an entry); or a function of v, of the meaning or (text, meaning).
    """

    pattern: str
    name: str | Callable[[str], str]
    role: Role  # only where the table of roles knows nothing
    cores: TensorCores
    precision: Callable[[re.Match, str], str] = lambda found, name: ""
    pieces: tuple = ()
    tail: tuple = ()
    why_not: str = ""  # for cores NO: a reason of its own
    alignment: str = ""  # pattern of a number
    note: str = ""
    in_word: bool = False


# --- words for pieces
ARCHITECTURES = WORDS["architectures"]
IDLE = "the tensor cores stand idle"


def describe_architecture(sm: str) -> tuple[str, str]:
    digits = sm.lower().removeprefix("sm")
    era = next((f" ({era.capitalize()})" for era, number in ARCHITECTURES.items() if number == f"sm{digits}"), "")
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


def _describe_nvjet(types: str) -> str:
    operands, sums, result = (WORDS["nvjet types"].get(types[at], "an unknown format") for at in (0, -2, -1))
    return f"operands in {'tf32' if operands == 'fp32' else operands}, sums in {sums}, result in {result}"


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


def _functor_pieces(found: re.Match, name: str) -> list[tuple[str, None]]:
    return [(functor, None)] if (functor := find_functor(name)) else []


# --- precision


def _of_template(found: re.Match, name: str) -> str:
    return template_format(name)


def _of_group(group: str, formats: dict[str, str] = FORMATS, on_cores: bool = False) -> Callable:
    """on_cores: tensor cores take no plain fp32."""

    def precision(found: re.Match, name: str) -> str:
        named = formats.get(found[group], "")
        return "tf32" if on_cores and named == "fp32" else named

    return precision


def _find_types(found: re.Match) -> list[str]:
    return list(dict.fromkeys(_FORMAT.findall(f"{found['before']}_{found['rest']}")))


def _of_product(on_cores: bool) -> Callable:
    """Named formats first; else what the accumulator's letter implies."""
    implied = {"h": "fp16", "s": "tf32", "d": "fp64", "i": "int8"} if on_cores else ACCUMULATORS

    def precision(found: re.Match, name: str) -> str:
        named = FORMATS.get(found["math"] or "") or next((FORMATS[one] for one in _find_types(found)), "")
        return "tf32" if on_cores and named == "fp32" else named or implied.get(found["acc"], "")

    return precision


def _of_unknown_product(found: re.Match, name: str) -> str:
    """An accumulator's letter means what it means within the scheme only."""
    return _of_product(False)(found, name) if _find_types(found) else ""


def _format_pieces(found: re.Match, name: str) -> list[tuple[str, str]]:
    """(text, meaning) of the formats that a product on tensor cores names."""
    types = _find_types(found)
    if not types and found["acc"] == "s" and not found["math"]:
        return [("", "none is named: operands in fp32, rounded to TF32")]
    return [
        (one, f"operands in {FORMATS[one]}" if at == 0 else f"{FORMATS[one]} appears too, sums or result")
        for at, one in enumerate(types)
    ]


def _sum_pieces(found: re.Match, name: str) -> list[tuple[str, str]]:
    return [(found["acc"] + found["kind"], f"{ACCUMULATORS[found['acc']]} on the CUDA cores: {IDLE}")]


def _flash_pieces(found: re.Match, name: str) -> list[tuple[str, str]]:
    meaning = f"{found['q']} queries times {found['k']} keys at a time; no score ever reaches memory"
    return [(f"{found['q']}, {found['k']}", meaning)]


def _family_of_product(word: str) -> str:
    return "CUTLASS" if "cutlass" in word else "cuDNN" if "cudnn" in word else "cuBLAS"


def _of_collective(found: re.Match, name: str) -> str:
    """Bytes of whatever format are none."""
    types = re.findall(_TOKEN.format("|".join(WORDS["NCCL types"])), found["rest"])
    return WORDS["NCCL types"][types[-1]].replace("bytes", "") if types else ""


# --- vocabularies
_FUNCTIONS = re.compile(r"\w*(Functor(OnSelf)?(_\w+)?|Ops|_kernel(_cuda|_impl)?|CUDAKernelImpl|_out|_scalar|_functor)")
_WRAPPERS = tuple(WORDS["functors"]["wrappers"].split())
_REPRESENTATIVE = ("NCCL compiles one kernel for a whole class of operations and calls the code that is really wanted from it: "
                   "LL, Sum and RING may stand in the name while another protocol runs")  # fmt: skip

# --- patterns
_ERAS = "|".join(f"(?:^|_){era}_" for era in ARCHITECTURES)
_FORMAT = re.compile(r"(?<![a-z0-9])(" + "|".join(FORMATS) + r")(?![a-z0-9])")
_INT, _BOOL = r"(?:\(int\))?", r"(?:\(bool\))?(?:true|false|0|1)"  # Nsight Systems writes (int)64 and (bool)1
_FLASH = rf"Flash_(?:fwd|bwd)_kernel_traits<{_INT}\d+, {_INT}(?P<q>\d+), {_INT}(?P<k>\d+), {_INT}\d+"
_FLAG = r"(?:\(bool\))?(?P<t>true|false|0|1)"
_BEHIND_TRAITS = rf"{_FLASH}.*?>>?\s*, "  # is_dropout, is_causal, ...; kernels of divided sequences have no dropout
_FMHA = r"fmha_cutlass(?P<way>[FB])_(?P<type>{type})_(?P<aligned>aligned|notaligned)_(?P<tile>\d+x\d+)(?P<rest>\w*)_sm(?P<sm>{sm})"
_F = r"(?:bf16|tf32|e4m3|e5m2|f\d+|i\d+|u\d+|s8)"
_XMMA = rf"(?P<sm>sm\d+)_xmma_(?P<what>{{what}})_(?P<operands>(?P<a>{_F}){_F})_(?P<result>{_F}{_F})_(?P<sums>{_F})_(?P<rest>{{rest}})"
_XMMA_CONVOLUTION = r"\w*?(?:cudnn|fprop|dgrad|wgrad|implicit_gemm|conv(?!ert))\w*?"
_ON_CUDA_CORES = r"\w*?(?:ffma|simt|dfma)\w*"
_CORE = r"(?<![a-z])(?P<acc>[hsdicz])(?P<instruction>{instruction})(?P<math>bf16|f16|tf32|fast\w*?)?_?(?P<kind>gemm|cudnn|fprop|dgrad|wgrad)(?P<rest>.*)"
_MATRIX_CORE, _ANY_CORE = (_CORE.format(instruction=rf"(?:\d{{3,6}}|\d+x\d+x\d+){times}") for times in ("", "?"))
_OF_THE_SCHEME = rf"(?:cutlass|magma|[sdhi]cudnn|{_ERAS})"
_TENSILE = r"Cijk_(?P<layout>A[a-z]{3,4}_B[a-z]{3,4})_(?P<types>(?=[A-Z0-9])(?P<a>F8|B8|I8|[A-Z]?)[A-Z0-9]*)(?P<rest>"
_NCCL = r"nccl(?:Sym(?:k)?DevKernel|DevKernel|Kernel)_(?P<operation>[A-Za-z]+)(?P<rest>\w*)"

# --- pieces that several rows have


def _read_pieces() -> dict[str, tuple]:
    """{family: its pieces} of kernel_pieces.tsv."""
    pieces: dict[str, tuple] = {}
    for line in (Path(__file__).parent / "kernel_pieces.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        family, where, field, meaning = line.split("\t")
        how, _, name = meaning.partition(" ")
        found = WORDS[name] if how == "in" and name in WORDS else globals()[name] if how == "by" else meaning
        inferred = (INFERRED,) if field.endswith(" (*)") else ()
        pieces[family] = (*pieces.get(family, ()), (where, field.removesuffix(" (*)"), found, *inferred))
    return pieces


PIECES = _read_pieces()
_TOKEN = r"(?<![A-Za-z0-9])(?P<v>{})(?![A-Za-z0-9])"
_NCCL_PIECES = (("=operation", "operation", WORDS["collectives"]),)
_XMMA_PIECES = (
    ("=sm", "architecture", describe_architecture), ("=what", "operation", lambda v: v.replace("_", " ")),
    ("=operands", "operands", lambda v: " times ".join(FORMATS.get(one, one) for one in re.findall(_F, v))),
    ("=result", "result", lambda v: f"stored as {FORMATS.get(one := re.match(_F, v)[0], one)}", INFERRED),
    ("=sums", "accumulator", lambda v: f"sums are kept in {FORMATS.get(v, v)}", INFERRED),
)  # fmt: skip
_PRODUCT_HEAD = (
    *((rf"(?:^|_){era}(?=_)", "architecture", f"written for {era.capitalize()} ({sm}); newer GPUs run it too") for era, sm in ARCHITECTURES.items()),
    (r"cutlass(?:3x)?_(?:sm)?(?P<v>\d{2,3})_", "architecture", describe_architecture),
    (r"wmma_tensorop|tensorop|simt", "unit", {"simt": "runs on the CUDA cores", None: "runs on the tensor cores"}),
)  # fmt: skip
_ON_CORES = (
    *_PRODUCT_HEAD, (_format_pieces, "format", ""), ("=acc", "accumulator", {letter: f"sums are kept in {sums}" for letter, sums in ACCUMULATORS.items()}),
    ("=instruction", "instruction tile",
     describe_instruction),
)  # fmt: skip
_WITHOUT_CORES = (*_PRODUCT_HEAD, (_sum_pieces, "operation", ""))
_FLASH_PIECES = (
    ("flash_(?P<v>fwd|bwd)", "operation", WORDS["passes"]),
    (rf"kernel_traits<{_INT}(?P<t>\d+)", "head width", "heads of at most {v} elements"),
    (_flash_pieces, "block tile", ""),
    ("(?P<t>)", "format", "operands in {any}"),
)
_TUPLE = r"tuple<cute::C<\d+>, cute::C<\d+>, cute::C<\d+>"
_OPERANDS = ("(?P<t>)", "format", "operands in {precision}")
_FLASH_3_PIECES = (
    (lambda found, name: [(found[0], f"attention, {'backward' if found['way'].startswith('B') else 'forward'} pass")], "operation", ""),
    ("=sm", "architecture", describe_architecture), _OPERANDS,
    (rf"tuple<(?P<v>cute::C<\d+>, cute::C<\d+>, cute::C<\d+>)\s*>(?!.*{_TUPLE})", "block tile",
     lambda v: (", ".join(re.findall(r"\d+", v)), describe_attention_tile(v)), INFERRED),
)  # fmt: skip
_CUDNN = (r"cudnn_generated_\w*?sdpa_(?P<sm>sm\d+)_\w*?(?P<way>fprop|bprop)_(?:(?P<unit>wgmma|wmma|mma|tcgen\w*?)_)?"
          r"(?P<type>f16|bf16|e4m3|e5m2|f8|fp8|f32)?(?P<rest>\w*)")  # fmt: skip
_IGEMM = r"(?i)igemm_(?P<way>fwd|bwd|wrw)_gtc{}\w*?(?P<type>fp32|fp16|bf16|int8)"
_TRITON = r"triton_{}_?fused_(?P<operators>\w*?)(?:_(?P<number>\d+))?$"
_TRITON_PIECES = (
    ("=kind", "kind", WORDS["kinds"]), ("=operators", "fused operators", lambda v: ", ".join(fused_operators(v)) or "none named"),
    ("=number", "number", "tells kernels of one graph apart"),
)  # fmt: skip

# --- the table
FAMILIES = (
    Family(_TRITON.format("(?P<kind>tem)"), "Triton (torch.compile)", Role.GEMM, UNKNOWN, pieces=_TRITON_PIECES),
    Family(_TRITON.format("(?P<kind>[a-z]{2,5}|split_scan)?"), "Triton (torch.compile)", Role.FUSED, NONE, pieces=_TRITON_PIECES),
    Family(_NCCL, "NCCL", Role.COMMUNICATION, NONE, _of_collective, _NCCL_PIECES, tail=PIECES["NCCL tail"], note=_REPRESENTATIVE),
    # fp16 runs on tensor cores from sm70 on, fp32 from sm80 on (three TF32 products each).
    Family(_FMHA.format(type="f32", sm=r"[1-7]\d(?!\d)"), "memory-efficient attention", Role.ATTENTION, NO, _of_group("type"), PIECES["memory-efficient attention"],
           why_not="{precision} before its time on sm{sm}", alignment="notaligned"),
    Family(_FMHA.format(type="f16|bf16", sm=r"[1-6]\d(?!\d)"), "memory-efficient attention", Role.ATTENTION, NO, _of_group("type"), PIECES["memory-efficient attention"],
           why_not="{precision} before its time on sm{sm}", alignment="notaligned"),
    Family(_FMHA.format(type="f16|bf16|f32", sm=r"\d+"), "memory-efficient attention", Role.ATTENTION, YES, _of_group("type"), PIECES["memory-efficient attention"], alignment="notaligned"),
    Family(_CUDNN, "cuDNN attention", Role.ATTENTION, YES, _of_group("type", WORDS["cuDNN types"]), PIECES["cuDNN attention"], PIECES["cuDNN attention tail"]),
    *(Family(rf"(?is)^(?=.*flash).*?{word}", "FlashAttention", Role.ATTENTION, NONE, _of_template, (("(?P<t>)", "operation", f"a helper: {meaning}"),))
      for word, meaning in TABLES["FlashAttention helpers"]),
    Family(r"splitkv.*?" + _FLASH, "FlashAttention 2", Role.ATTENTION, YES, _of_template, (
        *_FLASH_PIECES, (rf"{_BEHIND_TRAITS}{_FLAG}, {_BOOL}", "causal", WORDS["causal"]),
        ("splitkv", "operation", "one sequence's keys are divided among blocks"))),
    Family(_FLASH, "FlashAttention 2", Role.ATTENTION, YES, _of_template, (
        *_FLASH_PIECES, (rf"{_BEHIND_TRAITS}{_BOOL}, {_FLAG}", "causal", WORDS["causal"]), (rf"{_BEHIND_TRAITS}{_FLAG}, {_BOOL}", "dropout", WORDS["dropout"]))),
    Family(r"FlashAttn(?P<way>Fwd|Bwd)Sm(?P<sm>\d+)", "FlashAttention 3", Role.ATTENTION, YES, _of_template, _FLASH_3_PIECES),
    Family(r"FlashAttention(?P<way>Forward|Backward)Sm(?P<sm>\d+)", "FlashAttention 4", Role.ATTENTION, YES, _of_template, _FLASH_3_PIECES),
    # AMD's libraries: unknown where a name says neither that matrix instructions (MFMA, WMMA) run nor that they do not.
    Family(_IGEMM.format(r"x\d*_"), "MIOpen (implicit GEMM)", Role.CONVOLUTION, YES, _of_group("type"), PIECES["MIOpen"]),
    Family(_IGEMM.format(""), "MIOpen (implicit GEMM)", Role.CONVOLUTION, UNKNOWN, _of_group("type"), PIECES["MIOpen"]),
    Family(r"(?i)(?:^|\W)ck::(?:\w|::)*(?:gemm|conv|contraction)\w*?_dl(?:ops)?_", "Composable Kernel", Role.GEMM, NO, _of_template, (_OPERANDS,)),
    Family(r"(?i)(?:^|\W)ck(?:_tile)?::.*?(?:gemm|conv(?!ert)|contraction|fmha|flatmm)", "Composable Kernel", Role.GEMM, YES, _of_template, (_OPERANDS,)),
    Family(r"nvjet_(?:(?P<sm>sm\d+)_)?(?P<types>(?P<a>[a-z0-9])[a-z0-9]{2,5})_(?P<tile>\d+x\d+)_(?P<stages>\d+x\d+)(?P<rest>\w*)", "cuBLASLt (nvjet)",
           Role.GEMM, YES, _of_group("a", WORDS["nvjet types"], on_cores=True), (
        ("=sm", "architecture", describe_architecture), ("=types", "formats", _describe_nvjet, INFERRED),
        ("=tile", "block tile", describe_tile, INFERRED), ("=stages", "stages", describe_stages, INFERRED)), PIECES["nvjet tail"]),
    *(Family(_XMMA.format(what=what, rest=rest), name, role, cores, _of_group("a", on_cores=cores is YES), _XMMA_PIECES, PIECES["xmma tail"], alignment=r"_aligna(\d+)")
      for what, name, role in ((_XMMA_CONVOLUTION, "cuDNN (xmma)", Role.CONVOLUTION), (r"\w+?", "cuBLASLt (xmma)", Role.GEMM))
      for rest, cores in ((_ON_CUDA_CORES, NO), (r"\w+", YES))),
    *(Family(begin + _TENSILE + rest, "Tensile (hipBLASLt, rocBLAS)", Role.GEMM, cores, _of_group("a", WORDS["Tensile types"]), PIECES["Tensile"], PIECES["Tensile tail"])
      # A tile per thread (TT) means no matrix instruction.
      for begin, rest, cores in (("", r"\w*_MI\d+x\d\w*)", YES), (r"(?=Cijk_A[a-z]{3,4}_B[a-z]{3,4}_S)", r"_\w+)", NO), ("", r"_\w*_TT\d+_\d\w*)", NO), ("", r"_\w+)", UNKNOWN))),
    *(Family(pattern, "cuBLAS", Role.GEMM, NONE, _of_template, ((pattern, "operation", meaning),)) for pattern, meaning in TABLES["helpers of products"]),
    Family(r"^\[?(?:CUDA )?[Mm]emset", "copy engine", Role.TRANSFER, NONE, pieces=(("[Mm]emset", "operation", "fills memory"),)),
    Family(r"^\[?(?:CUDA )?[Mm]emcpy\s*(?P<way>[HDP]to[HDP])?", "copy engine", Role.TRANSFER, NONE, pieces=(
        (lambda found, name: [(found["way"] or "", WORDS["directions"][found["way"]])], "direction", ""),
        ("Pageable", "memory", "host memory that is not pinned: the copy goes by way of a buffer and the host waits for it"),
        ("Pinned", "memory", "pinned host memory: the copy can run beside the host and the kernels"))),
    Family("multi_tensor_apply", "PyTorch", Role.OPTIMIZER, NONE, _of_template, (
        ("multi_tensor_apply", "operation", "one launch works through lists of tensors: the foreach and fused optimizers"),
        (_functor_pieces, "function", WORDS["list functors"]),
        (r"Metadata<(?:\w+, )?(?:\(int\))?(?P<t>\d+)", "lists", lambda v: f"{v} list{'s' if v != '1' else ''} of tensors side by side"))),
    *(Family(rf"(?:^|[ :]){loop}", "PyTorch", Role.OTHER, NONE, _of_template, (
        (loop, "loop", meaning), (_functor_pieces, "function", "how elements are joined" if loop == "reduce_kernel" else "what is computed for each element")))
      for loop, meaning in TABLES["loops"]),
    Family(r"convolve_sgemm|winograd\w*::|dgrad_engine|wgrad_alg\d|dgrad2d|wgrad2d|fft2d_[rc]2[rc]", "cuDNN", Role.CONVOLUTION, NO, _of_template,
           (("(?P<t>)", "unit", f"a convolution on the CUDA cores: {IDLE}"),), why_not="{known} operands"),
    Family(rf"^(?=.*(?:{_OF_THE_SCHEME}|gemm_))(?P<before>(?:(?!simt).)*?){_MATRIX_CORE}", _family_of_product, Role.GEMM, YES,
           _of_product(True), _ON_CORES, PIECES["product tail"], alignment=r"_align(\d+)", in_word=True),
    Family(rf"^(?=.*(?:{_OF_THE_SCHEME}|gemm_))(?:(?=.*{_OF_THE_SCHEME})|(?=.*simt))(?P<before>.*?){_ANY_CORE}", _family_of_product,
           Role.GEMM, NO, _of_product(False), _WITHOUT_CORES, PIECES["product tail"], alignment=r"_align(\d+)", in_word=True),
    Family(rf"^(?=.*gemm_)(?P<before>.*?){_ANY_CORE}", "", Role.GEMM, UNKNOWN, _of_unknown_product,
           alignment=r"_align(\d+)", in_word=True),
)  # fmt: skip
