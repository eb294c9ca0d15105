"""torch_dist folders go from Megatron-Core's dist_checkpointing to this trainer and back, and training goes on as if they had not."""

import dataclasses
import io

import pytest
import torch
from support.launch import flags, plan_of, quietly, same, steps
from support.megatron_core import (
    Distributed,
    Ours,
    Theirs,
    batches,
    describe_run,
    gradients,
    plan_for,
    read_all,
    take_steps,
)
from support.megatron_dist import load_theirs, mapping, save_ours, save_theirs
from support.model_variants import VARIANTS, build
from support.wording import wording

from megatron_lite.checkpoint.folder import read_manifest
from megatron_lite.checkpoint.megatron_dist import DistFile
from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.cli.main import main

pytestmark = pytest.mark.usefixtures("ended_managers", "writer_on_cpu")
RESHARDABLE, BUCKETS, APART = (
    {"distrib_optim_sharding_type": "fully_reshardable"},
    {"distrib_optim_sharding_type": "dp_reshardable"},
    {"singleton_local_shards": True},
)


@pytest.mark.parametrize(
    "precision, variant, metadata",
    [
        ("fp32", "gqa_swiglu_rmsnorm", {}),
        ("fp32", "untied", {"non_homogeneous_layers": True}),
        ("bf16", "qk_layernorm", {}),
        ("bf16", "gqa_swiglu_rmsnorm", APART),
        ("fp16", "gelu_tanh", {}),
    ],
)
def test_what_megatron_saved_is_read_by_name(precision, variant, metadata, tmp_path):
    plan, shape = plan_for(precision), VARIANTS[variant]
    theirs = Theirs(plan, shape, build(shape).state_dict())
    take_steps(theirs, range(3))
    file = DistFile(save_theirs(theirs, tmp_path / "iter_0000003", 3, metadata))
    assert file.without_optimizer is None
    assert same(read_all(file), theirs.flat())
    assert file.record == describe_run(theirs, 3, trainer="Megatron-LM")


def test_plain_values_are_read_from_among_the_objects(tmp_path):
    """As Megatron-Core 0.19 stores them, in no file of their own."""
    shape = VARIANTS["gqa_swiglu_rmsnorm"]
    theirs = Theirs(plan_for("bf16"), shape, build(shape).state_dict())
    take_steps(theirs, range(3))
    folder = save_theirs(theirs, tmp_path / "first" / "iter_0000003", 3, {})
    if (folder / "common.pt").exists():  # before 0.19
        common = torch.load(folder / "common.pt", weights_only=False)
        stored = mapping.ShardedObject("common_state", common, (1,), (0,))
        folder = save_theirs(theirs, tmp_path / "second" / "iter_0000003", 3, {}, common_state=stored)
        (folder / "common.pt").unlink()
    file = DistFile(folder)
    assert file.without_optimizer is None
    assert same(read_all(file), theirs.flat())
    assert file.record == describe_run(theirs, 3, trainer="Megatron-LM")
    assert read_manifest(folder) == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("metadata, bucket_size", [(RESHARDABLE, None), (BUCKETS, None), (BUCKETS, 100)])
def test_the_distributed_optimizers_state_is_read(precision, metadata, bucket_size, tmp_path):
    plan, shape = plan_for(precision), VARIANTS["gqa_swiglu_rmsnorm"]
    theirs = Distributed(plan, shape, build(shape).state_dict(), bucket_size)
    take_steps(theirs, range(3))
    file = DistFile(save_theirs(theirs, tmp_path / "iter_0000003", 3, metadata))
    assert file.without_optimizer is None
    assert same(read_all(file), theirs.flat())


def test_masters_that_megatron_mixed_up_are_not_taken(tmp_path):
    """Megatron-Core 0.16.1 takes slices of padded buckets from a buffer without the padding."""
    plan, shape = plan_for("bf16"), VARIANTS["gqa_swiglu_rmsnorm"]
    theirs = Distributed(plan, shape, build(shape).state_dict(), bucket_size=100)
    theirs.step(gradients(shape, 0))
    file = DistFile(save_theirs(theirs, tmp_path / "iter_0000001", 1, RESHARDABLE))
    assert file.record.optimizer is None and wording("checkpoint/masters-that-are-not") in file.without_optimizer
    weights = {name: value for name, value in theirs.flat().items() if name.startswith("model.")}
    assert same(read_all(file), weights)


@pytest.mark.parametrize(
    "precision, variant",
    [("fp32", "gqa_swiglu_rmsnorm"), ("fp32", "untied"), ("bf16", "qk_layernorm"), ("fp16", "gelu_tanh")],
)
def test_megatron_loads_what_was_saved_here(precision, variant, tmp_path):
    plan, shape = plan_for(precision), VARIANTS[variant]
    ours, theirs = Ours(plan, shape), Theirs(plan, shape)
    take_steps(ours, range(3))
    record = save_ours(ours, tmp_path / "iter_0000003", 3)
    state = load_theirs(theirs, tmp_path / "iter_0000003")
    assert same(theirs.flat(), ours.flat())
    assert state["iteration"] == 3 and state["args"].consumed_train_samples == 12
    assert torch.equal(state["rng_state"][0]["torch_rng_state"], torch.get_rng_state())
    again = DistFile(tmp_path / "iter_0000003")
    held = {name: value for name, value in read_all(again).items() if not name.startswith("random.")}
    assert again.record == CheckpointRecord.from_json(record.to_json()) or again.record.trainer == "Megatron-LM"
    assert same(held, ours.flat())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_megatrons_distributed_optimizer_loads_it_too(precision, tmp_path, monkeypatch):
    plan, shape = plan_for(precision), VARIANTS["gqa_swiglu_rmsnorm"]
    ours = Ours(plan, shape)
    take_steps(ours, range(3))
    save_ours(ours, tmp_path / "iter_0000003", 3)
    theirs = Distributed(plan, shape, build(shape, seed=3).state_dict(), bucket_size=100)
    # without Transformer Engine's Adam, its state must exist, and a step per parameter that it loaded before is missed
    theirs.step(gradients(shape, 9))
    theirs.scheduler.num_steps = 0
    optimizer = pytest.importorskip("megatron.core.optimizer").DistributedOptimizer
    put = optimizer._set_main_param_and_optimizer_states
    monkeypatch.setattr(
        optimizer,
        "_set_main_param_and_optimizer_states",
        lambda self, parameter, tensors: put(
            self, parameter, tensors | {"step": self._get_main_param_and_optimizer_states(parameter)["step"]}
        ),
    )
    load_theirs(theirs, tmp_path / "iter_0000003")
    # steps are told by the clock there
    found, expected = (
        {name: value for name, value in run.flat().items() if not name.endswith(".step")} for run in (theirs, ours)
    )
    assert same(found, expected)
    steps = {value["step"].item() for value in theirs.optimizer.chained_optimizers[0].optimizer.state.values()}
    assert steps == {3.0}


LIKE = {"fp32": 2e-6, "bf16": 3e-3}  # of losses near 5: bf16 is rounded after other operations there


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_goes_on_with_the_same_losses(precision, tmp_path):
    """Megatron begins, this trainer takes over, and another Megatron takes over from it."""
    plan, shape = plan_for(precision), VARIANTS["gqa_swiglu_rmsnorm"]
    fed = batches(shape, 25)
    theirs, ours, others = Theirs(plan, shape, build(shape).state_dict()), Ours(plan, shape), Theirs(plan, shape)
    for batch in fed[:5]:
        theirs.train(batch)
    ours.load(DistFile(save_theirs(theirs, tmp_path / "theirs" / "iter_0000005", 5, {})))
    save_ours(ours, tmp_path / "ours" / "iter_0000005", 5)
    load_theirs(others, tmp_path / "ours" / "iter_0000005")
    losses = [[run.train(batch) for batch in fed[5:15]] for run in (theirs, ours, others)]
    assert losses[2] == losses[0]
    assert losses[1] == pytest.approx(losses[0], abs=LIKE[precision])
    save_ours(ours, tmp_path / "ours" / "iter_0000015", 15)
    others = Theirs(plan, shape)
    load_theirs(others, tmp_path / "ours" / "iter_0000015")
    again = Ours(plan, shape)
    again.load(DistFile(save_theirs(others, tmp_path / "others" / "iter_0000015", 15, {})))
    losses = [[run.train(batch) for batch in fed[15:]] for run in (ours, others, again)]
    assert losses[2] == losses[0]
    assert losses[1] == pytest.approx(losses[0], abs=LIKE[precision])


# launch.MODEL
SMALL = dataclasses.replace(VARIANTS["gelu_tanh"], ffn_hidden_size=128, seq_length=16, init_method_std=0.02)


def test_states_of_transformer_engine_are_left_out_with_a_word(tmp_path, capsys):
    words = "--lr-warmup-iters 2 --lr-decay-iters 6 --min-lr 1e-3 --weight-decay 0.1 --transformer-impl local"
    plan = plan_of(flags(words))
    theirs = Theirs(plan, SMALL, build(SMALL).state_dict())
    take_steps(theirs, range(3))
    module = "decoder.layers.self_attention.core_attention._extra_state"
    states = [
        mapping.ShardedObject(module, state, (2,), (layer,))
        for layer, state in enumerate([io.BytesIO(), io.BytesIO(b"fp8")])
    ]
    save_theirs(theirs, tmp_path / "theirs" / "iter_0000003", 3, {}, attention=states)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("3")
    said = "note: --load {}: 10 _extra_state entries, Transformer Engine's own (FP8 scales, or empty), are left out"
    _, out = quietly(flags(words, "--exit-interval 5 --load", tmp_path / "theirs"), tmp_path / "run")
    assert said.format(tmp_path / "theirs" / "iter_0000003") in out and "loaded iteration 3" in out
    assert [record["iteration"] for record in steps(tmp_path / "run")] == [4, 5]
    assert main(["convert", "--load", str(tmp_path / "theirs"), "--save", str(tmp_path / "ours")]) == 0
    assert said.format(tmp_path / "theirs" / "iter_0000003") in capsys.readouterr().out
    converted = DistFile(tmp_path / "ours" / "iter_0000003")
    assert same(read_all(converted), theirs.flat()) and converted.arguments["adam_beta2"] == 0.999
    again = Theirs(plan, SMALL)
    load_theirs(again, tmp_path / "ours" / "iter_0000003", random=False)
    assert same(again.flat(), theirs.flat())
