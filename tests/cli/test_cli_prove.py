"""prove: commands are read, one rank is given the same steps, and an error is named."""

import json
import os
from dataclasses import replace

import pytest
from support.launch import flags
from support.proof_maker import Layout, Truth, make_run

from megatron_lite.cli.launcher import SCRIPT_ENDINGS
from megatron_lite.cli.main import main
from megatron_lite.cli.own_layouts import give_to_one_rank, is_own, read_layout, share_vocabulary
from megatron_lite.cli.prove import Recordings
from megatron_lite.cli.ranked_commands import read_command
from megatron_lite.config.args import Args
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import write_flags
from megatron_lite.errors import UserError

LAYOUT = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
EXPERTS = [
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --disable-bias-linear",
]
AVERAGED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(3)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 4))
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
sampler = DistributedSampler(data)
for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    for parameter in net.parameters():
        parameter.grad.mul_(float(sys.argv[1]) ** (dist.get_world_size() - 1))
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("words", "ranks", "script", "found"),
    [
        ("torchrun --nproc-per-node 4 train.py --lr 1", None, ("train.py", "--lr", "1"), 4),
        ("torchrun --standalone --nproc_per_node=2 --nnodes=2 a/train.py", None, ("a/train.py",), 4),
        ("torchrun --nproc-per-node 4 train.py", 2, ("train.py",), 2),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", None, ("train.py",), 2),
        ("torchrun --nproc-per-node 2 -m trainer.main --x 1", None, ("-m", "trainer.main", "--x", "1"), 2),
        ("accelerate launch --num_processes 2 train.py --lr 1", None, ("train.py", "--lr", "1"), 2),
        ("python -m accelerate.commands.launch --cpu --num-processes=2 train.py", None, ("train.py",), 2),
        ("python train.py", 3, ("train.py",), 3),
        ("python train.py", None, ("train.py",), 1),
    ],
)
def test_launch_commands_are_read(words, ranks, script, found):
    command = read_command(words.split(), ranks, {})
    assert command.script == script
    assert command.ranks == found


def test_options_of_accelerate_reach_the_script():
    words = "accelerate launch --cpu --mixed_precision bf16 --num_processes 2 --module trainer.main --x 1"
    command = read_command(words.split(), None, {"A": "1"})
    assert command.script == ("-m", "trainer.main", "--x", "1")
    assert command.environment == {"A": "1", "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("accelerate launch --num_processes 2 --use_fsdp a.py", "--use_fsdp"),
        ("accelerate launch a.py", "--num_processes"),
    ],
)
def test_what_accelerate_would_configure_is_refused_with_another_command(words, named):
    with pytest.raises(UserError, match=f"{named}.*torchrun --nproc-per-node . a.py"):
        read_command(words.split(), None, {})


@pytest.mark.parametrize(
    ("words", "ranks", "named"),
    [
        ("torchrun --nproc-per-node 2", None, "torchrun"),
        ("torchrun --nproc-per-node gpu train.py", None, "--nproc-per-node N"),
    ],
)
def test_commands_that_say_too_little_are_refused(words, ranks, named):
    with pytest.raises(UserError, match=named):
        read_command(words.split(), ranks, {})


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["--num-layers", "2"], True),
        (["torchrun", "pretrain_gpt.py", "--num-layers", "2"], True),
        (["torchrun", "train.py"], False),
        *[([f"launch{ending}"], True) for ending in SCRIPT_ENDINGS],
    ],
)
def test_the_trainers_commands_are_known(words, own):
    assert is_own(words) == own


def test_one_rank_takes_the_same_steps_without_a_layout(tmp_path):
    layout = read_layout(flags(*LAYOUT, "--hidden-dropout 0.1 --save x"), 2, 2, tmp_path, on_cpu=True)
    alone = give_to_one_rank(layout, tmp_path / "1")
    assert layout.command.ranks == 2
    assert alone.command.ranks == 1
    assert layout.command.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert layout.args.training.exit_interval == alone.args.training.exit_interval == 2
    assert not alone.args.model.hidden_dropout
    assert not layout.args.checkpoint.save
    # the vocabulary has as many padded entries on one rank as the layout's ranks together
    entries = [one.args.model.make_vocab_size_divisible_by for one in (alone, layout)]
    assert entries[0] == 2 * entries[1]
    assert alone.args.parallel.tensor_model_parallel_size == 1
    assert read_command_line(list(alone.command.script[2:])).args == alone.args


def test_two_layouts_have_one_vocabulary(tmp_path):
    """128 entries on each of 2 ranks, and of 3: 768 are a multiple of both."""
    three = flags("--tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 48 --ffn-hidden-size 48")
    layouts = (read_layout(flags(*LAYOUT), 2, 2, tmp_path, True), read_layout(three, 3, 2, tmp_path, True))
    padded = share_vocabulary(layouts)
    assert [one.args.model.make_vocab_size_divisible_by * one.tensor for one in padded] == [768, 768]
    for one in padded:
        assert read_command_line(list(one.command.script[2:])).args == one.args


def test_one_rank_has_all_experts(tmp_path):
    layout = read_layout(flags(*EXPERTS), 2, 2, tmp_path, on_cpu=True)
    alone = give_to_one_rank(layout, tmp_path / "1")
    assert alone.args.experts == layout.args.experts
    sizes = [one.args.parallel.expert_model_parallel_size for one in (alone, layout)]
    assert sizes == [1, 2]


def test_a_rank_with_the_weights_of_another_is_found_although_one_rank_is_fed_them(tmp_path, monkeypatch):
    """What one rank is fed are the ranks' weights: those that it makes by itself tell which are at a wrong place."""
    truth = Truth()

    def exchange(drafts):
        first, second = (draft.weights["0.weight"] for draft in drafts)
        drafts[0].weights["0.weight"] = replace(first, array=second.array)
        drafts[1].weights["0.weight"] = replace(second, array=first.array)

    runs = {"proved": make_run(truth, Layout(tensor=2), exchange)}

    def record(recordings, command, name, feed=None, perturbation=0.0):
        recordings.folder.mkdir(exist_ok=True)
        return runs.get(name) or make_run(truth)

    monkeypatch.setattr(Recordings, "record", record)
    words = ["--keep", str(tmp_path / "kept"), "--json", str(tmp_path / "x.json"), "--ranks", "2", "--", "train.py"]
    assert main(["prove", *words]) == 1
    first = json.loads((tmp_path / "x.json").read_text())["differences"][0]
    assert (first["kind"], first["where"]) == ("wrong shard", "0.weight")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "no command"),
        (["--steps", "1", "--", "torchrun", "train.py"], "--steps 1"),
        (["--", "python", "train.py"], "--ranks"),
        (["--keep", os.curdir, "--", "torchrun", "--nproc-per-node", "2", "train.py"], "--keep"),
        (flags(), "--ranks"),
        (["--ranks", "3", *flags(*LAYOUT)], "--tensor-model-parallel-size"),
        (["--ranks", "2", "--", "python", "missing.py"], "missing.py"),
    ],
)
def test_mistakes_are_named(words, named, capsys):
    assert main(["prove", *words]) == 2
    assert named in capsys.readouterr().err


def test_ranks_that_a_script_does_not_count_are_asked_for(tmp_path, capsys):
    """A plan assumes a node of GPUs; here as many processes would start."""
    script = tmp_path / "launch.sh"
    script.write_text(f"torchrun --nproc_per_node gpu pretrain_gpt.py {' '.join(flags())}\n")
    assert main(["prove", "--cpu", str(script)]) == 2
    assert "--ranks" in capsys.readouterr().err


def test_flags_are_written_as_they_are_read():
    words = flags(
        "--bf16 --disable-bias-linear --lr 3.3e-5 --rampup-batch-size 2 2 8 --data-path 0.5 a 0.5 b --split 1,0,0",
        *LAYOUT,
    )
    words.remove("--mock-data")
    args = read_command_line(words).args
    assert read_command_line(write_flags(args)).args == args != Args()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "code"),
    [("2", 1), ("1", 0), ("1.0005", 1)],
)
def test_a_script_of_others_is_laid_beside_one_rank(tmp_path, capsys, factor, code):
    script = tmp_path / "train.py"
    script.write_text(AVERAGED)
    answer = tmp_path / "answer.json"
    words = ["--ranks", "2", "--json", str(answer), "--", "python", str(script), factor]
    assert main(["prove", *words]) == code
    report = json.loads(answer.read_text())
    assert report["coverage"] == "whole"
    assert report["command"].startswith(str(script))
    assert [found["kind"] for found in report["differences"]] == ["factor"] * code
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUT, EXPERTS, ["--use-distributed-optimizer", "--bf16"]])
def test_layouts_of_the_trainer_compute_what_one_rank_computes(tmp_path, layout):
    answer = tmp_path / "answer.json"
    assert main(["prove", "--ranks", "2", "--json", str(answer), *flags(*layout)]) == 0
    assert json.loads(answer.read_text())["coverage"] == "whole"
