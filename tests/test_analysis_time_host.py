"""Where a step goes without a GPU."""

import pytest
from trace_maker import AUTOGRAD, MadeTrace, cpu_run

from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.read import read_traces


def timed(made: MadeTrace, folder) -> RankTime:
    [trace] = read_traces(made.write(folder))
    time = rank_time(trace, attribute_events(trace))
    assert sum(time.rows.values()) == pytest.approx(time.step_ms, abs=1e-9)
    return time


def rows(time: RankTime) -> dict[str, float]:
    return {row: round(ms * 1e3, 3) for row, ms in time.rows.items() if ms}


def one_step() -> MadeTrace:
    made = MadeTrace(device=None)
    made.step(1, 0, 1000)
    made.op("aten::mm", 100, 300)
    return made


def test_a_whole_run_has_the_rows_that_were_made(tmp_path):
    time = timed(cpu_run(steps=5), tmp_path)
    assert (time.on_gpu, time.device, time.syncs, time.launches) == (False, None, (), 0.0)
    # gloo runs from 500 to 800; operators until 550 and from 800 on
    wanted = {"data_wait": 100, "compute": 490, "exposed_communication": 250, "host": 160}
    assert rows(time) == pytest.approx(wanted, abs=1.01)  # the last step ends 5 us early
    assert time.overlap == pytest.approx(1 / 6)
    assert time.loader_host_ms == pytest.approx(0.1)


def test_phases_are_the_hosts(tmp_path):
    phases = {phase.name: phase for phase in timed(cpu_run(steps=5), tmp_path).phases}
    assert list(phases) == ["data", "forward", "backward", "grad_sync", "optimizer_step"]
    assert (
        phases["backward"].host_ms,
        phases["backward"].compute_ms,
        phases["backward"].communication_ms,
    ) == pytest.approx((0.3, 0.24, 0.1))
    assert phases["backward"].device_ms == phases["backward"].host_ms


def test_waiting_inside_autograds_wrapper_is_communication_and_its_own_work_is_compute(tmp_path):
    made = one_step()
    made.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 400, 700)
    made.gloo(500, 700)
    assert rows(timed(made, tmp_path)) == {"compute": 300, "exposed_communication": 200, "host": 500}


def test_a_collective_operator_waits(tmp_path):
    made = one_step()
    made.op("c10d::allreduce_", 400, 700)
    made.gloo(410, 700)
    assert rows(timed(made, tmp_path)) == {"compute": 210, "exposed_communication": 290, "host": 500}


def test_operators_of_autograds_thread_and_compiled_code_compute(tmp_path):
    made = one_step()
    made.op("aten::mm", 200, 400, AUTOGRAD)
    made.op("autograd::engine::evaluate_function: MmBackward0", 200, 400, AUTOGRAD)
    made.op("aten::stack", 500, 600, thread=77)  # a loader's thread is not the step's
    made.annotation("## Call CompiledFxGraph abc ##", 700, 800)
    assert rows(timed(made, tmp_path)) == {"compute": 400, "host": 600}


def test_loading_saving_and_collecting_garbage(tmp_path):
    made = one_step()
    made.annotation("data", 0, 90)
    made.op("aten::stack", 10, 50)  # collating is loading
    made.annotation("save", 800, 900)
    made.frame("<built-in function collect>", 600, 650)
    time = timed(made, tmp_path)
    assert rows(time) == {"data_wait": 90, "compute": 200, "save": 100, "garbage_collector": 50, "host": 560}


def test_a_phase_inside_another_is_not_counted_twice(tmp_path):
    made = one_step()
    made.annotation("optimizer_step", 400, 900)
    made.annotation("clip_grad", 500, 600)
    phases = {phase.name: phase.host_ms * 1e3 for phase in timed(made, tmp_path).phases}
    assert phases == pytest.approx({"optimizer_step": 400, "clip_grad": 100})


def test_the_timeline_is_the_main_threads(tmp_path):
    time = timed(cpu_run(steps=3), tmp_path)
    assert [span.name for span in time.timeline] == [
        "data",
        "forward",
        "backward",
        "communication",
        "grad_sync",
        "optimizer_step",
    ]


def test_python_between_operators_has_its_phase_and_line(tmp_path):
    made = one_step()
    made.annotation("forward", 50, 400)
    made.frame("train.py(3): tokenize", 600, 900)
    sites = {(site.what, site.phase): site.idle_ms * 1e3 for site in timed(made, tmp_path).hosts}
    assert sites == pytest.approx(
        {
            ("Python between operators", ""): 50 + 200 + 100,
            ("Python between operators", "forward"): 50 + 100,
            ("train.py(3): tokenize", ""): 300,
        }
    )
