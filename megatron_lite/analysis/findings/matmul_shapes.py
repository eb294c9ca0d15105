"""Matrix products whose dimensions fit the hardware badly.

Meaning: matrix units work on tiles. A dimension that is no multiple of 8 (16 bytes of fp16) may lose tensor cores or
    wide loads altogether; one that is no multiple of 64 leaves part of the last tile, and of each cache line, empty.
    hidden 1000 is a multiple of 8 and still no good: 1024 has the same number of tiles.
Measured: dimensions of the products in the trace (needs --pytorch-profiler-collect-shapes), which layer they are by
    the run's plan, and their time. The cost is the part of the tiles' work that is padding: 1 - product of (dimension
    / next multiple of 64), which is arithmetic; that a lost tensor core costs more is in no-tensor-cores.
Cost: at least the padding; odd dimensions (no multiple of 8) often cost several times as much.
Do: the next multiple of 128 where it is near, else of 64.
Flags: --hidden-size, --ffn-hidden-size, --kv-channels, --make-vocab-size-divisible-by 128, --seq-length.
False alarm: products so small that launching them costs more than their tiles.
"""

import math

from megatron_lite.analysis.findings.base import (
    MIN_SHARE_SHOWN,
    Evidence,
    Finding,
    find_lost_time,
    in_ms,
    of_step,
    share,
)
from megatron_lite.analysis.findings.run_settings import name_layer, suggest_size
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.estimate.hardware import TILE as USUAL_TILE
from megatron_lite.estimate.hardware import best_multiple, least_multiple, padded

CODE, TITLE = "matmul-shapes", "matrix dimensions off the tiles"
TOO_MUCH = 0.10  # of the step in products with odd dimensions, whose cost the tiles alone do not tell
HALF_BYTES = 2  # an element of fp16 or bf16
LOAD, TILE, WIDE_TILE = least_multiple(HALF_BYTES), best_multiple(HALF_BYTES), USUAL_TILE  # 8, 64, 128
NEAR = 0.05  # a dimension may grow by so much to reach a multiple of 128
MAX_SHOWN = 4


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    rows = [row for row in one.kernels.roofline if row.role is Role.GEMM and any(map(is_off, row.dims))]
    rows.sort(key=lambda row: -row.ms)
    ms, cost = sum(row.ms for row in rows), sum(row.ms * _padding(row.dims) for row in rows)
    odd = sum(row.ms for row in rows if any(size > LOAD and size % LOAD for size in row.dims))
    sizes = dict.fromkeys(size for row in rows for size in row.dims if is_off(size))
    changes = list(dict.fromkeys(suggest_size(facts, size, enlarge(size)) for size in sizes))
    shown = (
        Evidence(f"{name_layer(facts, row.dims)} {row.shape}: {in_ms(row.ms)}, {row.per_step:,.3g} per step", row.phase)
        for row in rows[:MAX_SHOWN]
    )
    text = f"products with such dimensions take {of_step(ms, one)}"
    advice = "; ".join(changes[:MAX_SHOWN])
    flags = tuple(change.partition(" (")[0] for change in changes if change.startswith("--"))
    limit = 0.0 if share(odd, one) >= TOO_MUCH else MIN_SHARE_SHOWN
    return find_lost_time(one, cost, text, advice, *shown, flags=flags, certain=one.time.on_gpu, at_least=limit)


def is_off(dimension: int) -> bool:
    """No multiple of 8, or large and no multiple of 64. Dimensions up to 8 are another matter: batches, heads."""
    return dimension > LOAD and (dimension % LOAD != 0 or dimension > TILE and dimension % TILE != 0)


def enlarge(dimension: int) -> int:
    """What to pad to: 1000 -> 1024, 50257 -> 50304, 20 -> 24, 72 -> 128."""
    if dimension < TILE:
        return padded(dimension, LOAD)
    wide = padded(dimension, WIDE_TILE)
    return wide if wide <= (1 + NEAR) * dimension else padded(dimension, TILE)


def _padding(dims: tuple[int, ...]) -> float:
    """Share of the tiles' work that is padding."""
    return 1 - math.prod(dimension / padded(dimension, TILE) for dimension in dims if dimension > TILE)
