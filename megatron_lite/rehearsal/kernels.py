"""Operations that are made of other parts on a GPU than on a CPU, so that fake tensors on the CPU leave the GPU's traces.

Only what a training step's memory depends on: which kernel attention takes, dropout's one-byte mask, RMSNorm in one piece.
What a kernel takes and gives back within itself stays unseen, as it does on the CPU.
"""

import contextlib
import re
import sys

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.instruments.memory_stacks import RECORDERS
from megatron_lite.rehearsal.attention import cpu_attention, cpu_choice, cuda_attention, cuda_choice

KEY = "AutogradCPU"  # where torch takes these apart; fake tensors on the CPU go there too


def cuda_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """One kernel that keeps a bool mask; a CPU multiplies by a mask in the tensor's own type."""
    return torch.native_dropout(x, p, train)[0] if train and p else x


class FusedRmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm as on a GPU: one kernel that keeps its input and one fp32 number per row, one for backward. On
    a CPU torch takes that operator apart, and keeps three tensors more."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def cuda_rms_norm(x: Tensor, normalized_shape, weight: Tensor, eps: float | None = None) -> Tensor:
    """RMSNorm in one piece."""
    return FusedRmsNorm.apply(x, weight)


ON = {
    "cuda": {
        "scaled_dot_product_attention": cuda_attention,
        "_fused_sdp_choice": cuda_choice,
        "dropout": cuda_dropout,
        "rms_norm": cuda_rms_norm,
    },
    "cpu": {"scaled_dot_product_attention": cpu_attention, "_fused_sdp_choice": cpu_choice},
}


# torch has no rule of what these do to tensors without data: nothing but change them in place
UPDATES = ("_fused_adamw_.tensor_lr", "_fused_sgd_.tensor_lr")


SCATTERING_NODES = re.compile(r"(Gather|Max|Min|Topk|Sort|Kthvalue|Median|Mode)Backward")
IN_PLACE = {
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}
ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
# of a tensor that autograd alone holds, seen from a mode: its own, those of two calls of modes and of this function
MAX_HOLDERS, MAX_STORAGE_HOLDERS = 5, 2
OF_MODES = (*RECORDERS, "/torch/_ops.py")  # frames between autograd and a mode


class InPlaceGradients(TorchDispatchMode):
    """Gradients as of tensors with data where none of Python's modes watches. Otherwise autograd keeps one tensor more than
    there is: beside the gradient of gather, max and their kin the zeros that it is scattered into (torch's
    FunctionsManual.cpp, areAnyTensorSubclassLike), and where two paths meet, the sum beside the first one's gradient
    (input_buffer.cpp, can_accumulate_inplace).

    A recorder on a CPU is such a mode, so that `device` cpu has sums beside gradients.
    """

    def __init__(self, device: str):
        super().__init__()
        self._adds = device == "cuda"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in IN_PLACE:
            node = torch._C._current_autograd_node()
            if node is not None and SCATTERING_NODES.match(node.name()):
                func = IN_PLACE[func]
        elif func is ADD and self._adds and _autograd_adds(*args):
            func = ADD_IN_PLACE
        return func(*args, **(kwargs or {}))


def _autograd_adds(first: Tensor, second) -> bool:
    """Whether autograd itself adds `second` to `first`, which nobody else holds."""
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None or not is_dense(first):
        return False
    frame = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in OF_MODES):
        frame = frame.f_back
    from_engine = frame is not None and frame.f_code.co_name == "_engine_run_backward"
    held = first._use_count(), torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return from_engine and held[0] <= MAX_HOLDERS and held[1] <= MAX_STORAGE_HOLDERS


@contextlib.contextmanager
def kernels_of(device: str):
    """While this lasts, this process's operations on CPU tensors are those of `device`, cuda or cpu. For fake tensors only:
    real ones cannot run what a CPU has no kernel for."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in ON[device].items():
            library.impl(name, function, KEY)
        for name in UPDATES:
            library.impl(name, _update, "Meta")
        yield


def _update(*arguments, **options):
    """In place, without memory."""
