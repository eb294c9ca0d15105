"""Checkpoints go from Megatron-Core's own classes to this trainer and back, and training goes on as if it had not."""

import argparse
import contextlib
import dataclasses
import io
import json
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import flags, on_ranks, plan_of, same
from layout_table import ask_ranks, build_rank
from lazy_module import LazyModule
from model_variants import VARIANTS, build, tokens
from test_model_megatron_parity import megatron_on_cpu, reference  # noqa: F401 - a fixture

from megatron_lite.checkpoint.find import open_megatron
from megatron_lite.checkpoint.megatron_file import MegatronFile, write_megatron_file
from megatron_lite.checkpoint.training_state import Record
from megatron_lite.config.layout import take_part
from megatron_lite.data.batch import Batch
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import TrainingStep

distributed, enums = LazyModule("megatron.core.distributed"), LazyModule("megatron.core.enums")
megatron_optimizer, scheduling = (
    LazyModule(f"megatron.core.{name}") for name in ("optimizer", "optimizer_param_scheduler")
)
parallel_state = LazyModule("megatron.core.parallel_state")
schedules = LazyModule("megatron.core.pipeline_parallel.schedules")
transformer_enums = LazyModule("megatron.core.transformer.enums")
CPU = torch.device("cpu")
SAMPLES = 4  # of a step
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TRAINING = (
    "--train-iters 20 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 "
    "--adam-beta2 0.95 --clip-grad 1 --transformer-impl local"
)
PRECISION = {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 1024 --loss-scale-window 2"}


# settings that have the same name there
OPTIMIZER = "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum clip_grad"
SCALE = "fp16 bf16 initial_loss_scale min_loss_scale loss_scale_window hysteresis"
SHAPE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels seq_length max_position_embeddings "
    "num_query_groups rotary_percent rotary_base rotary_interleaved rotary_seq_len_interpolation_factor normalization "
    "norm_epsilon qk_layernorm init_method_std"
)


@pytest.fixture
def optimizers_on_cpu(megatron_on_cpu, monkeypatch):  # noqa: F811
    pretend(monkeypatch)


def pretend(monkeypatch):
    """Megatron's optimizers ask for CUDA in three ways: scalars on it, its tensors' type names, and .cuda()."""
    kind = torch.Tensor.type
    with torch.device("meta"):  # at its first use torch notes its constructors, which are not to be those below
        torch.empty(0)

    def on_cpu(make):
        return lambda *given, device=None, **named: make(*given, device="cpu" if device == "cuda" else device, **named)

    def as_on_cuda(self, *given, **named):
        return kind(self, *given, **named) if given or named else kind(self).replace("torch.", "torch.cuda.")

    monkeypatch.setattr(torch, "tensor", on_cpu(torch.tensor))
    monkeypatch.setattr(torch, "zeros", on_cpu(torch.zeros))
    monkeypatch.setattr(torch.Tensor, "type", as_on_cuda)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *given: self)


class Theirs:
    """A run of Megatron-Core: its model, its optimizer in its groups, its scheduler; saved as Megatron-LM does."""

    def __init__(self, plan, shape, weights=None, stage=None):
        self.plan, self.shape = plan, shape
        self.model = reference(shape, stage).to(DTYPES[plan.precision])
        if weights is not None:
            self.model.load_state_dict(weights, strict=False)
        self.model.ddp_config, self.wrapped = distributed.DistributedDataParallelConfig(), self.model
        self.make_optimizer(self.model)

    def make_optimizer(self, module, **settings):
        """settings: of its OptimizerConfig, beside those of the plan."""
        o, p, schedule = self.plan.args.optimizer, self.plan.args.precision, self.plan.learning_rate
        self.optimizer = megatron_optimizer.get_megatron_optimizer(
            megatron_optimizer.OptimizerConfig(
                **{name: getattr(o, name) for name in OPTIMIZER.split()},
                **{name: getattr(p, name) for name in SCALE.split()},
                params_dtype=DTYPES[self.plan.precision],
                **settings,
            ),
            [module],
        )
        self.scheduler = scheduling.OptimizerParamScheduler(
            self.optimizer,
            schedule.init,
            schedule.peak,
            schedule.floor,
            schedule.warmup_samples,
            schedule.decay_samples,
            schedule.style,
            schedule.start_weight_decay,
            schedule.end_weight_decay,
            schedule.weight_decay_samples,
            schedule.weight_decay_style,
            use_checkpoint_opt_param_scheduler=False,
        )

    def step(self, gradients: dict):
        """gradients: by name, unscaled."""
        scale = self.optimizer.get_loss_scale()
        for name, parameter in self.model.named_parameters():
            parameter.grad = (gradients[name] * scale).to(parameter.dtype)
        if self.optimizer.step()[0]:
            self.scheduler.step(SAMPLES)

    def train(self, batch) -> float:
        """One step on (tokens, labels) through its own forward and backward."""
        tokens, labels = batch
        length = self.shape.seq_length
        blocked = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        self.begin()
        loss = self.wrapped(tokens, torch.arange(length).expand_as(tokens), blocked, labels=labels).mean()
        loss.backward()
        self.update()
        return loss.item()

    def begin(self):
        self.optimizer.zero_grad()

    def update(self):
        assert self.optimizer.step()[0]
        self.scheduler.step(SAMPLES)

    def train_stage(self, batch) -> float | None:
        """The same of a pipeline's stage, a sequence at a time; the last one's loss."""
        length, sequences = self.shape.seq_length, iter(list(zip(*(whole.split(1) for whole in batch))))
        blocked = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

        def forward(sequences, model):
            tokens, labels = next(sequences)
            losses = model(tokens, torch.arange(length).expand_as(tokens), blocked, labels=labels)
            return losses, lambda losses: (losses.mean(), {"loss": losses.mean().item()})

        self.optimizer.zero_grad()
        found = schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward,
            data_iterator=sequences,
            model=[self.model],
            num_microbatches=SAMPLES,
            seq_length=length,
            micro_batch_size=1,
        )
        self.optimizer.step()
        self.scheduler.step(SAMPLES)
        return sum(one["loss"] for one in found) / SAMPLES if found else None

    def save(self, path: Path, iteration: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "args": self.namespace(iteration),
                "checkpoint_version": 3.0,
                "iteration": iteration,
                "model": self.model.state_dict_for_save_checkpoint(),
                "optimizer": self.optimizer.state_dict(),
                "opt_param_scheduler": self.scheduler.state_dict(),
                "num_floating_point_operations_so_far": 0,
                "rng_state": [
                    {
                        "random_rng_state": random.getstate(),
                        "np_rng_state": np.random.get_state(),
                        "torch_rng_state": torch.get_rng_state(),
                        "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),
                        "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
                    }
                ],
            },
            path,
        )
        return path

    def load(self, path: Path) -> dict:
        """As Megatron-LM's load_checkpoint; returns what the file holds."""
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        return state

    def namespace(self, iteration: int) -> argparse.Namespace:
        """As Megatron-LM's: what was typed, and objects of its own classes."""
        s, a = self.shape, self.plan.args
        return argparse.Namespace(
            **vars(a.training),
            **vars(a.optimizer),
            consumed_train_samples=iteration * SAMPLES,
            **{name: getattr(s, name) for name in SHAPE.split()},
            group_query_attention=s.num_query_groups != s.num_attention_heads,
            position_embedding_type=s.position_embedding,
            swiglu=s.activation == "swiglu",
            squared_relu=s.activation == "squared_relu",
            bias_gelu_fusion=s.activation == "gelu_tanh",
            add_bias_linear=s.linear_bias,
            add_qkv_bias=s.qkv_bias,
            untie_embeddings_and_output_weights=not s.tied_embeddings,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            apply_query_key_layer_scaling=s.query_key_layer_scaling,
            attention_softmax_in_fp32=s.softmax_in_fp32,
            apply_layernorm_1p=False,
            fp16=a.precision.fp16,
            bf16=a.precision.bf16,
            params_dtype=DTYPES[self.plan.precision],
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            model_type=enums.ModelType.encoder_or_decoder,
            attention_backend=transformer_enums.AttnBackend.auto,
            path=Path("somewhere"),
        )

    def flat(self) -> dict:
        """Its live tensors under our names, found by the identity of its parameters."""
        inner = self.optimizer.chained_optimizers[0]
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            master = getattr(p, "main_param", p)
            if master is not p:
                found[f"optimizer.{name}.master"] = master.detach()
            found |= {f"optimizer.{name}.{key}": value for key, value in inner.optimizer.state[master].items()}
        if getattr(inner, "grad_scaler", None):
            found |= {
                "loss_scale.scale": inner.grad_scaler.scale.reshape(()),
                "loss_scale.growth_tracker": torch.tensor(inner.grad_scaler._growth_tracker, dtype=torch.int32),
                "loss_scale.hysteresis_tracker": torch.tensor(inner.grad_scaler._hysteresis_tracker, dtype=torch.int32),
            }
        return found | {"optimizer.good_samples": torch.tensor(self.scheduler.num_steps)}


class Distributed(Theirs):
    """The same with --use-distributed-optimizer: flat buffers, in buckets with --overlap-grad-reduce."""

    def __init__(self, plan, shape, weights, bucket_size):
        self.plan, self.shape, self.bucket_size = plan, shape, bucket_size
        self.model = reference(shape).to(DTYPES[plan.precision])
        self.model.load_state_dict(weights, strict=False)
        self.model.config.bf16 = plan.args.precision.bf16
        self.wrapped = distributed.DistributedDataParallel(
            self.model.config,
            distributed.DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=bucket_size is not None,
                bucket_size=bucket_size,
            ),
            self.model,
        )
        self.make_optimizer(self.wrapped, use_distributed_optimizer=True)

    def begin(self):
        self.wrapped.zero_grad_buffer()
        super().begin()

    def update(self):
        self.wrapped.finish_grad_sync()
        super().update()

    def step(self, gradients: dict):
        for name, parameter in self.model.named_parameters():
            parameter.main_grad.copy_(gradients[name])
        super().update()

    def save(self, path: Path, iteration: int) -> Path:
        super().save(path, iteration)
        self.optimizer.save_parameter_state(str(path.with_name("distrib_optim.pt")))
        return path

    def namespace(self, iteration: int) -> argparse.Namespace:
        typed = super().namespace(iteration)
        typed.use_distributed_optimizer, typed.data_parallel_size, typed.ddp_bucket_size = True, 1, self.bucket_size
        return typed

    def flat(self) -> dict:
        """Through the optimizer's own way to a parameter's state (world of one: the shard is the whole)."""
        inner = self.optimizer.chained_optimizers[0]
        found = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            states = inner._get_main_param_and_optimizer_states(p)
            found |= {
                f"optimizer.{name}.{key}": states[key].detach().view(p.shape) for key in ("exp_avg", "exp_avg_sq")
            }
            if p.dtype != torch.float32:
                found[f"optimizer.{name}.master"] = states["param"].detach().view(p.shape)
            found[f"optimizer.{name}.step"] = torch.tensor(float(self.scheduler.num_steps // SAMPLES))
        return found | {"optimizer.good_samples": torch.tensor(self.scheduler.num_steps)}


class Ours:
    """The same of this trainer."""

    def __init__(self, plan, shape):
        self.plan, self.shape = plan, shape
        self.model = build(shape, seed=7).to(DTYPES[plan.precision])
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = Optimizer(plan, list(self.parameters.values()), CPU)

    def step(self, gradients: dict):
        scale = self.optimizer.loss_scale
        scaled = [(gradients[name] * scale).to(p.dtype) for name, p in self.parameters.items()]
        self.optimizer.step(scaled, SAMPLES, lambda name: contextlib.nullcontext())

    def train(self, batch) -> float:
        loss = self.model(*batch).mean()
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        self.step(dict(zip(self.parameters, gradients)))
        return loss.item()

    def flat(self) -> dict:
        weights = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        return weights | self.optimizer.tensors(list(self.parameters))

    def load(self, file: MegatronFile):
        file.read_into(self.flat())
        self.optimizer.resume()

    def record(self, iteration: int, **more) -> Record:
        known = {"vocab_size": 127, "consumed_valid_samples": 8} | more
        return describe_run(self, iteration, **known)

    def save(self, path: Path, iteration: int):
        with open(path, "wb") as file:
            write_megatron_file(file, self.record(iteration), self.flat(), self.plan.args)


def describe_run(run, iteration: int, **more) -> Record:
    return Record(
        iteration=iteration,
        consumed=iteration * SAMPLES,
        shape=dataclasses.asdict(run.shape),
        precision=run.plan.precision,
        schedule=dataclasses.asdict(run.plan.learning_rate),
        optimizer=run.plan.args.optimizer.optimizer,
        **more,
    )


def read_all(file) -> dict:
    read = {name: torch.empty(file.size_of(name), dtype=file.dtype_of(name)) for name in file.names()}
    file.read_into(read)
    return read


def gradients(shape, step: int, infinite: bool = False) -> dict:
    generator = torch.Generator().manual_seed(step)
    made = {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in build(shape).named_parameters()}
    if infinite:
        made["embedding.word_embeddings.weight"][0, 0] = float("inf")
    return made


def plan_for(precision: str, *words: str):
    return plan_of(flags(TRAINING, PRECISION[precision], *words))


def take_steps(run, steps):
    """Those of fp16 meet an overflow at first, and again."""
    for step in steps:
        run.step(gradients(run.shape, step, infinite=run.plan.precision == "fp16" and step in (1, 5)))


def assert_both_go_on(ours, theirs):
    """Compared in fp32: halves are their rounded masters, so that a last digit there may turn one over."""
    for run in (ours, theirs):
        take_steps(run, range(4, 8))
    mine, other = ours.flat(), theirs.flat()
    full = [name for name in mine if mine[name].dtype == torch.float32]
    assert mine.keys() == other.keys() and any(name.endswith("exp_avg_sq") for name in full)
    assert max((mine[name] - other[name]).abs().max().item() for name in full) < 1e-6


def batches(shape, count: int) -> list:
    return [(tokens(shape, SAMPLES, seed=2 * i), tokens(shape, SAMPLES, seed=2 * i + 1)) for i in range(count)]


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
    """As `pretend`, and what Megatron asks of CUDA where there are several ranks. The process ends with the test."""
    pretend(patch := pytest.MonkeyPatch())
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
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
