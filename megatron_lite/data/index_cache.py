"""Index arrays kept on disk: built once, mapped by every rank of every later run. docs/decisions/007-index-cache.md."""

import hashlib
import json
import logging
import mmap
import os
import secrets
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.errors import DataError
from megatron_lite.run_folder import sync_folder
from megatron_lite.shared_files import Lock, open_regular, read_bounded, try_lock
from megatron_lite.units import count

FORMAT = "megatron_lite index cache 1"
BLOCK_BYTES = 1 << 20  # a checksum each
MAX_DESCRIPTION_BYTES = 1 << 26  # checksums of 8 TiB
MAX_BLOCKS = 1 << 10  # checked when an entry is opened: a GiB, so all of nearly every entry
FLAG = "--data-cache-path"
LARGE = 10_000_000  # entries of the indices: about a second of building and 100 MB on each rank
MAX_WAIT_S = 1800  # for another process that builds the same entry
POLL_S = 0.1

logger = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Entry:
    """Arrays that are a function of the key alone. kind: GPTDataset, BlendedDataset; split: train, valid, test."""

    kind: str
    split: str
    key: dict
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]]  # of the arrays, by name

    @property
    def name(self) -> str:
        """HASH-KIND-SPLIT."""
        text = json.dumps({"format": FORMAT, "kind": self.kind, **self.key}, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{self.kind}-{self.split}"


class Damaged(Exception):
    """An entry whose files do not fit each other or the key: what is wrong."""


class IndexFiles:
    """The files of one entry in one folder: an array each, and a description with their checksums."""

    def __init__(self, folder: str, entry: Entry):
        self.entry, self.folder = entry, Path(folder)
        self.description = self.folder / f"{entry.name}-description.txt"
        self._paths = {name: self.folder / f"{entry.name}-{name}.npy" for name in entry.shapes}

    def open(self) -> Arrays | None:
        """The arrays, mapped read-only; None if there is no finished entry; Damaged if it cannot be trusted.

        Checked: the description, the sizes, each array's type and shape, and checksums of up to a GiB.
        """
        try:
            described = json.loads(read_bounded(self.description, MAX_DESCRIPTION_BYTES, follow_link=True))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise Damaged(f"{self.description.name} cannot be read ({error})") from None
        files = described.get("files") if isinstance(described, dict) else None
        if not isinstance(files, dict) or set(files) != set(self.entry.shapes):
            raise Damaged(f"{self.description.name} lists other files")
        if described != json.loads(self._describe(files)):
            raise Damaged(f"{self.description.name} describes something else")
        arrays = {}
        for name, (shape, dtype) in self.entry.shapes.items():
            path = self._paths[name]
            try:
                with os.fdopen(open_regular(path, os.O_RDONLY, follow_link=True), "rb") as file:
                    _check_bytes(path.name, file, files[name])
                arrays[name] = array = np.load(path, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise Damaged(f"{path.name} cannot be read ({error})") from None
            if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
                raise Damaged(f"{path.name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
        return arrays

    def write(self, arrays: Arrays) -> None:
        """All of the entry, or nothing that looks like one. OSError if the folder does not take it."""
        temporaries, files = {}, {}  # by their final paths; what the description says of each array
        try:
            for final in (*(self._paths[name] for name in arrays), self.description):
                temporaries[final] = final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")
            for name, array in arrays.items():
                with open(temporaries[self._paths[name]], "x+b") as file:
                    np.save(file, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
                        sums = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
                        files[name] = {"bytes": len(data), "crc32_per_mib": sums}
            with open(temporaries[self.description], "xb") as file:
                file.write(self._describe(files).encode())
                file.flush()
                os.fsync(file.fileno())
            for final, temporary in temporaries.items():  # the description last: it is what makes an entry
                os.replace(temporary, final)
        finally:
            for temporary in temporaries.values():
                temporary.unlink(missing_ok=True)
        sync_folder(self.folder)

    def _describe(self, files: dict) -> str:
        """What description.txt holds."""
        entry = self.entry
        content = {"format": FORMAT, "kind": entry.kind, "split": entry.split, "made_of": entry.key, "files": files}
        return json.dumps(content, indent=1) + "\n"

    def stamp(self) -> tuple[int, int] | None:
        """Changes when the entry is written anew; None: there is none."""
        try:
            status = os.stat(self.description)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def _check_bytes(name: str, file, facts) -> None:
    """Damaged unless the size and the checksums of the blocks, or of MAX_BLOCKS spread over the file, are right."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        sums = facts.get("crc32_per_mib") if isinstance(facts, dict) else None
        num_blocks = -(-len(data) // BLOCK_BYTES)
        if not isinstance(sums, str) or facts.get("bytes") != len(data) or len(sums) != 8 * num_blocks:
            raise Damaged(f"{name} has {len(data)} bytes, which are not as many as were written")
        for number in np.linspace(0, num_blocks - 1, min(num_blocks, MAX_BLOCKS)).astype(int).tolist():
            block = data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            if f"{zlib.crc32(block):08x}" != sums[8 * number : 8 * number + 8]:
                raise Damaged(f"{name} has changed since it was written (MiB {number})")


class IndexCache:
    """folder: --data-cache-path, where everything is kept; None: large indices are, beside their data.

    Logged are a damaged entry, large indices that cannot be kept, and another process that is waited for in vain.
    """

    def __init__(self, folder: str | None = None):
        self._folder = folder

    def folder_for(self, kind: str, prefix: str | None, num_entries: int) -> str | None:
        """Where indices of so many entries are kept; None: nowhere. prefix: of the data, None for a blend's."""
        if self._folder is not None:
            return self._folder
        if prefix is None or num_entries < LARGE:
            return None
        return os.path.join(prefix, "cache", f"{kind}_indices")  # Megatron's rule: a folder of the prefix's name

    def get(self, folder: str | None, entry: Entry, build: Callable[[], Arrays]) -> Arrays:
        """The arrays of an entry, mapped; built and written first if they are not there, or not sound. None: kept
        nowhere.

        Of all processes that ask at once, one builds. DataError if --data-cache-path does not take them; a folder
        beside the data that does not is no mistake: then they stay in memory.
        """
        if folder is None:
            return build()
        files = IndexFiles(folder, entry)
        unsound = None  # the state of the files that were found damaged
        deadline = time.monotonic() + MAX_WAIT_S
        while True:
            stamp = files.stamp()
            if stamp != unsound:
                try:
                    arrays = files.open()
                except Damaged as damage:
                    logger.info(f"  index cache {folder}: {damage}; built again")
                    unsound = stamp
                else:
                    if arrays is not None:
                        return arrays
            built = self._build_if_first(files, build, stamp)
            if built is not None:
                return built
            if time.monotonic() > deadline:
                logger.info(
                    f"  index cache {folder}: another process has been writing it for too long; built in memory"
                )
                return build()
            time.sleep(POLL_S)

    def _build_if_first(self, files: IndexFiles, build: Callable[[], Arrays], stamp) -> Arrays | None:
        """The arrays, mapped if they can be kept. None if another process is building, or has just done so."""
        arrays = None
        try:
            os.makedirs(files.folder, exist_ok=True)
            with try_lock(files.folder / f"{files.entry.name}.lock") as lock:
                if lock is Lock.BUSY or files.stamp() != stamp:
                    return None
                if lock is Lock.HELD:  # what writers that were killed left
                    for leftover in files.folder.glob(f".{files.entry.name}-*.tmp"):
                        leftover.unlink(missing_ok=True)
                arrays = build()
                files.write(arrays)
                return files.open() or arrays  # mapped: the pages are then shared with the other ranks
        except (OSError, Damaged) as error:
            reason = getattr(error, "strerror", None) or error
        if self._folder is not None:
            raise DataError(
                f"{FLAG} {self._folder}: cannot be written ({reason}); "
                "give a folder with room that you may write to, or "
                "leave the flag out"
            )
        entries = sum(shape[0] for shape, _ in files.entry.shapes.values())
        logger.info(f"  indices of {count(entries)} entries are not kept: {files.folder} cannot be written ({reason})")
        return build() if arrays is None else arrays
