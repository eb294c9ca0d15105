"""Flags that are found are fed back: what they promise is what the plan made of them needs."""

import dataclasses
import math
from unittest.mock import Mock

import pytest
from support.command_lines import argv

from megatron_lite.config.check import RULES_WITHOUT_FILES, check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.formats.hardware import Processor
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.memory import measure_peak, predict_memory
from megatron_lite.planner.what_if import (
    HALVED_EVERY,
    NO_RECOMPUTE,
    Variant,
    build_variant,
    find_fewest_recomputed,
    fit,
    what_if,
)
from megatron_lite.units import GIB

MEDIUM = ("--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
          "--micro-batch-size 4 --global-batch-size 16 --vocab-size 50256")  # fmt: skip
LONG = "--seq-length 32768 --max-position-embeddings 32768"
GPU = World(gpus=1)
H200 = find_processor("H200")


def plan_of(words: list[str], world: World = GPU) -> Plan:
    line = read_command_line(words)
    check(line, world, RULES_WITHOUT_FILES)
    return resolve(line.args, world, line.args.data.vocab_size + 1)


def plan(changes: str = "", world: World = GPU) -> Plan:
    return plan_of(argv(f"{MEDIUM} {changes}"), world)


def pasted(changes: str, one: Variant, world: World = GPU) -> Plan:
    """The plan of the command line that a user would make of the advice."""
    words, dropping = [], False
    for word in argv(f"{MEDIUM} {changes}"):
        dropping = word in one.drop if word.startswith("--") else dropping
        words += [] if dropping else [word]
    return plan_of([*words, *(word for flag in one.add for word in flag.split())], world)


def with_memory(gib: float, processor: Processor = H200) -> Processor:
    return dataclasses.replace(processor, memory_gib=gib)


@pytest.mark.parametrize("changes", ["", "--fp16", "--bf16", "--fp16 --accumulate-allreduce-grads-in-fp32",
                                     "--bf16 --recompute-granularity full --recompute-method block --recompute-num-layers 3",
                                     "--attention-backend unfused --optimizer sgd"])  # fmt: skip
def test_every_what_if_can_be_pasted(changes):
    now = plan(changes)
    found = what_if(now, H200)
    assert len(found) >= 7
    for one in found:
        again = pasted(changes, one)
        assert again == one.plan != now
        assert predict_memory(again, H200) == one.memory
        assert one.words and one.time is not None


def test_what_if_shows_the_usual_changes():
    words = [one.words for one in what_if(plan("--fp16"))]
    assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in words
    assert {"--micro-batch-size 2", "--micro-batch-size 8", "--bf16 instead of --fp16", "without --fp16 (fp32)",
            "--accumulate-allreduce-grads-in-fp32", "--optimizer sgd",
            "--hidden-dropout 0 --attention-dropout 0"} <= set(words)  # fmt: skip
    # SDPA holds no scores: there is nothing for selective recomputation to save
    assert "--recompute-granularity selective" not in words
    stored = what_if(plan("--fp16 --attention-backend unfused"))
    assert "--recompute-granularity selective" in [one.words for one in stored]


def test_what_the_trainer_would_refuse_is_not_offered_and_the_batch_stays():
    assert "--micro-batch-size 8" not in [one.words for one in what_if(plan("--global-batch-size 4"))]
    assert build_variant(plan(), None, micro_batch_size=3) is None
    assert build_variant(plan("--attention-backend flash --bf16"), None, fp16=False, bf16=False) is None
    # also where it was not given
    words = argv(f"{MEDIUM} !--global-batch-size".replace("--global-batch-size 16", ""))
    one = build_variant(plan_of(words), None, micro_batch_size=2)
    assert one.plan.batch.final == 4 and set(one.add) == {"--global-batch-size 4", "--micro-batch-size 2"}
    four = World(size=4, local_size=4, gpus=4)  # ranks share it
    assert fit(plan("--fp16", four), with_memory(1000.0)).found.plan.args.training.micro_batch_size == 4


@pytest.mark.parametrize("changes", ["--fp16", "--bf16", "", "--bf16 --attention-backend unfused"])
@pytest.mark.parametrize("gib", [9.0, 12.0, 16.0, 24.0, 80.0])
def test_what_is_found_fits_and_can_be_pasted(changes, gib):
    found = fit(plan(changes), with_memory(gib), 0.1)
    assert found.budget_bytes == int(gib * GIB * 0.9)
    if found.found is None:
        assert found.least.peak_bytes > found.budget_bytes
        return
    again = pasted(changes, found.found)
    assert predict_memory(again, H200).peak.num_bytes == found.found.peak_bytes <= found.budget_bytes
    assert again.batch == plan(changes).batch


def test_the_largest_micro_batch_that_divides_the_batch():
    """Each larger divisor, with the same recomputation, is too large."""
    found = fit(plan("--fp16"), with_memory(24.0)).found
    larger = [build_variant(plan("--fp16"), None, micro_batch_size=size) for size in (4, 8, 16)
              if size > found.plan.args.training.micro_batch_size]  # fmt: skip
    assert larger and all(one.peak_bytes > 24.0 * GIB * 0.92 for one in larger)
    assert found.plan.args.model.recompute_granularity is None


def test_recomputation_is_as_little_as_possible():
    """A layer less would not fit."""
    changes = "--fp16 --seq-length 16384 --max-position-embeddings 16384"
    found = fit(plan(changes), with_memory(14.0)).found
    model = found.plan.args.model
    assert (model.recompute_method, found.plan.args.training.micro_batch_size) == ("block", 1)
    assert 1 < model.recompute_num_layers < 24
    fewer = build_variant(found.plan, None, recompute_num_layers=model.recompute_num_layers - 1)
    assert fewer.peak_bytes > 14.0 * GIB * 0.92
    unneeded = "--fp16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    found = fit(plan(unneeded), H200)
    assert found.fits and "--recompute-granularity" in found.found.drop
    assert all(getattr(found.found.plan.args.model, name) is None for name in NO_RECOMPUTE)


@pytest.mark.parametrize(
    ("changes", "gib", "remedy"),
    [
        (LONG, 14.0, "--bf16"),
        (f"--bf16 {LONG}", 12.0, "--grad-reduce-in-bf16"),
        ("--fp16 --seq-length 131072 --max-position-embeddings 131072", 20.0, "--seq-length"),
    ],
)
def test_an_impossible_fit_says_the_smallest_change_that_fits(changes, gib, remedy):
    found = fit(plan(changes), with_memory(gib))
    assert found.found is None and found.least.peak_bytes > found.budget_bytes
    assert found.remedy.peak_bytes <= found.budget_bytes
    assert any(flag.startswith(remedy) for flag in found.remedy.add), found.remedy.words
    assert predict_memory(pasted(changes, found.remedy), H200).peak.num_bytes == found.remedy.peak_bytes


@pytest.mark.parametrize(("changes", "gib"), [("--hidden-size 16384", 4.0), ("--fp16", 5.0)])
def test_where_the_model_is_too_large_no_other_model_is_proposed(changes, gib):
    found = fit(plan(changes), with_memory(gib))
    assert (found.found, found.remedy) == (None, None) and found.least.peak_bytes > found.budget_bytes

    # a GPU without bf16 is offered fp16
    found = fit(plan(LONG), with_memory(14.0, find_processor("V100")))
    assert "--fp16" in found.remedy.add


@pytest.mark.parametrize(("gib", "added"), [
    (14, ()), (13, ("--use-distributed-optimizer",)), (6, ("--use-torch-fsdp2",)),
    (4, ("--recompute-granularity full", "--use-torch-fsdp2")),
])  # fmt: skip
def test_ranks_share_out_the_model_before_anything_is_computed_twice(gib, added):
    world = World(size=4, local_size=4, gpus=4)
    now = plan("--num-layers 24 --hidden-size 1280 --num-attention-heads 20 --bf16 --micro-batch-size 1", world)
    found = fit(now, with_memory(gib)).found
    assert (
        found.peak_bytes <= gib * GIB
        and pasted("--hidden-size 1280 --num-attention-heads 20 --bf16 --micro-batch-size 1", found, world)
        == found.plan
    )
    assert set(added) <= set(found.add) and ("--recompute-granularity full" in found.add) == (len(added) == 2), (
        found.add
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 80])
@pytest.mark.parametrize("bend", [0, 1, 5, 60])
def test_the_fewest_recomputed_layers_are_found_with_few_predictions(layers, bend):
    """Peaks fall evenly, or more slowly from some layer on, or not at all from there."""
    for slope_after in (10, 3, 0):
        peaks = [1000 - 10 * min(number, bend) - slope_after * max(number - bend, 0) for number in range(layers + 1)]
        for budget in range(peaks[-1], peaks[0]):
            measure = Mock(side_effect=peaks.__getitem__)
            number = find_fewest_recomputed(layers, measure, budget)
            asked = [call.args[0] for call in measure.call_args_list]
            assert peaks[number] <= budget < peaks[number - 1]
            # both ends, the answer and the one below it, where memory is linear
            assert slope_after != 10 or len(asked) <= 4
            assert len(asked) <= 2 + HALVED_EVERY * math.ceil(math.log2(layers)) and len(set(asked)) == len(asked)


@pytest.mark.parametrize("changes", ["", "--fp16", "--bf16 --use-torch-fsdp2", "--optimizer sgd --attention-backend unfused",
                                     "--recompute-granularity full --recompute-method block --recompute-num-layers 3"])  # fmt: skip
def test_the_peak_alone_is_that_of_the_moments(changes):
    one = plan(changes, World(size=4, local_size=4, gpus=4))
    assert measure_peak(one, H200) == predict_memory(one, H200).peak.num_bytes


@pytest.mark.parametrize("schedule", ["1F1B", "ZeroBubble --torch-compile none"])
@pytest.mark.parametrize("gib", [0.5, 2.0])
def test_a_pipeline_whose_weights_cannot_be_shared_out_has_an_answer(schedule, gib):
    """Nothing fits, and the trainer refuses sharded weights in a pipeline, a zero-bubble schedule sharded state too."""
    stages = f"--bf16 --pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --micro-batch-size 1"
    world = World(size=4, local_size=4, gpus=4)
    found = fit(plan(stages, world), with_memory(gib))
    assert found.found is None and found.least.peak_bytes > found.budget_bytes
    assert pasted(stages, found.least, world) == found.least.plan
