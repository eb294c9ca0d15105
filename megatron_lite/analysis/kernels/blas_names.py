"""Names after CUTLASS' scheme: cuBLAS of 2017-2022, CUTLASS, cuDNN's products; and cuBLAS' helpers.

The scheme (CUTLASS profiler guide): architecture, unit, <accumulator><instruction><operation>, formats, threadblock
MxN, K of a slice x stages, layouts, alignment. cuBLAS follows it with words of its own, which NVIDIA does not document.
"""

import re

from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName, Part
from megatron_lite.analysis.kernels.name_words import (
    ARCHITECTURES,
    SPLIT_K,
    alignment_words,
    architecture,
    layout_words,
    matrix_role,
    number_in,
    parts_found,
    stage_words,
    template_format,
    tile_words,
    why_on_cuda_cores,
)
from megatron_lite.analysis.kernels.number_formats import ACCUMULATORS, FORMATS

_INSTRUCTIONS = {
    "884": "8x8x4",
    "1688": "16x8x8",
    "16816": "16x8x16",
    "8816": "8x8x16",
    "16832": "16x8x32",
    "16864": "16x8x64",
    "161616": "16x16x16",
    "161632": "16x16x32",
    "168128": "16x8x128",
}
_CORE = re.compile(
    r"(?<![a-z])(?P<acc>[hsdicz])(?P<instruction>\d{3,6}|\d+x\d+x\d+)?(?P<math>bf16|f16|tf32|fast\w*?)?"
    r"_?(?P<kind>gemm|cudnn|fprop|dgrad|wgrad)"
)
_FAMILY = re.compile("cutlass|magma|[sh]cudnn|gemm_|" + "|".join(f"(^|_){era}_" for era in ARCHITECTURES))
_OF_THE_SCHEME = re.compile("cutlass|magma|[sdhi]cudnn|" + "|".join(f"(^|_){era}_" for era in ARCHITECTURES))
_FORMAT = re.compile(r"(?<![a-z0-9])(" + "|".join(FORMATS) + r")(?![a-z0-9])")
_TAIL = (
    (r"_(?P<v>\d+x\d+(x\d+)?)(?=_|$)", "block tile", tile_words, False),
    (
        r"(?<=\dx\d\d_)(?P<v>\d+x\d+x\d+)(?=_)",
        "cluster",
        lambda v: f"clusters of {v} blocks share what they load",
        False,
    ),
    (r"(?<=\d_)(?P<v>\d+x\d+)(?=_[ntc]{2,3}_|_nhwc|_nchw)", "stages", stage_words, False),
    (r"_ldg(?P<v>\d+)", "load width", lambda v: f"each load takes {v} elements", False),
    (
        r"_(?P<v>relu|gelu|bias\w*?)(?=_|$)",
        "epilogue",
        lambda v: f"can apply {v} to the result; whether it did is not said",
        False,
    ),
    (r"_(?P<v>f2f)(?=_|$)", "epilogue", lambda v: "converts between number formats while storing", True),
    (r"_stages_(?P<v>\d+x\d+)", "stages", stage_words, True),
    (r"_(?P<v>sliced\d+x\d+)", "slices", lambda v: "the warps of a block divide K among them", True),
    (r"_(?P<v>split_?[kK]\w*?)(?=_|$)", "split-K", lambda v: SPLIT_K, True),
    (r"_(?P<v>[nt]{2,3})(?=_|$)", "layout", layout_words, False),
    (r"_(?P<v>nhwc|nchw)(?=_|$)", "layout", lambda v: "channels last" if v == "nhwc" else "channels first", False),
    (r"_align(?P<v>\d+)", "alignment", alignment_words, False),
)


def blas_name(name: str) -> KernelName | None:
    """ampere_fp16_s1688gemm_fp16_128x128_ldg8_relu_f2f_stages_32x1_tn, volta_sgemm_64x64_nt, cutlass_80_..._align4."""
    word = _word(name)
    core = _CORE.search(word)
    if not core or not _FAMILY.search(word):
        return None
    before, after = word[: core.start()], word[core.end() :]
    types = list(dict.fromkeys(_FORMAT.findall(f"{before}_{after}")))
    on_cores = bool(core["instruction"]) and "simt" not in before
    by_scheme = "simt" in before or _OF_THE_SCHEME.search(word)
    cores = TensorCores.YES if on_cores else TensorCores.NO if by_scheme else TensorCores.UNKNOWN
    unknown = cores is TensorCores.UNKNOWN  # an accumulator's letter means what it means within the scheme only
    precision, alignment = _precision(core, types, on_cores or unknown), number_in(r"_align(\d+)", after)
    if unknown and not types:
        precision = ""
    return KernelName(
        name=name,
        family="" if unknown else "CUTLASS" if "cutlass" in word else "cuDNN" if "cudnn" in word else "cuBLAS",
        role=matrix_role(word),
        tensor_cores=cores,
        precision=precision,
        parts=() if unknown else (*_head(before), *_core_parts(core, types, on_cores), *parts_found(_TAIL, after)),
        why_not="" if cores is not TensorCores.NO else why_on_cuda_cores(precision, alignment),
        alignment=alignment,
    )


def helper_name(name: str) -> KernelName | None:
    """gemv2T_kernel_val, dot_kernel, gemmk1_kernel, splitKreduce_kernel: what cuBLAS does without tiles."""
    found = re.search(r"gemv\w*|gemm(?:k1|SN)\w*|dot_kernel|reduce_1Block_kernel|splitKreduce_kernel", name)
    if not found:
        return None
    what = found[0]
    meaning = (
        "adds up the pieces of a product whose K was divided"
        if "splitK" in what
        else "a dot product"
        if what in ("dot_kernel", "reduce_1Block_kernel")
        else "a product with a vector, or with a matrix too thin for tiles: memory bandwidth is its limit"
    )
    return KernelName(
        name,
        "cuBLAS",
        Role.GEMM,
        TensorCores.NOT_APPLICABLE,
        template_format(name),
        (Part(what, "operation", meaning),),
    )


def _word(name: str) -> str:
    """The part that follows the scheme: void cutlass::Kernel2<cutlass_80_...>(...) -> cutlass_80_..."""
    inner = re.search(r"Kernel2?<\s*(\w+)", name)
    return inner[1] if inner and "cutlass" in name else re.split(r"[<(]", name.strip().removeprefix("void "))[0]


def _precision(core: re.Match, types: list[str], on_cores: bool) -> str:
    named = FORMATS.get(core["math"] or "") or next((FORMATS[one] for one in types), "")
    if named == "fp32" and on_cores:
        return "tf32"  # tensor cores take no plain fp32
    if named or not on_cores:
        return named or ACCUMULATORS[core["acc"]]
    return {"h": "fp16", "s": "tf32", "d": "fp64", "i": "int8"}.get(core["acc"], "")


def _head(before: str) -> list[Part]:
    parts = [
        Part(era, "architecture", f"written for {era.capitalize()} ({sm}); newer GPUs run it too")
        for era, sm in ARCHITECTURES.items()
        if re.search(rf"(^|_){era}_", before)
    ]
    compiled = re.search(r"cutlass(?:3x)?_(?:sm)?(\d{2,3})_", before)
    if compiled:
        parts.append(architecture(f"sm{compiled[1]}"))
    unit = re.search(r"wmma_tensorop|tensorop|simt", before)
    if unit:
        parts.append(
            Part(unit[0], "unit", "runs on the CUDA cores" if unit[0] == "simt" else "runs on the tensor cores")
        )
    return parts


def _core_parts(core: re.Match, types: list[str], on_cores: bool) -> list[Part]:
    sums = ACCUMULATORS[core["acc"]]
    if not on_cores:
        return [
            Part(f"{core['acc']}{core['kind']}", "operation", f"{sums} on the CUDA cores: the tensor cores stand idle")
        ]
    digits = core["instruction"]
    tile = _INSTRUCTIONS.get(digits, digits if "x" in digits else "of a size that is not known here")
    formats = [
        Part(
            one,
            "format",
            f"operands in {FORMATS[one]}" if place == 0 else f"{FORMATS[one]} appears too, sums or result",
        )
        for place, one in enumerate(types)
    ]
    if not types and core["acc"] == "s" and not core["math"]:
        formats = [Part("", "format", "none is named: operands in fp32, rounded to TF32")]
    return [
        *formats,
        Part(core["acc"], "accumulator", f"sums are kept in {sums}"),
        Part(digits, "instruction tile", f"one instruction of the tensor cores multiplies {tile} (MxNxK)"),
    ]
