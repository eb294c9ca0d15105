"""Counters of CUPTI's PM sampling: read as Kineto and torch write them, and measured over the steady steps."""

import pytest
from support.perfetto_maker import TORCH_JSON, TORCH_PACKETS, write_pftrace
from support.trace_maker import BASE_US, MadeTrace, gpu_run, write

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.kernels.kernel_results import MEMORY_BUSY, SM_ACTIVE, Role
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.report.terminal import Style, terminal_lines

SM_NAMES = ["SM Active (%)", "sm__cycles_active.avg.pct_of_peak_sustained_elapsed"]
MEMORY_NAMES = [
    "DRAM BW (%)",
    "HBM BW (%)",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
]
STEPS = 6


def samples_of(value_at, every_us=10.0) -> list[tuple[float, float]]:
    times = [BASE_US + every_us * place for place in range(int(STEPS * 1000 / every_us) + 20)]
    return [(at, value_at(at - BASE_US)) for at in times]


def with_counters(samples: dict[str, list[tuple[float, float]]], gpu=0) -> MadeTrace:
    """As Kineto writes them: handleCounterEvent of libkineto/src/output_json.cpp."""
    made = gpu_run(steps=STEPS)
    for name, values in samples.items():
        entry = {"ph": "C", "cat": "hardware_counters", "name": name, "pid": f"GPU {gpu} Counters", "tid": 0}
        made.events += [entry | {"ts": at, "args": {"": value}} for at, value in values]
    return made


def use_of(path):
    return {one.name: one for one in analyze([path]).facts.critical.kernels.counters}


def test_both_forms_of_torch_hold_the_same_samples():
    """Three metrics of PM sampling, 50 times; power and two clocks twice; cycles of 20 kernels, whose rest the JSON cuts."""
    of_json, packets = (read_traces(path)[0].counters for path in (TORCH_JSON, TORCH_PACKETS))
    assert packets.names == of_json.names and len(packets) == 3 * 50 + 3 * 2 + 20
    for column in ("name", "device", "time_ns"):
        assert (getattr(packets, column) == getattr(of_json, column)).all()
    is_whole = packets.name == packets.names.index("Cycles (Current Kernel)")
    assert packets.value[is_whole] == pytest.approx(of_json.value[is_whole], abs=1)
    assert (packets.value[~is_whole] == of_json.value[~is_whole]).all() and packets.value[~is_whole].sum() % 1


@pytest.mark.parametrize("sm_name", SM_NAMES)
@pytest.mark.parametrize("memory_name", MEMORY_NAMES)
def test_means_of_the_steady_steps(tmp_path, sm_name, memory_name):
    """A sample counts by the time that it stands for in the steady steps."""
    made = with_counters(
        {sm_name: samples_of(lambda us: 80 if us % 20 else 40), memory_name: samples_of(lambda us: 25)}
    )
    found = use_of(made.write(tmp_path))
    assert found[sm_name].meaning == SM_ACTIVE and found[memory_name].meaning == MEMORY_BUSY
    assert found[sm_name].mean == pytest.approx(60, abs=0.5) and found[memory_name].mean == pytest.approx(25)


def test_what_kernels_of_one_role_reach(tmp_path):
    """Products run from 100 to 700 us of a step, the optimizer's kernel to 800; then the device waits."""

    def value(us: float) -> float:
        in_step = us % 1000
        return 70 if 100 <= in_step < 700 else 30 if 700 <= in_step < 800 else 0

    made = with_counters({"SM Active (%)": samples_of(value)})
    [use] = use_of(made.write(tmp_path)).values()
    assert use.by_role[Role.GEMM] == pytest.approx(70) and use.by_role[Role.OPTIMIZER] == pytest.approx(30)
    assert use.working == pytest.approx((600 * 70 + 100 * 30 + 10 * 0) / 710, rel=0.02)
    assert use.mean == pytest.approx((600 * 70 + 100 * 30) / 1000, rel=0.02)


def test_packets_of_counters_are_measured_alike(tmp_path):
    samples = {"SM Active (%)": samples_of(lambda us: us % 90), "dram__bytes_read.sum": samples_of(lambda us: 1e9)}
    of_json = use_of(with_counters(samples).write(tmp_path))
    assert of_json == use_of(write_pftrace(gpu_run(steps=STEPS), tmp_path, samples=samples))
    assert of_json["dram__bytes_read.sum"].meaning == ""


def test_they_are_evidence_where_the_report_infers(tmp_path):
    samples = {"SM Active (%)": samples_of(lambda us: 37), "DRAM BW (%)": samples_of(lambda us: 12)}
    report = analyze([with_counters(samples).write(tmp_path)])
    [found] = [one for one in report.findings if one.code == "below-roofline"]
    assert [one for one in found.evidence if "37%" in str(one) and "12%" in str(one) and "CUPTI" in str(one)]
    shown = "\n".join(terminal_lines(report, Style(), False))
    assert "SM Active (%)" in shown and "DRAM BW (%)" in shown


def test_without_samples_nothing_is_claimed(tmp_path):
    few = {"SM Active (%)": samples_of(lambda us: 50)[:30]}
    other_gpu = with_counters({"SM Active (%)": samples_of(lambda us: 50)}, gpu=3)
    for made in (gpu_run(steps=STEPS), with_counters(few), other_gpu):
        report = analyze([made.write(tmp_path)])
        assert report.facts.critical.kernels.counters == ()
        assert "CUPTI" not in "\n".join(terminal_lines(report, Style(), False))


@pytest.mark.parametrize("entry", [
    {"pid": "GPU 0 Counters", "args": {"": "NaN"}}, {"pid": 0, "args": {"": 5}}, {"pid": "GPU 0 Counters"},
    {"pid": "GPU x Counters", "args": {"": 5}}, {"pid": "GPU 0 Counters", "args": {"": [1]}},
])  # fmt: skip
def test_other_entries_are_no_samples(tmp_path, entry):
    data = gpu_run(steps=STEPS).data()
    data["traceEvents"].append({"ph": "C", "name": "x", "ts": BASE_US} | entry)
    [trace] = read_traces(write(data, tmp_path / "t.json"))
    assert not len(trace.counters) and len(trace.events) == len(data["traceEvents"]) - 1


@pytest.mark.parametrize("value", [-5.0, 200.0, 1e17])
def test_what_is_no_share_has_no_meaning(tmp_path, value):
    samples = {"SM Active (%)": samples_of(lambda us: value if us == 3000 else 50)}
    report = analyze([with_counters(samples).write(tmp_path)])
    [use] = report.facts.critical.kernels.counters
    assert use.meaning == "" and "CUPTI" not in "\n".join(terminal_lines(report, Style(), False))


@pytest.mark.parametrize("damage", [{"args": {"": 1e308}}, {"args": {"": -1e300}}, {"ts": 1e30}, {"ts": -1e30}])
def test_damaged_samples_are_left_out(tmp_path, damage):
    made = with_counters({"SM Active (%)": samples_of(lambda us: 50)})
    before = len(made.events)
    made.events += [made.events[-1] | damage]
    [trace] = read_traces(made.write(tmp_path))
    assert len(made.events) == before + 1 and trace.counters.value.max() == trace.counters.value.min() == 50
    assert len(trace.counters) == len(samples_of(lambda us: 50))
