"""What differs in how two runs were started, whether they are comparable, and when a difference is more than noise."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, variance
from typing import Any

import msgspec
import numpy as np

from megatron_lite.analysis.compare.compare_results import Change, Flag, Pair
from megatron_lite.analysis.intervals import Numbers
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


def flags_that_differ(a: Facts, b: Facts) -> tuple[Flag, ...]:
    """Settings of runs of this trainer, as typed or filled in; then precision, versions, hardware and variables."""
    if a.run is None or b.run is None:
        return ()
    sides: list[list[dict[str, Any]]] = []
    for run in (a.run, b.run):
        flags = {f"--{name.replace('_', '-')}": value for name, value in run.args.items() if name not in PLACES}
        plan, record = run.plan, run.record
        plain = {"precision": plan.precision, "device": plan.device, "backend": plan.backend, "ranks": run.world_size}
        sides.append([flags, plain, record.versions, msgspec.to_builtins(record.hardware), record.environment])
    return tuple(
        Flag(name, _describe_value(mine.get(name)), _describe_value(theirs.get(name)))
        for mine, theirs in zip(*sides)
        for name in {**mine, **theirs}
        if mine.get(name) != theirs.get(name)
    )


def objections(a: Facts, b: Facts) -> list[str]:
    """Why the two do not do the same work, a sentence each with its flag; [] if they do or nothing says."""
    found, sizes = [], []
    one, other = (msgspec.to_builtins(facts.shape) for facts in (a, b))
    if a.plan.shape is not None and b.plan.shape is not None:
        told = [
            f"{flag} {_describe_value(one[name])} against {_describe_value(other[name])}"
            for name, flag in MODEL_FLAGS.items()
            if None not in (one[name], other[name])
            and one[name] != other[name]
            # tensor parallel ranks pad the vocabulary to a multiple of their own
            and not (name == "padded_vocab_size" and a.plan.vocab_size == b.plan.vocab_size is not None)
        ]
        found += [f"{', '.join(told)}: another model"] if told else []
    for run in (a.run, b.run):
        seen = run.batch_sizes[run.ordinary & (run.batch_sizes > 0)] if run else ()
        sizes.append(float(np.median(seen)) if len(seen) else None)
    if None not in sizes and sizes[0] != sizes[1]:
        found.append(f"--global-batch-size {sizes[0]:,.0f} against {sizes[1]:,.0f} samples per step: another batch")
    return found


def _describe_value(value: object) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- is a difference between two runs more than their steps differ anyway?

MAX_BLOCKS = 5  # of consecutive steps: their medians also show a drift, which single steps' spread hides
MIN_STEPS = 3
FLOOR = 0.01  # of the larger number: two starts of one command differ by that much, which no single run shows
TOO_NOISY = 0.2  # a band wider than this cannot say "not changed"
# Student's t, two-sided 99%, 1 to 8 degrees of freedom: a comparison has dozens of numbers,
# of which 95% would call two wrongly
T_99 = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36)


def paired(a: float | None, b: float | None, band: float | None) -> Pair:
    """Two numbers and the noise of their difference."""
    return Pair(a, b, band, _find_change(a, b, band))


def paired_samples(a: Samples, b: Samples, *, center: Callable[[Any], Any] = np.median) -> Pair:
    """The centers of two runs' steps (fewer than MIN_STEPS of either: no band)."""
    mine, theirs = (float(center(values)) if len(values) else None for values in (a, b))
    return paired(mine, theirs, compute_noise_band(a, b))


def exact(a: float | None, b: float | None) -> Pair:
    """Numbers that do not vary from step to step, such as bytes at a peak: changed by FLOOR of the larger or more."""
    return Pair(a, b, 0.0, _find_change(a, b, FLOOR * max(a or 0.0, b or 0.0)))


def compute_noise_band(*samples: Samples) -> float | None:
    """Half the 99% confidence interval of B - A, from medians of blocks of steps; None for too few steps."""
    if min(map(len, samples)) < MIN_STEPS:
        return None
    variances, means, counts = [], [], []
    for values in samples:
        number = min(MAX_BLOCKS, len(values))
        bounds = [len(values) * at // number for at in range(number + 1)]
        blocks = [float(np.median(values[first:last])) for first, last in pairwise(bounds)]
        variances.append(variance(blocks) / number)
        counts.append(number)
        means.append(fmean(blocks))
    whole = sum(variances)
    # Welch: where one run varies much more than the other, its own few blocks are all that is known of the noise
    parts = sum(part**2 / (number - 1) for part, number in zip(variances, counts))
    freedom = int(whole**2 / parts) if parts else len(T_99)
    return max(T_99[max(1, min(freedom, len(T_99))) - 1] * sqrt(whole), FLOOR * max(means))


def _find_change(a: float | None, b: float | None, band: float | None) -> Change:
    if a is None or b is None:
        return Change.UNCLEAR if a is b else Change.ONLY_B if a is None else Change.ONLY_A
    if band is None:
        return Change.UNCLEAR
    if abs(b - a) > band:
        return Change.MORE if b > a else Change.LESS
    return Change.UNCLEAR if band > TOO_NOISY * max(abs(a), abs(b)) else Change.SAME
