"""Memory in closed form against the rehearsal of the real step, over every other of 73 plans."""

import pytest
import torch
from estimate_grid import CPU_GRID, GRID, LLAMA, NAMED, PP, QUICK, QUICK_ON_CPU, ZERO1, Case, plan_for
from support.slow_cases import slowly

from megatron_lite.caching_allocator import MIN_BLOCK_BYTES
from megatron_lite.cpu_kernels import products
from megatron_lite.formats import hardware
from megatron_lite.formats.hardware import CUBLAS_WORKSPACE
from megatron_lite.planner.memory import predict_memory
from megatron_lite.rehearsal import rehearse
from megatron_lite.units import MIB

WITHIN = 0.03  # what was found is 2.7%, and 1.9% but for one plan (python tests/estimate_grid.py)

# of any optimizer: the learning rate, good samples, whether steps stopped, a one
SCALARS = 4 * MIN_BLOCK_BYTES
KEPT = ("cublasWorkspace", "cublasLtWorkspace")


CELLS = [
    *((name, "cuda") for name in GRID if name not in CPU_GRID),
    *(
        (name, "cpu")
        for name in ("tiny", "bytes, bf16, recompute", "bytes, llama, recompute", "bytes, fp32, no dropout", *CPU_GRID)
    ),
]


DEFAULT = [*((name, "cuda") for name in QUICK), *((name, "cpu") for name in QUICK_ON_CPU)]
NEVER_LEFT_OUT = [*DEFAULT, *((name, "cuda") for name in NAMED)]
# `python tests/estimate_grid.py` walks all: to be run after a change of the formulas.
CHOSEN = [cell for number, cell in enumerate(CELLS) if number % 2 == 0 or cell in NEVER_LEFT_OUT]


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(*cell, marks=() if cell in DEFAULT else pytest.mark.slow) for cell in CHOSEN],
)
def test_formula_and_rehearsal_agree(name, device):
    case = Case(name, device)
    assert abs(case.error) < WITHIN and case.names_the_phase, case.line()


PROCESSORS = {
    "with bf16": "flags\t: avx2 avx512f avx512bw avx512_bf16",
    "without bf16": "flags\t: avx2",
}


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_ON_CPU else pytest.mark.slow) for name in CPU_GRID]
)
def test_they_agree_whatever_the_processor_multiplies(name, processor, pretend, monkeypatch, tmp_path):
    """A processor without bf16 computes attention in fp32 and recomputes it; one with bf16 keeps its masks as numbers."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(PROCESSORS[processor] + "\n\n")
    pretend(cpuinfo)
    monkeypatch.setattr(products, "WIDENED", (torch.bfloat16,) if processor == "without bf16" else ())
    case = Case(name, "cpu")
    assert abs(case.error) < WITHIN and case.names_the_phase, case.line()


# plans that peak where the output layer's or the embedding's matrix gets gradients that are added to others
WORDS = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--hidden-dropout 0 --attention-dropout 0 "
)


SUMMED = [
    ("--micro-batch-size 2", "cuda", "output layer"),
    ("--micro-batch-size 1", "cpu", "embedding"),  # as many tokens as channels: logits as large as the matrix
    ("--seq-length 64 --micro-batch-size 1 --bf16", "cuda", "embedding"),
    pytest.param("--micro-batch-size 1 --bf16", "cpu", "embedding", marks=pytest.mark.slow),
    pytest.param("--micro-batch-size 4 --bf16", "cpu", "output layer", marks=pytest.mark.slow),
    pytest.param(
        "--seq-length 32 --micro-batch-size 1 --fp16 --accumulate-allreduce-grads-in-fp32", "cuda", "embedding",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "device", "where"), SUMMED)
def test_a_weights_gradient_is_a_gradient_in_both_also_where_it_is_added_to_another(words, device, where):
    plan = plan_for(WORDS + words, device=device)
    peak, held = predict_memory(plan).peak, rehearse(plan).categories
    assert peak.where == where
    for category in ("gradients", "logits and loss"):
        expected = sum(row.num_bytes for row in peak.rows if row.category == category)
        # some numbers per token; the matrix has 12 or 24 MiB
        assert abs(held.get(category, 0) - expected) < 2**19, category


@pytest.mark.parametrize(
    ("words", "ranks", "rank"),
    [
        (LLAMA + "--qk-layernorm --kv-channels 128", 1, 0),
        ("--optimizer sgd", 1, 0),
        ("--optimizer muon", 1, 0),
        (PP + "2", 2, 1),
        (ZERO1 + "--bf16 --hidden-size 256", 2, 0),
        *slowly(
            ("", 1, 0),
            ("--optimizer muon --num-experts 4 --disable-bias-linear --moe-shared-expert-intermediate-size 64", 1, 0),
            (f"--optimizer muon --bf16 --hidden-size 256 {ZERO1}", 2, 0),
            (PP + "2", 2, 0),
        ),
    ],
)
def test_both_count_a_step_counter_of_each_parameter_tensor(words, ranks, rank):
    """A number that takes a block of 512 bytes; moments fill their blocks at these sizes."""
    plan = plan_for(f"{WORDS} --micro-batch-size 2 {words}", ranks, rank=rank)
    expected = sum(row.num_bytes for row in predict_memory(plan).peak.rows if row.category == "moments")
    assert rehearse(plan).categories["moments"] == expected + SCALARS


@pytest.mark.parametrize(
    ("release", "words", "expected"),
    [
        ((2, 11), "", MIB),
        ((2, 11), "--disable-bias-linear --add-qkv-bias", MIB),
        ((2, 11), "--disable-bias-linear", 0),
        ((2, 12), "", 0),
        (None, "", 0),
    ],
)
def test_products_with_a_bias_have_a_workspace_of_their_own_up_to_torch_2_11(release, words, expected, monkeypatch):
    monkeypatch.setattr(hardware, "read_torch_release", lambda: release)
    plan = plan_for(f"{WORDS} --micro-batch-size 2 {words}")
    both = 2 * CUBLAS_WORKSPACE + expected
    rows = [row.num_bytes for row in predict_memory(plan).peak.rows if row.name.startswith("cuBLAS")]
    events = rehearse(plan, steps=1).snapshot["device_traces"][0]
    walked = [event["size"] for event in events if event["action"] == "alloc" and event["frames"][0]["name"] in KEPT]
    assert sum(rows) == sum(walked) == both


def test_a_cpu_has_no_workspaces(monkeypatch):
    monkeypatch.setattr(hardware, "read_torch_release", lambda: (2, 11))
    plan = plan_for(WORDS + "--micro-batch-size 2", device="cpu")
    assert not [row for row in predict_memory(plan).peak.rows if row.name.startswith("cuBLAS")]
    events = rehearse(plan, steps=1).snapshot["device_traces"][0]
    assert not [event for event in events if event["frames"] and event["frames"][0]["name"] in KEPT]


def test_the_installed_torch_is_known_without_importing_it():
    major, minor = torch.__version__.split(".")[:2]
    assert hardware.read_torch_release() == (int(major), int(minor))
