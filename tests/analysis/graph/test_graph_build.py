"""Graphs of made traces: each kind of edge, what contradicts measured times, and unchanged replays."""

from dataclasses import replace

import numpy as np
import pytest
from support.graphs import lengths_us, make_graph, measured_us, run, step_us
from support.trace_maker import MAIN, MadeTrace, cpu_run, gpu_run

from megatron_lite.analysis.graph.graph import ActivityKind, EdgeKind, Graph
from megatron_lite.analysis.graph.replay import check_replay, find_critical_path, list_path_parts


def change_work(graph: Graph, chosen, factor: float) -> Graph:
    """The graph with the work of the chosen activities times a factor."""
    work_ns = graph.activities.work_ns.copy()
    work_ns[chosen] = (work_ns[chosen] * factor).astype(np.int64)
    return replace(graph, activities=replace(graph.activities, work_ns=work_ns))


@pytest.mark.parametrize(
    "made",
    [
        [gpu_run(steps=5)],
        [gpu_run(steps=5, item=True)],
        [gpu_run(steps=5, step_us=800.0, gpu_lag_us=700.0)],
        [gpu_run(steps=5, all_reduce_us=300.0)],
        [gpu_run(steps=1)],
        [cpu_run(steps=4, world_size=1)],
        [cpu_run(steps=4, rank=rank) for rank in range(2)],
        [gpu_run(steps=5, all_reduce_us=300.0, rank=rank, world_size=2) for rank in range(2)],
    ],
    ids=["launches", "item", "queue", "all-reduce", "one step", "cpu", "gloo", "nccl"],
)
def test_an_unchanged_replay_is_the_measured_step(made, tmp_path):
    trust = check_replay(make_graph(tmp_path, *made))
    assert trust.replayed_ms == pytest.approx(trust.measured_ms, rel=0.001)
    assert trust.why_not == ""
    assert trust.contradicted == 0


def test_device_work_waits_for_its_launch(tmp_path):
    """The host takes longer, and the device, which had nothing queued, with it."""
    graph = make_graph(tmp_path, gpu_run(steps=5))
    assert graph.seen[EdgeKind.LAUNCH] == 4 * 5
    on_host = graph.find_kind(ActivityKind.OPERATOR, ActivityKind.PYTHON, ActivityKind.LOADER)
    assert step_us(change_work(graph, on_host, 2.0)) == pytest.approx(2000, rel=0.01)


def test_a_stream_runs_in_order(tmp_path):
    """Kernels of 700 us per step that take twice as long bound a step of 1,000."""
    graph = make_graph(tmp_path, gpu_run(steps=5))
    slow = change_work(graph, graph.find_kind(ActivityKind.KERNEL), 2.0)
    assert step_us(slow) == pytest.approx(1400 + 10, rel=0.01)
    kinds = {part.kind for part in list_path_parts(find_critical_path(run(slow)))}
    assert kinds <= {"kernel", "copy"}


def test_a_queue_settles(tmp_path):
    """The host is far ahead of a busy device. With kernels of half the length it bounds the steps, not the queue."""
    graph = make_graph(tmp_path, gpu_run(steps=6, step_us=700.0, gpu_lag_us=3000.0))
    assert measured_us(graph) == pytest.approx(710, rel=0.02)
    fast = change_work(graph, graph.find_kind(ActivityKind.KERNEL), 0.5)
    assert step_us(fast) == pytest.approx(700, rel=0.02)


def test_the_host_waits_for_the_device(tmp_path):
    graph = make_graph(tmp_path, gpu_run(steps=5, item=True))
    assert graph.seen[EdgeKind.SYNC] == 5
    slow = change_work(graph, graph.find_kind(ActivityKind.KERNEL), 3.0)
    # after each wait the host comes back with 95 us less than a step to go, and launches from there
    assert step_us(slow) > 2100 + 100


def test_another_thread_works_for_the_main_one(tmp_path):
    """Autograd's thread takes ten times as long; the main thread, which waits for it, goes on later."""
    graph = make_graph(tmp_path, gpu_run(steps=5))
    assert graph.seen[EdgeKind.HANDOVER] == 2 * 5
    lanes = [at for at, lane in enumerate(graph.lanes) if lane.name.startswith("thread")]
    of_autograd = np.isin(graph.activities.lane, lanes[1:]) & graph.find_kind(ActivityKind.OPERATOR)
    slow = change_work(graph, of_autograd, 20.0)
    assert step_us(slow) == pytest.approx(1000 + 19 * 30, rel=0.02)


def make_two_streams() -> MadeTrace:
    """Per step of 1,000 us: a kernel of 200, a copy of 500 on another stream behind it, and a kernel behind that."""
    made = MadeTrace()
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 990)
        made.op("aten::mm", at + 5, at + 100)
        made.kernel("sgemm_a", at + 50, at + 250, at + 10)
        made.runtime("cudaEventRecord", at + 20, at + 22)
        made.runtime("cudaStreamWaitEvent", at + 23, at + 25)
        made.copy("Memcpy DtoH (Device -> Pinned)", at + 252, at + 752, at + 30, 4096, stream=24)
        made.runtime("cudaEventRecord", at + 40, at + 42)
        made.runtime("cudaStreamWaitEvent", at + 43, at + 45)
        made.kernel("sgemm_b", at + 754, at + 954, at + 50)
    return made


def test_a_stream_waits_for_an_event_of_another(tmp_path):
    graph = make_graph(tmp_path, make_two_streams())
    assert graph.seen[EdgeKind.EVENT] == 10
    slow = change_work(graph, graph.find_kind(ActivityKind.COPY), 2.0)
    assert step_us(slow) == pytest.approx(1404, rel=0.01)


def test_ranks_meet_in_a_collective(tmp_path):
    """Rank 1 computes 300 us longer; without that both ranks are so much faster."""
    ranks = []
    for rank, backward_us in enumerate((300.0, 600.0)):
        made = MadeTrace(rank, 2)
        for number in range(5):
            at = number * 1500.0
            made.step(number, at, at + 1490)
            made.op("aten::mm", at + 5, at + 30)
            made.kernel("sgemm_a", at + 50, at + 50 + backward_us, at + 10)
            made.collective(at + 50 + backward_us, at + 1000, at + 40, thread=MAIN, stream=7)
            made.kernel("adam", at + 1002, at + 1400, at + 60)
            made.sync(at + 70, at + 1402)
        ranks.append(made)
    graph = make_graph(tmp_path, *ranks)
    assert lengths_us(graph, ActivityKind.TRANSFER) == [350.0] * 10
    of_late = (graph.rank == 1) & graph.find_kind(ActivityKind.KERNEL)
    long = of_late & (graph.activities.work_ns == 600_000)
    assert step_us(change_work(graph, long, 0.5)) == pytest.approx(1200, rel=0.01)


def make_stage(rank: int) -> MadeTrace:
    """Two stages of a pipeline: the first computes 600 us of each step of 1,000 and sends, the second receives for as long,
    and computes 200."""
    made = MadeTrace(rank, 2)
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 990)
        made.op("aten::mm", at + 5, at + 30)
        if rank == 0:
            made.kernel("sgemm", at + 50, at + 650, at + 10)
            sent = made.collective(at + 651, at + 700, at + 20, name="send", thread=MAIN, stream=7)
            sent["args"]["Dst Rank"] = 1
            made.kernel("rest", at + 702, at + 900, at + 40)
        else:
            received = made.collective(at + 60, at + 700, at + 20, name="recv", thread=MAIN, stream=7)
            received["args"]["Src Rank"] = 0
            made.kernel("sgemm", at + 702, at + 902, at + 40)
        made.sync(at + 60, at + 903)
    return made


def test_a_stage_waits_for_what_another_one_sends(tmp_path):
    graph = make_graph(tmp_path, make_stage(0), make_stage(1))
    assert sorted(lengths_us(graph, ActivityKind.TRANSFER)) == [49.0] * 10
    trust = check_replay(graph)
    assert trust.why_not == ""
    of_first = (graph.rank == 0) & (graph.activities.work_ns == 600_000)
    assert step_us(change_work(graph, of_first, 0.5)) == pytest.approx(700, rel=0.02)


def make_gloo_rank() -> MadeTrace:
    """Per step of 1,000 us: 300 of an operator, a sum of 500 on gloo's thread, for which the main thread waits."""
    made = MadeTrace(device=None, world_size=2)
    for number in range(4):
        at = number * 1000.0
        made.step(number, at, at + 1000)
        made.annotation("backward", at + 1, at + 810)
        made.op("aten::mm", at + 2, at + 290)
        made.op("c10d::allreduce_", at + 291, at + 299)
        made.gloo(at + 300, at + 800)
        made.annotation("optimizer_step", at + 815, at + 995)
        made.op("aten::_foreach_add_", at + 820, at + 990)
    return made


def test_a_backend_takes_collectives_over(tmp_path):
    graph = make_graph(tmp_path, make_gloo_rank())
    assert graph.seen[EdgeKind.CALL] == 4
    assert graph.seen[EdgeKind.WAIT] == 4
    assert graph.limits
    assert step_us(change_work(graph, graph.find_kind(ActivityKind.TRANSFER), 0.2)) == pytest.approx(600, abs=5)
    of_mm = graph.find_kind(ActivityKind.OPERATOR) & (graph.activities.work_ns == 288_000)
    assert step_us(change_work(graph, of_mm, 2.0)) == pytest.approx(1288, abs=5)


def make_late_recorded_sum() -> MadeTrace:
    """As above, but gloo's thread comes to record the end only when the main thread, which waited, is long at work."""
    made = MadeTrace(device=None, world_size=2)
    for number in range(4):
        at = number * 1000.0
        made.step(number, at, at + 1000)
        made.annotation("backward", at + 1, at + 810)
        made.op("aten::mm", at + 2, at + 290)
        made.op("c10d::allreduce_", at + 291, at + 299)
        made.gloo(at + 300, at + 900)
        made.annotation("optimizer_step", at + 800, at + 995)
        made.op("aten::_foreach_add_", at + 800, at + 990)
    return made


def test_an_end_that_is_recorded_late_is_where_the_host_goes_on(tmp_path):
    graph = make_graph(tmp_path, make_late_recorded_sum())
    assert graph.seen[EdgeKind.WAIT] == 4
    assert lengths_us(graph, ActivityKind.TRANSFER) == [500.0] * 4
    assert step_us(change_work(graph, graph.find_kind(ActivityKind.TRANSFER), 0.2)) == pytest.approx(600, abs=5)


def make_loader_rank() -> MadeTrace:
    """Per step of 1,000 us the main thread waits 600 for a batch of workers, and computes 390."""
    made = MadeTrace(device=None)
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 1000)
        made.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 600)
        made.annotation("forward", at + 605, at + 995)
        made.op("aten::mm", at + 610, at + 990)
    return made


def test_a_batch_is_ready_when_a_worker_has_made_it(tmp_path):
    graph = make_graph(tmp_path, make_loader_rank())
    assert graph.seen[EdgeKind.BATCH] == 4
    faster = change_work(graph, graph.find_kind(ActivityKind.OPERATOR), 0.1)
    assert step_us(faster) == pytest.approx(1000, rel=0.1)
    assert step_us(change_work(graph, graph.find_kind(ActivityKind.WORKER), 0.1)) < 600


def test_contradicting_edges_are_counted_and_left_out(tmp_path):
    """Kernels that start before their launch: the clocks of host and device differ."""
    made = MadeTrace()
    for number in range(4):
        at = number * 1000.0
        made.step(number, at, at + 990)
        made.op("aten::mm", at + 5, at + 400)
        made.kernel("sgemm_a", at + 50, at + 250, at + 300)
    trust = check_replay(make_graph(tmp_path, made))
    assert trust.contradicted == 1.0
    assert trust.why_not


def test_waits_without_a_reason_are_not_trusted(tmp_path):
    """Kernels start 400 us after their launch on an idle stream: nothing in the trace says why."""
    made = MadeTrace()
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 990)
        made.op("aten::mm", at + 5, at + 100)
        made.kernel("sgemm_a", at + 20, at + 250, at + 10)
        made.kernel("sgemm_b", at + 700, at + 950, at + 50)
        made.sync(at + 60, at + 955)
    trust = check_replay(make_graph(tmp_path, made))
    assert trust.unexplained_ms == pytest.approx(0.45, abs=0.02)
    assert trust.why_not


def test_a_trace_without_steps_claims_nothing(tmp_path):
    made = MadeTrace()
    made.annotation("something", 0, 10)
    trust = check_replay(make_graph(tmp_path, made))
    assert trust.measured_ms == 0
    assert trust.why_not


def test_the_critical_path_adds_up(tmp_path):
    """A synchronizing step: the path goes through host, device and back, and is as long as the step."""
    graph = make_graph(tmp_path, gpu_run(steps=5, item=True))
    parts = list_path_parts(find_critical_path(run(graph)))
    assert sum(part.ms for part in parts) == pytest.approx(1.0, rel=0.02)
    assert {"kernel", "python"} <= {part.kind for part in parts}
    assert all(part.ms >= 0 for part in parts)
