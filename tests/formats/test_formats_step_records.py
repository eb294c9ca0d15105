"""steps.jsonl: what is written is read again, and what is not known stands in no line."""

import io
import json
import math

import msgspec
import pytest
from support.step_lines import INTERVAL, STEP

from megatron_lite.analysis.run.step_lines import StepLines
from megatron_lite.formats.step_records import RanksRecord, StepRecord, append_record

COLUMNS = {  # of the reader, which has other names than the file where one word means one number and many
    "ms": "step_ms",
    "batch_size": "batch_sizes",
    "next_lr": "next_lrs",
    "loss": "losses",
    "grad_norm": "grad_norms",
}
NOT_READ = {
    "step",
    "iteration",
    "reduce_wait_ms",
    "gpu_reduce_wait_ms",
    "beside_profile",
    "local",
    "routing",
    "prediction_losses",
}


def write(path, *records) -> StepLines:
    file = io.BytesIO()
    for record in records:
        append_record(file, record)
    path.write_bytes(file.getvalue())
    lines = StepLines(path)
    lines.read()
    return lines


def test_every_field_of_a_step_is_read_again(tmp_path):
    steps = write(tmp_path / "steps.jsonl", STEP).read_steps()
    assert steps.iterations.tolist() == [11] and not steps.undisturbed.any()
    for field in msgspec.structs.fields(StepRecord):
        if field.name in NOT_READ:
            continue
        column, written = getattr(steps, COLUMNS.get(field.name, field.name)), getattr(STEP, field.name)
        read = {name: values[0] for name, values in column.items()} if isinstance(written, dict) else column[0]
        assert read == written, field.name


def test_every_list_of_an_interval_is_read_again(tmp_path):
    lines = write(tmp_path / "steps.jsonl", STEP, RanksRecord(ranks=INTERVAL))
    ranks = lines.read_ranks()
    assert (ranks.first[0], ranks.last[0]) == INTERVAL.iterations
    for name in set(INTERVAL.__struct_fields__) - {"iterations", "phases_ms", "gpu_phases_ms", "hardware"}:
        assert getattr(ranks, name)[0].tolist() == getattr(INTERVAL, name), name
    for phases in (ranks.phases_ms, ranks.gpu_phases_ms):
        assert math.isnan(phases["forward"][0, 1])
    hardware = lines.read_hardware()
    assert {name: hardware.get(name).tolist() for name in INTERVAL.hardware} == INTERVAL.hardware


@pytest.mark.parametrize(
    ("more", "written"),
    [
        ({}, {}),
        ({"loss": None, "grad_norm": None, "skipped": False}, {"loss": None, "grad_norm": None, "skipped": False}),
        ({"loss": 0.0, "gpu_ms": None, "gpu_phases_ms": {}}, {"loss": 0.0}),
    ],
)
def test_what_is_not_known_stands_in_no_line(more, written):
    file = io.BytesIO()
    append_record(file, StepRecord(iteration=3, step=2, ms=1.0, phases_ms={}, **more))
    always = {"kind": "step", "iteration": 3, "step": 2, "ms": 1.0, "phases_ms": {}}
    assert json.loads(file.getvalue()) == always | written
    assert file.getvalue().count(b"\n") == 1


def test_a_loss_that_is_not_known_is_no_loss_that_is_not_finite(tmp_path):
    unknown = StepRecord(iteration=1, step=1, ms=1.0, phases_ms={})
    not_finite = StepRecord(iteration=2, step=2, ms=1.0, phases_ms={}, loss=None)
    steps = write(tmp_path / "steps.jsonl", unknown, not_finite).read_steps()
    assert steps.not_finite.tolist() == [False, True] and all(map(math.isnan, steps.losses))
