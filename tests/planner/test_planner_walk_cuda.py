"""What a rehearsal takes for a GPU's kernels: attention, dropout, norms, cuBLAS, and their refusals."""

import functools

import pytest
import torch
from support.rehearsal_cases import GPU, planned
from support.wording import wording
from torch import nn

from megatron_lite.errors import UserError
from megatron_lite.formats.hardware import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_SINCE_HOPPER
from megatron_lite.instruments.memory_summary import peak
from megatron_lite.phases import Phase
from megatron_lite.planner.walk.walk_steps import walk
from megatron_lite.rehearsal import Rehearsal, rehearse

LAYERS, HIDDEN, TOKENS, POSITIONS = 2, 64, 64, 32
BACKWARD = "step 1/backward"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


@functools.cache
def on_gpu(words: str) -> Rehearsal:
    return rehearse(planned(f"--global-batch-size 2 {words}", GPU), steps=1)


def allocations(rehearsal: Rehearsal, tag: str, name: str = "aten.") -> list[int]:
    """Sizes of what an operation allocated where the tag begins so."""
    events = rehearsal.snapshot["device_traces"][0]
    made = (event for event in events if event["action"] == "alloc" and event["user_metadata"].startswith(tag))
    return [event["size"] for event in made if event["frames"][0]["name"].startswith(name)]


def sizes(rehearsal: Rehearsal, operation: str, phase: str = "forward") -> list[int]:
    """Of what this operation allocated."""
    return allocations(rehearsal, f"step 1/{phase}", f"aten.{operation}.default")


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("--bf16", "flash"),
        ("--fp16 --attention-backend flash " + DROPOUT, "flash"),
        ("--bf16 --attention-backend fused", "flash"),
        ("", "efficient"),
        ("--bf16 --reset-attention-mask", "flash"),
        ("--bf16 --window-size 3,0", "flash"),
        ("--bf16 --group-query-attention --num-query-groups 2", "flash"),
        ("--group-query-attention --num-query-groups 2", "efficient"),
        ("--bf16 --kv-channels 10", "flash"),
    ],
)
def test_attention_is_the_kernel_that_a_gpu_takes(words, kernel):
    found = on_gpu(words)
    outputs = sizes(found, f"_scaled_dot_product_{kernel}_attention")
    assert len(outputs) >= 2 * LAYERS and not sizes(found, "_softmax")
    assert sizes(found, f"_scaled_dot_product_{kernel}_attention_backward", "backward")


@pytest.mark.parametrize("words", ["--bf16 --attention-backend unfused", "--kv-channels 10"])
def test_scores_are_written_down_where_no_kernel_keeps_them_away(words):
    scores = TOKENS * POSITIONS * 4 * (2 if "bf16" in words else 4)
    assert scores in sizes(on_gpu(words), "_softmax") + sizes(on_gpu(words), "_safe_softmax")


def test_what_kernels_keep():
    """Padded heads; a mask per layer, of two sequences in fp32; a byte per element of a dropout; one number per row of a norm."""
    flash = "_scaled_dot_product_flash_attention"
    even, odd = (sizes(on_gpu(f"--bf16 --kv-channels {width}"), flash)[0] for width in (16, 10))
    assert even == odd
    masks = allocations(on_gpu("--reset-attention-mask"), "step 1/forward", "aten.where.")
    assert masks == LAYERS * [2 * POSITIONS * POSITIONS * 4]
    dropped = sizes(on_gpu("--bf16 " + DROPOUT), "native_dropout")
    assert dropped.count(TOKENS * HIDDEN) == 1 + 2 * LAYERS  # the embedding's, two per layer
    norm = allocations(on_gpu("--bf16 --normalization RMSNorm"), "step 1/forward/decoder.final_layernorm", "")
    assert set(norm) == {4 * TOKENS, 2 * TOKENS * HIDDEN}


def test_a_kernel_that_cannot_run_is_refused_as_by_the_trainer():
    with pytest.raises(UserError) as caught:
        on_gpu("--bf16 --attention-backend flash --kv-channels 264")
    assert str(caught.value) == (
        wording("planner/flash-cannot-run-here", "--attention-backend", 264, "--attention-backend")
    )


def test_cublas_takes_two_workspaces():
    plan = planned("--bf16", GPU)
    older, newer = (rehearse(plan, 1, size) for size in (CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_SINCE_HOPPER))
    assert newer.allocated_peak_bytes - older.allocated_peak_bytes == 2 * (32 * 2**20 - 8_519_680)
    assert older.categories["workspace"] >= 2 * 8_519_680


def make_step(weight: nn.Parameter, compute):
    """A training step whose loss is the sum of what is computed from the weight."""

    def step(phase):
        weight.grad = None
        with phase(Phase.FORWARD):
            loss = compute(weight).sum()
        with phase(Phase.BACKWARD):
            loss.backward()

    return step


def test_any_model_and_step_can_be_walked():
    def prepare():
        layer = nn.Linear(100, 1000, bias=False)
        return make_step(layer.weight, lambda _: layer(torch.empty(10, 100)).exp())

    found = peak(walk(prepare, 3, "cpu"))
    # the weight and its gradient, input, gradient of the product, loss and its own gradient; the result of exp is gone
    assert (found.size, found.tag) == (2 * 400_000 + 4_000 + 40_000 + 8, "step 3/backward/Linear")  # the last of equals


@pytest.mark.parametrize(
    "choose",
    [lambda x: x.gather(1, torch.empty(1000, 1, dtype=torch.int64)), lambda x: x.max(dim=1).values],
    ids=["gather", "max"],
)
def test_gradients_of_what_was_chosen_are_scattered_in_place(choose):
    """As of tensors with data; autograd takes another way for those without, which holds one tensor more."""
    size = peak(walk(lambda: make_step(nn.Parameter(torch.empty(1000, 100)), choose), 2, "cpu")).size
    assert 2 * 400_000 <= size < 2 * 400_000 + 30_000  # the weight and its gradient; results and indices


def test_gradients_of_two_paths_are_added_in_place():
    """As a GPU's own record has it (339 of 387 sums of a 24-layer model in fp32), where nobody else holds the first one."""

    def follow_two_paths(weight: nn.Parameter):
        y = weight * 2
        return torch.sin(y) * torch.exp(y)

    def count_sums(device: str) -> int:
        step = lambda: make_step(nn.Parameter(torch.empty(1000, 100)), follow_two_paths)
        events = walk(step, 1, device)["device_traces"][0]
        made = (event for event in events if event["action"] == "alloc" and event["user_metadata"].startswith(BACKWARD))
        return sum(event["frames"][0]["name"] == "aten.add.Tensor" for event in made)

    assert (count_sums("cuda"), count_sums("cpu")) == (0, 1)  # a recorder on a CPU is seen by autograd


def test_an_operation_without_rule_never_runs_on_real_memory():
    with torch.library._scoped_library("rehearsal_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        ran = []
        library.impl("twice", lambda x: ran.append(x) or x + x, "CPU")
        with pytest.raises(RuntimeError, match="twice"):
            walk(lambda: lambda phase: torch.ops.rehearsal_test.twice(torch.empty(3)), 1, "cpu")
        assert ran == []


def test_layer_norm_keeps_its_statistics_in_fp32_on_a_gpu():
    """On an H200 both figures of 8,192 rows took 64 KiB in fp16."""

    def prepare():
        norm = nn.LayerNorm(64, dtype=torch.float16)
        x = torch.empty(8192, 64, dtype=torch.float16, requires_grad=True)

        def step(phase):
            with phase(Phase.FORWARD):
                out = norm(x)
            with phase(Phase.BACKWARD):
                out.sum().backward()
            norm.zero_grad()
            x.grad = None

        return step

    sizes = [event["size"] for event in walk(prepare, 1, "cuda")["device_traces"][0] if event["action"] == "alloc"]
    assert sizes.count(8192 * 4) == 2
