"""torch.compile compiles again and again.

Meaning: compiled code holds for the shapes, types and values it was made for. When they change, the guard fails and
    the code is compiled anew: seconds in which nothing is computed. Past a limit torch gives up and runs eagerly.
Measured: steps that the run marked as compiling, the first step and those with an evaluation left out; without a run,
    compilations within the steady steps of a trace. The cost is the extra time of these steps, spread over all.
Cost: all of it, as long as new variants keep coming.
Do: TORCH_LOGS=recompiles names the failing guard. Keep shapes constant (fixed length, padding to few lengths), mark a
    changing dimension (torch._dynamo.mark_dynamic), keep Python numbers that change out of compiled functions.
Flags: --torch-compile; constant --micro-batch-size and --seq-length, no --rampup-batch-size that changes the last
    batch.
False alarm: a second variant for evaluation, and one per distinct layer, at the beginning.
"""

import math
from statistics import median

from megatron_lite.analysis.findings.base import MIN_SHARE_SHOWN, Evidence, Finding, in_ms, of_step, share, where
from megatron_lite.analysis.findings.step_measurements import covered_ms, rows_named
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind

CODE, TITLE = "recompilation", "compiling anew in the middle of training"
MIN_STEPS = 2  # a single one may be a variant that was due
MAX_SHOWN = 6
COMPILES = ("_compile.compile_inner", "entire_frame_compile", "compile_fx", "dynamo: _compile")


def find(facts: Facts) -> Finding | None:
    run, one = facts.run, facts.critical
    found = _measure_run(run) if run is not None else None
    if found is None and one is not None:
        rows = rows_named(one, lambda name: name.startswith(COMPILES), Kind.OP, Kind.ANNOTATION)
        cost = covered_ms(one, rows)
        if len(rows) and share(cost, one) >= MIN_SHARE_SHOWN:
            found = cost, Evidence(f"compiling takes {of_step(cost, one)}", where(one, rows[0])), one.time.rank
    if found is None:
        return None
    cost, seen, rank = found
    advice = "start with TORCH_LOGS=recompiles to see which guard fails, and keep shapes and Python values constant"
    return Finding(
        cost_ms=cost, evidence=(seen,), advice=advice, flags=("TORCH_LOGS=recompiles",), gain_ms=cost, rank=rank
    )


def _measure_run(run: Run) -> tuple[float, Evidence, None] | None:
    """(cost, evidence, no rank) of steps that compile after the first."""
    late = [index for index in range(1, len(run.compiling)) if run.compiling[index] and not run.evaluating[index]]
    if len(late) < MIN_STEPS:
        return None
    steady_ms = run.steady_step_ms
    if not steady_ms:  # all steps compile: what they take besides
        steady_ms = median(run.training_ms[at] - run.compile_ms[at] for at in late) if run.compile_ms else math.nan
    cost = sum(max(0.0, run.training_ms[index] - steady_ms) for index in late) / run.steps
    if not cost >= MIN_SHARE_SHOWN * steady_ms:
        return None
    shown = ", ".join(str(run.iterations[at]) for at in late[:MAX_SHOWN]) + (", ..." if len(late) > MAX_SHOWN else "")
    text = (
        f"{len(late)} of {run.steps} steps compiled something, after the first one (iterations {shown}); spread over "
        f"all steps {in_ms(cost)} each, beside {in_ms(steady_ms)} without compiling"
    )
    return cost, Evidence(text, "steps.jsonl"), None
