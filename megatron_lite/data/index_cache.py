"""Index arrays kept on disk: built once, mapped by every rank of every later run. docs/decisions/007-index-cache.md."""

import hashlib
import json
import logging
import mmap
import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypedDict

import numpy as np

from megatron_lite.errors import DataError
from megatron_lite.run_folder import sync_folder
from megatron_lite.shared_files import Lock, open_regular, read_bounded, try_lock
from megatron_lite.units import count

CACHE_FORMAT = "megatron_lite index cache 1"
CHECKSUM_BYTES = 1 << 20  # a checksum each
MAX_DESCRIPTION_BYTES = 1 << 26  # checksums of 8 TiB
MAX_CHECKED_BLOCKS = 1 << 10  # checked when an entry is opened: a GiB, so all of nearly every entry
FLAG = "--data-cache-path"
LARGE_INDEX_ENTRIES = 10_000_000  # entries of the indices: about a second of building and 100 MB on each rank
MAX_BUILD_WAIT_S = 1800  # for another process that builds the same entry
POLL_S = 0.1

logger = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[tuple[int, ...], np.dtype[np.integer]]]  # shape and type of each array by its name
Stamp = tuple[int, int]  # inode and time of change, in ns


class FileFacts(TypedDict):
    """The description of one array's file."""

    bytes: int
    crc32_per_mib: str  # 8 hexadecimal digits for each block


@dataclass(frozen=True)
class CacheEntry:
    """Arrays that are a function of the key alone."""

    kind: str  # GPTDataset | BlendedDataset
    split: str  # train | valid | test
    key: dict[str, object]  # plain values
    shapes: Shapes

    @property
    def name(self) -> str:
        """The beginning of its files' names: HASH-KIND-SPLIT."""
        text = json.dumps({"format": CACHE_FORMAT, "kind": self.kind, **self.key}, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{self.kind}-{self.split}"


class Damaged(Exception):
    """An entry whose files do not fit each other or the key: what is wrong."""


class IndexFiles:
    """The files of one entry in one folder: an array each, and a description with their checksums."""

    def __init__(self, folder: str, entry: CacheEntry):
        self.entry = entry
        self.folder = Path(folder)
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
        return {name: self._open_array(name, files[name]) for name in self.entry.shapes}

    def _open_array(self, name: str, facts: object) -> np.ndarray:
        """An array, mapped read-only. Damaged unless it is what the entry and its description say.

        Args:
            name: Name of the array.
            facts: What the description says of it, a FileFacts if it is sound.
        """
        shape, dtype = self.entry.shapes[name]
        path = self._paths[name]
        array: np.ndarray
        try:
            with os.fdopen(open_regular(path, os.O_RDONLY, follow_link=True), "rb") as file:
                _check_bytes(path.name, file, facts)
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise Damaged(f"{path.name} cannot be read ({error})") from None
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise Damaged(f"{path.name} is {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
        return array

    def write(self, arrays: Arrays) -> None:
        """All of the entry, or nothing that looks like one. OSError if the folder does not take it."""
        temporaries: dict[Path, Path] = {}  # by their final paths
        files: dict[str, FileFacts] = {}  # what the description says of each array
        try:
            for final in (*(self._paths[name] for name in arrays), self.description):
                temporaries[final] = final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")
            for name, array in arrays.items():
                files[name] = _write_array(temporaries[self._paths[name]], array)
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

    def _describe(self, files: Mapping[str, object]) -> str:
        """The text of description.txt. files: a FileFacts of each array."""
        entry = self.entry
        content = {
            "format": CACHE_FORMAT,
            "kind": entry.kind,
            "split": entry.split,
            "made_of": entry.key,
            "files": files,
        }
        return json.dumps(content, indent=1) + "\n"

    def stamp(self) -> Stamp | None:
        """A mark that changes when the entry is written anew; None: there is no entry."""
        try:
            status = os.stat(self.description)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def _write_array(path: Path, array: np.ndarray) -> FileFacts:
    """Write an array to a new file, so that it outlives a power cut, and describe it. OSError."""
    with open(path, "x+b") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            blocks = (data[at : at + CHECKSUM_BYTES] for at in range(0, len(data), CHECKSUM_BYTES))
            sums = "".join(f"{zlib.crc32(block):08x}" for block in blocks)
            return {"bytes": len(data), "crc32_per_mib": sums}


def _check_bytes(name: str, file: BinaryIO, facts: object) -> None:
    """Compare size and checksums of the blocks, or of MAX_CHECKED_BLOCKS over the file, with the description.

    Args:
        name: Name of the file.
        file: Opened for reading.
        facts: What the description says of it, a FileFacts if it is sound.

    Raises:
        Damaged: They differ.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        sums = None
        num_bytes = None
        if isinstance(facts, dict):
            sums = facts.get("crc32_per_mib")
            num_bytes = facts.get("bytes")
        num_blocks = -(-len(data) // CHECKSUM_BYTES)
        if not isinstance(sums, str) or num_bytes != len(data) or len(sums) != 8 * num_blocks:
            raise Damaged(f"{name} has {len(data)} bytes, which are not as many as were written")
        num_checked = min(num_blocks, MAX_CHECKED_BLOCKS)
        for number in np.linspace(0, num_blocks - 1, num_checked).astype(int).tolist():
            start = number * CHECKSUM_BYTES
            found = f"{zlib.crc32(data[start : start + CHECKSUM_BYTES]):08x}"
            expected = sums[8 * number : 8 * number + 8]
            if found != expected:
                raise Damaged(f"{name} has changed since it was written (MiB {number})")


class IndexCache:
    """Keeps indices on disk.

    Logged are a damaged entry, large indices that cannot be kept, and another process that is waited for in vain.
    """

    def __init__(self, folder: str | None = None):
        """
        Args:
            folder: --data-cache-path, where everything is kept; None: large indices are, beside their data.
        """
        self._folder = folder

    def folder_for(self, kind: str, prefix: str | None, num_entries: int) -> str | None:
        """The folder in which indices are kept; None: nowhere.

        Args:
            kind: GPTDataset or BlendedDataset.
            prefix: Prefix of the data; None for a blend.
            num_entries: Entries of all indices together.
        """
        if self._folder is not None:
            return self._folder
        if prefix is None or num_entries < LARGE_INDEX_ENTRIES:
            return None
        return os.path.join(prefix, "cache", f"{kind}_indices")  # Megatron's rule: a folder of the prefix's name

    def get(self, folder: str | None, entry: CacheEntry, build: Callable[[], Arrays]) -> Arrays:
        """The arrays of an entry, mapped; built and written first if they are not there, or not sound.

        Of all processes that ask at once, one builds.

        Args:
            folder: The folder that `folder_for` gives; None: the arrays are built in memory, and kept nowhere.
            entry: What the arrays are made of.
            build: Makes the arrays.

        Raises:
            DataError: --data-cache-path does not take them. A folder beside the data that does not is no mistake: then
                they stay in memory.
        """
        if folder is None:
            return build()
        files = IndexFiles(folder, entry)
        unsound: Stamp | None = None  # the state of the files that were found damaged
        deadline = time.monotonic() + MAX_BUILD_WAIT_S
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

    def _build_if_first(self, files: IndexFiles, build: Callable[[], Arrays], stamp: Stamp | None) -> Arrays | None:
        """Build an entry unless another process does so.

        Args:
            files: Where it is kept.
            build: Makes the arrays.
            stamp: The mark of the files that were found unsound; None: there were none.

        Returns:
            The arrays, mapped if they can be kept; None if another process is building, or has just done so.
        """
        arrays: Arrays | None = None
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
