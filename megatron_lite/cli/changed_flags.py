"""How to follow an objection to flags that stand in a launch script, without editing the script."""

import re
import shlex
from collections.abc import Sequence

from megatron_lite.cli.launch_script import read_launch_script
from megatron_lite.cli.launcher import END, GPUS_PER_NODE
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags
from megatron_lite.errors import UserError

PROBE = "7"  # a value that no script has a reason to look at
FLAG = re.compile(r"(--[\w-]+)( [^\s:;]+)?")
ADVISED = re.compile(r"; (?:try (\d+)\.|did you mean (\w+)\?)$")
ADDED = re.compile(r"; add (--[\w-]+) N\.$")
INSTEAD = re.compile(r"; give (--[\w-]+) instead of (--[\w-]+)\.$")
RANKS = re.compile(r"; start a multiple of (\d+)")
EXPLAINED = re.compile(r" is empty: .* give it")  # a line of left_out.py that says what to do
OTHER_MODEL = "train that model with Megatron-LM"  # without such a flag it is another model, which nobody asked for


def explain_change(
    words: Sequence[str], lines: Sequence[str], gpus: int | None, dropped: Sequence[str], added: Sequence[str]
) -> list[str]:
    """A line with the command that follows the objections; [] where none begins with a flag, or the model is another one.

    Args:
        words: The script and its arguments.
        lines: The objections.
        gpus: Of the job, where they were given.
        dropped: Names behind --drop.
        added: Flags behind --add.
    """
    objected = [(match[1], line) for line in lines if (match := FLAG.match(line))]
    if not objected or any(OTHER_MODEL in line for line in lines):
        return []
    known = {spelling for flag in list_flags(Args) for spelling in flag.spellings}
    unknown = [flag for flag, _ in objected if flag not in known]
    if unknown:
        names = [*dropped, *(flag.lstrip("-") for flag in dict.fromkeys(unknown))]
        changed = _write_command(words, gpus, names, added)
        return [f"a plan of the run without those flags: megatron-lite plan {changed}"]
    if any(EXPLAINED.search(line) for line in lines):
        return []
    ranks = next((int(match[1]) for line in lines if (match := RANKS.search(line))), None)
    if ranks:
        return [f"on as many GPUs as it needs: megatron-lite plan {_write_command(words, ranks, dropped, added)}"]
    flag, line = objected[0]
    instead = INSTEAD.search(line)
    if instead:
        changed = _write_command(words, gpus, [*dropped, instead[2].lstrip("-")], [*added, instead[1], "VALUE"])
        return [f"with that change: megatron-lite plan {changed}"]
    another = ADDED.search(line)
    flag = another[1] if another else flag
    found = next((match for line in lines if (match := ADVISED.search(line))), None)
    advised = (found[1] or found[2]) if found else "VALUE"
    script, *arguments = words
    ends = [] if END in arguments else [[*arguments, END]]
    for taken in (*ends, arguments):
        if _takes(script, [*taken, flag, PROBE], min(gpus, GPUS_PER_NODE) if gpus else None):
            changed = _write_command([script, *taken, flag, advised], gpus, dropped, added)
            return [f"{script} takes other values behind its arguments: megatron-lite plan {changed}"]
    changed = _write_command(words, gpus, dropped, [*added, flag, advised])
    return [f"{script} takes no flags of the trainer: megatron-lite plan {changed}"]


def _write_command(words: Sequence[str], gpus: int | None, dropped: Sequence[str], added: Sequence[str]) -> str:
    """Write the words that follow `megatron-lite plan`."""
    options = ["--gpus", str(gpus)] if gpus else []
    options += [f"--drop={','.join(dropped)}"] if dropped else []
    options += [f"--add={' '.join(added)}"] if added else []
    return shlex.join([*options, *words])


def _takes(script: str, arguments: list[str], gpus_per_node: int | None) -> bool:
    """Whether the last flag of the trainer that the script then starts is the last of the arguments."""
    try:
        launch = read_launch_script(script, arguments, 1, gpus_per_node)
    except UserError:
        return False
    return END not in launch.flags and list(launch.flags[-2:]) == arguments[-2:]
