"""Takes of a damaged record what has the right types."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import UNSET, UnsetType

MAX_RECORD_NUMBER = 2**64  # seeds are the largest numbers in run.json
MAX_RECORD_DEPTH = 32  # of groups in groups in run.json
# what msgspec raises; the last of a key with half a character
NOT_THIS_TYPE = (msgspec.ValidationError, OverflowError, UnicodeEncodeError)
Part = TypeVar("Part", bound=msgspec.Struct)


def convert_sound(values: dict[str, Any], kind: type[Part]) -> tuple[Part, list[str]]:
    """Take what in `values` has the right type.

    Returns:
        The record, and what has another type: "plan.world.size: Expected `int`, got `str`".

    Args:
        values: a JSON object.
        kind: a Struct whose fields all have defaults.
    """
    lost: list[str] = []
    return _convert(_keep_possible(values), kind, "", lost), lost


def _convert(
    values: dict[str, Any],
    kind: type[Part],
    where: str,  # the names of the groups around it, each with a dot behind
    lost: list[str],  # takes what has another type
) -> Part:
    """The record of what in `values` has the right type."""
    with suppress(*NOT_THIS_TYPE):
        return msgspec.convert(values, kind)
    sound = {}
    for field in msgspec.structs.fields(kind):
        if field.name not in values:
            continue
        part = _convert_part(values[field.name], field.type, f"{where}{field.name}", lost)
        if part is not UNSET:
            sound[field.name] = part
    return kind(**sound)


def _convert_part(
    value: object,
    kind: Any,
    where: str,  # its name, with those of the groups around it
    lost: list[str],  # takes what has another type
) -> Any | UnsetType:
    """A field's value, or what of its parts is sound; UNSET where that is nothing."""
    try:
        return msgspec.convert(value, kind)
    except NOT_THIS_TYPE as error:
        problem = str(error).partition(" - at ")[0]
    if isinstance(value, dict):
        for choice in _list_choices(kind):
            if get_origin(choice) is dict:
                _, kind_of_parts = get_args(choice)
                parts = {}
                for name, part in value.items():
                    parts[name] = _convert_part(part, kind_of_parts, f"{where}.{name}", lost)
                return {name: part for name, part in parts.items() if part is not UNSET}
            if _is_partial(choice):
                return _convert(value, choice, f"{where}.", lost)
    lost.append(f"{where}: {problem}")
    return UNSET


def _list_choices(kind: Any) -> Iterator[Any]:
    """The types that a field may have: those of a union, or the one."""
    if isinstance(kind, type) or get_origin(kind) is dict:
        yield kind
    else:
        yield from get_args(kind)


def _is_partial(kind: Any) -> bool:
    """Whether it is a Struct that may lack any of its fields."""
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return False
    return not any(field.required for field in msgspec.structs.fields(kind))


def _keep_possible(value: Any, depth: int = 0) -> Any:
    """The value with None in the place of each number that no run can have said, and of what lies too deep."""
    if depth > MAX_RECORD_DEPTH:
        return None
    if isinstance(value, dict):
        return {name: _keep_possible(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list):
        return [_keep_possible(part, depth + 1) for part in value]
    # NaN is in no range
    if isinstance(value, int | float) and not -MAX_RECORD_NUMBER < value < MAX_RECORD_NUMBER:
        return None
    return value
