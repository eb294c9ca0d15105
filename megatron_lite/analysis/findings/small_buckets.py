"""Gradients are reduced in many small collectives.

Meaning: each collective pays a latency that does not depend on its size. Below about a megabyte the latency, not the
    network's bandwidth, decides.
Measured: collectives per steady step, their bytes as the trace tells them, and the communication among the small ones
    that nothing hides. A trace without shapes: the run's parameters in fp32, spread over the collectives of backward.
Cost: that exposed time; larger buckets pay fewer latencies.
Do: larger buckets; fewer, larger tensors in collectives of your own.
Flags: --ddp-bucket-size N (parameters): several millions.
False alarm: small collectives of tensor or expert parallelism, which are not gradients.
"""

import numpy as np

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.run_settings import parameters, part, whole
from megatron_lite.analysis.findings.step_measurements import (
    communication_rows,
    exposed_ms,
    per_step,
    reduction_rows,
    steady_steps,
)
from megatron_lite.analysis.ranks.calls import collective_bytes
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.units import size

CODE, TITLE = "small-buckets", "many small collectives"
SMALL_BYTES = 2**20  # latency is about that of moving a megabyte, on NVLink as on a network
MANY = 16  # per step: the loss, the norm and a few flags are fewer
FP32_BYTES = 4
FLAG = "--ddp-bucket-size 6553600"  # parameters: 25 MiB of fp32, as torch has it


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    rows, number = communication_rows(one), parameters(facts)
    sizes = collective_bytes(one.trace, rows, whole(part(facts, "world", "size")))  # NaN for unknown
    if np.isnan(sizes).all() and number:
        rows = reduction_rows(one)
        sizes = np.full(len(rows), FP32_BYTES * number * steady_steps(one) / max(1, len(rows)))
    small = rows[sizes <= SMALL_BYTES]
    if per_step(one, small) < MANY:
        return None
    cost, median = exposed_ms(one, small), float(np.median(sizes[sizes <= SMALL_BYTES]))
    text = f"{per_step(one, small):,.0f} collectives per step of {size(median)} (median); nothing hides"
    text += f" {of_step(cost, one)}"
    advice = f"larger buckets: {FLAG}"
    return find_lost_time(one, cost, text, advice, row=small[0], flags=(FLAG,), certain=False, cheap=True)
