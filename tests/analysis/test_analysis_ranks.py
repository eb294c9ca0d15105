"""Ranks beside each other: made traces with known answers, the eight public DLRM ranks, and runs without traces."""

from dataclasses import replace

import pytest
from support.paths import REPO, TRACES
from support.trace_maker import GLOO, MadeTrace, cpu_run, gpu_run
from support.wording import wording

from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.from_run import compare_ranks_of_run
from megatron_lite.analysis.ranks.ranks import compare_ranks
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.read import read_traces

DLRM = TRACES / "v100_dlrm_8ranks"
TRANSFER_US, ELEMENTS = 40, 1_000_000
BUS_GB_S = 4 * ELEMENTS * 2 * 3 / 4 / (TRANSFER_US * 1000)  # of 4 ranks
KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL128(ncclDevKernelArgsStorage<4096ul>)"


def late_run(rank, world, late_us, latest_us, steps=3, first=5, sized=True, group="0", **header) -> MadeTrace:
    """Forward on the GPU from 20 to 220 + late, then an all_reduce until 220 + latest + the transfer, after each other."""
    made = MadeTrace(rank, world, **header)
    for index in range(steps):
        late, latest = (us[index] if isinstance(us, list) else us for us in (late_us, latest_us))
        at, begin, end = 1000.0 * index, 1000.0 * index + 220 + late, 1000.0 * index + 220 + latest + TRANSFER_US
        made.step(first + index, at, at + 990)
        made.annotation("forward", at + 1, at + 15)
        made.kernel("ampere_sgemm_128x64_tn", at + 20, begin, at + 5)
        made.annotation("backward", at + 15, at + 60)
        made.collective(begin, end, at + 30, elements=ELEMENTS, kernel=KERNEL, group=group, thread=100)
        made.annotation("optimizer_step", at + 60, at + 80)
        made.kernel("multi_tensor_apply_kernel<Adam>", at + 800, at + 950, at + 65)
        if not sized:
            made.events[-4]["args"].pop("Seq", None)
    if not sized:
        for event in made.events:
            event["args"].pop("Seq", None)
    return made


def placed(traces):
    placings = [(trace, attribute_events(trace)) for trace in traces]
    return [RankFacts(trace, rank_time(trace, placing), RankKernels(None), placing) for trace, placing in placings]


def seen(folder, *made):
    return placed(read_traces(one.write(folder / str(at)))[0] for at, one in enumerate(made))


def four(folder, late=(0, 10, 20, 200), **more):
    return seen(folder, *(late_run(rank, 4, us, max(late), **more) for rank, us in enumerate(late)))


def beside_run(rank: int, computes_us: float, starts_us: list[float], last_us: list[float], ahead_us=0.0) -> MadeTrace:
    """Steps whose all_reduces run beside a kernel that begins at 20 us. Each ends 40 us after the last rank's start."""
    made = MadeTrace(rank, 2)
    for index in range(5):
        at = 1000.0 * (index + 1) - ahead_us
        made.step(5 + index, at, at + 990)
        made.kernel("ampere_sgemm_128x64_tn", at + 20, at + computes_us, at + 5)
        for start, last in zip(starts_us, last_us):
            end = 1000.0 * (index + 1) + last + TRANSFER_US
            made.collective(at + start, end, at + 10 + start / 100, elements=ELEMENTS, kernel=KERNEL, thread=100)
    return made


def test_a_lead_that_nobody_loses_costs_nothing(tmp_path):
    """Rank 1 is 35 us ahead in each of five all_reduces beside its computing: it waits 175 us per step, and no longer."""
    starts = [200.0 + 100 * number for number in range(5)]
    behind = beside_run(0, 900, starts, starts)
    ahead = beside_run(1, 900, starts, starts, ahead_us=35)
    found = compare_ranks(seen(tmp_path, behind, ahead))
    assert found.rows[1].wait_ms == pytest.approx(0.175) and found.straggler is None
    assert [row.caused_wait_ms for row in found.rows] == pytest.approx([0, 0])


def test_lateness_that_grows_beside_computing_costs_what_is_waited_at_its_end(tmp_path):
    """Rank 0 comes 20, 40, ... 100 us later; rank 1 has nothing left to compute 90 us before the last one ends."""
    starts = [200.0 + 100 * number for number in range(5)]
    later = [start + 20 * number for number, start in enumerate(starts, 1)]
    found = compare_ranks(seen(tmp_path, beside_run(0, 750, later, later), beside_run(1, 650, starts, later)))
    assert found.rows[1].wait_ms == pytest.approx(0.3)
    assert (found.straggler.rank, found.straggler.cause) == (0, "compute")
    assert found.straggler.caused_wait_ms == pytest.approx(0.09)


def test_waits_transfer_and_bandwidth_are_told_apart(tmp_path):
    found = compare_ranks(four(tmp_path))
    [row] = found.collectives
    assert (row.name, row.algorithm, row.phase, row.dtype) == ("all_reduce", "ring, LL128", "backward", "Float")
    assert (row.group_size, row.per_step, row.num_bytes) == (4, 1, 4 * ELEMENTS)
    assert row.transfer_ms == pytest.approx(0.040) and row.wait_ms == pytest.approx((200 + 190 + 180) / 4 / 1000)
    assert row.kernel_ms == pytest.approx(row.transfer_ms + row.wait_ms) == pytest.approx(row.exposed_ms)
    assert row.bus_gb_s == pytest.approx(BUS_GB_S)
    assert [one.wait_ms for one in found.rows] == pytest.approx([0.2, 0.19, 0.18, 0])
    assert [one.caused_wait_ms for one in found.rows] == pytest.approx([0, 0, 0, 0.19])
    assert [one.last_in for one in found.rows] == [0, 0, 0, 1]
    assert (found.clocks_aligned, found.critical_rank, found.missing, found.notes) == (True, 3, (), ())
    for row in found.rows:
        assert row.exposed_communication_ms == pytest.approx(row.exposed_wait_ms + 0.040)
    late = found.straggler
    assert (late.rank, late.share_last, late.cause, late.phase) == (3, 1, "compute", "forward")
    assert late.caused_wait_ms == pytest.approx(0.19) == pytest.approx(late.cause_ms)
    assert compare_ranks(four(tmp_path)[::-1]) == found, "in any order"


def test_a_slow_loader_is_the_cause(tmp_path):
    slow = [cpu_run(rank=rank, gloo_us=300) for rank in range(2)]
    for event in slow[1].events:  # 180 us later from "data" on, and gloo ends with the other's
        at = (event["ts"] - 1e6) % 1000
        if event["name"] == "data":
            event["dur"] += 180
        elif event["name"] == "gloo:all_reduce":
            event["ts"], event["dur"] = event["ts"] + 180, event["dur"] - 180
        elif not event["name"].startswith("ProfilerStep"):
            event["ts"], event["dur"] = event["ts"] + 180, event["dur"] - (180 if event["name"] == "grad_sync" else 0)
            event["ts"] -= 180 if at >= 800 else 0
    found = compare_ranks(seen(tmp_path, *slow))
    assert (found.straggler.rank, found.straggler.cause, found.straggler.phase) == (1, "data_wait", "data")
    assert found.straggler.caused_wait_ms == pytest.approx(0.18) and found.rows[0].wait_ms == pytest.approx(0.18)


@pytest.mark.parametrize(
    "late",
    [
        [0, 0, 0, 0],
        [0, 5, 0, 5],
        [[0, 200, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[200, 0, 0], [0, 200, 0], [0, 0, 0], [0, 0, 200]],
    ],
)
def test_ranks_that_take_turns_or_are_alike_have_no_straggler(tmp_path, late):
    latest = [200] * 3 if isinstance(late[0], list) else max(late)
    made = [late_run(rank, 4, us, latest) for rank, us in enumerate(late)]
    assert compare_ranks(seen(tmp_path, *made)).straggler is None


def test_no_cause_where_none_explains_the_lag(tmp_path):
    made = [late_run(rank, 4, 200, 200) if rank == 3 else late_run(rank, 4, 0, 200) for rank in range(4)]
    for event in made[3].events:  # the late rank computes no longer: it does nothing at all until then
        if event["name"].startswith("ampere"):
            event["dur"] -= 200
    assert compare_ranks(seen(tmp_path, *made)).straggler.cause == ""


def test_clocks_of_hosts_are_set_right_by_the_ends(tmp_path):
    bases = (0, 0, 7_000_000, 7_000_000)
    made = []
    for rank, us in enumerate((0, 10, 20, 200)):
        header = {"host_name": f"node{rank // 2}", "baseTimeNanoseconds": 1_700_000_000_000_000_000 + bases[rank]}
        made.append(late_run(rank, 4, us, 200, **header))
    found, plain = compare_ranks(seen(tmp_path / "a", *made)), compare_ranks(four(tmp_path / "b"))
    assert found.clocks_aligned and "clocks differ" in found.notes[0] and "node" in found.notes[0]
    assert [row.wait_ms for row in found.rows] == pytest.approx([row.wait_ms for row in plain.rows])
    assert found.straggler == plain.straggler and found.rows[0].host == "node0"


def test_ranks_of_one_host_share_its_clock(tmp_path):
    made = [late_run(rank, 4, us, 200, host_name="one") for rank, us in enumerate((0, 10, 20, 200))]
    found = compare_ranks(seen(tmp_path, *made))
    assert found.clocks_aligned and found.notes == () and found.straggler.rank == 3


def test_traces_without_a_common_clock_are_laid_over_each_other(tmp_path):
    found = compare_ranks([replace(one, trace=replace(one.trace, base_ns=None)) for one in four(tmp_path)])
    assert found.straggler.rank == 3 and wording("analysis/no-common-clock") in found.notes[0]
    assert [row.wait_ms for row in found.rows] == pytest.approx([0.2, 0.19, 0.18, 0])


@pytest.mark.parametrize("sized", [True, False])
def test_windows_that_begin_apart_are_matched(tmp_path, sized):
    """Rank 1 lacks the first step; with sequence numbers, and without them by order, step and time."""
    whole, short = late_run(0, 2, 0, 100, steps=4, sized=sized), late_run(1, 2, 100, 100, steps=3, first=6, sized=sized)
    for event in short.events:
        event["ts"] += 1000
        if "Seq" in event["args"]:
            event["args"]["Seq"] += 1
    found = compare_ranks(seen(tmp_path, whole, short))
    assert found.rows[0].wait_ms == pytest.approx(0.1) and found.rows[1].wait_ms == 0 and found.straggler.rank == 1


def test_missing_ranks_are_named(tmp_path):
    found = compare_ranks(seen(tmp_path, late_run(1, 4, 0, 50), late_run(2, 4, 50, 50)))
    assert (found.world_size, found.present, found.missing) == (4, (1, 2), (0, 3)) and found.straggler.rank == 2


def test_one_rank_has_collectives_without_waits(tmp_path):
    found = compare_ranks(seen(tmp_path, gpu_run(all_reduce_us=300, world_size=2)))
    [row] = found.collectives
    assert (row.transfer_ms, row.wait_ms, row.bus_gb_s) == (None, None, None)
    assert row.kernel_ms == pytest.approx(0.3) and row.exposed_ms == pytest.approx(0.1)
    assert (found.critical_rank, found.missing, found.straggler, found.clocks_aligned) == (0, (1,), None, None)
    assert found.rows[0].wait_ms is None and found.rows[0].exposed_wait_ms is None


def test_other_collectives_and_names_used_twice_are_not_compared(tmp_path):
    other = late_run(1, 2, 50, 50, sized=False)
    for event in other.events:
        event["args"].pop("Collective name", None)
        event["name"] = event["name"].replace("AllReduce", "AllGather").replace("all_reduce", "all_gather")
    found = compare_ranks(seen(tmp_path / "a", late_run(0, 2, 0, 50), other))
    assert "different collectives" in found.notes[0] and found.rows[0].wait_ms is None and found.straggler is None
    pairs = seen(tmp_path / "b", *(late_run(rank, 4, 0, 0, group="tp") for rank in range(4)))
    for trace in (one.trace for one in pairs):
        object.__setattr__(trace, "collectives", tuple(replace(one, group_size=2) for one in trace.collectives))
    assert wording("analysis/more-ranks-use-name") in compare_ranks(pairs).notes[0]


def test_gloo_spans_belong_where_they_were_called(tmp_path):
    made = [cpu_run(rank=rank) for rank in range(2)]
    for one in made:
        for index in range(4):
            one.op("c10d::allreduce_", 1000 * index + 480, 1000 * index + 490)
        for event in one.events:
            if event["tid"] == GLOO:
                event["ts"] += 450  # taken up in the next phase only
    [row] = compare_ranks(seen(tmp_path, *made)).collectives
    assert (row.name, row.phase, row.per_step, row.num_bytes, row.bus_gb_s) == ("all_reduce", "backward", 1, None, None)


MEGATRON = (("1", "TENSOR_MODEL_PARALLEL_GROUP", [[0, 1], [2, 3]]), ("2", "DATA_PARALLEL_GROUP", [[0, 2], [1, 3]]))


def describe_groups(rank: int, backend: str, groups=MEGATRON) -> dict:
    """A header's "distributedInfo" of 4 ranks: the default group, and of each of these the one that has the rank."""
    rows = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": []}]
    for name, description, members in groups:
        [own] = [ranks for ranks in members if rank in ranks]
        rows.append({"pg_name": name, "pg_desc": description, "pg_size": 2, "ranks": own})
    return {"backend": backend, "rank": rank, "world_size": 4, "pg_config": rows}


def test_communication_is_told_apart_by_group(tmp_path):
    """Two tensor parallel pairs use one name for two groups; each ismatched on its own ranks. What does not overlap adds up."""
    made = []
    for rank in range(4):
        one = late_run(rank, 4, 0, 0, group="2", distributedInfo=describe_groups(rank, "nccl"))
        for step in range(3):
            begin = 1000 * step + 300 + 10 * (rank % 2)
            one.collective(begin, 1000 * step + 340, 1000 * step + 50, group="1", group_size=2, elements=100)
        made.append(one)
    found = compare_ranks(seen(tmp_path, *made))
    data, tensor = found.groups
    assert (data.group, data.per_step, data.num_bytes) == ("data", 1, 4 * ELEMENTS)
    assert (data.busy_ms, data.exposed_ms) == pytest.approx((0.040, 0.040))
    assert (tensor.group, tensor.num_bytes, tensor.most_exposed_rank) == ("tensor", 400, 0)
    assert (tensor.exposed_ms, tensor.most_exposed_ms) == pytest.approx((0.035, 0.040))
    assert [(row.group, row.group_size) for row in found.collectives] == [("data", 4), ("tensor", 2)]
    assert not [note for note in found.notes if "ranks 0, 1" in note]
    waits = {row.rank: row.wait_ms for row in found.rows}
    assert waits[0] == waits[2] == pytest.approx(0.010) and waits[1] == waits[3] == 0


def test_gloo_groups_are_told_by_what_calls_them(tmp_path):
    groups = (("1", "mesh_tensor", [[0, 1], [2, 3]]), ("2", "pipeline", [[0, 2], [1, 3]]))
    made = []
    for rank in range(4):
        one = MadeTrace(rank, 4, device=None, distributedInfo=describe_groups(rank, "gloo", groups))
        for index in range(3):
            at = 1000.0 * index
            one.step(10 + index, at, at + 995)
            one.annotation("forward", at + 100, at + 600)
            one.op("aten::mm", at + 100, at + 200)
            one.op("_ColumnLinear", at + 200, at + 320)
            one.op("c10d::allreduce_", at + 205, at + 210)
            one.gloo(at + 210, at + 310, thread=GLOO)
            one.op("_c10d_functional::wait_tensor", at + 212, at + 312)
            one.annotation("gloo:send", at + 250, at + 700)  # under way beside what follows
            one.op("aten::mm", at + 400, at + 500)
            one.op("c10d::allreduce_", at + 800, at + 805)
            one.gloo(at + 810, at + 830, thread=GLOO)
        made.append(one)
    found = compare_ranks(seen(tmp_path, *made))
    assert [(row.group, row.per_step) for row in found.groups] == [("pipeline", 1), ("tensor", 1), ("", 1)]
    assert [row.busy_ms for row in found.groups] == pytest.approx([0.45, 0.1, 0.02])
    assert [row.exposed_ms for row in found.groups] == pytest.approx([0.45 - 0.1 - 0.06 - 0.01, 0.1, 0.02], abs=0.012)
    phases = {(row.name, row.group): row.phase for row in found.collectives}
    assert phases["all_reduce", "tensor"] == phases["send", "pipeline"] == "forward"


def test_waits_in_reductions_that_are_under_way_at_once_count_once(tmp_path):
    """Two buckets on gloo: rank 0 hands both over early and waits 300 us for rank 1, which computes longer."""
    made = []
    for rank in range(2):
        one = MadeTrace(rank, 2, device=None)
        for index in range(4):
            at, late = 1000.0 * index, 300 * rank
            one.step(5 + index, at, at + 990)
            one.annotation("forward", at + 1, at + 100 + late)
            one.op("aten::mm", at + 2, at + 99 + late)
            one.annotation("backward", at + 100 + late, at + 900)
            for bucket in range(2):
                begin = at + 110 + 10 * bucket + late
                one.op("c10d::allreduce_", begin - 2, begin)
                one.gloo(begin, at + 500 + 20 * bucket, thread=GLOO + bucket)
        made.append(one)
    found = compare_ranks(seen(tmp_path, *made))
    assert [row.wait_ms for row in found.rows] == pytest.approx([0.31, 0]), "410 to 110, and 10 more in the second"
    late = found.straggler
    assert late.caused_wait_ms == pytest.approx(0.31) and (late.rank, late.cause, late.phase) == (
        1,
        "compute",
        "forward",
    )


def exchange(rank: int, how: str, wait_us=100) -> MadeTrace:
    """Stages 0, 1, 2 hand on to the next one and back, twice a step: receivers come `wait_us` before the senders."""
    made = MadeTrace(rank, 3)
    for step, micro_batch in ((step, micro_batch) for step in range(3) for micro_batch in range(2)):
        at = 1000.0 * step + 400 * micro_batch
        if not micro_batch:
            made.step(5 + step, at, at + 990)
        made.kernel("ampere_sgemm_128x64_tn", at + 5, at + 15, at + 1)
        for middle, (source, target) in ((at + 150, (0, 1)), (at + 300, (1, 2))):
            if rank not in (source, target):
                continue
            name, peer, begin = ("send", target, middle) if rank == source else ("recv", source, middle - wait_us)
            launched = middle - 110
            told = {
                "Collective name": name, "In msg nelems": ELEMENTS, "Out msg nelems": ELEMENTS, "dtype": "Float",
                "Process Group Name": "7", "Group size": 3, ("Dst Rank" if name == "send" else "Src Rank"): peer,
            }  # fmt: skip
            if how == "span":
                told = {}
                made.annotation(
                    f"nccl:{name} {rank}{'->' if name == 'send' else '<-'}{peer}", launched - 1, launched + 7
                )
            if how == "coalesced":
                made.op("record_param_comms", launched - 20, launched - 10)["args"].update(told)
                told = {}
            made.kernel("ncclDevKernel_SendRecv(x)", begin, middle + TRANSFER_US, launched, stream=20, **told)
    group = {"pg_name": "7", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "pg_size": 3, "ranks": [0, 1, 2]}
    made.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 3, "pg_config": [group]}
    return made


@pytest.mark.parametrize("how", ["record", "span", "coalesced"])
def test_what_a_stage_sends_is_matched_with_what_the_next_one_receives(tmp_path, how):
    found = compare_ranks(seen(tmp_path, *(exchange(rank, how) for rank in range(3))))
    rows = {row.name: row for row in found.collectives}
    assert set(rows) == {"send", "recv"}
    for name, wait_us in (("send", 0), ("recv", 100)):
        assert rows[name].transfer_ms == pytest.approx(TRANSFER_US / 1000 * rows[name].per_step), name
        assert rows[name].wait_ms == pytest.approx(wait_us / 1000 * rows[name].per_step), name
        assert rows[name].num_bytes == (None if how == "span" else 4 * ELEMENTS)
    assert all(row.wait_ms is None for row in found.rows), "what a schedule brings is nobody's fault"
    assert found.straggler is None and not found.notes


def test_what_one_kernel_sends_and_receives_is_matched_in_both_directions(tmp_path):
    made = [MadeTrace(rank, 2) for rank in range(2)]
    for step in range(3):
        at = 1000.0 * step
        for rank, one in enumerate(made):
            one.step(5 + step, at, at + 990)
            one.kernel("ampere_sgemm_128x64_tn", at + 5, at + 15, at + 1)
            for name, direction in (("send", "Dst Rank"), ("recv", "Src Rank")):
                told = {"Collective name": name, "In msg nelems": ELEMENTS, "dtype": "Float", "Group size": 2}
                one.op("record_param_comms", at + 20, at + 30)["args"].update(told | {direction: 1 - rank})
            one.kernel("ncclDevKernel_SendRecv(x)", at + 100 + 50 * rank, at + 190, at + 40, stream=20)
    [row] = compare_ranks(seen(tmp_path, *made)).collectives
    assert (row.name, row.num_bytes, row.per_step) == ("send_recv", 4 * ELEMENTS, 1)
    assert (row.transfer_ms, row.wait_ms) == pytest.approx((0.040, 0.025))
    assert row.bus_gb_s == pytest.approx(4 * ELEMENTS / 40_000)


def test_traces_without_rank_or_of_several_windows(tmp_path):
    made = four(tmp_path)
    nameless = [replace(one, trace=replace(one.trace, rank=None), time=replace(one.time, rank=None)) for one in made]
    found = compare_ranks(nameless)
    assert found.rows == () and found.critical_rank is None and "only" in found.notes[0] and found.collectives
    assert "left out" in compare_ranks([*four(tmp_path), nameless[0]]).notes[0]
    assert "several traces" in compare_ranks([*four(tmp_path), four(tmp_path)[0]]).notes[0]
    assert compare_ranks([]) is None


@pytest.mark.skipif(not DLRM.is_dir(), reason="no ../shared/traces beside the repository")
def test_the_dlrm_ranks():
    """Rank 7 comes last in 5 of 8 collectives; the first all-to-all lasts 7,635 us on an early rank, 10 us on the last."""
    traces = [read_traces(path)[0] for path in sorted(DLRM.glob("*.json.gz"))]
    found = compare_ranks(placed(traces))
    assert (found.straggler.rank, found.straggler.share_last, found.critical_rank) == (7, 5 / 8, 7)
    assert found.clocks_aligned and found.missing == () and found.notes == () and len(found.rows) == 8
    wanted = ("all_to_all", 24576, "forward")
    [first] = [row for row in found.collectives if (row.name, row.num_bytes, row.phase) == wanted]
    assert first.transfer_ms == pytest.approx(0.010) and first.wait_ms > 3 and first.group_size == 8
    assert sum(row.per_step for row in found.collectives) == 8
    for row in found.collectives:
        assert row.kernel_ms == pytest.approx(row.transfer_ms + row.wait_ms) and row.exposed_ms <= row.kernel_ms + 1e-9
    for row in found.rows:
        assert 0 <= row.exposed_wait_ms <= row.exposed_communication_ms <= row.communication_ms
        assert row.wait_ms <= row.communication_ms


@pytest.mark.parametrize(
    "said",
    [
        {"In msg nelems": -5, "Out msg nelems": 10**30, "Group size": 0, "Seq": -3},
        {"dtype": "\x1b[31m", "Seq": 10**30},
        {"In msg nelems": "many", "Group size": "all", "Process Group Name": 7, "Seq": None},
        {"Collective name": "</script>", "Group size": -1},
    ],
)
def test_hostile_numbers_are_unknown_not_wrong(tmp_path, said):
    made = [late_run(rank, 2, 50 * rank, 50) for rank in range(2)]
    for event in (event for one in made for event in one.events if "Seq" in event["args"]):
        event["args"] |= said
    found = compare_ranks(seen(tmp_path, *made))
    assert all(row.num_bytes is None or 0 <= row.num_bytes < 2**50 for row in found.collectives) and found.collectives
    assert found.rows[0].wait_ms == pytest.approx(0.05)


@pytest.mark.slow
def test_a_real_slow_rank_is_named_by_traces_and_without(tmp_path):
    from support.launch import flags, pretrain  # torch: not for the fast tests

    window = (
        "--profile --use-pytorch-profiler --profile-step-start 6 --profile-step-end 10 --profile-ranks -1 --run-dir"
    )
    argv = flags("--micro-batch-size 2 --train-iters 11 --log-interval 4", window, tmp_path)
    ended = pretrain(["400", *argv], ranks=2, script=REPO / "tests" / "slow_rank.py")
    assert ended.code == 0, ended.err
    traces = [read_traces(path)[0] for path in sorted(tmp_path.glob("*.pt.trace.json*"))]
    found = compare_ranks(placed(traces))
    assert (found.present, found.missing, found.clocks_aligned, found.critical_rank) == ((0, 1), (), True, 1)
    assert (found.straggler.rank, found.straggler.phase) == (1, "data") and found.straggler.caused_wait_ms > 300
    assert {row.name for row in found.collectives} >= {"all_reduce"}
    from_steps = compare_ranks_of_run(read_run(tmp_path)).straggler
    assert (from_steps.rank, from_steps.cause, from_steps.phase) == (1, "data_wait", "data")
    assert from_steps.caused_wait_ms > 300
