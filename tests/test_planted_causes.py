"""Made runs with a planted cause, all as they are reported: named first, and no certain finding besides what was planted."""

from pathlib import Path

import pytest
from planted_causes import GIB, MADE, answers, judge

from megatron_lite.analysis.analyze import analyze

UNNAMED = {  # no rule names them yet
    "evaluating in each step", "a second forward", "fp64 in a block", "anomaly mode", "needless recomputation",
}  # fmt: skip


def report_on(name: str, folder: Path):
    MADE[name].make(folder)
    return analyze([folder])


@pytest.mark.parametrize("name", [name for name in MADE if name not in UNNAMED])
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
