"""The file of --yaml-cfg as words of a command line."""

from pathlib import Path

import yaml

from megatron_lite.config.flags import Flag, dashed

YAML_FLAG = "--yaml-cfg"


def read_yaml(path: str, knobs: dict[str, Flag], names: set[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """([(spelling, values)], mistakes) of the file's settings. Never raises.

    Groups nest freely, names take - or _, lists are several values, true and false set switches, null is "not given".
    knobs: by field name. names: every spelling with an answer.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        return [], [f"{YAML_FLAG} {path}: cannot be read ({reason}); check the path."]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        return [], [f"{YAML_FLAG} {path}: not YAML{where}; mend the file."]
    if not isinstance(content, dict):
        return [], [f"{YAML_FLAG} {path}: holds no NAME: VALUE lines; write some, or drop the flag."]
    return _words(path, content, knobs, names)


def _words(path: str, content: dict, knobs: dict[str, Flag], names: set[str]):
    words, mistakes = [], []
    for name, value in _leaves(content, (id(content),)):
        flag = knobs.get(name.lstrip("-").replace("-", "_"))
        spelling = flag.spelling if flag else dashed(name.lstrip("-"))
        mistake = _mistake(name, value, flag)
        if mistake:
            mistakes.append(f"{path}: {mistake}")
        elif isinstance(value, bool) and flag is not None and flag.as_switch:
            words.append((spelling, [flag.as_switch[not value]]))
        elif isinstance(value, bool):
            off = flag is not None and flag.default
            if value != off or spelling not in names:
                words.append((spelling, []))
        elif value is not None:
            words.append((spelling, [str(item) for item in value] if isinstance(value, list) else [str(value)]))
    return words, mistakes


def _leaves(content: dict, above: tuple[int, ...]):
    for name, value in content.items():
        if not isinstance(value, dict):
            yield str(name), value
        elif id(value) not in above:  # an alias may point back to the group that it stands in
            yield from _leaves(value, (*above, id(value)))


def _mistake(name: str, value, flag: Flag | None) -> str | None:
    if flag is None or value is None:
        return None
    if flag.is_switch and not isinstance(value, bool):
        return f"{name}: {value}: is a switch; give true or false."
    if isinstance(value, bool) and not (flag.is_switch or flag.as_switch):
        return f"{name}: {str(value).lower()}: is no switch; give its value, or null."
    return None
