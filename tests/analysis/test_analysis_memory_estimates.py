"""Closed forms of memory, the model of the caching allocator with growing segments, and memory from a profiler's trace."""

from dataclasses import replace

import pytest
from support.snapshot_maker import MadeSnapshot
from support.trace_maker import MadeTrace, place
from support.wording import wording

from megatron_lite.analysis.memory.read import SnapshotReader, read_snapshot
from megatron_lite.analysis.memory.record import build_record
from megatron_lite.analysis.memory.reserved import replay_peak
from megatron_lite.analysis.memory.trace_memory import measure_trace_memory
from megatron_lite.caching_allocator import Allocation, SegmentMap
from megatron_lite.config.shape import ModelShape
from megatron_lite.pipeline_schedule import Stage
from megatron_lite.planner.attention_kernel import MATH, UNFUSED
from megatron_lite.planner.memory import activation_bytes, logits_bytes
from megatron_lite.planner.micro_batch import MicroBatch
from megatron_lite.planner.state_size import state_bytes
from megatron_lite.units import MIB

SHAPE = ModelShape(
    num_layers=24, hidden_size=1024, num_attention_heads=16, num_query_groups=16, kv_channels=64, ffn_hidden_size=4096,
    seq_length=2048, max_position_embeddings=2048, padded_vocab_size=50304,
)  # fmt: skip
WHOLE = Stage(0, 1, (range(SHAPE.num_layers),))
SBH = 2048 * 4 * 1024


def kept(precision: str, recomputed: int = 0, **kind) -> int:
    return activation_bytes(MicroBatch(SHAPE, 4, precision, **kind), WHOLE, 1, lambda layers: recomputed)


def statistics(layers: int, heads: int = 16) -> int:
    """fp32 numbers per token: two for each norm, and one for each head of fused attention."""
    return 4 * 2048 * 4 * (layers * (2 * 2 + heads) + 2)


def test_plain_gpts_activations_are_34_bytes_per_element():
    """Korthikanti et al. 2022, equation 2, and what stands around the layers: last norm, embedding's dropout."""
    assert kept("bf16") == 24 * 34 * SBH + 5 * SBH + statistics(24)
    scores = 16 * 2048**2 * 4
    unfused = 24 * (34 * SBH + 5 * scores) + 5 * SBH + statistics(24, heads=0)
    assert kept("bf16", attention=UNFUSED) == unfused
    assert kept("fp32", attention=MATH) == 24 * (66 * SBH + 9 * scores) + 9 * SBH + statistics(24, 0)
    on_cpu = 24 * (72 * SBH + 12 * scores) + 12 * SBH + statistics(24, 0)  # masks of fp32 numbers
    assert kept("fp32", attention=MATH, on_cpu=True) == on_cpu


def test_recomputed_layers_keep_their_input_and_one_is_there_again():
    one, norm = 34 * SBH, statistics(0)
    layer = one + statistics(1) - norm
    assert kept("bf16", recomputed=24) == 24 * 2 * SBH + layer + 3 * SBH
    assert kept("bf16", recomputed=1) == 23 * layer + 2 * SBH + 5 * SBH + norm


def test_states_and_logits():
    assert [sum(state_bytes(100, kind, False, "adam").values()) for kind in ("fp16", "fp32")] == [1600, 1600]
    assert sum(state_bytes(100, "bf16", True, "adam").values()) == 1800
    assert state_bytes(100, "fp32", False, "sgd", momentum=False)["moments"] == 0
    rows = 2**24 // 50304  # whose logits are in fp32, beside their softmax
    tokens = 4 * 2048
    assert logits_bytes(MicroBatch(SHAPE, 4, "fp16")) == (2 * tokens + 4 * rows) * 50304
    assert logits_bytes(MicroBatch(SHAPE, 4, "bf16")) == (2 * tokens + 4 * rows) * 50304
    assert logits_bytes(MicroBatch(SHAPE, 4, "fp32")) == 4 * tokens * (50304 + 1024)
    assert logits_bytes(MicroBatch(replace(SHAPE, padded_vocab_size=256), 1, "bf16")) == 2 * 2048 * (256 + 1024)
    assert logits_bytes(MicroBatch(replace(SHAPE, padded_vocab_size=4096), 1, "bf16")) == (2 + 4) * 2048 * 4096


def sized(size: int, stream: int = 0) -> Allocation:
    return Allocation(size, "", [], stream)


def test_growing_segments_grow_by_pages_and_keep_streams_apart():
    layout = SegmentMap(expandable=True)
    pieces = ((21 * MIB, 0, 40), (18 * MIB, 0, 40), (2 * MIB, 0, 60), (4096, 0, 60 + 2), (2 * MIB, 7, 60 + 2 + 20))
    for size, stream, reserved in pieces:
        layout.place(sized(size, stream))
        assert layout.reserved == reserved * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_free_goes_back(expandable):
    layout, large, small = SegmentMap(expandable), sized(40 * MIB), sized(512)
    for piece in (large, small):
        layout.place(piece)
    layout.release(large)
    layout.give_back()
    assert layout.reserved == 2 * MIB
    layout.release(small)
    layout.give_back()
    assert layout.reserved == 0
    layout.place(large)
    assert layout.reserved == 40 * MIB and len(layout.address_of) == 1


def test_the_record_replayed_with_growing_segments(tmp_path):
    """Four blocks of 30 MiB, all freed: together they serve 120 MiB only if they lie in one segment."""
    made = MadeSnapshot(240 * MIB)
    for piece in [made.alloc(30 * MIB) for _ in range(4)]:
        made.free(piece)
    made.alloc(120 * MIB)
    found = read_snapshot(made.write(tmp_path)).fragmentation
    assert (found.reserved_bytes, found.replay_as_it_was_bytes) == (240 * MIB, 240 * MIB)
    assert (found.replay_reserved_bytes, found.expandable) == (120 * MIB, False)
    made.reserved = 400 * MIB  # a replay that misses what was reserved says nothing
    found = read_snapshot(made.write(tmp_path))
    assert found.fragmentation.replay_reserved_bytes is None
    assert any(wording("analysis/reserves-of-what-was", 60) in note for note in found.notes)


def test_a_replay_gives_back_where_the_record_does(tmp_path):
    made = MadeSnapshot(2**30)
    made.free(made.alloc(40 * MIB))
    made.add("segment_free", addr=1, size=40 * MIB)
    made.alloc(60 * MIB)
    reader = SnapshotReader(build_record(made.data(), tmp_path))
    peaks = [replay_peak(reader.record, reader.lives, expandable) for expandable in (False, True)]
    assert peaks == [60 * MIB, 60 * MIB]


@pytest.mark.parametrize("kind", [{}, {"device": None}])
def test_memory_events_of_a_trace_tell_the_peak_its_phase_and_operator(tmp_path, kind):
    made = MadeTrace(**kind)
    for step in range(3):
        at = step * 1000
        made.add_all(
            ("step", step, at, at + 1000),
            ("annotation", "forward", at + 10, at + 500),
            ("op", "aten::linear", at + 20, at + 200),
            ("op", "aten::addmm", at + 30, at + 100),
            ("op", "aten::log_softmax", at + 300, at + 400),
        )
    assert measure_trace_memory(*place(made, tmp_path)) is None, "without memory events nothing is said"
    for step in range(3):
        at = step * 1000
        made.memory(at + 50, 1000, 1000, 4096)
        made.memory(at + 150, 1000, 2000, 4096)
        made.memory(at + 350, 500 + step, 2500 + step, 8192)
        made.memory(at + 900, -2500 - step, 0, 8192)
    found = measure_trace_memory(*place(made, tmp_path))
    assert (found.peak_bytes, found.peak_phase, found.peak_operator) == (2502, "forward", "aten::log_softmax")
    assert found.reserved_bytes == 8192 and found.total_is_given and found.device == (-1 if kind else 0)
    assert max(num_bytes for _, num_bytes in found.curve) == 2502
