"""Makes a folder of a run that holds what a report reads, and nothing that may not be shown."""

import getpass
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_lite.analysis.discover import SourceFile, discover_sources, look_at
from megatron_lite.analysis.failed_job import find_evidence
from megatron_lite.analysis.trace.columns import TraceError
from megatron_lite.bundle.clean_nsys import clean_nsys
from megatron_lite.bundle.clean_records import clean_record
from megatron_lite.bundle.clean_run import clean_run
from megatron_lite.bundle.clean_snapshot import clean_snapshot
from megatron_lite.bundle.clean_trace import clean_trace
from megatron_lite.bundle.names import Secret, Substitutes
from megatron_lite.bundle.owners import find_owners
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import EVIDENCE_FILE
from megatron_lite.postmortem.bundled_evidence import encode_evidence
from megatron_lite.postmortem.evidence import JobEvidence

# the profiler's window, in names of files: all files of a bundle are of one
_WINDOW = 10**18


@dataclass
class CleanFolder:
    """What was made of a run."""

    folder: Path
    names: Substitutes
    # what the run has and the bundle has not, with the reason
    left_out: list[str] = field(default_factory=list)


def clean_folder(paths: Sequence[Path], folder: Path) -> CleanFolder:
    """Write what a report on `paths` reads into `folder`, without what may not be shown.

    Args:
        paths: Traces, snapshots and run folders of one run, or folders that hold them.
        folder: An empty folder.

    Raises:
        UserError: Nothing under `paths` can be read.
    """
    evidence = find_evidence(paths)
    sources = discover_sources(paths, may_be_none=evidence is not None)
    made = CleanFolder(folder, Substitutes())
    _hide_this_machine(made.names)
    for kind, name in find_owners(sources, evidence):
        made.names.hide(kind, name)
    if evidence is not None:
        _add_evidence(evidence, made)
    for run_folder in sources.run_folders:
        clean_run(run_folder, folder, made.names)
    for number, path in enumerate(sources.traces, start=1):
        _add_trace(look_at(path, named=True), number, made)
    for number, path in enumerate(sources.snapshots, start=1):
        _add_snapshot(look_at(path, named=True), number, made)
    return made


def _hide_this_machine(names: Substitutes) -> None:
    """Note who and what this is: the bundle is mostly made where the run was, by who started it."""
    names.hide(Secret.HOST, socket.gethostname())
    names.hide(Secret.HOST, socket.gethostname().partition(".")[0])
    with suppress(KeyError, OSError):
        names.hide(Secret.USER, getpass.getuser())
    names.hide(Secret.USER, Path(os.path.expanduser("~")).name)


def _add_evidence(evidence: JobEvidence, made: CleanFolder) -> None:
    """Write what a failed job left, as records: logs, error files and stacks hold texts of all kinds."""
    made.names.enter("evidence of the failure")
    cleaned = clean_record(evidence, made.names)
    (made.folder / EVIDENCE_FILE).write_bytes(encode_evidence(cleaned))


def _add_trace(file: SourceFile, number: int, made: CleanFolder) -> None:
    name = f"trace-{number}" if file.rank is None else f"rank-{file.rank}"
    made.names.enter(f"trace of rank {file.rank}" if file.rank is not None else f"trace {number}")
    is_export = file.what == "nsys"
    # exports of several nodes differ in their node's number
    name_of_file = f"node-{number}.sqlite" if is_export else f"{name}.{_WINDOW}.pt.trace.json.gz"
    target = made.folder / name_of_file
    clean = clean_nsys if is_export else clean_trace
    try:
        clean(file.path, target, made.names)
    except TraceError:
        target.unlink(missing_ok=True)
        made.left_out.append(f"{name}: a trace that cannot be read")


def _add_snapshot(file: SourceFile, number: int, made: CleanFolder) -> None:
    name = f"snapshot-{number}" if file.rank is None else f"snapshot-rank-{file.rank}"
    made.names.enter(f"snapshot of rank {file.rank}" if file.rank is not None else f"snapshot {number}")
    target = made.folder / f"{name}.{_WINDOW}.pickle"
    try:
        clean_snapshot(file.path, target, made.names)
    except UserError:
        made.left_out.append(f"{name}: a memory snapshot that cannot be read")
