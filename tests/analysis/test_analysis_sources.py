"""What is found under the paths that a user names."""

import gzip
import json
import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.trace_maker import MadeTrace, gpu_run, write
from support.wording import wording

from megatron_lite.analysis.discover import DAMAGED, TO_NAME, discover_sources
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE

SECOND = 10**9


def trace(
    folder: Path, rank: int | None = 0, time_ns: int = 1_700_000_000 * SECOND, world_size=2, ending=".json"
) -> Path:
    made = MadeTrace(rank, world_size)
    made.step(1, 0, 10)
    who = "host" if rank is None else f"host_rank{rank}"
    return write(made.data(), folder / f"{who}.{time_ns}.pt.trace{ending}")


def snapshot(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}, protocol=4))
    return path


def run(folder: Path, started="2024-01-01T00:00:00+0000", **flags) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = flags.get("snapshot", "snapshot.pickle")
    settings = {"memory_snapshot_path": snapshot, "record_memory_history": "snapshot" in flags}
    settings["tensorboard_dir"] = flags.get("tensorboard_dir")
    (folder / RUN_FILE).write_text(json.dumps({"schema": 1, "started": started, "plan": {"settings": settings}}))
    (folder / STEPS_FILE).write_text("{}\n")
    return folder


def reasons(found) -> dict[str, str]:
    return {path.name: why for path, why in found.ignored}


def complaint(*paths: Path) -> str:
    with pytest.raises(UserError) as caught:
        discover_sources(paths)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_are_named(tmp_path):
    """Known by their content, wherever they lie."""
    plain, zipped, memory = trace(tmp_path), trace(tmp_path, 1, ending=".json.gz"), snapshot(tmp_path / "memory.pkl")
    odd, bare = trace(tmp_path / "odd", 1).rename(tmp_path / "anything.json"), tmp_path / "bare.json"
    bare.write_text('[\n{"name": "x", "ph": "X", "ts": 1}]')
    for paths in ((plain,), (zipped, memory), (plain, odd), (bare,)):
        found = discover_sources(paths)
        assert found.traces == tuple(path for path in paths if path != memory)
        assert found.snapshots == ((memory,) if memory in paths else ())
        assert discover_sources(paths[::-1]) == found


LATER, OLDER = 600, "an older window of {}; {} is the newest"
OF_ANY_PROCESS = "not newer than {1}; neither names its rank, so they may be of two processes; name it alone to read it"
OTHER_SIZE = "of another run (8 ranks; the newest trace, {1}, is of 2 ranks); name it alone to read it"
WINDOWS = {  # folder, rank, seconds and more of each trace; the ones that are read; why others are not, by their names
    "ranks by rank": ([("", rank, 7 - rank, 8) for rank in range(8)], range(8), {}),
    "folders of their own": ([("node0", 0, 0), ("node1", 1, 0)], range(2), {}),
    "the newest of each rank": (
        [("", 0, 0), ("", 1, 1), ("", 0, LATER), ("", 1, LATER + 1)],
        (2, 3),
        {0: OLDER.format("rank 0", "{2}"), 1: OLDER.format("rank 1", "{3}")},
    ),
    "one that only one rank has": (
        [("", 0, 0), ("", 1, 1), ("", 0, LATER)],
        (2,),
        {0: OLDER.format("rank 0", "{2}"), 1: "an older window; rank 1 has none of the newest one"},
    ),
    "the same twice": ([("", 0, 0), ("", 0, 0, 2, ".json.gz")], (0,), {1: "the same window of rank 0 as {0}"}),
    "another size": ([("", 0, 0, 8), ("", 0, LATER, 2)], (1,), {0: OTHER_SIZE}),
    "no rank": ([("", None, 0), ("", None, LATER)], (1,), {0: OF_ANY_PROCESS}),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_of_several_windows(tmp_path, kind):
    made, read, why = WINDOWS[kind]
    paths = [
        trace(tmp_path / folder, rank, (1_700_000_000 + seconds) * SECOND, *more)
        for folder, rank, seconds, *more in made
    ]
    found = discover_sources([tmp_path])
    names = [path.name for path in paths]
    assert found.traces == tuple(paths[at] for at in read)
    assert reasons(found) == {names[at]: text.format(*names) for at, text in why.items()}


def test_runs_in_different_folders(tmp_path):
    old, new = trace(tmp_path / "a", 0, 1_700_000_000 * SECOND), trace(tmp_path / "b", 0, 1_700_000_600 * SECOND)
    found = discover_sources([tmp_path])
    assert found.traces == (new,)
    assert found.ignored == ((old, wording("analysis/of-another-run-older", new)),)


def report(path: Path, time_s: int) -> Path:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE NVTX_EVENTS (start)")
    os.utime(path, (time_s, time_s))
    return path


def test_reports_of_nsys(tmp_path):
    nodes = tuple(report(tmp_path / f"gpt_2_node{number}.sqlite", 2000 + number) for number in range(2))
    old = report(tmp_path / "gpt_1_node0.sqlite", 1000)
    found = discover_sources([tmp_path])
    older = "older than gpt_2_node1.sqlite; name it alone to read it"
    assert (found.traces, reasons(found)) == (nodes, {old.name: older})
    (tmp_path / "gpt_2_node0.nsys-rep").write_bytes(b"x")
    assert discover_sources([tmp_path]) == found, "what is exported needs no advice"
    mine = trace(tmp_path)
    found = discover_sources([tmp_path])
    assert found.traces == (mine,) and reasons(found)[nodes[0].name].startswith(
        wording("analysis/report-of-nsight-systems")
    )


def test_a_run_folder(tmp_path):
    folder = run(tmp_path / "run")
    mine, memory = trace(folder), snapshot(folder / "mem" / "snapshot.pickle")
    trace(folder / "iter_0000010")
    (folder / "events.out.tfevents.1").write_bytes(b"x")
    found = discover_sources([folder])
    assert found == discover_sources([folder / RUN_FILE]) == discover_sources([folder / STEPS_FILE])
    assert (found.run_folders, found.traces, found.snapshots, found.ignored) == ((folder,), (mine,), (memory,), ())


def test_what_a_run_wrote_elsewhere(tmp_path):
    tensorboard, memory = tmp_path / "tb", snapshot(tmp_path / "mem" / "snap_rank0.pickle")
    mine = trace(tensorboard, time_ns=1_710_000_000 * SECOND)
    folder = run(tmp_path / "run", tensorboard_dir=str(tensorboard), snapshot="mem/snap.pickle")
    found = discover_sources([folder])
    assert (found.traces, found.snapshots) == ((mine,), (memory,)), "relative to the folder that holds the run's"
    os.utime(memory, (0, 0))
    mine.rename(mine.with_name(f"host_rank0.{1_600_000_000 * SECOND}.pt.trace.json"))
    found = discover_sources([folder])
    assert (found.traces, found.snapshots) == ((), ()), "they are older than the run"


@pytest.mark.parametrize(
    "record", ["", "[]", "{", '{"plan": 5, "started": "soon"}', '{"started": null, "plan": {"args": {}}}']
)
def test_a_damaged_record_of_a_run_is_the_readers_business(tmp_path, record):
    (run(tmp_path) / RUN_FILE).write_text(record)
    assert discover_sources([tmp_path]).run_folders == (tmp_path,)


def test_of_several_runs_the_newest(tmp_path):
    for number, name in enumerate("ba"):
        for file in (run(tmp_path / name) / RUN_FILE, tmp_path / name / STEPS_FILE):
            os.utime(file, (1000 + number, 1000 + number))
    found = discover_sources([tmp_path])
    assert found.run_folders == (tmp_path / "a",)
    assert found.ignored == ((tmp_path / "b", wording("analysis/another-run-folder-than", tmp_path / "a")),)


def test_the_run_that_wrote_the_traces_stands_before_a_newer_one(tmp_path):
    writer = run(tmp_path / "writer", tensorboard_dir=str(tmp_path / "tb"))
    mine = trace(tmp_path / "tb", time_ns=1_710_000_000 * SECOND)
    run(tmp_path / "newer", "2025-01-01T00:00:00+0000", tensorboard_dir=str(tmp_path / "tb"))
    for file in writer.iterdir():
        os.utime(file, (0, 0))
    found = discover_sources([tmp_path])
    assert (found.traces, found.run_folders) == ((mine,), (writer,))


def test_runs_that_share_a_tensorboard_folder(tmp_path):
    first = trace(tmp_path / "tb", time_ns=1_704_070_000 * SECOND)  # 2024-01-01 00:46:40 UTC
    second = trace(tmp_path / "tb", time_ns=1_710_000_000 * SECOND)
    ended = run(tmp_path / "a", tensorboard_dir=str(tmp_path / "tb"))
    record = json.loads((ended / RUN_FILE).read_text())
    (ended / RUN_FILE).write_text(json.dumps(record | {"ended": "2024-01-01T01:00:00+0000"}))
    later = run(tmp_path / "b", "2024-02-01T00:00:00+0000", tensorboard_dir=str(tmp_path / "tb"))
    assert discover_sources([ended]).traces == (first,)
    assert discover_sources([later]).traces == (second,)


def test_a_run_is_not_read_with_the_snapshot_of_another(tmp_path):
    old, new = run(tmp_path / "old"), run(tmp_path / "new")
    foreign, mine = snapshot(old / "snapshot.pickle"), trace(new)
    for file in old.iterdir():
        os.utime(file, (1000, 1000))
    found = discover_sources([tmp_path])
    assert (found.run_folders, found.traces, found.snapshots) == ((new,), (mine,), ())
    assert reasons(found)[foreign.name] == wording("analysis/of-another-run-than", new, old)
    assert discover_sources([new, foreign]).snapshots == (foreign,), "the user named it"
    inside = trace(old / "restarted", time_ns=1_600_000_000 * SECOND)
    assert inside not in discover_sources([tmp_path]).traces


def test_a_run_inside_of_a_run_has_its_own_files(tmp_path):
    outer = run(tmp_path)
    mine, foreign = trace(outer), snapshot(run(tmp_path / "inner") / "snapshot.pickle")
    for file in (outer / "inner").iterdir():
        os.utime(file, (1000, 1000))
    found = discover_sources([tmp_path])
    assert (found.run_folders, found.traces, found.snapshots) == ((outer,), (mine,), ())
    assert foreign.name in reasons(found)


CUT = b'{"traceEvents": [{}, {'


@pytest.mark.parametrize(
    ("ending", "data"),
    [
        (".json", b"{"),
        (".json", CUT),
        (".json", b"{" + b" " * 2**20 + b"["),
        (".json.gz", gzip.compress(CUT, mtime=0)),
    ],
)
def test_a_damaged_newer_file_displaces_no_sound_one(tmp_path, ending, data):
    sound = tuple(trace(tmp_path, rank) for rank in range(2))
    damaged = tmp_path / f"host_rank0.{1_700_000_600 * SECOND}.pt.trace{ending}"
    damaged.write_bytes(data)
    found = discover_sources([tmp_path])
    assert (found.traces, reasons(found)) == (sound, {damaged.name: DAMAGED})
    assert discover_sources([damaged]).traces == (damaged,), "its reader says what is wrong with it"


def test_a_trace_without_a_header_is_sound_if_it_has_an_end(tmp_path):
    trace(tmp_path)
    newer = tmp_path / f"host_rank0.{1_700_000_600 * SECOND}.pt.trace.json"
    newer.write_text(json.dumps({"traceEvents": []}) + " " * 40)
    assert discover_sources([tmp_path]).traces == (newer,)


def test_a_report_is_no_source(tmp_path):
    for name in ("report.json", "run-20240101-000000.json", "manifest.json", "ranks.json"):
        (run(tmp_path) / name).write_text("{}")
    assert discover_sources([tmp_path]).ignored == ()


def test_what_is_not_read_is_named(tmp_path):
    trace(tmp_path)
    (tmp_path / "settings.json").write_text('{"a": 1}')
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "model.pickle").write_bytes(pickle.dumps([1, 2]))
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8bgarbage")
    (tmp_path / "run.nsys-rep").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    assert reasons(discover_sources([tmp_path])) == {
        "settings.json": wording("analysis/json-but-no-trace"), "empty.json": "empty", "bad.json.gz": wording("analysis/its-gzip-data-cannot"),
        "model.pickle": wording("analysis/pickle-but-no-memory"),
        "run.nsys-rep": wording("analysis/report-of-nsight-systems-export", "--type"),
    }  # fmt: skip


def test_nothing_to_read(tmp_path):
    assert complaint(tmp_path / "no") == wording("analysis/there-is-no-such", tmp_path / "no")
    assert complaint(tmp_path) == wording("analysis/no-trace-memory-snapshot", tmp_path, TO_NAME)
    file = tmp_path / "a.txt"
    file.write_text("hello")
    assert complaint(file) == wording("analysis/neither-trace-nor-memory", file)
    for number in range(5):
        (tmp_path / f"{number}.json").write_text("{}")
    assert complaint(tmp_path) == wording("analysis/no-trace-memory-snapshot-or", tmp_path, 2, TO_NAME)


def test_a_truncated_gzip_is_still_a_trace(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps(gpu_run(steps=50).data()).encode())[:3000])
    assert discover_sources([path]).traces == (path,)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission(tmp_path):
    path = trace(tmp_path)
    path.chmod(0)
    assert wording("analysis/cannot-be-opened-permission") in complaint(path)


def test_links_in_a_circle(tmp_path):
    path = trace(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    found = discover_sources([tmp_path])
    assert found.traces == (path,)
    assert reasons(found) == {"gone.json": wording("analysis/cannot-be-opened-no")}


def test_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lite.analysis.discover.MAX_LISTED_FILES", 3)
    for number in range(5):
        trace(tmp_path, number, world_size=5)
    found = discover_sources([tmp_path])
    assert len(found.traces) == 3 and "more than 3 files" in found.ignored[0][1]
