"""What is hashed while it is written."""

import errno
import os

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from megatron_lite.checkpoint import dcp
from megatron_lite.checkpoint.folder import PIECE, HashedFile, checksum
from megatron_lite.errors import describe_io_error


def test_the_entry_is_that_of_the_file(tmp_path):
    with HashedFile(tmp_path / "file") as hashed:
        for length in (0, 1, PIECE - 1, PIECE + 1, 3 * PIECE):
            hashed.write(bytes(length % 251 for _ in range(16)) * (length // 16) + b"x" * (length % 16))
    assert hashed.entry == checksum(tmp_path / "file")


def test_a_digest_that_fails_ends_the_save(tmp_path, monkeypatch):
    class Broken:
        def update(self, piece):
            raise MemoryError("no room for a digest")

    monkeypatch.setattr(xxhash, "xxh3_128", Broken)
    with pytest.raises(MemoryError, match="no room"), HashedFile(tmp_path / "file") as hashed:
        hashed.write(bytes(PIECE + 1))


@pytest.mark.parametrize("number", [0, 1])
def test_a_full_disk_under_either_file_of_a_rank_ends_the_save(tmp_path, monkeypatch, number):
    write, pieces = HashedFile.write, []
    for name in "ab":
        pieces.append(dcp.TensorPiece(dcp.Region(name, (0,), (9,)), (9,), torch.arange(9.0)))

    def fill_disk(file, data):
        if str(file.name).endswith(f"_{number}.distcp"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    entries = dcp.write(tmp_path, pieces, {}, lambda metadata: {}, None)
    assert entries == {name: checksum(tmp_path / name) for name in ("__0_0.distcp", "__0_1.distcp")}
    monkeypatch.setattr(HashedFile, "write", fill_disk)
    with pytest.raises(CheckpointException) as caught:
        dcp.write(tmp_path, pieces, {}, lambda metadata: {}, None)
    assert describe_io_error(caught.value) == "No space left on device"
