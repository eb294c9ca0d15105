"""What ranks exchange, by formula: as the walk of the real step counts it, and over which link it goes."""

from collections import Counter
from dataclasses import replace

import pytest
from support.command_lines import plan
from support.exchanges import count_exchanges
from support.slow_cases import slowly
from support.wording import wording

from megatron_lite.config.world import World
from megatron_lite.formats.hardware import CUBLAS_WORKSPACE
from megatron_lite.mesh_axes import CONTEXT, CONTEXT_HEADS, CONTEXT_POSITIONS, DATA, PIPELINE, TENSOR
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.traffic import (
    GATHER,
    REDUCE,
    SCATTER,
    SEND,
    Members,
    find_members,
    find_route,
)
from megatron_lite.planner.walk.walk_steps import walk_plan

MODEL = (
    "--num-layers 2 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --bf16 "
    "--make-vocab-size-divisible-by 32 --vocab-size 400"
)
TP2, TP4, PP2 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4", "--pipeline-model-parallel-size 2"
SP, CP2, ZERO1, ZERO3 = (
    "--sequence-parallel",
    "--context-parallel-size 2",
    "--use-distributed-optimizer",
    "--use-torch-fsdp2",
)
CP4, HEADS = "--context-parallel-size 4", "--cp-comm-type a2a"
HEADS_AND_POSITIONS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
FURTHER = "--mtp-num-layers 2 --hidden-dropout 0 --untie-embeddings-and-output-weights"
AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ONE_GROUP = "--group-query-attention --num-query-groups 2"
SMALL = 1024  # bytes of the loss' three numbers per token, of counts and the norm


def node(ranks: int, of: int | None = None) -> World:
    return World(size=ranks, local_size=of or ranks, gpus=of or ranks)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", 2), (ZERO1, 2), (ZERO3, 2), (f"{ZERO3} --num-distributed-optimizer-instances 2", 4), (TP2, 2), (CP2, 2),
        (f"{TP2} {AGAIN}", 2), (PP2, 2), (f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers 4", 2),
        (f"{PP2} --pipeline-schedule ZeroBubble", 2), (f"{TP2} {SP} {PP2} {ZERO1}", 8), (f"{TP4} {SP} {ONE_GROUP}", 4),
        (f"--optimizer muon {ZERO1}", 2), (FURTHER, 2), (f"{CP2} {HEADS}", 2),
        (f"{CP4} {HEADS} {ONE_GROUP} --num-query-groups 4 {AGAIN}", 4),
        *slowly(
            (f"{TP2} {AGAIN} --hidden-dropout 0", 2), (f"{CP2} {AGAIN}", 2), (f"{PP2} --untie-embeddings-and-output-weights", 4),
            (f"{TP2} {SP} {CP2} {ZERO3} --num-layers 4", 8), (f"{FURTHER} {TP2} {SP} {AGAIN}", 2),
            (f"{FURTHER} {PP2} --num-layers 4", 2), (f"{TP2} {SP} {CP4} {HEADS_AND_POSITIONS} {AGAIN}", 8),
            (f"{CP2} --cp-comm-type a2a p2p", 2),
        ),
    ],
)  # fmt: skip
def test_the_formula_is_what_the_real_step_exchanges(words, ranks):
    given = plan(f"{MODEL} --global-batch-size {2 * ranks} {words}", node(ranks))
    for one, expected, found in count_exchanges(given, _count_times):
        if SP in words:  # gradients of what all tensor parallel ranks hold, one piece
            found = Counter({key: times for key, times in found.items() if (*key[:2], times) != (TENSOR, REDUCE, 1)})
        # ZeRO-3: the final norm counts as a part of each layer
        assert found == pytest.approx(expected, rel=0.001), one.stage


@pytest.mark.parametrize("words", [ZERO1, *slowly((ZERO3,), (f"{TP2} {SP}",))])
def test_the_walk_counts_what_the_last_step_exchanges(words):
    """As the first one does."""
    given = plan(f"{MODEL} --global-batch-size 4 {words}", node(2))
    first, second = (walk_plan(given, steps, CUBLAS_WORKSPACE).collectives for steps in (1, 2))
    assert first == second != ()


def _count_times(group: str, kind: str, num_bytes: int, times: int) -> dict[tuple[str, str, int], int]:
    """Times by group, kind and size; all bytes of gradients and weights, which travel in pieces; {} of few numbers."""
    if num_bytes <= SMALL:
        return {}
    return {(group, kind, 0): num_bytes * times} if group == DATA else {(group, kind, num_bytes): times}


def test_which_ranks_are_near():
    given = plan(f"--num-layers 8 --num-attention-heads 8 {TP4} {PP2} --global-batch-size 16 {ZERO1}", node(32, 8))
    assert [find_members(group, given.layout, given.sharding, given.world) for group in (TENSOR, DATA, PIPELINE)] == [
        Members(4, 4), Members(4, 2), Members(2, 1)
    ]  # fmt: skip
    outermost = plan(
        f"--num-layers 8 --num-attention-heads 8 {TP4} {PP2} --global-batch-size 16 --use-tp-pp-dp-mapping", node(32, 8)
    )
    found = [
        find_members(group, outermost.layout, outermost.sharding, outermost.world) for group in (TENSOR, DATA, PIPELINE)
    ]
    assert found == [Members(4, 4), Members(4, 1), Members(2, 2)] and found[1].nodes == 4


def test_ranks_that_exchange_heads_are_neighbors():
    given = plan(f"--num-layers 8 --num-attention-heads 8 {TP2} {CP4} {HEADS_AND_POSITIONS}", node(16, 4))
    groups = (CONTEXT, CONTEXT_HEADS, CONTEXT_POSITIONS)
    found = [find_members(group, given.layout, given.sharding, given.world) for group in groups]
    assert found == [Members(4, 2), Members(2, 2), Members(2, 1)]


def test_routes():
    h100, l40s = find_processor("H100"), find_processor("L40S")
    one_node, wide = Members(8, 8), Members(16, 2)
    assert find_route(GATHER, one_node, h100).words == wording("planner/over-link-between-gpus", 7, 8, 450)
    assert find_route(REDUCE, one_node, h100).words.startswith("once over")
    assert find_route(REDUCE, wide, h100).words == wording("planner/x-over-network-between", 2, 7, 8, 2, 50)
    assert find_route(SCATTER, wide, h100).milliseconds(50e6) == pytest.approx(7 / 8 / 2)
    assert find_route(SEND, Members(2, 1), h100).milliseconds(50e6) == pytest.approx(1.0)
    assert find_route(GATHER, Members(1, 1), h100) is None and find_route(GATHER, wide, l40s) is None
    # two GPUs of a node behind a fast network wait for their own link
    slow_link = replace(h100, link_gb_s=None, pcie_gb_s=16, network_gb_s=400)
    assert "PCIe at 16" in find_route(GATHER, wide, slow_link).words
