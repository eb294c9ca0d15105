"""Finds the checkpoint to load, and opens it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.folder import CheckpointDir
from megatron_lite.checkpoint.megatron_file import open_megatron
from megatron_lite.checkpoint.training_state import Stored
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import METADATA_FILE, RECORD_FILE, TRACKER_FILE, checkpoint_name, iteration_of

T = TypeVar("T")


class Agree(Protocol):
    """Looks at a folder for all ranks, whose views of it may differ."""

    def __call__(self, look: Callable[[], T], /) -> T:
        """Return what look() gives one rank, or raise what it raises there, on all of them."""
        ...


def _look_alone(look: Callable[[], T], /) -> T:
    return look()


def chosen(source: Path, step: int | None, flag: str = "--load") -> CheckpointDir | None:
    """The checkpoint that --load and --ckpt-step name.

    Args:
        source: The folder of checkpoints.
        step: The value of --ckpt-step; None: the one that the tracker names.
        flag: The one that names `source`.

    Returns:
        None if the folder holds no checkpoint.

    Raises:
        CheckpointError: The checkpoint is gone, or the tracker names none.
    """
    if step is not None:
        asked = CheckpointDir(source, checkpoint_name(step))
        if asked.folder is None:
            raise CheckpointError(f"--ckpt-step {step}: there is no {asked.final}; {_those_there_are(source)}.")
        return asked
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
    wrong = _describe_untracked(source) if slot is None else _describe_missing(source, slot)
    if wrong is not None:
        raise CheckpointError(f"{flag} {source}: {wrong}.")
    return slot


def _describe_untracked(source: Path) -> str | None:
    """Say what is wrong with a folder without a tracker; None if it holds no checkpoint."""
    inside = (METADATA_FILE, RECORD_FILE, "mp_rank_00", "mp_rank_00_000")
    if any((source / name).exists() for name in inside):
        return (
            f"is a checkpoint itself; give the folder around it, {source.parent}, with a {TRACKER_FILE} that names it"
        )
    if folder.complete(source):
        return f"holds checkpoints, but no {TRACKER_FILE}; give --ckpt-step, {_those_there_are(source)}"
    return None


def _describe_missing(source: Path, slot: CheckpointDir) -> str | None:
    """Say what is wrong with a tracker that names `slot`; None if that checkpoint is there."""
    if slot.folder is not None:
        return None
    return f"{TRACKER_FILE} names {slot.name}, which is not there; give --ckpt-step, {_those_there_are(source)}"


def find_latest_valid(
    source: Path,
    step: int | None,
    damage: Callable[[Path], str | None],
    say: Callable[[str], None],
    agree: Agree = _look_alone,
    flag: str = "--load",
) -> CheckpointDir | None:
    """`chosen`, or the newest earlier one whose contents are what was written.

    Args:
        source: The folder of checkpoints.
        step: The value of --ckpt-step, or None.
        damage: Says what is wrong with the contents of a checkpoint's folder, the same on all ranks.
        say: Is told of each checkpoint that is passed over.
        agree: Lets all ranks see what one sees.
        flag: The one that names `source`.

    Returns:
        None if the folder holds no checkpoint.

    Raises:
        CheckpointError: The checkpoint that --ckpt-step names is damaged, or every one is.
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
        iteration = iteration_of(earlier.name)
        if newest is None or iteration is None or iteration >= newest:
            continue
        say(f"  {slot.final} is damaged: {wrong}; going back to {earlier.name}")
        slot = earlier
        wrong = damage(earlier.expected)
        if wrong is None:
            return slot
    raise CheckpointError(
        f"{flag} {source}: {slot.name} is damaged: {wrong}; there is no earlier one. Load another folder, "
        "or start afresh without --load."
    )


def open_checkpoint(path: Path) -> Stored:
    """A checkpoint's folder in one of the formats: Megatron-LM's torch_dist, which is ours too, or its torch file."""
    if (path / METADATA_FILE).exists():
        # torch.distributed.checkpoint's import takes a second
        from megatron_lite.checkpoint.megatron_dist import DistFile

        return DistFile(path)
    return open_megatron(path)


def open_newest(source: Path, step: int | None = None, say: Callable[[str], None] = print) -> Stored:
    """Open a checkpoint by this process alone.

    Args:
        source: The folder of checkpoints.
        step: An iteration; None: the newest sound checkpoint.
        say: Is told of each checkpoint that is passed over, and of what is left out of the one that is opened.

    Raises:
        CheckpointError: There is none, or it holds the model of --model.
    """
    slot = find_latest_valid(Path(source), step, folder.wrong, say)
    if slot is None:
        raise CheckpointError(f"--load {source}: holds no {TRACKER_FILE}; give the folder that --save wrote to.")
    stored = open_checkpoint(slot.expected)
    model = stored.record.kernels.get("model")
    if model:
        raise CheckpointError(
            f"--load {stored.path}: holds the model of --model {model}; only training with it reads that."
        )
    for text in stored.notes:
        say(f"  note: --load {stored.path}: {text}")
    return stored


def _those_there_are(source: Path, besides: CheckpointDir | None = None) -> str:
    """List the complete checkpoints of a folder, in words that end a message."""
    names = [str(iteration_of(slot.name)) for slot in folder.complete(source) if slot != besides]
    if not names:
        return "there is no complete one"
    return f"there are complete ones of iteration {', '.join(names)}"
