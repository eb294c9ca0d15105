"""Every form in which people keep memory snapshots is read, and gives the same figures as the pickle."""

import bz2
import gzip
import json
import lzma
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from support.snapshot_maker import forward_stack, training, write
from support.trace_maker import gpu_run
from support.wording import wording
from torch.cuda import _memory_viz

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.discover import discover_sources, look_at
from megatron_lite.analysis.memory.read import read_snapshot
from megatron_lite.errors import UserError
from megatron_lite.units import MIB

PEAK = 29 * MIB


def dump_json(data, path: Path, **options):
    path.write_text(json.dumps(data, **options))


def dump_with(protocol):
    return lambda data, path: path.write_bytes(pickle.dumps(data, protocol=protocol))


def packed(pack):
    return lambda data, path: path.write_bytes(pack(pickle.dumps(data, protocol=4)))


def zip_of_json(data, path: Path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("readme.txt", "a snapshot")
        archive.writestr("snapshot.json", json.dumps(data))


def legacy_torch(data, path: Path):
    torch.save(data, path, _use_new_zipfile_serialization=False)


def page(data, path: Path):
    path.write_text(_memory_viz.trace_plot(data))


FORMS = {
    **{f"protocol{number}.pickle": dump_with(number) for number in range(6)},
    "packed.pickle.gz": packed(gzip.compress),
    "packed.pkl.bz2": packed(bz2.compress),
    "packed.pickle.xz": packed(lzma.compress),
    "plain.json": dump_json,
    "sorted.json": lambda data, path: dump_json(data, path, sort_keys=True),
    "indented.json": lambda data, path: dump_json(data, path, indent=2, sort_keys=True),
    "sorted.json.gz": lambda data, path: path.write_bytes(gzip.compress(json.dumps(data, sort_keys=True).encode())),
    "saved.pt": lambda data, path: torch.save(data, path),
    "legacy.pt": legacy_torch,
    "packed.zip": zip_of_json,
    "wrapped.pickle": lambda data, path: write({"step": 3, "memory": {"snapshot": data}}, path),
    "wrapped.json": lambda data, path: dump_json({"rank": 0, "snapshot": data}, path),
    "ordered.pickle": lambda data, path: path.write_bytes(pickle.dumps(__import__("collections").OrderedDict(data))),
    "page.html": page,
    "renamed.bin": lambda data, path: write(data, path),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_that_the_user_names(tmp_path, name):
    path = tmp_path / name
    FORMS[name](training().data(), path)
    assert discover_sources([path]).snapshots == (path,)
    [found] = analyze([path]).facts.snapshots
    assert (found.peak_bytes, found.events) == (PEAK, len(training().data()["device_traces"][0]))
    assert found.sites == read_snapshot(write(training().data(), tmp_path / "as_ever.pickle")).sites


@pytest.mark.parametrize("name", [name for name in FORMS if name != "renamed.bin"])
def test_a_form_that_lies_in_a_folder(tmp_path, name):
    path = tmp_path / name
    FORMS[name](training().data(), path)
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    found = discover_sources([tmp_path])
    assert (found.snapshots, found.ignored) == ((path,), ())


@pytest.mark.parametrize("ending", ["pickle", "pickle.gz", "json"])
def test_a_list_of_segments(tmp_path, ending):
    """torch.cuda.memory_snapshot() of torch 2.0 and before, and of today."""
    history = [{"addr": 5, "real_size": MIB + 1, "frames": forward_stack(8)}]
    old = {"size": 2 * MIB, "state": "active_allocated", "history": history}
    new = {
        "address": 2**30,
        "size": MIB,
        "requested_size": MIB,
        "state": "active_allocated",
        "frames": forward_stack(9),
    }
    sizes = {"device": 0, "total_size": 2 * MIB, "active_size": 2 * MIB, "stream": 0}
    segments = [sizes | {"address": 5, "blocks": [old]}, sizes | {"address": 2**30, "blocks": [new]}]
    path = tmp_path / f"list.{ending}"
    text = json.dumps(segments, sort_keys=True).encode() if ending == "json" else pickle.dumps(segments, protocol=4)
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    [found] = analyze([path]).facts.snapshots
    assert found.peak_bytes == 2 * MIB + 512 and found.sites[0].site == "model.py:8 forward"


def test_of_several_snapshots_in_a_file_the_one_with_the_failed_request(tmp_path):
    failed = training()
    failed.out_of_memory(7 * MIB, 5 * MIB, forward_stack(13))
    path = write({"before": training(layers=9).data(), "after": failed.data()}, tmp_path / "two.pickle")
    found = read_snapshot(path)
    assert found.oom is not None and wording("analysis/file-holds-snapshots-number", 2, 2) in found.notes[0]
    path = write([training().data(), training(layers=9).data()], tmp_path / "two.pickle")
    assert "number 1 is shown" in read_snapshot(path).notes[0], "as many bytes: the first"


def test_zstd(tmp_path):
    """Unpacked where this Python can, else named."""
    path = tmp_path / "s.pickle.zst"
    try:
        import zstandard
    except ImportError:
        path.write_bytes(b"\x28\xb5\x2f\xfdxxxx")
        with pytest.raises(UserError, match="packed with zstd|damaged zstd"):
            analyze([path])
        return
    path.write_bytes(zstandard.compress(pickle.dumps(training().data(), protocol=4)))
    assert read_snapshot(path).peak_bytes == PEAK


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, pack):
    path = tmp_path / "s.pickle.x"
    path.write_bytes(pack(b"\x80\x04" + bytes(2**27)))
    with pytest.raises(UserError, match="unpacks to more than"):
        read_snapshot(path)


@pytest.mark.parametrize("name", ["packed.pickle.gz", "packed.pkl.bz2", "packed.pickle.xz", "saved.pt", "packed.zip"])
def test_cuts_and_damage_of_packed_files_are_one_line(tmp_path, name):
    path = tmp_path / name
    FORMS[name](training().data(), path)
    whole = path.read_bytes()
    for end in range(8, len(whole), max(len(whole) // 12, 1)):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError) as caught:
            analyze([path])
        assert "\n" not in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("data", [{"segments": 3, "phones": []}, {"a": [1, 2]}, [{"a": 1}], {"size": [1]}])
def test_other_json_is_no_snapshot(tmp_path, data):
    path = tmp_path / "other.json"
    dump_json(data, path)
    with pytest.raises(UserError, match="JSON, but no trace"):
        analyze([path])


def test_a_packed_trace_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "trace.json.xz"
    path.write_bytes(lzma.compress(b'{"schemaVersion": 1, "traceEvents": []}'))
    with pytest.raises(UserError, match="packed with xz; unpack it first"):
        analyze([path])


@pytest.mark.parametrize("bare", [False, True])
def test_a_trace_whose_keys_are_sorted_says_the_same(tmp_path, bare):
    data = gpu_run(steps=5).data()
    data = data["traceEvents"] if bare else data
    verdicts = []
    for order in (False, True):
        dump_json(data, tmp_path / f"{order}.json", sort_keys=order)
        verdicts.append(analyze([tmp_path / f"{order}.json"]).verdict)
    assert verdicts[0] == verdicts[1]


def test_a_page_of_this_program_is_no_snapshot(tmp_path):
    """It speaks of segments and blocks, and lies beside the run's own snapshot."""
    page = tmp_path / "report.html"
    page.write_text(
        "<!DOCTYPE html>\n<html><p>device_traces, segments and blocks of total_size and active_size</p></html>"
    )
    assert look_at(page).what == ""
