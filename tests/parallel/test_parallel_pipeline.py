"""Stages of a pipeline: which layers they have, in which order they compute, what they send and how much they hold."""

import itertools
import json

import pytest
from layout_table import ask_ranks, measure_traffic
from support.launch import flags, on_ranks, plan_of, train_without_tables

from megatron_lite.analysis.analyze import analyze
from megatron_lite.config.layout import Layout, count_chunk_layers, count_stage_layers
from megatron_lite.config.plan import plan_stages
from megatron_lite.config.world import World
from megatron_lite.pipeline_schedule import Action, Stage, find_source, order_actions
from megatron_lite.thresholds import slowest_rank

PP2 = "--pipeline-model-parallel-size 2"


def stages_of(number: int, chunks: int = 1, splits_backward: bool = False, group: int = 0) -> list[Stage]:
    layers = [tuple(range(at, at + 1) for at in range(one, number * chunks, number)) for one in range(number)]
    return [Stage(one, number, layers[one], splits_backward, group) for one in range(number)]


class Exchange:
    """What a stage does in its actions, as Pipeline does: it asks for what the next action takes before it computes, and sends when what it
    sent before has been asked for. Each step goes as far as it can."""

    def __init__(self, stage: Stage, micro_batches: int, stages: list["Exchange"]):
        self.stage, self.stages, self.actions = stage, stages, order_actions(stage, micro_batches)
        self.sent, self.asked = {True: [], False: []}, {True: 0, False: 0}  # by direction: forward or not
        self.taken = {True: 0, False: 0}
        self.index, self.computed, self.held, self.most = 0, False, 0, 0

    def step(self) -> bool:
        """Whether it came further."""
        if self.index == len(self.actions):
            return False
        action = self.actions[self.index]
        if action.of_weights:
            assert action._replace(of_weights=False) in self.actions[: self.index]
            self.ask(self.index + 1)
            self.index += 1
            return True
        step = 1 if action.is_forward else -1
        if not self.computed:
            if self.index == 0:
                self.ask(0)
            if self.takes(action):
                sent = self.stages[(self.stage.number - step) % len(self.stages)].sent[action.is_forward]
                if len(sent) == self.taken[action.is_forward]:
                    return False
                moved = action._replace(
                    chunk=action.chunk
                    - step * (action.is_forward and self.stage.is_first or not action.is_forward and self.stage.is_last)
                )
                assert sent[self.taken[action.is_forward]] == moved
                self.taken[action.is_forward] += 1
            self.ask(self.index + 1)
            self.held += step
            self.most = max(self.most, self.held)
            self.computed = True
        if not (self.stage.ends(action.chunk) if action.is_forward else self.stage.starts(action.chunk)):
            receiver = self.stages[(self.stage.number + step) % len(self.stages)]
            if receiver.asked[action.is_forward] < len(self.sent[action.is_forward]) - self.stage.sends_ahead + 1:
                return False
            self.sent[action.is_forward].append(action)
        self.index, self.computed = self.index + 1, False
        return True

    def takes(self, action: Action) -> bool:
        at_end = self.stage.starts(action.chunk) if action.is_forward else self.stage.ends(action.chunk)
        return not (action.of_weights or at_end)

    def ask(self, index: int):
        if index < len(self.actions) and self.takes(self.actions[index]):
            self.asked[self.actions[index].is_forward] += 1


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"),
    [
        *itertools.product((1, 2, 3, 4, 7), (1,), (1, 2, 3, 8)),
        *((stages, chunks, stages * groups) for stages in (2, 3, 4, 8) for chunks in (2, 3, 5) for groups in (1, 2, 5)),
    ],
)
def test_every_order_of_turns_comes_to_its_end(stages, chunks, micro_batches):
    """Each stage takes what others have sent, in the order in which they sent it."""
    ranks: list[Exchange] = []
    ranks += [Exchange(stage, micro_batches, ranks) for stage in stages_of(stages, chunks)]
    while sum(one.step() for one in ranks):
        pass
    for one in ranks:
        assert one.index == 2 * micro_batches * chunks and one.held == 0
        assert one.most == one.stage.count_waiting(micro_batches)
        assert len(set(one.actions)) == len(one.actions)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_groups_of_micro_batches_come_to_their_end(stages, chunks):
    """Those that Megatron-LM takes: no fewer than there are stages, and so is what is left for the last group."""
    for group, micro_batches in itertools.product(range(stages, 3 * stages), range(stages, 6 * stages)):
        if group > micro_batches or 0 < micro_batches % group < stages:
            continue
        ranks: list[Exchange] = []
        ranks += [Exchange(stage, micro_batches, ranks) for stage in stages_of(stages, chunks, group=group)]
        while sum(one.step() for one in ranks):
            pass
        for one in ranks:
            assert one.index == 2 * micro_batches * chunks and one.held == 0
            assert one.most == one.stage.count_waiting(micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), [*itertools.product((2, 3, 4, 8), (1, 2, 3, 8, 21))])
def test_weights_fill_what_stages_would_wait(stages, micro_batches):
    """No stage deadlocks, goes further ahead than 1F1B, or holds more than 1F1B's first; most of the bubble is gone."""
    ranks: list[Exchange] = []
    ranks += [Exchange(stage, micro_batches, ranks) for stage in stages_of(stages, splits_backward=True)]
    while sum(one.step() for one in ranks):
        pass
    for one in ranks:
        assert one.index == 3 * micro_batches == len(set(one.actions)) and one.held == 0
        assert one.most <= one.stage.count_waiting(micro_batches)
        held = list(itertools.accumulate(1 if t.is_forward else -1 if t.of_weights else 0 for t in one.actions))
        assert max(held) <= ranks[0].stage.count_waiting(micro_batches) and held[-1] == 0
    if micro_batches >= stages:
        assert measure_ticks(ranks) <= 3 * micro_batches + stages - 1 + 3  # 1F1B: 3 * (stages - 1)


def measure_ticks(ranks: list[Exchange]) -> int:
    """Until all actions are done, each a tick long."""
    actions, ends, clocks = [list(one.actions) for one in ranks], {}, [0] * len(ranks)
    while any(actions):
        for number, (one, waiting) in enumerate(zip(ranks, actions)):
            while waiting:
                source = find_source(one.stage, waiting[0])
                if source is not None and source not in ends:
                    break
                clocks[number] = ends[number, waiting[0]] = max(clocks[number], ends.get(source, 0)) + 1
                waiting.pop(0)
    return max(clocks)


def test_a_single_stage_takes_turns():
    actions = order_actions(Stage(0, 1, (range(4),)), 2)
    assert [(action.is_forward, action.micro_batch) for action in actions] == [
        (True, 0),
        (False, 0),
        (True, 1),
        (False, 1),
    ]


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


PP4 = "--pipeline-model-parallel-size 4"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


# What Megatron-Core 0.19.0 gives each chunk, by its get_num_layers_to_build and get_transformer_layer_offset.
@pytest.mark.parametrize(
    ("words", "num_layers", "counts"),
    [
        (f"{PP4} {EMBEDDING} {LOSS}", 6, [[1, 2, 2, 1]]),
        (f"{PP4} {LOSS}", 7, [[2, 2, 2, 1]]),
        (f"{PP4} {EMBEDDING}", 7, [[1, 2, 2, 2]]),
        (f"{PP4} {EMBEDDING} {LOSS} --num-virtual-stages-per-pipeline-rank 2", 6, [[0, 1, 1, 1], [1, 1, 1, 0]]),
        (f"{PP4} {EMBEDDING} {LOSS} --num-layers-per-virtual-pipeline-stage 1", 6, [[0, 1, 1, 1], [1, 1, 1, 0]]),
        (f"{PP4} {EMBEDDING} --num-layers-per-virtual-pipeline-stage 2", 15, [[1, 2, 2, 2], [2, 2, 2, 2]]),
        (f"{PP4} --pipeline-model-parallel-layout Et*2|(t|)*2tL", 5, [[2, 1, 1, 1]]),
        (f"{PP2} --pipeline-model-parallel-layout Et*3|(tt|)*6L", 15, [[3, 2], [2, 2], [2, 2], [2, 0]]),
        (f"{PP2} --pipeline-model-parallel-layout E,tt|t,L", 3, [[2, 1]]),
    ],
)
def test_layers_of_chunks(words, num_layers, counts):
    world = World(size=4, local_size=4)
    plan = plan_of(flags(f"--num-layers {num_layers} --global-batch-size 8 {words}"), world)
    assert count_chunk_layers(plan.args.parallel, num_layers) == counts
    stages = [one.stage for one in plan_stages(plan)]
    assert [[len(stage.chunks[chunk]) for stage in stages] for chunk in range(len(counts))] == counts
    in_order = [layer for chunk in range(len(counts)) for stage in stages for layer in stage.chunks[chunk]]
    assert in_order == list(range(num_layers))


def test_a_chunk_without_layers_is_said_to_have_none():
    stage = Stage(0, 2, (range(0), range(3, 5), range(7, 8)))
    assert stage.describe_layers("-") == "none, 4-5, 8-8" and stage.layers == [3, 4, 7]


@pytest.mark.parametrize("sizes", [[[0, 3], [2, 1]], [[3, 1], [0, 2]], [[1, 2, 0], [4, 1, 1], [0, 1, 2]]])
@pytest.mark.parametrize("micro_batches", [3, 6, 63, 66])
def test_a_stage_of_unequal_chunks_is_fullest_when_most_layers_wait(sizes, micro_batches):
    """sizes: of each stage, the layers of its chunks."""
    stages = len(sizes)
    for number, chunks in enumerate(sizes):
        stage = Stage(number, stages, tuple(range(size) for size in chunks))
        count = micro_batches // stages * stages
        held, most = [0] * len(chunks), 0
        for action in order_actions(stage, count):
            held[action.chunk] += 1 if action.is_forward else -1
            most = max(most, sum(map(int.__mul__, held, chunks)))
        found = [sum(map(int.__mul__, others, chunks)) + chunks[one] for one, others in stage.list_fullest(count)]
        assert max(found) == most


def test_a_rank_is_slow_beside_those_of_its_stage():
    """The stage with the loss takes longer, and nobody is to blame."""
    times, steps, stages = [10.0, 10.0, 20.0, 20.5], [100.0] * 4, [0, 0, 1, 1]
    assert slowest_rank([10.0, 10.0, 10.0, 20.0], steps) == (10.0, 3)
    assert slowest_rank(times, steps, stages) is None
    assert slowest_rank([10.0, 14.0, 20.0, 20.0], steps, stages) == (4.0, 1)


@pytest.mark.parametrize("data_is_outermost", [False, True])
def test_every_rank_has_one_place(data_is_outermost):
    layout = Layout(tensor=2, context=3, data=2, pipeline=4, data_is_outermost=data_is_outermost)
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
    answers = ask_ranks(measure_traffic, tmp_path, json.dumps(flags(words)), ranks=ranks)
    for rank, (*_, sent, calls) in enumerate(answers):
        share = 2 if tensor else 1
        num_bytes = 2 * 16 * 64 // share
        assert sent["send"] == 8 * num_bytes and calls[f"send of {num_bytes}"] == 8, rank
        if not tensor:
            embedding, norm = 2 * 128 * 64, 4
            assert sent["all-reduce"] == embedding + norm


@pytest.mark.slow
def test_traces_tell_communication_apart_by_group(tmp_path):
    """4 micro-batches of 2 layers a rank: every layer gathers and sums twice in forward and again in backward."""
    window = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --profile-ranks -1"
    runs = {
        "stages": f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel",
        "sequences": "--context-parallel-size 2 --use-distributed-optimizer",
    }
    common = "--num-layers 4 --global-batch-size 8 --micro-batch-size 2 --train-iters 4"
    scenarios = {name: flags(common, words, window) for name, words in runs.items()}
    (tmp_path / "scenarios.json").write_text(json.dumps(scenarios))
    on_ranks(train_without_tables, tmp_path, str(tmp_path / "scenarios.json"), ranks=4)
    for name, expected in (
        # 2 layers of 4 micro-batches gather and sum twice each way, and gather twice again for weights; embedding, logits, loss besides
        ("stages", {"tensor": 94, "pipeline": 8, "": 3}),
        ("sequences", {"context": 4 * 2 * 2, "data": 5 + 5, "": 1}),
    ):
        ranks = analyze([tmp_path / name]).facts.ranks
        assert {row.group: row.per_step for row in ranks.groups} == expected
        exposed = sum(row.exposed_communication_ms for row in ranks.rows) / 4
        assert 0 < sum(row.exposed_ms for row in ranks.groups) < 1.05 * exposed
        phases = (
            "forward",
            "backward",
            "pipeline_wait",
        )  # stages send what they have computed when the action has ended
        assert all(row.phase in phases for row in ranks.collectives if row.group)
