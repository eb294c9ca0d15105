"""Names of kernels taken apart and put in words, and what kernels and operators are for."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import TRACES
from support.wording import wording

from megatron_lite.analysis.kernels.kernel_names import in_words, short_name, taken_apart
from megatron_lite.analysis.kernels.kernel_results import Role, TensorCores
from megatron_lite.analysis.kernels.kernel_words import (
    bare_operator,
    demangled,
    fused_operators,
    get_kernel_role,
    get_operator_role,
    is_communication,
)
from megatron_lite.analysis.trace.columns import DEVICE_KINDS
from megatron_lite.analysis.trace.read import read_traces

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


def test_a_half_precision_kernel_of_cublas():
    kernel = taken_apart("ampere_fp16_s1688gemm_fp16_128x128_ldg8_relu_f2f_stages_32x1_tn")
    assert (kernel.role, kernel.family, kernel.tensor_cores, kernel.precision) == (Role.GEMM, "cuBLAS", YES, "fp16")
    said = {part.text: part.meaning for part in kernel.parts}
    assert list(said) == ["ampere", "fp16", "s", "1688", "128x128", "ldg8", "relu", "f2f", "stages_32x1", "tn"]
    assert "sm80" in said["ampere"] and "fp32" in said["s"] and "16x8x8" in said["1688"]
    assert said["ldg8"] == wording("analysis/each-load-takes-elements", 8)
    assert said["tn"].startswith(wording("analysis/first-operand-transposed-second"))
    assert {part.text for part in kernel.parts if part.inferred} == {"f2f", "stages_32x1"}


def read_names() -> list[tuple[str, ...]]:
    """(name, role, tensor cores, precision) of kernels of real traces and libraries; "-" where nothing is said."""
    lines = (Path(__file__).parent / "kernel_names.tsv").read_text().splitlines()[1:]
    return [(name.encode().decode("unicode_escape"), *rest) for name, *rest in (line.split("\t") for line in lines)]


NAMES = read_names()


@pytest.mark.parametrize(("name", "role", "cores", "precision"), NAMES)
def test_kernels(name, role, cores, precision):
    kernel = taken_apart(name)
    assert role in ("-", get_kernel_role(name).name)
    assert cores in ("-", kernel.tensor_cores.name) and precision in ("-", kernel.precision)
    assert bool(kernel.why_not) == (kernel.tensor_cores is NO)
    assert is_communication(name) == (get_kernel_role(name) is Role.COMMUNICATION)


# name: its pieces, all (=) or among others (>=), as "field: text; ..."
PIECES = """
ampere_sgemm_128x64_tn = architecture: ampere; operation: sgemm; block tile: 128x64; layout: tn
void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(x) = architecture: sm80; unit: tensorop; format: bf16; accumulator: s; instruction tile: 16816; epilogue: relu; block tile: 256x128; stages: 32x3; layout: tn; alignment: align8
nvjet_tst_192x192_64x4_2x1_v_bz_splitK_bias_TNN >= split-K: splitK
sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_kernel >= instruction tile: tensor16x8x16
ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*) = operation: AllReduce; algorithm: RING; protocol: LL; reduction: Sum; format: float
ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>) = operation: AllReduce; reduction: Sum; format: f32; algorithm: RING; protocol: LL
ncclDevKernel_SendRecv(x) = operation: SendRecv
triton_red_fused_add_native_layer_norm_12 = kind: red; fused operators: add_native_layer_norm; number: 12
void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, at::native::FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double>(x) >= function: FusedAdamMathFunctor; lists: 4
void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&), y>(int) >= function: bfloat16_copy_kernel_cuda
Memcpy HtoD (Pageable -> Device) = direction: HtoD; memory: Pageable
"""


@pytest.mark.parametrize("line", PIECES.strip().splitlines())
def test_pieces(line):
    name, among_others, pieces = re.fullmatch(r"(.*) (>?)= (.*)", line).groups()
    wanted, seen = dict(piece.split(": ") for piece in pieces.split("; ")), fields(name)
    assert wanted.items() <= seen.items() and (among_others or len(seen) == len(wanted))


def test_what_names_tell_beside_their_pieces():
    assert taken_apart("ampere_sgemm_128x64_tn").why_not == "fp32 operands"
    assert taken_apart("cutlass_80_simt_sgemm_128x32_8x5_nn_align1").alignment == 1
    assert all(part.inferred for part in taken_apart("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN").parts)
    assert "another protocol" in taken_apart("ncclDevKernel_AllGather_RING_LL(x)").note
    assert taken_apart("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)").precision == ""  # bytes of whatever format


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


def test_what_torch_compile_fused_stands_in_the_name():
    assert fused_operators("_log_softmax__to_copy_sum") == ["_log_softmax", "_to_copy", "sum"]
    found = fused_operators("add_native_layer_norm_backward_gelu_backward_what")
    assert found == ["add", "native_layer_norm_backward", "gelu_backward", "what"]
    assert fused_operators("") == fused_operators("___") == []


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
    assert wording("analysis/what-it-is-for") in text
    assert "Tensor cores: no (fp32 operands); try --bf16 or --fp16" in text
    inferred = "\n".join(in_words("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT"))
    assert wording("analysis/inferred-from-use-not") in inferred
    assert in_words("my_own_thing")[-1] == wording("analysis/what-it-is-for-unknown")
    assert any(line.startswith("Beware: NCCL") for line in in_words("ncclKernel_AllReduce_RING_LL_Sum_float(x)"))
    assert "odd" in "\n".join(in_words("cutlass_80_simt_hgemm_128x32_8x5_nn_align1"))


LONG = {"x": 100_000, "<": 50_000, "(": 50_000, "1x": 50_000, "cutlass_": 9_000, "gemm_s1688": 9_000, "flash_": 9_000,
        "igemm_fwd_gtcx": 9_000, "ck::gemm": 9_000, "at::native::": 9_000, "all_": 25_000, "(anonymous namespace)::": 5_000}  # fmt: skip
HOSTILE = ["", "\x00\x1b[2J\n", "<script>alert(1)</script>", "gemm_", "_ZN", "_ZN9", "s1688gemm", "nvjet_", "Cijk_", "\ud800",
           "triton_poi_fused_" + "_a" * 40_000, "_ZN" + "1a" * 40_000, *(piece * number for piece, number in LONG.items())]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_string_fails_or_takes_long(name):
    started = time.process_time()
    lines = in_words(name)
    get_kernel_role(name), get_operator_role(name), is_communication(name)
    assert time.process_time() - started < 10
    assert lines


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


@pytest.mark.parametrize(
    ("role", "name"), [(role, name) for role, names in OPERATORS.items() for name in names.split()]
)
def test_operators(role, name):
    assert get_operator_role(name) is role


def test_an_operator_and_its_node_in_the_backward_pass_have_one_bare_name():
    names = (
        "aten::nll_loss NllLossBackward0 autograd::engine::evaluate_function:_NllLossBackward0 aten::nll_loss_backward"
    )
    assert {bare_operator(name.replace(":_", ": ")) for name in names.split()} == {"nll_loss"}
    assert [bare_operator(name) for name in ("aten::add_", "c10d::allreduce_", "")] == ["add", "c10d::allreduce", ""]
    assert all(map(is_communication, ["gloo:all_reduce", "nccl:all_reduce"]))


@pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/traces beside the repository")
def test_every_kernel_of_real_traces_has_a_role_and_can_be_said():
    names = set()
    for path in (path for path in sorted(TRACES.glob("*/rank0*")) if not path.parent.name.endswith("workers4")):
        trace = read_traces(path)[0]
        names |= {trace.names[name] for kind in DEVICE_KINDS for name in trace.events.name[trace.rows[kind]].tolist()}
    assert len(names) > 200
    for name in names:
        assert get_kernel_role(name) is not Role.OTHER and taken_apart(name).tensor_cores is not UNKNOWN
        assert len(in_words(name)) >= 2 and short_name(name)


def test_the_main_word_of_the_functions_own_name_decides():
    """What stands among template arguments, or in a namespace, tells what was fused into a function, not what it is."""
    experts = "cutlass::epilogue::thread::SiLu, cutlass::epilogue::fusion::Scatter, SoftmaxTopK"
    assert (
        get_kernel_role(f"void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<{experts}> >(x)")
        is Role.GEMM
    )
    assert (
        get_kernel_role("void moe::dev::finalize::finalizeKernel<KernelParams<cutlass::bfloat16_t> >(x)")
        is Role.EMBEDDING
    )
    assert get_kernel_role("void ns::swiglu_kernel<GemmParams>(MatmulArguments)") is Role.ELEMENTWISE
    assert get_kernel_role("void flashinfer::norm::RMSNormKernel<8u>(x)") is Role.NORM


def test_formats_of_both_operands_are_told_and_the_wider_one_is_the_products():
    kernel = taken_apart("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_TN_biasM_clmp_dynBatch_sm100f")
    assert (kernel.precision, kernel.tensor_cores) == ("fp8", YES)
    assert [part.text for part in kernel.parts if part.field == "operands"] == ["MxE2m1", "MxE4m3"]
    assert fields(kernel.name)["result"] == "Bfloat16" and fields(kernel.name)["block tile"] == "t128x16x256"


def test_a_mangled_name_that_was_cut_keeps_its_last_word():
    assert demangled("_ZN5aiter48fmoe_bf16_pertokenFp8_g1u1_vs_si") == "aiter::fmoe_bf16_pertokenFp8_g1u1_vs_si"


def read_roles_with(table: Path, name: str) -> tuple[int, str]:
    """(exit code, what is printed) of a process of its own: roles are read once."""
    code = (
        "from megatron_lite.analysis.kernels.kernel_words import get_kernel_role\n"
        "from megatron_lite.errors import UserError\n"
        f"try: print(get_kernel_role({name!r}).name)\nexcept UserError as error: raise SystemExit(str(error))"
    )
    given = os.environ | {"MEGATRON_LITE_KERNEL_NAMES": str(table)}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_user_adds_roles_of_kernels(tmp_path):
    table = tmp_path / "kernels.tsv"
    table.write_text("# mine\nGEMM\t^my_product my_other_product\nCOMMUNICATION\tring_exchange\n")
    assert read_roles_with(table, "my_product_kernel") == (0, "GEMM\n")
    assert read_roles_with(table, "void ns::Ring_Exchange<int>(x)") == (0, "COMMUNICATION\n")
    assert read_roles_with(table, "ampere_sgemm_128x64_tn") == (0, "GEMM\n")


@pytest.mark.parametrize("text", ["PRODUCT\tx\n", "GEMM\n", "GEMM\t(\n", None])
def test_a_table_of_the_user_that_is_wrong_is_one_line(tmp_path, text):
    table = tmp_path / "kernels.tsv"
    if text is not None:
        table.write_text(text)
    code, said = read_roles_with(table, "x")
    assert code == 1 and said.count("\n") == 1 and "kernels.tsv" in said
