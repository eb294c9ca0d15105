"""What tune may set, and how a command is written with it."""

import re

import pytest
from support.paths import DOCS
from support.tuned_commands import finding, flag, script, trainer, variable

from megatron_lite.cli.tune import read_tuned_command
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags
from megatron_lite.errors import UserError
from megatron_lite.formats.setting import Setting
from megatron_lite.tune.candidates import list_candidates
from megatron_lite.tune.knobs import NO_KNOBS, LossEffect, Target, read_knobs, read_trainer_knobs

KNOWN = frozenset({"starved-loader"})
SWITCHES = {spelling for flag in list_flags(Args) if flag.is_switch for spelling in flag.spellings}
FLAGS = {spelling for flag in list_flags(Args) for spelling in flag.spellings}
TRAINED = ("--lr", "--bf16", "--fp16", "--global-batch-size", "--seq-length", "--clip-grad", "--grad-reduce-in-bf16")


def test_the_table_names_flags_and_variables_that_exist():
    table = read_trainer_knobs()
    assert not set(TRAINED) & set(table)
    for name, knob in table.items():
        assert name in FLAGS or name.isupper()
        assert knob.losses in (LossEffect.BIT_EQUAL, LossEffect.ROUNDING) and knob.needs
        for target in knob.targets:
            assert target in list(Target) or re.fullmatch(r"x \d+|\d+", target)
        assert (knob.targets == (Target.ON,)) <= (name in SWITCHES or name == "--torch-compile")


def test_the_page_has_the_table():
    page = (DOCS / "tune.md").read_text(encoding="utf-8")
    for knob in read_trainer_knobs().values():
        row = f"| `{knob.name}` | {knob.before} | {' or '.join(knob.targets)} | {knob.needs} | {knob.losses} |"
        assert row in page


@pytest.mark.parametrize(
    ("command", "remedy", "change"),
    [
        (trainer("p", "t", "--num-workers", "0"), [flag("--num-workers", "4")], [flag("--num-workers", "4")]),
        (trainer("p", "t", "--num-workers", "4"), [flag("--num-workers", "4")], None),
        (trainer("p", "t"), [flag("--num-workers")], None),
        (trainer("p", "t", "--micro-batch-size", "2"), [flag("--micro-batch-size")], [flag("--micro-batch-size", "4")]),
        (
            trainer("p", "t", "--micro-batch-size=2"),
            [flag("--micro-batch-size", "9")],
            [flag("--micro-batch-size", "4")],
        ),
        (trainer("p", "t", "--log-interval", "5"), [flag("--log-interval", "100")], [flag("--log-interval", "100")]),
        (trainer("p", "t", "--log-interval", "500"), [flag("--log-interval", "100")], None),
        (trainer("p", "t", "--eval-interval", "3"), [flag("--eval-interval")], [flag("--eval-interval", "30")]),
        (trainer("p", "t"), [flag("--eval-interval")], None),
        (trainer("p", "t", "--log-params-norm"), [flag("--log-params-norm", None)], [flag("--log-params-norm", None)]),
        (trainer("p", "t"), [flag("--log-params-norm", None)], None),
        (trainer("p", "t"), [flag("--async-save")], [flag("--async-save")]),
        (trainer("p", "t", "--async-save"), [flag("--async-save")], None),
        (
            trainer("p", "t"),
            [flag("--manual-gc"), flag("--manual-gc-interval", "100")],
            [flag("--manual-gc"), flag("--manual-gc-interval", "100")],
        ),
        (trainer("p", "t"), [flag("--num-workers", "4"), flag("--lr", "1")], None),
        (script(NCCL_DEBUG="INFO"), [variable("NCCL_DEBUG", None)], [variable("NCCL_DEBUG", None)]),
        (script(), [variable("NCCL_DEBUG", None)], None),
        (script("--num-workers", "0"), [flag("--num-workers", "4")], None),
    ],
)
def test_a_remedy_becomes_a_change(command, remedy, change):
    found = [list(one.change) for one in list_candidates([finding("x", tuple(remedy))], command, (), ())]
    assert found == ([] if change is None else [change])


@pytest.mark.parametrize(
    ("words", "setting", "written"),
    [
        ("--a 1 --b", flag("--a", "2"), "--a 2 --b"),
        ("--a=1 --b", flag("--a", "2"), "--a 2 --b"),
        ("--b", flag("--a", "2"), "--b --a 2"),
        ("--a 1 --b", flag("--a", None), "--b"),
        ("--fast x --b", flag("--fast", None), "x --b"),
        ("x", flag("--fast"), "x --fast"),
        ("--a 1 --b --a 3", flag("--a", "2"), "--b --a 2"),
        ("--a -1 --b", flag("--a", "2"), "--a 2 --b"),
        ("d.w=1 z", Setting(kind="argument", name="d.w", value="2"), "d.w=2 z"),
        ("z", Setting(kind="argument", name="d.w", value="2"), "z d.w=2"),
        ("--a 1", variable("N", "2"), "--a 1"),
    ],
)
def test_a_setting_takes_its_place_in_the_command(words, setting, written):
    command = script(*words.split())
    assert " ".join(command.write_words((setting,))) == f"python train.py {written}".strip()


def test_variables_stand_before_the_command():
    command = script("a b", N="1")
    assert command.write((variable("N", "2 3"),)) == "N='2 3' python train.py 'a b'"
    assert command.write((variable("N", None), variable("M", "1"))) == "env -u N M=1 python train.py 'a b'"
    assert command.get("variable", "N") == "1"


@pytest.mark.parametrize(
    ("words", "first", "is_trainer"),
    [
        ("megatron-lite train --lr 1", 2, True),
        ("python -m megatron_lite --lr 1", 3, True),
        ("torchrun --nproc-per-node 2 -m megatron_lite --lr 1", 5, True),
        ("torchrun --nproc-per-node 2 train.py --lr 1", 4, False),
        ("bash train.sh --lr 1", 4, False),
    ],
)
def test_the_script_is_found(words, first, is_trainer):
    command = read_tuned_command(words.split(), NO_KNOBS)
    assert (command.first_argument, command.is_trainer) == (first, is_trainer)


def test_the_repositorys_own_script_is_the_trainer(tmp_path, repo=DOCS.parent):
    assert read_tuned_command(["python", str(repo / "pretrain_gpt.py"), "--lr", "1"], NO_KNOBS).is_trainer
    other = tmp_path / "pretrain_gpt.py"
    other.write_text("import megatron\n")
    assert not read_tuned_command(["python", str(other), "--lr", "1"], NO_KNOBS).is_trainer


def test_a_file_of_knobs_is_read(tmp_path):
    path = tmp_path / "knobs.yaml"
    path.write_text(
        "short: [--steps, '40']\n"
        "knobs:\n"
        "  - {name: --workers, values: [2, 4], answers: [starved-loader], losses: bit-equal}\n"
        "  - {name: --fused, values: [true], answers: [starved-loader]}\n"
        "  - {name: OMP_NUM_THREADS, kind: variable, values: [1], answers: [starved-loader]}\n"
    )
    found, text = read_knobs(str(path), KNOWN)
    assert text == path.read_text() and found.short == ("--steps", "40")
    workers, fused, threads = found.knobs
    assert workers.list_settings() == (flag("--workers", "2"), flag("--workers", "4"))
    assert workers.losses is LossEffect.BIT_EQUAL and not workers.is_switch
    assert fused.list_settings() == (flag("--fused"),) and fused.is_switch
    assert threads.list_settings() == (variable("OMP_NUM_THREADS", "1"),)


@pytest.mark.parametrize(
    "text",
    [
        "knobs: [{name: --a, values: [1]}]",
        "knobs: [{name: --a, values: [1], answers: [no-such-finding]}]",
        "knobs: [{name: --a, values: [1], answers: [], loses: x}]",
        "knobs: [{name: --a, values: [[1]], answers: []}]",
        "knobs: 1",
        "- 1",
        "a: [",
        "&a [*a]",
    ],
)
def test_a_wrong_file_of_knobs_is_one_line(tmp_path, text):
    path = tmp_path / "knobs.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_knobs(str(path), KNOWN)
    [line] = caught.value.lines
    assert line.startswith(f"--knobs {path}: ")
