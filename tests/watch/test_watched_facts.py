"""What watch notes of a script besides its steps, and the rules that read it."""

import json

import pytest
import torch
from support.trace_maker import AUTOGRAD, MadeTrace
from support.training_maker import cpu, ordinary_steps, run
from support.wording import wording
from torch import nn
from torch.utils.data import DataLoader

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings.rules import apply_rules
from megatron_lite.units import GIB
from megatron_lite.watch.profiler import Profiler, count_local_ranks

STEPS = 14


def watch_loop(folder, limits=(0.01,), loader=None):
    """A loop that clips its gradients to each of the limits in turn; returns the norms that it saw first in each step."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = loader or [torch.randn(4, 8) for _ in range(STEPS)]
    norms = []
    with Profiler(folder, steps=range(20, 21)):
        for batch in batches:
            optimizer.zero_grad()
            (100 * model(batch)).square().mean().backward()
            found = [nn.utils.clip_grad_norm_(model.parameters(), limit) for limit in limits]
            norms.append(found[0].item() if found else None)
            optimizer.step()
    return norms


def read_lines(folder):
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def read_watched(folder) -> dict:
    return json.loads((folder / "run.json").read_text())["watched"]


def codes(folder) -> list[str]:
    return [one.code for one in apply_rules(analyze([folder]).facts)]


@pytest.mark.parametrize(("limit", "found"), [(0.001, True), (1e6, False)])
def test_norms_that_clipping_returns_are_noted(tmp_path, limit, found):
    clip = nn.utils.clip_grad_norm_
    norms = watch_loop(tmp_path, (limit,))
    assert nn.utils.clip_grad_norm_ is clip
    assert [line["grad_norm"] for line in read_lines(tmp_path)] == pytest.approx(norms)
    assert read_watched(tmp_path)["clip_grad"] == limit
    assert ("hard-clipping" in codes(tmp_path)) is found


def test_several_limits_in_a_step_are_none(tmp_path):
    watch_loop(tmp_path, (0.001, 0.002))
    assert not any("grad_norm" in line for line in read_lines(tmp_path))
    assert "clip_grad" not in read_watched(tmp_path) and "hard-clipping" not in codes(tmp_path)


def test_the_loader_and_the_process_are_noted(tmp_path):
    watch_loop(tmp_path, (), DataLoader(torch.randn(4 * STEPS, 8), batch_size=4))
    told = read_watched(tmp_path)
    assert told["loader_workers"] == 0 and told["local_ranks"] == 1
    assert 0 < told["peak_host_bytes"] < told["host_memory_bytes"]


@pytest.mark.parametrize(
    ("size", "launched", "ranks"), [(1, "", 1), (8, "4", 4), (8, "", None), (8, "9", None), (8, "x", None)]
)
def test_ranks_of_the_machine_are_those_that_the_launcher_names(monkeypatch, size, launched, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", launched)
    assert count_local_ranks(size) == ranks


def write_watched(folder, hardware=None, steps=None, **watched):
    """The record of a watched script on a CPU."""
    run(folder, steps=steps or ordinary_steps(), device="cpu", world=1)
    record = json.loads((folder / "run.json").read_text())
    del record["plan"]
    told = {"command": ["python", "train.py"], "watched": {"local_ranks": 1} | watched}
    record["hardware"] |= hardware or {}
    (folder / "run.json").write_text(json.dumps(record | told))


@pytest.mark.parametrize(("threads", "found"), [(32, True), (2, False)])
def test_more_threads_than_cores_of_a_watched_script(tmp_path, threads, found):
    cpu(tmp_path)
    write_watched(tmp_path, {"threads": threads, "cpus": 2}, ordinary_steps(core_wait_ms=4.0, cpu_ms=9.0))
    report = analyze([tmp_path])
    assert ([one.code for one in report.findings][:1] == ["too-many-threads"]) is found
    if found:
        first = report.findings[0]
        assert first.cost_ms == pytest.approx(4.0) and not first.certain
        assert "torch.set_num_threads(2)" in first.advice


@pytest.mark.parametrize(("workers", "code"), [(12, "too-many-workers"), (1, "starved-loader")])
def test_more_workers_than_cores_of_a_watched_script(tmp_path, workers, code):
    wait = lambda made, at: made.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 1)
    cpu(tmp_path, change=wait)
    write_watched(tmp_path, {"cpus": 2}, ordinary_steps(phase_data=4.0), loader_workers=workers)
    (next(tmp_path.glob("*.json.gz"), None) or next(tmp_path.glob("*.pt.trace.json"))).unlink()
    found = [one for one in codes(tmp_path) if one in ("too-many-workers", "starved-loader")]
    assert found == [code]


def write_checkpointed(folder, again=True):
    """6 layers on a CPU, each of which runs forward again inside backward."""
    made = MadeTrace(0, 1, device=None)
    for index in range(6):
        at = 10.0 + 12_000 * index
        made.step(10 + index, at, at + 7_700)
        for place in range(6):
            start = at + 10 + 300 * place
            made.op("aten::linear", start, start + 290, sequence=1000 * index + place)
        for place in reversed(range(6)):
            start = at + 2_000 + 900 * (5 - place)
            node = {"sequence": 1000 * index + place, "forward_thread": 1}
            made.op("autograd::engine::evaluate_function: AddmmBackward0", start, start + 890, AUTOGRAD, **node)
            if again:
                made.op("aten::linear", start + 5, start + 290, AUTOGRAD, sequence=1000 * index + 500 + place)
            made.op("aten::mm", start + 295, start + 880, AUTOGRAD)
    made.write(folder)


@pytest.mark.parametrize(
    ("again", "peak", "found"),
    [(True, 2 * GIB, True), (True, 12 * GIB, False), (True, None, False), (False, 2 * GIB, False)],
)
def test_recomputation_on_a_cpu_is_needless_beside_free_memory(tmp_path, again, peak, found):
    write_checkpointed(tmp_path, again)
    memory = {} if peak is None else {"peak_host_bytes": peak, "host_memory_bytes": 24 * GIB}
    write_watched(tmp_path, **memory)
    findings = {one.code: one for one in apply_rules(analyze([tmp_path]).facts)}
    assert ("needless-recompute" in findings) is found
    if found:
        assert findings["needless-recompute"].cost_ms == pytest.approx(6 * 0.285)
        assert "2.00 GiB of 24.00 GiB" in findings["needless-recompute"].evidence[1].text


@pytest.mark.parametrize(("ranks", "together"), [(1, False), (2, True)])
def test_only_several_ranks_are_told_to_collect_together(tmp_path, ranks, together):
    for rank in range(ranks):
        made = MadeTrace(rank, ranks, device=None)
        for number in range(6):
            at = 10_000.0 * number
            made.op("aten::mm", at + 10, at + 6_000)
            made.annotation("Python GC", at + 6_000, at + 9_000)
            made.step(number, at, at + 9_900)
        made.write(tmp_path)
    [found] = [one for one in analyze([tmp_path]).findings if one.code == "gc-pauses"]
    assert (wording("watch/on-all-ranks") in found.advice) is together


@pytest.mark.parametrize(("cpu_ms", "found"), [((9.0, 9.2), True), ((9.0, 11.0), False)])
def test_waiting_for_a_core_is_not_taken_off_python(tmp_path, cpu_ms, found):
    """The profiled steps are 2 ms longer than those before: for a core, or by the profiler's own work."""
    inside = range(20, 26)
    made = MadeTrace(0, 1, device=None)
    for number in inside:
        at = 10_000.0 * number
        made.op("aten::mm", at + 10, at + 4_000)
        made.op("aten::mm", at + 5_500, at + 9_990)
        made.step(number, at, at + 9_995)
    made.write(tmp_path)
    steps = ordinary_steps(
        ms=lambda at: 10.0 if at in inside else 8.0,
        profiled=lambda at: at in inside,
        core_wait_ms=lambda at: 2.0 if at in inside else 0.1,
        cpu_ms=lambda at: cpu_ms[at in inside],
    )
    run(tmp_path, steps=steps, device="cpu", world=1)
    assert ("host-gaps" in codes(tmp_path)) is found


@pytest.mark.parametrize(
    ("workers", "cpus", "flag", "less"),
    [
        (0, 2, "num_workers=2", True),  # 9 would keep up
        (0, 64, "num_workers=9", False),
        (1, 2, "num_workers=2", False),
        (2, 2, "", True),
        (4, 64, "num_workers=8", False),
    ],
)
def test_no_more_workers_are_advised_than_there_are_cores(tmp_path, workers, cpus, flag, less):
    made = MadeTrace(0, 1, device=None)
    for number in range(6):
        at = 10_000.0 * number
        made.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 5, at + 8_990)
        made.op("aten::mm", at + 8_995, at + 9_990)
        made.step(number + 10, at, at + 9_995)
    made.write(tmp_path)
    write_watched(tmp_path, {"cpus": cpus}, loader_workers=workers)
    [found] = [one for one in analyze([tmp_path]).findings if one.code == "starved-loader"]
    assert (flag in found.advice) if flag else ("num_workers" not in found.advice)
    assert (wording("watch/do-less-per-batch") in found.advice) is less
