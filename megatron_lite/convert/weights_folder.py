"""The weights of a Hugging Face folder, whole or in pieces, as safetensors or as torch's older .bin files."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.convert.config_file import read_json
from megatron_lite.convert.safetensors_file import SafetensorsFile
from megatron_lite.errors import CheckpointError
from megatron_lite.process_state import limit_memory

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class Weights(Protocol):
    """Named tensors. CheckpointError for what cannot be read."""

    def names(self) -> set[str]: ...

    def tensor(self, name: str) -> Tensor: ...


def open_weights(folder: Path) -> Weights:
    """The weights of `folder`. CheckpointError if it has none."""
    for name, opened in ((WHOLE, open_piece), (INDEX, Pieces), (BIN, open_piece), (BIN_INDEX, Pieces)):
        if (folder / name).is_file():
            return opened(folder / name)
    raise CheckpointError(
        f"--load-hf {folder}: holds no {WHOLE}, {BIN}, nor their index.json; give the folder of a whole model."
    )


def open_piece(path: Path) -> Weights:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else BinFile(path)


class BinFile:
    """A file of torch.save: tensors only, so that it runs no code."""

    def __init__(self, path: Path):
        try:
            with limit_memory(path.stat().st_size):
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

    def names(self) -> set[str]:
        return set(self._tensors)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


class Pieces:
    """Several files and an index that says which tensor is where. One file at a time is open."""

    def __init__(self, index: Path):
        self._index, self._open = index, None
        self._files = read_json(index).get("weight_map")
        if not isinstance(self._files, dict) or not all(map(_is_plain, self._files.values())):
            raise CheckpointError(
                f"--load-hf {index}: its weight_map does not name files of that folder; copy or download it again."
            )

    def names(self) -> set[str]:
        return set(self._files)

    def tensor(self, name: str) -> Tensor:
        return self._piece(name).tensor(name)

    def _piece(self, name: str) -> Weights:
        file = self._files[name]
        if self._open is None or self._open[0] != file:
            self._open = None  # before the next one is read
            self._open = (file, open_piece(self._index.parent / file))
        piece = self._open[1]
        if name not in piece.names():
            raise CheckpointError(
                f"--load-hf {self._index.parent / file}: lacks {name}, which {self._index.name} says "
                "it holds; copy or download it again."
            )
        return piece


def _is_plain(name) -> bool:
    """An index must not send its reader to files elsewhere."""
    return isinstance(name, str) and Path(name).name == name
