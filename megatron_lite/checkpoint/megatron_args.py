"""Megatron's arguments, as its files keep them in an argparse.Namespace, and what they say in our terms."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

from megatron_lite.checkpoint.megatron_state import Plain, Scheduler
from megatron_lite.checkpoint.training_state import CheckpointRecord, ShapeFields, build_shape
from megatron_lite.config.args import Args
from megatron_lite.config.expert_layers import parse_expert_layers, parse_window_layers
from megatron_lite.config.plan import LearningRatePlan, parse_window
from megatron_lite.config.shape import SINKHORN, ExpertShape, LatentShape, ModelShape, choose_losses
from megatron_lite.model.gpt import DTYPES

T = TypeVar("T")
SAME_NAME = [
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "seq_length",
    "max_position_embeddings",
    "qk_layernorm",
    "normalization",
    "norm_epsilon",
    "rotary_percent",
    "rotary_base",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
]
# fields of ExpertShape, but for those of layers and of losses that balance experts
EXPERT_ARGUMENTS = {
    "number": "num_experts",
    "topk": "moe_router_topk",
    "ffn_hidden_size": "moe_ffn_hidden_size",
    "shared_ffn_hidden_size": "moe_shared_expert_intermediate_size",
    "shared_gate": "moe_shared_expert_gate",
    "score_function": "moe_router_score_function",
    "pre_softmax": "moe_router_pre_softmax",
    "scaling_factor": "moe_router_topk_scaling_factor",
    "groups": "moe_router_num_groups",
    "group_topk": "moe_router_group_topk",
    "router_dtype": "moe_router_dtype",
    "expert_bias": "moe_router_enable_expert_bias",
    "z_loss_coeff": "moe_z_loss_coeff",
    "input_jitter": "moe_input_jitter_eps",
    "forced_balance": "moe_router_force_load_balancing",
    "capacity_factor": "moe_expert_capacity_factor",
    "drop_policy": "moe_token_drop_policy",
    "probs_on_input": "moe_apply_probs_on_input",
}
BALANCING_TYPE = "moe_router_load_balancing_type"
BALANCING_COEFF = "moe_aux_loss_coeff"
SCHEDULE = {
    "style": "lr_decay_style",
    "peak": "max_lr",
    "floor": "min_lr",
    "warmup_samples": "lr_warmup_steps",
    "decay_samples": "lr_decay_steps",
    "weight_decay_style": "wd_incr_style",
    "start_weight_decay": "start_wd",
    "end_weight_decay": "end_wd",
    "weight_decay_samples": "wd_incr_steps",
}
STYLES = {"constant", "linear", "cosine", "inverse-square-root", "WSD"}
# other spellings of an argument, by older and by newer versions of Megatron-LM
OTHER_NAMES = {
    "norm_epsilon": ("layernorm_epsilon",),
    "tensor_model_parallel_size": ("model_parallel_size",),
    "num_experts": ("num_moe_experts",),
    "apply_layernorm_1p": ("layernorm_zero_centered_gamma",),
}
POSITIONS = ("learned_absolute", "rope", "yarn", "none")
# Arguments that change what the model computes and have no counterpart here: {argument: values that change nothing}.
# Source: TransformerConfig and arguments.py of Megatron-LM, 0.16.1 and main of 2026-08.
UNSUPPORTED = {
    "no_rope_freq": (None, 0),
    "fp32_residual_connection": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "qk_l2_norm": (None, False),
    "attention_output_gate": (None, False),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "quick_geglu": (None, False),
    "geglu": (None, False),
    "glu_linear_offset": (None, 0.0),
    "activation_func_clamp_value": (None,),
    "moe_latent_size": (None, 0),
    "enable_mhc_connections": (None, False),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_layer_pattern": (None,),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (None, False),
    "normalization": (None, "LayerNorm", "RMSNorm"),
    "retro_add_retriever": (None, False),
}


@dataclass(frozen=True)
class MegatronArgs:
    """Reads a file's Namespace. `given` knows what an older Megatron left out."""

    namespace: argparse.Namespace

    @overload
    def given(self, name: str) -> object: ...

    @overload
    def given(self, name: str, default: T) -> T: ...

    def given(self, name: str, default: object = None) -> object:
        """The argument, or what the same behavior was before there was one."""
        for spelling in (name, *OTHER_NAMES.get(name, ())):
            value: object = getattr(self.namespace, spelling, None)
            if value is not None:
                return value
        return default

    def find_unsupported(self) -> list[str]:
        """Arguments that change what the model computes and cannot be honored here, such as "window_size=(127, 0)"."""
        found = []
        for name, harmless in UNSUPPORTED.items():
            value = getattr(self.namespace, name, None)
            if value not in harmless:
                found.append(f"{name}={value}")
        heads = self.given("num_attention_heads", 1)
        width = self.given("kv_channels", self.given("hidden_size", 0) // heads)
        scale: float | None = self.given("softmax_scale", None)
        if scale is not None and not math.isclose(scale, width**-0.5, rel_tol=1e-6):
            found.append(f"softmax_scale={scale}")
        positions = self.given("position_embedding_type", POSITIONS[0])
        if positions not in POSITIONS:
            found.append(f"position_embedding_type={positions}")
        if self.given("num_experts", 0) and self.given("add_bias_linear", True):
            found.append("add_bias_linear=True of experts")
        if self.given("multi_latent_attention", False) and self.given("window_size") is not None:
            found.append("window_size of latent attention")
        if self.given("multi_latent_attention", False) and self.given("softmax_type", "vanilla") != "vanilla":
            found.append("softmax_type of latent attention")
        gated = self.given("gated_linear_unit", False)
        if gated and not self.given("swiglu", False):
            found.append("gated_linear_unit=True without swiglu")
        return found

    @property
    def plain(self) -> dict[str, object]:
        """The arguments that a conversion keeps: values that are no objects of a program, and lists of such."""
        return {name: value for name, value in vars(self.namespace).items() if _is_plain(value)}

    @property
    def splits(self) -> tuple[int, int, int]:
        """The numbers of (tensor, pipeline, expert) parallel ranks over whose files a model is spread."""
        kinds = ("tensor", "pipeline", "expert")
        tensor, pipeline, expert = (self.given(f"{kind}_model_parallel_size", 1) for kind in kinds)
        return tensor, pipeline, expert

    @property
    def chunks(self) -> int:
        """Pieces of a stage's layers, interleaved with those of other stages;
        each is a model of its own in the file."""
        return int(self.given("virtual_pipeline_model_parallel_size", 1))

    def shape(self, padded_vocab_size: int) -> ShapeFields:
        """Fields of ModelShape.

        Args:
            padded_vocab_size: Rows of the embedding, which the arguments do not tell.

        Raises:
            KeyError: An argument without a default is missing.
        """
        given = self.given
        shape: ShapeFields = {"padded_vocab_size": padded_vocab_size}
        for field in dataclasses.fields(ModelShape):
            if field.name in SAME_NAME:
                value = given(field.name, field.default)
                if value is dataclasses.MISSING:
                    raise KeyError(f"args.{field.name}")
                shape[field.name] = value
        heads = given("num_attention_heads", 0)
        has_biases = given("add_bias_linear", True)
        shape["num_query_groups"] = given("num_query_groups", heads) if given("group_query_attention") else heads
        shape["kv_channels"] = given("kv_channels", given("hidden_size", 0) // heads)
        positions = self._find_position_embedding()
        shape["position_embedding"] = positions
        shape["layernorm_1p"] = given("apply_layernorm_1p", False)
        shape["activation"] = self._find_activation(has_biases)
        shape["linear_bias"] = has_biases
        shape["qkv_bias"] = has_biases or given("add_qkv_bias", False)
        shape["mtp_num_layers"] = given("mtp_num_layers", None) or 0
        shape["mtp_loss_scaling_factor"] = given("mtp_loss_scaling_factor", 0.1)
        shape["tied_embeddings"] = not given("untie_embeddings_and_output_weights", False)
        shape["query_key_layer_scaling"] = given("apply_query_key_layer_scaling", False)
        shape["softmax_type"] = given("softmax_type", "vanilla")
        shape["softmax_in_fp32"] = given("attention_softmax_in_fp32", False)
        shape |= self._read_latent() if given("multi_latent_attention", False) else self._read_rotary_scaling(positions)
        shape["experts"] = self._read_experts()
        shape |= self._read_window(given("num_layers", 1))
        if given("use_mup", False):
            hidden = given("hidden_size", 0)
            shape |= self._read_width(hidden, given("kv_channels", hidden // heads))
        return dataclasses.asdict(build_shape(shape))

    def _read_window(self, num_layers: int) -> dict[str, Plain]:
        """Fields of ModelShape that --window-size sets.

        Args:
            num_layers: Number of layers of the model.
        """
        size: object = getattr(self.namespace, "window_size", None)
        skipped: object = getattr(self.namespace, "window_attn_skip_freq", None)
        if isinstance(size, (list, tuple)):
            size = ",".join(str(one) for one in size)
        if not isinstance(size, str):
            return {}
        window = parse_window(size)
        if window is None:
            return {}
        layers = parse_window_layers(None if skipped is None else str(skipped), num_layers)
        pattern = "" if all(layers) else "".join(str(int(has_window)) for has_window in layers)
        return {"window": window, "window_layers": pattern}

    def _read_width(self, hidden: int, channels: int) -> dict[str, Plain]:
        """Fields of ModelShape that --use-mup sets.

        Args:
            hidden: The model's hidden size.
            channels: The width of one head.
        """
        given = self.given
        width = hidden / given("mup_base_hidden_size", hidden)
        output = given("mup_output_mult", 1.0)
        base_scale = given("mup_base_head_dim", 1.0) ** 0.5
        return {
            "mup_width_mult": width,
            "embedding_scale": given("mup_embedding_mult", 1.0),
            "logits_scale": 1 / width if output == 1 else output,
            "softmax_scale": base_scale / channels ** given("mup_attn_scale_power", 1.0),
        }

    def _read_rotary_scaling(self, positions: str) -> dict[str, Plain]:
        """Fields of ModelShape on the scaling of rotary frequencies.

        Args:
            positions: How the model knows positions. YaRN is a scaling of ModelShape's "rope".
        """
        given = self.given
        if positions == "rope" and given("use_rope_scaling", False):
            return {"rope_scaling_factor": given("rope_scaling_factor", 8.0)}
        if positions != "yarn":
            return {}
        return {
            "position_embedding": "rope",
            "yarn_scaling_factor": given("rotary_scaling_factor", 1.0),
            "yarn_original_max_position_embeddings": given("yarn_original_max_position_embeddings", 4096),
            "yarn_beta_fast": given("yarn_beta_fast", 32.0),
            "yarn_beta_slow": given("yarn_beta_slow", 1.0),
            "yarn_mscale": given("mscale", 1.0),
            "yarn_mscale_all_dim": given("mscale_all_dim", 0.0),
            "yarn_round_to_int": given("yarn_correction_range_round_to_int", True),
        }

    def _read_latent(self) -> ShapeFields:
        """Fields of ModelShape on latent attention."""
        given = self.given
        factor = given("rotary_scaling_factor", 1.0)
        latent = LatentShape(
            q_lora_rank=given("q_lora_rank", None),
            kv_lora_rank=given("kv_lora_rank", 32),
            qk_head_dim=given("qk_head_dim", 128),
            qk_pos_emb_head_dim=given("qk_pos_emb_head_dim", 64),
            v_head_dim=given("v_head_dim", 128),
            scaling_factor=factor,
            mscale_all_dim=given("mscale_all_dim", 0.0),
        )
        return {
            "latent": dataclasses.asdict(latent),
            "kv_channels": latent.head_width,
            "rotary_interleaved": True,
            "qkv_bias": False,
            "yarn_scaling_factor": factor if given("rope_type", "yarn") == "yarn" else None,
            "yarn_original_max_position_embeddings": given("original_max_position_embeddings", 4096),
            "yarn_beta_fast": given("beta_fast", 32.0),
            "yarn_beta_slow": given("beta_slow", 1.0),
            "yarn_mscale": given("mscale", 1.0),
            "yarn_mscale_all_dim": latent.mscale_all_dim,
        }

    def _find_position_embedding(self) -> str:
        """How the model knows positions: one of POSITIONS, which older versions said with flags."""
        positions = self.given("position_embedding_type", "learned_absolute")
        if self.given("use_rotary_position_embeddings"):
            return "rope"
        if positions == "learned_absolute" and not self.given("add_position_embedding", True):
            return "none"
        return positions

    def _find_activation(self, has_biases: bool) -> str:
        """The activation of the MLP, in ModelShape's words. has_biases: whether linear layers have them."""
        if self.given("swiglu"):
            return "swiglu"
        if self.given("squared_relu"):
            return "squared_relu"
        if self.given("openai_gelu") or (self.given("bias_gelu_fusion", True) and has_biases):
            return "gelu_tanh"  # fused: the one place where Megatron uses the tanh formula
        return "gelu_erf"

    def _read_experts(self) -> ShapeFields | None:
        """Fields of ExpertShape; None of a dense model.

        Raises:
            ValueError: Layers with experts follow a pattern that is no pattern.
        """
        given = self.given
        if not given("num_experts", 0):
            return None
        # where older files say nothing of a field without a default
        usual: dict[str, object] = {"topk": 2, "ffn_hidden_size": given("ffn_hidden_size", 0)}
        fields: ShapeFields = {}
        for field in dataclasses.fields(ExpertShape):
            if field.name in EXPERT_ARGUMENTS:
                fields[field.name] = given(EXPERT_ARGUMENTS[field.name], usual.get(field.name, field.default))
        kinds = _as_list(given(BALANCING_TYPE, "aux_loss"))
        factors = _as_list(given(BALANCING_COEFF, 0.0))
        fields["layers"] = parse_expert_layers(str(given("moe_layer_freq", 1)), given("num_layers", 0))
        fields["sinkhorn"] = SINKHORN in kinds
        fields["balancing"] = choose_losses(kinds, factors)
        return fields

    def consumed(self, iteration: int) -> int:
        """Samples drawn until the end of this iteration."""
        return self.given("consumed_train_samples", iteration * self.given("global_batch_size", 0))

    def schedule(self, scheduler: Scheduler) -> dict[str, Plain] | None:
        """Fields of LearningRatePlan from a scheduler's state and these arguments; None where they say too little."""
        known = {ours: scheduler.get(theirs) for ours, theirs in SCHEDULE.items()}
        if None in known.values() or known["style"] not in STYLES:
            return None
        wsd_samples: int | None = self.given("lr_wsd_decay_samples", None)
        if self.given("train_samples") is None:
            iterations: int | None = self.given("lr_wsd_decay_iters", None)
            wsd_samples = None if iterations is None else iterations * self.namespace.global_batch_size
        if known["style"] == "WSD" and wsd_samples is None:
            return None
        build: Callable[..., LearningRatePlan] = LearningRatePlan
        plan = build(
            **known,
            init=self.given("lr_warmup_init", 0.0),
            wsd_samples=wsd_samples or 0,
            wsd_style=self.given("lr_wsd_decay_style", "exponential"),
        )
        return dataclasses.asdict(plan)


def _is_plain(value: object) -> bool:
    """Whether an argument is no object of a program, or a list without any."""
    if isinstance(value, list):
        return all(isinstance(item, (bool, int, float, str)) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _as_list(value: object) -> list[Any]:
    """Make a list of an argument that has one value, or several in a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def name_experts(experts: ExpertShape) -> dict[str, object]:
    """Arguments of Megatron-LM, by name, for a mixture of experts: lists for layers and for losses that balance it."""
    losses = experts.balancing or ((SINKHORN if experts.sinkhorn else "none", 0.0),)
    return {
        **{argument: getattr(experts, field) for field, argument in EXPERT_ARGUMENTS.items()},
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_layer_freq": [int(has_experts) for has_experts in experts.layers],
        BALANCING_TYPE: [kind for kind, _ in losses],
        BALANCING_COEFF: [coeff for _, coeff in losses],
    }


def _write_experts(experts: ExpertShape | None, arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a mixture of experts, in the values that Megatron's parser gives them; {} of a dense model.

    Args:
        experts: The model's.
        arguments: Flags by name, as typed.
    """
    if experts is None:
        return {}
    derived = name_experts(experts)
    frequency = str(arguments.get("moe_layer_freq", "1")).strip()
    # flags of a model that was imported have their defaults, which say nothing of it
    if frequency.isdigit() and parse_expert_layers(frequency, len(experts.layers)) == experts.layers:
        derived["moe_layer_freq"] = int(frequency)
    kinds = _as_list(arguments.get(BALANCING_TYPE, ()))
    coeffs = _as_list(arguments.get(BALANCING_COEFF, ()))
    if choose_losses(kinds, coeffs) == experts.balancing and (SINKHORN in kinds) == experts.sinkhorn:
        derived |= {BALANCING_TYPE: kinds, BALANCING_COEFF: coeffs}
    for name in (BALANCING_TYPE, BALANCING_COEFF):
        values = _as_list(derived[name])
        derived[name] = values[0] if len(values) == 1 else values
    derived["expert_model_parallel_size"] = 1
    derived["expert_tensor_parallel_size"] = 1
    return derived


def name_latent(s: ModelShape) -> dict[str, object]:
    """Arguments of Megatron-LM, by name, for latent attention and its rotary frequencies; {} of another attention."""
    if s.latent is None:
        return {}
    sizes = dataclasses.asdict(s.latent)
    return {
        "multi_latent_attention": True,
        "rotary_scaling_factor": sizes.pop("scaling_factor"),
        **sizes,
        "rope_type": "rope" if s.yarn_scaling_factor is None else "yarn",
        "original_max_position_embeddings": s.yarn_original_max_position_embeddings,
        "beta_fast": s.yarn_beta_fast,
        "beta_slow": s.yarn_beta_slow,
        "mscale": s.yarn_mscale,
        # its channels turn as neighbors in any case
        "rotary_interleaved": False,
    }


def _write_latent(s: ModelShape, arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments of latent attention; {} of another attention.

    Args:
        s: The model's shape.
        arguments: Flags by name, as typed.
    """
    if s.latent is None:
        return {}
    return {
        **name_latent(s),
        "kv_channels": arguments.get("kv_channels") or s.hidden_size // s.num_attention_heads,
        "position_embedding_type": s.position_embedding,
        "use_rope_scaling": False,
    }


def plain_arguments(args: Args) -> dict[str, object]:
    """The flags by name, as typed, in values that Megatron-LM writes."""
    typed: dict[str, object] = {}
    for group in dataclasses.fields(args):
        typed |= vars(getattr(args, group.name))
    del typed["exit_signal"]  # Megatron keeps an object of Python's signal module
    return {name: list(value) if isinstance(value, tuple) else value for name, value in typed.items()}


def build_namespace(record: CheckpointRecord, arguments: Mapping[str, object], ckpt_format: str) -> argparse.Namespace:
    """The arguments under which Megatron would have trained this.

    Args:
        record: Record of the checkpoint.
        arguments: Flags by name, as typed; what is derived from them here goes before them.
        ckpt_format: The value of --ckpt-format.
    """
    s = record.model_shape
    derived: dict[str, object] = {name: record.shape[name] for name in SAME_NAME}
    derived |= {
        "encoder_seq_length": s.seq_length,
        "window_size": None if s.window is None else (s.window, 0),
        "window_attn_skip_freq": [int(one) for one in s.window_layers] or None,
        "softmax_type": s.softmax_type,
        "mtp_num_layers": s.mtp_num_layers or None,
        "mtp_loss_scaling_factor": s.mtp_loss_scaling_factor,
        "padded_vocab_size": s.padded_vocab_size,
        "group_query_attention": s.num_query_groups != s.num_attention_heads,
        "num_query_groups": s.num_query_groups,
        "kv_channels": s.kv_channels,
        **name_rotary_scaling(s),
        "apply_layernorm_1p": s.layernorm_1p,
        "layernorm_zero_centered_gamma": s.layernorm_1p,
        "swiglu": s.activation == "swiglu",
        "squared_relu": s.activation == "squared_relu",
        "bias_gelu_fusion": s.activation == "gelu_tanh",
        "add_bias_linear": s.linear_bias,
        "add_qkv_bias": s.qkv_bias and not s.linear_bias,
        "untie_embeddings_and_output_weights": not s.tied_embeddings,
        "apply_query_key_layer_scaling": s.query_key_layer_scaling,
        "attention_softmax_in_fp32": s.softmax_in_fp32,
        "iteration": record.iteration,
        "consumed_train_samples": record.consumed,
        "consumed_valid_samples": record.consumed_valid_samples,
        "skipped_train_samples": record.left_out,
        "params_dtype": DTYPES[record.precision],
        "fp16": record.precision == "fp16",
        "bf16": record.precision == "bf16",
        "ckpt_format": ckpt_format,
        "use_distributed_optimizer": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "data_parallel_random_init": False,
        "no_save_optim": record.optimizer is None,
        "no_save_rng": record.ranks == 0,
        "rank": 0,
    }
    nested = _write_experts(s.experts, arguments) | _write_latent(s, arguments)
    return argparse.Namespace(**{**arguments, **derived, **nested})


def name_rotary_scaling(s: ModelShape) -> dict[str, Plain]:
    """Arguments of Megatron-LM, by name, for the kind of positions and how rotary frequencies are scaled."""
    if s.yarn_scaling_factor is not None and s.latent is None:
        return {
            "position_embedding_type": "yarn",
            "use_rope_scaling": False,
            "rotary_scaling_factor": s.yarn_scaling_factor,
            "yarn_original_max_position_embeddings": s.yarn_original_max_position_embeddings,
            "yarn_beta_fast": s.yarn_beta_fast,
            "yarn_beta_slow": s.yarn_beta_slow,
            "mscale": s.yarn_mscale,
            "mscale_all_dim": s.yarn_mscale_all_dim,
            "yarn_correction_range_round_to_int": s.yarn_round_to_int,
        }
    arguments: dict[str, Plain] = {
        "position_embedding_type": s.position_embedding,
        "use_rope_scaling": s.rope_scaling_factor is not None,
    }
    if s.rope_scaling_factor is not None:
        arguments["rope_scaling_factor"] = s.rope_scaling_factor
    return arguments


def build_scheduler(schedule: Mapping[str, Plain] | None, good_samples: int) -> Scheduler:
    """The state of Megatron's OptimizerParamScheduler.

    Args:
        schedule: Fields of LearningRatePlan; None: unknown, so that the state says only how far it had come.
        good_samples: Samples of all successful steps.
    """
    state: Scheduler = {}
    if schedule:
        state = {theirs: schedule[ours] for ours, theirs in SCHEDULE.items()}
    state["num_steps"] = good_samples
    return state
