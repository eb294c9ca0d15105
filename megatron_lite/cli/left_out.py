"""Which command that was not run a missing value of a launch script comes from."""

import re
from collections.abc import Sequence

MAX_STEPS = 6  # from a flag over variables to a command
LONGEST_COMMAND = 60
FLAG = re.compile(r"--[\w-]+")


def explain_empty_values(lines: Sequence[str], left_out: Sequence[Sequence[str]], text: str) -> list[str]:
    """The trainer's objections; where a value is missing since a command was not run, the line names both.

    Args:
        lines: the objections.
        left_out: commands whose output the script may have wanted.
        text: of the script and of those that it starts.
    """
    explained, told = [], set()
    for line in lines:
        flag = FLAG.match(line)
        source = _find_source(flag[0], left_out, text) if flag else None
        if not flag or source is None:
            explained.append(line)
            continue
        variable, command = source
        where = f"write {variable}=VALUE into the script" if variable else "write its value into the script"
        if line.endswith("got none."):
            explained.append(f"{flag[0]} is empty: `{command}` was not run; {where}.")
        else:
            explained.append(line)
            if source not in told:
                explained.append(f"{flag[0]}: `{command}`, from which it comes, was not run; {where}.")
        told.add(source)
    return explained


def _find_source(flag: str, left_out: Sequence[Sequence[str]], text: str) -> tuple[str, str] | None:
    """(the variable that it sets, or nothing; the command) behind the value of a flag, over other variables."""
    name = re.escape(flag).replace(r"\-", "[-_]")
    values = re.findall(rf"{name}[= \t]+(\"[^\"]*\"|'[^']*'|\$\([^)]*\)|\S+)", text)
    waiting = [("", value) for value in values]
    seen: set[str] = set()
    for _ in range(MAX_STEPS):
        following = []
        for variable, value in waiting:
            command = _find_command(value, left_out)
            if command:
                return variable, command
            for other in re.findall(r"\$\{?#?(\w+)|\b([A-Za-z_]\w*)(?=[^\w]*[*/+-])", value):
                inner = other[0] or other[1]
                if inner not in seen:
                    seen.add(inner)
                    following += [(inner, found) for found in re.findall(rf"(?m)\b{re.escape(inner)}=(.*)$", text)]
        waiting = following
    return None


def _find_command(value: str, left_out: Sequence[Sequence[str]]) -> str | None:
    """The command inside $(...) or `...` of a value that was not run."""
    inside = (
        " ".join(re.findall(r"\$\((?!\()(.*)\)|`([^`]*)`", value, re.DOTALL)[0])
        if re.search(r"\$\((?!\()|`", value)
        else ""
    )
    for command in left_out:
        if re.search(rf"(?:^|[\s;|&(/]){re.escape(command[0].rpartition('/')[2])}(?:[\s;|&)]|$)", inside):
            shown = " ".join(" ".join(command).split())
            return shown if len(shown) <= LONGEST_COMMAND else f"{shown[:LONGEST_COMMAND]}..."
    return None
