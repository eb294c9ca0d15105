"""The flags of a launch command as a plan takes them: without names of files, with those of forks and old ones
translated, changed as asked."""

from collections.abc import Sequence
from pathlib import Path

from megatron_lite.config.args import Args
from megatron_lite.config.command_line import CommandLine, read_values, split_words
from megatron_lite.config.flags import OUTDATED, RENAMED, build, dashed, list_flags, read_flags
from megatron_lite.config.fp8 import Fp8, PaperArgs
from megatron_lite.errors import ConfigError

Words = list[tuple[str, list[str]]]  # each flag with its values
FILE = Path(__file__).with_suffix(".tsv")
NO_EFFECT = "no effect"
FP8_FORMAT = "--fp8-format"
DEEPSPEED = "--deepspeed"
ZERO_STAGE = "--zero-stage"
ZERO_1 = "--use-distributed-optimizer"
ZERO_3 = "--use-torch-fsdp2"
ZERO_STAGES = {"0": [], "1": [ZERO_1], "2": [ZERO_1], "3": [ZERO_3]}
OF_DEEPSPEED = (
    DEEPSPEED,
    "--deepspeed-config",
    "--deepspeed-mpi",
    "--ds-config",
    "--no-pipeline-parallel",
    "--deepspeed-activation-checkpointing",
)
PATHS = (
    "FILE",
    "FOLDER",
    "[WEIGHT] PREFIX ...",
)  # what help calls the values of flags that name files


def adapt_flags(flags: Sequence[str], dropped: Sequence[str], added: Sequence[str]) -> tuple[list[str], list[str]]:
    """Adapt the flags of a launch command to what is planned.

    Args:
        flags: Flags of the trainer, as the launch command has them.
        dropped: Names of flags to leave out, with or without dashes in front.
        added: Flags with their values, which stand for those of the same name.

    Returns:
        The flags that are planned, and what to note of the change.
    """
    line = CommandLine()
    words = split_words(list(flags), line)
    strays = list(flags[: len(line.mistakes)])
    others = split_words(list(added), CommandLine())
    names = {_normalize(name) for name in dropped}
    left_out = names | {_normalize(name) for name, _ in others}
    kept = [word for word in words if _normalize(word[0]) not in left_out]
    notes = _note_changes(words, names, others)
    kept, translated = _translate_deepspeed(kept)
    kept, further = _translate_others(kept)
    kept, outdated = _translate_outdated(kept)
    kept, empty = _drop_empty_paths(kept)
    return [*strays, *_join([*kept, *others])], [*notes, *translated, *further, *outdated, *empty]


def take_fp8(flags: Sequence[str]) -> tuple[Fp8 | None, list[str]]:
    """Take the flags of FP8 out of those of the trainer, which stops at --fp8-format.

    Returns:
        FP8, and the other flags; None, and all flags, where --fp8-format is not among them.

    Raises:
        ConfigError: A value of one of them cannot be read; with a line for each mistake.
    """
    line = CommandLine()
    words = split_words(list(flags), line)
    strays = list(flags[: len(line.mistakes)])
    names = {spelling for flag in list_flags(PaperArgs) for spelling in flag.spellings}
    of_fp8 = [word for word in words if word[0] in names]
    if not any(name == FP8_FORMAT for name, _ in of_fp8):
        return None, list(flags)
    found = read_values(of_fp8, PaperArgs)
    if found.mistakes:
        raise ConfigError(found.mistakes)
    paper: PaperArgs = build(PaperArgs, found.values)
    return paper.fp8, [*strays, *_join([word for word in words if word[0] not in names])]


def _normalize(name: str) -> str:
    """Write a flag with dashes: zero_stage, --zero_stage -> --zero-stage."""
    return dashed(name.lstrip("-"))


def _join(words: Words) -> list[str]:
    joined = []
    for name, values in words:
        # a value that looks like a flag came behind a sign of equality
        is_glued = len(values) == 1 and values[0].startswith("-")
        joined += [f"{name}={values[0]}"] if is_glued else [name, *values]
    return joined


def _note_changes(words: Words, names: set[str], others: Words) -> list[str]:
    """Note what was changed as asked.

    Args:
        words: the flags of the launch command.
        names: the flags to leave out.
        others: the flags that were given for them.
    """
    notes = []
    gone = dict.fromkeys(name for name, _ in words if _normalize(name) in names)
    if gone:
        notes.append(f"left out by --drop: {', '.join(gone)}.")
    if others:
        notes.append(f"given by --add: {' '.join(_join(others))}.")
    return notes


def _translate_deepspeed(words: Words) -> tuple[Words, list[str]]:
    """The words with DeepSpeed's ZeRO stages as flags of this trainer, where --deepspeed is among them."""
    if not any(_normalize(name) == DEEPSPEED for name, _ in words):
        return words, []
    kept: Words = []
    stage = None
    for name, values in words:
        if _normalize(name) == ZERO_STAGE and values and values[0] in ZERO_STAGES:
            stage = values[0]
            kept += [(flag, list[str]()) for flag in ZERO_STAGES[stage]]
        elif _normalize(name) not in OF_DEEPSPEED:
            kept.append((name, values))
    return kept, [_describe_stage(stage)]


def _translate_others(words: Words) -> tuple[Words, list[str]]:
    """The words without flags of Megatron-LM's forks and others on which a plan does not depend."""
    table = read_planned_flags()
    kept: Words = []
    left_out: list[str] = []
    read_as: list[str] = []
    for name, values in words:
        normal = _normalize(name)
        for_value = table.get("=".join([normal, *values])) if values else None
        planned = for_value or table.get(normal)
        if planned is None:
            kept.append((name, values))
        elif planned == NO_EFFECT:
            left_out.append(name)
        else:
            flag, *planned_values = planned.split()
            if not for_value and not planned_values:
                planned_values = values
            kept.append((flag, planned_values))
            given = " ".join([name, *values])
            read_as.append(f"{given} as {' '.join([flag, *planned_values])}")
    notes = []
    if left_out:
        names = ", ".join(dict.fromkeys(left_out))
        notes.append(f"flags without effect on a plan, at which a run here stops: {names}.")
    if read_as:
        notes.append(f"spellings that a plan reads, at which a run here stops: {', '.join(read_as)}.")
    return kept, notes


def _translate_outdated(words: Words) -> tuple[Words, list[str]]:
    """The words with flags that Megatron-LM has renamed by their names of today, and without those that it has
    retired."""
    kept: Words = []
    found = []
    for name, values in words:
        theirs = read_flags().get(name)
        if theirs is None or theirs.answer not in OUTDATED:
            kept.append((name, values))
            continue
        found.append(name)
        if theirs.answer == RENAMED:
            kept += split_words([*theirs.text.split(), *values], CommandLine())
    if not found:
        return kept, []
    names = ", ".join(dict.fromkeys(found))
    return kept, [f"flags of older versions of Megatron-LM, at which a run here stops: {names}."]


def _describe_stage(stage: str | None) -> str:
    if stage is None:
        return f"DeepSpeed's ZeRO stage is in its file, which is not read: none is planned; add {ZERO_1} for stage 1."
    if stage == "2":
        return f"DeepSpeed's ZeRO stage 2 is planned as stage 1, {ZERO_1}: gradients stay whole on each rank."
    planned = " ".join(ZERO_STAGES[stage]) or "no flag"
    return f"DeepSpeed's ZeRO stage {stage} is planned as {planned}; its other flags and its file are left out."


def read_planned_flags() -> dict[str, str]:
    """Read planned_flags.tsv: what is planned, by the flag with dashes."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines if line.startswith("--"))


def _drop_empty_paths(words: Words) -> tuple[Words, list[str]]:
    """The words without flags that name files and have no value, or several: neither memory nor time depends on
    them."""
    many = {spelling: flag.many for flag in list_flags(Args) if flag.value in PATHS for spelling in flag.spellings}
    unusable = [(name, values) for name, values in words if name in many and not _is_usable(values, many[name])]
    if not unusable:
        return words, []
    names = ", ".join(dict.fromkeys(name for name, _ in unusable))
    kept = [word for word in words if word not in unusable]
    return kept, [f"{names}: without a value that could be used, which a plan does not need."]


def _is_usable(values: list[str], many: bool) -> bool:
    if not all(value.strip() for value in values):
        return False
    return len(values) == 1 or (many and len(values) > 1)
