"""The file of --yaml-cfg as words of a command line."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_lite.config.flags import Flag

# --- keys of Megatron-LM's YAML files that are not named as the flag that sets them

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
# What Megatron's YAML calls each activation; its gelu is the exact one, whatever is fused.
ACTIVATIONS = {
    "swiglu": "--swiglu",
    "silu": "--swiglu",  # with gated_linear_unit
    "squaredrelu": "--squared-relu",
    "squared_relu": "--squared-relu",
    "gelu": "--no-bias-gelu-fusion",
}
ACTIVATION_KEYS = ("activation-func", "gated-linear-unit")


def plain(name: str) -> str:
    """A key as a flag spells it, without its dashes in front: bias_swiglu_fusion -> bias-swiglu-fusion."""
    key = name.lstrip("-").replace("_", "-")
    return SAME.get(key, key)


def switches_off(names: Iterable[str]) -> dict[str, str]:
    """{key: the one of `names` that switches it off}: bias-swiglu-fusion -> --no-bias-swiglu-fusion.

    The key is the flag's name without its "no" or "disable", or that behind apply, enable, perform or use.
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


def activation_words(values: dict[str, object]) -> tuple[list[tuple[str, list[str]]], str | None]:
    """(words, mistake) of activation_func and gated_linear_unit, in {key: value} of the whole file."""
    activation, gated = values.get("activation-func"), values.get("gated-linear-unit")
    swiglu = values.get("swiglu") is True
    if activation is None:
        if gated and not swiglu:
            return [], f"gated_linear_unit: {_shown(gated)}: needs activation_func: swiglu; add it, or give false."
        return [], None
    flag = ACTIVATIONS.get(activation) if isinstance(activation, str) else None
    if flag is None or (activation == "silu" and not (gated or swiglu)):
        return [], f"activation_func: {activation}: choose from swiglu, squaredrelu, gelu."
    if gated and flag != "--swiglu":
        return (
            [],
            f"gated_linear_unit: {_shown(gated)}: goes with activation_func: swiglu only, not {activation}; give false.",
        )
    asked = [name for name in ("--swiglu", "--squared-relu") if values.get(plain(name)) is True and name != flag]
    if asked:
        key = plain(asked[0]).replace("-", "_")
        return [], f"{key}: true: contradicts activation_func: {activation}; keep one."
    return [(flag, [])], None


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


YAML_FLAG = "--yaml-cfg"
Word = tuple[str, list[str]]  # a spelling and its values


def read_yaml(path: str, knobs: dict[str, Flag], names: set[str]) -> tuple[list[Word] | None, list[str]]:
    """([(spelling, values)], mistakes) of the file's settings; None and why, if nothing can be read. Never raises.

    Groups nest freely, names take - or _, lists are several values, true and false set switches, null is "not given".
    The name of what a --no-... flag switches off is a switch too. Unknown names that are false or null ask for nothing.
    knobs: by field name. names: every spelling with an answer.
    """
    import yaml  # most command lines name no file, and --help and plan are to answer at once

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


def _words(path: str, content: dict[Any, Any], knobs: dict[str, Flag], names: set[str]) -> tuple[list[Word], list[str]]:
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


def _of_knob(flag: Flag, value: object) -> list[Word]:
    if isinstance(value, bool):
        if flag.as_switch:
            return [(flag.spelling, [flag.as_switch[not value]])]
        return [(flag.spelling, [])] if value != flag.default else []
    return [(flag.spelling, _texts(value))]


def _of_other(key: str, value: object, switched_off: str | None, names: set[str]) -> list[Word]:
    """What is no knob's field: another spelling, the other side of a --no-... flag, or a name that is unknown."""
    if switched_off:
        return [] if value else [(switched_off, [])]
    if value is False or (value == "" and f"--{key}" in names):
        return []
    return [(f"--{key}", [] if value is True else _texts(value))]


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _leaves(content: dict[Any, Any], above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if not isinstance(value, dict):
            yield str(name), value
        elif id(value) not in above:  # an alias may point back to the group that it stands in
            yield from _leaves(value, (*above, id(value)))


def _mistake(name: str, value: object, flag: Flag | None, switched_off: str | None) -> str | None:
    if not (flag or switched_off) or value is None:
        return None
    if (flag is None or flag.is_switch) and not isinstance(value, bool):
        return f"{name}: {value}: is a switch; give true or false."
    if isinstance(value, bool) and flag and not (flag.is_switch or flag.as_switch):
        return f"{name}: {str(value).lower()}: is no switch; give its value, or null."
    return None
