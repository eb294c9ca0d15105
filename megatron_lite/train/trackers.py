"""What draws a run's scalars: TensorBoard, Weights & Biases, MLflow. Each has its package, which only runs that use it need."""

import dataclasses
import time
from pathlib import Path
from typing import Protocol

from megatron_lite.config.plan import Plan
from megatron_lite.errors import UserError

MAX_WAITING, MAX_SECONDS = 900, 30.0  # MLflow takes 1,000 numbers at once
MAX_LENGTH = 500  # of a setting's text there


class Tracker(Protocol):
    """Takes scalars as they come, also of an iteration before the last one."""

    def add(self, iteration: int, scalars: dict[str, float], consumed: int | None):
        """Numbers of an iteration, and how many samples were seen then, where that matters."""

    def flush(self):
        """Everything so far to where it is kept."""

    def close(self, failed: bool):
        """The run is over."""


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

    def flush(self):
        waiting, self._waiting, self._sent_at = self._waiting, [], time.monotonic()
        if waiting:
            self._client.log_batch(self._run, metrics=waiting)

    def close(self, failed: bool):
        self.flush()
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


def open_trackers(plan: Plan, run_dir: Path) -> list[Tracker]:
    """Those that the flags ask for. UserError where a package is missing."""
    w, found = plan.args.watch, []
    if w.tensorboard_dir:
        found.append(TensorBoard(plan))
    if w.wandb_project:
        found.append(WeightsAndBiases(plan, run_dir))
    if w.mlflow_experiment:
        found.append(MLflow(plan))
    return found


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
