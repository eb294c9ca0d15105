"""One builder: a run and the walk of its plan build the same replica."""

import functools

import pytest
from support.launch import CPU, flags, plan_of
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.parallel.replica import Replica
from megatron_lite.planner.walk.fake_backend import FakeBackend, fake_other_ranks
from megatron_lite.planner.walk.kernels import replace_kernels
from megatron_lite.train.build_replica import build_replica
from megatron_lite.train.real_backend import RealBackend

LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
ZERO3 = "--use-torch-fsdp2 --bf16"


def describe(replica: Replica) -> list:
    """Each module of a replica: its name, its class, what was put on it, and its parameters without their data."""
    rows = []
    for name, module in replica.model.named_modules():
        put_on = {key: describe_function(value) for key, value in vars(module).items() if callable(value)}
        own = [(key, p.dtype, p.shape, p.device) for key, p in module.named_parameters(recurse=False)]
        rows.append((name, type(module).__name__, put_on, own))
    return [*rows, replica.names, replica.counted, sorted(replica.parts)]


def describe_function(function) -> str:
    """The name of a function, below what was bound to it; attention and loss are a backend's own choice."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__name__)


def compare_replicas(plan: Plan):
    """Build a replica on either backend, among ranks that answer at once."""
    with fake_other_ranks(plan) as groups:
        with replace_kernels(plan.device), FakeTensorMode(allow_non_fake_inputs=True):
            walked = build_replica(plan, groups, FakeBackend())
        trained = build_replica(plan, groups, RealBackend(CPU))
    assert describe(walked) == describe(trained)
    assert type(walked) is type(trained)


@pytest.mark.parametrize("words", ["", "--bf16", f"--fp16 {LLAMA}", FULL, "--bf16 --squared-relu --apply-layernorm-1p"])
def test_a_walk_builds_what_a_run_builds(words):
    compare_replicas(plan_of(flags(words)))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("words", ["", PP2, f"{PP2} --bf16", TP2, f"{TP2} --sequence-parallel --bf16", CP2, ZERO3])
def test_a_walk_builds_what_each_of_two_ranks_builds(words, rank):
    compare_replicas(plan_of(flags(words), World(rank=rank, size=2, local_rank=rank, local_size=2)))
