"""Every rule about flags: a command line that breaks only this one, and the one line that answers it."""

import dataclasses
import random
import re

import pytest
from support.command_lines import argv, mistakes, yields_missed
from support.paths import REPO
from support.rule_cases import BROKEN, BY_WORLD, FINE, FOUR_RANKS, ONE_GPU, SAID_OF_ANOTHER, TWO_LINES
from support.wording import wording

from megatron_lite.config.args import Args
from megatron_lite.config.check import RULES_WITHOUT_FILES, check
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import list_flags
from megatron_lite.config.plan import resolve
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError


def test_a_broken_rule_is_one_line_that_names_the_flag_and_the_remedy():
    for changes in BROKEN:
        said = mistakes(changes)
        if "nothing" in changes:  # the missing file is told as well
            said = said[:1]
        given = {word.lstrip("!").partition("=")[0] for word in changes.split() if "--" in word}
        assert len(said) == 1 and "\n" not in said[0], (changes, said)
        first = re.match(r"--[\w-]+", said[0])[0]
        assert first in given or SAID_OF_ANOTHER[changes] == first, (changes, said)
        assert re.search(r"[;:] |must|needs|is refused", said[0]) and said[0].endswith("."), said


RANGED = [flag for flag in list_flags(Args) if flag.must_be]


@pytest.mark.parametrize("flag", RANGED, ids=lambda flag: flag.spelling)
def test_a_number_out_of_its_range_is_one_line(flag):
    """Just outside of each bound; inside it nothing is said of the number itself."""
    for bound in ("at_least", "above", "at_most", "below"):
        limit = getattr(flag.must_be, bound)
        if limit is None:
            continue
        step = 1 if flag.kind is int or limit > 1 else 0.5
        outside, inside = {
            "at_least": (limit - step, limit),
            "above": (limit, limit + step),
            "at_most": (limit + step, limit),
            "below": (limit, limit - step),
        }[bound]
        wrong = f"{flag.spelling} {outside:.10g}: must be {flag.must_be.describe()}"
        other = "!--train-iters " if flag.field == "train_samples" else ""
        said = mistakes(f"{other}{flag.spelling} {flag.kind(outside)!r}")
        assert len(said) == 1 and said[0].startswith(wrong), said
        said = mistakes(f"{flag.spelling} {flag.kind(inside)!r}")
        assert not any(": must be" in line and flag.must_be.describe() in line for line in said)


def test_the_ranges_are_those_of_megatron():
    ranges = {flag.spelling: flag.must_be.describe().partition(";")[0] for flag in RANGED}
    assert len(RANGED) == 112
    assert ranges["--num-layers"] == wording("config/at-least-and-at", 1, 100000)
    assert ranges["--seed"] == "at least 0 and below 4294967296"
    assert ranges["--lr"] == ranges["--clip-grad"] == ranges["--weight-decay"] == ranges["--eval-iters"] == "at least 0"
    assert ranges["--hidden-dropout"] == ranges["--adam-beta1"] == "at least 0 and below 1"
    assert ranges["--adam-eps"] == ranges["--norm-epsilon"] == ranges["--min-loss-scale"] == "above 0"


@pytest.mark.parametrize(("changes", "answers"), TWO_LINES.items())
def test_a_mistake_with_two_sides_is_told_from_both(changes, answers):
    assert mistakes(changes) == answers


@pytest.mark.parametrize(("changes", "world", "answer"), BY_WORLD)
def test_rules_about_ranks_and_gpus(changes, world, answer):
    said = mistakes(changes, world)
    assert len(said) == 1 and answer in said[0], said


def test_what_is_allowed_passes():
    for changes, world in (
        *((changes, World()) for changes in ("", *FINE)),
        ("--attention-backend flash --bf16", ONE_GPU),
        ("--attention-backend fused --fp16 --reset-attention-mask", ONE_GPU),
        ("--attention-backend flash --fp16 --reset-attention-mask --window-size 3,0", ONE_GPU),
        ("--context-parallel-size 2 --reset-attention-mask --window-size 3,0 --global-batch-size 8", FOUR_RANKS),
        ("--context-parallel-size 2 --dataloader-inter-document-masking --global-batch-size 8", FOUR_RANKS),
        ("--distributed-backend nccl", ONE_GPU),
        ("--distributed-backend gloo", ONE_GPU),
        ("--use-pytorch-profiler", World(under_nsys=True)),
        ("--profile", World(gpus=1, under_nsys=True)),
        ("--profile --profile-ranks 3 0", FOUR_RANKS),
        ("", World(size=4, local_size=4, gpus=4)),
    ):
        assert mistakes(changes, world) == [], changes


def test_no_rule_is_left_out_here():
    def everything():
        for changes in [*BROKEN, *TWO_LINES]:
            mistakes(changes)
        for changes, world, _ in BY_WORLD:
            mistakes(changes, world)

    rules = [path for path in (REPO / "megatron_lite/config/rules").glob("*.py") if path.name != "files.py"]
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
    rng, knobs = random.Random(5), list(list_flags(Args))
    passed = 0
    for _ in range(500):
        chosen = rng.sample(knobs, rng.randint(1, 4))
        words = [word for flag in chosen for word in (flag.spelling, *rng.choice(extremes(flag)))]
        world = rng.choice([World(), FOUR_RANKS, ONE_GPU])
        line = read_command_line(argv(words))
        try:
            check(line, world)
            resolve(line.args, world, 100)
            passed += 1
        except ConfigError as error:
            assert error.lines and all(text.strip() for text in error.lines)
    assert 25 < passed < 475


WHOLE = [-(2**63) - 1, -1, 0, 2**31, 2**53, 2**53 + 1, 2**63]
REAL = [-1e308, -1.0, 0.0, 5e-324, 1e38, 1e39]
NUMERIC = [flag for flag in list_flags(Args) if flag.kind in (int, float)]


def numbers_of(value) -> list:
    """All numbers within a plan."""
    if dataclasses.is_dataclass(value):
        return [number for field in dataclasses.fields(value) for number in numbers_of(getattr(value, field.name))]
    if isinstance(value, (tuple, frozenset, range)):
        parts = (value.start, value.stop) if isinstance(value, range) else value
        return [number for one in parts for number in numbers_of(one)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.parametrize("flag", NUMERIC, ids=lambda flag: flag.spelling)
def test_the_extremes_of_every_numeric_flag_are_one_line_or_fit(flag):
    """One line that names the flag; or what follows from it has 63 bits, is finite in fp32, and makes no tensor beyond memory's bounds."""
    passed = []
    for value in WHOLE if flag.kind is int else REAL:
        words = [repr(value)] * (3 if flag.field == "rampup_batch_size" else 1)
        line = read_command_line(argv([flag.spelling, *words]))
        try:
            check(line, World(), RULES_WITHOUT_FILES)
            found = resolve(line.args, World(), line.args.data.vocab_size + 1)
        except ConfigError as error:
            assert all(text.startswith("--") and "\n" not in text for text in error.lines)
            assert any(flag.spelling in text for text in error.lines), error.lines
            continue
        passed.append(value)
        for number in numbers_of(dataclasses.replace(found, args=None)):
            assert abs(number) < (2**63 if isinstance(number, int) else 3.5e38), (value, number)
        assert found.shape.padded_vocab_size * found.shape.hidden_size < 2**59
    most = 2**53 if flag.kind is int else 3.5e38
    assert all(not value or 1e-38 <= abs(value) <= most for value in passed)
