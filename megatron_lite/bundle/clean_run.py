"""Writes the files of a run folder anew: run.json, steps.jsonl and ranks.json, by their typed records."""

import json
from contextlib import suppress
from pathlib import Path

import msgspec

from megatron_lite.analysis.run.read_record import read_record
from megatron_lite.analysis.run.step_lines import read_damaged_line
from megatron_lite.bundle.clean_records import clean_record
from megatron_lite.bundle.names import Substitutes
from megatron_lite.formats.failure_record import FailureRecord, encode_failure
from megatron_lite.formats.file_names import RANKS_FILE, RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import RunRecord, encode_run
from megatron_lite.formats.sound_fields import convert_sound
from megatron_lite.formats.step_records import (
    MAX_STEP_LINE_BYTES,
    HardwareRecord,
    RankInterval,
    RanksRecord,
    StepRecord,
)
from megatron_lite.shared_files import open_foreign, read_foreign

Line = StepRecord | RanksRecord[RankInterval] | HardwareRecord
# counts as a line that cannot be read
_UNREADABLE = b"null\n"
# the beginning of a line, as a run leaves it that is killed
_CUT = b"{"


def clean_run(source: Path, target: Path, names: Substitutes) -> None:
    """Write the run in the folder `source` into the folder `target`, without what may not be shown.

    Args:
        source: A run folder.
        target: A folder.
        names: What stands in the place of names.
    """
    record, _ = read_record(source)
    if record is not None:
        names.enter(RUN_FILE)
        _clean_record_of_run(source, target, record, names)
    if (source / STEPS_FILE).is_file():
        names.enter(STEPS_FILE)
        _clean_steps(source / STEPS_FILE, target / STEPS_FILE, names)
    names.enter(RANKS_FILE)
    _clean_verdict(source / RANKS_FILE, target / RANKS_FILE, names)


def _clean_record_of_run(source: Path, target: Path, record: RunRecord, names: Substitutes) -> None:
    with suppress(OSError, ValueError, RecursionError):
        written = json.loads(read_foreign(source / RUN_FILE))
        names.drop("keys that run.json does not have", len(set(written) - set(RunRecord.__struct_fields__)))
    cleaned = clean_record(record, names)
    (target / RUN_FILE).write_text(encode_run(cleaned), encoding="utf-8")
    # starts before this one count, and are not read
    for number, _ in enumerate(sorted(source.glob("run-*.json")), start=1):
        (target / f"run-{number}.json").write_text("{}\n", encoding="utf-8")


def _clean_steps(source: Path, target: Path, names: Substitutes) -> None:
    decode = msgspec.json.Decoder(Line).decode
    encode = msgspec.json.Encoder().encode
    with open_foreign(source) as read, target.open("wb") as written:
        while text := read.readline(MAX_STEP_LINE_BYTES):
            line: Line | None
            try:
                line = decode(text)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                if not text.endswith(b"\n") and len(text) < MAX_STEP_LINE_BYTES:
                    written.write(_CUT)
                    return
                found = read_damaged_line(text)
                line = found if isinstance(found, StepRecord) else None
            if line is not None:
                written.write(encode(clean_record(line, names)) + b"\n")
            elif text.strip():
                names.drop("lines that cannot be read")
                written.write(_UNREADABLE)


def _clean_verdict(source: Path, target: Path, names: Substitutes) -> None:
    """Write ranks.json, where there is one."""
    try:
        values = json.loads(read_foreign(source))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(values, dict):
        failure, _ = convert_sound(values, FailureRecord)
        target.write_text(encode_failure(clean_record(failure, names)), encoding="utf-8")
