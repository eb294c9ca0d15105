"""Checks a command line and reports all mistakes together, before a process group or a file is made."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron_lite.config.args import Args
from megatron_lite.config.command_line import CommandLine
from megatron_lite.config.dependent_flags import DEPENDENCIES
from megatron_lite.config.flags import Flag, Range, list_flags
from megatron_lite.config.plan import choose_compilation
from megatron_lite.config.rules.experts import expert_rules
from megatron_lite.config.rules.files import file_rules
from megatron_lite.config.rules.latent import latent_rules
from megatron_lite.config.rules.model import model_rules
from megatron_lite.config.rules.multi_token import multi_token_rules
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
    yield from find_numbers_outside(args, list_flags(Args))


def find_numbers_outside(args: Args, flags: Iterable[Flag]) -> Iterator[str]:
    """Describe each number of these flags that is outside of its range."""
    for flag in flags:
        if flag.must_be is None:
            continue
        for value in _list_numbers(flag.get(args)):
            if not flag.must_be.holds(value):
                yield _describe_number_outside(flag, flag.must_be, value)


def _describe_number_outside(flag: Flag, must_be: Range, value: float) -> str:
    """Describe a number outside the range of its flag, with the remedy."""
    shown = f"{value:.10g}" if flag.kind is float else value
    is_optional = flag.default is None and not flag.required
    remedy = ", or leave it out" if is_optional and not must_be.remedy else ""
    return f"{flag.spelling} {shown}: must be {must_be.describe()}{remedy}."


Rule = Callable[[Args, World], Iterator[str]]
RULES_WITHOUT_FILES = (
    required_rules,
    range_rules,
    model_rules,
    latent_rules,
    multi_token_rules,
    expert_rules,
    training_rules,
    precision_rules,
    optimizer_rules,
    rank_rules,
    data_rules,
    watch_rules,
    profile_rules,
)
RULES = (*RULES_WITHOUT_FILES, file_rules)


def check(line: CommandLine, world: World, rules: Sequence[Rule] = RULES) -> None:
    """Raise one ConfigError with every mistake: unreadable words first, then broken rules.

    A rule that speaks of a flag whose value could not be read, or is wrong by itself, is left out. Where a file of
    settings could not be read, all rules are.

    Args:
        line: The command line.
        world: The rank, and how many there are.
        rules: Functions that yield a line for each mistake.
    """
    mistakes = list(line.mistakes)
    broken = set(line.broken)
    for rule in () if line.unread else rules:
        for mistake in rule(line.args, world):
            named = re.findall(r"--[\w-]+", mistake)
            if broken.intersection(named):
                continue
            mistakes.append(mistake)
            if rule is range_rules:
                broken.add(named[0])
    if mistakes:
        raise ConfigError(list(dict.fromkeys(mistakes)))


def remarks(line: CommandLine, world: World) -> list[str]:
    """Notes about a command line that is no mistake. Printed once, by rank 0."""
    args = line.args
    notes = list(dict.fromkeys(line.notes))
    notes += _list_flags_without_effect(line)
    notes += _remark_on_profile(args)
    parallel = args.parallel
    passes_on = any("p2p" in kind for kind in parallel.cp_comm_type)
    if passes_on and "cp_comm_type" in line.spelled and parallel.context_parallel_size > 1:
        given = f"--cp-comm-type {' '.join(parallel.cp_comm_type)}"
        notes.append(f"{given}: p2p gathers keys and values here, rather than passing them on, with the same losses.")
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


def _list_flags_without_effect(line: CommandLine) -> Iterator[str]:
    """Flags that were given without what they depend on."""
    for dependency in DEPENDENCIES:
        given = [name for name in dependency.fields if name in line.spelled]
        if not given or dependency.holds(line.args):
            continue
        for name in given:
            yield f"{line.spelled[name]} has no effect without {dependency.needed}."


def _remark_on_profile(args: Args) -> Iterator[str]:
    """Where less is profiled than was asked for, or more."""
    p = args.profile
    if not p.profile and not p.use_pytorch_profiler:
        return
    if not p.profile:
        yield "--use-pytorch-profiler without --profile: profiling all the same."
    iterations = args.training.train_iters
    beyond = f"lies beyond --train-iters {iterations}"
    if args.training.skip_train:
        yield "--skip-train: there are no steps to profile."
    elif iterations is not None and p.profile_step_start > iterations:
        yield f"--profile-step-start {p.profile_step_start} {beyond}: nothing will be profiled."
    elif iterations is not None and p.profile_step_end > iterations + 1:
        yield f"--profile-step-end {p.profile_step_end} {beyond}: the profile stops with the run."
