"""The page and the JSON Schemas of a run's files are made from the Structs, and hold for what is written."""

import io
import json

import jsonschema
import pytest
from format_schemas import DOCS, FILES, PAGE, build_page, build_schema
from support.command_lines import plan as resolved_plan
from support.step_lines import INTERVAL, STEP

from megatron_lite.config.world import World
from megatron_lite.formats.failure_record import FailureRecord, RankAtFailure, encode_failure
from megatron_lite.formats.run_record import RunRecord, encode_run
from megatron_lite.formats.step_records import RanksRecord, StepRecord, append_record
from megatron_lite.train.run_record import record_plan


@pytest.mark.parametrize("name", FILES)
def test_schemas_are_current(name):
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == build_schema(name), "python tests/format_schemas.py makes them anew"


def test_the_page_is_current_and_tells_every_field():
    page = build_page()
    assert PAGE.read_text(encoding="utf-8") == page, "python tests/format_schemas.py makes it anew"
    for record in (StepRecord, RunRecord, FailureRecord, RankAtFailure):
        assert all(f"| `{name}` |" in page for name in record.__struct_fields__)


def test_a_written_run_fulfills_its_schema():
    schema = json.loads(build_schema("run.schema.json"))
    plan = resolved_plan("--bf16 --use-torch-fsdp2", World(size=2, gpus=1), vocab_size=100)
    record = json.loads(encode_run(RunRecord(status="running", plan=record_plan(plan))))
    jsonschema.validate(record, schema)
    record["plan"]["world"]["size"] = "two"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, schema)


def test_written_lines_fulfill_their_schema():
    schema = json.loads(build_schema("steps.schema.json"))
    file = io.BytesIO()
    for record in (STEP, RanksRecord(ranks=INTERVAL), StepRecord(iteration=1, step=1, ms=1.0, phases_ms={}, loss=None)):
        append_record(file, record)
    for line in file.getvalue().splitlines():
        jsonschema.validate(json.loads(line), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"kind": "step", "iteration": 1}, schema)


def test_a_written_failure_fulfills_its_schema():
    schema = json.loads(build_schema("ranks.schema.json"))
    waiting = RankAtFailure(host="here", wall_time=1000.5, groups={"7": 2}, stack=("f (a.py:1)",))
    record = json.loads(encode_failure(FailureRecord(verdict="rank 1 died", ranks={"0": waiting})))
    jsonschema.validate(record, schema)
    record["ranks"]["0"]["groups"] = "7"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(record, schema)
