"""Hostile, damaged and strange snapshot files: one clear line each, and nothing of them is executed."""

import os
import pickle
import random
import struct

import pytest
from memory_maker import training, write

from megatron_lite.analysis.memory.read import read_snapshot
from megatron_lite.errors import UserError


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        read_snapshot(path)
    [line] = caught.value.lines
    assert "\n" not in line and line.isprintable() and str(path) in line and len(line) < 600
    return line


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_is_run(tmp_path, protocol):
    mark = tmp_path / "mark"
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [Calls(os.mkdir, str(mark))]}, protocol=protocol))
    assert "names " in refusal(path) and "holds plain values only" in refusal(path) and not mark.exists()


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x02cos\nsystem\nU\x04truetR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"(ios\nsystem\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02cbuiltins\neval\n)\x81.",
    ],
)
def test_every_opcode_that_names_code_is_refused(tmp_path, opcodes):
    path = tmp_path / "s.pickle"
    path.write_bytes(opcodes)
    refusal(path)


def test_objects_elsewhere_are_refused(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(b"\x80\x02X\x01\x00\x00\x00aQ.")
    assert "refers to objects outside of itself" in refusal(path)


@pytest.mark.parametrize(
    "opcodes",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 2**60),
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"a",
        b"\x80\x05\x96" + struct.pack("<Q", 2**61),
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x02]r\xff\xff\xff\x3f.",
    ],
    ids=["text", "bytes", "bytearray", "memo of 64 GiB", "memo of 16 GiB"],
)
def test_a_few_bytes_cannot_ask_for_gigabytes(tmp_path, opcodes):
    path = tmp_path / "s.pickle"
    path.write_bytes(opcodes)
    assert "damaged" in refusal(path) or "is no memory snapshot" in refusal(path)


def test_every_cut_is_one_line(tmp_path):
    whole = pickle.dumps(training().data(), protocol=4)
    path = tmp_path / "s.pickle"
    for end in [0, 1, 2, *range(10, len(whole), len(whole) // 40)]:
        path.write_bytes(whole[:end])
        assert "cut short or damaged" in refusal(path)


def test_damage_never_makes_a_traceback(tmp_path):
    whole, chance, path = pickle.dumps(training().data(), protocol=4), random.Random(1), tmp_path / "s.pickle"
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read_snapshot(path)
        except UserError:
            refused += 1
    assert refused > 50


def change(data, what):
    trace, segment = data["device_traces"][0], data["segments"][0]
    match what:
        case "no dict":
            return ["a", 1]
        case "nothing":
            return {"segments": [], "device_traces": []}
        case "segments is text":
            data["segments"] = "none"
        case "no segments":
            del data["segments"]
        case "event is text":
            trace[3] = "alloc"
        case "address is text":
            trace[3]["addr"] = "0x7f"
        case "size is NaN":
            trace[3]["size"] = float("nan")
        case "size is negative":
            trace[3]["size"] = -1
        case "size is huge":
            trace[3]["size"] = 2**70
        case "frames are numbers":
            trace[3]["frames"] = [1, 2]
        case "blocks are none":
            segment["blocks"] = None
        case "device is text":
            segment["device"] = "gpu"
        case "annotation lacks a time":
            data["external_annotations"] = [{"stage": "START", "name": "forward"}]
        case "tag is a list":
            trace[3]["user_metadata"] = []
    return data


@pytest.mark.parametrize(
    "what",
    [
        "no dict",
        "nothing",
        "segments is text",
        "no segments",
        "event is text",
        "address is text",
        "size is NaN",
        "size is negative",
        "size is huge",
        "frames are numbers",
        "blocks are none",
        "device is text",
        "annotation lacks a time",
        "tag is a list",
    ],
)
def test_values_that_are_no_snapshot(tmp_path, what):
    assert "is no memory snapshot" in refusal(write(change(training().data(), what), tmp_path / "s.pickle"))


def test_control_characters_and_markup_do_not_reach_the_terminal(tmp_path):
    made = training()
    made.alloc(2**30, [{"filename": "/x/\x1b[31m.py", "line": 3, "name": "<script>\n\x07"}], "step 1/forward/\x1b]0;x")
    found = read_snapshot(made.write(tmp_path / "s.pickle"))
    assert all(f"{site.site}{site.module}{site.phase}".isprintable() for site in found.sites)


def test_a_missing_file(tmp_path):
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "none.pickle")
