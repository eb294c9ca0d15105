"""Reads pickles without running code that they name: files of torch.save, and torch.distributed.checkpoint's .metadata.

torch's restricted unpickler builds tensors and plain containers. A class that a file names becomes an Inert, which
keeps what the file says about the object. In a file of torch.save that must be a class of a known training program; any
other is refused by name. In .metadata every class and function is an Inert, and torch's Metadata is made from checked
values.
"""

import argparse
import tarfile
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import torch

from megatron_lite.checkpoint.megatron_state import MegatronState, is_state
from megatron_lite.errors import CheckpointError, first_line
from megatron_lite.pickle_bounds import BoundedUnpickler, check_pickle
from megatron_lite.process_state import limit_memory
from megatron_lite.shared_files import open_foreign, read_foreign

if TYPE_CHECKING:
    # importing it takes a second
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

T = TypeVar("T")
# None of what these hold is needed here: enums, paths and recorders among the arguments, numpy's random state
PACKAGES = {
    "megatron",
    "megatron_patch",
    "transformer_engine",
    "apex",
    "deepspeed",
    "modelopt",
    "nvidia_resiliency_ext",
    "numpy",
    "signal",
    "pathlib",
    "datetime",
}
# getattr: Python 3.11.2 pickles a member of an enum as getattr(class, name)
CLASSES = {"types.SimpleNamespace", "_io.BytesIO", "io.BytesIO", "builtins.range", "builtins.slice", "builtins.getattr"}


class Inert:
    """Stands for an object of any class: `arguments` it was made with, and its `state`. Does nothing."""

    named = "an object of another program"
    arguments: tuple[object, ...]
    state: object

    def __new__(cls, *arguments: object) -> "Inert":  # noqa: PYI034 - Self came with Python 3.11
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = None
        return made

    def __init__(self, *arguments: object):
        """Everything is kept by __new__, which pickles may call alone."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __repr__(self) -> str:
        # arguments may lie in each other without end
        return self.named


def load(path: Path) -> MegatronState:
    """The dict that torch.save wrote to `path`; its tensors stay in the file until they are used.

    Raises CheckpointError for a file that is damaged, names a class outside PACKAGES and CLASSES, or holds no dict.
    """
    state = load_object(path)
    if not is_state(state):
        raise CheckpointError(f"--load {path}: holds a {type(state).__name__}, not a checkpoint; check the file.")
    return state


MAX_PICKLE_BYTES = 2**27  # without its tensors
LEGACY_PICKLES = 5  # before the tensors, in a file by a torch older than 1.6


def check_file(source: Path | BytesIO) -> None:
    """Whether torch will come to an end with a file of torch.save.

    OSError for what is no regular file, pickle's errors for a damaged one, ValueError for one that is refused.
    """
    if isinstance(source, BytesIO):
        _check_content(source)
        return
    with open_foreign(source) as file:
        _check_content(file)


def _check_content(file: BinaryIO) -> None:
    """Whether torch will come to an end with an opened file of torch.save. Raises as `check_file`."""
    if torch.serialization._is_zipfile(file):
        file.seek(0)
        pickled = torch._C.PyTorchFileReader(file).get_record("data.pkl")
        if len(pickled) > MAX_PICKLE_BYTES:
            raise ValueError(f"its pickle has {len(pickled)} bytes, more than the {MAX_PICKLE_BYTES} that are read")
        check_pickle(pickled)
        return
    file.seek(0)
    if tarfile.is_tarfile(file):
        raise ValueError("it is a tar file, which torch before 0.4 wrote")
    file.seek(0)
    content = file.read()
    end = 0
    for _ in range(LEGACY_PICKLES):
        end = check_pickle(content, end)


def load_object(path: Path, beside: BytesIO | None = None) -> object:
    """Read what torch.save wrote.

    Args:
        path: The file that is read, or that `beside` belongs to; messages name it.
        beside: The bytes to read instead.

    Raises:
        CheckpointError: As `load` does.
    """
    source = path if beside is None else beside
    try:
        with limit_memory(path.stat().st_size if beside is None else len(beside.getbuffer())):
            check_file(source)
            if beside is not None:
                beside.seek(0)
            named = torch.serialization.get_unsafe_globals_in_checkpoint(source)
            harmless = [name for name in named if name in CLASSES or name.partition(".")[0] in PACKAGES]
            refused = sorted(set(named) - {*harmless, "argparse.Namespace"})
            if refused:
                raise CheckpointError(
                    f"--load {path}: names {refused[0]}, which is neither data nor a class of a known training "
                    "program, and reading it might run its code; load a file that you trust, without it."
                )
            if beside is not None:
                beside.seek(0)
            with torch.serialization.safe_globals([argparse.Namespace, *((Inert, name) for name in harmless)]):
                made: object = torch.load(source, map_location="cpu", weights_only=True, mmap=beside is None)
                return made
    except FileNotFoundError:
        raise CheckpointError(f"--load {path}: there is no such file; check the folder.") from None
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files make torch raise errors of many kinds
        raise CheckpointError(
            f"--load {path}: cannot be read ({type(error).__name__}: {first_line(error)}); it is damaged, or "
            "older than torch 1.6. Load an earlier one, or save it again with a newer torch."
        ) from None


# --- .metadata

MAX_METADATA_BYTES = 2**27  # enough for 600,000 tensors
MEMORY_PER_BYTE = 40  # of Python objects, for a byte of the file
FORMS = "torch.distributed.checkpoint.metadata."
PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
DTYPES_BY_NAME = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Unpickler(BoundedUnpickler):
    """Pickles can call only what this returns, and set attributes of that: both end in an Inert's own methods."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> type[Inert]:
        full = f"{module}.{name}"
        return self._classes.setdefault(full, type("Inert", (Inert,), {"named": full}))


def read_metadata(path: Path) -> "Metadata":
    """Read what a .metadata file says of tensors and bytes, and where they are; all else in it is left out.

    Files by torch and by Megatron-Core are known, of any Python. Every file that it names lies beside it. OSError for
    one that cannot be read, ValueError for one that is damaged or no such file.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta  # takes a second

    size = path.stat().st_size
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"has {size} bytes, more than the {MAX_METADATA_BYTES} that are read")
    try:
        with limit_memory(size, MEMORY_PER_BYTE):
            data = read_foreign(path, MAX_METADATA_BYTES)
            fields = _fields(_Unpickler(data).load(), FORMS + "Metadata")
            stored = _require(dict, fields["state_dict_metadata"])
            entries = {_require(str, name): _entry(made) for name, made in stored.items()}
            stored_places = _require(dict, fields["storage_data"])
            places = {_index(index): _place(made) for index, made in stored_places.items()}
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files make pickle raise errors of many kinds
        raise ValueError(f"no metadata of tensors: {first_line(error)}") from None
    return Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta())


def _entry(made: object) -> "BytesStorageMetadata | TensorStorageMetadata":
    """Read the entry of one key."""
    from torch.distributed.checkpoint import metadata as forms

    if _name(made) == FORMS + "BytesStorageMetadata":
        return forms.BytesStorageMetadata()
    fields = _fields(made, FORMS + "TensorStorageMetadata")
    # the rest of the properties is deprecated
    dtype = DTYPES_BY_NAME[_name(_state(fields["properties"], FORMS + "TensorProperties", tuple)[0])]
    chunks = [_fields(chunk, FORMS + "ChunkStorageMetadata") for chunk in _require(list, fields["chunks"])]
    pieces = [forms.ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    return forms.TensorStorageMetadata(forms.TensorProperties(dtype=dtype), _size(fields["size"]), pieces)


def _index(made: object) -> "MetadataIndex":
    """Read which part of what is stored under a key is meant."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    fields = _fields(made, FORMS + "MetadataIndex")
    offset = fields.get("offset")
    index = fields.get("index")
    return MetadataIndex(
        _require(str, fields["fqn"]),
        None if offset is None else _size(offset),
        None if index is None else _number(index),
    )


def _place(made: object) -> "_StorageInfo":
    """The file and the bytes of a part. ValueError for a file that does not lie beside the metadata."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    fields = _fields(made, PLACE)
    name = _require(str, fields["relative_path"])
    if Path(name).name != name:
        raise ValueError(f"a tensor is said to be in {name!r}")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name} was written through a filter (transform_descriptors), which is not read here")
    return _StorageInfo(name, _number(fields["offset"]), _number(fields["length"]))


def _name(made: object) -> str:
    """The full name of the class that `made` is, or is an instance of; or what `made` is instead."""
    return str(getattr(made, "named", f"a {type(made).__name__}"))


def _state(made: object, full_name: str, kind: type[T]) -> T:
    """The state that a pickle sets of an instance of the class `full_name`. ValueError unless it is of this kind."""
    if _name(made) != full_name or not isinstance(made, Inert):
        raise ValueError(f"{_name(made)} in the place of {full_name}")
    return _require(kind, made.state)


def _fields(made: object, full_name: str) -> dict[str, object]:
    """The attributes of an instance of the dataclass `full_name`. ValueError for anything else."""
    return _state(made, full_name, dict)


def _size(made: object) -> torch.Size:
    """Sizes or offsets, one per dimension. ValueError for anything else."""
    if _name(made) != "torch.Size" or not isinstance(made, Inert):
        raise ValueError(f"{_name(made)} in the place of a size")
    [numbers] = made.arguments
    if not isinstance(numbers, (list, tuple)):
        raise ValueError(f"{_name(numbers)} in the place of a size's numbers")  # noqa: TRY004 - as of other damage
    return torch.Size([_number(number) for number in numbers])


def _number(made: object) -> int:
    """A number of elements or bytes. ValueError for anything else."""
    number = _require(int, made)
    if not 0 <= number < 2**63:
        raise ValueError("no size where one belongs")
    return number


def _require(kind: type[T], made: object) -> T:
    """`made`, which is of exactly this kind. ValueError if not."""
    if not isinstance(made, kind) or type(made) is not kind:
        raise ValueError(f"{_name(made)} in the place of a {kind.__name__}")
    return made
