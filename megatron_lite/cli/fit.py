"""`megatron-lite fit` finds out whether a training script fits into a GPU that is not there."""

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_lite.cli.parser import Parser, write_json
from megatron_lite.cli.ranked_commands import ACCELERATE, TORCHRUN, find_script, read_command
from megatron_lite.errors import UserError
from megatron_lite.formats.fit_record import FitRecord
from megatron_lite.formats.hardware import Processor
from megatron_lite.live_line import LiveLine
from megatron_lite.planner.find_processors import find_processors
from megatron_lite.planner.fit_results import FitReport, GpuRoom, WalkedChange
from megatron_lite.planner.script_walks import Walker, refuse_other_makers
from megatron_lite.report.fit_terminal import fit_lines
from megatron_lite.report.text import get_style
from megatron_lite.terminal import print_lines

DEFAULT_GPU = "H100"
PROGRAM = "megatron-lite fit"
LAUNCHERS = (*TORCHRUN, *ACCELERATE)
DOES_NOT_FIT = 1  # exit code


def run(argv: list[str]) -> int:
    """Walk the command, print whether it fits.

    Returns:
        0; 1 where it does not fit into one of the GPUs.

    Raises:
        UserError: There is no command, or it cannot be walked.
    """
    options, command = _read_options(argv)
    processors = [] if options.cpu else _list_processors(options.gpu or [DEFAULT_GPU])
    command, ranks = _take_script(command)
    line = LiveLine()
    began = time.monotonic()
    line.draw(f"{' '.join(command)} ...")
    walker = Walker(tuple(command), processors[0] if processors else None, ranks)
    found = _walk(walker, options, line)
    seconds = time.monotonic() - began
    largest = None
    why_no_batch = ""
    changes: tuple[WalkedChange, ...] = ()
    if processors and not options.quick:
        largest, why_no_batch = found.walker.find_largest_batch(found.record, line.draw)
        changes = found.walker.walk_changes(found.record, line.draw)
        line.wipe()
    rooms = tuple(GpuRoom(processor, found.record.reserved_peak_bytes) for processor in processors)
    report = FitReport(
        " ".join(command), found.record, rooms, largest, why_no_batch, changes, seconds, ranks, found.peaks
    )
    written = write_json(options.json, msgspec.to_builtins(report))
    print_lines([*fit_lines(report, get_style(sys.stdout)), *written])
    return 0 if all(room.fits for room in rooms) else DOES_NOT_FIT


@dataclass(frozen=True)
class WalkedRank:
    """The walk of the rank that holds most.

    Attributes:
        walker: Walks that rank.
        record: What it holds.
        peaks: Bytes that each walked rank reserves; {}: there is one rank.
    """

    walker: Walker
    record: FitRecord
    peaks: dict[int, int]


def _walk(walker: Walker, options: argparse.Namespace, line: LiveLine) -> WalkedRank:
    """Walk the script, on each kind of rank where there are several. UserError where it cannot be walked."""
    quiet = not options.output
    walked: dict[int, FitRecord] = {}
    if walker.ranks > 1:
        walked = walker.walk_kinds_of_ranks(line.draw, quiet=quiet)
        walker = _choose_worst_rank(walker, walked)
        record = walked[walker.rank]
    if walker.ranks == 1 or options.snapshot:
        record = walker.walk(quiet=quiet, snapshot=options.snapshot or "")
    line.wipe()
    if record.failure:
        raise UserError(f"{PROGRAM}: {record.failure}")
    peaks = {rank: found.reserved_peak_bytes for rank, found in walked.items()}
    return WalkedRank(walker, record, peaks)


def _choose_worst_rank(walker: Walker, walked: dict[int, FitRecord]) -> Walker:
    """Choose the rank that holds most, or one that failed.

    Args:
        walker: Walks any rank.
        walked: What was found, by rank.
    """

    def compare(rank: int) -> tuple[bool, int]:
        record = walked[rank]
        return bool(record.failure), record.reserved_peak_bytes

    return dataclasses.replace(walker, rank=max(walked, key=compare))


def _take_script(command: list[str]) -> tuple[list[str], int]:
    """Replace a launcher by the command of a rank. Returns it and the number of ranks.

    UserError where the launcher does not say it.
    """
    if not any(Path(word).name in LAUNCHERS for word in command[: find_script(command)]):
        return command, 1
    launched = read_command(command, None, {}, PROGRAM)
    return [sys.executable, *launched.script], launched.ranks


def _list_processors(names: list[str]) -> list[Processor]:
    """List the GPUs that were named. UserError for those that are not NVIDIA's."""
    found = find_processors(names)
    for processor in found:
        refuse_other_makers(processor)
    return found


def _read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        "fit",
        "Runs a training script unchanged on a GPU that is not there, with tensors that have no data, until its "
        "optimizer has stepped twice. Reports whether it fits, what holds memory at the peak, the largest batch, and "
        "what one change would give.",
    )
    parser.usage = "megatron-lite fit [OPTIONS] [--] COMMAND ..."
    add = parser.add_argument
    add("--gpu", action="append", metavar="NAME", help=f"the script finds the first one named [{DEFAULT_GPU}]")
    add("--cpu", action="store_true", help="walk it as on the CPU instead")
    add("--quick", action="store_true", help="walk it once: neither other batches nor changes")
    add("--snapshot", metavar="FILE", help="write a memory snapshot for pytorch.org/memory_viz")
    add("--json", metavar="FILE", help="write the answer as JSON, too")
    add("--output", action="store_true", help="show what the script prints")
    return parser.split_command(argv)
