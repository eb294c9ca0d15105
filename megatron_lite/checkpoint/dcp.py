"""Checkpoints by torch.distributed.checkpoint, whose ranks each write pieces of tensors and read any part."""

import contextlib
import io
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_lite.checkpoint.folder import Background, HashedFile, Manifest
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
class TensorPiece:
    """A tensor that is written as a region of a stored tensor, whose shape is `whole`."""

    region: Region
    whole: tuple[int, ...]
    tensor: Tensor


FindAliases = Callable[[Metadata], dict[str, str]]  # {further key: stored key}


def write(
    folder: Path,
    pieces: list[TensorPiece],
    objects: dict[str, object],
    find_aliases: FindAliases,
    group: ProcessGroup | None,
) -> Manifest:
    """Write pieces and objects of all ranks. Collective over `group`.

    Args:
        folder: Where the files are written.
        pieces: Tensors that this rank gives; each region is given by one rank.
        objects: Plain objects that this rank gives beside tensors, by key.
        find_aliases: Names what is to be found under several keys and stored once.
        group: The ranks that write; None: this process alone.

    Returns:
        The manifest's entries of this rank's files.

    Raises:
        CheckpointException: On every rank, if one of them fails.
    """
    writer = _Writer(folder, find_aliases)
    with _quiet():
        state_dict_saver.save(
            {},
            storage_writer=writer,
            planner=_SavePlanner(pieces, objects),
            process_group=group,
            no_dist=group is None,
        )
    return writer.entries


class Reader(FileSystemReader):
    """Reads parts of tensors. torch's own unpickles the metadata, which runs any code that the file asks for."""

    def __init__(self, folder: Path):
        """OSError or ValueError for metadata that cannot be read."""
        super().__init__(folder)
        self.folder = folder
        self.metadata = read_metadata(folder / METADATA_FILE)

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return what was read when this was made. The arguments are those of torch's method, and have no effect."""
        return self.metadata

    def read(self, wanted: list[tuple[Region, Tensor]]) -> None:
        """Copy each region into the tensor that is given for it, which has its sizes. Raises what torch raises."""
        for name in {place.relative_path for place in self.metadata.storage_data.values()}:
            require_regular(self.folder / name)
        with _quiet(), limit_memory(sum(path.stat().st_size for path in self.folder.iterdir())):
            state_dict_loader.load(
                {str(number): tensor for number, (_, tensor) in enumerate(wanted)},
                storage_reader=self,
                planner=_LoadPlanner([region for region, _ in wanted], self.metadata),
                no_dist=True,
            )

    def read_object(self, key: str) -> io.BytesIO:
        """The bytes of an object. KeyError if there is none of that key."""
        place = self.metadata.storage_data[MetadataIndex(key)]
        with open_foreign(self.folder / place.relative_path) as file:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))


class _SavePlanner(DefaultSavePlanner):
    """Plans to write the pieces and objects of this rank, whatever torch's state dict holds."""

    def __init__(self, pieces: list[TensorPiece], objects: dict[str, object]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self._objects = objects
        self._tensors: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # by key and offsets
        for piece in pieces:
            region = piece.region
            self._tensors[region.key, region.offsets] = piece.tensor.detach().view(region.sizes)

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects]
        for piece in self._pieces:
            offsets = torch.Size(piece.region.offsets)
            data = TensorWriteData(
                ChunkStorageMetadata(offsets, torch.Size(piece.region.sizes)),
                TensorProperties(dtype=piece.tensor.dtype),
                torch.Size(piece.whole),
            )
            items.append(WriteItem(MetadataIndex(piece.region.key, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        if index.fqn in self._objects:
            return self._objects[index.fqn]
        return self._tensors[index.fqn, tuple(index.offset or ())]


@dataclass
class _Share:
    """The items that go into one file of a rank, and what was written of them."""

    file_name: str
    items: list[WriteItem] = field(default_factory=list)
    num_bytes: int = 0  # of the items' tensors
    results: list[WriteResult] = field(default_factory=list)


class _Writer(FileSystemWriter):
    """Writes two files of a rank at once, as Megatron-Core does, and hashes them.

    torch's threads lose what they raise.
    """

    def __init__(self, folder: Path, find_aliases: FindAliases):
        super().__init__(folder)
        self.entries: Manifest = {}  # of the files of this rank
        self._find_aliases = find_aliases

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shares = [_Share(f"{plan.storage_data.prefix}{number}.distcp") for number in range(2)]
        for item in sorted(plan.items, key=_num_bytes, reverse=True):
            lightest = min(shares, key=lambda share: share.num_bytes)
            lightest.items.append(item)
            lightest.num_bytes += _num_bytes(item)
        stopped = threading.Event()
        other = Background()
        first, second = shares

        def write_share(share: _Share) -> None:
            try:
                with HashedFile(Path(self.path) / share.file_name) as file:
                    for item in share.items:
                        if stopped.is_set():
                            break
                        start = file.tell()
                        _write_item(planner.resolve_data(item), file)
                        place = _StorageInfo(share.file_name, start, file.tell() - start)
                        share.results.append(WriteResult(item.index, place.length, place))
            except BaseException:
                stopped.set()
                raise
            self.entries[share.file_name] = file.entry

        if second.items:
            other.start(lambda: write_share(second))
        try:
            write_share(first)
        finally:
            other.finish()
        written: Future[list[WriteResult]] = Future()
        written.set_result(first.results + second.results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
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


def _write_item(data: Tensor | io.BytesIO, file: HashedFile) -> None:
    if isinstance(data, io.BytesIO):
        file.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes all of a storage
    torch.save(tensor, file)


def _num_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None:
        return 0
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class _LoadPlanner(DefaultLoadPlanner):
    """Plans to read regions into the tensors that torch's state dict holds under their numbers."""

    def __init__(self, regions: list[Region], stored: Metadata):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._regions = regions
        self._stored = stored.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for number, region in enumerate(self._regions):
            chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
            stored = self._stored[region.key]
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"{region.key} is no tensor")  # noqa: TRY004 - as of other damage
            found = create_read_items_for_chunk_list(region.key, stored, [chunk])
            if sum(math.prod(item.lengths) for item in found) != math.prod(region.sizes):
                raise ValueError(f"a part of {region.key} is missing")
            items += [replace(item, dest_index=MetadataIndex(str(number))) for item in found]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn]


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
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
def _quiet() -> Iterator[None]:
    """Suppress torch's warning that a process reads or writes by itself: it is meant to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
