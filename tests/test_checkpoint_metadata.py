"""The .metadata of a checkpoint, a pickle: read as torch reads it, whoever wrote it, and no part of it is ever run."""

import enum
import io
import pickle
import pickletools
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_lite.checkpoint.metadata_pickle import MAX_BYTES, read_metadata

EVENTS: list = []  # what Python's audit hook has seen since a test began to watch; None: nobody watches
WATCHED = {"on": False}
TENSORS = {"a.weight": torch.ones(4, 3, dtype=torch.bfloat16), "a.step": torch.tensor(3.0), "n": torch.zeros(0, 2, dtype=torch.int64)}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> Metadata:
    """As torch reads it: of tensors, one of them in two pieces on two ranks, and of an entry of bytes."""
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save(TENSORS | {"extra": io.BytesIO(b"x")}, checkpoint_id=folder, no_dist=True)
    found = pickle.loads((folder / ".metadata").read_bytes())
    entry = found.state_dict_metadata["a.weight"]
    halves = [ChunkStorageMetadata(torch.Size([2 * rank, 0]), torch.Size([2, 3])) for rank in range(2)]
    found.state_dict_metadata["two"] = TensorStorageMetadata(entry.properties, entry.size, halves)
    for rank, half in enumerate(halves):
        found.storage_data[MetadataIndex("two", half.offsets, rank)] = _StorageInfo(f"__{rank}_0.distcp", 10, 20)
    return found


class WithGetattr(pickle.Pickler):
    """Pickles enums as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def pickled(value, pickler=pickle.Pickler, protocol=4) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol).dump(value)
    return file.getvalue()


@pytest.mark.parametrize("pickler, protocol", [(pickle.Pickler, 4), (pickle.Pickler, 5), (WithGetattr, 4), (pickle._Pickler, 4)])
def test_it_is_read_as_torch_reads_it(metadata, tmp_path, pickler, protocol):
    path = tmp_path / ".metadata"
    path.write_bytes(pickled(metadata, pickler, protocol))
    assert (b"getattr" in path.read_bytes()) == (pickler is WithGetattr)
    found = read_metadata(path)
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.storage_data == metadata.storage_data
