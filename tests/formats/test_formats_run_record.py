"""run.json: what the trainer decides is written field by field, and what is damaged is named and left out."""

import dataclasses
import json
import subprocess
import sys

import msgspec
import pytest
from support.command_lines import plan as resolved_plan
from support.paths import REPO
from support.wording import wording

from megatron_lite.analysis.run.read_record import read_record
from megatron_lite.config.shape import ModelShape
from megatron_lite.config.world import World
from megatron_lite.formats import run_record
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.formats.run_record import RunRecord, encode_run
from megatron_lite.formats.sound_fields import convert_sound
from megatron_lite.train.run_record import record_plan

STAGES = "--pipeline-model-parallel-size 2 --num-layers 4 --decoder-first-pipeline-num-layers 1"
WORDS = {
    "one rank": ("", World()),
    "stages": (f"{STAGES} --decoder-last-pipeline-num-layers 3", World(size=4, rank=3)),
    "chunks": (
        "--pipeline-model-parallel-size 2 --num-layers 8 --num-layers-per-virtual-pipeline-stage 2",
        World(size=2, rank=1),
    ),
    "shards": ("--bf16 --use-torch-fsdp2 --profile --profile-step-start 3", World(size=2, gpus=1)),
}


@pytest.mark.parametrize("what", WORDS)
def test_a_plan_is_read_as_it_was_decided(what):
    words, world = WORDS[what]
    plan = resolved_plan(words, world, vocab_size=100)
    written = json.loads(encode_run(RunRecord(plan=record_plan(plan))))
    record, lost = convert_sound(written, RunRecord)
    assert lost == [] and record.schema == run_record.RUN_SCHEMA
    read = record.plan
    for part in ("world", "layout", "shape", "batch", "compilation", "sharding"):
        decided = getattr(plan, part)
        known = None if decided is None else dataclasses.asdict(decided)
        found = getattr(read, part)
        assert (None if found is None else msgspec.structs.asdict(found)) == known, part
    assert read.args["model"]["hidden_size"] == plan.args.model.hidden_size
    typed = {name: value for group in read.args.values() for name, value in group.items()}
    settings = msgspec.structs.asdict(read.settings)
    assert settings == {name: typed[name] for name in settings}
    assert [range(*chunk) for chunk in read.stage.chunks] == list(plan.stage.chunks)
    assert range(*read.profile_window) == plan.profile_window
    assert (read.device, read.precision, read.train_iters) == (plan.device, plan.precision, plan.train_iters)
    assert read.micro_batches == plan.micro_batches(plan.train_samples)


def test_stages_are_told_of_all_ranks():
    words, world = WORDS["stages"]
    read = record_plan(resolved_plan(words, world, vocab_size=100))
    assert read.stages_of_ranks == (0, 0, 1, 1) and read.stage_layers == (1, 3)
    assert record_plan(resolved_plan("", World(), vocab_size=100)).stages_of_ranks == ()


def test_what_no_field_holds_is_decided_by_none():
    """A field that the trainer decides and the record lacks would be a TypeError in the run, so that all are there."""
    names = {field.name for field in msgspec.structs.fields(run_record.Shape)}
    assert names == {field.name for field in dataclasses.fields(ModelShape)}


@pytest.mark.parametrize(
    ("values", "lost"),
    [
        ({"plan": {"world": {"size": "x", "rank": 1}}}, ["plan.world.size: Expected `int | null`, got `str`"]),
        ({"plan": {"world": {"size": 0}}}, ["plan.world.size: Expected `int` >= 1"]),
        (
            {"plan": 3, "hardware": []},
            ["plan: Expected `object | null`, got `int`", "hardware: Expected `object`, got `array`"],
        ),
        ({"versions": {"torch": 3, "python": "3.11"}}, ["versions.torch: Expected `str`, got `int`"]),
        ({"plan": {"args": {"data": {"seed": 1}, "model": 5}}}, ["plan.args.model: Expected `object`, got `int`"]),
        ({"prediction": {"memory": {"moments": [{}]}}}, ["prediction.memory: Object missing required field `phase`"]),
    ],
)
def test_what_is_damaged_is_named_and_the_rest_is_read(values, lost):
    sound = {"status": "finished", "parameters": 7, "environment": {"A": "1"}}
    record, found = convert_sound(sound | values, RunRecord)
    assert found == lost
    assert (record.status, record.parameters, record.environment) == ("finished", 7, {"A": "1"})


def test_parts_beside_a_damaged_one_are_read():
    values = {"world": {"size": "x", "rank": 1}, "args": {"data": {"seed": 1}, "model": 5}, "device": "cpu"}
    record, lost = convert_sound({"plan": values, "versions": {"torch": 3, "python": "3.11"}}, RunRecord)
    assert len(lost) == 3 and record.versions == {"python": "3.11"}
    assert (record.plan.world.rank, record.plan.world.size) == (1, None)
    assert record.plan.args == {"data": {"seed": 1}} and record.plan.device == "cpu"


def test_damage_is_one_note(tmp_path):
    damaged = {"schema": 1, "plan": {"world": {"size": []}, "batch": 1, "device": 2, "precision": 3}}
    (tmp_path / RUN_FILE).write_text(json.dumps(damaged))
    record, [note] = read_record(tmp_path)
    assert record.plan == run_record.PlanRecord() and "\n" not in note
    assert note.startswith(wording("formats/run-json-is-damaged"))
    assert note.endswith("; and 1 more.")


def test_half_a_character_in_a_path_is_written_and_read(tmp_path):
    record = RunRecord(command=["train\udc80.py"], artefacts={"steps": "\ud800"})
    (tmp_path / RUN_FILE).write_text(encode_run(record))
    assert read_record(tmp_path)[0].command == record.command


@pytest.mark.slow
def test_a_renamed_field_is_a_type_error(tmp_path):
    """As mypy says it in CI."""
    text = (REPO / "megatron_lite" / "formats" / "run_record.py").read_text()
    package = tmp_path / "megatron_lite"
    for path in (REPO / "megatron_lite").rglob("*.py"):
        copy = package / path.relative_to(REPO / "megatron_lite")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (package / "py.typed").touch()
    renamed = text.replace("    memory_bytes: Size | None = None", "    device_bytes: Size | None = None")
    assert renamed != text
    (package / "formats" / "run_record.py").write_text(renamed)
    reader = package / "analysis" / "run_facts.py"
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", str(reader)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and wording("formats/hardware-has-no-attribute") in done.stdout
