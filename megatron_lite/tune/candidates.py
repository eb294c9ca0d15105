"""Changes that a report's findings name, of those that leave the losses as they are."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.formats.setting import Setting
from megatron_lite.formats.tune_ledger import SeenFinding, Settings
from megatron_lite.tune.knobs import DeclaredKnob, LossEffect, Target, TrainerKnob, read_trainer_knobs
from megatron_lite.tune.variant import TunedCommand, add_settings

MULTIPLE = re.compile(r"x (\d+)")
BELOW = re.compile(r"below (\d+)")


@dataclass(frozen=True)
class ProposedChange:
    """A change to try."""

    code: str  # the finding that names it
    change: Settings
    losses: LossEffect
    expected_ms: float | None = None  # that the finding says it saves of a step, at most


def list_candidates(
    findings: Sequence[SeenFinding], command: TunedCommand, kept: Settings, declared: Sequence[DeclaredKnob]
) -> Iterator[ProposedChange]:
    """List the changes that findings name, in the report's order.

    Args:
        findings: of the report on the command with the settings that were kept.
        command: as it was given.
        kept: what differs from it by now.
        declared: knobs of the user's file, which come before the trainer's.
    """
    for finding in findings:
        for knob in declared:
            if finding.code in knob.answers:
                for setting in knob.list_settings():
                    if not _is_set(setting, command, kept):
                        yield ProposedChange(finding.code, (setting,), knob.losses, finding.gain_ms)
        for remedy in finding.remedies:
            yield from _apply_table(finding, remedy, command, kept)


def _apply_table(
    finding: SeenFinding, remedy: Settings, command: TunedCommand, kept: Settings
) -> Iterator[ProposedChange]:
    """Make a change of a remedy, where the table has all that it sets."""
    table = read_trainer_knobs()
    change: list[Setting] = []
    losses = LossEffect.BIT_EQUAL
    for setting in remedy:
        knob = table.get(setting.name)
        if knob is None or (setting.kind == "flag" and not command.is_trainer):
            return
        chosen = _choose(knob, setting, _get_value(setting, command, kept))
        if chosen is None:
            return
        if not _is_set(chosen, command, kept):
            change.append(chosen)
        if knob.losses is LossEffect.ROUNDING:
            losses = LossEffect.ROUNDING
    if change:
        yield ProposedChange(finding.code, tuple(change), losses, finding.gain_ms)


def _choose(knob: TrainerKnob, setting: Setting, now: str | None) -> Setting | None:
    """Choose the value that a remedy gives to a knob; None where the table has none for it.

    Args:
        knob: the row of the table.
        setting: as the finding has it.
        now: the value in the command; None where it is not given.
    """
    limit = BELOW.fullmatch(knob.before)
    number = int(now) if now is not None and now.isdecimal() else None
    if limit and (number is None or number >= int(limit[1])):
        return None
    for target in knob.targets:
        value = setting.value
        if target == Target.LEFT_OUT:
            if value is None:
                return setting
        elif value is None:
            continue
        elif target == Target.ON:
            return _give(setting, "")
        elif target == Target.OF_FINDING:
            if value:
                return setting
        elif factor := MULTIPLE.fullmatch(target):
            if number:
                return _give(setting, str(number * int(factor[1])))
        else:
            return _give(setting, target)
    return None


def _give(setting: Setting, value: str) -> Setting:
    """Give a setting another value."""
    return Setting(kind=setting.kind, name=setting.name, value=value)


def _get_value(setting: Setting, command: TunedCommand, kept: Settings) -> str | None:
    """Get the value that a knob has by now; None where it is not given."""
    for one in kept:
        if (one.kind, one.name) == (setting.kind, setting.name):
            return one.value
    return command.get(setting.kind, setting.name)


def _is_set(setting: Setting, command: TunedCommand, kept: Settings) -> bool:
    """Whether a knob has that value already."""
    return _get_value(setting, command, kept) == setting.value


def combine(kept: Settings, change: Settings, command: TunedCommand) -> Settings:
    """Add a change to what was kept, without what the command has anyway."""
    return tuple(setting for setting in add_settings(kept, change) if not command.has(setting))
