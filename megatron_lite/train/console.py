"""The lines that people and scripts read: Megatron-LM's, and one of our own."""

import math
import time
from dataclasses import dataclass
from datetime import datetime

from megatron_lite.live_line import LiveLine
from megatron_lite.phases import Phase
from megatron_lite.units import MIB, count, duration

WIDTH = 24  # of the progress bar

OPTIMIZER = (Phase.UNSCALE, Phase.CLIP_GRAD, Phase.OPTIMIZER_STEP)
BATCH = (Phase.DATA, Phase.DATA_TO_DEVICE)
# name: (the --timing-log-level that asks for it, the phases in it). Source: training_log in Megatron-LM's megatron/training/training.py,
# and where megatron-core 0.16.1 starts and stops its timers; after backward-compute those that Megatron has none for
TIMERS = {
    "forward-backward": (1, (*BATCH, Phase.FORWARD, Phase.BACKWARD, Phase.GRAD_SYNC)),
    "all-grads-sync": (1, (Phase.GRAD_SYNC,)),
    "optimizer-unscale-and-check-inf": (1, (Phase.UNSCALE,)),
    "optimizer-clip-main-grad": (1, (Phase.CLIP_GRAD,)),
    "optimizer-inner-step": (1, (Phase.OPTIMIZER_STEP,)),
    "optimizer": (1, OPTIMIZER),
    "batch-generator": (2, BATCH),
    "forward-compute": (2, (*BATCH, Phase.FORWARD)),
    "backward-compute": (2, (Phase.BACKWARD,)),
    **{phase.value: (2, (phase,)) for phase in (Phase.DATA, Phase.FORWARD, Phase.LOG, Phase.EVAL, Phase.SAVE)},
}


@dataclass(frozen=True)
class IntervalFigures:
    """What a console line says of the steps since the last one."""

    iteration: int
    train_iters: int
    consumed: int
    seconds_per_iteration: float
    tflops_per_gpu: float  # Megatron's count: causal attention
    learning_rate: float  # of the next step, as Megatron prints it
    batch_size: int
    loss: float | None  # None: every step was skipped
    loss_scale: float  # likewise
    grad_norm: float | None
    zeros: float | None
    params_norm: float | None
    skipped: int
    nan: int


def iteration_line(f: IntervalFigures, with_throughput: bool) -> str:
    """Megatron-LM 0.16's line, field by field."""
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {f.iteration:8d}/{f.train_iters:8d}",
        f"consumed samples: {f.consumed:12d}",
        f"elapsed time per iteration (ms): {f.seconds_per_iteration * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {f.tflops_per_gpu:.1f}" if with_throughput else None,
        f"learning rate: {f.learning_rate:.6E}",
        f"global batch size: {f.batch_size:5d}",
        f"lm loss: {f.loss:.6E}" if f.loss is not None else None,
        f"loss scale: {f.loss_scale:.1f}",
        f"grad norm: {f.grad_norm:.3f}" if f.grad_norm is not None else None,
        f"num zeros: {f.zeros:.1f}" if f.zeros is not None else None,
        f"params norm: {f.params_norm:.3f}" if f.params_norm is not None else None,
        f"number of skipped iterations: {f.skipped:3d}",
        f"number of nan iterations: {f.nan:3d}",
    ]
    return " | ".join(part for part in parts if part) + " |"


def speed_line(tokens_per_second: float, causal_tflops: float, full_tflops: float, peak: float | None) -> str:
    """tokens/s of all ranks, and model FLOPs per rank on both conventions, against the table's peak if it has one."""
    line = (
        f"   {count(tokens_per_second)} tokens/s | TFLOP/s per rank: {causal_tflops:.3g} causal (Megatron-LM), "
        f"{full_tflops:.3g} full attention"
    )
    if peak is None:
        return line
    return line + (
        f" | MFU {100 * causal_tflops / peak:.1f}% causal, {100 * full_tflops / peak:.1f}% full, of {peak:g} TFLOP/s"
    )


def evaluation_lines(title: str, loss: float) -> str:
    """Megatron-LM's validation line between lines of dashes. `title`: 'iteration 5' or 'iteration 5 on test set'."""
    line = f" validation loss at {title} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    return "\n".join(("-" * (len(line) + 1), line, "-" * (len(line) + 1)))


def perplexity(loss: float) -> float:
    """exp(loss), held at exp(20), as Megatron-LM does."""
    return math.exp(min(20.0, loss))


def memory_line(rank: int, iteration: int, stats: dict[str, int]) -> str:
    """Megatron-LM's memory line, from torch.cuda.memory_stats()."""
    names = {
        "allocated": "allocated_bytes.all.current",
        "max allocated": "allocated_bytes.all.peak",
        "reserved": "reserved_bytes.all.current",
        "max reserved": "reserved_bytes.all.peak",
    }
    parts = " | ".join(f"{name}: {stats[key] / MIB:.2f}" for name, key in names.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {parts}"


def compute_timers(phases: dict[str, list[float]], level: int = 2) -> dict[str, list[float]]:
    """TIMERS up to a --timing-log-level, from milliseconds of every rank by phase name, NaN where it has none: 0 in a timer. None
    that is 0 on all ranks."""
    found = {}
    for name, (needed, parts) in TIMERS.items():
        columns = [phases[part.value] for part in parts if part.value in phases]
        of_ranks = [sum(ms for ms in row if not math.isnan(ms)) for row in zip(*columns)]
        if needed <= level and any(of_ranks):
            found[name] = of_ranks
    return found


def timer_lines(option: str, found: dict[str, list[float]]) -> str:
    """Megatron-LM's block of `compute_timers`; its least time is that of ranks that have one."""
    heads = {
        "max": "max time across ranks (ms):",
        "minmax": "(min, max) time across ranks (ms):",
        "all": "times across ranks (ms):",
    }
    lines = [heads[option]]
    for name, of_ranks in found.items():
        label = f"    {f'{name} ':.<48}"
        if option == "all":
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(of_ranks) if ms)]
        elif option == "max":
            lines.append(f"{label}: {max(of_ranks):.2f}")
        else:
            lines.append(f"{label}: ({min(filter(None, of_ranks)):.2f}, {max(of_ranks):.2f})")
    return "\n".join(lines)


class ProgressLine(LiveLine):
    """How far training is and how long it will take, from iteration `first`, where this run began, to `last`."""

    def __init__(self, first: int, last: int, active: bool):
        super().__init__(active, lines=False)  # the log has lines of its own
        self._first, self._last = first, last
        self._started = time.monotonic()

    def update(self, iteration: int, loss: float | None):
        """Show `iteration`, the newest loss that has arrived, and the time left at the pace so far."""
        if not self.due:
            return
        done = iteration - self._first
        left = (time.monotonic() - self._started) / max(done, 1) * (self._last - iteration)
        bar = ("#" * (WIDTH * iteration // self._last)).ljust(WIDTH, ".")
        shown = "" if loss is None else f"  loss {loss:.4f}"
        self.draw(f"[{bar}] {iteration}/{self._last}{shown}  {duration(left)} left")
