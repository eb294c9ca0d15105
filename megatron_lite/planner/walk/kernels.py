"""Replaces operations whose parts differ between GPU and CPU, so that fake tensors on the CPU take a GPU's memory.

Only what a training step's memory depends on: which kernel attention takes, dropout's one-byte mask, RMSNorm in one
piece. What a kernel takes and gives back within itself stays unseen, as it does on the CPU.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_dense
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.instruments.memory_tracker import RECORDERS
from megatron_lite.planner.attention_kernel import EFFICIENT_HEAD_BYTES, FLASH_HEAD_STEP, MAX_FLASH_HEAD

FLASH: int = SDPBackend.FLASH_ATTENTION.value
EFFICIENT: int = SDPBackend.EFFICIENT_ATTENTION.value
MATH: int = SDPBackend.MATH.value
HALF = (torch.float16, torch.bfloat16)
MASK_STEP = 16  # elements: rows of a mask are padded to it
KEY = "AutogradCPU"  # where torch takes operations apart; fake tensors on the CPU go there too

# --- scaled_dot_product_attention as a GPU or a CPU computes it, for tensors without data
#
# torch looks at a tensor's device to choose the kernel, and what a kernel keeps for backward depends on it. Fake
# tensors look like the CPU's here whatever they stand for, so the choice is made by the rules below.
#
# Letters: B batch, N query heads, G key heads, T positions, D width of one head.


def cuda_choice(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Answer torch._fused_sdp_choice as a GPU since Ampere does (sdp_utils.cpp of torch 2.13).

    cuDNN is never named: it keeps what flash and the memory-efficient kernel keep. Where torch prefers it, it alone
    takes grouped keys with a mask; here they are then repeated for each head, more than it needs.

    Args:
        q_BNTD: Queries. The arguments are those of scaled_dot_product_attention.
        k_BGTD: Keys.
        v_BGTD: Values.
        attn_mask: Broadcasts to (B, N, T, T).
        dropout_p: The share of scores that is dropped.
        is_causal: Whether positions see those before them only.
        scale: The factor of scores; None: torch's own.
        enable_gqa: Whether heads may share keys.

    Returns:
        The number of a SDPBackend.

    Raises:
        RuntimeError: No kernel that is allowed takes these tensors.
    """
    flags = torch.backends.cuda
    width = q_BNTD.shape[-1]
    fits_flash = attn_mask is None and q_BNTD.dtype in HALF and width <= MAX_FLASH_HEAD
    if fits_flash and (flags.flash_sdp_enabled() or flags.cudnn_sdp_enabled()):
        return FLASH
    is_grouped = q_BNTD.shape[1] != k_BGTD.shape[1]
    is_aligned = width * q_BNTD.element_size() % EFFICIENT_HEAD_BYTES == 0
    if flags.mem_efficient_sdp_enabled() and not is_grouped and is_aligned:
        return EFFICIENT
    return _choose_math(q_BNTD, attn_mask)


def cpu_choice(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Answer torch._fused_sdp_choice as a CPU does, whose flash kernel knows no dropout.

    Arguments and result are those of `cuda_choice`.
    """
    if torch.backends.cuda.flash_sdp_enabled() and not dropout_p:
        return FLASH
    return _choose_math(q_BNTD, attn_mask)


def _choose_math(q_BNTD: Tensor, attn_mask: Tensor | None) -> int:
    """Choose the computation in pieces. RuntimeError where it is not allowed."""
    if torch.backends.cuda.math_sdp_enabled():
        return MATH
    masked = "a mask" if attn_mask is not None else "no mask"
    raise RuntimeError(f"no such kernel for {q_BNTD.dtype}, heads of {q_BNTD.shape[-1]} and {masked}")


def cuda_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention as a GPU does (attention.cpp of torch 2.13).

    Args:
        q: Queries, (B, N, T, D).
        k: Keys, (B, G, T, D).
        v: Values, (B, G, T, D).
        attn_mask: As for `cuda_choice`, like the rest.

    Returns:
        (B, N, T, D).
    """
    if attn_mask is not None:
        from torch.nn.attention.bias import CausalBias  # takes a second

        if isinstance(attn_mask, CausalBias):
            # causal from the end, which kernels know
            attn_mask = None
            is_causal = True
    choice = cuda_choice(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    width = q.shape[-1]
    factor = width**-0.5 if scale is None else scale
    out: Tensor
    if choice == FLASH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        padded = [_pad(tensor, FLASH_HEAD_STEP) for tensor in (q, k, v)]
        out = flash(*padded, dropout_p, is_causal, scale=factor)[0]
        return out[..., :width]
    if choice == EFFICIENT:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
        bias = None if attn_mask is None else _make_bias(attn_mask, q, k.shape[-2])
        out = efficient(q, k, v, bias, keeps, dropout_p, is_causal, scale=factor)[0]
        return out
    return _attend_in_pieces(q, k, v, attn_mask, dropout_p, is_causal, factor, enable_gqa)


def cpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention as a CPU does. Arguments and result are those of `cuda_attention`."""
    choice = cpu_choice(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if choice == FLASH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = None if attn_mask is None else _as_numbers(attn_mask, q)
        out: Tensor = flash(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
        return out
    return _attend_in_pieces(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attend_in_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Compute scores, softmax and their product one after another, on any device."""
    kernel = torch.ops.aten._scaled_dot_product_attention_math
    out: Tensor = kernel(q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return out


def _make_bias(mask: Tensor, q: Tensor, positions: int) -> Tensor:
    """Make what the memory-efficient kernel adds to scores: rows of a padded length, expanded to all heads.

    Args:
        mask: What may be attended to, as truths or as numbers.
        q: Queries, (B, N, T, D).
        positions: Of the keys.
    """
    rows = _pad(_as_numbers(mask, q), MASK_STEP)[..., :positions]
    return rows.expand(*q.shape[:3], positions)


def _pad(tensor: Tensor, step: int) -> Tensor:
    """Pad the last dimension to a multiple of `step`."""
    missing = -tensor.shape[-1] % step
    return F.pad(tensor, (0, missing)) if missing else tensor


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    """Turn a mask of truths into 0 and minus infinity, in the type of another tensor."""
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=like.dtype))


# --- dropout and norms in one piece


def cuda_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Drop by one kernel that keeps a bool mask; a CPU multiplies by a mask in the tensor's own type.

    Args:
        x: Any tensor.
        p: The share that is dropped.
        train: Whether anything is.
    """
    if not (train and p):
        return x
    return torch.native_dropout(x, p, train)[0]


class _NormContext(Protocol):
    """Values that the forward of a norm leaves for its backward."""

    has_bias: bool

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class FusedRmsNorm(torch.autograd.Function):
    """RMSNorm as a GPU computes it: one kernel that keeps its input and one fp32 number per row, one for backward.

    On a CPU torch takes aten::_fused_rms_norm apart, and keeps three tensors more.
    """

    @staticmethod
    def forward(ctx: _NormContext, x: Tensor, weight: Tensor) -> Tensor:
        per_row = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, per_row)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: _NormContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


# torch gives `apply` no types; so below
_norm_rms: Callable[[Tensor, Tensor], Tensor] = FusedRmsNorm.apply


def cuda_rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor, eps: float | None = None) -> Tensor:
    """Normalize by RMSNorm in one piece. The arguments are those of torch.rms_norm."""
    return _norm_rms(x, weight)


class FusedLayerNorm(torch.autograd.Function):
    """LayerNorm as a GPU computes it, which keeps mean and deviation of each row in fp32.

    On a CPU aten::native_layer_norm keeps them in the tensor's own type. Measured on an H200 in fp16: 64 KiB instead of
    32 for 8,192 rows.
    """

    @staticmethod
    def forward(ctx: _NormContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, dimensions: int) -> Tensor:
        ctx.has_bias = bias is not None
        rows = (*x.shape[: x.dim() - dimensions], *[1] * dimensions)
        mean = x.new_empty(rows, dtype=torch.float32)
        deviation = x.new_empty(rows, dtype=torch.float32)
        ctx.save_for_backward(x, weight, mean, deviation)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: _NormContext, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, *_ = ctx.saved_tensors
        of_weight = None if weight is None else torch.empty_like(weight)
        of_bias = torch.empty_like(weight) if ctx.has_bias else None
        return torch.empty_like(x), of_weight, of_bias, None


_norm_layer: Callable[[Tensor, Tensor | None, Tensor | None, int], Tensor] = FusedLayerNorm.apply


def cuda_layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize by LayerNorm in one piece. The arguments are those of torch.layer_norm."""
    return _norm_layer(x, weight, bias, len(normalized_shape))


ON: dict[str, dict[str, Callable[..., object]]] = {  # operations by their name, of each kind of device
    "cuda": {
        "scaled_dot_product_attention": cuda_attention,
        "_fused_sdp_choice": cuda_choice,
        "dropout": cuda_dropout,
        "rms_norm": cuda_rms_norm,
        "layer_norm": cuda_layer_norm,
    },
    "cpu": {"scaled_dot_product_attention": cpu_attention, "_fused_sdp_choice": cpu_choice},
}


# torch has no rule of what these do to tensors without data: nothing but change them in place
UPDATES = ("_fused_adamw_.tensor_lr", "_fused_sgd_.tensor_lr")

# --- gradients that are added in place

SCATTERING_NODES = re.compile(r"(Gather|Max|Min|Topk|Sort|Kthvalue|Median|Mode)Backward")
Operation = OpOverload[..., object]
IN_PLACE: dict[Operation, Operation] = {
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
}
ADD: Operation = torch.ops.aten.add.Tensor
ADD_IN_PLACE: Operation = torch.ops.aten.add_.Tensor
# of a tensor that autograd alone holds, seen from a mode: its own, those of two calls of modes and of this function
MAX_HOLDERS = 5
MAX_STORAGE_HOLDERS = 2
USE_COUNT = "_use_count"  # a method of Tensor that torch's stubs leave out
OF_MODES = (*RECORDERS, "/torch/_ops.py")  # frames between autograd and a mode


class InPlaceGradients(TorchDispatchMode):
    """Makes gradients as of tensors with data where none of Python's modes watches.

    Otherwise autograd keeps one tensor more than there is: beside the gradient of gather, max and their kin the zeros
    that it is scattered into (torch's FunctionsManual.cpp, areAnyTensorSubclassLike), and where two paths meet, the sum
    beside the first one's gradient (input_buffer.cpp, can_accumulate_inplace).

    A recorder on a CPU is such a mode, so that `device` cpu has sums beside gradients.
    """

    def __init__(self, device: str):
        """
        Args:
            device: cuda or cpu, the one that is stood for.
        """
        TorchDispatchMode.__init__(self)
        self._adds = device == "cuda"

    def __torch_dispatch__(
        self,
        func: Operation,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in IN_PLACE:
            node = torch._C._current_autograd_node()
            if node is not None and SCATTERING_NODES.match(node.name()):
                func = IN_PLACE[func]
        elif func is ADD and self._adds and _autograd_adds(args[0]):
            func = ADD_IN_PLACE
        return func(*args, **(kwargs or {}))


def _autograd_adds(first: object) -> bool:
    """Whether autograd adds to a tensor in place, because nothing else refers to it. To be called by a mode."""
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    if not isinstance(first, Tensor) or not is_dense(first):
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and any(part in frame.f_code.co_filename for part in OF_MODES):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "_engine_run_backward":
        return False
    count_holders: Callable[[], int] = getattr(first, USE_COUNT)
    storage_holders = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return count_holders() <= MAX_HOLDERS and storage_holders <= MAX_STORAGE_HOLDERS


@contextlib.contextmanager
def replace_kernels(device: str, key: str = KEY) -> Iterator[None]:
    """Inside the block, operations on CPU tensors are those of a device.

    For fake tensors only: real ones cannot run what a CPU has no kernel for.

    Args:
        device: cuda or cpu.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in ON[device].items():
            library.impl(name, function, key)
        for name in UPDATES:
            library.impl(name, lambda *arguments, **options: None, "Meta")
        yield
