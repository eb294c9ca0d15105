"""What `megatron-lite plan` says, for programs: docs/planning.md describes it."""

from typing import Any

from megatron_lite.estimate.what_if import Fit, Variant
from megatron_lite.report.json_file import plain
from megatron_lite.report.plan_figures import PLAN_SCHEMA, PlanReport, StageOutlook
from megatron_lite.report.plan_search import search_as_json
from megatron_lite.report.plan_terminal import verdicts


def as_json(report: PlanReport) -> dict[str, Any]:
    """Plain dicts, lists, numbers and strings; None for what is not known."""
    memory, gpus = report.memory, []
    for one in report.outlooks:
        time, length = one.time, one.duration
        best = {"step_ms": time.step_ms, "tokens_per_s": time.tokens_per_s} if time.peak_tflops else {}
        known = {"seconds": length.seconds, "days": length.days, "gpu_hours": length.gpu_hours} if length else {}
        gpus.append({
            "processor": plain(one.processor), "room_bytes": one.room_bytes, "peak_bytes": one.memory.peak.num_bytes,
            "time": plain(time) | best, "duration": plain(length) | known if length else None,
            "fit": _fit_as_json(one.fit), "inference": plain(one.inference),
        })  # fmt: skip
    return {
        "schema": PLAN_SCHEMA,
        "title": report.title,
        "facts": report.facts,
        "verdicts": verdicts(report),
        "notes": list(report.notes),
        "plan": plain(report.plan),
        "parameters": report.parts,
        "flops_per_token": {"causal": report.flops_causal, "full": report.flops_full},
        "memory": {
            "peak_bytes": memory.peak.num_bytes, "phase": memory.peak.phase, "where": memory.peak.where,
            "is_estimate": True,
            "moments": [plain(moment) | {"num_bytes": moment.num_bytes} for moment in memory.moments],
        },
        "margin": report.margin,
        "gpus": gpus,
        "what_if": [_variant_as_json(one) for one in report.variants],
        "fit": _fit_as_json(report.fit),
        "inference": plain(report.inference),
        "exact": plain(report.exact),
        "search": search_as_json(report.search),
        "stages": [_stage_as_json(one) for one in report.stages],
        "hints": plain(report.hints),
    }  # fmt: skip


def _stage_as_json(one: StageOutlook) -> dict[str, Any]:
    peak, time = one.memory.peak, one.time
    return {
        "stage": one.plan.stage.number, "rank": one.plan.world.rank, "layers": one.plan.stage.layers,
        "peak_bytes": peak.num_bytes, "phase": peak.phase, "where": peak.where, "rows": plain(peak.rows),
        "time": plain(time), "exact": plain(one.exact),
    }  # fmt: skip


def _variant_as_json(one: Variant | None) -> dict[str, Any] | None:
    if one is None:
        return None
    step_ms = one.time.step_ms if one.time and one.time.peak_tflops else None
    return {"add": list(one.add), "drop": list(one.drop), "peak_bytes": one.peak_bytes, "step_ms": step_ms}


def _fit_as_json(found: Fit | None) -> dict[str, Any] | None:
    if found is None:
        return None
    variants = {name: _variant_as_json(getattr(found, name)) for name in ("given", "found", "least", "way_out")}
    gpu, budget = found.processor.name, found.budget_bytes
    return {"gpu": gpu, "budget_bytes": budget, "margin": found.margin, "fits": found.fits, **variants}
