"""The safetensors format: a JSON header that says where each tensor lies, then the bytes of all of them.

Eight bytes give the header's length, little-endian; offsets count from its end. Written tensor by tensor and read
through a memory map, so that a model never has to be in memory as a whole.
Source: the format section of the safetensors project's README.
"""

import json
import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8
ALIGNMENT = 8  # of the first tensor, so that a map can be read in place


def tensor_bytes(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(size) * dtype.itemsize


class SafetensorsWriter:
    """Writes {name: size} of one dtype; `add` must then be given each tensor, in that order."""

    def __init__(self, path: Path, sizes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        self._left = iter(sizes.items())
        self._dtype = dtype
        self._file = open(path, "wb")
        header = _header(sizes, dtype)
        self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)

    def add(self, name: str, tensor: Tensor):
        expected = next(self._left, None)
        if (name, tuple(tensor.shape)) != expected or tensor.dtype != self._dtype:
            raise ValueError(f"{name} {tuple(tensor.shape)} {tensor.dtype} comes where {expected} was announced")
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    def close(self):
        """Raises ValueError if a tensor that was announced is missing."""
        self._file.close()
        left = next(self._left, None)
        if left is not None:
            raise ValueError(f"{left[0]} was announced and never came")


class SafetensorsFile:
    """The tensors of a file, mapped: none is read before it is used. CheckpointError if the file is damaged."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._start, self._entries = _read_header(self._map)
        except OSError as error:
            raise _unreadable(path, error.strerror) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(path, f"{error or 'its header is damaged'}") from None

    def names(self) -> set[str]:
        return set(self._entries)

    def tensor(self, name: str) -> Tensor:
        """A view of the file."""
        dtype, size, first = self._entries[name]
        count = math.prod(size)
        if count == 0:
            return torch.empty(size, dtype=dtype)
        place = self._start + first
        raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=place, count=count * dtype.itemsize)
        aligned = raw if place % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype).view(size)


def _header(sizes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    entries, first = {"__metadata__": {"format": "pt"}}, 0  # transformers wants the format
    for name, size in sizes.items():
        end = first + tensor_bytes(size, dtype)
        entries[name] = {"dtype": NAMES[dtype], "shape": list(size), "data_offsets": [first, end]}
        first = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


def _read_header(data: mmap.mmap) -> tuple[int, dict[str, tuple[torch.dtype, tuple[int, ...], int]]]:
    """(where the tensors begin, {name: (dtype, size, first byte)}). ValueError and others if it makes no sense."""
    start = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")
    if start > len(data):
        raise ValueError("it is shorter than its header says")
    entries = {}
    for name, entry in json.loads(data[LENGTH_BYTES:start]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} has the type {entry['dtype']}, which is not supported")
        dtype, size, (first, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*size, first, end)):
            raise ValueError(f"{name} has no valid shape and place")
        if end - first != tensor_bytes(size, dtype) or start + end > len(data):
            raise ValueError(f"{name} does not lie within it; it was cut short")
        entries[name] = (dtype, size, first)
    return start, entries


def _unreadable(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"--load-hf {path}: cannot be read ({why}); copy or download it again.")
