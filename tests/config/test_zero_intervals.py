"""Intervals of 0 switch off what they time, as in Megatron-LM; what scripts pass around numbers is read as there."""

import pytest
from support.command_lines import mistakes, plan, read
from support.launch import checkpoint, flags, quietly, steps
from support.wording import wording

from megatron_lite.config.args import Args
from megatron_lite.config.data_paths import split_shares
from megatron_lite.config.flags import list_flags
from megatron_lite.config.world import World

pytestmark = pytest.mark.usefixtures("process_group")

OFF = "--exit-interval 0 --exit-duration-in-mins 0 --save-interval 0 --save-retain-interval 0"


@pytest.mark.parametrize(
    "name", [flag.spelling for flag in list_flags(Args) if flag.zero_is_off] + ["--persistent-save-interval"]
)
def test_0_is_the_same_as_leaving_an_interval_out(name):
    assert mistakes(f"{name} 0") == [] and read(f"{name} 0").args == read().args
    assert len(mistakes(f"{name} -1")) == 1


@pytest.mark.parametrize("name", ["--log-interval", "--log-memory-interval", "--tensorboard-log-interval"])
def test_intervals_by_which_megatron_divides_are_at_least_1(name):
    assert len(mistakes(f"{name} 0")) == 1


def test_a_run_without_intervals_saves_and_evaluates_at_its_end(tmp_path):
    words = f"{OFF} --eval-interval 0 --eval-iters 1 --train-iters 3"
    reason, out = quietly(flags(words, "--save", tmp_path / "save"), tmp_path / "run")
    assert reason is None and len(steps(tmp_path / "run")) == 3
    assert [path.name for path in (tmp_path / "save").glob("iter_*")] == ["iter_0000003"]
    assert checkpoint(tmp_path / "save", 3)["record"].iteration == 3
    assert "validation loss at iteration 3 on validation set" in out and "iteration 3 |" not in out


def test_validations_are_counted_without_an_interval():
    assert plan("--eval-interval 0").args.watch.count_validations(100) == 0
    assert plan("--eval-interval 30").args.watch.count_validations(100) == 3


@pytest.mark.parametrize("split", ["'969, 30, 1'", '"969,30,1"', "969, 30, 1", "[969,30,1]", "969/30/1", "969:30:1"])
def test_quotes_and_brackets_around_shares_do_not_count(split):
    assert split_shares(split) == [969, 30, 1]
    assert mistakes(["--split", split]) == []


def test_a_non_persistent_interval_of_0_asks_for_nothing():
    assert mistakes("--non-persistent-save-interval 0") == []
    assert len(mistakes("--non-persistent-save-interval 5")) == 1


REQUIRED = [flag.spelling for flag in list_flags(Args) if flag.required]
PARALLEL = (
    "--tensor-model-parallel-size 2",
    "--tensor-model-parallel-size 2 --sequence-parallel --group-query-attention --num-query-groups 2",
    "--context-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
    "--use-distributed-optimizer --swiglu",
    "--use-torch-fsdp2 --recompute-granularity full --recompute-method block",
)


@pytest.mark.parametrize("missing", [*REQUIRED, "all"])
@pytest.mark.parametrize("words", PARALLEL)
def test_a_missing_flag_is_a_line_whatever_else_is_given(missing, words):
    out = REQUIRED if missing == "all" else [missing]
    lines = mistakes(" ".join(f"!{name}" for name in out) + f" {words}", World(0, 2, 0, 2))
    assert {wording("config/is-missing-every-run", name) for name in out} <= set(lines)
