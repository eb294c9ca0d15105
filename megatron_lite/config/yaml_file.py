"""The file of --yaml-cfg as words of a command line."""

from pathlib import Path

import yaml

from megatron_lite.config.flags import Flag
from megatron_lite.config.yaml_keys import ACTIVATION_KEYS, activation_words, plain, switches_off

YAML_FLAG = "--yaml-cfg"
Word = tuple[str, list[str]]  # a spelling and its values


def read_yaml(path: str, knobs: dict[str, Flag], names: set[str]) -> tuple[list[Word] | None, list[str]]:
    """([(spelling, values)], mistakes) of the file's settings; None and why, if nothing can be read. Never raises.

    Groups nest freely, names take - or _, lists are several values, true and false set switches, null is "not given".
    The name of what a --no-... flag switches off is a switch too. Unknown names that are false or null ask for nothing.
    knobs: by field name. names: every spelling with an answer.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        return None, [f"{YAML_FLAG} {path}: cannot be read ({reason}); check the path."]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        return None, [f"{YAML_FLAG} {path}: not YAML{where}; mend the file."]
    if not isinstance(content, dict):
        return None, [f"{YAML_FLAG} {path}: holds no NAME: VALUE lines; write some, or drop the flag."]
    return _words(path, content, knobs, names)


def _words(path: str, content: dict, knobs: dict[str, Flag], names: set[str]) -> tuple[list[Word], list[str]]:
    leaves, off = list(_leaves(content, (id(content),))), switches_off(names)
    words, mistake = activation_words({plain(name): value for name, value in leaves})
    mistakes = [mistake] if mistake else []
    for name, value in leaves:
        key = plain(name)
        flag = knobs.get(key.replace("-", "_"))
        switched_off = None if flag or f"--{key}" in names else off.get(key)
        mistake = _mistake(name, value, flag, switched_off)
        if mistake:
            mistakes.append(mistake)
        elif key not in ACTIVATION_KEYS and value is not None:
            words += _of_knob(flag, value) if flag else _of_other(key, value, switched_off, names)
    return words, [f"{path}: {mistake}" for mistake in mistakes]


def _of_knob(flag: Flag, value) -> list[Word]:
    if isinstance(value, bool):
        if flag.as_switch:
            return [(flag.spelling, [flag.as_switch[not value]])]
        return [(flag.spelling, [])] if value != flag.default else []
    return [(flag.spelling, _texts(value))]


def _of_other(key: str, value, switched_off: str | None, names: set[str]) -> list[Word]:
    """What is no knob's field: another spelling, the other side of a --no-... flag, or a name that is unknown."""
    if switched_off:
        return [] if value else [(switched_off, [])]
    if value is False or (value == "" and f"--{key}" in names):
        return []
    return [(f"--{key}", [] if value is True else _texts(value))]


def _texts(value) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _leaves(content: dict, above: tuple[int, ...]):
    for name, value in content.items():
        if not isinstance(value, dict):
            yield str(name), value
        elif id(value) not in above:  # an alias may point back to the group that it stands in
            yield from _leaves(value, (*above, id(value)))


def _mistake(name: str, value, flag: Flag | None, switched_off: str | None) -> str | None:
    if not (flag or switched_off) or value is None:
        return None
    if (switched_off or flag.is_switch) and not isinstance(value, bool):
        return f"{name}: {value}: is a switch; give true or false."
    if isinstance(value, bool) and flag and not (flag.is_switch or flag.as_switch):
        return f"{name}: {str(value).lower()}: is no switch; give its value, or null."
    return None
