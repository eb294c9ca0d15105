"""The first step takes a large part of a short run.

Meaning: the first step creates the CUDA context, picks kernels, fills the allocator and, with torch.compile,
    compiles. None of it comes again.
Measured: the first step against the median of ordinary steps, in steps.jsonl, with the time in which torch.compile
    compiled.
Cost: the difference, spread over the run's steps; in a long run it vanishes. It is no part of steady throughput.
Do: for short runs, no compiling, or a compile cache that outlives the run; keep warm-up out of any comparison.
Flags: --torch-compile none in short runs; TORCHINDUCTOR_CACHE_DIR on a disk that stays.
False alarm: a trial of a few steps of what will be a long run.
"""

import math

from megatron_lite.analysis.findings.base import Evidence, Finding, in_ms
from megatron_lite.analysis.findings.run_settings import compiles
from megatron_lite.analysis.run_facts import Facts

CODE, TITLE = "first-step", "long first step of a short run"
TOO_MUCH = 0.20  # of the run's time
MIN_MS = 10_000.0  # less nobody waits for
MIN_STEPS = 30  # a shorter run is a trial


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or not run.first_step_ms or not run.steady_step_ms or run.steps < MIN_STEPS:
        return None
    extra = run.first_step_ms - run.steady_step_ms
    total = math.fsum(ms for ms in run.step_ms if not math.isnan(ms))
    if extra < max(MIN_MS, TOO_MUCH * total):
        return None
    compiling_ms = run.compile_ms[0] if run.compile_ms else math.nan
    text = (
        f"the first step took {in_ms(run.first_step_ms)}, ordinary ones {in_ms(run.steady_step_ms)}: "
        f"{extra / total:.0%} of {run.steps} steps"
        + (f", {in_ms(compiling_ms)} of the first for compiling" if compiling_ms > 0 else "")
    )
    compiled, advice, flags = compiles(facts), "leave the first steps out of comparisons; a longer run hides them", ()
    if compiled:
        flags = ("--torch-compile none", "TORCHINDUCTOR_CACHE_DIR")
        advice = (
            "compiling does not pay in so short a run: --torch-compile none, or keep its cache where the next run "
            "finds it (TORCHINDUCTOR_CACHE_DIR)"
        )
    seen = Evidence(text, "steps.jsonl")
    return Finding(
        cost_ms=extra / run.steps,
        evidence=(seen,),
        advice=advice,
        flags=flags,
        gain_ms=extra / run.steps,
        certain=bool(compiled),
    )
