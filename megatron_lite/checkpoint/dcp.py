"""torch.distributed.checkpoint: every rank writes its own tensors, and any number of ranks reads them."""

import contextlib
import re
import signal
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_lite.checkpoint.metadata_pickle import read_metadata
from megatron_lite.checkpoint.record import Record
from megatron_lite.errors import CheckpointError, first_line
from megatron_lite.process_state import limit_memory
from megatron_lite.run_folder import RECORD_FILE

METADATA_FILE = ".metadata"
# torch's words for a disk that took no more
CUT_SHORT = re.compile(r"enforce fail.*(unexpected pos|file write failed)")


def write(folder: Path, tensors: dict[str, Tensor], group):
    """Write `tensors` of all ranks of `group`, each name held by one rank, to `folder`; None: by this process alone.

    Collective. CheckpointException on every rank if one fails.
    """
    with _quiet():
        dcp.save(tensors, storage_writer=FileSystemWriter(folder), process_group=group, no_dist=group is None)


class DcpFile:
    """A checkpoint that `write` wrote, with its record. CheckpointError if it cannot be read."""

    def __init__(self, folder: Path):
        self._folder = folder
        with _readable(folder / RECORD_FILE):
            self.record = Record.from_json((folder / RECORD_FILE).read_text(encoding="utf-8"))
        self.without_optimizer = None if self.record.optimizer else "was not saved (--no-save-optim, or a conversion)"
        with _readable(folder / METADATA_FILE):
            metadata = read_metadata(folder / METADATA_FILE)
        self._reader = _Reader(folder, metadata)
        self._tensors = {name: entry for name, entry in metadata.state_dict_metadata.items()
                         if isinstance(entry, TensorStorageMetadata)}

    def names(self) -> set[str]:
        return set(self._tensors)

    def size_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].size)

    def dtype_of(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.dtype

    def read_into(self, targets: dict[str, Tensor]) -> None:
        if not targets:
            return
        require_fit(self, self._folder, targets)
        with _readable(self._folder), _quiet(), limit_memory(sum(path.stat().st_size for path in self._folder.iterdir())):
            dcp.load(dict(targets), storage_reader=self._reader, no_dist=True)


def require_fit(stored, where: Path, targets: dict[str, Tensor]):
    """CheckpointError unless `stored` has every one of `targets`, in its shape."""
    absent = sorted(set(targets) - stored.names())
    if absent:
        raise CheckpointError(f"--load {where}: lacks {len(absent)} of the tensors that this run needs, such as "
                              f"{absent[0]}; give the flags that the checkpoint was trained with.")
    for name, target in targets.items():
        if tuple(target.shape) != stored.size_of(name):
            raise CheckpointError(f"--load {where}: {name} has the shape {list(stored.size_of(name))}, and the run's is "
                                  f"{list(target.shape)}; give the flags that the checkpoint was trained with.")


class _Reader(FileSystemReader):
    """torch's own unpickles the metadata, which runs any code that the file asks for."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self._metadata


@contextlib.contextmanager
def _readable(path: Path):
    """Whatever a damaged file makes torch and pickle raise becomes one line."""
    try:
        with interruptible():
            yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch's exception is none of Python's ordinary ones
        raise CheckpointError(f"--load {path}: cannot be read ({reason(error)}); it is damaged or was written by another "
                              "program. Load an earlier one with --ckpt-step.") from error


@contextlib.contextmanager
def interruptible():
    """Ctrl-C inside is a KeyboardInterrupt outside: torch makes a failed rank or a full disk of it, or drops it."""
    before, interrupts = signal.getsignal(signal.SIGINT), []
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number, frame):
        interrupts.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            raise KeyboardInterrupt


def reason(error: BaseException) -> str:
    """The gist of an error in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        return reason(error.failures[min(error.failures)][0])
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if CUT_SHORT.search(str(error)):
        return "a file could not be written to its end"
    return first_line(error)


@contextlib.contextmanager
def _quiet():
    """Without torch's warning that a process reads or writes by itself: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
