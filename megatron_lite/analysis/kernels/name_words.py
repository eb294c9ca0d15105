"""What pieces of kernel names mean, in plain clauses; shared by the readers of the families."""

import re

from megatron_lite.analysis.kernels.figures import Role
from megatron_lite.analysis.kernels.kernel_name import Part
from megatron_lite.analysis.kernels.number_formats import MIXED

ARCHITECTURES = {
    "maxwell": "sm50",
    "pascal": "sm60",
    "volta": "sm70",
    "turing": "sm75",
    "ampere": "sm80",
    "ada": "sm89",
    "hopper": "sm90",
    "blackwell": "sm100",
}
SPLIT_K = "K is divided among blocks, whose pieces are added up at the end"
_LAYOUTS = {"n": "as it is", "t": "transposed", "c": "conjugate transposed"}
_CPP_TYPES = {
    "__nv_bfloat16": "bf16",
    "bfloat16_t": "bf16",
    "BFloat16": "bf16",
    "__half": "fp16",
    "bhalf_t": "bf16",
    "half_t": "fp16",
    "_Float16": "fp16",
    "Half": "fp16",
    "float_e4m3_t": "fp8",
    "float_e5m2_t": "fp8",
    "tfloat32_t": "tf32",
    "float": "fp32",
    "double": "fp64",
}
_CPP_TYPE = re.compile(r"(?<![A-Za-z0-9_])(?:\w+::)*(" + "|".join(_CPP_TYPES) + r")(?![A-Za-z0-9_])")


def parts_found(patterns, text: str) -> list[Part]:
    """A part for each (pattern with a group v, field, words of v, inferred) that is found, in the order of the text."""
    seen = [
        (match.start("v"), Part(match[0].strip("_"), field, words(match["v"]), inferred))
        for pattern, field, words, inferred in patterns
        if (match := re.search(pattern, text))
    ]
    return [part for _, part in sorted(seen, key=lambda one: one[0])]


def architecture(sm: str) -> Part:
    """'sm80' -> the generation of GPUs."""
    era = next((era for era, number in ARCHITECTURES.items() if number == sm), "")
    digits = sm.removeprefix("sm")
    named = f" ({era.capitalize()})" if era else ""
    return Part(sm, "architecture", f"compiled for compute capability {digits[:-1]}.{digits[-1:]}{named}")


def tile_words(tile: str) -> str:
    """'128x64x32' -> what a block of threads makes."""
    sizes = tile.split("x")
    slices = f", in slices of {sizes[2]} along K" if len(sizes) > 2 else ""
    return f"a block of threads makes {sizes[0]}x{sizes[1]} of the result{slices}"


def stage_words(text: str) -> str:
    """'32x3' -> the pipeline along K."""
    depth, stages = text.split("x")
    return f"slices of {depth} along K, {stages} of them in flight"


def layout_words(letters: str) -> str:
    """'tn' -> which operand is transposed."""
    first, second = (_LAYOUTS.get(letter, "unknown") for letter in letters[:2].lower())
    return f"first operand {first}, second {second} (BLAS' letters for matrices stored by columns)"


def alignment_words(elements: str) -> str:
    """'1' -> how wide the loads are."""
    odd = ": some size is odd, so loads are narrow" if int(elements) <= 2 else ""
    return f"operands are read {elements} element{'s' if elements != '1' else ''} at a time{odd}"


def number_in(pattern: str, text: str) -> int | None:
    """The first group of `pattern` as a number."""
    found = re.search(pattern, text)
    return int(found[1]) if found else None


def template_formats(name: str) -> list[str]:
    """Number formats among a C++ name's template arguments, in order."""
    arguments = name.partition("<")[2]
    return [_CPP_TYPES[one] for one in _CPP_TYPE.findall(arguments.rpartition(">(")[0] or arguments)]


def template_format(name: str) -> str:
    """The narrowest of them: what the operands most likely have; '' without any."""
    formats = template_formats(name)
    return next((one for one in (*MIXED, "tf32") if one in formats), formats[0] if formats else "")


def matrix_role(word: str) -> Role:
    """GEMM, or CONVOLUTION for the kernels that compute one as a product."""
    return Role.CONVOLUTION if re.search(r"cudnn|fprop|dgrad|wgrad|implicit_gemm|conv(?!ert)", word) else Role.GEMM


def why_on_cuda_cores(precision: str, alignment: int | None) -> str:
    """The reason, in a few words, that a product does without tensor cores."""
    if precision == "fp32":
        return "fp32 operands"
    if (alignment or 8) <= 2:
        return "odd sizes"
    return f"{precision or 'unknown'} operands on the CUDA cores"
