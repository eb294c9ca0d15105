"""Explains an out-of-memory error: what was asked for, what held memory, what would help,
and a snapshot of that moment."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeGuard

import torch

from megatron_lite.config.plan import Plan
from megatron_lite.errors import attach_explanation
from megatron_lite.formats.memory_snapshot import MemorySnapshot
from megatron_lite.instruments.base import Instrument, Tell
from megatron_lite.instruments.memory_summary import (
    HELD_ACTIVATIONS,
    HELD_EVALUATION,
    HELD_GRADIENTS,
    HELD_INPUT,
    HELD_OPTIMIZER,
    HELD_WEIGHTS,
    HeldMemory,
    describe_place,
    list_held_memory,
    sum_by_category,
    sum_by_site,
)
from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.instruments.snapshot_format import extend_name, write_snapshot
from megatron_lite.units import KIB, size

# --- remedies for a run that does not fit: only flags that change its memory

FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
LAST_RESORT = (
    "fewer --num-layers, a smaller --hidden-size or a shorter --seq-length: weights and optimizer state are whole "
    "on every rank, so that more ranks do not help"
)
MOVING = (HELD_ACTIVATIONS, HELD_EVALUATION, HELD_INPUT, HELD_GRADIENTS)
STANDING = (HELD_WEIGHTS, HELD_OPTIMIZER)


class PredictPeak(Protocol):
    """The planner's closed form of a run's memory."""

    def __call__(self, plan: Plan, /, **changes: object) -> int:
        """Called for each remedy: returns the peak, in bytes, of the plan with these fields of Args changed."""


class FindRemedies(Protocol):
    """A list of what would help a run whose memory ran out."""

    def __call__(self, held: dict[str, int], asked: int, unused: int, /) -> list[str]:
        """Called when memory has run out: returns remedies, best first.

        Args:
            held: Bytes by category.
            asked: Bytes that did not fit.
            unused: Bytes that the allocator reserved and no tensor holds.
        """


def list_remedies(
    plan: Plan, predict_peak: PredictPeak | None, held: dict[str, int], asked: int, unused: int
) -> list[str]:
    """List flags that would lower the run's memory, best first, each with the predicted peak. Never empty.

    Args:
        plan: The run's.
        predict_peak: The planner's closed form; None: flags without the peak that they lead to.
        held: Bytes by category.
        asked: Bytes that did not fit.
        unused: Bytes that the allocator reserved and no tensor holds.
    """
    activations = _list_activation_remedies(plan, predict_peak)
    state = _list_gradient_remedies(plan, predict_peak)
    moving = sum(held.get(name, 0) for name in MOVING)
    standing = sum(held.get(name, 0) for name in STANDING)
    found = activations + state if moving >= standing else state + activations
    if plan.device == "cuda" and unused >= max(asked, 1):
        found.insert(
            0, f"set {EXPANDABLE} in the environment: the memory that is reserved but unused would have been enough"
        )
    return found or [LAST_RESORT]


def _list_activation_remedies(plan: Plan, predict_peak: PredictPeak | None) -> list[str]:
    """List flags that lower the memory of activations."""
    model = plan.args.model
    layers = plan.shape.num_layers
    batch = plan.args.training.micro_batch_size
    recomputed = model.recompute_num_layers or 1
    remedies: list[str] = []
    if batch > 1:
        smaller = max(number for number in range(1, batch) if batch % number == 0)
        words = f"--micro-batch-size {smaller} instead of {batch}, with the same --global-batch-size"
        remedies.append(_add_peak(words, plan, predict_peak, micro_batch_size=smaller))
    if model.recompute_granularity != "full" and model.model is None:
        full_recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        remedies.append(_add_peak(FULL_RECOMPUTE, plan, predict_peak, **full_recompute))
    elif model.recompute_method == "block" and recomputed < layers:
        words = f"--recompute-num-layers {layers} instead of {recomputed}"
        remedies.append(_add_peak(words, plan, predict_peak, recompute_num_layers=layers))
    if plan.precision == "fp32":
        remedies.append(_add_peak("--bf16", plan, predict_peak, bf16=True))
    return remedies


def _list_gradient_remedies(plan: Plan, predict_peak: PredictPeak | None) -> list[str]:
    """List flags that lower the memory of gradients."""
    if not plan.fp32_gradients:
        return []
    without_sums = {"accumulate_allreduce_grads_in_fp32": False}
    words = "no --accumulate-allreduce-grads-in-fp32"
    if plan.precision == "bf16":
        without_sums["grad_reduce_in_bf16"] = True
        words = "--grad-reduce-in-bf16"
    return [_add_peak(f"{words}: gradients without fp32 sums", plan, predict_peak, **without_sums)]


def _add_peak(words: str, plan: Plan, predict_peak: PredictPeak | None, **changes: object) -> str:
    """Add to a remedy the peak that it leads to, where that can be predicted."""
    # the formulas know the built-in GPT only
    if plan.args.model.model is not None or predict_peak is None:
        return words
    try:
        return f"{words} (predicted peak {size(predict_peak(plan, **changes))})"
    except Exception:  # noqa: BLE001 - nothing may fail here: an error is being explained
        return words


MAX_NAMED_PLACES = 3  # places in the code that are named
MAX_CAUGHT_SNAPSHOTS = 3  # snapshots of failures that the program caught: each may be gigabytes
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

    asked: int | None  # None where nobody said so
    free: int
    total: int
    reserved: int  # by this process's allocator, used or not
    all_known: bool = True  # whether the snapshot has every tensor that holds memory


class ShortageRecorder(Protocol):
    """A recorder that knows a device's memory when it runs out."""

    @property
    def place(self) -> StepMarks:
        """Read when memory has run out: where the run is."""

    @property
    def number(self) -> int:
        """Read when memory has run out: the number of the device in snapshots."""

    def watch_for_shortage(self, observe: Callable[[Shortage], None], /) -> None:
        """Called once, before the model is built; `observe` is to be called at every allocation that fails, on the
        thread where it fails."""

    def measure_shortage(self, asked: int | None, /) -> Shortage:
        """Called at the end of a run whose memory ran out, where `observe` was not called.

        Args:
            asked: Bytes that did not fit; None where nobody said so.
        """

    def snapshot(self) -> tuple[MemorySnapshot, bool]:
        """Called when memory has run out: returns a snapshot of this moment, and whether it lacks dropped events."""


def is_out_of_memory(error: BaseException | None) -> TypeGuard[BaseException]:
    """Whether a run failed because memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def read_asked_bytes(error: BaseException) -> int | None:
    """Read how many bytes the CPU's allocator was asked for from its error message; None for other errors."""
    found = re.search(r"you tried to allocate (\d+) bytes", str(error))
    return int(found[1]) if found else None


def explain_unrecorded(error: BaseException, rank: int, remedies: list[str]) -> list[str]:
    """Explain an out-of-memory error of a CPU run without --record-memory-history in two lines.

    Args:
        error: The error.
        rank: This process's rank.
        remedies: What would help, a few words each.
    """
    asked = read_asked_bytes(error)
    memory = read_host_memory()
    words = "" if asked is None else f" {size(asked)} were asked for;"
    return [
        f"error: out of memory on rank {rank}:{words} {size(memory.free)} of {size(memory.total)} are free",
        "  would help: " + "; ".join(remedies),
    ]


class OutOfMemoryWatch(Instrument):
    """Explains an out-of-memory error of this rank, and writes a snapshot of that moment.

    Args:
        rank: This process's.
        path: The file beside which the snapshot is written; None: no snapshot.
        recorder: What knows the device's memory.
        find_remedies: What would help.
        tell: Called with each line for the console.
    """

    def __init__(
        self, rank: int, path: Path | None, recorder: ShortageRecorder, find_remedies: FindRemedies, tell: Tell
    ) -> None:
        self._rank = rank
        self._path = path
        self._recorder = recorder
        self._tell = tell
        self._find_remedies = find_remedies
        self._lines: list[str] = []
        self._files = 0
        self._over = False

    def open(self) -> None:
        self._recorder.watch_for_shortage(self._observe)

    def close(self, error: BaseException | None) -> None:
        if is_out_of_memory(error):
            if not self._lines:  # a library ran out of memory, not torch's allocator, or no observer was called
                self._observe(self._recorder.measure_shortage(read_asked_bytes(error)))
            for line in self._lines:
                self._tell(line)
            attach_explanation(error, self._lines)  # a traceback would hide these lines
        elif self._lines:
            self._tell(f"{self._lines[0].removeprefix('error: ')}; the run went on. {self._lines[-1].strip()}")
        self._over = True  # torch knows no way to take an observer back

    def _observe(self, shortage: Shortage) -> None:
        """Explain a shortage at the failing allocation. An error raised here would hide the one to be explained."""
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

    def _explain(self, shortage: Shortage, snapshot: MemorySnapshot) -> list[str]:
        """Explain a shortage in four lines: what was asked for, what held memory, its largest parts, what would
        help."""
        held = list_held_memory(snapshot, self._recorder.number)
        used = sum(piece.size for piece in held)
        by_category: dict[str, int] = {}
        holders = ""
        if any(piece.tag or piece.frames for piece in held):
            by_category = sum_by_category(held)
            largest = sum_by_site(held)
            holders = ", ".join(f"{name} {size(amount)}" for name, amount in by_category.items())
        else:  # without a history, blocks have sizes only
            largest = _sum_by_size(held)
            if held:
                holders = f"{len(held):,} tensors; what they are is known with --record-memory-history"
        if not shortage.all_known:  # what was not recorded is what steps make anew each time
            unknown = max(shortage.reserved - sum(by_category.values()), 0)
            by_category[HELD_ACTIVATIONS] = by_category.get(HELD_ACTIVATIONS, 0) + unknown
        remedies = self._find_remedies(by_category, shortage.asked or 0, _count_unused(shortage, snapshot, used))
        sites = "; ".join(_describe_site(*one) for one in largest[:MAX_NAMED_PLACES])
        return [
            _describe_shortage(shortage, used),
            f"  held by: {holders or 'no tensor that is known'}",
            f"  largest: {sites or 'unknown'}",
            f"  would help: {'; '.join(remedies)}",
        ]

    def _write(self, snapshot: MemorySnapshot) -> str:
        """Write the snapshot; returns where it lies, or why it could not be written."""
        if self._path is None:
            return "none; --record-memory-history writes one, with the code that allocated each tensor"
        path = extend_name(self._path, f"_oom_rank{self._rank}")
        if self._files == MAX_CAUGHT_SNAPSHOTS:
            return f"{path} is of an earlier failure; a run writes at most {MAX_CAUGHT_SNAPSHOTS}"
        self._files += 1
        try:
            write_snapshot(path, snapshot)
        except OSError as error:
            return f"--memory-snapshot-path: {path} could not be written ({error.strerror})"
        return f"{path}; draw it at pytorch.org/memory_viz"


def _sum_by_size(held: list[HeldMemory]) -> list[tuple[str, int, int]]:
    """Count memory whose origin is unknown by its size: ("", bytes of a piece, pieces), largest first."""
    counts = Counter(piece.size for piece in held)
    return [("", amount, counts[amount]) for amount in sorted(counts, reverse=True)]


def _count_unused(shortage: Shortage, snapshot: MemorySnapshot, used: int) -> int:
    """Count the bytes that are reserved and cannot be used: segments that can grow leave none."""
    if snapshot.get("allocator_settings", {}).get("expandable_segments"):
        return 0
    return shortage.reserved - used


def _describe_site(name: str, amount: int, pieces: int) -> str:
    """Describe a place that holds memory, as in '2.0 MiB attend (model/attend.py:50) x 24'."""
    words = f"{size(amount)} {name}".rstrip()
    return f"{words} x {pieces}" if pieces > 1 else words


def _describe_shortage(shortage: Shortage, used: int) -> str:
    asked = "an unknown amount was" if shortage.asked is None else f"{size(shortage.asked)} were"
    known = "" if shortage.all_known else "at least "
    return (
        f"{asked} asked for; tensors hold {known}{size(used)}, {size(shortage.reserved)} are reserved, "
        f"{size(shortage.free)} of {size(shortage.total)} are free"
    )


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this machine's memory. Linux; zeros elsewhere."""

    total: int
    free: int
    mine: int  # that this process has in memory


def read_host_memory() -> HostMemory:
    """Read the memory of this machine and of this process."""
    found = {"MemTotal": 0, "MemAvailable": 0, "VmRSS": 0}
    for file in ("/proc/meminfo", "/proc/self/status"):
        try:
            lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        for name, _, value in (line.partition(":") for line in lines):
            if name in found:
                found[name] = int(value.split()[0]) * KIB
    return HostMemory(total=found["MemTotal"], free=found["MemAvailable"], mine=found["VmRSS"])
