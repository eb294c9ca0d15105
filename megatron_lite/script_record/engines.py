"""Sees what brings the gradients of ranks together: the path that is checked is named in the answer."""

import torch.distributed as dist
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from megatron_lite.instruments.replacing import get_function, put_in_place

COLLECTIVES = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "all_gather_into_tensor", "all_to_all_single")
DATA_PARALLEL = "torch's DistributedDataParallel"
SHARDED = "torch's fully_shard"
HOOK = "a communication hook"


class SeenEngines:
    """The engines that a script uses, in the order of first use."""

    def __init__(self) -> None:
        self._engines: list[str] = []
        self._calls: list[str] = []

    def attach(self) -> None:
        """Start, for the rest of the process."""
        self._see(DistributedDataParallel, "__init__", DATA_PARALLEL, self._engines)
        self._see(DistributedDataParallel, "register_comm_hook", HOOK, self._engines)
        self._see(fsdp, "fully_shard", SHARDED, self._engines)
        for name in COLLECTIVES:
            self._see(dist, name, f"dist.{name}", self._calls)

    def describe(self) -> tuple[str, ...]:
        """List the engines, and last the collectives that the script calls itself."""
        if not self._calls:
            return tuple(self._engines)
        return (*self._engines, f"the script's own {', '.join(self._calls)}")

    def _see(self, place: object, name: str, described: str, found: list[str]) -> None:
        function = get_function(place, name)

        def call(*arguments: object, **named: object) -> object:
            if described not in found:
                found.append(described)
            return function(*arguments, **named)

        put_in_place(place, name, call)
