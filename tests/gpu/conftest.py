"""What tests on GPUs share."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts


@pytest.fixture(scope="module")
def deterministic():
    """For tests that compare bit for bit; --deterministic-mode does the same in a run of its own."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
