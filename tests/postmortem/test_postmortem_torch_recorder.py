"""The form of made recordings is torch's, and what is read of them agrees with torch's own recorder and analysis."""

import argparse
import logging
import pickle
import subprocess
import sys

import pytest
from support.flight_recordings import RecordedJob
from support.launch import free_port

from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.evidence import JobEvidence

pytestmark = pytest.mark.slow
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1], group_desc="pair")
data = torch.ones(4, 2)
dist.all_reduce(data)
(dist.recv, dist.send)[rank == 0](data, 1 - rank)
dist.all_gather_into_tensor(torch.ones(8, 2), data, group=group)
dist.broadcast(data, 0)
waits = None if rank else dist.all_reduce(data, async_op=True)
folder = sys.argv[1]
with open(f"{folder}/fr_{rank}", "wb") as file:
    file.write(_dump_fr_trace(True, True, False))
with open(f"{folder}/json_{rank}", "wb") as file:
    file.write(_dump_fr_trace_json())
os.write(1, b"done")
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The dumps of two ranks on gloo, of which rank 1 does not enter the last collective."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "script.py").write_text(SCRIPT)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment |= {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, folder / "script.py", folder],
            env={**environment, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        assert [process.stdout.read(4) for process in ranks] == [b"done"] * 2
    finally:
        for process in ranks:
            process.stdin.close()
            process.wait()
    return folder


def make_same() -> RecordedJob:
    job = RecordedJob(2, {"1": ("pair", [0, 1])}, backend="gloo")
    job.call(shape=[4, 2])
    job.send(0, 1, shape=[4, 2])
    job.call("all_gather", "1", shape=[4, 2], output=[2, 4, 2])
    job.call("broadcast", shape=[4, 2])
    job.call(shape=[4, 2], without=[1])
    return job


def test_the_recorder_of_torch_is_read(recorded):
    for kind in ("fr", "json"):
        evidence = collect_evidence([recorded / f"{kind}_{rank}" for rank in range(2)])
        assert not evidence.unread
        assert [[call.number for call in one.calls] for one in evidence.recordings] == [[1, 1, 2, 3], [1, 1, 2]]
        assert [call.has_ended for call in evidence.recordings[0].calls][-1] is False
        assert [one.progress["0"].enqueued for one in evidence.recordings] == [3, 2]


def test_made_recordings_have_the_form_of_torch(recorded):
    job = make_same()
    for rank in job.ranks:
        real = pickle.loads((recorded / f"fr_{rank}").read_bytes())
        made = job.dump(rank)
        assert made.keys() == real.keys()
        for one, other in zip(made["entries"], real["entries"], strict=True):
            assert one.keys() == other.keys()
            for name in ("record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "is_p2p",
                         "profiling_name", "state", "input_sizes", "output_sizes", "input_dtypes"):  # fmt: skip
                assert one[name] == other[name], (rank, one["record_id"], name)
        assert made["pg_config"] == real["pg_config"]
        enqueued = {group: told["last_enqueued_collective"] for group, told in made["pg_status"].items()}
        assert enqueued == {group: told["last_enqueued_collective"] for group, told in real["pg_status"].items()}


# --- torch's own analysis


def find_missing(evidence: JobEvidence) -> set[tuple[str, int, int]]:
    """Group, number and rank of each first collective of a group in which a rank is missing."""
    entered: dict[tuple[str, int], set[int]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for recording in evidence.recordings:
        for call in recording.calls:
            entered.setdefault((call.group, call.number), set()).add(recording.rank)
            members[call.group] = recording.groups[call.group].ranks
    first: dict[str, int] = {}
    for group, number in sorted(entered):
        if set(members[group]) - entered[group, number]:
            first.setdefault(group, number)
    return {
        (group, number, rank)
        for group, number in first.items()
        for rank in set(members[group]) - entered[group, number]
    }


def analyze_with_torch(job: RecordedJob) -> set[tuple[str, int, int]]:
    """The same by torch.distributed.flight_recorder, which counts messages and collectives of one number as one."""
    from torch.distributed.flight_recorder.components import builder

    logging.disable(logging.CRITICAL)
    try:
        options = argparse.Namespace(
            verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=10
        )
        details = {f"rank{rank}": {"rank": rank, **job.dump(rank)} for rank in job.ranks}
        database = builder.build_db(details, options, job.version)
    finally:
        logging.disable(logging.NOTSET)
    return {
        (collective.group_id, collective.collective_seq_id, rank)
        for collective in database.collectives
        for rank in collective.missing_ranks or ()
    }


@pytest.mark.parametrize("version", ["2.4", "2.10"])
@pytest.mark.parametrize(
    "missing", [{"0": [2]}, {"1": [1]}, {"0": [0, 3]}, {"1": [0], "2": [3]}, {"0": [3], "2": [2]}], ids=str
)
def test_torch_finds_the_same_ranks_missing(missing, version, tmp_path):
    job = RecordedJob(4, {"1": ("left", [0, 1]), "2": ("right", [2, 3])}, version=version)
    for group in ("0", "1", "2", "0"):
        job.call("all_reduce", group)
        job.call("broadcast", group)
    for group, ranks in missing.items():
        job.call("reduce", group, without=ranks)
    job.write(tmp_path)
    evidence = collect_evidence([tmp_path])
    assert not evidence.unread
    found = find_missing(evidence)
    assert found == analyze_with_torch(job)
    assert {(group, rank) for group, _, rank in found} == {
        (group, rank) for group, ranks in missing.items() for rank in ranks
    }
