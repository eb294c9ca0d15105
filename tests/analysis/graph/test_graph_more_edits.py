"""Edits of graphs of made traces: recomputation off, other checkpoints, other buckets, other stages."""

from dataclasses import replace

import numpy as np
import pytest
from support import run_maker
from support.graphs import make_graph, run, step_us
from support.trace_maker import GLOO, MadeTrace, cpu_run, gpu_run, place

from megatron_lite.analysis.graph.edits.accumulation import sum_gradients_once
from megatron_lite.analysis.graph.edits.buckets import (
    LEAST_HALF_BYTES,
    fit_transfers,
    merge_collectives,
    resize_buckets,
    sum_in_backward,
)
from megatron_lite.analysis.graph.edits.change import set_work
from megatron_lite.analysis.graph.edits.fusion import fuse_update
from megatron_lite.analysis.graph.edits.left_out import leave_out_named
from megatron_lite.analysis.graph.edits.recomputation import drop_recomputation, find_recomputed
from megatron_lite.analysis.graph.edits.recording import leave_out_recording, measure_recording
from megatron_lite.analysis.graph.edits.saving import (
    Saving,
    add_saving,
    measure_saving,
    read_saving,
    save_every,
    save_in_thread,
)
from megatron_lite.analysis.graph.edits.stages import move_layers
from megatron_lite.analysis.graph.edits.straggler import level_late_steps
from megatron_lite.analysis.graph.edits.transfers import find_gradient_sums
from megatron_lite.analysis.graph.graph import ON_HOST, ActivityKind
from megatron_lite.analysis.graph.recomputation import ENGINE
from megatron_lite.analysis.graph.replay import check_replay
from megatron_lite.analysis.run.read import read_run

# --- recomputation


def make_recomputing(on_gpu: bool, records_all: bool = False) -> MadeTrace:
    """Per step of 1,000 us a node of backward of 500, of which forward is 200 from the first operator to the last."""
    made = MadeTrace() if on_gpu else MadeTrace(device=None)
    for number in range(4):
        at = number * 1000.0
        made.step(number, at, at + 1000)
        made.annotation("backward", at + 1, at + 790)
        begin = at + 10
        made.op(f"{ENGINE}: MmBackward0", begin, begin + 500, sequence=5, forward_thread=1)
        made.op("MmBackward0", begin + 1, begin + 499, sequence=5, forward_thread=1)
        made.op("aten::mm", begin + 50, begin + 100, sequence=20)
        made.op("aten::relu", begin + 150, begin + 250, sequence=21)
        made.op("aten::mm", begin + 260, begin + 490, **({"sequence": 22} if records_all else {}))
        for name in ("AddBackward0", "SumBackward0"):
            begin = at + (520 if name == "AddBackward0" else 560)
            made.op(f"{ENGINE}: {name}", begin, begin + 30, sequence=4, forward_thread=1)
            made.op("aten::add", begin + 2, begin + 20, **({"sequence": 23} if records_all else {}))
        if on_gpu:
            made.kernel("sgemm", at + 70, at + 370, at + 65)
            made.kernel("relu", at + 371, at + 571, at + 165)
            made.kernel("sgemm_backward", at + 572, at + 972, at + 290)
        else:
            made.annotation("optimizer_step", at + 800, at + 995)
            made.op("aten::_foreach_add_", at + 805, at + 990)
    return made


def test_without_recomputation_backward_is_shorter(tmp_path):
    """With the 49 us of Python in front of the first operator forward takes 249."""
    graph = make_graph(tmp_path, make_recomputing(on_gpu=False))
    assert find_recomputed(graph).any()
    assert step_us(drop_recomputation(graph)) == pytest.approx(1000 - 249, abs=2)


def test_without_recomputation_the_device_does_less(tmp_path):
    graph = make_graph(tmp_path, make_recomputing(on_gpu=True))
    kernels = graph.find_kind(ActivityKind.KERNEL) & (graph.activities.again_ns > 0)
    assert set((graph.activities.work_ns[kernels] / 1e3).tolist()) == {300, 200}
    # the host, which takes 249 less of 1,000
    assert step_us(drop_recomputation(graph)) == pytest.approx(751, abs=2)


def test_nothing_is_computed_again_in_a_backward_that_is_recorded(tmp_path):
    graph = make_graph(tmp_path, make_recomputing(on_gpu=False, records_all=True))
    assert not find_recomputed(graph).any()
    plain = make_graph(tmp_path / "plain", gpu_run(steps=4))
    assert step_us(drop_recomputation(plain)) == step_us(plain)


# --- checkpoints


def make_saving(every: int) -> MadeTrace:
    """Steps of 1,000 us, of which some take 600 more to save."""
    made = MadeTrace(device=None)
    at = 0.0
    for number in range(8):
        length = 1000.0
        made.annotation("forward", at + 1, at + 905)
        made.op("aten::mm", at + 2, at + 900)
        if (number + 1) % every == 0:
            length = 1600.0
            made.annotation("save", at + 950, at + 1550)
            made.op("aten::copy_", at + 960, at + 1540)
        made.step(number, at, at + length)
        at += length
    return made


@pytest.mark.parametrize("every", [1, 2, 4])
def test_checkpoints_at_other_intervals(tmp_path, every):
    made = make_saving(every)
    saving = measure_saving(*place(made, tmp_path / "read"))
    assert saving == Saving(stop_ns=600_000, every=every, computing_ns=600_000)
    waiting = replace(saving, computing_ns=0.0)
    graph = add_saving(make_graph(tmp_path, made), saving)
    assert step_us(graph) == pytest.approx(1000 + 600 / every, rel=0.01)
    assert check_replay(graph).off == pytest.approx(0, abs=0.001)
    assert step_us(save_every(graph, saving, 12)) == pytest.approx(1050, rel=0.01)
    assert step_us(save_in_thread(graph, waiting, 100_000)) == pytest.approx(1000 + 100 / every, rel=0.01)
    # Python's lock
    assert step_us(save_in_thread(graph, saving)) == pytest.approx(1000 + 300 / every, rel=0.01)


def test_a_thread_saves_no_faster_than_it_can_write(tmp_path):
    graph = make_graph(tmp_path, cpu_run(steps=4, world_size=1, gloo_us=10.0))
    slow = Saving(stop_ns=5e6, every=2, computing_ns=0.0)
    assert step_us(save_in_thread(add_saving(graph, slow), slow)) == 2500


def test_steps_tell_how_a_run_saves(tmp_path):
    lines = []
    for number in range(1, 13):
        saves = number % 4 == 0
        phases_ms = {"forward": 10.0, "save": 30.0 if saves else 0.0}
        lines.append(run_maker.step(number, ms=50.0, phases_ms=phases_ms, cpu_ms=60.0 if saves else 50.0))
    run = read_run(run_maker.folder(tmp_path / "saving", lines))
    assert read_saving(run) == Saving(stop_ns=30e6, every=4, computing_ns=10e6)
    assert read_saving(run, "eval") is None
    assert read_saving(read_run(run_maker.folder(tmp_path / "not yet", lines[:3]))) is None


# --- collectives

SIZES = (1000, 3000, 1000, 3000)  # elements of 4 bytes; a sum takes 100 us, and 100 for 1,000 elements


def add_sum(made: MadeTrace, called: float, begin: float, elements: int, has_sizes: bool = True) -> float:
    """A sum over ranks that is handed over in 8 us, and its end."""
    end = begin + 100 + elements / 10
    made.op("c10d::allreduce_", called, called + 8)
    sizes = {"Input Dims": [[elements]], "Input type": ["float"]} if has_sizes else {}
    made.add("user_annotation", "gloo:all_reduce", begin, end, GLOO, **sizes)
    return end


def make_summing(
    rank: int,
    afterwards: bool = False,
    has_sizes: bool = True,
    sizes: tuple[int, ...] = SIZES,
) -> MadeTrace:
    """Backward in four parts of 200 us, each of which gives gradients that are summed, at once or behind backward; an
    update of 100 us waits for all."""
    made = MadeTrace(rank, 2, device=None)
    at = 0.0
    for number in range(4):
        moment = at + 1
        free = at
        for elements in sizes:
            made.op("aten::mm", moment, moment + 200)
            moment += 201
            if not afterwards:
                free = add_sum(made, moment, max(moment + 4, free), elements, has_sizes)
                moment += 9
        made.annotation("backward", at + 1, moment)
        if afterwards:
            begun = moment
            for elements in sizes:
                moment = add_sum(made, moment + 1, moment + 5, elements, has_sizes)
            made.annotation("sum gradients", begun, moment + 1)
            free = moment + 1
        made.annotation("optimizer_step", free + 1, free + 102)
        made.op("aten::_foreach_add_", free + 1, free + 101)
        made.step(number, at, free + 103)
        at = free + 103
    return made


def make_graph_of_sums(tmp_path, **form):
    return make_graph(tmp_path, make_summing(0, **form), make_summing(1, **form))


def test_buckets_of_another_size(tmp_path):
    """Calls come at 202, 412, 622 and 832 us; sums take 200, 400, 200 and 400."""
    graph = make_graph_of_sums(tmp_path)
    assert step_us(graph) == pytest.approx(206 + 1200 + 103 + 4, abs=15)
    model = fit_transfers(graph, find_gradient_sums(graph))
    assert model is not None
    assert (model.latency_ns, model.ns_per_byte) == pytest.approx((100_000, 25), rel=0.01)
    whole = resize_buckets(graph, 1e9)
    # without the three calls that are left out backward is shorter
    assert step_us(whole) == pytest.approx(832 - 24 + 900 + 103, abs=15)
    # pairs of 4,000 elements: the second one waits for the first
    pairs = resize_buckets(graph, 12_000)
    assert step_us(pairs) == pytest.approx(412 - 8 + 500 + 500 + 103, abs=15)
    # a sum of 3,000 as three of 1,000, whose gradients come from one operator
    parts = resize_buckets(graph, 4_000)
    assert step_us(parts) == pytest.approx(412 + 600 + 200 + 600 + 103, abs=15)
    # one size tells no latency: no part of it is summed earlier
    assert step_us(resize_buckets(whole, 8_000)) == step_us(whole)


def test_buckets_of_one_size_are_merged_at_the_least_that_it_saves(tmp_path):
    """Of 200 us for 4,000 bytes, 128 KiB of 132 and more are latency."""
    ranks = [make_summing(rank, sizes=(1000,) * 4) for rank in range(2)]
    graph = make_graph(tmp_path, *ranks)
    assert step_us(graph) == pytest.approx(832 + 200 + 103, abs=15)
    one_ns = 200_000 / (LEAST_HALF_BYTES + 4_000)
    merged_us = one_ns * (LEAST_HALF_BYTES + 16_000) / 1e3
    assert step_us(resize_buckets(graph, 1e9)) == pytest.approx(832 - 24 + merged_us + 103, abs=15)


def test_the_sums_of_the_last_micro_batch_stay_with_their_moves(tmp_path):
    """Two micro-batches of one bucket each, whose gradients are moved in 50 us and back in 30."""
    ranks = []
    for rank in range(2):
        made = MadeTrace(rank, 2, device=None)
        for number in range(4):
            at = number * 1500.0
            made.step(number, at, at + 1500)
            for begun in (at + 1, at + 701):
                made.annotation("backward", begun, begun + 690)
                made.op("aten::mm", begun + 1, begun + 300)
                made.op("torch::distributed::reducer::mul_out", begun + 310, begun + 360)
                end = add_sum(made, begun + 365, begun + 370, 2000)
                made.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", end + 5, end + 35)
            made.annotation("optimizer_step", at + 1395, at + 1499)
            made.op("aten::_foreach_add_", at + 1396, at + 1498)
        ranks.append(made)
    graph = make_graph(tmp_path, *ranks)
    assert graph.activities.bucket_ns.sum() == 2 * 4 * 2 * 80_000
    before_us = step_us(graph)
    after_us = step_us(sum_gradients_once(graph, 2))
    # the wait of 300 us, the moves, and the call
    assert before_us - after_us == pytest.approx(300 + 80 + 8, abs=20)


def test_buckets_whose_sizes_are_not_recorded_stay_as_they_are(tmp_path):
    graph = make_graph_of_sums(tmp_path, has_sizes=False)
    assert fit_transfers(graph, find_gradient_sums(graph)) is None
    assert resize_buckets(graph, 1e9) is graph


def test_sums_beside_backward_instead_of_behind_it(tmp_path):
    graph = make_graph_of_sums(tmp_path, afterwards=True)
    assert step_us(graph) == pytest.approx(804 + 1200 + 103 + 20, abs=15)
    sums = graph.find_phase("sum gradients") & graph.find_kind(ActivityKind.TRANSFER)
    assert step_us(sum_in_backward(graph, sums, 8_000)) == pytest.approx(201 + 4 * 300 + 103, abs=30)


def test_small_collectives_as_one(tmp_path):
    ranks = []
    for rank in range(2):
        made = MadeTrace(rank, 2, device=None)
        for number in range(4):
            at = number * 1700.0
            made.step(number, at, at + 1700)
            made.annotation("forward", at + 1, at + 390)
            made.op("aten::mm", at + 2, at + 380)
            made.annotation("metrics", at + 395, at + 1690)
            for part in range(10):
                add_sum(made, at + 400 + part * 125, at + 405 + part * 125, 1)
            made.op("aten::item", at + 1660, at + 1690)
        ranks.append(made)
    graph = make_graph(tmp_path, *ranks)
    metrics = graph.find_phase("metrics") & graph.find_kind(ActivityKind.TRANSFER)
    assert step_us(merge_collectives(graph, metrics)) == pytest.approx(400 + 100 + 9 * 20 + 40, abs=80)


# --- stages


def test_layers_of_a_pipeline_move_to_the_other_stage(tmp_path):
    """Three layers of 200 us and one, which sends what a rank waits for; then two each."""
    ranks = []
    for rank in range(2):
        made = MadeTrace(rank, 2, device=None)
        for number in range(4):
            at = number * 1000.0
            made.step(number, at, at + 1000)
            made.annotation("forward", at + 1, at + (610 if rank == 0 else 212))
            made.op("aten::mm", at + 2, at + (602 if rank == 0 else 202))
            made.op("c10d::allreduce_", at + (602 if rank == 0 else 202), at + (609 if rank == 0 else 210))
            made.gloo(at + (606 if rank == 0 else 206), at + 700)
            made.annotation("optimizer_step", at + 705, at + 995)
            made.op("aten::_foreach_add_", at + 710, at + 990)
        ranks.append(made)
    graph = make_graph(tmp_path, *ranks)
    assert step_us(graph) == pytest.approx(1000, rel=0.01)
    assert step_us(move_layers(graph, (3, 1), (2, 2))) == pytest.approx(800, rel=0.02)
    assert step_us(move_layers(graph, (3,), (4,))) == step_us(graph)


# --- ranks that are late in turns


def make_turn(rank: int) -> MadeTrace:
    """Each rank computes 600 us in every second step, and 200 in the others; the sum of 100 begins when both have come."""
    made = MadeTrace(rank, 2, device=None)
    for number in range(6):
        at = number * 1000.0
        computed = at + (602 if number % 2 == rank else 202)
        made.step(number, at, at + 1000)
        made.annotation("forward", at + 1, at + 690)
        made.op("aten::mm", at + 2, computed)
        made.op("c10d::allreduce_", computed, computed + 7)
        made.gloo(computed + 4, at + 700)
        made.annotation("optimizer_step", at + 705, at + 995)
        made.op("aten::_foreach_add_", at + 710, at + 990)
    return made


def test_ranks_that_are_late_in_turns_at_the_pace_of_the_others(tmp_path):
    graph = make_graph(tmp_path, make_turn(0), make_turn(1))
    assert step_us(graph) == pytest.approx(1000, rel=0.01)
    assert step_us(level_late_steps(graph, (0, 1))) == pytest.approx(600, rel=0.02)
    # the other one is still late in each second step
    assert 750 < step_us(level_late_steps(graph, (0,))) < 850
    assert level_late_steps(graph, ()) is graph


# --- work that names tell of


def test_without_what_names_tell_of(tmp_path):
    made = MadeTrace(device=None)
    for number in range(4):
        at = number * 1000.0
        made.step(number, at, at + 1000)
        made.annotation("forward", at + 1, at + 990)
        made.op("aten::mm", at + 2, at + 500)
        made.annotation("Python GC", at + 600, at + 800)
    graph = make_graph(tmp_path, made)
    assert step_us(leave_out_named(graph, "garbage_collector")) == pytest.approx(800, rel=0.01)
    assert step_us(leave_out_named(graph, "save")) == step_us(graph)


# --- the profiler's own work


def test_steps_without_the_profilers_work(tmp_path):
    graph = make_graph(tmp_path, cpu_run(steps=4, world_size=1, gloo_us=10.0))
    assert step_us(leave_out_recording(graph, {"forward": 30_000.0})) == pytest.approx(970, abs=2)
    assert step_us(leave_out_recording(graph, {})) == step_us(graph)


def test_collectives_that_are_slow_by_chance_are_not_the_profilers_work(tmp_path):
    """Backward is 200 us longer while recorded, but the profiler takes 10 us for what the host does in forward."""
    graph = make_graph(tmp_path, cpu_run(steps=4, world_size=1, gloo_us=10.0))
    on_host = graph.find_kind(*ON_HOST)
    in_forward = np.count_nonzero(on_host & graph.find_phase("forward"))
    in_backward = np.count_nonzero(on_host & graph.find_phase("backward"))
    most_us = 10 + 10 * in_backward / in_forward
    longer_ns = {"forward": 10_000.0, "backward": 200_000.0}
    assert step_us(graph) - step_us(leave_out_recording(graph, longer_ns)) == pytest.approx(most_us, abs=2)


def test_recorded_steps_beside_the_others(tmp_path):
    """Backward of recorded steps takes 10 ms more; a step that saves and the first ones do not count."""
    lines = []
    for number in range(1, 21):
        is_recorded = 11 <= number < 15
        phases_ms = {"forward": 20.0, "backward": 40.0 if is_recorded else 30.0}
        if number <= 4 or number == 12:
            phases_ms["backward"] = 100.0
        if number == 12:
            phases_ms["save"] = 50.0
        whole_ms = sum(phases_ms.values())
        lines.append(run_maker.step(number, ms=whole_ms, phases_ms=phases_ms, profiled=is_recorded))
    run = read_run(run_maker.folder(tmp_path / "whole", lines))
    assert measure_recording(run) == {"forward": 0.0, "backward": pytest.approx(10e6)}
    short = read_run(run_maker.folder(tmp_path / "short", lines[:12]))
    assert measure_recording(short) == {}


@pytest.mark.parametrize(("profiled_ms", "longer_ms"), [(44.0, 0.0), (52.0, 2.0)])
def test_waits_that_move_to_another_phase_are_not_the_profilers_work(tmp_path, profiled_ms, longer_ms):
    """Backward of recorded steps takes 10 ms more, forward less: the profiler takes no more than the whole step says."""
    lines = []
    for number in range(1, 21):
        is_recorded = 11 <= number < 15
        whole_ms = profiled_ms if is_recorded else 50.0
        backward_ms = 40.0 if is_recorded else 30.0
        phases_ms = {"forward": whole_ms - backward_ms, "backward": backward_ms}
        lines.append(run_maker.step(number, ms=whole_ms, phases_ms=phases_ms, profiled=is_recorded))
    run = read_run(run_maker.folder(tmp_path / "run", lines))
    assert measure_recording(run) == {"forward": 0.0, "backward": pytest.approx(longer_ms * 1e6)}


# --- updates


def test_an_update_in_one_pass(tmp_path):
    """Adam's formula of two tensors: 21 reads and writes of each element become 7."""
    made = MadeTrace(device=None)
    formula = ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div", "add_", "addcdiv_")
    for number in range(4):
        at = number * 1000.0
        made.step(number, at, at + 1000)
        made.annotation("forward", at + 1, at + 195)
        made.op("aten::mul", at + 2, at + 190)
        made.annotation("optimizer_step", at + 199, at + 999)
        for part in range(2):
            for at_call, name in enumerate(formula):
                begin = at + 200 + part * 400 + at_call * 50
                made.op(f"aten::{name}", begin, begin + 50)
    graph = make_graph(tmp_path, made)
    assert step_us(fuse_update(graph, "optimizer_step")) == pytest.approx(200 + 800 * 7 / 21, rel=0.01)
    assert fuse_update(graph, "forward") is graph


# --- sends and receives


def make_stage(rank: int) -> MadeTrace:
    """Two stages: the first one computes 300 us and sends; the second one posts a receive at once, and asks for it when it
    has computed 600, to compute 300 more."""
    group = {"pg_name": "1", "pg_desc": "pipeline", "backend_config": "cpu:gloo", "pg_size": 2, "ranks": [0, 1]}
    info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_count": 1, "pg_config": [group]}
    made = MadeTrace(rank, 2, device=None, distributedInfo=info)
    for number in range(4):
        at = number * 1000.0
        made.step(number, at, at + 1000)
        made.annotation("forward", at + 1, at + 990)
        if rank == 0:
            made.op("aten::mm", at + 2, at + 300)
            made.annotation("gloo:send", at + 302, at + 950)
            made.op("aten::mm", at + 305, at + 950)
        else:
            # in the first step the host waits for it: it takes 2 us
            asked = at + 600 if number else at + 100
            made.op("aten::mm", at + 5, asked)
            made.annotation("gloo:recv", at + 2, max(asked + 2, at + 304))
            made.op("aten::mm", at + 604, at + 900)
        made.annotation("optimizer_step", at + 991, at + 999)
        made.op("aten::_foreach_add_", at + 992, at + 998)
    return made


def test_what_is_received_was_there_before_the_host_asked(tmp_path):
    """The second stage's first product takes no time: it goes on when the first stage has sent, at 302 us."""
    graph = make_graph(tmp_path, make_stage(0), make_stage(1))
    assert step_us(graph) == pytest.approx(1000, rel=0.01)
    activities = graph.activities
    received = np.flatnonzero(graph.find_kind(ActivityKind.TRANSFER) & (graph.rank == 1))
    assert (activities.work_ns[received] < 310_000).all()
    first = (activities.end_ns - activities.start_ns == 595_000) & (graph.rank == 1)
    quick = run(set_work(graph, first, 0))
    second = np.flatnonzero((activities.end_ns - activities.start_ns == 296_000) & (graph.rank == 1))
    begins_us = (quick.start_ns[second] - activities.start_ns[second]) / 1e3
    assert begins_us[1] == pytest.approx(302 - 604, abs=10)
