"""Training waits for the data loader.

Meaning: the next batch was not ready when the step wanted it: loading takes longer than
    computing, or is not done ahead.
Measured: the device's idle time while the host stood in the loader; without a trace the host's
    time in the phase "data", of the rank that waits most. Loading that is hidden behind computing
    does not count.
Cost: a step cannot be shorter than loading one batch divided by the number of workers.
Do: let more workers load ahead; if the cores are taken, do less per batch: tokenize before
    training, larger reads, a local disk, fewer small tensors in the collate function.
Flags: --num-workers N (0 loads in the training process, with nothing hidden). megatron-lite
    preprocess writes .bin/.idx files once, so that loading is only reading.
False alarm: the first steps of a run, while workers start; they are left out of the figures.
"""

import math

from megatron_lite.analysis.findings import too_many_workers
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import LoaderWait, loader_wait, loader_workers, part, whole
from megatron_lite.analysis.findings.step_measurements import in_ms
from megatron_lite.analysis.run_facts import Facts

CODE = "starved-loader"
TITLE = "waiting for the data loader"


def find(facts: Facts) -> Finding | None:
    wait = loader_wait(facts)
    if wait is None or too_many_workers.are_too_many(facts):
        return None
    workers = loader_workers(facts)
    wanted = _workers(wait, workers, whole(part(facts, "world", "local_size")))
    advice = (
        (f"load ahead with more workers: --num-workers {wanted}") if wanted else "load ahead with more worker processes"
    )
    if isinstance(workers, int):
        advice += f" (now {workers})"
    return Finding(
        cost_ms=wait.ms,
        evidence=(Evidence(wait.text, wait.where), *_loading(wait)),
        advice=advice,
        flags=(f"--num-workers {wanted or 'N'}",),
        gain_ms=wait.ms,
        rank=wait.rank,
    )


def _workers(wait: LoaderWait, now: int | None, ranks: int | None) -> int | None:
    """With none, loading time over computing time says how many keep up; else twice as many as now."""
    if now is None:
        return None
    if now > 0:
        return 2 * now
    return max(2, math.ceil(wait.loading_ms / wait.busy_ms)) if wait.loading_ms and wait.busy_ms else 2


def _loading(wait: LoaderWait) -> tuple[Evidence, ...]:
    if wait.loading_ms is None:
        return ()
    return (Evidence(f"the host stands {in_ms(wait.loading_ms)} per step in the loader, hidden or not"),)
