"""Writes a made trace as torch 2.14 writes a .pftrace: torch/csrc/profiler/cupti/monitor_pftrace.cpp.

tests/analysis/traces/torch_2_14.pftrace.gz is torch's own; a test lays what is written here beside it.
"""

import gzip
import json
import struct
from collections.abc import Iterable
from pathlib import Path

from support.paths import TESTS
from support.trace_maker import MadeTrace

# Both written by torch 2.14.1 of one window of its CUPTI monitor, whose records were made.
TORCH_JSON = TESTS / "analysis" / "traces" / "torch_2_14_rank0.json.gz"
TORCH_PACKETS = TESTS / "analysis" / "traces" / "torch_2_14_rank0.pftrace.gz"
BASE_NS = 1_700_000_000_000_000_000
STAGES = {"kernel": (1, "Kernel"), "gpu_memcpy": (2, "Memcpy"), "gpu_memset": (3, "Memset")}
STAGES |= {"gpu_user_annotation": (4, "Annotation")}
LANES = 100  # the first lane's number
EXTRA = ("correlation", "bytes")
SELDOM = ("device", "context", "stream", *EXTRA)
WITHOUT_CATEGORY = ("cuda_sync", "overhead")


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    code = bytearray()
    while value >= 0x80:
        code.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*code, value))


def field(number: int, value: float | str | bytes) -> bytes:
    """A field of a message: a number, a double, a text or a message."""
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    code = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(code)) + code


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    return b"".join(field(number, value) for number, value in fields)


def packet(*fields: tuple[int, int | float | str | bytes], sequence: int = 1) -> bytes:
    """A packet in the trace; its sequence stands in all but those that describe tracks."""
    own = fields if any(number == 60 for number, _ in fields) else (*fields, (10, sequence))
    return field(1, message(*own))


def annotation(name: str, value) -> bytes:
    """A debug annotation; entries of lists have no name."""
    own = field(10, name) if name else b""
    if isinstance(value, dict):
        return own + b"".join(field(11, annotation(key, one)) for key, one in value.items())
    if isinstance(value, list):
        return own + b"".join(field(12, annotation("", one)) for one in value)
    if isinstance(value, float):
        return own + field(5, value)
    return own + (field(4, value) if isinstance(value, int) else field(6, value))


class Interned(dict):
    """Numbers of texts, from 1 on."""

    def __missing__(self, text):
        self[text] = len(self) + 1
        return self[text]

    def entries(self, table: int) -> list[tuple[int, bytes]]:
        return [(table, message((1, number), (2, text))) for text, number in self.items()]


def of_time(us: float) -> int:
    return BASE_NS + round(us * 1000)


def slices(events: list[dict], tracks: Interned, names: Interned, categories: Interned) -> list[bytes]:
    """A group of slices: all beginnings, then all ends."""
    begun, ended = [], []
    for event in events:
        track = tracks[event["pid"], event["tid"]]
        own = [(9, 1), (11, track), (10, names[event["name"]])]
        if event["cat"] not in WITHOUT_CATEGORY:
            own.append((3, categories[event["cat"]]))
        own += [(4, annotation(key, value)) for key, value in event["args"].items()]
        begun.append(packet((8, of_time(event["ts"])), (13, 2), (11, message(*own))))
        end = message((9, 2), (11, track))
        ended.append(packet((8, of_time(event["ts"] + event["dur"])), (11, end)))
    return begun + ended


def stages(events: Iterable[dict], names: Interned, lanes: Interned) -> list[bytes]:
    """Work of the device, each piece with its length."""
    made = []
    for event in events:
        args = event["args"]
        own = [(1, len(made) + 1), (2, round(event["dur"] * 1000)), (11, args["device"])]
        own += [(13, lanes[args["stream"]] + LANES - 1), (14, STAGES[event["cat"]][0]), (5, 1)]
        if event["cat"] in ("kernel", "gpu_user_annotation"):
            own.append((20, names[event["name"]]))
        extra = {"device id": args["device"], "context id": 1, "stream id": args["stream"]}
        extra |= {key: args[key] for key in EXTRA if args.get(key)}
        extra |= {key: value for key, value in args.items() if key not in SELDOM}
        own += [(6, message((1, key), (2, str(value)))) for key, value in extra.items()]
        made.append(packet((8, of_time(event["ts"])), (13, 2), (53, message(*own))))
    return made


def counters(samples: dict[str, list[tuple[float, float]]], gpu: int) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Packets of a GPU's counters, and what names these."""
    specs = [(1, message((1, number), (2, name))) for number, name in enumerate(samples)]
    described = message((1, gpu + 1), (2, message(*specs)), (3, gpu))
    made = []
    for number, values in enumerate(samples.values()):
        for us, value in values:
            event = message((4, gpu + 1), (2, message((1, number), (3, float(value)))))
            made.append(packet((8, of_time(us)), (13, 2), (52, event)))
    return made, [(47, described)] if samples else []


def of_made(made: MadeTrace, samples: dict[str, list[tuple[float, float]]] | None = None) -> bytes:
    """The packets of a made trace. samples: of the counters of GPU 0, (time in us, value) by name."""
    tracks, names, categories, lanes = Interned(), Interned(), Interned(), Interned()
    host = [event for event in made.events if event["ph"] == "X" and event["cat"] not in (*STAGES, "Trace")]
    groups = []
    for calls in (False, True):
        groups += slices([one for one in host if (one["cat"] == "cuda_runtime") == calls], tracks, names, categories)
    groups += stages((event for event in made.events if event["cat"] in STAGES), names, lanes)
    counted, described = counters(samples or {}, gpu=0)
    clock = [(1, message((1, number), (2, BASE_NS))) for number in (6, 1)]
    head = [packet((8, BASE_NS), (6, message(*clock)))]
    for (pid, tid), uuid in tracks.items():
        thread = message((1, pid), (2, tid), (5, f"thread {tid}"))
        head.append(packet((60, message((1, uuid), (4, thread)))))
    specs = list(STAGES.values())
    width = len(str(max(lanes, default=0)))
    specs += [(number + LANES - 1, f"[{stream:0{width}d}] stream {stream}") for stream, number in lanes.items()]
    entries = described + names.entries(2) + categories.entries(1)
    entries += [(24, message((1, number), (2, name))) for number, name in specs]
    head.append(packet((13, 1), (12, message(*entries))))
    return b"".join(head + groups + counted)


def write_pftrace(made: MadeTrace, folder: Path, **more) -> Path:
    """As a file named as torchtitan names it."""
    path = folder / f"rank{made.rank or 0}_trace.pftrace.gz"
    path.write_bytes(gzip.compress(of_made(made, **more)))
    return path


def as_torch_writes_json(made: MadeTrace) -> dict:
    """The JSON of the same trace by the same writer: copies and memsets are named by arguments alone."""
    data = json.loads(json.dumps(made.data()))
    for event in data["traceEvents"]:
        if event["cat"] == "gpu_memset":
            event["name"] = "Memset"
        if event["cat"] == "gpu_memcpy":
            copy, source, _, target = event["name"].removeprefix("Memcpy ").replace("(", "").replace(")", "").split()
            event["name"] = "Memcpy"
            event["args"] |= {"copy kind": copy, "src kind": source.lower(), "dst kind": target.lower()}
    return data
