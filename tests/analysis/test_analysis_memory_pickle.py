"""Hostile, damaged and strange snapshot files: one clear line each, and nothing of them is executed."""

import os
import pickle
import random
import struct

import pytest
from support.snapshot_maker import training, write
from support.wording import wording

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
    assert (
        "names " in refusal(path) and wording("analysis/holds-plain-values-only") in refusal(path) and not mark.exists()
    )


@pytest.mark.parametrize(
    ("opcodes", "words"),
    [
        (b"\x80\x02cos\nsystem\nU\x04truetR.", "names "),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "names "),
        (b"(ios\nsystem\n.", "names "),
        (b"\x80\x02\x82\x01.", "cannot be read as a snapshot"),  # of a registry of code
        (b"\x80\x02cbuiltins\neval\n)\x81.", "names "),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "refers to objects outside of itself"),
        # a few bytes that ask for gigabytes: of text, bytes, bytearray, and memos of 64 and 16 GiB
        (b"\x80\x04\x8d" + struct.pack("<Q", 2**60), ""),
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"a", ""),
        (b"\x80\x05\x96" + struct.pack("<Q", 2**61), ""),
        (b"\x80\x02]r\xff\xff\xff\xff.", ""),
        (b"\x80\x02]r\xff\xff\xff\x3f.", ""),
    ],
)
def test_opcodes_that_name_code_or_ask_for_much_are_refused(tmp_path, opcodes, words):
    path = tmp_path / "s.pickle"
    path.write_bytes(opcodes)
    assert words in refusal(path)


def test_every_cut_is_one_line(tmp_path):
    whole = pickle.dumps(training().data(), protocol=4)
    path = tmp_path / "s.pickle"
    for end in [0, 1, 2, *range(10, len(whole), len(whole) // 40)]:
        path.write_bytes(whole[:end])
        assert wording("analysis/ends-before-its-data") in refusal(path)


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


def of_event(**fields):
    """A snapshot with one event changed."""

    def change(data):
        data["device_traces"][0][3] |= fields
        return data

    return change


WRONG = {
    "no dict": lambda data: ["a", 1],
    "nothing": lambda data: {"segments": [], "device_traces": []},
    "segments is text": lambda data: data | {"segments": "none"},
    "no segments": lambda data: {"device_traces": data["device_traces"]},
    "blocks are none": lambda data: data | {"segments": [data["segments"][0] | {"blocks": None}]},
    "device is text": lambda data: data | {"segments": [data["segments"][0] | {"device": "gpu"}]},
    "annotation lacks a time": lambda data: data | {"external_annotations": [{"stage": "START", "name": "forward"}]},
    "event is text": lambda data: data | {"device_traces": [["alloc"]]},
    "address is text": of_event(addr="0x7f"),
    "size is NaN": of_event(size=float("nan")),
    "size is negative": of_event(size=-1),
    "size is huge": of_event(size=2**70),
    "frames are numbers": of_event(frames=[1, 2]),
    "tag is a list": of_event(user_metadata=[]),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_that_are_no_snapshot(tmp_path, what):
    assert wording("analysis/is-no-memory-snapshot") in refusal(
        write(WRONG[what](training().data()), tmp_path / "s.pickle")
    )


def test_control_characters_and_markup_do_not_reach_the_terminal(tmp_path):
    made = training()
    stack = [{"filename": "/x/\x1b[31m.py", "line": 3, "name": "<script>\n\x07"}]
    made.alloc(2**30, "step 1/forward/\x1b]0;x", stack)
    found = read_snapshot(made.write(tmp_path))
    assert all(f"{site.site}{site.module}{site.phase}".isprintable() for site in found.sites)


def test_a_missing_file(tmp_path):
    assert wording("analysis/cannot-be-read-no") in refusal(tmp_path / "none.pickle")
