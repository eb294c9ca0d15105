"""The first line: true statements, or the reason why there is none."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from support import report_cases as cases
from support.training_maker import gpu, ordinary_steps, run
from support.wording import wording

from megatron_lite.analysis.analyze import analyze, describe_run
from megatron_lite.analysis.findings.base import CheckResult
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.verdict import build_verdict
from megatron_lite.formats.run_record import RunRecord
from megatron_lite.report.sections.all import run_section

NAN = float("nan")
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
H100 = "NVIDIA H100 80GB HBM3"


def only(**parts) -> Facts:
    """Of nothing but these parts."""
    return Facts(**{"ranks_seen": (), "ranks": None, "snapshots": (), "run": None, "gaps": (), **parts})


def facts(device=H100, mfu=None, **time) -> Facts:
    """One rank alone."""
    kernels = dataclasses.replace(cases.rank_kernels(0), mfu=mfu)
    trace, time = cases.trace(0, device), cases.rank_time(0, device, **time)
    return only(ranks_seen=(RankFacts(trace=trace, placing=cases.placing(), time=time, kernels=kernels),))


def changed(one: Facts, part: str, **changes) -> Facts:
    """With other values in a part of the only rank: its trace or its time."""
    rank = one.critical
    rank = dataclasses.replace(rank, **{part: dataclasses.replace(getattr(rank, part), **changes)})
    return dataclasses.replace(one, ranks_seen=(rank,))


def run_of(**changes):
    return dataclasses.replace(cases.run_of(), **changes)


def verdict_of(run=None, ranks=None, findings=(), **given):
    return build_verdict(dataclasses.replace(facts(**given), run=run, ranks=ranks), findings)


COSTLY = dataclasses.replace(cases.findings()[0], title="matrix products in fp32", cost_ms=44.0)
REPLAYED = dataclasses.replace(COSTLY, gain_ms=20.0, gain_is_bound=False)
SAVING_NOTHING = dataclasses.replace(REPLAYED, gain_ms=0.1)
STRAGGLER = dataclasses.replace(cases.ranks_of().straggler, caused_wait_ms=15.0)
LATE = dataclasses.replace(cases.ranks_of(), straggler=STRAGGLER)
UNKNOWN_KIND = cases.ranks_of("other")
COMPUTES = {"compute": 97.0, "host": 3.0}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": UNKNOWN_KIND}, "20% of each step is spent waiting for communication in backward"),
        ({"mfu": 0.31}, "31% of peak; 20% of each step is spent waiting for communication, 10% waiting for the host"),
        ({}, "The GPU computes 60% of each step; 20%"),
        ({"device": None, "rows": {"compute": 30.0, "host": 50.0}}, "50% of each step is spent on Python between"),
        ({"rows": COMPUTES, "findings": (COSTLY,)}, "most costly cause: matrix products in fp32 (44 ms)"),
        ({"rows": COMPUTES, "findings": (REPLAYED,)}, "largest saving: matrix products in fp32 (20 ms)"),
        # it is not the most costly one: that saves nothing by itself
        (
            {"rows": COMPUTES, "findings": (dataclasses.replace(COSTLY, cost_ms=30.0), SAVING_NOTHING)},
            "first cause: matrix products in fp32 (30 ms)",
        ),
        ({"rows": COMPUTES, "findings": (SAVING_NOTHING,)}, "40% of device time is matrix products"),
        ({"rows": COMPUTES}, "40% of device time is matrix products"),
        ({"ranks": LATE}, "the other ranks wait 15 ms per step for rank 1"),
    ],
)
def test_the_sentence_names_what_costs_most(given, says):
    sentence = verdict_of(**given).sentence
    assert says in sentence and sentence[0] == sentence[0].upper()


def test_what_is_small_or_not_there_is_not_named():
    assert "wait" not in verdict_of(rows={"compute": 100.0}, ranks=cases.ranks_of()).sentence
    for rows in (cases.ROWS, {"compute": 30.0, "host": 50.0, "save": 20.0}, {"compute": 100.0}):
        sentence = verdict_of(device=None, rows=rows, findings=cases.findings()).sentence
        assert "GPU" not in sentence and "kernel" not in sentence


@pytest.mark.parametrize(
    ("rows", "bound"),
    [
        ({"compute": 90.0, "host": 10.0}, "compute"),
        ({"compute": 60.0, "exposed_communication": 40.0}, "communication"),
        ({"compute": 60.0, "exposed_copy": 40.0}, "copy"),
        ({"compute": 30.0, "data_wait": 50.0, "host": 20.0}, "data"),
        ({"compute": 70.0, "host": 10.0, "launch": 8.0, "allocator": 7.0, "garbage_collector": 5.0}, "host"),
        ({"compute": 60.0, "sync": 30.0, "host": 10.0}, "sync"),
        ({"compute": 5.0, "host": 12.0}, "host"),
        ({}, "compute"),
    ],
)
def test_what_bounds_the_run_is_its_largest_loss_where_that_decides(rows, bound):
    assert verdict_of(rows=rows).bound == bound


UNEXPLAINED = {"compute": 60.0, "host": 10.0, "unexplained": 30.0}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"number": 3, "steady": 1}, "only one steady step; profile at least 3"),
        ({"number": 2, "steady": 0}, "none of the 2 steps is steady (first of the window)"),
        ({"number": 0}, "no complete step in the trace"),
        ({"step_ms": 0.0}, "no complete step in the trace"),
        ({"rows": UNEXPLAINED}, "30% of the step is unexplained, more than any cause"),
    ],
)
def test_too_little_to_say_anything_is_inconclusive(given, why):
    verdict = verdict_of(**given)
    assert (verdict.bound, verdict.confidence, verdict.why) == ("inconclusive", "low", why)
    assert verdict.sentence.startswith(f"INCONCLUSIVE: {why}")


def test_a_trace_without_step_marks_says_so():
    alone = facts(number=1)
    steps = (dataclasses.replace(alone.critical.time.steps[0], number=None),)
    assert wording("analysis/no-step-marks") in build_verdict(changed(alone, "time", steps=steps), ()).sentence


def test_a_profiler_that_distorts_is_inconclusive_and_one_that_disturbs_lowers_confidence():
    told = {200.0: ("inconclusive", "low"), 120.0: ("communication", "low"), 101.0: ("communication", "high")}
    for profiled_ms, expected in told.items():
        verdict = verdict_of(run_of(profiled_step_ms=profiled_ms, before_profile_ms=100.0))
        assert (verdict.bound, verdict.confidence) == expected


def test_confidence_needs_three_steps_alike_and_explained_and_a_possible_speed():
    assert verdict_of().confidence == "high"
    assert verdict_of(number=2).why == wording("analysis/steady-steps-profile-at", 2, 3)
    doubtful = verdict_of(rows={"compute": 45.0, "host": 30.0, "unexplained": 25.0})
    assert wording("analysis/of-step-is-unexplained", 25) in doubtful.why
    uneven = [dataclasses.replace(one, end_ns=one.end_ns + at * 50_000_000) for at, one in enumerate(cases.steps(4))]
    verdict = build_verdict(changed(facts(), "time", steps=tuple(uneven)), ())
    assert verdict.confidence == "low" and wording("analysis/steps-differ-by") in verdict.why
    verdict = verdict_of(mfu=1.2)
    assert verdict.confidence == "low" and wording("analysis/of-peak-is-impossible", 120) in verdict.why


@pytest.mark.parametrize(("steps", "window"), [(3, None), (5, "2:6"), (8, "3:9"), (15, "10:16"), (100, "10:16")])
def test_the_window_proposed_for_a_watched_run_is_within_its_steps(steps, window):
    watched = dataclasses.replace(cases.run_of(steps), record=cases.record_of(None, command=["python"]))
    sentence = build_verdict(only(run=watched), ()).sentence
    assert wording("analysis/inconclusive-no-steps-were") in sentence
    assert (f"--steps {window}`" in sentence) == (window is not None)
    assert ("--steps" in sentence) == (window is not None)


def test_without_a_trace_memory_or_the_run_speaks():
    verdict = build_verdict(only(snapshots=(cases.snapshot(),)), ())
    assert verdict.sentence == wording("analysis/memory-peaks-at-gib-in", "32.00", 38, 25, 12)
    verdict = build_verdict(only(run=cases.run_of()), ())
    assert verdict.sentence.startswith(wording("analysis/ms-per-step-tokens", 95.5, "171,000", 33))
    for changes in ({}, {"peak_bytes": 0, "held": ()}):
        cut = dataclasses.replace(cases.snapshot(), complete=False, **changes)
        verdict = build_verdict(only(snapshots=(cut,)), ())
        assert (verdict.confidence, verdict.why) == (
            "low",
            wording("analysis/events-more-than-of", "120,000", 1),
        )


def test_the_title_names_what_is_known():
    whole = cases.report().facts
    assert describe_run(["runs/run-1"], whole) == f"run-1: 2 ranks, {H100}, GPT 24 x 1024"
    fewer = dataclasses.replace(whole, ranks_seen=whole.ranks_seen[:1], run=None)
    assert describe_run(["a.json", "b.json"], fewer) == f"a.json and 1 more: 1 of 2 ranks, {H100}"
    assert describe_run(["s.pickle"], only(snapshots=(cases.snapshot(),))) == "s.pickle: 1 snapshot"
    odd = run_of(record=RunRecord())
    assert describe_run(["run-2"], only(run=odd)) == "run-2"
    nameless = changed(facts(), "trace", rank=None, world_size=None)
    [seen] = changed(nameless, "time", rank=None).ranks_seen  # a process without a rank
    assert describe_run(["job.sqlite"], only(ranks_seen=(seen, seen))).startswith("job.sqlite: 2 processes, ")


def report_of(folder, **columns):
    """Of a made run beside a GPU trace."""
    gpu(folder)
    run(folder, ordinary_steps(**columns), clip_grad=1.0)
    return analyze([folder])


def test_a_run_that_learned_nothing_says_so_first(tmp_path):
    skipped = report_of(tmp_path / "skipped", skipped=True, loss=None, grad_norm=None).verdict.sentence
    assert skipped.startswith(wording("analysis/nothing-was-learned-all", 40))
    lost = report_of(tmp_path / "lost", loss=None).verdict.sentence
    assert lost.startswith(wording("analysis/nothing-was-learned-loss", 40))
    assert "learned" not in report_of(tmp_path / "some", skipped=lambda index: index < 39).verdict.sentence


def test_what_a_run_learned_is_a_fact_of_its_report(tmp_path):
    def told(name, **columns):
        return run_section(report_of(tmp_path / name, **columns), False).blocks[0].texts

    rises = told("rises", loss=lambda index: 3.0 + index / 100, grad_norm=20.0)
    assert wording("analysis/loss-did-not-fall", 3.035, 8, 3.355, 8) in rises
    assert wording("analysis/scales-gradient-down-in", "--clip-grad", 1, 20) in rises
    falls = told("falls", grad_norm=lambda index: 20.0 if index else 9.0)
    assert wording("analysis/loss-fell-in-first", 2.997, 8, 2.965, 8) in falls
    assert not any("gradient norm" in text for text in falls)


BOUNDS = {
    "compute": {"compute": 90.0, "host": 10.0},
    "communication": {"compute": 60.0, "exposed_communication": 40.0},
    "copy": {"compute": 60.0, "exposed_copy": 40.0},
    "data": {"compute": 50.0, "data_wait": 50.0},
    "sync": {"compute": 60.0, "sync": 40.0},
    "host": {"compute": 60.0, "host": 40.0},
    "save": {"compute": 60.0, "save": 40.0},
}
CUT = "t.json: the JSON breaks off after byte 7; what precedes it was read"
RUN = run_of(record=cases.record_of({"device": "cuda", "world": {"size": 2}}), profiled=np.array([False, True, True]))
CONTRADICTIONS = {  # changes of the trace, changes of the run, what is said
    "a damaged file": ({"damage": (CUT,)}, {}, CUT),
    "a run on a CPU": (
        {},
        {"record": cases.record_of({"device": "cpu"})},
        "the run was on a CPU, and the trace holds a GPU's work",
    ),
    "another run": (
        {},
        {"record": cases.record_of({"device": "cuda", "world": {"size": 8}})},
        "the trace is of 2 ranks, the run of 8",
    ),
    "another step time": (
        {},
        {"profiled_step_ms": 300.0, "before_profile_ms": 300.0},
        "a step takes 100.0 ms in the trace and 300.0 ms by the run's own clock (steps.jsonl)",
    ),
}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictory_evidence_lowers_the_confidence_of_every_verdict(bound, what):
    of_trace, of_run, says = CONTRADICTIONS[what]
    sound = dataclasses.replace(facts(rows=BOUNDS[bound]), run=RUN)
    verdict = build_verdict(sound, ())
    assert (verdict.bound, verdict.confidence) == (bound, "high")
    doubtful = dataclasses.replace(changed(sound, "trace", **of_trace), run=dataclasses.replace(RUN, **of_run))
    verdict = build_verdict(doubtful, ())
    assert (verdict.bound, verdict.confidence) == (bound, "low") and says in verdict.why


def test_sources_that_say_different_things_are_doubtful():
    """A wait for data that the host's clock does not know; a snapshot without the allocator's peak."""
    for waits, confidence in (((0.1, 0.2, 0.2), "low"), ((0.1, 45.0, 50.0), "high"), ((0.0,) * 3, "low")):
        run_ = dataclasses.replace(RUN, phases_ms={"data": np.array(waits)})
        verdict = verdict_of(run_, rows=BOUNDS["data"])
        assert (verdict.bound, verdict.confidence) == ("data", confidence)
    assert wording("analysis/trace-has-ms-per", 50.0, 0.0) in verdict.why
    assert (
        verdict_of(
            dataclasses.replace(run_, record=cases.record_of({"world": {"size": 2, "rank": 1}})), rows=BOUNDS["data"]
        ).confidence
        == "high"
    )
    for peak_gib, confidence in ((40, "low"), (33, "high")):
        run_ = run_of(peak_memory_bytes=np.array([NAN, peak_gib, peak_gib]) * 2**30)
        verdict = build_verdict(only(snapshots=(cases.snapshot(),), run=run_), ())
        assert (verdict.bound, verdict.confidence) == ("memory", confidence)


def drop_events(path, drop):
    """Rewrite a made trace without the events of which drop(event) is true."""
    data = json.loads(path.read_text())
    data["traceEvents"] = [one for one in data["traceEvents"] if not drop(one)]
    path.write_text(json.dumps(data))


def test_a_gpu_trace_without_its_kernels_is_no_cpu_run(tmp_path):
    path = gpu(tmp_path)
    drop_events(path, lambda one: one["cat"] in DEVICE_EVENTS)
    report = analyze([tmp_path])
    assert report.verdict.sentence.startswith(wording("analysis/inconclusive-trace-holds-kernel", 35))
    assert report.title.endswith(wording("analysis/without-its-work-2", H100))
    drop_events(path, lambda one: one["cat"] == "cuda_runtime")
    said = analyze([tmp_path]).verdict.sentence
    assert wording("analysis/names-device-and-holds", H100) in said
    run(tmp_path, device="cpu", world=2)
    assert analyze([tmp_path]).verdict.confidence == "high"
    run(tmp_path, world=2)
    assert wording("analysis/run-was-on-gpu") in analyze([tmp_path]).verdict.sentence


def test_a_gpu_trace_that_breaks_off_is_no_cpu_run(tmp_path):
    path = gpu(tmp_path)
    data = json.loads(path.read_text())
    data["traceEvents"].sort(key=lambda one: one["cat"] in DEVICE_EVENTS)
    text = json.dumps(data)
    path.write_text(text[: min(text.index(f'"cat": "{name}"') for name in ("kernel", "gpu_memcpy"))])
    report = analyze([path])
    assert report.verdict.bound == "inconclusive" and "no kernel" in report.verdict.why
    path.write_text(text[: text.rindex('"cat": "kernel"')])
    report = analyze([path])
    assert report.verdict.confidence == "low" and "the JSON breaks off" in report.verdict.why
    assert not [one for one in report.findings if one.certain]
    assert {check.answer for check in report.checks} == {CheckResult.NOT_VISIBLE}


def test_launches_without_kernels_lower_confidence(tmp_path):
    path, kernels = gpu(tmp_path), itertools.count()
    drop_events(path, lambda one: one["cat"] == "kernel" and next(kernels) % 4 == 0)
    verdict = analyze([path]).verdict
    assert verdict.confidence == "low" and wording("analysis/kernel-launches-have-no") in verdict.why
