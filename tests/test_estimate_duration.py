"""How long a whole training takes, and its arithmetic."""

import pytest
from command_lines import plan

from megatron_lite.config.world import World
from megatron_lite.estimate.step_time import duration_of

GPT2 = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 64 --global-batch-size 512 --train-iters 19073 --bf16"
)
EIGHT = World(size=8, local_size=8, gpus=8)


def test_ten_billion_tokens_of_gpt2():
    """llm.c's 124M: 19,073 steps of 524,288 tokens at 140 ms."""
    seen = duration_of(plan(GPT2, EIGHT, 50257), tokens_per_s=524_288 / 0.140)
    assert (seen.tokens, seen.gpus) == (19_073 * 524_288, 8)
    assert seen.seconds == pytest.approx(19_073 * 0.140)
    assert seen.days == pytest.approx(19_073 * 0.140 / 86_400)
    assert seen.gpu_hours == pytest.approx(8 * 19_073 * 0.140 / 3600)


def test_conventions_of_flops_stand_side_by_side():
    seen = duration_of(plan(GPT2, EIGHT, 50257), tokens_per_s=1.0, tokens=10**9)
    parameters = 124_475_904
    weights, scores = 12 * 12 * 768**2 + 50304 * 768, 12 * 1024 * 768
    assert seen.flops_6nd == 6 * parameters * 10**9
    assert seen.flops_causal == 6 * (weights + scores) * 10**9
    assert seen.flops_full == 6 * (weights + 2 * scores) * 10**9


def test_tokens_need_not_fill_sequences():
    seen = duration_of(plan(), tokens_per_s=10.0, tokens=5)
    assert (seen.tokens, seen.seconds) == (5, 0.5)
    assert 0 < seen.flops_causal < seen.flops_full


def test_a_training_given_in_samples_ends_with_them():
    seen = duration_of(plan("!--train-iters --train-samples 1000"), tokens_per_s=32.0)
    assert seen.tokens == plan("!--train-iters --train-samples 1000").train_samples * 32
