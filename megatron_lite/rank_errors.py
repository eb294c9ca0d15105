"""How a rank ends that met an error: who tells people, who tells torchrun, and in which order ranks go."""

import hashlib
import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.launchers import find_launch
from megatron_lite.config.world import World, read_world
from megatron_lite.errors import ConfigError, RanksError, UserError
from megatron_lite.machine import count_gpu_files
from megatron_lite.terminal import print_lines

JOINED = re.compile(r"(\d+)/\d+ clients joined")  # torch's words
SECONDS_FOR_RANK_0 = 5  # what other ranks leave the first one to say an error that all of them have
SECONDS_FOR_THE_FIRST = 8  # what ranks that lost others leave to the one to blame, to end before them


def refuse_mistakes(argv: list[str]) -> int:
    """Tell the mistakes of a command line, and return the exit code; 0 where there are none. Imports no torch.

    Torch alone knows how many GPUs there are: only a command line that is wrong with any number of them is refused
    here.
    """
    line = read_command_line(argv)
    files = count_gpu_files()
    mistakes: list[ConfigError] = []
    try:
        launch = find_launch(os.environ)
        world = read_world(files, 1, {**os.environ, **(launch.variables if launch else {})})
    except UserError as error:
        end_with_error(error, World())
        return error.exit_code
    for gpus in (files, 0, world.local_size) if files else (0,):
        try:
            check(line, replace(world, gpus=gpus))
            return 0
        except ConfigError as error:
            mistakes.append(error)
    end_with_error(mistakes[0], world)
    return mistakes[0].exit_code


def end_with_error(error: UserError, world: World) -> None:
    """Say it once, although every rank may have the same to say."""
    if not isinstance(error, RanksError):
        if world.local_rank:
            time.sleep(SECONDS_FOR_RANK_0)  # the launcher ends this rank meanwhile, if rank 0 failed likewise
        tell_error(error, world)
        return
    # one rank speaks for all; the rank to blame is to be the first that the launcher sees ending
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it was ignored until the failure was explained
    if not error.told:
        _print(error, world)
    if error.told or error.ended:
        time.sleep(SECONDS_FOR_THE_FIRST)
    write_error_file(error)


def tell_error(error: UserError, world: World) -> None:
    """Tell an error to people, if no other rank of this node has told the same, and to torchrun for its summary."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_first = True
    if error_file:  # those of a node's ranks lie in folders below a common one
        text = hashlib.sha256("\n".join(error.lines).encode(errors="replace")).hexdigest()
        try:
            (Path(error_file).parents[1] / f"printed-{text[:16]}").touch(exist_ok=False)
        except OSError as failure:
            is_first = not isinstance(failure, FileExistsError)
    if is_first:
        _print(error, world)
    write_error_file(error)


def _print(error: UserError, world: World) -> None:
    prefix = f"rank {world.rank}: " if world.local_rank and not isinstance(error, RanksError) else ""
    print_lines([f"{prefix}error: {text}" for text in error.lines], sys.stderr)


def write_error_file(error: UserError) -> None:
    """Where torchrun reads why a rank failed."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = {"message": "; ".join(error.lines), "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(error_file, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


def describe_failed_meeting(failure: str, world: World, where: str, limit_s: float) -> str:
    """Describe why the ranks did not meet, with the remedy.

    Args:
        failure: The message of torch's error.
        world: This rank, and how many there are.
        where: MASTER_ADDR:MASTER_PORT, of which rank 0 holds the port.
        limit_s: Seconds that were waited.
    """
    again = "with the same MASTER_ADDR and MASTER_PORT"
    if "EADDRINUSE" in failure or "address already in use" in failure.lower():
        return f"MASTER_PORT {where.rpartition(':')[2]} is in use on this machine; set another."
    joined = JOINED.search(failure)
    if joined and int(joined[1]) < world.size:
        came = int(joined[1])
        absent = world.size - int(joined[1])
        who = "rank 1" if world.size == 2 else f"{absent} of {world.size} ranks"
        met = f"{came} of {world.size} ranks met at {where}"
        return (
            f"{who} did not come within {limit_s:.0f} s ({met}); "
            f"see that all are started, {again}, or raise --distributed-timeout-minutes."
        )
    if world.rank > 0:
        return (
            f"rank 0 cannot be reached at MASTER_ADDR:MASTER_PORT {where} ({failure}); "
            f"see that it is started there, {again}."
        )
    return (
        f"MASTER_ADDR:MASTER_PORT {where} cannot be opened by rank 0 ({failure}); "
        "set an address of the machine of rank 0."
    )
