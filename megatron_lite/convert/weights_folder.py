"""Reads the weights of a Hugging Face folder, whole or in pieces, as safetensors or as torch's older .bin files."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_lite.checkpoint.unpickle import check_file
from megatron_lite.convert.config_file import read_json
from megatron_lite.errors import CheckpointError, describe_io_error
from megatron_lite.process_state import limit_memory
from megatron_lite.shared_files import require_regular

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
# safetensors' names of the types that are converted
SAFETENSORS_DTYPES = {
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
TENSOR_ALIGNMENT = 8  # bytes, of a safetensors file's first tensor


class Weights(Protocol):
    """Tensors of a file or a folder, by name."""

    @property
    def names(self) -> set[str]: ...

    def tensor(self, name: str) -> Tensor: ...


class SafetensorsHandle(Protocol):
    """An opened file of the package safetensors: what is used of it."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> "SafetensorsSlice": ...

    def get_tensor(self, name: str) -> Tensor: ...


class SafetensorsSlice(Protocol):
    """A tensor in such a file, which is not read yet."""

    def get_dtype(self) -> str: ...


def open_weights(folder: Path) -> Weights:
    """The weights of a folder. CheckpointError if it has none, or they cannot be read."""
    for name in (WEIGHTS_FILE, INDEX_FILE, BIN, BIN_INDEX):
        if (folder / name).is_file():
            return TensorPieces(folder / name) if name.endswith(".json") else open_piece(folder / name)
    raise CheckpointError(
        f"--load-hf {folder}: holds no {WEIGHTS_FILE}, {BIN}, nor their index.json; give the folder of a whole model."
    )


def open_piece(path: Path) -> Weights:
    """The weights of one file. CheckpointError if they cannot be read."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else BinFile(path)


class SafetensorsFile:
    """The tensors of a file, mapped into memory: none is read before it is used."""

    def __init__(self, path: Path):
        """Raises CheckpointError for a file that cannot be read."""
        why = ""
        try:
            require_regular(path)
            self._file = _open_safetensors(path)
            names = self._file.keys()
            types = {name: self._file.get_slice(name).get_dtype() for name in names}
            for name, dtype in types.items():
                if dtype not in SAFETENSORS_DTYPES and not why:
                    why = f"{name} has the type {dtype}, which is not supported"
        except Exception as error:  # noqa: BLE001 - the library raises errors of many kinds, SafetensorError among them
            why = describe_io_error(error).removesuffix(f": {path}")
        if why:
            raise CheckpointError(f"--load-hf {path}: cannot be read ({why}); copy or download it again.")
        self.names = set(types)

    def tensor(self, name: str) -> Tensor:
        """Read the tensor of this name."""
        return self._file.get_tensor(name)


def _open_safetensors(path: Path) -> SafetensorsHandle:
    """Open a file, whose tensors are mapped into memory. SafetensorError for a damaged one."""
    return safe_open(path, framework="pt")


class BinFile:
    """A file of torch.save: tensors only, so that it runs no code."""

    def __init__(self, path: Path):
        """Raises CheckpointError for a file that cannot be read, or holds anything else."""
        try:
            with limit_memory(path.stat().st_size):
                check_file(path)
                loaded: object = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointError(f"--load-hf {path}: cannot be read ({error.strerror}); check the folder.") from None
        except Exception as error:  # noqa: BLE001 - damaged files make torch raise errors of many kinds
            raise CheckpointError(
                f"--load-hf {path}: holds more than tensors or is damaged ({type(error).__name__}); "
                "use the model's .safetensors."
            ) from None
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
        ):
            raise CheckpointError(f"--load-hf {path}: is no set of tensors; use the model's .safetensors.")
        self._tensors: dict[str, Tensor] = loaded
        self.names = set(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self._tensors[name]


class TensorPieces:
    """Several files and an index that says which tensor is where. One file at a time is open."""

    def __init__(self, index: Path):
        """Raises CheckpointError for an index that cannot be read, or names files elsewhere."""
        self._index = index
        self._open: tuple[Path, Weights] | None = None
        files = read_json(index).get("weight_map")
        # an index must not send its reader to files elsewhere
        if not isinstance(files, dict) or not all(map(_is_file_name, files.values())):
            raise CheckpointError(
                f"--load-hf {index}: its weight_map does not name files of that folder; copy or download it again."
            )
        self._files: dict[str, str] = files
        self.names = set(self._files)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor. CheckpointError if its file lacks it."""
        path = self._index.parent / self._files[name]
        piece = self._open_piece(path)
        if name not in piece.names:
            raise CheckpointError(
                f"--load-hf {path}: lacks {name}, which {self._index.name} says it holds; copy or download it again."
            )
        return piece.tensor(name)

    def _open_piece(self, path: Path) -> Weights:
        """Open a file, unless it is the one that is open."""
        if self._open is not None and self._open[0] == path:
            return self._open[1]
        self._open = None  # before the next one is read
        piece = open_piece(path)
        self._open = (path, piece)
        return piece


def _is_file_name(name: object) -> bool:
    """Whether a value is the name of a file, without a folder."""
    return isinstance(name, str) and name.isprintable() and Path(name).name == name


def write_safetensors(
    path: Path,
    sizes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[Tensor],
    others: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> None:
    """Write tensors, which come one by one.

    The library itself takes them all at once, and a model need not fit into memory.

    Args:
        path: Path of the new file.
        sizes: Sizes of the tensors by name, in their order.
        dtype: Data type of all of them but `others`.
        tensors: A tensor for each name.
        others: Types by name of those that have another one.

    Raises:
        ValueError: There are more or fewer tensors.
        OSError: The file cannot be written.
    """
    type_names = {known: name for name, known in SAFETENSORS_DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants the format
    first = 0  # byte of the next tensor
    for name, size in sizes.items():
        own = others.get(name, dtype)
        end = first + math.prod(size) * own.itemsize
        header[name] = {"dtype": type_names[own], "shape": list(size), "data_offsets": [first, end]}
        first = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % TENSOR_ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in zip(sizes, tensors, strict=True):
            content = tensor.contiguous().flatten().view(torch.uint8)
            file.write(content.numpy().data)
