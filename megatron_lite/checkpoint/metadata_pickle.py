"""Reads torch.distributed.checkpoint's .metadata file, a pickle, without unpickling it.

The opcodes are followed as data: a class or function that the file names becomes an `_Object`, which remembers what it
would be made from. Nothing is imported, called or assigned to. torch's Metadata is then made from values of checked types.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

# enough for 600,000 tensors
MAX_BYTES = 2**27
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
FORMS = "torch.distributed.checkpoint.metadata."
PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
# opcodes that push their argument, a constant, an empty collection; that make a tuple, or fill a collection, of so many
# of the last items, or None: of those behind the mark
PUSHES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
PUSHES |= {"BINBYTES", "SHORT_BINBYTES"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "FROZENSET": None}
FILLS = {"SETITEM": 2, "APPEND": 1, "SETITEMS": None, "APPENDS": None, "ADDITEMS": None}
IGNORED = {"PROTO", "FRAME", "STOP"}


@dataclass(eq=False)
class _Object:
    """What the file says of an object: the class or function that would make it, from what, and its state."""

    maker: Any
    arguments: Any = ()
    state: Any = None


class _Name(str):
    """The full name of a class or function that the file names."""


class _Pairs(list):
    """The keys and values of a dict in turn: hashing a key that holds itself many times over would take for ever."""


def read_metadata(path: Path) -> Metadata:
    """What the .metadata file at `path` says of tensors and bytes, and where they are; all else in it is left out.

    Files by torch and by Megatron-Core are known, of any Python and of protocol 4 or 5. Every file that it names lies
    beside it. OSError for one that cannot be read, ValueError for one that is damaged or no such file.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"has {path.stat().st_size} bytes, more than the {MAX_BYTES} that are read")
    try:
        return _Build().metadata(_follow(path.read_bytes()))
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no metadata of tensors: {error}") from None


def _follow(pickled: bytes):
    """What the opcodes would make, of _Object, _Name, _Pairs, list, tuple, and plain values."""
    stack, marks, memo = [], [], []

    def take(count: int | None) -> list:
        start = marks.pop() if count is None else len(stack) - count
        if start < 0:
            raise ValueError("a pickle that takes more than it put down")
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(pickled):
        name = opcode.name
        if name in PUSHES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            stack.append(_Pairs() if name == "EMPTY_DICT" else [])
        elif name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in TUPLES:
            stack.append(tuple(take(TUPLES[name])))
        elif name in FILLS:
            items = take(FILLS[name])
            stack[-1].extend(items)
        elif name == "STACK_GLOBAL":
            module, attribute = take(2)
            stack.append(_Name(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            maker, arguments = take(2)
            stack.append(_Object(maker, arguments))
        elif name == "BUILD":
            [state] = take(1)
            if not isinstance(stack[-1], _Object):
                raise ValueError("a pickle that gives a state to what is no object")
            stack[-1].state = state
        elif name not in IGNORED:
            raise ValueError(f"the pickle's opcode {name}, which has no place here")
    if len(stack) != 1:
        raise ValueError("a pickle that does not end with one object")
    return stack[0]


class _Build:
    """torch's Metadata from what `_follow` returned. What is referred to many times is converted once."""

    def __init__(self):
        self._converted = {}

    def metadata(self, made) -> Metadata:
        fields = self._fields(made, FORMS + "Metadata")
        entries = {_text(name): self._once(self._entry, entry) for name, entry in _items(fields["state_dict_metadata"])}
        places = {self._index(index): self._place(place) for index, place in _items(fields["storage_data"])}
        return Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta())

    def _once(self, convert: Callable, made):
        key = convert.__name__, id(made)
        if key not in self._converted:
            self._converted[key] = convert(made)
        return self._converted[key]

    def _entry(self, made) -> TensorStorageMetadata | BytesStorageMetadata:
        if _maker(made) == FORMS + "BytesStorageMetadata":
            return BytesStorageMetadata()
        fields = self._fields(made, FORMS + "TensorStorageMetadata")
        if _maker(fields["properties"]) != FORMS + "TensorProperties":
            raise ValueError("a tensor without properties")
        # the rest of its state is deprecated
        dtype = DTYPES[fields["properties"].state[0]]
        chunks = self._once(self._chunks, fields["chunks"])
        return TensorStorageMetadata(TensorProperties(dtype=dtype), self._size(fields["size"]), chunks)

    def _chunks(self, made) -> list[ChunkStorageMetadata]:
        chunks = (self._fields(chunk, FORMS + "ChunkStorageMetadata") for chunk in made)
        return [ChunkStorageMetadata(self._size(chunk["offsets"]), self._size(chunk["sizes"])) for chunk in chunks]

    def _index(self, made) -> MetadataIndex:
        fields = self._fields(made, FORMS + "MetadataIndex")
        offset, index = fields.get("offset"), fields.get("index")
        return MetadataIndex(
            _text(fields["fqn"]),
            None if offset is None else self._size(offset),
            None if index is None else _number(index),
        )

    def _place(self, made) -> _StorageInfo:
        fields = self._fields(made, PLACE)
        name = _text(fields["relative_path"])
        if Path(name).name != name:
            raise ValueError(f"a tensor is said to be in {name!r}")
        if fields.get("transform_descriptors"):
            raise ValueError(f"{name} was written through a filter (transform_descriptors), which is not read here")
        return _StorageInfo(name, _number(fields["offset"]), _number(fields["length"]))

    def _fields(self, made, full: str) -> dict[str, Any]:
        """The attributes of an instance of the dataclass `full`."""
        if _maker(made) != full:
            raise ValueError(f"{_maker(made)} in the place of {full}")
        return self._once(_attributes, made.state)

    def _size(self, made) -> torch.Size:
        if _maker(made) != "torch.Size":
            raise ValueError(f"{_maker(made)} in the place of a size")
        [numbers] = made.arguments
        return self._once(_dimensions, numbers)


def _attributes(made) -> dict[str, Any]:
    return {_text(name): value for name, value in _items(made)}


def _dimensions(made) -> torch.Size:
    return torch.Size([_number(number) for number in made])


def _items(made) -> list[tuple]:
    if not isinstance(made, _Pairs) or len(made) % 2:
        raise ValueError("no dict where one belongs")
    return list(zip(made[::2], made[1::2], strict=True))


def _maker(made) -> str:
    """The name of the class that `made` is an instance of, or what `made` is instead."""
    named = isinstance(made, _Object) and isinstance(made.maker, _Name)
    return str(made.maker) if named else f"a {type(made).__name__}"


def _number(made) -> int:
    if type(made) is not int or not 0 <= made < 2**63:
        raise ValueError("no size where one belongs")
    return made


def _text(made) -> str:
    if type(made) is not str:
        raise ValueError("no name where one belongs")
    return made
