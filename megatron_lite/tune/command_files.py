"""The scripts and data sets that a command names: whoever tunes it has to know when they change."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.shared_files import open_foreign

SCRIPTS = (".py", ".sh")
DATA_SET = (".bin", ".idx")  # behind the word that names both


def stamp_files(words: Sequence[str]) -> dict[str, str]:
    """Say by path what each file is: by its content, of a data set by size and time of change.

    What a script imports, and data that it finds by itself, is not among them.

    Args:
        words: the command.
    """
    stamps = {}
    for word in words:
        _, _, value = word.rpartition("=")
        for path in _list_scripts(value):
            with open_foreign(path) as file:
                stamps[str(path)] = hashlib.sha256(file.read()).hexdigest()
        for path in _list_data(value):
            state = path.stat()
            stamps[str(path)] = f"{state.st_size} bytes of {state.st_mtime_ns}"
    return stamps


def _list_scripts(word: str) -> Iterator[Path]:
    """List the script that a word names, if it is one that can be read."""
    path = Path(word)
    if word.endswith(SCRIPTS) and _is_file(path) and os.access(path, os.R_OK):
        yield path


def _list_data(word: str) -> Iterator[Path]:
    """List the files of the data set that a word names, where both are there."""
    paths = [Path(word + ending) for ending in DATA_SET]
    if all(map(_is_file, paths)):
        yield from paths


def _is_file(path: Path) -> bool:
    """Whether it is a file; a word that is too long for a path, or holds a NUL, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
