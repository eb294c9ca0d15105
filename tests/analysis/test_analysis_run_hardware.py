"""What lines of steps.jsonl tell of the ranks' hardware, added up."""

import math

import pytest
from support.training_maker import rank_lines, run

from megatron_lite.analysis.run.hardware import HardwareTally
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.run.step_lines import StepLines
from megatron_lite.formats.hardware_record import ClockLimit, HardwareFigures


def test_means_are_over_samples_and_of_clocks_over_those_at_work():
    tally = HardwareTally()
    tally.add_line({"samples": [9], "sm_clock_mhz": [1980, 1000], "power_w": [600, 300], "idle": [0, 0]}, 2)
    tally.add_line({"samples": [3, 1], "sm_clock_mhz": [1980, 2000], "power_w": [600, 100], "idle": [0, 0]}, 2)
    tally.add_line({"samples": [10], "power_w": [600, 200], "idle": [0, 1]}, 2)
    found = tally.build()
    assert found.get("sm_clock_mhz").tolist() == [1980, 1100]
    assert found.get("power_w").tolist() == [600, pytest.approx((2700 + 100 + 2000) / 20)]
    assert found.get("idle").tolist() == [0, 0.5]
    assert found.get("samples").tolist() == [22, 20]


def test_events_are_added_up_and_extremes_kept():
    tally = HardwareTally()
    tally.add_line(
        {"samples": [1], "xids": [0, 1], "last_xid": [None, 79], "temperature_c": [60, 90], "pcie_width": [16]}, 2
    )
    tally.add_line({"samples": [1], "xids": [0, 2], "temperature_c": [70, 80], "pcie_width": [16, 8]}, 2)
    # processes that the driver ends after it
    tally.add_line({"samples": [1], "xids": [0, 1], "last_xid": [None, 45]}, 2)
    tally.add_line({"samples": [1], "clock_limits": [0, 0x48]}, 2)
    tally.add_line({"samples": [1], "clock_limits": [4, 0x20]}, 2)
    found = tally.build()
    assert found.get("xids").tolist() == [0, 4]
    assert (found.get_one("last_xid", 0), found.get_one("last_xid", 1)) == (None, 79)
    assert found.get("temperature_c").tolist() == [70, 90]
    assert found.get("pcie_width").tolist() == [16, 8]
    assert found.get_limits(1) == ClockLimit.HW_SLOWDOWN | ClockLimit.HW_THERMAL | ClockLimit.SW_THERMAL
    assert math.isnan(found.get("power_w")[0])
    with pytest.raises(KeyError):
        found.get("no_such_figure")


def test_lists_of_a_wrong_length_and_lines_without_samples_tell_nothing():
    tally = HardwareTally()
    tally.add_line({"samples": [1, 2, 3], "power_w": [5, 5]}, 2)
    tally.add_line({"power_w": [5, 5]}, 2)
    tally.add_line({"samples": [1], "power_w": [5, 5, 5], "unheard_of": [1]}, 2)
    assert tally.build().figures.keys() == {"samples"}


def test_samples_of_one_rank_stand_for_it():
    tally = HardwareTally()
    tally.add_record(1, HardwareFigures(samples=4, power_w=300))
    found = tally.build()
    assert found.ranks == 2
    assert (found.get_one("power_w", 0), found.get_one("power_w", 1)) == (None, 300)


def test_every_line_counts_also_those_that_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lite.analysis.run.step_lines.MIN_RANK_LINES", 4)
    monkeypatch.setattr("megatron_lite.analysis.run.step_lines.MAX_KEPT_RANK_NUMBERS", 1)
    lines = rank_lines([3.0, 3.0], lines=40)
    for number, line in enumerate(lines):
        line["hardware"] = {"samples": [1], "xids": [0, 1 if number == 33 else 0]}
    found = read_run(run(tmp_path, ranks=lines))
    assert len(found.ranks.intervals.first) < 40
    assert found.hardware.get("xids").tolist() == [0, 1]
    assert found.hardware.get("samples").tolist() == [40, 40]


def test_a_line_of_one_rank_is_read_and_only_of_the_last_start(tmp_path):
    folder = run(tmp_path)
    path = folder / "steps.jsonl"
    alone = b'{"kind":"hardware","iterations":[3,3],"rank":1,"figures":{"samples":2,"last_xid":79,"xids":1}}\n'
    path.write_bytes(alone + path.read_bytes() + alone)
    lines = StepLines(path)
    lines.read()
    assert lines.unread == []
    assert lines.read_hardware().get_one("xids", 1) == 1
    path.write_bytes(path.read_bytes() + alone)
    lines.read()
    assert lines.read_hardware().get_one("xids", 1) == 2
