"""`megatron-lite tune` tries what reports advise, in turns with the command as it is, and keeps what is faster."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lite.cli.batch_systems import Job
from megatron_lite.cli.launcher import MODULE, PLACERS, PROGRAM, count_ranks
from megatron_lite.cli.parser import Parser
from megatron_lite.cli.ranked_commands import find_script
from megatron_lite.cli.recorded_runs import TRAINER
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags
from megatron_lite.errors import UserError
from megatron_lite.formats.tune_ledger import TuneRequest
from megatron_lite.shared_files import read_foreign
from megatron_lite.terminal import print_lines
from megatron_lite.tune.command_files import stamp_files
from megatron_lite.tune.knobs import NO_KNOBS, KnobFile, list_variables, read_knobs
from megatron_lite.tune.ledger import Ledger
from megatron_lite.tune.tuner import Bounds, Tuner
from megatron_lite.tune.variant import TunedCommand

OWN_COMMAND = ("megatron-lite", "train")
MIN_STEPS_OF_RUN = 20  # the profiled window, and steps before and behind it


def run(argv: list[str]) -> int:
    """Tune the command, print what was tried and the command to use. Returns an exit code."""
    options, words = _read_options(argv)
    knobs, text = _read_knobs(options.knobs)
    command = read_tuned_command(words, knobs)
    request = TuneRequest(
        command=tuple(words),
        knobs=text,
        variables={name: os.environ[name] for name in list_variables(knobs.knobs) if name in os.environ},
        files=stamp_files(words),
        steps=options.steps,
        rounds=options.rounds,
        tolerance=options.loss_tolerance,
    )
    ledger = Ledger(Path(options.ledger), request, anew=options.restart)
    bounds = Bounds(
        trials=options.trials,
        seconds=None if options.time is None else 60 * options.time,
        rounds=options.rounds,
        tolerance=options.loss_tolerance,
    )
    from megatron_lite.cli.tuned_runs import VariantRunner
    from megatron_lite.report.text import get_style
    from megatron_lite.report.tune_terminal import describe_progress, tune_lines

    with tempfile.TemporaryDirectory(prefix="megatron-lite-tune-") as folder:
        runner = VariantRunner(command, knobs.short, options.steps, Path(folder), bounds.seconds)
        tuner = Tuner(
            command,
            knobs.knobs,
            bounds,
            ledger,
            runner.run,
            tell=lambda told: print_lines([f"tune: {describe_progress(told)}"]),
        )
        with ending_runs():
            trials, outcome = tuner.tune()
    print_lines(["", *tune_lines(trials, outcome, get_style(sys.stdout))])
    return 0


@contextmanager
def ending_runs() -> Iterator[None]:
    """Let the run that goes on end, too, where this process is ended, or its terminal is closed."""
    # nohup has SIGHUP ignored
    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    kept = {number: signal.signal(number, _interrupt) for number in ending}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    """End as on ctrl-C."""
    raise KeyboardInterrupt


def _read_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line of tune: the options, and the words of the command.

    Raises:
        UserError: An option's value is none that it can have.
    """
    parser = Parser(
        "tune",
        "Runs a training command for a few steps, takes from the report the first change that is a flag, a variable "
        "or a declared knob and leaves the losses as they are, runs both in turns, keeps what is faster by more than "
        "the noise, and goes on. Ends with the command to use, and with everything that was tried. The same command "
        "goes on where it was interrupted.",
    )
    parser.usage = "megatron-lite tune [OPTIONS] [--] COMMAND ..."
    add = parser.add_argument
    add("--knobs", metavar="FILE", help="knobs that a script's author declares (docs/tune.md), YAML")
    add("--ledger", metavar="FILE", default="tune.jsonl", help="file of all that was tried [tune.jsonl]")
    add("--restart", action="store_true", help="begin the ledger anew; what it held is kept in FILE.old")
    add("--trials", type=int, default=20, metavar="N", help="changes that are tried at most [20]")
    add("--time", type=float, metavar="MINUTES", help="that all runs may take together [no limit]")
    add("--steps", type=int, default=40, metavar="N", help="steps of each run [40]")
    add("--rounds", type=int, default=3, metavar="N", help="runs of each variant in a trial [3]")
    add(
        "--loss-tolerance",
        type=float,
        default=1e-3,
        metavar="SHARE",
        help="relative difference of a step's loss that another order of sums may make [0.001]; 0: none",
    )
    options, command = parser.split_command(argv)
    for name, least in (("trials", 0), ("steps", MIN_STEPS_OF_RUN), ("rounds", 1), ("loss_tolerance", 0.0)):
        value = getattr(options, name)
        if not value >= least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}.")
    if options.time is not None and not options.time > 0:
        raise UserError(f"--time {options.time}: give minutes, more than 0.")
    return options, command


def _read_knobs(path: str | None) -> tuple[KnobFile, str]:
    """Read the file of --knobs, and its text; no knobs where it is not given."""
    if path is None:
        return NO_KNOBS, ""
    from megatron_lite.analysis.findings.rules import RULES

    return read_knobs(path, frozenset(RULES))


def read_tuned_command(words: list[str], knobs: KnobFile) -> TunedCommand:
    """Read which of a command's words are arguments of its script, and whether that is this package's trainer.

    Args:
        words: the command.
        knobs: of the user's file, which say what switches are.

    Raises:
        UserError: the command is a part of one, which waits for other nodes.
    """
    _check_nodes(words)
    switches = {knob.name for knob in knobs.knobs if knob.is_switch}
    first_argument, is_trainer = _find_arguments(words)
    if is_trainer:
        switches |= {name for flag in list_flags(Args) if flag.is_switch for name in flag.spellings}
    return TunedCommand(tuple(words), first_argument, is_trainer, frozenset(switches), dict(os.environ))


def _check_nodes(words: list[str]) -> None:
    """Refuse torchrun on several nodes: every run would wait for those on which nobody starts it."""
    script = find_script(words)
    before = words[:script]
    nodes = count_ranks(before, Job()).nodes
    if nodes > 1 and PLACERS.isdisjoint(Path(word).name for word in before):
        raise UserError(
            f"megatron-lite tune: the command runs on {nodes} nodes, and is started on this one alone; "
            "give it with srun or mpirun, or tune it on one node."
        )


def _find_arguments(words: list[str]) -> tuple[int, bool]:
    """Find where a script's arguments begin, and whether it is the trainer; behind all words where no script is
    named."""
    if (Path(words[0]).name, *words[1:2]) == OWN_COMMAND:
        return len(OWN_COMMAND), True
    script = find_script(words)
    if script is None:
        return len(words), False
    if words[script].endswith(".py"):
        return script + 1, _is_trainer(Path(words[script]))
    return script + 2, tuple(words[script : script + 2]) == TRAINER


def _is_trainer(script: Path) -> bool:
    """Whether a script is this package's pretrain_gpt.py, and not Megatron-LM's."""
    if script.name != PROGRAM:
        return False
    try:
        return MODULE.encode() in read_foreign(script)
    except OSError:
        return False
