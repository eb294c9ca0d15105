"""Roles of kernels and operators, by names that real traces and libraries have."""

import json
import time
from pathlib import Path

import pytest

from megatron_lite.analysis.kernels.figures import Role
from megatron_lite.analysis.kernels.roles import bare_operator, is_communication, role_of_kernel, role_of_operator
from megatron_lite.analysis.trace.columns import DEVICE_KINDS
from megatron_lite.analysis.trace.read import read_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/traces beside the repository")
ATEN = "void at::native::"
ANONYMOUS = f"{ATEN}(anonymous namespace)::"
KERNELS = {
    Role.GEMM: [
        "ampere_fp16_s1688gemm_fp16_128x128_ldg8_relu_f2f_stages_32x1_tn",
        "ampere_sgemm_128x64_tn",
        "volta_h884gemm_64x128_ldg8_nn",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
        "void gemv2T_kernel_val<int, int, float, float, float, 128>(x)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(x)",
        "matmul_kernel",
        "triton_tem_fused_addmm_gelu_0",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>(x::Params)",
        "triton_mm",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, x> >(x)",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN",
        "void wvSplitK_hf_sml_<__half, 64>(x)",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const> > >(x)",
    ],
    Role.ATTENTION: [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >(x)",
        "void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64> >(x)",
        "_attn_fwd",
        "attn_fwd.kd",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<x> > >(x)",
        "fmha_cutlassF_f16_aligned_64x128_rf_sm80(x)",
        "aiter::fmha_bwd_hd64_bf16_causal_a16_rtne_recompile",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0",
        "triton_tem_fused_flex_attention_0",
        "_bwd_kernel_dkdv",
    ],
    Role.FUSED: [
        "triton_poi_fused__to_copy_add_native_layer_norm_3",
        "triton_red_fused__log_softmax_12",
        "triton_per_fused_sum_0",
        "triton_for_fused_1",
        "triton_",
        "graph_0_cpp_fused_add_0",
        "triton_poi_fused__scaled_dot_product_flash_attention_2",
        "triton_red_fused_all_reduce_3",
    ],
    Role.COMMUNICATION: [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "rcclDevKernel_Generic",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymDevKernel_AllReduce_x(x)",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)",
        "void deep_ep::internode::notify_dispatch<false, 4>(int const*)",
        "_ZN7deep_ep9internode7combineILb0EEEv",
        "void intranode::combine<nv_bfloat16, 8, 768>(x)",
        "void internode_ll::dispatch<true, 3, 7168>(x)",
        "one_shot_all_reduce_kernel",
        "multimem_all_reduce_kernel",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(x)",
        "void mscclpp::allreduce<float>(x)",
        "nvshmemi_transfer_rma_blocking",
    ],
    Role.OPTIMIZER: [
        f"{ANONYMOUS}multi_tensor_apply_kernel<TensorListMetadata<1>, at::native::LpNormFunctor<float> >(x)",
        f"{ATEN}amp_update_scale_cuda_kernel(float*, int*)",
        "void fused_adam_kernel<float>(x)",
        "void lamb_stage_1<float>(x)",
    ],
    Role.NORM: [
        f"{ANONYMOUS}vectorized_layer_norm_kernel<c10::Half, float, false>(x)",
        f"{ANONYMOUS}GammaBetaBackwardCUDAKernel<x>(x)",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(x)",
        "_rms_norm_forward_kernel",
    ],
    Role.SOFTMAX: [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(x)",
        f"{ANONYMOUS}cunn_SoftMaxForward<4, float, float, float, LogSoftMaxForwardEpilogue>(x)",
        f"{ANONYMOUS}nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(x)",
        "liger_cross_entropy_kernel",
        "void scaled_upper_triang_masked_softmax_warp_forward<__half, __half, float, 11>(x)",
    ],
    Role.CONVOLUTION: [
        "volta_scudnn_128x64_relu_interior_nn_v1",
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(x)",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_stage5_x",
        "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x256_16x4_nhwc_align4>(x)",
        "cask_cudnn::computeOffsetsKernel(x)",
        "miopenSp3AsmConv_v21_1_3_gfx9_fp32_f2x3_stride1",
        "igemm_wrw_gtcx2_nhwc_fp16_bx0_ex1_bt256x256x32",
    ],
    Role.EMBEDDING: [
        f"{ANONYMOUS}indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(x)",
        f"{ATEN}index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<x> >(x)",
        "void cub::DeviceRadixSortOnesweepKernel<x>(x)",
        "void split_embedding_backward_codegen_adagrad_unweighted(x)",
        f"{ATEN}vectorized_gather_kernel<16, long>(x)",
    ],
    Role.CAST_COPY: [
        f"{ATEN}vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)>(x)",
        f"{ANONYMOUS}CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 4, 64, 64>(x)",
        "Memcpy DtoD (Device -> Device)",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false>(x)",
        "__amd_rocclr_copyBuffer",
        f"{ATEN}chunk_cat_cuda_kernel<float, c10::BFloat16>(x)",
    ],
    Role.TRANSFER: [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
        "CopyHostToDevice",
        "[CUDA memcpy HtoD]",
        "__amd_rocclr_fillBufferAligned.kd",
    ],
    Role.ELEMENTWISE: [
        f"{ATEN}vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, at::detail::Array<char*, 1> >(x)",
        f"{ANONYMOUS}elementwise_kernel_with_index<int, at::native::arange_cuda_out(x)>(x)",
        f"{ATEN}fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>(x)",
        "_swiglu_forward_kernel",
    ],
    Role.REDUCTION: [
        f"{ATEN}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>, float, 4> >(x)",
        "void cub::DeviceScanKernel<cub::DeviceScanPolicy<int>::Policy600, int*, int*>(x)",
    ],
    Role.OTHER: ["", "<<<what>>>", "my_own_thing", "\x1b[31m\x00"],
}
OPERATORS = {
    Role.GEMM: "aten::mm aten::addmm aten::linear aten::bmm aten::_scaled_mm AddmmBackward0 aten::matmul aten::baddbmm",
    Role.ATTENTION: "aten::scaled_dot_product_attention aten::_flash_attention_forward FlashAttnFunc "
    "ScaledDotProductFlashAttentionBackward0",
    Role.NORM: "aten::native_layer_norm NativeLayerNormBackward0 aten::rms_norm aten::cudnn_batch_norm",
    Role.SOFTMAX: "aten::_softmax aten::nll_loss_backward LogSoftmaxBackward0 aten::cross_entropy_loss aten::mse_loss",
    Role.COMMUNICATION: "c10d::allreduce_ nccl:all_reduce gloo:all_reduce record_param_comms "
    "_c10d_functional::all_gather_into_tensor",
    Role.OPTIMIZER: "aten::_fused_adamw_ aten::_foreach_add_ Optimizer.step#AdamW.step aten::_amp_update_scale_",
    Role.FUSED: "CompiledFunction CompiledFunctionBackward triton_poi_fused_add_0",
    Role.EMBEDDING: "aten::embedding aten::embedding_dense_backward aten::index aten::index_put_ IndexBackward0",
    Role.CAST_COPY: "aten::copy_ aten::_to_copy aten::clone aten::cat aten::contiguous aten::to",
    Role.REDUCTION: "aten::sum aten::mean aten::linalg_vector_norm aten::max_pool2d_with_indices",
    Role.ELEMENTWISE: "aten::add_ aten::gelu aten::gelu_backward aten::native_dropout MulBackward0 aten::fill_ "
    "aten::zero_",
    Role.CONVOLUTION: "aten::conv2d aten::cudnn_convolution ConvolutionBackward0",
    Role.TRANSFER: "aten::pin_memory",
    Role.OTHER: "aten::view aten::t aten::transpose aten::empty aten::is_nonzero aten::item TBackward0 what",
}


@pytest.mark.parametrize(("role", "name"), [(role, name) for role, names in KERNELS.items() for name in names])
def test_kernels(role, name):
    assert role_of_kernel(name) is role


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, names in OPERATORS.items() for name in names.split()]
)
def test_operators(role, name):
    assert role_of_operator(name) is role


def test_an_operator_and_its_node_in_the_backward_pass_have_one_bare_name():
    names = [
        "aten::nll_loss",
        "NllLossBackward0",
        "autograd::engine::evaluate_function: NllLossBackward0",
        "aten::nll_loss_backward",
    ]
    assert {bare_operator(name) for name in names} == {"nll_loss"}
    assert bare_operator("aten::add_") == "add"
    assert bare_operator("c10d::allreduce_") == "c10d::allreduce"
    assert bare_operator("") == ""


def test_kernels_and_spans_of_communication_are_found_and_nothing_else_is():
    assert all(map(is_communication, [*KERNELS[Role.COMMUNICATION], "gloo:all_reduce", "nccl:all_reduce"]))
    others = [name for role, names in KERNELS.items() if role is not Role.COMMUNICATION for name in names]
    assert not any(map(is_communication, others))


@needs_traces
def test_every_kernel_of_real_traces_has_a_role():
    names = set()
    for path in (path for path in sorted(TRACES.glob("*/rank0*")) if not path.parent.name.endswith("workers4")):
        trace = read_traces(path)[0]
        names |= {trace.names[name] for kind in DEVICE_KINDS for name in trace.events.name[trace.rows[kind]].tolist()}
    assert len(names) > 200
    assert {name for name in names if role_of_kernel(name) is Role.OTHER} == set()


@pytest.mark.parametrize(
    "piece", ["a", "_", "<", "at::native::", "all_", "(anonymous namespace)::", "flash", "1x", "gemm_"]
)
def test_no_name_takes_long(piece):
    name, started = piece * (100_000 // len(piece)), time.process_time()
    role_of_kernel(name), role_of_operator(name), is_communication(name)
    assert time.process_time() - started < 5


def test_roles_are_text():
    assert json.dumps({Role.GEMM: 1.0}) == '{"matrix products": 1.0}'
