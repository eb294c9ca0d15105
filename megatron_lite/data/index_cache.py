"""Index arrays kept on disk: built once, mapped by every rank of every later run. docs/decisions/007-index-cache.md."""

import os
import time
from collections.abc import Callable

from megatron_lite.data.index_files import Arrays, Damaged, Entry, IndexFiles
from megatron_lite.errors import DataError
from megatron_lite.shared_files import Lock, try_lock
from megatron_lite.units import count

FLAG = "--data-cache-path"
LARGE = 10_000_000  # entries of the indices: about a second of building and 100 MB on each rank
LONGEST_WAIT_S = 1800  # for another process that builds the same entry
POLL_S = 0.1


class IndexCache:
    """folder: --data-cache-path, where everything is kept; None: large indices are, beside their data.

    `say` gets a line when an entry was damaged, when large indices cannot be kept, and when another process is waited for
    in vain.
    """

    def __init__(self, folder: str | None = None, say: Callable[[str], None] = lambda text: None):
        self._folder = folder
        self._say = say

    def folder_for(self, kind: str, prefix: str | None, num_entries: int) -> str | None:
        """Where indices of so many entries are kept; None: nowhere. prefix: of the data, None for a blend's."""
        if self._folder is not None:
            return self._folder
        if prefix is None or num_entries < LARGE:
            return None
        return os.path.join(prefix, "cache", f"{kind}_indices")  # Megatron's rule: a folder of the prefix's name

    def get(self, folder: str, entry: Entry, build: Callable[[], Arrays]) -> Arrays:
        """The arrays of an entry, mapped; built and written first if they are not there, or not sound.

        Of all processes that ask at once, one builds. DataError if --data-cache-path does not take them; a folder beside
        the data that does not is no mistake: then they stay in memory.
        """
        files = IndexFiles(folder, entry)
        unsound = None  # the state of the files that were found damaged
        deadline = time.monotonic() + LONGEST_WAIT_S
        while True:
            stamp = _stamp(files)
            if stamp != unsound:
                try:
                    arrays = files.open()
                except Damaged as damage:
                    self._say(f"  index cache {folder}: {damage}; built again")
                    unsound = stamp
                else:
                    if arrays is not None:
                        return arrays
            built = self._build_if_first(files, build, stamp)
            if built is not None:
                return built
            if time.monotonic() > deadline:
                self._say(f"  index cache {folder}: another process has been writing it for too long; built in memory")
                return build()
            time.sleep(POLL_S)

    def _build_if_first(self, files: IndexFiles, build: Callable[[], Arrays], stamp) -> Arrays | None:
        """None if another process is building, or has just done so."""
        try:
            os.makedirs(files.folder, exist_ok=True)
            with try_lock(files.folder / f"{files.entry.name}.lock") as lock:
                if lock is Lock.BUSY or _stamp(files) != stamp:
                    return None
                if lock is Lock.HELD:
                    files.sweep()
                return self._build(files, build)
        except OSError as error:
            return self._without(files, build, error)

    def _build(self, files: IndexFiles, build: Callable[[], Arrays]) -> Arrays:
        arrays = build()
        try:
            files.write(arrays)
            return files.open() or arrays  # mapped: the pages are then shared with the other ranks
        except (OSError, Damaged) as error:
            return self._without(files, lambda: arrays, error)

    def _without(self, files: IndexFiles, build: Callable[[], Arrays], error: Exception) -> Arrays:
        reason = getattr(error, "strerror", None) or error
        if self._folder is not None:
            raise DataError(
                f"{FLAG} {self._folder}: cannot be written ({reason}); give a folder with room that you may write to, or "
                "leave the flag out"
            )
        entries = sum(shape[0] for shape, _ in files.entry.shapes.values())
        self._say(f"  indices of {count(entries)} entries are not kept: {files.folder} cannot be written ({reason})")
        return build()


def _stamp(files: IndexFiles) -> tuple[int, int] | None:
    """Changes when the entry is written anew; None: there is none."""
    try:
        facts = os.stat(files.description)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns
