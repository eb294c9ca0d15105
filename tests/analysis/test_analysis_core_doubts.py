"""What rests on the speed of a rank's host is certain only where it is known that the rank had its cores."""

import json

import pytest
from support.trace_maker import GLOO, NCCL_STREAM, MadeTrace
from support.training_maker import BF16_GEMM, cpu, ordinary_steps, run
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.compare.compare import compare
from megatron_lite.analysis.core_use import CoreUse, read_core_use
from megatron_lite.analysis.verdict_word import VerdictWord
from megatron_lite.formats.trace_header import CORES_IN_TRACE
from megatron_lite.report.sections.all import ranks_section

FREE = {"steps": 8, "ms": 12.0, "cpu_ms": 11.0, "core_wait_ms": 0.05, "involuntary_switches": 1}
TAKEN = FREE | {"core_wait_ms": 5.0}
SOME_TAKEN = FREE | {"core_wait_ms": 1.0}  # 8% of a step: no shortage, but a third of what the rank is late
STEP_US, STEPS = 12_000.0, 8
ALWAYS = [3_000.0] * STEPS
TURNS = [3_000.0, -3_000.0] * (STEPS // 2)
AT_TIMES = [0.0, 0.0, 5_000.0, 0.0] * (STEPS // 4)


def write_ranks(folder, late_us, cores=(None, None), on_gpu=False, in_kernels=True):
    """Two ranks without a run record, of which rank 1 (rank 0 where it is negative) reduces so many us later in each step.

    in_kernels: the late rank computes longer; else its device idles.
    """
    for rank, known in enumerate(cores):
        header = {} if known is None else {CORES_IN_TRACE: known}
        device = "NVIDIA H100 80GB HBM3" if on_gpu else None
        made = MadeTrace(rank, 2, device=device, **header)
        at = 0.0
        for number, late in enumerate(late_us):
            own = max(late, 0.0) if rank == 1 else max(-late, 0.0)
            ready, end = at + 6_000 + own, at + 6_300 + abs(late)
            computed = ready if in_kernels else at + 6_000
            if on_gpu:
                made.op("aten::mm", at + 5, at + 20)
                made.kernel(BF16_GEMM, at + 30, computed, at + 10)
                made.collective(ready + 1, end, ready - 20, elements=2**24, stream=NCCL_STREAM)
            else:
                made.op("aten::mm", at + 10, computed)
                made.gloo(ready + 1, end, thread=GLOO)
            made.annotation("forward", at + 2, ready)
            made.step(number, at, end + 5)
            at = end + 10
        made.write(folder)
    return analyze([folder])


def is_certain(report, code: str) -> bool:
    [found] = [one for one in report.findings if one.code == code]
    return found.certain


@pytest.mark.parametrize(
    ("late_us", "code"), [(ALWAYS, "straggler"), (TURNS, "late-in-turns"), (AT_TIMES, "late-at-times")]
)
def test_late_ranks_of_a_cpu_are_certain_only_if_their_cores_were_free(tmp_path, late_us, code):
    doubted = write_ranks(tmp_path / "unknown", late_us)
    assert doubted.findings[0].code == code and not is_certain(doubted, code)
    assert (doubted.verdict.word, doubted.verdict.confidence) == (VerdictWord.STRAGGLER, "low")
    assert wording("analysis/no-run-record") in doubted.verdict.why and "megatron-lite watch" in doubted.verdict.why
    assert any(wording("analysis/no-run-record") in piece.text for piece in doubted.findings[0].evidence)
    known = write_ranks(tmp_path / "known", late_us, (FREE, FREE))
    assert known.verdict.word is VerdictWord.STRAGGLER and wording("analysis/no-run-record") not in known.verdict.why
    # where a rank is late at times, steps differ, which is a doubt of its own
    assert known.verdict.confidence == ("low" if late_us is AT_TIMES else "high")
    assert is_certain(known, code) is (late_us is not AT_TIMES)


def test_cores_of_another_rank_say_nothing_of_the_late_one(tmp_path):
    report = write_ranks(tmp_path, ALWAYS, (FREE, None))
    assert not is_certain(report, "straggler") and report.verdict.confidence == "low"


def test_a_rank_that_had_no_core_is_no_straggler(tmp_path):
    report = write_ranks(tmp_path, ALWAYS, (FREE, TAKEN))
    assert report.verdict.word is VerdictWord.BUSY_MACHINE and report.verdict.confidence == "low"
    assert report.findings[0].code == "busy-machine"
    assert "straggler" not in [one.code for one in report.findings]
    assert str(report.findings[0].evidence[0].where).startswith("host_rank1.")


def test_waiting_for_a_core_must_not_explain_the_lateness(tmp_path):
    report = write_ranks(tmp_path, ALWAYS, (FREE, SOME_TAKEN))
    assert not is_certain(report, "straggler") and wording("analysis/rank-waited-for-cpu", 1, 1.0) in report.verdict.why


@pytest.mark.parametrize(("in_kernels", "certain"), [(True, True), (False, False)])
def test_a_gpu_that_computes_longer_needs_no_record_of_cores(tmp_path, in_kernels, certain):
    report = write_ranks(tmp_path, ALWAYS, on_gpu=True, in_kernels=in_kernels)
    found = report.facts.ranks.straggler
    assert found.rank == 1 and found.cause == ("compute" if in_kernels else "host")
    assert is_certain(report, "straggler") is certain
    assert (report.verdict.confidence == "high") is certain


def write_reduction(folder, start_us: float, end_us: float, cores):
    """Backward from 3 to 7 ms, and a reduction."""
    for rank in range(2):
        made = MadeTrace(rank, 2, device=None, **({CORES_IN_TRACE: cores} if cores else {}))
        for number in range(STEPS):
            at = STEP_US * number
            made.op("aten::mm", at + 10, at + 3_000)
            made.op("aten::mm", at + 3_010, at + 6_990)
            made.annotation("forward", at + 2, at + 3_005)
            made.annotation("backward", at + 3_006, at + 9_400)
            made.op("autograd::engine::evaluate_function: MmBackward0", at + 3_008, at + 6_995, sequence=1)
            made.gloo(at + start_us, at + end_us, thread=GLOO)
            made.annotation("optimizer_step", at + 9_401, at + 11_900)
            made.op("aten::_fused_adamw_", at + 9_410, at + 11_890)
            made.step(number, at, at + STEP_US - 5)
        made.write(folder)
    return analyze([folder])


@pytest.mark.parametrize(("code", "start_us"), [("no-overlap", 7_000), ("all-reduce-tail", 5_000)])
def test_exchanges_of_a_cpu_are_certain_only_if_cores_were_free(tmp_path, code, start_us):
    doubted = write_reduction(tmp_path / "unknown", start_us, 9_300, None)
    assert doubted.findings[0].code == code and not doubted.findings[0].certain
    known = write_reduction(tmp_path / "known", start_us, 9_300, FREE)
    assert known.findings[0].code == code and known.findings[0].certain


def test_waiting_for_others_on_a_cpu_has_low_confidence_without_a_record(tmp_path):
    for name, cores, confidence in (("unknown", None, "low"), ("known", FREE, "high")):
        verdict = write_reduction(tmp_path / name, 7_000, 11_000, cores).verdict
        assert (verdict.word, verdict.confidence) == (VerdictWord.COMMUNICATION_BOUND, confidence)


@pytest.mark.parametrize("record", ["none", "without CPU times", "with CPU times"])
def test_waiting_for_a_loader_is_certain_only_beside_a_record_of_cores(tmp_path, record):
    made = MadeTrace(0, 1, device=None)
    for number in range(STEPS):
        at = STEP_US * number
        made.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at + 5, at + 5_000)
        made.op("aten::mm", at + 5_010, at + 11_900)
        made.step(number + 10, at, at + STEP_US - 5)
    made.write(tmp_path)
    cores = {"core_wait_ms": 0.1, "cpu_ms": 7.0} if record == "with CPU times" else {}
    if record != "none":
        run(tmp_path, steps=ordinary_steps(ms=12.0, phase_data=5.0, **cores), device="cpu", world=1)
    assert is_certain(analyze([tmp_path]), "starved-loader") is bool(cores)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (FREE, CoreUse(8, 12.0, 11.0, 0.05, 1.0)),
        ({"steps": 3, "ms": 5.0}, CoreUse(3, 5.0, None, None, None)),
        ({"steps": 3, "ms": 5.0, "core_wait_ms": -1}, None),
        ({"steps": 3, "ms": 5.0, "cpu_ms": "many"}, None),
        ({"steps": 0, "ms": 5.0}, None),
        ({"ms": 5.0}, None),
        ([1, 2], None),
        (None, None),
        ({"steps": 1, "ms": float("inf")}, None),
    ],
)
def test_a_header_is_read_as_far_as_it_makes_sense(written, read):
    assert read_core_use(json.loads(json.dumps(written))) == read


@pytest.mark.parametrize(
    ("cores", "note"), [(None, "A: no run record"), (TAKEN, "A was measured on a busy machine"), (FREE, "")]
)
def test_a_comparison_of_traces_says_what_is_known_of_the_cores(tmp_path, cores, note):
    base = write_ranks(tmp_path / "a", [0.0] * STEPS, (cores, cores)).facts
    new = write_ranks(tmp_path / "b", ALWAYS, (FREE, FREE)).facts
    told = [text for text in compare(base, new).notes if text.startswith("A")]
    assert (len(told) == 1 and told[0].startswith(note)) if note else not told


def test_longer_steps_are_nobodys_without_cpu_times(tmp_path):
    inside = range(20, 26)
    longer = lambda at: 14.3 if at in inside else 10.0
    for name, times in (("unknown", {}), ("known", {"cpu_ms": longer, "core_wait_ms": 0.1})):
        cpu(tmp_path / name)
        steps = ordinary_steps(ms=longer, profiled=lambda at: at in inside, **times)
        run(tmp_path / name, steps=steps, device="cpu", world=1)
        report = analyze([tmp_path / name])
        [found] = [one for one in report.findings if one.code == "profiler-overhead"]
        said = any("no CPU time was recorded" in piece.text for piece in found.evidence)
        assert said is (name == "unknown")
        assert (wording("analysis/profiler-made-steps-longer", 43) in report.verdict.why) is (name == "known")


def test_the_table_of_ranks_says_what_is_not_known_of_the_late_one(tmp_path):
    for name, cores, said in (("unknown", None, True), ("known", FREE, False)):
        section = ranks_section(write_ranks(tmp_path / name, ALWAYS, (cores, cores)), everything=False)
        assert (wording("analysis/no-run-record") in str(section)) is said


def test_the_header_of_a_merged_file_tells_of_no_rank(tmp_path):
    """Merging scripts keep the header of the first file."""
    write_ranks(tmp_path / "single", ALWAYS, (FREE, FREE))
    events = []
    for rank in range(2):
        [path] = (tmp_path / "single").glob(f"host_rank{rank}.*")
        data = json.loads(path.read_text())
        events += [event | {"pid": f"rank{rank}_{event['pid']}"} for event in data["traceEvents"]]
    del data["distributedInfo"]
    (tmp_path / "merged.json").write_text(json.dumps(data | {"traceEvents": events}))
    report = analyze([tmp_path / "merged.json"])
    assert [one.trace.cores for one in report.facts.ranks_seen] == [None, None]
    assert report.facts.ranks.straggler.rank == 1 and not is_certain(report, "straggler")


@pytest.mark.parametrize(("cores", "certain"), [(None, False), (FREE, True)])
def test_a_slow_host_before_a_gpu_is_certain_only_if_its_cores_were_free(tmp_path, cores, certain):
    made = MadeTrace(0, 1, device="NVIDIA H100 80GB HBM3", **({CORES_IN_TRACE: cores} if cores else {}))
    for number in range(STEPS):
        at = STEP_US * number
        for place in range(400):
            start = at + 10 + 25 * place
            made.op("aten::add", start, start + 15)
            made.kernel("elementwise_kernel", start + 13, start + 17, start + 5)
        made.step(number, at, at + 10_100)
    made.write(tmp_path)
    assert is_certain(analyze([tmp_path]), "launch-bound") is certain
