"""Made runs with a planted cause, all as they are reported: named first, and no certain finding besides what was planted."""

import io
import json
from pathlib import Path

import pytest
import torch
from planted_causes import GIB, MADE, answers, judge
from support.trace_maker import AUTOGRAD, GLOO, MadeTrace

from megatron_lite.analysis.analyze import analyze
from megatron_lite.watch.profiler import Profiler


def report_on(name: str, folder: Path):
    MADE[name].make(folder)
    return analyze([folder])


@pytest.mark.parametrize("name", MADE)
def test_the_cause_is_named_first_and_nothing_else_for_certain(tmp_path, name):
    cause, report = MADE[name], report_on(name, tmp_path)
    named = judge(report, cause.codes)
    assert named == ("first" if cause.codes else "silent"), answers(report)
    beside = {finding.code for finding in report.findings if finding.certain} - {*cause.codes, *cause.true_besides}
    assert not beside


def test_a_failed_request_tells_what_was_held_then_and_what_lay_free_in_pieces(tmp_path):
    report = report_on("memory in pieces", tmp_path)
    oom = report.facts.snapshots[0].oom
    assert oom.unused_bytes > 7 * GIB and oom.held_bytes == sum(one.num_bytes for one in oom.held)
    assert report.findings[0].flags == ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)
    assert "activations" not in report.verdict.sentence


def test_ranks_out_of_order_are_no_stragglers_and_nobody_waits_longer_than_calls_take(tmp_path):
    ranks = report_on("collectives in another order", tmp_path).facts.ranks
    assert ranks.disorder is not None and ranks.straggler is None and ranks.imbalance is None
    assert all(row.caused_wait_ms <= row.communication_ms for row in ranks.rows)


@pytest.mark.parametrize("with_shapes", [True, False])
def test_threads_that_begin_two_calls_in_either_order_are_no_disorder(tmp_path, with_shapes):
    """DDP hands two reductions over at once; of rank 1's two threads now one, now the other begins first."""
    large, small = [[200_000]], [[400]]
    for rank in range(2):
        all_ranks = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}
        told = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": [all_ranks]}
        made = MadeTrace(rank, 2, device=None, distributedInfo=told)
        for number in range(6):
            at = 10_000.0 * number
            made.op("aten::mm", at + 10, at + 6_000)
            for place, dims in enumerate([large, small]):
                shapes = {"dims": [dims]} if with_shapes else {}
                made.op("c10d::allreduce_", at + 6_100 + 10 * place, at + 6_105 + 10 * place, **shapes)
            swapped = rank == 1 and number % 2 == 1
            for place, dims in enumerate([small, large] if swapped else [large, small]):
                span = made.gloo(at + 6_120 + 5 * place, at + 8_000 + 5 * place, thread=GLOO + place)
                span["args"] = {"Input Dims": dims, "Input type": ["float"]}
            made.step(number, at, at + 9_990)
        made.write(tmp_path)
    assert analyze([tmp_path]).facts.ranks.disorder is None


@pytest.mark.parametrize(
    "name, inside_us, found",
    [
        ("MyScanBackward", 100, ["python-in-function"]),
        ("MyScanBackward", 2_900, []),  # operators explain it
        ("_DDPSinkBackward", 100, []),  # torch's own
        ("my_ops::scan", 100, []),  # C++
    ],
)
def test_python_in_a_custom_function_on_a_cpu(tmp_path, name, inside_us, found):
    made = MadeTrace(0, 1, device=None)
    for number in range(6):
        at = 10_000.0 * number
        made.op("aten::mm", at + 10, at + 5_000)
        made.op(f"autograd::engine::evaluate_function: {name}", at + 5_005, at + 8_020, AUTOGRAD, sequence=1)
        made.op(name, at + 5_010, at + 8_010, AUTOGRAD, sequence=1)
        made.op("aten::mul", at + 5_020, at + 5_020 + inside_us, AUTOGRAD)
        made.step(number, at, at + 8_050)
    made.write(tmp_path)
    assert [one.code for one in analyze([tmp_path]).findings if one.code == "python-in-function"] == found


def test_torch_save_is_a_phase_of_a_watched_run(tmp_path):
    """Each step saves; the time of that is no forward pass."""
    model, batch = torch.nn.Linear(16, 16), torch.ones(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save = torch.save
    with Profiler(tmp_path, steps=range(3, 5)):
        for _ in range(6):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.save(model.state_dict(), io.BytesIO())
    assert torch.save is save
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert all({"save", "forward", "backward", "optimizer_step"} <= set(line["phases_ms"]) for line in lines[1:6])
