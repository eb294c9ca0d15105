"""torch.compile compiles again and again.

Meaning: compiled code holds for the shapes, types and values it was made for. When they change,
    the guard fails and the code is compiled anew: seconds in which nothing is computed. Past a
    limit torch gives up and runs eagerly.
Measured: steps that the run marked as compiling, the first step and those with an evaluation left
    out; without a run, compilations within the steady steps of a trace. The cost is the extra
    time of these steps, spread over all.
Cost: all of it, as long as new variants keep coming.
Do: TORCH_LOGS=recompiles names the failing guard. Keep shapes constant (fixed length, padding to
    few lengths), mark a changing dimension (torch._dynamo.mark_dynamic), keep Python numbers that
    change out of compiled functions.
Flags: --torch-compile; constant --micro-batch-size and --seq-length, no --rampup-batch-size that
    changes the last batch.
False alarm: a second variant for evaluation, and one per distinct layer, at the beginning.
"""

import math
from statistics import median

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MIN_SHARE_SHOWN,
    covered,
    in_ms,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE = "recompilation"
TITLE = "compiling anew in the middle of training"
FEWEST = 2  # steps: a single one may be a variant that was due
COMPILES = ("_compile.compile_inner", "entire_frame_compile", "compile_fx", "dynamo: _compile")


def find(facts: Facts) -> Finding | None:
    if facts.run is not None and (seen := _of_run(facts.run)):
        return seen
    return _of_trace(facts.critical) if facts.critical is not None else None


def _of_run(run: Run) -> Finding | None:
    late = [index for index in range(1, len(run.compiling)) if run.compiling[index] and not run.evaluating[index]]
    if len(late) < FEWEST:
        return None
    steady_ms = run.steady_step_ms or _without_compiling(run, late)
    cost = sum(max(0.0, run.training_ms[index] - steady_ms) for index in late) / run.steps
    if not cost >= MIN_SHARE_SHOWN * steady_ms:
        return None
    shown = ", ".join(str(run.iterations[index]) for index in late[:6]) + (", ..." if len(late) > 6 else "")
    text = (
        f"{len(late)} of {run.steps} steps compiled something, after the first one (iterations {shown}); spread "
        "over all "
        f"steps {in_ms(cost)} each, beside {in_ms(steady_ms)} without compiling"
    )
    return _finding(cost, Evidence(text, "steps.jsonl"), None)


def _without_compiling(run: Run, late: list[int]) -> float:
    """Of a run whose steps all compile: what they take besides; NaN where the steps do not say."""
    return median(run.training_ms[index] - run.compile_ms[index] for index in late) if run.compile_ms else math.nan


def _of_trace(one: RankFacts) -> Finding | None:
    rows = rows_named(one, lambda name: name.startswith(COMPILES), Kind.OP, Kind.ANNOTATION)
    cost = covered(one, rows).length / 1e6 / steady_steps(one)
    if not len(rows) or share(cost, one) < MIN_SHARE_SHOWN:
        return None
    return _finding(cost, Evidence(f"compiling takes {of_step(cost, one)}", where(one, rows[0])), one.time.rank)


def _finding(cost: float, evidence: Evidence, rank: int | None) -> Finding:
    return Finding(
        cost_ms=cost,
        evidence=(evidence,),
        advice="start with TORCH_LOGS=recompiles to see which guard fails, and keep shapes and Python values constant",
        flags=("TORCH_LOGS=recompiles",),
        gain_ms=cost,
        rank=rank,
    )
