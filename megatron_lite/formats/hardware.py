"""Peak rates and memory of GPUs, from a table whose rows have a source and a date. Unknown GPUs have unknown peaks."""

import functools
import importlib.util
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Processor:
    """One GPU as PyTorch shows it. Peaks are dense, without sparsity, at the boost clock; None: unknown,
    or not supported."""

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
    network_gb_s: float | None = (
        None  # to other nodes, one direction: what the maker's own system has for each of its GPUs
    )

    capability: float | None = None  # NVIDIA's compute capability (developer.nvidia.com/cuda-gpus); None: another maker

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU; 0 where it is not known."""
        return int((self.memory_gib or 0.0) * 2**30)

    @property
    def since_hopper(self) -> bool:
        """Compute capability 9.0 or 10.0."""
        return self.name.startswith(("H100", "H200", "B200"))

    @property
    def multiplies_any_fp8_layout(self) -> bool:
        """Whether products in fp8 take transposed operands, and scales of 32 numbers: compute capability 10.0."""
        return self.name.startswith("B200")


FILE = Path(__file__).with_name("processors.tsv")


def _read_processors() -> tuple[Processor, ...]:
    """The rows of processors.tsv; an empty field is None or Processor's default."""
    lines = [line.split("\t") for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    row: dict[str, Any] = {
        field.name: None if field.default is MISSING else field.default for field in fields(Processor)
    }
    processors = []
    for line in lines[1:]:
        given: dict[str, Any] = {name: text for name, text in zip(lines[0], line) if text}
        for name, text in given.items():
            if text in ("yes", "no"):
                given[name] = text == "yes"
            elif name not in ("name", "pattern", "source"):
                given[name] = float(text) if "." in text else int(text)
        processors.append(Processor(**row | given))
    return tuple(processors)


PROCESSORS = _read_processors()
_PARTS = re.compile(r"\bMIG\b|GRID|Laptop|Max-Q")  # a slice or a slower build of the GPU whose name it bears


def match_processor(device_name: str | None) -> Processor | None:
    """The GPU with the name that PyTorch or a trace gives it; None if the table lacks it."""
    name = device_name or ""
    return None if _PARTS.search(name) else next((one for one in PROCESSORS if re.search(one.pattern, name)), None)


def peak_tflops(device_name: str | None, precision: str) -> float | None:
    """TFLOP/s of one GPU in fp32, tf32, fp16, bf16 or fp8; None if the table lacks it, or the GPU (bf16 on a V100)."""
    processor = match_processor(device_name)
    return None if processor is None else get_peak_tflops(processor, precision)


def get_peak_tflops(processor: Processor, precision: str) -> float | None:
    """Peak TFLOP/s of a GPU of the table in this precision; None if unknown."""
    if precision == "bf16" and not processor.bf16:
        return None
    peaks = {"fp32": processor.fp32_tflops, "tf32": processor.tf32_tflops, "fp8": processor.fp8_tflops}
    return peaks.get(precision, processor.half_tflops if precision in ("fp16", "bf16") else None)


# --- the memory that cuBLAS works in, which torch takes from its allocator at the first matrix product and keeps

# ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize: ":4096:2:16:8", on Hopper and Blackwell ":4096:8"
# (docs.nvidia.com/cuda/cublas, CUBLAS_WORKSPACE_CONFIG). One for each thread that multiplies: forward's and backward's.
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
CUBLAS_WORKSPACE_SINCE_HOPPER = 8 * 4096 * 1024
CUBLAS_THREADS = 2


def cublas_workspace_bytes(processor: Processor | None, deterministic: bool) -> int:
    """Size of one workspace. Where the GPU is not known, an older one's;
    --deterministic-mode asks for Hopper's on all."""
    newer = processor is not None and processor.since_hopper
    return CUBLAS_WORKSPACE_SINCE_HOPPER if newer or deterministic else CUBLAS_WORKSPACE


# cuBLASLt computes products that add a bias. Up to torch 2.11 it works in memory of its own, which torch takes at the
# first such product and keeps, for each thread that has one: 1 MiB in forward's, measured on an H200 with torch 2.11.0
# on 2026-11-25 (docs/benchmarks.md). Its size is 1,024 KiB by default (parseCUDABlasLtWorkspaceSize in ATen/cuda/
# CublasHandlePool.cpp, 2026-01-12). Since github.com/pytorch/pytorch/pull/175879, merged on 2026-03-02 and so in torch
# 2.12 and 2.13, it works in cuBLAS' own workspace. Not measured: layers that backward computes again on its own thread.
CUBLASLT_WORKSPACE = 2**20
LAST_WITH_OWN_CUBLASLT_WORKSPACE = (2, 11)


def cublaslt_workspace_bytes(adds_biases: bool) -> int:
    """Bytes that cuBLASLt keeps for itself with the torch that is installed here; 0 without torch or without biases.

    Args:
        adds_biases: Whether linear layers of the model have biases.
    """
    release = read_torch_release()
    if release is None or release > LAST_WITH_OWN_CUBLASLT_WORKSPACE:
        return 0
    return CUBLASLT_WORKSPACE if adds_biases else 0


@functools.cache
def read_torch_release() -> tuple[int, int] | None:
    """Read (2, 13) of torch 2.13.0 from its files, as importing it takes a second; None if it is not installed."""
    found = importlib.util.find_spec("torch")
    for folder in (found and found.submodule_search_locations) or ():
        path = Path(folder, "version.py")
        if path.is_file() and (version := re.search(r"__version__ = '(\d+)\.(\d+)", path.read_text(encoding="utf-8"))):
            return int(version[1]), int(version[2])
    return None


# --- sizes of matrix products that the hardware likes
#
# Source: NVIDIA Deep Learning Performance, "Matrix Multiplication Background User's Guide", 2023-02: tensor cores work
# best on M, N and K of a multiple of 16 bytes (before cuBLAS 11 they needed that), on A100 of 128 bytes; and results
# are cut into tiles of up to 256x128.

ALIGNED_BYTES = 16  # below it loads are narrow, and old libraries leave the tensor cores alone
BEST_BYTES = 128  # a whole line of the cache
TILE = 128  # edge of a usual tile of the result: a size just above a multiple leaves the last tiles nearly empty


def least_multiple(element_bytes: int) -> int:
    """Elements that a size must be a multiple of for full loads: 8 for fp16 and bf16, 4 for TF32, 16 for fp8."""
    return max(1, ALIGNED_BYTES // element_bytes)


def best_multiple(element_bytes: int) -> int:
    """Elements that a size should be a multiple of: 64 for fp16 and bf16, 32 for TF32, 128 for fp8."""
    return max(1, BEST_BYTES // element_bytes)


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple: padded(50257, 64) is 50304."""
    return -(-size // multiple) * multiple
