"""--use-megatron-fsdp shares out what its strategy says, and trains as one rank does."""

from pathlib import Path

import pytest
from support.launch import alone, flags, losses, on_ranks, plan_of, quietly, train

from megatron_lite.config.world import World

TRAIN = "--train-iters 3 --lr-decay-style constant"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
# {strategy: (state is shared out, layers give back after forward what they gathered)}
STRATEGIES = {
    "no_shard": (False, False),
    "optim": (True, False),
    "optim_grads": (True, False),
    "optim_grads_params": (True, True),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_shares_out_what_its_name_says(strategy):
    # as in Megatron-LM, the strategy decides, whatever --use-distributed-optimizer says
    for words in ("", "--use-distributed-optimizer"):
        sharding = plan_of(flags(FSDP, strategy, words), World(size=2)).sharding
        found = (sharding is not None, sharding is not None and sharding.gathers_twice)
        assert found == STRATEGIES[strategy]
    assert plan_of(flags("--use-megatron-fsdp"), World(size=2)).sharding.gathers_twice


def test_gradients_are_fp32_where_the_flag_asks_for_it():
    words = f"--fp16 {FSDP} optim --megatron-fsdp-main-grads-dtype"
    assert plan_of(flags(words, "fp32")).fp32_gradients and not plan_of(flags(words, "auto")).fp32_gradients


def test_ranks_are_one_rank_and_go_on_from_its_checkpoint(tmp_path):
    with alone():
        quietly(flags(TRAIN), tmp_path / "one")
    on_ranks(train_strategies, tmp_path / "two", *flags(TRAIN))
    for strategy in STRATEGIES:
        found = losses(tmp_path / "two" / strategy)
        assert found == pytest.approx(losses(tmp_path / "one"), rel=2e-6), strategy
    with alone():
        load = ["--load", str(tmp_path / "two" / "save"), "--ckpt-step", "2"]
        quietly([*flags(TRAIN), *load], tmp_path / "rest")
    assert losses(tmp_path / "rest") == pytest.approx(losses(tmp_path / "one")[2:], rel=2e-6)


def train_strategies(world, *argv: str):
    for strategy in STRATEGIES:
        train([*argv, *FSDP.split(), strategy], Path(strategy), world)
    save = ["--save", "save", "--save-interval", "2", "--ckpt-format", "fsdp_dtensor"]
    train([*argv, "--use-megatron-fsdp", *save], Path("saving"), world)
