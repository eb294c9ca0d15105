"""The first step takes a large part of a short run.

Meaning: the first step creates the CUDA context, picks kernels, fills the allocator and, with
    torch.compile, compiles. None of it comes again.
Measured: the first step against the median of ordinary steps, in steps.jsonl.
Cost: the difference, spread over the run's steps; in a long run it vanishes. It is no part of
    steady throughput.
Do: for short runs, no compiling, or a compile cache that outlives the run; keep warm-up out of
    any comparison.
Flags: without --torch-compile in short runs; TORCHINDUCTOR_CACHE_DIR on a disk that stays.
False alarm: a trial of a few steps of what will be a long run.
"""

import math

from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.seen.planned import argument
from megatron_lite.analysis.findings.seen.steady import in_ms

CODE = "first-step"
TITLE = "long first step of a short run"
TOO_MUCH = 0.20  # of the run's time
LEAST_MS = 10_000.0  # less nobody waits for
FEWEST_STEPS = 30  # a shorter run is a trial


def find(facts: Facts) -> Finding | None:
    run = facts.run
    if run is None or not run.first_step_ms or not run.steady_step_ms or run.steps < FEWEST_STEPS:
        return None
    extra = run.first_step_ms - run.steady_step_ms
    total = math.fsum(ms for ms in run.step_ms if not math.isnan(ms))
    if extra < max(LEAST_MS, TOO_MUCH * total):
        return None
    compiles = bool(argument(facts, "torch_compile"))
    text = (f"the first step took {in_ms(run.first_step_ms)}, ordinary ones {in_ms(run.steady_step_ms)}: "
            f"{extra / total:.0%} of {run.steps} steps")
    advice = ("compiling does not pay in so short a run: drop --torch-compile, or keep its cache "
              "(TORCHINDUCTOR_CACHE_DIR)"
              if compiles else "leave the first steps out of comparisons; a longer run hides them")
    return Finding(
        code=CODE, title=TITLE, cost_ms=extra / run.steps, evidence=(Evidence(text, "steps.jsonl"),), advice=advice,
        flags=("TORCHINDUCTOR_CACHE_DIR",) if compiles else (), gain_ms=extra / run.steps, certain=compiles,
    )
