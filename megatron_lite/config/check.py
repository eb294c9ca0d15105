"""Checks a command line and reports all mistakes together, before a process group or a file is made."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from megatron_lite.config.args import Args, ExpertArgs, LatentArgs
from megatron_lite.config.command_line import CommandLine
from megatron_lite.config.flags import list_flags
from megatron_lite.config.layout import count_chunks
from megatron_lite.config.plan import choose_compilation
from megatron_lite.config.rules.experts import expert_rules
from megatron_lite.config.rules.files import file_rules
from megatron_lite.config.rules.latent import latent_rules
from megatron_lite.config.rules.model import model_rules
from megatron_lite.config.rules.run import data_rules, profile_rules, rank_rules, watch_rules
from megatron_lite.config.rules.training import optimizer_rules, precision_rules, training_rules
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError


def required_rules(args: Args, world: World) -> Iterator[str]:
    """Flags that every command line must give."""
    for flag in list_flags(Args):
        if flag.required and flag.get(args) is None:
            yield f"{flag.spelling} is missing; every run needs it."


def _list_numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a flag's value, which may be none, one or many."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def range_rules(args: Args, world: World) -> Iterator[str]:
    """Numbers outside the range of their flag."""
    for flag in list_flags(Args):
        for value in _list_numbers(flag.get(args)) if flag.must_be else ():
            if flag.is_in_range(value):
                continue
            shown = f"{value:.10g}" if flag.kind is float else value
            optional = flag.default is None and not flag.required and ";" not in flag.must_be
            yield f"{flag.spelling} {shown}: must be {flag.must_be}{', or leave it out' if optional else ''}."


Rule = Callable[[Args, World], Iterator[str]]
RULES_WITHOUT_FILES = (
    required_rules, range_rules, model_rules, latent_rules, expert_rules, training_rules, precision_rules, optimizer_rules, rank_rules,
    data_rules, watch_rules, profile_rules,
)  # fmt: skip
RULES = (*RULES_WITHOUT_FILES, file_rules)


def check(line: CommandLine, world: World, rules: Sequence[Rule] = RULES) -> None:
    """Raise one ConfigError with every mistake: unreadable words first, then broken rules.

    A rule that speaks of a flag whose value could not be read, or is wrong by itself, is left out. Where a file of settings
    could not be read, all rules are.
    """
    mistakes = list(line.mistakes)
    broken = set(line.broken)
    for rule in () if line.unread else rules:
        for mistake in rule(line.args, world):
            named = re.findall(r"--[\w-]+", mistake)
            if not broken.intersection(named):
                mistakes.append(mistake)
                broken.update(named[:1] if rule is range_rules else ())
    if mistakes:
        raise ConfigError(list(dict.fromkeys(mistakes)))


# Flags that cannot matter where another one that they depend on was not given: {what is needed: (fields, whether it holds)}
DEPENDS: dict[str, tuple[str, Callable[[Args], object]]] = {
    "--tensor-model-parallel-size above 1": ("sequence_parallel", lambda a: a.parallel.tensor_model_parallel_size > 1),
    "--pipeline-model-parallel-size above 1": (
        ("decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers use_tp_pp_dp_mapping "
         "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_schedule"),
        lambda a: a.parallel.pipeline_model_parallel_size > 1,
    ),
    "stages of several chunks": (
        "microbatch_group_size_per_virtual_pipeline_stage",
        lambda a: count_chunks(a.parallel, a.model.num_layers or 1) > 1,
    ),
    "--context-parallel-size above 1": ("cp_comm_type", lambda a: a.parallel.context_parallel_size > 1),
    "--cp-comm-type a2a+p2p": (
        "hierarchical_context_parallel_sizes", lambda a: "a2a+p2p" in a.parallel.cp_comm_type
    ),
    "--use-megatron-fsdp": (
        ("data_parallel_sharding_strategy megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype "
         "megatron_fsdp_grad_comm_dtype"), lambda a: a.parallel.use_megatron_fsdp,
    ),
    "--fp16 or --bf16": (
        "loss_scale accumulate_allreduce_grads_in_fp32 load_main_params_from_ckpt", lambda a: a.precision.fp16 or a.precision.bf16
    ),
    "--bf16": ("grad_reduce_in_bf16", lambda a: a.precision.bf16),
    "--fp16": ("initial_loss_scale min_loss_scale loss_scale_window hysteresis", lambda a: a.precision.fp16),
    "the built-in GPT (drop --model)": (
        "attention_backend explain_attention profile_modules use_cpu_initialization", lambda a: a.model.model is None
    ),
    "--position-embedding-type rope": ("use_rope_scaling", lambda a: a.model.position_embedding_type == "rope"),
    "--use-rope-scaling": ("rope_scaling_factor", lambda a: a.model.use_rope_scaling),
    "--position-embedding-type yarn": (
        "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int",
        lambda a: a.model.position_embedding_type == "yarn",
    ),
    "--position-embedding-type yarn or --multi-latent-attention": (
        "rotary_scaling_factor mscale mscale_all_dim",
        lambda a: a.model.position_embedding_type == "yarn" or a.latent.multi_latent_attention,
    ),
    "--multi-latent-attention": (
        " ".join(field.name for field in fields(LatentArgs)[1:]), lambda a: a.latent.multi_latent_attention
    ),
    "--num-experts": (
        " ".join(("expert_tensor_parallel_size", *(field.name for field in fields(ExpertArgs)[1:]))),
        lambda a: a.experts.num_experts is not None,
    ),
    "--window-size": ("window_attn_skip_freq", lambda a: a.model.window_size is not None),
    "--group-query-attention": (
        "num_query_groups", lambda a: a.model.group_query_attention or a.model.num_query_groups == 1
    ),
    "--recompute-granularity full": (
        "recompute_method recompute_num_layers", lambda a: a.model.recompute_granularity == "full"
    ),
    "--decoupled-lr": ("decoupled_min_lr", lambda a: a.optimizer.decoupled_lr is not None),
    "--qk-layernorm": ("apply_wd_to_qk_layernorm", lambda a: a.model.qk_layernorm),
    "--optimizer muon": (
        ("muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_num_ns_steps "
         "muon_coefficient_type muon_fp32_matmul_prec muon_tp_mode muon_scalar_optimizer"),
        lambda a: a.optimizer.optimizer == "muon",
    ),
    "--use-mup": (
        "mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power", lambda a: a.model.use_mup
    ),
    "--lr-decay-style WSD": (
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples", lambda a: a.optimizer.lr_decay_style == "WSD"
    ),
    "--tokenizer-type TikTokenizer": (
        "tiktoken_pattern tiktoken_num_special_tokens", lambda a: a.data.tokenizer_type == "TikTokenizer"
    ),
    "--fim-data": (
        ("fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token "
         "fim_suffix_token fim_pad_token fim_eod_token"),
        lambda a: a.data.fim_data,
    ),
    "--dataloader-type single or cyclic": ("num_workers", lambda a: a.data.dataloader_type != "external"),
    "--dataloader-type cyclic": ("data_sharding", lambda a: a.data.dataloader_type == "cyclic"),
    "the step timeline (drop --no-step-timeline)": ("timing_log_level", lambda a: a.watch.step_timeline),
    "--timing-log-level 1 or 2": ("timing_log_option", lambda a: a.watch.timing_log_level),
    "--exit-signal-handler": ("exit_signal", lambda a: a.training.exit_signal_handler),
    "--manual-gc": ("manual_gc_interval", lambda a: a.training.manual_gc),
    "--save": (
        ("save_interval save_retain_interval log_progress no_save_optim no_save_rng ckpt_format async_save "
         "exit_on_save_failure"), lambda a: a.checkpoint.save,
    ),
    "--load": (
        "ckpt_step exit_on_missing_checkpoint no_load_optim no_load_rng override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        lambda a: a.checkpoint.load,
    ),
    "--load or --pretrained-checkpoint": (
        "finetune load_main_params_from_ckpt use_checkpoint_args", lambda a: a.checkpoint.load or a.checkpoint.pretrained_checkpoint
    ),
    "--use-checkpoint-args": (
        "use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args", lambda a: a.checkpoint.use_checkpoint_args
    ),
    "--profile": ("profile_step_start profile_step_end", lambda a: a.profile.is_on),
    "--profile, or a profile on demand": ("profile_ranks", lambda a: a.profile.is_on),
    "--use-pytorch-profiler, or a profile on demand": (
        ("pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra "
         "pytorch_profiler_collect_memory pytorch_profiler_collect_flops profile_modules profile_gzip no_profile_gzip"),
        lambda a: a.profile.use_pytorch_profiler,
    ),
    "--use-pytorch-profiler or --record-memory-history": (
        "report", lambda a: a.profile.use_pytorch_profiler or a.profile.record_memory_history
    ),
    "--profile for Nsight Systems": (
        "record_shapes", lambda a: a.profile.profile and not a.profile.use_pytorch_profiler
    ),
    "--record-memory-history": (
        "memory_snapshot_path memory_history_events", lambda a: a.profile.record_memory_history
    ),
}  # fmt: skip


def remarks(line: CommandLine, world: World) -> list[str]:
    """Notes about a command line that is no mistake. Printed once, by rank 0."""
    args = line.args
    notes = list(dict.fromkeys(line.notes))
    for needed, (names, holds) in DEPENDS.items():
        in_vain = [name for name in names.split() if name in line.spelled and not holds(args)]
        notes += [f"{line.spelled[name]} has no effect without {needed}." for name in in_vain]
    p = args.profile
    t = args.training
    if p.use_pytorch_profiler and not p.profile:
        notes.append("--use-pytorch-profiler without --profile: profiling all the same.")
    profiling = p.profile or p.use_pytorch_profiler
    last = f"lies beyond --train-iters {t.train_iters}"
    if profiling and t.skip_train:
        notes.append("--skip-train: there are no steps to profile.")
    elif profiling and t.train_iters is not None and p.profile_step_start > t.train_iters:
        notes.append(f"--profile-step-start {p.profile_step_start} {last}: nothing will be profiled.")
    elif profiling and t.train_iters is not None and p.profile_step_end > t.train_iters + 1:
        notes.append(f"--profile-step-end {p.profile_step_end} {last}: the profile stops with the run.")
    parallel = args.parallel
    if "cp_comm_type" in line.spelled and parallel.context_parallel_size > 1:
        given = f"--cp-comm-type {' '.join(parallel.cp_comm_type)}"
        notes.append(f"{given}: context parallel ranks gather keys and values here, which gives the same losses.")
    if args.checkpoint.ckpt_format == "fsdp_dtensor" and args.checkpoint.save is not None:
        whose = "which any layout here and Megatron-LM's torch_dist load, not Megatron-FSDP's own reader"
        notes.append(f"--ckpt-format fsdp_dtensor: checkpoints are written as torch_dist, {whose}.")
    if args.checkpoint.save is not None and args.checkpoint.save_interval is None:
        notes.append("--save without --save-interval: a checkpoint is written when the run ends, none before.")
    if "torch_compile_backend" in line.spelled and not choose_compilation(args, world).layers:
        notes.append("--torch-compile-backend has no effect without --torch-compile.")
    if args.precision.fp16 and not world.gpus:
        notes.append("--fp16 is 4 to 20 times slower than fp32 on CPUs, which lack the hardware; prefer --bf16.")
    return notes
