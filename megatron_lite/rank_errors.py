"""How a rank ends that met an error: who tells people, who tells torchrun, and in which order ranks go."""

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.machine import count_gpu_files
from megatron_lite.config.world import World, read_world
from megatron_lite.errors import ConfigError, RanksError, UserError
from megatron_lite.terminal import print_lines

SECONDS_FOR_RANK_0 = 5  # what other ranks leave the first one to say an error that all of them have
SECONDS_FOR_THE_FIRST = 8  # what ranks that lost others leave to the one to blame, to end before them


def refuse_mistakes(argv: list[str]) -> int:
    """Tell the mistakes of a command line, and return the exit code; 0 where there are none. Imports no torch.

    Torch alone knows how many GPUs there are: only a command line that is wrong with any number of them is refused here.
    """
    line, files = read_command_line(argv), count_gpu_files()
    world = read_world(files, threads=1)
    first: ConfigError | None = None
    for gpus in (files, 0, world.local_size) if files else (0,):
        try:
            check(line, replace(world, gpus=gpus))
            return 0
        except ConfigError as error:
            first = first or error
    end_with_error(first, world)
    return first.exit_code


def end_with_error(error: UserError, world: World):
    """Say it once, although every rank may have the same to say."""
    if not isinstance(error, RanksError):
        if world.local_rank:
            time.sleep(SECONDS_FOR_RANK_0)  # the launcher ends this rank meanwhile, if rank 0 failed likewise
        return tell_error(error, world)
    # one rank speaks for all; the rank to blame is to be the first that the launcher sees ending
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it was ignored until the failure was explained
    if not error.told:
        _print(error, world)
    if error.told or error.ended:
        time.sleep(SECONDS_FOR_THE_FIRST)
    write_error_file(error)


def tell_error(error: UserError, world: World):
    """To people, if no other rank of this node has told the same, and to torchrun for its summary."""
    error_file, is_first = os.environ.get("TORCHELASTIC_ERROR_FILE"), True
    if error_file:  # those of a node's ranks lie in folders below a common one
        text = hashlib.sha256("\n".join(error.lines).encode(errors="replace")).hexdigest()
        try:
            (Path(error_file).parents[1] / f"printed-{text[:16]}").touch(exist_ok=False)
        except OSError as failure:
            is_first = not isinstance(failure, FileExistsError)
    if is_first:
        _print(error, world)
    write_error_file(error)


def _print(error: UserError, world: World):
    prefix = f"rank {world.rank}: " if world.local_rank and not isinstance(error, RanksError) else ""
    print_lines([f"{prefix}error: {text}" for text in error.lines], sys.stderr)


def write_error_file(error: UserError):
    """Where torchrun reads why a rank failed."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = {"message": "; ".join(error.lines), "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(error_file, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
