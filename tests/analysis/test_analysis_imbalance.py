"""Imbalance that moves, and ranks that do not call the same collectives."""

import random
from dataclasses import replace

import numpy as np
import pytest
from support.finding_cases import ALL_REDUCE, GATHER, moving, orders, recorded
from support.trace_maker import MadeTrace
from support.training_maker import BF16_GEMM, gpu, rank_lines
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.ranks.imbalance import find_imbalance
from megatron_lite.analysis.ranks.ranks import compare_ranks

STEP_MS = 100.0


def find(net, on_gpu=True, compute=None):
    """net: by step, what others wait for each rank."""
    net_ms = np.array(net, float).T
    return find_imbalance(range(len(net_ms)), net_ms, compute, STEP_MS, on_gpu)


def test_ranks_in_turns_blame_no_single_rank():
    found = find([[15, -15], [-15, 15]] * 4)
    assert (found.rank, found.late_steps, found.steps) == (None, 8, 8)
    assert found.lost_ms == found.late_ms == 15 and dict(found.ranks) == {0: 0.5, 1: 0.5}
    four = find([[15 if rank == step % 4 else -15 for rank in range(4)] for step in range(8)])
    assert four.rank is None and four.lost_ms == 15 and len(four.ranks) == 4


@pytest.mark.parametrize("every", [3, 7])
def test_a_tail_names_its_rank_and_its_period(every):
    found = find([[-300, 300] if step % every == 2 else [0, 0] for step in range(21)])
    late = len(range(2, 21, every))
    assert (found.rank, found.late_steps, found.steps, found.every) == (1, late, 21, every)
    assert found.late_ms == 300 and found.lost_ms == pytest.approx(300 * late / 21)


def test_a_tail_without_a_period_says_none():
    found = find([[-300, 300] if step in (1, 4, 11) else [0, 0] for step in range(14)])
    assert (found.rank, found.every, found.late_steps) == (1, None, 3)


def test_two_late_steps_make_no_period():
    """Any two are at one distance."""
    found = find([[-300, 300] if step in (3, 7) else [0, 0] for step in range(14)])
    assert (found.rank, found.every, found.late_steps) == (1, None, 2)


@pytest.mark.parametrize(
    "net",
    [
        [[0, 0]] * 8,
        [[3, -3], [-3, 3]] * 4,  # 3% of a step
        [[0, 0]] * 7 + [[200, -200]],  # one odd step
        [[15, -15], [-15, 15]],  # too few steps
        [[15, -15]] * 8,  # always the same one: a straggler
    ],
)
def test_near_misses(net):
    assert find(net) is None


def test_noise_of_a_quiet_machine_gives_none():
    """Ranks that differ by chance: a few percent, now and then a hiccup."""
    for seed in range(200):
        chance = random.Random(seed)
        late = [[abs(chance.gauss(0, 1.5)) for _ in range(4)] for _ in range(20)]
        net = [
            [one - max(other for at, other in enumerate(step) if at != rank) for rank, one in enumerate(step)]
            for step in late
        ]
        assert find(net) is None


def test_without_a_gpu_delays_by_chance_are_no_turns():
    """Other work on the cores delays ranks by very unequal times; unequal work of the run's own is alike."""
    chance = random.Random(3)
    by_chance = [chance.expovariate(1 / 8) ** 1.5 / 3 for _ in range(40)]
    net = [[late, -late] if chance.random() < 0.5 else [-late, late] for late in by_chance]
    assert find(net, on_gpu=False) is None
    assert find([[15, -15], [-15, 15]] * 4, on_gpu=False) is not None


def test_the_late_rank_computes_longer_or_not(tmp_path):
    net = [[15, -15], [-15, 15]] * 4
    longer = np.array([[15.0, 0.0] * 4, [0.0, 15.0] * 4])
    assert find(net, compute=longer).computes is True
    assert find(net, compute=np.ones((2, 8))).computes is False
    moving([[1500, 0], [0, 1500]] * 4)(tmp_path)
    [one] = [one for one in analyze([tmp_path]).findings if one.code == "late-in-turns"]
    assert one.certain and one.rank is None and one.cost_ms == pytest.approx(1.5, rel=0.01)


def late_findings(folder):
    """The findings about late ranks by code, and the cost of each; 0.01 ms apart is the same."""
    findings = [one for one in analyze([folder]).findings if one.code.startswith("late-") or one.code == "straggler"]
    return {one.code: one for one in findings}


def test_a_straggler_and_a_rank_that_is_late_at_times_are_both_named(tmp_path):
    """Each costs what the step would gain without it: the second one comes 4 ms later than the straggler."""
    moving([[0, 6000 if step % 5 == 2 else 0, 0, 2000] for step in range(20)])(tmp_path)
    found = late_findings(tmp_path)
    assert found["straggler"].rank == 3 and found["straggler"].cost_ms == pytest.approx(1.6, rel=0.01)
    assert found["late-at-times"].rank == 1 and found["late-at-times"].cost_ms == pytest.approx(0.8, rel=0.01)
    assert len(found) == 2


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_costs_what_it_comes_later_than_the_straggler(tmp_path, world):
    """Also where the straggler is one of few, or the only one, beside whom the rank's lateness is measured."""
    on_time = [0] * (world - 2)
    moving([[2000, *on_time, 5000 if step % 5 == 2 else 0] for step in range(20)])(tmp_path)
    found = late_findings(tmp_path)
    assert found["straggler"].rank == 0 and found["straggler"].cost_ms == pytest.approx(2 * 16 / 20, rel=0.01)
    late = found["late-at-times"]
    assert late.rank == world - 1 and late.cost_ms == pytest.approx((5 - 2) * 4 / 20, rel=0.01)
    imbalance = analyze([tmp_path]).facts.ranks.imbalance
    assert imbalance.late_ms == pytest.approx(5 - 2, rel=0.01)
    assert (imbalance.usual[0], imbalance.late_steps, imbalance.every) == (0, 4, 5)


def test_of_two_ranks_one_that_computes_longer_is_told_so_beside_a_straggler(tmp_path):
    moving([[2000, 6000 if step % 6 == 2 else 0] for step in range(20)])(tmp_path)
    assert analyze([tmp_path]).facts.ranks.imbalance.computes is True
    assert wording("analysis/late-rank-computes-longer") in str(late_findings(tmp_path)["late-at-times"].evidence)


def test_a_straggler_alone_is_the_only_late_rank(tmp_path):
    chance = random.Random(1)
    moving([[*(chance.uniform(0, 100) for _ in range(3)), 2000] for _ in range(20)])(tmp_path)
    assert list(late_findings(tmp_path)) == ["straggler"]


@pytest.mark.parametrize("world", [2, 4])
def test_different_ranks_that_are_late_in_some_steps_are_turns(tmp_path, world):
    late_us = [
        [4000 if step % 4 == 1 and step // 4 % world == rank else 0 for rank in range(world)] for step in range(20)
    ]
    moving(late_us)(tmp_path)
    found = late_findings(tmp_path)
    assert list(found) == ["late-in-turns"] and found["late-in-turns"].cost_ms == pytest.approx(4 * 5 / 20, rel=0.01)
    imbalance = analyze([tmp_path]).facts.ranks.imbalance
    assert (imbalance.late_steps, imbalance.every, imbalance.rank) == (5, 4, None)


def test_two_late_steps_of_two_ranks_are_no_pattern():
    net = [[0, 0]] * 14
    net[3], net[9] = [40, -40], [-40, 40]
    assert find(net) is None


@pytest.mark.parametrize(
    ("late_us", "code", "cost_ms"),
    [
        ([[0, 0, 3000, 0]] * 12, "straggler", 3.0),
        ([[0, 0, 3000 if step % 4 == 1 else 0, 0] for step in range(12)], "late-at-times", 0.75),
        ([[0, 3000, 0, 0] if step % 2 else [0, 0, 3000, 0] for step in range(11)], "late-in-turns", 3.0),
        ([[0, 0, 30, 0]] * 12, None, None),
    ],
)
def test_lateness_that_passes_through_two_groups_counts_once(tmp_path, late_us, code, cost_ms):
    """A rank delays its pair, and the pair delays the world."""
    moving(late_us, pairs=True)(tmp_path)
    found = late_findings(tmp_path)
    assert list(found) == ([code] if code else [])
    if code:
        assert found[code].cost_ms == pytest.approx(cost_ms, rel=0.01)


def test_waiting_for_ranks_in_turns_is_not_told_again_as_communication(tmp_path):
    moving([[1500, 0], [0, 1500]] * 4)(tmp_path)
    codes = [one.code for one in analyze([tmp_path]).findings]
    assert codes.count("late-in-turns") == 1 and not [code for code in codes if code.startswith("exposed")]


def turns(steps: int, late_ms: float, each=1):
    """Console lines of one step each; one rank of two takes longer in forward."""
    lines = []
    for step in range(steps):
        forward = [3.0 + (late_ms if step % 2 == rank else 0.0) for rank in range(2)]
        [line] = rank_lines(forward, 1, steps=[each] * 2)
        lines.append(line | {"iterations": [1 + step, 1 + step]})
    return lines


@pytest.mark.parametrize(("late_ms", "each", "codes"), [(3.0, 1, ["late-in-turns"]), (0.2, 1, []), (3.0, 5, [])])
def test_ranks_in_turns_without_traces(tmp_path, late_ms, each, codes):
    recorded(ranks=turns(12, late_ms, each))(tmp_path)
    assert [one.code for one in analyze([tmp_path]).findings if one.code.startswith("late-")] == codes


# --- order of collectives


def disorder_of(folder):
    return analyze([folder]).facts.ranks.disorder


def test_the_first_difference_of_order_is_named(tmp_path):
    orders([ALL_REDUCE, GATHER])(tmp_path)
    found = disorder_of(tmp_path)
    assert (found.rank, found.other_rank, found.place, found.reordered) == (0, 1, 1, True)
    assert found.what.startswith("all_gather") and found.other_what.startswith("all_reduce")
    assert found.steps == found.of_steps


def test_another_collective_in_the_same_place_is_named(tmp_path):
    orders([GATHER, GATHER])(tmp_path)
    found = disorder_of(tmp_path)
    assert (found.place, found.reordered) == (2, False)


def two_groups(folder, ranks, second):
    """Rank 1 calls the collectives of two groups in another order, or with other sizes."""
    for rank in range(ranks):
        groups = [
            {"pg_name": name, "pg_desc": text, "pg_size": 2, "ranks": [0, 1]}
            for name, text in (("1", "mesh_tp"), ("2", "mesh_dp"))
        ]
        made = MadeTrace(
            rank,
            2,
            device="NVIDIA H100 80GB HBM3",
            distributedInfo={"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups},
        )
        for index in range(5):
            at = 10.0 + 9_000 * index
            made.kernel(BF16_GEMM, at + 20, at + 8_000, at + 5)
            for place, (group, elements) in enumerate(second if rank else [("1", 100), ("2", 200)]):
                began = at + 8_000 + 200 * place
                made.collective(began, began + 190, at + 40 + 10 * place, elements=elements, group=group, group_size=2)
            made.step(10 + index, at, at + 8_950)
        made.write(folder)


@pytest.mark.parametrize("second", [[("2", 200), ("1", 100)], [("1", 300), ("2", 200)]])
def test_groups_may_interleave_and_sizes_may_differ(tmp_path, second):
    two_groups(tmp_path, 2, second)
    assert disorder_of(tmp_path) is None


def test_without_known_groups_nothing_is_said(tmp_path):
    orders([ALL_REDUCE, GATHER])(tmp_path)
    report = analyze([tmp_path])
    assert report.facts.ranks.disorder is not None
    for one in report.facts.ranks_seen:
        unknown = tuple(replace(call, group=None) for call in one.trace.collectives)
        object.__setattr__(one.trace, "collectives", unknown)
    assert compare_ranks(report.facts.ranks_seen).disorder is None


def test_a_second_rank_that_is_as_late_as_the_straggler_is_named(tmp_path):
    def one_late(folder, late_ranks, ranks):
        for rank in range(ranks):
            late = 1500 if rank in late_ranks else 0
            gpu(folder, rank, ranks, reduce="late", late_us=late, wait_us=1500 - late)

    one_late(tmp_path / "a", (2, 5), 8)
    late = analyze([tmp_path / "a"]).facts.ranks.straggler
    assert {late.rank, *late.alike} == {2, 5}
    one_late(tmp_path / "b", (2,), 8)
    assert analyze([tmp_path / "b"]).facts.ranks.straggler.alike == ()
