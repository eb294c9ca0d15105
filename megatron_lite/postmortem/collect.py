"""All that a job has left in some files and folders, as one JobEvidence.

Each file is recognized by its content: jobs, and people who copy their files, name them as they like. A kind of file is
a row of EVIDENCE_READERS.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_lite.errors import UserError, describe_io_error
from megatron_lite.postmortem.bundled_evidence import find_bundled, is_bundled_evidence, read_bundled_evidence
from megatron_lite.postmortem.console_logs import is_console_log, is_kernel_log, read_console_log
from megatron_lite.postmortem.debug_dumps import is_debug_dump, keep_last_requests, read_debug_dump
from megatron_lite.postmortem.elastic_errors import is_error_file, read_error_file
from megatron_lite.postmortem.evidence import JobEvidence
from megatron_lite.postmortem.flight_recordings import find_world_size, is_flight_recording, read_flight_recordings
from megatron_lite.postmortem.process_stacks import is_stack_file, read_stack_file
from megatron_lite.postmortem.recording_sets import ATTEMPT_FOLDER, choose_recordings
from megatron_lite.postmortem.run_records import (
    is_last_words,
    is_ranks_file,
    is_run_file,
    is_steps_file,
    read_last_words,
    read_ranks_file,
    read_run_file,
    read_steps_file,
)
from megatron_lite.shared_files import open_foreign
from megatron_lite.units import counted

# bytes of a file's beginning that its readers are shown
RECOGNIZED_BYTES = 2**16
MAX_EVIDENCE_DEPTH = 8
MAX_EVIDENCE_FILES = 20_000
# what no job leaves as its last words, and what takes long to walk
SKIPPED_FOLDERS = frozenset({".git", "__pycache__", "node_modules", "site-packages"})


@dataclass(frozen=True)
class EvidenceReader:
    """A row of EVIDENCE_READERS: how a kind of file is recognized, and what reads it."""

    # plural, as in JobEvidence.read: "flight recordings"
    kind: str
    # given the file's first RECOGNIZED_BYTES bytes and its path; the path is a hint that is never needed
    recognizes: Callable[[bytes, Path], bool]
    # what one file tells; UserError, one line that begins with the path, for one that cannot be read
    read: Callable[[Path], JobEvidence]


# the first that recognizes a file reads it; those that are surest come first
EVIDENCE_READERS: tuple[EvidenceReader, ...] = (
    EvidenceReader("bundles", is_bundled_evidence, read_bundled_evidence),
    EvidenceReader("flight recordings", is_flight_recording, read_flight_recordings),
    EvidenceReader("debug dumps", is_debug_dump, read_debug_dump),
    EvidenceReader("dumps of stacks", is_stack_file, read_stack_file),
    EvidenceReader("error files", is_error_file, read_error_file),
    EvidenceReader("records of ranks", is_ranks_file, read_ranks_file),
    EvidenceReader("last words", is_last_words, read_last_words),
    EvidenceReader("records of runs", is_run_file, read_run_file),
    EvidenceReader("records of steps", is_steps_file, read_steps_file),
    # any text may be one
    EvidenceReader("kernel logs", is_kernel_log, read_console_log),
    EvidenceReader("console logs", is_console_log, read_console_log),
)


def collect_evidence(paths: Sequence[Path], readers: Sequence[EvidenceReader] = EVIDENCE_READERS) -> JobEvidence:
    """Read all that is recognized in files and folders.

    Args:
        paths: Files and folders; a file that is named here and that no reader recognizes is named in `unread`.
        readers: Kinds of files, surest first.

    Returns:
        What all files of the newest attempt tell together, where folders of torchrun tell attempts apart. A file that
        cannot be read, or is left out, is a line in `unread`, and never an error.
    """
    read: list[tuple[Path, JobEvidence]] = []
    seen: set[tuple[int, int]] = set()
    unread: list[str] = []
    for file, is_named in _list_files(paths, unread):
        try:
            status = file.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            reader = _find_reader(file, readers)
        except OSError as error:
            unread.append(f"{file}: {describe_io_error(error)}")
            continue
        if reader is not None:
            read.append((file, _read_file(file, reader)))
        elif is_named:
            unread.append(f"{file}: no kind of file that a job's last words are read from.")
    pieces, attempt_notes = _drop_attempts(read)
    united = unite_evidence([*pieces, JobEvidence(unread=tuple(unread))])
    recordings, notes = choose_recordings(united.recordings, united.world_size)
    sizes = sorted({piece.world_size for piece in pieces if piece.world_size is not None})
    # an attempt before may have had more ranks
    world_size = find_world_size(recordings) or united.world_size
    if len(sizes) > 1:
        told = ", ".join(map(str, sizes))
        notes = (*notes, f"the files name different numbers of ranks ({told}); {world_size} is taken.")
    return replace(
        united,
        recordings=recordings,
        unanswered=keep_last_requests(united),
        world_size=world_size,
        unread=united.unread + attempt_notes + notes,
    )


def _find_reader(file: Path, readers: Sequence[EvidenceReader]) -> EvidenceReader | None:
    with open_foreign(file) as opened:
        head = opened.read(RECOGNIZED_BYTES)
    return next((reader for reader in readers if reader.recognizes(head, file)), None)


def _read_file(file: Path, reader: EvidenceReader) -> JobEvidence:
    try:
        piece = reader.read(file)
    except UserError as error:
        return JobEvidence(unread=(str(error),))
    except OSError as error:
        return JobEvidence(unread=(f"{file}: {describe_io_error(error)}",))
    except Exception as error:  # noqa: BLE001 - whatever a foreign file does to its reader, the others are read
        return JobEvidence(unread=(f"{file}: cannot be read as one of {reader.kind} ({type(error).__name__}).",))
    if piece.read:
        # of a bundle, which tells of which files it was made
        return piece
    with suppress(OSError):
        piece = replace(piece, written_at={reader.kind: file.stat().st_mtime})
    return replace(piece, read={reader.kind: 1})


def _drop_attempts(read: Sequence[tuple[Path, JobEvidence]]) -> tuple[list[JobEvidence], tuple[str, ...]]:
    """Leave out what attempts before the newest one of a launcher left behind: their failures are not the last one.

    Args:
        read: Files with what they tell.

    Returns:
        What the other files tell, and a line for each launcher. Flight recordings are kept: they are chosen later.
    """
    newest: dict[Path, int] = {}
    for file, _ in read:
        launcher, attempt = _find_attempt(file)
        newest[launcher] = max(attempt, newest.get(launcher, attempt))
    pieces = []
    dropped: Counter[Path] = Counter()
    for file, piece in read:
        launcher, attempt = _find_attempt(file)
        if attempt < newest[launcher]:
            dropped[launcher] += 0 if piece.recordings else 1
            piece = JobEvidence(recordings=piece.recordings, unread=piece.unread, read=piece.read)
        pieces.append(piece)
    notes = []
    for launcher, number in dropped.items():
        if number:
            what = f"{counted(number, 'file')} of attempts before attempt_{newest[launcher]}"
            notes.append(f"{launcher}: {what} left out; name the folder of an attempt to read it alone.")
    return pieces, tuple(notes)


def _find_attempt(file: Path) -> tuple[Path, int]:
    """The folder of the launcher that a file lies in, and the number of its attempt; -1 for a file of no attempt."""
    for folder in file.parents:
        found = ATTEMPT_FOLDER.fullmatch(folder.name)
        if found:
            return folder.parent, int(found[1])
    return file, -1


def _list_files(paths: Sequence[Path], unread: list[str]) -> Iterator[tuple[Path, bool]]:
    """Each file, by name, and whether it was named itself."""
    for path in paths:
        if not path.is_dir():
            yield path, True
            continue
        for number, file in enumerate(_walk(path, path.resolve(), 0, unread)):
            if number == MAX_EVIDENCE_FILES:
                unread.append(
                    f"{path}: holds more than {MAX_EVIDENCE_FILES:,} files; the others were not looked at; name them."
                )
                break
            yield file, False


def _walk(folder: Path, root: Path, depth: int, unread: list[str]) -> Iterator[Path]:
    """The regular files below `folder`; a link is followed to a file below `root` only."""
    if depth > MAX_EVIDENCE_DEPTH:
        unread.append(f"{folder}: lies more than {MAX_EVIDENCE_DEPTH} folders deep and was not looked at; name it.")
        return
    bundled = find_bundled(folder)
    if bundled is not None:
        yield bundled
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        unread.append(f"{folder}: {describe_io_error(error)}")
        return
    for entry in entries:
        path = Path(entry.path)
        try:
            if entry.is_symlink() and not path.resolve().is_relative_to(root):
                continue
            if entry.is_file():
                yield path
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
        except (OSError, RuntimeError):
            continue
        if is_folder and entry.name not in SKIPPED_FOLDERS:
            yield from _walk(path, root, depth + 1, unread)


def unite_evidence(pieces: Sequence[JobEvidence]) -> JobEvidence:
    """Unite what several files tell; where they name different numbers of ranks, the largest is taken."""
    sizes = [piece.world_size for piece in pieces if piece.world_size is not None]
    unread = [line for piece in pieces for line in piece.unread]
    read: Counter[str] = Counter()
    written_at: dict[str, float] = {}
    for piece in pieces:
        read.update(piece.read)
        for kind, at in piece.written_at.items():
            written_at[kind] = max(at, written_at.get(kind, at))
    return JobEvidence(
        recordings=tuple(one for piece in pieces for one in piece.recordings),
        stacks=tuple(one for piece in pieces for one in piece.stacks),
        ends=tuple(one for piece in pieces for one in piece.ends),
        events=tuple(one for piece in pieces for one in piece.events),
        progress=tuple(one for piece in pieces for one in piece.progress),
        unanswered=tuple(one for piece in pieces for one in piece.unanswered),
        world_size=max(sizes, default=None),
        unread=tuple(dict.fromkeys(unread)),
        read=dict(read),
        written_at=written_at,
    )
