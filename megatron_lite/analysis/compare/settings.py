"""What differs in how two runs were started, and whether they are comparable at all."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, variance

from megatron_lite.analysis.compare.compare_results import Change, Flag, Pair
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts

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
    flags = _differing(a.run.args, b.run.args, lambda name: f"--{name.replace('_', '-')}", skip=PLACES)
    plain = [
        Flag(key, _words(a.plan.get(key)), _words(b.plan.get(key)))
        for key in ("precision", "device", "backend")
        if a.plan.get(key) != b.plan.get(key)
    ]
    sizes = (
        [Flag("ranks", str(a.run.world_size), str(b.run.world_size))] if a.run.world_size != b.run.world_size else []
    )
    records = [
        flag
        for part in ("versions", "hardware", "environment")
        for flag in _differing(_part(a.run, part), _part(b.run, part), str)
    ]
    return (*flags, *plain, *sizes, *records)


def objections(a: Facts, b: Facts) -> list[str]:
    """Why the two do not do the same work, a sentence each with its flag; [] if they do or nothing says."""
    return [*_other_model(a, b), *_other_batch(a.run, b.run)]


def _other_model(a: Facts, b: Facts) -> Iterator[str]:
    one, other = a.plan.get("shape"), b.plan.get("shape")
    if isinstance(one, dict) and isinstance(other, dict):
        told = [
            f"{flag} {_words(one[name])} against {_words(other[name])}"
            for name, flag in MODEL_FLAGS.items()
            if name in one and name in other and one[name] != other[name]
        ]
        if told:
            yield f"{', '.join(told)}: another model"


def _other_batch(a: Run | None, b: Run | None) -> Iterator[str]:
    if a is None or b is None:
        return
    sizes = [_batch(run) for run in (a, b)]
    if None not in sizes and sizes[0] != sizes[1]:
        yield f"--global-batch-size {sizes[0]:g} against {sizes[1]:g} samples per step: another batch"


def _batch(run: Run) -> float | None:
    seen = [size for size, plain in zip(run.batch_sizes, run.ordinary) if plain and size > 0]
    return median(seen) if seen else None


def _part(run: Run, name: str) -> dict:
    part = run.record.get(name)
    return part if isinstance(part, dict) else {}


def _differing(a: dict, b: dict, title, skip=()) -> list[Flag]:
    names = [name for name in {**a, **b} if name not in skip and a.get(name) != b.get(name)]
    return [Flag(title(name), _words(a.get(name)), _words(b.get(name))) for name in names]


def _words(value) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- is a difference between two runs more than their steps differ anyway?


BLOCKS = 5  # of consecutive steps: their medians also show a drift, which single steps' spread hides
MIN_STEPS = 3
FLOOR = 0.01  # of the larger number: two starts of one command differ by that much, which no single run shows
TOO_NOISY = 0.2  # a band wider than this cannot say "not changed"
# Student's t, two-sided 99%, 1 to 8 degrees of freedom: a comparison has dozens of numbers, of which 95% would call two wrongly
T_99 = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36)


def paired(a: float | None, b: float | None, band: float | None) -> Pair:
    """Two numbers and the noise of their difference."""
    return Pair(a, b, band, _change(a, b, band))


def paired_samples(a: Sequence[float], b: Sequence[float], centre=median) -> Pair:
    """The centres of two runs' steps (fewer than MIN_STEPS of either: no band)."""
    return paired(centre(a) if a else None, centre(b) if b else None, compute_noise_band(a, b))


def compute_noise_band(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Half the 99% confidence interval of B - A, from medians of blocks of steps; None for too few steps."""
    if min(len(a), len(b)) < MIN_STEPS:
        return None
    blocks_a, blocks_b = _block_medians(a), _block_medians(b)
    error = sqrt(variance(blocks_a) / len(blocks_a) + variance(blocks_b) / len(blocks_b))
    freedom = min(len(blocks_a) + len(blocks_b) - 2, len(T_99))
    return max(T_99[freedom - 1] * error, FLOOR * max(fmean(blocks_a), fmean(blocks_b)))


def exact(a: float | None, b: float | None) -> Pair:
    """Numbers that do not vary from step to step, such as bytes at a peak: changed by FLOOR of the larger or more."""
    return Pair(a, b, 0.0, _change(a, b, FLOOR * max(a or 0.0, b or 0.0)))


def _block_medians(values: Sequence[float]) -> list[float]:
    blocks = min(BLOCKS, len(values))
    bounds = [len(values) * at // blocks for at in range(blocks + 1)]
    return [median(values[first:last]) for first, last in pairwise(bounds)]


def _change(a: float | None, b: float | None, band: float | None) -> Change:
    if a is None or b is None:
        return Change.UNCLEAR if a is b else Change.ONLY_B if a is None else Change.ONLY_A
    if band is None:
        return Change.UNCLEAR
    if abs(b - a) > band:
        return Change.MORE if b > a else Change.LESS
    return Change.UNCLEAR if band > TOO_NOISY * max(abs(a), abs(b)) else Change.SAME
