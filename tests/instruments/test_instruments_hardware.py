"""The sampler of the hardware, on scripted devices of a fake NVML and on made files of a kernel."""

import dataclasses
import importlib
import json
import math
import sys
import threading

import pytest
import torch
from support.paths import TESTS

from megatron_lite.formats.hardware_record import ClockLimit, HardwareFigures
from megatron_lite.instruments import hardware_sampler
from megatron_lite.instruments.gpu_sensors import GpuSensors, open_gpu
from megatron_lite.instruments.hardware_sampler import HardwareLines, HardwareSampler
from megatron_lite.instruments.host_counters import HostCounters, measure_shares
from megatron_lite.instruments.step_time import StepTime
from megatron_lite.train.rank_stats import find_gpu_troubles, gather

NOTHING = ("samples", "sampling_ms")


@pytest.fixture
def nvml(monkeypatch):
    """A function that takes {device: what it tells}, and returns the fake module."""
    monkeypatch.syspath_prepend(str(TESTS / "support" / "fake_nvml"))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def script(**devices):
        module = importlib.import_module("pynvml")
        module.read_script(json.dumps({name.replace("_", "-"): told for name, told in devices.items()}))
        return module

    yield script
    sys.modules.pop("pynvml", None)


@pytest.fixture
def no_host(tmp_path):
    """A machine whose kernel tells nothing."""
    return HostCounters(tmp_path / "proc", tmp_path / "sys")


def known(figures: HardwareFigures) -> dict[str, float]:
    values = {name: getattr(figures, name) for name in HardwareFigures.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None and name not in NOTHING}


def sample(sensors, host, times=1) -> HardwareFigures:
    sampler = HardwareSampler(sensors, host)
    for _ in range(times):
        sampler.sample()
    return sampler.take()


def test_a_healthy_gpu_is_told_whole(nvml, no_host):
    nvml(GPU_1={})
    assert known(sample(open_gpu(["GPU-1"], ""), no_host)) == {
        "sm_clock_mhz": 1980,
        "min_sm_clock_mhz": 1980,
        "memory_clock_mhz": 2619,
        "temperature_c": 61,
        "power_w": 640,
        "utilization": 0.99,
        "clock_limits": 0,
        "idle": 0,
        "slowed": 0,
        "power_capped": 0,
        "max_sm_clock_mhz": 1980,
        "power_limit_w": 700,
        "slowdown_c": 87,
        "pcie_width": 16,
        "max_pcie_width": 16,
        "repair": 0,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "remapped_rows": 0,
        "nvlink_errors": 0,
        "pcie_replays": 0,
        "xids": 0,
    }


def test_a_hot_gpu_is_slowed_in_a_share_of_its_samples(nvml, no_host):
    hot = int(ClockLimit.HW_SLOWDOWN | ClockLimit.HW_THERMAL)
    nvml(
        GPU_1={
            "sm_clock_mhz": [1980, 1095, 1095, 1095],
            "reasons": [0, 0, hot, hot, hot],
            "temperature_c": [80, 91, 88],
        }
    )
    figures = sample(open_gpu(["GPU-1"], ""), no_host, times=4)
    assert (figures.samples, figures.slowed, figures.clock_limits) == (4, 0.75, hot)
    assert (figures.sm_clock_mhz, figures.min_sm_clock_mhz, figures.temperature_c) == (1316.25, 1095, 91)


def test_the_clock_of_an_idle_gpu_is_not_its_clock(nvml, no_host):
    nvml(GPU_1={"sm_clock_mhz": [1980, 345, 345], "reasons": [0, 0, 1, 1]})
    figures = sample(open_gpu(["GPU-1"], ""), no_host, times=3)
    assert (figures.sm_clock_mhz, figures.min_sm_clock_mhz, figures.slowed, figures.clock_limits) == (1980, 1980, 0, 0)
    assert figures.idle == pytest.approx(2 / 3)
    nvml(GPU_1={"reasons": 1})
    figures = sample(open_gpu(["GPU-1"], ""), no_host)
    assert (figures.sm_clock_mhz, figures.slowed, figures.power_capped, figures.idle) == (None, None, None, 1)


def test_counters_are_told_as_what_they_grew_by(nvml, no_host):
    nvml(
        GPU_1={
            "ecc_uncorrected": [3, 5],
            "remapped": [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]],
            "nvlink": [7, 19],
            "pcie_replays": [100, 40],
        }
    )
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host)
    sampler.sample()
    first = sampler.take()
    assert (first.ecc_uncorrected, first.remapped_rows, first.nvlink_errors, first.pcie_replays) == (0, 0, 0, 0)
    for _ in range(hardware_sampler.SAMPLES_PER_COUNT):
        sampler.sample()
    # a driver that was loaded anew counts from 0
    second = sampler.take()
    assert (second.ecc_uncorrected, second.remapped_rows, second.nvlink_errors, second.pcie_replays) == (2, 1, 12, 0)
    assert second.repair == 1
    assert sampler.take() is None


def test_an_xid_of_hardware_is_told_also_where_processes_are_ended_for_it(nvml, no_host):
    nvml(GPU_1={"xids": [45, 79, 45, 45]})
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host)
    sampler.sample()
    figures = sampler.take()
    assert (figures.xids, figures.last_xid) == (4, 79)


def test_xids_are_taken_once(nvml, no_host):
    nvml(GPU_1={"xids": [48, 63]})
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host)
    sampler.sample()
    first = sampler.take()
    assert (first.xids, first.last_xid) == (2, 63)
    sampler.sample()
    second = sampler.take()
    assert (second.xids, second.last_xid) == (0, None)


def test_what_may_not_be_read_is_absent_and_asked_once(nvml, no_host):
    module = nvml(
        GPU_1={
            "errors": {
                "nvmlDeviceGetPowerUsage": 4,
                "nvmlDeviceRegisterEvents": 4,
                "nvmlDeviceGetTotalEccErrors": 3,
                "nvmlDeviceGetRemappedRows": 3,
                "nvmlDeviceGetFieldValues": 3,
                "nvmlDeviceGetTemperatureThreshold": 3,
            }
        }
    )
    sensors = open_gpu(["GPU-1"], "")
    sampler = HardwareSampler(sensors, no_host)
    sampler.sample()
    figures = sampler.take()
    absent = (
        "power_w",
        "xids",
        "ecc_corrected",
        "ecc_uncorrected",
        "remapped_rows",
        "repair",
        "nvlink_errors",
        "slowdown_c",
    )
    assert [name for name in absent if getattr(figures, name) is not None] == []
    assert figures.sm_clock_mhz == 1980
    assert sampler.describe().unread.keys() == set(absent)
    assert sampler.describe().unread["power_w"] == "Insufficient Permissions"
    calls = module.devices["GPU-1"].calls
    sampler.sample()
    # clocks of multiprocessors and memory, temperature, utilization, reasons
    assert module.devices["GPU-1"].calls - calls == 5


def test_a_passing_failure_is_asked_again(nvml, no_host):
    module = nvml(GPU_1={"errors": {"nvmlDeviceGetTemperature": 999}})
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host)
    sampler.sample()
    assert sampler.take().temperature_c is None
    module.devices["GPU-1"].told["errors"] = {}
    sampler.sample()
    assert sampler.take().temperature_c == 61
    assert sampler.describe().unread == {}


def test_a_lost_gpu_is_told_and_asked_no_more(nvml, no_host):
    module = nvml(GPU_1={"lost_after": 12})
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host)
    for _ in range(3):
        sampler.sample()
    figures = sampler.take()
    assert (figures.lost, figures.samples) == (1, 3)
    assert module.devices["GPU-1"].calls == 13


def test_older_drivers_know_the_reasons_by_another_name(nvml, no_host):
    nvml(GPU_1={"reasons": 0x20, "errors": {"nvmlDeviceGetCurrentClocksEventReasons": 13}})
    figures = sample(open_gpu(["GPU-1"], ""), no_host)
    assert (figures.clock_limits, figures.slowed) == (ClockLimit.SW_THERMAL, 1)


def test_an_instance_tells_what_the_whole_gpu_does(nvml, no_host):
    nvml(MIG_7={"parent": "GPU-1"}, GPU_1={"temperature_c": 70})
    sensors = open_gpu(["GPU-7", "MIG-7"], "")
    assert isinstance(sensors, GpuSensors)
    assert sensors.is_mig
    assert sample(sensors, no_host).temperature_c == 70


def test_a_gpu_is_found_by_its_place_and_never_by_its_number(nvml):
    nvml(GPU_1={"pci": "00000000:1B:00.0"})
    assert isinstance(open_gpu(["GPU-9"], "00000000:1B:00.0"), GpuSensors)
    assert "GPU-9" in open_gpu(["GPU-9"], "00000000:1C:00.0")


def test_without_nvml_there_is_a_reason(nvml, monkeypatch):
    nvml(init_error=9)
    assert "Driver Not Loaded" in open_gpu(["GPU-1"], "")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in open_gpu(["GPU-1"], "")


# --- the host


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/pod/box\n", "sys/fs/cgroup/pod/cpu.stat"),
        ("0::/\n", "sys/fs/cgroup/cpu.stat"),
        ("4:memory:/pod\n3:cpu,cpuacct:/pod\n0::/\n", "sys/fs/cgroup/cpu/pod/cpu.stat"),
    ],
)
def test_quotas_of_all_groups_around_a_process_count(tmp_path, membership, file):
    write(tmp_path, proc__self__cgroup=membership)
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("usage_usec 5\nnr_periods 100\nnr_throttled 10\nthrottled_usec 9\n")
    host = HostCounters(tmp_path / "proc", tmp_path / "sys")
    before = dict(host.read_counts())
    path.write_text("usage_usec 5\nnr_periods 300\nnr_throttled 160\nthrottled_usec 9\n")
    assert dict(measure_shares(before, dict(host.read_counts()), 20.0)) == {"quota_used_up": 0.75}


def test_time_that_others_took_is_a_share(tmp_path):
    write(
        tmp_path,
        proc__stat="cpu  100 0 100 700 50 0 0 50 40 0\ncpu0 1 1 1\n",
        proc__pressure__memory="some avg10=0.00 total=1000000\nfull avg10=0.00 total=7\n",
        proc__vmstat="nr_free_pages 5\npswpin 10\npswpout 20\n",
    )
    host = HostCounters(tmp_path / "proc", tmp_path / "sys")
    before = dict(host.read_counts())
    write(
        tmp_path,
        proc__stat="cpu  400 0 200 900 50 0 0 350 240 0\n",
        proc__pressure__memory="some avg10=0.00 total=3500000\n",
        proc__vmstat="nr_free_pages 5\npswpin 110\npswpout 20\n",
    )
    assert dict(measure_shares(before, dict(host.read_counts()), 10.0)) == {
        "stolen": pytest.approx(300 / 900),
        "memory_pressure": 0.25,
        "swapped_bytes": 100 * host._page_bytes,
    }


def test_clocks_and_heat_of_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3}, raising=False)
    for core, khz in ((2, 1_200_000), (3, 1_400_000)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        for name, text in (
            ("cpufreq/scaling_cur_freq", f"{khz}\n"),
            ("cpufreq/cpuinfo_max_freq", "3800000\n"),
            ("thermal_throttle/package_throttle_count", "4\n"),
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    host = HostCounters(tmp_path / "proc", tmp_path / "sys")
    assert (host.read_cpu_mhz(), host.max_cpu_mhz) == (1300, 3800)
    assert dict(host.read_counts()) == {"cpu_slowdowns": 8}


def test_a_machine_that_tells_nothing_has_no_figures(no_host):
    assert known(sample(None, no_host, times=6)) == {}


# --- the lines of a run


def test_figures_of_a_rank_go_into_its_line(nvml, no_host):
    nvml(GPU_1={"errors": {"nvmlDeviceGetPowerUsage": 4}, "temperature_c": 61})
    figures = sample(open_gpu(["GPU-1"], ""), no_host)
    figures.sampling_ms = 0.25
    line = gather([], 0, torch.device("cpu"), 1, figures).build_record().hardware
    assert line == {"sampling_ms": [0.25], "samples": [1]} | {name: [value] for name, value in known(figures).items()}
    assert gather([], 0, torch.device("cpu"), 1).build_record().hardware == {}


def test_a_number_that_all_ranks_have_is_written_once():
    hardware = {"max_sm_clock_mhz": [1980.0] * 1000, "temperature_c": [61.0] * 999 + [91.5], "power_w": [math.nan, 5.0]}
    figures = gather([], 0, torch.device("cpu"), 1)
    line = dataclasses.replace(figures, hardware=hardware).build_record().hardware
    assert line["max_sm_clock_mhz"] == [1980]
    assert line["temperature_c"] == [61] * 999 + [91.5]
    assert line["power_w"] == [None, 5]


# --- the thread


def test_the_thread_samples_until_the_end_and_once_more(nvml, no_host):
    nvml(GPU_1={"xids": [79]})
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host, period_s=3600)
    sampler.resume(0)
    while sampler._sampled < 1:
        threading.Event().wait(0.001)
    sampler.finish()
    figures = sampler.take()
    assert (figures.samples, figures.last_xid) == (2, 79)
    sampler.close(None)
    assert "hardware sampler" not in [thread.name for thread in threading.enumerate()]


def test_a_driver_that_hangs_does_not_hold_up_the_end(nvml, no_host, monkeypatch):
    module = nvml(GPU_1={})
    stuck, goes_on = threading.Event(), threading.Event()

    def hang(*arguments):
        stuck.set()
        goes_on.wait()
        return 50

    module.nvmlDeviceGetTemperature = hang
    monkeypatch.setattr(hardware_sampler, "MAX_END_S", 0.01)
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host)
    sampler.resume(0)
    stuck.wait()
    sampler.close(None)
    assert sampler.take() is None
    goes_on.set()


def test_a_costly_sample_is_taken_seldom(no_host, monkeypatch):
    sampler = HardwareSampler(None, no_host)
    waits = []

    def wait(seconds):
        waits.append(seconds)
        return len(waits) == 3

    costs = iter((0.0002, 0.02, 0.02, 0.02))
    monkeypatch.setattr(sampler, "sample", lambda with_counts=False: next(costs))
    monkeypatch.setattr(sampler._ends, "wait", wait)
    sampler._run()
    assert waits == pytest.approx([1.0, 10.1, 13.4])


def test_without_console_lines_samples_are_written_now_and_then_and_at_the_end(nvml, no_host):
    nvml(GPU_1={})
    sampler = HardwareSampler(open_gpu(["GPU-1"], ""), no_host)
    now = [100.0]
    lines = HardwareLines(sampler, 2, clock=lambda: now[0])
    now[0] = 111.0
    assert lines.take(4, is_last=False) is None
    sampler.sample()
    first = lines.take(5, is_last=False)
    assert (first.rank, first.iterations, first.figures.samples) == (2, (1, 5), 1)
    sampler.sample()
    now[0] = 112.0
    assert lines.take(6, is_last=False) is None
    last = lines.take(9, is_last=True)
    assert (last.iterations, last.figures.samples) == ((6, 9), 1)


# --- the console


def warn(**hardware):
    steps = StepTime(1, seconds=0.01)
    figures = gather([steps], 0, torch.device("cpu"), 1)
    return dict(find_gpu_troubles(dataclasses.replace(figures, hardware=hardware)))


def test_the_console_names_the_gpu_that_is_slowed_down_most():
    hot = float(ClockLimit.HW_SLOWDOWN | ClockLimit.HW_THERMAL)
    told = {"max_sm_clock_mhz": [1980.0] * 3, "clock_limits": [0.0, hot, hot]}
    found = warn(sm_clock_mhz=[1980.0, 1300.0, 1095.0], slowed=[0.0, 0.9, 1.0], **told)
    assert found.keys() == {"slowed 2"}
    assert "1,095 of 1,980 MHz: thermal slowdown" in found["slowed 2"]
    assert warn(sm_clock_mhz=[1980.0, 1300.0, math.nan], slowed=[0.0, 0.2, 1.0], **told) == {}
    assert warn() == {}


def test_the_console_names_errors_of_a_gpu():
    found = warn(xids=[0.0, 2.0], last_xid=[math.nan, 79.0], ecc_uncorrected=[math.nan, 0.0])
    assert found.keys() == {"xids 1"} and "79" in found["xids 1"]
