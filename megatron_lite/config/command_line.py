"""argv and YAML -> Args, with every mistake collected instead of stopping at the first."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megatron_lite.config.args import Args
from megatron_lite.config.flags import Flag, build, dashed, flags_of
from megatron_lite.config.megatron import ACCEPTED, REFUSED, RESPELLED, RETIRED, answers

YAML_FLAG = "--yaml-cfg"


@dataclass
class CommandLine:
    """What was typed: the flags' values, notes to print once, and mistakes, one line each."""

    args: Args | None = None
    values: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)  # fields named by the user
    broken: set[str] = field(default_factory=set)  # spellings whose value could not be read


def read_command_line(argv: list[str]) -> CommandLine:
    """Read `argv`, with the file of --yaml-cfg below it. Never raises: see `.mistakes`."""
    line = CommandLine()
    known = {spelling: flag for flag in flags_of(Args) for spelling in flag.spellings}
    words = _words(argv, line)
    for path in [values[0] for name, values in words if name == YAML_FLAG and len(values) == 1]:
        words = _yaml_words(path, known, line) + words
    for name, values in words:
        if name == YAML_FLAG:
            if len(values) != 1:
                line.mistakes.append(f"{YAML_FLAG}: give one file.")
            continue
        _take(name, values, known, line)
    line.args = build(Args, line.values)
    return line


def _words(argv: list[str], line: CommandLine) -> list[tuple[str, list[str]]]:
    """['--lr', '1', '--fp16'] -> [('--lr', ['1']), ('--fp16', [])]; `--lr=1` is the same."""
    words: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("-") and not _is_number(token):
            name, equals, value = token.partition("=")
            words.append((name, [value] if equals else []))
        elif words:
            words[-1][1].append(token)
        else:
            line.mistakes.append(f"'{token}' stands before any flag; put a flag in front of it, or drop it.")
    return words


def _take(name: str, values: list[str], known: dict[str, Flag], line: CommandLine):
    accepted, refused, retired = answers(ACCEPTED), answers(REFUSED), answers(RETIRED)
    if name in known:
        _read_value(name, known[name], values, line)
    elif name in RESPELLED:
        first, *rest = RESPELLED[name]
        line.notes.append(f"{name} is an old spelling of {' '.join((first, *rest))}.")
        for new_name, new_values in _words([first, *rest, *values], line):
            _take(new_name, new_values, known, line)
    elif name in accepted:
        line.notes.append(f"{name} has no effect here: {accepted[name]}.")
    elif name in retired:
        line.notes.append(f"{name} was retired by Megatron-LM and has no effect: {retired[name]}.")
    elif name in refused:
        line.mistakes.append(f"{name} is refused: {refused[name]}.")
    else:
        _refuse_unknown(name, _all_names(known), line)


def _all_names(known: dict[str, Flag]) -> list[str]:
    return [*known, *answers(ACCEPTED), *answers(RETIRED), *answers(REFUSED), *RESPELLED, YAML_FLAG]


def _refuse_unknown(name: str, names: list[str], line: CommandLine):
    near = difflib.get_close_matches("--" + name.lstrip("-").replace("_", "-"), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "--help lists them all."
    line.mistakes.append(f"{name} is not a flag; {hint}")
    line.broken.update(near)  # most likely what was meant: do not call it missing as well


def _read_value(name: str, flag: Flag, values: list[str], line: CommandLine):
    value, mistake = _convert(name, flag, values)
    if mistake:
        line.mistakes.append(mistake)
        line.broken.update(flag.spellings)
        return
    line.values[flag.field] = value
    line.given.add(flag.field)


def _convert(name: str, flag: Flag, values: list[str]) -> tuple[object, str | None]:
    """(value, None), or (None, what is wrong)."""
    if flag.is_switch:
        if values:
            return None, f"{name} takes no value, got '{' '.join(values)}'; drop that."
        return not flag.default, None
    if flag.many:
        if not values and not flag.optional and flag.kind is not str:
            return None, f"{name} needs at least one value."
        items = [_convert_one(name, flag, value) for value in values]
        wrong = [mistake for _, mistake in items if mistake]
        return (None, wrong[0]) if wrong else (tuple(item for item, _ in items), None)
    if len(values) != 1:
        got = f"got {len(values)}: '{' '.join(values)}'" if values else "got none"
        return None, f"{name} takes one value, {got}."
    return _convert_one(name, flag, values[0])


def _convert_one(name: str, flag: Flag, text: str) -> tuple[object, str | None]:
    if flag.choices and text not in flag.choices:
        near = difflib.get_close_matches(text, flag.choices, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        return None, f"{name} {text}: choose from {', '.join(flag.choices)}{hint}"
    try:
        return flag.kind(text), None
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[flag.kind]
        return None, f"{name} {text}: needs {kind}."


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def _yaml_words(path: str, known: dict[str, Flag], line: CommandLine) -> list[tuple[str, list[str]]]:
    """The file's settings as flags. Groups nest freely; names take - or _; true and false set switches."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        line.mistakes.append(f"{YAML_FLAG} {path}: cannot be read ({reason}); check the path.")
        return []
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        line.mistakes.append(f"{YAML_FLAG} {path}: not YAML{where}; mend the file.")
        return []
    if not isinstance(content, dict):
        line.mistakes.append(f"{YAML_FLAG} {path}: must hold NAME: VALUE lines.")
        return []
    by_field = {flag.field: flag for flag in known.values()}
    names = set(_all_names(known))
    return [word for name, value in _leaves(content) for word in _yaml_word(str(name), value, by_field, names)]


def _leaves(content: dict):
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, value


def _yaml_word(name: str, value, by_field: dict[str, Flag], names: set[str]) -> list[tuple[str, list[str]]]:
    """`fp16: true` -> --fp16; `add_bias_linear: false` -> --disable-bias-linear; `lr: 1e-4` -> --lr 1e-4."""
    flag = by_field.get(name.lstrip("-").replace("-", "_"))
    if value is None:
        return []
    spelling = flag.spelling if flag else dashed(name.lstrip("-"))
    if isinstance(value, bool):
        off = flag.default if flag and flag.is_switch else False
        return [(spelling, [])] if value != off or spelling not in names else []
    values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return [(spelling, values)]
