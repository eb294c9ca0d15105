"""How fast a run went: ordinary steps against the first and the profiled ones; tokens per second; model FLOPs."""

import dataclasses
from dataclasses import dataclass
from statistics import median, quantiles

from megatron_lite.analysis.run.columns import Columns
from megatron_lite.analysis.run.step_lines import number
from megatron_lite.config.shape import ModelShape
from megatron_lite.estimate.flops import step_flops
from megatron_lite.notable import FEWEST_BEFORE

TERA = 1e12
COMPARED = 50  # steps before a window, as many as the trainer's own line about the profiler's slowdown
FEWEST_FOR_SPREAD = 4


@dataclass(frozen=True)
class Speed:
    """The names are those of Run."""

    first_step_ms: float | None
    steady_step_ms: float | None
    step_spread_ms: float | None
    profiled_step_ms: float | None
    before_profile_ms: float | None
    after_profile_ms: float | None
    tokens_per_second: float | None
    model_tflops: float | None
    model_tflops_full: float | None
    mfu_causal: float | None
    mfu_full: float | None


def speed_of(plan: dict, record: dict, columns: Columns, starts_at_first: bool) -> tuple[Speed, list[str]]:
    """(figures, what is missing and why). starts_at_first: the columns begin with the start's very first step."""
    training, notes = columns.training_ms, []
    ordinary = [row for row, plain in enumerate(columns.ordinary) if plain]
    plain_ms = [training[row] for row in ordinary]
    if training and not ordinary:
        notes.append(
            "No step is an ordinary one (each is the first, profiled, compiling, evaluating or saving): "
            "there is no steady step time."
        )
    inside = [row for row, profiled in enumerate(columns.profiled) if profiled]
    before, after = ([training[row] for row in rows] for rows in _beside(columns, inside))
    rate, shape = _samples_per_ms(columns, ordinary), shape_of(plan)
    if training and shape is None:
        notes.append("The model's shape is unknown: no tokens per second, no model FLOPs.")
    hardware = record.get("hardware")
    peak = number(hardware.get("peak_tflops")) if isinstance(hardware, dict) else 0.0
    causal, full = (_tflops(shape, plan, rate, convention) for convention in (True, False))
    return Speed(
        first_step_ms=training[0] if training and starts_at_first else None,
        steady_step_ms=median(plain_ms) if plain_ms else None,
        step_spread_ms=_spread(plain_ms),
        profiled_step_ms=median(training[row] for row in inside) if inside else None,
        before_profile_ms=median(before) if len(before) >= FEWEST_BEFORE else None,
        after_profile_ms=median(after) if len(after) >= FEWEST_BEFORE else None,
        tokens_per_second=1000 * rate * shape.seq_length if rate and shape else None,
        model_tflops=causal,
        model_tflops_full=full,
        mfu_causal=causal / peak if causal and peak > 0 else None,
        mfu_full=full / peak if full and peak > 0 else None,
    ), notes


def shape_of(plan: dict) -> ModelShape | None:
    """The model's shape from a plan; None where it is incomplete or no numbers."""
    given = plan.get("shape")
    if not isinstance(given, dict):
        return None
    known = {field.name: given[field.name] for field in dataclasses.fields(ModelShape) if field.name in given}
    try:
        shape = ModelShape(**known)
        return shape if 0 < step_flops(shape, 1, causal=True) < float("inf") and shape.seq_length > 0 else None
    except (TypeError, ValueError):
        return None


def _beside(columns: Columns, inside: list[int]) -> tuple[list[int], list[int]]:
    """Steps that the profiled ones are compared with: undisturbed ones before the first window and after the last."""
    rows = [row for row, plain in enumerate(columns.undisturbed) if plain] if inside else []
    return [row for row in rows if row < inside[0]][-COMPARED:], [row for row in rows if row > inside[-1]][:COMPARED]


def _spread(values: list[float]) -> float | None:
    if len(values) < FEWEST_FOR_SPREAD:
        return None
    first, _, third = quantiles(values, n=4)
    return third - first


def _samples_per_ms(columns: Columns, ordinary: list[int]) -> float | None:
    known = [row for row in ordinary if columns.batch_sizes[row] > 0]  # NaN is not
    ms = sum(columns.training_ms[row] for row in known)
    return sum(columns.batch_sizes[row] for row in known) / ms if ms > 0 else None


def _tflops(shape: ModelShape | None, plan: dict, rate: float | None, causal: bool) -> float | None:
    world = plan.get("world")
    ranks = number(world.get("size")) if isinstance(world, dict) else 0
    if shape is None or rate is None or not ranks > 0:
        return None
    return step_flops(shape, 1, causal) * rate * 1000 / TERA / ranks
