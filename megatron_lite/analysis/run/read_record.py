"""Reads run.json: what of it is sound, and what is wrong with the rest."""

import json
from pathlib import Path
from typing import Any

import msgspec

from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.formats.run_record import RUN_SCHEMA, RunRecord, Settings
from megatron_lite.formats.sound_fields import convert_sound
from megatron_lite.process_state import is_there
from megatron_lite.shared_files import read_foreign

MAX_NAMED_FIELDS = 3  # fields that a note names
RUNNING = "running"
LOST = "killed or lost: its process is gone"
UNCERTAIN = "running, or killed"


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
