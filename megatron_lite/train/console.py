"""The lines that people and scripts read: Megatron-LM's, and one of our own; log messages, as lines."""

import logging
import math
import time
from datetime import datetime

from megatron_lite.config.args import WatchArgs
from megatron_lite.live_line import LiveLine, say
from megatron_lite.phases import Phase
from megatron_lite.train.step_metrics import StepFigures
from megatron_lite.units import MIB, count, duration, significant

PROGRESS_WIDTH = 24  # of the progress bar

OPTIMIZER_PHASES = (Phase.UNSCALE, Phase.CLIP_GRAD, Phase.OPTIMIZER_STEP)
BATCH_PHASES = (Phase.DATA, Phase.DATA_TO_DEVICE)
# name: (the --timing-log-level that asks for it, the phases in it). Source: training_log in Megatron-LM's
# megatron/training/training.py, and where megatron-core 0.16.1 starts and stops its timers; after backward-compute
# those that Megatron has none for
TIMERS = {
    "forward-backward": (1, (*BATCH_PHASES, Phase.FORWARD, Phase.BACKWARD, Phase.GRAD_SYNC)),
    "all-grads-sync": (1, (Phase.GRAD_SYNC,)),
    "optimizer-unscale-and-check-inf": (1, (Phase.UNSCALE,)),
    "optimizer-clip-main-grad": (1, (Phase.CLIP_GRAD,)),
    "optimizer-inner-step": (1, (Phase.OPTIMIZER_STEP,)),
    "optimizer": (1, OPTIMIZER_PHASES),
    "batch-generator": (2, BATCH_PHASES),
    "forward-compute": (2, (*BATCH_PHASES, Phase.FORWARD)),
    "backward-compute": (2, (Phase.BACKWARD,)),
    **{phase.value: (2, (phase,)) for phase in (Phase.DATA, Phase.FORWARD, Phase.LOG, Phase.EVAL, Phase.SAVE)},
}


class ConsoleHandler(logging.Handler):
    """Prints messages as `say` does."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record."""
        say(record.getMessage())


def set_up_logging(is_first: bool) -> None:
    """Print what the package logs: on the first rank everything, on other ranks what is logged with
    `extra=EVERY_RANK`."""
    handler = ConsoleHandler()
    handler.addFilter(lambda record: is_first or hasattr(record, "every_rank"))
    logger = logging.getLogger("megatron_lite")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def iteration_line(
    steps: list[StepFigures],
    seconds: float,
    tflops: float | None,
    train_iters: int,
    watch: WatchArgs,
    others: dict[str, float],
    left_out: int = 0,
) -> str:
    """Megatron-LM 0.16's line on an interval's steps, field by field.

    Args:
        steps: Steps of the interval. Learning rate and loss scale are the next step's, as Megatron prints them.
        seconds: Seconds of one iteration.
        tflops: TFLOP/s of one GPU, in Megatron's count: causal attention. None for unknown, with which --log-throughput
            does not go.
        train_iters: Iterations of the whole training.
        watch: Flags of logging.
        others: Losses beside the main one by name, of routers and of further tokens.
        left_out: Samples that --iterations-to-skip named.
    """
    last = steps[-1]
    loss = _average_loss(steps)
    skipped = sum(s.skipped for s in steps)
    nans = sum(not math.isfinite(s.loss_sum) for s in steps)
    parts = [f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {last.iteration:8d}/{train_iters:8d}"]
    parts.append(f"consumed samples: {last.consumed:12d}")
    if left_out:
        parts.append(f"skipped samples: {left_out:12d}")
    parts.append(f"elapsed time per iteration (ms): {seconds * 1000:.1f}")
    if watch.log_throughput:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f}")
    parts.append(f"learning rate: {last.next_lr:.6E}")
    parts.append(f"global batch size: {last.batch_size:5d}")
    if loss is not None:
        parts.append(f"lm loss: {loss:.6E}")
    for name, other in others.items():
        parts.append(f"{name}: {other:.6E}")
    parts.append(f"loss scale: {last.next_loss_scale:.1f}")
    if not last.skipped:
        parts.append(f"grad norm: {last.grad_norm:.3f}")
    if watch.log_num_zeros_in_grad:
        parts.append(f"num zeros: {last.zeros:.1f}")
    if watch.log_params_norm:
        parts.append(f"params norm: {last.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {skipped:3d}")
    parts.append(f"number of nan iterations: {nans:3d}")
    return " | ".join(parts) + " |"


def _average_loss(steps: list[StepFigures]) -> float | None:
    """The mean loss of the steps that were not skipped, if there are any."""
    losses = [s.loss for s in steps if not s.skipped]
    return sum(losses) / len(losses) if losses else None


def speed_line(
    tokens_per_second: float, causal_tflops: float | None, full_tflops: float | None, peak: float | None
) -> str:
    """Our own line on an interval's speed.

    Args:
        tokens_per_second: Tokens per second of all ranks.
        causal_tflops: Model TFLOP/s per rank with causal attention counted as Megatron-LM does; None for unknown.
        full_tflops: TFLOP/s of one GPU with full attention.
        peak: The processor's peak in TFLOP/s, if the table has it.
    """
    line = f"   {count(tokens_per_second)} tokens/s"
    if causal_tflops is None or full_tflops is None:
        return line
    line += f" | TFLOP/s per rank: {significant(causal_tflops)} causal (Megatron-LM), "
    line += f"{significant(full_tflops)} full attention"
    if peak is not None:
        causal = 100 * causal_tflops / peak
        full = 100 * full_tflops / peak
        line += f" | MFU {causal:.1f}% causal, {full:.1f}% full, of {peak:g} TFLOP/s"
    return line


def evaluation_lines(title: str, loss: float) -> str:
    """Megatron-LM's validation line between lines of dashes. `title`: 'iteration 5' or 'iteration 5 on test set'."""
    line = f" validation loss at {title} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def perplexity(loss: float) -> float:
    """Compute exp(loss), held at exp(20), as Megatron-LM does."""
    return math.exp(min(20.0, loss))


def memory_line(rank: int, iteration: int, stats: dict[str, int]) -> str:
    """Megatron-LM's line on a rank's memory.

    Args:
        rank: The rank.
        iteration: Iterations that are done.
        stats: torch.cuda.memory_stats() of its GPU.
    """
    names = {
        "allocated": "allocated_bytes.all.current",
        "max allocated": "allocated_bytes.all.peak",
        "reserved": "reserved_bytes.all.current",
        "max reserved": "reserved_bytes.all.peak",
    }
    parts = " | ".join(f"{name}: {stats[key] / MIB:.2f}" for name, key in names.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {parts}"


def compute_timers(phases: dict[str, list[float]], level: int = 2) -> dict[str, list[float]]:
    """Compute Megatron-LM's timers.

    Args:
        phases: Milliseconds of every rank by phase name, NaN where a rank has none, which counts as 0 in a timer.
        level: A --timing-log-level, up to which timers are wanted.

    Returns:
        Milliseconds of every rank by timer, without timers that are 0 on all ranks.
    """
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
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(of_ranks) if ms]
        elif option == "max":
            lines.append(f"{label}: {max(of_ranks):.2f}")
        else:
            least = min(ms for ms in of_ranks if ms)
            lines.append(f"{label}: ({least:.2f}, {max(of_ranks):.2f})")
    return "\n".join(lines)


class ProgressLine(LiveLine):
    """The line that shows how far training is and how long it will take."""

    def __init__(self, first: int, last: int, active: bool):
        """
        Args:
            first: The iteration where this run began.
            last: The last iteration.
            active: Whether this rank shows the line.
        """
        # the log has lines of its own
        super().__init__(active, lines=False)
        self._first = first
        self._last = last
        self._started = time.monotonic()

    def update(self, iteration: int, loss: float | None) -> None:
        """Show `iteration`, the newest loss that has arrived, and the time left at the pace so far."""
        if not self.due:
            return
        done = iteration - self._first
        pace_s = (time.monotonic() - self._started) / max(done, 1)
        left = pace_s * (self._last - iteration)
        filled = "#" * (PROGRESS_WIDTH * iteration // self._last)
        bar = filled.ljust(PROGRESS_WIDTH, ".")
        shown = "" if loss is None else f"  loss {loss:.4f}"
        self.draw(f"[{bar}] {iteration}/{self._last}{shown}  {duration(left)} left")
