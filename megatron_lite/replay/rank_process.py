"""A rank of `megatron-lite replay`:  python -m megatron_lite.replay.rank_process FOLDER FLAGS

It runs under the variables of a launcher. FOLDER holds the request, and gets the answer. FLAGS are those of the run,
without what it writes.
"""

import os
import sys
from pathlib import Path

import msgspec
import torch

from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import AUTO, Plan, resolve
from megatron_lite.config.world import World, read_world
from megatron_lite.data.tokenizers import Tokenizer, build_tokenizer
from megatron_lite.errors import UserError
from megatron_lite.formats.replay_record import REPLAYED_RANK_FILE, REQUEST_FILE, AttemptKind, RankRecord, ReplayRequest
from megatron_lite.model.custom_model import find_custom_model
from megatron_lite.parallel.layers import no_compiler
from megatron_lite.parallel.process_group import process_group
from megatron_lite.replay.examine_step import StepExaminer
from megatron_lite.train.checkpoint_checks import require_checkpoint
from megatron_lite.train.console import set_up_logging
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.prepare_torch import prepare_torch


def main(words: list[str]) -> int:
    """Examine the step, and write what was found.

    Args:
        words: The folder, and the run's flags.

    Returns:
        The exit code: 0, or that of the mistake, which the answer tells.
    """
    folder, *flags = words
    path = Path(folder)
    request = msgspec.json.decode((path / REQUEST_FILE).read_bytes(), type=ReplayRequest)
    world = read_world(torch.cuda.device_count(), torch.get_num_threads())
    set_up_logging(world.is_first)
    try:
        record = _examine(flags, request, world)
        code = 0
    except UserError as error:
        record = RankRecord(rank=world.rank, ranks=world.size, failure=" ".join(error.lines))
        code = error.exit_code
    target = path / REPLAYED_RANK_FILE.format(world.rank)
    partial = target.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(record))
    partial.replace(target)
    if world.size > 1:
        sys.stdout.flush()
        # what a failed training's frames hold waits for gloo's threads (app.py)
        os._exit(code)
    return code


def _examine(flags: list[str], request: ReplayRequest, world: World) -> RankRecord:
    """Set this rank up as a training does, and examine the step."""
    plan, tokenizer = _plan_run(flags, world)
    prepare_torch(plan)
    streams = DataStreams(plan)
    if plan.args.model.model is not None:
        find_custom_model(plan.args.model.model)
    require_checkpoint(plan.args.checkpoint)
    with process_group(plan):
        return StepExaminer(plan, streams, tokenizer, request, _print_attempt).examine()


def _plan_run(flags: list[str], world: World) -> tuple[Plan, Tokenizer]:
    """Plan the run. Returns this rank's plan, and the tokenizer."""
    line = read_command_line(flags)
    check(line, world)
    tokenizer = build_tokenizer(line.args.data)
    if line.args.training.torch_compile == AUTO:
        world = World(**{**vars(world), "no_compiler": no_compiler(world)})
    return resolve(line.args, world, tokenizer.vocab_size), tokenizer


def _print_attempt(kind: AttemptKind) -> None:
    """Tell in the output which attempt begins."""
    print(f"attempt: {kind.value}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
