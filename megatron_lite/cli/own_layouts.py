"""Commands of this package's trainer for a proof: a few steps on the layout of a launch command, and on one rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.cli.launcher import SCRIPT_ENDINGS, split_at_trainer
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.cli.ranked_commands import RankedCommand
from megatron_lite.cli.recorded_runs import TRAINER
from megatron_lite.config.args import Args, CheckpointArgs, ParallelArgs, ProfileArgs, WatchArgs
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import write_flags
from megatron_lite.errors import UserError
from megatron_lite.variables import PACKAGE_FOLDER, prepend_python_path

RUN_FOLDER = "run"  # within the folder of a recorded run


@dataclass(frozen=True)
class OwnLayout:
    """The trainer on a layout.

    Attributes:
        command: What its ranks run.
        described: The layout, as flags.
        tensor: Ranks that split each layer, for which the vocabulary is padded.
        args: The settings of the run.
    """

    command: RankedCommand
    described: str
    tensor: int
    args: Args


def is_own(words: list[str]) -> bool:
    """Whether a launch command starts this package's trainer: a script of a shell, its flags, or pretrain_gpt.py.

    Args:
        words: The command.
    """
    first = words[0]
    return first.startswith("--") or first.endswith(SCRIPT_ENDINGS) or split_at_trainer(words) is not None


def read_layout(words: list[str], ranks: int | None, steps: int, folder: Path, on_cpu: bool) -> OwnLayout:
    """Read a launch command of the trainer, shortened to some steps.

    Args:
        words: The command.
        ranks: How many run it; None: as many as it says.
        steps: Number of steps to train.
        folder: Folder of the run.
        on_cpu: Use no GPU.

    Raises:
        UserError: The command cannot be read, or does not say how many ranks there are.
    """
    found = planned_run(words, ranks)
    if found.gpus_assumed:
        raise UserError(f"{words[0]}: the number of ranks is unknown; give --ranks N before it.")
    args = read_command_line(list(found.flags)).args
    shortened = _shorten(args, found.plan.batch.final, steps, folder)
    environment = _choose_environment(found.environment, on_cpu)
    command = RankedCommand((*TRAINER, *write_flags(shortened)), found.plan.world.size, environment)
    described = " ".join(write_flags(Args(parallel=args.parallel))) or "data parallel"
    return OwnLayout(command, described, found.plan.layout.tensor, shortened)


def share_vocabulary(layouts: tuple[OwnLayout, OwnLayout]) -> tuple[OwnLayout, OwnLayout]:
    """Pad the vocabulary of two layouts alike, which each pads for its own tensor parallel ranks.

    Args:
        layouts: The layouts that are laid beside each other.
    """
    padded_to = [layout.args.model.make_vocab_size_divisible_by * layout.tensor for layout in layouts]
    common = math.lcm(*padded_to)
    first, second = layouts
    return _pad_vocabulary(first, common), _pad_vocabulary(second, common)


def _pad_vocabulary(layout: OwnLayout, multiple: int) -> OwnLayout:
    """The layout with a vocabulary that is a multiple of so many entries."""
    model = replace(layout.args.model, make_vocab_size_divisible_by=multiple // layout.tensor)
    args = replace(layout.args, model=model)
    command = replace(layout.command, script=(*TRAINER, *write_flags(args)))
    return replace(layout, args=args, command=command)


def give_to_one_rank(layout: OwnLayout, folder: Path) -> OwnLayout:
    """The same steps without a layout: the vocabulary is as long as that of the layout's ranks together.

    Args:
        layout: The layout of several ranks.
        folder: Folder of the run on one rank.
    """
    args = layout.args
    rows = args.model.make_vocab_size_divisible_by * layout.tensor
    timeout = args.parallel.distributed_timeout_minutes
    alone = replace(
        args,
        model=replace(args.model, make_vocab_size_divisible_by=rows),
        parallel=ParallelArgs(distributed_timeout_minutes=timeout),
        watch=replace(args.watch, run_dir=str(folder / RUN_FOLDER)),
    )
    command = replace(layout.command, script=(*TRAINER, *write_flags(alone)), ranks=1)
    return OwnLayout(command, "1 rank", 1, alone)


def _choose_environment(environment: Mapping[str, str], on_cpu: bool) -> dict[str, str]:
    chosen = prepend_python_path(environment, PACKAGE_FOLDER)
    if on_cpu:
        chosen["CUDA_VISIBLE_DEVICES"] = ""
    return chosen


def _shorten(args: Args, batch: int, steps: int, folder: Path) -> Args:
    """The run's settings for so many steps, without dropout and checkpoints, each step written down."""
    return replace(
        args,
        model=replace(args.model, hidden_dropout=0.0, attention_dropout=0.0),
        training=replace(args.training, global_batch_size=batch, step_batch_size_schedule=None, exit_interval=steps),
        watch=WatchArgs(log_interval=1, eval_iters=0, run_dir=str(folder / RUN_FOLDER)),
        checkpoint=CheckpointArgs(),
        profile=ProfileArgs(),
    )
