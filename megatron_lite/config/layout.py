"""Which rank holds what of the model's state. Pure numbers."""

from dataclasses import dataclass

from megatron_lite.config.args import ParallelArgs
from megatron_lite.config.world import World

COPIES, ROWS = (
    "copies",
    "rows",
)  # dimensions of a mesh: ranks that hold the same rows, and those that share out the model


@dataclass(frozen=True)
class Sharding:
    """How ranks share out fp32 weights, gradients and moments: each parameter by rows, in equal parts but for the last ones."""

    ranks: int  # that together hold the whole
    gathers_twice: (
        bool  # layers give back after forward what they gathered (ZeRO-3), or keep it until backward (ZeRO-1)
    )

    def find_rows(self, shape: tuple[int, ...], index: int) -> "Rows":
        """Those of the `index`-th of these ranks, of a parameter of `shape`."""
        each = -(-shape[0] // self.ranks)
        start = min(each * index, shape[0])
        return Rows(start, min(start + each, shape[0]), shape)


@dataclass(frozen=True)
class Rows:
    """A part of a tensor along its first dimension."""

    start: int
    end: int
    whole: tuple[int, ...]  # the tensor's shape

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.end - self.start, *self.whole[1:])


def plan_sharding(parallel: ParallelArgs, world: World) -> Sharding | None:
    """None where every rank keeps everything."""
    ranks = world.size // parallel.num_distributed_optimizer_instances
    if ranks == 1 or not (parallel.use_distributed_optimizer or parallel.use_torch_fsdp2):
        return None
    return Sharding(ranks, gathers_twice=parallel.use_torch_fsdp2 and parallel.torch_fsdp2_reshard_after_forward)
