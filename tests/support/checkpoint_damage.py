"""Damage to checkpoint folders, and what of them is left."""

from pathlib import Path


def flip(path: Path):
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def iterations(save: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in save.glob("iter_*"))
