"""The same run with other flags: what it would need, and how fast it could be."""

import dataclasses
from dataclasses import dataclass

from megatron_lite.config.args import Args
from megatron_lite.config.check import RULES_WITHOUT_FILES
from megatron_lite.config.flags import Flag, build, flags_of
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.config.rules.run import data_rules
from megatron_lite.estimate.hardware import Processor
from megatron_lite.estimate.peak import predict_memory
from megatron_lite.estimate.prediction import MemoryPrediction, TimePrediction
from megatron_lite.estimate.step_time import predict_time

RULES = [rule for rule in RULES_WITHOUT_FILES if rule is not data_rules]  # a plan may be made without its data
FLAGS = {flag.field: flag for flag in flags_of(Args)}


@dataclass(frozen=True)
class Variant:
    """A changed plan. `add` goes behind the command line, where the last one of a name counts; `drop` must leave it."""

    plan: Plan
    add: tuple[str, ...]  # ("--micro-batch-size 8", "--bf16")
    drop: tuple[str, ...]  # ("--fp16",)
    memory: MemoryPrediction
    time: TimePrediction | None  # None without a GPU to predict for

    @property
    def peak_bytes(self) -> int:
        """Of one GPU's tensors."""
        return self.memory.peak.num_bytes

    @property
    def words(self) -> str:
        """'--bf16 instead of --fp16', 'without --fp16', '' for no change."""
        added, dropped = " ".join(self.add), " ".join(self.drop)
        if added and dropped:
            return f"{added} instead of {dropped}"
        if added or not dropped:
            return added
        return f"without {dropped}" + (" (fp32)" if {"--fp16", "--bf16"} & set(self.drop) else "")


def variant_of(plan: Plan, processor: Processor | None = None, **changes) -> Variant | None:
    """`plan` with the fields of Args in `changes`; the global batch stays. None where the trainer would refuse that."""
    if plan.args.training.global_batch_size is None and changes.get("micro_batch_size"):
        changes = {"global_batch_size": plan.batch.final, **changes}
    before = _values(plan.args)
    changes = {name: value for name, value in changes.items() if before[name] != value}
    args = build(Args, before | changes)
    if any(mistake for rule in RULES for mistake in rule(args, plan.world)):
        return None
    changed = resolve(args, plan.world, plan.vocab_size)
    add, drop = _spelled(before, changes)
    return Variant(
        changed, add, drop, predict_memory(changed, processor), predict_time(changed, processor) if processor else None
    )


def _values(args: Args) -> dict[str, object]:
    groups = [getattr(args, group.name) for group in dataclasses.fields(args)]
    return {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def _spelled(before: dict[str, object], changes: dict[str, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(flags to add, flags to drop)."""
    add = [_text(FLAGS[name], value) for name, value in changes.items() if not _is_default(FLAGS[name], value)]
    drop = [
        FLAGS[name].spelling
        for name, value in changes.items()
        if _is_default(FLAGS[name], value) and not _is_default(FLAGS[name], before[name])
    ]
    return tuple(add), tuple(drop)


def _is_default(flag: Flag, value) -> bool:
    """Only switches and what is None when left out can be taken back by leaving the flag out."""
    return value == flag.default and (flag.is_switch or value is None)


def _text(flag: Flag, value) -> str:
    if flag.is_switch:
        return flag.spelling
    return f"{flag.spelling} {f'{value:g}' if isinstance(value, float) else value}"
