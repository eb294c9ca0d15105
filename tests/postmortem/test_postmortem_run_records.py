"""ranks.json, steps.jsonl and run.json become evidence through their typed records; damage is a line in `unread`."""

import json

import pytest
from support import run_maker

from megatron_lite.errors import UserError
from megatron_lite.formats.failure_record import FailureRecord, RankAtFailure, encode_failure, encode_last_words
from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.evidence import EventKind, GroupProgress, StackFrame
from megatron_lite.postmortem.run_records import read_ranks_file, read_run_file, read_steps_file

WAITS = RankAtFailure(
    place="pp 0",
    host="node1",
    pid=10,
    wall_time=1000.0,
    step=3,
    started_at=100,
    phase="backward",
    phase_s=40.5,
    begun=13,
    finished=13,
    groups={"4": 7},
    waits_for="the forward of micro-batch 3 from rank 2",
    stack=("wait (train.py:88)", "odd frame"),
)
FAILED = RankAtFailure(host="node2", pid=11, wall_time=990.0, step=3, left="ZeroDivisionError: by zero")
LEFT = RankAtFailure(left="RanksError: rank 2 ended", blameless=True)
WELL = RankAtFailure(left="no error", blameless=True)


@pytest.fixture
def ranks_file(tmp_path):
    path = tmp_path / "ranks.json"
    ranks = {"0": WAITS, "2": FAILED, "3": LEFT, "4": WELL}
    path.write_text(encode_failure(FailureRecord(verdict="", ranks=ranks)))
    return path


def test_each_rank_has_its_progress(ranks_file):
    found = read_ranks_file(ranks_file)
    first = found.progress[0]
    assert [progress.rank for progress in found.progress] == [0, 2, 3, 4]
    assert (first.host, first.pid, first.seen_at, first.place) == ("node1", 10, 1000.0, "pp 0")
    # iterations go on where the start before has ended
    assert (first.step, first.phase, first.phase_s) == (103, "backward", 40.5)


def test_numbers_of_collectives_are_progress_of_groups(ranks_file):
    recording = read_ranks_file(ranks_file).recordings[0]
    assert recording.progress == {"0": GroupProgress(13, None, 13), "4": GroupProgress(7)}


def test_a_status_has_the_stack_of_the_main_thread(ranks_file):
    (stack,) = read_ranks_file(ranks_file).stacks
    assert (stack.rank, stack.host, stack.pid, stack.taken_at) == (0, "node1", 10, 1000.0)
    assert stack.threads[0].frames == (StackFrame("wait", "train.py", 88), StackFrame("odd frame", ""))


def test_ends_tell_errors_from_consequences(ranks_file):
    failed, left, well = read_ranks_file(ranks_file).ends
    assert (failed.rank, failed.error, failed.message) == (2, "ZeroDivisionError", "by zero")
    assert (failed.is_consequence, left.is_consequence, well.is_consequence) == (None, True, None)
    assert (left.error, well.error, well.exit_code) == ("RanksError", "", 0)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00" * 10])
@pytest.mark.parametrize("read", [read_ranks_file, read_run_file])
def test_what_is_no_record_is_refused_in_one_line(tmp_path, read, text):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(UserError):
        read(path)


def test_damaged_parts_of_ranks_are_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps({"ranks": {"0": {"step": "three", "pid": 5}, "first": {}, "1": {"step": 4}}}))
    found = read_ranks_file(path)
    assert len(found.unread) == 2
    assert [(progress.rank, progress.pid, progress.step) for progress in found.progress] == [(0, 5, 0), (1, None, 4)]


def test_files_of_a_run_are_recognized_by_their_content(tmp_path, ranks_file):
    run_maker.folder(tmp_path, [run_maker.step(1)])
    for number, name in enumerate(("run.json", "steps.jsonl", "ranks.json")):
        (tmp_path / name).rename(tmp_path / str(number))
    found = collect_evidence([tmp_path])
    assert found.unread == () and sorted(found.read.values()) == [1, 1, 1]
    assert len(found.ends) == 4 and len(found.progress) == 4


def write_run(path, **fields):
    run_maker.folder(path, None, run_maker.RECORD | fields)
    return path / "run.json"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"status": "finished"}, ("", "finished", 0, None)),
        ({"status": "interrupted"}, ("", "interrupted", None, None)),
        ({"status": "failed: ValueError: no such file"}, ("ValueError", "no such file", None, None)),
        ({"status": "failed: RanksError: rank 1 died"}, ("RanksError", "rank 1 died", None, True)),
    ],
)
def test_a_run_has_the_end_of_its_writer(tmp_path, fields, end):
    world = {"size": 4, "rank": 3, "local_rank": 1}
    ended = "1970-01-01T01:00:00+0000"
    found = read_run_file(write_run(tmp_path, **fields, ended=ended, plan=run_maker.PLAN | {"world": world}))
    (process,) = found.ends
    assert (process.error, process.message, process.exit_code, process.is_consequence) == end
    assert (process.rank, process.local_rank, process.host, process.pid) == (3, 1, "h", 1)
    assert process.ended_at == 3600.0
    assert found.world_size == 4


def test_a_run_of_another_machine_may_still_run(tmp_path):
    assert read_run_file(write_run(tmp_path, status="running")).ends == ()


def test_ranks_go_as_far_as_their_steps_are_written(tmp_path):
    lines = [run_maker.step(number, ms=100.0) for number in range(1, 6)]
    lines.insert(2, run_maker.ranks(1, 2, [90.0, 110.0]))
    run_maker.folder(tmp_path, lines, run_maker.RECORD | {"plan": {"world": {"size": 2, "rank": 1}}})
    found = read_steps_file(tmp_path / "steps.jsonl")
    steps = [(progress.rank, progress.step, progress.usual_step_s) for progress in found.progress]
    assert steps == [(0, 2, 0.09), (1, 5, 0.1)]


def test_a_new_start_replaces_the_one_before(tmp_path):
    run_maker.folder(tmp_path, [run_maker.step(1, iteration=9), run_maker.step(1, iteration=5)])
    lines = [*map(json.dumps, [run_maker.step(1, iteration=9, loss=None), run_maker.step(1, iteration=5)])]
    (tmp_path / "steps.jsonl").write_text("\n".join(lines) + "\n")
    assert read_steps_file(tmp_path / "steps.jsonl").events == ()


def test_steps_that_are_not_finite_are_events(tmp_path):
    lines = [
        run_maker.step(1),
        run_maker.step(2, loss=None),
        run_maker.step(3, grad_norm=None, local=True),
        # a dynamic loss scale skips such steps on purpose
        run_maker.step(4, grad_norm=None, skipped=True),
    ]
    run_maker.folder(tmp_path, lines, run_maker.RECORD | {"plan": {"world": {"size": 2, "rank": 1}}})
    events = read_steps_file(tmp_path / "steps.jsonl").events
    assert [(event.kind, event.code, event.rank) for event in events] == [
        (EventKind.NOT_FINITE, 2, None),
        (EventKind.NOT_FINITE, 3, 1),
    ]
    assert [event.source.rpartition(":")[2] for event in events] == ["2", "3"]


def test_errors_of_gpus_are_events(tmp_path):
    def hardware(**figures):
        return run_maker.ranks(1, 2, [90.0, 110.0], hardware={"samples": [3], **figures})

    alone = {"samples": 2, "xids": 2, "last_xid": 79}
    lines = [
        run_maker.step(1),
        hardware(xids=[0], ecc_uncorrected=[0, None]),
        hardware(xids=[0, 1], last_xid=[None, 48], ecc_uncorrected=[0, 3]),
        {"kind": "hardware", "iterations": [3, 3], "rank": 1, "figures": alone},
        {"kind": "hardware", "iterations": [3, 3], "rank": 0, "figures": {"samples": 2, "xids": 0}},
    ]
    run_maker.folder(tmp_path, lines)
    found = read_steps_file(tmp_path / "steps.jsonl")
    assert found.unread == ()
    assert [(event.kind, event.rank, event.code, event.count) for event in found.events] == [
        (EventKind.XID, 1, 48, 1),
        (EventKind.DEVICE_ERROR, 1, None, 1),
        (EventKind.XID, 1, 79, 2),
    ]
    assert [event.source.rpartition(":")[2] for event in found.events] == ["3", "3", "4"]


def test_lines_that_are_no_steps_are_counted(tmp_path):
    lines = [run_maker.step(1), "no JSON\n", '{"kind": "step"}\n', run_maker.step(2), '{"kind": "st']
    run_maker.folder(tmp_path, lines)
    found = read_steps_file(tmp_path / "steps.jsonl")
    assert len(found.unread) == 1 and "steps.jsonl:2:" in found.unread[0]


def test_last_words_of_a_rank_tell_where_it_was_and_how_it_ended(tmp_path):
    said = RankAtFailure(
        host="node1",
        pid=7,
        step=12,
        phase="forward",
        phase_s=3.0,
        step_s=4.0,
        still_s=2.5,
        usual_step_s=0.5,
        rank=2,
        local_rank=0,
        world_size=4,
        error="torch.OutOfMemoryError",
        message="full",
        error_stack=("step (train.py:88)",),
        exit_code=1,
        ended_at=1000.0,
        process_state="dead",
    )
    (tmp_path / "renamed").write_text(encode_last_words(said))
    found = collect_evidence([tmp_path])
    assert found.unread == () and found.world_size == 4
    (progress,) = found.progress
    assert (progress.rank, progress.step, progress.step_s, progress.still_s) == (2, 12, 4.0, 2.5)
    assert (progress.usual_step_s, progress.process_state) == (0.5, "dead")
    (end,) = found.ends
    assert (end.rank, end.local_rank, end.exit_code, end.ended_at) == (2, 0, 1, 1000.0)
    assert (end.error, end.message) == ("torch.OutOfMemoryError", "full")
    assert end.frames == (StackFrame("step", "train.py", 88),)
    # numbers of collectives stand in its flight recording
    assert found.recordings == ()


@pytest.mark.parametrize(("name", "rank"), [("last_words-3.json", 3), ("last_words-pid-77.json", None)])
def test_the_name_of_last_words_may_tell_the_rank(tmp_path, name, rank):
    (tmp_path / name).write_text(encode_last_words(RankAtFailure(signal=15, ended_at=5.0)))
    found = collect_evidence([tmp_path])
    assert [(end.rank, end.message) for end in found.ends] == [(rank, "signal 15")]
    assert [progress.rank for progress in found.progress] == ([] if rank is None else [rank])
