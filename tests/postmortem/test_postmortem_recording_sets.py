"""Recordings of several attempts, several dumps of one, and files that an attempt did not overwrite."""

from pathlib import Path

import pytest
from support.flight_recordings import RecordedJob

from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.evidence import FlightRecording, GroupProgress, JobEvidence
from megatron_lite.postmortem.flight_recordings import build_recordings
from megatron_lite.postmortem.recording_sets import choose_recordings


def make_job(calls: int, *, after_s: float = 0, **options) -> RecordedJob:
    job = RecordedJob(4, **options)
    job.wait(after_s)
    for _ in range(calls):
        job.call()
    return job


def count_calls(evidence: JobEvidence) -> dict[int | None, int]:
    """Calls of each rank's newest recording."""
    return {recording.rank: len(recording.calls) for recording in evidence.recordings}


def test_the_newest_attempt_counts(tmp_path):
    make_job(3).write(tmp_path / "attempt_0")
    make_job(5, after_s=1000).write(tmp_path / "attempt_1", [0, 1, 2])
    evidence = collect_evidence([tmp_path])
    # attempt 1 is read though its rank 3 left nothing
    assert count_calls(evidence) == {0: 5, 1: 5, 2: 5}
    assert len(evidence.unread) == 1
    assert f"{tmp_path}/attempt_0/nccl_trace_rank_*" in evidence.unread[0]


def test_an_attempt_with_fewer_ranks_is_whole(tmp_path):
    make_job(3).write(tmp_path / "attempt_0")
    job = RecordedJob(2)
    job.wait(1000)
    job.call()
    job.write(tmp_path / "attempt_1")
    evidence = collect_evidence([tmp_path])
    assert evidence.world_size == 2
    assert count_calls(evidence) == {0: 1, 1: 1}


def test_of_dumps_of_one_attempt_the_newest_complete_one_counts(tmp_path):
    for number, (calls, ranks) in enumerate([(3, None), (5, None), (6, [0])]):
        make_job(calls).write(tmp_path, ranks, prefix=f"dump{number}_rank_")
    evidence = collect_evidence([tmp_path])
    assert count_calls(evidence) == dict.fromkeys(range(4), 5)
    # the older one shows whether a rank went on
    assert [len(one.calls) for one in evidence.recordings if one.rank == 0] == [3, 5]
    assert [line.partition(":")[0] for line in evidence.unread] == [f"{tmp_path}/dump2_rank_*"]


def test_many_dumps_are_named_in_a_few_lines(tmp_path):
    for calls in range(1, 21):
        make_job(calls).write(tmp_path, prefix=f"dump{calls:02}_rank_")
    evidence = collect_evidence([tmp_path])
    assert count_calls(evidence) == dict.fromkeys(range(4), 20)
    assert len(evidence.unread) == 4
    assert f"{tmp_path}/dump01_rank_* and 13 other sets" in evidence.unread[-1]
    assert len(evidence.recordings) == 3 * 4


def test_a_rank_that_called_nothing_is_there(tmp_path):
    job = RecordedJob(4)
    job.call(without=[2])
    job.write(tmp_path)
    evidence = collect_evidence([tmp_path])
    assert count_calls(evidence) == {0: 1, 1: 1, 2: 0, 3: 1}
    assert {recording.backend for recording in evidence.recordings} == {"nccl"}


def test_a_restarted_job_counts_without_folders_of_attempts(tmp_path):
    make_job(3).write(tmp_path, prefix="a_")
    make_job(2, after_s=1000).write(tmp_path, [1, 2], prefix="b_")
    assert count_calls(collect_evidence([tmp_path])) == {1: 2, 2: 2}


def test_folders_of_hosts_are_one_set(tmp_path):
    for host, ranks in (("host0", [0, 1]), ("host1", [2, 3])):
        make_job(3).write(tmp_path / host, ranks)
        make_job(4).write(tmp_path / host, ranks, prefix="again_")
    evidence = collect_evidence([tmp_path])
    assert count_calls(evidence) == dict.fromkeys(range(4), 4)
    assert not evidence.unread


def test_folders_of_ranks_are_one_set(tmp_path):
    job = make_job(3, backend="gloo")
    for rank in job.ranks:
        (path,) = job.write(tmp_path / f"rank_{rank}", [rank], prefix="fr")
        path.rename(path.with_name("fr"))
    evidence = collect_evidence([tmp_path])
    assert count_calls(evidence) == dict.fromkeys(range(4), 3)
    assert not evidence.unread


def test_a_file_of_an_attempt_before_is_no_slow_rank(tmp_path):
    make_job(3).write(tmp_path)
    make_job(5, after_s=1000).write(tmp_path, [0, 1, 2])
    evidence = collect_evidence([tmp_path])
    assert count_calls(evidence) == {0: 5, 1: 5, 2: 5}
    assert [line.partition(":")[0] for line in evidence.unread] == [f"{tmp_path}/nccl_trace_rank_3"]


def test_a_rank_that_called_late_makes_nobody_old(tmp_path):
    job = RecordedJob(4, {"1": ("first", [0, 1, 2])})
    job.call(group="1")
    job.wait(500)
    job.call(without=[2])
    job.write(tmp_path)
    assert count_calls(collect_evidence([tmp_path])) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_what_a_log_tells_of_a_rank_counts_where_it_left_no_dump():
    def summarize(rank: int, number: int) -> FlightRecording:
        return FlightRecording(
            f"train.log:{rank}", rank, "nccl", (), progress={"0": GroupProgress(number)}, has_forgotten=True
        )

    job = make_job(3)
    dumps = [build_recordings(job.dump(rank), f"fr_{rank}", rank).recordings[0] for rank in (0, 1, 3)]
    chosen, notes = choose_recordings([*dumps, *(summarize(rank, 3) for rank in job.ranks)], 4)
    assert [(one.rank, len(one.calls)) for one in chosen] == [(0, 3), (1, 3), (2, 0), (3, 3)]
    assert not notes


def test_a_slow_rank_stays(tmp_path):
    job = make_job(3)
    job.wait(500)
    for _ in range(3):
        job.call(without=[3])
    job.write(tmp_path)
    assert count_calls(collect_evidence([tmp_path])) == {0: 6, 1: 6, 2: 6, 3: 3}


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_the_last_rank_follows_from_the_others(tmp_path, form):
    *_, last = make_job(3).write(tmp_path, form=form)
    last.rename(tmp_path / "renamed")
    evidence = collect_evidence([tmp_path])
    assert sorted(count_calls(evidence)) == [0, 1, 2, 3]
    assert not evidence.unread


def test_a_rank_that_nothing_tells_stays_unknown(tmp_path):
    paths = make_job(3).write(tmp_path)
    for number, path in enumerate(paths[:2]):
        path.rename(tmp_path / "ab"[number])
    evidence = collect_evidence([tmp_path])
    assert sorted(recording.rank is None for recording in evidence.recordings) == [False, False, True, True]
    assert len(evidence.unread) == 2
    assert {Path(line.partition(":")[0]).name for line in evidence.unread} == {"a", "b"}
