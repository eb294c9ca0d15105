"""From the tensors of all ranks to a complete checkpoint on disk."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.folder import CheckpointDir
from megatron_lite.checkpoint.megatron_args import plain_arguments
from megatron_lite.checkpoint.shared_storage import UnseenFilesError, Written, describe_place, require_seen
from megatron_lite.checkpoint.training_state import CheckpointRecord
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


@dataclass(frozen=True)
class SaveFailure:
    """Why a checkpoint is not complete, to be told on every rank."""

    text: str
    unseen: tuple[int, ...] = ()  # ranks whose files lie where the first rank does not see them


@dataclass(frozen=True)
class Writer:
    """Writes checkpoints into `save`. Its methods are collective over `group`; None: this process alone.

    write_tensors(folder, record, tensors, group): a format's own part; returns the manifest's entries of files that it
    knows. retain_interval: checkpoints of other iterations are deleted once a newer one is complete; None: never.
    """

    save: Path
    write_tensors: Callable
    group: object = None
    retain_interval: int | None = None

    def write(self, record: CheckpointRecord, tensors: dict[str, Tensor], release: bool = False) -> Path:
        """Write SAVE/iter_NNNNNNN, or SAVE/release, and the tracker; returns the folder.

        tensors: this rank's share; each name is given by one rank.
        CheckpointError on every rank if one of them fails; what was complete before is then untouched.
        """
        slot = CheckpointDir(self.save, RELEASE if release else checkpoint_name(record.iteration))
        parts = self._together(slot, lambda: self._write_files(slot, record, tensors))
        self._together(slot, lambda: self._commit(slot, parts) if self._rank == 0 else None)
        return slot.final

    @property
    def _rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def _write_files(self, slot: CheckpointDir, record: CheckpointRecord, tensors: dict[str, Tensor]) -> Written:
        """Write this rank's share into the unfinished checkpoint."""
        failure = None
        if self._rank == 0:
            try:
                folder.prepare(slot)
                write_atomically(slot.unfinished / RECORD_FILE, record.to_json())
            except OSError as error:
                failure = error
        raised = next((error for error in self._exchange(failure) if error is not None), None)
        if raised is not None:
            raise raised
        known, written = self.write_tensors(slot.unfinished, record, tensors, self.group), {}
        for path in sorted(slot.unfinished.rglob("*")):
            name = str(path.relative_to(slot.unfinished))
            # torch.distributed.checkpoint names files __RANK_NUMBER.distcp; all others are the first rank's
            owner = name.split("_")[2] if name.startswith("__") else "0"
            if owner == str(self._rank) and path.is_file() and path.name != MANIFEST_FILE:
                written[name] = known.get(name) or folder.checksum(path)
        return Written(written, describe_place(self.save))

    def _commit(self, slot: CheckpointDir, parts: list[Written]):
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

    def _together(self, slot: CheckpointDir, act: Callable) -> list:
        """Every rank's result of `act`, on every rank; CheckpointError on all if it failed on one."""
        result = failure = None
        try:
            with interruptible():
                result = act()
        except KeyboardInterrupt:
            if self._rank == 0:
                folder.discard(slot)
            raise
        except UnseenFilesError as error:
            failure = SaveFailure(str(error), error.ranks)
        except BaseException as error:
            failure = self._describe_failure(slot, error)
            if failure is None:
                raise
        results = self._exchange((result, failure))
        failures = [failure for _, failure in results if failure is not None]
        if failures:
            if self._rank == 0 or self._rank in failures[0].unseen:
                folder.discard(slot)
            raise CheckpointError(failures[0].text)
        return [result for result, _ in results]

    def _describe_failure(self, slot: CheckpointDir, error: BaseException) -> SaveFailure | None:
        """What to say of an error of this rank's disk, or of torch's writer; None for any other error."""
        if failures := getattr(error, "failures", None):  # known to all ranks already, with the rank that failed
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

    def _exchange(self, value) -> list:
        if self.group is None:
            return [value]
        everyone: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone


def write_alone(
    save: Path,
    record: CheckpointRecord,
    tensors: dict[str, Tensor],
    release: bool = False,
    arguments: dict | None = None,
) -> Path:
    """Write all of a checkpoint from this process, without a process group; returns its folder. CheckpointError.

    arguments: flags that it was trained with, by name; those that are not known have their defaults.
    """
    from megatron_lite.checkpoint import megatron_dist  # torch.distributed.checkpoint's import takes a second

    with folder.reserved(Path(save), 0, print):
        return Writer(Path(save), megatron_dist.writer(plain_arguments(Args()) | (arguments or {}))).write(
            record, tensors, release
        )


# --- which rank writes which tensor: replicas hold the same ones, so that each of them writes a part


def assign_share(tensors: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """The part of `tensors` that `rank` of `size` writes: about the same number of bytes each, largest first.

    Scalars are the first rank's. Every rank comes to the same division, as names and shapes are the same.
    """
    loads, mine = [0] * size, {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        lightest = loads.index(min(loads)) if tensor.ndim else 0
        loads[lightest] += tensor.nbytes
        if lightest == rank:
            mine[name] = tensor
    return mine
