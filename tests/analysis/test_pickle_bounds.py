"""Pickles that would never end, or overflow the stack of C, are refused by every reader; others read as before."""

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from megatron_lite.analysis.memory.snapshot_file import read_values
from megatron_lite.checkpoint import unpickle
from megatron_lite.errors import CheckpointError, UserError
from megatron_lite.pickle_bounds import BoundedUnpickler, PickleBoundError, check_pickle

MANY = 20_000


def key(made: bytes) -> bytes:
    """A pickle of a dict with this key."""
    return b"\x80\x02}" + made + b"Ns."


HOSTILE = {
    "a tuple of twice the same, 60 times": key(b"K\x01" + b"2\x86" * 60),
    "the same through the memo": key(b"K\x01" + b"q\x00h\x00\x86" * 60),
    "the same with marks": key(b"K\x01q\x00" + b"0(h\x00h\x00h\x00tq\x00" * 40),
    "three long tuples": key(b"K\x01q\x00" + (b"0(" + b"h\x00" * MANY + b"tq\x00") * 3),
    "a tuple in a tuple, 300,000 times": key(b"N" + b"\x85" * 300_000),
    "in a frame": b"\x80\x04\x95" + (130).to_bytes(8, "little") + b"}K\x01" + b"2\x86" * 63 + b"Ns.",
    "integers of one place": b"\x80\x02}("
    + b"".join(b"\x8a\x0b" + (number * (2**61 - 1)).to_bytes(11, "little") + b"N" for number in range(1, MANY))
    + b"u.",
}
SOUND = (
    {"a": [1, 2.5, (1, 2), None, True, 2**63, -5, "x" * 300, b"y" * 300] * 40},
    {(number, (number, "x")): [number] for number in range(1000)},
    [tuple(range(1000)) for _ in range(50)],
    [2**64 - 1, -(2**63), 2**100],
    [[[[[]]]]],
)


class Plain(BoundedUnpickler):
    def find_class(self, module, name):
        assert module == "_codecs", module  # of bytes in old protocols
        return super().find_class(module, name)


def save_with_pickle(path: Path, content: bytes) -> Path:
    """A file of torch.save with another pickle in it."""
    torch.save({"a": torch.ones(3)}, path.with_suffix(".whole"))
    with zipfile.ZipFile(path.with_suffix(".whole")) as whole, zipfile.ZipFile(path, "w") as made:
        for info in whole.infolist():
            made.writestr(info, content if info.filename.endswith("/data.pkl") else whole.read(info))
    return path


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_each_reader_refuses_what_would_not_end(content, tmp_path):
    with pytest.raises(PickleBoundError):
        check_pickle(content)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="no metadata of tensors"):
        unpickle.read_metadata(tmp_path / ".metadata")
    with pytest.raises(CheckpointError, match="PickleBoundError"):
        unpickle.load(save_with_pickle(tmp_path / "a.pt", content))
    (tmp_path / "a.pickle").write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_values(tmp_path / "a.pickle")
    assert len(refused.value.lines) == 1


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", SOUND)
def test_what_costs_little_is_read_as_pickle_reads_it(value, protocol):
    content = pickle.dumps(value, protocol)
    reader = Plain(b"before" + content + b"behind", len(b"before"))
    assert reader.end == len(b"before") + len(content)
    assert reader.load() == value
    assert check_pickle(content) == len(content)


def test_calls_are_given_no_more_than_the_size_explains():
    """OrderedDict(the same list), again and again."""
    items = b"(" + b"K\x01K\x02\x86" * MANY + b"lq\x00"
    content = b"\x80\x02" + items + (b"ccollections\nOrderedDict\nh\x00\x85R0") * MANY + b"."
    with pytest.raises(PickleBoundError):
        check_pickle(content)


def test_files_of_an_old_torch_are_checked_too(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    unpickle.check_file(tmp_path / "old.bin")
    content = (tmp_path / "old.bin").read_bytes()
    (tmp_path / "hostile.bin").write_bytes(HOSTILE["a tuple in a tuple, 300,000 times"] + content)
    with pytest.raises(PickleBoundError):
        unpickle.check_file(tmp_path / "hostile.bin")
