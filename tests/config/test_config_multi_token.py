"""Flags of multi-token prediction: what they must satisfy together, and what they plan."""

import pytest
from support.launch import flags, plan_of
from support.multi_token_variants import MULTI_TOKEN_VARIANTS

from megatron_lite.config.model_size import count_parameters, step_flops
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError
from megatron_lite.model.gpt import list_parameters

TWO = World(size=2, local_size=2)
PP2 = "--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 4"


@pytest.mark.parametrize(
    ("words", "world", "named"),
    [
        ("--mtp-num-layers 1 --context-parallel-size 2", TWO, "--context-parallel-size 2"),
        ("--mtp-num-layers 1 --use-torch-fsdp2", TWO, "--use-torch-fsdp2"),
        (f"--mtp-num-layers 1 {PP2} --pipeline-schedule ZeroBubble", TWO, "--pipeline-schedule"),
        ("--mtp-num-layers 1 --window-size 4,0", World(), "--window-size"),
        ("--mtp-num-layers 1 --reset-attention-mask", World(), "--reset-attention-mask"),
        ("--mtp-num-layers 1 --ckpt-format torch --save somewhere", World(), "--ckpt-format torch"),
        (f"--mtp-num-layers 2 {PP2} --pipeline-model-parallel-layout Et*2|t*2mL", TWO, "1 layers m"),
        (f"{PP2} --pipeline-model-parallel-layout Et*2|t*2mL", TWO, "--mtp-num-layers is missing"),
        (f"--mtp-num-layers 1 {PP2} --pipeline-model-parallel-layout Et*2|tmtL", TWO, "in the last piece"),
        (f"--mtp-num-layers 1 {PP2} --pipeline-model-parallel-layout Et*2m|t*2L", TWO, "in the last piece"),
    ],
)
def test_flags_that_exclude_each_other_are_named_in_one_line(words, world, named):
    with pytest.raises(ConfigError) as caught:
        plan_of(flags(words), world)
    assert len(caught.value.lines) == 1 and named in caught.value.lines[0]


def test_a_layout_places_the_layers_on_the_last_stage():
    layers = [
        plan_of(
            flags(f"--mtp-num-layers 1 {PP2} --pipeline-model-parallel-layout Et*3|tmL"),
            World(size=2, local_size=2, rank=rank),
        ).stage.layers
        for rank in (0, 1)
    ]
    assert [list(numbers) for numbers in layers] == [[0, 1, 2], [3]]


def test_no_depth_is_no_multi_token_prediction():
    assert plan_of(flags("--mtp-num-layers 0")).shape.mtp_num_layers == 0


@pytest.mark.parametrize("name", MULTI_TOKEN_VARIANTS)
def test_parameters_are_those_of_the_model(name):
    shape = MULTI_TOKEN_VARIANTS[name]
    sizes = list_parameters(shape).values()
    assert count_parameters(shape) == sum(_multiply(size) for size in sizes)


def _multiply(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def test_flops_count_a_layer_and_logits_for_each_depth():
    """As Megatron-LM's num_floating_point_operations, without the norms that it counts."""
    one, two, three = (step_flops(plan_of(flags(f"--mtp-num-layers {depths}")).shape, 1, True) for depths in (0, 1, 2))
    shape = plan_of(flags("")).shape
    h, ffn, s, v = shape.hidden_size, shape.ffn_hidden_size, shape.seq_length, shape.padded_vocab_size
    assert three - two == two - one == 3 * 2 * s * (4 * h * h + 2 * h * ffn + h * s + h * v + 2 * h * h)
