"""Records that are read from files, and damage to them."""

import msgspec
import numpy as np
import pytest
from support.proof_maker import Layout, Truth, make_run

from megatron_lite.analysis.equality.compare import compare
from megatron_lite.analysis.equality.proved_run import read_run
from megatron_lite.analysis.equality.wholes import write_weights

TRUTH = Truth()


@pytest.fixture
def folder(tmp_path):
    """The files that three ranks wrote."""
    for number, rank in make_run(TRUTH, Layout(data=3)).ranks.items():
        (tmp_path / f"rank{number}.json").write_bytes(msgspec.json.encode(rank.record))
        np.savez(tmp_path / f"rank{number}.npz", **rank.tensors)
    return tmp_path


def test_files_are_read_as_they_were_written(folder):
    run = read_run(folder)
    assert (sorted(run.ranks), run.world, run.missing) == ([0, 1, 2], 3, ())
    report = compare(run, make_run(TRUTH))
    assert (report.differences, report.coverage) == ((), "whole")


def remove_record(folder):
    (folder / "rank1.json").unlink()


def cut_record(folder):
    path = folder / "rank1.json"
    path.write_bytes(path.read_bytes()[:100])


def remove_tensors(folder):
    (folder / "rank1.npz").unlink()


def cut_tensors(folder):
    path = folder / "rank1.npz"
    path.write_bytes(path.read_bytes()[:1000])


def change_tensors(folder):
    path = folder / "rank1.npz"
    content = bytearray(path.read_bytes())
    content[300:310] = b"0123456789"
    path.write_bytes(content)


def lose_a_tensor(folder):
    np.savez(folder / "rank1.npz", other=np.zeros(3))


def fail(folder):
    record = msgspec.json.decode((folder / "rank1.json").read_bytes())
    record["failure"] = "no optimizer was seen"
    (folder / "rank1.json").write_bytes(msgspec.json.encode(record))


@pytest.mark.parametrize(
    "damage", [remove_record, cut_record, remove_tensors, cut_tensors, change_tensors, lose_a_tensor, fail]
)
def test_a_rank_that_cannot_be_read_is_named(folder, damage):
    damage(folder)
    run = read_run(folder)
    assert sorted(run.ranks) == [0, 2] and run.world == 3
    assert [line.partition(":")[0] for line in run.missing] == ["rank 1"]
    report = compare(run, make_run(TRUTH))
    assert report.coverage != "whole" and report.not_compared[0].startswith("rank 1:")


def test_an_empty_folder_is_not_compared(tmp_path):
    report = compare(read_run(tmp_path), make_run(TRUTH))
    assert (report.coverage, report.differences) == ("nothing", ())


def test_weights_keep_their_precision(tmp_path):
    weights = {"exact": np.array([1.0, 0.5]), "fine": np.array([1.0, 1 + 1e-12])}
    write_weights(weights, tmp_path / "weights.npz")
    read = np.load(tmp_path / "weights.npz")
    assert read["exact"].dtype == np.float32 and read["fine"].dtype == np.float64
    assert all(np.array_equal(read[name], array) for name, array in weights.items())
