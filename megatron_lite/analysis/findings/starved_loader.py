"""Training waits for the data loader.

Meaning: the next batch was not ready when the step wanted it: loading takes longer than computing, or is not done
    ahead.
Measured: the device's idle time while the host stood in the loader; without a trace the host's time in the phase
    "data", of the rank that waits most. Loading that is hidden behind computing does not count.
Cost: a step cannot be shorter than loading one batch divided by the number of workers.
Do: let more workers load ahead; if the cores are taken, do less per batch: tokenize before training, larger reads, a
    local disk, fewer small tensors in the collate function.
Flags: --num-workers N (0 loads in the training process, with nothing hidden). megatron-lite preprocess writes
    .bin/.idx files once, so that loading is only reading.
False alarm: the first steps of a run, while workers start; they are left out of the figures.
"""

import math

from megatron_lite.analysis.findings import too_many_workers
from megatron_lite.analysis.findings.base import Evidence, Finding, in_ms
from megatron_lite.analysis.findings.run_settings import loader_workers, measure_loader_wait
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "starved-loader", "waiting for the data loader"


def find(facts: Facts) -> Finding | None:
    wait, workers = measure_loader_wait(facts), loader_workers(facts)
    if wait is None or too_many_workers.are_too_many(facts):
        return None
    wanted = None if workers is None else 2 * workers
    if workers is not None and workers <= 0:
        # Loading time over computing time says how many keep up.
        known = wait.loading_ms and wait.busy_ms
        wanted = max(2, math.ceil(wait.loading_ms / wait.busy_ms)) if known else 2
    advice = (
        f"load ahead with more workers: --num-workers {wanted}" if wanted else "load ahead with more worker processes"
    )
    loading = wait.loading_ms is not None
    text = f"the host stands {in_ms(wait.loading_ms)} per step in the loader, hidden or not" if loading else ""
    flags = (f"--num-workers {wanted or 'N'}",)
    return Finding(
        cost_ms=wait.ms,
        evidence=(Evidence(wait.text, wait.where), *([Evidence(text)] if text else [])),
        advice=f"{advice} (now {workers})" if isinstance(workers, int) else advice,
        flags=flags,
        gain_ms=wait.ms,
        rank=wait.rank,
    )
