"""Writes the tensors of all ranks as a complete checkpoint."""

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.folder import CheckpointDir, Manifest
from megatron_lite.checkpoint.megatron_args import plain_arguments
from megatron_lite.checkpoint.shared_storage import UnseenFilesError, WrittenTensors, describe_place, require_seen
from megatron_lite.checkpoint.training_state import CheckpointRecord, WriteTensors
from megatron_lite.config.args import Args
from megatron_lite.errors import CheckpointError, describe_io_error
from megatron_lite.process_state import interruptible
from megatron_lite.run_folder import (
    MANIFEST_FILE,
    RECORD_FILE,
    RELEASE,
    checkpoint_name,
    iteration_of,
    write_atomically,
)
from megatron_lite.units import size

T = TypeVar("T")


@dataclass(frozen=True)
class SaveFailure:
    """Why a checkpoint is not complete, to be told on every rank."""

    text: str
    unseen: tuple[int, ...] = ()  # ranks whose files lie where the first rank does not see them


@dataclass(frozen=True)
class CheckpointWriter:
    """Writes checkpoints into `save`. Its methods are collective over `group`."""

    save: Path
    write_tensors: WriteTensors  # a format's own part
    group: dist.ProcessGroup | None = None  # of the ranks that write; None: this process alone
    # checkpoints of other iterations are deleted once a newer one is complete; None: never
    retain_interval: int | None = None

    def write(self, record: CheckpointRecord, tensors: dict[str, Tensor], release: bool = False) -> Path:
        """Write a checkpoint, and the tracker that names it.

        Args:
            record: Plain values of the checkpoint.
            tensors: This rank's share, by flat name; each name is given by one rank.
            release: Whether it is SAVE/release instead of SAVE/iter_NNNNNNN.

        Returns:
            Its folder.

        Raises:
            CheckpointError: On every rank, if one of them fails; what was complete before is then untouched.
        """
        slot = CheckpointDir(self.save, RELEASE if release else checkpoint_name(record.iteration))
        parts = self._together(slot, lambda: self._write_files(slot, record, tensors))

        def commit() -> None:
            if self._rank == 0:
                self._commit(slot, parts)

        self._together(slot, commit)
        return slot.final

    @property
    def _rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def _write_files(self, slot: CheckpointDir, record: CheckpointRecord, tensors: dict[str, Tensor]) -> WrittenTensors:
        """Write this rank's share into the unfinished checkpoint."""
        failure: OSError | None = None
        if self._rank == 0:
            try:
                folder.prepare(slot)
                write_atomically(slot.unfinished / RECORD_FILE, record.to_json())
            except OSError as error:
                failure = error
        raised = next((error for error in self._exchange(failure) if error is not None), None)
        if raised is not None:
            raise raised
        hashed = self.write_tensors(slot.unfinished, record, tensors, self.group)
        written: Manifest = {}
        for path in sorted(slot.unfinished.rglob("*")):
            name = str(path.relative_to(slot.unfinished))
            # torch.distributed.checkpoint names files __RANK_NUMBER.distcp; all others are the first rank's
            owner = name.split("_")[2] if name.startswith("__") else "0"
            if owner == str(self._rank) and path.is_file() and path.name != MANIFEST_FILE:
                written[name] = hashed.get(name) or folder.checksum(path)
        return WrittenTensors(written, describe_place(self.save))

    def _commit(self, slot: CheckpointDir, parts: list[WrittenTensors]) -> None:
        """Make the unfinished checkpoint the newest one, and delete the one before it unless it is to be kept.

        Args:
            slot: The checkpoint.
            parts: What each rank wrote, by rank.

        Raises:
            UnseenFilesError: Files of some ranks are not in the folder.
        """
        require_seen(slot, parts)
        folder.write_manifest(slot, {name: entry for part in parts for name, entry in part.files.items()})
        try:
            before = folder.newest(self.save)
        except ValueError:
            before = None
        folder.commit(slot)
        if before is None or before.name == slot.name or self.retain_interval is None:
            return
        iteration = iteration_of(before.name)
        if iteration is None or iteration % self.retain_interval == 0:
            return
        # as in Megatron: what a link names is somebody's
        if before.final.is_dir() and not before.final.is_symlink() and not folder.missing(slot.final):
            with contextlib.suppress(OSError):  # one too many is no failure of the new one
                folder.delete_checkpoint(before)

    def _together(self, slot: CheckpointDir, act: Callable[[], T]) -> list[T]:
        """Do the same on all ranks.

        Args:
            slot: The checkpoint that is being written; discarded if one rank fails.
            act: What each rank does.

        Returns:
            Every rank's result of `act`, on every rank.

        Raises:
            CheckpointError: On all ranks, if `act` failed on one for a reason of its disk.
        """
        outcome: T | SaveFailure
        try:
            with interruptible():
                outcome = act()
        except KeyboardInterrupt:
            if self._rank == 0:
                folder.discard(slot)
            raise
        except UnseenFilesError as error:
            outcome = SaveFailure(str(error), error.ranks)
        except BaseException as error:
            failure = self._describe_failure(slot, error)
            if failure is None:
                raise
            outcome = failure
        outcomes = self._exchange(outcome)
        failures = [other for other in outcomes if isinstance(other, SaveFailure)]
        if failures:
            first = failures[0]
            if self._rank == 0 or self._rank in first.unseen:
                folder.discard(slot)
            raise CheckpointError(first.text)
        return [other for other in outcomes if not isinstance(other, SaveFailure)]

    def _describe_failure(self, slot: CheckpointDir, error: BaseException) -> SaveFailure | None:
        """Put an error of this rank's disk, or of torch's writer, into words; None for any other error."""
        failures = getattr(error, "failures", None)
        if failures:  # known to all ranks already, with the rank that failed
            why = f"rank {min(failures)}: {describe_io_error(error)}"
        elif isinstance(error, (OSError, RuntimeError)):  # torch makes a RuntimeError of a full disk
            why = f"rank {self._rank}: {describe_io_error(error)}"
        else:
            return None
        try:
            why += f", {size(shutil.disk_usage(self.save).free)} free there"
        except OSError:
            why += ", and the folder cannot be asked for its room"
        return SaveFailure(
            f"--save {self.save}: {slot.name} could not be written ({why}); earlier "
            "checkpoints are untouched. Make room or choose another folder."
        )

    def _exchange(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        if self.group is None:
            return [value]
        everyone = [value] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone


def write_alone(
    save: Path,
    record: CheckpointRecord,
    tensors: dict[str, Tensor],
    release: bool = False,
    arguments: Mapping[str, object] | None = None,
) -> Path:
    """Write all of a checkpoint from this process, without a process group.

    Args:
        save: The folder of checkpoints.
        record: Plain values of the new one.
        tensors: Tensors of the checkpoint, by flat name.
        release: Whether it is SAVE/release instead of SAVE/iter_NNNNNNN.
        arguments: Flags that it was trained with, by name; those that are not known have their defaults.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It cannot be written, or another run saves there.
    """
    from megatron_lite.checkpoint import megatron_dist  # torch.distributed.checkpoint's import takes a second

    flags = plain_arguments(Args())
    if arguments is not None:
        flags |= arguments
    with folder.reserved(Path(save), 0, print):
        return CheckpointWriter(Path(save), megatron_dist.writer(flags)).write(record, tensors, release)


# --- which rank writes which tensor: replicas hold the same ones, so that each of them writes a part


def assign_share(tensors: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Choose the tensors that a rank writes: about the same number of bytes each, largest first.

    Scalars are the first rank's. Every rank comes to the same division, as names and shapes are the same.

    Args:
        tensors: Tensors that all of these ranks hold, by flat name.
        rank: The one in question, from 0.
        size: How many ranks hold them.
    """
    loads = [0] * size  # bytes, by rank
    mine: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        lightest = loads.index(min(loads)) if tensor.ndim else 0
        loads[lightest] += tensor.nbytes
        if lightest == rank:
            mine[name] = tensor
    return mine
