"""Finds names of machines and users where the files of a run hold them in known places.

Such a name may be made of known words ("gpu-node-17"), which stay in labels and texts unless they are known to name
somebody. So they are looked for in all files before the first one is cleaned.
"""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from megatron_lite.analysis.discover import Sources
from megatron_lite.analysis.run.read_record import read_record
from megatron_lite.analysis.trace.columns import TraceError
from megatron_lite.analysis.trace.file_blocks import FileBlocks
from megatron_lite.analysis.trace.kineto import rank_in_name
from megatron_lite.analysis.trace.read import SQLITE_MAGIC
from megatron_lite.analysis.trace.sqlite_file import open_database
from megatron_lite.bundle.names import Secret
from megatron_lite.formats.failure_record import FailureRecord
from megatron_lite.formats.file_names import RANKS_FILE, RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import RunRecord
from megatron_lite.formats.sound_fields import convert_sound
from megatron_lite.postmortem.bundled_evidence import encode_evidence
from megatron_lite.postmortem.evidence import JobEvidence
from megatron_lite.shared_files import open_foreign, read_foreign

Owner = tuple[Secret, str]
MAX_OWNERS = 200  # of a run; each is looked for in every text
MAX_FACTS = 10_000  # of a table of names and values
_OVERLAP_BYTES = 512
# as torch's tensorboard_trace_handler names files: MACHINE_PROCESS.TIME.pt.trace.json
_MACHINE_IN_NAME = re.compile(r"(?P<host>[A-Za-z][\w.-]*)_\d{1,8}\.\d{13,19}\.pt\.trace\.json(?:\.gz)?")
# each begins with letters of its own, which a search finds fast
_OWNERS_IN_TEXT = (
    (Secret.HOST, re.compile(rb'"host_?name"\s*:\s*"([^"\\]{3,255})"')),
    (Secret.USER, re.compile(rb'"user_?name"\s*:\s*"([^"\\]{3,255})"')),
    (Secret.USER, re.compile(rb"/home/([\w.@+-]{3,64})[/\\\"]")),
    (Secret.USER, re.compile(rb"/Users/([\w.@+-]{3,64})[/\\\"]")),
    (Secret.USER, re.compile(rb"\\Users\\{1,2}([\w .-]{3,64})\\")),
    # folders of compiled code in /tmp
    (Secret.USER, re.compile(rb"torchinductor_([\w.@+-]{3,64})[/\\]")),
)
# a flag or a variable whose value is a machine
_NAME_OF_HOST = re.compile(r"(?:host|hostname|addr|address|endpoint|server)$", re.IGNORECASE)
# what an export of Nsight Systems calls them, in tables of names and values
_NAME_AND_VALUE = {"name", "value"}
_KINDS_IN_EXPORT = (
    (Secret.HOST, re.compile(r"host ?_?name", re.IGNORECASE)),
    (Secret.USER, re.compile(r"user ?_?name", re.IGNORECASE)),
)


def find_owners(sources: Sources, evidence: JobEvidence | None) -> Iterator[Owner]:
    """Find the machines and users that a run's files name, at most MAX_OWNERS.

    Args:
        sources: The files of the run.
        evidence: What a failed job left; None for none.
    """
    found: set[Owner] = set()
    for owner in _find_all(sources, evidence):
        if len(found) >= MAX_OWNERS:
            return
        if owner not in found:
            found.add(owner)
            yield owner


def _find_all(sources: Sources, evidence: JobEvidence | None) -> Iterator[Owner]:
    if evidence is not None:
        yield from ((Secret.HOST, host) for host in sorted(list_hosts(evidence)))
        yield from _find_in_text(encode_evidence(evidence))
    for folder in sources.run_folders:
        yield from _find_in_records(folder)
        for name in (RUN_FILE, STEPS_FILE, RANKS_FILE):
            yield from _find_in_file(folder / name)
    for path in sources.traces:
        named = _MACHINE_IN_NAME.fullmatch(path.name)
        if named and rank_in_name(path.name) is None:
            yield Secret.HOST, named["host"]
        yield from _find_in_export(path)
    for path in (*sources.traces, *sources.snapshots):
        yield from _find_in_file(path)


def list_hosts(evidence: JobEvidence) -> set[str]:
    """List the machines that the records of a failed job name."""
    hosts: set[str | None] = {record.host for record in evidence.stacks}
    hosts |= {record.host for record in evidence.ends}
    hosts |= {record.host for record in evidence.events}
    hosts |= {record.host for record in evidence.progress}
    hosts |= {record.host for record in evidence.unanswered}
    return {host for host in hosts if host}


def _find_in_records(folder: Path) -> Iterator[Owner]:
    """Find the machines of a run folder's records: its own, and those of the ranks that failed."""
    record, _ = read_record(folder)
    if record is not None:
        yield from ((Secret.HOST, host) for host in _list_hosts_of_run(record))
    with suppress(OSError, ValueError, RecursionError):
        written = json.loads(read_foreign(folder / RANKS_FILE))
        if isinstance(written, dict):
            failure, _ = convert_sound(written, FailureRecord)
            yield from ((Secret.HOST, rank.host) for rank in failure.ranks.values() if rank.host)


def _list_hosts_of_run(record: RunRecord) -> Iterator[str]:
    """List the machine of a run, and those that its command and its environment name as addresses."""
    if record.process is not None and record.process.host:
        yield record.process.host
    words = record.command or []
    named = [*pairwise(words), *(word.partition("=")[::2] for word in words)]
    named += (record.environment or {}).items()
    for name, value in named:
        if value and _NAME_OF_HOST.search(name):
            # HOST:PORT
            yield value.partition(":")[0]


def _find_in_file(path: Path) -> Iterator[Owner]:
    """Find owners in a file's text, plain or gzipped; none where it cannot be read."""
    before = b""
    # whoever cleans the file says what is wrong with it
    with suppress(TraceError):
        for block in FileBlocks(path):
            yield from _find_in_text(before + block)
            before = block[-_OVERLAP_BYTES:]


def _find_in_text(text: bytes) -> Iterator[Owner]:
    for kind, pattern in _OWNERS_IN_TEXT:
        # a file names the same home in each of its frames
        for name in sorted(set(pattern.findall(text))):
            yield kind, name.decode("utf-8", "replace")


def _find_in_export(path: Path) -> Iterator[Owner]:
    """Find owners in an export of Nsight Systems; none in other files."""
    with suppress(OSError, sqlite3.Error):
        with open_foreign(path) as file:
            is_database = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
        if is_database:
            with open_database(path) as database:
                yield from _find_in_tables(database)


def _find_in_tables(database: sqlite3.Connection) -> Iterator[Owner]:
    for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        quoted = '"' + table.replace('"', '""') + '"'
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({quoted})")}
        if not columns >= _NAME_AND_VALUE:
            continue
        for name, value in database.execute(f"SELECT name, value FROM {quoted} LIMIT {MAX_FACTS}"):
            if isinstance(name, str) and isinstance(value, str):
                yield from ((kind, value) for kind, pattern in _KINDS_IN_EXPORT if pattern.search(name))
