"""Names of cuBLASLt's newer kernels (xmma, nvjet) and of AMD's Tensile, each after a scheme of its own.

None of the three is documented: xmma's and Tensile's words mostly explain themselves, nvjet's letters are read from
their use.
"""

import re

from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName, Part
from megatron_lite.analysis.kernels.name_words import (
    SPLIT_K,
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
from megatron_lite.analysis.kernels.number_formats import FORMATS

_F = r"(?:bf16|tf32|e4m3|e5m2|f\d+|i\d+|u\d+|s8)"
_XMMA = re.compile(
    rf"(?P<sm>sm\d+)_xmma_(?P<what>\w+?)_(?P<a>{_F})(?P<b>{_F})_(?P<c>{_F})(?P<d>{_F})_(?P<sums>{_F})_(?P<rest>\w+)"
)
_XMMA_TAIL = (
    (r"^(?P<v>[ntc]{2})_[ntc]", "layout", layout_words, False),
    (r"tilesize(?P<v>\d+x\d+x\d+)", "block tile", tile_words, False),
    (r"stage(?P<v>\d+)", "stages", lambda v: f"{v} slices of K are in flight at once", False),
    (r"(?P<v>warpgroup)size\d+x\d+x\d+", "unit", lambda v: "wgmma: groups of four warps feed the tensor cores", True),
    (r"warpsize(?P<v>\d+x\d+x\d+)", "warps", lambda v: f"a block's warps stand as {v}", True),
    (
        r"tensor(?P<v>\d+x\d+x\d+)",
        "instruction tile",
        lambda v: f"one instruction of the tensor cores multiplies {v} (MxNxK)",
        False,
    ),
    (r"(?P<v>ffma|dfma|simt)", "unit", lambda v: "multiply-adds on the CUDA cores: the tensor cores stand idle", False),
    (r"(?P<v>split_?k\w*?)(?=_|$)", "split-K", lambda v: SPLIT_K, True),
)
_NVJET = re.compile(
    r"nvjet_(?:(?P<sm>sm\d+)_)?(?P<types>[a-z0-9]{3,6})_(?P<tile>\d+x\d+)_(?P<stages>\d+x\d+)(?P<rest>\w*)"
)
_NVJET_LETTERS = {"h": "fp16", "t": "bf16", "q": "fp8", "r": "fp8", "s": "fp32", "d": "fp64"}
_NVJET_TAIL = (
    (r"_(?P<v>\d+x\d+)(?=_)", "cluster", lambda v: f"clusters of {v} blocks share what they load", True),
    (
        r"_(?P<v>[hv])(?=_)",
        "order",
        lambda v: "blocks walk the result " + ("along rows" if v == "h" else "down columns"),
        True,
    ),
    (r"(?P<v>2cta)", "pairs", lambda v: "two blocks work as one on a tile", True),
    (r"coop(?P<v>[AB])", "cooperation", lambda v: f"two warp groups share a tile, divided along operand {v}", True),
    (r"(?P<v>splitK)", "split-K", lambda v: SPLIT_K, True),
    (
        r"_(?P<v>bias|bgrad[ab])(?=_)",
        "epilogue",
        lambda v: "adds a bias" if v == "bias" else "sums the bias gradient up too",
        True,
    ),
    (r"_(?P<v>[NT]{3})$", "layout", layout_words, True),
)
_TENSILE = re.compile(r"Cijk_A(?P<a>[a-z]{3,4})_B(?P<b>[a-z]{3,4})_(?P<types>[A-Z0-9]+)(?P<rest>_\w+)")
_TENSILE_LETTERS = {
    "F8": "fp8",
    "B8": "fp8",
    "I8": "int8",
    "B": "bf16",
    "H": "fp16",
    "X": "tf32",
    "S": "fp32",
    "D": "fp64",
}
_TENSILE_TAIL = (
    (r"_MT(?P<v>\d+x\d+x\d+)", "block tile", tile_words, False),
    (
        r"_MI(?P<v>\d+x\d+(x\d+)*)",
        "instruction tile",
        lambda v: f"matrix instructions (MFMA, AMD's tensor cores) of {v}",
        False,
    ),
)

_WAYS = {"fwd": "forward", "bwd": "gradient of the input", "wrw": "gradient of the weights"}
# Families of AMD's libraries: (pattern, family, tensor cores). Where a name says neither that matrix instructions (MFMA,
# WMMA) run nor that they do not, it is unknown.
_AMD = (
    (r"igemm_(?P<way>fwd|bwd|wrw)_gtcx\d*_\w*?(?P<type>fp32|fp16|bf16|int8)", "MIOpen (implicit GEMM)", TensorCores.YES),
    (r"igemm_(?P<way>fwd|bwd|wrw)_gtc\w*?(?P<type>fp32|fp16|bf16|int8)", "MIOpen (implicit GEMM)", TensorCores.UNKNOWN),
    (r"(?:^|\W)ck::(?:\w|::)*(?:gemm|conv|contraction)\w*?_dl(?:ops)?_", "Composable Kernel", TensorCores.NO),
    (r"(?:^|\W)ck(?:_tile)?::.*?(?:gemm|conv(?!ert)|contraction|fmha|flatmm)", "Composable Kernel", TensorCores.YES),
)


def amd_name(name: str) -> KernelName | None:
    """igemm_fwd_gtcx3_nhwc_fp16_bx0_..._bt128x128x32_...: MIOpen; ck::kernel_gemm_xdl_cshuffle_v3<...>: Composable Kernel."""
    for pattern, family, cores in _AMD:
        found = re.search(pattern, name, re.IGNORECASE)
        if not found:
            continue
        words = found.groupdict()
        precision = FORMATS.get(words["type"], "") if words else template_format(name)
        parts = [Part(words["way"], "operation", f"convolution, {_WAYS[words['way']]}")] if words else []
        if precision:
            parts.append(Part(words.get("type", ""), "format", f"operands in {precision}"))
        role = Role.CONVOLUTION if words else Role.ATTENTION if "fmha" in found[0].lower() else matrix_role(found[0])
        why_not = why_on_cuda_cores(precision, None) if cores is TensorCores.NO else ""
        return KernelName(name, family, role, cores, precision, tuple(parts), why_not)
    return None


def xmma_name(name: str) -> KernelName | None:
    """sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_..., and its convolutions."""
    found = _XMMA.search(name)
    if not found:
        return None
    rest, (a, b, c, sums) = (
        found["rest"],
        (FORMATS.get(found[group], found[group]) for group in ("a", "b", "c", "sums")),
    )
    on_cores, alignment = not re.search(r"ffma|simt|dfma", rest), number_in(r"_aligna(\d+)", rest)
    precision = "tf32" if on_cores and a == "fp32" else a
    parts = (
        architecture(found["sm"]),
        Part(found["what"], "operation", found["what"].replace("_", " ")),
        Part(found["a"] + found["b"], "operands", f"{a} times {b}"),
        Part(found["c"] + found["d"], "result", f"stored as {c}", True),
        Part(found["sums"], "accumulator", f"sums are kept in {sums}", True),
        *parts_found(_XMMA_TAIL, rest),
    )
    role = matrix_role(found["what"])
    return KernelName(
        name,
        "cuBLASLt (xmma)" if role is Role.GEMM else "cuDNN (xmma)",
        role,
        TensorCores.YES if on_cores else TensorCores.NO,
        precision,
        parts,
        "" if on_cores else why_on_cuda_cores(precision, alignment),
        alignment,
    )


def nvjet_name(name: str) -> KernelName | None:
    """nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT: cuBLASLt since CUDA 12."""
    found = _NVJET.search(name)
    if not found:
        return None
    types = found["types"]
    operands, sums, result = (_NVJET_LETTERS.get(types[at], "an unknown format") for at in (0, -2, -1))
    precision = "tf32" if operands == "fp32" else operands if operands in _NVJET_LETTERS.values() else ""
    parts = [architecture(found["sm"])] if found["sm"] else []
    parts += [
        Part(types, "formats", f"operands in {precision or operands}, sums in {sums}, result in {result}", True),
        Part(found["tile"], "block tile", tile_words(found["tile"]), True),
        Part(found["stages"], "stages", stage_words(found["stages"]), True),
        *parts_found(_NVJET_TAIL, found["rest"]),
    ]
    return KernelName(name, "cuBLASLt (nvjet)", Role.GEMM, TensorCores.YES, precision, tuple(parts))


def tensile_name(name: str) -> KernelName | None:
    """Cijk_Alik_Bljk_BBS_BH_..._MT256x256x64_MI16x16x1_...: hipBLASLt and rocBLAS. i, j: result; l: what is summed."""
    found = _TENSILE.search(name)
    if not found:
        return None
    precision = next((_TENSILE_LETTERS[key] for key in _TENSILE_LETTERS if found["types"].startswith(key)), "")
    layout = ("n" if found["a"].startswith("i") else "t") + ("n" if found["b"].startswith("l") else "t")
    parts = parts_found(_TENSILE_TAIL, found["rest"])
    on_cores = any(part.field == "instruction tile" for part in parts)
    without = precision == "fp32" or re.search(r"_TT\d+_\d+", found["rest"])  # a tile per thread: no matrix instruction
    cores = TensorCores.YES if on_cores else TensorCores.NO if without else TensorCores.UNKNOWN
    parts = (
        Part(f"A{found['a']}_B{found['b']}", "layout", layout_words(layout), True),
        Part(found["types"], "formats", f"operands in {precision or 'an unknown format'}", True),
        *parts,
    )
    return KernelName(
        name,
        "Tensile (hipBLASLt, rocBLAS)",
        Role.GEMM,
        cores,
        precision,
        parts,
        why_on_cuda_cores(precision, None) if cores is TensorCores.NO else "",
    )
