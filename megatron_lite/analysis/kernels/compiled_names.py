"""Names that torch.compile's code generator (Inductor) gives to its Triton kernels: triton_poi_fused_add_gelu_3."""

import re

from megatron_lite.analysis.kernels.figures import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_name import KernelName, Part

_TRITON = re.compile(r"triton_(?P<kind>[a-z]{2,5}|split_scan)?_?fused_(?P<operators>\w*?)(?:_(?P<number>\d+))?$")
_KINDS = {
    "poi": "element by element",
    "per": "a reduction whose rows fit into registers",
    "red": "a reduction that loops over its rows",
    "for": "one kernel over a list of tensors",
    "tem": "a template (matrix product, attention or convolution) with what follows it",
    "split_scan": "a running sum in pieces",
    "mix": "reductions of two directions",
}
# Operator names of several words; the longest that fits is taken.
_OPERATORS = tuple(
    sorted(
        (
            "_to_copy",
            "_softmax",
            "_log_softmax",
            "_softmax_backward_data",
            "_log_softmax_backward_data",
            "_unsafe_view",
            "_scaled_mm",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_fused_adamw",
            "_fused_adam",
            "_foreach_add",
            "native_layer_norm",
            "native_layer_norm_backward",
            "layer_norm",
            "rms_norm",
            "_fused_rms_norm",
            "_fused_rms_norm_backward",
            "native_dropout",
            "native_dropout_backward",
            "native_batch_norm",
            "batch_norm",
            "native_group_norm",
            "gelu_backward",
            "silu_backward",
            "threshold_backward",
            "sigmoid_backward",
            "tanh_backward",
            "embedding_dense_backward",
            "nll_loss_forward",
            "nll_loss_backward",
            "cross_entropy",
            "index_put",
            "index_select",
            "index_add",
            "masked_fill",
            "slice_backward",
            "select_backward",
            "slice_scatter",
            "select_scatter",
            "zeros_like",
            "ones_like",
            "full_like",
            "new_zeros",
            "scalar_tensor",
            "constant_pad_nd",
            "clamp_min",
            "clamp_max",
            "logical_and",
            "logical_not",
            "bitwise_and",
            "prepare_softmax_online",
            "max_pool2d_with_indices",
            "convolution_backward",
            "split_with_sizes",
            "linalg_vector_norm",
            "flex_attention",
            "flex_attention_backward",
            "where",
            "addmm",
            "baddbmm",
            "bmm",
            "mm",
        ),
        key=len,
        reverse=True,
    )
)


def compiled_name(name: str) -> KernelName | None:
    """Its kind and the operators that were fused; what is none of Inductor's fused kernels: None."""
    found = _TRITON.search(name)
    if not found:
        return None
    kind, operators = found["kind"] or "", fused_operators(found["operators"])
    template = kind == "tem"
    parts = [Part(kind, "kind", _KINDS[kind])] if kind in _KINDS else []
    parts += [Part(found["operators"], "fused operators", ", ".join(operators) or "none named")]
    if found["number"]:
        parts.append(Part(found["number"], "number", "tells kernels of one graph apart"))
    role = (
        Role.FUSED
        if not template
        else Role.ATTENTION
        if "attention" in found["operators"]
        else (Role.CONVOLUTION if "conv" in found["operators"] else Role.GEMM)
    )
    return KernelName(
        name,
        "Triton (torch.compile)",
        role,
        TensorCores.UNKNOWN if template else TensorCores.NOT_APPLICABLE,
        "",
        tuple(parts),
    )


def fused_operators(text: str) -> list[str]:
    """'_to_copy_add_native_layer_norm' -> ['_to_copy', 'add', 'native_layer_norm']. Unknown words stand alone."""
    found, rest = [], text
    while rest:
        known = next((one for one in _OPERATORS if re.match(rf"{one}(?=_|$)", rest)), None)
        word = known or re.match(r"_?[^_]*", rest)[0]
        found.append(word)
        rest = rest[max(1, len(word)) :]
        rest = rest.removeprefix("_")
    return [word for word in found if word.strip("_")]
