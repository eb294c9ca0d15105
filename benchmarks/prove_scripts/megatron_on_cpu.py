"""Lets Megatron-Core train where there is no GPU: what it asks of CUDA is given on the CPU."""

import contextlib
import functools
import warnings

import torch

warnings.filterwarnings("ignore")
from megatron.core.tensor_parallel import random


def on_cpu(make):
    @functools.wraps(make)
    def made(*values, device=None, **options):
        return make(*values, device="cpu" if device == "cuda" else device, **options)

    return made


def pretend_cuda():
    """Constructors take "cuda" for the CPU, tensors bear CUDA's type names, dropout has no state of its own."""
    # torch notes its constructors at the first use of a device's scope: not those below
    with torch.device("meta"):
        torch.empty(0)
    type_name = torch.Tensor.type

    def as_on_cuda(self, *values, **options):
        name = type_name(self, *values, **options)
        return name if values or options else name.replace("torch.", "torch.cuda.")

    torch.cuda.current_device = lambda: "cpu"
    for name in ("tensor", "zeros", "ones"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.Tensor.type = as_on_cuda
    torch.Tensor.cuda = lambda self, *device: self
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
