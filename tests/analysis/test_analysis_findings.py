"""Every rule finds its made cause and passes by the near miss; every page says what a page must."""

import dataclasses
import re
from pathlib import Path

import pytest
from support import report_cases
from support.finding_cases import (
    ANSWERS,
    CASES,
    CLEAN,
    EDITED,
    GATHER,
    MORE_NEAR_MISSES,
    MORE_TRIGGERS,
    THIN,
    both,
    gpu,
    on_gpu,
    python_works,
    rank_lines,
    ranks_late,
    recorded,
)
from support.paths import SHARED
from support.trace_maker import GLOO, MadeTrace
from support.training_maker import FP32_GEMM, SIMT_GEMM, ordinary_steps
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings.base import Finding, rule
from megatron_lite.analysis.findings.rules import RULES, apply_rules, get_page
from megatron_lite.analysis.findings.settings import read_settings
from megatron_lite.analysis.graph.build import build_graph
from megatron_lite.analysis.graph.replay import replay
from megatron_lite.analysis.kernels.kernel_results import TensorCores
from megatron_lite.analysis.ranks.rank_results import Straggler
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.config.args import Args
from megatron_lite.config.flags import list_flags

TRAINER_FLAGS = {spelling for flag in list_flags(Args) for spelling in flag.spellings}
DIVISIBLE = "--make-vocab-size-divisible-by"
PARTS = ("Meaning:", "Measured:", "Cost:", "Do:", "Flags of this trainer:", "False alarm:")
WIDE, FP32 = [4096, 16384], {"dtypes": ["float", "float"], "gemm": FP32_GEMM}
BUSY_3 = {"core_wait_ms": [0.5, 4.0, 0.5], "involuntary_switches": [1, 4, 1], "cpu_ms": [9.0, 6.0, 9.0]}
NOTHING = Facts((), None, (), None, ())
triggers = [*((code, case[0]) for code, case in CASES.items()), *MORE_TRIGGERS]
near_misses = [*((code, case[1]) for code, case in CASES.items()), *MORE_NEAR_MISSES]
REAL = [*sorted(filter(Path.is_dir, (SHARED / "traces").glob("*"))), *sorted((SHARED / "snapshots").glob("*.pickle"))]
NEEDS_REAL = pytest.mark.skipif(not REAL, reason="no ../shared/traces beside the repository")


def report_on(folder, write) -> Report:
    write(folder)
    report = analyze([folder])
    assert [gap for gap in report.facts.gaps if "mistake" in gap or wording("analysis/could-not-be") in gap] == []
    return report


def found_in(folder, write) -> list:
    return list(report_on(folder, write).findings)


@pytest.mark.parametrize(("code", "write"), triggers, ids=[code for code, _ in triggers])
def test_the_cause_is_found(tmp_path, code, write):
    report = report_on(tmp_path, write)
    mine = [one for one in report.findings if one.code == code]
    assert len(mine) == 1
    [one] = mine
    check_gain(one, report)
    assert one.evidence and all(piece.text and "\n" not in piece.text for piece in one.evidence)
    assert one.advice and "\n" not in one.advice
    said = " | ".join([one.advice, *(piece.text for piece in one.evidence)])
    assert "nan" not in said.lower().split()
    settings = [setting for together in one.settings for setting in together]
    assert all(
        setting.name.isupper() if setting.kind == "variable" else setting.name in TRAINER_FLAGS for setting in settings
    )
    assert len(one.settings) >= len(one.flags)
    if write is CASES[code][0]:
        assert (one.edit is not None) == (code in EDITED)
    if write is CASES[code][0] and code in ANSWERS:
        cost, words = ANSWERS[code]
        assert words in said and (not cost or one.cost_ms == pytest.approx(float(cost), rel=0.05))


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--num-workers 4", [("flag", "--num-workers", "4")]),
        ("--num-workers N", [("flag", "--num-workers", "")]),
        ("--async-save", [("flag", "--async-save", "")]),
        ("--profile-ranks -1", [("flag", "--profile-ranks", "-1")]),
        ("without --log-params-norm", [("flag", "--log-params-norm", None)]),
        (
            "--manual-gc --manual-gc-interval 100",
            [("flag", "--manual-gc", ""), ("flag", "--manual-gc-interval", "100")],
        ),
        ("--pipeline-model-parallel-layout 'Et|tL'", [("flag", "--pipeline-model-parallel-layout", "Et|tL")]),
        ("OMP_NUM_THREADS=2", [("variable", "OMP_NUM_THREADS", "2")]),
        ("TORCHINDUCTOR_CACHE_DIR", [("variable", "TORCHINDUCTOR_CACHE_DIR", "")]),
        ("PYTORCH_CUDA_ALLOC_CONF=a:True,b:1", [("variable", "PYTORCH_CUDA_ALLOC_CONF", "a:True,b:1")]),
    ],
)
def test_what_a_flag_sets_is_read(flag, settings):
    assert [(one.kind, one.name, one.value) for one in read_settings(flag)] == settings


def check_gain(one: Finding, report: Report) -> None:
    """A bound is no more than the cost; a change of the graph, also where nothing is claimed by it, makes no step longer."""
    assert one.gain_ms is None or one.gain_ms >= 0
    if one.gain_is_bound:
        assert one.gain_ms is None or one.gain_ms <= one.cost_ms * (1 + 1e-9)
    if one.edit is None:
        assert one.gain_is_bound
        return
    graph = build_graph([(rank.trace, rank.placing) for rank in report.facts.graph_ranks])
    before = replay(graph)
    after = replay(one.edit.apply(graph))
    assert before is None or after.step_ns <= before.step_ns


def straggler_of(folder, window, ordinary_ms) -> str:
    """All evidence of the finding, of traces of three ranks beside medians of a whole run."""
    write = both(window, recorded(ranks=rank_lines(ordinary_ms), world=3))
    [one] = [one for one in found_in(folder, write) if one.code == "straggler"]
    said = " | ".join(piece.text for piece in one.evidence)
    return f"rank {one.rank}, {'certain' if one.certain else 'likely'}: {said}"


@pytest.mark.parametrize(
    ("ranks", "stacks", "flags"),
    [(3, False, ("--pytorch-profiler-collect-callstack",)), (3, True, ()), (2, True, ("--profile-ranks -1",))],
)
def test_advice_about_a_straggler_asks_only_for_what_is_not_there(tmp_path, ranks, stacks, flags):
    for rank in range(ranks):
        gpu(tmp_path, rank, 3, header={"with_stack": int(stacks)})
    facts = analyze([tmp_path]).facts
    late = Straggler(1, 5.0, 0.9, cause="", cause_ms=0.0, phase="")
    found = RULES["straggler"](dataclasses.replace(facts, ranks=dataclasses.replace(facts.ranks, straggler=late)))
    advice = f"record it with {flags[0]}" if flags else "swap its node or GPU"
    assert found.flags == flags and found.advice.startswith(f"rank 1: {advice}")


def test_a_straggler_of_the_run_that_the_profiled_steps_do_not_show_says_both(tmp_path):
    other = straggler_of(tmp_path / "other", ranks_late(20), [3.0, 3.0, 5.0])
    assert other.startswith(wording("analysis/rank-likely-over-whole", 2, 2, 2.0))
    assert wording("analysis/rank-medians-in-steps", 1, 0.02) in other
    alike = straggler_of(tmp_path / "alike", ranks_late(20), [3.0, 5.0, 3.0])
    assert wording("analysis/in-profiled-steps-too", 0.02) in alike
    same = straggler_of(tmp_path / "same", ranks_late(1500), [3.0, 5.0, 3.0])
    assert same.startswith("rank 1, certain: ") and wording("analysis/whole-run") not in same


@pytest.mark.parametrize(
    ("line", "seen", "advice"),
    [
        (None, ", the longest stretch of it after aten::sum", "(with_stack=True) names the function; "),
        ("train.py(7): think", " in train.py(7): think", ""),
    ],
)
def test_python_at_work_on_a_cpu_is_named_by_phase_and_with_stacks_by_function(tmp_path, line, seen, advice):
    [found] = found_in(tmp_path, python_works(4_000, line))
    assert (found.code, found.title) == ("host-gaps", wording("report/python-between-operators"))
    assert found.cost_ms == pytest.approx(4.0, rel=0.05)
    assert found.edit is not None and found.gain_ms == pytest.approx(4.0, rel=0.05)
    assert wording("analysis/python-runs-for-millisecond", 4.0) in found.evidence[0].text
    assert (
        wording("analysis/ms-in-median-step", 4.0, seen) in found.evidence[1].text
        and found.evidence[1].where == "forward"
    )
    assert wording("analysis/take-that-work-out", advice) in found.advice


@pytest.mark.parametrize(
    ("tensor", "flags"), [(2, ("--num-distributed-optimizer-instances 2",)), (8, ("--micro-batch-size",))]
)
def test_weights_are_gathered_within_a_node_only_where_it_has_several_replicas(tmp_path, tensor, flags):
    """Of 8 ranks on a node tensor parallel ones have different parts of the model, and share out nothing with each other."""
    layout = {"tensor": tensor, "context": 1, "pipeline": 1, "data": 8}
    described = {"pg_name": "0", "pg_desc": "mesh_data", "pg_size": 2, "ranks": [0, 1]}
    told = {"backend": "nccl", "rank": 0, "world_size": 8 * tensor, "pg_config": [described]}
    plan = {"layout": layout, "sharding": {"ranks": 8, "gathers_twice": False}}
    plan["world"] = {"size": 8 * tensor, "local_size": 8}
    write = both(on_gpu(reduce="tail", collective=GATHER, header={"distributedInfo": told}), recorded(plan=plan))
    [found] = [one for one in found_in(tmp_path, write) if one.code == "parameter-gather"]
    assert found.flags == flags


@pytest.mark.parametrize(("code", "write"), near_misses, ids=[code for code, _ in near_misses])
def test_the_near_miss_is_not(tmp_path, code, write):
    assert code not in [one.code for one in found_in(tmp_path, write)]


@pytest.mark.parametrize("what", CLEAN)
def test_a_clean_run_has_no_finding_of_cost(tmp_path, what):
    assert [one for one in found_in(tmp_path, CLEAN[what]) if one.cost_ms or one.cost_bytes] == []


def test_codes_are_unique_and_speakable_and_have_their_cases():
    assert set(RULES) == set(CASES)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code) for code in RULES)


@pytest.mark.parametrize("code", RULES)
def test_a_page_says_all_that_it_must(code):
    page, title = get_page(code), RULES[code].title
    assert [part for part in PARTS if f"\n{part} " not in page] == []
    assert sorted(map(page.index, PARTS)) == list(map(page.index, PARTS))
    assert 8 <= len(page.splitlines()) <= 28
    assert title and title == title.strip() and len(title) < 60


def test_without_facts_no_rule_speaks():
    assert apply_rules(NOTHING) == ()
    assert get_page("no-such-code") is None


def test_a_rule_that_fails_is_a_named_gap(monkeypatch):
    @rule("broken-rule", "by a foreign file")
    def find_broken(facts):
        raise ZeroDivisionError("by a foreign file")

    gaps = []
    monkeypatch.setitem(RULES, "broken-rule", find_broken)
    assert apply_rules(NOTHING, gaps.append) == ()
    assert len(gaps) == 1 and "broken-rule" in gaps[0] and "by a foreign file" in gaps[0]


def test_the_most_costly_comes_first(tmp_path):
    some = found_in(tmp_path, CASES["starved-loader"][0])[0]
    prices = [(1.0, None), (None, 10), (3.0, None), (None, None), (None, 20)]
    made = [dataclasses.replace(some, cost_ms=ms, cost_bytes=size) for ms, size in prices]
    rules = {f"made-{k}": rule(f"made-{k}", "")(lambda facts, one=one: one) for k, one in enumerate(made)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_lite.analysis.findings.rules.RULES", rules)
        found = [(one.cost_ms, one.cost_bytes) for one in apply_rules(NOTHING)]
    assert found == [(3.0, None), (1.0, None), (None, 20), (None, 10), (None, None)]


@NEEDS_REAL
@pytest.mark.parametrize("path", REAL, ids=[path.name for path in REAL])
def test_files_of_others_confuse_no_rule(path):
    report = analyze([path])
    assert [gap for gap in report.facts.gaps if gap.startswith("rule ")] == []
    step_ms = max((one.time.step_ms for one in report.facts.ranks_seen), default=0.0)
    assert all(0 <= one.cost_ms <= step_ms for one in report.findings if one.cost_ms is not None)


@NEEDS_REAL
def test_a_real_snapshot_with_explicit_attention_says_so():
    report = analyze([SHARED / "snapshots" / "cuda_gpt_24x1024_seq1024_bf16.pickle"])
    [one] = [one for one in report.findings if one.code == "attention-memory"]
    layers, batch, heads, length = 24, 4, 16, 1024
    assert one.cost_bytes == pytest.approx(layers * batch * heads * length**2 * 4, rel=0.01)  # in fp32


@NEEDS_REAL
def test_the_pair_of_loaders_is_told_apart():
    traces = [SHARED / "traces" / f"v100_resnet50_loader_workers{workers}" for workers in (0, 4)]
    codes = [[one.code for one in analyze([path]).findings] for path in traces]
    assert ["starved-loader" in found for found in codes] == [True, False]


@pytest.mark.parametrize(
    ("device", "gain_ms"),
    [
        ("NVIDIA H100 80GB HBM3", 40.0 * (1 - 66.9 / 989.5)),  # both peaks are known
        ("Tesla V100-DGXS-32GB", 40.0 - 1.25),  # 156.25 GFLOP at the fp16 peak of 125 TFLOP/s; no fp32 peak
        ("GPU of nobody", None),
    ],
)
def test_the_gain_of_16_bits_is_bounded_by_the_hardware_or_not_at_all(device, gain_ms):
    [one] = report_cases.report(device, ranks=None).facts.ranks_seen[:1]
    row = dataclasses.replace(one.kernels.rows[0], ms=40.0, precision="fp32", tensor_cores=TensorCores.NO)
    product = dataclasses.replace(one.kernels.roofline[0], dtype="fp32", flops=156.25e9)
    kernels = dataclasses.replace(one.kernels, rows=(row,), roofline=(product,))
    found = RULES["fp32-products"].function(NOTHING, dataclasses.replace(one, kernels=kernels))
    assert found.gain_ms == (gain_ms and pytest.approx(gain_ms)) and found.cost_ms == pytest.approx(gain_ms or 40.0)
    assert found.certain is (gain_ms is not None)


@pytest.mark.parametrize(
    ("device", "word"), [("cpu", "without --record-memory-history"), ("cuda", "device times, not gaps")]
)
def test_a_disturbing_profiler_is_blamed_by_its_flags(device, word):
    plan = {"device": device, "settings": {"record_memory_history": True}}
    slow = dataclasses.replace(report_cases.run_of(), record=report_cases.record_of(plan), profiled_step_ms=150.0)
    assert word in RULES["profiler-overhead"](dataclasses.replace(NOTHING, run=slow)).advice


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        ({"shape": {"ffn_hidden_size": 4000}}, "--ffn-hidden-size 4096 (now 4000)"),
        ({"shape": {"padded_vocab_size": 4000}}, f"{DIVISIBLE} 128 (the vocabulary has now 4000 rows)"),
        (None, "pad 4000 to 4096"),
    ],
)
def test_advice_for_tensor_cores_names_what_the_run_has(tmp_path, plan, advice):
    odd = on_gpu(gemm=SIMT_GEMM, dims=[[8192, 1024], [1024, 4000]])
    found = found_in(tmp_path, odd if plan is None else both(odd, recorded(**plan)))
    [one] = [one for one in found if one.code == "no-tensor-cores"]
    assert one.advice == advice
    assert one.flags == ((advice.partition(" (")[0],) if plan else ())


def test_the_profiler_is_blamed_for_certain_only_if_steps_after_it_recover(tmp_path):
    def overhead(name: str, after_ms: float, number: int = 40):
        ms = lambda at: 10.0 if at < 20 else 15.0 if at < 24 else after_ms
        steps = ordinary_steps(number, ms=ms, cpu_ms=ms, profiled=lambda at: 20 <= at < 24)
        recorded(steps=steps)(tmp_path / name)
        found = apply_rules(analyze([tmp_path / name]).facts)  # as the rule says it, before the verdict's doubts
        [one] = [one for one in found if one.code == "profiler-overhead"]
        return one.certain, one.evidence[0].text.partition("; ")[2]

    assert overhead("recovers", 10.0) == (True, wording("analysis/those-after-them-again", 10.0))
    assert overhead("stays", 14.0) == (False, wording("analysis/those-after-them-still", 14.0))
    assert overhead("unknown", 10.0, 24) == (False, "")


def test_a_straggler_of_traces_on_a_busy_machine_is_none(tmp_path):
    both(ranks_late(900), recorded(ranks=rank_lines([3.0, 5.0, 3.0], **BUSY_3), world=3))(tmp_path)
    report = analyze([tmp_path])
    assert report.facts.ranks.straggler is None
    assert "straggler" not in [one.code for one in report.findings]
    assert report.verdict.sentence.startswith(wording("analysis/rank-waits-for-cpu", 1, 40))
    assert report.verdict.confidence == "low" and wording("analysis/ranks-waited-for-cpu") in report.verdict.why
    assert any("busy-machine" in note for note in report.facts.ranks.notes)


@pytest.mark.parametrize(
    ("parts", "advice", "flags"),
    [
        ({"dims": THIN}, "larger products", ("--micro-batch-size",)),
        ({"dims": [[2040, 4096], WIDE]}, "larger products; dimensions in multiples of 64", ("--micro-batch-size",)),
        ({"dims": [[256, 4096], WIDE], **FP32}, "larger products; 16 bits", ("--micro-batch-size", "--bf16")),
    ],
)
def test_advice_for_slow_products_names_what_they_lack(tmp_path, parts, advice, flags):
    on_gpu(**parts)(tmp_path)
    facts = analyze([tmp_path]).facts
    one = RULES["below-roofline"](facts)
    assert (one.advice, one.flags) == (advice, flags)


@pytest.mark.parametrize(("name", "word"), [("FSDP::all_gather (layers.0)", "fully_shard"), ("other", "bucket")])
def test_small_collectives_of_sharded_weights_are_no_buckets(tmp_path, name, word):
    made = MadeTrace(0, 2, device=None)
    for index in range(6):
        at = 9_000.0 * index
        made.op("aten::mm", at, at + 6_000)
        made.annotation(name, at, at + 10)
        for place in range(25):
            span = made.gloo(at + 6_010 + 100 * place, at + 6_110 + 100 * place, thread=GLOO)
            span["args"] = {"Input Dims": [[65_536]], "Input type": ["float"]}
        made.annotation("backward", at + 3_000, at + 8_600)
        made.step(10 + index, at, at + 8_900)
    made.write(tmp_path)
    [found] = [one for one in analyze([tmp_path]).findings if one.code == "small-buckets"]
    assert word in found.advice
