"""Draws a run's scalars and keeps its report: in TensorBoard, Weights & Biases, MLflow.

Only runs that use one need its package.
"""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Protocol, TypedDict

from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import REPORT_FILE, REPORT_PAGE
from megatron_lite.shared_files import read_foreign
from megatron_lite.train.console import compute_timers, perplexity
from megatron_lite.train.rank_stats import RankFigures
from megatron_lite.train.step_metrics import StepFigures
from megatron_lite.units import significant

logger = logging.getLogger(__name__)
# numbers and seconds after which MLflow is sent what waits; it takes 1,000 numbers at once
MAX_WAITING = 900
MAX_TRACKER_SECONDS = 30.0
MAX_SETTING_LENGTH = 500  # characters of a setting's text there


class Tracker(Protocol):
    """A keeper of scalars as they come, also of an iteration before the last one."""

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None) -> None:
        """Called when numbers of an iteration are known.

        Args:
            iteration: Counted from 1 in the whole training.
            scalars: Values by name.
            consumed: Samples of all ranks up to then, where they are to be drawn over samples, too.
        """

    def add_report(self, report: "ReportSummary") -> None:
        """Called once after the run, if it has a report."""

    def flush(self) -> None:
        """Called where the run may stand still or end: write everything so far to where it is kept."""

    def close(self, failed: bool) -> None:
        """Called once, when the run is over."""


class _RankTimes(TypedDict):
    """The time of a rank in report.json, in milliseconds."""

    step_ms: float
    rows: dict[str, float]


class _Rank(TypedDict):
    """A rank in report.json."""

    rank: int
    time: _RankTimes | None


class _Finding(TypedDict):
    """A finding in report.json; its cost in milliseconds per step."""

    title: str
    cost_ms: float | None


class _Change(TypedDict):
    """A remedy in report.json's order of remedies, in milliseconds per step."""

    change: str
    ms: float
    step_ms: float


class _Gains(TypedDict):
    """Gains of all remedies together, in report.json."""

    order: list[_Change]


class _Verdict(TypedDict):
    """The verdict in report.json."""

    sentence: str


class _Report(TypedDict):
    """The keys of report.json that are read here."""

    run: dict[str, float | None] | None
    critical_rank: int | None
    ranks_seen: list[_Rank]
    findings: list[_Finding]
    gains: _Gains | None
    verdict: _Verdict


@dataclasses.dataclass(frozen=True)
class ReportSummary:
    """The summary of the report in a run's folder."""

    verdict: str
    findings: list[str]  # most costly first
    numbers: dict[str, float]
    files: tuple[Path, ...]  # the page first
    changes: tuple[str, ...] = ()  # the first to make first

    @classmethod
    def read(cls, run_dir: Path) -> "ReportSummary":
        """Read RUN/report.json, whose keys docs/report_json.md lists."""
        report: _Report = json.loads(read_foreign(run_dir / REPORT_FILE))
        run = report["run"] or {}
        numbers: dict[str, float | None] = {}
        for name in ("first_step_ms", "steady_step_ms", "tokens_per_second", "model_tflops", "mfu_causal"):
            numbers[name] = run.get(name)
        for rank in report["ranks_seen"]:
            times = rank["time"]
            if rank["rank"] == report["critical_rank"] and times:
                numbers["profiled_step_ms"] = times["step_ms"]
                for name, ms in times["rows"].items():
                    numbers[f"{name}_ms"] = ms
        findings = []
        for one in report["findings"]:
            cost_ms = one["cost_ms"]
            cost = "" if cost_ms is None else f": {cost_ms:,.2f} ms per step"
            findings.append(f"{one['title']}{cost}")
        changes = []
        for change in report["gains"]["order"] if report["gains"] else []:
            after = f"saves {change['ms']:,.2f} ms per step, which then takes {change['step_ms']:,.2f} ms"
            changes.append(f"{change['change']}: {after}")
        return cls(
            verdict=report["verdict"]["sentence"],
            findings=findings,
            numbers={f"report/{name}": float(value) for name, value in numbers.items() if value is not None},
            files=(run_dir / REPORT_PAGE, run_dir / REPORT_FILE),
            changes=tuple(changes),
        )


class TensorBoard:
    """Scalars under Megatron's names, over iterations, and over samples."""

    def __init__(self, plan: Plan):
        from torch.utils.tensorboard import SummaryWriter

        w = plan.args.watch
        self._writer = SummaryWriter(log_dir=w.tensorboard_dir, max_queue=w.tensorboard_queue_size)
        for name, value in _list_settings(plan).items():
            self._writer.add_text(name, value)

    def flush(self) -> None:
        """Write everything so far to the run's file."""
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Close the run's file."""
        self._writer.close()

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None) -> None:
        """Draw scalars over iterations, and over samples. The arguments are those of Charts.add."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            if consumed is not None:
                self._writer.add_scalar(f"{name} vs samples", value, consumed)

    def add_report(self, report: ReportSummary) -> None:
        """Show the report as a text."""
        numbers = "".join(f"| {name} | {significant(value, 4)} |\n" for name, value in report.numbers.items())
        findings = "".join(f"- {text}\n" for text in report.findings)
        changes = "".join(f"{number}. {text}\n" for number, text in enumerate(report.changes, 1))
        table = f"| | |\n| --- | ---: |\n{numbers}"
        self._writer.add_text("report/verdict", f"{report.verdict}\n\n{findings}\n{changes}\n{table}")


class _WandbSummary(Protocol):
    """The part of a wandb run's summary that is used here."""

    def update(self, values: dict[str, str | float], /) -> None:
        """Set values of the summary."""


class _WandbRun(Protocol):
    """The part of wandb's Run that is used here."""

    @property
    def summary(self) -> _WandbSummary:
        """The last values of the run."""

    def define_metric(self, name: str, *, step_metric: str) -> object:
        """Draw metrics over another one."""

    def log(self, values: dict[str, object], /) -> None:
        """Send values of one moment."""

    def finish(self, *, exit_code: int) -> None:
        """End the run of the package."""


class WeightsAndBiases:
    """A run of its own, drawn over its scalar "iteration"; "samples" is another."""

    def __init__(self, plan: Plan, run_dir: Path):
        w = plan.args.watch
        self._wandb = wandb = _import("wandb", "--wandb-project")
        folder = Path(w.wandb_save_dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._run: _WandbRun = wandb.init(
            project=w.wandb_project,
            name=w.wandb_exp_name or None,
            entity=w.wandb_entity or None,
            dir=str(folder),
            config=_list_settings(plan),
            settings=wandb.Settings(console="off"),
        )
        # steps of a console line are told when it comes, after evaluations between them
        self._run.define_metric("*", step_metric="iteration")

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None) -> None:
        """Log scalars, and samples where their number is given. The arguments are those of Charts.add."""
        values: dict[str, object] = {"iteration": iteration, **scalars}
        if consumed is not None:
            values["samples"] = consumed
        self._run.log(values)

    def add_report(self, report: ReportSummary) -> None:
        """Keep the page of the report, and its numbers in the summary."""
        with open(report.files[0], encoding="utf-8") as page:
            self._run.log({"report/page": self._wandb.Html(page, inject=False)})
        self._run.summary.update({"report/verdict": report.verdict, **report.numbers})

    def flush(self) -> None:
        """Do nothing, as the package sends by itself."""

    def close(self, failed: bool) -> None:
        """End the run of the package."""
        self._run.finish(exit_code=int(failed))


class _MLflowClient(Protocol):
    """The part of MlflowClient that is used here, of one run; metrics and params are of mlflow.entities."""

    def log_batch(
        self, run_id: str, *, metrics: list[object] | tuple[()] = (), params: list[object] | tuple[()] = ()
    ) -> object:
        """Send numbers and settings, at most 1,000 and 100 at once."""

    def log_artifact(self, run_id: str, path: str, /) -> None:
        """Keep a file of the run."""

    def set_tag(self, run_id: str, key: str, value: str, /) -> None:
        """Keep a text of the run."""

    def set_terminated(self, run_id: str, status: str, /) -> None:
        """End the run: FINISHED or FAILED."""


class MLflow:
    """A run of an experiment, where MLFLOW_TRACKING_URI says, else in the current folder."""

    def __init__(self, plan: Plan):
        mlflow = _import("mlflow", "--mlflow-experiment")
        client = mlflow.MlflowClient()
        name = plan.args.watch.mlflow_experiment
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        self._run: str = client.create_run(experiment).info.run_id
        self._client: _MLflowClient = client
        # (name, value, milliseconds since 1970, iteration) to what log_batch takes
        self._make_metric: Callable[[str, float, int, int], object] = mlflow.entities.Metric
        settings: list[object] = []
        for setting, value in _list_settings(plan).items():
            settings.append(mlflow.entities.Param(setting, value[:MAX_SETTING_LENGTH]))
        for first in range(0, len(settings), 100):
            self._client.log_batch(self._run, params=settings[first : first + 100])
        self._waiting: list[object] = []
        self._sent_at = time.monotonic()

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None) -> None:
        """Keep scalars, and samples where their number is given, to be sent with others.

        The arguments are those of Charts.add.
        """
        now = int(time.time() * 1000)
        for name, value in scalars.items():
            self._waiting.append(self._make_metric(name, value, now, iteration))
        if consumed is not None:
            self._waiting.append(self._make_metric("samples", consumed, now, iteration))
        if len(self._waiting) > MAX_WAITING or time.monotonic() - self._sent_at > MAX_TRACKER_SECONDS:
            self.flush()

    def add_report(self, report: ReportSummary) -> None:
        """Keep the files of the report, its verdict and its numbers."""
        for path in report.files:
            self._client.log_artifact(self._run, str(path))
        self._client.set_tag(self._run, "report/verdict", report.verdict[:MAX_SETTING_LENGTH])
        now = int(time.time() * 1000)
        for name, value in report.numbers.items():
            self._waiting.append(self._make_metric(name, value, now, 0))

    def flush(self) -> None:
        """Send all numbers that wait."""
        waiting = self._waiting
        self._waiting = []
        self._sent_at = time.monotonic()
        if waiting:
            self._client.log_batch(self._run, metrics=waiting)

    def close(self, failed: bool) -> None:
        """Send what waits, and end the run."""
        self.flush()
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def open_trackers(plan: Plan, run_dir: Path) -> list[Tracker]:
    """Open the trackers that the flags ask for, on the last rank.

    Args:
        plan: This rank's.
        run_dir: The run's folder, for files that have no other.

    Raises:
        UserError: A package is missing.
    """
    w = plan.args.watch
    found: list[Tracker] = []
    if not plan.world.is_last:
        return []
    if w.tensorboard_dir:
        found.append(TensorBoard(plan))
    if w.wandb_project:
        found.append(WeightsAndBiases(plan, run_dir))
    if w.mlflow_experiment:
        found.append(MLflow(plan))
    return found


class Charts:
    """Scalars under Megatron-LM's names, for every tracker; on the last rank only, on others it does nothing."""

    def __init__(self, plan: Plan, run_dir: Path):
        self.plan = plan
        self._trackers = open_trackers(plan, run_dir)

    def step(self, f: StepFigures, seconds: float | None) -> None:
        """Draw the scalars of a step, over iterations and over samples.

        Args:
            f: The step's figures.
            seconds: How long it took; None for a profiled step.
        """
        w = self.plan.args.watch
        if f.iteration % w.tensorboard_log_interval:
            return
        scalars: dict[str, float | None] = {
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

    def add(self, iteration: int, scalars: Mapping[str, float | None], consumed: int | None = None) -> None:
        """Draw the scalars that are known: over iterations, and over samples.

        Args:
            iteration: The iteration that they are of.
            scalars: Values by name; None for an unknown one.
            consumed: Samples of the training so far; None: nothing is drawn over samples.
        """
        known = {name: value for name, value in scalars.items() if value is not None}
        if known:
            self._each(lambda tracker: tracker.add(iteration, known, consumed))

    def ranks(self, iteration: int, f: RankFigures) -> None:
        """Draw times and memory of an interval. Megatron's NAME-time is the slowest rank's, in seconds per
        iteration."""
        w = self.plan.args.watch
        scalars: dict[str, float] = {}
        if w.log_timers_to_tensorboard:
            for name, times in compute_timers(f.mean_ms).items():
                scalars[f"{name}-time"] = max(times) / 1000
                scalars[f"{name}-time-min"] = min(ms for ms in times if ms) / 1000
        if w.log_memory_to_tensorboard:
            most = {"host-memory-bytes": f.host_memory_bytes, "mem-step-peak-bytes": f.peak_memory_bytes}
            for name, values in most.items():
                if not any(map(math.isnan, values)):
                    scalars[name] = max(values)
        self.add(iteration, scalars)

    def memory(self, iteration: int, stats: dict[str, int]) -> None:
        """Draw the allocator's counters, as of torch.cuda.memory_stats()."""
        names = {
            "mem-reserved-bytes": "reserved_bytes.all.current",
            "mem-allocated-bytes": "allocated_bytes.all.current",
            "mem-max-allocated-bytes": "allocated_bytes.all.peak",
            "mem-allocated-count": "allocation.all.current",
        }
        self.add(iteration, {name: stats[key] for name, key in names.items()})

    def evaluation(self, which: str, loss: float, iteration: int, consumed: int) -> None:
        """Draw the loss of an evaluation, and its perplexity if asked for.

        Megatron has one name for both kinds, ours beside it.

        Args:
            which: validation or test.
            loss: Mean loss per token, in nats.
            iteration: The newest one.
            consumed: Samples of all ranks up to then.
        """
        ppl = perplexity(loss) if self.plan.args.watch.log_validation_ppl_to_tensorboard else None
        for kind in dict.fromkeys(("validation", which)):
            self.add(iteration, {f"lm loss {kind}": loss, f"lm loss {kind} ppl": ppl}, consumed)

    def add_report(self, run_dir: Path) -> None:
        """Show the report that lies in the run's folder."""
        if self._trackers:
            summary = ReportSummary.read(run_dir)
            self._each(lambda tracker: tracker.add_report(summary))

    def flush(self) -> None:
        """Write everything so far to where it is kept."""
        self._each(lambda tracker: tracker.flush())

    def __enter__(self) -> "Charts":  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._each(lambda tracker: tracker.close(error is not None))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        """Call every tracker. One that fails, as over a network, gets nothing more; training goes on."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - packages of others
                self._trackers.remove(tracker)
                logger.info(
                    f"  {type(tracker).__name__} failed and gets no more of this run; training goes on: {error}"
                )


def _import(package: str, flag: str) -> ModuleType:
    """Import a package that a flag needs. UserError if it is not installed."""
    try:
        return __import__(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(f"{flag} needs the package {package}, which is not installed: pip install {package}") from None


def _list_settings(plan: Plan) -> dict[str, str]:
    """The values of all flags as text, by their names in the code."""
    settings = {}
    for group in dataclasses.asdict(plan.args).values():
        for name, value in group.items():
            settings[name] = str(value)
    return settings
