"""Starts a process that has torch, in which the real model and step of a plan are walked without data.

What it walks with stands in planner/walk.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

from megatron_lite.config.plan import Plan, list_stage_kinds
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.formats.hardware import Processor, cublas_workspace_bytes
from megatron_lite.live_line import LiveLine
from megatron_lite.planner.plan_results import Exact

MODULE = "megatron_lite.rehearsal"
WALKS_AT_ONCE = 2
SNAPSHOT = "stage_{}/predicted.pickle"


def walk_step(
    plan: Plan, flags: Sequence[str], snapshot: Path, processor: Processor | None = None, limit_s: float | None = None
) -> Exact:
    """Figures of the walk of one rank's step.

    Args:
        plan: Of the rank.
        flags: Of the trainer; the plan is what they lead to.
        snapshot: Where the walk writes its snapshot.
        processor: The GPU, whose cuBLAS takes more on newer ones; None: an older one.
        limit_s: Seconds after which the walk is given up; None: never.

    Raises UserError where torch is missing, the flags do not work, or the walk takes longer than `limit_s`.
    """
    request = {
        "flags": list(flags),
        "world": asdict(plan.world),
        "vocab_size": plan.vocab_size,
        "snapshot": str(snapshot),
        "workspace": cublas_workspace_bytes(processor, plan.args.training.deterministic_mode),
    }
    started = time.monotonic()
    line = LiveLine()
    line.draw("walking the real model and step, without data")
    try:
        walk = subprocess.run(
            [sys.executable, "-m", MODULE],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"the walk of the real step takes more than {limit_s:g} s; --exact waits for it.") from None
    finally:
        line.wipe()
    return _read_figures(walk, time.monotonic() - started)


def _read_figures(walk: subprocess.CompletedProcess[str], seconds: float) -> Exact:
    """Read what a walk printed. ConfigError with its lines for mistakes of the user, UserError for a failure."""
    lines = walk.stderr.strip().splitlines()
    if walk.returncode == UserError.exit_code and lines:
        raise ConfigError(lines)
    if walk.returncode:
        why = lines[-1] if lines else f"exit code {walk.returncode}"
        raise UserError(f"--exact: the walk failed ({why}); leave it out.")
    figures = json.loads(walk.stdout.splitlines()[-1])
    known = {field.name: figures[field.name] for field in fields(Exact) if field.name in figures}
    return Exact(seconds=seconds, **known)


def walk_stages(plan: Plan, flags: Sequence[str], folder: Path, processor: Processor | None) -> dict[int, Exact]:
    """Figures of one rank of each kind of stage, by the stage's number, which the snapshot in `folder` bears, too.

    Args:
        plan: Of any rank.
        flags: Of the trainer; the plan is what they lead to.
        folder: Where snapshots are written.
        processor: The GPU; None: an older one.
    """
    plans = [one for one, _ in list_stage_kinds(plan)] if plan.layout.pipeline > 1 else [plan]

    def walk(one: Plan) -> Exact:
        path = folder / SNAPSHOT.format(one.stage.number)
        path.parent.mkdir()
        return walk_step(one, flags, path, processor)

    if len(plans) == 1:
        return {plans[0].stage.number: walk(plans[0])}
    with ThreadPoolExecutor(WALKS_AT_ONCE) as pool:
        return {one.stage.number: exact for one, exact in zip(plans, pool.map(walk, plans))}
