"""torch.distributed.checkpoint: every rank writes its own pieces of tensors, and any number of ranks reads any part."""

import contextlib
import io
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_lite.checkpoint.folder import Background, HashedFile
from megatron_lite.checkpoint.unpickle import read_metadata
from megatron_lite.errors import CheckpointError, describe_io_error
from megatron_lite.process_state import interruptible, limit_memory
from megatron_lite.run_folder import METADATA_FILE
from megatron_lite.shared_files import open_foreign, require_regular


@dataclass(frozen=True)
class Region:
    """A block of a stored tensor: from `offsets` on, `sizes` elements along each dimension."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A tensor that is written as a region of a stored tensor, whose shape is `whole`."""

    region: Region
    whole: tuple[int, ...]
    tensor: Tensor


def write(
    folder: Path, pieces: list[Piece], objects: dict[str, object], find_aliases: Callable, group
) -> dict[str, dict]:
    """Write the pieces and objects of all ranks of `group`, each given by one rank, to `folder`; None: by this process
    alone.

    find_aliases(metadata): {further key: stored key}, for what is to be found under several keys and stored once.
    Collective. CheckpointException on every rank if one fails. Returns the manifest's entries of this rank's files.
    """
    writer = _Writer(folder, find_aliases)
    with _quiet():
        dcp.save(
            {},
            storage_writer=writer,
            planner=_SavePlanner(pieces, objects),
            process_group=group,
            no_dist=group is None,
        )
    return writer.entries


class Reader(FileSystemReader):
    """torch's own unpickles the metadata, which runs any code that the file asks for."""

    def __init__(self, folder: Path):
        """OSError or ValueError for metadata that cannot be read."""
        super().__init__(folder)
        self.folder, self.metadata = folder, read_metadata(folder / METADATA_FILE)

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self.metadata

    def read(self, wanted: list[tuple[Region, Tensor]]):
        """Copy each region into the tensor that is given for it, which has its sizes. Raises what torch raises."""
        for name in {place.relative_path for place in self.metadata.storage_data.values()}:
            require_regular(self.folder / name)
        with _quiet(), limit_memory(sum(path.stat().st_size for path in self.folder.iterdir())):
            dcp.load(
                {str(number): tensor for number, (_, tensor) in enumerate(wanted)},
                storage_reader=self,
                planner=_LoadPlanner([region for region, _ in wanted]),
                no_dist=True,
            )

    def read_object(self, key: str) -> io.BytesIO:
        """The bytes of an object. KeyError if there is none of that key."""
        place = self.metadata.storage_data[MetadataIndex(key)]
        with open_foreign(self.folder / place.relative_path) as file:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, pieces: list[Piece], objects: dict[str, object]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = {
            (piece.region.key, piece.region.offsets): piece.tensor.detach().view(piece.region.sizes) for piece in pieces
        }
        self._pieces, self._objects = pieces, objects

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        for piece in self._pieces:
            offsets, sizes = torch.Size(piece.region.offsets), torch.Size(piece.region.sizes)
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, sizes),
                TensorProperties(dtype=piece.tensor.dtype),
                torch.Size(piece.whole),
            )
            items.append(WriteItem(MetadataIndex(piece.region.key, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex):
        if index.fqn in self._objects:
            return self._objects[index.fqn]
        return self._tensors[index.fqn, tuple(index.offset)]


class _Writer(FileSystemWriter):
    """Writes two files of a rank at once, as Megatron-Core does, and hashes them.

    torch's threads lose what they raise.
    """

    def __init__(self, folder: Path, find_aliases: Callable):
        super().__init__(folder)
        self.entries: dict[str, dict] = {}  # the manifest's, of the files of this rank
        self._find_aliases = find_aliases

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shares, loads = ([], []), [0, 0]
        for item in sorted(plan.items, key=_num_bytes, reverse=True):
            lightest = loads.index(min(loads))
            shares[lightest].append(item)
            loads[lightest] += _num_bytes(item)
        results, stopped, other = ([], []), threading.Event(), Background()

        def write_share(number: int):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            try:
                with open(Path(self.path) / name, "wb") as raw, HashedFile(raw) as file:
                    for item in shares[number]:
                        if not stopped.is_set():
                            start = file.tell()
                            _write_item(planner.resolve_data(item), file)
                            place = _StorageInfo(name, start, file.tell() - start)
                            results[number].append(WriteResult(item.index, place.length, place))
            except BaseException:
                stopped.set()
                raise
            self.entries[name] = file.entry

        if shares[1]:
            other.start(lambda: write_share(1))
        try:
            write_share(0)
        finally:
            other.finish()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results[0] + results[1])
        return written

    def finish(self, metadata: Metadata, results: list[list]):
        aliases: dict[str, list[str]] = {}
        for alias, key in self._find_aliases(metadata).items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            aliases.setdefault(key, []).append(alias)
        again = [
            replace(result, index=replace(result.index, fqn=alias))
            for part in results
            for result in part
            for alias in aliases.get(result.index.fqn, ())
        ]
        super().finish(metadata, [*results, again])


def _write_item(data: Tensor | io.BytesIO, file: HashedFile):
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes all of a storage
    torch.save(tensor, file)


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, regions: list[Region]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._regions = regions

    def create_local_plan(self) -> LoadPlan:
        items = []
        for number, region in enumerate(self._regions):
            chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
            found = create_read_items_for_chunk_list(region.key, self.metadata.state_dict_metadata[region.key], [chunk])
            if sum(math.prod(item.lengths) for item in found) != math.prod(region.sizes):
                raise ValueError(f"a part of {region.key} is missing")
            items += [replace(item, dest_index=MetadataIndex(str(number))) for item in found]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


@contextlib.contextmanager
def readable(path: Path):
    """Whatever a damaged file makes torch and pickle raise becomes one line."""
    try:
        with interruptible():
            yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch's exception is none of Python's ordinary ones
        raise CheckpointError(
            f"--load {path}: cannot be read ({describe_io_error(error)}); it is damaged or was written by another "
            "program. Load an earlier one with --ckpt-step."
        ) from error


@contextlib.contextmanager
def _quiet():
    """Without torch's warning that a process reads or writes by itself: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
