"""Where a missing value of a launch script would come from: a command that was not run, an argument, or a variable of
the cluster."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_HOPS = 6  # from a flag over variables to their source
LONGEST_COMMAND = 60
FLAG = re.compile(r"--[\w-]+")
VALUE = r"(\"[^\"]*\"|'[^']*'|\$\([^)]*\)|\S+)"
# A variable as $NAME, ${NAME...}, or a bare name in arithmetic; an argument as $1.
USED = re.compile(r"\$\{?#?(\w+)|\b([A-Za-z_]\w*)(?=\W*[*/+-])")
COMMAND = re.compile(r"\$\((?!\()(.*)\)|`([^`]*)`", re.DOTALL)


@dataclass(frozen=True)
class _Source:
    """The origin of a missing value. variable: the last one before the source; command: what was not run; name: an
    argument or a variable without a value."""

    variable: str = ""
    command: str = ""
    name: str = ""


def explain_empty_values(lines: Sequence[str], left_out: Sequence[Sequence[str]], text: str, script: str) -> list[str]:
    """Say in the trainer's objections where a missing value would come from.

    Args:
        lines: the objections.
        left_out: commands whose output the script may have wanted.
        text: of the script and of those that it starts.
        script: its name.
    """
    explained = []
    named = set()
    for line in lines:
        flag = FLAG.match(line)
        source = _find_source(flag[0], left_out, text) if flag else None
        is_empty = line.endswith("got none.")
        if flag is None or source is None or not (is_empty or source.command):
            explained.append(line)
        elif is_empty or source.name:
            explained.append(f"{flag[0]} is empty: {_explain_source(source, script)}")
        else:
            explained.append(line)
            if source not in named:
                explained.append(f"{flag[0]}: {_explain_command(source, ', from which it comes,')}")
        named.add(source)
    return explained


def _explain_source(source: _Source, script: str) -> str:
    """Say what is behind an empty value, and how to give it."""
    if source.name.isdigit():
        return f"it is argument {source.name} of {script}; give it."
    if source.name:
        return f"{source.name} has no value here; give it: {source.name}=VALUE megatron-lite plan {script} ..."
    return _explain_command(source)


def _explain_command(source: _Source, whence: str = "") -> str:
    """Say which command was not run, and where to write the value that it would have given."""
    where = f"{source.variable}=VALUE" if source.variable else "its value"
    return f"`{source.command}`{whence} was not run; write {where} into the script."


def _find_source(flag: str, left_out: Sequence[Sequence[str]], text: str) -> _Source | None:
    """Find what is behind the value of a flag, over other variables: first of all a command, else what has no value
    itself."""
    name = re.escape(flag).replace(r"\-", "[-_]")
    waiting = [("", value) for value in re.findall(rf"{name}[= \t]+{VALUE}", text)]
    seen: set[str] = set()
    without_value = None
    for _ in range(MAX_HOPS):
        following = []
        for variable, value in waiting:
            command = _find_command(value, left_out)
            if command:
                return _Source(variable, command)
            for found in USED.finditer(value):
                inner = found[1] or found[2]
                if inner in seen or (found[2] and inner not in text.replace(value, "")):
                    continue
                seen.add(inner)
                assigned = re.findall(rf"(?m)(?:^|[\s;(])(?:export[ \t]+)?{re.escape(inner)}=(.*)$", text)
                following += [(inner, right) for right in assigned]
                if not assigned and found[1] and without_value is None:
                    without_value = _Source(variable, name=inner)
        waiting = following
    return without_value


def _find_command(value: str, left_out: Sequence[Sequence[str]]) -> str | None:
    """The command inside $(...) or `...` of a value that was not run."""
    found = COMMAND.search(value)
    if found is None:
        return None
    inside = found[1] or found[2] or ""
    for command in left_out:
        program = re.escape(command[0].rpartition("/")[2])
        if re.search(rf"(?:^|[\s;|&(/]){program}(?:[\s;|&)]|$)", inside):
            shown = " ".join(" ".join(command).split())
            return shown if len(shown) <= LONGEST_COMMAND else f"{shown[:LONGEST_COMMAND]}..."
    return None
