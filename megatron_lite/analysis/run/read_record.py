"""Reads run.json: what of it is sound, and what is wrong with the rest."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from msgspec import UNSET, UnsetType

from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.formats.run_record import RUN_SCHEMA, RunRecord, Settings
from megatron_lite.process_state import is_there
from megatron_lite.shared_files import read_foreign

MAX_RECORD_NUMBER = 2**64  # seeds are the largest numbers in run.json
MAX_RECORD_DEPTH = 32  # of groups in groups in run.json
MAX_NAMED_FIELDS = 3  # fields that a note names
# what msgspec raises; the last of a key with half a character
NOT_THIS_TYPE = (msgspec.ValidationError, OverflowError, UnicodeEncodeError)
RUNNING = "running"
LOST = "killed or lost: its process is gone"
UNCERTAIN = "running, or killed"
Part = TypeVar("Part", bound=msgspec.Struct)


def read_record(folder: Path) -> tuple[RunRecord | None, list[str]]:
    """Read run.json, with the status that its process has now.

    Returns:
        The record, None where nothing can be read; and what is wrong with it.
    """
    record, notes = _read_file(folder)
    if record is None or record.status != RUNNING:
        return record, notes
    # a process that was killed cannot write how it ended
    there = None if record.process is None else is_there(msgspec.to_builtins(record.process))
    if there is False:  # it may have ended, and written so, since the file was read
        record, notes = _read_file(folder)
    if record is not None and record.status == RUNNING:
        status = {True: RUNNING, False: LOST, None: UNCERTAIN}[there]
        record = msgspec.structs.replace(record, status=status)
    return record, notes


def _read_file(folder: Path) -> tuple[RunRecord | None, list[str]]:
    """The record as the file holds it, and what is wrong with it."""
    try:
        values = json.loads(read_foreign(folder / RUN_FILE))
    except FileNotFoundError:
        return None, [f"there is no {RUN_FILE}, so that the run's flags, hardware and end are unknown."]
    except OSError as error:
        return None, [f"{RUN_FILE} cannot be opened ({error.strerror})."]
    except (ValueError, RecursionError):
        return None, [f"{RUN_FILE} is damaged: it is no JSON."]
    if not isinstance(values, dict):
        return None, [f"{RUN_FILE} is damaged: it is no JSON object."]
    if not values:
        return None, [f"{RUN_FILE} is empty."]
    _add_settings(values)
    record, lost = convert_sound(values, RunRecord)
    notes = []
    if lost:
        some = "; ".join(lost[:MAX_NAMED_FIELDS])
        if len(lost) > MAX_NAMED_FIELDS:
            some += f"; and {len(lost) - MAX_NAMED_FIELDS} more"
        notes.append(f"{RUN_FILE} is damaged, and what is damaged counts as unknown: {some}.")
    if record.schema != RUN_SCHEMA:
        has = f"{RUN_FILE} has schema {values.get('schema')!r}"
        notes.append(f"{has}, and this reader knows {RUN_SCHEMA}: some of it may be misread.")
    return record, notes


def _add_settings(values: dict[str, Any]) -> None:
    """Give a plan without settings those that stand among its flags.

    Runs recorded before there were settings have their flags in groups alone: without this, each would count as left
    out.

    Args:
        values: the JSON object of run.json, which is changed.
    """
    plan = values.get("plan")
    if not isinstance(plan, dict) or "settings" in plan:
        return
    groups = plan.get("args")
    if not isinstance(groups, dict):
        return
    names = {field.name for field in msgspec.structs.fields(Settings)}
    settings = {}
    for group in groups.values():
        if isinstance(group, dict):
            settings.update({name: value for name, value in group.items() if name in names})
    plan["settings"] = settings


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
