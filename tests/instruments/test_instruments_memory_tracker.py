"""The CPU's storage tracker against what torch says is alive, and the address space against its own rules."""

import gc
import random
import threading

import pytest
import torch
from support.snapshots import live_at_each_moment, live_blocks, trace

from megatron_lite.caching_allocator import Allocation, SegmentMap, rounded
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.memory_tags import ModuleHooks, StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.units import MIB


@pytest.fixture
def tracker():
    gc.collect()
    tracker = StorageTracker(StepMarks(), 100_000)
    tracker.start()
    yield tracker
    tracker.stop()
    assert tracker.failure is None


def live_bytes(tracker: StorageTracker) -> int:
    """Of all storages that are known and alive."""
    return sum(live_blocks(tracker.snapshot()).values())


def alive(*tensors: torch.Tensor) -> int:
    """Bytes of their storages, shared ones once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_views_and_in_place_operations_take_no_memory(tracker):
    a = torch.zeros(1000)
    b, c = a.view(10, 100), a[5:9]
    a.add_(1).mul_(2)
    parts = a.split(100)
    assert live_bytes(tracker) == alive(a, b, c, *parts) == 4000
    del a, b, c
    assert live_bytes(tracker) == 4000  # the parts hold it still
    del parts
    assert live_bytes(tracker) == 0


def test_every_way_to_make_a_tensor_is_seen(tracker):
    made = [torch.empty(7), torch.tensor([1.0, 2.0]), torch.arange(9), torch.ones(3, 4).t().contiguous()]
    made += [torch.zeros(5).bool(), torch.ones(4) + 1, torch.eye(3).clone(), torch.cat([torch.ones(2), torch.ones(3)])]
    made += [torch.empty(0).resize_(11), torch.nn.Parameter(torch.zeros(6)), *torch.ones(4, 4).svd()]
    made += [torch.randn(6).sort().values, torch.zeros(5).half()]
    assert live_bytes(tracker) == alive(*made)


def test_a_storage_that_grows_is_freed_and_taken_anew(tracker):
    grown = torch.empty(100)
    grown.resize_(300)
    assert live_bytes(tracker) == alive(grown) == 1200
    actions = [f"{event['action']} {event['size']}" for event in trace(tracker.snapshot())]
    freed = ["free_requested 400", "free_completed 400"]
    assert actions == [f"segment_alloc {2 * MIB}", "alloc 400", *freed, "alloc 1200"]


def test_what_autograd_saves_is_held_until_backward_has_used_it(tracker):
    x = torch.ones(1000, requires_grad=True)
    y = (x * 2).exp()  # saves its result
    z = (y * y).sum()
    del y
    before = live_bytes(tracker)
    assert before == 4000 + 4000 + 4
    z.backward()
    assert live_bytes(tracker) == alive(x, x.grad, z) == 4000 + 4000 + 4


def test_other_threads_free_and_are_heard(tracker):
    held = [torch.zeros(1000)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert live_bytes(tracker) == 0 and len(list(live_at_each_moment(tracker.snapshot()))) == 4


def test_what_was_there_before_is_there_from_the_start():
    old = torch.zeros(1000)
    tracker = StorageTracker(StepMarks(), 100)
    tracker.start()
    try:
        new = old.view(10, 100) + 1
        old.add_(1)
    finally:
        tracker.stop()
    assert [event["size"] for event in trace(tracker.snapshot()) if event["action"] == "alloc"] == [4000]
    assert sorted(live_blocks(tracker.snapshot()).values()) == [4000, 4000] and new is not None


def test_stacks_name_the_line_and_the_operation(tracker):
    kept = torch.zeros(3)  # this line
    code = test_stacks_name_the_line_and_the_operation.__code__
    [event] = [event for event in trace(tracker.snapshot()) if event["action"] == "alloc"]
    assert event["frames"][0] == {"filename": "??", "line": 0, "name": "aten.zeros.default"}
    assert event["frames"][1] == {"filename": __file__, "line": code.co_firstlineno + 1, "name": code.co_name}
    assert kept is not None and not any("/instruments/memory_" in frame["filename"] for frame in event["frames"])


def test_errors_stay_what_they_are_and_shortages_are_reported_while_they_fail(tracker):
    asked = []
    tracker.out_of_memory = asked.append
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.zeros(3) + torch.zeros(4)
    assert live_bytes(tracker) == 0 and asked == []
    with pytest.raises(RuntimeError):
        torch.empty(2**60, dtype=torch.uint8)
    event = trace(tracker.snapshot())[-1]
    assert asked == [2**60] and (event["action"], event["size"], "addr" in event) == ("oom", 2**60, False)


def test_a_snapshot_changes_nothing_that_follows(tracker):
    a = torch.zeros(300)
    first = tracker.snapshot()
    b = torch.zeros(5)
    del a
    second, third = tracker.snapshot(), tracker.snapshot()
    assert trace(second)[: len(trace(first))] == trace(first) and second == third and b is not None
    assert sum(live_blocks(second).values()) == 20


class Counts(torch.nn.Module):
    """Begins with an operation that autograd does not record."""

    def forward(self, x):
        return x * torch.ones(8).cumsum(0)


def step_of(place: StepMarks, hooks: ModuleHooks, model: torch.nn.Module, number: int, between=lambda: None):
    """One forward and backward, watched."""
    watching = Instruments([place], print)
    hooks.attach()
    try:
        with watching.step(number):
            with watching.phase("forward"):
                loss = model(torch.ones(2, 8)).sum()
            between()
            with watching.phase("backward"):
                loss.backward()
    finally:
        hooks.detach()


def test_backward_is_named_by_the_module_that_it_belongs_to(tracker):
    place = tracker._place
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Counts(), torch.nn.Linear(8, 8))
    step_of(place, ModuleHooks(place, in_backward=False), model, 1)
    made = [e for e in trace(tracker.snapshot()) if e["action"] == "alloc"]
    tags = {e["user_metadata"] for e in made}
    assert {f"step 1/{phase}/{n}" for phase in ("forward", "backward") for n in "012"} <= tags
    in_no_module, of_backward = (
        [e["frames"][0]["name"] for e in made if e["user_metadata"] == f"step 1/{place}"]
        for place in ("forward", "backward/0")
    )
    assert in_no_module == ["aten.ones.default", "aten.sum.default"]
    assert "aten.mm.default" in of_backward  # the first layer's weight gradient
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks


def test_gradients_that_arrive_on_other_threads_bring_their_module():
    told = []
    place = StepMarks(told.append)
    # what an Identity hands on is another module's
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Identity())
    step_of(place, ModuleHooks(place, in_backward=True), model, 7, told.clear)
    # the whole model's result is that of its last layer
    assert told == ["step 7/backward", "step 7/backward/1", "step 7/backward/Sequential", "step 7/backward/0", "step 7"]


@pytest.mark.parametrize(("seed", "expandable"), [(0, False), (1, False), (2, False), (3, True), (4, True)])
def test_blocks_fill_segments_and_never_overlap(seed, expandable):
    chance, layout, held = random.Random(seed), SegmentMap(expandable), []
    for _ in range(1500):
        if held and chance.random() < 0.48:
            layout.release(held.pop(chance.randrange(len(held))))
        else:
            size = chance.choice((1, 512, 513, 100_000, MIB, MIB + 1, 9 * MIB, 10 * MIB, 33 * MIB))
            held.append(Allocation(size, "", []))
            layout.place(held[-1])
    check(layout, held)
    other = layout.copy()
    for allocation in held:
        other.release(allocation)
    check(other, [])
    assert all(len(segment.starts) == 1 for segment in other.segments)  # all free blocks joined
    check(layout, held)  # untouched by what became of its copy


def check(layout: SegmentMap, held: list[Allocation]):
    found, free = set(), []
    for number, segment in enumerate(layout.segments):
        at = segment.address
        for start, size, holder in zip(segment.starts, segment.sizes, segment.holders, strict=True):
            assert start == at
            at += size
            if holder is None:
                free.append((size, start, number))
            else:
                assert layout.address_of[holder] == start and size >= rounded(holder.size)
                found.add(holder)
        assert at == segment.address + segment.size
        assert not any(a is b is None for a, b in zip(segment.holders, segment.holders[1:]))
    assert found == set(held) == set(layout.address_of)
    assert sorted(free) == sorted(entry for blocks in layout._free.values() for entry in blocks)


def put(layout: SegmentMap, *sizes: int) -> list[Allocation]:
    pieces = [Allocation(size, "", []) for size in sizes]
    for piece in pieces:
        layout.place(piece)
    return pieces


def test_segments_are_as_large_as_cudas_and_blocks_are_split_and_taken_again():
    sizes = {1: 2, MIB: 2, MIB + 1: 20, 10 * MIB - 512: 20, 10 * MIB: 10, 11 * MIB + 1: 12}
    for size, segment_mib in sizes.items():
        assert SegmentMap().place(Allocation(size, "", [])).size == segment_mib * MIB
    layout, size = SegmentMap(), 10 * MIB - 512
    put(layout, size, size)
    assert [segment.sizes for segment in layout.segments] == [[size, 20 * MIB - size]]  # a rest of at most 1 MiB stays
    layout = SegmentMap()
    a, _, c, _ = put(layout, 4096, 512, 1024, 512)
    large, small = layout.release(a), layout.release(c)
    e, f = put(layout, 600, 2000)  # the smallest that fits
    assert (layout.address_of[e], layout.address_of[f]) == (small, large) and len(layout.segments) == 1
