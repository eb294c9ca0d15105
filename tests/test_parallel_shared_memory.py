"""Gradients' means in memory that the ranks of a machine share."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from launch import checkpoint, flags, losses, on_ranks, same, train_all

from megatron_lite.parallel import data_parallel, shared_memory
from megatron_lite.parallel.shared_memory import SharedMean, map_rows
from megatron_lite.train import step

RANKS, LENGTHS = 3, (1, 2, 7, 64, 100, 1000)
TRAINED = {"fp32": "", "bf16": "--bf16", "small buckets": "--bf16 --ddp-bucket-size 500"}


def draw(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + length))


def average_all(world):
    """For on_ranks: prints each length's mean, twice, since memory is used again."""
    shared_memory.MAX_ELEMENTS, shared_memory.PIECE = 64, 10
    memory, found = SharedMean(map_rows(1000, None), None), []
    for length in LENGTHS * 2:
        flat = draw(world.rank, length)
        memory.average(flat)
        found.append(flat.tolist())
    print(json.dumps(found))


def test_all_ranks_hold_the_same_mean(tmp_path):
    outputs = on_ranks("test_parallel_shared_memory:average_all", tmp_path, ranks=RANKS)
    first, *others = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert others == [first] * (RANKS - 1)
    for length, found in zip(LENGTHS * 2, first, strict=True):
        exact = sum(draw(rank, length).double() for rank in range(RANKS)) / RANKS
        assert torch.allclose(torch.tensor(found).double(), exact, rtol=1e-6, atol=1e-7)


def find_room(world, folder: str):
    """For on_ranks: no folder; no memory; both there."""
    shared_memory.FOLDER = Path(folder, "none")
    assert map_rows(1000, None) is None
    shared_memory.FOLDER, reserve = Path(folder), os.posix_fallocate

    def refuse(*_):
        raise OSError(28, "No space left on device")

    os.posix_fallocate = refuse
    assert map_rows(1000, None) is None
    os.posix_fallocate = reserve
    assert map_rows(1000, None).shape == (world.size, 1000)


def test_without_room_nobody_takes_it_and_no_file_stays(tmp_path):
    (tmp_path / "shm").mkdir()
    on_ranks("test_parallel_shared_memory:find_room", tmp_path, str(tmp_path / "shm"))
    assert not list((tmp_path / "shm").iterdir())


def note_order(world, scenario: str):
    """For on_ranks: prints in which order a rank has its gradients, and averages them."""
    shared_memory.MIN_ELEMENTS, order = 1, []
    average, call = SharedMean.average, data_parallel.call_when_computed
    SharedMean.average = lambda *arguments: order.append("average") or average(*arguments)
    step.call_when_computed = lambda loss, action: call(loss, lambda: order.append("computed") or action())
    train_all(world, scenario)
    print(json.dumps(order))


def test_waiting_for_other_ranks_begins_when_a_rank_has_all_its_gradients(tmp_path):
    words = flags("--train-iters 3 --log-interval 1 --global-batch-size 8 --bf16 --ddp-bucket-size 20000")
    (tmp_path / "one.json").write_text(json.dumps({"run": words}))
    for output in on_ranks("test_parallel_shared_memory:note_order", tmp_path, str(tmp_path / "one.json")):
        order = "".join(one[0] for one in json.loads(output.splitlines()[-1]))
        assert re.fullmatch("(ca+){3}", order) and "aa" in order


def train_both_ways(world, through_sockets: str, shared: str):
    """For on_ranks: each scenario through gloo, and through shared memory."""
    train_all(world, through_sockets)
    shared_memory.MIN_ELEMENTS, shared_memory.MAX_ELEMENTS = 1, 3000
    train_all(world, shared)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("ways"), []
    for way in ("sockets", "shared"):
        words = {f"{name} {way}": f"--train-iters 5 --global-batch-size 8 {flag}" for name, flag in TRAINED.items()}
        scenarios = {name: flags(word, "--save", Path(name)) for name, word in words.items()}
        paths.append(folder / f"{way}.json")
        paths[-1].write_text(json.dumps(scenarios))
    [out, _] = on_ranks("test_parallel_shared_memory:train_both_ways", folder / "2", *map(str, paths))
    return folder / "2", out


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_learn_bit_for_bit_as_through_sockets(trained, name):
    sockets, shared = (trained[0] / f"{name} {way}" for way in ("sockets", "shared"))
    assert losses(sockets) == losses(shared)
    first, second = (checkpoint(folder, 5) for folder in (sockets, shared))
    del first["record"], second["record"]
    assert first and same(first, second)


def test_which_way_it_is_stands_in_the_output(trained):
    assert trained[1].count("gradients: averaged in memory that the ranks share") == len(TRAINED)
