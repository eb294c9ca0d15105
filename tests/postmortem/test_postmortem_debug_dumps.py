"""What torch.distributed.debug leaves: answers of ranks, and which of them did not answer."""

import json

import pytest
from support import debug_dumps as made
from support.flight_recordings import RecordedJob

from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.evidence import CallState, JobEvidence

FILE = "/code/train.py"


@pytest.fixture
def read(tmp_path):
    def read_text(text: str, name: str = "x") -> JobEvidence:
        (tmp_path / name).write_text(text)
        evidence = collect_evidence([tmp_path / name])
        assert evidence.read == {"debug dumps": 1}, evidence.unread
        return evidence

    return read_text


def test_stacks_are_those_of_ranks_on_hosts(read):
    answers = [made.make_traceback(FILE, 80 + rank, "step") for rank in range(3)]
    evidence = read(made.make_dump(answers, "dump_traceback"), "stacks_20261128_164815.txt")
    assert [(stack.rank, stack.host) for stack in evidence.stacks] == [(0, "node0"), (1, "node1"), (2, "node2")]
    main = [thread for stack in evidence.stacks for thread in stack.threads if thread.is_main]
    assert [thread.frames[0].line for thread in main] == [80, 81, 82]
    assert evidence.world_size == 3
    assert not evidence.unread
    later = read(made.make_dump(answers, "dump_traceback"), "stacks_20261128_164915.txt")
    assert later.stacks[0].taken_at - evidence.stacks[0].taken_at == 60


def test_a_rank_that_does_not_answer_is_evidence(read):
    answers = [made.make_traceback(FILE, 80, "step")] * 4
    failures = {1: (503, made.REFUSED), 2: (408, made.TIMED_OUT)}
    evidence = read(made.make_dump(answers, "dump_traceback", failures))
    assert [stack.rank for stack in evidence.stacks] == [0, 3]
    assert [(one.rank, one.was_refused, one.host) for one in evidence.unanswered] == [
        (1, True, "node1"),
        (2, False, "node2"),
    ]
    assert evidence.world_size == 4


def test_a_rank_that_answers_later_is_not_silent(tmp_path):
    answers = [made.make_traceback(FILE, 80, "step")] * 3
    silent = {1: (408, made.TIMED_OUT), 2: (408, made.TIMED_OUT)}
    for second, failures in enumerate([silent, {2: (408, made.TIMED_OUT)}, {2: (503, made.REFUSED)}]):
        dump = made.make_dump(answers, "dump_traceback", failures)
        (tmp_path / f"stacks_20261128_16481{second}.txt").write_text(dump)
    (tmp_path / "tcpstore_20261128_164819.txt").write_text(made.make_store(3))
    evidence = collect_evidence([tmp_path])
    assert [(one.rank, one.was_refused) for one in evidence.unanswered] == [(2, True)]


def test_a_server_without_the_handler_has_answered(read):
    failures = {rank: (404, made.NO_HANDLER) for rank in range(2)}
    evidence = read(made.make_dump(["", ""], "torchcomms_health_check", failures))
    assert not evidence.unanswered
    assert not evidence.unread


def test_pages_with_the_flight_recorder_are_read(read):
    job = RecordedJob(3, backend="gloo")
    job.call()
    job.call(without=[1])
    answers = [json.dumps(job.dump_json(rank), indent=2) for rank in job.ranks]
    evidence = read(made.make_page(answers, "fr_trace_json", {2: 503}))
    assert [(one.rank, len(one.calls)) for one in evidence.recordings] == [(0, 2), (1, 1)]
    assert [(one.rank, one.was_refused) for one in evidence.unanswered] == [(2, None)]


def test_wait_counters_tell_in_what_a_rank_waits(read):
    answers = [made.make_counters(TCPStore__get=0, TCPStore__wait=1), made.make_counters(TCPStore__get=0)]
    evidence = read(made.make_dump(answers, "wait_counter_values"))
    assert [(one.rank, one.phase) for one in evidence.progress] == [(0, "TCPStore__wait"), (1, None)]


def test_the_store_tells_hosts(read):
    evidence = read(made.make_store(3))
    assert [(one.rank, one.host) for one in evidence.progress] == [(0, "node0"), (1, "node1"), (2, "node2")]
    assert evidence.world_size == 3


def test_tables_tell_who_entered_what(read):
    recordings = read(made.TABLES).recordings
    assert [(one.rank, one.backend) for one in recordings] == [(0, "nccl"), (1, "nccl"), (2, "nccl")]
    assert [(call.group, call.number, call.name) for call in recordings[0].calls] == [
        ("0", 1, "all_reduce"), ("1", 1, "_all_gather_base"), ("0", 2, "all_reduce"), ("1", 2, "all_reduce"),
    ]  # fmt: skip
    assert recordings[0].groups["1"].ranks == (0, 1)
    assert recordings[0].groups["1"].description == "TP"
    other = recordings[1].calls[-1]
    assert (other.name, other.input_shapes, other.state) == ("broadcast", ((9,),), CallState.STARTED)
    # rank 2 is missing in the second collective
    assert [(call.group, call.number, call.input_shapes) for call in recordings[2].calls] == [("0", 1, ((4, 2),))]


def test_pages_with_tables_are_read(read):
    row = {"id": "0", "collective_seq_id": "7", "pg_desc": "0:default_pg", "collective_name": "nccl:all_reduce",
           "input_sizes": "[[4]]", "output_sizes": "[[4]]", "expected_ranks": "{0, 1, 2}",
           "collective_state": "started", "missing_ranks": "{1}", "mismatch_collectives": ""}  # fmt: skip
    summary = f"PARTIAL DATA: 2/3 workers responded\n  Rank 2: {made.REFUSED}"
    evidence = read(made.make_tables_page([row], summary))
    assert [(one.rank, [call.number for call in one.calls]) for one in evidence.recordings] == [(0, [7]), (1, [])]
    assert [(one.rank, one.was_refused) for one in evidence.unanswered] == [(2, True)]
    assert evidence.world_size == 3


def test_tables_say_nothing_of_ranks_that_did_not_answer(read):
    text = f"PARTIAL DATA: 2/3 workers responded\n  Rank 1: {made.REFUSED}\n\n{made.TABLES}"
    evidence = read(text)
    assert [one.rank for one in evidence.recordings] == [0, 2]
    assert [one.rank for one in evidence.unanswered] == [1]


DAMAGED = {
    "json": made.make_dump(["{", '{"a": 1}', "[" * 50_000], "fr_trace_json"),
    "nothing": made.make_dump(["", "\0", "?"], "dump_traceback"),
    "tables": made.TABLES.replace("True", "").replace("{0, 1, 2}", "{0"),
    "cells": made.TABLES.replace("[[", "[[[[[") + "\n--- Collectives ---\n\n--- Collectives ---\na",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=list(DAMAGED))
def test_damage_is_named(text, read):
    for end in range(len(text) - 1, 0, -max(1, len(text) // 50)):
        assert all("\n" not in line for line in read(f"{text[:end]}\n{made.make_store(1)}").unread)
