"""Describes what a run that goes on draws or follows otherwise than the run that was saved: a line for each."""

import os
from collections.abc import Iterator, Mapping

from megatron_lite.config.args import DataArgs, OptimizerArgs
from megatron_lite.config.data_paths import SPLIT, split_shares
from megatron_lite.config.flags import dashed
from megatron_lite.config.plan import Plan
from megatron_lite.errors import DataError

# where samples come from: flags that take the place of each other
SOURCES = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path", "per_split_data_args_path",
    "mock_data", "external_dataloader",
)  # fmt: skip
# flags that say which tokens a sample has, or in which order samples come
ORDER = ("dataloader_type", "data_sharding")
CONTENT = (
    "tokenizer_type", "fim_data", "fim_rate", "fim_spm_rate", "reset_position_ids", "reset_attention_mask",
    "dataloader_inter_document_masking", "eod_mask_loss",
)  # fmt: skip
MAX_BLEND_CHARACTERS = 100  # characters of a blend


def compare_data(saved: Mapping[str, object], plan: Plan, consumed: int) -> Iterator[str]:
    """Yield a line for each difference of the data.

    Args:
        saved: The checkpoint's arguments; what is missing is unknown.
        plan: This run's.
        consumed: Samples drawn before, which are counted from the beginning of today's order.
    """
    skipped = f"the {consumed} samples consumed so far are counted in the order of today's data"
    args = plan.args
    d = args.data
    source_then = _describe_source(saved)
    source_now = _describe_source({name: getattr(d, name) for name in SOURCES})
    if source_then and source_now and source_then != source_now:
        yield f"data was {_shorten(source_then)} and is {_shorten(source_now)}: {skipped}."
    is_split = not (d.mock_data or d.train_data_path or d.valid_data_path or d.external_dataloader)
    if is_split and "split" in saved and _normalize(saved["split"]) != _normalize(d.split):
        yield f"--split was {saved['split'] or SPLIT} and is {d.split or SPLIT}: {skipped}."
    seed = saved.get("seed")
    if isinstance(seed, int) and seed != args.training.seed and d.dataloader_type != "cyclic":
        yield f"--seed was {seed} and is {args.training.seed}: {skipped}."
    length = saved.get("seq_length")
    if isinstance(length, int) and length != plan.shape.seq_length:
        yield f"--seq-length was {length} and is {plan.shape.seq_length}: samples begin elsewhere, and {skipped}."
    batch = saved.get("global_batch_size")
    if isinstance(batch, int) and batch != plan.batch.final:
        changed = f"--global-batch-size was {batch} and is {plan.batch.final}"
        yield f"{changed}: an iteration takes another number of samples; the next one begins after {consumed}."
    if d.fim_data and consumed:
        yield "--fim-data: which documents are rearranged, and where, is drawn anew from the seed, as in Megatron-LM."
    yield from _compare_order_and_content(saved, d, skipped)


def _compare_order_and_content(saved: Mapping[str, object], d: DataArgs, skipped: str) -> Iterator[str]:
    """Yield a line for each flag of the order of samples, or of their content, that differs.

    Args:
        saved: The checkpoint's arguments.
        d: This run's data flags.
        skipped: What another order means for the samples consumed so far.
    """
    for name in (*ORDER, *CONTENT):
        then = saved.get(name)
        now = getattr(d, name)
        if then is not None and now is not None and then != now:
            what = skipped if name in ORDER else "samples have other tokens or targets"
            yield f"{dashed(name)} was {then} and is {now}: {what}."


def describe_idle_flags(o: OptimizerArgs, why: str) -> Iterator[str]:
    """Yield a line for a flag that chooses between the checkpoint's schedule and the command line's, where there is no
    choice.

    Args:
        o: The optimizer's flags.
        why: What leaves the command line's schedule alone.
    """
    for name in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"):
        if getattr(o, name):
            yield f"{dashed(name)} has no effect: {why}, so the schedule is that of the command line."


def _describe_source(given: Mapping[str, object]) -> str:
    """Spell the flags that name the data, as in '--data-path 0.3 a 0.7 b'; empty where nothing is said."""
    parts = []
    for name in SOURCES:
        value = given.get(name)
        if value is True:
            parts.append(dashed(name))
        elif isinstance(value, (list, tuple)) and value:
            words = [_spell_path(str(word)) for word in value]
            parts.append(" ".join([dashed(name), *words]))
        elif isinstance(value, str) and value:
            parts.append(f"{dashed(name)} {_spell_path(value)}")
    return " ".join(parts)


def _spell_path(word: str) -> str:
    """Spell a path in the one way that two spellings of it from here have in common."""
    return os.path.relpath(word) if os.sep in word else word


def _normalize(split: object) -> tuple[float, ...] | None:
    """The shares of --split, which sum to 1; None for a damaged value."""
    try:
        shares = split_shares(str(split or SPLIT))
    except DataError:
        return None
    total = sum(shares)
    return tuple(round(share / total, 9) for share in shares)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_BLEND_CHARACTERS else f"{text[:MAX_BLEND_CHARACTERS]}..."
