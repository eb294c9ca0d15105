"""`megatron-lite self-check` finds out whether a layout computes what one rank computes: both train the same steps,
from the same weights."""

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.cli.parser import Parser
from megatron_lite.cli.planned_run import planned_run, split_options
from megatron_lite.config.args import Args, CheckpointArgs, ParallelArgs, ProfileArgs, WatchArgs
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import write_flags
from megatron_lite.errors import ConfigError, UserError
from megatron_lite.live_line import LiveLine
from megatron_lite.terminal import print_lines
from megatron_lite.variables import PACKAGE_FOLDER, prepend_python_path

if TYPE_CHECKING:
    from megatron_lite.analysis.compare.losses import Losses

IS_ERROR = 1  # exit code
MAX_LINES_SHOWN = 8


def run(argv: list[str]) -> int:
    """Train both, print losses and gradient norms and what they say.

    Returns:
        0, or 1 where rounding does not explain a difference.
    """
    options, words = _parse(argv)
    found = planned_run(words, options.ranks)
    plan = found.plan
    if found.gpus_assumed:
        raise UserError(f"{words[0]}: the number of ranks is unknown; give --ranks N before it.")
    if plan.world.size == 1:
        raise UserError("megatron-lite self-check: one rank alone; give --ranks N with a layout for them.")
    args = read_command_line(list(found.flags)).args
    environment = {**os.environ, **found.environment}
    if options.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    ranks = f"{plan.world.size} ranks"
    with tempfile.TemporaryDirectory() as name:
        folder_of_one = Path(name) / "1"
        folder_of_ranks = Path(name) / str(plan.world.size)
        line = LiveLine()
        line.draw(f"1 rank: {options.steps} steps ...")
        shortened = _shorten(args, plan.batch.final, options.steps, folder_of_one)
        _train(write_flags(_give_to_one_rank(shortened, plan.layout.tensor)), 1, environment, "1 rank")
        line.draw(f"{ranks}: {options.steps} steps ...")
        shortened = _shorten(args, plan.batch.final, options.steps, folder_of_ranks)
        _train(write_flags(shortened), plan.world.size, environment, ranks)
        line.wipe()
        losses = _compare(folder_of_one, folder_of_ranks)
    if losses is None:
        remedy = "try a smaller --lr or --initial-loss-scale."
        raise UserError(f"megatron-lite self-check: no step had a finite loss on both; {remedy}")
    from megatron_lite.report.comparison import build_losses_section
    from megatron_lite.report.section import section_lines
    from megatron_lite.report.text import get_style

    layout = " ".join(write_flags(Args(parallel=args.parallel))) or "data parallel"
    section = build_losses_section(losses, ("1 rank", ranks, "difference"))
    print_lines([f"{ranks}: {layout}", "", *section_lines(section, get_style(sys.stdout))])
    return IS_ERROR if losses.is_error else 0


def _parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Split the words into the options and the launch command. UserError for a mistake."""
    parser = Parser(
        "self-check",
        "Trains the same steps on the layout of a launch command and on one rank, from the same weights and without "
        "dropout, and reports whether loss and gradient norm differ by more than rounding. The model must fit on one "
        "rank: --num-layers behind the other flags makes it smaller.",
    )
    command = "SCRIPT.sh ARGUMENTS... | torchrun ... pretrain_gpt.py FLAGS | FLAGS"
    parser.usage = f"megatron-lite self-check [OPTIONS] {command}"
    add = parser.add_argument
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="of the layout, all on this machine [that of the launch command]",
    )
    add("--steps", type=int, default=1, metavar="N", help="to train; the first one is judged [1]")
    add("--cpu", action="store_true", help="train on the CPU, whatever GPUs there are")
    options, words = split_options(parser, argv)
    if not words:
        remedy = "give SCRIPT.sh with its arguments, or the trainer's flags."
        raise UserError(f"megatron-lite self-check: no launch command; {remedy}")
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: must be at least 1.")
    return options, words


def _compare(folder_of_one: Path, folder_of_ranks: Path) -> "Losses | None":
    """Compare the losses of the run on one rank with those of the run on several; None where none is finite on both."""
    from megatron_lite.analysis.analyze import analyze
    from megatron_lite.analysis.compare.losses import compare_losses

    one = analyze([folder_of_one]).facts.run
    several = analyze([folder_of_ranks]).facts.run
    return compare_losses(one, several)


def _shorten(args: Args, batch: int, steps: int, folder: Path) -> Args:
    """The run's settings for so many steps, without dropout and checkpoints, each step written down."""
    return replace(
        args,
        model=replace(args.model, hidden_dropout=0.0, attention_dropout=0.0),
        training=replace(args.training, global_batch_size=batch, step_batch_size_schedule=None, exit_interval=steps),
        watch=WatchArgs(log_interval=1, eval_iters=0, run_dir=str(folder)),
        checkpoint=CheckpointArgs(),
        profile=ProfileArgs(),
    )


def _give_to_one_rank(args: Args, tensor: int) -> Args:
    """The same work without a layout. `tensor`: its ranks that split layers, for which the vocabulary is padded."""
    rows = args.model.make_vocab_size_divisible_by * tensor
    timeout = args.parallel.distributed_timeout_minutes
    return replace(
        args,
        model=replace(args.model, make_vocab_size_divisible_by=rows),
        parallel=ParallelArgs(distributed_timeout_minutes=timeout),
    )


def _train(flags: list[str], ranks: int, environment: Mapping[str, str], title: str) -> None:
    """UserError with the trainer's own last lines where it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    done = subprocess.run(
        [sys.executable, *launcher, "megatron_lite", *flags],
        env=prepend_python_path(environment, PACKAGE_FOLDER),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        lines = done.stdout.splitlines()
        said = [text.removeprefix("error: ") for text in lines if text.startswith("error: ")]
        if not said:
            said = lines[-MAX_LINES_SHOWN:]
        raise ConfigError([f"{title}: the trainer ended with exit code {done.returncode}.", *dict.fromkeys(said)])
