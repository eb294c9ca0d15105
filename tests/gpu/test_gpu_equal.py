"""The same training on the GPU and on the CPU, and in 16 bits and 32: the losses lie on each other."""

import contextlib
import io
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_checks.pytest_side import checked_device

pytestmark = pytest.mark.usefixtures("process_group")

DEVICE = checked_device()
if DEVICE is None:
    pytest.skip("needs a GPU", allow_module_level=True)

from support.launch import ALONE, flags, losses, train

from megatron_lite.config.world import World
from megatron_lite.model.attention import Scope, explicit_attention, find_document_edges
from megatron_lite.model.flash_attention import flash_attention

HERE = World(gpus=1) if DEVICE == "cuda" else ALONE
STEPS = 20
# one start for all: a GPU's own random numbers are others than the CPU's
WIDTH = 128 if DEVICE == "cuda" else 32
MODEL = (
    f"--num-layers 4 --hidden-size {WIDTH} --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    f"--micro-batch-size 4 --global-batch-size 8 --train-iters {STEPS} --lr 1e-3 --use-cpu-initialization"
)
EAGER, FP16 = "--torch-compile none", "--fp16 --initial-loss-scale 65536"


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    return curve(EAGER, tmp_path_factory.mktemp("fp32"), HERE)


def curve(words: str, folder: Path, world: World) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        train(flags(MODEL, words), folder, world)
    return losses(folder)


def most_off(found: list[float], expected: list[float], record) -> float:
    """The largest distance, as a share; noted for the results."""
    assert len(found) == len(expected) == STEPS and None not in found
    worst = max(abs(a - b) / b for a, b in zip(found, expected))
    record("most off", f"{worst:.1e}")
    return worst


def test_a_gpu_learns_as_the_cpu_does(fp32, tmp_path, record_property):
    on_cpu = curve(EAGER, tmp_path, ALONE)
    assert fp32[0] == pytest.approx(on_cpu[0], rel=1e-5)  # one forward pass, before rounding has added up
    assert most_off(fp32, on_cpu, record_property) < 2e-4
    assert fp32[-1] < 0.97 * fp32[0]


@pytest.mark.parametrize(("words", "limit"), [(FP16, 1e-3), ("--bf16", 4e-3)])
def test_16_bits_learn_as_32_do(fp32, tmp_path, words, limit, record_property):
    assert most_off(curve(f"{EAGER} {words}", tmp_path, HERE), fp32, record_property) < limit


@pytest.mark.skipif(DEVICE == "cpu", reason="compiling takes a CPU too long here")
@pytest.mark.parametrize("words", ["", FP16])
def test_compiled_layers_learn_as_the_plain_ones_do(fp32, tmp_path, words, record_property):
    found = curve(f"--torch-compile layers {words}", tmp_path, HERE)
    assert most_off(found, fp32, record_property) < (1e-3 if words else 2e-4)


@pytest.mark.parametrize("has_offset", [False, True], ids=["plain softmax", "offset"])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("documents", [1, 7])
@pytest.mark.parametrize(("queries", "width"), [(128, 64), (48, 20)])
def test_flash_attention_equals_scores_in_memory(queries, width, documents, window, has_offset, record_property):
    """In bf16, beside fp32: results, and gradients of all that they are made from, also of the last queries alone."""
    device = torch.device(DEVICE)
    numbers = torch.arange(128) * documents // 128
    edges = find_document_edges(numbers.expand(2, -1), device) if documents > 1 else None
    generator = torch.Generator().manual_seed(1)
    sizes = [(2, 4, queries, width), (2, 2, 128, width), (2, 2, 128, width)]
    inputs = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    if has_offset:
        inputs.append(torch.tensor([-1.0, 0.0, 1.0, 3.0]).bfloat16())

    def attend(kernel, dtype):
        own = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
        out = kernel(*own[:3], Scope(edges, window, *own[3:]), 0.0, 1)
        weights = torch.arange(out.numel(), device=device).cos().view_as(out)
        return [out, *torch.autograd.grad((out * weights).sum(), own)]

    explicitly = partial(explicit_attention, fp32_softmax=True, scale_by_layer=False)
    expected = attend(explicitly, torch.float32)
    found = attend(flash_attention, torch.bfloat16)
    off = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
    record_property("most off", f"{max(off):.1e}")
    assert max(off) < 0.03
