"""The place of this process among all ranks, from the launcher's environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.config.launchers import BY_TORCHRUN, read_ranks

INJECTIONS = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD")
NSYS_LIBRARIES = ("nsight-systems", "libToolsInjection")


@dataclass(frozen=True)
class World:
    """A process of the job. Without a launcher it is the only one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    gpus: int = 0  # GPUs that this process sees
    threads: int = 1  # that its operations on CPU tensors use
    under_nsys: bool = False  # Nsight Systems watches this process
    # why torch.compile can make no kernels for this process's GPU; empty: it can, as far as is known
    no_compiler: str = ""

    @property
    def gpu(self) -> int:
        """The index of this rank's GPU among those it sees; launchers may show each rank its own one only."""
        return self.local_rank % max(self.gpus, 1)

    @property
    def is_first(self) -> bool:
        """Whether this rank prints what concerns the whole run."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank logs: the last one, as in Megatron-LM, where the last pipeline stage holds the loss."""
        return self.rank == self.size - 1

    def select_ranks(self, ranks: tuple[int, ...]) -> frozenset[int]:
        """The ranks that a flag names; -1 stands for all."""
        return frozenset(range(self.size) if -1 in ranks else ranks)


def read_world(gpus: int, threads: int, environment: Mapping[str, str] = os.environ) -> World:
    """Read the launcher's variables, which have torchrun's names.

    Args:
        gpus: Number of GPUs, as torch counts them here.
        threads: Number of threads, as torch counts them here.
        environment: The variables.

    Raises:
        ConfigError: Some of the numbers cannot be.
    """
    # `nsys profile` and `nsys launch` name their session, and bring their library into the process by a variable of
    # CUDA, of NVTX, or of the loader; a launcher between nsys and us may have dropped some of these
    libraries = " ".join(environment.get(name, "") for name in INJECTIONS)
    ranks = read_ranks(environment)
    return World(
        rank=ranks.rank,
        size=ranks.size,
        local_rank=ranks.local_rank,
        # launchers other than torchrun place ranks themselves, and may show each its own GPU only
        local_size=1 if gpus == 1 and BY_TORCHRUN not in environment else ranks.local_size,
        gpus=gpus,
        threads=threads,
        under_nsys="NSYS_PROFILING_SESSION_ID" in environment or any(name in libraries for name in NSYS_LIBRARIES),
    )
