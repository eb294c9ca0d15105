"""More loader workers than cores, and training still waits for data.

Meaning: worker processes take the cores from each other and from the training process: switching between them, copies
    of the data set in memory and a disk that seeks cost more than they bring.
Measured: --num-workers times the ranks of this machine against the cores that a rank may use, and the wait for the
    loader (as in starved-loader) that is left in spite of them.
Cost: the wait; how much of it fewer workers save, only a run tells. More workers are not always faster.
Do: halve the workers until the wait grows; do less work per batch (tokenize before training).
Flags: --num-workers N with N x ranks below the number of cores.
False alarm: workers that mostly wait for a slow network disk may well outnumber the cores.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import (
    hardware,
    loader_workers,
    local_ranks,
    measure_loader_wait,
    whole,
)
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "too-many-workers", "more loader workers than cores"


def find(facts: Facts) -> Finding | None:
    wait = measure_loader_wait(facts)
    if wait is None or not are_too_many(facts):
        return None
    workers, ranks, cpus = _count(facts)
    fewer = max(1, cpus // (2 * ranks))
    seen = Evidence(f"{workers} workers x {ranks} ranks of this machine on {cpus} cores", "run.json")
    advice = f"fewer workers than cores: --num-workers {fewer} (now {workers}), and less work per batch"
    return Finding(
        cost_ms=wait.ms,
        evidence=(Evidence(wait.text, wait.where), seen),
        advice=advice,
        flags=(f"--num-workers {fewer}",),
        gain_ms=wait.ms,
        certain=False,
        rank=wait.rank,
    )


def are_too_many(facts: Facts) -> bool:
    """More workers on this machine than cores; False where either is unknown. One worker is never too many."""
    workers, ranks, cpus = _count(facts)
    return bool(workers and ranks and cpus) and workers > 1 and workers * ranks > cpus


def _count(facts: Facts) -> tuple[int | None, int | None, int | None]:
    return whole(loader_workers(facts)), local_ranks(facts), whole(hardware(facts, "cpus"))
