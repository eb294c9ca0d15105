"""The safetensors format, against the library of that name, and with damage."""

import json

import pytest
import torch

from megatron_lite.convert.safetensors_file import SafetensorsFile, SafetensorsWriter
from megatron_lite.errors import CheckpointError


def write(path, tensors):
    first = next(iter(tensors.values()))
    writer = SafetensorsWriter(path, {name: tuple(t.shape) for name, t in tensors.items()}, first.dtype)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()
    return path


def some(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, 6, generator=generator).to(dtype)
    return {"b": numbers, "a.turned": numbers.T, "scalar": numbers[0, 0], "odd": numbers[0, :3]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_library_reads_what_is_written(dtype, tmp_path):
    library = pytest.importorskip("safetensors.torch", reason="the comparison needs safetensors")
    tensors = some(dtype)
    read = library.load_file(write(tmp_path / "x.safetensors", tensors))
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_what_the_library_writes_is_read(tmp_path):
    library = pytest.importorskip("safetensors.torch", reason="the comparison needs safetensors")
    tensors = {
        name: t.clone(memory_format=torch.contiguous_format)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
        for name, t in ((f"{dtype}{key}", value) for key, value in some(dtype).items())
    }
    tensors["empty"] = torch.zeros(0, 3)
    library.save_file(tensors, tmp_path / "x.safetensors", metadata={"a": "b"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.names() == tensors.keys()
    for name, tensor in tensors.items():
        assert file.tensor(name).dtype == tensor.dtype and torch.equal(file.tensor(name), tensor)


def test_tensors_at_odd_places_are_read(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}).encode()
    numbers = torch.tensor([1.5, -2.0])
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"?" + numbers.numpy().tobytes())
    read = SafetensorsFile(path).tensor("x")
    assert torch.equal(read, numbers) and read.data_ptr() % 4 == 0


def test_changing_what_was_read_leaves_the_file_alone(tmp_path):
    path = write(tmp_path / "x.safetensors", some())
    before = path.read_bytes()
    SafetensorsFile(path).tensor("b").zero_()
    assert path.read_bytes() == before


def test_the_writer_holds_its_caller_to_the_announcement(tmp_path):
    with pytest.raises(ValueError, match="b .* comes where .*a.* was announced"):
        SafetensorsWriter(tmp_path / "x", {"a": (2,), "b": (2,)}, torch.float32).add("b", torch.zeros(2))
    with pytest.raises(ValueError, match="torch.float16 comes where"):
        SafetensorsWriter(tmp_path / "x", {"a": (2,)}, torch.float32).add("a", torch.zeros(2, dtype=torch.float16))
    with pytest.raises(ValueError, match="a was announced and never came"):
        SafetensorsWriter(tmp_path / "x", {"a": (2,)}, torch.float32).close()


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            {"x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}},
            "x has the type F8_E4M3, which is not supported",
        ),
        ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "x does not lie within it"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "x does not lie within it"),
        ({"x": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, "x has no valid shape and place"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "x has no valid shape and place"),
        ({"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, ""),
        ({"x": 3}, ""),
        ([], ""),
        ({"x": {}}, ""),
    ],
)
def test_a_header_that_makes_no_sense_is_one_line(header, said, tmp_path):
    text = json.dumps(header).encode()
    damaged(tmp_path / "x", len(text).to_bytes(8, "little") + text + bytes(8), said)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_file_that_was_cut_short_is_one_line(keep, tmp_path):
    whole = write(tmp_path / "x.safetensors", some()).read_bytes()
    damaged(tmp_path / "x", whole[:keep], "")


def damaged(path, content: bytes, said: str):
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.startswith(f"--load-hf {path}: cannot be read (") and said in message
    assert message.endswith("; copy or download it again.") and "\n" not in message
