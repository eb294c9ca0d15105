"""Gradients are reduced in many small collectives.

Meaning: each collective pays a latency that does not depend on its size. Below about a megabyte
    the latency, not the network's bandwidth, decides.
Measured: collectives per steady step, their bytes as the trace tells them, and the communication
    among the small ones that nothing hides. A trace without shapes: the run's parameters in fp32,
    spread over the collectives of backward.
Cost: that exposed time; larger buckets pay fewer latencies.
Do: larger buckets; fewer, larger tensors in collectives of your own.
Flags: --ddp-bucket-size N (parameters): several millions.
False alarm: small collectives of tensor or expert parallelism, which are not gradients.
"""

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import part, whole
from megatron_lite.analysis.findings.step_measurements import (
    MIN_SHARE_SHOWN,
    communication_rows,
    exposed_ms,
    of_step,
    reduction_rows,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.ranks.calls import collective_bytes
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.units import size

CODE = "small-buckets"
TITLE = "many small collectives"
SMALL_BYTES = 2**20  # latency is about that of moving a megabyte, on NVLink as on a network
MANY = 16  # per step: the loss, the norm and a few flags are fewer
FP32_BYTES = 4
FLAG = "--ddp-bucket-size 6553600"  # parameters: 25 MiB of fp32, as torch has it


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None:
        return None
    rows, sizes = _sized(facts, one)
    small = rows[sizes <= SMALL_BYTES]
    cost = exposed_ms(one, small)
    if len(small) < MANY * steady_steps(one) or share(cost, one) < MIN_SHARE_SHOWN:
        return None
    median = float(np.median(sizes[sizes <= SMALL_BYTES]))
    text = (
        f"{len(small) / steady_steps(one):,.0f} collectives per step of {size(median)} (median); nothing hides "
        f"{of_step(cost, one)}"
    )
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one, small[0])),),
        advice=f"larger buckets: {FLAG}",
        flags=(FLAG,),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def _sized(facts: Facts, one: RankFacts) -> tuple[np.ndarray, np.ndarray]:
    """(collectives of the steady steps, bytes of each; NaN for unknown)."""
    rows = communication_rows(one)
    sizes = collective_bytes(one.trace, rows, whole(part(facts, "world", "size")))
    parameters = whole(facts.run.record.get("parameters")) if facts.run else None
    if not np.isnan(sizes).all() or not parameters:
        return rows, sizes
    gradients = reduction_rows(one)
    mean = FP32_BYTES * parameters * steady_steps(one) / max(1, len(gradients))
    return gradients, np.full(len(gradients), mean)
