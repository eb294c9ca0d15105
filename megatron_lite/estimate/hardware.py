"""What processors can do at most. A row has a source and a date; an unknown processor has an unknown peak."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Dense matrix-multiplication peaks in TFLOP/s, without sparsity."""

    name: str  # what torch.cuda.get_device_name must contain
    half_tflops: float  # fp16 and bf16
    fp32_tflops: float  # plain fp32, not TF32
    source: str


PEAKS = (
    Peak("H200", 989.5, 66.9, "NVIDIA H200 datasheet, 2024: 1,979 with sparsity, halved"),
    Peak("H100 PCIe", 756.0, 51.2, "NVIDIA H100 datasheet, 2023: 1,513 with sparsity, halved"),
    Peak("H100 NVL", 835.5, 60.0, "NVIDIA H100 datasheet, 2024: 1,671 with sparsity, halved"),
    Peak("H100", 989.5, 66.9, "NVIDIA H100 SXM datasheet, 2023: 1,979 with sparsity, halved"),
    Peak("A100", 312.0, 19.5, "NVIDIA A100 datasheet, 2021"),
    Peak("V100-SXM", 125.0, 15.7, "NVIDIA V100 datasheet, 2020"),
    Peak("V100-PCIE", 112.0, 14.0, "NVIDIA V100 datasheet, 2020"),
)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """TFLOP/s of one GPU in fp32, fp16 or bf16; None for what the table does not hold (bf16 on a V100, say)."""
    for peak in PEAKS:
        if peak.name in device_name:
            if precision == "bf16" and peak.name.startswith("V100"):
                return None
            return peak.fp32_tflops if precision == "fp32" else peak.half_tflops
    return None
