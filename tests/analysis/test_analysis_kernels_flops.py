"""FLOPs that are read from a real profile against the closed form of the model that was profiled."""

import pytest
import torch
from support.model_variants import VARIANTS
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.analysis.kernels.rank_kernels import rank_kernels
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.read import read_traces
from megatron_lite.config.model_size import step_flops
from megatron_lite.model.attention_choice import choose_attention
from megatron_lite.model.gpt import GPT

BATCH, STEPS = 2, 3


def profiled(step, folder):
    """Kernel figures of `step`, called a few times under PyTorch's profiler on the CPU."""
    path = folder / "rank0.1.pt.trace.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        acc_events=True,
        schedule=schedule(wait=0, warmup=1, active=STEPS + 1),
        on_trace_ready=lambda prof: prof.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(STEPS + 2):
            step()
            profiler.step()
    [trace] = read_traces(path)
    placing = attribute_events(trace)
    return rank_kernels(trace, placing, rank_time(trace, placing))


def gpt(shape, backend: str) -> GPT:
    attend = choose_attention(backend, shape, batch=BATCH, device="cpu", dtype=torch.float32, masked=False)
    return GPT(shape, attend)


@pytest.mark.parametrize(("variant", "backend"), [("gelu_tanh", "unfused"), ("no_bias", "flash"), ("untied", "flash")])
def test_a_training_step_has_the_flops_of_the_closed_form(variant, backend, tmp_path):
    shape = VARIANTS[variant]
    model, tokens = gpt(shape, backend), torch.zeros(BATCH, shape.seq_length, dtype=torch.long)

    def step():
        with record_function("forward"):
            loss = model(tokens, tokens).mean()
        with record_function("backward"):
            loss.backward()

    kernels = profiled(step, tmp_path)
    assert kernels.model_flops == step_flops(shape, BATCH, causal=False)
    if backend == "flash":
        halves = kernels.model_flops - step_flops(shape, BATCH, causal=True)
        assert kernels.attention_flops == 2 * halves


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_are_told_from_the_backward_pass(reentrant, tmp_path):
    layer, given = torch.nn.Linear(32, 64, bias=False), torch.randn(16, 32, requires_grad=True)

    def step():
        checkpoint(layer, given, use_reentrant=reentrant).sum().backward()

    kernels = profiled(step, tmp_path)
    product = 2 * 16 * 32 * 64
    assert (kernels.model_flops, kernels.recomputed_flops) == (3 * product, product)


@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_have_the_flops_that_torch_counts(bias, tmp_path):
    """A first layer, whose input needs no gradient, one with a frozen weight, and an ordinary one."""
    first, frozen, last = (torch.nn.Conv2d(given, 8, 3, padding=1, bias=bias) for given in (3, 8, 8))
    frozen.weight.requires_grad = False
    net, images = torch.nn.Sequential(first, frozen, last), torch.randn(BATCH, 3, 16, 16)

    def step():
        net(images).sum().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    assert profiled(step, tmp_path).model_flops == counter.get_total_flops()
