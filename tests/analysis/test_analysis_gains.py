"""Gains of findings by replays: they add up to the new step, and claim nothing where a graph is not that of the steps."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import run_maker
from support.finding_cases import CASES, on_gpu, saves_every
from support.paths import SHARED
from support.trace_maker import MadeTrace, place, write
from support.training_maker import FP32_GEMM, gpu

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings.base import Edit
from megatron_lite.analysis.findings.sync_edits import drop_sites
from megatron_lite.analysis.gains import describe_next_steps, find_gains
from megatron_lite.analysis.graph import build
from megatron_lite.analysis.graph.build import build_graph
from megatron_lite.analysis.graph.edits.change import scale_work
from megatron_lite.analysis.graph.edits.syncs import drop_syncs_of, find_resumed
from megatron_lite.analysis.graph.graph import ActivityKind
from megatron_lite.analysis.graph.replay import check_replay, replay
from megatron_lite.analysis.graph.sequence import NamedEdit, measure_gains
from megatron_lite.analysis.report import Report

PUBLIC = SHARED / "traces" / "v100_resnet50_loader_workers0"


def make_loading_and_syncing(steps: int = 6) -> MadeTrace:
    """Per step of 1,500 us the device waits 500 for the loader and, behind kernels of 600, 200 for a host that has synchronized."""
    made = MadeTrace()
    for number in range(steps):
        at = number * 1500.0
        made.step(number, at, at + 1495)
        made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 1, at + 500)
        with made.phase("forward", at + 505, at + 1490):
            made.op("aten::mm", at + 510, at + 560)
            made.kernel("sgemm_a", at + 520, at + 1120, at + 515)
            made.sync(at + 600, at + 1121, operator="aten::item")
            made.op("aten::mm", at + 1300, at + 1340)
            made.kernel("sgemm_b", at + 1320, at + 1420, at + 1310)
    return made


def report_on(folder: Path, *ranks: MadeTrace) -> Report:
    for made in ranks:
        made.write(folder)
    return analyze([folder])


def check_sums(report: Report) -> None:
    """What holds of all gains that are claimed."""
    found = report.gains
    assert found is not None and found.why_not == ""
    step_ms = found.step_ms
    by_code = {finding.code: finding for finding in report.findings}
    for change in found.order:
        assert change.ms > 0
        step_ms -= change.ms
        assert change.step_ms == pytest.approx(step_ms, rel=1e-9)
        assert by_code[change.code].gain_ms == pytest.approx(change.alone_ms, rel=1e-9)
        assert not by_code[change.code].gain_is_bound
    assert found.order[0].ms == pytest.approx(found.order[0].alone_ms, rel=1e-9)
    assert all(finding.gain_ms >= 0 for finding in report.findings if not finding.gain_is_bound)


def test_gains_add_up_to_the_new_step(tmp_path):
    report = report_on(tmp_path, make_loading_and_syncing())
    check_sums(report)
    assert {change.code for change in report.gains.order} == {"starved-loader", "sync-in-step"}
    assert report.gains.step_ms == report.facts.critical.time.step_ms
    # 700 us of kernels, and 300 of the host's own
    assert report.gains.order[-1].step_ms < 0.95


def test_the_next_steps_name_the_order_and_the_step_after_it(tmp_path):
    report = report_on(tmp_path, make_loading_and_syncing())
    said = report.verdict.next_steps
    places = [said.index(change.change) for change in report.gains.order]
    assert places == sorted(places)
    assert said == describe_next_steps(report.gains)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="no ../shared/traces beside the repository")
def test_gains_of_a_public_trace_add_up():
    """Products in 16 bits save nothing while the device waits for the loader, and something behind it."""
    report = analyze([PUBLIC])
    check_sums(report)
    alone = {change.code: change.alone_ms for change in report.gains.order}
    assert report.gains.order[0].code == "starved-loader"
    assert alone["fp32-products"] < 0.05 * report.gains.step_ms
    assert report.findings[0].code == "starved-loader" and report.findings[0].cost_ms < max(
        found.cost_ms for found in report.findings if found.code == "fp32-products"
    )


def test_a_contradicted_graph_claims_nothing(tmp_path):
    """Kernels begin before their launches: the clocks of host and device differ."""
    made = make_loading_and_syncing()
    for event in made.events:
        if event["cat"] == "cuda_runtime" and event["name"].startswith("cudaLaunch"):
            event["ts"] += 40
    report = report_on(tmp_path, made)
    assert report.gains is not None and report.gains.why_not
    assert report.gains.order == () and report.verdict.next_steps == "" and report.gains.confidence == "low"
    assert all(finding.gain_is_bound for finding in report.findings)


def test_too_many_events_claim_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "MAX_GRAPH_EVENTS", 10)
    report = report_on(tmp_path, make_loading_and_syncing())
    assert f"{len(report.facts.critical.trace.events):,}" in report.gains.why_not
    assert all(finding.gain_is_bound for finding in report.findings)


def test_an_inconclusive_report_claims_nothing(tmp_path):
    report = report_on(tmp_path, make_loading_and_syncing(steps=1))
    assert report.verdict.bound == "inconclusive"
    assert report.gains.why_not == report.verdict.why


def test_steps_apart_from_those_of_the_report_claim_nothing(tmp_path):
    report = report_on(tmp_path, make_loading_and_syncing())
    one = report.facts.critical
    longer = replace(one, time=replace(one.time, step_ms=2 * one.time.step_ms))
    facts = replace(report.facts, ranks_seen=(longer,))
    assert find_gains(facts, report.findings, report.verdict).gains.why_not


def test_without_a_change_no_graph_is_built(tmp_path):
    CASES["exposed-copies"][0](tmp_path)
    report = analyze([tmp_path])
    assert report.findings and not any(finding.edit for finding in report.findings)
    assert report.gains is None


def test_layers_move_between_stages_whose_ranks_were_all_traced(tmp_path):
    CASES["unbalanced-stages"][0](tmp_path)
    for rank in range(4):
        gpu(tmp_path, rank, 4)
    report = analyze([tmp_path])
    [finding] = [one for one in report.findings if one.code == "unbalanced-stages"]
    graph = build_graph([(one.trace, one.placing) for one in report.facts.graph_ranks])
    before = replay(graph)
    after = replay(finding.edit.apply(graph))
    assert after.step_ns != before.step_ns


def test_saving_in_each_step_is_left_out(tmp_path):
    made = MadeTrace()
    for number in range(5):
        at = number * 1000.0
        made.step(number, at, at + 995)
        made.annotation("forward", at + 1, at + 658)
        made.op("aten::mm", at + 5, at + 40)
        made.kernel("sgemm_a", at + 50, at + 650, at + 10)
        made.sync(at + 45, at + 651)
        made.annotation("save", at + 660, at + 960)
    report = report_on(tmp_path, made)
    [finding] = [one for one in report.findings if one.code == "save-in-step"]
    graph = build_graph([(one.trace, one.placing) for one in report.facts.graph_ranks])
    assert replay(finding.edit.apply(graph)).step_ns == pytest.approx(700_000, rel=0.02)


def test_small_collectives_outside_of_backward_are_sent_at_once(tmp_path):
    """20 sums of 100 us in a step of 3,000, each of one number: one of them remains."""
    ranks = []
    for rank in range(2):
        made = MadeTrace(rank, 2, device=None)
        for number in range(6):
            at = 3_000.0 * number
            made.step(number, at, at + 3_000)
            made.annotation("forward", at + 1, at + 900)
            made.op("aten::mm", at + 2, at + 890)
            made.annotation("average metrics", at + 905, at + 2_995)
            for part in range(20):
                begun = at + 910 + 103 * part
                made.op("c10d::allreduce_", begun, begun + 2)
                span = made.gloo(begun + 1, begun + 101)
                span["args"] = {"Input Dims": [[1]], "Input type": ["float"]}
        ranks.append(made)
    report = report_on(tmp_path, *ranks)
    [found] = [finding for finding in report.findings if finding.code == "small-buckets"]
    assert "average metrics" in found.advice and not found.flags
    assert found.gain_ms == pytest.approx(1.9, abs=0.2) and not found.gain_is_bound


def test_small_collectives_between_which_layers_compute_cannot_be_sent_at_once(tmp_path):
    """What ranks that split a layer exchange in forward: each result is needed for the next one."""
    ranks = []
    for rank in range(2):
        made = MadeTrace(rank, 2, device=None)
        for number in range(6):
            at = 6_500.0 * number
            made.step(number, at, at + 6_500)
            made.annotation("forward", at + 1, at + 6_495)
            for layer in range(20):
                begun = at + 10 + 320 * layer
                made.op("aten::mm", begun, begun + 200)
                made.op("c10d::allreduce_", begun + 201, begun + 203)
                span = made.gloo(begun + 202, begun + 302)
                span["args"] = {"Input Dims": [[1024]], "Input type": ["float"]}
        ranks.append(made)
    report = report_on(tmp_path, *ranks)
    [found] = [finding for finding in report.findings if finding.code == "small-buckets"]
    assert found.edit is None and not found.flags


def test_a_change_that_finds_nothing_to_change_keeps_its_bound(tmp_path):
    report = report_on(tmp_path, make_loading_and_syncing())
    graph = build_graph([(one.trace, one.placing) for one in report.facts.graph_ranks])
    same = NamedEdit("same", lambda one: one)
    unmatched = NamedEdit("unmatched", partial(drop_syncs_of, operators=["aten::nowhere"], phases=[]))
    faster = NamedEdit("faster", lambda one: scale_work(one, one.find_kind(ActivityKind.KERNEL), 0.5))
    measured = measure_gains(graph, [same, unmatched, faster])
    assert set(measured.alone_ms) == {"faster"}


def test_without_anything_to_change_nothing_is_claimed(tmp_path):
    report = report_on(tmp_path, make_loading_and_syncing())
    edit = Edit("x", partial(drop_syncs_of, operators=["aten::nowhere"], phases=[]))
    findings = [replace(report.findings[0], edit=edit, gain_ms=1.0, gain_is_bound=True)]
    found = find_gains(report.facts, findings, report.verdict)
    assert found.gains.why_not and found.findings == tuple(findings)


def test_a_graph_of_nothing_has_no_steps():
    graph = build_graph([])
    assert len(graph.activities) == 0
    assert replay(graph) is None
    assert check_replay(graph).why_not


@pytest.mark.parametrize("world_size", [2, None, 1])
def test_one_rank_of_many_is_doubted_also_where_the_file_does_not_say_how_many(tmp_path, world_size):
    made = make_loading_and_syncing()
    made.world_size = 2
    for step in range(6):
        at = step * 1500.0
        made.collective(at + 1430, at + 1470, at + 1425)
    data = made.data()
    data["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": world_size}
    if world_size is None:
        del data["distributedInfo"]
    report = analyze([write(data, tmp_path / "trace.json")])
    graph = build_graph([(one.trace, one.placing) for one in report.facts.graph_ranks])
    assert bool(graph.limits) == (world_size != 1) and set(graph.limits) <= set(report.gains.doubts)


# --- the order of findings


def test_findings_stand_in_the_order_of_what_they_save(tmp_path):
    """By the replay where there is one, else by the cost: what costs most may save nothing by itself."""
    report = report_on(tmp_path, make_loading_and_syncing())
    [replayed] = [found for found in report.findings if found.code == "sync-in-step"]
    syncing = replace(replayed, gain_is_bound=True, gain_ms=replayed.cost_ms)
    hidden = Edit("x", lambda graph: scale_work(graph, graph.find_kind(ActivityKind.KERNEL), 0.999))
    given = [
        replace(syncing, code="costly", cost_ms=1.4, edit=hidden),
        replace(syncing, code="unknown", cost_ms=1.2, gain_ms=None, edit=None),
        replace(syncing, code="small", cost_ms=0.01, edit=None),
        replace(syncing, code="bound", cost_ms=0.3, edit=None),
        syncing,
    ]
    found = find_gains(report.facts, given, report.verdict)
    # a cost of which nobody knows what the remedy saves stands behind what saves a notable part of the step
    assert [one.code for one in found.findings] == ["sync-in-step", "bound", "unknown", "small", "costly"]


def test_all_ranks_multiply_in_16_bits(tmp_path):
    """Kernels of one rank alone would save nothing: the other one comes to the sum as late as it did."""
    for rank in range(2):
        gpu(tmp_path, rank, 2, gemm=FP32_GEMM, dtypes=["float", "float"])
    report = analyze([tmp_path])
    [finding] = [one for one in report.findings if one.code == "fp32-products"]
    assert not finding.gain_is_bound and finding.gain_ms > 0.5 * finding.cost_ms


# --- remedies that became changes of the graph


@pytest.mark.parametrize(
    ("code", "saves_us"),
    [
        ("gc-pauses", 500),
        ("allocator-stalls", 500),
        ("graph-capture", 500),
        ("startup-in-step", 1500),
        ("save-in-step", 1500),
        ("unfused-elementwise", 1500),
    ],
)
def test_a_remedy_saves_what_its_cause_takes(tmp_path, code, saves_us):
    CASES[code][0](tmp_path)
    report = analyze([tmp_path])
    [finding] = [one for one in report.findings if one.code == code]
    graph = build_graph([(one.trace, one.placing) for one in report.facts.graph_ranks])
    saved_ns = replay(graph).step_ns - replay(finding.edit.apply(graph)).step_ns
    assert saved_ns == pytest.approx(saves_us * 1e3, rel=0.1)


def test_a_host_that_waits_without_a_record_claims_nothing(tmp_path):
    """Both fill the step, and nothing says which of them waits: shorter kernels would seem to save nothing."""
    made = MadeTrace()
    for number in range(6):
        at = number * 1500.0
        made.step(number, at, at + 1495)
        made.annotation("forward", at + 1, at + 1490)
        made.op("aten::mm", at + 2, at + 40)
        made.kernel("sgemm", at + 20, at + 1480, at + 15)
    graph = build_graph([place(made, tmp_path)])
    assert check_replay(graph).filled > 0.9 and check_replay(graph).why_not
    for number in range(6):
        made.sync(number * 1500.0 + 50, number * 1500.0 + 1481)
    graph = build_graph([place(made, tmp_path / "synchronized")])
    assert check_replay(graph).filled < 0.1 and not check_replay(graph).why_not


def test_saving_at_another_interval_is_a_part_of_the_mean_step(tmp_path):
    """Of 40 steps 7 take 30 ms more to save. The profiled ones do not: what it adds to the mean step stands beside them."""
    on_gpu()(tmp_path)
    saves_every(5, steps=40)(tmp_path)
    report = analyze([tmp_path])
    [finding] = [one for one in report.findings if one.code == "save-and-eval"]
    assert finding.cost_ms == pytest.approx(7 * 30 / 40)
    check_sums(report)
    gains = report.gains
    assert gains.stalls_ms == pytest.approx(finding.cost_ms, rel=0.03)
    assert gains.step_ms == pytest.approx(report.facts.critical.time.step_ms + gains.stalls_ms)
    # a checkpoint of 30 ms takes a hundredth of 300 steps of 10 ms
    assert "500" in gains.order[0].change
    assert finding.gain_ms == pytest.approx(gains.stalls_ms * (1 - 40 / 7 / 500), rel=1e-6)


def test_no_stall_is_advised_to_come_more_often(tmp_path):
    """Checkpoints take most of the time, evaluations each 10 steps next to nothing; a first step of 2 s is none of it."""
    lines = []
    for number in range(1, 41):
        phases_ms = {"forward": 5.0}
        if number % 5 == 0:
            phases_ms["save"] = 30.0
        if number % 10 == 0:
            phases_ms["eval"] = 0.5
        ms = 10.0 + phases_ms.get("save", 0.0) + phases_ms.get("eval", 0.0)
        lines.append(run_maker.step(number, ms=200.0 if number == 1 else ms, phases_ms=phases_ms))
    run_maker.folder(tmp_path, lines)
    [finding] = [one for one in analyze([tmp_path]).findings if one.code == "save-and-eval"]
    assert "--eval-interval" not in finding.flags and "evaluat" not in finding.advice
    assert "evaluat" not in finding.edit.change and "500" in finding.edit.change


def test_waits_are_left_out_by_line_where_stacks_tell_it(tmp_path):
    """Of two reads of a value one is meant; its operator is that of the other one, too."""
    made = MadeTrace()
    for number in range(6):
        at = number * 1500.0
        made.step(number, at, at + 1495)
        made.annotation("forward", at + 1, at + 1490)
        for part, line in enumerate(("train.py(10): read_loss", "train.py(20): read_norm")):
            begin = at + 10 + part * 700
            made.frame(line, begin, begin + 690)
            made.op("aten::mm", begin + 1, begin + 20)
            made.kernel("gemm", begin + 10, begin + 410, begin + 5)
            made.sync(begin + 30, begin + 411, operator="aten::item")
    report = report_on(tmp_path, made)
    facts = report.facts
    graph = build_graph([(one.trace, one.placing) for one in facts.graph_ranks])
    sites = facts.critical.time.syncs
    assert len({site.frame for site in sites}) == 2
    resumed = int(find_resumed(graph).sum())
    left = [int(find_resumed(drop_sites(facts, "x", [site]).apply(graph)).sum()) for site in sites]
    assert left == [resumed // 2, resumed // 2]
    both = drop_sites(facts, "x", sites).apply(graph)
    assert not find_resumed(both).any() and replay(both).step_ns < replay(graph).step_ns


def test_gains_are_those_of_steps_without_the_profiler(tmp_path):
    """Forward of profiled steps is 1.5 ms longer on the host than that of the others."""
    made = make_loading_and_syncing(steps=10)
    plain = report_on(tmp_path / "plain", made)
    folder = tmp_path / "run"
    lines = []
    for number in range(1, 31):
        is_profiled = 10 <= number < 20
        phases_ms = {"forward": 0.65 if is_profiled else 0.5}
        lines.append(run_maker.step(number, ms=1.65 if is_profiled else 1.5, phases_ms=phases_ms, profiled=is_profiled))
    run_maker.folder(folder, lines)
    report = report_on(folder, made)
    gains = report.gains
    assert gains.recording_ms > 0 and gains.is_without_profiler and not plain.gains.is_without_profiler
    assert gains.step_ms + gains.recording_ms == pytest.approx(report.facts.critical.time.step_ms)
    check_sums(report)


def test_what_other_jobs_take_in_the_window_is_not_the_profilers_work(tmp_path):
    """Profiled steps are 0.3 ms longer, for which the main thread had no core."""
    lines = []
    for number in range(1, 31):
        is_profiled = 10 <= number < 16
        phases_ms = {"forward": 0.6 if is_profiled else 0.3}
        wait_ms = 0.3 if is_profiled else 0.0
        ms = 1.2 + wait_ms
        made = run_maker.step(number, ms, phases_ms=phases_ms, profiled=is_profiled, cpu_ms=1.0, core_wait_ms=wait_ms)
        lines.append(made)
    run_maker.folder(tmp_path, lines)
    report = report_on(tmp_path, make_loading_and_syncing())
    assert report.gains.recording_ms == pytest.approx(0, abs=1e-9) and not report.gains.is_without_profiler
    check_sums(report)
