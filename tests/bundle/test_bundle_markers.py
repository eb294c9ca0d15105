"""A marker in every place that holds a text: it comes out of none but those that the documentation names."""

import dataclasses
import enum
import json
import pickle
import typing
from collections.abc import Mapping
from types import UnionType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bundle_check import find_secrets
from support.snapshot_maker import MadeSnapshot
from support.trace_maker import gpu_run, write

from megatron_lite.analysis.trace.kineto_json import EventArgs
from megatron_lite.bundle.clean_folder import clean_folder
from megatron_lite.bundle.clean_records import RULES, clean_record
from megatron_lite.bundle.names import Substitutes
from megatron_lite.formats import failure_record, run_record, step_records
from megatron_lite.postmortem import evidence
from megatron_lite.postmortem.bundled_evidence import read_bundled_evidence

MARKER = "zyxwmarkervut"
RECORDS = (
    run_record.RunRecord,
    failure_record.FailureRecord,
    failure_record.RankAtFailure,
    step_records.StepRecord,
    step_records.RankInterval,
    step_records.HardwareRecord,
    evidence.JobEvidence,
)


def fill(kind):
    """A value of a type with the marker in the place of each text."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Annotated:
        return fill(arguments[0])
    if origin in (typing.Union, UnionType):
        return fill(next(one for one in arguments if one not in (type(None), msgspec.UnsetType)))
    if origin is typing.Literal:
        return arguments[0]
    if origin in (dict, Mapping):
        return {fill(arguments[0]): fill(arguments[1])}
    if origin is list:
        return [fill(arguments[0])]
    if origin is tuple:
        return tuple(fill(one) for one in arguments if one is not Ellipsis)
    if kind in (str, typing.Any):
        return MARKER
    if kind in (int, float):
        return 1
    if kind is bool:
        return True
    if issubclass(kind, enum.Enum):
        return next(iter(kind))
    hints = typing.get_type_hints(kind, include_extras=True)
    names = (
        kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [one.name for one in dataclasses.fields(kind)]
    )
    return kind(**{name: fill(hints[name]) for name in names})


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_no_text_of_a_record_comes_out(kind):
    filled = fill(kind)
    assert MARKER in str(msgspec.to_builtins(filled)) or kind is step_records.HardwareRecord
    assert MARKER not in str(msgspec.to_builtins(clean_record(filled, Substitutes())))


def list_texts(kind, seen):
    """(record, field) of each field that holds texts, of a record and of those in it."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = (
        kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else [one.name for one in dataclasses.fields(kind)]
    )
    for name in names:
        waiting = [hints[name]]
        while waiting:
            part = waiting.pop()
            waiting += (
                typing.get_args(part)[1:] if typing.get_origin(part) in (dict, Mapping) else typing.get_args(part)
            )
            if part in (str, typing.Any):
                seen.add((kind.__name__, name))
            elif isinstance(part, type) and (issubclass(part, msgspec.Struct) or dataclasses.is_dataclass(part)):
                list_texts(part, seen)
    return seen


def test_each_rule_is_of_a_field_that_holds_texts():
    known = set()
    for kind in RECORDS:
        list_texts(kind, known)
    rules = {(record, name) for record, of_record in RULES.items() for name in of_record}
    assert rules - known <= {("RankAtFailure", "process_state")}
    # texts that have no rule are taken out
    assert known - rules == set()


CLEANERS = (
    Substitutes.clean_name,
    Substitutes.clean_label,
    Substitutes.clean_path,
    Substitutes.clean_frame,
    Substitutes.clean_text,
    Substitutes.clean_host,
)
AROUND = st.text(alphabet=st.sampled_from("aZ09 _-./:()<>@#'\"\\\n\u00e4"), max_size=12)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(before=AROUND, after=AROUND)
def test_no_text_around_it_lets_the_marker_through(before, after):
    text = f"{before}{MARKER}{after}"
    assert not any(MARKER in clean(Substitutes(), text) for clean in CLEANERS)
    assert MARKER not in "".join(Substitutes().clean_command([text]))


def mark(value, kept=frozenset()):
    """A JSON value with the marker in each text, and in a further key of each object."""
    if isinstance(value, dict):
        marked = {key: part if key in kept else mark(part, kept) for key, part in value.items()}
        return marked | {MARKER: MARKER, f"{MARKER}2": {MARKER: [MARKER]}}
    if isinstance(value, list):
        return [mark(part, kept) for part in value]
    return MARKER if isinstance(value, str) else value


def make_everything(path):
    """A folder with a trace, a snapshot, a run and what a failed job leaves, all marked."""
    path.mkdir()
    made = gpu_run()
    made.frame("train.py(12): main", 0, 100)
    made.collective(20, 40, 10)
    made.memory(10, 100, 100)
    sound = made.data()
    marked = mark(sound["traceEvents"], frozenset({"ph"}))
    for event in list(marked):
        for key in ("name", "cat", "pid", "tid"):
            if event["ph"] == "X" and key in event:
                # as a report reads it, but for one field
                marked.append(
                    event | {other: sound["traceEvents"][0][other] for other in ("cat", "pid", "tid") if other != key}
                )
    names = [
        {"ph": "M", "name": name, "pid": 1, "tid": 1, "ts": 0, "args": {"name": MARKER}}
        for name in ("process_name", "thread_name")
    ]
    arguments = {field.encode_name: MARKER for field in msgspec.structs.fields(EventArgs)}
    marked.append(sound["traceEvents"][0] | {"args": arguments | {"Input Dims": [MARKER], "Input type": [MARKER]}})
    header = mark({key: value for key, value in sound.items() if key != "traceEvents"})
    header |= {"host_name": MARKER, "WARNING": [MARKER], "megatron_lite_cores": {"steps": 1, "ms": 1.0, MARKER: MARKER}}
    header |= {"deviceProperties": [{"id": 0, "name": MARKER}], "trace_id": MARKER}
    header["distributedInfo"] |= {
        "rank": 0,
        "world_size": 1,
        "pg_config": [{"pg_name": MARKER, "pg_desc": MARKER, "ranks": [0], "pg_size": 1}],
    }
    content = header | {"traceEvents": [*sound["traceEvents"], *marked, *names]}
    write(content, path / f"{MARKER}_rank0.1700000000000000000.pt.trace.json")
    snapshot = MadeSnapshot(**{MARKER: MARKER})
    snapshot.alloc(2**20, MARKER)
    data = snapshot.data()
    marked_snapshot = mark(data, frozenset({"action", "state", "stage"}))
    (path / f"{MARKER}.pickle").write_bytes(pickle.dumps(marked_snapshot))
    record = msgspec.to_builtins(fill(run_record.RunRecord)) | {"schema": 1, MARKER: MARKER}
    (path / "run.json").write_text(json.dumps(record))
    step = {
        "kind": "step",
        "iteration": 1,
        "step": 1,
        "ms": 1.0,
        "phases_ms": {MARKER: 1.0},
        "gpu_phases_ms": {MARKER: 1.0},
    }
    lines = [step | {MARKER: MARKER}, step | {"iteration": MARKER}, {"kind": MARKER}, MARKER]
    ranks = {
        "kind": "ranks",
        "ranks": {"iterations": [1, 1], "step_ms": [1.0], "phases_ms": {MARKER: [1.0]}, MARKER: 1},
    }
    (path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, ranks]) + MARKER)
    failure = msgspec.to_builtins(fill(failure_record.FailureRecord))
    failure["ranks"] = {"0": next(iter(failure["ranks"].values())), MARKER: {}}
    (path / "ranks.json").write_text(json.dumps(failure))
    (path / f"{MARKER}.log").write_text(make_log())
    (path / "fr_0.json").write_text(json.dumps(make_recording()))
    (path / "stacks.txt").write_text(
        f"Current thread 0x00007f0000000001 [{MARKER}] (most recent call first):\n"
        f'  File "/home/{MARKER}/train.py", line 12 in {MARKER}\n'
    )
    (path / "error.json").write_text(
        json.dumps(
            {"message": {"message": f"ValueError: {MARKER}", "extraInfo": {"py_callstack": MARKER, "timestamp": "1"}}}
        )
    )
    return path


def make_log():
    return (
        f"[rank0]: Traceback (most recent call last):\n"
        f'[rank0]:   File "/home/{MARKER}/train.py", line 12, in {MARKER}\n'
        f"[rank0]:     {MARKER}({MARKER})\n"
        f"[rank0]: {MARKER}Error: {MARKER}\n"
        f"[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB {MARKER}\n"
        f"srun: error: {MARKER}: task 0: Out Of Memory\n"
        f"x NCCL WARN {MARKER} Connection closed by remote peer {MARKER}\n"
        f"{MARKER}\n"
    )


def make_recording():
    frame = {"name": MARKER, "filename": f"/{MARKER}/{MARKER}.py", "line": 1}
    entry = {
        "record_id": 0, "pg_id": 0, "process_group": [MARKER, MARKER], "collective_seq_id": 1, "op_id": 1,
        "profiling_name": f"nccl:{MARKER}", "time_created_ns": 1, "input_sizes": [[3]], "input_dtypes": [MARKER],
        "output_sizes": [[3]], "output_dtypes": [MARKER], "state": "scheduled", "frames": [frame], "retired": False,
        MARKER: MARKER,
    }  # fmt: skip
    groups = {"0": {"name": MARKER, "desc": MARKER, "ranks": "[0, 1]"}, MARKER: {"name": MARKER, "desc": MARKER}}
    return {"version": "2.4", "pg_config": groups, "pg_status": {}, "entries": [entry], "rank": 0, MARKER: MARKER}


def test_no_text_of_any_file_comes_out(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    found = clean_folder([make_everything(tmp_path / "run")], made)
    assert found.left_out == []
    # nothing was spared because it was not read
    read = read_bundled_evidence(made / "job_evidence.json")
    assert read.recordings and read.stacks and read.ends and read.events and read.progress
    assert {path.name.partition(".")[0] for path in made.iterdir()} >= {
        "rank-0",
        "run",
        "steps",
        "ranks",
        "job_evidence",
    }
    assert len(list(made.glob("*.pickle"))) == 1
    assert find_secrets(made, [MARKER]) == []
