"""A profiled run ends with its report, made by another process that can neither fail it nor hold it up."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron_lite.config.plan import Plan
from megatron_lite.live_line import EVERY_RANK
from megatron_lite.variables import PACKAGE_FOLDER, prepend_python_path

logger = logging.getLogger(__name__)

MAX_REPORT_SECONDS = 60
REPORT = ("-m", "megatron_lite.cli.main", "report")


def wants_report(plan: Plan, traced_on_demand: bool = False) -> bool:
    """Tell whether something was recorded that the report can read. Files of Nsight Systems are complete after the run
    only."""
    profile = plan.args.profile
    planned = plan.profile_window and (profile.use_pytorch_profiler or profile.record_memory_history)
    return bool(profile.report and (planned or traced_on_demand))


def end_with_report(run_dir: Path, seconds: float = MAX_REPORT_SECONDS) -> bool:
    """Print what `megatron-lite report` finds in a run's folder, and leave report.html there.

    Args:
        run_dir: The run's folder.
        seconds: How long that may take.

    Returns:
        False if it cannot, which one line says.
    """
    again = f"megatron-lite report {run_dir}"
    encoding = sys.stdout.encoding or "utf-8"
    try:
        process = subprocess.Popen(
            [sys.executable, *REPORT, str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=prepend_python_path(os.environ, PACKAGE_FOLDER) | {"PYTHONIOENCODING": encoding},
            start_new_session=True,  # so that the limit ends what it started, too
            text=True,
            encoding=encoding,
            errors="replace",
        )
    except OSError as error:
        logger.info(f"  no report: another process cannot be started ({error}); {again} makes it", extra=EVERY_RANK)
        return False
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        logger.info(f"  no report within {seconds:g} s; {again} makes it", extra=EVERY_RANK)
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1].removeprefix("error: ")
    done = process.returncode == 0
    logger.info(f"\n{out.rstrip()}" if done else f"  no report: {last}; {again} tries again", extra=EVERY_RANK)
    return done
