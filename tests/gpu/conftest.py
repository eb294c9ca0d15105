"""What tests on GPUs share."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]  # tests, the repository


@pytest.fixture(scope="module")
def deterministic():
    """For tests that compare bit for bit; --deterministic-mode does the same in a run of its own."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def group():
    """A process group of this process, and the first GPU, for runs inside it."""
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
