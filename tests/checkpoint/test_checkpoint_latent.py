"""Checkpoints of models with latent attention: of Megatron-Core and back, and from one layout to another."""

import pytest
from support.latent_variants import LATENT_VARIANTS
from support.launch import same
from support.megatron_core import Ours, Theirs, as_theirs, batches, plan_for, read_all, take_steps
from support.megatron_dist import load_theirs, save_ours, save_theirs
from support.model_variants import build

from megatron_lite.checkpoint.megatron_dist import DistFile

VARIANTS = {"queries of hidden states": "", "gpt": "", "yarn": "", "deepseek": "--moe-layer-freq [0,1]"}


@pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_megatron_saved_is_read_by_name(variant, tmp_path):
    plan, shape = plan_for("bf16", VARIANTS[variant]), LATENT_VARIANTS[variant]
    theirs = Theirs(plan, shape)
    theirs.model.load_state_dict(
        as_theirs(build(shape).state_dict(), dict(theirs.model.named_parameters())), strict=False
    )
    take_steps(theirs, range(3))
    file = DistFile(save_theirs(theirs, tmp_path / "iter_0000003", 3, {}))
    assert file.without_optimizer is None
    assert same(read_all(file), theirs.flat())
    read = file.record.model_shape
    assert (read.latent, read.kv_channels, read.rotary_width) == (shape.latent, shape.kv_channels, shape.rotary_width)
    assert (read.yarn_scaling_factor, read.rotary_interleaved) == (shape.yarn_scaling_factor, True)


@pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
@pytest.mark.parametrize("variant", VARIANTS)
def test_megatron_loads_what_was_saved_here_and_goes_on(variant, tmp_path):
    plan, shape = plan_for("fp32", VARIANTS[variant]), LATENT_VARIANTS[variant]
    ours, theirs = Ours(plan, shape), Theirs(plan, shape)
    take_steps(ours, range(3))
    save_ours(ours, tmp_path / "iter_0000003", 3)
    load_theirs(theirs, tmp_path / "iter_0000003")
    assert same(theirs.flat(), ours.flat())
    for batch in batches(shape, 2):
        assert ours.train(batch) == pytest.approx(theirs.train(batch), abs=2e-6)
