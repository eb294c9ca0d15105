"""The speed table judged: what the benchmark measured against the bars, and memory against the plan."""

import json
from pathlib import Path

from benchmarks.training.contestants import OURS
from benchmarks.training.summary import ON_GPU
from gpu_checks.outcome import FAILED, OUT_OF_TIME, PASSED, Outcome
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.formats.hardware import match_processor, peak_tflops
from megatron_lite.planner.memory import predict_memory
from megatron_lite.units import count, size

MFU_BARS = {"gate": 0.45, "goal": 0.52, "best hoped for": 0.56}  # full attention, of one H200
BARS_ARE_OF = "H200"


def judge_speed(part: str, found: Path, device: str, code: int | None, seconds: float, limit_s: float) -> Outcome:
    """From the benchmark's file. Speed below a bar is said and no failure; memory above the plan's is one."""
    if not found.exists():
        words = f"ended after its {limit_s:.0f} s" if code is None else f"exit code {code}, nothing was measured"
        return Outcome(part, OUT_OF_TIME if code is None else FAILED, words, seconds, limit_s)
    measured = json.loads(found.read_text(encoding="utf-8"))
    figures = collect_figures(measured, device)
    results = [run["result"] for run in measured["runs"]]
    failures = [
        f"failed: {result['contestant']}, round {result['round']}: {result['failure']}"
        for result in results
        if result["failure"]
    ]
    too_much = figures["peak_bytes"] is not None and figures["peak_bytes"] > figures["planned_peak_bytes"]
    if too_much:
        failures.append("failed: ours takes more memory than planned")
    result = FAILED if too_much or figures["tokens_per_s"] is None else PASSED if code == 0 else OUT_OF_TIME
    words = f"{len(results)} run{'s' if len(results) != 1 else ''} measured, {len(failures)} failed"
    remarks = [*failures, *describe_figures(figures)]
    return Outcome(part, result, words, seconds, limit_s, remarks=remarks, figures=figures)


def collect_figures(measured: dict, device: str) -> dict:
    """The trainer's own; None is what nobody measured. Bytes are of the GPU's tensors."""
    line = next(line for line in measured["summary"] if line["name"] == OURS)
    gpu = measured["machine"]["gpus"][0]["name"] if device == "cuda" and measured["machine"]["gpus"] else None
    peak = peak_tflops(gpu, measured["work"]["precision"]) if gpu else None
    figures = {
        "gpu": gpu,
        "tokens_per_s": line["tokens_s"],
        "first_step_s": line["first_step_s"],
        "mfu_full": line["tflops_full"] / peak if line["tflops_full"] and peak else None,
        "mfu_causal": line["tflops_causal"] / peak if line["tflops_causal"] and peak else None,
        "peak_bytes": None,
        "planned_peak_bytes": None,
        "over": {ratio["other"]: ratio["median"] for ratio in measured["ratios"] if ratio["ours"] == OURS},
    }
    if device == "cuda":  # what the trainer predicts for the very flags that were run, on this GPU
        words = next(run["command"] for run in measured["runs"] if run["result"]["contestant"] == OURS)
        plan = planned_run(words[words.index("pretrain_gpt.py") + 1 :], 1).plan
        figures["peak_bytes"] = line["peak_bytes"]
        figures["planned_peak_bytes"] = predict_memory(plan, match_processor(gpu)).peak.num_bytes
    return figures


def describe_figures(figures: dict) -> list[str]:
    """Lines under the table, with the bars where they were made for this GPU."""
    if figures["tokens_per_s"] is None:
        return []

    def say(reached: bool) -> str:
        return "reached" if reached else "MISSED"

    lines = [f"ours: {count(figures['tokens_per_s'])} tokens/s"]
    if figures["peak_bytes"] is not None:
        peak, planned = size(figures["peak_bytes"]), size(figures["planned_peak_bytes"])
        lines.append(f"memory: tensors peak at {peak}, planned were {planned}")
    with_bars = BARS_ARE_OF in (figures["gpu"] or "")
    if figures["mfu_full"] is not None:
        line = f"MFU: {figures['mfu_full']:.1%} full, {figures['mfu_causal']:.1%} causal"
        bars = [f"{name} {bar:.0%} {say(figures['mfu_full'] >= bar)}" for name, bar in MFU_BARS.items()]
        lines.append(f"{line}; {', '.join(bars)}" if with_bars else line)
    for other, ratio in figures["over"].items():
        bar = ON_GPU.get(other) if with_bars else None
        lines.append(f"over {other}: {ratio:.2f} x" + (f"; bar {bar:g} {say(ratio >= bar)}" if bar else ""))
    return lines
