"""plan --exact, and the check of an estimate: a process that has torch walks the real model and step without data."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_lite.cli.planned_run import PlannedRun
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.estimate.hardware import Processor, cublas_workspace_bytes
from megatron_lite.live_line import LiveLine
from megatron_lite.report.plan_figures import Exact, PlanReport
from megatron_lite.report.plan_terminal import verdicts
from megatron_lite.units import size

MODULE = "megatron_lite.rehearsal.rehearse"
MAX_UNASKED_S = 10  # of a walk that nobody asked for


def exact(run: PlannedRun, snapshot: Path, processor: Processor | None = None, limit_s: float | None = None) -> Exact:
    """Figures of the walk, whose snapshot is then at `snapshot`.

    Raises UserError where torch is missing, the flags do not work, or the walk takes longer than `limit_s`.
    """
    deterministic = run.plan.args.training.deterministic_mode
    request = {
        "flags": list(run.flags), "world": dataclasses.asdict(run.plan.world), "vocab_size": run.plan.vocab_size,
        "snapshot": str(snapshot), "workspace": cublas_workspace_bytes(processor, deterministic),
    }  # fmt: skip
    started, line, command = time.monotonic(), LiveLine(), [sys.executable, "-m", MODULE]
    line.draw("walking the real model and step, without data")
    try:
        asked = json.dumps(request)
        walk = subprocess.run(command, input=asked, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise UserError(f"the walk of the real step takes more than {limit_s:g} s; --exact waits for it.") from None
    finally:
        line.wipe()
    lines = walk.stderr.strip().splitlines()
    if walk.returncode == UserError.exit_code and lines:
        raise ConfigError(lines)
    if walk.returncode:
        why = lines[-1] if lines else f"exit code {walk.returncode}"
        raise UserError(f"--exact: the walk failed ({why}); leave it out.")
    figures = json.loads(walk.stdout.splitlines()[-1])
    known = {field.name: figures[field.name] for field in dataclasses.fields(Exact) if field.name in figures}
    return Exact(seconds=time.monotonic() - started, **known)


def can_walk_unasked(stream) -> bool:
    """Whether somebody looks on, and torch is installed. Nothing is imported."""
    return stream.isatty() and importlib.util.find_spec("torch") is not None


def check_lines(run: PlannedRun, report: PlanReport) -> list[str]:
    """What the walk of the real step says of an estimate that was printed already: its peak, and verdicts that change with it."""
    processor = report.outlooks[0].processor if report.outlooks else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = exact(run, Path(folder) / "predicted.pickle", processor, MAX_UNASKED_S)
        except UserError as error:
            return ["", *(f"  not checked: {line}" for line in error.lines)]
    off = report.memory.peak.num_bytes / found.allocated_peak_bytes - 1
    walked = dataclasses.replace(report, exact=found)
    pairs = zip(verdicts(report), verdicts(walked))
    changed = [new for old, new in pairs if old.partition(":")[0] != new.partition(":")[0]]  # 'fits in one H200'
    peak = f"exact peak {size(found.allocated_peak_bytes)} in {found.phase}, the estimate is {off:+.1%} off"
    how = f"the real model and step, walked without data in {found.seconds:.1f} s; --exact shows it"
    return ["", f"  {peak}", f"    ({how})", *(f"  {line}" for line in changed)]
