"""Names of fused attention: FlashAttention 2 and 3, PyTorch's memory-efficient kernels (xFormers), cuDNN's."""

import re

from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName, Part
from megatron_lite.analysis.kernels.name_words import architecture, template_format

_INT = r"(?:\(int\))?(\d+)"  # Nsight Systems writes (int)64 for 64
_BOOL = r"(?:\(bool\))?(true|false|0|1)"
_TRAITS = re.compile(rf"Flash_(?:fwd|bwd)_kernel_traits<{_INT}, {_INT}, {_INT}, {_INT}")
_FLAGS = re.compile(rf">>?\s*, {_BOOL}, {_BOOL}(?:, {_BOOL})?")
_FLASH_HELPERS = (
    ("dot_do_o", "sums gradient times output, which the backward pass needs first"),
    ("convert_dq", "converts the gradient of the queries from fp32"),
    ("convert_dkv", "converts the gradients of keys and values"),
    ("splitkv_combine", "joins pieces of one sequence"),
    ("preprocess", "prepares sums that the backward pass needs"),
    ("postprocess", "converts a gradient from fp32"),
    ("prepare_varlen", "plans the blocks of sequences of unequal length"),
    ("combine", "joins pieces of one sequence"),
)
_FMHA = re.compile(
    r"fmha_cutlass(?P<way>[FB])_(?P<type>f16|bf16|f32)_(?P<aligned>aligned|notaligned)_(?P<tile>\d+x\d+)"
    r"(?P<rest>\w*)_sm(?P<sm>\d+)"
)
_CUDNN = re.compile(
    r"cudnn_generated_\w*?sdpa_(?P<sm>sm\d+)_\w*?(?P<way>fprop|bprop)_(?:(?P<unit>wgmma|wmma|mma|tcgen\w*?)_)?"
    r"(?P<type>f16|bf16|e4m3|e5m2|f8|fp8|f32)?(?P<rest>\w*)"
)


def attention_name(name: str) -> KernelName | None:
    """Any of them; None for what is no fused attention that is known here."""
    return _flash_2(name) or _flash_3(name) or _efficient(name) or _cudnn(name) or _helper(name)


def _flash_2(name: str) -> KernelName | None:
    traits = _TRAITS.search(name)
    if not traits or _helper_words(name):
        return None
    width, queries, keys, _ = traits.groups()
    backward, precision = "flash_bwd" in name, template_format(name)
    flags = _FLAGS.search(name, traits.end())
    # Template arguments after the traits: is_dropout, is_causal, ...; kernels of divided sequences have no dropout.
    divided = "splitkv" in name
    dropout_at, causal_at = (None, 1) if divided else (1, 2)
    causal = flags[causal_at] in ("true", "1") if flags else None
    parts = [
        Part(
            "flash_bwd" if backward else "flash_fwd",
            "operation",
            "attention, backward pass" if backward else "attention, forward pass",
        ),
        Part(width, "head width", f"heads of at most {width} elements"),
        Part(
            f"{queries}, {keys}",
            "block tile",
            f"{queries} queries times {keys} keys at a time; no score ever reaches memory",
        ),
        Part("", "format", f"operands in {precision or 'an unknown format'}"),
    ]
    if flags:
        meaning = "skips what lies after a query" if causal else "no causal mask: all scores are computed"
        parts.append(Part(flags[causal_at], "causal", meaning))
    if flags and dropout_at:
        parts.append(Part(flags[dropout_at], "dropout", f"with{'' if flags[1] in ('true', '1') else 'out'} dropout"))
    if divided:
        parts.append(Part("splitkv", "operation", "one sequence's keys are divided among blocks"))
    return KernelName(name, "FlashAttention 2", Role.ATTENTION, TensorCores.YES, precision, tuple(parts), causal=causal)


def _flash_3(name: str) -> KernelName | None:
    found = re.search(
        r"FlashAttn(?P<way>Fwd|Bwd)Sm(?P<sm>\d+)|FlashAttention(?P<long>Forward|Backward)Sm(?P<sm4>\d+)", name
    )
    if not found or _helper_words(name):
        return None
    backward, sm = (found["way"] or found["long"]).startswith(("Bwd", "Back")), found["sm"] or found["sm4"]
    precision = template_format(name)
    tile = re.search(
        r"tuple<cute::C<(\d+)>, cute::C<(\d+)>, cute::C<(\d+)>\s*>(?!.*tuple<cute::C<\d+>, cute::C<\d+>, cute::C<\d+>)",
        name,
    )
    parts = [
        Part(found[0], "operation", f"attention, {'backward' if backward else 'forward'} pass"),
        architecture(f"sm{sm}"),
    ]
    if precision:
        parts.append(Part("", "format", f"operands in {precision}"))
    if tile:
        parts.append(
            Part(
                ", ".join(tile.groups()),
                "block tile",
                f"{tile[1]} queries times {tile[2]} keys, heads of {tile[3]}",
                True,
            )
        )
    return KernelName(
        name,
        "FlashAttention 3" if found["way"] else "FlashAttention 4",
        Role.ATTENTION,
        TensorCores.YES,
        precision,
        tuple(parts),
    )


def _efficient(name: str) -> KernelName | None:
    found = _FMHA.search(name)
    if not found:
        return None
    sm, kind = int(found["sm"]), found["type"]
    # fp32 runs on tensor cores from sm80 on (three TF32 products each), fp16 from sm70 on.
    on_cores = sm >= (80 if kind == "f32" else 70)
    precision = {"f16": "fp16", "bf16": "bf16", "f32": "fp32"}[kind]
    queries, keys = found["tile"].split("x")
    parts = [
        Part(
            f"cutlass{found['way']}",
            "operation",
            "attention, " + ("forward pass" if found["way"] == "F" else "backward pass"),
        ),
        Part(kind, "format", f"operands in {precision}"),
        Part(
            found["aligned"],
            "alignment",
            "whole vectors are loaded" if found["aligned"] == "aligned" else "odd head width: narrow loads",
        ),
        Part(found["tile"], "block tile", f"{queries} queries times {keys} keys at a time"),
        architecture(f"sm{sm}"),
    ]
    width = re.search(r"_k(\d+)", found["rest"])
    if width:
        parts.append(Part(width[0].strip("_"), "head width", f"heads of at most {width[1]} elements"))
    if "_rf" in found["rest"]:
        parts.append(Part("rf", "registers", "the output stays in registers until it is done"))
    return KernelName(
        name,
        "memory-efficient attention",
        Role.ATTENTION,
        TensorCores.YES if on_cores else TensorCores.NO,
        precision,
        tuple(parts),
        "" if on_cores else f"{precision} before its time on sm{sm}",
        alignment=1 if found["aligned"] == "notaligned" else None,
    )


def _cudnn(name: str) -> KernelName | None:
    found = _CUDNN.search(name)
    if not found:
        return None
    # cuDNN says f16 for both 16-bit formats: a bf16 model runs ..._wgmma_f16_... as well.
    precision = {"f16": "fp16/bf16", "bf16": "bf16", "f32": "fp32", None: ""}.get(found["type"], "fp8")
    parts = [
        architecture(found["sm"]),
        Part(
            found["way"], "operation", "attention, " + ("forward pass" if found["way"] == "fprop" else "backward pass")
        ),
    ]
    if found["unit"]:
        parts.append(
            Part(
                found["unit"],
                "unit",
                "tensor core instructions of Hopper" if found["unit"] == "wgmma" else "tensor core instructions",
            )
        )
    if precision:
        parts.append(
            Part(found["type"], "format", f"operands in {precision.replace('/', ' or ')}", precision == "fp16/bf16")
        )
    tile = re.search(r"_(\d+x\d+x\d+)", found["rest"])
    if tile:
        queries, keys, width = tile[1].split("x")
        parts.append(Part(tile[1], "block tile", f"{queries} queries times {keys} keys, heads of {width}", True))
    knob = re.search(r"knob_(\d+)", found["rest"])
    if knob:
        parts.append(Part(knob[0], "variant", "cuDNN's number for this configuration", True))
    return KernelName(name, "cuDNN attention", Role.ATTENTION, TensorCores.YES, precision, tuple(parts))


def _helper(name: str) -> KernelName | None:
    meaning = _helper_words(name)
    if not meaning:
        return None
    return KernelName(
        name,
        "FlashAttention",
        Role.ATTENTION,
        TensorCores.NOT_APPLICABLE,
        template_format(name),
        (Part("", "operation", f"a helper: {meaning}"),),
    )


def _helper_words(name: str) -> str:
    if not re.search(r"flash", name, re.IGNORECASE):
        return ""
    return next((meaning for word, meaning in _FLASH_HELPERS if word in name.lower()), "")
