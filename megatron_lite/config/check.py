"""All mistakes of a command line together, before a process group or a file is made."""

import re
from collections.abc import Callable, Iterator, Sequence

from megatron_lite.config.args import Args
from megatron_lite.config.command_line import CommandLine
from megatron_lite.config.plan import choose_compilation
from megatron_lite.config.rules.machine import machine_rules
from megatron_lite.config.rules.model import model_rules
from megatron_lite.config.rules.optimizer import optimizer_rules
from megatron_lite.config.rules.run import data_rules, profile_rules, rank_rules, watch_rules
from megatron_lite.config.rules.training import precision_rules, training_rules
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError

# --- flags that were given but cannot matter, because another one that they depend on was not

DEPENDS: tuple[tuple[tuple[str, ...], str, Callable[[Args], object]], ...] = (
    (("loss_scale",), "--fp16 or --bf16", lambda a: a.precision.fp16 or a.precision.bf16),
    (("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), "--fp16", lambda a: a.precision.fp16),
    (("accumulate_allreduce_grads_in_fp32",), "--fp16 or --bf16", lambda a: a.precision.fp16 or a.precision.bf16),
    (
        ("num_query_groups",),
        "--group-query-attention",
        lambda a: a.model.group_query_attention or a.model.num_query_groups == 1,
    ),
    (("recompute_num_layers",), "--recompute-granularity full", lambda a: a.model.recompute_granularity),
    (
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        "--lr-decay-style WSD",
        lambda a: a.optimizer.lr_decay_style == "WSD",
    ),
    (
        ("tiktoken_pattern", "tiktoken_num_special_tokens"),
        "--tokenizer-type TikTokenizer",
        lambda a: a.data.tokenizer_type == "TikTokenizer",
    ),
    (("num_workers",), "--dataloader-type single or cyclic", lambda a: a.data.dataloader_type != "external"),
    (("data_sharding",), "--dataloader-type cyclic", lambda a: a.data.dataloader_type == "cyclic"),
    (("timing_log_level",), "the step timeline (drop --no-step-timeline)", lambda a: a.watch.step_timeline),
    (("timing_log_option",), "--timing-log-level 1 or 2", lambda a: a.watch.timing_log_level),
    (("exit_signal",), "--exit-signal-handler", lambda a: a.training.exit_signal_handler),
    (("manual_gc_interval",), "--manual-gc", lambda a: a.training.manual_gc),
    (
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
        "--save",
        lambda a: a.checkpoint.save,
    ),
    (("no_load_optim", "no_load_rng"), "--load", lambda a: a.checkpoint.load),
    (
        ("profile_step_start", "profile_step_end"),
        "--profile",
        lambda a: a.profile.profile or a.profile.use_pytorch_profiler or a.profile.record_memory_history,
    ),
    (
        ("profile_ranks",),
        "--profile, or a profile on demand",
        lambda a: a.profile.profile or a.profile.use_pytorch_profiler or a.profile.record_memory_history,
    ),
    (
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
        "--use-pytorch-profiler, or a profile on demand",
        lambda a: a.profile.use_pytorch_profiler,
    ),
    (
        ("report",),
        "--use-pytorch-profiler or --record-memory-history",
        lambda a: a.profile.use_pytorch_profiler or a.profile.record_memory_history,
    ),
    (
        ("record_shapes",),
        "--profile for Nsight Systems",
        lambda a: a.profile.profile and not a.profile.use_pytorch_profiler,
    ),
    (
        ("memory_snapshot_path", "memory_history_events"),
        "--record-memory-history",
        lambda a: a.profile.record_memory_history,
    ),
)


def without_effect(line: CommandLine) -> Iterator[str]:
    """One sentence for each flag that the user gave in vain."""
    for fields, needed, holds in DEPENDS:
        for name in fields:
            if name in line.spelled and not holds(line.args):
                yield f"{line.spelled[name]} has no effect without {needed}."


Rule = Callable[[Args, World], Iterator[str]]
RULES_WITHOUT_FILES = (
    model_rules,
    training_rules,
    precision_rules,
    optimizer_rules,
    rank_rules,
    data_rules,
    watch_rules,
    profile_rules,
)
RULES = (*RULES_WITHOUT_FILES, machine_rules)


def check(line: CommandLine, world: World, rules: Sequence[Rule] = RULES) -> None:
    """Raise one ConfigError with every mistake: unreadable words first, then broken rules.

    A rule that speaks of a flag whose value could not be read is left out: its value is unknown. Where a file of settings
    could not be read, all rules are.
    """
    mistakes = list(line.mistakes)
    for rule in () if line.unread else rules:
        for mistake in rule(line.args, world):
            if not line.broken.intersection(re.findall(r"--[\w-]+", mistake)):
                mistakes.append(mistake)
    if mistakes:
        raise ConfigError(list(dict.fromkeys(mistakes)))


def remarks(line: CommandLine, world: World) -> list[str]:
    """What is worth a word but no reason to stop. Told once, by rank 0."""
    args, notes = line.args, list(dict.fromkeys([*line.notes, *without_effect(line)]))
    p, t = args.profile, args.training
    if p.use_pytorch_profiler and not p.profile:
        notes.append("--use-pytorch-profiler without --profile: profiling all the same.")
    profiling = p.profile or p.use_pytorch_profiler
    if profiling and t.skip_train:
        notes.append("--skip-train: there are no steps to profile.")
    elif profiling and t.train_iters is not None and p.profile_step_start > t.train_iters:
        notes.append(
            f"--profile-step-start {p.profile_step_start} lies beyond --train-iters {t.train_iters}: "
            "nothing will be profiled."
        )
    elif profiling and t.train_iters is not None and p.profile_step_end > t.train_iters + 1:
        notes.append(
            f"--profile-step-end {p.profile_step_end} lies beyond --train-iters {t.train_iters}: "
            "the profile stops with the run."
        )
    if args.checkpoint.save is not None and args.checkpoint.save_interval is None:
        notes.append("--save without --save-interval: a checkpoint is written when the run ends, none before.")
    if "torch_compile_backend" in line.spelled and not choose_compilation(args, world).layers:
        notes.append("--torch-compile-backend has no effect without --torch-compile.")
    if args.precision.fp16 and not world.gpus:
        notes.append("--fp16 is 4 to 20 times slower than fp32 on CPUs, which lack the hardware; prefer --bf16.")
    return notes
