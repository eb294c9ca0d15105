"""Checkpoints: one file, written beside its place, synced, renamed; the tracker last.

At any moment the tracker names a complete checkpoint, or the one before it.
"""

import dataclasses
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_lite.config.flags import dashed
from megatron_lite.config.plan import LearningRatePlan, Plan
from megatron_lite.errors import CheckpointError
from megatron_lite.phases import Phase
from megatron_lite.run_folder import (
    TRACKER_FILE,
    checkpoint_dir,
    checkpoint_file,
    read_tracker,
    sync_folder,
    write_atomically,
)
from megatron_lite.train.loop import Progress

FORMAT = 1
# fields of a shape that may differ between a checkpoint and the run that loads it
FREE = {"hidden_dropout", "attention_dropout", "softmax_in_fp32", "query_key_layer_scaling", "init_method_std",
        "seq_length"}
# the flags behind fields that are named otherwise
SHAPE_FLAGS = {
    "padded_vocab_size": "the padded --vocab-size", "position_embedding": "--position-embedding-type",
    "layernorm_1p": "--apply-layernorm-1p", "activation": "the activation (--swiglu, --squared-relu, ...)",
    "linear_bias": "having biases (--disable-bias-linear)", "qkv_bias": "having a QKV bias (--add-qkv-bias)",
    "tied_embeddings": "tied output (--untie-embeddings-and-output-weights)",
}
SCHEDULE_FLAGS = {
    "style": "--lr-decay-style", "init": "--lr-warmup-init", "peak": "--lr", "floor": "--min-lr",
    "warmup_samples": "the warm-up in samples (--lr-warmup-...)",
    "decay_samples": "the decay in samples (--lr-decay-..., --train-...)", "wsd_style": "--lr-wsd-decay-style",
    "wsd_samples": "the last phase in samples (--lr-wsd-decay-...)",
    "weight_decay_style": "--weight-decay-incr-style",
    "weight_decay_samples": "the training in samples (--train-...)",
}


def require_checkpoint(plan: Plan):
    """With --exit-on-missing-checkpoint: raise CheckpointError now, if --load holds none. Touches nothing."""
    c = plan.args.checkpoint
    if c.exit_on_missing_checkpoint and _newest(c.load) is None:
        raise CheckpointError(f"--load {c.load}: holds no {TRACKER_FILE}, and --exit-on-missing-checkpoint is given; "
                              "check the folder, or drop that flag to start afresh.")


class Checkpoints:
    """Saves and loads everything that training depends on."""

    def __init__(self, plan: Plan, model, optimizer, device: torch.device, say):
        self.plan, self.model, self.optimizer, self.device, self._say = plan, model, optimizer, device, say

    def save(self, progress: Progress):
        """Write SAVE/iter_NNNNNNN and the tracker. Collective; a failure is raised on every rank."""
        c = self.plan.args.checkpoint
        folder = checkpoint_dir(Path(c.save), progress.iteration)
        random_states = None if c.no_save_rng else _gather(_random_state(self.device), self.plan.world.size)
        failure = [None]
        if self.plan.world.is_first:
            try:
                _write(folder, self._state(progress, random_states))
                write_atomically(folder.parent / TRACKER_FILE, str(progress.iteration))
                sync_folder(folder.parent)
            except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError of several lines
                why = getattr(error, "strerror", None) or str(error).splitlines()[0]
                failure[0] = (f"--save {c.save}: the checkpoint of iteration {progress.iteration} could not be written "
                              f"({why}); earlier ones are untouched. Make room or choose another folder.")
        dist.broadcast_object_list(failure, src=0)
        if failure[0]:
            raise CheckpointError(failure[0])
        self._say(f"  saved iteration {progress.iteration}: {folder}")
        if self.plan.args.watch.log_progress and self.plan.world.is_first:
            with open(folder.parent / "progress.txt", "a", encoding="utf-8") as file:
                file.write(f"iteration {progress.iteration}, {progress.consumed} samples: {folder.name}\n")

    def load(self, progress: Progress):
        """Continue from --load's newest checkpoint, or start from --pretrained-checkpoint's weights, or do nothing."""
        c = self.plan.args.checkpoint
        for source, weights_only in ((c.load, c.finetune), (c.pretrained_checkpoint, True)):
            iteration = _newest(source)
            if iteration is not None:
                return self._restore(Path(source), iteration, weights_only, progress)
        if c.load is not None:
            self._say(f"  --load {c.load}: no checkpoint yet, starting from random weights")

    def _state(self, progress: Progress, random_states) -> dict:
        optimizer = None if self.plan.args.checkpoint.no_save_optim else self.optimizer.state_dict()
        return {
            "format": FORMAT,
            "iteration": progress.iteration,
            "consumed": progress.consumed,
            "shape": dataclasses.asdict(self.plan.shape),
            "schedule": dataclasses.asdict(self.optimizer.schedule),
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "random_states": random_states,
        }

    def _restore(self, source: Path, iteration: int, weights_only: bool, progress: Progress):
        c = self.plan.args.checkpoint
        state = _read(source, iteration)
        self._check_shape(source, state["shape"])
        self.model.load_state_dict(state["model"])
        if weights_only:
            self.optimizer.weights.reload()
            self._say(f"  loaded the weights of iteration {iteration}: {source}")
            return
        progress.iteration = progress.started_at = state["iteration"]
        progress.consumed = state["consumed"]
        if c.no_load_optim:
            self.optimizer.weights.reload()  # as in Megatron, the schedule starts over as well
        else:
            self._check_optimizer(source, state["optimizer"])
            self._restore_schedule(source, state["schedule"])
            self.optimizer.load_state_dict(state["optimizer"])
        if not c.no_load_rng:
            self._restore_random_state(source, state["random_states"])
        self._say(f"  loaded iteration {iteration}: {source}")

    def _check_shape(self, source: Path, saved: dict):
        mine = dataclasses.asdict(self.plan.shape)
        wrong = [f"{SHAPE_FLAGS.get(name, dashed(name))} is {mine[name]}, the checkpoint's {saved.get(name)}"
                 for name in mine if name not in FREE and mine[name] != saved.get(name)]
        if wrong:
            raise CheckpointError(f"--load {source}: holds another model ({'; '.join(wrong)}); give its flags.")

    def _check_optimizer(self, source: Path, saved: dict | None):
        mine = self.plan.args.optimizer.optimizer
        if saved is None:
            raise CheckpointError(f"--load {source}: was saved with --no-save-optim and holds no optimizer; add "
                                  "--no-load-optim to start with fresh moments, or --finetune to start at iteration 0.")
        if mine != saved["kind"]:
            raise CheckpointError(f"--load {source}: --optimizer is {mine}, the checkpoint's {saved['kind']}; give the "
                                  "same, or --no-load-optim to start with fresh moments.")

    def _restore_schedule(self, source: Path, saved: dict):
        o = self.plan.args.optimizer
        mine = dataclasses.asdict(self.plan.learning_rate)
        if o.use_checkpoint_opt_param_scheduler:
            self.optimizer.follow(LearningRatePlan(**saved))
        elif not o.override_opt_param_scheduler and mine != saved:
            wrong = [f"{SCHEDULE_FLAGS.get(name, dashed(name))} is {mine[name]}, the checkpoint's {saved[name]}"
                     for name in mine if mine[name] != saved[name]]
            raise CheckpointError(
                f"--load {source}: another schedule ({'; '.join(wrong)}); add --override-opt-param-scheduler to take the "
                "command line's, or --use-checkpoint-opt-param-scheduler to take the checkpoint's."
            )

    def _restore_random_state(self, source: Path, states: list | None):
        rank = self.plan.world.rank
        if states is None:
            raise CheckpointError(f"--load {source}: was saved with --no-save-rng and holds no random states; add "
                                  "--no-load-rng to go on with those of --seed.")
        if rank < len(states):  # a rank that the saving run did not have keeps the state that its seed gave it
            _set_random_state(states[rank], self.device)


class Saving:
    """The chore of saving at --save-interval."""

    phase = Phase.SAVE

    def __init__(self, plan: Plan, checkpoints: Checkpoints, log, loaded: int):
        self.plan, self.checkpoints, self.log = plan, checkpoints, log
        c = plan.args.checkpoint
        here = c.save is not None and c.load is not None and Path(c.save).resolve() == Path(c.load).resolve()
        self.saved = loaded if here and loaded else None  # the newest iteration that the folder holds

    def due(self, progress: Progress) -> bool:
        interval = self.plan.args.checkpoint.save_interval
        return interval is not None and progress.iteration % interval == 0

    def act(self, progress: Progress):
        """Save, unless this iteration is saved already."""
        if self.plan.args.checkpoint.save is None or self.saved == progress.iteration:
            return
        self.log.meter.settle()  # weights of a run that diverged must not be called a checkpoint
        self.checkpoints.save(progress)
        self.saved = progress.iteration


def _newest(source: str | None) -> int | None:
    if source is None:
        return None
    try:
        return read_tracker(Path(source))
    except ValueError as error:
        raise CheckpointError(f"--load {source}: {TRACKER_FILE} holds no iteration ({error}); write the number into it.")


def _write(folder: Path, state: dict):
    """`folder` appears complete or not at all."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    path = checkpoint_file(unfinished)
    path.parent.mkdir(parents=True)
    try:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
        sync_folder(unfinished)
        if checkpoint_file(folder).exists():  # the same iteration saved again: the tracker may name it already
            os.replace(path, checkpoint_file(folder))
            sync_folder(checkpoint_file(folder).parent)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)  # what is left of a failure would fill a full disk


def _read(source: Path, iteration: int) -> dict:
    path = checkpoint_file(checkpoint_dir(source, iteration))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # tensors and plain values only: runs no code
    except FileNotFoundError:
        raise CheckpointError(f"--load {source}: the tracker names iteration {iteration}, but there is no {path}; "
                              f"write the number of a checkpoint that exists into {TRACKER_FILE}.")
    except Exception as error:  # noqa: BLE001 - damaged files make torch raise errors of many kinds
        raise CheckpointError(f"--load {path}: cannot be read ({type(error).__name__}); it is damaged or was written by "
                              f"another trainer. Write an earlier checkpoint's number into {TRACKER_FILE}.")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"--load {path}: is not a checkpoint of this trainer; load one that it saved.")
    return state


def _gather(value, size: int) -> list:
    everyone: list = [None] * size
    dist.all_gather_object(everyone, value)
    return everyone


def _random_state(device: torch.device) -> dict:
    """Python's, numpy's, torch's and the device's generators, as plain values and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_random_state(state: dict, device: torch.device):
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
