"""Reads argv and YAML files into Args. Collects all mistakes instead of stopping at the first."""

import math
from dataclasses import dataclass, field

from megatron_lite.config import flags
from megatron_lite.config.args import Args
from megatron_lite.config.flags import RENAMED, RESPELLED, Flag, list_flags, read_flags
from megatron_lite.config.misspelled import describe_unknown, find_closest
from megatron_lite.config.yaml_file import YAML_FLAG, read_yaml
from megatron_lite.units import is_number

MAX_EXACT_NUMBER = 2**53  # JSON and doubles hold no larger ones exactly
# of fp32, without its denormal numbers
MIN_FLOAT = 1.17549435e-38
MAX_FLOAT = 3.40282346e38


@dataclass
class CommandLine:
    """A command line as it was typed: the flags' values, notes to print once, and mistakes, one line each."""

    args: Args = field(default_factory=Args)
    values: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # spellings whose value could not be read
    unread: bool = False  # a file of settings is missing: what it would have said is unknown
    spelled: dict[str, str] = field(default_factory=dict)  # {field that the user set: the spelling that set it}


def read_command_line(argv: list[str]) -> CommandLine:
    """Read `argv`, with the files of --yaml-cfg below it. Never raises: see `.mistakes`."""
    line = CommandLine()
    known = _list_spellings(Args)
    words = split_words(argv, line)
    for name, values in words:
        if name == YAML_FLAG:
            line.spelled.clear()
            _take_file(values, known, line)
    line.spelled.clear()  # only two spellings in one place contradict each other
    for name, values in words:
        if name != YAML_FLAG:
            _take(name, values, known, line)
    line.args = flags.build(Args, line.values)
    return line


def read_values(words: list[tuple[str, list[str]]], root_class: type) -> CommandLine:
    """Read flags of another root class than Args.

    Their values and mistakes are in the result, whose args mean nothing.
    """
    line = CommandLine()
    known = _list_spellings(root_class)
    for name, values in words:
        _take(name, values, known, line)
    return line


def _list_spellings(root_class: type) -> dict[str, Flag]:
    """Flags by each of their spellings."""
    known = {}
    for flag in list_flags(root_class):
        for spelling in flag.spellings:
            known[spelling] = flag
    return known


def _take_file(values: list[str], known: dict[str, Flag], line: CommandLine) -> None:
    """Take the settings of a YAML file into `line`.

    Args:
        values: What --yaml-cfg was given: the file.
        known: Flags by spelling.
        line: What was read so far.
    """
    if len(values) != 1:
        line.mistakes.append(f"{YAML_FLAG} takes one file, got {len(values)}.")
        line.unread = True
        return
    [path] = values
    knobs = {flag.field: flag for flag in known.values()}
    of_file, mistakes = read_yaml(path, knobs, {*known, YAML_FLAG, *read_flags()})
    line.mistakes += mistakes
    if of_file is None:
        line.unread = True
        return
    before = len(line.mistakes)
    for name, settings in of_file:
        _take(name, settings, known, line)
    line.mistakes[before:] = [f"{path}: {mistake}" for mistake in line.mistakes[before:]]


def split_words(argv: list[str], line: CommandLine) -> list[tuple[str, list[str]]]:
    """Split words into flags with their values: ["--lr", "1", "--fp16"] -> [("--lr", ["1"]), ("--fp16", [])].

    `--lr=1` is the same.

    Args:
        argv: The words.
        line: Gets the mistakes.
    """
    words: list[tuple[str, list[str]]] = []
    for token in argv:
        is_negative = is_number(token) or token[1:2].isdigit()  # --window-size -1,0
        if token.startswith("-") and not is_negative:
            name, equals, value = token.partition("=")
            words.append((name, [value] if equals else []))
        elif words:
            words[-1][1].append(token)
        else:
            line.mistakes.append(f"'{token}' stands before any flag; put a flag in front of it, or drop it.")
    return words


def _take(name: str, values: list[str], known: dict[str, Flag], line: CommandLine) -> None:
    """Take one flag with its values into `line`, whatever it turns out to be."""
    theirs = read_flags().get(name)
    if name in known:
        _take_known(name, known[name], values, line)
    elif theirs and theirs.answer == RESPELLED:
        line.notes.append(f"{name} is an old spelling of {theirs.text}.")
        for new_name, new_values in split_words([*theirs.text.split(), *values], line):
            _take(new_name, new_values, known, line)
    elif theirs:
        text, is_mistake = flags.describe_flag(theirs, values)
        place = line.mistakes if is_mistake else line.notes
        place.append(text)
        if theirs.answer == RENAMED:
            # what was meant is there: do not call it missing as well
            line.broken.update(theirs.text.split())
    elif name == YAML_FLAG:
        line.mistakes.append(f"{YAML_FLAG} is in a settings file; give all files on the command line.")
    else:
        mistake, near = describe_unknown(name, [*known], [YAML_FLAG])
        line.mistakes.append(mistake)
        line.broken.update(near)  # most likely what was meant: do not call it missing as well


def _take_known(name: str, flag: Flag, values: list[str], line: CommandLine) -> None:
    """Take a flag of this trainer, by one of its spellings."""
    value, mistake = _convert(name, flag, values)
    if mistake:
        line.mistakes.append(mistake)
        line.broken.update(flag.spellings)
        return
    before = line.values.get(flag.field)
    earlier = line.spelled.get(flag.field, name)
    if earlier != name and before != value:
        line.mistakes.append(f"{earlier} {before} and {name} {value} are one setting; keep one.")
    line.values[flag.field] = value
    line.spelled[flag.field] = name


def _convert(name: str, flag: Flag, values: list[str]) -> tuple[object, str | None]:
    """Convert the values of a flag: (value, None), or (None, what is wrong)."""
    if flag.is_switch:
        if not values:
            return not flag.default, None
        got = f"got '{' '.join(values)}'"
        return None, f"{name} is a switch and takes no value, {got}; drop the value, or the flag to switch it off."
    if flag.as_switch and not values:
        return flag.as_switch[0], None
    if flag.many:
        return _convert_many(name, flag, values)
    if len(values) != 1:
        got = f"got {len(values)}: '{' '.join(values)}'" if values else "got none"
        return None, f"{name} takes one value, {got}."
    value, mistake = _convert_one(name, flag, values[0])
    if flag.zero_is_off and value == 0:
        return None, mistake
    return value, mistake


def _convert_many(name: str, flag: Flag, values: list[str]) -> tuple[object, str | None]:
    """The values of a flag that takes several, as _convert has them; of mistakes the first."""
    if flag.kind is int:
        # Megatron-LM's own test scripts quote several numbers as one word
        quoted = values
        values = []
        for value in quoted:
            values += value.split() or [value]
    if not values:
        return None, f"{name} takes one value or more, got none."
    items = []
    for text in values:
        item, mistake = _convert_one(name, flag, text)
        if mistake:
            return None, mistake
        items.append(item)
    return tuple(items), None


def _convert_one(name: str, flag: Flag, text: str) -> tuple[object, str | None]:
    """The value that a word spells, as _convert has it."""
    if flag.choices and text not in flag.choices:
        same = [choice for choice in flag.choices if choice.lower() == text.lower()]
        near = same or find_closest(text, flag.choices, 0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        return None, f"{name} {text}: choose from {', '.join(flag.choices)}{hint}"
    is_blank = not text.strip() and text != flag.default
    if is_blank or "\0" in text:
        return None, f"{name} {text!r}: is no usable value; give one, or drop the flag."
    try:
        value = flag.kind(text)
    except ValueError:
        return None, f"{name} {text}: needs {'a whole number' if flag.kind is int else 'a number'}."
    if flag.kind is float and not math.isfinite(value):
        return None, f"{name} {text}: needs a finite number."
    if flag.kind is float and value and not MIN_FLOAT <= abs(value) <= MAX_FLOAT:
        return None, f"{name} {text}: needs 0 or a number that fp32 holds, from {MIN_FLOAT:g} to {MAX_FLOAT:g}."
    if flag.kind is int and abs(value) > MAX_EXACT_NUMBER:
        return None, f"{name} {text}: needs a whole number of at most 2^53 = {MAX_EXACT_NUMBER}."
    return value, None
