"""Checkpoints of mixtures of experts, latent attention and multi-token prediction, from Megatron-Core and to it."""

from collections.abc import Iterable

import pytest
from support.expert_variants import EXPERT_VARIANTS
from support.latent_variants import LATENT_VARIANTS
from support.launch import same
from support.megatron_core import Ours, Theirs, batches, load_ours, plan_for, read_all, take_steps
from support.megatron_dist import load_theirs, save_ours, save_theirs
from support.model_variants import build
from support.multi_token_variants import MULTI_TOKEN_VARIANTS

from megatron_lite.checkpoint.megatron_dist import DistFile

# (shape, flags): stacked layers, and layers that are kept apart; with biases that balance experts in "deepseek"
EXPERTS = {
    "mixtral": "",
    "qwen": "",
    "deepseek": "--moe-layer-freq [0,1]",
    "every second layer": "--moe-layer-freq [1,0]",
}
LATENT = {"queries of hidden states": "", "gpt": "", "yarn": "", "deepseek": "--moe-layer-freq [0,1]"}
VARIANTS = {f"experts, {name}": (EXPERT_VARIANTS[name], words) for name, words in EXPERTS.items()}
VARIANTS |= {f"further tokens, {name}": (MULTI_TOKEN_VARIANTS[name], "") for name in MULTI_TOKEN_VARIANTS}
VARIANTS |= {f"latent attention, {name}": (LATENT_VARIANTS[name], words) for name, words in LATENT.items()}
# in 16 bits all variants have the same masters and moments: one of a kind is enough but for the slow tests
IN_16_BITS = ("experts, deepseek", "further tokens, untied", "latent attention, yarn")
# in 32 bits, of variants that differ in a flag of their kind
ONLY_SLOW = ("experts, qwen", "latent attention, gpt", "latent attention, queries of hidden states")


def cross_precisions(variants: Iterable[str]) -> list:
    """Each variant with both precisions."""
    slow = {name: [] if name in IN_16_BITS else pytest.mark.slow for name in variants}
    in_bf16 = [pytest.param(name, "bf16", marks=slow[name]) for name in variants]
    in_fp32 = [pytest.param(name, "fp32", marks=pytest.mark.slow if name in ONLY_SLOW else []) for name in variants]
    return [*in_fp32, *in_bf16]


@pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
@pytest.mark.parametrize(("variant", "precision"), cross_precisions(VARIANTS))
def test_what_megatron_saved_is_read_by_name(variant, precision, tmp_path):
    shape, words = VARIANTS[variant]
    theirs = Theirs(plan_for(precision, words), shape)
    load_ours(theirs.model, build(shape))
    take_steps(theirs, range(3))
    file = DistFile(save_theirs(theirs, tmp_path / "iter_0000003", 3, {}))
    assert file.without_optimizer is None
    assert same(read_all(file), theirs.flat())
    read = file.record.model_shape
    assert (read.experts, read.latent) == (shape.experts, shape.latent)
    assert (read.mtp_num_layers, read.mtp_loss_scaling_factor) == (shape.mtp_num_layers, shape.mtp_loss_scaling_factor)
    assert (read.kv_channels, read.rotary_width) == (shape.kv_channels, shape.rotary_width)
    assert read.yarn_scaling_factor == shape.yarn_scaling_factor
    assert read.rotary_interleaved == (shape.latent is not None)


@pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
@pytest.mark.parametrize(("variant", "precision"), cross_precisions(VARIANTS))
def test_megatron_loads_what_was_saved_here_and_goes_on(variant, precision, tmp_path):
    shape, words = VARIANTS[variant]
    plan = plan_for(precision, words)
    ours = Ours(plan, shape)
    theirs = Theirs(plan, shape)
    take_steps(ours, range(3))
    save_ours(ours, tmp_path / "iter_0000003", 3)
    load_theirs(theirs, tmp_path / "iter_0000003")
    assert same(theirs.flat(), ours.flat())
    weights = [
        {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
        for tensors in (read_all(DistFile(tmp_path / "iter_0000003")), ours.flat())
    ]
    assert same(*weights)
    for batch in batches(shape, 2):
        assert ours.train(batch) == pytest.approx(theirs.train(batch), abs=2e-6 if precision == "fp32" else 2e-2)


@pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
@pytest.mark.parametrize(
    ("variant", "precision"), cross_precisions(["experts, mixtral", "experts, deepseek", "further tokens, untied"])
)
def test_through_megatron_and_back_is_bitwise(variant, precision, tmp_path):
    shape, words = VARIANTS[variant]
    plan = plan_for(precision, words)
    ours = Ours(plan, shape)
    theirs = Theirs(plan, shape)
    take_steps(ours, range(3))
    save_ours(ours, tmp_path / "ours" / "iter_0000003", 3)
    load_theirs(theirs, tmp_path / "ours" / "iter_0000003")
    back = DistFile(save_theirs(theirs, tmp_path / "theirs" / "iter_0000003", 3, {}))
    assert back.without_optimizer is None
    assert same(read_all(back), ours.flat())
