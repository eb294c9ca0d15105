"""What is hashed while it is written."""

import hashlib

import pytest

from megatron_lite.checkpoint.folder import PIECE, HashedFile, checksum


def test_the_entry_is_that_of_the_file(tmp_path):
    with open(tmp_path / "file", "wb") as file, HashedFile(file) as hashed:
        for length in (0, 1, PIECE - 1, PIECE + 1, 3 * PIECE):
            hashed.write(bytes(length % 251 for _ in range(16)) * (length // 16) + b"x" * (length % 16))
    assert hashed.entry == checksum(tmp_path / "file")


def test_a_digest_that_fails_ends_the_save(tmp_path, monkeypatch):
    class Broken:
        def update(self, piece):
            raise MemoryError("no room for a digest")

    monkeypatch.setattr(hashlib, "sha256", Broken)
    with pytest.raises(MemoryError, match="no room"), open(tmp_path / "file", "wb") as file, HashedFile(file) as hashed:
        hashed.write(bytes(PIECE + 1))
