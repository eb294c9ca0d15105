"""Explains an out-of-memory error: what was asked for, what held memory, what would help,
and a snapshot of that moment."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_lite.config.plan import Plan
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
from megatron_lite.instruments.snapshot_format import extend_name, write_snapshot
from megatron_lite.units import KIB, size

# --- remedies for a run that does not fit: only flags that change its memory

FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LAST_RESORT = (
    "fewer --num-layers, a smaller --hidden-size or a shorter --seq-length: weights and optimizer state are whole "
    "on every rank, so that more ranks do not help"
)
MOVING, STANDING = (ACTIVATIONS, EVALUATION, INPUT, GRADIENTS), (WEIGHTS, OPTIMIZER)


PredictPeak = Callable[..., int]  # (plan, fields of Args as keywords) -> peak bytes of the plan with those fields


def list_remedies(
    plan: Plan, predict_peak: PredictPeak | None, held: dict[str, int], asked: int, unused: int
) -> list[str]:
    """Flags that would lower the run's memory, best first, each with the predicted peak. Never empty.

    Args:
        plan: The run's.
        predict_peak: The planner's closed form; None: flags without the peak that they lead to.
        held: Bytes by category.
        asked: Bytes that did not fit.
        unused: Bytes that the allocator reserved and no tensor holds.
    """
    model, batch, layers = plan.args.model, plan.args.training.micro_batch_size, plan.shape.num_layers
    recomputed = model.recompute_num_layers or 1

    custom = model.model is not None  # the formulas know the built-in GPT only

    def change(words: str, **changes) -> str:
        if custom or predict_peak is None:
            return words
        try:
            return f"{words} (predicted peak {size(predict_peak(plan, **changes))})"
        except Exception:  # noqa: BLE001 - nothing may fail here: an error is being explained
            return words

    activations, state = [], []
    if batch > 1:
        smaller = max(number for number in range(1, batch) if batch % number == 0)
        words = f"--micro-batch-size {smaller} instead of {batch}, with the same --global-batch-size"
        activations.append(change(words, micro_batch_size=smaller))
    if model.recompute_granularity != "full" and not custom:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        activations.append(change(FULL_RECOMPUTE, **full))
    elif model.recompute_method == "block" and recomputed < layers:
        words = f"--recompute-num-layers {layers} instead of {recomputed}"
        activations.append(change(words, recompute_num_layers=layers))
    if plan.precision == "fp32":
        activations.append(change("--bf16", bf16=True))
    if plan.fp32_gradients:
        fewer = {"accumulate_allreduce_grads_in_fp32": False}
        words = "no --accumulate-allreduce-grads-in-fp32"
        if plan.precision == "bf16":
            words, fewer["grad_reduce_in_bf16"] = "--grad-reduce-in-bf16", True
        state.append(change(f"{words}: gradients without fp32 sums", **fewer))
    moving, standing = (sum(held.get(name, 0) for name in names) for names in (MOVING, STANDING))
    found = activations + state if moving >= standing else state + activations
    if plan.device == "cuda" and unused >= max(asked, 1):
        found.insert(
            0, f"set {EXPANDABLE} in the environment: the memory that is reserved but unused would have been enough"
        )
    return found or [LAST_RESORT]


MAX_SITES = 3  # places in the code that are named
MAX_FILES = 3  # snapshots of failures that the program caught: each may be gigabytes
# messages of libraries that allocate memory themselves, as RuntimeErrors
SIGNS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "not enough memory",
)


@dataclass(frozen=True)
class Shortage:
    """Bytes of a device at the moment when memory ran out."""

    asked: int | None
    free: int
    total: int
    reserved: int  # by this process's allocator, used or not
    all_known: bool = True  # whether the snapshot has every tensor that holds memory


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a run failed because memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def read_asked_bytes(error: BaseException) -> int | None:
    """Bytes that the CPU's allocator was asked for, by its error message; None for other errors."""
    found = re.search(r"you tried to allocate (\d+) bytes", str(error))
    return int(found[1]) if found else None


def explain_unrecorded(error: BaseException, rank: int, remedies: list[str]) -> list[str]:
    """Two lines about an out-of-memory error of a CPU run without --record-memory-history."""
    asked, memory = read_asked_bytes(error), read_host_memory()
    words = "" if asked is None else f" {size(asked)} were asked for;"
    return [
        f"error: out of memory on rank {rank}:{words} {size(memory['free'])} of {size(memory['total'])} are free",
        "  would help: " + "; ".join(remedies),
    ]


class OutOfMemory(Instrument):
    """Explains an out-of-memory error of this rank. Writes a snapshot beside `path`, if that is given."""

    def __init__(self, rank: int, path: Path | None, recorder, find_remedies, tell):
        """find_remedies: `list_remedies` without its first two arguments."""
        self._rank, self._path, self._recorder, self._tell = rank, path, recorder, tell
        self._find_remedies = find_remedies
        self._lines: list[str] = []
        self._files = 0
        self._over = False

    def open(self):
        self._recorder.watch_for_shortage(self._observe)

    def close(self, error: BaseException | None):
        if is_out_of_memory(error):
            if not self._lines:  # a library ran out of memory, not torch's allocator, or no observer was called
                self._observe(self._recorder.measure_shortage(read_asked_bytes(error)))
            for line in self._lines:
                self._tell(line)
            error.explained = self._lines  # a traceback would hide these lines
        elif self._lines:
            self._tell(f"{self._lines[0].removeprefix('error: ')}; the run went on. {self._lines[-1].strip()}")
        self._over = True  # torch knows no way to take an observer back

    def _observe(self, shortage: Shortage):
        """Called at the failing allocation. An error raised here would hide the one to be explained."""
        if self._over:
            return
        start = f"error: out of memory on rank {self._rank}, {describe_place(self._recorder.place.tag)}"
        try:
            snapshot, _ = self._recorder.snapshot()
            written = self._write(snapshot)
            first, *others = self._explain(shortage, snapshot)
            self._lines = [f"{start}: {first}", *others, f"  snapshot: {written}"]
        except Exception as problem:  # noqa: BLE001 - see above
            self._lines = [f"{start}; why could not be found out: {problem}"]

    def _explain(self, shortage: Shortage, snapshot: dict) -> list[str]:
        """What was asked for, who held memory, and what would help."""
        held = list_held_memory(snapshot, self._recorder.number)
        used, by_category = sum(piece.size for piece in held), {}
        if any(piece.tag or piece.frames for piece in held):
            by_category, largest = sum_by_category(held), sum_by_site(held)
            holders = ", ".join(f"{name} {size(amount)}" for name, amount in by_category.items())
        else:  # without a history, blocks have sizes only
            counts = Counter(piece.size for piece in held)
            largest = [("", amount, counts[amount]) for amount in sorted(counts, reverse=True)]
            holders = f"{len(held):,} tensors; what they are is known with --record-memory-history" if held else ""
        named = [
            f"{size(amount)} {name}".rstrip() + (f" x {pieces}" if pieces > 1 else "")
            for name, amount, pieces in largest[:MAX_SITES]
        ]
        if not shortage.all_known:  # what was not recorded is what steps make anew each time
            unknown = max(shortage.reserved - sum(by_category.values()), 0)
            by_category[ACTIVATIONS] = by_category.get(ACTIVATIONS, 0) + unknown
        # segments that can grow leave nothing that could not be used
        unused = 0 if snapshot.get("allocator_settings", {}).get("expandable_segments") else shortage.reserved - used
        asked = "an unknown amount was" if shortage.asked is None else f"{size(shortage.asked)} were"
        known = "" if shortage.all_known else "at least "
        first = (
            f"{asked} asked for; tensors hold {known}{size(used)}, {size(shortage.reserved)} are reserved, "
            f"{size(shortage.free)} of {size(shortage.total)} are free"
        )
        remedies = self._find_remedies(by_category, shortage.asked or 0, unused)
        return [
            first,
            f"  held by: {holders or 'no tensor that is known'}",
            f"  largest: {'; '.join(named) or 'unknown'}",
            f"  would help: {'; '.join(remedies)}",
        ]

    def _write(self, snapshot: dict) -> str:
        """Write the snapshot; returns where it lies, or why it could not be written."""
        if self._path is None:
            return "none; --record-memory-history writes one, with the code that allocated each tensor"
        path = extend_name(self._path, f"_oom_rank{self._rank}")
        if self._files == MAX_FILES:
            return f"{path} is of an earlier failure; a run writes at most {MAX_FILES}"
        self._files += 1
        try:
            write_snapshot(path, snapshot)
        except OSError as error:
            return f"--memory-snapshot-path: {path} could not be written ({error.strerror})"
        return f"{path}; draw it at pytorch.org/memory_viz"


def read_host_memory() -> dict[str, int]:
    """Bytes: total and free of this machine, and those this process has in memory. Linux; zeros elsewhere."""
    found = {"MemTotal": 0, "MemAvailable": 0, "VmRSS": 0}
    for file in ("/proc/meminfo", "/proc/self/status"):
        try:
            lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        for name, _, value in (line.partition(":") for line in lines):
            if name in found:
                found[name] = int(value.split()[0]) * KIB
    return {"total": found["MemTotal"], "free": found["MemAvailable"], "mine": found["VmRSS"]}
