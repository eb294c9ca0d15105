"""How to follow an objection to a flag that stands in a launch script: where the script takes the flag with another value."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.cli.launch_script import read_launch_script
from megatron_lite.errors import UserError

END = "--"
PROBE = "7"  # a value that no script has a reason to look at
FLAG = re.compile(r"(--[\w-]+)( [^\s:;]+)?")
ADVISED = re.compile(r"; try (\d+)\.$")


def explain_change(
    words: Sequence[str], lines: Sequence[str], gpus: int | None, gpus_per_node: int | None
) -> list[str]:
    """A line that says how to give the script the flag of the first objection; [] where no objection begins with one.

    Args:
        words: The script and its arguments.
        lines: The objections.
        gpus: Of the job, where they were given.
        gpus_per_node: As of read_launch_script.
    """
    found = next((match for line in lines if (match := FLAG.match(line))), None)
    if found is None:
        return []
    flag = found[1]
    advised = next((match[1] for line in lines if (match := ADVISED.search(line))), "VALUE")
    script, *arguments = words
    ends = [] if END in arguments else [[*arguments, END]]
    for taken in (*ends, arguments):
        if _takes(script, [*taken, flag, PROBE], gpus_per_node):
            options = ["--gpus", str(gpus)] if gpus else []
            changed = shlex.join([*options, script, *taken, flag, advised])
            return [f"{Path(script).name} takes other values behind its arguments: megatron-lite plan {changed}"]
    return [f"{script} takes no flags of the trainer: write {flag} {advised} into it."]


def _takes(script: str, arguments: list[str], gpus_per_node: int | None) -> bool:
    """Whether the last flag of the trainer that the script then starts is the last of the arguments."""
    try:
        launch = read_launch_script(script, arguments, 1, gpus_per_node)
    except UserError:
        return False
    return END not in launch.flags and list(launch.flags[-2:]) == arguments[-2:]
