"""Ranks that share out or split the model are one rank: the same losses, the same checkpoints, less memory, no more bytes than needed."""

import contextlib
import io
import itertools
import json
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from layout_table import (
    BUBBLE,
    CHUNKS,
    CP2,
    FEWER_BATCHES,
    LAYOUTS,
    LLAMA,
    PP2,
    QUICK,
    SCALE,
    SP,
    TP2,
    TRAIN,
    ZERO1,
    ZERO3,
    ask_ranks,
    build_rank,
    check_case,
    measure_traffic,
    run_cases,
)
from support.launch import (
    alone,
    build_bare,
    checkpoint,
    flags,
    losses,
    on_ranks,
    plan_of,
    same,
    train,
    train_all,
)
from support.slow_cases import slowly

from megatron_lite.analysis.memory.read import read_snapshot
from megatron_lite.config.layout import Sharding, whole_part
from megatron_lite.config.world import World
from megatron_lite.model.attention import Scope
from megatron_lite.model.gpt import GPT
from megatron_lite.parallel.groups import make_groups
from megatron_lite.rehearsal import rehearse
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import BatchMaker, TrainingStep

CPU = torch.device("cpu")
ONE_GROUP = "--group-query-attention --num-query-groups 1"
# each goes on from the one before; the last one's end is an uninterrupted run's
RING = [
    "zero1, 2",
    "tp2, sp, pp2",
    "cp2",
    "tp4, sp",
    "pp4",
    "zero3, 2 x 2",
    "pp2, chunks, zero1",
    "tp2, sp, zero3",
    "alone",
    "cp2, pp2",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("sharded"), QUICK, FEWER_BATCHES)


@pytest.mark.parametrize(("model", "layout"), QUICK)
def test_all_ranks_are_one(runs, model, layout):
    check_case(runs, model, layout)


# --- checkpoints know no layout


def hand_on(folder: Path, words: str, ring: list[str]):
    """One iteration on each layout of `ring`, each going on from the one before."""
    (folder / "alone").mkdir(parents=True)
    for layout in ring:
        layout_words, ranks = LAYOUTS.get(layout, ("", 1))
        argv = flags(
            TRAIN,
            words,
            layout_words,
            "--train-iters 10 --exit-interval 1 --save-interval 1 --load",
            folder / "kept",
            "--save",
            folder / "kept",
        )
        if ranks == 1:
            with alone(), contextlib.redirect_stdout(io.StringIO()):
                train(argv, folder / "run")
        else:
            (folder / "argv.json").write_text(json.dumps({"run": argv}))
            on_ranks(train_all, folder, str(folder / "argv.json"), ranks=ranks)


@pytest.mark.parametrize(
    "words", [pytest.param("", marks=pytest.mark.slow), f"--fp16 {SCALE} --num-layers 2"], ids=["fp32", "fp16"]
)
def test_each_layout_goes_on_from_another(tmp_path, words):
    ring = ["zero1, 2", "tp2, sp", "alone", "zero3, 2"]
    hand_on(tmp_path, words, ring)
    check_ring(tmp_path, words, len(ring))


@pytest.mark.slow
def test_a_ring_of_layouts(tmp_path):
    hand_on(tmp_path, "", RING)
    check_ring(tmp_path, "", len(RING))


def check_ring(folder: Path, words: str, length: int):
    with alone(), contextlib.redirect_stdout(io.StringIO()):
        train(
            flags(
                TRAIN,
                words,
                "--save",
                folder / "whole",
                f"--train-iters 10 --exit-interval {length} --save-interval {length}",
            ),
            folder / "alone",
        )
    whole, handed_on = checkpoint(folder / "whole", length), checkpoint(folder / "kept", length)
    # measured in the ninth of ten losses, each of another layout: 2.9e-6, six units in the last place
    within = 5e-4 if words else 5e-6
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=0, abs=within)
    names = [name for name in whole if name != "record" and not name.startswith("random.")]
    assert not [n for n in names if not torch.allclose(whole[n].float(), handed_on[n].float(), atol=0.02)]


def load_and_save(world, argv: str):
    """For on_ranks: what is loaded from --load is saved again, before any step."""
    plan, progress = plan_of(json.loads(argv), world), Progress()
    with Checkpoints(plan, *build_rank(plan), CPU) as checkpoints:
        checkpoints.load(progress)
        checkpoints.save(progress)


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ("--async-save", ZERO3),
        ("--ckpt-format torch", ZERO1),
        ("", f"{TP2} {SP}"),
        *slowly(("", ZERO1), ("--ckpt-format torch", TP2), ("", PP2)),
        *slowly(("", f"{SP} --tensor-model-parallel-size 4"), ("--ckpt-format torch", PP2)),
        *slowly(
            *itertools.product(
                ("", "--ckpt-format torch"), (f"{TP2} {ZERO1}", f"{PP2} {TP2} {SP}", CHUNKS, f"{PP2} {ZERO1}")
            )
        ),
    ],
)
def test_what_is_loaded_and_saved_again_is_the_same(saved, tmp_path, words, layout):
    argv = flags(TRAIN, f"{LLAMA} --bf16", words, layout, "--load", saved, "--save", tmp_path / "again")
    splits = [word for word in layout.split() if word in f"{TP2} {PP2} {ZERO1} {ZERO3}"]
    ranks = 4 if len([word for word in splits if word.startswith("--")]) > 1 or "4" in layout else 2
    on_ranks(load_and_save, tmp_path, json.dumps(argv), ranks=ranks)
    first, again = checkpoint(saved, 2), checkpoint(tmp_path / "again", 2)
    names = [name for name in first if name != "record" and not name.startswith("random.")]
    assert len(names) > 50 and all(same(first[name], again[name]) for name in names)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps of one rank."""
    folder = tmp_path_factory.mktemp("saved")
    with alone(), contextlib.redirect_stdout(io.StringIO()):
        train(flags(TRAIN, f"{LLAMA} --bf16 --exit-interval 2", "--save", folder / "kept"), folder)
    return folder / "kept"


# --- what travels, and what is held


@pytest.mark.parametrize("layout", [ZERO1, ZERO3])
def test_bytes(tmp_path, layout):
    """Two micro-batches of two layers. ZeRO-1: 4 bytes per parameter reduce-scattered, 2 gathered. ZeRO-3: 4 per micro-batch,
    and in each a layer is gathered twice."""
    argv = flags(f"--hidden-size 128 --fp16 --accumulate-allreduce-grads-in-fp32 {layout}")
    for answer in ask_ranks(measure_traffic, tmp_path, json.dumps(argv)):
        layer, number, largest, built, weights, states, sent, _ = answer
        # a rank's rows, and one parameter at a time whole, its rows rounded
        assert built <= 4 * number / 2 + 4 * largest + 2 * largest / 2 + 512 * 100
        assert weights == 4 * number / 2 and states == 2 * weights
        again = 1 if layout == ZERO1 else 2
        gathered = 2 * number if layout == ZERO1 else 2 * (2 * number + 2 * 2 * layer)
        assert sent == {"reduce-scatter": 4 * number * again, "all-gather": gathered, "all-reduce": 4}


@pytest.mark.parametrize("sequence_parallel", [SP, pytest.param("", marks=pytest.mark.slow)])
def test_what_split_layers_exchange(tmp_path, sequence_parallel):
    """In fp16, of two micro-batches: hidden states, forward and backward, twice per layer and once each by embedding and loss; of
    each token three numbers for the loss; per step the gradients of what all ranks hold, and the norm."""
    argv = flags(f"--hidden-size 64 --fp16 {TP2} {sequence_parallel} --make-vocab-size-divisible-by 32")
    for *_, sent, calls in ask_ranks(measure_traffic, tmp_path, json.dumps(argv)):
        hidden, layers, micro_batches = 2 * 16 * 64, 2, 4
        loss, norm, partial = 12 * 16 * micro_batches, 4, 0
        if sequence_parallel:
            each = (4 * layers + 2) * micro_batches
            # what columns were computed from is gathered again for their weights
            kinds = {"all-gather": each + (2 * layers + 1) * micro_batches, "reduce-scatter": each}
            partial = 2 * (layers * 6 + 2 + 16) * 64  # norms, biases after a sum, positions
        else:  # the embedding's and the loss's in one direction only
            kinds = {"all-reduce": (4 * layers + 2) * micro_batches}
        assert {kind: calls[f"{kind} of {hidden}"] for kind in kinds} == kinds
        expected = Counter({kind: times * hidden for kind, times in kinds.items()})
        assert sent == expected + Counter({"all-reduce": loss + norm + partial})


def draw(world, argv: str):
    """For on_ranks: prints what dropout left of the embedding's hidden states and of attention."""
    plan = plan_of(json.loads(argv), world)
    model = build_bare(plan)
    torch.manual_seed(7 + (world.rank if plan.layout.sequence_parallel else 0))
    ids = torch.arange(plan.shape.seq_length)[None]
    hidden = model.embedding(ids, ids)
    attend = model.decoder.layers[0].self_attention.attend.function
    of_layers = []
    for _ in range(2):
        q = torch.zeros(1, 2, 16, 8)
        of_layers.append(zlib.crc32(attend(q, q, torch.ones_like(q), Scope(), 0.5, 1).numpy().tobytes()))
    print(json.dumps([zlib.crc32((hidden == 0).numpy().tobytes()), *of_layers]))


@pytest.mark.parametrize("sequence_parallel", [SP, ""])
def test_ranks_drop_alike_what_all_hold_and_their_own_apart(tmp_path, sequence_parallel):
    argv = json.dumps(flags(f"{TP2} {sequence_parallel} --hidden-dropout 0.5 --attention-dropout 0.5"))
    runs = [ask_ranks(draw, tmp_path, argv) for _ in range(2)]
    (hidden, *heads), (others_hidden, *others_heads) = runs[0]
    assert runs[0] == runs[1]
    assert (hidden == others_hidden) == (not sequence_parallel)
    assert len({*heads, *others_heads}) == 4  # of two ranks and two layers


@pytest.mark.parametrize(
    "words",
    [
        f"{TP2} {SP}",
        *slowly(
            (f"{ZERO1} --bf16",),
            (f"{PP2} --bf16",),
            (ZERO3,),
            (f"{ZERO3} --fp16",),
            (TP2,),
            (f"{TP2} --fp16",),
            (f"{TP2} {SP} --bf16",),
            (PP2,),
        ),
        *slowly((f"{CHUNKS} --bf16",), (f"{TP2} {ONE_GROUP}",), (f"{PP2} {BUBBLE}",)),
    ],
)
def test_the_rehearsed_peak_is_the_recorded_one(tmp_path, words):
    argv = flags(
        words, "--make-vocab-size-divisible-by 32 --train-iters 3 --num-layers 4 --hidden-size 64 --record-memory-history --no-report",
        "--profile-step-start 0 --profile-step-end 3 --memory-snapshot-path", tmp_path / "memory.pickle",
    )  # fmt: skip
    (tmp_path / "argv.json").write_text(json.dumps({"run": argv}))
    on_ranks(train_all, tmp_path, str(tmp_path / "argv.json"))
    recorded, expected = read_snapshot(tmp_path / "memory.pickle"), rehearse(plan_of(argv, World(0, 2, 0, 2)))
    # the loop's own scalars, which the rehearsal has none of, and what gloo's threads have not let go of yet
    assert 0 <= recorded.peak_bytes - expected.allocated_peak_bytes <= 0.05 * recorded.peak_bytes
    found = {held.category: held.num_bytes for held in recorded.held}
    for kind in ("moments", "master weights"):
        assert abs(found.get(kind, 0) - expected.categories.get(kind, 0)) <= 1024


# --- an overflow anywhere, and mistakes


def overflow(world):
    """For on_ranks: an Inf in one rank's loss."""
    plan = plan_of(flags(f"--fp16 {SCALE} {ZERO1}"), world)
    step = TrainingStep(plan, *build_rank(plan), BatchMaker(plan.args.data, plan.layout, CPU, None))
    batches = iter(lambda: torch.randint(127, (1, plan.shape.seq_length + 1)), None)
    forward, skipped = GPT.forward, []
    for number in range(3):
        scale = float("inf") if number == 1 and world.rank == 1 else 1.0
        GPT.forward = lambda *inputs, scale=scale: forward(*inputs) * scale
        skipped.append(bool(step(batches, 0, lambda phase: contextlib.nullcontext()).update.skipped))
    print(json.dumps(skipped))


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path):
    assert ask_ranks(overflow, tmp_path) == [[False, True, False]] * 2


def limits(world, argv: str):
    """For on_ranks: prints the time limits of all groups' operations, in seconds."""
    plan = plan_of(json.loads(argv), world)
    made = make_groups(plan, CPU)
    groups = [made.mesh[name].get_group() for name in made.mesh.mesh_dim_names] + [made.context.whole]
    print(json.dumps([group._get_backend(CPU).options._timeout.total_seconds() for group in groups]))


def test_every_groups_operations_have_the_flags_limit(tmp_path):
    argv = json.dumps(flags(f"{TP2} {CP2} --distributed-timeout-minutes 3"))
    assert ask_ranks(limits, tmp_path, argv, ranks=4) == [[180.0] * 3] * 4


def test_rows():
    def rows(index: int, shape: tuple[int, ...]):
        return Sharding(4, index, False).find_rows(whole_part(shape))

    assert [rows(index, (10, 3)).blocks[0].offsets[0] for index in range(4)] == [0, 3, 6, 9]
    assert [rows(index, (10, 3)).shape for index in range(4)] == [(3, 3), (3, 3), (3, 3), (1, 3)]
    assert [rows(index, (2,)).shape for index in range(4)] == [(1,), (1,), (0,), (0,)]
