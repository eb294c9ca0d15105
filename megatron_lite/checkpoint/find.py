"""Which checkpoint to load, and opening it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.folder import CheckpointDir
from megatron_lite.checkpoint.megatron_file import open_megatron
from megatron_lite.checkpoint.training_state import Stored
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import METADATA_FILE, RECORD_FILE, TRACKER_FILE, checkpoint_name, iteration_of


def chosen(source: Path, step: int | None, flag: str = "--load") -> CheckpointDir | None:
    """The checkpoint that --load and --ckpt-step name; None if the folder holds none. CheckpointError if it is gone.

    flag: the one that names `source`.
    """
    if step is not None:
        slot = CheckpointDir(source, checkpoint_name(step))
        if slot.folder is None:
            raise CheckpointError(f"--ckpt-step {step}: there is no {slot.final}; {_those_there_are(source)}.")
        return slot
    try:
        slot = folder.newest(source)
    except ValueError:
        raise CheckpointError(
            f"{flag} {source}: {TRACKER_FILE} holds no iteration; write the number of a checkpoint into "
            f"it, {_those_there_are(source)}."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{flag} {source}: {TRACKER_FILE} cannot be read ({error.strerror}); make it readable, or "
            "choose another folder."
        ) from None
    inside = (METADATA_FILE, RECORD_FILE, "mp_rank_00", "mp_rank_00_000")
    wrong = None
    if slot is None and any((source / name).exists() for name in inside):
        wrong = (
            f"is a checkpoint itself; give the folder around it, {source.parent}, with a {TRACKER_FILE} that names it"
        )
    elif slot is None and folder.complete(source):
        wrong = f"holds checkpoints, but no {TRACKER_FILE}; give --ckpt-step, {_those_there_are(source)}"
    elif slot is not None and slot.folder is None:
        wrong = f"{TRACKER_FILE} names {slot.name}, which is not there; give --ckpt-step, {_those_there_are(source)}"
    if wrong is not None:
        raise CheckpointError(f"{flag} {source}: {wrong}.")
    return slot


def find_latest_valid(
    source: Path,
    step: int | None,
    damage: Callable[[Path], str | None],
    say: Callable,
    agree: Callable = lambda look: look(),
    flag: str = "--load",
) -> CheckpointDir | None:
    """`chosen`, or the newest earlier one whose contents are what was written.

    damage(folder): what is wrong with a checkpoint, the same on all ranks. agree(look): what look() gives one of them,
    or raises, on all. What is passed over is said. CheckpointError if the one that --ckpt-step names, or every one, is
    damaged.
    """
    slot = agree(partial(chosen, source, step, flag))
    if slot is None:
        return None
    wrong = damage(slot.expected)
    if wrong is None:
        return slot
    # a run that saves here may have gone on meanwhile
    if step is None and agree(partial(chosen, source, step, flag)) != slot:
        return find_latest_valid(source, step, damage, say, agree, flag)
    if step is not None:
        raise CheckpointError(
            f"--ckpt-step {step}: {slot.final} is damaged: {wrong}; choose another, "
            f"{_those_there_are(source, besides=slot)}."
        )
    newest = iteration_of(slot.name)
    for earlier in agree(partial(folder.complete, source)):
        if newest is None or iteration_of(earlier.name) >= newest:
            continue
        say(f"  {slot.final} is damaged: {wrong}; going back to {earlier.name}")
        slot, wrong = earlier, damage(earlier.expected)
        if wrong is None:
            return slot
    raise CheckpointError(
        f"{flag} {source}: {slot.name} is damaged: {wrong}; there is no earlier one. Load another folder, "
        "or start afresh without --load."
    )


def open_checkpoint(path: Path) -> Stored:
    """A checkpoint's folder in one of the formats: Megatron-LM's torch_dist, which is ours too, or its torch file."""
    if (path / METADATA_FILE).exists():
        from megatron_lite.checkpoint.megatron_dist import (
            DistFile,
        )  # torch.distributed.checkpoint's import takes a second

        return DistFile(path)
    return open_megatron(path)


def open_newest(source: Path, step: int | None = None, say: Callable = print) -> Stored:
    """The newest sound checkpoint of a folder, or iteration `step`, by this process alone. CheckpointError if none."""
    slot = find_latest_valid(Path(source), step, folder.wrong, say)
    if slot is None:
        raise CheckpointError(f"--load {source}: holds no {TRACKER_FILE}; give the folder that --save wrote to.")
    stored = open_checkpoint(slot.expected)
    if model := stored.record.kernels.get("model"):
        raise CheckpointError(
            f"--load {stored.path}: holds the model of --model {model}; only training with it reads that."
        )
    for text in stored.notes:
        say(f"  note: --load {stored.path}: {text}")
    return stored


def _those_there_are(source: Path, besides: CheckpointDir | None = None) -> str:
    names = [str(iteration_of(slot.name)) for slot in folder.complete(source) if slot != besides]
    return f"there are complete ones of iteration {', '.join(names)}" if names else "there is no complete one"
