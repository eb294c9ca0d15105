"""The files that a run writes its figures to.

steps.jsonl has one line per step, what it cost and what came out; and one per console line, of all ranks.

Steps between two console lines can be written ahead, for whom the process is killed before the second: what of them only the
console line brings, losses of all ranks, say, replaces them then.
Trackers draw scalars with Megatron-LM's names.
"""

import json
import logging
import math
import os
from pathlib import Path

from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.phases import StepTime
from megatron_lite.run_folder import RANKS_KIND, STEP_KIND, STEPS_FILE
from megatron_lite.shared_files import open_regular
from megatron_lite.train.console import compute_timers, perplexity
from megatron_lite.train.rank_stats import RankFigures
from megatron_lite.train.step_metrics import StepFigures
from megatron_lite.train.trackers import open_trackers

logger = logging.getLogger(__name__)


class StepsFile:
    """Appends, so that a resumed run goes on in the same file."""

    def __init__(self, run_dir: Path):
        try:
            self._file = open(run_dir / STEPS_FILE, "ab", opener=open_regular)
        except OSError as error:
            raise UserError(
                f"{run_dir / STEPS_FILE}: cannot be written ({error.strerror}); move it away, or give another "
                "--run-dir."
            ) from None
        self._kept: int | None = None  # bytes of the file before what was written ahead; None: nothing was

    def write(self, figures: StepFigures, time: StepTime):
        """One step, as run_folder says."""
        self._take_back()
        self._append(_record(figures, time))

    def write_ahead(self, figures: StepFigures, time: StepTime):
        """The same until something else is written."""
        if self._kept is None:
            self._kept = self._file.tell()
        self._append(_record(figures, time))

    def write_ranks(self, figures: RankFigures):
        """One interval of all ranks, as run_folder says."""
        self._take_back()
        self._append({"kind": RANKS_KIND, "ranks": figures.record()})

    def flush(self):
        """Everything so far to the operating system, which keeps it when this process is killed."""
        self._file.flush()

    def close(self):
        self._file.close()

    def _take_back(self):
        if self._kept is not None:
            self._file.truncate(self._kept)
            self._file.seek(0, os.SEEK_END)  # for the next tell
            self._kept = None

    def _append(self, record: dict):
        self._file.write(json.dumps(record).encode() + b"\n")


def _record(figures: StepFigures, time: StepTime) -> dict:
    """The line of a step. What is not known of it is left out, but for its loss and its norm."""

    def to_finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "kind": STEP_KIND,
        "iteration": figures.iteration,
        "consumed_samples": figures.consumed,
        "batch_size": figures.batch_size,
        **time.describe(),
        "loss": to_finite(figures.loss),
        "grad_norm": None if figures.skipped else to_finite(figures.grad_norm),
        "loss_scale": figures.loss_scale,
        "skipped": figures.skipped,
        "next_lr": figures.next_lr,
        **({"local": True} if figures.local else {}),
    }


class Charts:
    """Scalars under Megatron-LM's names, for every tracker. Written by the last rank only."""

    def __init__(self, plan: Plan, run_dir: Path):
        self.plan, self._trackers = plan, open_trackers(plan, run_dir)

    def step(self, f: StepFigures, seconds: float | None):
        """One step's scalars, over iterations and over samples. `seconds`: None for a profiled step."""
        w = self.plan.args.watch
        if f.iteration % w.tensorboard_log_interval:
            return
        scalars = {
            "learning-rate": f.next_lr,
            "batch-size": f.batch_size,
            "lm loss": f.loss,
            "loss-scale": f.next_loss_scale if w.log_loss_scale_to_tensorboard else None,
            "grad-norm": None if f.skipped else f.grad_norm,
            "num-zeros": f.zeros if w.log_num_zeros_in_grad else None,
            "params-norm": f.params_norm if w.log_params_norm else None,
            "world-size": self.plan.world.size if w.log_world_size_to_tensorboard else None,
            "iteration-time": seconds if w.log_timers_to_tensorboard else None,
        }
        self.add(f.iteration, scalars, f.consumed)

    def add(self, iteration: int, scalars: dict[str, float | None], consumed: int | None = None):
        """Those that are known: over iterations, and over samples where `consumed` says how many."""
        known = {name: value for name, value in scalars.items() if value is not None}
        if known:
            self._each("add", iteration, known, consumed)

    def ranks(self, iteration: int, f: RankFigures):
        """Times and memory of an interval. Megatron's NAME-time is the slowest rank's, in seconds per iteration."""
        w, scalars = self.plan.args.watch, {}
        if w.log_timers_to_tensorboard:
            for name, times in compute_timers(f.mean_ms).items():
                scalars |= {f"{name}-time": max(times) / 1000, f"{name}-time-min": min(filter(None, times)) / 1000}
        if w.log_memory_to_tensorboard:
            most = {"host-memory-bytes": f.host_memory_bytes, "mem-step-peak-bytes": f.peak_memory_bytes}
            scalars |= {name: max(values) for name, values in most.items() if not any(map(math.isnan, values))}
        self.add(iteration, scalars)

    def memory(self, iteration: int, stats: dict[str, int]):
        """The allocator's counters, as of torch.cuda.memory_stats()."""
        names = {
            "mem-reserved-bytes": "reserved_bytes.all.current",
            "mem-allocated-bytes": "allocated_bytes.all.current",
            "mem-max-allocated-bytes": "allocated_bytes.all.peak",
            "mem-allocated-count": "allocation.all.current",
        }
        self.add(iteration, {name: stats[key] for name, key in names.items()})

    def evaluation(self, which: str, loss: float, iteration: int, consumed: int):
        """'validation' or 'test' loss, and its perplexity if asked for. Megatron has one name for both, ours beside it."""
        ppl = perplexity(loss) if self.plan.args.watch.log_validation_ppl_to_tensorboard else None
        for kind in dict.fromkeys(("validation", which)):
            self.add(iteration, {f"lm loss {kind}": loss, f"lm loss {kind} ppl": ppl}, consumed)

    def flush(self):
        """Everything so far to where it is kept."""
        self._each("flush")

    def close(self, failed: bool):
        """failed: the run ended with an error."""
        self._each("close", failed)

    def _each(self, action: str, *arguments):
        """One that fails, as over a network, gets nothing more; training goes on."""
        for tracker in list(self._trackers):
            try:
                getattr(tracker, action)(*arguments)
            except Exception as error:  # noqa: BLE001 - packages of others
                self._trackers.remove(tracker)
                logger.info(
                    f"  {type(tracker).__name__} failed and gets no more of this run; training goes on: {error}"
                )
