"""Saves a run's state to checkpoints and restores it."""

import dataclasses
import logging
import platform
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lite.checkpoint import folder, megatron_file
from megatron_lite.checkpoint.find import find_latest_valid, open_checkpoint
from megatron_lite.checkpoint.folder import Background
from megatron_lite.checkpoint.host_copies import HostCopies
from megatron_lite.checkpoint.megatron_args import plain_arguments
from megatron_lite.checkpoint.random_states import get_random_state, set_random_state
from megatron_lite.checkpoint.shared_storage import list_files
from megatron_lite.checkpoint.training_state import CheckpointRecord, Stored
from megatron_lite.checkpoint.write import Writer, assign_share
from megatron_lite.config.layout import put_part, whole_part
from megatron_lite.config.plan import LearningRatePlan, Plan
from megatron_lite.errors import CheckpointError
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


class Checkpoints:
    """Saves and loads everything that training depends on.

    A context manager that waits for a save in the background.
    """

    def __init__(self, plan: Plan, replica: Replica, optimizer: Optimizer, device: torch.device):
        self.plan, self.replica, self.optimizer, self.device = plan, replica, optimizer, device
        # {flat name: this rank's part of the tensor}
        self._parts = {flat: part for name, part in replica.parts.items() for flat in _list_flat_names(name)}
        # those that others write: of what tensor parallel ranks hold alike one has them,
        # of a tied embedding the first stage
        uncounted = [name for name, counts in zip(replica.names, replica.owned, strict=True) if not counts]
        copies = [name for name in replica.names if is_copy(plan.stage, name)]
        self._others = {flat for name in uncounted for flat in _list_flat_names(name)} & set(self._parts)
        self._others |= {flat for name in copies for flat in (*_list_flat_names(name), f"optimizer.{name}.step")}
        c = plan.args.checkpoint
        # a group of its own: saving must not mix with training's collectives, and needs no GPU
        used, limit = c.save or c.load or c.pretrained_checkpoint, get_time_limit(plan.args.parallel)
        self._group = dist.new_group(backend="gloo", timeout=limit) if used else None
        self._background = Background()
        write_tensors = megatron_file.writer(plan.args) if c.ckpt_format == "torch" else self._write_tensors
        self._writer = Writer(Path(c.save), write_tensors, self._group, c.save_retain_interval) if c.save else None
        self._copies = HostCopies(self._my_share()) if c.save and c.async_save else None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if error is None:
            self.finish()
        else:
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

    def save(self, progress: Progress):
        """Write SAVE/iter_NNNNNNN and the tracker. Collective; a failure is raised on every rank.

        With --async-save it returns as soon as the state is copied; `failed` and `finish` tell of a failure.
        """
        plan, c = self.plan, self.plan.args.checkpoint
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
        tensors, random = self._my_share(), {}
        if not c.no_save_rng:
            state = get_random_state(self.device)
            random = {f"random.{plan.world.rank}.{key}": value for key, value in state.items()}
        if self._copies is None:
            return self._write(record, tensors | random)
        if self._background.busy:
            logger.info("  waiting for the last checkpoint to be written; a larger --save-interval would not wait")
        self.finish()
        copied = self._copies.take(tensors)

        def write_copies():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread begins with GPU 0, on which torch's writer would wait
            self._copies.wait()
            self._write(record, copied | random)

        self._background.start(write_copies)

    def load(self, progress: Progress):
        """Continue from --load's newest checkpoint, or start from --pretrained-checkpoint's weights, or do nothing."""
        c = self.plan.args.checkpoint
        for flag, source, step, weights_only in (
            ("--load", c.load, c.ckpt_step, c.finetune),
            ("--pretrained-checkpoint", c.pretrained_checkpoint, None, True),
        ):
            if source is None:
                continue
            slot = find_latest_valid(Path(source), step, self._find_damage, logger.info, self._as_first_rank, flag)
            if slot is not None:  # a release is weights, whatever it holds, as in Megatron
                return self._restore(slot.expected, weights_only or slot.name == RELEASE, progress)
        if c.load is not None:
            logger.info(f"  --load {c.load}: no checkpoint yet, starting from random weights")

    def _my_share(self) -> dict[str, torch.Tensor]:
        """The tensors that this rank writes, not copied. Ranks that hold the same tensors write some of them each."""
        c, layout, dtype = self.plan.args.checkpoint, self.plan.layout, DTYPES[self.plan.precision]
        named = zip(self.replica.names, self.replica.parameters)
        tensors = {f"model.{name}": parameter.detach().to(dtype) for name, parameter in named}
        tensors |= self._list_expert_biases()
        if not c.no_save_optim:
            tensors |= self.optimizer.tensors(self.replica.names)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in self._others}
        parts = {name: tensors.pop(name) for name in self._parts if name in tensors}
        one_file = c.ckpt_format == "torch"  # of the first rank
        whole = assign_share(tensors, layout.stage_rank, 1 if one_file else layout.stage_size)
        shared: dict[str, torch.Tensor] = {}
        for copies in dict.fromkeys((self.replica.copies, self.replica.expert_copies)):
            alike = {name: tensor for name, tensor in parts.items() if self.replica.find_copies(name) == copies}
            shared |= assign_share(alike, copies.place, 1 if one_file else copies.number)
        return self._gather(whole | shared) if one_file else whole | shared

    def _list_expert_biases(self) -> dict[str, torch.Tensor]:
        """By flat name, the biases by which routers balance experts, which no optimizer knows."""
        biases = {}
        for name, mixture in self.replica.list_mixtures():
            mixture.router.state.prepare(self.device)
            bias = mixture.router.state.bias_E
            if bias is not None:
                biases[f"model.{name}.router.expert_bias"] = bias
        return biases

    def _load_expert_biases(self, stored: Stored) -> None:
        """Take those that a checkpoint holds; one without experts, or without biases, holds none."""
        held = stored.names()
        biases = {name: bias for name, bias in self._list_expert_biases().items() if name in held}
        if biases:
            stored.read_into(biases)

    def _gather(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All ranks' tensors on the first rank; those that it did not hold whole are on the host. Collective."""
        parts = {name: self._parts.get(name) or whole_part(tuple(tensor.shape)) for name, tensor in tensors.items()}
        mine = {name: (part, tensors[name].dtype) for name, part in parts.items()}
        everyones: list = [None] * self.plan.world.size
        dist.all_gather_object(everyones, mine, group=self._group)
        for name, (part, dtype) in {name: form for forms in everyones for name, form in forms.items()}.items():
            if name in everyones[0] and everyones[0][name][0] == whole_part(part.whole):
                continue  # the first rank has all of it
            whole = torch.zeros(part.whole, dtype=dtype)
            if name in tensors:
                put_part(whole, tensors[name], parts[name])
            dist.reduce(whole, 0, group=self._group)
            tensors[name] = whole
        return tensors if self.plan.world.is_first else {}

    def _write_tensors(self, *arguments) -> dict[str, dict]:
        from megatron_lite.checkpoint import megatron_dist  # torch.distributed.checkpoint's import takes a second

        return megatron_dist.writer(plain_arguments(self.plan.args), self._parts)(*arguments)

    def _write(self, record: CheckpointRecord, tensors: dict[str, torch.Tensor]):
        try:
            written = self._writer.write(record, tensors)
        except CheckpointError as error:
            if self.plan.args.checkpoint.exit_on_save_failure:
                raise
            return logger.info(f"  warning: {error} Training goes on.")
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

    def _as_first_rank(self, look: Callable):
        """The result of `look` on the first rank, on all ranks: their views of a shared folder may differ.

        Collective.
        """
        found: list = [None]
        if self.plan.world.is_first:
            try:
                found = [look()]
            except CheckpointError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0, group=self._group)
        if isinstance(found[0], CheckpointError):
            raise found[0]
        return found[0]

    def _find_damage(self, path: Path) -> str | None:
        """What is wrong with a checkpoint; each rank checks a part of it.

        CheckpointError if ranks see different files.
        """
        world = self.plan.world
        if world.size > 1:
            require_shared_load(path, world.rank, self._as_first_rank(partial(list_files, path)), self._group)
        everyone: list = [None] * world.size
        dist.all_gather_object(everyone, folder.wrong(path, slice(world.rank, None, world.size)), group=self._group)
        return next((text for text in everyone if text is not None), None)

    def _restore(self, path: Path, weights_only: bool, progress: Progress):
        c, stored = self.plan.args.checkpoint, open_checkpoint(path)
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
            require_optimizer(path, stored, self.plan.args.optimizer.optimizer)
            schedule = require_schedule(path, record, self.plan.args.optimizer, self.plan.learning_rate)
            if schedule is not None:
                self.optimizer.follow(LearningRatePlan(**schedule))
            # masters are read from masters or, of a run in fp32, from the weights; the weights are rounded from them
            held, names = stored.names(), self.replica.names
            targets = {
                name: tensor
                for name, tensor in self.optimizer.tensors(names).items()
                if not name.endswith(".master") and (name in held or not name.startswith("loss_scale."))
            }
            for name, master in zip(names, self.optimizer.weights.masters, strict=True):
                source = f"optimizer.{name}.master"
                targets[source if source in held else f"model.{name}"] = master.detach()
            stored.read_into(targets, self._parts)
            self.optimizer.resume()
        self._load_expert_biases(stored)
        warn_of_rotary(path, record, self.plan.shape.rotary_seq_len_interpolation_factor)
        for text in self._compare(stored, weights_only):
            logger.info(f"  note: --load {path}: {text}")
        if weights_only:
            return logger.info(f"  loaded the weights of iteration {record.iteration}: {path}")
        progress.iteration = progress.started_at = record.iteration
        progress.consumed, progress.consumed_valid = record.consumed, record.consumed_valid_samples
        progress.left_out = record.left_out
        if not c.no_load_rng:
            self._load_random_state(path, stored)
        logger.info(f"  loaded iteration {record.iteration}: {path}")

    def _compare(self, stored: Stored, weights_only: bool) -> Iterator[str]:
        """Lines on what the run does otherwise than the one that was saved."""
        plan, record = self.plan, stored.record
        if weights_only or plan.args.checkpoint.no_load_optim:
            yield from describe_idle_flags(plan.args.optimizer, "no optimizer is loaded")
        elif record.schedule is None:
            yield from describe_idle_flags(plan.args.optimizer, "the checkpoint holds no schedule")
        if not weights_only:
            yield from compare_data(stored.arguments, plan, record.consumed)
            yield from compare_kernels(record.kernels, describe_kernels(self.replica.model, plan.compilation))

    def _load_random_state(self, path: Path, stored: Stored):
        rank, record = self.plan.world.rank, stored.record
        if record.ranks == 0 and record.trainer != CheckpointRecord.trainer:
            return logger.info(f"  random states of {record.trainer} do not apply here; dropout continues from --seed")
        if record.ranks == 0:
            raise CheckpointError(
                f"--load {path}: was saved with --no-save-rng and holds no random states; add "
                "--no-load-rng to continue with those of --seed."
            )
        prefix = f"random.{rank}."  # a rank that the saving run did not have keeps the state that its seed gave it
        state = {
            name: torch.empty(stored.size_of(name), dtype=stored.dtype_of(name))
            for name in stored.names()
            if name.startswith(prefix)
        }
        if state:
            stored.read_into(state)
            set_random_state({name.removeprefix(prefix): value for name, value in state.items()}, self.device)


def _list_flat_names(name: str) -> list[str]:
    """Flat names of a parameter and of the optimizer's tensors of its shape."""
    return [f"model.{name}", *(f"optimizer.{name}.{kind}" for kind in STATES)]
