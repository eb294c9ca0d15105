"""Saves a run's state to checkpoints and restores it."""

import dataclasses
import logging
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint import folder, megatron_file
from megatron_lite.checkpoint.find import find_latest_valid, open_checkpoint
from megatron_lite.checkpoint.folder import Background, Manifest
from megatron_lite.checkpoint.host_copies import HostCopies
from megatron_lite.checkpoint.megatron_args import plain_arguments
from megatron_lite.checkpoint.random_states import get_random_state, set_random_state
from megatron_lite.checkpoint.shared_storage import list_files
from megatron_lite.checkpoint.training_state import CheckpointRecord, Stored
from megatron_lite.checkpoint.write import CheckpointWriter, assign_share
from megatron_lite.config.layout import Part, put_part, whole_part
from megatron_lite.config.plan import Plan
from megatron_lite.errors import CheckpointError
from megatron_lite.model.experts import list_expert_biases
from megatron_lite.model.gpt import DTYPES
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.pipeline import is_copy
from megatron_lite.parallel.process_group import get_time_limit
from megatron_lite.parallel.replica import Replica
from megatron_lite.run_folder import RELEASE
from megatron_lite.shared_files import open_regular
from megatron_lite.train.checkpoint_checks import (
    compare_kernels,
    describe_kernels,
    require_optimizer,
    require_schedule,
    require_shape,
    require_shared_load,
    warn_of_rotary,
)
from megatron_lite.train.loop import Progress
from megatron_lite.train.resume_checks import compare_data, describe_idle_flags

logger = logging.getLogger(__name__)

STATES = ("master", "exp_avg", "exp_avg_sq", "momentum_buffer")  # the optimizer's tensors of a parameter's shape
SECONDS_TO_FINISH = 60  # that a failed run gives a save in the background
Seen = TypeVar("Seen")


class Checkpoints:
    """Saves and loads everything that training depends on.

    A context manager that waits for a save in the background.
    """

    def __init__(self, plan: Plan, replica: Replica, optimizer: Optimizer, device: torch.device):
        """
        Args:
            plan: This rank's.
            replica: The rank's part of the model.
            optimizer: Updates the replica's parameters.
            device: Has random states of its own.
        """
        self.plan = plan
        self.replica = replica
        self.optimizer = optimizer
        self.device = device
        # by flat name, this rank's part of the tensor
        self._parts: dict[str, Part] = {}
        for name, part in replica.parts.items():
            self._parts |= dict.fromkeys(_list_flat_names(name), part)
        # flat names of what others write
        self._others = self._find_others()
        c = plan.args.checkpoint
        self._group: dist.ProcessGroup | None = None
        if c.save or c.load or c.pretrained_checkpoint:
            # a group of its own: saving must not mix with training's collectives, and needs no GPU
            self._group = dist.new_group(backend="gloo", timeout=get_time_limit(plan.args.parallel))
        self._background = Background()
        self._writer: CheckpointWriter | None = None
        self._copies: HostCopies | None = None
        if c.save:
            write_tensors = megatron_file.writer(plan.args) if c.ckpt_format == "torch" else self._write_tensors
            self._writer = CheckpointWriter(Path(c.save), write_tensors, self._group, c.save_retain_interval)
        if c.save and c.async_save:
            self._copies = HostCopies(self._my_share())

    def _find_others(self) -> set[str]:
        """Find the flat names of what other ranks write: of what tensor parallel ranks hold alike one has them, of an
        embedding on both ends of a pipeline the first stage."""
        replica = self.replica
        others: set[str] = set()
        for name, is_owned in zip(replica.names, replica.owned, strict=True):
            flat_names = _list_flat_names(name)
            if not is_owned:
                others |= set(flat_names) & set(self._parts)
            if is_copy(self.plan.stage, name):
                others |= {*flat_names, f"optimizer.{name}.step"}
        return others

    def __enter__(self) -> "Checkpoints":  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
            return
        self._background.give_up(SECONDS_TO_FINISH)
        if self._background.busy:
            logger.info(
                f"  warning: the checkpoint in the background is given up after {SECONDS_TO_FINISH} s; the one "
                "before it is the newest"
            )

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed; `finish` raises its error."""
        return self._background.failed

    def finish(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: It failed; on every rank.
        """
        self._background.finish()

    def save(self, progress: Progress) -> None:
        """Write SAVE/iter_NNNNNNN and the tracker. Collective; a failure is raised on every rank.

        With --async-save it returns as soon as the state is copied; `failed` and `finish` tell of a failure.
        """
        plan = self.plan
        c = plan.args.checkpoint
        record = CheckpointRecord(
            iteration=progress.iteration,
            consumed=progress.consumed,
            consumed_valid_samples=progress.consumed_valid,
            left_out=progress.left_out,
            shape=dataclasses.asdict(plan.shape),
            precision=plan.precision,
            vocab_size=plan.vocab_size,
            schedule=dataclasses.asdict(self.optimizer.schedule),
            optimizer=None if c.no_save_optim else plan.args.optimizer.optimizer,
            ranks=0 if c.no_save_rng else plan.world.size,
            versions={"torch": torch.__version__, "python": platform.python_version()},
            kernels=describe_kernels(self.replica.model, plan.compilation),
        )
        tensors = self._my_share()
        random: dict[str, Tensor] = {}
        if not c.no_save_rng:
            state = get_random_state(self.device)
            random = {f"random.{plan.world.rank}.{key}": value for key, value in state.items()}
        copies = self._copies
        if copies is None:
            self._write(record, tensors | random)
            return
        if self._background.busy:
            logger.info("  waiting for the last checkpoint to be written; a larger --save-interval would not wait")
        self.finish()
        copied = copies.take(tensors)

        def write_copies() -> None:
            if self.device.type == "cuda":
                # a thread begins with GPU 0, on which torch's writer would wait
                torch.cuda.set_device(self.device)
            copies.wait()
            self._write(record, copied | random)

        self._background.start(write_copies)

    def load(self, progress: Progress) -> None:
        """Continue from --load's newest checkpoint, or start from --pretrained-checkpoint's weights, or do nothing."""
        c = self.plan.args.checkpoint
        for flag, source, step, weights_only in (
            ("--load", c.load, c.ckpt_step, c.finetune),
            ("--pretrained-checkpoint", c.pretrained_checkpoint, None, True),
        ):
            if source is None:
                continue
            slot = find_latest_valid(Path(source), step, self._find_damage, logger.info, self._as_first_rank, flag)
            if slot is not None:
                # a release is weights, whatever it holds, as in Megatron
                self._restore(slot.expected, weights_only or slot.name == RELEASE, progress)
                return
        if c.load is not None:
            logger.info(f"  --load {c.load}: no checkpoint yet, starting from random weights")

    def _my_share(self) -> dict[str, Tensor]:
        """The tensors that this rank writes, by flat name, not copied. Ranks that hold the same tensors write some of
        them each."""
        c = self.plan.args.checkpoint
        layout = self.plan.layout
        dtype = DTYPES[self.plan.precision]
        named = zip(self.replica.names, self.replica.parameters)
        tensors = {f"model.{name}": parameter.detach().to(dtype) for name, parameter in named}
        tensors |= self._list_expert_biases()
        if not c.no_save_optim:
            tensors |= self.optimizer.tensors(self.replica.names)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self._others}
        parts = {name: tensors.pop(name) for name in self._parts if name in tensors}
        # the first rank's
        one_file = c.ckpt_format == "torch"
        whole = assign_share(tensors, layout.stage_rank, 1 if one_file else layout.stage_size)
        shared: dict[str, Tensor] = {}
        find_ranks = self.replica.find_replicate_ranks
        for ranks in dict.fromkeys((self.replica.replicate_ranks, self.replica.expert_replicate_ranks)):
            alike = {name: tensor for name, tensor in parts.items() if find_ranks(name) == ranks}
            shared |= assign_share(alike, ranks.place, 1 if one_file else ranks.number)
        return self._gather(whole | shared) if one_file else whole | shared

    def _list_expert_biases(self) -> dict[str, Tensor]:
        """List by flat name the biases by which routers balance experts, which no optimizer knows."""
        biases = list_expert_biases(self.replica.list_mixtures(), self.device)
        return {f"model.{name}": bias for name, bias in biases.items()}

    def _load_expert_biases(self, stored: Stored) -> None:
        """Take those that a checkpoint holds; one without experts, or without biases, holds none."""
        held = stored.names()
        biases = {name: bias for name, bias in self._list_expert_biases().items() if name in held}
        if biases:
            stored.read_into(biases)

    def _gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather all ranks' tensors on the first rank; those that it did not hold whole are on the host. Collective."""
        mine: dict[str, tuple[Part, torch.dtype]] = {}
        for name, tensor in tensors.items():
            part = self._parts.get(name) or whole_part(tuple(tensor.shape))
            mine[name] = (part, tensor.dtype)
        everyones: list[dict[str, tuple[Part, torch.dtype]]] = [{} for _ in range(self.plan.world.size)]
        dist.all_gather_object(everyones, mine, group=self._group)
        forms: dict[str, tuple[Part, torch.dtype]] = {}
        for of_rank in everyones:
            forms |= of_rank
        of_first_rank = everyones[0]
        for name, (part, dtype) in forms.items():
            if name in of_first_rank and of_first_rank[name][0] == whole_part(part.whole):
                # the first rank has all of it
                continue
            whole = torch.zeros(part.whole, dtype=dtype)
            if name in tensors:
                put_part(whole, tensors[name], mine[name][0])
            dist.reduce(whole, 0, group=self._group)
            tensors[name] = whole
        return tensors if self.plan.world.is_first else {}

    def _write_tensors(
        self, path: Path, record: CheckpointRecord, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
    ) -> Manifest:
        """Write the tensors as Megatron-LM's torch_dist format has them, as WriteTensors says."""
        # torch.distributed.checkpoint's import takes a second
        from megatron_lite.checkpoint import megatron_dist

        write = megatron_dist.writer(plain_arguments(self.plan.args), self._parts)
        return write(path, record, tensors, group)

    def _write(self, record: CheckpointRecord, tensors: dict[str, Tensor]) -> None:
        """Write a checkpoint, and say so. Collective."""
        assert self._writer is not None, "only a run with --save writes"
        try:
            written = self._writer.write(record, tensors)
        except CheckpointError as error:
            if self.plan.args.checkpoint.exit_on_save_failure:
                raise
            logger.info(f"  warning: {error} Training goes on.")
            return
        logger.info(f"  saved iteration {record.iteration}: {written}")
        if not (self.plan.args.watch.log_progress and self.plan.world.is_first):
            return
        path = written.parent / "progress.txt"
        try:
            with open(path, "a", encoding="utf-8", opener=open_regular) as file:
                file.write(f"iteration {record.iteration}, {record.consumed} samples: {written.name}\n")
        except OSError as error:
            logger.info(
                f"  warning: --log-progress: {path} cannot be written ({error.strerror}); the checkpoint is complete."
            )

    def _as_first_rank(self, look: Callable[[], Seen], /) -> Seen:
        """Return on all ranks what `look` gives the first one: their views of a shared folder may differ. Collective.

        Raises:
            CheckpointError: look() raises it on the first rank.
        """
        # the error, or what is seen
        answers: list[tuple[CheckpointError | None, list[Seen]]] = [(None, [])]
        if self.plan.world.is_first:
            try:
                answers = [(None, [look()])]
            except CheckpointError as error:
                answers = [(error, [])]
        dist.broadcast_object_list(answers, src=0, group=self._group)
        refusal, seen = answers[0]
        if refusal is not None:
            raise refusal
        return seen[0]

    def _find_damage(self, path: Path) -> str | None:
        """Find what is wrong with a checkpoint; each rank checks a part of it. Collective.

        Raises:
            CheckpointError: Ranks see different files.
        """
        world = self.plan.world
        if world.size > 1:
            names = self._as_first_rank(partial(list_files, path))
            require_shared_load(path, world.rank, names, self._group)
        everyone: list[str | None] = [None] * world.size
        found = folder.wrong(path, slice(world.rank, None, world.size))
        dist.all_gather_object(everyone, found, group=self._group)
        return next((text for text in everyone if text is not None), None)

    def _restore(self, path: Path, weights_only: bool, progress: Progress) -> None:
        """Continue from a checkpoint.

        Args:
            path: Folder of the checkpoint.
            weights_only: Take nothing but its weights.
            progress: Where training is, which a whole checkpoint says.
        """
        c = self.plan.args.checkpoint
        stored = open_checkpoint(path)
        record = stored.record
        require_shape(path, record, self.plan.shape, self.plan.vocab_size, self.plan.args.model.model)
        for text in stored.notes:
            logger.info(f"  note: --load {path}: {text}")
        if c.load_main_params_from_ckpt:
            # as in Megatron, the masters get the stored weights in the precision in which they were stored
            named = zip(self.replica.names, self.optimizer.weights.masters, strict=True)
            stored.read_into({f"model.{name}": master.detach() for name, master in named}, self._parts)
            self.optimizer.weights.write_back()
        elif weights_only or c.no_load_optim:
            # without an optimizer the masters begin as the rounded weights; as in Megatron, the schedule starts over
            named = zip(self.replica.names, self.replica.parameters)
            stored.read_into({f"model.{name}": value.detach() for name, value in named}, self._parts)
            self.optimizer.weights.reload(DTYPES[self.plan.precision])
        else:
            self._load_optimizer(path, stored)
        self._load_expert_biases(stored)
        warn_of_rotary(path, record, self.plan.shape.rotary_seq_len_interpolation_factor)
        for text in self._compare(stored, weights_only):
            logger.info(f"  note: --load {path}: {text}")
        if weights_only:
            logger.info(f"  loaded the weights of iteration {record.iteration}: {path}")
            return
        progress.iteration = record.iteration
        progress.started_at = record.iteration
        progress.consumed = record.consumed
        progress.consumed_valid = record.consumed_valid_samples
        progress.left_out = record.left_out
        if not c.no_load_rng:
            self._load_random_state(path, stored)
        logger.info(f"  loaded iteration {record.iteration}: {path}")

    def _load_optimizer(self, path: Path, stored: Stored) -> None:
        """Take schedule, moments and masters from a checkpoint, and round the weights from the masters."""
        require_optimizer(path, stored, self.plan.args.optimizer.optimizer)
        schedule = require_schedule(path, stored.record, self.plan.args.optimizer, self.plan.learning_rate)
        if schedule is not None:
            self.optimizer.follow(schedule)
        held = stored.names()
        names = self.replica.names
        targets: dict[str, Tensor] = {}
        for name, tensor in self.optimizer.tensors(names).items():
            is_master = name.endswith(".master")
            # a checkpoint may hold no loss scale
            is_wanted = name in held or not name.startswith("loss_scale.")
            if is_wanted and not is_master:
                targets[name] = tensor
        # masters are read from masters or, of a run in fp32, from the weights
        for name, master in zip(names, self.optimizer.weights.masters, strict=True):
            source = f"optimizer.{name}.master"
            targets[source if source in held else f"model.{name}"] = master.detach()
        stored.read_into(targets, self._parts)
        self.optimizer.resume()

    def _compare(self, stored: Stored, weights_only: bool) -> Iterator[str]:
        """Yield lines on what the run does otherwise than the one that was saved."""
        plan = self.plan
        record = stored.record
        if weights_only or plan.args.checkpoint.no_load_optim:
            yield from describe_idle_flags(plan.args.optimizer, "no optimizer is loaded")
        elif record.schedule is None:
            yield from describe_idle_flags(plan.args.optimizer, "the checkpoint holds no schedule")
        if not weights_only:
            yield from compare_data(stored.arguments, plan, record.consumed)
            yield from compare_kernels(record.kernels, describe_kernels(self.replica.model, plan.compilation))

    def _load_random_state(self, path: Path, stored: Stored) -> None:
        """Take this rank's random states from a checkpoint.

        Raises:
            CheckpointError: It holds none, though it could.
        """
        record = stored.record
        if record.ranks == 0 and record.trainer != CheckpointRecord.trainer:
            logger.info(f"  random states of {record.trainer} do not apply here; dropout continues from --seed")
            return
        if record.ranks == 0:
            raise CheckpointError(
                f"--load {path}: was saved with --no-save-rng and holds no random states; add "
                "--no-load-rng to continue with those of --seed."
            )
        # a rank that the saving run did not have keeps the state that its seed gave it
        prefix = f"random.{self.plan.world.rank}."
        state = {}
        for name in stored.names():
            if name.startswith(prefix):
                state[name] = torch.empty(stored.size_of(name), dtype=stored.dtype_of(name))
        if state:
            stored.read_into(state)
            set_random_state({name.removeprefix(prefix): value for name, value in state.items()}, self.device)


def _list_flat_names(name: str) -> list[str]:
    """List the flat names of a parameter and of the optimizer's tensors of its shape."""
    return [f"model.{name}", *(f"optimizer.{name}.{kind}" for kind in STATES)]
