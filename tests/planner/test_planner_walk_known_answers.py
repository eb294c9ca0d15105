"""Rehearsals against what others measured: snapshots of a real GPU, and the figures of the example that GPU users start with."""

import pytest
import torch
from support.launch import flags, plan_of
from support.medium_lm import prepare as prepare_medium
from support.paths import SNAPSHOTS
from support.rehearsal_cases import EXAMPLE
from support.snapshots import read_snapshot
from support.wording import wording
from torch import Tensor

from megatron_lite.analysis.memory.read import read_snapshot as analyze
from megatron_lite.config.world import World
from megatron_lite.formats.hardware import CUBLAS_WORKSPACE
from megatron_lite.instruments.memory_summary import peak
from megatron_lite.parallel.backend import Backend
from megatron_lite.planner.walk.fake_backend import FakeBackend, fake_other_ranks
from megatron_lite.planner.walk.walk_steps import Walked, prepare, walk
from megatron_lite.rehearsal import summarize_walk
from megatron_lite.units import GIB

needs_real = pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="no ../shared/snapshots beside the repository")
ONE, FOUR = World(gpus=1), World(size=4, local_size=4, gpus=4)


@needs_real
@pytest.mark.slow
@pytest.mark.parametrize(("positions", "bf16"), [(128, False), (1024, True)])
def test_a_real_gpu_held_as_much_to_the_byte(positions, bf16):
    """Somebody's GPU, model and training step; fp32 without, and bf16 with autocast."""
    path = SNAPSHOTS / f"cuda_gpt_24x1024_seq{positions}_{'bf16' if bf16 else 'fp32'}.pickle"
    found = summarize_walk(Walked(walk(lambda: prepare_medium(positions, bf16), 2, "cuda")))
    real = analyze(path)
    known = {128: 7_013_335_044, 1024: 24_207_167_496}[positions]
    assert peak(found.snapshot).size == peak(read_snapshot(path)).size == known
    assert (found.allocated_peak_bytes, found.phase) == (real.peak_bytes, real.peak_phase)
    assert found.reserved_peak_bytes == pytest.approx(real.fragmentation.reserved_bytes, rel=0.015)
    for held in real.held:
        if held.num_bytes > 0.05 * real.peak_bytes:
            assert found.categories[held.category] == pytest.approx(held.num_bytes, rel=0.03), held.category


def example(words: str = "", world: World = FOUR, backend: Backend | None = None):
    plan = plan_of(flags(EXAMPLE, words), world)
    with fake_other_ranks(plan) as groups:
        return summarize_walk(Walked(walk(lambda: prepare(plan, groups, backend or FakeBackend()), 2, plan.device)))


class InPlaceLoss(torch.autograd.Function):
    """Megatron-LM's way: one fp32 copy of the logits, which becomes softmax and then gradient."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        softmax_NV, rows_N = logits_NV.float(), torch.arange(len(labels_N))
        softmax_NV -= softmax_NV.max(dim=-1, keepdim=True)[0]
        chosen_N = softmax_NV[rows_N, labels_N]
        sums_N = softmax_NV.exp_().sum(dim=-1)
        softmax_NV /= sums_N[:, None]
        ctx.save_for_backward(softmax_NV, labels_N, rows_N)
        ctx.dtype = logits_NV.dtype
        return sums_N.log() - chosen_N

    @staticmethod
    def backward(ctx, gradient_N: Tensor):
        softmax_NV, labels_N, rows_N = ctx.saved_tensors
        softmax_NV[rows_N, labels_N] -= 1
        softmax_NV *= gradient_N[:, None]
        return softmax_NV.to(ctx.dtype), None


class InPlaceLossBackend(FakeBackend):
    """The backend of walks, with Megatron-LM's loss."""

    def choose_losses(self, plan, kernels, tensor):
        return in_place_losses


def in_place_losses(hidden_BTH: Tensor, weight_VH: Tensor, labels_BT: Tensor) -> Tensor:
    logits_NV = torch.nn.functional.linear(hidden_BTH, weight_VH).flatten(0, 1)
    return InPlaceLoss.apply(logits_NV, labels_BT.flatten()).view(labels_BT.shape)


@pytest.mark.slow
def test_the_example_peaks_in_cross_entropy():
    """The chart that comes with this example, of Megatron-LM on four GPUs, shows about 15 GB, at cross entropy."""
    found = example(backend=InPlaceLossBackend())
    # of the labels' logits, with the fp32 copy there
    assert found.where.startswith(wording("planner/forward-of-step-in", 1))
    assert found.allocated_peak_bytes == pytest.approx(15.07e9 + 2 * CUBLAS_WORKSPACE, rel=0.001)


@pytest.mark.slow
def test_the_example_with_this_trainers_loss():
    """The logits once in fp16, 2.1 GiB less: most is held where the output's weight gets its gradient beside them."""
    found = example()
    assert found.where.startswith(wording("planner/backward-of-step-in", 1))
    assert found.allocated_peak_bytes / GIB == pytest.approx(12.626, rel=0.0005)
    assert found.categories["logits and loss"] == 2 * 4 * 2048 * 50304
    four, alone = example("--num-layers 2"), example("--num-layers 2 --global-batch-size 4", ONE)
    gradients = four.allocated_peak_bytes - alone.allocated_peak_bytes
    assert gradients == pytest.approx(2 * (355_919_872 - 22 * 12_596_224), rel=0.001)  # the buckets' of 16 bits
