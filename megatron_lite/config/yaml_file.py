"""Reads a file of --yaml-cfg as words of a command line."""

from collections.abc import Iterator
from typing import Any

from megatron_lite.config.flags import Flag
from megatron_lite.shared_files import read_foreign_text

YAML_FLAG = "--yaml-cfg"
MAX_YAML_BYTES = 2**20
MAX_ENTRIES = 10_000  # with what aliases repeat
Word = tuple[str, list[str]]  # a spelling and its values

# Fields of Megatron's configuration classes, and the flags that fill them.
SAME = {
    "fp4": "fp4-format",
    "fp4-param": "fp4-param-gather",
    "fp8": "fp8-format",
    "fp8-param": "fp8-param-gather",
    "init-method": "init-method-xavier-uniform",
    "layernorm-zero-centered-gamma": "apply-layernorm-1p",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "num-moe-experts": "num-experts",
    "overlap-p2p-comm-warmup-flush": "overlap-p2p-communication-warmup-flush",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
}
OTHERWISE_NAMED = {
    "barrier-with-L1-time": "--no-barrier-with-level-1-timing",
    "overlap-p2p-comm": "--no-overlap-p2p-communication",
}
# What Megatron's YAML calls each activation (silu with gated_linear_unit); its gelu is the exact one, fused or not.
YAML_ACTIVATIONS = {
    "swiglu": "--swiglu",
    "silu": "--swiglu",
    "squaredrelu": "--squared-relu",
    "squared_relu": "--squared-relu",
    "gelu": "--no-bias-gelu-fusion",
}
# fields of Megatron-Core's configuration whose names its command line takes no more
CORE_NAMES = {"layernorm-epsilon": "norm-epsilon"}
ACTIVATION_KEYS = ("activation-func", "gated-linear-unit")


def read_yaml(path: str, knobs: dict[str, Flag], names: set[str]) -> tuple[list[Word] | None, list[str]]:
    """Read the settings of a file as words of a command line. Never raises.

    Groups nest freely, names take - or _, lists are several values, true and false set switches, null is "not given".
    The name of what a --no-... flag switches off is a switch too. Unknown names that are false or null ask for nothing.

    Args:
        path: The file.
        knobs: Flags of the trainer, by field name.
        names: Every spelling of a flag that has an answer.

    Returns:
        Each setting as (spelling, values), or None if nothing can be read; and all mistakes, a line each.
    """
    content, why = _read_content(path)
    if content is None:
        return None, [f"{YAML_FLAG} {path}: {why}"]
    leaves = list(_list_leaves(content, (id(content),)))
    by_key = {_spell_dashed(name): value for name, value in leaves}
    words, mistake = _read_activation(by_key)
    mistakes = [mistake] if mistake else []
    off = _find_switches_off(names)
    for name, value in leaves:
        if value is None:
            continue
        key = _spell_dashed(name)
        key = CORE_NAMES.get(key, key)
        flag = knobs.get(key.replace("-", "_"))
        switched_off = None
        if flag is None and f"--{key}" not in names:
            switched_off = off.get(key)
        mistake = _check_kind(value, flag, switched_off)
        if mistake is not None:
            mistakes.append(f"{name}: {mistake}")
        elif key not in ACTIVATION_KEYS:
            words += _read_setting(key, value, flag, switched_off, names)
    return words, [f"{path}: {mistake}" for mistake in mistakes]


def _read_content(path: str) -> tuple[dict[Any, Any] | None, str]:
    """Read the groups and settings of a file: a dict, or None and why it cannot be read."""
    import yaml  # most command lines name no file, and --help and plan are to answer at once

    try:
        content = _load(read_foreign_text(path, MAX_YAML_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        return None, f"cannot be read ({reason}); check the path."
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        return None, f"not YAML{where}; mend the file."
    if not isinstance(content, dict):
        return None, "holds no NAME: VALUE lines; write some, or drop the flag."
    return content, ""


def _check_kind(value: object, flag: Flag | None, switched_off: str | None) -> str | None:
    """Whether a setting has a value where one belongs: what is wrong, or None.

    Args:
        value: What the file gives.
        flag: The flag that it sets, if it is one of the trainer.
        switched_off: The --no-... flag of which it is the other side, if there is one.
    """
    is_switch = flag.is_switch if flag else switched_off is not None
    if is_switch and not isinstance(value, bool):
        return f"{value}: is a switch; give true or false."
    takes_bool = flag is None or flag.is_switch or flag.as_switch
    if isinstance(value, bool) and not takes_bool:
        return f"{str(value).lower()}: is no switch; give its value, or null."
    return None


def _load(text: str) -> Any:
    """The content of YAML. ValueError where a few lines would repeat each other without end."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > MAX_ENTRIES:
                raise ValueError("merged keys repeat each other")

    content = yaml.load(text, Loader)
    if _count_entries(content, {}) > MAX_ENTRIES:
        raise ValueError("aliases repeat each other")
    return content


def _count_entries(value: object, known: dict[int, int]) -> int:
    """How many values it holds, with those of its parts.

    Args:
        value: Anything that YAML holds.
        known: Numbers of parts that are counted already, by their ids.
    """
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) not in known:
        known[id(value)] = 0  # where it stands in itself
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count_entries(part, known) for part in parts)
    return known[id(value)]


def _list_leaves(content: dict[Any, Any], above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The settings of all groups, as (name, value).

    Args:
        content: A group.
        above: Identities of the groups around it, and its own.
    """
    for name, value in content.items():
        if not isinstance(value, dict):
            yield str(name), value
        elif id(value) not in above:  # an alias may point back to the group that it stands in
            yield from _list_leaves(value, (*above, id(value)))


def _spell_dashed(name: str) -> str:
    """A key as a flag spells it, without its dashes in front: bias_swiglu_fusion -> bias-swiglu-fusion."""
    key = name.lstrip("-").replace("_", "-")
    return SAME.get(key, key)


def _find_switches_off(names: set[str]) -> dict[str, str]:
    """Find the --no-... flags by the keys that they switch off: bias-swiglu-fusion -> --no-bias-swiglu-fusion.

    A key is the flag's name without its "no" or "disable", or that behind apply, enable, perform or use.
    """
    off = dict(OTHERWISE_NAMED)
    for name in sorted(names, key=lambda name: ("disable" in name, name)):  # of two spellings, --no-...
        words = name[2:].split("-")
        negation = next((word for word in words if word in ("no", "disable")), None)
        if negation:
            words.remove(negation)
            for before in ("", "apply-", "enable-", "perform-", "use-"):
                off.setdefault(before + "-".join(words), name)
    return off


def _read_setting(key: str, value: object, flag: Flag | None, switched_off: str | None, names: set[str]) -> list[Word]:
    """A knob's field, another spelling, the other side of a --no-... flag, or a name that is unknown."""
    values = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if flag and isinstance(value, bool):
        if flag.as_switch:
            return [(flag.spelling, [flag.as_switch[not value]])]
        return [(flag.spelling, [])] if value != flag.default else []
    if flag:
        return [(flag.spelling, values)]
    if switched_off:
        return [] if value else [(switched_off, [])]
    if value is False or (value == "" and f"--{key}" in names):
        return []
    return [(f"--{key}", [] if value is True else values)]


def _read_activation(values: dict[str, object]) -> tuple[list[Word], str | None]:
    """Read activation_func and gated_linear_unit together, which name one flag.

    Args:
        values: Settings of the whole file, by key.

    Returns:
        The words, and a mistake or None.
    """
    activation = values.get("activation-func")
    gated = values.get("gated-linear-unit")
    swiglu = values.get("swiglu") is True
    shown = f"gated_linear_unit: {str(gated).lower() if isinstance(gated, bool) else gated}"
    if activation is None:
        wrong = gated and not swiglu
        return [], f"{shown}: needs activation_func: swiglu; add it, or give false." if wrong else None
    flag = YAML_ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if flag is None or (activation == "silu" and not (gated or swiglu)):
        return [], f"activation_func: {activation}: choose from swiglu, squaredrelu, gelu."
    if gated and flag != "--swiglu":
        return [], f"{shown}: goes with activation_func: swiglu only, not {activation}; give false."
    for name in ("--swiglu", "--squared-relu"):
        if values.get(_spell_dashed(name)) is True and name != flag:
            key = _spell_dashed(name).replace("-", "_")
            return [], f"{key}: true: contradicts activation_func: {activation}; keep one."
    return [(flag, [])], None
