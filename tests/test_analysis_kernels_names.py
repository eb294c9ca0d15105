"""Names of kernels taken apart and put in words, and what kernels and operators are for."""

import json
import time
from pathlib import Path

import pytest

from megatron_lite.analysis.kernels.kernel_names import demangled, in_words, short_name, taken_apart
from megatron_lite.analysis.kernels.kernel_results import Role, TensorCores
from megatron_lite.analysis.kernels.roles import (
    bare_operator,
    fused_operators,
    is_communication,
    role_of_kernel,
    role_of_operator,
)
from megatron_lite.analysis.trace.columns import DEVICE_KINDS
from megatron_lite.analysis.trace.read import read_traces

TRACES = Path(__file__).parents[2] / "shared" / "traces"
YES, NO, UNKNOWN, NONE = TensorCores.YES, TensorCores.NO, TensorCores.UNKNOWN, TensorCores.NOT_APPLICABLE
ATEN = "void at::native::"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, "
    "cutlass::bfloat16_t, pytorch_flash::Flash_kernel_traits<64, 128, 64, 4, cutlass::bfloat16_t> >, false, {causal}, "
    "false, false, true, true, false, "
    "false>(pytorch_flash::Flash_fwd_params)"
)
MANGLED = (
    "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22"
    "ImplicitGemmMultistageINS_4gemm"
    "9GemmShapeILi64ELi128ELi32EEENS_10tfloat32_tE"
)


def fields(name: str) -> dict[str, str]:
    return {part.field: part.text for part in taken_apart(name).parts}


def test_the_seeds_half_precision_kernel():
    kernel = taken_apart("ampere_fp16_s1688gemm_fp16_128x128_ldg8_relu_f2f_stages_32x1_tn")
    assert (kernel.role, kernel.family, kernel.tensor_cores, kernel.precision) == (Role.GEMM, "cuBLAS", YES, "fp16")
    said = {part.text: part.meaning for part in kernel.parts}
    assert list(said) == ["ampere", "fp16", "s", "1688", "128x128", "ldg8", "relu", "f2f", "stages_32x1", "tn"]
    assert "sm80" in said["ampere"] and "fp32" in said["s"] and "16x8x8" in said["1688"]
    assert said["ldg8"] == "each load takes 8 elements"
    assert said["tn"].startswith("first operand transposed, second as it is")
    assert {part.text for part in kernel.parts if part.inferred} == {"f2f", "stages_32x1"}


def test_the_seeds_single_precision_kernel():
    kernel = taken_apart("ampere_sgemm_128x64_tn")
    assert (kernel.tensor_cores, kernel.precision, kernel.why_not) == (NO, "fp32", "fp32 operands")
    assert fields("ampere_sgemm_128x64_tn") == {
        "architecture": "ampere",
        "operation": "sgemm",
        "block tile": "128x64",
        "layout": "tn",
    }


@pytest.mark.parametrize(
    ("name", "cores", "precision"),
    [
        ("volta_sgemm_32x32_sliced1x4_tn", NO, "fp32"),
        ("volta_h884gemm_64x128_ldg8_nn", YES, "fp16"),
        ("ampere_h16816gemm_128x64_ldg8_stages_64x3_nn", YES, "fp16"),
        ("turing_fp16_s1688gemm_fp16_256x64_ldg8_f2f_nn", YES, "fp16"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn", YES, "bf16"),
        ("volta_fp16_sgemm_fp16_64x32_nn", NO, "fp16"),
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>(x)",
            YES,
            "tf32",
        ),  # no format: TF32
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(x)", NO, "fp32"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(x)", YES, "bf16"),
        ("cutlass_80_tensorop_d884gemm_128x64_16x3_nt_align1", YES, "fp64"),
        ("cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64_2x1x1_0_tnn_align8", YES, "bf16"),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas",
            YES,
            "bf16",
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute",
            NO,
            "fp32",
        ),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x32_stage3_tensor16x8x8_kernel", YES, "tf32"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", YES, "fp16"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", YES, "bf16"),
        ("nvjet_sm100_qqtst_128x256_128x4_2x1_2cta_v_bz_NTT", YES, "fp8"),
        ("nvjet_sss_128x128_32x4_1x1_h_bz_NNT", YES, "tf32"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_SN", YES, "bf16"),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_SN_1LDSB0", NO, "fp32"),
        ("Cijk_Alik_Bljk_F8B8BS_BH_UserArgs_MT256x256x128_MI16x16x1", YES, "fp8"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, float>(x)", NONE, "bf16"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(x)", NONE, "fp32"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", NO, "fp32"),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)", NO, "fp32"),
        (
            "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x256_16x4_nhwc_align4>(x)",
            YES,
            "tf32",
        ),
        (MANGLED, YES, "tf32"),
        (
            "void cutlass::device_kernel<cutlass::gemm::GemmUniversal<MainloopSm90Tma<5>, cutlass::float_e4m3_t> >(x)",
            YES,
            "fp8",
        ),
        ("fmha_cutlassF_f16_aligned_64x128_rf_sm80(x)", YES, "fp16"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm70(x)", NO, "fp32"),
        ("fmha_cutlassB_f32_aligned_64x64_k64_sm80(x)", YES, "fp32"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
            YES,
            "fp16/bf16",
        ),
        (
            "void flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, cutlass::half_t> >(x)",
            NONE,
            "fp16",
        ),
        (
            "void flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8, cutlass::half_t> >(x)",
            NONE,
            "fp16",
        ),
        ("igemm_fwd_gtcx3_nhwc_fp16_bx0_ex0_bt128x128x32_wt32x32x8_ws1x1_wr2x2_ta1x8x2x1_1x4x1x64_gkgs", YES, "fp16"),
        ("igemm_wrw_gtcx2_nhwc_bf16_bx0_ex1_bt256x256x32_wt32x32x8", YES, "bf16"),
        ("igemm_bwd_gtcx_nchw_fp32_bx0_ex1_bt128x128x8", YES, "fp32"),
        ("igemm_fwd_gtcm_nchw_fp16_bt64x32x8", UNKNOWN, "fp16"),
        ("void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm<ck::bhalf_t> >(x)", YES, "bf16"),
        ("_ZN2ck40kernel_gemm_xdl_cshuffle_v3_multi_d_b_preshuffle", YES, ""),
        (
            "void ck::tensor_operation::device::(anonymous namespace)::kernel_grouped_conv_fwd_xdl_cshuffle<_Float16>(x)",
            YES,
            "fp16",
        ),
        ("void ck::kernel_gemm_dl_v1r3<ck::GridwiseGemmDl<ck::half_t> >(x)", NO, "fp16"),
        (
            "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVS<_Float16> > >(x)",
            YES,
            "fp16",
        ),
        ("hgemm_bf16_t32x32x64x6_ksd_w1x2x1", UNKNOWN, "bf16"),
        ("my_hgemm_kernel", UNKNOWN, ""),
        ("Cijk_Alik_Bljk_HB_MT64x64x16_SN_1LDSB0", UNKNOWN, "fp16"),
        ("Cijk_Alik_Bljk_HB_MT64x64x16_SN_TT4_4_WG16_16_1", NO, "fp16"),
        ("void regular_fft<256u, EPT<16u>, __half>(x)", NONE, ""),
        ("triton_tem_fused_mm_0", UNKNOWN, ""),
        ("matmul_kernel", UNKNOWN, ""),
        ("triton_poi_fused_add_0", NONE, ""),
        (f"{ATEN}vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int)", NONE, "fp32"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", NONE, "bf16"),
    ],
)
def test_tensor_cores_and_precision(name, cores, precision):
    kernel = taken_apart(name)
    assert (kernel.tensor_cores, kernel.precision) == (cores, precision)
    assert bool(kernel.why_not) == (cores is NO)


def test_pieces_of_cutlass_and_of_what_is_inferred():
    assert fields("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(x)") == {
        "architecture": "sm80",
        "unit": "tensorop",
        "format": "bf16",
        "accumulator": "s",
        "instruction tile": "16816",
        "epilogue": "relu",
        "block tile": "256x128",
        "stages": "32x3",
        "layout": "tn",
        "alignment": "align8",
    }
    assert taken_apart("cutlass_80_simt_sgemm_128x32_8x5_nn_align1").alignment == 1
    assert all(part.inferred for part in taken_apart("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN").parts)
    assert fields("nvjet_tst_192x192_64x4_2x1_v_bz_splitK_bias_TNN")["split-K"] == "splitK"
    assert (
        fields("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_kernel")[
            "instruction tile"
        ]
        == "tensor16x8x16"
    )


@pytest.mark.parametrize(
    ("written", "causal"), [("true", True), ("false", False), ("(bool)1", True), ("(bool)0", False)]
)
def test_flash_attention_says_whether_it_is_causal(written, causal):
    kernel = taken_apart(FLASH.format(causal=written))
    assert (kernel.causal, kernel.precision, kernel.role) == (causal, "bf16", Role.ATTENTION)
    assert (fields(kernel.name)["head width"], fields(kernel.name)["block tile"]) == ("64", "128, 64")


def test_flash_attention_with_divided_sequences_has_no_dropout_among_its_arguments():
    traits = "Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::half_t, x>"
    kernel = taken_apart(f"void flash::flash_fwd_splitkv_kernel<{traits}, true, false, false, true>(x)")
    assert (kernel.causal, fields(kernel.name).get("dropout")) == (True, None)


def test_collectives_of_all_years():
    old = fields("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)")
    new = fields("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    assert old == {
        "operation": "AllReduce",
        "algorithm": "RING",
        "protocol": "LL",
        "reduction": "Sum",
        "format": "float",
    }
    assert new == old | {"format": "f32"}
    assert "another protocol" in taken_apart("ncclDevKernel_AllGather_RING_LL(x)").note
    assert fields("ncclDevKernel_SendRecv(x)") == {"operation": "SendRecv"}
    assert taken_apart("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)").precision == ""  # bytes of whatever format


def test_what_torch_compile_fused_stands_in_the_name():
    assert fused_operators("_log_softmax__to_copy_sum") == ["_log_softmax", "_to_copy", "sum"]
    assert fused_operators("add_native_layer_norm_backward_gelu_backward_what") == [
        "add",
        "native_layer_norm_backward",
        "gelu_backward",
        "what",
    ]
    assert fused_operators("") == fused_operators("___") == []
    assert fields("triton_red_fused_add_native_layer_norm_12") == {
        "kind": "red",
        "fused operators": "add_native_layer_norm",
        "number": "12",
    }


def test_lists_of_tensors_and_elementwise_functions():
    adam = (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
        "at::native::FusedOptimizerTensorListMetadata<4>, "
        "at::native::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double>(x)"
    )
    assert (fields(adam)["function"], fields(adam)["lists"], taken_apart(adam).precision) == (
        "FusedAdamMathFunctor",
        "4",
        "fp32",
    )
    copy = f"{ATEN}vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&), y>(int)"
    assert fields(copy)["function"] == "bfloat16_copy_kernel_cuda"
    assert fields("Memcpy HtoD (Pageable -> Device)") == {"direction": "HtoD", "memory": "Pageable"}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            f"{ATEN}vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, at::detail::Array<char*, 1> >(int)",
            "vectorized_elementwise_kernel<FillFunctor>",
        ),
        (f"{ATEN}(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>(float*)", "CatArrayBatchedCopy"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(x)",
            "cutlass_80_simt_sgemm_128x32_8x5_nn_align1",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x> > >(y)",
            "cutlass::device_kernel<FlashAttnFwdSm90>",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        (MANGLED, "cutlass_cudnn_train::Kernel<ImplicitGemmConvolution>"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"),
        ("", ""),
        ("<<<>>>", "<<<>>>"),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short


def test_mangled_names_give_their_identifiers():
    assert demangled("_ZN7cutlass6KernelINS_4GemmE") == "cutlass::Kernel<Gemm>"
    assert demangled("_Z3foov") == "foo"
    assert demangled("_ZN99999999999x") == "_ZN99999999999x"
    assert demangled("plain") == "plain"


def test_words_for_people():
    text = "\n".join(in_words("ampere_sgemm_128x64_tn"))
    assert "What it is for: a matrix product (by cuBLAS)." in text
    assert "Tensor cores: no (fp32 operands); try --bf16 or --fp16" in text
    inferred = "\n".join(in_words("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"))
    assert "(*) inferred: seen in use, documented by nobody." in inferred
    assert in_words("my_own_thing")[-1] == "What it is for: unknown: no pattern of this tool fits the name."
    assert any(line.startswith("Beware: NCCL") for line in in_words("ncclKernel_AllReduce_RING_LL_Sum_float(x)"))
    assert "odd" in "\n".join(in_words("cutlass_80_simt_hgemm_128x32_8x5_nn_align1"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "\x00\x1b[2J\n",
        "<script>alert(1)</script>",
        "gemm_",
        "_ZN",
        "_ZN9",
        "s1688gemm",
        "nvjet_",
        "Cijk_",
        "x" * 100_000,
        "<" * 50_000,
        "(" * 50_000,
        "1x" * 50_000,
        "cutlass_" * 9_000,
        "gemm_s1688" * 9_000,
        "flash_" * 9_000,
        "triton_poi_fused_" + "_a" * 40_000,
        "igemm_fwd_gtcx" * 9_000,
        "ck::gemm" * 9_000,
        "_ZN" + "1a" * 40_000,
        "at::native::" * 9_000,
        "all_" * 25_000,
        "(anonymous namespace)::" * 5_000,
        "\ud800",
    ],
)
def test_no_string_fails_or_takes_long(name):
    started = time.process_time()
    lines = in_words(name)
    role_of_kernel(name), role_of_operator(name), is_communication(name)
    assert time.process_time() - started < 10
    assert lines


# --- roles, by names that real traces and libraries have

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


@pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/traces beside the repository")
def test_every_kernel_of_real_traces_has_a_role_and_can_be_said():
    names = set()
    for path in (path for path in sorted(TRACES.glob("*/rank0*")) if not path.parent.name.endswith("workers4")):
        trace = read_traces(path)[0]
        names |= {trace.names[name] for kind in DEVICE_KINDS for name in trace.events.name[trace.rows[kind]].tolist()}
    assert len(names) > 200
    for name in names:
        assert role_of_kernel(name) is not Role.OTHER and taken_apart(name).tensor_cores is not UNKNOWN
        assert len(in_words(name)) >= 2 and short_name(name)


def test_roles_are_text():
    assert json.dumps({Role.GEMM: 1.0}) == '{"matrix products": 1.0}'
