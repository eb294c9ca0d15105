"""Files that are damaged, foreign or hostile: what can be read is read, and the rest is said in a sentence."""

import gzip
import itertools
import json
import threading
import zlib
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import numpy as np
import pytest
from support.trace_maker import cpu_run, gpu_run, write
from support.wording import wording

from megatron_lite.analysis import analyze as analysis
from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.kernels.rank_kernels import rank_kernels
from megatron_lite.analysis.trace import read as trace_read
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.analysis.trace.file_blocks import read_ahead
from megatron_lite.analysis.trace.kineto_json import Chunks
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.errors import UserError
from megatron_lite.report.json_file import as_json
from megatron_lite.report.sections.all import build_limitations

EVENTS = len([event for event in gpu_run(steps=3).events if event["ph"] == "X"])


@pytest.fixture
def text() -> str:
    return json.dumps(gpu_run(steps=3).data())


def read(folder, text: str | bytes, name="t.json"):
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    [trace] = read_traces(path)
    return trace


def event(name="a", ts="1", dur="1", category="cpu_op", more="") -> str:
    return f'{{"ph": "X", "cat": "{category}", "name": "{name}", "pid": 1, "tid": 7, "ts": {ts}, "dur": {dur}{more}}}'


def of(*events: str) -> str:
    return '{"schemaVersion": 1, "traceEvents": [' + ",\n".join(events) + "]}"


def complaint(path) -> str:
    with pytest.raises(UserError) as caught:
        read_traces(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), path.name)


@pytest.mark.parametrize("share", np.linspace(0.3, 1, 15))
def test_json_may_be_cut_anywhere(tmp_path, text, share):
    cut = text[: int(len(text) * share) - 1]
    trace = read(tmp_path, cut)
    whole = len(trace.events) == EVENTS and cut.endswith('"made.json"')
    assert cut.count('"ph": "X"') - len(trace.events) in (0, 1)
    assert len(trace.notes) == (not whole)
    assert whole or trace.notes[0].startswith("t.json: the JSON breaks off ")
    assert (trace.rank, trace.devices) == (0, ("NVIDIA A100-SXM4-80GB",)), "the header stands before"


def test_json_cut_in_an_event_says_where_it_begins(tmp_path, text):
    place = text.index('"ph"', len(text) // 2) + 40
    begin = text.rindex('{"ph"', 0, place)
    note = f"t.json: the JSON breaks off in the event at byte {begin:,}; what precedes it was read"
    assert read(tmp_path, text[:place]).notes == (note,)


@pytest.mark.parametrize("end", ["", ",", " , "])
def test_json_cut_between_events(tmp_path, end):
    cut = '{"traceEvents": [' + event("a") + "," + event("b") + end
    trace = read(tmp_path, cut)
    note = f"t.json: the JSON breaks off after byte {len(cut)}; what precedes it was read"
    assert (len(trace.events), trace.notes) == (2, (note,))


def test_a_damaged_event_in_the_middle_costs_only_itself(tmp_path, text):
    place = text.index('"ph"', len(text) // 2)
    trace = read(tmp_path, text[:place] + '"""' + text[place:])
    assert (len(trace.events), trace.notes) == (EVENTS - 1, (wording("analysis/t-json-events-that", 1),))


def test_cut_off_and_damaged_gzip(tmp_path):
    zipped = bytearray(gzip.compress(json.dumps(gpu_run(steps=100).data()).encode()))
    trace = read(tmp_path, bytes(zipped[:-500]), "t.json.gz")
    assert trace.notes[0].startswith(wording("analysis/t-json-gz-gzip")) and len(trace.events) > EVENTS
    zipped[len(zipped) // 2 : len(zipped) // 2 + 50] = bytes(50)
    [note] = [note for note in read(tmp_path, bytes(zipped), "t.json.gz").notes if "gzip" in note]
    assert note.startswith(wording("analysis/t-json-gz-gzip-data"))


def test_values_that_are_no_numbers(tmp_path):
    trace = read(tmp_path, of(
        event("a"), event("nan", ts="NaN"), event("inf", dur="Infinity"), event("lower", ts="2", dur="inf"),
        event("minus", ts="3", dur="-nan"), event("k", "4", "1", "kernel", ', "args": {"device": null, "stream": "x", "correlation": 1e99, "bytes": {}}'),
        event("null", ts="null"), event("huge", ts="1e300"), event("text", ts='"5"'), event("list", ts="[6]"),
        event("b", "7", "1", more=', "args": {"Sequence number": 99999999999999999999999, "Input Dims": "no"}'),
        event("c", "8", "1", more=', "args": null'), event("d", "9", "1", more=', "args": [1, 2]'),
    ))  # fmt: skip
    names = [trace.name_of(i) for i in range(len(trace.events))]
    assert names == ["a", "inf", "lower", "minus", "k", "text", "b", "c", "d"]
    assert trace.notes == (wording("analysis/events-without-start-time", 4),)
    [kernel] = trace.rows[Kind.KERNEL]
    assert (trace.events.device[kernel], trace.events.stream[kernel], trace.events.correlation[kernel]) == (1, 7, -1)
    assert (trace.events.end_ns >= trace.events.start_ns).all()
    assert (trace.events.sequence == -1).all()


def test_exact_times_that_are_no_times(tmp_path):
    """Absolute times with nanoseconds take another way through the decoder."""
    fine = [event(f"e{i}", f"1711964646123456.{i}01") for i in range(3)]
    trace = read(tmp_path, of(*fine, event("text", ts='"NaN"'), event("huge", ts="1e300"), event("null", ts="null")))
    assert (len(trace.events), trace.notes) == (3, (wording("analysis/events-without-start-time", 3),))
    assert trace.events.start_ns.tolist() == [0, 100, 200]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a\x01b\nc", "a b c"),
        ("C:\\Users\\x.py(1): f", "C:\\Users\\x.py(1): f"),
        ("caf\xe9", "caf\ufffd"),
        ('q\\"u\\\\', 'q"u\\'),
        ("\\ud800 x \\ud83d\\ude00", "\ufffd x \U0001f600"),  # half a character cannot be printed
    ],
)
def test_control_characters_backslashes_and_broken_utf8(tmp_path, written, name):
    trace = read(tmp_path, of(event(written), event("b", "2")).encode("latin-1"))
    assert ([trace.name_of(0), trace.name_of(1)], trace.notes) == ([name, "b"], ())


def test_negative_durations_are_instants(tmp_path):
    trace = read(tmp_path, of(event("a"), event("b", "2", "-5")))
    assert (trace.events.end_ns - trace.events.start_ns).tolist() == [1000, 0]
    assert trace.notes == (wording("analysis/events-with-negative-duration", 1),)


def test_zero_times_in_a_trace_of_absolute_ones_are_lost_times(tmp_path):
    trace = read(
        tmp_path, of(*(event("a", f"16941282014354{i:02d}") for i in range(5)), event("zero", "0", category="kernel"))
    )
    assert (len(trace.events), trace.notes) == (5, (wording("analysis/events-without-start-time", 1),))
    assert len(read(tmp_path, of(event("a", "0"), event("b", "5"))).events) == 2, "here 0 is the beginning"


def test_work_that_runs_into_the_next_on_its_stream_is_clipped(tmp_path):
    def kernel(name, ts, dur, stream):
        return event(name, ts, dur, "kernel", f', "args": {{"device": 0, "stream": {stream}}}')

    trace = read(tmp_path, of(
        kernel("a", 10, 100, 7), kernel("b", 20, 5, 7), kernel("c", 12, 50, 8), event("op", 9, 200), kernel("d", 30, 1, 7)
    ))  # fmt: skip
    lengths = {trace.name_of(i): int(trace.events.end_ns[i] - trace.events.start_ns[i]) for i in range(5)}
    assert lengths == {"op": 200_000, "a": 10_000, "b": 5_000, "c": 50_000, "d": 1_000}
    assert trace.notes == (wording("analysis/gpu-operations-that-ran", 1),)


def test_headers_of_any_type(tmp_path):
    header = {"distributedInfo": [1], "deviceProperties": {"a": 1}, "baseTimeNanoseconds": "soon", "schemaVersion": {}}
    trace = read(tmp_path, json.dumps(header | {"traceEvents": [json.loads(event())]}))
    assert (trace.rank, trace.world_size, trace.devices, trace.base_ns, trace.facts) == (None, None, (), None, {})
    header = {
        "distributedInfo": {"rank": "2", "world_size": -1, "backend": "x" * 999},
        "deviceProperties": [None, {"name": 5}, {}],
    }
    trace = read(tmp_path, json.dumps(header | {"traceEvents": [json.loads(event())]}))
    assert (trace.rank, trace.world_size, trace.devices, trace.facts) == (2, None, ("5", ""), {"backend": "x" * 200})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "t.json: empty; a trace holds a JSON object with traceEvents."),
        (b" \n", "t.json: empty; a trace holds a JSON object with traceEvents."),
        (b"hello", "t.json: not a trace: neither JSON nor gzipped JSON."),
        (b"\x80\x04}", "t.json: not a trace: neither JSON nor gzipped JSON."),
        (b'{"schema": 1, "plan": {}}', "t.json: JSON without traceEvents, so no trace of torch.profiler."),
        (b'{"traceEvents": []}', "t.json: a trace in which no event has a duration"),
        (b"[]", "t.json: a trace in which no event has a duration"),
        (b"[1, 2, 3]", "t.json: the JSON breaks off in the event at byte 1; what precedes it was read"),
        (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', "t.json: a trace in which no event has a duration"),
        (
            b'{"traceEvents": [{"ph": "X", "name": "x"}]}',
            "t.json: no event of it has a start time, so there is nothing to analyze.",
        ),
        (gzip.compress(b"", mtime=0), "t.json: empty; a trace holds a JSON object with traceEvents."),
        (
            gzip.compress(b"{" * 1000, mtime=0)[:15],
            "t.json: the gzip file ends early, after 260 bytes of text; what precedes it was read, and holds no event.",
        ),
        (
            b"\x1f\x8bgarbage!",
            "t.json: the gzip data is damaged after 0 bytes of text; what precedes it was read, and holds no event.",
        ),
    ],
)
def test_what_is_no_trace_is_said_in_a_line(tmp_path, content, words):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert complaint(path) == words


def test_paths_that_cannot_be_read(tmp_path):
    assert complaint(tmp_path).endswith(wording("analysis/folder-name-file-in"))
    assert complaint(tmp_path / "no.json") == wording("analysis/no-json-no-such")
    assert wording("analysis/export-it-first-nsys", "--type") in complaint(tmp_path / "run.nsys-rep")
    assert "QdstrmImporter" in complaint(tmp_path / "run.qdstrm")


def test_an_endless_string_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lite.analysis.trace.kineto_json._MAX_EVENT_BYTES", 10_000)
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + event() + ', {"ph": "X", "name": "' + "x" * 100_000)
    chunks = Chunks(path, 1000)
    assert sum(map(len, chunks)) == 1
    assert chunks._at < 100 and wording("analysis/breaks-off-in-event") in chunks.damage


def test_blocks_read_ahead():
    assert list(read_ahead(iter([b"a", b"b"] * 10), most=2)) == [b"a", b"b"] * 10
    failing = read_ahead(b"a" if number == 0 else 1 / 0 for number in range(2))
    assert next(failing) == b"a"
    with pytest.raises(ZeroDivisionError):
        next(failing)
    before = threading.active_count()
    abandoned = read_ahead(iter(itertools.repeat(b"x")), most=2)
    assert next(abandoned) == b"x"
    abandoned.close()
    assert threading.active_count() == before, "whoever stops reading leaves no thread behind"


def test_deep_nesting_is_no_crash(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    trace = read(tmp_path, of(event("a"), event("b", "2", more=f', "args": {{"x": {deep}}}'), event("c", "3")))
    assert [trace.name_of(i) for i in range(len(trace.events))] in (["a", "b", "c"], ["a", "c"])


def test_memory_of_a_trace_is_not_its_file(tmp_path):
    """Chunks are let go: what is held at any time is a few chunks, however long the file is."""
    path = write(gpu_run(steps=400).data(), tmp_path / "t.json")
    chunks = Chunks(path, 4096)
    longest = max(len(chunks._text) for _ in chunks)
    assert longest < 3 * 4096 < path.stat().st_size / 20


def in_kinetos_order(made):
    """The host's work thread by thread, each piece where it ends, then calls and the device's work by time."""
    host = [event for event in made.events if event["cat"] in ("cpu_op", "user_annotation")]
    rest = [event for event in made.events if event not in host]
    made.events = sorted(host, key=lambda event: (-event["tid"], event["ts"] + event["dur"]))
    made.events += sorted(rest, key=lambda event: event["ts"])
    return made


CUT_RUNS = {
    "CPU": lambda: cpu_run(steps=20, world_size=1),
    "GPU": lambda: gpu_run(steps=20, item=True),
    "CPU as Kineto writes": lambda: in_kinetos_order(cpu_run(steps=20, world_size=1)),
    "GPU as Kineto writes": lambda: in_kinetos_order(gpu_run(steps=20, item=True)),
}


@pytest.mark.parametrize("cut", [0.3, 0.5, 0.7, 0.8, 0.9, "in a string", "gz"])
@pytest.mark.parametrize("run", CUT_RUNS)
def test_a_cut_trace_is_reported_over_its_whole_steps(run, cut, tmp_path):
    text = json.dumps(CUT_RUNS[run]().data())
    path = tmp_path / ("t.json.gz" if cut == "gz" else "t.json")
    if cut == "gz":
        zipped = gzip.compress(text.encode())
        path.write_bytes(zipped[: len(zipped) * 9 // 10])
        text = zlib.decompressobj(wbits=31).decompress(path.read_bytes()).decode()
    else:
        in_string = text.index('"name": "', len(text) * 3 // 4) + 12
        text = text[: in_string if cut == "in a string" else int(len(text) * cut)]
        path.write_text(text)
    report = analyze([path])
    time, sentence = report.facts.ranks_seen[0].time, report.verdict.sentence
    assert sum("the JSON breaks off" in gap or "ends early" in gap for gap in build_limitations(report)) == 1
    assert report.verdict.confidence == "low"
    if "GPU" in run and '"cat": "kernel"' not in text:
        assert sentence.startswith(wording("analysis/inconclusive-trace-names-device"))
        return
    last_work = "aten::_fused_adamw_" if "Kineto" not in run else "ProfilerStep"
    whole = text.count("multi_tensor_apply" if "GPU" in run else last_work)
    counted = [step.number for step in time.steps if step.steady]
    # all but the first one on a GPU, and the last where nothing follows
    assert set(counted) <= set(range(10, 10 + whole)) and len(counted) >= whole - 2
    assert "INCONCLUSIVE" not in sentence and f"{len(counted)} steady steps; " in report.verdict.why
    uncut = analyze([CUT_RUNS[run]().write(tmp_path / "uncut")]).facts.ranks_seen[0].time
    assert time.rows == pytest.approx(uncut.rows, rel=0.1, abs=0.03)


def test_of_a_trace_that_is_too_large_as_many_whole_steps_are_read_as_may_be_held(tmp_path, monkeypatch):
    """They were half of them: of a trace of few long steps one was left."""
    monkeypatch.setattr("megatron_lite.analysis.trace.kineto.Chunks", lambda path: Chunks(path, 500))
    made = gpu_run(steps=6)
    path, per_step = made.write(tmp_path), len(made.events) // 6
    monkeypatch.setattr(trace_read, "MAX_EVENTS", per_step * 5)
    report = analyze([path])
    assert len(report.facts.ranks_seen[0].time.steady_steps) >= 2
    made.events = sorted(made.events, key=lambda event: event["name"].startswith("ProfilerStep"))  # the marks last
    cut = json.dumps(made.data()).partition('"name": "ProfilerStep')[0]
    (tmp_path / "cut.json").write_text(cut)
    monkeypatch.setattr(trace_read, "MAX_EVENTS", 1000)
    assert wording("analysis/no-step-marks") not in analyze([tmp_path / "cut.json"]).verdict.sentence
    monkeypatch.setattr(trace_read, "MAX_EVENTS", per_step * 2)
    report = analyze([path])
    sentence = report.verdict.sentence
    assert sentence.startswith(wording("analysis/inconclusive-only-one-complete"))
    assert wording("analysis/profile-at-least") not in sentence


# --- several files, in a process each


def test_in_processes_as_in_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_read, "MIN_BYTES_SAID", 0)
    paths = [gpu_run(rank=rank, world_size=3).write(tmp_path) for rank in range(3)]
    *readers, missing = trace_read.readers([*paths, tmp_path / "no.json"], read_traces)
    for path, read_there in zip(paths, readers, strict=True):
        [there], [here] = read_there(), read_traces(path)
        same = ("rank", "names", "shapes", "collectives")
        assert [getattr(there, name) for name in same] == [getattr(here, name) for name in same]
        assert all(np.array_equal(column, vars(here.events)[name]) for name, column in vars(there.events).items())
    with pytest.raises(UserError, match="no.json: No such file"):
        missing()


def test_analyzed_in_processes_they_give_the_same_report(tmp_path, monkeypatch):
    for rank in range(3):
        gpu_run(rank=rank, world_size=3).write(tmp_path)
    monkeypatch.setattr(
        analysis, "rank_kernels", lambda trace, *given: 1 / 0 if trace.rank == 1 else rank_kernels(trace, *given)
    )
    here = as_json(analyze([tmp_path]))
    monkeypatch.setattr(trace_read, "MIN_BYTES_SAID", 0)
    there = as_json(analyze([tmp_path]))
    assert any("ZeroDivisionError" in gap for gap in here["gaps"]) and len(here["ranks_seen"]) == 3
    assert {**there, "read_s": 0} == {**here, "read_s": 0}


def test_a_killed_process_is_made_up_for_and_small_files_need_none(tmp_path, monkeypatch):
    path, future = gpu_run().write(tmp_path), Future()
    future.set_exception(BrokenProcessPool("killed"))
    assert len(trace_read._take_result(future, partial(read_traces, path))) == 1
    monkeypatch.setattr(trace_read, "_work_in_processes", None)
    paths = [gpu_run(rank=rank).write(tmp_path) for rank in range(2)]
    assert [read()[0].rank for read in trace_read.readers(paths, read_traces)] == [0, 1]
