"""Reads what a run was, and finds from where a step of it can be run again."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec

from megatron_lite.analysis.run.read_record import read_record
from megatron_lite.config.args import Args, CheckpointArgs, ProfileArgs, WatchArgs
from megatron_lite.config.flags import build, list_flags, write_flags
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import RUN_FILE, STEPS_FILE
from megatron_lite.formats.replay_record import LoggedStep
from megatron_lite.formats.run_record import PlanRecord, RunRecord
from megatron_lite.run_folder import iteration_of
from megatron_lite.shared_files import open_foreign, read_foreign

MAX_KEPT_STEPS = 4096  # before the step, that are read of what was logged
MAX_STEPS_FROM_START = 1000  # that are run where there is no checkpoint, unless --from 0 asks for more
STEP_LINE = b'"kind":"step"'
MAX_LOGGED_LINE_BYTES = 1 << 20
DATA_ENDINGS = (".bin", ".idx")
MOMENT_S = 1.0  # by which run.json rounds a moment
MIN_RANKS_OF_ORDER = 3  # of two the sum is the same in any order


class StepLine(msgspec.Struct, frozen=True):
    """The fields that are read of a line of steps.jsonl; its other fields may hold anything."""

    iteration: int
    step: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    skipped: bool = False
    local: bool = False


@dataclass(frozen=True)
class ReplayedRun:
    """A run of this trainer, as its folder describes it.

    Attributes:
        folder: Of the run.
        record: What run.json holds.
        plan: Its plan.
        args: The flags of its newest start.
        logged: Steps up to the one to replay, the oldest first.
        started_at: The iteration after which its newest start began.
    """

    folder: Path
    record: RunRecord
    plan: PlanRecord
    args: Args
    logged: tuple[LoggedStep, ...]
    started_at: int

    @property
    def ranks(self) -> int:
        """How many ranks it had."""
        return self.plan.world.size or 1


@dataclass(frozen=True)
class ReplayStart:
    """A place at which a replay begins.

    Attributes:
        described: In words.
        flags: Of the ranks.
        load: Flags by which the run itself would go on from there; "": from its own start.
        iteration: The iteration after which it begins.
    """

    described: str
    flags: tuple[str, ...]
    load: str
    iteration: int


def read_replayed_run(folder: Path, step: int) -> ReplayedRun:
    """Read a run.

    Args:
        folder: The run's folder.
        step: The iteration to replay.

    Raises:
        UserError: It is no run of this trainer, or its flags cannot be read.
    """
    record, notes = read_record(folder)
    if record is None:
        raise UserError(f"megatron-lite replay {folder}: {' '.join(notes)} Give the folder of a run.")
    args = _read_args(folder)
    if record.plan is None or args is None:
        raise UserError(
            f"megatron-lite replay {folder}: {RUN_FILE} holds no plan of this trainer; only its own runs are replayed, "
            "not scripts of others."
        )
    logged, started_at = _read_steps(folder / STEPS_FILE, step)
    return ReplayedRun(folder, record, record.plan, args, logged, started_at)


def _read_args(folder: Path) -> Args | None:
    """Read the flags that run.json holds, also those that no reader of reports takes for sound; None: it holds none."""
    try:
        values = json.loads(read_foreign(folder / RUN_FILE))
        groups = values["plan"]["args"]
        known = [one for one in list_flags(Args) if one.field in groups.get(one.section, {})]
        fields = {one.field: groups[one.section][one.field] for one in known}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    args: Args = build(Args, fields)
    return args


def _read_steps(path: Path, last: int) -> tuple[tuple[LoggedStep, ...], int]:
    """Read the logged steps up to an iteration, and after which one the newest start began."""
    steps: dict[int, LoggedStep] = {}
    started_at = 0
    decoder = msgspec.json.Decoder(StepLine)
    try:
        file = open_foreign(path)
    except OSError:
        return (), 0
    with file:
        while line := file.readline(MAX_LOGGED_LINE_BYTES):
            if STEP_LINE not in line.replace(b" ", b""):
                continue
            try:
                record = decoder.decode(line)
            except msgspec.DecodeError:
                continue
            started_at = record.iteration - record.step
            if last - MAX_KEPT_STEPS < record.iteration <= last:
                steps[record.iteration] = LoggedStep(
                    iteration=record.iteration,
                    loss=record.loss,
                    grad_norm=record.grad_norm,
                    skipped=record.skipped,
                    local=record.local,
                )
    return tuple(steps[number] for number in sorted(steps)), started_at


def find_start(run: ReplayedRun, step: int, chosen: int | None, folder: Path) -> ReplayStart:
    """Find from where the step is run again.

    Args:
        run: The run.
        step: The iteration.
        chosen: The value of --from; None: the last checkpoint before the step.
        folder: Where ranks may write.

    Raises:
        UserError: There is no such place.
    """
    c = run.args.checkpoint
    found = _find_checkpoints(run)
    before = sorted(iteration for iteration in found if iteration < step)
    at = chosen
    if at is None:
        at = before[-1] if before else 0
    if at in found:
        source = found[at]
        checkpoint = CheckpointArgs(load=source, ckpt_step=at, ckpt_format=c.ckpt_format)
        flags = _write(run, checkpoint, folder)
        return ReplayStart(f"the checkpoint of iteration {at}", flags, f"--load {source} --ckpt-step {at}", at)
    _check_start(run, step, chosen, sorted(found))
    checkpoint = replace(CheckpointArgs(), pretrained_checkpoint=c.pretrained_checkpoint, ckpt_format=c.ckpt_format)
    if c.finetune:
        checkpoint = replace(checkpoint, load=c.load, ckpt_step=c.ckpt_step, finetune=True)
    described = "the run's start"
    if not before:
        described += ", as no checkpoint lies before the step"
    return ReplayStart(described, _write(run, checkpoint, folder), "", 0)


def _check_start(run: ReplayedRun, step: int, chosen: int | None, found: Sequence[int]) -> None:
    """Check that a step may be run again from the run's start.

    Args:
        run: The run.
        step: The iteration.
        chosen: The value of --from; None: the last checkpoint before the step.
        found: The iterations of the checkpoints that are there.

    Raises:
        UserError: There is no such checkpoint, or the way from the start is not what was meant.
    """
    if chosen:
        there = ", ".join(map(str, found)) or "none"
        raise UserError(f"--from {chosen}: there is no such checkpoint; there are {there}.")
    if chosen is None and 0 < run.started_at < step:
        c = run.args.checkpoint
        raise UserError(
            f"megatron-lite replay {run.folder}: the run went on from iteration {run.started_at}, whose checkpoint is "
            f"in neither --load {c.load} nor --save {c.save}; put it there, or give --from 0 to run from the start."
        )
    if step > MAX_STEPS_FROM_START and chosen is None:
        raise UserError(f"--step {step}: no checkpoint lies before it; --from 0 runs all {step} steps from the start.")


def _find_checkpoints(run: ReplayedRun) -> dict[int, str]:
    """Find the iterations of the run's own checkpoints, and the folder of each.

    In another folder than its own only what it went on from is of this run: later ones are another run's. With
    --finetune it counted its iterations anew. Of a run that has logged nothing it is unknown where it began.
    """
    c = run.args.checkpoint
    found: dict[int, str] = {}
    if c.load is not None and not c.finetune:
        is_own = c.save is not None and os.path.realpath(c.load) == os.path.realpath(c.save)
        for iteration in _list_checkpoints(c.load):
            if is_own or not run.logged or iteration <= run.started_at:
                found[iteration] = c.load
    if c.save is not None:
        for iteration in _list_checkpoints(c.save):
            found[iteration] = c.save
    return found


def find_other_bits(run: ReplayedRun, step: int) -> str:
    """Find out what has changed since the run computed a step, so that its bits are not to be expected; "": nothing is
    known.

    Args:
        run: The run.
        step: The iteration.
    """
    if run.started_at >= step:
        return f"the run was started again after iteration {run.started_at}: the flags are those of that start"
    over = _read_moment(run.record.ended or run.record.started)
    if over is None:
        return ""
    for prefix in _list_prefixes(run.args):
        for ending in DATA_ENDINGS:
            path = Path(f"{prefix}{ending}")
            if path.is_file() and path.stat().st_mtime > over + MOMENT_S:
                return f"{path} has changed since the run"
    return ""


def _read_moment(text: str | None) -> float | None:
    """Read a moment of run.json, in seconds since 1970; None where it holds none."""
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None


def _list_prefixes(args: Args) -> list[str]:
    """List the files that training data come from, without .bin and .idx; weights stand among them."""
    d = args.data
    return [*(d.data_path or ()), *(d.train_data_path or ())]


def find_other_order(run: ReplayedRun, start: ReplayStart) -> str:
    """Find out why a replay may add up in another order than the run, so that last bits differ; "": it does not.

    DistributedDataParallel puts gradients into other buckets behind the first step that it makes. Where a gradient
    stands in its bucket says in which order three ranks or more add it up.

    Args:
        run: The run.
        start: Where the replay begins.
    """
    layout = run.plan.layout
    ranks = (layout.data or 1) * (layout.context or 1)
    if ranks < MIN_RANKS_OF_ORDER or start.iteration == run.started_at:
        return ""
    why = f"the run did not start at iteration {start.iteration}"
    return f"{why}, and sums over {ranks} ranks have another order behind a start"


def _list_checkpoints(source: str | None) -> list[int]:
    """List the iterations of the checkpoints in a folder."""
    if source is None or not Path(source).is_dir():
        return []
    numbers = [iteration_of(path.name) for path in Path(source).iterdir() if path.is_dir()]
    return [number for number in numbers if number is not None]


def _write(run: ReplayedRun, checkpoint: CheckpointArgs, folder: Path) -> tuple[str, ...]:
    """Write the run's flags, without what it writes and records."""
    watch = run.args.watch
    args = replace(
        run.args,
        checkpoint=checkpoint,
        profile=ProfileArgs(),
        watch=WatchArgs(
            eval_iters=watch.eval_iters,
            eval_interval=watch.eval_interval,
            full_validation=watch.full_validation,
            run_dir=str(folder),
        ),
    )
    return tuple(write_flags(args))
