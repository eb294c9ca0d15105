"""What several rules ask the run's own record: settings, machine, memory that is left, layers, waits for the loader."""

import math
from collections import Counter
from dataclasses import dataclass
from statistics import median

from megatron_lite.analysis.findings.step_measurements import MATTERS, in_ms, of_step, share, where
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.phases import Phase
from megatron_lite.units import GIB, size

# --- what the run's own record says of its plan and machine; None for what it does not say. Foreign runs say nothing


def argument(facts: Facts, name: str):
    """A flag as resolved ("micro_batch_size"); None for unknown."""
    return facts.run.args.get(name) if facts.run else None


def part(facts: Facts, group: str, name: str):
    """plan[group][name]: ("world", "size"), ("shape", "hidden_size"), ("batch", "final")."""
    values = facts.plan.get(group)
    return values.get(name) if isinstance(values, dict) else None


def compiles(facts: Facts) -> bool | None:
    """Whether layers go through torch.compile, as the run decided; None for unknown."""
    return part(facts, "compilation", "layers")


def loader_workers(facts: Facts) -> int | None:
    """Processes per rank, as the run decided; None for unknown."""
    return facts.plan.get("loader_workers")


def hardware(facts: Facts, name: str):
    """run.json's hardware: "cpus", "memory_bytes", "threads"."""
    values = facts.run.record.get("hardware") if facts.run else None
    return values.get(name) if isinstance(values, dict) else None


def variable(facts: Facts, name: str) -> str | None:
    """An environment variable that the run wrote down."""
    return variables(facts).get(name)


def variables(facts: Facts) -> dict[str, str]:
    """All that it wrote down."""
    values = facts.run.record.get("environment") if facts.run else None
    values = values if isinstance(values, dict) else {}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def whole(value) -> int | None:
    """A number of things: a positive int, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def micro_batches(facts: Facts) -> int | None:
    """Per rank and step, after a ramp-up; None for unknown."""
    size, batch = whole(argument(facts, "micro_batch_size")), whole(part(facts, "batch", "final"))
    world = whole(part(facts, "world", "size"))
    return batch // (size * world) if size and batch and world else None


def on_gpu(facts: Facts) -> bool | None:
    """None for unknown."""
    device, one = facts.plan.get("device"), facts.critical
    if one is not None and (one.time.on_gpu or not device):
        return one.time.on_gpu
    return device == "cuda" if device else None


# --- how much memory is left, and whether a larger micro-batch fits into it. Says nothing without both numbers


USABLE = 0.92  # of the device's memory: the CUDA context, NCCL and the allocator's gaps take the rest
GROWS_WITH_BATCH = ("activations", "logits and loss")


@dataclass(frozen=True)
class Peak:
    """The most that tensors took on one device."""

    num_bytes: int
    grows_bytes: int  # the part that is proportional to the micro-batch; all of it, where that is not known
    where: str


@dataclass(frozen=True)
class Larger:
    """A micro-batch that fits."""

    size: int
    flag: str
    text: str


def peak(facts: Facts) -> Peak | None:
    """By a snapshot if there is one that is no simulation, else by the allocator's own counter."""
    real = [one for one in facts.snapshots if not one.simulated and one.complete]
    if real:
        most = max(real, key=lambda one: one.peak_bytes)
        grows = sum(part.num_bytes for part in most.held if part.category in GROWS_WITH_BATCH)
        return Peak(most.peak_bytes, grows or most.peak_bytes, most.source)
    counted = [int(value) for value in (facts.run.peak_memory_bytes if facts.run else ()) if not math.isnan(value)]
    return Peak(max(counted), max(counted), "steps.jsonl") if counted and max(counted) > 0 else None


def device_bytes(facts: Facts) -> int | None:
    """Memory of the run's GPU, by its own record."""
    return whole(hardware(facts, "memory_bytes"))


def larger_micro_batch(facts: Facts) -> Larger | None:
    """Twice the micro-batch (or more) at the same global batch, if the peak then still fits; else None."""
    now, number = whole(argument(facts, "micro_batch_size")), micro_batches(facts)
    held, room = peak(facts), device_bytes(facts)
    if not (now and number and held and room) or number < 2:
        return None
    fixed, factor = held.num_bytes - held.grows_bytes, 1
    while number % (2 * factor) == 0 and fixed + 2 * factor * held.grows_bytes <= USABLE * room:
        factor *= 2
    if factor == 1:
        return None
    then = fixed + factor * held.grows_bytes
    text = (
        f"--micro-batch-size {factor * now} (now {now}): the peak of {size(held.num_bytes)} would be at most "
        f"{size(then)} "
        f"of {size(room)}"
    )
    return Larger(factor * now, f"--micro-batch-size {factor * now}", text)


# --- whether memory is short at all, and what a category holds


TIGHT = 0.60  # of the device's memory: below, a larger micro-batch is the better use of what is left
LARGE_BYTES = 4 * GIB  # where the device is not known: less fits on any that trains


def is_tight(facts: Facts, one: Snapshot) -> bool:
    """Did it run out, fill most of the device, or (the device unknown) take gigabytes?"""
    if one.oom is not None:
        return True
    room = device_bytes(facts)
    return one.peak_bytes >= (TIGHT * room if room else LARGE_BYTES)


def sum_category(one: Snapshot, category: str) -> int:
    """Of one category at the peak."""
    return sum(held.num_bytes for held in one.held if held.category == category)


# --- which layer a matrix product is, and which flag makes a dimension: by the run's own shape


def name_layer(facts: Facts, dims: tuple[int, ...]) -> str:
    """ "MLP fc1", by two of the product's three dimensions in any order (backward transposes).

    The third should be the micro-batch's tokens: these may number as many as another layer's features.
    """
    size, length = whole(argument(facts, "micro_batch_size")), whole(part(facts, "shape", "seq_length"))
    tokens = size * length if size and length else None
    fitting = [
        (tuple((Counter(dims) - Counter(pair)).elements()) != (tokens,), name)
        for name, pair in _layers(facts)
        if not Counter(pair) - Counter(dims)
    ]
    return min(fitting, key=lambda one: one[0])[1] if fitting else "product"


def suggest_size(facts: Facts, dimension: int, wanted: int) -> str:
    """What to change to turn `dimension` into `wanted`: "--hidden-size 1024 (now 1000)"."""
    for flag, value in _flags(facts):
        if value == dimension:
            return f"{flag} {wanted} (now {dimension})"
    if dimension == whole(part(facts, "shape", "padded_vocab_size")):
        return f"--make-vocab-size-divisible-by 128 (the vocabulary has now {dimension} rows)"
    return f"pad {dimension} to {wanted}"


def _flags(facts: Facts) -> tuple[tuple[str, int | None], ...]:
    shape = {
        name: whole(part(facts, "shape", name))
        for name in ("hidden_size", "ffn_hidden_size", "kv_channels", "seq_length")
    }
    return (
        ("--hidden-size", shape["hidden_size"]),
        ("--ffn-hidden-size", shape["ffn_hidden_size"]),
        ("--kv-channels", shape["kv_channels"]),
        ("--seq-length", shape["seq_length"]),
    )


def _layers(facts: Facts) -> list[tuple[str, tuple[int, int]]]:
    names = (
        "hidden_size",
        "ffn_hidden_size",
        "kv_channels",
        "num_attention_heads",
        "num_query_groups",
        "padded_vocab_size",
    )
    values = [whole(part(facts, "shape", name)) for name in names]
    if None in values:
        return []
    hidden, ffn, width, heads, groups, vocabulary = values
    fc1 = ffn * (2 if argument(facts, "swiglu") else 1)
    mlp = [("MLP", (hidden, ffn))] if fc1 == ffn else [("MLP fc1", (hidden, fc1)), ("MLP fc2", (hidden, ffn))]
    return [
        ("output projection to the vocabulary", (hidden, vocabulary)),
        *mlp,
        ("attention QKV projection", (hidden, (heads + 2 * groups) * width)),
        ("attention output projection", (hidden, heads * width)),
    ]


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


def loader_wait(facts: Facts) -> LoaderWait | None:
    """None where it does not matter or is unknown."""
    if facts.ranks_seen:
        one = max(facts.ranks_seen, key=lambda seen: seen.time.rows.get("data_wait", 0.0))
        return _of_trace(one)
    if facts.run is None or not facts.run.steady_step_ms:
        return None
    return _of_ranks(facts.run) or _of_steps(facts.run)


def _of_trace(one: RankFacts) -> LoaderWait | None:
    ms = one.time.rows.get("data_wait", 0.0)
    if share(ms, one) < MATTERS:
        return None
    who = "the device" if one.time.on_gpu else "the step"
    return LoaderWait(
        ms,
        one.time.step_ms - ms,
        one.time.loader_host_ms or None,
        f"{who} waits for the loader {of_step(ms, one)}",
        where(one),
        one.time.rank,
    )


def _of_ranks(run: Run) -> LoaderWait | None:
    waits = run.ranks.phases_ms.get(DATA, ()) if run.ranks else ()
    known = [(ms, rank) for rank, ms in enumerate(waits) if not math.isnan(ms)]
    return _of_host(run, *max(known)) if known else None


def _of_steps(run: Run) -> LoaderWait | None:
    waits = [ms for ms, ordinary in zip(run.phases_ms.get(DATA, ()), run.ordinary) if ordinary and not math.isnan(ms)]
    return _of_host(run, median(waits), None) if waits else None


def _of_host(run: Run, ms: float, rank: int | None) -> LoaderWait | None:
    if ms < MATTERS * run.steady_step_ms:
        return None
    text = f"{in_ms(ms)} of a step of {in_ms(run.steady_step_ms)} pass in the phase {DATA} (median of ordinary steps)"
    where_seen = "steps.jsonl" if rank is None else f"rank {rank}, steps.jsonl"
    return LoaderWait(ms, run.steady_step_ms - ms, None, text, where_seen, rank)
