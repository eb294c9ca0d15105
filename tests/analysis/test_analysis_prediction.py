"""A prediction read back from run.json and held against what was measured."""

import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from support import report_cases as cases
from support.prediction_cases import GIB, facts, held, measured, memory, record, time
from support.training_maker import run as write_run
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.memory.memory_results import OutOfMemory
from megatron_lite.analysis.predicted import compare_prediction, find_predicted_memory, find_predicted_time
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.run_facts import Compared
from megatron_lite.formats.run_record import Prediction, RunRecord, encode_run
from megatron_lite.formats.sound_fields import convert_sound


def of(snapshot=None, device="cuda", **parts):
    snapshots = () if snapshot is None else (snapshot,)
    return compare_prediction(facts(record(memory(), time()), device, snapshots, **parts))


def write(prediction: Prediction | None) -> dict:
    """The parts of run.json, as a reader has them."""
    return json.loads(encode_run(RunRecord(prediction=prediction)))


def read(values: dict) -> tuple[Prediction | None, list[str]]:
    """(what was predicted, what of it is damaged)."""
    found, lost = convert_sound(values, RunRecord)
    return found.prediction, lost


def test_a_prediction_comes_back_as_it_was_written():
    written = write(record(memory(), time()))
    assert read(written) == (record(memory(), time()), [])
    assert written["prediction"]["peak_bytes"] == 31 * GIB


@pytest.mark.parametrize(
    "prediction", [None, "soon", [], {}, {"memory": None, "time": None}, {"memory": {"moments": []}}]
)
def test_a_run_that_predicted_nothing_is_compared_with_nothing(prediction):
    assert compare_prediction(facts(read({"prediction": prediction})[0])) is None


def test_damage_leaves_out_the_part_that_it_hits():
    whole = write(record(memory(), time()))
    for change in ({"num_bytes": "many"}, {"num_bytes": math.nan}, {"num_bytes": math.inf}, {"num_bytes": None}):
        broken = copy.deepcopy(whole)
        broken["prediction"]["memory"]["moments"][0]["rows"][0] |= change
        prediction, [lost] = read(broken)
        assert find_predicted_memory(prediction) is None and find_predicted_time(prediction) == time()
        assert lost.startswith("prediction.memory: Expected `int`")
    for change in ({"rows": []}, {"rows": 3}, {"rows": [{}]}, {"tokens": "x"}, {"notes": 1}):
        broken = copy.deepcopy(whole)
        broken["prediction"]["time"] |= change
        prediction, _ = read(broken)
        assert find_predicted_time(prediction) is None and find_predicted_memory(prediction) == memory()


def test_a_snapshot_is_compared_category_by_category():
    found = of(measured()).memory
    assert found.peak == Compared("peak of tensors", 31 * GIB, 32 * GIB)
    assert found.peak.difference == pytest.approx(1 / 31)
    assert sum(row.predicted for row in found.categories) == found.peak.predicted
    assert sum(row.measured for row in found.categories) == found.peak.measured
    assert found.categories[-1] == Compared("workspace", 0, GIB) and found.categories[-1].difference is None
    assert (found.predicted_at, found.measured_in) == ("cross entropy (backward)", "backward")


def test_a_record_that_began_late_tells_the_peak_only():
    found = of(replace(measured(), complete=False))
    assert found.memory.categories == () and found.memory.peak.measured == 32 * GIB
    assert "snapshot.pickle began late" in found.notes[0]


def test_memory_that_ran_out_never_reached_its_peak():
    found = of(replace(measured(), oom=OutOfMemory(GIB, 0, "loss.py:3")))
    assert found.memory is None
    predicted = "which was predicted as 31.00 GiB at cross entropy (backward)."
    assert found.notes[0] == wording("analysis/memory-ran-out-before", predicted)


def test_without_a_snapshot_the_gpus_own_counter_is_compared():
    found = of(peak_memory_bytes=np.array([math.nan, 30 * GIB, 33 * GIB]))
    assert found.memory.peak.measured == 33 * GIB and found.memory.categories == ()
    assert (found.memory.source, found.memory.rank) == ("steps.jsonl", 1)
    assert wording("analysis/no-peak-of-gpu") in of().notes[0]


def test_host_memory_is_not_what_tensors_hold():
    found = of(device="cpu", peak_memory_bytes=np.full(3, 9e9))
    assert found.memory is None and "--record-memory-history" in found.notes[0]
    assert of(measured(), device="cpu").memory.peak.measured == 32 * GIB


def test_the_step_is_compared_with_the_shortest_possible_one():
    found = of().time
    assert found.step == Compared("step", 50.0, 95.5) and found.parts == ()
    assert found.tokens == Compared("tokens per second", 1000 * 16384 / 50, 171_000.0)
    assert found.not_predicted == time().notes
    nothing = of(steady_step_ms=None)
    assert nothing.time is None and wording("analysis/no-typical-step") in nothing.notes[-1]


def test_parts_of_a_trace_add_up_to_its_step():
    parts = of(ranks_seen=cases.report().facts.ranks_seen[:1]).time.parts
    assert [(part.name, part.predicted, part.measured) for part in parts] == [
        (wording("report/matrix-products-attention"), 30.0, 50.0),
        (wording("analysis/all-other-computing"), 10.0, 10.0),
        (wording("analysis/communication-not-overlapped-with-compute"), 10.0, 20.0),
        ("not computing", 0.0, 20.0),
    ]
    assert sum(part.measured for part in parts) == 100.0


def test_a_whole_folder_is_analyzed_with_its_prediction(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "run.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"prediction": write(record(memory(), time()))["prediction"]})
    )
    found = analyze([folder]).facts.predicted
    assert found.time.step.predicted == 50.0 and found.memory is None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prediction": None}))
    assert read_run(folder).record.prediction is None and analyze([folder]).facts.predicted is None


def test_categories_that_only_one_side_knows_stand_beside_nothing():
    snapshot = replace(measured(), held=held(parameters=2, communication=1), peak_phase="")
    rows = {row.name: row for row in of(snapshot).memory.categories}
    assert rows["communication"].predicted == 0 and rows["moments"].measured == 0
    assert rows["moments"].difference == -1.0


def test_a_damaged_plan_costs_the_rank_only():
    seen = facts(record(memory()))
    damaged, lost = convert_sound({"plan": {"device": "cuda", "world": 3}}, RunRecord)
    assert lost == ["plan.world: Expected `object`, got `int`"]
    damaged = structs.replace(damaged, prediction=record(memory()))
    run = replace(seen.run, record=damaged, peak_memory_bytes=np.array([33.0 * GIB]))
    assert compare_prediction(replace(seen, run=run)).memory.rank is None
