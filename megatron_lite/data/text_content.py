"""Decides by its first bytes what an input file of text holds: its name is only a promise."""

import json
import re
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path

from megatron_lite.data.compression import HEAD_BYTES, FileKind, find_kind, find_kind_of_name, unpack
from megatron_lite.errors import DataError
from megatron_lite.shared_files import open_foreign

# Megatron's "loose json" goes by any of these names.
JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines", ".ldjson")
SAMPLE_BYTES = 1 << 16
MAX_SAMPLE_LINES = 100
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TABLES = (".csv", ".tsv")
# A JSON object whose end is not among the sampled bytes.
OPENS_OBJECT = re.compile(r'\{\s*"(\\.|[^"\\])*"\s*:')
UNREADABLE = (OSError, EOFError, zlib.error, LZMAError)
COLUMN_NAME = re.compile(r"[A-Za-z_][\w-]*")
QUOTED_CHARACTERS = 40


@dataclass(frozen=True)
class TextContent:
    """How an input file is to be read."""

    kind: FileKind | None  # of its compression
    is_jsonl: bool  # one object a line; else the file is one document
    notes: tuple[str, ...] = ()  # where the name promises something else


def explain_unreadable(path: str, error: Exception) -> DataError:
    """The error for a file that could not be read or decompressed, of one line."""
    why = getattr(error, "strerror", None) or error
    return DataError(f"--input {path}: cannot be read ({why}); check its permissions, or copy the file again")


def look_into(path: str | Path, json_keys: Sequence[str]) -> TextContent:
    """Decide how a file is to be read.

    Args:
        path: Path of the file.
        json_keys: Keys whose texts are wanted, should it hold JSON.

    Raises:
        DataError: The file is neither text nor JSON lines; the message has the remedy.
    """
    path = str(path)
    try:
        with open_foreign(path) as packed:
            kind = find_kind(packed.read(HEAD_BYTES))
            packed.seek(0)
            with closing(unpack(path, packed, kind)) as file:
                head = file.read(SAMPLE_BYTES)
    except UNREADABLE as error:
        raise explain_unreadable(path, error) from None
    inner = find_kind(head)
    if kind and inner:
        remedy = inner.remedy or "unpack it once"
        raise DataError(f"--input {path}: is {inner.name} inside of {kind.name}, which is not read; {remedy}")
    notes = _compare_compression(path, kind)
    promised = find_kind_of_name(path)
    name = Path(path).with_suffix("").name if promised else Path(path).name
    ending = Path(name).suffix.lower()
    text = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace")
    is_whole = len(head) < SAMPLE_BYTES
    if not text.strip():
        return TextContent(kind, ending in JSON_LINES, notes)
    is_jsonl = _holds_json_lines(text, is_whole)
    if promised and kind is None and not is_jsonl and (ending in JSON_LINES or "\ufffd" in text):
        damage = f"it is not {promised.name}, as its name suggests, and holds no JSON lines either"
        raise explain_unreadable(path, EOFError(damage))
    if not is_jsonl:
        _refuse_other_json(path, text, ending, json_keys)
        _refuse_table(path, text, ending, json_keys)
    if is_jsonl and ending not in JSON_LINES:
        notes += (f"{path}: holds JSON objects, one a line: each becomes a document.",)
    return TextContent(kind, is_jsonl or ending in JSON_LINES, notes)


def _compare_compression(path: str, kind: FileKind | None) -> tuple[str, ...]:
    """A note if a file's compression is not what its name promises."""
    promised = find_kind_of_name(path)
    if kind == promised:
        return ()
    if kind is None:
        return (f"{path}: is not compressed, though its name ends so: it is read as it is.",)
    return (f"{path}: is {kind.name}, by its content: it is unpacked.",)


def _holds_json_lines(text: str, is_whole: bool) -> bool:
    """Whether at least half of the first lines are JSON objects, and the first one among them or broken."""
    lines = text.split("\n")
    last = "" if is_whole else lines.pop()
    if not lines:
        return OPENS_OBJECT.match(last.lstrip()) is not None
    lines = [line for line in lines if line.strip()][:MAX_SAMPLE_LINES]
    objects = sum(_is_object(line) for line in lines)
    return objects > 0 and 2 * objects >= len(lines)


def _is_object(line: str) -> bool:
    """Whether a line is one JSON object."""
    if not line.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_other_json(path: str, text: str, ending: str, json_keys: Sequence[str]) -> None:
    """Refuse JSON in another form than one object a line, if it holds a key that is asked for or its name says JSON.

    Args:
        path: Path of the file.
        text: Beginning of the file.
        ending: Ending of its name, without that of a compression.
        json_keys: Keys whose texts are wanted.

    Raises:
        DataError: The message has the remedy.
    """
    stripped = text.lstrip()
    if not stripped.startswith(("{", "[")):
        return
    is_list = stripped.startswith("[")
    begins = stripped[1:].lstrip() if is_list else stripped
    if not OPENS_OBJECT.match(begins):
        return
    first_line = stripped.split("\n", 1)[0]
    if is_list and _is_json(first_line) and first_line != stripped.rstrip():
        return
    keys = [key for key in json_keys if re.search(rf"[{{,]\s*{re.escape(json.dumps(key))}\s*:", text)]
    if not keys and ending not in JSON_LINES:
        return
    if is_list:
        raise _describe_other_json(path, "one JSON list", ".[]")
    try:
        json.JSONDecoder().raw_decode(begins)
    except RecursionError:
        return
    except ValueError as error:
        # an integer of thousands of digits is an error without a place
        broken_at = error.pos if isinstance(error, json.JSONDecodeError) else 0
        # A broken first line is told as the line that it is; an object of many lines may end behind the sample.
        if "\n" not in begins[:broken_at] and "\n" in begins:
            return
    raise _describe_other_json(path, "JSON objects that are not one a line", ".")


def _describe_other_json(path: str, what: str, program: str) -> DataError:
    """The error for JSON in another form. program: of jq, which writes one object a line."""
    return DataError(
        f"--input {path}: holds {what}; write one object a line first (jq -c '{program}' FILE > NEW.jsonl)"
    )


def _is_json(text: str) -> bool:
    """Whether a text is one JSON value."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_table(path: str, text: str, ending: str, json_keys: Sequence[str]) -> None:
    """Refuse a table, by a name that says so or by a header with a key that is asked for.

    Args:
        path: Path of the file.
        text: Beginning of the file.
        ending: Ending of its name, without that of a compression.
        json_keys: Keys whose texts are wanted.

    Raises:
        DataError: The message has the remedy.
    """
    header, _, rest = text.lstrip().partition("\n")
    second = rest.partition("\n")[0]
    separator = "\t" if "\t" in header else ","
    fields = [field.strip().strip('"') for field in header.split(separator)]
    are_names = len(fields) > 1 and all(COLUMN_NAME.fullmatch(field) for field in fields)
    has_key = are_names and any(key in fields for key in json_keys)
    if separator not in second:
        has_key = False
    if ending not in TABLES and not has_key:
        return
    shown = header[:QUOTED_CHARACTERS].strip()
    remedy = "write its rows as JSON lines first (pandas.read_csv(FILE).to_json(NEW, orient='records', lines=True))"
    raise DataError(f"--input {path}: holds a table (its first line is {shown!r}); {remedy}")
