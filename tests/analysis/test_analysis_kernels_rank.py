"""Kernel, operator and roofline figures of a rank: made traces with known answers, and properties of real ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
from support.paths import TRACES
from support.trace_maker import AUTOGRAD, MadeTrace, cpu_run, gpu_run
from support.wording import wording

from megatron_lite.analysis.kernels.kernel_results import RankKernels, Role, TensorCores
from megatron_lite.analysis.kernels.rank_kernels import rank_kernels
from megatron_lite.analysis.kernels.selection import heaviest
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.read import read_traces

FILES = [path for path in sorted(TRACES.glob("*/rank0*")) if not path.parent.name.endswith("workers0")]  # as workers4
SGEMM, TF32, FLASH = (
    "ampere_sgemm_128x64_tn",
    "cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4",
    (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 64, 4, false, false, cutlass::bfloat16_t, x> >"
        ", false, true, false>(x)"
    ),
)
BF16 = "c10::BFloat16"
Q = [2, 4, 128, 64]
CONVOLUTION = [[32, 64, 56, 56], [32, 3, 112, 112], [64, 3, 7, 7]]


def figures(made: MadeTrace, folder) -> RankKernels:
    [trace] = read_traces(made.write(folder))
    placing = attribute_events(trace)
    return rank_kernels(trace, placing, rank_time(trace, placing))


def one_product(
    made: MadeTrace, at: float, kernel: str, name: str, dims: list, dtypes=None, us: float = 100.0, values=None
):
    made.op(name, at, at + 20, dims=dims, dtypes=dtypes, values=values)
    made.kernel(kernel, at + 30, at + 30 + us, at + 5)


def steps(count: int, of_step, **header) -> MadeTrace:
    """`of_step(made, at)` in each of `count` equal steps of 1 ms."""
    made = MadeTrace(**header)
    for number in range(count):
        made.step(number, number * 1000, number * 1000 + 990)
        of_step(made, number * 1000 + 10)
    return made


def test_kernels_roles_and_tensor_cores_of_a_run(tmp_path):
    kernels = figures(gpu_run(steps=4, all_reduce_us=300, world_size=2), tmp_path)
    wanted = {Role.GEMM: 0.6, Role.COMMUNICATION: 0.3, Role.OPTIMIZER: 0.1, Role.TRANSFER: 0.01}
    assert kernels.roles == pytest.approx(wanted)
    assert kernels.device_ms == pytest.approx(1.01)
    rows = {row.short: row for row in kernels.rows}
    backward = rows["ampere_sgemm_128x64_nt"]
    assert backward.ms == pytest.approx(0.4)
    assert (backward.per_step, backward.phase, backward.operator) == (1.0, "backward", "aten::mm")
    assert (backward.tensor_cores, backward.precision) == (TensorCores.NO, "fp32")
    assert sum(row.share for row in kernels.rows) == pytest.approx(1)
    assert [row.ms for row in kernels.rows] == sorted((row.ms for row in kernels.rows), reverse=True)
    assert kernels.matrix_ms == pytest.approx(0.6)
    assert (kernels.tensor_core_ms, kernels.without_tensor_cores) == (0, {"fp32 operands": pytest.approx(0.6)})


def test_work_and_bound_of_a_product(tmp_path):
    def product(made, at):
        one_product(made, at, SGEMM, "aten::mm", [[512, 1024], [1024, 256]])

    kernels = figures(steps(3, product), tmp_path)
    [row] = kernels.roofline
    flops = 2 * 512 * 1024 * 256
    assert (row.operator, row.dims, row.dtype) == ("aten::mm", (512, 256, 1024), "fp32")
    assert row.shape == "[512, 1024] x [1024, 256] fp32"
    assert (row.flops, row.per_step, row.ms) == (flops, 1, pytest.approx(0.1))
    assert row.num_bytes == 4 * (512 * 1024 + 1024 * 256 + 512 * 256)
    assert row.achieved_tflops == pytest.approx(flops / 1e-4 / 1e12)
    # A100, fp32 outside tensor cores
    assert row.bound_by == "compute" and row.bound_ms == pytest.approx(flops / 19.5e12 * 1e3)
    assert row.efficiency == pytest.approx(row.bound_ms / row.ms)
    assert (kernels.model_flops, kernels.peak_dtype, kernels.peak_tflops) == (flops, "fp32", 19.5)
    assert kernels.mfu == pytest.approx(kernels.achieved_tflops / 19.5)


def test_the_kernel_tells_tf32_which_the_operator_does_not(tmp_path):
    kernels = figures(
        steps(3, lambda made, at: one_product(made, at, TF32, "aten::mm", [[512, 1024], [1024, 256]])), tmp_path
    )
    assert (kernels.peak_dtype, kernels.peak_tflops, kernels.roofline[0].dtype) == ("tf32", 156.0, "fp32")
    assert kernels.tensor_core_ms == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::addmm", [[32], [16, 64], [64, 32]], 2 * 16 * 64 * 32),
        ("aten::bmm", [[8, 16, 64], [8, 64, 32]], 2 * 8 * 16 * 64 * 32),
        ("aten::baddbmm", [[8, 16, 32], [8, 16, 64], [8, 64, 32]], 2 * 8 * 16 * 64 * 32),
        ("aten::linear", [[4, 4, 64], [32, 64], [32]], 2 * 16 * 64 * 32),
        ("aten::matmul", [[4, 4, 64], [64, 32]], 2 * 16 * 64 * 32),
        ("aten::matmul", [[2, 3, 4, 64], [2, 3, 64, 32]], 2 * 6 * 4 * 64 * 32),
        ("aten::_scaled_dot_product_flash_attention", [[2, 4, 128, 64]] * 3, 4 * 2 * 4 * 128 * 128 * 64),
        ("aten::_flash_attention_forward", [[2, 128, 4, 64]] * 3, 4 * 2 * 4 * 128 * 128 * 64),
        ("aten::_scaled_dot_product_cudnn_attention", [Q, *[[2, 2, 256, 64]] * 2], 4 * 2 * 4 * 128 * 256 * 64),
        # MFU counts backward as twice forward; that the kernel repeats the scores is no model FLOP
        ("aten::_scaled_dot_product_efficient_attention_backward", [Q] * 4, 2 * 4 * 2 * 4 * 128 * 128 * 64),
        ("aten::_flash_attention_backward", [[2, 128, 4, 64]] * 4, 2 * 4 * 2 * 4 * 128 * 128 * 64),
        ("aten::convolution_backward", CONVOLUTION, 2 * 2 * 32 * 64 * 56 * 56 * 3 * 49),
    ],
)
def test_flops_of_operators(tmp_path, name, dims, flops):
    kernels = figures(steps(3, lambda made, at: one_product(made, at, SGEMM, name, dims)), tmp_path)
    assert kernels.model_flops == flops


@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("aten::mm", [[512, 1024], [1000, 256]]),
        ("aten::mm", [[512], [512, 4]]),
        ("aten::mm", []),
        ("aten::mm", [[-1, 4], [4, 4]]),
        ("aten::mm", [["x", 4], [4, 4]]),
        ("aten::mm", [[2**50, 4], [4, 4]]),
        ("aten::bmm", [[[4, 4]], [[4, 4]]]),
        ("aten::_scaled_dot_product_flash_attention", [[4, 128, 64]] * 3),
        ("aten::cudnn_convolution", [[1, 3, 8, 8], [4, 3, 3, 3]]),
        ("some::mm", [[4, 4], [4, 4]]),
    ],
)
def test_shapes_that_tell_nothing_give_no_figure(tmp_path, name, dims):
    kernels = figures(steps(3, lambda made, at: one_product(made, at, SGEMM, name, dims)), tmp_path)
    assert (kernels.model_flops, kernels.mfu) == (None, None)
    assert kernels.roofline == ()
    assert kernels.matrix_ms == pytest.approx(0.1)


def test_a_forward_convolution_takes_its_result_from_the_backward_pass(tmp_path):
    result, given, weight = CONVOLUTION

    def both(made, at):
        one_product(made, at, SGEMM, "aten::cudnn_convolution", [given, weight])
        one_product(made, at + 300, SGEMM, "aten::convolution_backward", [result, given, weight])

    forward = 2 * math.prod(result) * 3 * 49
    assert figures(steps(3, both), tmp_path).model_flops == 3 * forward


def values_of_backward(mask: object, bias="[64]") -> list:
    """The "Concrete Inputs" of aten::convolution_backward."""
    return ["", "", "", bias, "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1", mask]


@pytest.mark.parametrize(
    ("values", "products"),
    [
        (values_of_backward("[True, True, True]"), 2),
        (values_of_backward("[True, True, False]", bias=""), 2),
        # a first layer, whose input needs no gradient
        (values_of_backward("[False, True, False]"), 1),
        # a layer whose weight is frozen
        (values_of_backward("[True, False, False]"), 1),
        # input and weight alone, as cudnn_convolution_backward has them
        (values_of_backward("[False, True]"), 1),
        # only the bias
        (values_of_backward("[False, False, True]"), None),
        # no mask, or a damaged one: both gradients
        (None, 2),
        ([], 2),
        (values_of_backward(""), 2),
        (values_of_backward("[False]"), 2),
        (values_of_backward("[False, True, Fal"), 2),
        (values_of_backward("[False, None, False]"), 2),
        (values_of_backward("[False, True, False, True]"), 2),
        (values_of_backward("[0, 1, 0]"), 2),
        (values_of_backward([False, True, False]), 2),
        ("[False, True", 2),
        (7, 2),
        ({"mask": None}, 2),
    ],
)
def test_a_convolution_computes_the_gradients_that_its_mask_names(tmp_path, values, products):
    result, given, weight = CONVOLUTION

    def backward(made, at):
        one_product(made, at, SGEMM, "aten::convolution_backward", CONVOLUTION, values=values)

    kernels = figures(steps(3, backward), tmp_path)
    if products is None:
        assert (kernels.model_flops, kernels.roofline) == (None, ())
        return
    [row] = kernels.roofline
    assert kernels.model_flops == row.flops == products * 2 * math.prod(result) * 3 * 49
    assert row.num_bytes == products * 4 * sum(map(math.prod, (result, given, weight)))


def test_convolutions_of_one_shape_and_several_masks(tmp_path):
    def backward(made, at):
        for place, mask in enumerate(("[True, True, False]", "[False, True, False]", "[True, True, False]")):
            values = values_of_backward(mask)
            one_product(made, at + 300 * place, SGEMM, "aten::convolution_backward", CONVOLUTION, values=values)

    forward = 2 * math.prod(CONVOLUTION[0]) * 3 * 49
    kernels = figures(steps(3, backward), tmp_path)
    assert sorted(row.flops for row in kernels.roofline) == [forward, 4 * forward]
    assert kernels.model_flops == 5 * forward


def test_causal_attention_computes_half_and_its_model_flops_count_all(tmp_path):
    def attention(made, at):
        made.op("aten::_scaled_dot_product_flash_attention", at, at + 30, dims=[[2, 4, 128, 64]] * 3, dtypes=[BF16] * 3)
        made.op("aten::_flash_attention_forward", at + 2, at + 20, dims=[[2, 128, 4, 64]] * 3, dtypes=[BF16] * 3)
        made.kernel(FLASH, at + 30, at + 80, at + 5)

    kernels = figures(steps(3, attention), tmp_path)
    full = 4 * 2 * 4 * 128 * 128 * 64
    [row] = kernels.roofline
    assert (row.operator, row.causal, row.flops) == ("aten::_scaled_dot_product_flash_attention", True, full / 2)
    assert row.dims == (2, 4, 128, 128, 64)
    assert (kernels.model_flops, kernels.attention_flops, kernels.peak_dtype) == (full, full, "bf16")
    assert not any("causal" in note for note in kernels.notes)


def test_recomputed_products_are_no_model_flops(tmp_path):
    def backward(made, at):
        one_product(made, at, SGEMM, "aten::mm", [[64, 64], [64, 64]])
        node = "autograd::engine::evaluate_function: MmBackward0"
        made.op(node, at + 200, at + 290, AUTOGRAD, sequence=5, forward_thread=1)
        made.op("aten::mm", at + 210, at + 220, AUTOGRAD, dims=[[64, 64], [64, 64]], sequence=9, forward_thread=0)
        made.kernel(SGEMM, at + 230, at + 280, at + 212, thread=AUTOGRAD)
        made.op("aten::mm", at + 240, at + 250, AUTOGRAD, dims=[[64, 64], [64, 64]])
        made.kernel(SGEMM, at + 290, at + 340, at + 242, thread=AUTOGRAD)

    kernels = figures(steps(3, backward), tmp_path)
    assert (kernels.model_flops, kernels.recomputed_flops) == (2 * 2 * 64**3, 2 * 64**3)


def test_bytes_of_elementwise_work_and_its_bound(tmp_path):
    def arithmetic(made, at):
        for index, (name, dims) in enumerate(
            [
                ("aten::add_", [[1024, 1024], [1024, 1024]]),
                ("aten::copy_", [[1024, 1024], [1024, 1024]]),
                ("aten::fill_", [[1024, 1024]]),
                ("aten::sum", [[1024, 1024]]),
                ("aten::native_layer_norm", [[1024, 1024], [], [1024], [1024]]),
                ("aten::embedding", [[50304, 64], [8, 128]]),
            ]
        ):
            made.op(name, at + 40 * index, at + 40 * index + 20, dims=dims)
            made.kernel(f"some_kernel_{index}", at + 40 * index + 30, at + 40 * index + 60, at + 40 * index + 5)

    kernels = figures(steps(3, arithmetic), tmp_path)
    moved = {row.operator: row.num_bytes for row in kernels.roofline}
    mib = 4 * 1024 * 1024
    assert moved == {
        "aten::add_": 3 * mib,
        "aten::copy_": 2 * mib,
        "aten::fill_": mib,
        "aten::sum": mib,
        "aten::native_layer_norm": 2 * mib + 2 * 4096,
        "aten::embedding": 2 * 8 * 128 * 64 * 4 + 8 * 128 * 4,
    }
    add = next(row for row in kernels.roofline if row.operator == "aten::add_")
    assert (add.bound_by, add.bound_ms) == ("memory", pytest.approx(3 * mib / 2039e9 * 1e3))
    assert kernels.model_flops is None
    # from operators
    assert kernels.roles.keys() == {Role.ELEMENTWISE, Role.CAST_COPY, Role.REDUCTION, Role.NORM, Role.EMBEDDING}


def test_the_fused_optimizer_takes_its_number_format_from_the_kernel(tmp_path):
    kernel = "void at::native::multi_tensor_apply_kernel<x<4>, at::native::FusedAdamMathFunctor<float, 4> >(x)"
    lists = [[[1000], [24]]] * 4

    def update(made, at):
        one_product(made, at, kernel, "aten::_fused_adamw_", lists, ["TensorList"] * 4)

    [row] = figures(steps(3, update), tmp_path).roofline
    assert (row.num_bytes, row.dtype, row.role) == (7 * 1024 * 4, "fp32", Role.OPTIMIZER)


def test_operators_own_time_and_the_device_work_below_them(tmp_path):
    def linear(made, at):
        made.op("aten::linear", at, at + 50, dims=[[16, 64], [32, 64]])
        made.op("aten::addmm", at + 10, at + 40, dims=[[32], [16, 64], [64, 32]])
        made.kernel(SGEMM, at + 60, at + 90, at + 20)

    kernels = figures(steps(4, linear), tmp_path)
    rows = {row.name: row for row in kernels.operators}
    assert (rows["aten::linear"].self_ms, rows["aten::linear"].device_ms) == (pytest.approx(0.02), pytest.approx(0.03))
    assert (rows["aten::addmm"].self_ms, rows["aten::addmm"].device_ms) == (pytest.approx(0.03), pytest.approx(0.03))
    assert [row.operator for row in kernels.roofline] == ["aten::addmm"]  # not linear's as well
    assert kernels.rows[0].operator == "aten::addmm"


def test_without_a_gpu_operators_are_the_work(tmp_path):
    kernels = figures(cpu_run(steps=4), tmp_path)
    assert kernels.rows == ()
    rows = {row.name: row for row in kernels.operators}
    assert rows["aten::mm"].self_ms == pytest.approx(0.150 + 0.235)
    assert rows["autograd::engine::evaluate_function: MmBackward0"].self_ms == pytest.approx(0.015)
    assert kernels.roles[Role.COMMUNICATION] == pytest.approx(0.3)
    assert kernels.device_ms == pytest.approx(sum(kernels.roles.values()))
    assert kernels.model_flops == 2 * 64 * 128 * 256  # the other product has no shapes
    assert (kernels.peak_tflops, kernels.mfu) == (None, None)
    assert any(wording("analysis/no-peak-is-known") in note for note in kernels.notes)


def test_gaps_are_named(tmp_path):
    def bare(made, at):
        made.op("aten::mm", at, at + 20)
        made.kernel(SGEMM, at + 30, at + 130, at + 5)

    def half(made, at):
        bare(made, at)
        one_product(made, at + 200, SGEMM, "aten::mm", [[64, 64], [64, 64]])

    product = [[64, 64], [64, 64]]
    assert "--pytorch-profiler-collect-shapes" in figures(steps(3, bare), tmp_path / "bare").notes[0]
    assert "shapes explain 50%" in figures(steps(3, half), tmp_path / "half").notes[0]
    for device, note in (
        ("NVIDIA Strange 3000", "no peak is known for NVIDIA Strange 3000"),
        ("Tesla V100-DGXS-32GB", "no fp32 peak of"),
    ):
        kernels = figures(
            steps(3, lambda m, at: one_product(m, at, SGEMM, "aten::mm", product), device=device), tmp_path / device
        )
        assert any(note in one for one in kernels.notes)
        assert (kernels.mfu, kernels.roofline[0].bound_ms, kernels.roofline[0].efficiency) == (None, None, None)


def test_a_trace_without_steady_steps_has_no_figures(tmp_path):
    [trace] = read_traces(gpu_run(steps=3).write(tmp_path))
    placing = attribute_events(trace)
    none = replace(placing, steps=tuple(replace(step, steady=False) for step in placing.steps))
    assert rank_kernels(trace, none, rank_time(trace, none)).notes == (wording("analysis/no-steady-step-so"),)


def test_compiled_regions_are_counted(tmp_path):
    def region(made, at):
        for start in (at, at + 100):
            made.op("Torch-Compiled Region: 0/0", start, start + 60)
            made.op("## Call CompiledFxGraph abc ##", start + 5, start + 50)
            made.kernel("triton_poi_fused_add_gelu_0", start + 60, start + 90, start + 20)

    kernels = figures(steps(3, region), tmp_path)
    assert kernels.compiled_regions == 2
    assert kernels.roles == {Role.FUSED: pytest.approx(0.06)}


def test_the_heaviest_label():
    groups, labels = np.array([0, 0, 0, 2]), np.array([1, 1, 0, -1])
    assert heaviest(groups, labels, np.array([1.0, 1.0, 1.5, 1.0]), 3).tolist() == [1, -1, -1]
    assert heaviest(groups[:0], labels[:0], np.zeros(0), 2).tolist() == [-1, -1]


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.parent.name)
def real(request):
    """(folder, time, kernels) of a real trace."""
    trace = read_traces(request.param)[0]
    placing = attribute_events(trace)
    time = rank_time(trace, placing)
    return request.param.parent.name, time, rank_kernels(trace, placing, time)


@pytest.mark.skipif(not FILES, reason="no ../shared/traces beside the repository")
def test_properties_of_real_traces(real):
    folder, time, kernels = real
    assert sum(kernels.roles.values()) == pytest.approx(kernels.device_ms)
    assert sum(row.ms for row in kernels.rows) == pytest.approx(kernels.device_ms)
    assert kernels.device_ms >= time.busy_ms * 0.999  # parallel streams count twice here
    known = kernels.tensor_core_ms + kernels.maybe_tensor_core_ms + sum(kernels.without_tensor_cores.values())
    assert kernels.matrix_ms >= known - 1e-9
    assert max((row.device_ms for row in kernels.operators), default=0) <= kernels.device_ms + 1e-9
    assert all(row.ms >= 0 and row.num_bytes >= 0 and math.isfinite(row.flops) for row in kernels.roofline)
    products = [row for row in kernels.roofline if row.role is Role.GEMM and row.efficiency is not None]
    assert all(row.efficiency <= 1 for row in products)  # nothing multiplies faster than the peak
    if folder.startswith("v100_resnet50"):
        # 4.09e9 multiply-adds per image of 224 x 224 (torchvision's figure), batch 32; backward takes twice forward
        assert kernels.model_flops == pytest.approx(3 * 2 * 4.09e9 * 32, rel=0.01)
        assert kernels.tensor_core_ms == 0
