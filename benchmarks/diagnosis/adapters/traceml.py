"""TraceML: its diagnoses as claims.

TraceML reads no traces: it observes a run. Of the answer key it can only be given the programs, which `traceml run` starts with steps
marked as its documentation says; all else is not read. The primary diagnosis comes first, then the sections' in the order of the
summary, each kind once:

- INPUT_BOUND is "slow-loader"; INPUT_STRAGGLER, COMPUTE_STRAGGLER, H2D_STRAGGLER and STRAGGLER are "straggler", with the rank.
- H2D_BOUND is "host-device-copies". RESIDUAL_HEAVY is any of what its advice lists: "host-work", "save-or-evaluate",
  "compile-or-capture".
- COMPUTE_BOUND, which TraceML calls informational, is family "compute" of low confidence.
- CREEP_EARLY and CREEP_CONFIRMED are "memory-growth"; HIGH_CPU and HIGH_PROCESS_CPU are "cores".

Severity "crit" is a claim of high confidence, "warn" and "info" are of low. All else that it says is no cause.
"""

import json
import subprocess
from pathlib import Path

from benchmarks.diagnosis.claims import HIGH, LOW, Claim, NotReadError
from benchmarks.diagnosis.make import HERE_PROGRAMS, start
from benchmarks.diagnosis.manifest import Run

STEPS = 26
SECTIONS = ("step_time", "step_memory", "process", "system")
MEANINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "INPUT_BOUND": (("slow-loader",), ()),
    "INPUT_STRAGGLER": (("straggler",), ()),
    "COMPUTE_STRAGGLER": (("straggler",), ()),
    "H2D_STRAGGLER": (("straggler",), ()),
    "STRAGGLER": (("straggler",), ()),
    "H2D_BOUND": (("host-device-copies",), ()),
    "RESIDUAL_HEAVY": (("host-work", "save-or-evaluate", "compile-or-capture"), ()),
    "COMPUTE_BOUND": ((), ("compute",)),
    "CREEP_EARLY": (("memory-growth",), ()),
    "CREEP_CONFIRMED": (("memory-growth",), ()),
    "HIGH_CPU": (("cores",), ()),
    "HIGH_PROCESS_CPU": (("cores",), ()),
}


def collect(run: Run, out: Path, python: str) -> None:
    """Run a program under TraceML.

    Args:
        run: Of the answer key.
        out: Where its summary goes.
        python: The interpreter of an environment that has TraceML and torch.

    Raises:
        NotReadError: It is no program, or TraceML failed.
    """
    if run.kind != "program":
        raise NotReadError("TraceML reads no traces")
    logs = out.parent / "logs"
    launcher = [str(Path(python).with_name("traceml")), "run", str(HERE_PROGRAMS), "--mode", "summary"]
    launcher += ["--logs-dir", str(logs), "--run-name", run.name, "--nproc-per-node", str(run.ranks)]
    try:
        start(run, [*launcher, "--args", run.recipe, "--traceml", "--steps", str(STEPS)])
        summary = next(logs.glob(f"{run.name}/**/final_summary.json"))
    except (RuntimeError, StopIteration, subprocess.TimeoutExpired) as error:
        raise NotReadError(f"{type(error).__name__}: {error}"[-500:]) from error
    out.write_text(summary.read_text())


def read_claims(summary: dict) -> list[Claim]:
    """Read TraceML's summary.

    Args:
        summary: final_summary.json.

    Raises:
        NotReadError: It had too few steps.
    """
    sections = summary.get("sections", summary)
    said = [summary.get("primary_diagnosis") or {}]
    for name in SECTIONS:
        section = sections.get(name) or {}
        said += [section.get("diagnosis") or {}, *(section.get("issues") or [])]
    if said[0].get("kind") == "INSUFFICIENT_STEP_TIME_DATA":
        raise NotReadError(said[0].get("summary", "too few steps"))
    claims = []
    seen = set()
    for one in said:
        kind = one.get("kind", "")
        if kind not in MEANINGS or kind in seen:
            continue
        seen.add(kind)
        classes, families = MEANINGS[kind]
        confidence = HIGH if one.get("severity") == "crit" else LOW
        text = f"{kind} ({one.get('severity')})"
        culprit = find_rank(said, kind) if "STRAGGLER" in kind else ""
        claims.append(Claim(classes, families, culprit, confidence, text))
    return claims


def find_rank(said: list[dict], kind: str) -> str:
    """Find the rank that a straggler's diagnosis or issue names."""
    for one in said:
        evidence = one.get("evidence") or {}
        ranks = one.get("ranks") or []
        culprit = evidence.get("culprit_rank", ranks[0] if ranks else None)
        if one.get("kind") == kind and culprit is not None:
            return f"rank {culprit}"
    return ""


def read_summary(path: Path) -> dict:
    return json.loads(path.read_text())
