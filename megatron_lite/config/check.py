"""All mistakes of a command line together, before a process group or a file is made."""

import re
from collections.abc import Callable, Iterator, Sequence

from megatron_lite.config.args import Args
from megatron_lite.config.command_line import CommandLine
from megatron_lite.config.compilation import compilation_of
from megatron_lite.config.rules.machine import machine_rules
from megatron_lite.config.rules.model import model_rules
from megatron_lite.config.rules.optimizer import optimizer_rules
from megatron_lite.config.rules.profile import profile_rules
from megatron_lite.config.rules.run import data_rules, rank_rules, watch_rules
from megatron_lite.config.rules.training import precision_rules, training_rules
from megatron_lite.config.without_effect import without_effect
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError

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


def check(line: CommandLine, world: World, rules: Sequence[Rule] = RULES):
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
    if "torch_compile_backend" in line.spelled and not compilation_of(args, world).layers:
        notes.append("--torch-compile-backend has no effect without --torch-compile.")
    if args.precision.fp16 and not world.gpus:
        notes.append("--fp16 is 4 to 20 times slower than fp32 on CPUs, which lack the hardware; prefer --bf16.")
    return notes
