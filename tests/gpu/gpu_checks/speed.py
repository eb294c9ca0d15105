"""The speed table judged: what the benchmark measured against the bars, and memory against the plan."""

import json
from pathlib import Path

from benchmarks.training.contestants import OURS
from gpu_checks.outcome import FAILED, OUT_OF_TIME, PASSED, Outcome
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.estimate.hardware import peak_tflops, processor_of
from megatron_lite.estimate.memory import predict_memory
from megatron_lite.units import count, size

MFU_BARS = {"gate": 0.45, "goal": 0.52, "best hoped for": 0.56}  # full attention, of one H200
RATIO_BARS = {"plain-compiled": 1.05, "plain": 1.4}  # tokens/s of ours over theirs, on one H200
BARS_ARE_OF = "H200"


def outcome_of(path: Path, part: str, device: str, code: int | None, seconds: float, limit_s: float) -> Outcome:
    """From the benchmark's file. Speed below a bar is said and no failure; memory above the plan's is one."""
    if not path.exists():
        words = f"ended after its {limit_s:.0f} s" if code is None else f"exit code {code}, nothing was measured"
        return Outcome(part, OUT_OF_TIME if code is None else FAILED, words, seconds, limit_s)
    measured = json.loads(path.read_text(encoding="utf-8"))
    figures = figures_of(measured, device)
    failures = [
        f"failed: {result['contestant']}, round {result['round']}: {result['failure']}"
        for result in _results(measured)
        if result["failure"]
    ]
    too_much = figures["peak_bytes"] is not None and figures["peak_bytes"] > figures["planned_peak_bytes"]
    if too_much:
        failures.append("failed: ours takes more memory than planned")
    result = FAILED if too_much or figures["tokens_per_s"] is None else PASSED if code == 0 else OUT_OF_TIME
    runs = len(_results(measured))
    return Outcome(
        part,
        result,
        f"{runs} run{'s' if runs != 1 else ''} measured, {len(failures)} failed",
        seconds,
        limit_s,
        remarks=[*failures, *_lines(figures)],
        figures=figures,
    )


def figures_of(measured: dict, device: str) -> dict:
    """Of ours; None is what nobody measured. Bytes are of the GPU's tensors."""
    line = next(line for line in measured["summary"] if line["name"] == OURS)
    gpu = measured["machine"]["gpus"][0]["name"] if device == "cuda" and measured["machine"]["gpus"] else None
    peak = peak_tflops(gpu, measured["work"]["precision"]) if gpu else None
    return {
        "gpu": gpu,
        "tokens_per_s": line["tokens_s"],
        "first_step_s": line["first_step_s"],
        "mfu_full": _over(line["tflops_full"], peak),
        "mfu_causal": _over(line["tflops_causal"], peak),
        "peak_bytes": line["peak_bytes"] if device == "cuda" else None,
        "planned_peak_bytes": _planned(measured, gpu) if device == "cuda" else None,
        "over": {ratio["other"]: ratio["median"] for ratio in measured["ratios"] if ratio["ours"] == OURS},
    }


def _results(measured: dict) -> list[dict]:
    return [run["result"] for run in measured["runs"]]


def _planned(measured: dict, gpu: str | None) -> int:
    """What the trainer foretells for the very flags that were run, on this GPU."""
    words = next(run["command"] for run in measured["runs"] if run["result"]["contestant"] == OURS)
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    return predict_memory(planned_run(flags, 1).plan, processor_of(gpu)).peak.num_bytes


def _over(value: float | None, whole: float | None) -> float | None:
    return value / whole if value and whole else None


def _lines(figures: dict) -> list[str]:
    if figures["tokens_per_s"] is None:
        return []
    lines = [f"ours: {count(figures['tokens_per_s'])} tokens/s"]
    if figures["peak_bytes"] is not None:
        lines.append(
            f"memory: tensors peak at {size(figures['peak_bytes'])}, planned were {size(figures['planned_peak_bytes'])}"
        )
    with_bars = BARS_ARE_OF in (figures["gpu"] or "")
    if figures["mfu_full"] is not None:
        bars = [f"{name} {bar:.0%} {_answer(figures['mfu_full'] >= bar)}" for name, bar in MFU_BARS.items()]
        lines.append(
            f"MFU: {figures['mfu_full']:.1%} full, {figures['mfu_causal']:.1%} causal"
            + (f"; {', '.join(bars)}" if with_bars else "")
        )
    for other, ratio in figures["over"].items():
        bar = RATIO_BARS.get(other) if with_bars else None
        lines.append(f"over {other}: {ratio:.2f} x" + (f"; bar {bar:g} {_answer(ratio >= bar)}" if bar else ""))
    return lines


def _answer(reached: bool) -> str:
    return "reached" if reached else "MISSED"
