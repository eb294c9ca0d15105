"""Observers of a run, put around the core: prediction, instruments, log, run.json, report."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_lite.checkpoint.find import chosen
from megatron_lite.config.model_size import count_parameters
from megatron_lite.config.plan import Plan
from megatron_lite.errors import CheckpointError, DivergedError, attach_explanation, get_explanation
from megatron_lite.formats.hardware import peak_tflops
from megatron_lite.formats.run_record import Prediction
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.build_instruments import WhereaboutsKeeper, build_instruments, build_sampler
from megatron_lite.instruments.memory_oom import PredictPeak, explain_unrecorded, is_out_of_memory, list_remedies
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.live_line import EVERY_RANK
from megatron_lite.machine import Machine
from megatron_lite.parallel.rank_status import RunPosition
from megatron_lite.train.log import Log
from megatron_lite.train.loop import Progress
from megatron_lite.train.post_run_report import end_with_report, wants_report
from megatron_lite.train.run_record import RunRecorder
from megatron_lite.train.step_metrics import StepMetrics
from megatron_lite.train.trackers import Charts

logger = logging.getLogger(__name__)


class RunPrediction(Protocol):
    """A prediction of a run before its first step."""

    @property
    def lines(self) -> Sequence[str]:
        """Asked for before the first step: what the console shows."""

    @property
    def record(self) -> Prediction:
        """Asked for before the first step: what run.json keeps."""


@dataclass(frozen=True)
class Planner:
    """Functions of the planner that a run calls. The entry hands them in: nothing that trains imports the planner."""

    predict_run: Callable[
        [Plan, str | None, int | None], RunPrediction
    ]  # before the first step; (plan, GPU, room in bytes)
    predict_peak: PredictPeak  # when memory has run out


class Observers:
    """Observers of one rank.

    Make them when torch knows its device. `instruments` and `record` exist while `watch` is open.

    Args:
        plan: This rank's plan.
        machine: The machine that it runs on.
        planner: Predicts time and memory.
    """

    def __init__(self, plan: Plan, machine: Machine, planner: Planner):
        self.plan = plan
        gpu_name: str | None = None
        self._peak_tflops: float | None = None
        room = machine.memory_bytes
        if plan.device == "cuda":
            gpu = torch.cuda.get_device_properties(plan.world.gpu)
            gpu_name = gpu.name
            self._peak_tflops = peak_tflops(gpu.name, plan.precision)
            room = gpu.total_memory
        self.peak_words = "MFU unknown: no peak for this processor in the table"  # what model FLOPs are held against
        if plan.args.model.model is not None:
            self.peak_words = f"MFU, FLOPs and memory of --model {plan.args.model.model} are unknown"
        elif self._peak_tflops is not None:
            self.peak_words = f"MFU against {self._peak_tflops:g} TFLOP/s"
        self._planner = planner
        self._prediction = planner.predict_run(plan, gpu_name, room)
        self.prediction_lines = self._prediction.lines
        self._timeline = Timeline()
        self._ends = contextlib.ExitStack()

    @contextlib.contextmanager
    def watch(self, run_dir: Path, where: RunPosition) -> Iterator[None]:
        """Around the training: instruments are on, and run.json tells how it ended."""
        plan = self.plan
        self._run_dir = run_dir
        predict_peak = self._planner.predict_peak
        instruments = build_instruments(plan, run_dir, self._timeline, _log_on_every_rank, predict_peak)
        self._hardware = build_sampler(plan)
        samplers = [] if self._hardware is None else [self._hardware]
        members = [WhereaboutsKeeper(where), *samplers, *instruments]
        parameters = count_parameters(plan.shape) if plan.args.model.model is None else None
        sampled = None if self._hardware is None else self._hardware.describe()
        self.record = RunRecorder(plan, run_dir, parameters, self._peak_tflops, self._prediction.record, sampled)
        with self.record, Instruments(members, _log_on_every_rank) as self.instruments:
            try:
                yield
            except DivergedError as error:
                replay = f"megatron-lite replay {run_dir} --step {error.iteration}"
                raise DivergedError(f"{error} {replay} finds out why.", error.iteration) from None

    def make_log(self, metrics: StepMetrics, progress: Progress) -> Log:
        """The log of a run that goes on from `progress`."""
        self.record.has_begun = True
        self._charts = self._ends.enter_context(Charts(self.plan, self._run_dir))
        return Log(
            self.plan,
            metrics,
            self._timeline,
            self._run_dir,
            progress,
            self._charts,
            self._peak_tflops,
            self._hardware,
        )

    def report(self) -> None:
        """Print the report of a profiled run, on the rank that has its trackers, and hand it to them."""
        if not (self.plan.world.is_last and wants_report(self.plan, self._timeline.window.traced_on_demand)):
            return
        if end_with_report(self._run_dir):
            self._charts.add_report(self._run_dir)

    @contextlib.contextmanager
    def explain_early_end(self) -> Iterator[None]:
        """Log what no traceback tells of Ctrl-C, and of memory that ran out where no instrument watched it.

        Closes the trackers.
        """
        try:
            with self._ends:
                yield
        except RuntimeError as error:
            if is_out_of_memory(error) and get_explanation(error) is None:
                remedies = list_remedies(self.plan, self._planner.predict_peak, {}, 0, 0)
                lines = explain_unrecorded(error, self.plan.world.rank, remedies)
                attach_explanation(error, lines)
                for line in lines:
                    _log_on_every_rank(line)
            raise
        except KeyboardInterrupt:
            save = self.plan.args.checkpoint.save
            newest = None
            with contextlib.suppress(CheckpointError):  # the next --load tells it
                newest = chosen(Path(save), None, "--save") if save and Path(save).is_dir() else None
            remedy = f"--load {save} goes on from {newest.name}" if newest else "there is no checkpoint to go on from"
            logger.info(f"interrupted; {remedy}")
            raise


def _log_on_every_rank(text: str) -> None:
    logger.info(text, extra=EVERY_RANK)
