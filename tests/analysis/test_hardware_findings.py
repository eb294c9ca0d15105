"""What reports say of hardware that is slowed down, beside what ranks and hosts do."""

import json

import pytest
from support.finding_cases import CAPPED, HOT, recorded, sampled
from support.paths import REPO
from support.training_maker import gpu, rank_lines

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.compare.compare import compare
from megatron_lite.analysis.compare.compare_results import Change
from megatron_lite.analysis.findings.communication_rules import NOT_THROTTLED
from megatron_lite.analysis.findings.hardware_rules import _is_serious
from megatron_lite.analysis.run.baseline import make_baseline, unpack_baseline
from megatron_lite.analysis.run.hardware import RanksHardware
from megatron_lite.analysis.run.read import read_run
from megatron_lite.formats.hardware_record import ClockLimit, name_limits
from megatron_lite.formats.trace_header import HARDWARE_IN_TRACE
from megatron_lite.report.sections.all import build_sections

LATE = (3.0, 9.0)
SLOW = {"sm_clock_mhz": [1980, 1095], "slowed": [0, 0.9], "clock_limits": [0, HOT]}


def texts(finding) -> str:
    return " | ".join(one.text for one in finding.evidence)


def find(report, code):
    return next(one for one in report.findings if one.code == code)


def test_a_slowed_gpu_is_named_first_and_explains_the_late_rank(tmp_path):
    sampled(LATE, **SLOW)(tmp_path)
    report = analyze([tmp_path])
    assert [one.code for one in report.findings[:2]] == ["gpu-slowed", "straggler"]
    slowed, late = report.findings[:2]
    assert (slowed.rank, slowed.cost_ms) == (1, late.cost_ms) == (1, pytest.approx(6.0))
    assert "1,095 of 1,980 MHz" in texts(slowed) and "90%" in texts(slowed)
    assert "1,095 of 1,980 MHz" in late.evidence[1].text
    assert "1,095 of 1,980 MHz" in report.verdict.sentence.split(". ")[0]


def test_a_late_rank_at_the_others_clock_is_not_throttled(tmp_path):
    sampled(LATE, sm_clock_mhz=[1980, 1965], slowed=[0], clock_limits=[0])(tmp_path)
    report = analyze([tmp_path])
    assert report.findings[0].code == "straggler"
    assert "MHz" not in report.verdict.sentence
    assert "1,965" in texts(report.findings[0]) and "1,980" in texts(report.findings[0])
    assert report.findings[0].advice.endswith(NOT_THROTTLED)
    assert not {"gpu-slowed", "gpu-low-clock"} & {one.code for one in report.findings}


def test_ranks_that_are_all_hot_are_all_named_and_cost_is_not_guessed(tmp_path):
    hardware = {"samples": [20], "max_sm_clock_mhz": [1980], "sm_clock_mhz": [1300, 1200, 1250, 1400, 1350, 1310]}
    hardware |= {"slowed": [0.9], "clock_limits": [HOT]}
    recorded(ranks=rank_lines([3.0] * 6, hardware=hardware), world=6)(tmp_path)
    slowed = find(analyze([tmp_path]), "gpu-slowed")
    assert (slowed.rank, slowed.cost_ms, len(slowed.evidence)) == (1, None, 5)


def test_a_slowed_gpu_that_nobody_waits_for_has_no_cost(tmp_path):
    sampled(**SLOW)(tmp_path)
    report = analyze([tmp_path])
    assert (report.findings[0].code, report.findings[0].cost_ms) == ("gpu-slowed", None)


def test_a_power_limit_below_the_others_is_likely_at_most(tmp_path):
    sampled(LATE, sm_clock_mhz=[1980, 1410], power_capped=[0, 1], clock_limits=[0, CAPPED])(tmp_path)
    report = analyze([tmp_path])
    found = find(report, "gpu-low-clock")
    assert (found.rank, found.certain, found.cost_ms) == (1, False, pytest.approx(6.0))
    assert "MHz" in texts(find(report, "straggler"))


def test_a_quota_stands_beside_the_wait_that_it_causes(tmp_path):
    waits = {"core_wait_ms": [0.5, 3.5], "cpu_ms": [9.0, 9.0], "involuntary_switches": [1, 4]}
    hardware = {"samples": [20], "quota_used_up": [0.0, 0.63], "stolen": [0.0, 0.2]}
    recorded(ranks=rank_lines([3.0, 3.0], hardware=hardware, **waits))(tmp_path)
    report = analyze([tmp_path])
    busy = find(report, "busy-machine")
    assert "63%" in texts(busy) and "20%" in texts(busy)
    assert find(report, "cpu-quota").cost_ms == pytest.approx(3.5)


def test_a_run_without_samples_says_nothing_of_its_hardware(tmp_path):
    recorded(ranks=rank_lines([3.0, 3.0]))(tmp_path)
    codes = {one.code for one in analyze([tmp_path]).findings}
    assert not {"gpu-slowed", "gpu-low-clock", "gpu-errors", "gpu-wear", "cpu-quota", "stolen-time"} & codes


@pytest.mark.parametrize(
    ("limits", "names"),
    [
        (ClockLimit.HW_SLOWDOWN, "hardware slowdown"),
        (ClockLimit.HW_SLOWDOWN | ClockLimit.HW_THERMAL, "thermal slowdown"),
        (ClockLimit.HW_SLOWDOWN | ClockLimit.HW_POWER_BRAKE | ClockLimit.SW_POWER_CAP, "power brake, power limit"),
        (ClockLimit(0), ""),
    ],
)
def test_limits_have_names_and_the_vague_one_gives_way(limits, names):
    assert name_limits(limits) == names


@pytest.mark.slow
def test_a_real_run_with_a_simulated_hot_gpu_names_it_first(tmp_path):
    from support.launch import flags, pretrain  # torch: not for the fast tests

    devices = {"GPU-0": {}, "GPU-1": {"sm_clock_mhz": [1980, 1095], "reasons": [0, HOT], "temperature_c": [80, 91]}}
    script = tmp_path / "devices.json"
    script.write_text(json.dumps(devices))
    argv = flags("--train-iters 24 --log-interval 4 --run-dir", tmp_path / "run")
    ended = pretrain([str(script), *argv], ranks=2, script=REPO / "tests" / "throttled_rank.py")
    assert ended.code == 0, ended.err
    report = analyze([tmp_path / "run"])
    assert report.findings[0].code == "gpu-slowed" and report.findings[0].rank == 1
    hardware = report.facts.ranks_hardware
    assert hardware.get_one("temperature_c", 1) == 91 and hardware.get_one("slowed", 0) == 0


def test_the_gpus_stand_in_the_report_with_what_their_samples_cost(tmp_path):
    sampled(LATE, **SLOW, temperature_c=[61, 91], power_w=[640, None], sampling_ms=[0.2])(tmp_path)
    report = analyze([tmp_path])
    section = next(one for one in build_sections(report, False) if one.key == "hardware")
    table, cost = section.blocks
    assert table.rows[0] == ["1", "1,095", "1,980", "91", "", "", "90%", "thermal slowdown"]
    assert [row[0] for row in table.rows] == ["1", "0"]
    assert "120 samples" in cost.texts[0] and "0.2 ms" in cost.texts[0]
    recorded(ranks=rank_lines([3.0, 3.0]))(tmp_path / "without")
    assert not [one for one in build_sections(analyze([tmp_path / "without"]), False) if one.key == "hardware"]


def compared(tmp_path, a: dict, b: dict):
    for name, figures in (("a", a), ("b", b)):
        sampled(**figures)(tmp_path / name)
    return compare(*(analyze([tmp_path / name]).facts for name in "ab"))


def test_a_comparison_names_the_lower_clock_before_the_code(tmp_path):
    cool = {"sm_clock_mhz": [1980], "slowed": [0], "clock_limits": [0], "temperature_c": [61]}
    found = compared(tmp_path, cool, SLOW | {"temperature_c": [61, 91]})
    totals = {total.name: (total.pair.a, total.pair.b, total.pair.change) for total in found.totals}
    assert totals["lowest GPU clock"] == (1980, 1095, Change.LESS)
    assert totals["highest GPU temperature"] == (61, 91, Change.MORE)
    assert totals["slowed GPU samples"] == (0, 90, Change.MORE)
    first = found.sentence.split(";")[0]
    assert first.startswith("B") and "1,095" in first and "1,980" in first


def test_clocks_that_are_alike_are_no_matter(tmp_path):
    alike = {"sm_clock_mhz": [1965], "slowed": [0], "clock_limits": [0]}
    found = compared(tmp_path, alike | {"sm_clock_mhz": [1980]}, alike)
    assert "MHz" not in found.sentence
    assert compared(tmp_path / "more", {}, {"sm_clock_mhz": [1095]}).totals[-1].name != "lowest GPU clock"


def test_a_baseline_keeps_the_gpu_with_the_lowest_clock(tmp_path):
    sampled(**SLOW)(tmp_path / "a")
    run = analyze([tmp_path / "a"]).facts.run
    path = tmp_path / "base.json"
    path.write_text(json.dumps(make_baseline(run)))
    (tmp_path / "made").mkdir()
    again = read_run(unpack_baseline(path, tmp_path / "made"))
    assert again.hardware.get_one("sm_clock_mhz", 1) == 1095 and again.hardware.get_limits(1) == HOT
    assert again.hardware.get_one("sm_clock_mhz", 0) is None


def trace_with(folder, rank, hardware):
    gpu(folder, rank=rank, header={HARDWARE_IN_TRACE: hardware})


def test_traces_tell_of_ranks_that_write_no_lines(tmp_path):
    hot = {"samples": 20, "idle": 0, "sm_clock_mhz": 1095, "max_sm_clock_mhz": 1980, "slowed": 0.9, "clock_limits": HOT}
    trace_with(tmp_path, 0, {"samples": 20, "idle": 0, "sm_clock_mhz": 1980, "slowed": 0, "clock_limits": 0})
    trace_with(tmp_path, 1, hot)
    report = analyze([tmp_path])
    slowed = find(report, "gpu-slowed")
    assert slowed.rank == 1 and report.findings[0] is slowed
    assert report.facts.ranks_hardware.get("sm_clock_mhz").tolist() == [1980, 1095]


def test_lines_are_believed_before_traces(tmp_path):
    sampled(sm_clock_mhz=[1980, 1095], slowed=[0, 0.9], clock_limits=[0, HOT])(tmp_path)
    trace_with(tmp_path, 1, {"samples": 3, "sm_clock_mhz": 500})
    trace_with(tmp_path, 2, {"samples": 3, "sm_clock_mhz": 700, "temperature_c": 60})
    hardware = analyze([tmp_path]).facts.ranks_hardware
    assert hardware.get("sm_clock_mhz").tolist() == [1980, 1095, 700]
    assert hardware.get_one("temperature_c", 2) == 60


@pytest.mark.parametrize("hardware", [[], "hot", {"samples": "many"}, {"sm_clock_mhz": -1}, {"samples": 1e300}])
def test_headers_of_another_form_tell_nothing(tmp_path, hardware):
    trace_with(tmp_path, 0, hardware)
    assert analyze([tmp_path]).facts.ranks_hardware.figures == {}


def test_an_xid_without_its_count_is_told(tmp_path):
    sampled(last_xid=[None, 79])(tmp_path)
    errors = find(analyze([tmp_path]), "gpu-errors")
    assert errors.rank == 1 and "79" in texts(errors)


@pytest.mark.parametrize(("xid", "is_serious"), [(79, True), (31, False), (11, False)])
def test_only_xids_that_are_known_as_such_are_certainly_of_hardware(xid, is_serious):
    hardware = RanksHardware(1, {"samples": (5.0,), "xids": (1.0,), "last_xid": (float(xid),)})
    assert _is_serious(hardware, 0) is is_serious


def test_heat_of_cores_is_told_with_a_known_clock(tmp_path):
    sampled(cpu_slowdowns=[500, 400], cpu_mhz=[None, 1200], max_cpu_mhz=[None, 3800])(tmp_path)
    hot = find(analyze([tmp_path]), "hot-cpu")
    assert hot.rank == 1 and "nan" not in texts(hot)
