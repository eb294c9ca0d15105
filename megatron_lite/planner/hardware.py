"""Peak rates and memory of GPUs, from a table whose rows have a source and a date. Unknown GPUs have unknown peaks."""

import functools
import importlib.util
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_lite.errors import UserError
from megatron_lite.units import MIB


@dataclass(frozen=True)
class Processor:
    """One GPU as PyTorch shows it. Peaks are dense, without sparsity, at the boost clock; None: unknown, or not supported."""

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

    @property
    def since_hopper(self) -> bool:
        """Compute capability 9.0 or 10.0."""
        return self.name.startswith(("H100", "H200", "B200"))


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
_NO_MODEL = {"nvidia", "amd", "tesla", "geforce", "rtx", "instinct", "gpu", "gb", "gib", "one", "die"}


def match_processor(device_name: str | None) -> Processor | None:
    """The GPU with the name that PyTorch or a trace gives it; None if the table lacks it."""
    name = device_name or ""
    return None if _PARTS.search(name) else next((one for one in PROCESSORS if re.search(one.pattern, name)), None)


def find_processor(text: str) -> Processor:
    """The GPU that people call by this name: "H200", "a100-40", "4090", "H100 PCIe", or PyTorch's name for it.

    A name that several boards bear stands for the commonest of them, which the row's name says.
    Raises UserError, with all names, for one whose memory the table does not hold.
    """
    known = [one for one in PROCESSORS if one.memory_gib]
    wanted = _split_name(text)
    fitting = [
        one for one in known if wanted[:1] == _split_name(one.name)[:1] and {*wanted} <= {*_split_name(one.name)}
    ]
    exact = [one for one in fitting if {*wanted} == {*_split_name(one.name)}]
    found = next(iter(exact + fitting), None) or match_processor(text) or _find_by_beginning(wanted, known)
    if found is None or found not in known:
        # without what a shell would not take
        names = [one.name.partition(" (")[0] for one in known]
        raise UserError(f"GPU '{text}': not in the table; take one of {', '.join(names)}.")
    return found


MIN_BEGINNING = 3  # letters and digits of "MI300", "H10"


def _find_by_beginning(wanted: list[str], known: list[Processor]) -> Processor | None:
    """'MI300' -> MI300X: the first one whose model begins so, if a digit tells it from a family."""
    first = next(iter(wanted), "")
    if len(first) < MIN_BEGINNING or not re.search(r"\d", first):
        return None
    others = {*wanted[1:]}
    begins = [one for one in known if _split_name(one.name)[:1] and _split_name(one.name)[0].startswith(first)]
    return next((one for one in begins if others <= {*_split_name(one.name)}), None)


MAX_WORDS_OF_NAME = 5  # "NVIDIA A100 SXM 80 GB"


def count_words_of_name(words: list[str]) -> int:
    """How many of the first words are the name of one GPU, as in H100 SXM 80 GB without quotes; 0 for none."""
    for number in range(min(MAX_WORDS_OF_NAME, len(words)), 0, -1):
        text = " ".join(words[:number])
        # a longer name must be all of it: H200 T4 are two
        if number > 1 and all({*_split_name(text)} != {*_split_name(one.name)} for one in PROCESSORS):
            continue
        try:
            find_processor(text)
        except UserError:
            continue
        return number
    return 0


def find_processors(words: list[str]) -> list[Processor]:
    """The GPUs that the words name, each in one word or several. UserError for one that the table lacks."""
    found: list[Processor] = []
    at = 0
    while at < len(words):
        number = max(1, count_words_of_name(words[at:]))
        found.append(find_processor(" ".join(words[at : at + number])))
        at += number
    return found


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


def _split_name(name: str) -> list[str]:
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


# cuBLASLt computes products that add a bias. Up to torch 2.11 it works in memory of its own, which torch takes at the
# first such product and keeps, for each thread that has one: 1 MiB in forward's, measured on an H200 with torch 2.11.0 on
# 2026-11-25 (docs/benchmarks.md). Its size is 1,024 KiB by default (parseCUDABlasLtWorkspaceSize in ATen/cuda/
# CublasHandlePool.cpp, 2026-01-12). Since github.com/pytorch/pytorch/pull/175879, merged on 2026-03-02 and so in torch 2.12
# and 2.13, it works in cuBLAS' own workspace. Not measured: layers that backward computes again on its own thread.
CUBLASLT_WORKSPACE = MIB
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
    """`size` rounded up to a multiple: padded(50257, 64) is 50304."""
    return -(-size // multiple) * multiple
