"""A process that drives several GPUs, and numbers of GPUs that are no places in the header's list."""

import pytest
from support.trace_maker import MadeTrace, measure, place

from megatron_lite.analysis.kernels.rank_kernels import rank_kernels
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.time.rank_time import rank_time

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
H100, V100 = "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB"


def two_gpus(second: list[tuple[float, float]]) -> MadeTrace:
    """Steps of 1,000 us; 4 products of 200 us each on GPU 0, and such (start, end) of the step on GPU 1."""
    made = MadeTrace(device=H100)
    dims = {"dims": [[1024, 1024], [1024, 1024]], "dtypes": ["c10::BFloat16", "c10::BFloat16"]}
    for index in range(5):
        at = 1000.0 * index
        made.step(index, at, at + 990)
        for place_in_step in range(4):
            launched = at + 20 + 30 * place_in_step
            made.op("aten::mm", launched - 5, launched + 10, **dims)
            begin = at + 150 + 200 * place_in_step
            made.kernel(GEMM, begin, begin + 200, launched)
        for begin, end in second:
            launched = at + 200 + begin / 10
            made.op("aten::mm", launched - 2, launched + 7, **dims)
            made.kernel(GEMM, at + begin, at + end, launched, device=1)
    return made


def test_kernels_and_flops_are_those_of_the_gpu_whose_step_is_shown(tmp_path):
    alone = two_gpus([])
    both = two_gpus([(400, 500), (500, 600), (600, 700)])
    found = []
    for made, folder in ((alone, tmp_path / "one"), (both, tmp_path / "two")):
        trace, placing = place(made, folder)
        time = rank_time(trace, placing)
        kernels = rank_kernels(trace, placing, time)
        facts = RankFacts(trace=trace, placing=placing, time=time, kernels=kernels)
        assert sum(row.ms for row in kernels.rows) == pytest.approx(time.rows["compute"]) == pytest.approx(0.8)
        assert facts.covered_ms(facts.compute_rows()) == pytest.approx(0.8)
        found.append((kernels.model_flops, kernels.mfu, kernels.rows[0].per_step, time.launches, time.step_ms))
    assert found[0] == pytest.approx(found[1])
    assert "GPU 1 is busy 0.3 ms" in " ".join(time.notes) and time.idle_beside_ms == 0


def test_idle_time_beside_another_gpu_is_told(tmp_path):
    time = measure(two_gpus([(950, 1100)]), tmp_path)
    assert time.idle_beside_ms == pytest.approx(0.15, rel=0.1)


def test_a_gpu_that_waits_for_another_of_the_process_waits_for_a_stream(tmp_path):
    made = MadeTrace(device=H100)
    for index in range(5):
        at = 2000.0 * index
        made.step(index, at, at + 1990)
        made.kernel("first half", at + 50, at + 950, at + 15)
        made.kernel("second half", at + 1000, at + 1900, at + 75, device=1)
        made.sync(at + 100, at + 1910)
    time = measure(made, tmp_path)
    assert time.rows["dependency"] == pytest.approx(0.9, abs=0.02) and time.rows["sync"] < 0.2
    assert time.idle_beside_ms == pytest.approx(0.9)


def header(*devices: tuple[int | None, str]) -> list[dict]:
    return [{"name": name} | ({} if number is None else {"id": number}) for number, name in devices]


@pytest.mark.parametrize(
    ("devices", "device", "name"),
    [
        ([(0, H100)], 0, H100),
        ([(0, H100)], 9, H100),  # ROCm: the machine's number
        ([(4, V100), (5, H100)], 5, H100),
        ([(4, V100), (5, H100)], 0, None),
        ([(0, H100), (1, H100)], 7, H100),
        ([(1, V100), (0, H100)], 1, V100),
        ([(0, H100), (1, H100), (0, H100), (1, H100)], 1, H100),  # headers of two ranks
        ([(0, H100), (0, V100)], 0, None),
        ([(None, V100), (None, H100)], 1, H100),
        ([(0, "")], 0, None),
    ],
)
def test_names_of_devices(tmp_path, devices, device, name):
    made = MadeTrace(deviceProperties=header(*devices))
    for index in range(3):
        made.step(index, 1000.0 * index, 1000.0 * index + 990)
        made.kernel("k", 1000.0 * index + 100, 1000.0 * index + 900, 1000.0 * index + 50, device=device)
    time = measure(made, tmp_path)
    assert (time.device, time.rows["compute"]) == (name, pytest.approx(0.8))
