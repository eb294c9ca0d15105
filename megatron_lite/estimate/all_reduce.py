"""How long ranks need at least to add up their gradients, and what of it backward cannot hide."""

from dataclasses import dataclass

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.hardware import Processor
from megatron_lite.estimate.params import parameter_count
from megatron_lite.estimate.traffic import gradient_bytes


@dataclass(frozen=True)
class Route:
    """The way of gradients between the GPUs of one node."""

    gb_s: float  # of one GPU, in one direction
    share: float  # of the gradients' bytes, that each GPU has to send
    words: str  # "2 x 7/8 over NVLink at 450 GB/s"

    def ms(self, num_bytes: int) -> float:
        """At least."""
        return num_bytes * self.share / self.gb_s / 1e6


def all_num_bytes(plan: Plan) -> int:
    """What one rank's gradients hold."""
    return gradient_bytes(plan) * parameter_count(plan.shape)


def last_num_bytes(plan: Plan) -> int:
    """Of the word embedding's gradient: it is complete only when backward ends (tied or not), so that no computation is
    left to hide its reduction."""
    return gradient_bytes(plan) * plan.shape.padded_vocab_size * plan.shape.hidden_size


def route_of(plan: Plan, processor: Processor) -> Route | None:
    """None where its speed is not known, or a rank has no others on its node.

    Without the help of switches each of n GPUs sends at least 2(n-1)/n of the bytes (Patarasuk and Yuan 2009, Bandwidth
    optimal all-reduce algorithms); to switches that add up it sends all of them once.
    """
    ranks = plan.world.local_size
    if ranks < 2:
        return None
    joined = processor.linked_gpus if processor.link_gb_s else 1
    return _linked(ranks, processor) if ranks <= joined else _over_pcie(ranks, joined, processor)


def _linked(ranks: int, processor: Processor) -> Route:
    gb_s = processor.link_gb_s / 2 * ((ranks - 1) / (processor.linked_gpus - 1) if processor.mesh else 1)
    over = f"over the link between GPUs at {gb_s:g} GB/s"
    if processor.sums_in_switch:
        return Route(gb_s, 1.0, f"once {over}, whose switches add up")
    return Route(gb_s, 2 * (ranks - 1) / ranks, f"2 x {ranks - 1}/{ranks} {over}")


def _over_pcie(ranks: int, joined: int, processor: Processor) -> Route | None:
    """The GPUs that a bridge joins share the work of what leaves them."""
    if processor.pcie_gb_s is None:
        return None
    groups = -(-ranks // joined)
    share = 2 * (groups - 1) / groups / joined
    words = f"2 x {groups - 1}/{groups}{f'/{joined}' if joined > 1 else ''} over PCIe at {processor.pcie_gb_s:g} GB/s"
    return Route(processor.pcie_gb_s, share, words)
