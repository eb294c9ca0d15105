"""Memory that ran out: five lines that say what was asked and who held it, and a snapshot of that moment."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_lite.config.plan import Plan
from megatron_lite.estimate.what_if import variant_of
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.memory_summary import (
    ACTIVATIONS,
    EVALUATION,
    GRADIENTS,
    INPUT,
    OPTIMIZER,
    WEIGHTS,
    describe_place,
    list_held_memory,
    sum_by_category,
    sum_by_site,
)
from megatron_lite.instruments.memory_tags import Place
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.units import KIB, size

# --- what would help a run that does not fit: only flags that change its memory here

FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LAST_RESORT = (
    "fewer --num-layers, a smaller --hidden-size or a shorter --seq-length: weights and optimizer state are whole "
    "on every rank, so that more ranks do not help"
)
MOVING, STANDING = (ACTIVATIONS, EVALUATION, INPUT), (WEIGHTS, OPTIMIZER)


def advice(plan: Plan, held: dict[str, int], asked: int, unused: int) -> list[str]:
    """Best first, never empty.

    held: bytes by category. asked: bytes that did not fit. unused: reserved by the allocator but held by no tensor.
    """
    found = []
    if plan.device == "cuda" and unused >= max(asked, 1):
        found.append(f"{EXPANDABLE} in the environment: what is reserved but unused would have sufficed")
    moving, standing = (sum(held.get(name, 0) for name in names) for names in (MOVING, STANDING))
    shrink = _smaller_activations(plan)
    state = _smaller_state(plan)
    found += shrink + state if moving + held.get(GRADIENTS, 0) >= standing else state + shrink
    return found or [LAST_RESORT]


def _smaller_activations(plan: Plan) -> list[str]:
    m, now, layers = plan.args.model, plan.args.training.micro_batch_size, plan.shape.num_layers
    found = []
    if now > 1:
        smaller = max(number for number in range(1, now) if now % number == 0)
        words = f"--micro-batch-size {smaller} instead of {now}, with the same --global-batch-size"
        found.append(_with_peak(plan, words, micro_batch_size=smaller))
    if m.recompute_granularity != "full":
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        found.append(_with_peak(plan, FULL_RECOMPUTE, **full))
    elif m.recompute_method == "block" and (m.recompute_num_layers or 1) < layers:
        words = f"--recompute-num-layers {layers} instead of {m.recompute_num_layers or 1}"
        found.append(_with_peak(plan, words, recompute_num_layers=layers))
    if plan.precision == "fp32":
        found.append(_with_peak(plan, "--bf16", bf16=True))
    return found


def _smaller_state(plan: Plan) -> list[str]:
    if not plan.fp32_gradients:
        return []
    fewer = {"accumulate_allreduce_grads_in_fp32": False}
    if plan.precision == "bf16":
        words = "--grad-reduce-in-bf16: gradients without fp32 sums"
        return [_with_peak(plan, words, grad_reduce_in_bf16=True, **fewer)]
    return [_with_peak(plan, "no --accumulate-allreduce-grads-in-fp32: gradients without fp32 sums", **fewer)]


def _with_peak(plan: Plan, words: str, **changes) -> str:
    """With the peak that the formulas give for the changed flags. Nothing may fail here: an error is being explained."""
    try:
        variant = variant_of(plan, **changes)
    except Exception:  # noqa: BLE001 - see above
        variant = None
    return words + (f" (predicted peak {size(variant.peak_bytes)})" if variant else "")


MAX_SITES = 3  # that are named
MAX_FILES = 3  # of failures that somebody caught: a snapshot may be gigabytes
# of libraries that allocate for themselves; their errors are plain RuntimeErrors
SIGNS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)


@dataclass(frozen=True)
class Shortage:
    """Bytes when memory ran out; None where they are not known."""

    asked: int | None
    free: int
    total: int
    reserved: int  # taken by this process's allocator, used or not
    all_known: bool = True  # every tensor that holds memory is in the snapshot


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a run failed because memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def asked_bytes(error: BaseException) -> int | None:
    """How much the CPU's allocator was asked for, from its message; None for other errors."""
    found = re.search(r"you tried to allocate (\d+) bytes", str(error))
    return int(found[1]) if found else None


def report(plan: Plan, tag: str, shortage: Shortage, snapshot: dict, device: int, written: str) -> list[str]:
    """The five lines. `written`: what became of the snapshot."""
    held = list_held_memory(snapshot, device)
    recorded = any(piece.tag or piece.frames for piece in held)  # without a history, blocks have sizes only
    sizes = sum_by_category(held) if recorded else []
    if recorded:
        largest = [f"{size(amount)} {name}{_times(pieces)}" for name, amount, pieces in sum_by_site(held)]
    else:
        numbers = Counter(piece.size for piece in held)
        largest = [f"{size(amount)}{_times(numbers[amount])}" for amount in sorted(numbers, reverse=True)]
    if held and not sizes:
        holders = f"{len(held):,} tensors; what they are is known with --record-memory-history"
    else:
        holders = ", ".join(f"{name} {size(amount)}" for name, amount in sizes) or "no tensor that is known"
    used = sum(piece.size for piece in held)
    by_category = dict(sizes)
    if not shortage.all_known:  # what was not recorded is what steps make anew each time
        unknown = max(shortage.reserved - sum(by_category.values()), 0)
        by_category[ACTIVATIONS] = by_category.get(ACTIVATIONS, 0) + unknown
    # segments that can grow leave nothing that could not be used
    unused = 0 if snapshot.get("allocator_settings", {}).get("expandable_segments") else shortage.reserved - used
    asked = "an unknown amount was" if shortage.asked is None else f"{size(shortage.asked)} were"
    known = "" if shortage.all_known else "at least "
    return [
        f"{_headline(plan.world.rank, tag)}: {asked} asked for; tensors hold {known}{size(used)}, {size(shortage.reserved)} are reserved, "
        + f"{size(shortage.free)} of {size(shortage.total)} are free",
        f"  held by: {holders}",
        "  largest: " + ("; ".join(largest[:MAX_SITES]) or "unknown"),
        "  would help: " + "; ".join(advice(plan, by_category, shortage.asked or 0, unused)),
        f"  snapshot: {written}",
    ]


def _times(pieces: int) -> str:
    return f" x {pieces}" if pieces > 1 else ""


def _headline(rank: int, tag: str) -> str:
    return f"error: out of memory on rank {rank}, {describe_place(tag)}"


def unrecorded(plan: Plan, error: BaseException) -> list[str]:
    """Two lines, where nothing watches: on a CPU without --record-memory-history."""
    asked, memory = asked_bytes(error), host_memory()
    words = "" if asked is None else f" {size(asked)} were asked for;"
    return [
        f"error: out of memory on rank {plan.world.rank}:{words} {size(memory['free'])} of {size(memory['total'])} are free",
        "  would help: " + "; ".join(advice(plan, {}, 0, 0)),
    ]


class OutOfMemory(Instrument):
    """Waits for it on this rank. `path`: where a snapshot is to be written; None for no file."""

    def __init__(self, plan: Plan, place: Place, path: Path | None, recorder, tell):
        self._plan, self._place, self._path, self._recorder, self._tell = plan, place, path, recorder, tell
        self._lines: list[str] = []
        self._files = 0
        self._over = False

    def open(self):
        self._recorder.watch_for_shortage(self._observe)

    def close(self, error: BaseException | None):
        if is_out_of_memory(error):
            if not self._lines:  # not torch's allocator but a library ran out, or nobody called
                self._observe(self._recorder.shortage(asked_bytes(error)))
            for line in self._lines:
                self._tell(line)
            error.explained = self._lines  # a traceback would only bury them
        elif self._lines:
            self._tell(f"{self._lines[0].removeprefix('error: ')}; the run went on. {self._lines[-1].strip()}")
        self._over = True  # torch knows no way to take an observer back

    def _observe(self, shortage: Shortage):
        """At the failing allocation. An error in here would take the place of the one that is being explained."""
        if self._over:
            return
        try:
            snapshot, _ = self._recorder.snapshot()
            written = self._write(snapshot)
            self._lines = report(self._plan, self._place.tag, shortage, snapshot, self._recorder.number, written)
        except Exception as problem:  # noqa: BLE001 - see above
            self._lines = [
                f"{_headline(self._plan.world.rank, self._place.tag)}; why could not be found out: {problem}"
            ]

    def _write(self, snapshot: dict) -> str:
        if self._path is None:
            return "none; --record-memory-history writes one, with the code that allocated each tensor"
        if self._files == MAX_FILES:
            return f"{self._path} is of an earlier failure; a run writes at most {MAX_FILES}"
        self._files += 1
        try:
            write_snapshot(self._path, snapshot)
        except OSError as error:
            return f"--memory-snapshot-path: {self._path} could not be written ({error.strerror})"
        return f"{self._path}; draw it at pytorch.org/memory_viz"


def host_memory() -> dict[str, int]:
    """Bytes: total and free of this machine, and those this process has in memory. Linux; zeros elsewhere."""
    found = {"total": 0, "free": 0, "mine": 0}
    names = {"MemTotal": "total", "MemAvailable": "free", "VmRSS": "mine"}
    for file in ("/proc/meminfo", "/proc/self/status"):
        try:
            lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in names:
                found[names[name]] = int(value.split()[0]) * KIB
    return found
