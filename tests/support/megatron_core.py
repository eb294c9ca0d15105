"""Megatron-Core's model and training, one rank on the CPU: what ours are held against."""

import argparse
import contextlib
import dataclasses
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.megatron_file import MegatronFile, write_megatron_file
from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.model.experts import list_mixtures
from megatron_lite.optim.optimizer import Optimizer
from support.launch import flags, plan_of
from support.lazy_module import LazyModule
from support.model_variants import build, tokens

gpt, layer_specs = LazyModule("megatron.core.models.gpt"), LazyModule("megatron.core.models.gpt.gpt_layer_specs")


transformer = LazyModule("megatron.core.transformer")
multi_token_prediction = LazyModule("megatron.core.transformer.multi_token_prediction")
moe_utils = LazyModule("megatron.core.transformer.moe.moe_utils")
transformer_attention = LazyModule("megatron.core.transformer.dot_product_attention")
package_info = LazyModule("megatron.core.package_info")


def activation(shape):
    functions = {
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "gelu_erf": torch.nn.functional.gelu,
        "swiglu": torch.nn.functional.silu,
        "squared_relu": lambda x: torch.relu(x) ** 2,
    }
    return {"activation_func": functions[shape.activation], "gated_linear_unit": shape.activation == "swiglu"}


def forget_balancing_losses():
    """Megatron-Core keeps a balancing loss of each layer for the whole process, of as many as the first model had."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # of 0.19; the other gives a copy there
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def describe_latent(shape):
    """Latent attention as Megatron-Core's settings."""
    latent = shape.latent
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_head_dim,
        "qk_pos_emb_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_type": "rope" if shape.yarn_scaling_factor is None else "yarn",
        "rotary_base": shape.rotary_base,
        "rotary_percent": shape.rotary_percent,
        "rotary_scaling_factor": latent.scaling_factor,
        "original_max_position_embeddings": shape.yarn_original_max_position_embeddings,
        "beta_fast": shape.yarn_beta_fast,
        "beta_slow": shape.yarn_beta_slow,
        "mscale": shape.yarn_mscale,
        "mscale_all_dim": latent.mscale_all_dim,
        # its local attention takes the width of its output from here
        "kv_channels": latent.v_head_dim,
        "rotary_interleaved": False,
    }


def has_query_norms():
    """Whether Megatron-Core gives queries of latent attention a norm where no latent vector comes before them."""
    return (package_info.MAJOR, package_info.MINOR) >= (0, 19)


def take_widths(specification):
    """Let the local specification's attention be built with the two widths that latent attention gives it, which
    Transformer Engine's asks for; it finds them in its arguments."""
    dot_product = transformer_attention.DotProductAttention

    class OfTwoWidths(dot_product):
        def __init__(self, *given, k_channels=None, v_channels=None, **named):
            super().__init__(*given, **named)

    for layer in getattr(specification, "layer_specs", [specification]):
        layer.submodules.self_attention.submodules.core_attention = OfTwoWidths
    return specification


YARN_NAMES = {
    "yarn_scaling_factor": "yarn_rotary_scaling_factor",
    "yarn_round_to_int": "yarn_correction_range_round_to_int",
}


def describe_experts(experts):
    """A mixture of experts as Megatron-Core's settings."""
    kinds, factors = zip(*experts.balancing) if experts.balancing else ((), ())
    return {
        "num_moe_experts": experts.number,
        # as one number where each layer has experts: a list makes its folders keep layers apart
        "moe_layer_freq": 1 if all(experts.layers) else [int(one) for one in experts.layers],
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.topk,
        "moe_router_score_function": experts.score_function,
        "moe_router_pre_softmax": experts.pre_softmax,
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_router_num_groups": experts.groups,
        "moe_router_group_topk": experts.group_topk,
        "moe_router_dtype": experts.router_dtype,
        "moe_router_enable_expert_bias": experts.expert_bias,
        "moe_router_load_balancing_type": "sinkhorn" if experts.sinkhorn else list(kinds) or "none",
        "moe_aux_loss_coeff": list(factors) or 0.0,
        "moe_z_loss_coeff": experts.z_loss_coeff,
        "moe_expert_capacity_factor": experts.capacity_factor,
        "moe_token_drop_policy": experts.drop_policy,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_apply_probs_on_input": experts.probs_on_input,
        # its all-to-all asks for a CUDA stream; a single rank computes the same
        "moe_token_dispatcher_type": "allgather",
    }


LAYER_OF_0_19 = ".mtp_model_layer."
LAYER = ".transformer_layer."
EXPERT = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.weight)")


def name_as_ours(name: str) -> tuple[str, int | None]:
    """(our name of one of Megatron-Core's parameters, which expert it is of); there each expert has its own."""
    known = name.replace(LAYER_OF_0_19, LAYER)
    match = EXPERT.fullmatch(known)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else (known, None)


def join_experts(flat: dict) -> dict:
    """Flat tensors of Megatron-Core with those of a layer's experts one below the other, as ours are."""
    joined: dict = {}
    experts: dict[str, list] = {}
    for name, tensor in flat.items():
        owner, kind = name, ""
        if name.startswith("optimizer.") and not name.endswith(".weight"):
            owner, _, kind = name.rpartition(".")
        prefix, _, weight = owner.partition(".")
        ours, number = name_as_ours(weight)
        key = ".".join(part for part in (prefix, ours, kind) if part)
        if number is None or tensor.ndim == 0:
            joined[key] = tensor
        else:
            experts.setdefault(key, []).append(tensor)
    return joined | {key: torch.cat(parts) for key, parts in experts.items()}


def as_theirs(tensors: dict, names) -> dict:
    """Our tensors by Megatron-Core's names: those that it has."""
    found = {}
    experts = 1 + max((number for _, number in map(name_as_ours, names) if number is not None), default=0)
    for name in names:
        ours, number = name_as_ours(name)
        if ours in tensors:
            found[name] = tensors[ours] if number is None else tensors[ours].unflatten(0, (experts, -1))[number]
    return found


def reference(shape, stage=None):
    """stage: of a pipeline: (its number, their number)."""
    number, stages = stage or (0, 1)
    is_latent = shape.latent is not None
    build_config = transformer.MLATransformerConfig if is_latent else transformer.TransformerConfig
    settings = dict(
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32 if stages > 1 else None,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn_hidden_size,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=shape.normalization,
        layernorm_epsilon=shape.norm_epsilon,
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        apply_query_key_layer_scaling=shape.query_key_layer_scaling,
        attention_softmax_in_fp32=shape.softmax_in_fp32 or shape.query_key_layer_scaling,
        rotary_interleaved=shape.rotary_interleaved,
        window_size=None if shape.window is None else (shape.window, 0),
        window_attn_skip_freq=[int(one) for one in shape.window_layers] or None,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **activation(shape),
        **(describe_experts(shape.experts) if shape.experts is not None else {}),
    )
    if is_latent and shape.latent.q_lora_rank is None and has_query_norms():
        pytest.skip("queries of hidden states need Transformer Engine in Megatron-Core 0.19, for a norm of their own")
    config = build_config(**settings | (describe_latent(shape) if is_latent else {}))
    specification = (
        layer_specs.get_gpt_decoder_block_spec(config, False, normalization=shape.normalization)
        if shape.experts is not None
        else layer_specs.get_gpt_layer_local_spec(
            qk_layernorm=shape.qk_layernorm, normalization=shape.normalization, multi_latent_attention=is_latent
        )
    )
    if is_latent:
        specification = take_widths(specification)
    further = {}
    if shape.mtp_num_layers:
        config.mtp_num_layers = shape.mtp_num_layers
        config.mtp_loss_scaling_factor = shape.mtp_loss_scaling_factor
        # it keeps the losses of the first model's depths for the whole process
        multi_token_prediction.MTPLossLoggingHelper.tracker.clear()
        forget_balancing_losses()
        further["mtp_block_spec"] = layer_specs.get_gpt_mtp_block_spec(config, specification, False)
    has_yarn = shape.yarn_scaling_factor is not None and not is_latent
    for field in dataclasses.fields(shape) if has_yarn else ():
        # GPTModel reads YaRN's numbers as attributes that its config has no fields for
        if field.name.startswith("yarn_"):
            name = YARN_NAMES.get(field.name, field.name)
            setattr(config, name, getattr(shape, field.name))
    return gpt.GPTModel(
        config,
        specification,
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="yarn" if has_yarn else shape.position_embedding,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 8.0,
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        seq_len_interpolation_factor=shape.rotary_seq_len_interpolation_factor,
        pre_process=number == 0,
        post_process=number == stages - 1,
        **further,
    )


def load_ours(theirs, ours) -> dict:
    """Our weights, and random biases that balance experts on both, into their model. Returns its parameters by name."""
    named = dict(theirs.named_parameters())
    weights = as_theirs(dict(ours.named_parameters()), named)
    assert weights.keys() == named.keys()
    left = theirs.load_state_dict({name: tensor.detach() for name, tensor in weights.items()}, strict=False)
    assert not left.unexpected_keys
    assert not [key for key in left.missing_keys if not key.endswith(("_extra_state", "expert_bias"))]
    for name, mixture in list_mixtures(ours):
        state = mixture.router.state
        state.prepare(CPU)
        if state.bias_E is not None:
            state.bias_E.copy_(0.3 * torch.randn(len(state.bias_E)))
            theirs.get_submodule(f"{name}.router").expert_bias.copy_(state.bias_E)
    return named


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


def pretend_cuda(monkeypatch):
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
        """gradients: by our names, unscaled."""
        gradients = as_theirs(gradients, dict(self.model.named_parameters()))
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
        done, self.grad_norm, _ = self.optimizer.step()
        assert done
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
        typed = argparse.Namespace(
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
            **self.name_experts(),
            mtp_num_layers=s.mtp_num_layers or None,
            mtp_loss_scaling_factor=s.mtp_loss_scaling_factor,
            model_type=enums.ModelType.encoder_or_decoder,
            attention_backend=transformer_enums.AttnBackend.auto,
            path=Path("somewhere"),
        )
        if s.latent is not None:
            vars(typed).update(describe_latent(s))
        return typed

    def name_experts(self) -> dict:
        """The arguments of its experts; {} of a dense model."""
        if self.shape.experts is None:
            return {}
        settings = describe_experts(self.shape.experts)
        return settings | {"num_experts": settings.pop("num_moe_experts"), "expert_model_parallel_size": 1}

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
        found = join_experts(found) | {"optimizer.good_samples": torch.tensor(self.scheduler.num_steps)}
        biases = {name: bias for name, bias in self.model.named_buffers() if name.endswith("router.expert_bias")}
        return found | {f"model.{name}": bias for name, bias in biases.items()}


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
        self.optimizer = Optimizer(plan, list(self.parameters.values()), CPU, names=list(self.parameters))

    def step(self, gradients: dict):
        scale = self.optimizer.loss_scale
        scaled = [(gradients[name] * scale).to(p.dtype) for name, p in self.parameters.items()]
        update = self.optimizer.step(scaled, SAMPLES, lambda name: contextlib.nullcontext())
        self.grad_norm = update.grad_norm.item()  # before clipping, of the last step

    def train(self, batch) -> float:
        loss = self.model(*batch).mean()
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        self.step(dict(zip(self.parameters, gradients)))
        return loss.item()

    def flat(self) -> dict:
        weights = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        for name, mixture in list_mixtures(self.model):
            mixture.router.state.prepare(CPU)
            if mixture.router.state.bias_E is not None:
                weights[f"model.{name}.router.expert_bias"] = mixture.router.state.bias_E
        return weights | self.optimizer.tensors(list(self.parameters))

    def load(self, file: MegatronFile):
        file.read_into(self.flat())
        self.optimizer.resume()

    def record(self, iteration: int, **more) -> CheckpointRecord:
        known = {"vocab_size": 127, "consumed_valid_samples": 8} | more
        return describe_run(self, iteration, **known)

    def save(self, path: Path, iteration: int):
        with open(path, "wb") as file:
            write_megatron_file(file, self.record(iteration), self.flat(), self.plan.args)


def describe_run(run, iteration: int, **more) -> CheckpointRecord:
    return CheckpointRecord(
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


def batches(shape, count: int) -> list:
    return [(tokens(shape, SAMPLES, seed=2 * i), tokens(shape, SAMPLES, seed=2 * i + 1)) for i in range(count)]
