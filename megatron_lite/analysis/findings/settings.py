"""Settings of a finding's remedy, read from the flags that its sentence names."""

import re
import shlex

from megatron_lite.formats.setting import Setting

WITHOUT = "without "  # before a flag that the remedy leaves out
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*(=|$)")
OPEN_VALUES = ("N", "M")  # stand for a value that the user chooses


def read_settings(words: str) -> tuple[Setting, ...]:
    """Read what is set together by a finding's flag: flags of the trainer, and variables of the environment.

    Args:
        words: the flag as findings name it: "--num-workers 4", "--manual-gc --manual-gc-interval 100",
            "without --log-params-norm", "OMP_NUM_THREADS=2".
    """
    is_left_out = words.startswith(WITHOUT)
    names: list[str] = []
    values: dict[str, list[str]] = {}
    for word in shlex.split(words.removeprefix(WITHOUT)):
        if word.startswith("--"):
            names.append(word)
        elif VARIABLE.match(word) and word not in OPEN_VALUES:
            name, _, value = word.partition("=")
            names.append(name)
            values[name] = [value] if value else []
        elif word not in OPEN_VALUES:
            values.setdefault(names[-1], []).append(word)
    return tuple(_build_setting(name, None if is_left_out else " ".join(values.get(name, []))) for name in names)


def _build_setting(name: str, value: str | None) -> Setting:
    return Setting(kind="flag" if name.startswith("-") else "variable", name=name, value=value)
