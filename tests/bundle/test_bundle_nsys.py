"""Exports of Nsight Systems in bundles."""

import sqlite3
from contextlib import closing

import pytest
from support.bundle_check import find_secrets, make_bundle
from support.nsys_maker import place, two_ranks
from support.paths import TRACES

SECRETS = ["zaphod", "magrathea", "somebody", "gpu-node-17"]


def make_export(folder):
    folder.mkdir()
    path = two_ranks(folder)
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO StringIds VALUES (90, 'zaphod of magrathea'), (91, '/home/zaphod/magrathea')")
        ranges = [
            (2000, 3000, 59, "magrathea of zaphod", place(20, 20), None),
            (3000, 4000, 59, None, place(20, 20), 90),
            (4000, 5000, 59, "forward on gpu-node-17", place(20, 20), None),
        ]
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", ranges)
        database.execute("CREATE TABLE PROCESSES (name TEXT, globalPid INTEGER)")
        database.execute("INSERT INTO PROCESSES VALUES ('zaphod', 1)")
        database.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'gpu-node-17')")
        database.execute("CREATE TABLE MPI_MAGRATHEA_EVENTS (start INTEGER)")
        database.execute("ALTER TABLE TARGET_INFO_GPU ADD COLUMN magrathea TEXT")
        database.execute("UPDATE TARGET_INFO_GPU SET magrathea = 'zaphod'")
        database.commit()
    return path


def test_an_export_tells_the_same_and_no_secret(tmp_path):
    made, _ = make_bundle([make_export(tmp_path / "export")], tmp_path / "made")
    assert find_secrets(made, SECRETS) == []
    with closing(sqlite3.connect(made / "node-1.sqlite")) as database:
        rows = dict(database.execute("SELECT id, value FROM StringIds"))
        facts = database.execute("SELECT name, value FROM META_DATA_EXPORT").fetchall()
    # a label that a range refers to, and none for a string that nothing refers to
    assert rows[90].startswith("label") and 91 not in rows
    assert facts == [("EXPORT_PRODUCT_VERSION", "2026.2"), (None, None)]


@pytest.mark.slow
def test_a_public_export_tells_the_same(tmp_path):
    if not (TRACES / "nsys_sqlite").is_dir():
        pytest.skip("public traces are not part of the project")
    make_bundle([TRACES / "nsys_sqlite"], tmp_path / "made")
