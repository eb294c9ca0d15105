"""Opens sqlite files that others wrote."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def open_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an sqlite file for reading alone, also in a folder that may not be written.

    Args:
        path: The file. Texts in it that are no UTF-8 are read all the same.

    Raises:
        sqlite3.Error: It cannot be read.
    """
    # immutable: no lock is taken, and no journal is looked for beside it
    uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        yield database
