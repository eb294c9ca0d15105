"""report.json: the numbers of the report, for programs; documented key by key."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import report_cases as cases
from run_maker import folder, ranks, step

from megatron_lite.analysis.report import REPORT_SCHEMA
from megatron_lite.analysis.run.read import read_run
from megatron_lite.report.json_file import as_json, json_text, plain, ranks_text

DOCUMENT = (Path(__file__).parents[1] / "docs" / "report_json.md").read_text(encoding="utf-8")
EMPTY = cases.report(ranks_seen=(), snapshots=(), ranks=None, run=None)


def keys_of(value) -> set[str]:
    """All keys at all depths."""
    if isinstance(value, dict):
        return set(value) | set().union(*(keys_of(item) for item in value.values()), set())
    return set().union(*(keys_of(item) for item in value), set()) if isinstance(value, list) else set()


def test_it_holds_what_the_report_holds():
    report = cases.report()
    read = json.loads(json_text(report))
    assert read["schema"] == REPORT_SCHEMA and read["verdict"]["sentence"] == report.verdict.sentence
    assert read["critical_rank"] == 1 and [one["rank"] for one in read["ranks_seen"]] == [0, 1]
    time = read["ranks_seen"][0]["time"]
    assert sum(time["rows"].values()) == pytest.approx(time["step_ms"]) and time["idle_ms"] == pytest.approx(18.0)
    assert read["ranks_seen"][0]["kernels"]["roles"]["matrix products"] == 40.0
    assert read["snapshots"][0]["peak_bytes"] == 32 * 2**30
    assert [one["code"] for one in read["findings"]] == [one.code for one in report.findings]
    assert [row["difference_bytes"] for row in read["ledger"]] == [0, 4 * 2**30, 0]
    assert read["run"]["steady_step_ms"] == 95.5 and read["run"]["status"] == "finished"


def test_it_is_ascii_without_nan_and_repeats_nothing():
    texts = {json_text(cases.report(name=cases.HOSTILE)) for _ in range(2)}
    assert len(texts) == 1 and texts.pop().isascii()
    odd = dataclasses.replace(cases.run_of(), steady_step_ms=math.nan, tokens_per_second=math.inf)
    read = json.loads(json_text(cases.report(run=odd)), parse_constant=lambda word: pytest.fail(word))
    assert read["run"]["steady_step_ms"] is None and read["run"]["tokens_per_second"] is None
    read = as_json(cases.report())
    assert not {"plan", "iterations", "step_ms", "losses"} & set(read["run"])
    assert "events" not in read["ranks_seen"][0] and len(json_text(cases.report())) < 300_000
    read = as_json(EMPTY)
    assert read["ranks"] is read["run"] is read["critical_rank"] is None
    assert read["snapshots"] == read["ranks_seen"] == []


def test_of_many_ranks_it_stays_small_and_a_file_beside_it_has_everything(tmp_path):
    """Details of 128 ranks fill 25 megabytes: only one rank's stand in report.json."""
    names = [f"phase_{at}" for at in range(12)]
    numbers = {"host_memory_bytes": [1.5] * 128, "phases_ms": {name: [2.25] * 128 for name in names}}
    console = [ranks(at, at, [1.125] * 128, **numbers) for at in range(1, 41)]
    run = read_run(folder(tmp_path, [*(step(at) for at in range(1, 41)), *console]))
    seen, snapshot = cases.report().facts.ranks_seen[0], cases.snapshot()
    wide = dataclasses.replace(seen.kernels, rows=seen.kernels.rows * 20)
    times = [dataclasses.replace(seen.time, rank=rank) for rank in range(128)]
    traces = [dataclasses.replace(seen, kernels=wide, time=time) for time in times]
    snapshots = [dataclasses.replace(snapshot, rank=rank) for rank in range(128)]
    report = cases.report(ranks_seen=tuple(traces), snapshots=tuple(snapshots), run=run)
    text = json_text(report)
    read = json.loads(text)
    assert len(text) < 5e6 / 4 and read["shortened"] == ["ranks_seen", "snapshots"]
    with_rows = [one["time"]["rank"] for one in read["ranks_seen"] if "rows" in one["kernels"]]
    assert with_rows == [read["critical_rank"]] and read["ranks_seen"][7]["time"]["rows"]["compute"] > 0
    assert read["run"]["ranks"]["intervals"][-1]["last"] == 40
    few = dataclasses.replace(report, facts=dataclasses.replace(report.facts, ranks_seen=tuple(traces[:17])))
    lines = [json.loads(line) for line in ranks_text(few).splitlines()]
    assert [one["of"] for one in lines] == ["ranks_seen"] * 17 + ["snapshots"] * 128
    assert lines[3]["kernels"] == plain(wide) and ranks_text(cases.report()) == ""


def test_every_key_and_the_schema_are_documented():
    roles = set(as_json(cases.report())["ranks_seen"][0]["kernels"]["roles"]) | set(cases.ROWS)
    documented = set(re.findall(r"`([\w ]+)`", DOCUMENT))
    assert keys_of(as_json(cases.report(traced_memory=(cases.traced_memory(),)))) - roles - documented == set()
    assert f"`schema` is {REPORT_SCHEMA}" in DOCUMENT
