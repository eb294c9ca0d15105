"""Reads pickles without running code that they name: files of torch.save, and torch.distributed.checkpoint's .metadata.

torch's restricted unpickler builds tensors and plain containers. A class that a file names becomes an Inert, which
keeps what the file says about the object. In a file of torch.save that must be a class of a known training program; any
other is refused by name. In .metadata every class and function is an Inert, and torch's Metadata is made from checked
values.
"""

import argparse
import contextlib
import tarfile
from io import BytesIO
from pathlib import Path

import torch

from megatron_lite.errors import CheckpointError, first_line
from megatron_lite.pickle_bounds import BoundedUnpickler, check_pickle
from megatron_lite.process_state import limit_memory
from megatron_lite.shared_files import open_foreign, read_foreign

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

    def __new__(cls, *arguments):
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __init__(self, *arguments):
        """Everything is kept by __new__, which pickles may call alone."""

    def __setstate__(self, state):
        self.state = state

    def __repr__(self) -> str:
        # arguments may lie in each other without end
        return self.named


def load(path: Path) -> dict:
    """The dict that torch.save wrote to `path`; its tensors stay in the file until they are used.

    Raises CheckpointError for a file that is damaged, names a class outside PACKAGES and CLASSES, or holds no dict.
    """
    state = load_object(path, path)
    if not isinstance(state, dict):
        raise CheckpointError(f"--load {path}: holds a {type(state).__name__}, not a checkpoint; check the file.")
    return state


MAX_PICKLE_BYTES = 2**27  # without its tensors
LEGACY_PICKLES = 5  # before the tensors, in a file by a torch older than 1.6


def check_file(source: Path | BytesIO):
    """Whether torch will come to an end with a file of torch.save.

    OSError for what is no regular file, pickle's errors for a damaged one, ValueError for one that is refused.
    """
    with open_foreign(source) if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        if torch.serialization._is_zipfile(file):
            file.seek(0)
            data = torch._C.PyTorchFileReader(file).get_record("data.pkl")
            if len(data) > MAX_PICKLE_BYTES:
                raise ValueError(f"its pickle has {len(data)} bytes, more than the {MAX_PICKLE_BYTES} that are read")
            check_pickle(data)
            return
        file.seek(0)
        if tarfile.is_tarfile(file):
            raise ValueError("it is a tar file, which torch before 0.4 wrote")
        file.seek(0)
        data, at = file.read(), 0
        for _ in range(LEGACY_PICKLES):
            at = check_pickle(data, at)


def load_object(path: Path, source: Path | BytesIO):
    """What torch.save wrote to `source`: `path` itself, or bytes from beside it.

    Raises CheckpointError as `load` does.
    """
    try:
        with limit_memory(path.stat().st_size if source is path else len(source.getbuffer())):
            check_file(source)
            if source is not path:
                source.seek(0)
            named = torch.serialization.get_unsafe_globals_in_checkpoint(source)
            harmless = [name for name in named if name in CLASSES or name.partition(".")[0] in PACKAGES]
            refused = sorted(set(named) - {*harmless, "argparse.Namespace"})
            if refused:
                raise CheckpointError(
                    f"--load {path}: names {refused[0]}, which is neither data nor a class of a known training "
                    "program, and reading it might run its code; load a file that you trust, without it."
                )
            if source is not path:
                source.seek(0)
            with torch.serialization.safe_globals([argparse.Namespace, *((Inert, name) for name in harmless)]):
                return torch.load(source, map_location="cpu", weights_only=True, mmap=source is path)
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
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _Unpickler(BoundedUnpickler):
    """Pickles can call only what this returns, and set attributes of that: both end in an Inert's own methods."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> type[Inert]:
        full = f"{module}.{name}"
        return self._classes.setdefault(full, type("Inert", (Inert,), {"named": full}))


def read_metadata(path: Path):
    """torch's Metadata: what the .metadata file at `path` says of tensors and bytes, and where they are; all else in it
    is left out.

    Files by torch and by Megatron-Core are known, of any Python. Every file that it names lies beside it. OSError for
    one that cannot be read, ValueError for one that is damaged or no such file.
    """
    import torch.distributed.checkpoint as dcp  # takes a second

    size = path.stat().st_size
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"has {size} bytes, more than the {MAX_METADATA_BYTES} that are read")
    try:
        with limit_memory(size, MEMORY_PER_BYTE):
            data = read_foreign(path, MAX_METADATA_BYTES)
            fields = _fields(_Unpickler(data).load(), FORMS + "Metadata")
            entries = {_require(str, name): _entry(made) for name, made in fields["state_dict_metadata"].items()}
            places = {_index(index): _place(made) for index, made in fields["storage_data"].items()}
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged files make pickle raise errors of many kinds
        raise ValueError(f"no metadata of tensors: {first_line(error)}") from None
    return dcp.Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=dcp.metadata.StorageMeta())


def _entry(made):
    from torch.distributed.checkpoint import metadata as forms

    if _name(made) == FORMS + "BytesStorageMetadata":
        return forms.BytesStorageMetadata()
    fields = _fields(made, FORMS + "TensorStorageMetadata")
    # the rest of the properties is deprecated
    dtype = DTYPES[_name(_state(fields["properties"], FORMS + "TensorProperties", tuple)[0])]
    chunks = [_fields(chunk, FORMS + "ChunkStorageMetadata") for chunk in _require(list, fields["chunks"])]
    pieces = [forms.ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    return forms.TensorStorageMetadata(forms.TensorProperties(dtype=dtype), _size(fields["size"]), pieces)


def _index(made):
    from torch.distributed.checkpoint.metadata import MetadataIndex

    fields = _fields(made, FORMS + "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    offset = None if offset is None else _size(offset)
    return MetadataIndex(_require(str, fields["fqn"]), offset, None if index is None else _number(index))


def _place(made):
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    fields = _fields(made, PLACE)
    name = _require(str, fields["relative_path"])
    if Path(name).name != name:
        raise ValueError(f"a tensor is said to be in {name!r}")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name} was written through a filter (transform_descriptors), which is not read here")
    return _StorageInfo(name, _number(fields["offset"]), _number(fields["length"]))


def _name(made) -> str:
    """The full name of the class that `made` is, or is an instance of; or what `made` is instead."""
    return str(getattr(made, "named", f"a {type(made).__name__}"))


def _state(made, full_name: str, kind: type):
    if _name(made) != full_name or not isinstance(made, Inert):
        raise ValueError(f"{_name(made)} in the place of {full_name}")
    return _require(kind, made.state)


def _fields(made, full_name: str) -> dict:
    """The attributes of an instance of a dataclass."""
    return _state(made, full_name, dict)


def _size(made) -> torch.Size:
    if _name(made) != "torch.Size":
        raise ValueError(f"{_name(made)} in the place of a size")
    [numbers] = made.arguments
    return torch.Size([_number(number) for number in numbers])


def _number(made) -> int:
    if not 0 <= _require(int, made) < 2**63:
        raise ValueError("no size where one belongs")
    return made


def _require(kind: type, made):
    if type(made) is not kind:
        raise ValueError(f"{_name(made)} in the place of a {kind.__name__}")
    return made
