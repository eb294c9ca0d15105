"""`megatron-lite prove` finds out whether a parallel training script computes what one rank computes."""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_lite.analysis.equality.compare import compare, compare_with_own_sum
from megatron_lite.analysis.equality.fed_tensors import write_fed_tensors
from megatron_lite.analysis.equality.proved_run import ProvedRun, read_run
from megatron_lite.analysis.equality.same_data import FeedDecision, decide_feed
from megatron_lite.analysis.equality.wholes import write_weights
from megatron_lite.cli.own_layouts import give_to_one_rank, is_own, read_layout, share_vocabulary
from megatron_lite.cli.parser import END, Parser, write_json
from megatron_lite.cli.planned_run import split_options
from megatron_lite.cli.rank_processes import TIMEOUT_S, RunLimits
from megatron_lite.cli.ranked_commands import RankedCommand, read_command
from megatron_lite.cli.recorded_runs import record_run
from megatron_lite.errors import UserError
from megatron_lite.formats.prove_record import FED_FILE, WEIGHTS_FILE, Feed
from megatron_lite.formats.prove_report import NOTHING_COMPARED, ProofReport
from megatron_lite.live_line import LiveLine
from megatron_lite.report.proof_terminal import proof_lines
from megatron_lite.report.text import get_style
from megatron_lite.terminal import print_lines

NOT_EQUAL = 1  # exit code
NOT_COMPARED = 2  # exit code
MIN_STEPS_PROVED = 2  # the first one's update is seen in the second
LAST_PLACE = 1.0  # by how many units of their last place weights are changed, to see what rounding does
AGAINST = "--against 'torchrun --nproc-per-node 1 train.py FLAGS'"


@dataclass(frozen=True)
class Commands:
    """A command and the one that it is laid beside.

    Attributes:
        proved: The parallel command.
        reference: The one that it is to be equal to.
        title: The proved command, for the answer.
        reference_title: The reference, likewise.
        was_given: Whether the user gave the reference.
    """

    proved: RankedCommand
    reference: RankedCommand
    title: str
    reference_title: str
    was_given: bool


@dataclass
class Recordings:
    """Runs of commands that are recorded, each in a folder of its own.

    Attributes:
        folder: Of all of them.
        limits: How far each goes.
        show: Show what the scripts print.
    """

    folder: Path
    limits: RunLimits
    show: bool
    line: LiveLine = field(default_factory=LiveLine)

    def record(
        self, command: RankedCommand, name: str, feed: Feed | None = None, perturbation: float = 0.0
    ) -> ProvedRun:
        """Record a run.

        Args:
            command: The script.
            name: Name of its folder.
            feed: What it takes of another run; None: nothing.
            perturbation: How much its weights are changed, in units of their last place.

        Raises:
            UserError: A rank ended without a record.
        """
        self.line.draw(f"{name}: {command}, {self.limits.steps} steps ...")
        folder = self.folder / name
        try:
            record_run(command, folder, self.limits, feed or Feed(), perturbation, self.show)
        finally:
            self.line.wipe()
        return read_run(folder)


def run(argv: list[str]) -> int:
    """Run both, print whether they compute the same.

    Returns:
        0; 1 where they differ by more than rounding; 2 where nothing could be compared.

    Raises:
        UserError: A command cannot be read, or did not train.
    """
    options, words = _read_options(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(options.keep or name).absolute()
        commands = _read_commands(options, words, folder)
        limits = RunLimits(options.steps, options.timeout)
        report = _prove(commands, Recordings(folder, limits, options.output))
    report = msgspec.structs.replace(report, seconds=time.monotonic() - began)
    written = write_json(options.json, msgspec.json.decode(msgspec.json.encode(report)))
    print_lines([*proof_lines(report, get_style(sys.stdout)), *written])
    if report.differences:
        return NOT_EQUAL
    return NOT_COMPARED if report.coverage == NOTHING_COMPARED else 0


def _prove(commands: Commands, recordings: Recordings) -> ProofReport:
    """Record what is needed, and compare it."""
    proved = recordings.record(commands.proved, "proved")
    try:
        alone = recordings.record(commands.reference, "reference")
    except UserError as error:
        if commands.was_given:
            raise
        return _prove_alone(commands, proved, f"one rank did not train: {' '.join(error.lines)}")
    decision = decide_feed(proved, alone)
    if decision.other_shape is not None:
        return ProofReport(
            command=commands.title,
            reference=commands.reference_title,
            ranks=commands.proved.ranks,
            reference_ranks=commands.reference.ranks,
            differences=(decision.other_shape,),
            not_compared=("losses, gradients and updates, as weights have other shapes",),
            coverage=NOTHING_COMPARED,
        )
    if decision.reason:
        return _prove_alone(commands, proved, f"the reference cannot take the same samples: {decision.reason}")
    feed = _make_feed(decision, proved, recordings.folder)
    reference = alone
    if feed != Feed():
        try:
            reference = recordings.record(commands.reference, "fed", feed)
        except UserError as error:
            why = f"the reference cannot take the same samples: {' '.join(error.lines)}"
            return _prove_alone(commands, proved, why)
    rounded = recordings.record(commands.reference, "rounding", feed, LAST_PLACE)
    return compare(
        proved,
        reference,
        rounded,
        probe=alone,
        start=decision.weights or None,
        command=commands.title,
        reference_command=commands.reference_title,
    )


def _prove_alone(commands: Commands, proved: ProvedRun, why: str) -> ProofReport:
    """Compare gradients with the mean of what the ranks computed, where no reference can be run."""
    report = compare_with_own_sum(proved, commands.title)
    if report.coverage == NOTHING_COMPARED:
        raise UserError(f"megatron-lite prove: {why}; give the command that it is to be equal to: {AGAINST}.")
    return msgspec.structs.replace(report, not_compared=(why, *report.not_compared))


def _make_feed(decision: FeedDecision, proved: ProvedRun, folder: Path) -> Feed:
    """Write the files that a reference takes weights and samples from."""
    weights = ""
    tensors = ""
    if decision.weights:
        weights = str(folder / WEIGHTS_FILE)
        write_weights(decision.weights, Path(weights))
    if decision.tensors:
        tensors = str(folder / FED_FILE)
        write_fed_tensors(proved, decision.tensors, Path(tensors))
    return Feed(weights=weights, indices=decision.indices, tensors=tensors)


def _read_commands(options: argparse.Namespace, words: list[str], folder: Path) -> Commands:
    """Read the command, and the one that it is laid beside."""
    against = shlex.split(options.against) if options.against else []
    if is_own(words):
        return _read_own_commands(options, words, against, folder)
    environment = _choose_environment(options.cpu)
    proved = read_command(words, options.ranks, environment)
    reference = read_command(against, None, environment) if against else proved.on(1)
    _check_ranks(proved, bool(against))
    return Commands(proved, reference, str(proved), str(reference), bool(against))


def _read_own_commands(options: argparse.Namespace, words: list[str], against: list[str], folder: Path) -> Commands:
    layout = read_layout(words, options.ranks, options.steps, folder / "proved", options.cpu)
    _check_ranks(layout.command, bool(against))
    if against:
        other = read_layout(against, None, options.steps, folder / "reference", options.cpu)
        layout, other = share_vocabulary((layout, other))
    else:
        other = give_to_one_rank(layout, folder / "reference")
    title = f"{layout.command.ranks} ranks: {layout.described}"
    return Commands(layout.command, other.command, title, other.described, bool(against))


def _check_ranks(proved: RankedCommand, was_given: bool) -> None:
    if proved.ranks == 1 and not was_given:
        raise UserError("megatron-lite prove: one rank alone; give --ranks N, or --against another command.")


def _choose_environment(on_cpu: bool) -> Mapping[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}


def _split(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into options and command. Options may stand behind the trainer's flags, too, whose names are
    known; those of a script of others are its own."""
    if END not in argv:
        options, command = split_options(parser, argv)
        if command and is_own(command):
            return options, command
    return parser.split_command(argv)


def _read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        "prove",
        "Runs a parallel training script for a few steps, and the same script on one rank, from the same weights and "
        "on the same samples. Compares losses, the gradient of every parameter and what every module returns, and "
        "names the first module that differs by more than rounding, and the kind of error.",
    )
    parser.usage = "megatron-lite prove [OPTIONS] [--] COMMAND ..."
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="of the command, all on this machine [those that it says]")
    add("--against", metavar="COMMAND", help="the command that it is to be equal to [the same script on one rank]")
    add(
        "--steps",
        type=int,
        default=MIN_STEPS_PROVED,
        metavar="N",
        help=f"to train [{MIN_STEPS_PROVED}, the least]",
    )
    add(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"after which the ranks of a run are stopped [{TIMEOUT_S:g}]",
    )
    add("--cpu", action="store_true", help="train on the CPU, whatever GPUs there are")
    add("--json", metavar="FILE", help="write the answer as JSON, too")
    add("--keep", metavar="FOLDER", help="keep what the ranks recorded in this new folder")
    add("--output", action="store_true", help="show what the scripts print")
    options, command = _split(parser, argv)
    if options.steps < MIN_STEPS_PROVED:
        raise UserError(f"--steps {options.steps}: must be at least {MIN_STEPS_PROVED}.")
    if options.timeout <= 0:
        raise UserError(f"--timeout {options.timeout:g}: must be positive.")
    if options.keep and Path(options.keep).exists():
        raise UserError(f"--keep {options.keep}: is there already; give a new folder.")
    return options, command
