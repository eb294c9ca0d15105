"""The table of processors, and sizes that the hardware likes."""

import re

import pytest
from support.launch import flags, plan_of
from support.wording import wording

from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.formats.hardware import (
    CUBLAS_WORKSPACE,
    CUBLAS_WORKSPACE_SINCE_HOPPER,
    PROCESSORS,
    best_multiple,
    cublas_workspace_bytes,
    get_peak_tflops,
    least_multiple,
    match_processor,
    padded,
    peak_tflops,
)
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.memory import predict_memory

# as PyTorch gives it: the row's name, TFLOP/s in 16 bits, GB/s
DEVICES = """
NVIDIA H200: H200, 989.5, 4800; NVIDIA H200 NVL: H200 NVL, 835.5, 4800; NVIDIA H100 80GB HBM3: H100 SXM 80 GB, 989.5,
3350; NVIDIA H100 PCIe: H100 PCIe 80 GB, 756, 2000; NVIDIA H100 NVL: H100 NVL 94 GB, 835.5, 3900; NVIDIA H100: H100,
board unknown, 989.5, None; NVIDIA A100-SXM4-40GB: A100 SXM 40 GB, 312, 1555; NVIDIA A100-SXM4-80GB: A100 SXM 80 GB,
312, 2039; NVIDIA A100 80GB PCIe: A100 PCIe 80 GB, 312, 1935; NVIDIA A100-PCIE-40GB: A100 PCIe 40 GB, 312, 1555;
NVIDIA A100-PG509-200: A100, board unknown, 312, None; A100-SXM4-40GB: A100 SXM 40 GB, 312, 1555; Tesla
V100-SXM2-16GB: V100 SXM2 16 GB, 125, 900; Tesla V100-SXM2-32GB: V100 SXM2 32 GB, 125, 900; Tesla V100-SXM3-32GB: V100
SXM2 32 GB, 125, 900; Tesla V100-PCIE-16GB: V100 PCIe 16 GB, 112, 900; Tesla V100-PCIE-32GB: V100 PCIe 32 GB, 112,
900; Tesla V100-DGXS-32GB: V100 of a DGX Station, 125, 900; Tesla V100S-PCIE-32GB: V100S PCIe 32 GB, 130, 1134; Tesla
T4: T4, 65, 320; NVIDIA A10G: A10G, 70, 600; NVIDIA A10: A10, 125, 600; NVIDIA L4: L4, 121, 300; NVIDIA L40: L40,
181.05, 864; NVIDIA L40S: L40S, 362.05, 864; NVIDIA GeForce RTX 3090: RTX 3090, 71, 936; NVIDIA GeForce RTX 4090: RTX
4090, 165.2, 1008; NVIDIA GeForce RTX 5090: RTX 5090, 209.5, 1792; NVIDIA B200: B200, 2250, 7750; AMD Instinct MI300X:
MI300X, 1307.4, 5300; AMD Instinct MI250X: MI250X (one die), 191.5, 1638
"""
UNKNOWN = """
NVIDIA GeForce RTX 4090 D; NVIDIA GeForce RTX 4090 Laptop GPU; NVIDIA GH200 480GB; NVIDIA H800; NVIDIA GB200;
NVIDIA A100-SXM4-80GB MIG 1g.10gb; GRID A100-10C; NVIDIA RTX A4000; NVIDIA GeForce RTX 3090 Ti; Quadro T4000; NVIDIA A100X; cpu
"""


def split(text: str) -> list[str]:
    return " ".join(text.split()).split("; ")


def test_names_as_pytorch_gives_them():
    for text in split(DEVICES):
        device, answer = text.split(": ")
        processor = match_processor(device)
        assert answer == f"{processor.name}, {processor.half_tflops:g}, {processor.memory_gb_s}"
        assert peak_tflops(device, "fp16") == processor.half_tflops
    for device in (None, "", *split(UNKNOWN)):
        assert match_processor(device) is None and peak_tflops(device, "fp16") is None


def test_peaks_by_number_format():
    formats = ("fp32", "tf32", "fp16", "bf16", "fp8", "int4", "")
    assert [peak_tflops("NVIDIA H200", one) for one in formats] == [66.9, 494.5, 989.5, 989.5, 1979.0, None, None]
    assert [peak_tflops("Tesla V100-SXM2-32GB", one) for one in formats] == [15.7, None, 125.0, None, None, None, None]
    assert peak_tflops("Tesla V100-DGXS-32GB", "fp32") is None
    assert [get_peak_tflops(find_processor("L4"), one) for one in formats[:5]] == [30.3, 60.0, 121.0, 121.0, 242.5]


# As total_memory was seen in device queries, out-of-memory messages and traces: what a row promises must be there.
SEEN_GIB = {
    "NVIDIA H200": 139.8375, "NVIDIA A100-SXM4-80GB": 79.3469, "NVIDIA A100-SXM4-40GB": 39.4935,
    "NVIDIA A100-PCIE-40GB": 39.3939, "Tesla V100-SXM2-32GB": 31.7394, "NVIDIA A30": 23.4961,
    "NVIDIA H100 80GB HBM3": 79.1100, "NVIDIA L40": 44.4000, "NVIDIA GeForce RTX 4090": 23.5200,
    "NVIDIA GeForce RTX 5090": 31.3600, "NVIDIA B200": 178.3500, "AMD Instinct MI300X": 191.9800,
}  # fmt: skip


def test_memory_is_not_more_than_was_seen_and_hardly_less():
    for device, gib in SEEN_GIB.items():
        assert 0 <= gib - match_processor(device).memory_gib < 0.4, device


CALLED = """
H200: H200; h200 nvl: H200 NVL; h100: H100 SXM 80 GB; H100-80: H100 SXM 80 GB; h100 pcie: H100 PCIe 80 GB; H100 NVL:
H100 NVL 94 GB; NVIDIA H100 80GB HBM3: H100 SXM 80 GB; A100: A100 SXM 80 GB; A100-40: A100 SXM 40 GB; a100 80gb: A100
SXM 80 GB; a100_40gb: A100 SXM 40 GB; a100-sxm4-40gb: A100 SXM 40 GB; A100 PCIe: A100 PCIe 80 GB; V100: V100 SXM2 16
GB; v100-32gb: V100 SXM2 32 GB; B200: B200; L4: L4; l40: L40; L40S: L40S; A10: A10; a10g: A10G; 3090: RTX 3090; 4090:
RTX 4090; RTX 3090: RTX 3090; rtx5090: RTX 5090; GeForce RTX 4090: RTX 4090; MI300X: MI300X; amd instinct mi325x:
MI325X
"""
NOT_CALLED = "GPU; 80GB; nvidia; GB200; 3090 ti; 4090 laptop; 4090 D; H100 40GB; A100-PG509-200; A100 MIG"


def test_names_as_people_type_them():
    for text in split(CALLED):
        typed, name = text.split(": ")
        assert find_processor(typed).name == name
    for text in ("", *split(NOT_CALLED)):  # answered with the list
        with pytest.raises(UserError) as caught:
            find_processor(text)
        (line,) = caught.value.lines
        assert line.startswith(wording("planner/gpu-not-in-table", text, 16)) and "RTX 4090" in line
        assert "unknown" not in line


def test_rows_are_what_hardware_allows():
    assert len({one.name for one in PROCESSORS}) == len(PROCESSORS)
    for one in PROCESSORS:
        link, pcie = one.link_gb_s, one.pcie_gb_s
        assert not one.memory_gib or find_processor(one.name) == one
        assert one.linked_gpus == 16 or link is not None, one.name
        assert not one.mesh or one.linked_gpus == 8, one.name
        assert pcie in (None, 16, 32, 64), one.name
        assert link is None or pcie is None or link / 2 > pcie, one.name
        assert not one.sums_in_switch or (link >= 900 and one.linked_gpus == 16), one.name
        assert re.search(r"\b20[12]\d\b", one.source), "a source with its date"
        peaks = (one.fp32_tflops, one.tf32_tflops, one.half_tflops, one.fp8_tflops)
        known = [peak for peak in peaks if peak is not None]
        assert known == sorted(known), one.name


def test_sizes_that_tensor_cores_like():
    assert [least_multiple(size) for size in (1, 2, 4, 8, 16, 32)] == [16, 8, 4, 2, 1, 1]
    assert [best_multiple(size) for size in (1, 2, 4)] == [128, 64, 32]
    assert (padded(50257, 64), padded(50304, 64), padded(1, 8), padded(0, 8)) == (50304, 50304, 8, 0)


@pytest.mark.parametrize(
    ("words", "gpu", "expected"),
    [
        ("", None, CUBLAS_WORKSPACE),
        ("", "A100", CUBLAS_WORKSPACE),
        ("", "4090", CUBLAS_WORKSPACE),
        ("", "H200", CUBLAS_WORKSPACE_SINCE_HOPPER),
        ("", "B200", CUBLAS_WORKSPACE_SINCE_HOPPER),
        ("--deterministic-mode", "A100", CUBLAS_WORKSPACE_SINCE_HOPPER),  # the trainer sets CUBLAS_WORKSPACE_CONFIG
    ],
)
def test_cublas_takes_more_on_newer_gpus(words, gpu, expected):
    plan = plan_of(flags(words), World(gpus=1))
    processor = find_processor(gpu) if gpu else None
    assert cublas_workspace_bytes(processor, plan.args.training.deterministic_mode) == expected
    rows = predict_memory(plan, processor).peak.rows
    assert [row.num_bytes for row in rows if row.name == "cuBLAS workspaces"] == [2 * expected]
