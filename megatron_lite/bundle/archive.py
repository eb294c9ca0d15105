"""Bundles as files: .zip or .tar.gz, written whole or not at all, and opened without trust."""

import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from megatron_lite.errors import UserError, describe_io_error
from megatron_lite.formats.file_names import BUNDLE_ENDINGS
from megatron_lite.units import size

ZIP = ".zip"
# the folder in a bundle that holds everything, and the file in it that makes it one
FOLDER = "run"
LIST_FILE = "taken_out.txt"
REPORT_TEXT = "report.txt"
README = "README.md"
MAX_BUNDLE_BYTES = 4 << 30  # of all files, unpacked
MAX_BUNDLE_FILES = 20_000
_COPY_BYTES = 1 << 20
# what a damaged archive makes its readers raise
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)
# later than any run: a copy may make files younger, never older than what they tell of
_ZIP_TIME = (2099, 1, 1, 0, 0, 0)
# name of a file in an archive, and its content
Entry = tuple[str, IO[bytes]]


def check_archive_name(path: Path) -> None:
    """Check the name that a bundle shall have. UserError for one that tells no kind of file."""
    if not path.name.endswith(BUNDLE_ENDINGS):
        raise UserError(f"--bundle {path}: a bundle is a .zip or a .tar.gz; end the name with one of them.")


def write_archive(folder: Path, path: Path) -> int:
    """Write the files of a folder into an archive, which is complete or absent.

    Args:
        folder: Holds files, no folders.
        path: The archive, whose name ends in one of BUNDLE_ENDINGS.

    Returns:
        Bytes of the archive.

    Raises:
        UserError: It cannot be written.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file())
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.name.endswith(ZIP):
            _write_zip(files, unfinished)
        else:
            _write_tar(files, unfinished)
        os.replace(unfinished, path)
        return path.stat().st_size
    except OSError as error:
        raise UserError(
            f"--bundle {path}: cannot be written ({describe_io_error(error)}); name another file."
        ) from None
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _write_zip(files: list[Path], target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(f"{FOLDER}/{file.name}", _ZIP_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            with file.open("rb") as read, archive.open(entry, "w", force_zip64=True) as written:
                while block := read.read(_COPY_BYTES):
                    written.write(block)


def _write_tar(files: list[Path], target: Path) -> None:
    with tarfile.open(target, "w:gz") as archive:
        for file in files:
            # made anew: a file's own entry names its owner
            entry = tarfile.TarInfo(f"{FOLDER}/{file.name}")
            entry.size = file.stat().st_size
            entry.mtime = file.stat().st_mtime
            with file.open("rb") as read:
                archive.addfile(entry, read)


# --- opening: names and sizes in an archive are anybody's


def open_bundle(path: Path, folder: Path) -> Path | None:
    """Unpack a bundle into `folder`.

    Args:
        path: Any file.
        folder: An empty folder.

    Returns:
        The folder with the bundle's files; None where the file is no bundle.

    Raises:
        UserError: It is one, and is damaged or too large.
    """
    if not path.name.endswith(BUNDLE_ENDINGS) or not path.is_file():
        return None
    with _open_entries(path) as entries:
        return _unpack(entries, path, folder)


def is_bundle(path: Path) -> bool:
    """Whether a file is a bundle. UserError for one that is damaged."""
    if not path.name.endswith(BUNDLE_ENDINGS) or not path.is_file():
        return False
    with _open_entries(path) as entries:
        return any(name == f"{FOLDER}/{LIST_FILE}" for name, _ in entries)


@contextmanager
def _open_entries(path: Path) -> Iterator[Iterator[Entry]]:
    """Open an archive, for its files one after the other. UserError where it cannot be read."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield _list_zip(archive)
        else:
            with tarfile.open(path, "r:gz") as tar:
                yield _list_tar(tar)
    except UNREADABLE as error:
        raise UserError(
            f"{path}: a bundle that cannot be read ({describe_io_error(error)}); ask for it again."
        ) from None


def _list_zip(archive: zipfile.ZipFile) -> Iterator[Entry]:
    for entry in archive.infolist():
        if not entry.is_dir():
            with archive.open(entry) as file:
                yield entry.filename, file


def _list_tar(archive: tarfile.TarFile) -> Iterator[Entry]:
    for entry in archive:
        file = archive.extractfile(entry) if entry.isreg() else None
        if file is not None:
            yield entry.name, file


def _unpack(entries: Iterator[Entry], path: Path, folder: Path) -> Path | None:
    """Write the files of an archive; None where it has no list of what was taken out, and so is no bundle."""
    target = folder / FOLDER
    target.mkdir()
    room = MAX_BUNDLE_BYTES
    for number, (name, file) in enumerate(entries):
        if number >= MAX_BUNDLE_FILES:
            raise UserError(f"{path}: holds more than {MAX_BUNDLE_FILES:,} files; no bundle does.")
        parts = PurePosixPath(name).parts
        # a bundle's files lie in one folder: any other name is none of a bundle
        if len(parts) != 2 or parts[0] != FOLDER or parts[1] in ("..", ".") or "\\" in name or "\0" in name:
            continue
        room -= _copy(file, target / parts[1], room, path)
    return target if (target / LIST_FILE).is_file() else None


def _copy(file: IO[bytes], target: Path, room: int, path: Path) -> int:
    """Copy a file of at most `room` bytes. Returns its bytes."""
    copied = 0
    with io.BufferedWriter(target.open("xb", buffering=0)) as written:
        while block := file.read(_COPY_BYTES):
            copied += len(block)
            if copied > room:
                raise UserError(f"{path}: holds more than {size(MAX_BUNDLE_BYTES)}; unpack it by hand to read it.")
            written.write(block)
    return copied
