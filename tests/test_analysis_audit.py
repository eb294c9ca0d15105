"""The audit: for each point a run that passes, one that fails and one that does not show it; and the command."""

import dataclasses
import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
from audit_cases import FAIL, MORE, NOT_SEEN, OWN_DATA, PASS, POINTS, failing, steps_of
from command_lines import plan as resolved_plan
from finding_cases import both, every, gpu, memory, on_cpu, ordinary_steps, recorded, run
from report_cases import HOSTILE, report
from trace_maker import gpu_run

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.audit import audit
from megatron_lite.analysis.audit.answers import Point
from megatron_lite.analysis.audit.audit import QUESTIONS, audit_run
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.analysis.kernels.kernel_results import Role
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.cli.main import main
from megatron_lite.report.audit_terminal import audit_lines
from megatron_lite.report.text import Style

SHARED = Path(__file__).parents[2] / "shared"
REAL = [
    path
    for name in ("traces/h100_qwen_stacks", "traces/nsys_sqlite", "snapshots/cuda_gpt_24x1024_seq128_fp32.pickle")
    if (path := SHARED / name).exists()
]  # one of each kind: every file is analysed in the tests of the findings
CODES = set(RULES)


@functools.cache
def report_of(write):
    """Many points are asked of the same few runs."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return analyze([folder])


def point_of(number, write, other=None) -> Point:
    found = report_of(write)
    return audit_run(found.facts, found.findings, analyze([other]).facts if other else None)[number - 1]


def told(point: Point) -> str:
    return " | ".join([*(f"{one.text} ({one.where})" for one in point.evidence), point.way_out])


def is_well_formed(point: Point):
    assert all(one.text and "\n" not in one.text + one.where for one in point.evidence)
    assert "nan" not in told(point).lower().split() and "could not be asked" not in told(point)
    assert point.evidence or point.answer is NOT_SEEN
    assert bool(point.way_out) == (point.answer is not PASS) and "\n" not in point.way_out
    assert not point.code or point.answer is FAIL and point.code in CODES


def test_there_are_eighteen_points_and_each_has_its_cases():
    assert len(QUESTIONS) == 18 == len(POINTS) and len({question for question, *_ in QUESTIONS}) == 18
    assert all(question.endswith("?") and set(codes.split()) <= CODES for question, _, codes, _ in QUESTIONS)


ANSWERS = [(number, answer, code if answer is FAIL else "", write) for number, (*writes, code, unseen) in POINTS.items()
           for answer, write in zip((PASS, FAIL, NOT_SEEN), (*writes, unseen)) if write]  # fmt: skip


@pytest.mark.parametrize(("number", "answer", "code", "write"), ANSWERS)
def test_runs_that_pass_fail_and_do_not_show_it(number, answer, code, write):
    point = point_of(number, write)
    is_well_formed(point)
    assert (point.number, point.answer, point.code) == (number, answer, code), told(point)


@pytest.mark.parametrize(
    ("number", "answer", "code", "write", "says"), MORE, ids=[f"{case[0]}-{case[4]}" for case in MORE]
)
def test_other_ways(number, answer, code, write, says):
    point = point_of(number, write)
    is_well_formed(point)
    assert (point.answer, point.code) == (answer, code) and says in told(point), told(point)


def test_a_window_that_begins_with_the_first_step_was_not_warmed_up():
    def cold(folder):
        gpu_run(steps=3, first=0).write(folder)

    point = point_of(1, cold)
    assert (point.answer, point.code) == (FAIL, "first-step") and " 0 steps ran before" in told(point), told(point)


@pytest.mark.parametrize(
    ("half_ms", "memory", "answer", "says"),
    [
        (6.0, True, PASS, "step: 10.1 ms in fp32, 6.1 ms in bf16 (-40%)"),
        (10.0, True, FAIL, "(+0%)"),
        (14.0, True, FAIL, "(+40%)"),
        (6.0, False, NOT_SEEN, "peak memory: not known of both"),
    ],
)
def test_whether_16_bits_pay_is_seen_beside_fp32(tmp_path, half_ms, memory, answer, says):
    steps = [steps_of(ms, memory) for ms in (half_ms, 10.0)]
    run(tmp_path / "fp32", steps[1], precision="fp32")
    run(tmp_path / "bf16", steps[0])
    point = point_of(10, recorded(steps=steps[0]), tmp_path / "fp32")
    is_well_formed(point)
    assert point.answer is answer and says in told(point), told(point)
    back = analyze([tmp_path / "fp32"])
    assert audit_run(back.facts, back.findings, analyze([tmp_path / "bf16"]).facts)[9].answer is answer


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"precision": "bf16"}, "the other in bf16"),
        ({"precision": "fp32", "shape": {"num_layers": 2}}, "--num-layers 24 against 2"),
    ],
)
def test_16_bits_beside_other_work_are_not_judged(tmp_path, other, says):
    run(tmp_path / "other", **other)
    point = point_of(10, run, tmp_path / "other")
    assert point.answer is NOT_SEEN and says in told(point)


def test_formats_that_mixed_precision_must_leave_alone():
    def change(made, at):
        made.op("aten::embedding", at + 100, at + 110, dims=[[512, 64], [4, 16]], dtypes=["c10::BFloat16", "long int"])
        made.op("aten::nll_loss_forward", at + 120, at + 130, dims=[[64, 512], [64]], dtypes=["float", "long int"])

    assert "token ids in long int, labels in long int" in told(point_of(10, on_cpu(change=change)))


@pytest.mark.parametrize(
    ("mine", "other", "answer", "says"),
    [
        ({}, {}, PASS, "the losses of 40 common iterations differ by at most 0.00%"),
        (
            {"loss": lambda index: 3.0 + 0.03 * (index == 20)},
            {"loss": 3.0},
            PASS,
            "by at most 1.00% (iteration 21: 3.03 here, 3 there)",
        ),
        ({"loss": lambda index: 3.0 + index / 100}, {"loss": 3.0}, FAIL, "13.00% (iteration 40"),
        (
            {"skipped": lambda index: index < 3, "loss": lambda index: None if index < 3 else 3.0},
            {},
            PASS,
            "37 common iterations",
        ),
        ({"skipped": True, "loss": None}, {}, NOT_SEEN, "0 iterations with a loss here, 40 there"),
        ({"loss": lambda index: None if index > 3 else 3.0 - index / 1000}, {}, FAIL, "not finite in 36 of 40 updates"),
    ],
)
def test_losses_beside_the_baseline(tmp_path, mine, other, answer, says):
    run(tmp_path / "base", ordinary_steps(**other))
    point = point_of(18, recorded(steps=ordinary_steps(**mine)), tmp_path / "base")
    is_well_formed(point)
    assert point.answer is answer and says in told(point), told(point)


def test_an_overflow_storm_explains_losses_that_differ(tmp_path):
    run(tmp_path / "base", precision="fp16")
    apart = ordinary_steps(skipped=every(6, True, False), loss=lambda index: 3.0 + index / 10)
    point = point_of(18, recorded(steps=apart, precision="fp16"), tmp_path / "base")
    assert (point.answer, point.code) == (FAIL, "overflow-storm")


def test_losses_of_other_data_are_not_judged(tmp_path):
    run(tmp_path / "base", seed=7)
    point = point_of(18, recorded(seed=1234), tmp_path / "base")
    assert point.answer is NOT_SEEN and "--seed 1234 here, 7 there" in told(point)
    run(tmp_path / "larger", ordinary_steps(batch_size=16), seed=1234)
    assert "another batch" in told(point_of(18, recorded(seed=1234), tmp_path / "larger"))
    gpu(tmp_path / "trace")
    assert "traces hold no losses" in told(point_of(18, run, tmp_path / "trace"))


def test_without_facts_nothing_is_seen():
    points = audit_run(Facts((), None, (), None, ()), ())
    assert [point.number for point in points] == list(range(1, 19)) and {point.answer for point in points} == {NOT_SEEN}
    for point in points:
        is_well_formed(point)


def test_what_to_record_names_flags_that_there_are():
    flags = {
        f"--{name.replace('_', '-')}"
        for group in dataclasses.asdict(resolved_plan("--bf16", vocab_size=100))["args"].values()
        for name in group
    }
    sources = "".join(path.read_text() for path in Path(audit.__file__).parent.glob("*.py"))
    own = {"--against", "--no-step-timeline"}  # the command's, and negations
    assert set(re.findall(r"--[a-z][a-z-]+[a-z]", sources)) - flags - own == set()


@pytest.mark.parametrize(
    ("number", "kernels", "times", "answer", "says"),
    [
        (9, {}, {"device": "Tesla P100-PCIE-16GB"}, NOT_SEEN, "this GPU has no tensor cores"),
        (9, {"matrix_ms": 0.2, "tensor_core_ms": 0.0, "roofline": ()}, {}, NOT_SEEN, "whose products are in 16 bits"),
        (9, {"maybe_tensor_core_ms": 9.0, "tensor_core_ms": 0.0, "roofline": ()}, {}, NOT_SEEN, "collect-shapes"),
        (9, {"tensor_core_ms": 0.0, "matrix_ms": 8.0}, {}, FAIL, "multiples of 64 (at least 8)"),
        (14, {}, {"rows": {"compute": 6.0, "unexplained": 3.0}}, NOT_SEEN, "unexplained: 3.0 ms"),
        (8, {"roles": {Role.ELEMENTWISE: 3.0}}, {}, FAIL, "compile the layers"),
    ],
)
def test_figures_that_are_seldom(number, kernels, times, answer, says):
    facts = report_of(gpu).facts
    one = facts.critical
    one = dataclasses.replace(
        one, kernels=dataclasses.replace(one.kernels, **kernels), time=dataclasses.replace(one.time, **times)
    )
    point = audit_run(dataclasses.replace(facts, ranks_seen=(one,)), ())[number - 1]
    is_well_formed(point)
    assert point.answer is answer and says in told(point), told(point)


def test_memory_that_nobody_measured_is_not_said_to_stay():
    """Each of the two memories counts its own values: 11 are one too few, 12 are enough."""
    for number, says in ((11, False), (12, True)):
        measured = ordinary_steps(
            host_memory_bytes=None, peak_memory_bytes=lambda index, last=number: 2**30 if 1 <= index <= last else None
        )
        text = told(point_of(12, recorded(steps=measured)))
        assert ("memory of the GPU does not grow over 12 ordinary steps" in text) is says
        assert "the process" not in text and text.count("does not grow") == says


def test_an_update_per_micro_batch_fails():
    def change(made, at):
        made.annotation("Optimizer.step#AdamW.step", at + 8700, at + 8710)
        made.annotation("Optimizer.step#AdamW.step", at + 8720, at + 8730)

    point = point_of(13, both(on_cpu(change=change, micro_batches=2), recorded(device="cpu", world=1)))
    assert point.answer is FAIL and "2 optimizer steps per iteration" in told(point), told(point)


def test_a_point_that_fails_itself_is_not_seen(monkeypatch):
    def broken(case):
        raise ZeroDivisionError("by a foreign file")

    monkeypatch.setattr(audit, "QUESTIONS", (("Is it broken?", broken, "", ""),))
    [point] = audit_run(Facts((), None, (), None, ()), ())
    assert point.answer is NOT_SEEN and "ZeroDivisionError: by a foreign file" in told(point)


@pytest.mark.skipif(not REAL, reason="no ../shared/traces beside the repository")
@pytest.mark.parametrize("path", REAL, ids=[path.name for path in REAL])
def test_files_of_others(path):
    found = analyze([path])
    points = audit_run(found.facts, found.findings)
    for point in points:
        is_well_formed(point)
    assert points[17].answer is NOT_SEEN
    assert not found.facts.ranks_seen or any(point.answer is not NOT_SEEN for point in points)


def test_lines_are_narrow_and_harmless():
    found = report(name=HOSTILE)
    points = audit_run(found.facts, found.findings, found.facts)
    evil = Point(19, HOSTILE, FAIL, (Evidence(HOSTILE, HOSTILE),) * 5, "sync-in-step", HOSTILE)
    for everything in (False, True):
        lines = audit_lines([*points, evil], [HOSTILE, "other"], Style(), everything)
        assert max(map(len, lines)) <= 100 and all(line.isprintable() for line in lines)
        assert any("and 2 more with --all" in line for line in lines) is not everything
    assert any("\033[" in line for line in audit_lines(points, ["a"], Style(colour=True)))


def test_the_command(tmp_path, capsys):
    both(gpu, recorded(**OWN_DATA))(tmp_path / "good")
    failing("sync-in-step")(tmp_path / "bad")
    assert (
        main(["audit", str(tmp_path / "good"), "--against", str(tmp_path / "good"), "--json", str(tmp_path / "a.json")])
        == 0
    )
    out = capsys.readouterr().out
    assert "held against" in out and "written:" in out and " pass, " in out and "gpu_ms" not in out
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["schema"] == 1 and len(written["points"]) == 18 and written["against"]
    assert written["points"][2] | {"evidence": []} == {
        "number": 3,
        "question": QUESTIONS[2][0],
        "answer": "pass",
        "evidence": [],
        "code": "",
        "way_out": "",
    }
    assert main(["audit", str(tmp_path / "bad")]) == 0
    assert "megatron-lite explain sync-in-step" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "bad"), "--strict"]) == 1
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
