"""--use-checkpoint-args: the model that a checkpoint describes, without its flags on the command line."""

import pytest
from support.launch import DATA, LENGTH, MODEL, QUIET, alone, flags, losses, plan_of, quietly

from megatron_lite.checkpoint.checkpoint_args import take_checkpoint_args
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.flags import write_flags
from megatron_lite.errors import ConfigError

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 5000 --rotary-percent 0.5 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 48 --hidden-dropout 0 --attention-dropout 0"
)
REST = [*DATA, *LENGTH, *QUIET, "--mock-data"]
TRAINED = "--train-iters 4 --lr-decay-style constant"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of iteration 2 of a Llama's run of 4, losses of the whole run)."""
    folder = tmp_path_factory.mktemp("saved")
    with alone():
        quietly(flags(LLAMA, TRAINED, "--save", folder / "save", "--save-interval 2"), folder / "run")
        yield folder / "save", losses(folder / "run")


def take(*words: str) -> list[str]:
    """The command line that stands for these words."""
    said: list[str] = []
    return write_flags(take_checkpoint_args(read_command_line([*REST, *TRAINED.split(), *words]), said.append).args)


def test_the_model_is_the_checkpoints(saved, tmp_path):
    folder, whole = saved
    argv = take("--load", str(folder), "--ckpt-step", "2", "--use-checkpoint-args")
    assert plan_of(argv).shape == plan_of(flags(LLAMA)).shape
    quietly(argv, tmp_path / "run")
    assert losses(tmp_path / "run") == whole[2:]


def test_as_in_megatron_some_flags_of_the_command_line_win_and_others_lose(saved):
    folder, _ = saved
    given = ("--seq-length", "8", "--hidden-dropout", "0.3", "--rotary-base", "100", "--use-checkpoint-args")
    args = read_command_line(take("--load", str(folder), *given)).args
    assert (args.model.seq_length, args.model.hidden_dropout, args.model.rotary_base) == (8, 0.0, 5000)


def test_without_a_checkpoint_the_command_line_counts(tmp_path):
    argv = take("--load", str(tmp_path), "--use-checkpoint-args", *MODEL)
    assert plan_of(argv).shape.num_layers == 2
    with pytest.raises(ConfigError, match="--use-checkpoint-args needs --load"):
        take("--use-checkpoint-args")


def test_sizes_of_parallelism_are_taken_when_asked_for(saved):
    folder, _ = saved
    common = ("--load", str(folder), "--use-checkpoint-args", "--tensor-model-parallel-size", "2")
    assert read_command_line(take(*common)).args.parallel.tensor_model_parallel_size == 2
    of_checkpoint = read_command_line(take(*common, "--use-mp-args-from-checkpoint-args"))
    assert of_checkpoint.args.parallel.tensor_model_parallel_size == 1
