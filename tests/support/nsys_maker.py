"""Makes small exports of Nsight Systems (SQLite) with known answers."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from megatron_lite.analysis.trace.columns import Kind

TABLES = {
    "StringIds": "id, value",
    "NVTX_EVENTS": "start, end, eventType, text, globalTid, textId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, bytes, copyKind, srcKind, dstKind",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start, end, deviceId, streamId, correlationId, globalPid, bytes",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start, end, deviceId, streamId, correlationId, globalPid, syncType",
    "TARGET_INFO_GPU": "id, name",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs",
    "META_DATA_EXPORT": "name, value",
}


def place(pid: int, tid: int = 0) -> int:
    return 1 << 48 | pid << 24 | tid


def export(folder: Path, **rows) -> Path:
    """A database with the tables that are given, as nsys makes tables only where it has rows."""
    path = folder / "report.sqlite"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for table in {"StringIds": (), **rows}:
            database.execute(f"CREATE TABLE {table} ({TABLES[table]})")
            for row in rows.get(table, ()):
                database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        database.commit()
    return path


def two_ranks(folder: Path) -> Path:
    """Two processes; the first one has a step with a kernel, a copy, a memset and a sync."""
    return export(
        folder,
        StringIds=[(1, "cudaLaunchKernel_v7000"), (2, "void gemm<float>(int)"), (3, "gemm"), (4, "step 8"), (5, "forward")],
        NVTX_EVENTS=[
            (1000, None, 34, "rank 1 of 2, window: steps 8-9", place(20, 20), None),
            (1000, 9000, 59, None, place(20, 20), 4), (1500, 4000, 59, None, place(20, 20), 5),
            (1600, 1900, 59, "aten::mm, seq = 5, op_id = 7, sizes = [[2, 3], [3, 4]], input_op_ids = []", place(20, 20), None),
            (500, 9500, 60, "profile", place(10, 10), None), (700, None, 59, "never ended", place(10, 10), None),
            (500, None, 34, "rank 0 of 2, window: steps 8-9", place(10, 10), None),
        ],
        CUPTI_ACTIVITY_KIND_RUNTIME=[(1700, 1750, place(20, 20), 77, 1)],
        CUPTI_ACTIVITY_KIND_KERNEL=[(2000, 2500, 1, 7, 77, place(20), 2, 3)],
        CUPTI_ACTIVITY_KIND_MEMCPY=[(3000, 3100, 1, 9, 78, place(20), 4096, 1, 0, 2)],
        CUPTI_ACTIVITY_KIND_MEMSET=[(3200, 3300, 1, 9, 79, place(20), 64)],
        CUPTI_ACTIVITY_KIND_SYNCHRONIZATION=[(3000, 3500, 1, 7, 80, place(20), 3)],
        TARGET_INFO_GPU=[(1, "B"), (0, "A")], TARGET_INFO_SESSION_START_TIME=[(10**18,)],
        META_DATA_EXPORT=[("EXPORT_PRODUCT_VERSION", "2026.2"), ("EXPORT_USER", "somebody")],
    )  # fmt: skip


def table(trace) -> list[tuple]:
    e = trace.events
    columns = zip(*map(np.ndarray.tolist, (e.kind, e.name, e.start_ns, e.end_ns)))
    return [(Kind(kind).name, trace.names[name], start, end) for kind, name, start, end in columns]
