"""The .metadata of a checkpoint, a pickle: read as torch reads it, whoever wrote it, and no part of it is ever run."""

import argparse
import contextlib
import dataclasses
import enum
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.launch import run_script
from support.wording import wording
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_lite.checkpoint.megatron_dist import COMMON_FILE, DistFile
from megatron_lite.checkpoint.training_state import CheckpointRecord
from megatron_lite.checkpoint.unpickle import MAX_METADATA_BYTES, read_metadata
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import RECORD_FILE

TENSORS = {
    "random.0.weight": torch.ones(4, 3, dtype=torch.bfloat16),
    "random.0.step": torch.tensor(3.0),
    "random.0.n": torch.zeros(0, 2, dtype=torch.int64),
}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> Metadata:
    """As torch reads it: of tensors, one of them in two pieces on two ranks, and of an entry of bytes."""
    folder = tmp_path_factory.mktemp("dcp")
    dcp.save(TENSORS | {"extra": io.BytesIO(b"x")}, checkpoint_id=folder, no_dist=True)
    found = pickle.loads((folder / ".metadata").read_bytes())
    entry = found.state_dict_metadata["random.0.weight"]
    halves = [ChunkStorageMetadata(torch.Size([2 * rank, 0]), torch.Size([2, 3])) for rank in range(2)]
    found.state_dict_metadata["two"] = TensorStorageMetadata(entry.properties, entry.size, halves)
    for rank, half in enumerate(halves):
        found.storage_data[MetadataIndex("two", half.offsets, rank)] = _StorageInfo(f"__{rank}_0.distcp", 10, 20)
    return found


class WithGetattr(pickle.Pickler):
    """Pickles enums as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def pickled(value, pickler=pickle.Pickler, protocol=4) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol).dump(value)
    return file.getvalue()


@pytest.mark.parametrize(
    "pickler, protocol", [(pickle.Pickler, 4), (pickle.Pickler, 5), (WithGetattr, 4), (pickle._Pickler, 4)]
)
def test_it_is_read_as_torch_reads_it(metadata, tmp_path, pickler, protocol):
    path = tmp_path / ".metadata"
    path.write_bytes(pickled(metadata, pickler, protocol))
    assert b"getattr" in path.read_bytes() or pickler is not WithGetattr
    found = read_metadata(path)
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.storage_data == metadata.storage_data


def test_values_are_checked(metadata, tmp_path):
    """Whatever torch would have taken."""
    path, key = tmp_path / ".metadata", MetadataIndex("two", torch.Size([2, 0]), 1)
    for changes, said in (
        ({"relative_path": "../other"}, "said to be in '../other'"),
        ({"relative_path": 3}, "a int in the place of a str"),
        ({"transform_descriptors": ["zstd"]}, "written through a filter"),
        ({"offset": -1}, "no size where one belongs"),
        ({"length": "x"}, "a str in the place of a int"),
    ):
        place = dataclasses.replace(metadata.storage_data[key], **changes)
        path.write_bytes(pickled(dataclasses.replace(metadata, storage_data=metadata.storage_data | {key: place})))
        with pytest.raises(ValueError, match=said):
            read_metadata(path)
    for size in ((2, 3), "two"):
        entry = dataclasses.replace(metadata.state_dict_metadata["two"], size=size)
        path.write_bytes(pickled(dataclasses.replace(metadata, state_dict_metadata={"two": entry})))
        with pytest.raises(ValueError, match="in the place of a size"):
            read_metadata(path)
    with open(path, "r+b") as file:
        file.truncate(MAX_METADATA_BYTES + 1)
    with pytest.raises(ValueError, match="more than the .* that are read"):
        read_metadata(path)


# --- hostile files


def name(module: str, attribute: str) -> bytes:
    """Opcodes that push a class or function."""
    return text(module) + text(attribute) + b"\x93"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


POISON = (
    name("pathlib", "PosixPath") + b"N}" + text("_str") + text("/victim") + b"s\x86b0"
)  # POP: the rest may be sound
POISONED = (POISON + b"}.", "argument")
HOSTILE = {  # after the opcode of the protocol: what is said of it
    "a class gets an attribute": POISONED,
    "an object gets an attribute": (
        name("pathlib", "PosixPath") + b")\x81N}" + text("_str") + text("/victim") + b"s\x86b.",
        "pathlib.PosixPath in the place of",
    ),
    "a call": (name("os", "mkdir") + text("MARK") + b"\x85R.", "os.mkdir in the place of"),
    "a call of getattr": (
        name("builtins", "getattr") + name("pathlib", "PosixPath") + text("unlink") + b"\x86R.",
        "builtins.getattr in the place of",
    ),
    "an old form of a name": (b"cos\nsystem\n" + text("touch MARK") + b"\x85R.", "os.system in the place of"),
    "an instance": (b"(" + text("touch MARK") + b"ios\nsystem\n.", "os.system in the place of"),
    "an object elsewhere": (text("x") + b"Q.", "outside of itself"),
    "a registered class": (b"\x82\x01.", "unregistered extension"),
    "a memo of 16 GiB": (b"]r\xff\xff\xff\x3f.", "far more memory"),
    "a long text": (b"\x8d" + struct.pack("<Q", 2**60) + b".", "cannot be read"),
    "a long byte array": (b"\x96" + struct.pack("<Q", 2**35) + b".", "cannot be read"),
    "a long number": (b"\x8b" + struct.pack("<i", 2**30) + b".", "truncated"),
    "more taken than put down": (b"\x86.", "underflow"),
    "nothing": (b".", "underflow"),
    "a cut": (b"(K\x01", "truncated"),
}
READ_ALL = """
import json, resource, sys
from pathlib import Path
from megatron_lite.checkpoint.megatron_dist import COMMON_FILE, DistFile
from megatron_lite.errors import CheckpointError
room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**28
resource.setrlimit(resource.RLIMIT_AS, (room, room))
said = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        said[folder.name] = f"read {DistFile(folder).names()}"
    except CheckpointError as error:
        said[folder.name] = str(error)
print(json.dumps([said, str(Path("/harmless"))]))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of nothing but random states, whose names are their keys."""
    folder = tmp_path_factory.mktemp("saved")
    dcp.save(TENSORS, checkpoint_id=folder, no_dist=True)
    torch.save({"args": argparse.Namespace()}, folder / COMMON_FILE)
    (folder / RECORD_FILE).write_text(CheckpointRecord(iteration=1, consumed=1, shape={}, precision="fp32").to_json())
    return folder


def test_a_hostile_file_ends_in_one_line_and_does_nothing(saved, tmp_path):
    """In a process with room for 256 MiB; also a sound file after a poisonous beginning."""
    folder = tmp_path / "hostile"
    sound = (saved / ".metadata").read_bytes()[11:]  # without the opcodes of protocol and frame
    for title, (opcodes, _) in (HOSTILE | {"poison": (POISON + sound, POISONED[1])}).items():
        shutil.copytree(saved, folder / title)
        (folder / title / ".metadata").write_bytes(b"\x80\x04" + opcodes)
    said, path = json.loads(run_script(READ_ALL, folder))
    for title, line in said.items():
        assert (
            line.startswith("--load ") and wording("checkpoint/metadata-cannot-be-read") in line and "\n" not in line
        ), line
        assert HOSTILE.get(title, POISONED)[1] in line, line
    assert path == "/harmless" and {path.name for path in folder.iterdir()} == {*HOSTILE, "poison"}


class Bomb:
    def __reduce__(self):
        return (bytearray, (2**31,))  # which the kernel grants at once where nothing limits it


def test_a_tensor_cannot_ask_for_gigabytes(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    folder, piece = Path(shutil.copytree(saved, tmp_path / "saved")), io.BytesIO()
    torch.save(Bomb(), piece)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(piece.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes(piece.getvalue())
    with pytest.raises(CheckpointError, match="cannot be read .MemoryError."):
        DistFile(folder).read_into({"random.0.step": torch.zeros(())})


@contextlib.contextmanager
def watched():
    """Events of Python's audit while the block runs. A hook cannot be taken away; it must not keep tensors of other tests."""
    done, watching = [], [True]
    sys.addaudithook(lambda event, details: done.append((event, details)) if watching else None)
    try:
        yield done
    finally:
        watching.clear()


def test_damage_touches_nothing_and_never_makes_a_traceback(saved, tmp_path):
    """Whatever is changed in a sound file: only the checkpoint's own files are opened, and nothing else is done."""
    folder, chance = Path(shutil.copytree(saved, tmp_path / "saved")), random.Random(1)
    sound, read = (saved / ".metadata").read_bytes(), 0
    targets = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    DistFile(folder).read_into(targets)  # what is imported at the first call is
    with watched() as done:
        for _ in range(400):
            damaged = bytearray(sound)
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(11, len(damaged))
                pieces = [
                    bytes([chance.randrange(256)]),
                    name("os", "system"),
                    b"R",
                    b"b",
                    b"\x81",
                    POISON,
                    b"h\x03",
                    b"",
                ]
                damaged[at : at + chance.randrange(2)] = chance.choice(pieces)
            (folder / ".metadata").write_bytes(damaged)
            done.clear()
            try:
                DistFile(folder).read_into(dict(targets))
                read += 1
            except CheckpointError as error:
                assert "\n" not in str(error)
            opened = {str(details[0]) for event, details in done if event == "open"} - {"/proc/self/statm"}
            # torch formats the traceback of its error, for which Python opens sources
            opened = {Path(path) for path in opened if not path.endswith(".py")}
            assert all(folder in (path, path.parent) for path in opened), opened
            acts = {event for event, _ in done} - {"open", "os.listdir", "os.scandir"}
            assert not {act for act in acts if act.startswith(("os.", "shutil.", "subprocess.", "socket."))}, acts
            assert "pickle.find_class" not in acts
    assert 0 < read < 400, "both ways are tried"
