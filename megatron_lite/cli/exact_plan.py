"""plan --exact: the real model and step, walked without data by a process that has torch; its snapshot is read back."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

from megatron_lite.cli.planned_run import PlannedRun
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.estimate.hardware import Processor, cublas_workspace_bytes
from megatron_lite.live_line import LiveLine
from megatron_lite.report.plan_figures import Exact

MODULE = "megatron_lite.rehearsal.rehearse"


def exact(run: PlannedRun, snapshot: Path, processor: Processor | None = None) -> Exact:
    """Figures of the walk, whose snapshot is then at `snapshot`. UserError where torch is not there or the flags do not work."""
    request = {
        "flags": list(run.flags), "world": dataclasses.asdict(run.plan.world), "vocab_size": run.plan.vocab_size,
        "snapshot": str(snapshot), "workspace": cublas_workspace_bytes(processor, run.plan.args.training.deterministic_mode),
    }  # fmt: skip
    started, line = time.monotonic(), LiveLine()
    line.draw("walking the real model and step, without data")
    try:
        walk = subprocess.run(
            [sys.executable, "-m", MODULE], input=json.dumps(request), capture_output=True, text=True, check=False
        )
    finally:
        line.wipe()
    lines = walk.stderr.strip().splitlines()
    if walk.returncode == UserError.exit_code and lines:
        raise ConfigError(lines)
    if walk.returncode:
        raise UserError(
            f"--exact: the walk failed ({lines[-1] if lines else f'exit code {walk.returncode}'}); leave it out."
        )
    figures = json.loads(walk.stdout.splitlines()[-1])
    known = {field.name for field in dataclasses.fields(Exact)}
    return Exact(
        seconds=time.monotonic() - started, **{name: value for name, value in figures.items() if name in known}
    )


def snapshot_lines(snapshot: Path, style, everything: bool) -> list[str]:
    """The memory section of the report on it: modules, source lines, layers, fragmentation."""
    from megatron_lite.analysis.analyze import analyze
    from megatron_lite.report.section_text import section_lines
    from megatron_lite.report.sections.memory import memory_section

    section = memory_section(analyze([snapshot]), everything)
    return ["", *section_lines(section, style)] if section else []
