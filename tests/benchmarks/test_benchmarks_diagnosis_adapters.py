"""benchmarks/diagnosis/adapters: that tables and diagnoses of tools become the claims that the adapters' docstrings state."""

import json
import sys

import pytest
from support.paths import REPO
from support.trace_maker import gpu_run

sys.path.insert(0, str(REPO))

from benchmarks.diagnosis.adapters import hta, ours, tracelens, traceml
from benchmarks.diagnosis.claims import HIGH, LOW, Claim, NotReadError
from benchmarks.diagnosis.collectors.asked_runs import ask_of_runs, find_traces
from benchmarks.diagnosis.manifest import read_classes
from megatron_lite.analysis.findings.rules import RULES


def describe(claims: list[Claim]) -> list[tuple]:
    return [(claim.classes, claim.families, claim.culprit, claim.confidence) for claim in claims]


def make_hta(idle: float, compute: float, **more: object) -> dict:
    found = {
        "temporal": [{"idle_time_pctg": idle, "compute_time_pctg": compute}],
        "kernels": [{"kernel_type": "COMMUNICATION", "sum": 30}, {"kernel_type": "MEMORY", "sum": 10}],
        "idle": [{"idle_category": "host_wait", "idle_time": 9.0}],
        "launches": [{"kernels": 10, "short": 2}],
    }
    return found | more


def test_the_largest_row_of_hta_comes_first():
    host = ((), ("host", "input"), "", HIGH)
    talks = (("exposed-communication",), (), "", LOW)
    copies = (("host-device-copies",), (), "", LOW)
    assert describe(hta.read_claims(make_hta(50.0, 30.0))) == [host, talks, copies]
    assert describe(hta.read_claims(make_hta(4.0, 56.0)))[0] == (("exposed-communication",), (), "", HIGH)
    short = make_hta(50.0, 45.0, launches=[{"kernels": 10, "short": 6}])
    assert describe(hta.read_claims(short)) == [(("launch-bound",), (), "", HIGH)]


def test_hta_without_a_row_says_that_it_computes_and_names_a_straggler():
    straggler = (("straggler",), (), "rank 3", LOW)
    found = describe(hta.read_claims(make_hta(2.0, 95.0, stragglers=[3])))
    assert found == [((), ("compute",), "", LOW), straggler]


def test_runs_that_a_tool_fails_on_are_not_read():
    for read in (hta.read_claims, tracelens.read_claims):
        with pytest.raises(NotReadError):
            read({"error": "KeyError: 'stream'"})
    with pytest.raises(NotReadError):
        hta.read_claims(make_hta(0.0, 0.0) | {"temporal": {"error": "no kernels"}})
    with pytest.raises(NotReadError):
        tracelens.read_claims({"gpu_timeline": []})
    with pytest.raises(NotReadError):
        traceml.read_claims({"primary_diagnosis": {"kind": "INSUFFICIENT_STEP_TIME_DATA"}})


def make_timeline(idle: float, talks: float = 0.0, copies: float = 0.0, again: float = 0.0) -> list[dict]:
    times = {"idle_time": idle, "exposed_comm_time": talks, "exposed_memcpy_time": copies, "total_time": 100.0}
    rows = [{"type": kind, "time ms": ms, "is_recompute": False} for kind, ms in times.items()]
    return [*rows, {"type": "busy_time", "time ms": again, "is_recompute": True}]


def test_rows_of_tracelens_are_claims_by_their_share():
    found = tracelens.read_claims({"gpu_timeline": make_timeline(25.0, talks=30.0, copies=6.0)})
    talks = (("exposed-communication",), (), "", HIGH)
    assert describe(found) == [talks, ((), ("host", "input"), "", HIGH), (("host-device-copies",), (), "", LOW)]
    recomputed = tracelens.read_claims({"gpu_timeline": make_timeline(25.0, again=22.0)})
    assert describe(recomputed) == [(("redundant-compute",), (), "", HIGH)]
    quiet = tracelens.read_claims({"gpu_timeline": make_timeline(3.0)})
    assert describe(quiet) == [((), ("compute",), "", LOW)]


def test_categories_of_tracelens_name_what_computes():
    categories = [{"op category": "elementwise", "total_direct_kernel_time_ms": 40.0}]
    update = {"name": "aten::addcmul_", "Categories": "['elementwise']", "total_direct_kernel_time_ms": 30.0}
    found = {"gpu_timeline": make_timeline(1.0), "ops_summary_by_category": categories}
    assert describe(tracelens.read_claims(found)) == [(("memory-bound-kernels",), (), "", HIGH)]
    updated = tracelens.read_claims(found | {"ops_summary": [update]})
    assert updated[0].classes == ("memory-bound-kernels", "unfused-optimizer")
    product = {"param: dtype_A_B": "('double', 'double')", "Kernel Time (µs)_sum": "30000.0"}
    slow = tracelens.read_claims({"gpu_timeline": make_timeline(1.0), "GEMM": [product]})
    assert slow[0].classes == ("low-throughput-products",)


def test_who_comes_last_in_tracelens_is_a_straggler_or_all_in_turns():
    rows = [
        {"rank": 0, "total_wait_time_us": 30_000.0, "pct_arrived_last": 10.0},
        {"rank": 1, "total_wait_time_us": 100.0, "pct_arrived_last": 90.0},
    ]
    found = {"gpu_timeline": make_timeline(1.0), "stragglers": rows}
    assert describe(tracelens.read_claims(found)) == [(("straggler",), (), "rank 1", HIGH)]
    in_turns = [row | {"pct_arrived_last": 50.0} for row in rows]
    assert tracelens.read_claims(found | {"stragglers": in_turns})[0].classes == ("late-in-turns",)


def test_traceml_primary_diagnosis_comes_first_and_each_kind_once():
    rank = {"kind": "INPUT_STRAGGLER", "severity": "crit", "ranks": [1], "evidence": {"culprit_rank": 1}}
    summary = {
        "primary_diagnosis": rank,
        "step_time": {"diagnosis": rank, "issues": [rank, {"kind": "RESIDUAL_HEAVY", "severity": "warn"}]},
        "system": {"diagnosis": {"kind": "HIGH_CPU", "severity": "warn"}},
        "process": {"diagnosis": {"kind": "NORMAL", "severity": "info"}},
    }
    found = describe(traceml.read_claims(summary))
    residual = (("host-work", "save-or-evaluate", "compile-or-capture"), (), "", LOW)
    assert found == [(("straggler",), (), "rank 1", HIGH), residual, (("cores",), (), "", LOW)]
    compute = traceml.read_claims({"primary_diagnosis": {"kind": "COMPUTE_BOUND", "severity": "info"}})
    assert describe(compute) == [((), ("compute",), "", LOW)]


def test_codes_of_ours_stand_for_classes_of_the_key(tmp_path):
    meanings = ours.read_meanings()
    assert {one for classes in meanings.values() for one in classes} <= set(read_classes())
    assert set(meanings) <= set(RULES)
    gpu_run(data_us=4000.0, step_us=5000.0).write(tmp_path)
    claims = ours.read_run(tmp_path)
    assert claims[0].classes == ("slow-loader",)


def test_a_collector_keeps_what_a_tool_dies_of_and_asks_once(tmp_path, monkeypatch):
    asked = []

    def ask(folder):
        asked.append(folder.name)
        return {"ranks": 8 // len(find_traces(folder))}

    (tmp_path / "g01").mkdir()
    (tmp_path / "g01" / "rank0.pt.trace.json.gz").touch()
    (tmp_path / "g02").mkdir()
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "raw"), str(tmp_path / "g01"), str(tmp_path / "g02")])
    for _ in range(2):
        ask_of_runs(ask)
    assert asked == ["g01", "g02"]
    assert json.loads((tmp_path / "raw" / "g01.json").read_text()) == {"ranks": 8}
    assert json.loads((tmp_path / "raw" / "g02.json").read_text())["error"].startswith("ZeroDivisionError: ")
