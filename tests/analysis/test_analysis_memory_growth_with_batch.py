"""The peak of twice the micro-batch is computed from a snapshot of the micro-batch, and must not be too low."""

from dataclasses import replace

import pytest
from support.launch import flags, plan_of

from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.memory.read import read_snapshot
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.rehearsal import rehearse

RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
KINDS = {
    "plain": "",
    "explicit attention": "--attention-backend local",
    "recomputed": RECOMPUTED,
    "few words": "--vocab-size 500 --make-vocab-size-divisible-by 1",
}


def walk(tmp_path, kind: str, micro_batch: int) -> Snapshot:
    """The snapshot of a walked step, as if a GPU had recorded it."""
    shape = (
        f"--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --micro-batch-size {micro_batch}"
    )
    plan = plan_of(flags(shape, "--max-position-embeddings 256 --bf16 --global-batch-size 8", KINDS[kind]))
    path = tmp_path / f"{micro_batch}.pickle"
    write_snapshot(path, rehearse(plan).snapshot)
    return read_snapshot(path)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("plain", "recomputed") else pytest.mark.slow) for kind in KINDS]
)
def test_the_peak_of_twice_the_micro_batch_is_not_above_what_a_snapshot_foretells(tmp_path, kind):
    one, twice = walk(tmp_path, kind, 2), walk(tmp_path, kind, 4)
    foretold = one.peak_bytes + one.grows_bytes
    assert twice.peak_bytes <= 1.001 * foretold
    # workspace counts as growing, though some processors' kernels have rooms of a fixed size
    workspace = sum(held.num_bytes for held in one.held if held.category == "workspace")
    assert foretold - workspace <= 1.02 * twice.peak_bytes


def test_a_run_is_judged_by_all_that_grows(tmp_path):
    """The advice to double the micro-batch is computed from these bytes."""
    recorded = replace(walk(tmp_path, "plain", 2), simulated=False)
    peak = Facts((), None, (recorded,), None, ()).peak
    assert peak.grows_bytes == recorded.grows_bytes
    assert peak.grows_bytes > recorded.peak_bytes / 3
