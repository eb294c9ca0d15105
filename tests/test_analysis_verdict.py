"""The first line: true statements, or the reason why there is none."""

import dataclasses
import json

import pytest
import report_cases as cases
from training_maker import gpu, ordinary_steps, run

from megatron_lite.analysis.analyze import analyze, describe_run
from megatron_lite.analysis.audit.answers import Answer
from megatron_lite.analysis.audit.audit import audit_run
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.verdict import build_verdict
from megatron_lite.report.sections.all import run_section

NOTHING = {"ranks": None, "snapshots": (), "run": None, "gaps": ()}


def facts(device="NVIDIA H100 80GB HBM3", mfu=None, **time) -> Facts:
    """One rank alone."""
    kernels = dataclasses.replace(cases.rank_kernels(0), mfu=mfu)
    rank = RankFacts(
        trace=cases.trace(0, device), placing=cases.placing(), time=cases.rank_time(0, device, **time), kernels=kernels
    )
    return Facts(**{**NOTHING, "ranks_seen": (rank,)})


def sentence(**given) -> str:
    return build_verdict(facts(**given), ()).sentence


def test_the_largest_losses_are_named_with_the_peak():
    assert sentence(mfu=0.31) == "31% of peak; 20% of each step waits for communication, 10% waits for the host"


def test_without_a_peak_the_gpu_s_own_share_leads():
    assert sentence().startswith("The GPU computes 60% of each step; 20%")


def test_a_cpu_trace_never_speaks_of_gpus():
    for rows in (cases.ROWS, {"compute": 30.0, "host": 50.0, "save": 20.0}, {"compute": 100.0}):
        verdict = build_verdict(facts(device=None, rows=rows), cases.findings())
        assert "GPU" not in verdict.sentence and "kernel" not in verdict.sentence
    assert "50% of each step goes to Python between operators" in sentence(
        device=None, rows={"compute": 30.0, "host": 50.0}
    )


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
    assert build_verdict(facts(rows=rows), ()).bound == bound


def test_a_run_that_computes_says_what_costs_most_in_it():
    rows = {"compute": 97.0, "host": 3.0}
    dear = dataclasses.replace(cases.findings()[0], title="matrix products in fp32", cost_ms=44.0)
    assert "most costly cause: matrix products in fp32 (44 ms)" in build_verdict(facts(rows=rows), (dear,)).sentence
    assert "40% of device time is matrix products" in build_verdict(facts(rows=rows), ()).sentence


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"number": 3, "steady": 1}, "only one steady step; profile a window of 3 or more"),
        ({"number": 2, "steady": 0}, "none of the 2 steps is steady (first of the window)"),
        ({"number": 0}, "no complete step in the trace"),
        ({"step_ms": 0.0}, "no complete step in the trace"),
    ],
)
def test_too_little_to_say_anything_is_inconclusive(changes, why):
    verdict = build_verdict(facts(**changes), ())
    assert (verdict.bound, verdict.confidence, verdict.why) == ("inconclusive", "low", why)
    assert verdict.sentence.startswith(f"INCONCLUSIVE: {why}")


def test_what_nobody_can_explain_is_no_verdict():
    verdict = build_verdict(facts(rows={"compute": 60.0, "host": 10.0, "unexplained": 30.0}), ())
    assert (verdict.bound, verdict.why) == ("inconclusive", "30% of the step is unexplained, more than any cause")


def test_a_trace_without_step_marks_says_so():
    alone = facts(number=1)
    step = dataclasses.replace(alone.critical.time.steps[0], number=None)
    time = dataclasses.replace(alone.critical.time, steps=(step,))
    unmarked = dataclasses.replace(alone, ranks_seen=(dataclasses.replace(alone.critical, time=time),))
    assert "no step marks" in build_verdict(unmarked, ()).sentence


def test_a_profiler_that_distorts_is_inconclusive_and_one_that_disturbs_lowers_confidence():
    for profiled_ms, bound, confidence in (
        (200.0, "inconclusive", "low"),
        (120.0, "communication", "low"),
        (101.0, "communication", "high"),
    ):
        run = dataclasses.replace(cases.run_of(), profiled_step_ms=profiled_ms, before_profile_ms=100.0)
        verdict = build_verdict(dataclasses.replace(facts(), run=run), ())
        assert (verdict.bound, verdict.confidence) == (bound, confidence)


def test_confidence_needs_three_steps_alike_and_explained():
    assert build_verdict(facts(), ()).confidence == "high"
    assert build_verdict(facts(number=2), ()).why == "2 steady steps; 3 or more would say it with confidence"
    assert (
        "25% of the step is unexplained"
        in build_verdict(facts(rows={"compute": 45.0, "host": 30.0, "unexplained": 25.0}), ()).why
    )
    uneven = tuple(
        dataclasses.replace(step, end_ns=step.end_ns + at * 50_000_000) for at, step in enumerate(cases.steps(4))
    )
    alone = facts()
    time = dataclasses.replace(alone.critical.time, steps=uneven)
    verdict = build_verdict(
        dataclasses.replace(alone, ranks_seen=(dataclasses.replace(alone.critical, time=time),)), ()
    )
    assert verdict.confidence == "low" and "steps differ by" in verdict.why


def test_a_rank_that_others_wait_for_is_named():
    assert (
        "the other ranks wait 15 ms per step for rank 1"
        in build_verdict(
            dataclasses.replace(
                facts(),
                ranks=dataclasses.replace(
                    cases.ranks_of(), straggler=dataclasses.replace(cases.ranks_of().straggler, caused_wait_ms=15.0)
                ),
            ),
            (),
        ).sentence
    )
    assert (
        "wait"
        not in build_verdict(dataclasses.replace(facts(rows={"compute": 100.0}), ranks=cases.ranks_of()), ()).sentence
    )


def test_without_a_trace_memory_or_the_run_speaks():
    alone = Facts(**{**NOTHING, "ranks_seen": (), "snapshots": (cases.snapshot(),)})
    assert build_verdict(alone, ()).sentence == (
        "Memory peaks at 32.00 GiB in backward: activations 38%, moments 25%, master weights 12%"
    )
    alone = Facts(**{**NOTHING, "ranks_seen": (), "run": cases.run_of()})
    assert build_verdict(alone, ()).sentence.startswith(
        "95.5 ms per step, 171,000 tokens/s, 33% of peak. INCONCLUSIVE: no trace"
    )
    cut = dataclasses.replace(cases.snapshot(), complete=False, peak_bytes=0, held=())
    verdict = build_verdict(Facts(**{**NOTHING, "ranks_seen": (), "snapshots": (cut,)}), ())
    assert (verdict.confidence, verdict.why) == ("low", "120,000 events; the record dropped older events")


def test_the_title_names_what_is_known():
    whole = cases.report().facts
    assert describe_run(["runs/run-1"], whole) == "run-1: 2 ranks, NVIDIA H100 80GB HBM3, GPT 24 x 1024"
    fewer = dataclasses.replace(whole, ranks_seen=whole.ranks_seen[:1], run=None)
    assert describe_run(["a.json", "b.json"], fewer) == "a.json and 1 more: 1 of 2 ranks, NVIDIA H100 80GB HBM3"
    assert (
        describe_run(["s.pickle"], Facts(**{**NOTHING, "ranks_seen": (), "snapshots": (cases.snapshot(),)}))
        == "s.pickle: 1 snapshot"
    )
    odd = dataclasses.replace(cases.run_of(), plan={"shape": 3, "world": "x"}, record={"hardware": []})
    assert describe_run(["run-2"], Facts(**{**NOTHING, "ranks_seen": (), "run": odd})) == "run-2"


def test_processes_without_ranks_are_not_called_ranks():
    seen = tuple(
        dataclasses.replace(
            one,
            trace=dataclasses.replace(one.trace, rank=None, world_size=None),
            time=dataclasses.replace(one.time, rank=None),
        )
        for one in cases.report().facts.ranks_seen
    )
    assert describe_run(["job.sqlite"], Facts(**{**NOTHING, "ranks_seen": seen})).startswith(
        "job.sqlite: 2 processes, "
    )


def run_verdict(folder, **columns) -> str:
    """Of a made run beside a GPU trace."""
    gpu(folder)
    run(folder, ordinary_steps(**columns), clip_grad=1.0)
    return analyze([folder]).verdict.sentence


def test_a_run_that_learned_nothing_says_so_first(tmp_path):
    skipped = run_verdict(tmp_path / "skipped", skipped=True, loss=None, grad_norm=None)
    assert skipped.startswith("Nothing was learned: all 40 steps were skipped, because a gradient was not finite. ")
    lost = run_verdict(tmp_path / "lost", loss=None)
    assert lost.startswith("Nothing was learned: the loss was not finite in all 40 updates. ")
    assert "learned" not in run_verdict(tmp_path / "some", skipped=lambda index: index < 39)


def test_what_a_run_learned_is_a_fact_of_its_report(tmp_path):
    gpu(tmp_path)
    run(tmp_path, ordinary_steps(loss=lambda index: 3.0 + index / 100, grad_norm=20.0), clip_grad=1.0)
    told = run_section(analyze([tmp_path]), False).blocks[0].texts
    assert "the loss did not fall: 3.035 in the first 8 updates, 3.355 in the last 8" in told
    assert "the gradient norm is cut in every update, to 1/20 in the median (--clip-grad)" in told
    run(tmp_path, ordinary_steps(grad_norm=lambda index: 20.0 if index else 9.0), clip_grad=1.0)
    told = run_section(analyze([tmp_path]), False).blocks[0].texts
    assert "the loss fell: 2.997 in the first 8 updates, 2.965 in the last 8" in told
    assert "gradient norm" not in " ".join(told)


BOUNDS = {
    "compute": {"compute": 90.0, "host": 10.0},
    "communication": {"compute": 60.0, "exposed_communication": 40.0},
    "copy": {"compute": 60.0, "exposed_copy": 40.0},
    "data": {"compute": 50.0, "data_wait": 50.0},
    "sync": {"compute": 60.0, "sync": 40.0},
    "host": {"compute": 60.0, "host": 40.0},
    "save": {"compute": 60.0, "save": 40.0},
}
CUT = "t.json: the JSON breaks off after byte 7; what stands before it was read"
RUN = dataclasses.replace(cases.run_of(), plan={"device": "cuda", "world": {"size": 2}}, profiled=(False, True, True))
CONTRADICTIONS = {
    "a damaged file": ({"damage": (CUT,)}, None, CUT),
    "a run on a CPU": (
        {},
        dataclasses.replace(RUN, plan={"device": "cpu"}),
        "the run was on a CPU, and the trace holds a GPU's work",
    ),
    "another run": (
        {},
        dataclasses.replace(RUN, plan={"device": "cuda", "world": {"size": 8}}),
        "the trace is of 2 ranks, the run of 8",
    ),
    "another step time": (
        {},
        dataclasses.replace(RUN, profiled_step_ms=300.0, before_profile_ms=300.0),
        "a step takes 100.0 ms in the trace and 300.0 ms by the run's own clock (steps.jsonl)",
    ),
}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_contradictory_evidence_lowers_the_confidence_of_every_verdict(bound, what):
    changes, run_, says = CONTRADICTIONS[what]
    sound = dataclasses.replace(facts(rows=BOUNDS[bound]), run=RUN)
    verdict = build_verdict(sound, ())
    assert (verdict.bound, verdict.confidence) == (bound, "high")
    rank = dataclasses.replace(sound.critical, trace=dataclasses.replace(sound.critical.trace, **changes))
    verdict = build_verdict(dataclasses.replace(sound, ranks_seen=(rank,), run=run_ or RUN), ())
    assert (verdict.bound, verdict.confidence) == (bound, "low") and says in verdict.why


def test_more_than_the_peak_is_impossible():
    verdict = build_verdict(facts(mfu=1.2), ())
    assert verdict.confidence == "low" and "120% of the peak is impossible" in verdict.why


def test_a_wait_for_data_that_the_host_s_clock_does_not_know_is_doubtful():
    for waits, confidence in (((0.1, 0.2, 0.2), "low"), ((0.1, 45.0, 50.0), "high")):
        run_ = dataclasses.replace(RUN, phases_ms={"data": waits})
        verdict = build_verdict(dataclasses.replace(facts(rows=BOUNDS["data"]), run=run_), ())
        assert (verdict.bound, verdict.confidence) == ("data", confidence)
    run_ = dataclasses.replace(run_, phases_ms={"data": (0.0,) * 3})
    verdict = build_verdict(dataclasses.replace(facts(rows=BOUNDS["data"]), run=run_), ())
    assert "the trace has 50.0 ms per step of waiting for the loader, and steps.jsonl 0.0 ms" in verdict.why


def test_a_snapshot_without_the_allocator_s_peak_is_doubtful():
    for peak, confidence in ((40 * 2**30, "low"), (33 * 2**30, "high")):
        run_ = dataclasses.replace(cases.run_of(), peak_memory_bytes=(float("nan"), peak, peak))
        verdict = build_verdict(
            Facts(**{**NOTHING, "ranks_seen": (), "snapshots": (cases.snapshot(),), "run": run_}), ()
        )
        assert (verdict.bound, verdict.confidence) == ("memory", confidence)
    dropped = dataclasses.replace(cases.snapshot(), complete=False)
    verdict = build_verdict(Facts(**{**NOTHING, "ranks_seen": (), "snapshots": (dropped,)}), ())
    assert verdict.why == "120,000 events; the record dropped older events"


def without(write, *categories):
    """A made trace that has lost all events of some categories."""

    def change(folder):
        path = write(folder)
        data = json.loads(path.read_text())
        data["traceEvents"] = [one for one in data["traceEvents"] if one["cat"] not in categories]
        path.write_text(json.dumps(data))

    return change


def test_a_gpu_trace_without_its_kernels_is_no_cpu_run(tmp_path):
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    without(gpu, *device)(tmp_path)
    report = analyze([tmp_path])
    assert report.verdict.sentence.startswith("INCONCLUSIVE: the trace holds 35 kernel launches and no kernel")
    assert report.title.endswith("NVIDIA H100 80GB HBM3 without its work")
    without(gpu, *device, "cuda_runtime")(tmp_path)
    said = analyze([tmp_path]).verdict.sentence
    assert "names a GPU (NVIDIA H100 80GB HBM3) and holds none of its work: a CPU's job, or no CUDA activities" in said
    run(tmp_path, device="cpu", world=2)
    assert analyze([tmp_path]).verdict.confidence == "high"
    run(tmp_path, world=2)
    assert "the run was on a GPU, and the trace holds none of its work" in analyze([tmp_path]).verdict.sentence


def test_a_gpu_trace_that_breaks_off_is_no_cpu_run(tmp_path):
    data = json.loads(gpu(tmp_path).read_text())
    data["traceEvents"].sort(key=lambda one: one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"))
    text = json.dumps(data)
    [path] = tmp_path.iterdir()
    path.write_text(text[: min(text.index(f'"cat": "{name}"') for name in ("kernel", "gpu_memcpy"))])
    report = analyze([path])
    assert report.verdict.bound == "inconclusive" and "no kernel" in report.verdict.why
    path.write_text(text[: text.rindex('"cat": "kernel"')])
    report = analyze([path])
    assert report.verdict.confidence == "low" and "the JSON breaks off" in report.verdict.why
    assert not [one for one in report.findings if one.certain]
    assert {point.answer for point in audit_run(report.facts, report.findings)} == {Answer.NOT_SEEN}


def test_launches_without_kernels_lower_confidence(tmp_path):
    path = gpu(tmp_path)
    data = json.loads(path.read_text())
    kernels = [one for one in data["traceEvents"] if one["cat"] == "kernel"]
    lost = {id(one) for one in kernels[::4]}
    data["traceEvents"] = [one for one in data["traceEvents"] if id(one) not in lost]
    path.write_text(json.dumps(data))
    verdict = analyze([path]).verdict
    assert verdict.confidence == "low" and "kernel launches have no kernel in the trace" in verdict.why
