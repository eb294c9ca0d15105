"""Environment variables that decide how fast a run is, and from where on they are worth a word:
before it and in its report."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
THREADS = "OMP_NUM_THREADS"
WATCH = "MEGATRON_LITE_WATCH"  # what `megatron-lite watch` tells the processes of a command, as JSON
WATCHED_RANK = "MEGATRON_LITE_WATCHED_RANK"  # the process that has RANK for itself, for those that it starts
FIT_REQUEST = "MEGATRON_LITE_FIT"  # what `megatron-lite fit` tells the process of a script, as JSON
PROVE_REQUEST = "MEGATRON_LITE_PROVE"  # what `megatron-lite prove` tells the processes of a script, as JSON
BOOTSTRAP = Path(__file__).parent / "watch" / "bootstrap"  # what Python runs first in processes of their commands
KERNEL_NAMES = "MEGATRON_LITE_KERNEL_NAMES"  # a file with the user's own roles of kernels
MORE_QUEUES = f"{QUEUES}=32"


class RunPlace(NamedTuple):
    """Where a run computes, as far as it decides which switches matter."""

    on_gpu: bool
    ranks: int
    local_ranks: int  # on one machine


# where a switch matters, by name
PLACES: dict[str, Callable[[RunPlace], bool]] = {
    "a GPU": lambda place: place.on_gpu,
    "ranks": lambda place: place.ranks > 1,
    "several GPUs": lambda place: place.on_gpu and place.ranks > 1,
    "GPUs side by side": lambda place: place.on_gpu and place.local_ranks > 1,
    "machines": lambda place: place.on_gpu and place.ranks > place.local_ranks,
}


@dataclass(frozen=True)
class Switch:
    """A variable for finding errors, or for going round broken hardware, which makes runs slower."""

    variable: str
    cost: str
    place: str  # of PLACES
    harmless: tuple[str, ...] = ("", "0", "OFF", "FALSE")


SWITCHES = (
    Switch("CUDA_LAUNCH_BLOCKING", "the host waits for every kernel", "a GPU"),
    Switch("TORCH_NCCL_ENABLE_TIMING", "events around every collective, which hinder overlap", "several GPUs"),
    Switch("TORCH_NCCL_BLOCKING_WAIT", "the host waits for every collective", "several GPUs"),
    # INFO only logs at the start
    Switch("TORCH_DISTRIBUTED_DEBUG", "every collective is checked on all ranks first", "ranks", ("", "OFF", "INFO")),
    Switch("PYTORCH_NO_CUDA_MEMORY_CACHING", "every tensor is a cudaMalloc and a cudaFree", "a GPU"),
    Switch("NCCL_DEBUG", "every collective is printed", "several GPUs", ("", "VERSION", "WARN", "INFO")),
    Switch("NCCL_P2P_DISABLE", "GPUs of one machine talk through host memory", "GPUs side by side"),
    Switch("NCCL_SHM_DISABLE", "ranks of one machine talk over the network", "GPUs side by side"),
    Switch("NCCL_IB_DISABLE", "InfiniBand is not used", "machines"),
)


PACKAGE_FOLDER = Path(__file__).parents[1]  # that holds the package, for processes where it is not installed


def prepend_python_path(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment for a process that looks for modules in `folder` first."""
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH")]))}


def has_needless_order(value: str | None, ranks: int, tensor: int = 1, context: int = 1) -> bool:
    """Whether all streams have one queue, which only tensor and context parallelism want.

    Args:
        value: The value of CUDA_DEVICE_MAX_CONNECTIONS.
        ranks: Ranks of the job.
        tensor: Ranks that split each layer.
        context: Ranks that share out the positions of each sequence.
    """
    return value == "1" and ranks > 1 and tensor == context == 1


def fitting_threads(threads: int, ranks: int, cores: int) -> int | None:
    """Threads per rank that do not wait for each other's cores.

    Args:
        threads: Threads of each rank now.
        ranks: Ranks on this machine.
        cores: Cores of this machine.

    Returns:
        A smaller number; None where the one of now does.
    """
    fitting = max(1, cores // ranks)
    return fitting if threads * ranks > cores and threads > fitting else None


def switches_on(environ: Mapping[str, str], place: RunPlace) -> dict[str, str]:
    """Find switches that were left on: "VARIABLE=value" and what it costs."""
    found = [(environ.get(switch.variable), switch) for switch in SWITCHES if PLACES[switch.place](place)]
    return {
        f"{switch.variable}={value}": switch.cost
        for value, switch in found
        if value is not None and value.upper() not in switch.harmless
    }
