"""safetensors files: what is written tensor by tensor, and files that are damaged or hostile."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.wording import wording

from megatron_lite.convert.weights_folder import SafetensorsFile, write_safetensors
from megatron_lite.errors import CheckpointError


def write(path, tensors):
    first = next(iter(tensors.values()))
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(path, sizes, first.dtype, iter(tensors.values()))
    return path


def some(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(5, 6, generator=generator).to(dtype)
    return {"b": numbers, "a.turned": numbers.T, "scalar": numbers[0, 0], "odd": numbers[0, :3]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_library_reads_what_is_written(dtype, tmp_path):
    tensors = some(dtype)
    read = load_file(write(tmp_path / "x.safetensors", tensors))
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_changing_what_was_read_leaves_the_file_alone(tmp_path):
    path = write(tmp_path / "x.safetensors", some())
    before = path.read_bytes()
    SafetensorsFile(path).tensor("b").zero_()
    assert path.read_bytes() == before


def test_the_writer_holds_its_caller_to_the_announcement(tmp_path):
    sizes = {"a": (2,), "b": (2,)}
    for tensors in ([torch.zeros(2)], [torch.zeros(2)] * 3):
        with pytest.raises(ValueError):
            write_safetensors(tmp_path / "x", sizes, torch.float32, tensors)


NONSENSE = [  # headers, and what is said of them
    (
        {"x": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}},
        "x has the type F8_E4M3, which is not supported",
    ),
    ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, ""),
    ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, ""),
    ({"x": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, ""),
    ({"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, ""),
    ({"x": 3}, ""),
    ([], ""),
]


def test_a_file_that_makes_no_sense_or_was_cut_short_is_one_line(tmp_path):
    path = tmp_path / "x"
    for header, said in NONSENSE:
        text = json.dumps(header).encode()
        damaged(path, len(text).to_bytes(8, "little") + text + bytes(8), said)
    for length in (2**27, 2**60, 2**64 - 1):  # a header that claims to be huge
        damaged(path, length.to_bytes(8, "little") + b"{" * 1000)
    whole = write(tmp_path / "whole", some()).read_bytes()
    for keep in (0, 4, 8, 100, -1):
        damaged(path, whole[:keep])


def damaged(path, content: bytes, said: str = ""):
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.startswith(wording("convert/cannot-be-read", "--load-hf", path)) and said in message
    assert message.endswith(wording("convert/copy-or-download-it")) and "\n" not in message
