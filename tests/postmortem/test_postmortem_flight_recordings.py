"""The flight recorder's files: every form of them says the same, and damaged or hostile ones are named."""

import json
import pickle
from pathlib import Path

import pytest
from support.flight_recordings import STEP, RecordedJob

from megatron_lite.errors import UserError
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.evidence import CallState, FlightRecording, GroupProgress
from megatron_lite.postmortem.flight_recordings import (
    build_recordings,
    find_rank_in_path,
    is_flight_recording,
    read_flight_recordings,
)

GROUPS = {"1": ("TENSOR_MODEL_PARALLEL_GROUP", [2, 3]), "2": ("", [1, 3])}


def make_job(**options) -> RecordedJob:
    job = RecordedJob(4, GROUPS, **options)
    job.call("all_reduce", shape=[4, 8])
    job.send(3, 1, "2", shape=[16])
    job.call("_all_gather_base", "1", shape=[8], output=[16], kind="BFloat16")
    job.exchange([(2, 3), (3, 2)], "1")
    job.coalesce(["broadcast", "broadcast"])
    job.call("all_reduce", without=[2])
    return job


def read_one(job: RecordedJob, rank: int, **options) -> FlightRecording:
    (recording,) = build_recordings(job.dump(rank, **options), f"fr_{rank}", rank).recordings
    return recording


def test_a_recording_has_each_call_with_its_group_and_place():
    recording = read_one(make_job(), 3)
    assert (recording.rank, recording.backend, recording.version) == (3, "nccl", "2.10")
    assert not (recording.has_forgotten or recording.is_only_active)
    assert recording.tells_starts
    assert recording.groups["1"].ranks == (2, 3)
    assert recording.groups["1"].description == "TENSOR_MODEL_PARALLEL_GROUP"
    assert recording.groups["2"].description == ""
    first = recording.calls[0]
    assert (first.name, first.group, first.number, first.state) == ("all_reduce", "0", 1, CallState.COMPLETED)
    assert (first.input_shapes, first.input_types, first.timeout_ms) == (((4, 8),), ("Float",), 600_000)
    assert (first.frames[2].file, first.frames[2].line, first.frames[2].function) == STEP
    gathered = recording.calls[2]
    assert (gathered.input_shapes, gathered.output_shapes, gathered.input_types) == (((8,),), ((16,),), ("BFloat16",))
    waits = recording.calls[-1]
    assert (waits.number, waits.state, waits.has_ended) == (3, CallState.STARTED, False)


def test_messages_go_between_ranks_of_the_job():
    recording = read_one(make_job(), 3)
    sent = recording.calls[1]
    assert (sent.name, sent.is_message, sent.number, sent.sender, sent.receiver) == ("send", True, 1, 3, 1)
    received = read_one(make_job(), 1).calls[1]
    assert (received.name, received.sender, received.receiver) == ("recv", 3, 1)


def test_parts_of_a_coalesced_call_have_its_state():
    calls = read_one(make_job(), 2).calls
    parts = [call for call in calls if call.is_part]
    assert [call.name for call in parts] == ["send", "recv", "broadcast", "broadcast"]
    assert {call.state for call in parts} == {CallState.COMPLETED}
    assert [call.number for call in parts] == [1, 1, 2, 2]
    job = RecordedJob(2)
    job.exchange([(0, 1), (1, 0)], stuck=True)
    assert [call.has_ended for call in read_one(job, 0).calls] == [False, False, False]


def test_a_call_that_nccl_gave_up_has_not_ended():
    job = RecordedJob(2, timing=False)
    job.call()
    job.call(without=[1], failed=True)
    recording = read_one(job, 0)
    assert [(call.has_ended, call.has_failed) for call in recording.calls] == [(True, False), (False, True)]
    assert not recording.tells_starts


def test_gloo_retires_what_has_ended():
    job = make_job(backend="gloo")
    recording = read_one(job, 3)
    assert {call.state for call in recording.calls} == {CallState.SCHEDULED}
    assert [call.has_ended for call in recording.calls] == [True, True, True, False]
    assert not any(call.is_message or call.has_failed for call in recording.calls)
    assert recording.groups["1"].ranks == ()
    # the status counts two messages of group 1 that are not recorded
    assert recording.progress["1"] == GroupProgress(1, None, 1)
    assert recording.progress["0"] == GroupProgress(3, None, 2)


def test_progress_is_told_where_it_is_certain():
    recording = read_one(make_job(), 3)
    assert recording.progress["0"] == GroupProgress(3, 3, 2)
    # its status may count messages
    assert recording.progress["1"] == GroupProgress()


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.7", "2.10"])
def test_pickles_and_json_of_each_version_say_the_same(version, tmp_path):
    job = make_job(version=version)
    pickles = collect_evidence(job.write(tmp_path / "pickles", frames=False))
    texts = collect_evidence(job.write(tmp_path / "texts", form="json"))
    assert not pickles.unread + texts.unread
    assert pickles.read == {"flight recordings": 4}
    assert pickles.world_size == texts.world_size == 4
    for one, other in zip(pickles.recordings, texts.recordings, strict=True):
        assert (one.calls, one.groups, one.progress) == (other.calls, other.groups, other.progress)


def test_the_list_of_an_old_torch_is_read():
    entries = [
        {"pg_id": 0, "seq_id": number, "profiling_name": "nccl:all_reduce", "state": "completed",
         "time_created_us": 1_700_000_000_000_000, "input_sizes": [[2]], "output_sizes": [[2]], "frames": []}
        for number in (1, 2)
    ]  # fmt: skip
    (recording,) = build_recordings(entries, "old", 1).recordings
    assert [(call.group, call.number, call.created_ns) for call in recording.calls] == [
        ("0", 1, 1_700_000_000_000_000_000),
        ("0", 2, 1_700_000_000_000_000_000),
    ]


def test_groups_by_number_are_read():
    # version 1.2 of the form
    entry = {"pg_id": 0, "seq_id": 1, "record_id": 0, "profiling_name": "nccl:all_reduce", "state": "started"}
    (recording,) = build_recordings(
        {"version": "1.2", "pg_config": {0: [0, 1, 2]}, "entries": [entry]}, "x", 1
    ).recordings
    assert recording.groups["0"].ranks == (0, 1, 2)
    assert recording.calls[0].group == "0"


def test_a_ring_buffer_forgets_and_active_calls_leave_gaps():
    job = RecordedJob(2, buffer=3)
    for _ in range(5):
        job.call()
    job.call(without=[1])
    assert read_one(job, 0).has_forgotten
    active = read_one(job, 0, only_active=True)
    assert active.is_only_active
    assert not active.has_forgotten
    assert [call.number for call in active.calls] == [6]


def test_dumps_of_several_ranks_lie_in_one_file(tmp_path):
    job = make_job()
    for values in ({f"rank{rank}.json": job.dump_json(rank) for rank in job.ranks},
                   {str(rank): job.dump_json(rank) for rank in job.ranks},
                   [{"rank": rank, **job.dump_json(rank)} for rank in job.ranks]):  # fmt: skip
        (tmp_path / "all.json").write_text(json.dumps(values))
        recordings = read_flight_recordings(tmp_path / "all.json").recordings
        assert [recording.rank for recording in recordings] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3), ("fr_12", 12), ("trace12", 12), ("host7_rank_3.pkl", 3), ("rank_3/dump.pkl", 3),
        ("fr_rank3.json", 3), ("nccl_trace_rank_", None), ("dump_20261128", None), ("dump_2026-11-28", None),
        ("dump.pkl", None), ("node_rank_2_rank_9", 9), ("local_rank_3", None), ("rank_4/local_rank_3.pkl", 4), ("attempt_1/5/dump", None),
    ],
)  # fmt: skip
def test_ranks_are_read_from_names(name, rank):
    assert find_rank_in_path(Path("/jobs/17") / name) == rank


def test_a_dump_may_tell_its_own_rank():
    # ranks 1 and 3 exchange messages; no other rank is in groups 0, 1 and 2
    assert build_recordings(make_job().dump(3), "x").recordings[0].rank == 3
    assert build_recordings(make_job().dump(0), "x").recordings[0].rank is None
    evidence = build_recordings(make_job().dump(3), "x", 2)
    assert evidence.recordings[0].rank == 3
    assert len(evidence.unread) == 1


class _Hostile:
    def __reduce__(self):
        import os

        return os.system, ("touch hostile",)


HOSTILE = {
    "code": pickle.dumps({"pg_config": {}, "entries": [_Hostile()]}),
    "cut": pickle.dumps(make_job().dump(0))[:-40],
    "tuples": b"\x80\x02}X\x09\x00\x00\x00pg_configK\x01" + b"2\x86" * 60 + b"s.",
    "json": b'{"pg_config": [[[[',
    "nested": b'{"pg_config": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_file_is_one_line(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fr_0").write_bytes(content)
    evidence = collect_evidence([tmp_path])
    assert not evidence.recordings
    assert len(evidence.unread) == 1
    assert evidence.unread[0].startswith(f"{tmp_path}/fr_0: ")
    assert not (tmp_path / "hostile").exists()
    if b"posix" in content:
        assert "posix.system" in evidence.unread[0]
    with pytest.raises(UserError):
        read_flight_recordings(tmp_path / "fr_0")


ODD = [None, True, -1, 2**70, 1e300, "", "x" * 5000, [], [[]], {}, {"a": {}}, [None], (1, "2")]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_any_value_may_be_any_other(odd):
    sound = make_job().dump(3)
    for name in sound:
        build_recordings({**sound, name: odd}, "x", 3)
    for name in sound["entries"][0]:
        entries = [{**sound["entries"][0], name: odd}, *sound["entries"][1:]]
        evidence = build_recordings({**sound, "entries": entries}, "x", 3)
        assert len(evidence.recordings[0].calls) == len(entries) - len(evidence.unread)
    for name in sound["pg_config"]["0"]:
        build_recordings({**sound, "pg_config": {"0": {**sound["pg_config"]["0"], name: odd}}}, "x", 3)


def test_a_trace_of_the_profiler_is_no_recording(tmp_path):
    """Its header lists process groups by the same name."""
    head = b'{"schemaVersion": 1, "deviceProperties": [], "distributedInfo": {"pg_config": []}, "traceEvents": ['
    assert not is_flight_recording(head, tmp_path / "rank0.pt.trace.json")
