"""What a plan makes of flags in scripts: names of files, DeepSpeed's flags, placeholders, variables without a value, pipes."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.command_lines import argv
from support.wording import wording

from megatron_lite.cli import launch_script
from megatron_lite.cli.launcher import MAX_SCRIPT_BYTES, find_launch
from megatron_lite.cli.planned_flags import adapt_flags, read_planned_flags
from megatron_lite.cli.planned_run import planned_run
from megatron_lite.config.args import Args
from megatron_lite.config.flags import STOPPING, list_flags, read_flags
from megatron_lite.config.fp8 import PaperArgs
from megatron_lite.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

FLAGS = " ".join(argv())


def plan(text: str, *arguments: str, gpus: int | None = None, **more):
    Path("job.sh").write_text(text + "\n")
    return planned_run(["job.sh", *arguments], gpus, **more)


@pytest.mark.parametrize("value", ["", "'' ''", "several words of a placeholder", "''"])
def test_files_that_a_script_has_no_name_for_do_not_stop_a_plan(value):
    names = ["--save", "--load", "--vocab-file", "--tensorboard-dir"]
    flags = " ".join(f"{name} {value}" for name in names)
    found = plan(f"torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} {flags}")
    assert found.plan.world.size == 2 and not set(names) & set(found.flags)
    assert any(note.startswith("--save, --load, --vocab-file, --tensorboard-dir:") for note in found.notes)


def test_a_value_that_a_plan_needs_is_still_asked_for():
    with pytest.raises(ConfigError) as raised:
        plan(f"torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} --seq-length $4")
    assert raised.value.lines == [wording("cli/is-empty-it-is", "--seq-length", 4)]


@pytest.mark.parametrize(
    ("stage", "sharded"), [("0", None), ("1", "distributed_optimizer"), ("2", "distributed_optimizer"), ("3", "fsdp2")]
)
def test_deepspeeds_stages_are_planned_as_flags_of_this_trainer(stage, sharded):
    more = f"--deepspeed --deepspeed_config ds.json --zero-stage {stage} --no-pipeline-parallel --train-tokens 300"
    found = plan(f"deepspeed --num_gpus 2 pretrain_gpt.py {FLAGS} {more}")
    parallel = found.plan.args.parallel
    assert parallel.use_distributed_optimizer == (sharded == "distributed_optimizer")
    assert parallel.use_torch_fsdp2 == (sharded == "fsdp2")
    assert any(note.startswith(wording("cli/deepspeed-zero-stage-is", stage)) for note in found.notes)


def test_deepspeeds_flags_are_known_only_with_deepspeed():
    flags = ["--zero-stage", "1", "--lr", "1"]
    assert adapt_flags(flags, (), ()) == (flags, [])
    kept, notes = adapt_flags(["--deepspeed", "--deepspeed_config", "x", "--lr", "1"], (), ())
    assert kept == ["--lr", "1"] and wording("cli/none-is-planned") in notes[0]


def test_flags_of_forks_are_left_out_or_read_with_a_note():
    kept, notes = adapt_flags(
        ["--use-mpi", "--wandb_name", "x", "--glu-activation", "swiglu", "--pad-vocab-size-to", "64", "--num-experts", "8"],
        (), (),
    )  # fmt: skip
    assert kept == ["--swiglu", "--padded-vocab-size", "64", "--num-experts", "8"]
    assert "--use-mpi, --wandb_name" in notes[0]
    assert "--glu-activation swiglu as --swiglu, --pad-vocab-size-to 64 as --padded-vocab-size 64" in notes[1]
    assert adapt_flags(["--num-experts", "1", "--topk", "2"], (), ())[0] == []


def test_the_table_of_forks_leads_to_flags_that_there_are():
    flags = [*list_flags(Args), *list_flags(PaperArgs)]
    known = {spelling for flag in flags for spelling in flag.spellings}
    for name, planned in read_planned_flags().items():
        assert name.partition("=")[0] not in known or "=" in name, name
        assert re.fullmatch("--[a-z0-9-]+", name.partition("=")[0])
        assert planned == "no effect" or planned.split()[0] in known
    # with this trainer itself they stay refused
    theirs = [read_flags()[name] for name in read_planned_flags() if name in read_flags()]
    assert theirs and all(flag.answer in STOPPING for flag in theirs)


def test_words_of_flags_survive_the_change():
    flags = ["stray", "--window-size=-1,0", "--lr", "-1", "--data-path", "0.3", "a", "--x=--y", "--fp16"]
    kept, _ = adapt_flags(flags, ["fp16"], [])
    assert kept == ["stray", "--window-size=-1,0", "--lr=-1", "--data-path", "0.3", "a", "--x=--y"]
    assert adapt_flags(flags, [], ["--lr", "2"])[0][-2:] == ["--lr", "2"]


@pytest.mark.parametrize("named", ["of-a-fork", "--of-a-fork", "of_a_fork"])
def test_flags_are_dropped_and_added_without_editing_a_script(named):
    text = f"torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} --of-a-fork 7"
    with pytest.raises(ConfigError):
        plan(text)
    found = plan(text, dropped=[named], added=["--global-batch-size", "32"])
    assert found.plan.batch.final == 32 and "--of-a-fork" not in found.flags
    assert found.notes[:2] == (
        wording("cli/left-out-by", "--drop", "--of-a-fork"),
        "given by --add: --global-batch-size 32.",
    )


def test_placeholders_count_as_values_where_bash_cannot_read_them():
    found = plan(
        f"SAVE=<Specify path>\nOTHER=/data/<YOUR_NAME>\ntorchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} --save $SAVE --load $OTHER"
    )
    assert found.plan.world.size == 2
    assert any("<Specify path>, <YOUR_NAME>" in note for note in found.notes)
    with pytest.raises(ConfigError, match="--seq-length LENGTH: needs a whole number"):
        plan(f"torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS} --seq-length <LENGTH>")


def test_placeholders_in_files_that_a_script_reads_or_starts_count_as_well():
    Path("config.sh").write_text(f"SAVE=<where to>\nexport PARAMS='{FLAGS} --save '$SAVE\n")
    command = 'sh -c "python $CODE/pretrain_gpt.py $PARAMS --load $OTHER"'
    Path("inner.sh").write_text(f"OTHER=<other>\nCODE=<source folder>\nsrun -n 2 {command}\n")
    found = plan(". `pwd`/config.sh\nbash inner.sh")
    assert found.plan.world.size == 2
    assert any("<where to>, <other>, <source folder>" in note for note in found.notes)


def test_variables_of_a_file_that_is_not_here_are_empty():
    start = f"set -euo pipefail\nsource settings_of_nobody.sh\ntorchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS}"
    found = plan(f"{start} --data-path $TRAIN_DATA --save $WHERE")
    assert any(wording("cli/train-data-where-are") in note for note in found.notes)
    with pytest.raises(ConfigError, match="LENGTH has no value here; give it: LENGTH=VALUE"):
        plan(f"{start} --seq-length $LENGTH")


@pytest.mark.parametrize("before", ["set -u\n", ""])
@pytest.mark.parametrize("options", ["--nnodes $MY_NODES --nproc_per_node 4", "--nproc_per_node 4 --nnodes=$MY_NODES"])
def test_an_empty_number_of_nodes_is_never_one_node(before, options):
    text = f"{before}torchrun {options} pretrain_gpt.py {FLAGS}"
    if before:
        with pytest.raises(UserError, match="MY_NODES is not set here; give it: MY_NODES=VALUE"):
            plan(text)
    else:
        assert plan(text).gpus_assumed


def test_as_many_gpus_are_assumed_as_one_replica_needs():
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 --num-layers 8"
    found = plan(f"deepspeed pretrain_gpt.py {FLAGS} {layout}")
    assert found.plan.world.size == 16 and found.gpus_assumed


@pytest.mark.parametrize(("option", "size"), [("worker-0:0,1", 2), ("a:0,1,2,3@b:0,1,2,3", 8), ("worker-0", None)])
def test_deepspeeds_list_of_devices_counts_them(option, size):
    assert find_launch(["deepspeed", "-i", option, "pretrain_gpt.py"], {}).ranks.size == size
    assert find_launch(["deepspeed", f"--include={option}", "pretrain_gpt.py"], {}).ranks.size == size


def test_a_script_without_flags_of_its_own_names_the_variable_that_has_them():
    with pytest.raises(
        UserError, match=r"takes the trainer's flags from PARAMS, .*: PARAMS='FLAGS' megatron-lite plan"
    ):
        plan('CMD="python -u ${CODE}/pretrain_gpt.py ${PARAMS}"\nsrun -n 8 sh -c "${CMD}"')


# --- pipes


def write_later(path: str, text: str, parts: int = 1) -> threading.Thread:
    def write():
        with open(path, "w") as pipe:
            for at in range(parts):
                pipe.write(text[at * len(text) // parts : (at + 1) * len(text) // parts])
                pipe.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name", ["job.sh", "pipe"])
def test_a_script_from_a_pipe_is_planned(name):
    os.mkfifo(name)
    thread = write_later(name, f"torchrun --nproc_per_node gpu pretrain_gpt.py {FLAGS} " + "\n# long" * 10_000, parts=7)
    # it is read once, though a plan reads a script several times
    assert planned_run([name], None).plan.world.size == 4
    thread.join()


def test_a_shells_substitution_is_planned():
    start = "import sys; from megatron_lite.cli.main import main; sys.exit(main())"
    command = f"{sys.executable} -c '{start}' plan <(echo torchrun --nproc_per_node 2 pretrain_gpt.py {FLAGS})"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert re.search(r"\b2 GPUs, batch", shown.stdout)


def test_a_pipe_without_a_writer_or_without_an_end_is_left(monkeypatch):
    monkeypatch.setattr(launch_script, "SECONDS_FOR_PIPE", 0.2)
    os.mkfifo("silent.sh")
    with pytest.raises(UserError, match="silent.sh: cannot be read .a pipe from which nothing came.; check the path"):
        planned_run(["silent.sh"], None)
    os.mkfifo("endless.sh")
    thread = write_later("endless.sh", "#" * (MAX_SCRIPT_BYTES + 1))
    with pytest.raises(UserError, match="more than 1 MiB"):
        planned_run(["endless.sh"], None)
    thread.join()
