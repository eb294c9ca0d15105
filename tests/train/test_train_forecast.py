"""What the console and run.json say of a run's memory and speed before its first step."""

import json

import msgspec
import pytest
from support.command_lines import plan
from support.launch import flags, plan_of, pretrain
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.config.world import World
from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.formats.run_record import Prediction
from megatron_lite.planner import run_prediction as module
from megatron_lite.planner.run_prediction import describe_forecast, forecast, record_forecast
from megatron_lite.planner.what_if import MARGIN
from megatron_lite.train.run_record import RunRecorder
from megatron_lite.units import GIB, size

ON_GPUS = World(size=2, local_size=2, gpus=2)
H200 = "NVIDIA H200"
MIDDLING = "--seq-length 64 --max-position-embeddings 64 --hidden-size 192 --vocab-size 2000"


def said(words: str, world: World, device: str | None, room: int | None) -> list[str]:
    return list(describe_forecast(forecast(plan(words, world), device, room)))


def test_memory_and_speed_on_a_gpu():
    seen = forecast(plan("--bf16", ON_GPUS), H200, 140 * GIB)
    memory, speed = describe_forecast(seen)
    peak = seen.memory.peak
    where = f"of 140.00 GiB, at {peak.where} ({peak.phase}):\n    "
    assert memory.startswith(wording("train/predicted-tensors-peak-at", size(peak.num_bytes), where))
    assert peak.rows[0].category in memory.splitlines()[1]
    assert speed.startswith("  predicted: at best ") and speed.endswith(" tokens/s")
    assert seen.time.gpu == "H200"


def test_ranks_of_one_machine_share_its_memory():
    (alone,) = said("", World(), None, 16 * GIB)
    (both,) = said("", World(size=2, local_size=2), None, 16 * GIB)
    assert " 2 x " in both and " x " not in alone and "at best" not in alone + both


def test_a_processor_that_no_table_has_is_given_no_speed():
    [line] = said("", ON_GPUS, "Foreign GPU 9", None)
    assert " of " not in line.split(",")[0]


def test_a_run_that_only_evaluates_is_not_judged_as_training():
    seen = forecast(plan("--skip-train", ON_GPUS), H200, 1)
    assert list(describe_forecast(seen)) == [] and record_forecast(seen).memory is None


def test_the_remedy_is_a_flag_that_fits():
    words = "--micro-batch-size 256 --global-batch-size 512 --num-layers 8"
    peak = forecast(plan(words, ON_GPUS), H200, None).memory.peak.num_bytes
    for world, device in ((ON_GPUS, H200), (ON_GPUS, "Foreign GPU 9"), (World(), None)):
        seen = forecast(plan(words, world), device, peak // 2)
        flags, _, needs = seen.remedy.rpartition(" would need ")
        changed = forecast(plan(f"{words} {flags}", world), device, peak // 2)
        assert not changed.excess_bytes(0) and size(changed.memory.peak.num_bytes) == needs
        assert list(describe_forecast(seen))[-1].endswith(f"; {seen.remedy}.")


def test_too_little_room_is_said_and_training_goes_on():
    peak = forecast(plan("", ON_GPUS), H200, GIB).memory.peak.num_bytes
    assert not any("note" in line for line in said("", ON_GPUS, H200, int(peak / (1 - MARGIN)) + 1))
    tight = said("", ON_GPUS, H200, peak)[-1]
    assert wording("train/note-predicted-peak-leaves", 8) in tight
    told = said("", ON_GPUS, H200, peak // 2)[-1]
    assert told.startswith(wording("train/note-predicted-peak-is", size(peak - peak // 2)))


@pytest.mark.parametrize("name", ["predict_memory", "predict_time"])
def test_a_broken_estimate_is_one_line(name, monkeypatch):
    def breaks(*given):
        raise ZeroDivisionError("by nobody")

    monkeypatch.setattr(module, name, breaks)
    seen = forecast(plan("", ON_GPUS), H200, GIB)
    what = name.removeprefix("predict_")
    assert f"  no prediction of the {what}: ZeroDivisionError: by nobody; please report it" in list(
        describe_forecast(seen)
    )
    assert getattr(record_forecast(seen), what) is None and len(record_forecast(seen).failures) == 1


def test_the_record_of_a_run_holds_it_with_all_its_formulas(tmp_path):
    seen = forecast(plan_of(flags()), None, GIB)
    with RunRecorder(plan_of(flags()), tmp_path, prediction=record_forecast(seen)):
        pass
    written = json.loads((tmp_path / RUN_FILE).read_text())["prediction"]
    assert msgspec.convert(written, Prediction) == record_forecast(seen)
    assert written["peak_bytes"] == seen.memory.peak.num_bytes and written["room_bytes"] == GIB
    assert set(written["memory"]["moments"][0]["rows"][0]) == {"category", "name", "num_bytes", "formula"}


def test_the_record_names_the_cores_and_the_variables_that_matter_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    with RunRecorder(plan_of(flags()), tmp_path):
        pass
    text = (tmp_path / RUN_FILE).read_text()
    record = json.loads(text)
    assert record["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_LAUNCH_BLOCKING" not in record["environment"] and "secret" not in text
    assert record["hardware"]["cpus"] >= 1
    assert {record["hardware"][f"{name}_products"] for name in ("bf16", "fp16")} <= {True, False}


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize(
    "words",
    [
        "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1",
        "--fp16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 2",
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --num-layers 4",
    ],
)
def test_a_real_run_holds_what_was_predicted(words, tmp_path):
    record = "--train-iters 3 --record-memory-history --profile-step-start 2 --profile-step-end 4"
    files = f"--memory-snapshot-path {tmp_path}/s.pickle --run-dir {tmp_path}/run"
    ended = pretrain(flags(MIDDLING, words, record, files))
    assert ended.code == 0, ended.err
    assert ended.out.count(wording("train/predicted-tensors-peak-at-about")) == 1
    found = analyze([tmp_path / "run", tmp_path / "s.pickle"]).facts.predicted.memory
    assert abs(found.peak.difference) < 0.05, found.peak
    assert sum(row.predicted for row in found.categories) == found.peak.predicted
