"""The trainer's own traces, and real ones of other people: properties, and an independent count of the rows from the raw
JSON."""

import functools
import gzip
import json
from pathlib import Path

import pytest
from support.launch import alone, flags, quietly
from support.paths import TRACES
from support.traces import trace_files
from support.wording import wording

from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.read import read_traces

FILES = sorted(TRACES.glob("*/rank*.json.gz")) + sorted(TRACES.glob("*/*.sqlite"))
needs_traces = pytest.mark.skipif(not FILES, reason="no ../shared/traces beside the repository")
COMPUTE, COMMUNICATION, COPY = 4, 2, 1  # what hides what


@functools.cache
def times(path: Path) -> tuple[RankTime, ...]:
    return tuple(rank_time(trace, attribute_events(trace)) for trace in read_traces(path))


def time_of(folder: str) -> RankTime:
    [time] = times(next((TRACES / folder).glob("rank0*")))
    return time


@needs_traces
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.name[:5]}")
def test_rows_sum_to_the_step_and_nothing_is_negative(path):
    for time in times(path):
        assert time.step_ms > 0
        assert sum(time.rows.values()) == pytest.approx(time.step_ms, rel=1e-12)
        assert min(time.rows.values()) >= 0
        assert time.rows["unexplained"] < 0.02 * time.step_ms
        assert time.busy_ms == pytest.approx(
            sum(time.rows[row] for row in ("compute", "exposed_communication", "exposed_copy"))
        )
        assert sum(site.idle_ms for site in time.syncs) == pytest.approx(time.rows["sync"], abs=1e-6)
        assert sum(site.idle_ms for site in time.hosts) <= time.rows["host"] + 1e-6
        assert all(0 <= phase.device_ms <= phase.device_span_ms + 1e-9 for phase in time.phases)
        assert all(phase.device_ms <= phase.device_sum_ms + 1e-9 for phase in time.phases)
        json.dumps(
            time.rows | {"syncs": [vars(site) for site in time.syncs], "phases": [vars(phase) for phase in time.phases]}
        )


def first_device_ns(path: Path) -> int:
    [trace] = read_traces(path)
    return int(trace.events.start_ns[trace.device_rows].min())


def swept(path: Path, time: RankTime) -> dict[str, float]:
    """ms per steady step of what runs at each moment, by a sweep over the file's own events."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    device = [
        event
        for event in events
        if event.get("ph") == "X"
        and str(event.get("cat")).lower() in ("kernel", "memcpy", "memset", "gpu_memcpy", "gpu_memset")
    ]
    shift = min(event["ts"] for event in device) - first_device_ns(path) / 1e3
    edges = [(step.start_ns / 1e3 + shift, 0, 0) for step in time.steps] + [(time.steps[-1].end_ns / 1e3 + shift, 0, 0)]
    for event in device:
        kernel = event["cat"].lower() == "kernel"
        kind = (COMMUNICATION if event["name"].startswith("nccl") else COMPUTE) if kernel else COPY
        edges += [(event["ts"], kind, 1), (event["ts"] + event["dur"], kind, -1)]
    windows = [(step.start_ns / 1e3 + shift, step.end_ns / 1e3 + shift) for step in time.steady_steps]
    running, found, before = {COMPUTE: 0, COMMUNICATION: 0, COPY: 0}, {COMPUTE: 0.0, COMMUNICATION: 0.0, COPY: 0.0}, 0.0
    for moment, kind, change in sorted(edges):
        on_top = max((one for one, count in running.items() if count), default=None)
        if on_top and any(start - 1e-3 <= before and moment <= end + 1e-3 for start, end in windows):
            found[on_top] += moment - before
        if kind:
            running[kind] += change
        before = moment
    per_step = 1e3 * len(windows)
    return {
        "compute": found[COMPUTE] / per_step,
        "exposed_communication": found[COMMUNICATION] / per_step,
        "exposed_copy": found[COPY] / per_step,
    }


@pytest.mark.parametrize("folder", ["a100_ddp_nccl_rank0of2", "h100_qwen_stacks", "v100_dlrm_8ranks"])
@needs_traces
def test_an_independent_sweep_finds_the_same(folder):
    time = time_of(folder)
    found = swept(next((TRACES / folder).glob("rank0*")), time)
    assert found == pytest.approx({row: time.rows[row] for row in found}, abs=2e-3)


@needs_traces
def test_the_launch_bound_one_is_found():
    time = time_of("a100_ddp_nccl_rank0of2")
    assert time.launch_bound
    assert time.rows["host"] > 0.7 * time.step_ms
    assert time.overlap == pytest.approx(0.156, abs=0.001)
    assert not time_of("h100_qwen_stacks").launch_bound


@needs_traces
def test_the_loader_without_workers_starves_the_gpu_and_four_do_not():
    alone, four = time_of("v100_resnet50_loader_workers0"), time_of("v100_resnet50_loader_workers4")
    assert alone.rows["data_wait"] > 0.3 * alone.step_ms
    assert four.rows["data_wait"] < 0.01 * four.step_ms
    assert four.loader_host_ms == pytest.approx(0.84, abs=0.01)


@needs_traces
def test_backward_takes_the_device_longer_than_its_label_says():
    phases = {phase.name: phase for phase in time_of("v100_resnet50_loader_workers0").phases}
    assert phases["backward"].device_ms > 2 * phases["backward"].host_ms
    assert phases["data"].host_ms > 60
    assert phases["data"].device_ms == 0
    assert {"forward", "data_to_device", "optimizer_step"} <= set(phases)


@needs_traces
def test_lines_of_the_program_stand_at_its_synchronizations():
    frames = {(site.operator, site.frame) for site in time_of("h100_qwen_stacks").syncs}
    assert ("aten::is_nonzero", "transformers/modeling_attn_mask_utils.py(243): _ignore_causal_mask_sdpa") in frames


def test_the_trainers_own_trace(tmp_path):
    """Every phase is found, a step's rows sum to it, and the step that evaluates does not count."""
    profile = "--profile --use-pytorch-profiler --profile-step-start 3 --profile-step-end 8 --tensorboard-dir"
    steps = "--train-iters 9 --global-batch-size 2 --eval-iters 1 --eval-interval 5"
    with alone():
        quietly(flags(steps, profile, tmp_path / "tb"), tmp_path / "run")
    [time] = times(*trace_files(tmp_path / "tb"))
    assert [step.number for step in time.steps] == [3, 4, 5, 6, 7]
    assert (time.steps[2].why_not, time.notes) == (wording("analysis/has-eval-in-it"), ())
    assert sum(time.rows.values()) == pytest.approx(time.step_ms, rel=1e-12)
    assert 0 < time.rows["compute"] < time.step_ms
    assert (time.rows["save"], time.on_gpu) == (0, False)
    phases = "data data_to_device forward backward grad_sync unscale clip_grad optimizer_step log"
    assert [phase.name for phase in time.phases] == phases.split()
    assert 0.5 * time.step_ms < sum(phase.host_ms for phase in time.phases) <= time.step_ms
    assert time.loader_host_ms == pytest.approx(time.phases[0].host_ms)
