"""report.json: the numbers of the report, for programs; documented key by key."""

import dataclasses
import json
import math

import pytest
from report_schema import FILE, write_schema
from support import report_cases as cases
from support.report_schemas import validators
from support.run_maker import folder, ranks, step

from megatron_lite.analysis.rank_facts import EventPlace
from megatron_lite.analysis.report import REPORT_SCHEMA
from megatron_lite.analysis.run.read import read_run
from megatron_lite.report.json_file import as_json, json_text, plain, ranks_text

EMPTY = cases.report(ranks_seen=(), snapshots=(), ranks=None, run=None)


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
    text = json_text(cases.report())  # laid out by msgspec, where no name holds half a letter
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
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


def test_the_schema_in_the_documentation_is_that_of_the_dataclasses():
    """To renew it: python tests/report_schema.py"""
    assert FILE.read_text(encoding="utf-8") == write_schema()


def test_reports_fulfil_the_schema_and_have_no_key_that_it_does_not_describe(tmp_path):
    """Also a damaged one of a run folder; new keys are allowed to others, who may have an older schema."""
    reader, strict = validators()
    console = [ranks(at, at, [1.125, 1.25], phases_ms={"forward": [1.0, 2.0]}) for at in range(1, 41)]
    run = read_run(folder(tmp_path, [*(step(at) for at in range(1, 41)), *console]))
    many = (cases.report().facts.ranks_seen * 9, (cases.snapshot(),) * 17)
    for report in (
        EMPTY,
        cases.report(),
        cases.report(name=cases.HOSTILE, run=run),
        cases.report(traced_memory=(cases.traced_memory(),), snapshots=()),
        cases.report(ranks_seen=many[0], snapshots=many[1]),
    ):
        strict.validate(as_json(report))
    read = as_json(cases.report())
    reader.validate(read | {"new": 1})
    for broken in (read | {"schema": 2}, read | {"title": None}, {key: read[key] for key in read if key != "verdict"}):
        assert not reader.is_valid(broken)
    assert not strict.is_valid(read | {"new": 1})


def test_a_place_is_written_as_its_words():
    place = EventPlace("rank 0", "rank0.json", 3)
    assert plain({"where": place}) == {"where": "rank 0"}
    assert type(plain(place)) is str
