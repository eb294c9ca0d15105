"""Dumps of the documented form, from files to the verdict."""

from collections.abc import Callable

import pytest
from support.flight_recordings import RecordedJob

from megatron_lite.postmortem.collect import collect_evidence
from megatron_lite.postmortem.conclude import conclude
from megatron_lite.postmortem.postmortem_results import FailureKind, Postmortem

GROUPS = {"1": ("TP", [0, 1]), "2": ("TP", [2, 3]), "3": ("DP", [0, 2]), "4": ("DP", [1, 3])}
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
Plant = Callable[[RecordedJob], None]


def plant_swap(job: RecordedJob) -> None:
    job.call("all_reduce", names={3: "broadcast"})
    job.call("broadcast", names={3: "all_reduce"})


def plant_chain(job: RecordedJob) -> None:
    job.call(group="1", without=[1])
    job.call(group="3", without=[0])
    job.call(group="2")


FAULTS: dict[str, tuple[Plant, FailureKind, tuple[int, ...]]] = {
    "missing": (lambda job: job.call(without=[2]), FailureKind.NEVER_ENTERED, (2,)),
    "given up": (lambda job: job.call(without=[2], failed=True), FailureKind.NEVER_ENTERED, (2,)),
    "shapes": (lambda job: job.call(shapes={1: [99]}), FailureKind.OTHER_ARGUMENTS, (1,)),
    "order": (plant_swap, FailureKind.OTHER_ORDER, (3,)),
    "chain": (plant_chain, FailureKind.NEVER_ENTERED, (1,)),
    "message": (lambda job: job.send(0, 2, "3", without=[0]), FailureKind.NEVER_ENTERED, (0,)),
    "batch": (lambda job: job.exchange([(0, 1), (1, 0)], "1", without=[1]), FailureKind.NEVER_ENTERED, (1,)),
    "ring": (lambda job: job.exchange(RING, without=[2]), FailureKind.NEVER_ENTERED, (2,)),
    "coalesced": (lambda job: job.coalesce(["broadcast"] * 3, without=[1]), FailureKind.NEVER_ENTERED, (1,)),
    "shapes of parts": (
        lambda job: job.coalesce(["broadcast"] * 3, shapes={1: [99]}),
        FailureKind.OTHER_ARGUMENTS,
        (1,),
    ),
    "shapes of an uneven gather": (
        lambda job: job.coalesce(["_broadcast_oop"] * 3, closing="ALLGATHER_coalesced", shapes={1: [99]}),
        FailureKind.OTHER_ARGUMENTS,
        (1,),
    ),
}


def read_verdict(folder, plant: Plant, *, options: dict[str, bool] | None = None, form="pickle", **job) -> Postmortem:
    made = RecordedJob(4, GROUPS, **job)
    for _ in range(20):
        for group in GROUPS:
            made.call("all_reduce", group)
        made.call("_all_gather_base", shape=[8], output=[32])
        made.exchange(RING)
    plant(made)
    made.write(folder, form=form, **(options or {}))
    return conclude(collect_evidence([folder]))


@pytest.mark.parametrize("timing", [True, False], ids=["timing", "no timing"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, timing, tmp_path):
    plant, kind, ranks = FAULTS[fault]
    found = read_verdict(tmp_path, plant, timing=timing)
    assert (found.kind, found.ranks) == (kind, ranks), found


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.7"])
@pytest.mark.parametrize("fault", ["missing", "shapes", "ring", "coalesced"])
def test_older_forms_say_the_same(fault, version, tmp_path):
    plant, kind, ranks = FAULTS[fault]
    found = read_verdict(tmp_path, plant, version=version)
    assert (found.kind, found.ranks) == (kind, ranks), found


@pytest.mark.parametrize("fault", ["missing", "shapes", "chain"])
def test_less_that_is_written_still_tells(fault, tmp_path):
    plant, kind, ranks = FAULTS[fault]
    ways = ({"options": {"only_active": True}}, {"options": {"frames": False}}, {"form": "json"}, {"buffer": 7},
            {"backend": "gloo"})  # fmt: skip
    for number, way in enumerate(ways):
        found = read_verdict(tmp_path / str(number), plant, **way)
        assert (found.kind, found.ranks) == (kind, ranks), (way, found)


@pytest.mark.parametrize("plant", [lambda job: job.call(stuck=True), lambda job: job.exchange(RING, stuck=True)])
def test_a_call_that_does_not_complete_is_no_healthy_job(plant, tmp_path):
    found = read_verdict(tmp_path / "timing", plant)
    assert (found.kind, found.ranks) == (FailureKind.STUCK_IN_KERNEL, ())
    # without timing nothing tells whether the device has begun it
    found = read_verdict(tmp_path / "none", plant, timing=False)
    assert found.kind is FailureKind.NETWORK
    assert found.confidence == "low"


def test_nothing_is_planted(tmp_path):
    assert read_verdict(tmp_path, lambda job: None).kind is FailureKind.NONE
