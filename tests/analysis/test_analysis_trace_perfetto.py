"""Perfetto traces of torch.profiler (.pftrace): the same columns as of the JSON of the same trace."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.perfetto_maker import (
    BASE_NS,
    TORCH_JSON,
    TORCH_PACKETS,
    as_torch_writes_json,
    field,
    message,
    of_made,
    packet,
    write_pftrace,
)
from support.trace_maker import MadeTrace, cpu_run, gpu_run, write

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.discover import discover_sources
from megatron_lite.analysis.findings.base import CheckResult
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.perfetto import PacketChunks
from megatron_lite.analysis.trace.perfetto_packets import is_perfetto
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.errors import UserError

OVERHEAD = 9  # the profiler's own work, whose process is -1 in the JSON
BEGIN, END = 1, 2


def rows(trace: Trace, without=()) -> list[tuple]:
    """What the columns say of each event, without their numbers of names."""
    events = trace.events
    listed = []
    for row in range(len(events)):
        shapes, collective = events.shapes[row], events.collective[row]
        kind = int(events.kind[row])
        own = [trace.name_of(row), kind, trace.threads[events.thread[row]] if kind != OVERHEAD else ()]
        for column in ("start_ns", "end_ns", "device", "stream", "correlation", "num_bytes", "sequence"):
            own.append(int(getattr(events, column)[row]))
        own += [int(events.forward_thread[row]), trace.shapes[shapes] if shapes >= 0 else None]
        own.append(trace.collectives[collective] if collective >= 0 else None)
        listed.append(tuple(own))
    return sorted((one for one in listed if not one[0].startswith(tuple(without))), key=repr)


def read(path: Path) -> Trace:
    [trace] = read_traces(path)
    return trace


def test_what_torch_writes_in_both_forms_is_read_alike():
    """Only the copies' directions are missing in the packets, and the JSON's span around all."""
    packets, of_json = read(TORCH_PACKETS), read(TORCH_JSON)
    missing = ("PyTorch Profiler (0)", "Memcpy")
    assert rows(packets, missing) == rows(of_json, missing) and len(packets.events) == len(of_json.events) - 1
    copies = [trace.matching(lambda name: name.startswith("Memcpy")) for trace in (packets, of_json)]
    assert [trace.events.num_bytes[chosen].tolist() for trace, chosen in zip((packets, of_json), copies)] == [
        [4096] * 5
    ] * 2
    assert {of_json.name_of(row) for row in np.flatnonzero(copies[1])} == {"Memcpy HtoD (Pinned -> Device)"}
    assert len(packets.notes) == 1 and "5" in packets.notes[0] and not of_json.notes
    assert packets.base_ns == of_json.base_ns and packets.rank == of_json.rank == 0
    assert not packets.damage and not packets.cut


def test_the_report_divides_the_step_alike():
    packets, of_json = (analyze([path]).facts.critical for path in (TORCH_PACKETS, TORCH_JSON))
    assert packets.time.rows == of_json.time.rows and packets.time.step_ms == of_json.time.step_ms
    assert packets.kernels.roles == of_json.kernels.roles


def test_copies_without_a_direction_are_not_denied():
    """Of batches from pinned memory and of copies per batch a report says that it cannot see them."""
    answers = {}
    for path in (TORCH_PACKETS, TORCH_JSON):
        asked = [check for check in analyze([path]).checks if check.number in (5, 6)]
        answers[path] = [check.answer for check in asked]
        told = [one.text for check in asked for one in check.evidence]
        assert not [text for text in told if text.startswith("no copy")]
    assert answers == {TORCH_PACKETS: [CheckResult.NOT_VISIBLE] * 2, TORCH_JSON: [CheckResult.PASSED] * 2}


def two_streams() -> MadeTrace:
    made = gpu_run(steps=4, all_reduce_us=300.0, world_size=4, item=True)
    made.memset(300, 310, 200, 64)
    made.frame("train.py(7): step", 20, 900)
    made.add("cuda_sync", "Stream Sync", 500, 600, thread=7, pid=0, device=0, stream=7, cuda_sync_kind="Stream Sync")
    made.op("aten::convolution_backward", 700, 720, dims=[[], [2, [3, 4]]], dtypes=["", "TensorList"],
            values=["", "[True, False, True]"], sequence=7, forward_thread=3)  # fmt: skip
    return made


@pytest.mark.parametrize("make", [two_streams, lambda: cpu_run(gloo_us=0)])
def test_made_traces_are_read_alike(tmp_path, make):
    made = make()
    packets = read(write_pftrace(made, tmp_path))
    of_json = read(write(as_torch_writes_json(made), tmp_path / "rank0.json"))
    assert rows(packets, ["Memcpy"]) == rows(of_json, ["Memcpy"]) and len(packets.events) == len(of_json.events)
    assert packets.with_shapes == of_json.with_shapes and packets.with_stack == of_json.with_stack


def test_the_maker_writes_what_torch_writes(tmp_path):
    made = gpu_run(steps=5, all_reduce_us=300, world_size=2, item=True)
    made.add("cuda_sync", "Stream Sync", 1172, 1850, thread=7, pid=0, device=0, context=1, stream=7, correlation=900,
             cuda_sync_kind="Stream Sync")  # fmt: skip
    made.memset(2700, 2705, 2300, 1024)
    made.frame("train.py(12): train_step", 10, 950)
    assert rows(read(write_pftrace(made, tmp_path))) == rows(read(TORCH_PACKETS), ["Instrumentation"])


def test_ranks_that_the_file_does_not_name_are_missed(tmp_path):
    """Its collectives tell of four ranks; the file's name of its own."""
    made = gpu_run(steps=5, all_reduce_us=300.0, world_size=4, rank=2)
    path = write_pftrace(made, tmp_path)
    trace = read(path)
    assert (trace.rank, trace.world_size, trace.least_world_size) == (2, None, 4)
    verdicts = [analyze([one]).verdict for one in (path, made.write(tmp_path / "json"))]
    assert [one.confidence for one in verdicts] == ["low", "low"]
    alone = read(write_pftrace(gpu_run(steps=4), tmp_path))
    assert alone.least_world_size is None


def test_json_under_the_name_of_packets(tmp_path):
    """torch 2.13 writes JSON, whatever the file's name says."""
    path = gpu_run(steps=4).write(tmp_path).rename(tmp_path / "rank0.pftrace")
    assert discover_sources([path]).traces == (path,) and len(read(path).devices) == 1


@pytest.mark.parametrize("name", ["a.pftrace", "a.pftrace.gz", "a.perfetto-trace", "a.json", "a"])
def test_a_file_is_known_by_its_content(tmp_path, name):
    content = of_made(gpu_run(steps=4))
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert discover_sources([path]).traces == (path,)
    if "." in name:
        assert discover_sources([tmp_path]).traces == (path,)
    assert len(read(path).events) == len([one for one in gpu_run(steps=4).events if one["ph"] == "X"])


# --- other forms of the same packets


def compressed(content: bytes) -> bytes:
    return field(1, field(50, zlib.compress(content)))


def begin(track: int, at: int, name: str, category="user_annotation", sequence=7) -> bytes:
    own = message((9, BEGIN), (11, track), (23, name), (22, category))
    return packet((8, BASE_NS + at), (11, own), sequence=sequence)


def end(track: int, at: int, sequence=7) -> bytes:
    return packet((8, BASE_NS + at), (11, message((9, END), (11, track))), sequence=sequence)


def write_packets(folder: Path, *packets: bytes) -> Path:
    path = folder / "t.pftrace"
    path.write_bytes(b"".join(packets))
    return path


def spans_of(trace: Trace) -> dict[str, tuple[int, int]]:
    events = trace.events
    return {trace.name_of(row): (int(events.start_ns[row]), int(events.end_ns[row])) for row in range(len(events))}


def test_compressed_packets(tmp_path):
    content = of_made(gpu_run(steps=4))
    plain = read(write_packets(tmp_path, content))
    packed = read(write_packets(tmp_path, compressed(content)))
    assert rows(plain) == rows(packed)


def test_slices_as_they_happen(tmp_path):
    """As Perfetto's own library writes them: an end belongs to what began last on its track."""
    path = write_packets(
        tmp_path, begin(1, 0, "a"), begin(1, 10, "b"), begin(2, 15, "other"), end(1, 20), end(2, 25), begin(1, 20, "c"),
        end(1, 30), end(1, 40),
    )  # fmt: skip
    assert spans_of(read(path)) == {"a": (0, 40), "b": (10, 20), "other": (15, 25), "c": (20, 30)}


def test_slices_that_touch_are_not_mixed_up(tmp_path):
    """As torch writes a group: by time alone "b" would begin in "a" and end there at once."""
    path = write_packets(tmp_path, begin(1, 0, "a"), begin(1, 10, "b"), end(1, 10), end(1, 20))
    assert spans_of(read(path)) == {"a": (0, 10), "b": (10, 20)}


def test_halves_without_a_counterpart_are_counted(tmp_path):
    trace = read(write_packets(tmp_path, end(1, 0), begin(1, 5, "a"), begin(1, 7, "b"), end(1, 9)))
    assert spans_of(trace) == {"b": (0, 2)}
    assert [note for note in trace.notes if ": 2," in note]


def test_numbers_of_names_hold_until_they_are_cleared(tmp_path):
    def named(number: int, name: str, flags: int) -> bytes:
        return packet((13, flags), (12, field(2, message((1, number), (2, name)))))

    def slice_of(number: int, at: int) -> bytes:
        own = message((9, BEGIN), (11, 1), (10, number), (22, "cpu_op"))
        return packet((8, BASE_NS + at), (11, own)) + end(1, at + 1, sequence=1)

    path = write_packets(
        tmp_path, named(1, "aten::a", 1), slice_of(1, 0), named(2, "aten::b", 0), slice_of(2, 10),
        named(1, "aten::c", 1), slice_of(1, 20), slice_of(2, 30),
    )  # fmt: skip
    assert sorted(spans_of(read(path))) == ["", "aten::a", "aten::b", "aten::c"]


# --- what is no trace of PyTorch's, and what is damaged


def complaint(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        analyze([path])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_perfetto_traces_of_others_are_refused(tmp_path):
    other = write_packets(tmp_path, begin(1, 0, "draw", "gfx"), end(1, 10))
    assert "PyTorch" in complaint(other)
    rocprof = [begin(1, 0, "gemm", "kernel_dispatch"), end(1, 10)]
    rocprof.append(packet((60, message((1, 1), (2, "COMPUTE AGENT [0] STREAM [1] (GPU)")))))
    assert "rocprofv3" in complaint(write_packets(tmp_path, *rocprof))


def test_a_timeline_of_this_package_is_no_trace(tmp_path):
    """As `report --perfetto` begins its files: the first packets have neither a time nor a track."""
    named = message((2, message((1, "written by"), (2, "megatron-lite report --perfetto"))))
    path = write_packets(tmp_path, field(1, field(5, named)), of_made(gpu_run(steps=3)))
    assert "--perfetto" in complaint(path)


def test_other_messages_are_no_packets():
    plane = message((1, 1), (2, "/host:CPU"), (3, message((1, 5))))
    for content in (field(1, plane), b"", b"\n", b"\n\n\n\n\n", b"\n\x05abcde", bytes(range(256))):
        assert not is_perfetto(content)


@pytest.fixture(scope="module")
def content() -> bytes:
    return of_made(gpu_run(steps=3))


@pytest.mark.parametrize("share", np.linspace(0.05, 0.99, 8))
def test_packets_may_be_cut_anywhere(tmp_path, content, share):
    """The ends of a group may be missing, so that none of its slices has a length."""
    try:
        trace = read(write_packets(tmp_path, content[: int(len(content) * share)]))
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert trace.cut and trace.damage


def test_damaged_packets_are_left_out_or_named(tmp_path, content):
    random = np.random.default_rng(0)
    whole = len(read(write_packets(tmp_path, content)).events)
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), 5):
            damaged[place] = random.integers(0, 256)
        try:
            traces = read_traces(write_packets(tmp_path, bytes(damaged)))
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert sum(len(trace.events) for trace in traces) <= whole


def test_absurd_sizes_are_given_up(tmp_path):
    sound = begin(1, 0, "aten::a", "cpu_op") + end(1, 10)
    endless = b"\x0a" + b"\xff" * 9 + b"\x01"
    deep = b""
    for _ in range(200):
        deep = field(12, deep)
    many = packet((8, BASE_NS), (11, b"\x48\x01" * 5000))
    nested = packet(
        (8, BASE_NS), (11, message((9, BEGIN), (11, 1), (23, "aten::b"), (4, field(10, "Input Dims") + deep)))
    )
    trace = read(write_packets(tmp_path, sound, nested, end(1, 20, sequence=1), many, endless))
    assert sorted(spans_of(trace)) == ["aten::a", "aten::b"]
    assert trace.cut and trace.damage


def test_more_open_slices_than_fit_end_the_reading(tmp_path):
    path = write_packets(tmp_path, *(begin(1, at, f"aten::{at}", "cpu_op") for at in range(100)))
    chunks = PacketChunks(path, max_open=10, block_bytes=256)
    entries = [entry for chunk in chunks for entry in chunk]
    assert len(entries) < 100 and chunks.cut and chunks.damage


def test_a_packet_that_grows_without_end_is_cut(tmp_path):
    """A thousandth of what it becomes; sound packets behind it are read."""
    sound = begin(1, 0, "aten::a", "cpu_op") + end(1, 10)
    bomb = field(1, field(50, zlib.compress(bytes(80 << 20))))
    trace = read(write_packets(tmp_path, sound, bomb, bomb, begin(1, 20, "aten::b", "cpu_op"), end(1, 30)))
    assert sorted(spans_of(trace)) == ["aten::a", "aten::b"] and trace.damage


def test_names_that_are_cleared_with_each_packet_end_the_reading(tmp_path):
    sound = begin(1, 0, "aten::a", "cpu_op") + end(1, 10)
    clearing = packet((13, 1), (8, BASE_NS)) * 5000
    chunks = PacketChunks(write_packets(tmp_path, sound * 1000, clearing), max_open=10, block_bytes=1 << 15)
    assert sum(map(len, chunks)) >= 500 and chunks.cut and chunks.damage


@pytest.mark.parametrize("names", [("a.json", "a.pftrace"), ("rank0.1.pt.trace.json.gz", "rank0.1.pftrace.gz")])
def test_of_both_forms_of_one_trace_json_is_read(tmp_path, names):
    """It says ranks, devices and directions of copies."""
    for name, source in zip(names, (TORCH_JSON, TORCH_PACKETS)):
        content = source.read_bytes()
        (tmp_path / name).write_bytes(content if name.endswith(".gz") else gzip.decompress(content))
    found = discover_sources([tmp_path])
    assert [path.name for path in found.traces] == [names[0]]
    assert [path.name for path, _ in found.ignored] == [names[1]]
