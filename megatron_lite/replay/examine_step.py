"""Runs a step of a training again in several ways, on one rank among others, and records what each way gave."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.args import CheckpointArgs
from megatron_lite.config.flags import replace_fields
from megatron_lite.config.plan import Plan, resolve
from megatron_lite.data.tokenizers import Tokenizer
from megatron_lite.errors import UserError
from megatron_lite.formats.replay_record import (
    AttemptKind,
    AttemptRecord,
    LoggedStep,
    RankRecord,
    ReplayedStep,
    ReplayRequest,
    SequenceRecord,
    WeightRecord,
)
from megatron_lite.optim.optimizer import DynamicLossScale
from megatron_lite.replay.replayed_training import ReplayedTraining, TrainingState, keep_finite
from megatron_lite.replay.step_sequences import (
    Place,
    SequenceReader,
    average_losses,
    find_suspects,
    merge_sequences,
    replace_rows,
)
from megatron_lite.step_failure import describe_failure
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.run_record import describe_versions

MAX_WATCHED_STEPS = 64  # before the step, and with it
STEPS_OF_LOSSES = 8  # before the step, of which sequences are compared with the step's
LOWER_RATES = (0.5, 0.125, 1 / 64)
IN_FP32 = {"fp16": False, "bf16": False, "loss_scale": None}


@dataclass
class FirstAttempt:
    """The first attempt, and what it leaves for the others.

    Attributes:
        record: What it gave.
        sequences: Of the step, of this rank.
        state: Before the step.
        weights: This rank's before the step, on the host.
        raw: The step's micro-batches.
        spare: Those of the step before.
    """

    record: AttemptRecord
    sequences: list[SequenceRecord]
    state: TrainingState
    weights: list[Tensor]
    raw: list[Tensor]
    spare: list[Tensor]
    training: ReplayedTraining | None
    facts: RankRecord


@dataclass
class StepExaminer:
    """Examines a step on this rank. All ranks make one, and call the same of it.

    Attributes:
        plan: This rank's plan, whose flags say where attempts begin.
        streams: The run's data.
        tokenizer: Decodes documents.
        request: What is to be found out.
        note: Called before each attempt with its kind.
    """

    plan: Plan
    streams: DataStreams
    tokenizer: Tokenizer
    request: ReplayRequest
    note: Callable[[AttemptKind], None] = lambda kind: None
    _attempts: list[AttemptRecord] = field(default_factory=list)

    def examine(self) -> RankRecord:
        """Run the step in all ways that tell something.

        Raises:
            UserError: The step cannot be reached.
        """
        first = self._run_first()
        self._attempts.append(first.record)
        suspects = self._find_suspects(first)
        if self._has_failed(first.record):
            self._attempts.append(self._run_without(first, suspects))
        first.training = None
        collect()
        second = self._run_again(AttemptKind.SECOND)
        if self._differ(first.record, second):
            self._run_again(AttemptKind.THIRD)
        if self._has_failed(first.record):
            self._attempts.append(self._run_in_fp32(first))
            self._run_at_lower_rates(first)
        return msgspec.structs.replace(first.facts, attempts=tuple(self._attempts), suspects=tuple(suspects))

    def _build(self, plan: Plan | None = None) -> ReplayedTraining:
        return ReplayedTraining(plan or self.plan, self.streams, self.tokenizer.eod)

    def _run_first(self) -> FirstAttempt:
        """Run to the step and through it, watching all of it."""
        step = self.request.step
        self.note(AttemptKind.FIRST)
        training = self._build()
        started_at = training.progress.iteration
        if started_at >= step:
            raise UserError(f"--step {step}: the run begins after iteration {started_at}; give a later step.")
        if training.leaves_out(step):
            raise UserError(f"--step {step}: --iterations-to-skip leaves it out; give another step.")
        earlier: dict[int, list[float]] = {}
        steps: list[ReplayedStep] = []
        for one in self._approach(training):
            steps.append(one)
            if one.iteration >= step - STEPS_OF_LOSSES:
                earlier[one.iteration] = average_losses(training)
        before = training.watched.list_modules() if steps else ()
        spare = list(training.batches.raw)
        state = training.keep_state()
        weights = [parameter.detach().to("cpu", copy=True) for parameter in training.replica.parameters]
        facts = self._describe_rank(training, started_at)
        raw = training.draw_batches()
        steps.append(training.run_step(iter(raw), is_watched=True))
        reader = SequenceReader(self.streams, self.tokenizer, self.request.max_text)
        sequences = reader.read(training, state.progress.consumed)
        record = AttemptRecord(
            kind=AttemptKind.FIRST,
            steps=tuple(steps),
            watched=training.watched.names,
            modules=training.watched.list_modules(),
            before=before,
            earlier=earlier,
        )
        return FirstAttempt(record, sequences, state, weights, raw, spare, training, facts)

    def _approach(self, training: ReplayedTraining) -> Iterator[ReplayedStep]:
        """Train until the step before, whose update is measured."""
        step = self.request.step
        watch_from = step - MAX_WATCHED_STEPS + 1
        yield from training.run_to(step - 2, watch_from)
        yield from training.measure_update(step - 1, watch_from)

    def _describe_rank(self, training: ReplayedTraining, started_at: int) -> RankRecord:
        plan = self.plan
        layout = plan.layout
        named = zip(training.replica.names, training.replica.parameters, strict=True)
        weights = []
        for name, parameter in named:
            square = parameter.detach().double().square().mean()
            weights.append(WeightRecord(name=name, rms=keep_finite(float(square.sqrt()))))
        return RankRecord(
            rank=plan.world.rank,
            ranks=plan.world.size,
            pipeline_rank=layout.pipeline_rank,
            tensor_rank=layout.tensor_rank,
            data_rank=layout.data_rank,
            context_rank=layout.context_rank,
            device=plan.device,
            precision=plan.precision,
            scales_dynamically=isinstance(training.optimizer.scaler, DynamicLossScale),
            is_deterministic=is_deterministic(plan),
            started_at=started_at,
            weights=tuple(weights),
            update_ratio=training.update_ratio,
            rate=float(training.optimizer.lr),
            versions={name: str(version) for name, version in describe_versions().items()},
        )

    def _find_suspects(self, first: FirstAttempt) -> list[Place]:
        """Find the sequences that stand out, the same on all ranks; the first one keeps those of all. Collective."""
        counts = self.plan.layout.tensor_rank == 0
        mine = first.sequences if counts else []
        everyones: list[list[SequenceRecord]] = [[] for _ in range(self.plan.world.size)]
        dist.all_gather_object(everyones, mine)
        pasts: list[dict[int, list[float]]] = [{} for _ in range(self.plan.world.size)]
        dist.all_gather_object(pasts, first.record.earlier if counts else {})
        earlier: dict[int, list[float]] = {}
        for past in pasts:
            for iteration, losses in past.items():
                earlier.setdefault(iteration, []).extend(losses)
        merged = merge_sequences(everyones)
        if self.plan.world.is_first:
            known = msgspec.structs.replace(first.record, sequences=tuple(merged), earlier=earlier)
            self._attempts[0] = known
        return find_suspects(merged, earlier)

    def _list_before(self, record: AttemptRecord) -> Sequence[LoggedStep | ReplayedStep]:
        """List the steps that the step is compared with: as logged, or those of the attempt where fewer were."""
        logged = [one for one in self.request.logged if one.iteration < self.request.step]
        replayed = [one for one in record.steps if one.iteration < self.request.step]
        return logged if len(logged) >= len(replayed) else replayed

    def _has_failed(self, first: AttemptRecord) -> bool:
        """Whether the step went wrong in the first attempt."""
        return bool(describe_failure(first.steps[-1], self._list_before(first)))

    def _run_without(self, first: FirstAttempt, suspects: Sequence[Place]) -> AttemptRecord:
        """Run the step without the sequences that stand out."""
        kind = AttemptKind.WITHOUT
        if not suspects:
            return AttemptRecord(kind=kind, left_out="no sequence of the batch stands out")
        self.note(kind)
        assert first.training is not None
        first.training.put_back(first.state)
        raw = replace_rows(first.raw, suspects, self.plan.layout.data_rank, first.spare)
        return AttemptRecord(kind=kind, steps=(first.training.run_step(iter(raw), is_watched=False),))

    def _run_again(self, kind: AttemptKind) -> AttemptRecord:
        """Run to the step and through it once more, from the start."""
        self.note(kind)
        training = self._build()
        steps = list(self._approach(training))
        steps.append(training.run_step(iter(training.draw_batches()), is_watched=True))
        record = AttemptRecord(
            kind=kind, steps=tuple(steps), watched=training.watched.names, modules=training.watched.list_modules()
        )
        self._attempts.append(record)
        del training
        collect()
        return record

    def _differ(self, one: AttemptRecord, other: AttemptRecord) -> bool:
        """Whether two attempts differ on any rank in any bit that was looked at. Collective."""
        differs = torch.tensor([float(one.steps != other.steps)])
        everyones: list[bool] = [False] * self.plan.world.size
        dist.all_gather_object(everyones, bool(differs.item()))
        return any(everyones)

    def _run_in_fp32(self, first: FirstAttempt) -> AttemptRecord:
        """Run the step in fp32, with the weights as they were before it."""
        kind = AttemptKind.FP32
        if self.plan.precision == "fp32":
            return AttemptRecord(kind=kind, left_out="the run is in fp32")
        self.note(kind)
        changed = replace_fields(self.plan.args, dict(IN_FP32))
        args = replace(changed, checkpoint=CheckpointArgs())
        plan = resolve(args, self.plan.world, self.plan.vocab_size)
        try:
            training = self._build(plan)
            training.take_weights(first.weights, first.state)
            step = training.run_step(iter(first.raw), is_watched=True)
        except torch.OutOfMemoryError:
            return AttemptRecord(kind=kind, left_out="memory ran out")
        record = AttemptRecord(kind=kind, steps=(step,), modules=training.watched.list_modules())
        del training
        collect()
        return record

    def _run_at_lower_rates(self, first: FirstAttempt) -> None:
        """Run to the step and through it at lower learning rates, until one passes."""
        kind = AttemptKind.LOWER_RATE
        updates = self.request.step - 1 - first.facts.started_at
        if not updates:
            why = "no update lies between the checkpoint and the step"
            self._attempts.append(AttemptRecord(kind=kind, left_out=why))
            return
        for rate in LOWER_RATES:
            self.note(kind)
            training = self._build()
            training.scale_rate(rate)
            steps = tuple(training.run_to(self.request.step))
            record = AttemptRecord(kind=kind, rate=rate, steps=steps)
            self._attempts.append(record)
            del training
            collect()
            if not describe_failure(record.steps[-1], self._list_before(first.record)):
                return


def is_deterministic(plan: Plan) -> bool:
    """Whether operations give the same bits each time, as this trainer's own do on a CPU.

    Those of a model of others may not: backward of indexing adds with several threads in any order.
    """
    is_own_on_cpu = plan.device == "cpu" and plan.args.model.model is None
    return is_own_on_cpu or plan.args.training.deterministic_mode


def collect() -> None:
    """Give back what a training held, whose parts refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
