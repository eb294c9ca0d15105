"""Flags that have no effect without another one."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from megatron_lite.config.args import Args, ExpertArgs, LatentArgs
from megatron_lite.config.layout import count_chunks


@dataclass(frozen=True)
class Dependency:
    """Flags that cannot matter where what they depend on was not given."""

    needed: str  # what they depend on, as a note to the user names it
    fields: tuple[str, ...]  # of Args' groups
    holds: Callable[[Args], object]  # whether what is needed was given


DEPENDENCIES = (
    Dependency(
        "--tensor-model-parallel-size above 1",
        ("sequence_parallel",),
        lambda args: args.parallel.tensor_model_parallel_size > 1,
    ),
    Dependency(
        "--pipeline-model-parallel-size above 1",
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "use_tp_pp_dp_mapping",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_schedule",
        ),
        lambda args: args.parallel.pipeline_model_parallel_size > 1,
    ),
    Dependency(
        "stages of several chunks",
        ("microbatch_group_size_per_virtual_pipeline_stage",),
        lambda args: count_chunks(args.parallel, args.model.num_layers or 1) > 1,
    ),
    Dependency(
        "--context-parallel-size above 1", ("cp_comm_type",), lambda args: args.parallel.context_parallel_size > 1
    ),
    Dependency(
        "--cp-comm-type a2a+p2p",
        ("hierarchical_context_parallel_sizes",),
        lambda args: "a2a+p2p" in args.parallel.cp_comm_type,
    ),
    Dependency(
        "--use-megatron-fsdp",
        (
            "data_parallel_sharding_strategy",
            "megatron_fsdp_main_params_dtype",
            "megatron_fsdp_main_grads_dtype",
            "megatron_fsdp_grad_comm_dtype",
        ),
        lambda args: args.parallel.use_megatron_fsdp,
    ),
    Dependency(
        "--fp16 or --bf16",
        ("loss_scale", "accumulate_allreduce_grads_in_fp32", "load_main_params_from_ckpt"),
        lambda args: args.precision.fp16 or args.precision.bf16,
    ),
    Dependency("--bf16", ("grad_reduce_in_bf16",), lambda args: args.precision.bf16),
    Dependency(
        "--fp16",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda args: args.precision.fp16,
    ),
    Dependency(
        "the built-in GPT (drop --model)",
        ("attention_backend", "explain_attention", "profile_modules", "use_cpu_initialization"),
        lambda args: args.model.model is None,
    ),
    Dependency(
        "--position-embedding-type rope",
        ("use_rope_scaling",),
        lambda args: args.model.position_embedding_type == "rope",
    ),
    Dependency("--use-rope-scaling", ("rope_scaling_factor",), lambda args: args.model.use_rope_scaling),
    Dependency(
        "--position-embedding-type yarn",
        (
            "yarn_original_max_position_embeddings",
            "yarn_beta_fast",
            "yarn_beta_slow",
            "yarn_correction_range_round_to_int",
        ),
        lambda args: args.model.position_embedding_type == "yarn",
    ),
    Dependency(
        "--position-embedding-type yarn or --multi-latent-attention",
        ("rotary_scaling_factor", "mscale", "mscale_all_dim"),
        lambda args: args.model.position_embedding_type == "yarn" or args.latent.multi_latent_attention,
    ),
    Dependency(
        "--multi-latent-attention",
        tuple(field.name for field in fields(LatentArgs)[1:]),
        lambda args: args.latent.multi_latent_attention,
    ),
    Dependency(
        "--num-experts",
        ("expert_tensor_parallel_size", *(field.name for field in fields(ExpertArgs)[1:])),
        lambda args: args.experts.num_experts is not None,
    ),
    Dependency("--mtp-num-layers", ("mtp_loss_scaling_factor",), lambda args: bool(args.model.mtp_num_layers)),
    Dependency("--window-size", ("window_attn_skip_freq",), lambda args: args.model.window_size is not None),
    Dependency(
        "--group-query-attention",
        ("num_query_groups",),
        lambda args: args.model.group_query_attention or args.model.num_query_groups == 1,
    ),
    Dependency(
        "--recompute-granularity full",
        ("recompute_method", "recompute_num_layers"),
        lambda args: args.model.recompute_granularity == "full",
    ),
    Dependency("--decoupled-lr", ("decoupled_min_lr",), lambda args: args.optimizer.decoupled_lr is not None),
    Dependency("--qk-layernorm", ("apply_wd_to_qk_layernorm",), lambda args: args.model.qk_layernorm),
    Dependency(
        "--optimizer muon",
        (
            "muon_momentum",
            "muon_nesterov",
            "muon_split_qkv",
            "muon_scale_mode",
            "muon_extra_scale_factor",
            "muon_num_ns_steps",
            "muon_coefficient_type",
            "muon_fp32_matmul_prec",
            "muon_tp_mode",
            "muon_scalar_optimizer",
        ),
        lambda args: args.optimizer.optimizer == "muon",
    ),
    Dependency(
        "--use-mup",
        ("mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult", "mup_base_head_dim", "mup_attn_scale_power"),
        lambda args: args.model.use_mup,
    ),
    Dependency(
        "--lr-decay-style WSD",
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda args: args.optimizer.lr_decay_style == "WSD",
    ),
    Dependency(
        "--tokenizer-type TikTokenizer",
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
        lambda args: args.data.tokenizer_type == "TikTokenizer",
    ),
    Dependency(
        "--fim-data",
        (
            "fim_rate",
            "fim_spm_rate",
            "fim_split_sample",
            "fim_fragment_rate",
            "fim_no_prefix",
            "fim_prefix_token",
            "fim_middle_token",
            "fim_suffix_token",
            "fim_pad_token",
            "fim_eod_token",
        ),
        lambda args: args.data.fim_data,
    ),
    Dependency(
        "--dataloader-type single or cyclic", ("num_workers",), lambda args: args.data.dataloader_type != "external"
    ),
    Dependency("--dataloader-type cyclic", ("data_sharding",), lambda args: args.data.dataloader_type == "cyclic"),
    Dependency(
        "the step timeline (drop --no-step-timeline)", ("timing_log_level",), lambda args: args.watch.step_timeline
    ),
    Dependency("--timing-log-level 1 or 2", ("timing_log_option",), lambda args: args.watch.timing_log_level),
    Dependency("--exit-signal-handler", ("exit_signal",), lambda args: args.training.exit_signal_handler),
    Dependency(
        "--error-injection-rate",
        ("error_injection_type", "rerun_mode"),
        lambda args: args.training.error_injection_rate > 0,
    ),
    Dependency("--manual-gc", ("manual_gc_interval",), lambda args: args.training.manual_gc),
    Dependency(
        "--save",
        (
            "save_interval",
            "save_retain_interval",
            "log_progress",
            "no_save_optim",
            "no_save_rng",
            "ckpt_format",
            "async_save",
            "exit_on_save_failure",
        ),
        lambda args: args.checkpoint.save,
    ),
    Dependency(
        "--load",
        (
            "ckpt_step",
            "exit_on_missing_checkpoint",
            "no_load_optim",
            "no_load_rng",
            "override_opt_param_scheduler",
            "use_checkpoint_opt_param_scheduler",
        ),
        lambda args: args.checkpoint.load,
    ),
    Dependency(
        "--load or --pretrained-checkpoint",
        ("finetune", "load_main_params_from_ckpt", "use_checkpoint_args"),
        lambda args: args.checkpoint.load or args.checkpoint.pretrained_checkpoint,
    ),
    Dependency(
        "--use-checkpoint-args",
        ("use_mp_args_from_checkpoint_args", "use_tokenizer_model_from_checkpoint_args"),
        lambda args: args.checkpoint.use_checkpoint_args,
    ),
    Dependency("--profile", ("profile_step_start", "profile_step_end"), lambda args: args.profile.is_on),
    Dependency("--profile, or a profile on demand", ("profile_ranks",), lambda args: args.profile.is_on),
    Dependency(
        "--use-pytorch-profiler, or a profile on demand",
        (
            "pytorch_profiler_collect_shapes",
            "pytorch_profiler_collect_callstack",
            "pytorch_profiler_collect_chakra",
            "pytorch_profiler_collect_memory",
            "pytorch_profiler_collect_flops",
            "profile_modules",
            "profile_gzip",
            "no_profile_gzip",
        ),
        lambda args: args.profile.use_pytorch_profiler,
    ),
    Dependency(
        "--use-pytorch-profiler or --record-memory-history",
        ("report",),
        lambda args: args.profile.use_pytorch_profiler or args.profile.record_memory_history,
    ),
    Dependency(
        "--profile for Nsight Systems",
        ("record_shapes",),
        lambda args: args.profile.profile and not args.profile.use_pytorch_profiler,
    ),
    Dependency(
        "--record-memory-history",
        ("memory_snapshot_path", "memory_history_events"),
        lambda args: args.profile.record_memory_history,
    ),
)
