"""What processors can do at most. A row has a source and a date; an unknown processor has unknown peaks."""

import re
from dataclasses import dataclass

from megatron_lite.errors import UserError


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
    memory_gib: float | None  # 2**30 bytes that PyTorch can have: total_memory, without what driver and ECC keep
    link_gb_s: float | None  # NVLink or Infinity Fabric, both directions added up; None: PCIe only, or unknown
    pcie_gb_s: float | None  # to the host and to GPUs without a link, one direction
    source: str
    bf16: bool = True
    linked_gpus: int = 16  # that the link joins at most, in a DGX-2 for one; a bridge joins 2
    mesh: bool = False  # the link is made of one to each other GPU, so that a pair has only its own
    sums_in_switch: bool = False  # NVLink's switches can add up what they pass on (NVLink SHARP)

    @property
    def since_hopper(self) -> bool:
        """Compute capability 9.0 or 10.0."""
        return self.name.startswith(("H100", "H200", "B200"))


_V100 = "NVIDIA V100 datasheet, 2020-01"
_A100 = "NVIDIA A100 datasheet, 2021-06"
_H100 = "NVIDIA H100 datasheet, 2024-09; sparse figures halved"
_H200 = "NVIDIA H200 datasheet, 2024-11; sparse figures halved"
_GA102 = "NVIDIA Ampere GA102 whitepaper 2.1, 2021"
# The first row whose pattern fits counts: special models stand before general ones. Of boards that share a name the
# commonest stands first. memory_gib: the least in public out-of-memory messages and device queries of 2019 to 2026,
# rounded down; drivers differ by up to 0.3 GiB. pcie_gb_s: of 16 lanes, half of what datasheets add up.
# name, pattern | half, tf32, fp32, fp8 TFLOP/s | memory GB/s, GiB | link, PCIe GB/s | source, bf16
PROCESSORS = (
    Processor("V100 SXM2 16 GB", r"V100-SXM2-16GB", 125.0, None, 15.7, None, 900, 15.7, 300, 16, _V100, False),
    Processor("V100 SXM2 32 GB", r"V100-SXM[23]-32GB", 125.0, None, 15.7, None, 900, 31.7, 300, 16, _V100, False),
    Processor("V100S PCIe 32 GB", r"V100S-PCIE", 130.0, None, 16.4, None, 1134, 31.7, None, 16, _V100, False),
    Processor("V100 PCIe 16 GB", r"V100-PCIE-16GB", 112.0, None, 14.0, None, 900, 15.7, None, 16, _V100, False),
    Processor("V100 PCIe 32 GB", r"V100-PCIE-32GB", 112.0, None, 14.0, None, 900, 31.7, None, 16, _V100, False),
    # 500 TFLOPS for the station's four; its clocks, hence plain fp32, are not documented.
    Processor(
        "V100 of a DGX Station",
        r"V100-DGXS",
        125.0,
        None,
        None,
        None,
        900,
        None,
        None,
        None,
        "NVIDIA DGX Station datasheet, 2018-03, a quarter of the station; memory: V100 datasheet",
        False,
    ),
    Processor("T4", r"\bT4\b", 65.0, None, 8.1, None, 320, 14.5, None, 16, "NVIDIA T4 datasheet, 2019-03", False),
    Processor("A100 SXM 80 GB", r"A100-SXM4-80GB|A100-SXM-80GB", 312.0, 156.0, 19.5, None, 2039, 79.1, 600, 32, _A100),
    Processor("A100 SXM 40 GB", r"A100-SXM4-40GB", 312.0, 156.0, 19.5, None, 1555, 39.3, 600, 32, _A100),
    Processor(
        "A100 PCIe 80 GB", r"A100 80GB PCIe", 312.0, 156.0, 19.5, None, 1935, 79.1, 600, 32, _A100, linked_gpus=2
    ),
    Processor(
        "A100 PCIe 40 GB", r"A100-PCIE-40GB", 312.0, 156.0, 19.5, None, 1555, 39.3, 600, 32, _A100, linked_gpus=2
    ),
    # PG509 and others name a board that no datasheet describes: the chip's peaks, but no bandwidth.
    Processor("A100, board unknown", r"\bA100\b", 312.0, 156.0, 19.5, None, None, None, None, None, _A100),
    Processor("A10G", r"\bA10G\b", 70.0, 35.0, 35.0, None, 600, 21.9, None, 32, "NVIDIA A10G datasheet (AWS), 2022-02"),
    Processor("A10", r"\bA10\b", 125.0, 62.5, 31.2, None, 600, 21.9, None, 32, "NVIDIA A10 datasheet, 2021-04"),
    Processor(
        "A30", r"\bA30\b", 165.0, 82.0, 10.3, None, 933, 23.4, 200, 32, "NVIDIA A30 datasheet, 2021-04", linked_gpus=2
    ),
    Processor(
        "A40", r"\bA40\b", 149.7, 74.8, 37.4, None, 696, 44.3, 112.5, 32, "NVIDIA A40 datasheet, 2021-08", linked_gpus=2
    ),
    Processor("RTX 3090", r"RTX 3090(?! Ti)", 71.0, 35.6, 35.6, None, 936, 23.5, 112.5, 32, _GA102, linked_gpus=2),
    Processor(
        "RTX 4090",
        r"RTX 4090(?! D)",
        165.2,
        82.6,
        82.6,
        330.3,
        1008,
        23.5,
        None,
        32,
        "NVIDIA Ada GPU architecture whitepaper 2.02, 2023",
    ),
    Processor(
        "RTX 5090",
        r"RTX 5090(?! D)",
        209.5,
        104.8,
        104.8,
        419.0,
        1792,
        31.3,
        None,
        64,
        "NVIDIA RTX Blackwell GPU architecture whitepaper 1.1, 2025-01",
    ),
    Processor(
        "L4",
        r"\bL4\b",
        121.0,
        60.0,
        30.3,
        242.5,
        300,
        21.9,
        None,
        32,
        "NVIDIA L4 datasheet, 2023-03; sparse figures halved",
    ),
    Processor("L40S", r"\bL40S\b", 362.05, 183.0, 91.6, 733.0, 864, 44.3, None, 32, "NVIDIA L40S datasheet, 2023-08"),
    Processor("L40", r"\bL40\b", 181.05, 90.5, 90.5, 362.0, 864, 44.3, None, 32, "NVIDIA L40 datasheet, 2022-12"),
    Processor("H200 NVL", r"H200 NVL", 835.5, 417.5, 60.0, 1670.5, 4800, 139.7, 900, 64, _H200, linked_gpus=4),
    Processor("H200", r"(?<!G)H200\b", 989.5, 494.5, 66.9, 1979.0, 4800, 139.7, 900, 64, _H200, sums_in_switch=True),
    Processor(
        "H100 SXM 80 GB",
        r"H100 80GB HBM3|H100-SXM5-80GB",
        989.5,
        494.5,
        66.9,
        1979.0,
        3350,
        79.1,
        900,
        64,
        _H100,
        sums_in_switch=True,
    ),
    Processor(
        "H100 PCIe 80 GB",
        r"H100 PCIe",
        756.0,
        378.0,
        51.2,
        1513.0,
        2000,
        79.1,
        600,
        64,
        "NVIDIA H100 datasheet, 2023-03; sparse figures halved",
        linked_gpus=2,
    ),
    Processor("H100 NVL 94 GB", r"H100 NVL", 835.5, 417.5, 60.0, 1670.5, 3900, 93.0, 600, 64, _H100, linked_gpus=2),
    Processor("H100, board unknown", r"(?<!G)H100\b", 989.5, 494.5, 66.9, 1979.0, None, None, None, None, _H100),
    Processor(
        "B200",
        r"(?<!G)B200\b",
        2250.0,
        1125.0,
        75.0,
        4500.0,
        7750,
        178.3,
        1800,
        64,
        "NVIDIA HGX B200 datasheet, 2025: an eighth of the board; sparse figures halved",
        sums_in_switch=True,
    ),
    # PyTorch sees each of the two dies of an MI250X as a GPU; how fast dies reach each other is not one number.
    Processor(
        "MI250X (one die)",
        r"MI250X",
        191.5,
        None,
        23.9,
        None,
        1638,
        63.9,
        None,
        None,
        "AMD Instinct MI250X data sheet, 2021-11: half of the module",
    ),
    Processor(
        "MI300X",
        r"MI300X",
        1307.4,
        653.7,
        163.4,
        2614.9,
        5300,
        191.6,
        896,
        64,
        "AMD Instinct MI300X data sheet, 2023-12",
        linked_gpus=8,
        mesh=True,
    ),
    Processor(
        "MI325X",
        r"MI325X",
        1307.4,
        653.7,
        163.4,
        2614.9,
        6000,
        255.6,
        896,
        64,
        "AMD Instinct MI325X data sheet, 2024-10",
        linked_gpus=8,
        mesh=True,
    ),
)
_PARTS = re.compile(r"\bMIG\b|GRID|Laptop|Max-Q")  # a slice or a slower build of the GPU whose name it bears
_NO_MODEL = {"nvidia", "amd", "tesla", "geforce", "rtx", "instinct", "gpu", "gb", "gib", "one", "die"}


def processor_of(device_name: str | None) -> Processor | None:
    """The row of a GPU by the name that PyTorch or a trace gives it; None for one that the table does not hold."""
    name = device_name or ""
    return None if _PARTS.search(name) else next((one for one in PROCESSORS if re.search(one.pattern, name)), None)


def processor_called(text: str) -> Processor:
    """The row of a GPU by what people call it: "H200", "a100-40", "4090", "H100 PCIe", or PyTorch's name for it.

    A name that several boards bear stands for the commonest of them, which the row's name says.
    Raises UserError, with all names, for one whose memory the table does not hold.
    """
    known = [one for one in PROCESSORS if one.memory_gib]
    wanted = _words(text)
    fitting = [one for one in known if wanted[:1] == _words(one.name)[:1] and {*wanted} <= {*_words(one.name)}]
    exact = [one for one in fitting if {*wanted} == {*_words(one.name)}]
    found = next(iter(exact + fitting), None) or processor_of(text)
    if found is None or found not in known:
        raise UserError(f"GPU '{text}': not in the table; take one of {', '.join(one.name for one in known)}.")
    return found


def peak_tflops(device_name: str | None, precision: str) -> float | None:
    """TFLOP/s of one GPU in fp32, tf32, fp16, bf16 or fp8; None for what the table lacks (bf16 on a V100, say)."""
    processor = processor_of(device_name)
    return None if processor is None else peak_tflops_of(processor, precision)


def peak_tflops_of(processor: Processor, precision: str) -> float | None:
    """The same of a row of the table."""
    if precision == "bf16" and not processor.bf16:
        return None
    peaks = {"fp32": processor.fp32_tflops, "tf32": processor.tf32_tflops, "fp8": processor.fp8_tflops}
    return peaks.get(precision, processor.half_tflops if precision in ("fp16", "bf16") else None)


def _words(name: str) -> list[str]:
    """'NVIDIA A100-SXM4-80GB' -> ['a100', 'sxm', '80']: what tells boards apart."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    words = [re.sub(r"^(\d+)gi?b$", r"\1", re.sub(r"^sxm\d$", "sxm", word)) for word in words]
    words = [re.sub(r"^rtx(?=\d)", "", word) for word in words]
    return [word for word in words if word not in _NO_MODEL]


# --- the memory that cuBLAS works in, which torch takes from its allocator at the first matrix product and keeps

# ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize: ":4096:2:16:8", on Hopper and Blackwell ":4096:8"
# (docs.nvidia.com/cuda/cublas, CUBLAS_WORKSPACE_CONFIG). One for each thread that multiplies: forward's and backward's.
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
CUBLAS_WORKSPACE_SINCE_HOPPER = 8 * 4096 * 1024
CUBLAS_THREADS = 2


def cublas_workspace_bytes(processor: Processor | None, deterministic: bool) -> int:
    """Size of one workspace. Where the GPU is not known, an older one's; --deterministic-mode asks for Hopper's on all."""
    newer = processor is not None and processor.since_hopper
    return CUBLAS_WORKSPACE_SINCE_HOPPER if newer or deterministic else CUBLAS_WORKSPACE


# --- sizes of matrix products that the hardware likes
#
# Source: NVIDIA Deep Learning Performance, "Matrix Multiplication Background User's Guide", 2023-02: tensor cores work
# best on M, N and K of a multiple of 16 bytes (before cuBLAS 11 they needed that), on A100 of 128 bytes; and results are
# cut into tiles of up to 256x128.

MIN_BYTES = 16  # below it loads are narrow, and old libraries leave the tensor cores alone
BEST_BYTES = 128  # a whole line of the cache
TILE = 128  # edge of a usual tile of the result: a size just above a multiple leaves the last tiles nearly empty


def least_multiple(element_bytes: int) -> int:
    """Elements that a size must be a multiple of for full loads: 8 for fp16 and bf16, 4 for TF32, 16 for fp8."""
    return max(1, MIN_BYTES // element_bytes)


def best_multiple(element_bytes: int) -> int:
    """Elements that a size should be a multiple of: 64 for fp16 and bf16, 32 for TF32, 128 for fp8."""
    return max(1, BEST_BYTES // element_bytes)


def padded(size: int, multiple: int) -> int:
    """The next multiple: padded(50257, 64) is 50304."""
    return -(-size // multiple) * multiple
