"""Snapshots with known answers: the curve, its peak, who held it, growth, out of memory; forms of all years."""

from pathlib import Path

import pytest
from support.paths import SNAPSHOTS
from support.snapshot_maker import BACKWARD, INIT, TRAIN, MadeSnapshot, forward_stack, frames, training, write
from support.wording import wording

from megatron_lite.analysis.memory.read import read_snapshot
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.units import MIB

needs_real = pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="no ../shared/snapshots beside the repository")


def read(made: MadeSnapshot, folder: Path, rank: int = 0):
    return check(read_snapshot(made.write(folder, rank)))


def check(found):
    """What holds of every snapshot."""
    assert sum(held.num_bytes for held in found.held) == sum(site.num_bytes for site in found.sites) == found.peak_bytes
    assert max(moment.allocated for moment in found.curve) == found.peak_bytes
    assert all(sum(moment.by_category) == moment.allocated for moment in found.curve)
    assert found.fragmentation.allocated_bytes <= found.peak_bytes
    times = [moment.time_us for moment in found.curve]
    assert times == sorted(times) and {held.category for held in found.held} <= set(CATEGORIES)
    return found


def held(found) -> dict[str, int]:
    return {one.category: one.num_bytes for one in found.held}


def test_the_peak_and_what_held_it_without_any_tag(tmp_path):
    found = read(training(), tmp_path)
    assert (found.peak_phase, found.complete, found.peak_bytes) == ("forward", True, 29 * MIB)
    wanted = {"parameters": 3 * MIB, "moments": 6 * MIB, "activations": 12 * MIB, "logits and loss": 8 * MIB}
    assert held(found) == wanted
    highest = {one.category: one.num_bytes for one in found.highest}
    assert highest["gradients"] == 3 * MIB and highest["workspace"] == 3 * MIB
    # sites are lines of the user's code; layers come from the order of equal stacks
    sites = {(site.site, site.category): (site.num_bytes, site.blocks) for site in found.sites}
    assert sites["model.py:13 forward", "activations"] == (12 * MIB, 3)
    assert sites["model.py:60 cross_entropy", "logits and loss"] == (8 * MIB, 1)
    assert [(layer.name, layer.num_bytes) for layer in found.layers] == [(f"layer {n}", 4 * MIB) for n in range(3)]
    assert any(wording("analysis/order-in-which-equal") in note for note in found.notes)


def test_own_tags_name_phase_and_module(tmp_path):
    made = MadeSnapshot(2**30, simulated="tensors of a CPU run")
    made.there_before(MIB, "setup", INIT)
    for number in range(2):
        made.alloc(2 * MIB, f"step 3/forward/decoder.layers.{number}.mlp", forward_stack(5))
    made.alloc(4 * MIB, "step 3/backward/decoder.layers.1", forward_stack(6))
    found = read(made, tmp_path, rank=3)
    assert (found.rank, found.simulated, found.peak_phase) == (3, True, "backward")
    layers = [(layer.name, layer.num_bytes) for layer in found.layers]
    assert layers == [("decoder.layers.0", 2 * MIB), ("decoder.layers.1", 2 * MIB)]
    [mlp] = [site for site in found.sites if site.category == "activations"]
    assert (mlp.module, mlp.blocks, mlp.phase) == ("decoder.layers.*.mlp", 2, "forward")


def test_annotations_tell_phases_and_steps(tmp_path):
    made = MadeSnapshot(2**30)
    for number in (4, 5):
        made.mark("START", f"ProfilerStep#{number}")
        made.mark("START", "Optimizer.step#AdamW.step")
        state = made.alloc(number * MIB, frames=frames(TRAIN))
        made.mark("END", "Optimizer.step#AdamW.step")
        made.free(state, frames=frames(TRAIN))
        made.mark("END", f"ProfilerStep#{number}")
    found = read(made, tmp_path)
    assert found.peak_phase == "optimizer_step" and found.peak_bytes == 5 * MIB
    steps = [(step.name, step.peak, step.allocated_at_end) for step in found.steps]
    assert steps == [("ProfilerStep#4", 4 * MIB, 0), ("ProfilerStep#5", 5 * MIB, 0)]


def test_a_leak_is_named_with_its_line(tmp_path):
    growth = read(training(steps=5, leak=MIB), tmp_path).growth
    assert (growth.bytes_per_step, growth.steps) == (MIB, 5)
    assert [(site.site, site.num_bytes) for site in growth.sites] == [("model.py:77 forward", MIB)]
    assert read(training(steps=5), tmp_path).growth is None
    assert read(training(steps=2, leak=MIB), tmp_path).growth is None, "too few steps to tell"


def test_the_last_failed_allocation(tmp_path):
    made = training()
    made.out_of_memory(7 * MIB, 5 * MIB, forward_stack(13))
    oom = read(made, tmp_path).oom
    assert (oom.requested_bytes, oom.device_free_bytes, oom.site) == (7 * MIB, 5 * MIB, "model.py:13 forward")


def test_a_ring_that_dropped_the_beginning_keeps_the_curve(tmp_path):
    whole, cut = training(steps=3), training(steps=3)
    del cut.events[: len(cut.events) // 2]
    found = read(cut, tmp_path)
    assert found.peak_bytes == read(whole, tmp_path).peak_bytes and found.curve[-1].allocated == 9 * MIB


def test_what_nothing_is_known_of_is_said(tmp_path):
    made = MadeSnapshot(2**30)
    made.there_before(512 * MIB)
    made.alloc(MIB, frames=forward_stack(3))
    found = read(made, tmp_path)
    assert held(found)["before the record"] == 512 * MIB and not found.complete
    assert any(wording("analysis/mib-of-peak-was", 512.0) in note for note in found.notes)


def test_of_several_devices_the_one_with_events(tmp_path):
    data = training().data()
    data["device_traces"] = [[], data["device_traces"][0]]
    data["segments"][0]["device"] = 1
    data["segments"].append({"device": 0, "address": 1, "total_size": 2 * MIB, "blocks": []})
    found = check(read_snapshot(write(data, tmp_path / "s.pickle")))
    assert (found.peak_bytes, found.device) == (29 * MIB, 1)
    assert found.notes[0] == wording("analysis/this-is-device-file-holds", 1, 0, 0)


def test_forms_of_older_torch(tmp_path):
    """Blocks with a history instead of frames and no address; events without times; a bare list of segments."""
    old = training().data()
    for event in old["device_traces"][0]:
        event.pop("user_metadata", None)
        del event["time_us"]
    del old["allocator_settings"], old["external_annotations"]
    found = check(read_snapshot(write(old, tmp_path / "old.pickle")))
    assert found.peak_bytes == 29 * MIB and wording("analysis/file-has-no-timestamps") in found.notes
    history = [{"addr": 5, "real_size": MIB + 1, "frames": forward_stack(8)}]
    block = {"size": 2 * MIB, "state": "active_allocated", "history": history}
    segments = [{"device": 0, "address": 5, "total_size": 2 * MIB, "stream": 0, "blocks": [block]}]
    bare = check(read_snapshot(write(segments, tmp_path / "bare.pickle")))
    assert bare.peak_bytes == MIB + 512 and bare.sites[0].site == "model.py:8 forward"
    assert bare.notes[0].startswith(wording("analysis/no-history-was-recorded"))


def test_backward_that_did_not_end_holds_gradients_by_their_sizes(tmp_path):
    made = MadeSnapshot(2**30)
    for _ in range(2):
        made.there_before(MIB, frames=INIT)
    made.alloc(4 * MIB, frames=forward_stack(5))
    made.alloc(MIB, frames=BACKWARD)
    made.alloc(3 * MIB, frames=BACKWARD)
    wanted = {"parameters": 2 * MIB, "activations": 4 * MIB, "gradients": MIB, "workspace": 3 * MIB}
    assert held(read(made, tmp_path)) == wanted


@needs_real
@pytest.mark.parametrize(
    ("name", "peak", "phase"),
    [
        ("cuda_gpt_24x1024_seq1024_bf16.pickle", 24_207_167_496, "backward"),
        ("cuda_gpt_24x1024_seq128_fp32.pickle", 7_013_335_044, "optimizer_step"),
    ],
)
def test_real_gpu_snapshots(name, peak, phase):
    """24 layers of 1024: 4 attention and 3 MLP matrices of 4096, 10,000 words twice, norms; fp32 with Adam."""
    found = check(read_snapshot(SNAPSHOTS / name))
    parameters = 24 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 10_000 * 1024 + 1024
    highest = {one.category: one.requested_bytes for one in found.highest}
    assert sum(one.requested_bytes for one in found.held) == peak and found.peak_phase == phase
    assert highest["parameters"] == highest["gradients"] == 4 * parameters
    assert 8 * parameters <= highest["moments"] <= 8 * parameters + 2 * 4 * 1024 * 10_000  # old and new of one weight
    assert found.complete and found.growth is None and len(found.steps) == 1
    replay = found.fragmentation
    assert abs(replay.replay_as_it_was_bytes - replay.reserved_bytes) < 0.005 * replay.reserved_bytes
    assert replay.allocated_bytes < replay.replay_reserved_bytes <= replay.reserved_bytes


@needs_real
def test_a_real_model_of_24_layers_has_24():
    found = read_snapshot(SNAPSHOTS / "cuda_gpt_24x1024_seq1024_bf16.pickle")
    assert [layer.name for layer in found.layers] == [
        wording("analysis/outside-of-layers"),
        *(f"layer {n}" for n in range(24)),
    ]
    assert len({layer.num_bytes for layer in found.layers[1:22]}) == 1  # backward has begun to free the last ones'
    assert found.sites[0].site == "nn_utils.py:6 softmax" and found.sites[0].num_bytes == 24 * 4 * 16 * 1024**2 * 4
