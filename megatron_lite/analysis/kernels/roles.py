"""What a kernel or an operator is for, read from its name: the first row of a table that matches decides.

Kernel names are no interface: they change with each release of a library and each compiler. What no row knows is
"other", which a report shows as such. A row's patterns stand apart by white space; they are searched in the lower-cased
name.
"""

import re
from functools import lru_cache

from megatron_lite.analysis.kernels.kernel_results import Role

LONGEST = 2000  # characters of a name that are looked at: C++ names may repeat their template arguments for pages


def _any_of(patterns: str) -> re.Pattern:
    return re.compile("|".join(patterns.split()))


# Collectives as kernels (NCCL of all years, RCCL, MSCCL++, oneCCL, DeepEP, NVSHMEM, symmetric memory, custom ones), and
# as the spans of torch.distributed's backends on the host (gloo:all_reduce).
_COMMUNICATION = _any_of(r"""
    ^(void\s+|static\s+)*(nccl|rccl|msccl|oneccl|ccl_) ^(gloo|nccl|mpi|ucc|xccl|hccl): ncclkernel nccl(sym)?devkernel
    rccl mscclpp msccl:: msccl_ oneapi::ccl deep_?ep([^a-z]|$) (^|[\s:])(inter|intra)node(_ll)?:: nvshmem rocshmem symmetric_memory:: multimem_
    (one|two)_?shot_?all_?reduce cross_device_reduce custom_all_?reduce quick_?reduce
    all_?reduce_?(fusion_|\w*_)?kernel reduce_?scatter_?\w*kernel all_?gather_?\w*kernel all_?to_?all_?\w*kernel""")
# What torch.compile generates; the operators that it fused stand in the name.
_COMPILED = _any_of(
    r"^triton_(?!tem)([a-z]{2,5}_|split_scan_)?fused ^triton_(poi|per|red|for|unk|split_scan)_ ^triton_$ cpp_fused_"
)

_KERNELS = tuple(
    (role, _any_of(patterns))
    for role, patterns in (
        (
            Role.CAST_COPY,
            r"""^\[?(cuda\s)?memcpy\s(dtod|device\sto\sdevice) ^copydevicetodevice rocclr_copybuffer
        nchw_?to_?nhwc nhwc_?to_?nchw""",
        ),
        (
            Role.TRANSFER,
            r"""^\[?(cuda\s)?(memcpy|memset)
        ^copy(hosttodevice|devicetohost|hosttohost|peertopeer) ^fillbuffer rocclr_fillbuffer""",
        ),
        # Inductor's templates before all else: their names list what was fused into them too.
        (Role.ATTENTION, r"^triton_tem\w*(attention|attn)"),
        (Role.CONVOLUTION, r"^triton_tem\w*conv"),
        (Role.GEMM, r"^triton_(tem|mm|bmm)"),
        # FBGEMM's tables name the optimizer that is fused into their backward.
        (Role.EMBEDDING, r"split_embedding embedding_codegen embedding_?bag"),
        (Role.SOFTMAX, r"masked_softmax softmax_(warp|block) cunn_softmax cunn_spatialsoftmax"),
        (
            Role.ATTENTION,
            r"""flash_?(fwd|bwd|attn|attention|infer|mla|decode|prefill) (^|[\s<:])(pytorch_)?flash:: fmha sdpa
        attention (^|[^a-z])_?m?attn [^a-z]mha_ aotriton _bwd_(kernel_)?(dkdv|dk_dv|dq) bwd_preprocess xqa_""",
        ),
        (
            Role.OPTIMIZER,
            r"""multi_?tensor_?apply fused_?adam adam_?w?_?(kernel|step|math|functor|cuda)
        (?<![a-z])lamb(?!da) fused_?sgd fused_?adagrad (^|_)lion_ muon newton_?schulz
        amp_(update_scale|non_finite|foreach) unscale optimizer""",
        ),
        (
            Role.NORM,
            r"""layer_?norm rms_?norm batch_?norm group_?norm instance_?norm weight_?norm [^a-z]bn_(fw|bw)
        gamma_?beta rowwisemoments computeinternalgradients [^a-z]ln_(fwd|bwd|parallel) (^|_)l2norm qk_?norm""",
        ),
        (
            Role.SOFTMAX,
            r"""softmax nll_?loss cunn_ cross_?entropy classnll logsumexp
        (mse|bce|ctc|kl_?div|smooth_l1|huber)_?(loss|kernel)""",
        ),
        (
            Role.CONVOLUTION,
            r"""conv(?!ert) [sdhi]cudnn _cudnn dgrad wgrad fprop implicit_?gemm winograd im2col col2im
        cudnn::(cnn|ops|detail|winograd|gemm) igemm_ miopen depthwise""",
        ),
        (
            Role.EMBEDDING,
            r"""embedding index_?(put|select|add|copy|fill|reduce|elementwise|kernel|func) indexing_backward
        gpu_index gather scatter compute_grad_weight long_segments segmented_ radix_?sort bitonic_?sort merge_?sort
        sort_?(by|kv|postprocess) unique top_?k linearize_index krn_partial bounds_check_indices one_?hot searchsorted
        bincount histogram""",
        ),
        (
            Role.GEMM,
            r"""(?<!fb)gemm gemv nvjet xmma cijk_ matmul split_?k_?reduce wvsplitk cublas hipblas rocblas mma_sync
        tensorop marlin grouped_?mm (^|_)(b|add|baddb|int|scaled_)?mm_?(kernel|fwd|bwd|fp8|bf16|f16) cutlass""",
        ),
        (
            Role.CAST_COPY,
            r"""copy catarray chunk_cat transpose permute (^|[^a-z])cast _cast contiguous convert quantize
        unpack pack_ _pad pad_ padding roll_ flip_ repeat tensor_?split""",
        ),
        (Role.ELEMENTWISE, r"elementwise dropout masked_scale distribution_ pointwise"),
        (Role.REDUCTION, r"reduc sum_ _sum mean_ _mean norm_?kernel argmax argmin scan cumsum cumprod pool compact"),
        (
            Role.ELEMENTWISE,
            r"""gelu relu silu swish swiglu geglu glu_ tanh sigmoid bias rotary rope activation act_and_mul
        fill functor triu tril add_ mul_ _add _mul where clamp philox random rand arange scale""",
        ),
    )
)

# Operators of the host by their bare name: aten::addmm and AddmmBackward0 are both "addmm".
_OPERATORS = tuple(
    (role, _any_of(patterns))
    for role, patterns in (
        (
            Role.COMMUNICATION,
            r"""^(c10d|_c10d_functional|c10d_functional|gloo|nccl|mpi|ucc|xccl|symm_mem): record_param_comms
        all_?reduce all_?gather reduce_?scatter all_?(to|2)_?all ^broadcast$ deep_ep""",
        ),
        (Role.FUSED, r"torch-compiled\sregion compiled_?function compiledfxgraph ^triton_ cpp_fused inductor"),
        (Role.EMBEDDING, r"split_embedding embedding_codegen"),
        (
            Role.OPTIMIZER,
            r"""optimizer\. ^_?foreach_ ^_?fused_(adam|sgd|adagrad) ^_?amp_ adam adagrad multi_tensor clip_grad""",
        ),
        (Role.ATTENTION, r"attention scaled_dot_product attn flash fmha"),
        (Role.CONVOLUTION, r"conv(?!ert)"),
        (Role.NORM, r"layer_?norm rms_?norm batch_?norm group_?norm instance_?norm weight_?norm"),
        (Role.SOFTMAX, r"softmax nll_loss cross_entropy _loss$ logsumexp kl_div loss_forward loss_backward"),
        (
            Role.EMBEDDING,
            r"""embedding ^_?index ^_?unsafe_index gather scatter masked_select top_?k ^sort argsort unique take
        ^nonzero searchsorted""",
        ),
        (
            Role.GEMM,
            r"""^_?(scaled_|int_|grouped_|weight_int8pack_|sparse_|mkldnn_|mkl_)?(add|b|addb|baddb)?mm(_out)?$ matmul
        ^linear _linear ^(add)?mv$ ^v?dot$ einsum ^tensordot ^addr$ ^_?addmm (?<!fb)gemm scaled_mm grouped_mm""",
        ),
        (Role.TRANSFER, r"pin_memory ^is_pinned"),
        (
            Role.CAST_COPY,
            r"""^(_?to(_copy)?|copy|_copy_from\w*|clone|contiguous|_?cat|concat|stack|repeat\w*|_?pad\w*)$
        ^(constant_pad_nd|roll|flip|\w*flatten_dense_tensors|tensor_split|split_with_sizes_copy|chunk_cat|fsdp\w*)$
        copy_bucket type_as quantize""",
        ),
        (
            Role.REDUCTION,
            r"""^(sum|nansum|mean|max|min|amax|amin|aminmax|any|all|argmax|argmin|norm|linalg_vector_norm)$
        ^(frobenius_norm|var|std|var_mean|median|cumsum|cumprod|prod|count_nonzero)$ pool""",
        ),
        (
            Role.ELEMENTWISE,
            r"""^(r?add|r?sub|mul|r?div|true_divide|divide|pow|sqrt|rsqrt|exp2?|expm1|log|log2|log1p|neg|abs)$
        ^(sign|sgn|sin|cos|tanh|erf|sigmoid|reciprocal|square|floor|ceil|round|trunc|clamp\w*|clip|maximum|minimum)$
        ^(fmod|remainder|addcmul|addcdiv|lerp|where|masked_fill|fill|zero|zeros|ones|full|zeros_like|ones_like)$
        ^(full_like|new_zeros|eq|ne|gt|ge|lt|le|isnan|isinf|isfinite|logical_\w+|bitwise_\w+|arange|triu|tril)$
        ^(normal|uniform|bernoulli|random\w*|rand\w*|exponential|silu|gelu|relu6?|elu|leaky_relu|hardtanh|hardswish)$
        ^(mish|softplus|glu|threshold|\w*dropout\w*|nan_to_num)$""",
        ),
    )
)
# Operators of several words; the longest that fits is taken.
_COMPOSED = """_to_copy _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _unsafe_view _scaled_mm
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _fused_adamw _fused_adam
    _foreach_add native_layer_norm native_layer_norm_backward layer_norm rms_norm _fused_rms_norm _fused_rms_norm_backward native_dropout
    native_dropout_backward native_batch_norm batch_norm native_group_norm gelu_backward silu_backward threshold_backward sigmoid_backward
    tanh_backward embedding_dense_backward nll_loss_forward nll_loss_backward cross_entropy index_put index_select index_add masked_fill
    slice_backward select_backward slice_scatter select_scatter zeros_like ones_like full_like new_zeros scalar_tensor constant_pad_nd
    clamp_min clamp_max logical_and logical_not bitwise_and prepare_softmax_online max_pool2d_with_indices convolution_backward
    split_with_sizes linalg_vector_norm flex_attention flex_attention_backward where addmm baddbmm bmm mm"""
_KNOWN_OPERATOR = re.compile(rf"(?:{'|'.join(sorted(_COMPOSED.split(), key=len, reverse=True))})(?=_|$)")
_ENGINE = "autograd::engine::evaluate_function: "


@lru_cache(maxsize=1 << 16)  # asked again for each step, phase and rank
def is_communication(name: str) -> bool:
    """Is it a kernel that moves data between processes, or a backend's span for one (gloo:all_reduce)?"""
    lowered = name[:LONGEST].lower()
    return not _COMPILED.search(lowered) and bool(_COMMUNICATION.search(lowered))


def get_kernel_role(name: str) -> Role:
    """The role of device work (kernel, memcpy, memset) by its name as the profiler wrote it."""
    lowered = name[:LONGEST].lower()
    if _COMPILED.search(lowered):
        return Role.FUSED
    if _COMMUNICATION.search(lowered):
        return Role.COMMUNICATION
    return _first(lowered, _KERNELS)


def get_operator_role(name: str) -> Role:
    """The role of a host operator or autograd node. Views and bookkeeping are OTHER: they move no data."""
    return _first(bare_operator(name), _OPERATORS)


def bare_operator(name: str) -> str:
    """'aten::add_' -> 'add', 'autograd::engine::evaluate_function: NllLossBackward0' -> 'nll_loss'."""
    bare = name[:LONGEST].removeprefix(_ENGINE)
    bare = re.sub(r"^(aten|prims|torch::autograd)::", "", bare)
    if re.fullmatch(r"\w+Backward\d*", bare):
        bare = re.sub(r"Backward\d*$", "", bare)
        bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare)
    bare = re.sub(r"(?<=\w)_backward(_data|_input|_weight)?$", "", bare.lower())
    return bare.rstrip("_") or bare


def _first(text: str, table: tuple) -> Role:
    return next((role for role, pattern in table if pattern.search(text)), Role.OTHER)


def fused_operators(text: str) -> list[str]:
    """'_to_copy_add_native_layer_norm' -> ['_to_copy', 'add', 'native_layer_norm']. Unknown words stand alone."""
    found, rest = [], text
    while rest:
        word = (_KNOWN_OPERATOR.match(rest) or re.match(r"_?[^_]*", rest))[0]
        found.append(word)
        rest = rest[max(1, len(word)) :].removeprefix("_")
    return [word for word in found if word.strip("_")]
