"""Records a run while it trains: console lines, charts, steps.jsonl, the progress line."""

import logging
import math
import os
import time
from pathlib import Path
from types import TracebackType

from megatron_lite.config.model_size import step_flops
from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import STEPS_FILE
from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.step_records import HardwareRecord, RanksRecord, StepRecord, append_record
from megatron_lite.instruments.hardware_sampler import HardwareSampler
from megatron_lite.instruments.step_time import StepTime
from megatron_lite.instruments.timeline import Timeline
from megatron_lite.live_line import EVERY_RANK
from megatron_lite.shared_files import open_regular
from megatron_lite.train.console import (
    ProgressLine,
    compute_timers,
    evaluation_lines,
    iteration_line,
    memory_line,
    speed_line,
    timer_lines,
)
from megatron_lite.train.loop import Progress
from megatron_lite.train.prediction_losses import name_prediction
from megatron_lite.train.rank_stats import AnomalyWarnings, RankFigures, gather
from megatron_lite.train.routing import RoutingRow
from megatron_lite.train.step import StepResult
from megatron_lite.train.step_metrics import StepFigures, StepMetrics
from megatron_lite.train.trackers import Charts

logger = logging.getLogger(__name__)
TERA = 1e12
SECONDS_AHEAD = 5.0  # of steps, at most, that a killed process takes along


class StepsFile:
    """The file steps.jsonl: a line per step, what it cost and what came out, and one per console line, of all ranks.

    It is appended to, so that a resumed run goes on in the same file. Steps between two console lines can be written
    ahead, for whom the process is killed before the second: what of them only the console line brings, losses of all
    ranks, say, replaces them then.
    """

    def __init__(self, run_dir: Path, routing: RoutingRow):
        """
        Args:
            run_dir: The run's folder.
            routing: Reads the figures of routers.
        """
        self._routing = routing
        try:
            self._file = open(run_dir / STEPS_FILE, "ab", opener=open_regular)
        except OSError as error:
            raise UserError(
                f"{run_dir / STEPS_FILE}: cannot be written ({error.strerror}); move it away, or give another "
                "--run-dir."
            ) from None
        # bytes of the file before what was written ahead; None: nothing was
        self._kept: int | None = None

    def write(self, figures: StepFigures, time: StepTime) -> None:
        """Append the line of a step."""
        self._take_back()
        append_record(self._file, _build_record(figures, time, self._routing))

    def write_ahead(self, figures: StepFigures, time: StepTime) -> None:
        """Append one step until something else is written, which takes its place."""
        if self._kept is None:
            self._kept = self._file.tell()
        append_record(self._file, _build_record(figures, time, self._routing))

    def write_ranks(self, figures: RankFigures) -> None:
        """Append one interval of all ranks."""
        self._take_back()
        append_record(self._file, RanksRecord(ranks=figures.build_record()))

    def write_hardware(self, iteration: int, rank: int, figures: HardwareFigures) -> None:
        """Append samples of this rank's hardware that no console line comes for.

        Args:
            iteration: The one beside which they were taken.
            rank: This one.
            figures: What they tell.
        """
        self._take_back()
        record = HardwareRecord(iterations=(iteration, iteration), rank=rank, figures=figures)
        append_record(self._file, record)

    def flush(self) -> None:
        """Hand everything so far to the operating system, which keeps it when this process is killed."""
        self._file.flush()

    def close(self) -> None:
        """Write everything and close the file."""
        self._file.close()

    def _take_back(self) -> None:
        """Remove what was written ahead."""
        if self._kept is not None:
            self._file.truncate(self._kept)
            # for the next tell
            self._file.seek(0, os.SEEK_END)
            self._kept = None


def _build_record(figures: StepFigures, time: StepTime, routing: RoutingRow) -> StepRecord:
    """Make the line of a step."""
    record = time.build_record(figures.iteration)
    record.consumed_samples = figures.consumed
    record.batch_size = figures.batch_size
    record.loss = _to_finite(figures.loss)
    record.grad_norm = None if figures.skipped else _to_finite(figures.grad_norm)
    record.loss_scale = figures.loss_scale
    record.skipped = figures.skipped
    record.next_lr = figures.next_lr
    record.local = figures.local
    record.routing = routing.read_record(figures.routing)
    record.prediction_losses = list(figures.predictions) or None
    return record


def _average_predictions(steps: list[StepFigures]) -> dict[str, float]:
    """Average the losses of further tokens of an interval over its steps that were not skipped; {} without any."""
    rows = [step.predictions for step in steps if step.predictions and not step.skipped]
    averages = {}
    for depth, losses in enumerate(zip(*rows)):
        averages[name_prediction(depth)] = sum(losses) / len(losses)
    return averages


def _to_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class IntervalTimer:
    """Adds up the seconds of one interval's typical steps: what a profile or compilation slowed down is left out of
    averages."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self.start()

    def start(self) -> None:
        """Begin a new interval."""
        self._mark = self._timeline.training_seconds()
        self._clean_seconds = 0.0
        self._disturbed_seconds = 0.0
        # iterations that averages leave out, and how many of them compiled
        self.left_out: list[int] = []
        self._compiling = 0
        self._steps = 0

    def step(self, iteration: int) -> None:
        """Note that the step of this iteration has run."""
        self.lap()
        self._steps += 1
        if self._timeline.current.disturbed:
            self.left_out.append(iteration)
            self._compiling += self._timeline.current.compiling

    def lap(self) -> None:
        """Count the time up to now as the running step's."""
        now = self._timeline.training_seconds()
        if self._timeline.current.disturbed:
            self._disturbed_seconds += now - self._mark
        else:
            self._clean_seconds += now - self._mark
        self._mark = now

    @property
    def nothing_clean(self) -> bool:
        """Whether every step of the interval was disturbed: averages are theirs, for want of others."""
        return len(self.left_out) == self._steps

    @property
    def seconds(self) -> float:
        """The seconds of the steps that averages are made of."""
        return self._disturbed_seconds if self.nothing_clean else self._clean_seconds

    def averaged(self, iterations: list[int]) -> set[int]:
        """Select the interval's iterations that averages are made of."""
        return set(iterations) if self.nothing_clean else set(iterations) - set(self.left_out)

    def words(self) -> str:
        """The console line on what averages leave out."""
        kinds = {"profiled": len(self.left_out) - self._compiling, "compiling": self._compiling}
        number = " and ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
        number += " step" if len(self.left_out) == 1 else " steps"
        if self.nothing_clean:
            return f"   time and throughput are of {number}: there was no other since the last line"
        return f"   time and throughput leave out {number}"


class Log:
    """The log of a run. Every rank has one, since summing over ranks takes all of them; only the last rank's speaks and
    writes."""

    def __init__(
        self,
        plan: Plan,
        metrics: StepMetrics,
        timeline: Timeline,
        run_dir: Path,
        progress: Progress,
        charts: Charts,
        peak_tflops: float | None = None,
        hardware: HardwareSampler | None = None,
    ):
        """
        Args:
            plan: This rank's.
            metrics: The figures of steps.
            timeline: Times of the steps.
            run_dir: The run's folder.
            progress: Where the run begins; the run keeps it up to date.
            charts: Draw scalars.
            peak_tflops: The processor's peak in TFLOP/s, if the table has it.
            hardware: Samples this rank's hardware; None where nothing does.
        """
        self.plan = plan
        self._hardware = hardware
        self.metrics = metrics
        self._timeline = timeline
        self._progress = progress
        self._speaks = plan.world.is_last
        self._charts = charts
        self._routing = RoutingRow(plan)
        self._steps_file = StepsFile(run_dir, self._routing) if self._speaks else None
        self._line = ProgressLine(progress.iteration, plan.train_iters, self._speaks)
        self._unwritten: list[StepFigures] = []
        # the last iteration written ahead of its console line
        self._ahead = 0
        self._written_at = time.monotonic()
        self._peak_tflops = peak_tflops
        stages = [plan.layout.locate(rank).pipeline_rank for rank in range(plan.world.size)]
        self._anomalies = AnomalyWarnings(stages)
        self._time = IntervalTimer(timeline)
        self._start_interval()

    def __enter__(self) -> "Log":  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            # brings the time of the interrupted step up to now
            self._timeline.training_seconds()
            self._unwritten += self.metrics.leftover()
            self._write_steps([*self._timeline.take(), self._timeline.current])
            self._write_last_samples()
        self._line.wipe()
        self._charts.flush()
        if self._steps_file:
            self._steps_file.close()

    def _write_last_samples(self) -> None:
        """Write what this rank's hardware did before an error, which may be its own."""
        if self._hardware is None or self._steps_file is None:
            return
        self._hardware.finish()
        figures = self._hardware.take()
        if figures is not None and self._progress.iteration:
            self._steps_file.write_hardware(self._progress.iteration, self.plan.world.rank, figures)

    def say(self, text: str) -> None:
        """Print on the last rank."""
        if self._speaks:
            logger.info(text, extra=EVERY_RANK)

    def record(self, progress: Progress, result: StepResult) -> None:
        """Record a step; called after each. Collective at the intervals' ends."""
        self.metrics.record(progress, result)
        self._time.step(progress.iteration)
        self._line.update(progress.iteration, self.metrics.latest_loss)
        interval = self.plan.args.watch.log_interval
        ends = progress.iteration % interval == 0 or progress.iteration == self.plan.train_iters
        if ends or progress.step == 1:
            self._report()
        elif self._speaks and time.monotonic() - self._written_at > SECONDS_AHEAD:
            self._write_ahead()
        # as in Megatron, the line after the very first step ends no interval
        if ends:
            self._start_interval()

    def finish(self) -> None:
        """Write what is left, after the last step."""
        self._unwritten += self.metrics.take()
        self._write_steps(self._timeline.take(wait=True))

    def evaluation(self, title: str, which: str, loss: float) -> None:
        """Log the result of an evaluation.

        Args:
            title: Words before the loss, such as "iteration 5".
            which: validation or test.
            loss: Mean loss per token, in nats.
        """
        self.say(evaluation_lines(title, loss))
        # as in Megatron, whose curves are those of training
        if not self.plan.args.training.skip_train:
            self._charts.evaluation(which, loss, self._progress.iteration, self._progress.consumed)
            self._charts.flush()

    def _start_interval(self) -> None:
        self._interval: list[StepFigures] = []
        self._time.start()

    def _report(self) -> None:
        """Report the interval so far. Collective."""
        figures = self.metrics.take()
        times = self._timeline.take()
        self._time.lap()
        self._interval += figures
        self._unwritten += figures
        # first: what follows may fail
        self._write_steps(times)
        if self._speaks:
            self._say_interval(self._interval)
        progress = self._progress
        # else no step is over, on no rank
        if self._timeline.detailed and progress.step > 1:
            samples = None if self._hardware is None else self._hardware.take()
            ranks = gather(times, progress.started_at, self.metrics.device, self.plan.world.size, samples)
            self._report_ranks(ranks, disturbed=all(one.disturbed for one in times))
        if self.plan.device == "cuda":
            self._report_memory()

    def _report_ranks(self, ranks: RankFigures, disturbed: bool) -> None:
        """Report an interval's figures of all ranks.

        Args:
            ranks: The figures.
            disturbed: Whether all steps were profiled or compiled.
        """
        if self._steps_file is None:
            return
        w = self.plan.args.watch
        self._steps_file.write_ranks(ranks)
        for line in self._anomalies.of(ranks, disturbed=disturbed):
            self.say(line)
        if w.timing_log_level:
            timers = compute_timers(ranks.mean_ms, w.timing_log_level)
            self.say(timer_lines(w.timing_log_option, timers))
        self._charts.ranks(self._progress.iteration, ranks)

    def _report_memory(self) -> None:
        """Report the allocator's counters of a GPU, where they are due."""
        w = self.plan.args.watch
        progress = self._progress
        interval = w.log_memory_interval
        is_due = progress.step == 1 or (interval and progress.iteration % interval == 0)
        if is_due and self.plan.world.is_first:
            logger.info(memory_line(self.plan.world.rank, progress.iteration, self._timeline.memory.stats()))
        if self._speaks and w.log_memory_to_tensorboard:
            self._charts.memory(progress.iteration, self._timeline.memory.stats())

    def _say_interval(self, steps: list[StepFigures]) -> None:
        """Print the lines on an interval's steps."""
        w = self.plan.args.watch
        shape = self.plan.shape
        seconds = self._time.seconds
        averaged = self._time.averaged([s.iteration for s in steps])
        samples = sum(s.batch_size for s in steps if s.iteration in averaged)
        # not known of a model of the user's own
        causal = None
        full = None
        if self.plan.args.model.model is None:
            available = seconds * TERA * self.plan.world.size
            causal = step_flops(shape, samples, True) / available
            full = step_flops(shape, samples, False) / available
        others = self._average_routing(steps) | _average_predictions(steps)
        left_out = self._progress.left_out
        self.say(iteration_line(steps, seconds / len(averaged), causal, self.plan.train_iters, w, others, left_out))
        self.say(speed_line(samples * shape.seq_length / seconds, causal, full, self._peak_tflops))
        if self._time.left_out:
            self.say(self._time.words())
        charted = causal is not None and (w.log_timers_to_tensorboard or w.log_throughput)
        if charted and not self._time.nothing_clean:
            self._charts.add(steps[-1].iteration, {"throughput": causal})

    def _average_routing(self, steps: list[StepFigures]) -> dict[str, float]:
        """Average the balancing losses of an interval over its steps that were not skipped; {} of a dense model."""
        rows = [self._routing.read_losses(s.routing).means for s in steps if s.routing and not s.skipped]
        if not rows:
            return {}
        return {name: sum(row[name] for row in rows) / len(rows) for name in self._routing.names}

    def _chart_routing(self, figures: StepFigures) -> None:
        """Draw what routers did in one step, under Megatron-LM's names."""
        record = self._routing.read_record(figures.routing)
        if record is None:
            return
        scalars = dict(record.losses)
        if self.plan.args.experts.moe_per_layer_logging:
            for name, row in self._routing.read_losses(figures.routing).layers.items():
                scalars |= {f"moe/{name}_layer_{layer}": loss for layer, loss in zip(self._routing.layers, row)}
        scalars["moe/busiest expert, times the mean"] = max(record.busiest)
        scalars["moe/dropped assignments"] = record.dropped
        total = max(sum(record.expert_tokens), 1)
        scalars |= {f"moe/share of expert {n}": tokens / total for n, tokens in enumerate(record.expert_tokens)}
        self._charts.add(figures.iteration, scalars)

    def _write_steps(self, times: list[StepTime]) -> None:
        """Write the steps that are over; the one that is being logged is written with the next ones."""
        if self._steps_file is None:
            return
        over = {t.step + self._progress.started_at: t for t in times}
        for figures in [f for f in self._unwritten if f.iteration in over]:
            step_time = over[figures.iteration]
            self._steps_file.write(figures, step_time)
            self._charts.step(figures, None if step_time.disturbed else step_time.training_seconds)
            self._chart_routing(figures)
            named = {name_prediction(depth): loss for depth, loss in enumerate(figures.predictions)}
            if named:
                self._charts.add(figures.iteration, named)
        self._unwritten = [f for f in self._unwritten if f.iteration not in over]
        self._steps_file.flush()
        self._ahead = 0
        self._written_at = time.monotonic()

    def _write_ahead(self) -> None:
        """Write the steps since the last console line as far as they are known; that line may be minutes away."""
        if self._steps_file is None:
            return
        times = {t.step + self._progress.started_at: t for t in self._timeline.so_far()}
        for figures in [*self._unwritten, *self.metrics.so_far(self._ahead)]:
            if figures.iteration > self._ahead and figures.iteration in times:
                self._steps_file.write_ahead(figures, times[figures.iteration])
                self._ahead = figures.iteration
        self._steps_file.flush()
        self._written_at = time.monotonic()
