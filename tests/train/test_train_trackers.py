"""Weights & Biases and MLflow, the real packages, without a network: what is in their files is what TensorBoard would have."""

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.launch import flags, losses, pretrain, quietly
from support.report_cases import report
from support.wording import wording

from megatron_lite.errors import UserError
from megatron_lite.report.json_file import json_text
from megatron_lite.train import log, trackers

pytestmark = pytest.mark.usefixtures("process_group")

RUN = "--train-iters 6 --log-interval 2 --eval-interval 3 --eval-iters 1 --log-validation-ppl-to-tensorboard"


def read_records(content: bytes) -> list[bytes]:
    """Of an offline run's file: LevelDB's log, blocks of 32 KiB that hold checksum, length, kind and bytes of each part."""
    records, part, at = [], b"", 7  # behind the file's own head
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(part)
            part = b""
    return records


def test_weights_and_biases_gets_all_scalars(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    quietly(
        flags(RUN, "--wandb-project tests --wandb-exp-name one", "--wandb-save-dir", tmp_path / "w"), tmp_path / "run"
    )
    wandb.teardown()  # its process writes the last block of the file after finish(), which does not wait for that
    [path] = (tmp_path / "w").rglob("*.wandb")
    rows = []
    for data in read_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("run"):
            assert (record.run.project, record.run.display_name) == ("tests", "one")
            config = {item.key: item.value_json for item in record.run.config.update}
        if record.HasField("history"):
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
    assert config["train_iters"] == '"6"'
    seen = {int(row["iteration"]): float(row["lm loss"]) for row in rows if "lm loss" in row}
    assert list(seen.values()) == pytest.approx(losses(tmp_path / "run")) and list(seen) == [*range(1, 7)]
    assert {int(row["iteration"]) for row in rows if "lm loss validation" in row} == {3, 6}
    assert all("samples" in row for row in rows if "lm loss" in row)


@pytest.mark.parametrize("fails", [False, True])
def test_mlflow_gets_all_scalars(tmp_path, monkeypatch, fails):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if fails:
        monkeypatch.setattr(log.StepsFile, "write_ranks", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quietly(flags(RUN, "--mlflow-experiment tests"), tmp_path / "run")
    else:
        quietly(flags(RUN, "--mlflow-experiment tests"), tmp_path / "run")
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == ("FAILED" if fails else "FINISHED") and run.data.params["train_iters"] == "6"
    if not fails:
        history = client.get_metric_history(run.info.run_id, "lm loss")
        assert [one.value for one in history] == pytest.approx(losses(tmp_path / "run"))
        assert {one.step for one in client.get_metric_history(run.info.run_id, "lm loss validation")} == {3, 6}


@pytest.mark.parametrize(("words", "package"), [("--wandb-project x", "wandb"), ("--mlflow-experiment x", "mlflow")])
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, words, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("builtins.__import__", _without(package))
    with pytest.raises(UserError, match=f"needs the package {package}, which is not installed: pip install {package}"):
        quietly(flags(words), tmp_path)


def _without(package: str):
    real = __import__

    def find(name, *arguments, **named):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *arguments, **named)

    return find


def test_a_tracker_that_fails_costs_a_line(tmp_path, monkeypatch):
    class Broken:
        def add(self, *arguments):
            raise ConnectionError("no route to host")

    monkeypatch.setattr(trackers, "open_trackers", lambda plan, run_dir: [Broken()])
    _, out = quietly(flags("--train-iters 2 --log-interval 1"), tmp_path / "run")
    assert out.count("Broken failed and gets no more of this run; training goes on: no route to host") == 1
    assert len(losses(Path(tmp_path / "run"))) == 2


def test_what_trackers_get_of_a_report(tmp_path):
    (tmp_path / "report.json").write_text(json_text(report()))
    summary = trackers.ReportSummary.read(tmp_path)
    assert summary.verdict == report().verdict.sentence and len(summary.findings) == len(report().findings) > 0
    gains = report().gains
    assert len(summary.changes) == (len(gains.order) if gains else 0)
    rows = report().facts.critical.time.rows
    assert {name: summary.numbers[f"report/{name}_ms"] for name in rows} == rows
    assert summary.numbers["report/profiled_step_ms"] == pytest.approx(sum(rows.values()))


@pytest.mark.slow
def test_every_tracker_gets_the_report(tmp_path, monkeypatch):
    """Of a run of two ranks: the last one has the trackers, and makes the report."""
    mlflow, _ = pytest.importorskip("mlflow"), pytest.importorskip("wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from wandb.proto.wandb_internal_pb2 import Record

    store, run = (tmp_path / "mlruns").as_uri(), tmp_path / "run"
    profile = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 6"
    names = "--wandb-project tests --mlflow-experiment tests --tensorboard-dir"
    for name, value in (
        ("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("MLFLOW_TRACKING_URI", store), ("MLFLOW_ALLOW_FILE_STORE", "true")
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    words = flags(RUN, profile, names, tmp_path / "tb", "--wandb-save-dir", tmp_path / "w", "--run-dir", run)
    ended = pretrain(words, ranks=2)
    assert ended.code == 0 and wording("cli/where-step-goes") in ended.out
    summary = trackers.ReportSummary.read(run)
    accumulator = EventAccumulator(str(tmp_path / "tb")).Reload()
    [event] = accumulator.Tensors("report/verdict/text_summary")
    assert event.tensor_proto.string_val[0].decode().startswith(summary.verdict)
    client = mlflow.MlflowClient(store)
    [one] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert one.info.status == "FINISHED" and one.data.tags["report/verdict"] == summary.verdict[:500]
    assert {name: one.data.metrics[name] for name in summary.numbers} == pytest.approx(summary.numbers)
    assert {file.path for file in client.list_artifacts(one.info.run_id)} == {"report.html", "report.json"}
    [path] = (tmp_path / "w").rglob("*.wandb")
    found = {}
    for data in read_records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("summary"):
            found |= {item.key or "/".join(item.nested_key): item.value_json for item in record.summary.update}
    assert json.loads(found["report/verdict"]) == summary.verdict
    assert float(found["report/profiled_step_ms"]) == pytest.approx(summary.numbers["report/profiled_step_ms"])
    [page] = path.parent.rglob("*.html")
    assert page.read_text() == (run / "report.html").read_text()


def test_tensorboards_table_has_no_exponents():
    board, texts = object.__new__(trackers.TensorBoard), {}
    board._writer = SimpleNamespace(add_text=lambda name, text, *_: texts.update({name: text}))
    board.add_report(trackers.ReportSummary("fine", [], {"report/tokens_per_second": 1234567.8}, ()))
    assert "| report/tokens_per_second | 1,234,568 |" in texts["report/verdict"]
