"""Reads torchelastic's error files, which a function under `@record` leaves of its exception: error.json.

The forms: {"message": {"message", "extraInfo": {"py_callstack", "timestamp"}, "errorCode"}}, which Python writes;
{"message": "...", "timestamp", "errorCode"}, of C++ and older ones.
"""

import json
import re
from pathlib import Path
from typing import Any

from megatron_lite.errors import UserError, describe_io_error
from megatron_lite.postmortem.evidence import JobEvidence, ProcessEnd
from megatron_lite.postmortem.log_prefixes import find_local_rank_in_path, find_rank_in_path
from megatron_lite.postmortem.python_tracebacks import MAX_ERROR_CHARACTERS, parse_traceback
from megatron_lite.shared_files import read_foreign

MAX_ERROR_FILE_BYTES = 2**24
MAX_TIME_S = 1e11
FIRST_FIELD = re.compile(rb'\s*\{\s*"message"\s*:\s*["{]')
LATER_FIELD = re.compile(rb'"(?:extraInfo|py_callstack|errorCode|timestamp)"\s*:')
NAME_OF_FILE = "error.json"
ERROR_TEXT = re.compile(
    r"(?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Timeout)): ?(?P<message>.*)", re.DOTALL
)


def is_error_file(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is an error file, whatever its name."""
    if not FIRST_FIELD.match(head):
        return False
    return path.name == NAME_OF_FILE or LATER_FIELD.search(head) is not None


def read_error_file(path: Path) -> JobEvidence:
    """Read how a process failed. UserError or OSError for a file that cannot be read."""
    try:
        values = json.loads(read_foreign(path, MAX_ERROR_FILE_BYTES))
    except OSError as error:
        raise UserError(f"{path}: {describe_io_error(error)}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no JSON.") from error
    told = values.get("message") if isinstance(values, dict) else None
    if isinstance(told, str):
        told = {"message": told, "extraInfo": values, "errorCode": values.get("errorCode")}
    if not isinstance(told, dict):
        raise UserError(f"{path}: has no message of an error.")
    extra = told.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return JobEvidence(ends=(_describe_error(path, told, extra),))


def _describe_error(path: Path, told: dict[str, Any], extra: dict[str, Any]) -> ProcessEnd:
    """The end of the process that wrote the file."""
    text = told.get("message")
    text = text if isinstance(text, str) else ""
    found = ERROR_TEXT.match(text)
    error = found["error"] if found else ""
    message = found["message"] if found else text
    stack = extra.get("py_callstack")
    traceback = parse_traceback(stack) if isinstance(stack, str) else None
    if traceback is not None and traceback.error.endswith(error):
        # with its module
        error = traceback.error
    return ProcessEnd(
        source=str(path),
        rank=find_rank_in_path(path),
        local_rank=find_local_rank_in_path(path),
        exit_code=_read_code(told.get("errorCode")),
        error=error,
        message=message.strip()[:MAX_ERROR_CHARACTERS],
        frames=traceback.frames if traceback is not None else (),
        ended_at=_read_timestamp(extra.get("timestamp")),
    )


def _read_code(code: object) -> int | None:
    """An exit code; torchelastic takes it from the process, so that a signal is negative."""
    if isinstance(code, bool) or not isinstance(code, int):
        return None
    return code if code and abs(code) < 2**31 else None


def _read_timestamp(timestamp: object) -> float | None:
    """Seconds since 1970, which are written as text or number."""
    try:
        at = float(timestamp) if isinstance(timestamp, str | int | float) else 0.0
    except (ValueError, OverflowError):
        return None
    return at if 0 < at < MAX_TIME_S else None
