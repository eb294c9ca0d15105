"""Every rule about flags: a command line that breaks only this one, and the one line that answers it."""

import random

import pytest
from command_lines import GOOD, REPO, argv, mistakes, plan, yields_missed
from rule_cases import BY_WORLD, FINE, FOUR_RANKS, MODEL, ONE_GPU, OPTIMIZER, RUN, TRAINING, TWO_LINES

from megatron_lite.config.args import Args
from megatron_lite.config.check import check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import flags_of
from megatron_lite.config.plan import resolve
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError


@pytest.mark.parametrize(("changes", "answer"), [*MODEL, *TRAINING, *OPTIMIZER, *RUN])
def test_a_broken_rule_is_one_line(changes, answer):
    said = mistakes(changes)
    if "nothing" in changes:  # the missing file is told as well
        said = said[:1]
    assert len(said) == 1, said
    assert answer in said[0] and "\n" not in said[0] and said[0].startswith("--")


@pytest.mark.parametrize(("changes", "answers"), TWO_LINES)
def test_a_mistake_with_two_sides_is_told_from_both(changes, answers):
    assert mistakes(changes) == answers


@pytest.mark.parametrize(("changes", "world", "answer"), BY_WORLD)
def test_rules_about_ranks_and_gpus(changes, world, answer):
    said = mistakes(changes, world)
    assert len(said) == 1 and answer in said[0], said


@pytest.mark.parametrize("changes", FINE)
def test_what_is_allowed_passes(changes):
    assert mistakes(changes) == []


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ("--attention-backend flash --bf16", ONE_GPU),
        ("--attention-backend fused --fp16 --reset-attention-mask", ONE_GPU),
        ("--distributed-backend nccl", ONE_GPU),
        ("--distributed-backend gloo", ONE_GPU),
        ("--use-pytorch-profiler", World(under_nsys=True)),
        ("--profile", World(gpus=1, under_nsys=True)),
        ("--profile --profile-ranks 3 0", FOUR_RANKS),
        ("", World(size=4, local_size=4, gpus=4)),
    ],
)
def test_what_this_world_allows_passes(changes, world):
    assert mistakes(changes, world) == []


def test_no_rule_is_left_out_here():
    def everything():
        for changes, _ in [*MODEL, *TRAINING, *OPTIMIZER, *RUN, *TWO_LINES]:
            mistakes(changes)
        for changes, world, _ in BY_WORLD:
            mistakes(changes, world)

    rules = [path for path in (REPO / "megatron_lite/config/rules").glob("*.py") if path.name != "machine.py"]
    assert yields_missed(rules, everything) == []


def extremes(flag):
    if flag.is_switch:
        return [[]]
    if flag.choices:
        return [[choice] for choice in flag.choices]
    values = {int: ["-1", "0", "1", "3", "1000003"], float: ["-1", "0", "1e-30", "0.5", "1", "1e30"], str: ["nothing"]}
    return [[value] * (3 if flag.field == "rampup_batch_size" else 1) for value in values[flag.kind]]


def test_no_combination_of_extremes_escapes_with_another_error():
    """500 random command lines: each is refused in lines, or has a plan."""
    rng, knobs = random.Random(5), list(flags_of(Args))
    passed = 0
    for _ in range(500):
        words = [
            word
            for flag in rng.sample(knobs, rng.randint(1, 4))
            for word in (flag.spelling, *rng.choice(extremes(flag)))
        ]
        world = rng.choice([World(), FOUR_RANKS, ONE_GPU])
        line = read_command_line(argv(words))
        try:
            check(line, world)
            resolve(line.args, world, 100)
            passed += 1
        except ConfigError as error:
            assert error.lines and all(text.strip() for text in error.lines)
    assert 25 < passed < 475


def test_rules_that_need_the_vocabulary():
    with pytest.raises(
        ConfigError, match="^--padded-vocab-size 99 is smaller than the vocabulary of 100; raise or drop it"
    ):
        plan("--padded-vocab-size 99")
    with pytest.raises(ConfigError, match="^--train-samples 7 is less than one global batch of 8; raise it"):
        plan("!--train-iters --train-samples 7")


def test_good_needs_all_its_flags():
    for name in sorted(set(GOOD) - {"--global-batch-size"}):
        assert mistakes(f"!{name}"), name
