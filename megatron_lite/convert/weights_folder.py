"""The weights of a Hugging Face folder, whole or in pieces, as safetensors or as torch's older .bin files."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from megatron_lite.checkpoint.unpickle import check_file
from megatron_lite.convert.config_file import read_json
from megatron_lite.errors import CheckpointError, describe_io_error
from megatron_lite.process_state import limit_memory
from megatron_lite.shared_files import require_regular

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# safetensors' names of the types that are converted
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
ALIGNMENT = 8  # bytes, of a safetensors file's first tensor


def open_weights(folder: Path):
    """The weights of `folder`: names, and tensor(name). CheckpointError if it has none, or they cannot be read."""
    for name in (WHOLE, INDEX, BIN, BIN_INDEX):
        if (folder / name).is_file():
            return Pieces(folder / name) if name.endswith(".json") else open_piece(folder / name)
    raise CheckpointError(
        f"--load-hf {folder}: holds no {WHOLE}, {BIN}, nor their index.json; give the folder of a whole model."
    )


def open_piece(path: Path):
    return SafetensorsFile(path) if path.suffix == ".safetensors" else BinFile(path)


class SafetensorsFile:
    """The tensors of a file, mapped into memory: none is read before it is used."""

    def __init__(self, path: Path):
        try:
            require_regular(path)
            self._file = safe_open(path, framework="pt")
            names = self._file.keys()
            types = {name: self._file.get_slice(name).get_dtype() for name in names}
            unknown = [name for name, dtype in types.items() if dtype not in DTYPES]
            why = f"{unknown[0]} has the type {types[unknown[0]]}, which is not supported" if unknown else None
        except Exception as error:  # noqa: BLE001 - the library raises errors of many kinds, SafetensorError among them
            why = describe_io_error(error).removesuffix(f": {path}")
        if why:
            raise CheckpointError(f"--load-hf {path}: cannot be read ({why}); copy or download it again.")
        self.names = set(types)

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class BinFile:
    """A file of torch.save: tensors only, so that it runs no code."""

    def __init__(self, path: Path):
        try:
            with limit_memory(path.stat().st_size):
                check_file(path)
                self._tensors = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointError(f"--load-hf {path}: cannot be read ({error.strerror}); check the folder.") from None
        except Exception as error:  # noqa: BLE001 - damaged files make torch raise errors of many kinds
            raise CheckpointError(
                f"--load-hf {path}: holds more than tensors or is damaged ({type(error).__name__}); "
                "use the model's .safetensors."
            ) from None
        if not isinstance(self._tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in self._tensors.items()
        ):
            raise CheckpointError(f"--load-hf {path}: is no set of tensors; use the model's .safetensors.")
        self.names = set(self._tensors)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


class Pieces:
    """Several files and an index that says which tensor is where. One file at a time is open."""

    def __init__(self, index: Path):
        self._index, self._open = index, (None, None)
        self._files = read_json(index).get("weight_map")
        # an index must not send its reader to files elsewhere
        if not isinstance(self._files, dict) or not all(
            isinstance(name, str) and name.isprintable() and Path(name).name == name for name in self._files.values()
        ):
            raise CheckpointError(
                f"--load-hf {index}: its weight_map does not name files of that folder; copy or download it again."
            )
        self.names = set(self._files)

    def tensor(self, name: str) -> Tensor:
        path = self._index.parent / self._files[name]
        if self._open[0] != path:
            self._open = (None, None)  # before the next one is read
            self._open = (path, open_piece(path))
        piece = self._open[1]
        if name not in piece.names:
            raise CheckpointError(
                f"--load-hf {path}: lacks {name}, which {self._index.name} says it holds; copy or download it again."
            )
        return piece.tensor(name)


def write_safetensors(path: Path, sizes: dict[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[Tensor]):
    """Write `tensors`, which come one by one in the order of `sizes`, {name: size}.

    The library itself takes them all at once, and a model need not fit into memory. ValueError for more or fewer
    tensors.
    """
    type_name = next(name for name, known in DTYPES.items() if known == dtype)
    header, first = {"__metadata__": {"format": "pt"}}, 0  # transformers wants the format
    for name, size in sizes.items():
        end = first + math.prod(size) * dtype.itemsize
        header[name] = {"dtype": type_name, "shape": list(size), "data_offsets": [first, end]}
        first = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(
            tensor.contiguous().flatten().view(torch.uint8).numpy().data
            for _, tensor in zip(sizes, tensors, strict=True)
        )
