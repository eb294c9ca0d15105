"""How to follow an objection to flags that stand in a launch script, without editing the script."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_lite.cli.launch_script import read_launch_script
from megatron_lite.cli.launcher import GPUS_PER_NODE
from megatron_lite.cli.parser import END
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags
from megatron_lite.errors import UserError

PROBE = "7"  # a value that no script has a reason to look at
FLAG = re.compile(r"(--[\w-]+)( [^\s:;]+)?")
ADVISED = re.compile(r"; (?:try (\d+)\.|did you mean (\w+)\?)$")
ADDED = re.compile(r"; add (--[\w-]+) N\.$")
INSTEAD = re.compile(r"; give (--[\w-]+) instead of (--[\w-]+)\.$")
RANKS = re.compile(r"; start a multiple of (\d+)")
EXPLAINED_LINE = re.compile(r" is empty: .* give it")  # a line of left_out.py that says what to do
OTHER_MODEL = "train that model with Megatron-LM"  # without such a flag it is another model, which nobody asked for


@dataclass(frozen=True)
class _Command:
    """The words that follow `megatron-lite plan`."""

    words: Sequence[str]  # the script and its arguments
    gpus: int | None  # of the job, where they were given
    dropped: Sequence[str]  # names behind --drop
    added: Sequence[str]  # flags behind --add

    def write(self) -> str:
        """Write the whole command for a shell."""
        options = []
        if self.gpus:
            options += ["--gpus", str(self.gpus)]
        if self.dropped:
            options.append(f"--drop={','.join(self.dropped)}")
        if self.added:
            options.append(f"--add={' '.join(self.added)}")
        return f"megatron-lite plan {shlex.join([*options, *self.words])}"


def explain_change(
    words: Sequence[str],
    lines: Sequence[str],
    gpus: int | None,
    dropped: Sequence[str],
    added: Sequence[str],
) -> list[str]:
    """Write the command that follows the objections.

    Args:
        words: The script and its arguments.
        lines: The objections.
        gpus: GPUs of the job, where they were given.
        dropped: Names behind --drop.
        added: Flags behind --add.

    Returns:
        A line with the command; [] where no objection begins with a flag, or the model is another one.
    """
    objections = [line for line in lines if FLAG.match(line)]
    if not objections or any(OTHER_MODEL in line for line in lines):
        return []
    command = _Command(words, gpus, dropped, added)
    unknown = _list_unknown(objections)
    if unknown:
        names = [flag.lstrip("-") for flag in unknown]
        changed = replace(command, dropped=[*dropped, *names])
        return [f"a plan of the run without those flags: {changed.write()}"]
    if any(EXPLAINED_LINE.search(line) for line in lines):
        return []
    ranks = _search_lines(RANKS, lines)
    if ranks:
        changed = replace(command, gpus=int(ranks[1]))
        return [f"on as many GPUs as it needs: {changed.write()}"]
    instead = INSTEAD.search(objections[0])
    if instead:
        names = [*dropped, instead[2].lstrip("-")]
        changed = replace(command, dropped=names, added=[*added, instead[1], "VALUE"])
        return [f"with that change: {changed.write()}"]
    advised = _search_lines(ADVISED, lines)
    value = (advised[1] or advised[2]) if advised else "VALUE"
    return [_give_value(command, _find_flag(objections[0]), value)]


def _find_flag(objection: str) -> str:
    """Find the flag whose value an objection asks for: the one to add, else the one that it begins with."""
    added = ADDED.search(objection)
    if added:
        return added[1]
    first = FLAG.match(objection)
    assert first is not None
    return first[1]


def _give_value(command: _Command, flag: str, value: str) -> str:
    """Write the command that gives a flag another value: behind the script's arguments where it takes that."""
    script, *arguments = command.words
    taken = _find_arguments(script, arguments, flag, command.gpus)
    if taken is None:
        changed = replace(command, added=[*command.added, flag, value])
        return f"{script} takes no flags of the trainer: {changed.write()}"
    changed = replace(command, words=[script, *taken, flag, value])
    return f"{script} takes other values behind its arguments: {changed.write()}"


def _list_unknown(objections: Sequence[str]) -> list[str]:
    """List the flags of objections that the trainer does not have, each once."""
    known = {spelling for flag in list_flags(Args) for spelling in flag.spellings}
    flags = [found[1] for line in objections if (found := FLAG.match(line))]
    return list(dict.fromkeys(flag for flag in flags if flag not in known))


def _search_lines(pattern: re.Pattern[str], lines: Sequence[str]) -> re.Match[str] | None:
    """Find the first line in which a pattern occurs."""
    for line in lines:
        found = pattern.search(line)
        if found:
            return found
    return None


def _find_arguments(script: str, arguments: list[str], flag: str, gpus: int | None) -> list[str] | None:
    """Find the arguments behind which the script takes flags of the trainer.

    Args:
        script: The script.
        arguments: Arguments of the script.
        flag: A flag of the trainer, with which it is tried.
        gpus: GPUs of the job, where they were given.

    Returns:
        The arguments, with -- at their end where the script wants it; None where it takes no flags.
    """
    gpus_per_node = min(gpus, GPUS_PER_NODE) if gpus else None
    tried = [arguments]
    if END not in arguments:
        tried.insert(0, [*arguments, END])
    for taken in tried:
        if _takes(script, [*taken, flag, PROBE], gpus_per_node):
            return taken
    return None


def _takes(script: str, arguments: list[str], gpus_per_node: int | None) -> bool:
    """Whether the last flag of the trainer that the script then starts is the last of the arguments."""
    try:
        launch = read_launch_script(script, arguments, 1, gpus_per_node)
    except UserError:
        return False
    return END not in launch.flags and list(launch.flags[-2:]) == arguments[-2:]
