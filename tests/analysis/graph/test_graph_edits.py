"""Edits of graphs of made traces whose steps are known after them."""

from dataclasses import replace

import numpy as np
import pytest
from support.graphs import make_graph, run, step_us
from support.trace_maker import MAIN, MadeTrace, cpu_run, gpu_run

from megatron_lite.analysis.graph.edits.accumulation import sum_gradients_once
from megatron_lite.analysis.graph.edits.fusion import fuse_operators
from megatron_lite.analysis.graph.edits.host_work import move_to_thread
from megatron_lite.analysis.graph.edits.kernels import limit_kernels
from megatron_lite.analysis.graph.edits.launches import capture_launches
from megatron_lite.analysis.graph.edits.links import change_link
from megatron_lite.analysis.graph.edits.loader import speed_up_loader, use_workers
from megatron_lite.analysis.graph.edits.overlap import overlap_collectives
from megatron_lite.analysis.graph.edits.straggler import level_rank
from megatron_lite.analysis.graph.edits.syncs import drop_syncs, find_resumed
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.graph.sequence import NamedEdit, measure_gains


def make_small_kernels() -> MadeTrace:
    """Per step of 1,000 us, 18 kernels of 10 us in forward, each launched 50 us after the one before."""
    made = MadeTrace()
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 995)
        made.annotation("forward", at + 5, at + 990)
        for call in range(18):
            begin = at + 10 + call * 50
            made.op("aten::add", begin, begin + 30)
            made.kernel("add_kernel", begin + 10, begin + 20, begin + 2)
    return made


def make_blocking_sums(computing_us: float = 300.0) -> MadeTrace:
    """Per step two sums of 200 us on the computing stream behind a kernel each, then an update of 100 us."""
    made = MadeTrace(world_size=2)
    step_us = 2 * (computing_us + 200) + 100 + 20
    for number in range(5):
        at = number * step_us
        made.step(number, at, at + step_us - 1)
        made.annotation("backward", at + 1, at + 40)
        made.op("aten::mm", at + 2, at + 39)
        moment = at + 100
        for part in range(2):
            made.kernel("sgemm", moment, moment + computing_us, at + 5 + part * 10)
            moment += computing_us + 1
            made.collective(moment, moment + 200, at + 10 + part * 10, thread=MAIN, stream=7)
            moment += 201
        made.annotation("optimizer_step", at + 50, at + 68)
        made.kernel("adam", moment, moment + 100, at + 60)
        made.sync(at + 70, moment + 101)
    return made


def make_accumulating_rank(rank: int) -> MadeTrace:
    """Per step of 2,000 us four micro-batches of 200, each with a sum of 200 that the main thread waits for."""
    made = MadeTrace(rank, 2, device=None)
    for number in range(4):
        at = number * 2000.0
        made.step(number, at, at + 2000)
        for part in range(4):
            begin = at + part * 450
            made.annotation("backward", begin, begin + 440)
            made.op("aten::mm", begin + 2, begin + 200)
            made.op("c10d::allreduce_", begin + 202, begin + 208)
            made.gloo(begin + 210, begin + 430)
        made.annotation("optimizer_step", at + 1800, at + 1990)
        made.op("aten::_foreach_add_", at + 1805, at + 1985)
    return made


def test_a_faster_loader(tmp_path):
    """The loader's 500 us of a step of 1,300 in which the device waits for it."""
    graph = make_graph(tmp_path, gpu_run(steps=5, step_us=1300.0, data_us=500.0))
    assert step_us(graph) == pytest.approx(1300, rel=0.01)
    assert step_us(speed_up_loader(graph, 2.0)) == pytest.approx(1050, rel=0.02)


def test_workers_bound_the_step_by_what_a_batch_takes(tmp_path):
    graph = make_graph(tmp_path, cpu_run(steps=4, world_size=1, gloo_us=10.0))
    assert step_us(use_workers(graph, 1)) == pytest.approx(900, rel=0.01)
    slow = make_graph(tmp_path / "slow", gpu_run(steps=5, step_us=2500.0, data_us=1900.0))
    assert step_us(use_workers(slow, 1)) == pytest.approx(1900, rel=0.01)
    assert step_us(use_workers(slow, 4)) < 800


def test_without_synchronizations_the_host_runs_ahead(tmp_path):
    """The device is busy for 710 us of each step; the host of 170 waits for it, and launches only then."""
    graph = make_graph(tmp_path, make_syncing())
    assert step_us(graph) == pytest.approx(1000, rel=0.01)
    assert step_us(drop_syncs(graph, find_resumed(graph))) == pytest.approx(800, rel=0.01)


def make_syncing() -> MadeTrace:
    """Per step of 1,000 us the host launches a kernel of 800 and waits for it; then it takes 195 for itself."""
    made = MadeTrace()
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 995)
        made.op("aten::mm", at + 2, at + 6)
        made.kernel("sgemm", at + 5, at + 805, at + 3)
        made.sync(at + 10, at + 806)
    return made


def test_captured_launches_leave_the_device_s_time(tmp_path):
    graph = make_graph(tmp_path, make_small_kernels())
    captured = step_us(capture_launches(graph, "forward"))
    assert 18 * 10 <= captured < 18 * 10 + 30
    assert step_us(capture_launches(graph, "backward")) == step_us(graph)


def test_operators_of_a_phase_in_one_call(tmp_path):
    """A call of 30 us is the shortest: nothing of 18 calls is work. Python takes 20 us between two."""
    graph = make_graph(tmp_path, make_small_kernels())
    host = graph.find_phase("forward") & graph.find_kind(ActivityKind.OPERATOR, ActivityKind.PYTHON)
    before_ns = graph.activities.work_ns[host].sum()
    fused = fuse_operators(graph, "forward")
    assert fused.activities.work_ns[host].sum() < 0.35 * before_ns
    assert step_us(fused) < 400


def test_a_late_rank_at_the_others_pace(tmp_path):
    ranks = []
    for rank, sleep_us in enumerate((0.0, 400.0)):
        made = MadeTrace(rank, 2, device=None)
        for number in range(4):
            at = number * 1000.0
            made.step(number, at, at + 1000)
            made.annotation("forward", at + 1, at + 205 + sleep_us)
            made.op("aten::mm", at + 2, at + 200)
            begin = at + 220 + sleep_us
            made.annotation("backward", begin - 10, at + 905)
            made.op("aten::mm", begin, begin + 80)
            made.op("c10d::allreduce_", begin + 82, begin + 90)
            made.gloo(begin + 92, at + 900)
            made.annotation("optimizer_step", at + 910, at + 995)
            made.op("aten::_foreach_add_", at + 915, at + 990)
        ranks.append(made)
    graph = make_graph(tmp_path, *ranks)
    assert step_us(graph) == pytest.approx(1000, rel=0.01)
    assert step_us(level_rank(graph, 1)) == pytest.approx(600, rel=0.03)
    assert step_us(level_rank(graph, 0)) == pytest.approx(1000, rel=0.01)


def find_transfers(graph: Graph):
    return graph.find_kind(ActivityKind.TRANSFER)


def test_another_link(tmp_path):
    graph = make_graph(tmp_path, make_blocking_sums())
    before = step_us(graph)
    assert before - step_us(change_link(graph, 2.0)) == pytest.approx(200, rel=0.03)
    assert step_us(change_link(graph, 0.5)) - before == pytest.approx(400, rel=0.03)


def test_overlap_hides_what_there_is_computing_for(tmp_path):
    """The first of two sums of 200 us runs beside 300 us of kernels, the second one has nothing to run beside."""
    graph = make_graph(tmp_path, make_blocking_sums())
    after = overlap_collectives(graph, find_transfers(graph))
    assert step_us(graph) - step_us(after) == pytest.approx(200, rel=0.05)
    small = make_graph(tmp_path / "small", make_blocking_sums(computing_us=50.0))
    saved = step_us(small) - step_us(overlap_collectives(small, find_transfers(small)))
    assert saved == pytest.approx(50, rel=0.1)


def test_kernels_at_their_bound(tmp_path):
    graph = make_graph(tmp_path, make_blocking_sums())
    rows = graph.activities.row[graph.find_kind(ActivityKind.KERNEL)]
    bound = np.full(len(rows), 100_000)
    faster = limit_kernels(graph, 0, rows, bound)
    assert step_us(graph) - step_us(faster) == pytest.approx(400, rel=0.03)
    assert step_us(limit_kernels(graph, 0, rows, bound * 100)) == step_us(graph)


def test_gradients_summed_once(tmp_path):
    graph = make_graph(tmp_path, *(make_accumulating_rank(rank) for rank in range(2)))
    assert step_us(graph) == pytest.approx(2000, rel=0.01)
    assert step_us(sum_gradients_once(graph, 4)) == pytest.approx(2000 - 3 * 220, rel=0.02)
    assert step_us(sum_gradients_once(graph, 1)) == pytest.approx(2000, rel=0.01)


def test_work_of_the_host_in_a_thread(tmp_path):
    graph = make_graph(tmp_path, cpu_run(steps=4, world_size=1, gloo_us=10.0))
    assert step_us(move_to_thread(graph, "optimizer_step")) == pytest.approx(900, rel=0.01)
    many = make_graph(tmp_path / "many", make_small_kernels())
    assert step_us(move_to_thread(many, "forward")) == pytest.approx(step_us(many), rel=0.1)


EDITS = {
    "loader": lambda graph: speed_up_loader(graph, 2.0),
    "workers": lambda graph: use_workers(graph, 2),
    "syncs": lambda graph: drop_syncs(graph, find_resumed(graph)),
    "launches": lambda graph: capture_launches(graph, "forward"),
    "fusion": lambda graph: fuse_operators(graph, "optimizer_step"),
    "rank": lambda graph: level_rank(graph, 0),
    "link": lambda graph: change_link(graph, 2.0),
    "overlap": lambda graph: overlap_collectives(graph, find_transfers(graph)),
    "once": lambda graph: sum_gradients_once(graph, 2),
    "thread": lambda graph: move_to_thread(graph, "optimizer_step"),
}
RUNS = {
    "gpu": lambda: [gpu_run(steps=4, item=True)],
    "cpu": lambda: [cpu_run(steps=3, rank=rank) for rank in range(2)],
    "nccl": lambda: [gpu_run(steps=4, all_reduce_us=300.0, rank=rank, world_size=2) for rank in range(2)],
}


@pytest.mark.parametrize("name", RUNS)
def test_edits_make_no_step_longer(name, tmp_path):
    graph = make_graph(tmp_path, *RUNS[name]())
    lengths = {what: step_us(edit(graph)) for what, edit in EDITS.items()}
    assert max(lengths.values()) <= step_us(graph) * 1.001, lengths


@pytest.mark.parametrize("name", RUNS)
def test_edits_follow_each_other_without_negative_times(name, tmp_path):
    for edits in (list(EDITS.values()), list(EDITS.values())[::-1]):
        graph = make_graph(tmp_path, *RUNS[name]())
        for edit in edits:
            graph = edit(graph)
            found = run(graph)
            assert (graph.activities.work_ns >= 0).all()
            assert (graph.activities.delay_ns >= 0).all()
            assert (found.end_ns >= found.start_ns).all()
            assert found.step_ns >= 0


@pytest.mark.parametrize("name", RUNS)
def test_gains_in_order_add_up(name, tmp_path):
    graph = make_graph(tmp_path, *RUNS[name]())
    gains = measure_gains(graph, [NamedEdit(what, edit) for what, edit in EDITS.items()]).order
    before_ms = step_us(graph) / 1e3
    assert gains
    assert sum(gain.ms for gain in gains) == pytest.approx(before_ms - gains[-1].step_ms, abs=1e-9)
    assert gains[0].ms == gains[0].alone_ms == max(gain.alone_ms for gain in gains)
    changed = graph
    for gain in gains:
        changed = EDITS[gain.name](changed)
        assert step_us(changed) / 1e3 == pytest.approx(gain.step_ms, abs=1e-9)


def test_an_edit_that_another_one_makes_needless_is_left_out(tmp_path):
    """Two ways to the same gain: the second saves nothing on top of the first."""
    graph = make_graph(tmp_path, make_syncing())
    edits = [NamedEdit(what, EDITS["syncs"]) for what in ("one", "other")]
    gains = measure_gains(graph, edits).order
    assert [gain.name for gain in gains] == ["one"]
    assert gains[0].ms == pytest.approx(0.2, rel=0.02)


def test_of_two_ways_to_a_gain_the_one_that_says_why_comes_first(tmp_path):
    graph = make_graph(tmp_path, make_syncing())
    edits = [NamedEdit("who", EDITS["syncs"], yields=True), NamedEdit("why", EDITS["syncs"])]
    assert [gain.name for gain in measure_gains(graph, edits).order] == ["why"]
    assert [gain.name for gain in measure_gains(graph, edits[:1]).order] == ["who"]


def test_without_a_steady_step_no_edit_gains_anything(tmp_path):
    graph = replace(make_graph(tmp_path, make_syncing()), boundaries=())
    assert measure_gains(graph, [NamedEdit("syncs", EDITS["syncs"])]).order == ()
