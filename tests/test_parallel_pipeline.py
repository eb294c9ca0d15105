"""Stages of a pipeline: which layers they have, in which order they compute, what they send and how much they hold."""

import itertools
import json
from collections import deque

import pytest
from launch import flags, on_ranks, plan_of

from megatron_lite.config.layout import Layout, Stage, count_stage_layers, order_turns
from megatron_lite.config.plan import plan_stages
from megatron_lite.config.world import World
from megatron_lite.thresholds import slowest_rank

PP2 = "--pipeline-model-parallel-size 2"


def stages_of(number: int) -> list[Stage]:
    return [Stage(one, number, range(one, one + 1)) for one in range(number)]


@pytest.mark.parametrize(("stages", "micro_batches"), list(itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 8))))
def test_every_order_of_turns_comes_to_its_end(stages, micro_batches):
    """Each stage takes what its neighbors have sent, in the order in which they sent it; of each direction one tensor is on its way, and
    one may be there already."""
    waiting = [deque(order_turns(stage, micro_batches)) for stage in stages_of(stages)]
    onward, back = ([deque() for _ in range(stages + 1)] for _ in range(2))  # by the stage that receives
    held, most = [0] * stages, [0] * stages
    onward[0].extend(range(micro_batches))
    moved = True
    while moved:
        moved = False
        for number, turns in enumerate(waiting):
            if not turns:
                continue
            turn = turns[0]
            comes = onward[number] if turn.is_forward else back[number]
            leaves = onward[number + 1] if turn.is_forward else back[number - 1] if number else deque()
            if not turn.is_forward and number == stages - 1:
                comes = deque([turn.micro_batch])
            ends_here = turn.is_forward and number == stages - 1
            if not comes or len(leaves) > 1 and not ends_here:
                continue
            assert comes.popleft() == turn.micro_batch
            leaves.append(turn.micro_batch)
            held[number] += 1 if turn.is_forward else -1
            most[number] = max(most[number], held[number])
            turns.popleft()
            moved = True
    assert not any(waiting) and held == [0] * stages
    assert most == [stage.count_waiting(micro_batches) for stage in stages_of(stages)]


def test_a_single_stage_takes_turns():
    turns = order_turns(Stage(0, 1, range(4)), 2)
    assert [(turn.is_forward, turn.micro_batch) for turn in turns] == [(True, 0), (False, 0), (True, 1), (False, 1)]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (PP2, [4, 4]),
        (f"{PP2} --decoder-first-pipeline-num-layers 3", [3, 5]),
        ("--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 2", [2, 2, 2, 2]),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            [1, 2, 2, 3],
        ),
    ],
)
def test_layers_of_stages(words, counts):
    world = World(size=4, local_size=4)
    plan = plan_of(flags(f"--num-layers 8 {words}"), world)
    assert count_stage_layers(plan.args.parallel, 8) == counts
    stages = [one.stage for one in plan_stages(plan)]
    assert [len(stage.layers) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage.layers] == list(range(8))


def test_a_rank_is_slow_beside_those_of_its_stage():
    """The stage with the loss takes longer, and nobody is to blame."""
    times, steps, stages = [10.0, 10.0, 20.0, 20.5], [100.0] * 4, [0, 0, 1, 1]
    assert slowest_rank([10.0, 10.0, 10.0, 20.0], steps) == (10.0, 3)
    assert slowest_rank(times, steps, stages) is None
    assert slowest_rank([10.0, 14.0, 20.0, 20.0], steps, stages) == (4.0, 1)


@pytest.mark.parametrize("data_is_outermost", [False, True])
def test_every_rank_has_one_place(data_is_outermost):
    layout = Layout(2, 3, 2, 4, data_is_outermost=data_is_outermost)
    places = [layout.locate(rank) for rank in range(48)]
    found = [layout.find_rank(p.tensor_rank, p.context_rank, p.data_rank, p.pipeline_rank) for p in places]
    assert found == list(range(48))
    neighbors = places[6].pipeline_rank == 1 if data_is_outermost else places[6].data_rank == 1
    assert neighbors and places[47].pipeline_rank == 3  # the last rank has the loss, which it prints


@pytest.mark.parametrize(
    "tensor", [pytest.param("", marks=pytest.mark.slow), "--tensor-model-parallel-size 2 --sequence-parallel"]
)
def test_what_stages_exchange(tmp_path, tensor):
    """Hidden states onward and their gradients back, once per micro-batch; of a tied embedding the gradient, once per step."""
    words = f"{PP2} {tensor} --hidden-size 64 --fp16 --make-vocab-size-divisible-by 32 --global-batch-size 8"
    ranks = 4 if tensor else 2
    outputs = on_ranks("test_parallel_layouts:measure", tmp_path, json.dumps(flags(words)), ranks=ranks)
    for rank, output in enumerate(outputs):
        *_, sent, calls = json.loads(output.splitlines()[-1])
        share = 2 if tensor else 1
        assert sent["send"] == 8 * (2 * 16 * 64 // share) and sent["recv_"] == sent["send"], rank
        assert calls["send"] == calls["recv_"] == 8
        if not tensor:
            embedding, norm = 2 * 128 * 64, 4
            assert sent["allreduce_"] == embedding + norm
