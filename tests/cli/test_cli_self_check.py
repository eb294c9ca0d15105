"""self-check: two runs of the same steps, and what their difference says."""

import json
from pathlib import Path

import msgspec
import pytest
from support.launch import flags
from support.training_maker import ordinary_steps
from support.training_maker import run as made_run
from support.wording import wording

from megatron_lite.cli import self_check
from megatron_lite.cli.main import main
from megatron_lite.config.args import Args
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import write_flags
from megatron_lite.config.plan import resolve
from megatron_lite.config.world import World
from megatron_lite.train.run_record import record_plan

LAYOUT = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]


def pretend(monkeypatch, factor: float) -> list[list[str]]:
    """Runs that only say that they trained; losses of the layout are wrong by a factor. Returns what would have been started."""
    started = []

    def write_run(words, ranks, environment, title):
        started.append(words)
        folder, line = Path(words[words.index("--run-dir") + 1]), read_command_line(words)
        assert line.mistakes == [] and environment["CUDA_VISIBLE_DEVICES"] == ""
        plan = msgspec.to_builtins(record_plan(resolve(line.args, World(size=ranks), 128)))
        made_run(folder, ordinary_steps(2, loss=2.0 * (factor if ranks > 1 else 1.0), grad_norm=1.0))
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(record | {"plan": plan}))

    monkeypatch.setattr(self_check, "_train", write_run)
    return started


@pytest.mark.parametrize(("factor", "code", "said"), [(1.0, 0, "rounding in fp32"), (1.01, 1, "something else")])
def test_losses_that_differ_by_more_than_rounding_are_an_error(monkeypatch, capsys, factor, code, said):
    started = pretend(monkeypatch, factor)
    words = [
        "--ranks",
        "2",
        "--steps",
        "2",
        "--cpu",
        *flags(*LAYOUT, "--hidden-dropout 0.1 --save x"),
    ]
    assert main(["self-check", *words]) == code
    out = capsys.readouterr().out
    assert said in out and "2 ranks: --tensor-model-parallel-size 2 --sequence-parallel" in out and "1 to 2" in out
    one, several = (read_command_line(words).args for words in started)
    assert [args.training.exit_interval for args in (one, several)] == [2, 2]
    assert not one.model.hidden_dropout and not several.checkpoint.save
    # the vocabulary has as many padded words on one rank as the layout's ranks together
    rows = [args.model.make_vocab_size_divisible_by for args in (one, several)]
    assert rows[0] == 2 * rows[1] and one.parallel.tensor_model_parallel_size == 1


EXPERTS = [
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --disable-bias-linear",
]


def test_one_rank_has_all_experts(monkeypatch, capsys):
    started = pretend(monkeypatch, 1.0)
    assert main(["self-check", "--ranks", "2", "--steps", "2", "--cpu", *flags(*EXPERTS)]) == 0
    assert "2 ranks: --expert-model-parallel-size 2" in capsys.readouterr().out
    one, several = (read_command_line(words).args for words in started)
    assert one.experts == several.experts
    sizes = [args.parallel.expert_model_parallel_size for args in (one, several)]
    assert sizes == [1, 2]


def test_mistakes_are_named(capsys):
    for words, said in {
        "": "no launch command",
        "--steps 0 --bf16": "--steps 0: must be at least 1.",
        " ".join(flags()): "one rank alone; give --ranks N",
        " ".join(["--ranks", "3", *flags(*LAYOUT)]): "does not divide the number of ranks, 3",
    }.items():
        assert main(["self-check", *words.split()]) == 2
        assert said in capsys.readouterr().err, said


def test_flags_are_written_as_they_are_read():
    words = flags(
        "--bf16 --disable-bias-linear --lr 3.3e-5 --rampup-batch-size 2 2 8 --data-path 0.5 a 0.5 b --split 1,0,0",
        *LAYOUT,
    )
    words.remove("--mock-data")
    args = read_command_line(words).args
    assert read_command_line(write_flags(args)).args == args != Args()


@pytest.mark.slow
def test_ranks_of_a_layout_beside_one_rank(capfd):
    assert main(["self-check", "--ranks", "2", *flags(*LAYOUT)]) == 0
    assert "rounding in fp32" in capfd.readouterr().out
    assert main(["self-check", "--ranks", "2", *flags(*EXPERTS)]) == 0
    said = capfd.readouterr().out
    assert "rounding in fp32" in said and "--expert-model-parallel-size 2" in said
    words = flags("--lr-warmup-iters 3 --train-data-path nowhere")
    words.remove("--mock-data")
    assert main(["self-check", "--ranks", "2", *words]) == 2
    assert wording("cli/rank-trainer-ended-with", 1) in (said := capfd.readouterr().err) and "nowhere" in said


def test_ranks_that_a_script_does_not_count_are_asked_for(tmp_path, monkeypatch, capsys):
    """A plan assumes a node of GPUs; here as many processes would start."""
    started = pretend(monkeypatch, 1.0)
    script = tmp_path / "launch.sh"
    script.write_text(f"torchrun --nproc_per_node gpu pretrain_gpt.py {' '.join(flags())}\n")
    assert main(["self-check", "--cpu", str(script)]) == 2
    assert wording("cli/number-of-ranks-is", "--ranks") in capsys.readouterr().err
    assert not started
