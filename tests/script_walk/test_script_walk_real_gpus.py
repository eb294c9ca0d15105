"""A script that is walked takes what somebody's GPU took, by the snapshots that were recorded there."""

import sys

import pytest
from support.paths import SNAPSHOTS, TESTS

from megatron_lite.analysis.memory.read import read_snapshot
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.script_walks import Walker

SCRIPT = f"""
import sys
import torch
sys.path.insert(0, {str(TESTS)!r})
torch.set_default_device("cuda")
from support import medium_lm

class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {{}})
        self.by_hand = medium_lm.AdamW(parameters)
    def step(self):
        self.by_hand.step()

positions, casts = int(sys.argv[1]), medium_lm.Casts(sys.argv[2] == "bf16")
model = medium_lm.LanguageModel(positions, casts)
optimizer = AdamW(list(model.parameters()))
sizes = (medium_lm.BATCHES * medium_lm.BATCH, positions)
inputs, targets = torch.empty(sizes, dtype=torch.int64), torch.empty(sizes, dtype=torch.int64)
for step in range(4):
    x, y = inputs[: medium_lm.BATCH].clone(), targets[: medium_lm.BATCH].clone()
    optimizer.zero_grad()
    logits = model(x)
    loss = medium_lm._cross_entropy(logits, y, casts)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="no ../shared/snapshots beside the repository")
@pytest.mark.parametrize(("positions", "precision"), [("128", "fp32"), ("1024", "bf16")])
def test_a_script_holds_what_a_real_gpu_held_to_the_byte(tmp_path, positions, precision):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    found = Walker((sys.executable, str(path), positions, precision), find_processor("A100")).walk()
    real = read_snapshot(SNAPSHOTS / f"cuda_gpt_24x1024_seq{positions}_{precision}.pickle")
    assert not found.failure
    assert (found.allocated_peak_bytes, found.phase) == (real.peak_bytes, real.peak_phase)
    assert found.reserved_peak_bytes == pytest.approx(real.fragmentation.reserved_bytes, rel=0.015)
