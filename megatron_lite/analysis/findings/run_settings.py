"""What rules ask the run's own record: settings, machine, memory left, layers, waits for the loader. None: it does not say."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.base import MATTERS, in_ms, of_step, share, where
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase
from megatron_lite.units import GIB, size


def argument(facts: Facts, name: str):
    """A flag as resolved ("micro_batch_size"); None for unknown."""
    return facts.run.args.get(name) if facts.run else None


def _entry(values, name: str):
    return values.get(name) if isinstance(values, dict) else None


def part(facts: Facts, group: str, name: str):
    """plan[group][name]: ("world", "size"), ("shape", "hidden_size"), ("batch", "final")."""
    return _entry(facts.plan.get(group), name)


def hardware(facts: Facts, name: str):
    """run.json's hardware: "cpus", "memory_bytes", "threads"."""
    return _entry(facts.run.record.get("hardware"), name) if facts.run else None


def variables(facts: Facts) -> dict[str, str]:
    """Environment variables that the run wrote down."""
    values = facts.run.record.get("environment") if facts.run else None
    values = values if isinstance(values, dict) else {}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def compiles(facts: Facts) -> bool | None:
    """Whether layers go through torch.compile, as the run decided."""
    return part(facts, "compilation", "layers")


def loader_workers(facts: Facts) -> int | None:
    """Processes per rank, as the run decided."""
    return facts.plan.get("loader_workers")


def whole(value) -> int | None:
    """A number of things: a positive int, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def local_ranks(facts: Facts) -> int | None:
    """Ranks of one machine."""
    return whole(part(facts, "world", "local_size"))


def parameters(facts: Facts) -> int | None:
    return whole(facts.run.record.get("parameters")) if facts.run else None


def device_bytes(facts: Facts) -> int | None:
    """Memory of the run's GPU, by its own record."""
    return whole(hardware(facts, "memory_bytes"))


def micro_batches(facts: Facts) -> int | None:
    """Per rank and step, after a ramp-up."""
    size, batch = whole(argument(facts, "micro_batch_size")), whole(part(facts, "batch", "final"))
    ranks = whole(part(facts, "layout", "data")) or whole(part(facts, "world", "size"))
    return batch // (size * ranks) if size and batch and ranks else None


def splits_model(facts: Facts) -> bool:
    """Whether ranks have parts of layers or some of them, and so exchange hidden states besides gradients."""
    return max(whole(part(facts, "layout", dimension)) or 1 for dimension in ("tensor", "pipeline")) > 1


def micro_batch_tokens(facts: Facts) -> int | None:
    """Of a rank."""
    size, length = whole(argument(facts, "micro_batch_size")), whole(part(facts, "shape", "seq_length"))
    return size * length // (whole(part(facts, "layout", "context")) or 1) if size and length else None


def on_gpu(facts: Facts) -> bool | None:
    device, one = facts.plan.get("device"), facts.critical
    if one is not None and (one.time.on_gpu or not device):
        return one.time.on_gpu
    return device == "cuda" if device else None


def measure_ordinary(run: Run | None, values: Sequence[float]) -> float | None:
    """Median over the ordinary steps that have a value."""
    if run is None or not len(values):
        return None
    known = values[run.ordinary & ~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


# --- memory: how much is left, whether a larger micro-batch fits into it, and whether it is short at all

USABLE = 0.92  # of the device's memory: the CUDA context, NCCL and the allocator's gaps take the rest
GROWS_WITH_BATCH = ("activations", "logits and loss")
TIGHT = 0.60  # of the device's memory: below, a larger micro-batch is the better use of what is left
LARGE_BYTES = 4 * GIB  # where the device is not known: less fits on any that trains


@dataclass(frozen=True)
class Peak:
    """The most that tensors took on one device."""

    num_bytes: int
    grows_bytes: int  # the part that is proportional to the micro-batch; all of it, where that is not known
    where: str


def measure_peak(facts: Facts) -> Peak | None:
    """By a snapshot if there is one that is no simulation, else by the allocator's own counter."""
    real = [one for one in facts.snapshots if not one.simulated and one.complete]
    if real:
        most = max(real, key=lambda one: one.peak_bytes)
        grows = sum(sum_category(most, category) for category in GROWS_WITH_BATCH)
        return Peak(most.peak_bytes, grows or most.peak_bytes, most.source)
    values = facts.run.peak_memory_bytes if facts.run else np.array([])
    most = int(values.max(initial=0, where=values > 0))  # NaN is not
    return Peak(most, most, "steps.jsonl") if most > 0 else None


def suggest_micro_batch(facts: Facts) -> tuple[str, str] | None:
    """(flag, sentence) of twice the micro-batch (or more) at the same global batch, if the peak then still fits."""
    now, number = whole(argument(facts, "micro_batch_size")), micro_batches(facts)
    held, room = measure_peak(facts), device_bytes(facts)
    if not (now and number and held and room) or number < 2:
        return None
    fixed, factor = held.num_bytes - held.grows_bytes, 1
    while number % (2 * factor) == 0 and fixed + 2 * factor * held.grows_bytes <= USABLE * room:
        factor *= 2
    if factor == 1:
        return None
    flag, then = f"--micro-batch-size {factor * now}", fixed + factor * held.grows_bytes
    return flag, f"{flag} (now {now}): the peak of {size(held.num_bytes)} would be at most {size(then)} of {size(room)}"


def is_tight(facts: Facts, one: Snapshot) -> bool:
    """Did it run out, fill most of the device, or (the device unknown) take gigabytes?"""
    room = device_bytes(facts)
    return one.oom is not None or one.peak_bytes >= (TIGHT * room if room else LARGE_BYTES)


def sum_category(one: Snapshot, category: str) -> int:
    """Bytes of one category at the peak."""
    return sum(held.num_bytes for held in one.held if held.category == category)


# --- which layer a matrix product is, and which flag makes a dimension: by the run's own shape


def name_layer(facts: Facts, dims: tuple[int, ...]) -> str:
    """ "MLP fc1", by two of the product's three dimensions in any order (backward transposes).

    The third should be the micro-batch's tokens: these may number as many as another layer's features.
    """
    names = ("hidden_size", "ffn_hidden_size", "kv_channels", "num_attention_heads", "num_query_groups")
    values = [whole(part(facts, "shape", name)) for name in (*names, "padded_vocab_size")]
    if None in values:
        return "product"
    hidden, ffn, width, heads, groups, vocabulary = values
    fc1 = ffn * (2 if argument(facts, "swiglu") else 1)
    layers = [
        ("output projection to the vocabulary", vocabulary),
        *([("MLP", ffn)] if fc1 == ffn else [("MLP fc1", fc1), ("MLP fc2", ffn)]),
        ("attention QKV projection", (heads + 2 * groups) * width),
        ("attention output projection", heads * width),
    ]
    fitting = [(name, Counter((hidden, features))) for name, features in layers]
    fitting = [(name, Counter(dims) - pair) for name, pair in fitting if not pair - Counter(dims)]
    tokens = Counter([micro_batch_tokens(facts)])
    return min(fitting, key=lambda one: one[1] != tokens)[0] if fitting else "product"


def suggest_size(facts: Facts, dimension: int, wanted: int) -> str:
    """What to change to turn `dimension` into `wanted`: "--hidden-size 1024 (now 1000)"."""
    for name in ("hidden_size", "ffn_hidden_size", "kv_channels", "seq_length"):
        if whole(part(facts, "shape", name)) == dimension:
            return f"--{name.replace('_', '-')} {wanted} (now {dimension})"
    if dimension == whole(part(facts, "shape", "padded_vocab_size")):
        return f"--make-vocab-size-divisible-by 128 (the vocabulary has now {dimension} rows)"
    return f"pad {dimension} to {wanted}"


# --- how long steps wait for the loader, by what there is: a trace, every rank's medians, or one rank's steps

DATA = Phase.DATA.value


@dataclass(frozen=True)
class LoaderWait:
    """Of the rank that waits most."""

    ms: float  # per step
    busy_ms: float  # the rest of the step
    loading_ms: float | None  # host time in the loader, hidden or not
    text: str
    where: str
    rank: int | None


def measure_loader_wait(facts: Facts) -> LoaderWait | None:
    """None where it does not matter or is unknown."""
    run = facts.run
    if facts.ranks_seen:
        one = max(facts.ranks_seen, key=lambda seen: seen.time.rows.get("data_wait", 0.0))
        ms = one.time.rows.get("data_wait", 0.0)
        if share(ms, one) < MATTERS:
            return None
        text = f"{'the device' if one.time.on_gpu else 'the step'} waits for the loader {of_step(ms, one)}"
        loading_ms = one.time.loader_host_ms or None
        return LoaderWait(ms, one.time.step_ms - ms, loading_ms, text, where(one), one.time.rank)
    if run is None or not run.steady_step_ms:
        return None
    waits = run.ranks.phases_ms.get(DATA, ()) if run.ranks else ()
    known = [(ms, rank) for rank, ms in enumerate(waits) if not math.isnan(ms)]
    seen = [max(known)] if known else []
    seen.append((measure_ordinary(run, run.phases_ms.get(DATA, ())), None))
    ms, rank = next((one for one in seen if (one[0] or 0.0) >= MATTERS * run.steady_step_ms), (None, None))
    if ms is None:
        return None
    text = f"{in_ms(ms)} of a step of {in_ms(run.steady_step_ms)} pass in the phase {DATA} (median of ordinary steps)"
    place = "steps.jsonl" if rank is None else f"rank {rank}, steps.jsonl"
    return LoaderWait(ms, run.steady_step_ms - ms, None, text, place, rank)
