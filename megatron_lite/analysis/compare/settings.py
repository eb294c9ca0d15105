"""Settings that differ of two runs, whether these are comparable, and when a difference is more than noise."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, variance
from typing import Any

import msgspec
import numpy as np

from megatron_lite.analysis.compare.compare_results import Change, ChangedFlag, Pair
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts

Samples = Sequence[float] | Numbers
# where things are written to: no setting of the run
PLACES = ("run_dir", "save", "load", "tensorboard_dir", "memory_snapshot_path", "master_port", "nsys_output")
MODEL_FLAGS = {  # of the plan's shape: the flags that decide it
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "ffn_hidden_size": "--ffn-hidden-size",
    "seq_length": "--seq-length",
    "padded_vocab_size": "--make-vocab-size-divisible-by",
    "position_embedding": "--position-embedding-type",
    "normalization": "--normalization",
    "activation": "--swiglu",
    "tied_embeddings": "--untie-embeddings-and-output-weights",
}


def flags_that_differ(a: Facts, b: Facts) -> tuple[ChangedFlag, ...]:
    """List what differs of the settings of this trainer's runs, as typed or filled in.

    Precision, versions, hardware and variables follow.
    """
    if a.run is None or b.run is None:
        return ()
    flags = []
    for of_a, of_b in zip(_list_settings(a.run), _list_settings(b.run)):
        for name in {**of_a, **of_b}:
            value_a = of_a.get(name)
            value_b = of_b.get(name)
            if value_a != value_b:
                flags.append(ChangedFlag(name, _describe_value(value_a), _describe_value(value_b)))
    return tuple(flags)


def _list_settings(run: Run) -> list[dict[str, Any]]:
    """The settings of a run in groups: flags, what was decided by them, versions, hardware, variables."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in run.args.items() if name not in PLACES}
    decided = {
        "precision": run.plan.precision,
        "device": run.plan.device,
        "backend": run.plan.backend,
        "ranks": run.world_size,
    }
    hardware = msgspec.to_builtins(run.record.hardware)
    return [flags, decided, run.record.versions, hardware, run.record.environment]


def objections(a: Facts, b: Facts) -> list[str]:
    """Write why two runs do not do the same work, a sentence each with its flag; [] if they do or nothing says."""
    found = []
    differing = _list_differing_shapes(a, b)
    if differing:
        found.append(f"{', '.join(differing)}: another model")
    batch_a = _find_batch_size(a)
    batch_b = _find_batch_size(b)
    if batch_a is not None and batch_b is not None and batch_a != batch_b:
        found.append(f"--global-batch-size {batch_a:,.0f} against {batch_b:,.0f} samples per step: another batch")
    return found


def _list_differing_shapes(a: Facts, b: Facts) -> list[str]:
    """The flags that decide a model's shape and differ, each with its values."""
    if a.plan.shape is None or b.plan.shape is None:
        return []
    shape_a = msgspec.to_builtins(a.shape)
    shape_b = msgspec.to_builtins(b.shape)
    # tensor parallel ranks pad the vocabulary to a multiple of their own
    same_vocabulary = a.plan.vocab_size is not None and a.plan.vocab_size == b.plan.vocab_size
    told = []
    for name, flag in MODEL_FLAGS.items():
        value_a = shape_a[name]
        value_b = shape_b[name]
        if value_a is None or value_b is None or value_a == value_b:
            continue
        if name == "padded_vocab_size" and same_vocabulary:
            continue
        told.append(f"{flag} {_describe_value(value_a)} against {_describe_value(value_b)}")
    return told


def _find_batch_size(facts: Facts) -> float | None:
    """The median number of samples of a typical step; None where nothing says."""
    if facts.run is None:
        return None
    known = facts.run.batch_sizes > 0  # NaN is not
    sizes = facts.run.batch_sizes[known & facts.run.ordinary]
    return float(np.median(sizes)) if len(sizes) else None


def _describe_value(value: object) -> str:
    """A setting's value as a person would type or read it."""
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- is a difference between two runs more than their steps differ anyway?

MAX_NOISE_BLOCKS = 5  # of consecutive steps: their medians also show a drift, which single steps' spread hides
MIN_COMPARED_STEPS = 3
FLOOR = 0.01  # of the larger number: two starts of one command differ by that much, which no single run shows
TOO_NOISY = 0.2  # a band wider than this cannot say "not changed"
# Student's t, two-sided 99%, 1 to 8 degrees of freedom: a comparison has dozens of numbers,
# of which 95% would call two wrongly
T_99 = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36)


def paired(a: float | None, b: float | None, band: float | None) -> Pair:
    """Pair two numbers, and say whether they differ.

    Args:
        a: the number before; None where the run does not say.
        b: the number after; None where the run does not say.
        band: a difference up to this may be noise; None for unknown.
    """
    return Pair(a, b, band, _find_change(a, b, band))


def paired_samples(a: Samples, b: Samples, *, center: Callable[[Any], Any] = np.median) -> Pair:
    """Pair the centers of two runs' steps; with fewer than MIN_COMPARED_STEPS of either their noise is unknown.

    Args:
        a: a number of each step of the run before.
        b: a number of each step of the run after.
        center: what makes one number of them.
    """
    center_a = float(center(a)) if len(a) else None
    center_b = float(center(b)) if len(b) else None
    return paired(center_a, center_b, compute_noise_band(a, b))


def exact(a: float | None, b: float | None) -> Pair:
    """Pair numbers that do not vary from step to step, such as bytes at a peak: changed by FLOOR of the larger or
    more."""
    largest = max(a or 0.0, b or 0.0)
    return Pair(a, b, 0.0, _find_change(a, b, FLOOR * largest))


def compute_noise_band(*samples: Samples) -> float | None:
    """Half the 99% confidence interval of B - A, from medians of blocks of steps; None for too few steps."""
    if min(map(len, samples)) < MIN_COMPARED_STEPS:
        return None
    whole = 0.0  # variance of the difference of means
    parts = 0.0
    means = []
    for values in samples:
        blocks = _compute_block_medians(values)
        number = len(blocks)
        of_mean = variance(blocks) / number
        whole += of_mean
        parts += of_mean**2 / (number - 1)
        means.append(fmean(blocks))
    # Welch: where one run varies much more than the other, its own few blocks are all that is known of the noise
    freedom = int(whole**2 / parts) if parts else len(T_99)
    row = max(1, min(freedom, len(T_99)))
    return max(T_99[row - 1] * sqrt(whole), FLOOR * max(means))


def _compute_block_medians(values: Samples) -> list[float]:
    """The medians of at most MAX_NOISE_BLOCKS blocks of consecutive steps."""
    number = min(MAX_NOISE_BLOCKS, len(values))
    bounds = [len(values) * at // number for at in range(number + 1)]
    return [float(np.median(values[first:last])) for first, last in pairwise(bounds)]


def _find_change(
    a: float | None,
    b: float | None,
    band: float | None,  # a difference up to this may be noise; None: unknown
) -> Change:
    """Say what became of a number."""
    if a is None and b is None:
        return Change.UNCLEAR
    if a is None:
        return Change.ONLY_B
    if b is None:
        return Change.ONLY_A
    if band is None:
        return Change.UNCLEAR
    if abs(b - a) > band:
        return Change.MORE if b > a else Change.LESS
    too_noisy = band > TOO_NOISY * max(abs(a), abs(b))
    return Change.UNCLEAR if too_noisy else Change.SAME
