"""Options of a command that stand behind the launch script or the trainer's flags, where people like to add them."""

import argparse
import re
from pathlib import Path

from megatron_lite.cli.launcher import MAX_SCRIPT_BYTES, split_at_trainer
from megatron_lite.cli.parser import END
from megatron_lite.planner.find_processors import count_words_of_name
from megatron_lite.shared_files import read_bounded

ONE_WORD_EACH = (None, 1)


def take_late_options(
    words: list[str], actions: dict[str, argparse.Action], of_script: bool
) -> tuple[list[str], list[str]]:
    """Take a command's options out of words that follow a script or the trainer's flags.

    An option that the script names itself is the script's. Words before the trainer's own, such as srun's, are left
    alone.

    Args:
        words: A script and its arguments, a launch command, or flags of the trainer; no option is a flag of the
            trainer.
        actions: The options of the command by their names.
        of_script: Whether the first word is a script.

    Returns:
        The command's options with their values, and the other words.
    """
    behind = words[1:]
    text = ""
    if of_script:
        text = _read_script(words[0])
    else:
        split = split_at_trainer(words)
        behind = split[1] if split else words
    before = words[: len(words) - len(behind)]
    own = {name: action for name, action in actions.items() if _may_be_late(name, action)}
    options: list[str] = []
    rest: list[str] = []
    at = 0
    while at < len(behind):
        name, equals, _ = behind[at].partition("=")
        if name not in own or _is_named(name, text):
            rest.append(behind[at])
            at += 1
            continue
        number = 1 if equals else 1 + _count_values(own[name], behind[at + 1 :])
        options += behind[at : at + number]
        at += number
    if options and rest[-1:] == [END]:
        # nothing is left behind it
        rest.pop()
    return options, [*before, *rest]


def _may_be_late(name: str, action: argparse.Action) -> bool:
    """Tell whether an option may stand behind the script: all but short ones, which are the script's, and --help."""
    return name.startswith(END) and action.dest not in ("help", "version")


def _is_named(name: str, text: str) -> bool:
    """Tell whether a script's text names an option."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None


def _count_values(action: argparse.Action, words: list[str]) -> int:
    """How many of the words are the option's."""
    if action.nargs == 0:
        return 0
    if action.nargs in ONE_WORD_EACH or not words:
        return min(1, len(words))
    # several names of GPUs: what is none is an argument of the script
    number = max(1, count_words_of_name(words))
    while number < len(words) and (more := count_words_of_name(words[number:])):
        number += more
    return number


def _read_script(path: str) -> str:
    try:
        return read_bounded(Path(path), MAX_SCRIPT_BYTES, follow_link=True)
    except OSError:
        return ""
