"""Runs variants of a command for a few steps each, and has them recorded."""

import ctypes
import enum
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.setting import Setting
from megatron_lite.formats.tune_ledger import MeasuredRun, Settings
from megatron_lite.formats.watch_request import WatchRequest, encode_request
from megatron_lite.shared_files import read_foreign
from megatron_lite.tune.read_measured import read_findings, read_measured
from megatron_lite.tune.variant import TunedCommand, add_settings
from megatron_lite.variables import BOOTSTRAP, WATCH, prepend_python_path

RECORDED_STEPS = (6, 12)  # steps that are profiled of a recorded run, [first, end)
NO_STEPS = (10**8, 10**8 + 1)
PARENT_DEATH_SIGNAL = 1  # of prctl
LOOK_S = 0.2
LIMIT_S = 1800.0  # that a run may take
# that it may take however little is left of all: one that hangs is not to take all of it, one that is late may end
LEAST_LIMIT_S = 60.0
TIMES_AS_LONG = 3  # as the longest run that ended
SECONDS_TO_END_RUN = 10.0
OUTPUT_FILE = "output.txt"
MAX_SHOWN_OUTPUT_BYTES = 2**16  # that is read of its end
ERROR_WORDS = ("error:", "Error:", "Error ")
OF_LAUNCHER = "ChildFailedError"  # torchrun's own line, which says that a rank failed
OWN_FOLDERS = ("--save", "--tensorboard-dir")  # a short run writes nothing into the user's
# what a short run of the trainer does without
LEFT_OUT_FLAGS = (
    "--profile",
    "--use-pytorch-profiler",
    "--pytorch-profiler-collect-callstack",
    "--pytorch-profiler-collect-memory",
    "--record-memory-history",
    "--wandb-project",
    "--mlflow-experiment",
)


class RunEnd(enum.Enum):
    """Why a run is over."""

    BY_ITSELF = "its process ended"
    TRAINED = "it has trained its steps"
    OUT_OF_TIME = "it took too long"


class VariantRunner:
    """Runs variants of one command, each in a folder that is removed when it was read."""

    def __init__(
        self, command: TunedCommand, short: tuple[str, ...], steps: int, folder: Path, seconds: float | None = None
    ):
        """Take what all runs have in common.

        Args:
            command: as it was given.
            short: words behind it by which a script of others ends by itself.
            steps: of each run.
            folder: for what is recorded.
            seconds: that all runs may take, from now on; None for no limit.
        """
        self._command = command
        self._short = short
        self._steps = steps
        self._folder = folder
        self._runs = 0
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._longest_s = 0.0

    def run(self, wanted: MeasuredRun) -> MeasuredRun:
        """Run a variant, and read what it measured.

        Args:
            wanted: purpose, number, round and settings; the rest is filled in.

        Raises:
            UserError: the command cannot be started.
        """
        began = time.monotonic()
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir(parents=True)
        is_recorded = wanted.purpose == "record"
        try:
            failure = self._run_to_its_end(wanted.settings, is_recorded, folder)
            wall_s = time.monotonic() - began
            if failure:
                return msgspec.structs.replace(wanted, failure=failure, wall_s=wall_s)
            self._longest_s = max(self._longest_s, wall_s)
            measured = read_measured(folder / "run", wanted, wall_s)
            if not is_recorded or measured.failure:
                return measured
            findings = read_findings(folder / "run")
            return msgspec.structs.replace(measured, findings=findings, wall_s=time.monotonic() - began)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_to_its_end(self, settings: Settings, is_recorded: bool, folder: Path) -> str:
        """Run a variant until it has trained its steps. Returns why it failed, or ""."""
        words, environment = self._write(settings, is_recorded, folder)
        output = folder / OUTPUT_FILE
        limit_s = self._limit_run()
        with output.open("wb") as file:
            try:
                process = subprocess.Popen(
                    words,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # safe beside threads: a single system call, looked up before
                    preexec_fn=_make_ending_with_parent(),  # noqa: PLW1509
                )
            except OSError as error:
                why = f"cannot be run ({error.strerror}); check its name."
                raise UserError(f"megatron-lite tune: {words[0]} {why}") from None
        try:
            end = self._wait(process, folder / "run" / STEPS_FILE, limit_s)
        finally:
            _end_group(process)
        if end is RunEnd.OUT_OF_TIME:
            return f"it did not end within {limit_s:.0f} s"
        if end is RunEnd.TRAINED or process.returncode == 0:
            return ""
        return f"exit code {process.returncode}: {_read_error(output)}"

    def _write(self, settings: Settings, is_recorded: bool, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Write the words of a run, and its variables."""
        environment = dict(os.environ)
        for name, value in self._command.get_variables(settings).items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        if self._command.is_trainer:
            flags = add_settings(settings, self._list_trainer_settings(is_recorded, folder))
            return self._command.write_words(flags), environment
        request = WatchRequest(
            folder=str(folder / "run"),
            steps=RECORDED_STEPS if is_recorded else NO_STEPS,
            memory=False,
            command=list(self._command.words),
        )
        # short runs that are thrown away are not for the lists that people keep of their runs
        trackers = {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": (folder / "mlflow").absolute().as_uri()}
        environment = prepend_python_path(environment, BOOTSTRAP) | trackers | {WATCH: encode_request(request)}
        return [*self._command.write_words(settings), *self._short], environment

    def _list_trainer_settings(self, is_recorded: bool, folder: Path) -> Settings:
        """List the flags by which the trainer runs for a few steps, and writes nothing into the user's folders."""
        values: dict[str, str | None] = {
            name: None for name in LEFT_OUT_FLAGS if self._command.get("flag", name) is not None
        }
        for name in OWN_FOLDERS:
            if self._command.get("flag", name) is not None:
                values[name] = str(folder / name.strip("-"))
        values |= {"--run-dir": str(folder / "run"), "--exit-interval": str(self._steps), "--no-report": ""}
        if is_recorded:
            first, end = RECORDED_STEPS
            values |= {"--use-pytorch-profiler": "", "--pytorch-profiler-collect-shapes": ""}
            values |= {"--profile-step-start": str(first), "--profile-step-end": str(end)}
        return tuple(Setting(kind="flag", name=name, value=value) for name, value in values.items())

    def _limit_run(self) -> float:
        """The seconds that a run may take: what is left of all, but at least a few times as long as others took."""
        left_s = self._end - time.monotonic()
        usual_s = max(LEAST_LIMIT_S, TIMES_AS_LONG * self._longest_s)
        return min(LIMIT_S, max(left_s, usual_s))

    def _wait(self, process: "subprocess.Popen[bytes]", steps_file: Path, limit_s: float) -> RunEnd:
        """Wait until the process ends, or has trained its steps where nothing else ends it.

        Args:
            process: the run.
            steps_file: its record, by a line per step.
            limit_s: seconds that it may take.
        """
        ends_by_itself = self._command.is_trainer or bool(self._short)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                process.wait(LOOK_S)
                return RunEnd.BY_ITSELF
            except subprocess.TimeoutExpired:
                if not ends_by_itself and _count_lines(steps_file) >= self._steps:
                    return RunEnd.TRAINED
        return RunEnd.OUT_OF_TIME


def _make_ending_with_parent() -> Callable[[], None] | None:
    """Make a function by which a new process ends when its parent is killed and can end nothing; None but on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    # looked up here: between fork and exec no library is to be searched
    prctl = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        prctl(PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)

    return end_with_parent


def _count_lines(path: Path) -> int:
    """Count the lines of a file; 0 where there is none."""
    try:
        return read_foreign(path).count(b"\n")
    except OSError:
        return 0


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(SECONDS_TO_END_RUN)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _read_error(output: Path) -> str:
    """Read the line of a process' output that says why it ended."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - MAX_SHOWN_OUTPUT_BYTES))
        text = file.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if any(word in line for word in ERROR_WORDS)]
    errors = [line for line in named if OF_LAUNCHER not in line]
    return (errors or lines or ["it said nothing"])[-1]
