"""What draws a run's scalars and keeps its report: TensorBoard, Weights & Biases, MLflow.

Only runs that use one need its package.
"""

import dataclasses
import json
import logging
import math
import time
from pathlib import Path
from typing import Protocol

from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import REPORT_FILE, REPORT_PAGE
from megatron_lite.shared_files import read_foreign
from megatron_lite.train.console import compute_timers, perplexity
from megatron_lite.train.rank_stats import RankFigures
from megatron_lite.train.step_metrics import StepFigures
from megatron_lite.units import significant

logger = logging.getLogger(__name__)
MAX_WAITING, MAX_SECONDS = 900, 30.0  # MLflow takes 1,000 numbers at once
MAX_LENGTH = 500  # of a setting's text there


class Tracker(Protocol):
    """Takes scalars as they come, also of an iteration before the last one."""

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None):
        """Numbers of an iteration, and how many samples were seen then, where that matters."""

    def add_report(self, report: "ReportSummary"):
        """What the run's report says."""

    def flush(self):
        """Everything so far to where it is kept."""

    def close(self, failed: bool):
        """The run is over."""


@dataclasses.dataclass(frozen=True)
class ReportSummary:
    """Of the report in a run's folder."""

    verdict: str
    findings: list[str]  # most costly first
    numbers: dict[str, float]
    files: tuple[Path, ...]  # the page first

    @classmethod
    def read(cls, run_dir: Path) -> "ReportSummary":
        """The summary of RUN/report.json, whose keys docs/report_json.md lists."""
        report = json.loads(read_foreign(run_dir / REPORT_FILE))
        run, numbers = report["run"] or {}, {}
        for name in ("first_step_ms", "steady_step_ms", "tokens_per_second", "model_tflops", "mfu_causal"):
            numbers[name] = run.get(name)
        for rank in report["ranks_seen"]:
            if rank["rank"] == report["critical_rank"] and rank["time"]:
                numbers["profiled_step_ms"] = rank["time"]["step_ms"]
                numbers |= {f"{name}_ms": ms for name, ms in rank["time"]["rows"].items()}
        findings = [
            one["title"] + ("" if one["cost_ms"] is None else f": {one['cost_ms']:,.2f} ms per step")
            for one in report["findings"]
        ]
        known = {f"report/{name}": float(value) for name, value in numbers.items() if value is not None}
        return cls(report["verdict"]["sentence"], findings, known, (run_dir / REPORT_PAGE, run_dir / REPORT_FILE))


class TensorBoard:
    """Megatron's names, over iterations, and over samples."""

    def __init__(self, plan: Plan):
        from torch.utils.tensorboard import SummaryWriter

        w = plan.args.watch
        self._writer = SummaryWriter(log_dir=w.tensorboard_dir, max_queue=w.tensorboard_queue_size)
        for name, value in _list_settings(plan).items():
            self._writer.add_text(name, value)
        self.flush = self._writer.flush

    def close(self, failed: bool):
        self._writer.close()

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None):
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
            if consumed is not None:
                self._writer.add_scalar(f"{name} vs samples", value, consumed)

    def add_report(self, report: ReportSummary):
        numbers = "".join(f"| {name} | {significant(value, 4)} |\n" for name, value in report.numbers.items())
        findings = "".join(f"- {text}\n" for text in report.findings)
        self._writer.add_text("report/verdict", f"{report.verdict}\n\n{findings}\n| | |\n| --- | ---: |\n{numbers}")


class WeightsAndBiases:
    """A run of its own, drawn over its scalar "iteration"; "samples" is another."""

    def __init__(self, plan: Plan, run_dir: Path):
        w, wandb = plan.args.watch, _import("wandb", "--wandb-project")
        folder = Path(w.wandb_save_dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=w.wandb_project,
            name=w.wandb_exp_name or None,
            entity=w.wandb_entity or None,
            dir=str(folder),
            config=_list_settings(plan),
            settings=wandb.Settings(console="off"),
        )
        # steps of a console line are told when it comes, after evaluations between them
        self._run.define_metric("*", step_metric="iteration")

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None):
        self._run.log({"iteration": iteration, **scalars, **({} if consumed is None else {"samples": consumed})})

    def add_report(self, report: ReportSummary):
        import wandb

        with open(report.files[0], encoding="utf-8") as page:
            self._run.log({"report/page": wandb.Html(page, inject=False)})
        self._run.summary.update({"report/verdict": report.verdict, **report.numbers})

    def flush(self):
        """It sends by itself."""

    def close(self, failed: bool):
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of an experiment, where MLFLOW_TRACKING_URI says, else in the current folder."""

    def __init__(self, plan: Plan):
        mlflow = _import("mlflow", "--mlflow-experiment")
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        name = plan.args.watch.mlflow_experiment
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment).info.run_id
        settings = [mlflow.entities.Param(name, value[:MAX_LENGTH]) for name, value in _list_settings(plan).items()]
        for first in range(0, len(settings), 100):
            self._client.log_batch(self._run, params=settings[first : first + 100])
        self._waiting: list = []
        self._sent_at = time.monotonic()

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None):
        now, known = int(time.time() * 1000), {**scalars, **({} if consumed is None else {"samples": consumed})}
        self._waiting += [self._entities.Metric(name, value, now, iteration) for name, value in known.items()]
        if len(self._waiting) > MAX_WAITING or time.monotonic() - self._sent_at > MAX_SECONDS:
            self.flush()

    def add_report(self, report: ReportSummary):
        for path in report.files:
            self._client.log_artifact(self._run, str(path))
        self._client.set_tag(self._run, "report/verdict", report.verdict[:MAX_LENGTH])
        now = int(time.time() * 1000)
        self._waiting += [self._entities.Metric(name, value, now, 0) for name, value in report.numbers.items()]

    def flush(self):
        waiting, self._waiting, self._sent_at = self._waiting, [], time.monotonic()
        if waiting:
            self._client.log_batch(self._run, metrics=waiting)

    def close(self, failed: bool):
        self.flush()
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def open_trackers(plan: Plan, run_dir: Path) -> list[Tracker]:
    """Those that the flags ask for, on the last rank. UserError where a package is missing."""
    w, found = plan.args.watch, []
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
        """'validation' or 'test' loss, and its perplexity if asked for.

        Megatron has one name for both, ours beside it.
        """
        ppl = perplexity(loss) if self.plan.args.watch.log_validation_ppl_to_tensorboard else None
        for kind in dict.fromkeys(("validation", which)):
            self.add(iteration, {f"lm loss {kind}": loss, f"lm loss {kind} ppl": ppl}, consumed)

    def add_report(self, run_dir: Path):
        """The report that lies in the run's folder."""
        if self._trackers:
            self._each("add_report", ReportSummary.read(run_dir))

    def flush(self):
        """Everything so far to where it is kept."""
        self._each("flush")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self._each("close", error is not None)

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


def _import(package: str, flag: str):
    try:
        return __import__(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UserError(f"{flag} needs the package {package}, which is not installed: pip install {package}") from None


def _list_settings(plan: Plan) -> dict[str, str]:
    """Flags by their names in the code."""
    groups = dataclasses.asdict(plan.args).values()
    return {name: str(value) for group in groups for name, value in group.items()}
