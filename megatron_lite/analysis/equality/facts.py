"""Reads the sizes of both runs by which figures can be explained."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lite.analysis.equality.proved_run import ProvedRun
from megatron_lite.analysis.equality.same_data import Roles

REFERENCES = "the reference's"
OWN_MEAN = "the mean of the ranks' own"


@dataclass(frozen=True)
class LayoutFacts:
    """Numbers of a layout by which gradients may be wrong."""

    # of the run: its ranks, those with samples of their own, and the largest group with the same samples
    ranks: int
    data_ranks: int
    peers: int
    # micro-batches a step, of a rank and of the reference
    micro_batches: int
    reference_micro_batches: int
    # ranks of each pipeline stage
    stages: tuple[tuple[int, ...], ...] = ()
    # what gradients are laid beside, as sentences say whose they are
    expected: str = REFERENCES

    @staticmethod
    def read(run: ProvedRun, roles: Roles, reference: ProvedRun | None) -> "LayoutFacts":
        """Read them from the first step.

        Args:
            run: The records of what is proved.
            roles: What its ranks do alike.
            reference: The records of the reference; None where there is none.
        """
        return LayoutFacts(
            ranks=run.world,
            data_ranks=len(roles.data_ranks),
            peers=max(map(len, roles.peers), default=1),
            micro_batches=_count_micro_batches(run),
            reference_micro_batches=1 if reference is None else _count_micro_batches(reference),
            stages=tuple(map(tuple, roles.stages)),
            expected=OWN_MEAN if reference is None else REFERENCES,
        )

    def spans_stages(self, ranks: Iterable[int]) -> bool:
        """Whether ranks are of several pipeline stages."""
        wanted = set(ranks)
        return sum(not wanted.isdisjoint(stage) for stage in self.stages) > 1

    def list_sizes(self) -> dict[str, int]:
        """Sizes that may be mistaken for each other, by what they are; each size once, without 1."""
        sizes = {
            "data-parallel ranks": self.data_ranks,
            "ranks with the same samples": self.peers,
            "ranks": self.ranks,
            "micro-batches of a step": self.micro_batches,
        }
        return {name: size for name, size in sizes.items() if size > 1}

    def describe(self, size: float, tolerance: float) -> str:
        """Write what of the layout has a size: "2 data-parallel ranks and 2 micro-batches of a step"."""
        found = self.explain(size, tolerance)
        # the data-parallel ranks, or those with the same samples, may be all of them
        if len(found) > 1 and "ranks" in found[0]:
            found = [name for name in found if name != "ranks"]
        number = round(size)
        return " and ".join(f"{number} {name}" for name in found)

    def explain(self, size: float, tolerance: float) -> list[str]:
        """List what of the layout has a size."""
        found = []
        for name, own in self.list_sizes().items():
            distance = abs(own - size)
            if distance <= tolerance * own:
                found.append(name)
        return found


def _count_micro_batches(run: ProvedRun) -> int:
    counts = [len(rank.record.steps[0].micro_batches) for rank in run.ranks.values() if rank.record.steps]
    return max(counts, default=1)
