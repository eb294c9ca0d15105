"""Checkpoints go from Megatron-Core's own classes to this trainer and back, and training goes on as if it had not."""

import contextlib
import dataclasses
import io
import json
import types
from pathlib import Path

import pytest
import torch
from layout_table import ask_ranks, build_rank
from support.launch import flags, on_ranks, plan_of, same
from support.megatron_core import (
    CPU,
    TRAINING,
    Distributed,
    Ours,
    Theirs,
    batches,
    describe_run,
    gradients,
    parallel_state,
    plan_for,
    pretend_cuda,
    read_all,
    take_steps,
)
from support.model_variants import VARIANTS, build

from megatron_lite.checkpoint.find import open_megatron
from megatron_lite.checkpoint.megatron_file import MegatronFile
from megatron_lite.config.layout import take_part
from megatron_lite.data.batch import Batch
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import TrainingStep


def assert_both_go_on(ours, theirs):
    """Compared in fp32: halves are their rounded masters, so that a last digit there may turn one over."""
    for run in (ours, theirs):
        take_steps(run, range(4, 8))
    mine, other = ours.flat(), theirs.flat()
    full = [name for name in mine if mine[name].dtype == torch.float32]
    assert mine.keys() == other.keys() and any(name.endswith("exp_avg_sq") for name in full)
    assert max((mine[name] - other[name]).abs().max().item() for name in full) < 1e-6


CASES = [
    ("fp32", "gelu_tanh"),
    ("fp32", "untied"),
    ("fp32", "gqa_swiglu_rmsnorm"),
    ("fp32", "qk_rmsnorm_rope"),
    ("bf16", "qk_layernorm"),
    ("fp16", "gelu_tanh"),
]


@pytest.mark.parametrize("precision, variant", CASES)
def test_what_megatron_saved_is_read_by_name_and_goes_on(precision, variant, tmp_path, optimizers_on_cpu):
    plan, shape = plan_for(precision), VARIANTS[variant]
    theirs = Theirs(plan, shape, build(shape).state_dict())
    take_steps(theirs, range(4))
    file = MegatronFile(theirs.save(tmp_path / "iter_0000004" / "mp_rank_00" / "model_optim_rng.pt", 4))
    assert same(read_all(file), theirs.flat())
    assert file.record == describe_run(theirs, 4, trainer="Megatron-LM")
    ours = Ours(plan, shape)
    ours.load(file)
    assert_both_go_on(ours, theirs)


@pytest.mark.parametrize("precision, variant", CASES)
def test_megatron_loads_what_was_saved_here_and_goes_on(precision, variant, tmp_path, optimizers_on_cpu):
    plan, shape = plan_for(precision), VARIANTS[variant]
    ours = Ours(plan, shape)
    take_steps(ours, range(4))
    ours.save(tmp_path / "model_optim_rng.pt", 4)
    theirs = Theirs(plan, shape)
    names = theirs.model.state_dict().keys()
    assert theirs.load(tmp_path / "model_optim_rng.pt")["model"].keys() == names
    assert same(theirs.flat(), ours.flat())
    assert_both_go_on(ours, theirs)


def test_sgds_momentum_crosses_over_both_ways(tmp_path, optimizers_on_cpu):
    plan, shape = plan_for("fp32", "--optimizer sgd"), VARIANTS["gelu_tanh"]
    theirs, ours = Theirs(plan, shape, build(shape).state_dict()), Ours(plan, shape)
    for step in range(3):
        theirs.step(gradients(shape, step))
    file = MegatronFile(theirs.save(tmp_path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", 3))
    assert file.record.optimizer == "sgd"
    ours.load(file)
    assert same(ours.flat(), theirs.flat())
    ours.step(gradients(shape, 3))
    ours.save(tmp_path / "model_optim_rng.pt", 4)
    back = Theirs(plan, shape)
    back.load(tmp_path / "model_optim_rng.pt")
    assert same(back.flat(), ours.flat())
    for run in (back, theirs):
        run.step(gradients(shape, 3 if run is theirs else 4))
    theirs.step(gradients(shape, 4))
    assert max((a - b).abs().max() for a, b in zip(back.model.parameters(), theirs.model.parameters())) < 1e-6


DECOUPLED = {"decoupled_lr": 1e-3, "decoupled_min_lr": 1e-4}


@pytest.mark.parametrize("settings", [{}, DECOUPLED, DECOUPLED | {"apply_wd_to_qk_layernorm": True}])
def test_groups_of_their_own_learning_rate_and_decaying_head_norms(settings, tmp_path, optimizers_on_cpu):
    """--decoupled-lr makes a third group; --apply-wd-to-qk-layernorm moves vectors into the decaying one."""
    plan, shape = plan_for("fp32"), VARIANTS["qk_layernorm"]
    theirs = Theirs(plan, shape, build(shape).state_dict())
    theirs.make_optimizer(theirs.model, **settings)
    take_steps(theirs, range(3))
    path = theirs.save(tmp_path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", 3)
    assert same(read_all(MegatronFile(path)), theirs.flat())
    state = torch.load(path, weights_only=False)
    groups = state["optimizer"]["param_groups"]
    assert len(groups) == (3 if settings else 2)
    for group in groups:  # as before Megatron-Core 0.16
        group["is_decoupled_lr"] = not group.pop("default_config")
    torch.save(state, path)
    assert same(read_all(MegatronFile(path)), theirs.flat())


GROUP_FLAGS = {
    "--decoupled-lr 3e-2 --decoupled-min-lr 3e-3": {"decoupled_lr": 3e-2, "decoupled_min_lr": 3e-3},
    "--decoupled-lr 3e-2": {"decoupled_lr": 3e-2},
    "--qk-layernorm --apply-wd-to-qk-layernorm": {"apply_wd_to_qk_layernorm": True},
    "--decoupled-lr 3e-2 --qk-layernorm --apply-wd-to-qk-layernorm": {
        "decoupled_lr": 3e-2,
        "apply_wd_to_qk_layernorm": True,
    },
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", GROUP_FLAGS)
def test_groups_of_parameters_are_trained_as_by_megatron_core(words, precision, tmp_path, optimizers_on_cpu):
    """Learning rates of embedding and output matrix, and decaying norms of heads; checkpoints of them cross over."""
    plan, shape = plan_for(precision, words, "--weight-decay 0.3"), VARIANTS["qk_layernorm"]
    ours, plain = Ours(plan, shape), Ours(plan_for(precision, "--weight-decay 0.3"), shape)
    theirs = Theirs(plan, shape, ours.model.state_dict())
    theirs.make_optimizer(theirs.model, **GROUP_FLAGS[words])
    for step in range(5):
        for run in (ours, plain, theirs):
            run.step(gradients(shape, step))

    def differ(one, other):
        pairs = [(one.flat()[name], other.flat()[name]) for name in one.flat() if name.startswith("model.")]
        return max((a.float() - b.float()).abs().max().item() for a, b in pairs)

    assert differ(ours, theirs) <= (1e-6 if precision == "fp32" else 0) and differ(ours, plain) > 1e-4
    ours.save(tmp_path / "model_optim_rng.pt", 5)
    assert same(read_all(MegatronFile(tmp_path / "model_optim_rng.pt")), ours.flat())
    # Megatron-Core 0.16.1 takes two groups that differ in their learning rate only for one, also in its own checkpoints
    if "decoupled" not in words:
        back = Theirs(plan, shape)
        back.make_optimizer(back.model, **GROUP_FLAGS[words])
        back.load(tmp_path / "model_optim_rng.pt")
        assert same(back.flat(), ours.flat())
    saved = torch.load(tmp_path / "model_optim_rng.pt", weights_only=False)["optimizer"]
    groups = saved.get("optimizer", saved)["param_groups"]
    own = [(group["max_lr"], group["min_lr"]) for group in groups if not group["default_config"]]
    floor = plan.learning_rate.floor
    assert own == ([(3e-2, 3e-3 if "min" in words else floor)] if "decoupled" in words else [])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bucket_size", [None, 100])
def test_the_distributed_optimizers_buffers_are_read(precision, bucket_size, tmp_path, optimizers_on_cpu):
    plan, shape = plan_for(precision), VARIANTS["qk_layernorm"]
    theirs = Distributed(plan, shape, build(shape).state_dict(), bucket_size)
    buckets = len(theirs.wrapped.buffers[0].buckets)
    assert buckets == 1 if bucket_size is None else buckets > 3
    for step in range(3):
        theirs.step(gradients(shape, step))
    file = MegatronFile(theirs.save(tmp_path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", 3))
    assert file.without_optimizer is None and file.record.optimizer == "adam"
    assert same(read_all(file), theirs.flat())


KINDS, LAYOUT = "is of several kinds of parameters, or from before February", "is laid out in a way that does not fit"
BESIDE = [  # what is changed in its file and in the buffers beside it: why there is no optimizer
    (lambda groups, buffers: buffers.pop("buckets_coalesced"), KINDS),
    (lambda groups, buffers: buffers.update({1: buffers[0]}), KINDS),
    (lambda groups, buffers: flat_of(buffers)["param"].mul_(2), LAYOUT),
    (lambda groups, buffers: flat_of(buffers).update(param=flat_of(buffers)["param"][1:]), LAYOUT),
    (lambda groups, buffers: groups[0].update(step=4), "has made [3, 4] steps, not one number of them"),
    (lambda groups, buffers: buffers.update(trap=eval), "cannot be read; it is damaged, or names classes"),
]


def flat_of(buffers: dict) -> dict:
    (flat,) = buffers[0].values()
    return flat


def test_buffers_that_do_not_fit_leave_the_weights(tmp_path, optimizers_on_cpu):
    theirs = Distributed(plan_for("bf16"), VARIANTS["qk_layernorm"], build(VARIANTS["qk_layernorm"]).state_dict(), None)
    take_steps(theirs, range(3))
    path = theirs.save(tmp_path / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt", 3)
    beside = path.with_name("distrib_optim.pt")
    sound = path.read_bytes(), beside.read_bytes()
    for change, why in BESIDE:
        state, buffers = (torch.load(io.BytesIO(content), weights_only=False) for content in sound)
        change(state["optimizer"]["optimizer"]["param_groups"], buffers)
        torch.save(state, path)
        torch.save(buffers, beside)
        file = MegatronFile(path)
        assert f"in distrib_optim.pt {why}" in file.without_optimizer
        assert file.names() == {f"model.{name}" for name, _ in theirs.model.named_parameters()}


def pretend_on_ranks():
    """As `pretend_cuda`, and what Megatron asks of CUDA where there are several ranks. The process ends with the test."""
    pretend_cuda(patch := pytest.MonkeyPatch())
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    # 0.19 asks for it before gradients are reduced, in case of events of CUDA graphs
    patch.setattr(torch.cuda, "current_stream", lambda: None)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    patch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: tracker)


def train_in_parts(world, variant: str, folder: str, in_stages: str = ""):
    """For on_ranks: Megatron trains in tensor parallel, or in stages, saves after 3 steps, and writes the losses of 7 more."""
    pretend_on_ranks()
    sizes = {"pipeline_model_parallel_size" if in_stages else "tensor_model_parallel_size": world.size}
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(1)
    shape, part = VARIANTS[variant], f"00_{world.rank:03d}" if in_stages else f"{world.rank:02d}"
    theirs = Theirs(plan_for("fp32"), shape, stage=(world.rank, world.size) if in_stages else None)
    fed, train = batches(shape, 10), theirs.train_stage if in_stages else theirs.train
    for batch in fed[:3]:
        train(batch)
    theirs.save(Path(folder) / f"mp_rank_{part}" / "model_optim_rng.pt", 3)
    losses = [train(batch) for batch in fed[3:]]
    if world.is_last:
        (Path(folder) / "losses.json").write_text(json.dumps(losses))


def go_on_in_parts(world, variant: str, folder: str, words: str):
    """For on_ranks: the same here, from what it saved; prints the losses."""
    shape, model_words = VARIANTS[variant], MODEL_WORDS[variant]
    plan = plan_of(flags(TRAINING, model_words, words), world)
    assert dataclasses.replace(plan.shape, init_method_std=shape.init_method_std) == shape
    replica, optimizer = build_rank(plan)
    checkpoints = Checkpoints(plan, replica, optimizer, CPU)
    checkpoints._restore(Path(folder), False, Progress())
    losses, phase = [], lambda _: contextlib.nullcontext()
    step = TrainingStep(plan, replica, optimizer, lambda batch: Batch(*batch, None, None, None))
    step.make.device = CPU
    for batch in batches(shape, 10)[3:]:
        result = step(zip(*(whole.split(plan.args.training.micro_batch_size) for whole in batch)), 0, phase)
        losses.append(result.loss_sum.item() / max(result.tokens.item(), 1))
    print(json.dumps(losses))


TENSOR = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --attention-backend unfused"
STAGES = "--pipeline-model-parallel-size 2 --make-vocab-size-divisible-by 128 --attention-backend unfused --micro-batch-size 1 --global-batch-size 4"
MODEL_WORDS = {
    "untied": "--hidden-size 32 --ffn-hidden-size 96 --seq-length 12 --untie-embeddings-and-output-weights",
    "gqa_swiglu_rmsnorm": (
        "--hidden-size 32 --ffn-hidden-size 96 --seq-length 12 --swiglu --normalization RMSNorm "
        "--group-query-attention --num-query-groups 2"
    ),
    "one_query_group": (
        "--hidden-size 32 --ffn-hidden-size 96 --seq-length 12 --group-query-attention --num-query-groups 1"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", MODEL_WORDS)
def test_a_tensor_parallel_run_goes_on_as_one_and_in_parts(variant, tmp_path):
    on_ranks(train_in_parts, tmp_path, variant, str(tmp_path))
    theirs = json.loads((tmp_path / "losses.json").read_text())
    plan, shape = plan_for("fp32"), VARIANTS[variant]
    ours = Ours(plan, shape)
    ours.load(open_megatron(tmp_path))
    losses = [ours.train(batch) for batch in batches(shape, 10)[3:]]
    assert losses == pytest.approx(theirs, abs=2e-6)
    for words in (TENSOR, f"{TENSOR} --sequence-parallel"):
        found = ask_ranks(go_on_in_parts, tmp_path, variant, str(tmp_path), words)
        assert found == [pytest.approx(theirs, abs=2e-6)] * 2


@pytest.mark.slow
def test_a_pipeline_goes_on_as_one_and_in_stages(tmp_path):
    on_ranks(train_in_parts, tmp_path, "untied", str(tmp_path), "in stages")
    theirs = json.loads((tmp_path / "losses.json").read_text())
    ours = Ours(plan_for("fp32"), VARIANTS["untied"])
    ours.load(open_megatron(tmp_path))
    losses = [ours.train(batch) for batch in batches(VARIANTS["untied"], 10)[3:]]
    assert losses == pytest.approx(theirs, abs=2e-6)
    found = ask_ranks(go_on_in_parts, tmp_path, "untied", str(tmp_path), STAGES)
    assert found[-1] == pytest.approx(theirs, abs=2e-6)


def share_out_the_optimizer(world, variant: str, its: str):
    """For on_ranks: ten losses of Megatron's distributed optimizer, or ("") of ours, each rank on its half of the samples."""
    shape, own = VARIANTS[variant], slice(2 * world.rank, 2 * world.rank + 2)
    fed = [[whole[own] for whole in batch] for batch in batches(shape, 10)]
    if its:
        pretend_on_ranks()
        parallel_state.initialize_model_parallel()
        theirs = Distributed(plan_for("fp32"), shape, build(shape).state_dict(), None)
        losses = [theirs.train(batch) for batch in fed]
    else:
        plan = plan_of(flags(TRAINING, MODEL_WORDS[variant], OF_ONE_MICRO_BATCH, "--use-distributed-optimizer"), world)
        replica, optimizer = build_rank(plan)
        for name, parameter in zip(replica.names, replica.parameters):
            take_part(parameter.detach(), build(shape).state_dict()[name], replica.parts[name])
        step = TrainingStep(plan, replica, optimizer, lambda batch: Batch(*batch, None, None, None))
        step.make.device = CPU
        results = [step(iter([batch]), 0, lambda _: contextlib.nullcontext()) for batch in fed]
        losses = [(result.loss_sum / result.tokens).item() for result in results]
    losses = torch.tensor(losses)
    torch.distributed.all_reduce(losses)
    print(json.dumps((losses / 2).tolist()))


OF_ONE_MICRO_BATCH = (
    "--make-vocab-size-divisible-by 128 --attention-backend unfused --micro-batch-size 2 --global-batch-size 4"
)


@pytest.mark.slow
@pytest.mark.parametrize("variant", MODEL_WORDS)
def test_the_distributed_optimizer_is_ours(variant, tmp_path):
    theirs, ours = (ask_ranks(share_out_the_optimizer, tmp_path, variant, its)[0] for its in ("theirs", ""))
    assert ours == pytest.approx(theirs, abs=2e-6)
