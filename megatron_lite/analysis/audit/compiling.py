"""The point about torch.compile."""

import math

from megatron_lite.analysis.audit.figures import Case, Outcome, blamed, not_seen, passed
from megatron_lite.analysis.audit.recording import RUN_FOLDER
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.seen.planned import compiles
from megatron_lite.analysis.findings.seen.steady import in_ms, where


def compiling_apart(case: Case) -> Outcome:
    """The first step's compiling apart from steady steps, and none later."""
    run, one = case.facts.run, case.facts.critical
    compiled = compiles(case.facts)
    regions = one.kernels.compiled_regions if one is not None else 0.0
    causes = ("recompilation", "graph-breaks", *(("first-step",) if compiled else ()))
    if found := case.found(*causes):
        return blamed(found)
    if compiled is False and not regions:
        return not_seen(
            "a run with --torch-compile", Evidence("nothing is compiled (--torch-compile none)", "run.json")
        )
    seen = (Evidence(f"{regions:,.3g} compiled regions per step", where(one)),) if regions else ()
    if not run or not (compiled or regions) or not run.first_step_ms or not run.steady_step_ms:
        return not_seen(RUN_FOLDER if run is None else "all steps of the run: start it with an empty --run-dir", *seen)
    late = [at for at, compiles in zip(run.iterations[1:], run.compiling[1:]) if compiles]
    told = f" (iterations {', '.join(map(str, late[:6]))})" if late else ""
    compiling_ms = run.compile_ms[0] if run.compile_ms else math.nan
    of_it = f" ({in_ms(compiling_ms)} of it compiling)" if compiling_ms > 0 else ""
    text = (
        f"first step {in_ms(run.first_step_ms)}{of_it}, ordinary ones {in_ms(run.steady_step_ms)}; "
        f"{len(late)} later steps compiled "
        f"something{told} and are left out"
    )
    return passed(Evidence(text, "steps.jsonl"), *seen)
