"""Several traces read at once are the same as read one after the other."""

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from trace_maker import gpu_run

from megatron_lite.analysis.trace import read as trace_read
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.errors import UserError


@pytest.fixture
def at_any_size(monkeypatch):
    monkeypatch.setattr(trace_read, "MIN_BYTES_SAID", 0)


def test_in_processes_as_in_this_one(tmp_path, at_any_size):
    paths = [gpu_run(rank=rank, world_size=3).write(tmp_path) for rank in range(3)]
    for path, read in zip(paths, trace_read.readers(paths), strict=True):
        [there], [here] = read(), read_traces(path)
        assert (there.rank, there.names, there.shapes, there.collectives) == (
            here.rank,
            here.names,
            here.shapes,
            here.collectives,
        )
        assert all(np.array_equal(column, vars(here.events)[name]) for name, column in vars(there.events).items())


def test_what_cannot_be_read_raises_in_its_turn(tmp_path, at_any_size):
    paths = [gpu_run().write(tmp_path), tmp_path / "no.json"]
    good, bad = trace_read.readers(paths)
    assert len(good()) == 1
    with pytest.raises(UserError, match="no.json: No such file"):
        bad()


def test_a_killed_process_is_made_up_for(tmp_path):
    path, future = gpu_run().write(tmp_path), Future()
    future.set_exception(BrokenProcessPool("killed"))
    assert len(trace_read._take_result(future, path)) == 1


def test_small_files_are_read_here(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_read, "_read_in_processes", None)
    paths = [gpu_run(rank=rank).write(tmp_path) for rank in range(2)]
    assert [read()[0].rank for read in trace_read.readers(paths)] == [0, 1]
