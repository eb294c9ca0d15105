"""`megatron-lite watch` times and profiles any training script of PyTorch, unchanged, and then explains it."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_lite.cli.parser import Parser
from megatron_lite.cli.rank_watch import MIN_STANDSTILL_S, RankWatch
from megatron_lite.errors import UserError
from megatron_lite.formats.failure_record import RankAtFailure
from megatron_lite.formats.file_names import FLIGHT_RECORDINGS, RUN_FILE
from megatron_lite.formats.watch_request import WatchRequest, encode_request
from megatron_lite.last_words import remove_recordings
from megatron_lite.process_folder import release_process_folder
from megatron_lite.terminal import print_lines
from megatron_lite.variables import BOOTSTRAP, WATCH, prepend_python_path

# variables of torch 2.11 and newer, with their names of before
RECORDING = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): f"{{folder}}/{FLIGHT_RECORDINGS}",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
}
SECONDS_TO_END = 45.0  # for a command that was asked to; torchrun leaves its ranks 30
SECONDS_BETWEEN_RANK_LOOKS = 0.5
SIGNALED = 128  # plus the signal's number: exit codes, as shells give them


def run(argv: list[str]) -> int:
    """Run the command, print the report on it. Returns the command's exit code."""
    options, command, steps = _read_options(argv)
    folder = Path(options.run_dir or f"watched/{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    written_before = _read_time_of_record(folder)
    # of a run before
    release_process_folder(folder)
    request = WatchRequest(folder=str(folder), steps=steps, memory=options.memory, command=command)
    # who gives a shorter time to end it says that such a standstill matters
    standstill_s = min(MIN_STANDSTILL_S, options.hang_timeout or MIN_STANDSTILL_S)
    ranks = RankWatch(folder, lambda standing: _tell_standstill(folder, standing), standstill_s)
    remove_recordings(folder, ranks.read_ranks())
    environment = prepend_python_path(os.environ, BOOTSTRAP) | _choose_recording(os.environ, folder)
    code = _run_to_its_end(command, environment | {WATCH: encode_request(request)}, ranks, options.hang_timeout)
    told = ranks.read_ranks()
    has_trained = _read_time_of_record(folder) not in (None, written_before)
    has_failed = _is_failure(code, ranks.stands, told.values())
    if not has_failed:
        remove_recordings(folder, told)
    if has_failed and told:
        # whom ranks waited for in their last steps is no matter of speed
        _explain_failure(folder, options.no_report, has_trained)
    elif not has_trained:
        _tell_unseen()
    elif not options.no_report:
        from megatron_lite.cli.report import run as report

        print_lines([""])
        report([str(folder)])
    return code


def _read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str], tuple[int, int]]:
    """Read the command line of watch.

    Returns:
        The options, the command, and the first step to profile with the first one behind.

    Raises:
        UserError: An option's value is none that it can have.
    """
    parser = Parser(
        "watch",
        "Runs a training script unchanged: python train.py, torchrun, accelerate launch. Works with any loop that "
        "calls backward() and a torch.optim optimizer's step(). Times the phases of every step, profiles some steps "
        "on all ranks, and reports why they take so long.",
    )
    parser.usage = "megatron-lite watch [OPTIONS] [--] COMMAND ..."
    add = parser.add_argument
    add(
        "--steps",
        default="10:16",
        metavar="A:B",
        help="profile steps A to B-1, counted from 1 [10:16]",
    )
    add("--memory", action="store_true", help="also record a memory snapshot of these steps")
    add("--run-dir", metavar="FOLDER", help="folder of the recording [watched/TIME]")
    add("--no-report", action="store_true", help="record only, without a report")
    add(
        "--hang-timeout",
        type=float,
        metavar="SECONDS",
        help="end the command when all its ranks stand still for so long, and say why [never]",
    )
    options, command = parser.split_command(argv)
    bounds = re.fullmatch(r"(\d{1,9}):(\d{1,9})", options.steps)
    if bounds is None or not 1 < int(bounds[1]) < int(bounds[2]):
        raise UserError(f"--steps {options.steps}: give two numbers, as in 10:16; the first is at least 2.")
    if options.hang_timeout is not None and not options.hang_timeout > 0:
        raise UserError(f"--hang-timeout {options.hang_timeout}: give seconds, more than 0.")
    return options, command, (int(bounds[1]), int(bounds[2]))


def _tell_unseen() -> None:
    """Say that no process of the command trained, and where watch cannot see."""
    unseen = "it cannot see scripts started with python -I, -E or -S, or that overwrite PYTHONPATH."
    lines = [
        "watch: no training was seen: no process of the command called backward().",
        f"  watch works through PYTHONPATH: {unseen}",
    ]
    print_lines(lines, sys.stderr)


def _read_time_of_record(folder: Path) -> int | None:
    """When the record of a run was written last, in ns since 1970; None without a record."""
    record = folder / RUN_FILE
    return record.stat().st_mtime_ns if record.exists() else None


def _choose_recording(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Choose variables by which torch's flight recorder is on, except those that the user has set.

    Args:
        environ: What the user has set.
        folder: Folder of the recording.
    """
    chosen = {}
    for names, value in RECORDING.items():
        # torch takes the second name, too, with a warning, and prefers the first
        if not any(name in environ for name in names):
            chosen[names[0]] = value.format(folder=folder)
    return chosen


def _advise(program: str) -> str:
    """Advise on a command that cannot be run: a script needs the program that reads it."""
    python = "python" if shutil.which("python") else "python3"
    interpreter = {".py": python, ".sh": "bash"}.get(Path(program).suffix)
    if interpreter is None:
        return "check its name"
    if not Path(program).is_file():
        return "there is no such script; check its path"
    return f"megatron-lite watch -- {interpreter} {program} runs and watches it"


def _is_failure(code: int, has_hung: bool, ranks: Iterable[RankAtFailure]) -> bool:
    """Whether the command did not end as it should.

    Args:
        code: Exit code of the command.
        has_hung: Whether all ranks stood still when it ended.
        ranks: Last words of the ranks.
    """
    if code == SIGNALED + signal.SIGINT:
        # who interrupts a run that goes on knows why it ends
        return has_hung
    return code != 0 or any(words.rank is not None and (words.exit_code or words.error) for words in ranks)


def _tell_standstill(folder: Path, ranks: dict[str, RankAtFailure]) -> None:
    """Say once that the command hangs, while it does.

    Args:
        folder: Folder of the recording.
        ranks: Last words of the ranks, by name.
    """
    # who has entered the fewest collectives is who the others wait for, if they wait for one
    name = min(ranks, key=lambda name: ranks[name].begun)
    words = ranks[name]
    place = f"in phase {words.phase}" if words.phase else "between phases"
    line = (
        f"watch: all ranks stand still; rank {name} stands in step {words.step}, {place}, since {words.still_s:.0f} s; "
        f"stacks and flight recordings are in {folder}; megatron-lite postmortem {folder} explains."
    )
    print_lines([line], sys.stderr)


def _explain_failure(folder: Path, is_brief: bool, has_trained: bool) -> None:
    """Print why the command failed or hung.

    Args:
        folder: Folder of the recording.
        is_brief: Only name what explains it.
        has_trained: Name what shows its steps, too.
    """
    if is_brief:
        print_lines([f"watch: the command failed; megatron-lite postmortem {folder} explains."], sys.stderr)
        return
    from megatron_lite.cli.postmortem import run as explain

    print_lines([""])
    try:
        explain([str(folder)])
    except UserError as error:
        print_lines([f"watch: {error}"], sys.stderr)
    if has_trained:
        print_lines(["", f"megatron-lite report {folder} shows where its steps went."])


def _end_hung_command(process: "subprocess.Popen[bytes]", ranks: RankWatch) -> int:
    """End a command whose ranks stand still, and return its exit code.

    Args:
        process: The command.
        ranks: Ranks of the command, which may outlive it.
    """
    process.terminate()
    try:
        code = process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    ranks.end_all()
    return code


def _run_to_its_end(
    command: list[str], environment: dict[str, str], ranks: RankWatch, hang_timeout_s: float | None
) -> int:
    """Run the command and return its exit code. Ctrl-C reaches the command, whose end is waited for.

    Args:
        command: Words of the command.
        environment: Variables of the command.
        ranks: Looks at its ranks meanwhile.
        hang_timeout_s: Seconds for which all ranks may stand still, at most; None for no limit.
    """
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        why = f"cannot be run ({error.strerror}); {_advise(command[0])}."
        raise UserError(f"megatron-lite watch: {command[0]} {why}") from None
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ranks:
            code = _wait(process, ranks, hang_timeout_s)
    finally:
        signal.signal(signal.SIGINT, kept)
    return code if code >= 0 else SIGNALED - code


def _wait(process: "subprocess.Popen[bytes]", ranks: RankWatch, hang_timeout_s: float | None) -> int:
    """Wait for the command's end, and return its exit code. The arguments are those of `_run_to_its_end`."""
    if hang_timeout_s is None:
        return process.wait()
    while True:
        try:
            return process.wait(SECONDS_BETWEEN_RANK_LOOKS)
        except subprocess.TimeoutExpired:
            if ranks.stands and ranks.stands_s >= hang_timeout_s:
                line = f"watch: all ranks stand still for {ranks.stands_s:.0f} s (--hang-timeout): ending the command."
                print_lines([line], sys.stderr)
                return _end_hung_command(process, ranks)
