"""What processors can do at most. A row has a source and a date; an unknown processor has unknown peaks."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Processor:
    """One GPU as PyTorch shows it. Dense peaks, without sparsity, at the boost clock; None: unknown or not built in."""

    name: str  # for people
    pattern: str  # regular expression that its torch.cuda.get_device_name contains
    half_tflops: float | None  # fp16 with sums in fp32, on tensor cores; bf16 too unless bf16 is False
    tf32_tflops: float | None
    fp32_tflops: float | None  # outside the tensor cores
    fp8_tflops: float | None
    memory_gb_s: float | None  # 1e9 bytes per second
    link_gb_s: float | None  # NVLink or Infinity Fabric, both directions added up; None: PCIe only, or unknown
    source: str
    bf16: bool = True


_V100 = "NVIDIA V100 datasheet, 2020-01"
_A100 = "NVIDIA A100 datasheet, 2021-06"
_H100 = "NVIDIA H100 datasheet, 2024-09; sparse figures halved"
_H200 = "NVIDIA H200 datasheet, 2024-11; sparse figures halved"
_GA102 = "NVIDIA Ampere GA102 whitepaper 2.1, 2021"
# The first row whose pattern fits counts: special models stand before general ones.
PROCESSORS = (
    Processor("V100 SXM2/SXM3", r"V100-SXM[23]", 125.0, None, 15.7, None, 900, 300, _V100, False),
    Processor("V100S PCIe", r"V100S-PCIE", 130.0, None, 16.4, None, 1134, None, _V100, False),
    Processor("V100 PCIe", r"V100-PCIE", 112.0, None, 14.0, None, 900, None, _V100, False),
    # 500 TFLOPS for the station's four; its clocks, hence plain fp32, are not documented.
    Processor("V100 of a DGX Station", r"V100-DGXS", 125.0, None, None, None, 900, None,
              "NVIDIA DGX Station datasheet, 2018-03, a quarter of the station; memory: V100 datasheet", False),
    Processor("T4", r"\bT4\b", 65.0, None, 8.1, None, 320, None, "NVIDIA T4 datasheet, 2019-03", False),
    Processor("A100 SXM 80 GB", r"A100-SXM4-80GB|A100-SXM-80GB", 312.0, 156.0, 19.5, None, 2039, 600, _A100),
    Processor("A100 SXM 40 GB", r"A100-SXM4-40GB", 312.0, 156.0, 19.5, None, 1555, 600, _A100),
    Processor("A100 PCIe 80 GB", r"A100 80GB PCIe", 312.0, 156.0, 19.5, None, 1935, 600, _A100),
    Processor("A100 PCIe 40 GB", r"A100-PCIE-40GB", 312.0, 156.0, 19.5, None, 1555, 600, _A100),
    # PG509 and others name a board that no datasheet describes: the chip's peaks, but no bandwidth.
    Processor("A100, board unknown", r"\bA100\b", 312.0, 156.0, 19.5, None, None, None, _A100),
    Processor("A10G", r"\bA10G\b", 70.0, 35.0, 35.0, None, 600, None, "NVIDIA A10G datasheet (AWS), 2021-11"),
    Processor("A10", r"\bA10\b", 125.0, 62.5, 31.2, None, 600, None, "NVIDIA A10 datasheet, 2021-04"),
    Processor("A30", r"\bA30\b", 165.0, 82.0, 10.3, None, 933, 200, "NVIDIA A30 datasheet, 2021-04"),
    Processor("A40", r"\bA40\b", 149.7, 74.8, 37.4, None, 696, 112.5, "NVIDIA A40 datasheet, 2021-08"),
    Processor("RTX 3090", r"RTX 3090(?! Ti)", 71.0, 35.6, 35.6, None, 936, None, _GA102),
    Processor("RTX 4090", r"RTX 4090(?! D)", 165.2, 82.6, 82.6, 330.3, 1008, None,
              "NVIDIA Ada GPU architecture whitepaper 2.02, 2023"),
    Processor("RTX 5090", r"RTX 5090(?! D)", 209.5, 104.8, 104.8, 419.0, 1792, None,
              "NVIDIA RTX Blackwell GPU architecture whitepaper 1.1, 2025-01"),
    Processor("L4", r"\bL4\b", 121.0, 60.0, 30.3, 242.5, 300, None,
              "NVIDIA L4 datasheet, 2023-03; sparse figures halved"),
    Processor("L40S", r"\bL40S\b", 362.05, 183.0, 91.6, 733.0, 864, None, "NVIDIA L40S datasheet, 2023-08"),
    Processor("L40", r"\bL40\b", 181.05, 90.5, 90.5, 362.0, 864, None, "NVIDIA L40 datasheet, 2022-12"),
    Processor("H200 NVL", r"H200 NVL", 835.5, 417.5, 60.0, 1670.5, 4800, 900, _H200),
    Processor("H200", r"(?<!G)H200\b", 989.5, 494.5, 66.9, 1979.0, 4800, 900, _H200),
    Processor("H100 PCIe", r"H100 PCIe", 756.0, 378.0, 51.2, 1513.0, 2000, 600,
              "NVIDIA H100 datasheet, 2023-03; sparse figures halved"),
    Processor("H100 NVL", r"H100 NVL", 835.5, 417.5, 60.0, 1670.5, 3900, 600, _H100),
    Processor("H100 SXM 80 GB", r"H100 80GB HBM3|H100-SXM5-80GB", 989.5, 494.5, 66.9, 1979.0, 3350, 900, _H100),
    Processor("H100, board unknown", r"(?<!G)H100\b", 989.5, 494.5, 66.9, 1979.0, None, None, _H100),
    Processor("B200", r"(?<!G)B200\b", 2250.0, 1125.0, 75.0, 4500.0, 7750, 1800,
              "NVIDIA HGX B200 datasheet, 2025: an eighth of the board; sparse figures halved"),
    # PyTorch sees each of the two dies of an MI250X as a GPU of its own.
    Processor("MI250X, one die", r"MI250X", 191.5, None, 23.9, None, 1638, None,
              "AMD Instinct MI250X data sheet, 2021-11: half of the module"),
    Processor("MI300X", r"MI300X", 1307.4, 653.7, 163.4, 2614.9, 5300, 896, "AMD Instinct MI300X data sheet, 2023-12"),
    Processor("MI325X", r"MI325X", 1307.4, 653.7, 163.4, 2614.9, 6000, 896, "AMD Instinct MI325X data sheet, 2024-10"),
)
_PARTS = re.compile(r"\bMIG\b|GRID|Laptop|Max-Q")  # a slice or a slower build of the GPU whose name it bears


def processor_of(device_name: str | None) -> Processor | None:
    """The row of a GPU by the name that PyTorch or a trace gives it; None for one that the table does not hold."""
    name = device_name or ""
    return None if _PARTS.search(name) else next((one for one in PROCESSORS if re.search(one.pattern, name)), None)


def peak_tflops(device_name: str | None, precision: str) -> float | None:
    """TFLOP/s of one GPU in fp32, tf32, fp16, bf16 or fp8; None for what the table lacks (bf16 on a V100, say)."""
    processor = processor_of(device_name)
    if processor is None or (precision == "bf16" and not processor.bf16):
        return None
    peaks = {"fp32": processor.fp32_tflops, "tf32": processor.tf32_tflops, "fp8": processor.fp8_tflops}
    return peaks.get(precision, processor.half_tflops if precision in ("fp16", "bf16") else None)
