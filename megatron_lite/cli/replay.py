"""`megatron-lite replay` runs a step of a training again, and says what it went wrong by."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_lite.analysis.replay.attempts import ReplayInput
from megatron_lite.analysis.replay.conclude import conclude
from megatron_lite.cli.parser import Parser, write_json
from megatron_lite.cli.rank_processes import EndedRank, RunLimits, run_ranks
from megatron_lite.cli.replayed_run import (
    ReplayedRun,
    ReplayStart,
    find_other_bits,
    find_other_order,
    find_start,
    read_replayed_run,
)
from megatron_lite.errors import UserError
from megatron_lite.formats.replay_record import REPLAYED_RANK_FILE, REQUEST_FILE, RankRecord, ReplayRequest
from megatron_lite.formats.replay_report import ReplayCause
from megatron_lite.live_line import LiveLine
from megatron_lite.report.replay_terminal import replay_lines
from megatron_lite.report.text import get_style
from megatron_lite.terminal import print_lines
from megatron_lite.units import counted
from megatron_lite.variables import PACKAGE_FOLDER, THREADS, prepend_python_path

FOUND = 1  # exit code
REPLAY_TIMEOUT_S = 3600.0
RANK_MODULE = ("-m", "megatron_lite.replay.rank_process")
GPU_FOLDERS = "/proc/driver/nvidia/gpus"


def run(argv: list[str]) -> int:
    """Run the step again, print what was found.

    Returns:
        0 where nothing is wrong with it, else 1.

    Raises:
        UserError: The run cannot be read, or the step cannot be reached.
    """
    options = _read_options(argv)
    began = time.monotonic()
    replayed = read_replayed_run(Path(options.run), options.step)
    other_bits = _find_missing_gpus(replayed, options.force) or find_other_bits(replayed, options.step)
    with tempfile.TemporaryDirectory(prefix="megatron-lite-replay-") as name:
        folder = Path(options.keep or name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        start = find_start(replayed, options.step, getattr(options, "from"), folder / "run")
        records = _run_ranks(replayed, start, folder, options)
    report = conclude(_gather(replayed, start, records, options.step, other_bits))
    report = msgspec.structs.replace(report, seconds=time.monotonic() - began)
    written = write_json(options.json, msgspec.json.decode(msgspec.json.encode(report)))
    print_lines([*replay_lines(report, get_style(sys.stdout)), *written])
    return 0 if report.cause is ReplayCause.NOTHING else FOUND


def _gather(
    replayed: ReplayedRun, start: ReplayStart, records: Sequence[RankRecord], step: int, other_bits: str
) -> ReplayInput:
    """Gather what is known of the step."""
    changed = _describe_other_versions(replayed, records[0]) or other_bits
    ranks = counted(replayed.ranks, "rank")
    return ReplayInput(
        run=str(replayed.folder),
        step=step,
        logged=replayed.logged,
        records=records,
        started_from=start.described,
        load=start.load,
        other_bits=changed,
        other_order=find_other_order(replayed, start),
        notes=(f"{ranks} on {records[0].device} in {records[0].precision}",),
    )


def _run_ranks(
    replayed: ReplayedRun, start: ReplayStart, folder: Path, options: argparse.Namespace
) -> list[RankRecord]:
    """Have the ranks examine the step.

    Raises:
        UserError: One of them could not.
    """
    step: int = options.step
    request = ReplayRequest(step=step, logged=replayed.logged)
    for rank in range(replayed.ranks):
        # of an earlier replay that was kept here
        (folder / REPLAYED_RANK_FILE.format(rank)).unlink(missing_ok=True)
    (folder / REQUEST_FILE).write_bytes(msgspec.json.encode(request))
    environment = prepend_python_path({**os.environ, **replayed.record.environment}, PACKAGE_FOLDER)
    threads = replayed.plan.world.threads
    if threads:
        # sums are made in the same order
        environment[THREADS] = str(threads)
    if options.force and replayed.plan.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    line = LiveLine()
    line.draw(f"running step {step} of {replayed.folder} again, from {start.described} ...")
    try:
        script = (*RANK_MODULE, str(folder), *start.flags)
        ended = run_ranks(script, replayed.ranks, environment, RunLimits(step, options.timeout), options.output)
    finally:
        line.wipe()
    return read_answers(folder, ended)


def read_answers(folder: Path, ended: Sequence[EndedRank]) -> list[RankRecord]:
    """Read the answers of all ranks.

    Args:
        folder: Where they lie.
        ended: How the ranks ended.

    Raises:
        UserError: One of them has none, or says why it could not answer.
    """
    records: list[RankRecord] = []
    missing: list[int] = []
    for rank in range(len(ended)):
        path = folder / REPLAYED_RANK_FILE.format(rank)
        if not path.exists():
            missing.append(rank)
            continue
        record = msgspec.json.decode(path.read_bytes(), type=RankRecord)
        if record.failure:
            raise UserError(f"megatron-lite replay: {record.failure}")
        records.append(record)
    if missing:
        # one that ended by itself before those that were stopped for its sake
        rank = min(missing, key=lambda one: ended[one].code == -signal.SIGTERM)
        end = ended[rank]
        why = "was still running when the time was over" if end.code is None else f"ended with exit code {end.code}"
        raise UserError(f"megatron-lite replay: rank {rank} {why}: {end.last_line}; --output shows all it says.")
    return records


def _find_missing_gpus(replayed: ReplayedRun, is_forced: bool) -> str:
    """Find out why this machine cannot give the run's bits; "": nothing is known that stands against it.

    Raises:
        UserError: There is such a reason, and --force was not given.
    """
    here = len(os.listdir(GPU_FOLDERS)) if os.path.isdir(GPU_FOLDERS) else 0
    needed = replayed.ranks if replayed.plan.device == "cuda" else 0
    if needed <= here or replayed.plan.device is None:
        return ""
    why = f"the run had {counted(needed, 'GPU')}, and this machine has {here}"
    if not is_forced:
        raise UserError(
            f"megatron-lite replay {replayed.folder}: {why}, so that bits cannot be compared; --force runs it all "
            "the same."
        )
    return why


def _describe_other_versions(replayed: ReplayedRun, record: RankRecord) -> str:
    """Name the versions that are not the run's."""
    then = replayed.record.versions
    changed = [name for name, version in record.versions.items() if name in then and then[name] != version]
    parts = [f"{name} was {then[name]} and is {record.versions[name]}" for name in changed if name != "python"]
    return ", ".join(parts)


def _read_options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        "replay",
        "Runs a step of a training of this trainer again, bit for bit, from the last checkpoint before it. Says "
        "whether data, numerics, learning rate or the hardware made it go wrong, and how to go on. Writes nothing "
        "into the run.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's folder, with run.json and steps.jsonl")
    add("--step", type=int, required=True, metavar="N", help="the iteration to run again")
    add("--from", type=int, metavar="ITERATION", help="the checkpoint to begin with; 0: the start [the last before N]")
    add("--force", action="store_true", help="go on though this machine cannot give the run's bits")
    add(
        "--timeout",
        type=float,
        default=REPLAY_TIMEOUT_S,
        metavar="SECONDS",
        help=f"for all of it [{REPLAY_TIMEOUT_S:g}]",
    )
    add("--json", metavar="FILE", help="write the answer as JSON, too")
    add("--keep", metavar="FOLDER", help="keep what the ranks recorded in this folder")
    add("--output", action="store_true", help="show what the ranks print")
    options = parser.parse_args(argv)
    if options.step < 1:
        raise UserError(f"--step {options.step}: must be at least 1.")
    if options.timeout <= 0:
        raise UserError(f"--timeout {options.timeout:g}: must be positive.")
    return options
