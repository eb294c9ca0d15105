"""Whatever is done to a job's files, collecting them ends, and what cannot be read is one line."""

import json
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import debug_dumps as made
from support.flight_recordings import RecordedJob
from support.fuzzing import EXAMPLES, bounded, damaged, documents, json_texts

from megatron_lite.postmortem.collect import collect_evidence

pytestmark = pytest.mark.slow


def make_job(backend: str = "nccl") -> RecordedJob:
    job = RecordedJob(4, {"1": ("TP", [0, 1])}, backend=backend)
    job.call()
    job.send(0, 1, "1")
    job.exchange([(0, 1), (1, 0)], "1")
    job.coalesce(["broadcast", "reduce"])
    job.call(without=[2])
    return job


DUMP = make_job().dump(0)
DUMP_JSON = make_job("gloo").dump_json(0)
TRACEBACK = made.make_traceback("/code/train.py", 80, "step")
TEXTS = [
    made.make_dump([TRACEBACK, TRACEBACK], "dump_traceback", {1: (503, made.REFUSED)}),
    made.make_dump([made.make_counters(TCPStore__wait=1)] * 2, "wait_counter_values"),
    made.make_page([json.dumps(DUMP_JSON)] * 2, "fr_trace_json"),
    made.make_store(3),
    made.TABLES,
]


def check_file(content: bytes) -> None:
    """A sound file beside it is read, or left out by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_job().write(folder, [1])
        (folder / "x").write_bytes(content)
        with bounded():
            evidence = collect_evidence([folder])
        is_named = any(line.startswith(f"{folder}/nccl_trace_rank_") for line in evidence.unread)
        assert is_named or any(one.source.endswith("_1") for one in evidence.recordings)
        assert not any("\n" in line for line in evidence.unread)


@EXAMPLES
@given(values=documents(DUMP))
def test_pickles_of_other_values(values):
    check_file(pickle.dumps(values, protocol=2))


@EXAMPLES
@given(content=damaged(pickle.dumps(DUMP, protocol=2)))
def test_damaged_pickles(content):
    check_file(content)


@EXAMPLES
@given(content=json_texts(DUMP_JSON))
def test_json_of_other_values(content):
    check_file(content)


@EXAMPLES
@given(text=st.sampled_from(TEXTS), data=st.data())
def test_damaged_debug_dumps(text, data):
    check_file(data.draw(damaged(text.encode())))
