"""The checks: for each a run that passes, one that fails and one that does not show it; and the command `audit`."""

import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
from support.command_lines import plan as resolved_plan
from support.finding_cases import (
    CASES,
    NEVER_GOOD,
    PAGEABLE,
    both,
    cpu,
    cpu_reads,
    every,
    gpu,
    memory,
    on_a_gpu_of,
    on_cpu,
    on_gpu,
    ordinary_steps,
    profiled_steps,
    recorded,
    remembered,
    run,
    sampled,
)
from support.paths import SHARED
from support.report_cases import HOSTILE, report
from support.trace_maker import cpu_run, gpu_run
from support.training_maker import ADD, FP32_GEMM, Step, rank_lines
from support.wording import wording

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings import base, checks
from megatron_lite.analysis.findings.base import CheckResult, Evidence
from megatron_lite.analysis.findings.check_case import Check
from megatron_lite.analysis.findings.checks import QUESTIONS, Question, answer_checks
from megatron_lite.analysis.findings.rules import RULES, judge
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.cli.main import main
from megatron_lite.report.section import section_lines
from megatron_lite.report.sections.checked import build_checked_section
from megatron_lite.report.text import Style

PASS, FAIL, NOT_VISIBLE = CheckResult.PASSED, CheckResult.FAILED, CheckResult.NOT_VISIBLE
NOTHING = Facts((), None, (), None, ())
REAL = [
    path
    for name in ("traces/h100_qwen_stacks", "traces/nsys_sqlite", "snapshots/cuda_gpt_24x1024_seq128_fp32.pickle")
    if (path := SHARED / name).exists()
]  # one of each kind: every file is analyzed in the tests of the findings
OWN_DATA = {"dataloader_type": "single", "shape": {"max_position_embeddings": 2048}}
LOST_RUN = recorded(steps=ordinary_steps(loss=lambda index: 3.0 - index / 1000 if index < 30 else None), **OWN_DATA)
FOUR_SUMS = [(ADD, 500, "aten::add")] * 4
WITHOUT_UNITS = recorded(device="cpu", world=1, hardware={"bf16_products": False})


def fp16(*args, **columns):
    return recorded(precision="fp16", steps=ordinary_steps(*args, **columns), **OWN_DATA)


NEVER_GOOD_RUN = fp16(14, **NEVER_GOOD)


def slow_copies(step: Step):
    """The host stands in the copy of a pinned batch until the device has nothing left."""
    asked = step.host
    began, _ = step.gap(600)
    step.made.annotation("data_to_device", asked, began + 350)
    step.made.sync(asked + 5, began + 300, operator="aten::to")


def reads_norm(step: Step):
    """Clipping reads the norm of the gradients, and the device has nothing left."""
    asked = step.host
    began, _ = step.gap(600)
    step.made.annotation("clip_grad", asked, began + 350)
    step.made.sync(asked + 5, began + 300, operator="aten::item")


def steps_of(ms: float, memory: bool):
    """Of `ms` and a little noise; the peak takes as many GiB."""
    columns = {"peak_memory_bytes": int(ms * 2**30)} if memory else {}
    return ordinary_steps(ms=lambda index: ms + index % 3 / 10, **columns)


def rates(held: bool):
    """A schedule that falls with every update; the 8th step is skipped."""
    falls = lambda index: 1e-4 - 1e-6 * (index - (held and index >= 7))
    return ordinary_steps(skipped=lambda index: index == 7, next_lr=falls)


slow_first = ordinary_steps(ms=lambda index: 10.0 if index else 900.0, compiling=every(1, False, True))
compiled = recorded(compiled=True, steps=slow_first)


def cpu_only(folder):
    """Without shapes."""
    made = cpu_run()
    for event in made.events:
        event["args"] = {}
    made.write(folder)


def changing_shapes(folder):
    made = gpu_run(steps=4)
    for number, event in enumerate(event for event in made.events if event["name"] == "aten::mm"):
        event["args"]["Input Dims"] = [[64, 128 + number], [128 + number, 256]]
    made.write(folder)


def cold(folder):
    """A window that begins with the first step."""
    gpu_run(steps=3, first=0).write(folder)


# (number, answer, code, made run, what it must say)


def on_a_host(figures: dict):
    """A run on CPUs whose machine was sampled."""
    hardware = {"samples": [20]} | figures if figures else {}
    return recorded(device="cpu", ranks=rank_lines([3.0, 3.0], hardware=hardware))


POINTS = [
    (1, PASS, "", recorded(steps=ordinary_steps(gpu_ms=9.0)), "between CUDA events"),
    (1, FAIL, "", run, "--no-step-timeline"),
    (1, NOT_VISIBLE, "", memory, ""),
    (1, FAIL, "first-step", cold, " 0 steps ran before"),
    (2, PASS, "", run, ""),
    (2, FAIL, "", recorded(steps=ordinary_steps(6, profiled=True)), ""),
    (2, NOT_VISIBLE, "", memory, ""),
    *((number, PASS, "", gpu, "") for number in (3, 4, 5, 6, 7, 8, 9)),
    *((number, NOT_VISIBLE, "", run, "") for number in (3, 7, 8, 9, 10, 15, 18, 19)),
    *((number, NOT_VISIBLE, "", gpu, "") for number in (11, 12, 13, 14, 16, 17)),
    (4, NOT_VISIBLE, "", memory, ""),
    (5, NOT_VISIBLE, "", cpu, ""),
    (11, PASS, "", fp16(loss_scale=65536.0), ""),
    (12, PASS, "", both(remembered(), on_a_gpu_of(80)), ""),
    (13, PASS, "", both(gpu, run), ""),
    (14, PASS, "", both(gpu, recorded(steps=profiled_steps(10.5))), ""),
    (15, PASS, "", compiled, ""),
    (16, PASS, "", both(gpu, recorded(**OWN_DATA)), ""),
    (17, PASS, "", recorded(**OWN_DATA), ""),
    (17, FAIL, "overflow-storm", fp16(skipped=every(5, True, False)), ""),
    (11, FAIL, "overflow-storm", NEVER_GOOD_RUN, "all 14 steps were skipped"),
    (11, NOT_VISIBLE, "", fp16(14, skipped=lambda index: index < 13), "13 of 14"),
    (13, FAIL, "overflow-storm", NEVER_GOOD_RUN, "no update at all: all 14 steps were skipped"),
    (13, FAIL, "no-learning", recorded(steps=ordinary_steps(loss=None)), "not finite in all 40 updates"),
    (17, FAIL, "overflow-storm", NEVER_GOOD_RUN, "all 14 steps were skipped"),
    (17, FAIL, "no-learning", LOST_RUN, "not finite in 10 of 40 updates (iteration 31, 32, 33, ...)"),
    (1, PASS, "", recorded(device="cpu"), "39 of 40 steps count"),
    (1, PASS, "", gpu, "11 steps ran before the first that counts"),
    (1, NOT_VISIBLE, "", cpu, "no work of a GPU"),
    (2, PASS, "", gpu, "4 steady steps"),
    (2, NOT_VISIBLE, "", on_gpu(steps=1), "1 steady step of 1"),
    (3, PASS, "", on_cpu(), "reading a value never waits; 0 values read"),
    (3, PASS, "", on_cpu(change=cpu_reads), "reading a value never waits; 84 values read"),
    (3, PASS, "", CASES["sync-in-step"][1], "1 synchronizations per step"),
    (3, FAIL, "sync-in-step", on_gpu(before_forward=slow_copies), "aten::to"),
    (3, FAIL, "clip-on-host", on_gpu(before_forward=reads_norm), "after 1 wait"),
    (3, PASS, "", CASES["clip-on-host"][0], "0 synchronizations per step"),
    (4, PASS, "", run, "in the phase data"),
    (5, FAIL, "unpinned-copies", on_gpu(copy=PAGEABLE), "from pageable memory"),
    (5, FAIL, "sync-in-step", on_gpu(before_forward=slow_copies), "1 wait of the host for them"),
    (5, NOT_VISIBLE, "", on_gpu(copy="CopyHostToDevice"), "do not say"),
    (5, NOT_VISIBLE, "", on_gpu(copy="Memcpy DtoD (Device -> Device)"), "no copy from the host"),
    (6, NOT_VISIBLE, "", cpu, "nothing is copied to one"),
    (8, FAIL, "unfused-elementwise", both(on_gpu(forward=FOUR_SUMS), recorded(compiled=True)), "15% would be"),
    (9, FAIL, "fp32-products", on_gpu(gemm=FP32_GEMM, dtypes=["float", "float"]), "0 ms of"),
    (9, FAIL, "matmul-shapes", CASES["matmul-shapes"][0], "MLP"),
    (9, PASS, "", on_cpu(), "are multiples of 64"),
    (9, NOT_VISIBLE, "", cpu_only, "record_shapes=True"),
    (10, FAIL, "fp32-products", both(on_cpu(dtype="float"), WITHOUT_UNITS), "in fp32"),
    (10, NOT_VISIBLE, "", both(gpu, recorded(precision="fp32")), "in bf16 or fp16"),
    (11, PASS, "", run, "bf16 has the range of fp32"),
    (12, NOT_VISIBLE, "", run, "does not grow over 39 typical steps"),
    (12, NOT_VISIBLE, "", remembered(steps=1, logits_gib=0.1, layer_gib=0.1), "peak of"),
    (13, FAIL, "", recorded(steps=ordinary_steps(batch_size=10, consumed_samples=None)), "no multiple of 8"),
    (13, FAIL, "", recorded(batch=16), "the plan has 16 samples"),
    (13, FAIL, "", both(on_gpu(micro_batches=2), run), "2 backward passes per step"),
    (13, FAIL, "", fp16(consumed_samples=lambda index: 4 * index), "has 8 samples and counts 4"),
    (13, FAIL, "", recorded(steps=rates(held=False)), "iteration 8, which was skipped"),
    (13, PASS, "", recorded(steps=rates(held=True)), "unchanged in skipped ones"),
    (14, NOT_VISIBLE, "", run, "a trace"),
    (16, NOT_VISIBLE, "", changing_shapes, "not the same in each"),
    (16, NOT_VISIBLE, "", on_gpu(steps=1), "schedule(active=...)"),
    (16, NOT_VISIBLE, "", recorded(dataloader_type="external"), "2,048 positions"),
    (17, NOT_VISIBLE, "", recorded(**OWN_DATA | {"dataloader_type": "external"}), "tokens/s"),
    (19, PASS, "", sampled(sm_clock_mhz=[1980, 1965], clock_limits=[0], slowed=[0], xids=[0]), "1,965 of 1,980 MHz"),
    (19, NOT_VISIBLE, "", sampled(stolen=[0.01]), "pip install nvidia-ml-py"),
    (19, PASS, "", on_a_host({"stolen": [0.01], "quota_used_up": [0.0]}), "1%"),
    (19, NOT_VISIBLE, "", on_a_host({}), "steps.jsonl"),
    (17, NOT_VISIBLE, "", recorded(eod_mask_loss=True, **OWN_DATA), "--eod-mask-loss"),
]


@functools.cache
def report_of(write):
    """Many checks are made of the same few runs."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return analyze([folder])


def check_of(number, write, other=None) -> Check:
    found = report_of(write)
    check = found.checks[number - 1]
    if other:
        check = check_beside(found, other)[number - 1]
    is_well_formed(check)
    return check


def check_beside(found, other) -> tuple[Check, ...]:
    """The checks of a run beside another one."""
    return answer_checks(found.facts, found.findings, found.looks, analyze([other]).facts)


def checks_of(facts: Facts) -> tuple[Check, ...]:
    judgement = judge(facts)
    return answer_checks(facts, judgement.findings, judgement.looks)


def told(check: Check) -> str:
    return " | ".join([*(f"{one.text} ({one.where})" for one in check.evidence), check.remedy])


def is_well_formed(check: Check):
    assert all(one.text and "\n" not in f"{one.text}{one.where}" for one in check.evidence)
    assert "nan" not in told(check).lower().split() and "failed (" not in told(check)
    assert check.evidence or check.answer is NOT_VISIBLE
    assert bool(check.remedy) == (check.answer is not PASS) and "\n" not in check.remedy
    assert not check.code or check.answer is FAIL and check.code in RULES


@pytest.mark.parametrize("code", RULES)
def test_a_rule_that_finds_nothing_says_what_it_saw_or_lacks(code):
    look = report_of(CASES[code][1]).looks[code]
    assert all(one.text and "\n" not in f"{one.text}{one.where}" for one in look.evidence)
    assert look.evidence or look.outcome is NOT_VISIBLE and look.remedy
    assert bool(look.remedy) == (look.outcome is not PASS)
    assert judge(NOTHING).looks[code].outcome is NOT_VISIBLE


def test_there_are_nineteen_points_and_each_has_its_cases():
    assert len(QUESTIONS) == 19 == len({one.text for one in QUESTIONS}) == len({one.name for one in QUESTIONS})
    assert all(one.text.endswith("?") and set(one.codes) <= set(RULES) for one in QUESTIONS)
    assert all(one.look or one.codes for one in QUESTIONS)
    assert {(number, answer) for number, answer, *_ in POINTS} >= {(number, NOT_VISIBLE) for number in range(1, 20)}
    assert {number for number, answer, *_ in POINTS if answer is PASS} == set(range(1, 20)) - {10, 18}


@pytest.mark.parametrize(("number", "answer", "code", "write", "says"), POINTS)
def test_runs_that_pass_fail_and_do_not_show_it(number, answer, code, write, says):
    check = check_of(number, write)
    assert (check.number, check.answer, check.code) == (number, answer, code) and says in told(check), told(check)


@pytest.mark.parametrize(
    ("number", "code"),
    [(number, code) for number, one in enumerate(QUESTIONS, 1) for code in one.codes],
)
def test_a_finding_with_one_of_a_question_s_codes_fails_it(number, code):
    check = check_of(number, CASES[code][0])
    assert (check.answer, check.code) == (FAIL, code), told(check)


@pytest.mark.parametrize(
    ("half_ms", "memory", "answer", "says"),
    [
        (6.0, True, PASS, "step: 10.1 ms in fp32, 6.1 ms in bf16 (-40%)"),
        (10.0, True, FAIL, "(+0%)"),
        (14.0, True, FAIL, "(+40%)"),
        (6.0, False, NOT_VISIBLE, "peak memory: not known of both"),
    ],
)
def test_whether_16_bits_pay_is_seen_beside_fp32(tmp_path, half_ms, memory, answer, says):
    steps = [steps_of(ms, memory) for ms in (half_ms, 10.0)]
    run(tmp_path / "fp32", steps[1], precision="fp32")
    run(tmp_path / "bf16", steps[0])
    check = check_of(10, recorded(steps=steps[0]), tmp_path / "fp32")
    assert check.answer is answer and says in told(check), told(check)
    assert check_beside(analyze([tmp_path / "fp32"]), tmp_path / "bf16")[9].answer is answer


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"precision": "bf16"}, "the other in bf16"),
        ({"precision": "fp32", "shape": {"num_layers": 2}}, "--num-layers 24 against 2"),
    ],
)
def test_16_bits_beside_other_work_are_not_judged(tmp_path, other, says):
    run(tmp_path / "other", **other)
    check = check_of(10, run, tmp_path / "other")
    assert check.answer is NOT_VISIBLE and says in told(check)


def test_formats_that_mixed_precision_must_leave_alone():
    def change(made, at):
        made.op("aten::embedding", at + 100, at + 110, dims=[[512, 64], [4, 16]], dtypes=["c10::BFloat16", "long int"])
        made.op("aten::nll_loss_forward", at + 120, at + 130, dims=[[64, 512], [64]], dtypes=["float", "long int"])

    assert wording("analysis/token-ids-in-long") in told(check_of(10, on_cpu(change=change)))


PASSED = "the losses of 40 common iterations differ by at most 0.00%"
BY_ONE = "by at most 1.00% (iteration 21: 3.03 here, 3 there)"
LOST = {"skipped": lambda index: index < 3, "loss": lambda index: None if index < 3 else 3.0}
STORM = {"skipped": every(6, True, False), "loss": lambda index: 3.0 + index / 10}


@pytest.mark.parametrize(
    ("mine", "other", "answer", "code", "says"),
    [
        ({}, {}, PASS, "", PASSED),
        ({"loss": lambda index: 3.0 + 0.03 * (index == 20)}, {"loss": 3.0}, PASS, "", BY_ONE),
        ({"loss": lambda index: 3.0 + index / 100}, {"loss": 3.0}, FAIL, "", "13.00% (iteration 40"),
        (LOST, {}, PASS, "", "37 common iterations"),
        ({"skipped": True, "loss": None}, {}, NOT_VISIBLE, "", "0 iterations with a loss here, 40 there"),
        ({"loss": lambda i: None if i > 3 else 3.0}, {}, FAIL, "no-learning", "not finite in 36 of 40 updates"),
        (STORM, {}, FAIL, "overflow-storm", "differ by"),
    ],
)
def test_losses_beside_the_baseline(tmp_path, mine, other, answer, code, says):
    precision = {"precision": "fp16"} if mine is STORM else {}
    run(tmp_path / "base", ordinary_steps(**other), **precision)
    check = check_of(18, recorded(steps=ordinary_steps(**mine), **precision), tmp_path / "base")
    assert (check.answer, check.code) == (answer, code) and says in told(check), told(check)


def test_losses_of_other_data_are_not_judged(tmp_path):
    run(tmp_path / "base", seed=7)
    check = check_of(18, recorded(seed=1234), tmp_path / "base")
    assert check.answer is NOT_VISIBLE and "--seed 1234 here, 7 there" in told(check)
    run(tmp_path / "larger", ordinary_steps(batch_size=16), seed=1234)
    assert "another batch" in told(check_of(18, recorded(seed=1234), tmp_path / "larger"))
    gpu(tmp_path / "trace")
    assert wording("analysis/traces-hold-no-losses") in told(check_of(18, run, tmp_path / "trace"))


def test_without_facts_nothing_is_seen():
    answered = checks_of(NOTHING)
    assert [check.number for check in answered] == list(range(1, 20)) and {check.answer for check in answered} == {
        NOT_VISIBLE
    }
    for check in answered:
        is_well_formed(check)


def test_what_to_record_names_flags_that_there_are():
    flags = {
        f"--{name.replace('_', '-')}"
        for group in dataclasses.asdict(resolved_plan("--bf16", vocab_size=100))["args"].values()
        for name in group
    }
    folder = Path(base.__file__).parent
    sources = "".join(path.read_text() for path in (folder / "base.py", *folder.glob("*check*.py")))
    own = {"--against", "--no-step-timeline"}  # the command's, and negations
    assert set(re.findall(r"--[a-z][a-z-]+[a-z]", sources)) - flags - own == set()


@pytest.mark.parametrize(
    ("number", "kernels", "times", "answer", "says"),
    [
        (9, {}, {"device": "Tesla P100-PCIE-16GB"}, NOT_VISIBLE, "this GPU has no tensor cores"),
        (
            9,
            {"matrix_ms": 0.2, "tensor_core_ms": 0.0, "roofline": ()},
            {},
            NOT_VISIBLE,
            "whose products are in 16 bits",
        ),
        (
            9,
            {"maybe_tensor_core_ms": 9.0, "tensor_core_ms": 0.0, "roofline": ()},
            {},
            NOT_VISIBLE,
            "record_shapes=True",
        ),
        (9, {"tensor_core_ms": 0.0, "matrix_ms": 8.0}, {}, FAIL, "multiples of 64 (at least 8)"),
        (14, {}, {"rows": {"compute": 6.0, "unexplained": 3.0}}, NOT_VISIBLE, "unexplained: 3.0 ms"),
        (8, {"roles": {Role.ELEMENTWISE: 3.0}}, {}, FAIL, "compile the layers"),
        *((number, {"roles": {}}, {}, NOT_VISIBLE, "") for number in (7, 8)),
        (14, {}, {"step_ms": 0.0}, NOT_VISIBLE, ""),
    ],
)
def test_figures_that_are_seldom(number, kernels, times, answer, says):
    facts = report_of(gpu).facts
    one, change = facts.critical, dataclasses.replace
    one = change(one, kernels=change(one.kernels, **kernels), time=change(one.time, **times))
    check = checks_of(dataclasses.replace(facts, ranks_seen=(one,)))[number - 1]
    assert check.answer is answer and says in told(check), told(check)


def test_memory_that_nobody_measured_is_not_said_to_stay():
    """Each of the two memories counts its own values: 11 are one too few, 12 are enough."""
    for number, says in ((11, False), (12, True)):
        measured = ordinary_steps(
            host_memory_bytes=None, peak_memory_bytes=lambda index, last=number: 2**30 if 1 <= index <= last else None
        )
        text = told(check_of(12, recorded(steps=measured)))
        assert (wording("analysis/memory-of-gpu-does", 12) in text) is says
        assert "the process" not in text and text.count(wording("analysis/does-not-grow")) == says


def test_an_update_per_micro_batch_fails():
    def change(made, at):
        made.annotation("Optimizer.step#AdamW.step", at + 8700, at + 8710)
        made.annotation("Optimizer.step#AdamW.step", at + 8720, at + 8730)

    check = check_of(13, both(on_cpu(change=change, micro_batches=2), recorded(device="cpu", world=1)))
    assert check.answer is FAIL and wording("analysis/optimizer-steps-per-iteration", 2) in told(check), told(check)


def test_a_point_that_fails_itself_is_not_seen(monkeypatch):
    def broken(*given):
        raise ZeroDivisionError("by a foreign file")

    monkeypatch.setattr(checks, "QUESTIONS", (Question("Is it broken?", "broken", look=broken),))
    [check] = checks_of(NOTHING)
    assert check.answer is NOT_VISIBLE and "ZeroDivisionError: by a foreign file" in told(check)


@pytest.mark.skipif(not REAL, reason="no ../shared/traces beside the repository")
@pytest.mark.parametrize("path", REAL, ids=[path.name for path in REAL])
def test_files_of_others(path):
    found = analyze([path])
    answered = found.checks
    for check in answered:
        is_well_formed(check)
    assert answered[17].answer is NOT_VISIBLE
    assert not found.facts.ranks_seen or any(check.answer is not NOT_VISIBLE for check in answered)


def test_lines_are_narrow_and_harmless():
    found = report(name=HOSTILE)
    answered = answer_checks(found.facts, found.findings, found.looks, found.facts)
    evil = Check(20, HOSTILE, FAIL, (Evidence(HOSTILE, HOSTILE),) * 5, "sync-in-step", HOSTILE)
    for everything in (False, True):
        lines = section_lines(build_checked_section([*answered, evil], False, everything=everything), Style())
        assert max(map(len, lines)) <= 100 and all(line.isprintable() for line in lines)
        assert any("and 2 more with --all" in line for line in lines) is not everything
    assert any("\033[" in line for line in section_lines(build_checked_section(answered, True), Style(colour=True)))
    in_lines = section_lines(build_checked_section([*answered, evil], False, in_full=False), Style())
    assert len(in_lines) == 1 + 20 and max(map(len, in_lines)) <= 100 and all(map(str.isprintable, in_lines))


def test_the_command(tmp_path, capsys):
    both(gpu, recorded(**OWN_DATA))(tmp_path / "good")
    CASES["sync-in-step"][0](tmp_path / "bad")
    good, bad, written = (str(tmp_path / name) for name in ("good", "bad", "a.json"))
    assert main(["audit", good, "--against", good, "--json", written]) == 0
    out = capsys.readouterr().out
    assert "held against" in out and "written:" in out and " passed, " in out and "gpu_ms" not in out
    found = json.loads(Path(written).read_text())
    assert found["schema"] == 1 and len(found["points"]) == 19 and found["against"]
    expected = {"number": 3, "question": QUESTIONS[2].text, "answer": "pass", "evidence": [], "code": "", "remedy": ""}
    expected |= {"name": QUESTIONS[2].name}
    assert found["points"][2] | {"evidence": []} == expected
    assert main(["audit", bad]) == 0
    assert "megatron-lite explain sync-in-step" in capsys.readouterr().out
    assert main(["audit", bad, "--strict"]) == 1
    memory(tmp_path / "snapshot", layer_gib=0.1, logits_gib=0.1)
    assert main(["audit", str(tmp_path / "snapshot"), "--strict"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "--help"),
        (["{}/none"], "none"),
        (["{}", "--against", "{}/none"], "none"),
        (["{}", "--json", "{}"], "--json"),
        (["{}", "--strikt"], "--strikt"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, argv, says):
    run(tmp_path)
    assert main(["audit", *(word.format(tmp_path) for word in argv)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
