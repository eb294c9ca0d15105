"""The folders of checkpoints: how one appears at once or not at all, which one is the newest, whether it is whole.

A checkpoint is written under a hidden name, listed with checksums in its manifest, announced, renamed, and then named
by the tracker. Killed before the rename, the tracker's checkpoint is the newest complete one; killed after it, the
announcement says so. At no instant is there none.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypedDict

import xxhash

from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import (
    ANNOUNCEMENT_FILE,
    MANIFEST_FILE,
    RECORD_FILE,
    RELEASE,
    TRACKER_FILE,
    checkpoint_name,
    iteration_of,
    sync_folder,
    write_atomically,
)
from megatron_lite.shared_files import Lock, open_foreign, read_bounded, read_foreign, try_lock

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# endings of hidden folders
UNFINISHED = ".unfinished"
PREVIOUS = ".previous"
RETIRED = ".retired"
REMAINS = {UNFINISHED, RETIRED}
PIECE = 2**22  # bytes hashed at once
DIGEST: Final = "xxh3_128"  # in the manifest: finds damage, not forgery, and costs a tenth of SHA-256
LOCK_FILE = ".lock"  # of the run that saves here: HOST, process PID, since TIME
# read of a file that holds a line
MAX_HOLDER_BYTES = 200
MAX_LINE_BYTES = 1000
SECONDS_BETWEEN_FOLDER_LOOKS = 0.2
FULL = {errno.ENOSPC, errno.EDQUOT}


class FileEntry(TypedDict):
    """The manifest's entry of one file."""

    bytes: int
    xxh3_128: str  # the digest of its contents, in hexadecimal digits


Manifest = dict[str, FileEntry]  # by a file's path, relative to the checkpoint's folder


@dataclass(frozen=True)
class CheckpointDir:
    """The place of one checkpoint among those of a folder. `name` is iter_NNNNNNN or release."""

    save: Path
    name: str

    @property
    def final(self) -> Path:
        return self.save / self.name

    @property
    def unfinished(self) -> Path:
        """Where it is written; hidden, so that neither people nor tools take it for a checkpoint."""
        return self.save / f".{self.name}{UNFINISHED}"

    @property
    def previous(self) -> Path:
        """Where one of the same name steps aside for a moment."""
        return self.save / f".{self.name}{PREVIOUS}"

    @property
    def folder(self) -> Path | None:
        """Where it can be read; None if it does not exist."""
        return next((path for path in (self.final, self.previous) if os.path.isdir(path)), None)

    @property
    def expected(self) -> Path:
        """`folder`, or where it should be: a run that saves may just have retired it."""
        return self.folder or self.final


@contextlib.contextmanager
def reserved(save: Path, wait_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from saving to a folder inside the block.

    Args:
        save: The folder.
        wait_s: Seconds for which another process that has it is waited for, at most.
        say: Takes a line on whom is waited for.

    Raises:
        CheckpointError: It is still in use then, or cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            _wait_for_lock(save, wait_s, say, held)
        except OSError as error:
            if error.errno not in FULL:
                raise CheckpointError(
                    f"--save {save}: cannot be written ({error.strerror}: {error.filename or LOCK_FILE}); "
                    "choose another folder."
                ) from None
            # what a killed run left there may be what fills the disk, and the next save clears it away
            say(f"  note: --save {save}: is not locked against other runs ({error.strerror}).")
        yield


def _wait_for_lock(save: Path, wait_s: float, say: Callable[[str], None], held: contextlib.ExitStack) -> None:
    """Put the lock of a folder into `held`, once no other run has it.

    Args:
        save: The folder, which is made if it is not there.
        wait_s: Seconds after which waiting ends.
        say: Is told of waiting, and of file systems whose locks do not hold off every other run.
        held: Holds the lock until it is closed.

    Raises:
        CheckpointError: Another run still has the lock.
        OSError: The folder or the lock file cannot be made.
    """
    path = save / LOCK_FILE
    host = socket.gethostname()
    me = f"{host}, process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}"
    started_s = time.monotonic()
    has_waited = False
    holder = ""
    save.mkdir(parents=True, exist_ok=True)
    while True:
        with contextlib.suppress(OSError):  # what it says of the process that has it, or had it and was killed
            holder = "".join(filter(str.isprintable, read_bounded(path, MAX_HOLDER_BYTES)))
        lock = held.enter_context(try_lock(path, me))
        waited_s = time.monotonic() - started_s
        if lock is not Lock.BUSY:
            break
        held.close()
        user = f"--save {save}: another run saves there ({holder or 'it has not said which'})"
        if waited_s >= wait_s:
            still = f", still after {wait_s:.0f} s" if wait_s else ""
            raise CheckpointError(f"{user}{still}; end that run, or choose another folder.")
        if not has_waited:
            say(f"  {user}; waiting for its end, {wait_s:.0f} s at most")
        has_waited = True
        time.sleep(SECONDS_BETWEEN_FOLDER_LOOKS)
    if has_waited:
        say(f"  --save {save}: that run has ended; going on after {waited_s:.0f} s")
    if lock is Lock.NONE:
        say(f"  note: --save {save}: the file system has no locks; a second run on this folder would not be noticed.")
    elif holder and not has_waited and not holder.startswith(f"{host}, "):
        say(
            f"  note: --save {save}: a run on another machine ({holder}) was ended or is cut off; "
            "if it still runs, end it: "
            "this file system may lock within one machine only."
        )


def prepare(slot: CheckpointDir) -> None:
    """Clear away what killed runs left, which may fill a disk. OSError if the folder cannot be written."""
    slot.save.mkdir(parents=True, exist_ok=True)
    for path in slot.save.glob(".*"):
        name = path.name[1:].rpartition(".")[0]
        if name != RELEASE and iteration_of(name) is None:
            continue  # somebody else's, such as a conversion into this folder that is going on
        if path.suffix == PREVIOUS and not (slot.save / name).exists():
            os.replace(path, slot.save / name)  # its successor never came
        elif path.suffix in REMAINS or path.suffix == PREVIOUS:
            shutil.rmtree(path, ignore_errors=True)
    slot.unfinished.mkdir()


def discard(slot: CheckpointDir) -> None:
    """Remove what was written of it so far: on a full disk the room is needed."""
    shutil.rmtree(slot.unfinished, ignore_errors=True)


class HashedFile(io.BufferedWriter):
    """A file that is written from its beginning to its end, and hashed meanwhile."""

    def __init__(self, path: Path):
        """Make the file, or empty it. OSError if it cannot be opened."""
        super().__init__(io.FileIO(path, "w"))
        self._digest = xxhash.xxh3_128()
        self._written_bytes = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file; what a block wrote that did not fail outlives a power cut."""
        try:
            if kind is None:
                self.flush()
                os.fsync(self.fileno())
        finally:
            self.close()

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write and hash `data`. Returns its bytes."""
        with memoryview(data).cast("B") as view:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                self._digest.update(piece)
                super().write(piece)
            self._written_bytes += len(view)
            return len(view)

    @property
    def entry(self) -> FileEntry:
        """The manifest's entry of what was written, as `checksum` would make it."""
        return {"bytes": self._written_bytes, DIGEST: self._digest.hexdigest()}


class Background:
    """A thread that does one piece of work at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the last piece of work is over and failed; `finish` will raise it."""
        return not self.busy and self._failure is not None

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`. `finish` must have been called since the last start."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the work; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def give_up(self, seconds: float) -> None:
        """Wait for the work for so long at most, and forget how it ended: something else has failed."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again by finish
            self._failure = error


def checksum(path: Path) -> FileEntry:
    """The manifest's entry of a file, whose contents are read. OSError if they cannot be."""
    digest = xxhash.xxh3_128()
    size = 0
    with open_foreign(path) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return {"bytes": size, DIGEST: digest.hexdigest()}


def write_manifest(slot: CheckpointDir, files: Manifest) -> None:
    """Say what the unfinished checkpoint consists of, and make all of it outlive a power cut."""
    write_atomically(slot.unfinished / MANIFEST_FILE, json.dumps({"files": files}, indent=1) + "\n")
    for folder in {(slot.unfinished / name).parent for name in files}:
        sync_folder(folder)
    sync_folder(slot.unfinished)


def commit(slot: CheckpointDir) -> None:
    """The unfinished checkpoint becomes the newest one."""
    write_atomically(slot.save / ANNOUNCEMENT_FILE, f"{slot.name} {_mark(slot.unfinished)} {_tracked(slot.save)}")
    sync_folder(slot.save)
    if slot.final.exists():
        shutil.rmtree(slot.previous, ignore_errors=True)
        os.replace(slot.final, slot.previous)
    os.replace(slot.unfinished, slot.final)
    sync_folder(slot.save)
    tracked = RELEASE if slot.name == RELEASE else str(iteration_of(slot.name))
    write_atomically(slot.save / TRACKER_FILE, tracked)
    sync_folder(slot.save)
    (slot.save / ANNOUNCEMENT_FILE).unlink()
    shutil.rmtree(slot.previous, ignore_errors=True)


def newest(source: Path) -> CheckpointDir | None:
    """The checkpoint that was completed last: the tracker's, but for an announced one that its run could not track.

    None if the folder has no tracker. ValueError for a tracker that names none, OSError for one that cannot be read.
    """
    with contextlib.suppress(OSError, ValueError):
        name, mark, tracked = read_bounded(source / ANNOUNCEMENT_FILE, MAX_LINE_BYTES).split()
        slot = CheckpointDir(source, name)
        # a tracker that was edited since is somebody's wish to go back
        if _mark(slot.final) == mark and _tracked(source) == tracked:
            return slot
    try:
        text = _read_tracker(source).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if text == RELEASE:
        return CheckpointDir(source, RELEASE)
    if not (text.isascii() and text.isdecimal()):  # int() takes 1_0 and other scripts' digits too
        raise ValueError(f"{TRACKER_FILE} holds {text!r}")
    return CheckpointDir(source, checkpoint_name(int(text)))


def complete(source: Path) -> list[CheckpointDir]:
    """All checkpoints of a folder that lack no file, the newest first; their contents are not read."""
    try:
        iterations = {path.name: iteration_of(path.name) for path in source.iterdir() if path.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return []
    numbered = [(iteration, name) for name, iteration in iterations.items() if iteration is not None]
    slots = [CheckpointDir(source, name) for _, name in sorted(numbered, reverse=True)]
    return [slot for slot in slots if missing(slot.expected) is None]


def missing(folder: Path) -> str | None:
    """Say what a checkpoint lacks, judged by names and sizes; None if nothing.

    A checkpoint by Megatron-LM, which has no manifest, lacks nothing.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    for name, expected in manifest.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != expected["bytes"]:
            return f"{name} has {size} bytes instead of {expected['bytes']}"
    return None


def damage(folder: Path, names: Iterable[str]) -> str | None:
    """Compare the contents of some files with the manifest.

    Args:
        folder: Folder of a checkpoint.
        names: Names of the files to look at, in its manifest.

    Returns:
        A line on the first file that is not what was written; None if all are.
    """
    manifest = read_manifest(folder)
    for name in names:
        try:
            found = checksum(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != manifest[name]:
            return f"{name} does not have the contents that were written (its checksum differs)"
    return None


def wrong(folder: Path, share: slice = slice(None)) -> str | None:
    """Judge a checkpoint by the sizes of all its files and the contents of some of them.

    Args:
        folder: Folder of the checkpoint.
        share: Slice of the manifest's sorted names: which files are read.

    Returns:
        A line on the first file that is wrong; None if none is.
    """
    try:
        return missing(folder) or damage(folder, sorted(read_manifest(folder))[share])
    except ValueError as error:  # it went between the two looks
        return str(error)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; empty for one by Megatron-LM, which has none.

    ValueError for one of this trainer's without a manifest, and for a damaged one.
    """
    try:
        text = read_foreign(folder / MANIFEST_FILE)
    except FileNotFoundError:
        # Megatron-LM's, in its torch or its torch_dist format
        is_megatron = (folder / "metadata.json").exists() or any(folder.glob("mp_rank_*/*.pt"))
        if is_megatron and not (folder / RECORD_FILE).exists():
            return {}
        raise ValueError(f"{MANIFEST_FILE} is missing") from None
    except OSError as error:
        raise ValueError(f"{MANIFEST_FILE} cannot be read ({error.strerror})") from None
    files: Manifest = {}
    try:
        files = json.loads(text)["files"]
        is_sound = all(set(entry) == {"bytes", DIGEST} for entry in files.values())
        # a manifest must not send its reader to files elsewhere
        is_sound &= not any(Path(name).is_absolute() or ".." in Path(name).parts for name in files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ValueError(f"{MANIFEST_FILE} is damaged")
    return files


def delete_checkpoint(slot: CheckpointDir) -> None:
    """Delete a checkpoint. First it loses its name: half of one must not be taken for a damaged one."""
    out_of_sight = slot.save / f".{slot.name}{RETIRED}"
    shutil.rmtree(out_of_sight, ignore_errors=True)
    os.replace(slot.final, out_of_sight)
    shutil.rmtree(out_of_sight, ignore_errors=True)


def _mark(folder: Path) -> str:
    """A digest of a checkpoint's manifest, as one word that tells it from others of its name."""
    return hashlib.sha256(read_foreign(folder / MANIFEST_FILE)).hexdigest()


def _tracked(source: Path) -> str:
    """A digest of the tracker's text, as one word; "nothing" where there is no tracker."""
    try:
        return hashlib.sha256(_read_tracker(source).encode()).hexdigest()
    except FileNotFoundError:
        return "nothing"


def _read_tracker(source: Path) -> str:
    """The tracker's text. OSError if it is no file.

    A link is followed: caches of downloads keep their files behind links.
    """
    return read_bounded(source / TRACKER_FILE, MAX_LINE_BYTES, follow_link=True)
