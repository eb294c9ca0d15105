"""Says which part of a whole tensor a rank holds, as far as the tensor or the library that made it tells."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

MASK = "mask_buffer"  # attribute of DTensor's _MaskPartial
MEGATRON_STATE = "megatron.core.parallel_state"
SPLIT = "tensor_model_parallel"  # attributes of Megatron-Core's parameters
SPLIT_DIMENSION = "partition_dim"
SPLIT_STRIDE = "partition_stride"
IS_REPLICATED_OVER_DATA = "allreduce"  # False: an expert's, whose ranks are others


@dataclass(frozen=True)
class HeldBlock:
    """A part of a whole tensor.

    Attributes:
        local: The values that this rank holds.
        whole: Shape of the whole.
        starts: Where the part begins in each dimension of it.
        is_placed: Whether the place was told; else the part is taken for the whole.
        is_partial: Whether parts of several ranks are to be added up.
    """

    local: Tensor
    whole: tuple[int, ...]
    starts: tuple[int, ...]
    is_placed: bool = False
    is_partial: bool = False


def find_blocks(tensor: Tensor, parameter: Tensor | None = None) -> Iterator[HeldBlock]:
    """Find the blocks of a tensor that this rank holds.

    Args:
        tensor: A weight, its gradient or what a module returned.
        parameter: Where its library notes how it is split; None: the tensor itself.
    """
    described = tensor if parameter is None else parameter
    if isinstance(tensor, DTensor):
        yield _find_block_of_dtensor(tensor)
    elif getattr(described, SPLIT, False) and tensor.dim():
        yield from _find_blocks_of_megatron(tensor, described)
    else:
        yield HeldBlock(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _find_block_of_dtensor(tensor: DTensor) -> HeldBlock:
    """Find the block of a DTensor; one that no block describes is gathered, which all its ranks do together."""
    placements = tensor.placements
    whole = tuple(tensor.shape)
    is_partial = any(isinstance(placement, Partial) for placement in placements)
    try:
        shape, starts = compute_local_shape_and_global_offset(whole, tensor.device_mesh, placements)
    except (NotImplementedError, RuntimeError):
        shape = ()
        starts = ()
    local = tensor.to_local()
    if tuple(shape) != tuple(local.shape):
        return HeldBlock(tensor.full_tensor(), whole, (0,) * len(whole), is_placed=True)
    for placement in placements:
        # rows that an embedding split by its vocabulary looked up in vain
        mask = getattr(placement, MASK, None)
        if mask is not None and mask.data is not None:
            local = local.clone()
            mask.apply_mask(local)
    # an empty part begins behind the end
    inside = tuple(min(start, size) for start, size in zip(starts, whole, strict=True))
    return HeldBlock(local, whole, inside, is_placed=True, is_partial=is_partial)


def _find_blocks_of_megatron(tensor: Tensor, described: Tensor) -> Iterator[HeldBlock]:
    """Find the blocks of a weight that Megatron-Core's tensor parallel ranks split.

    A gated layer's weight holds a piece of each of `partition_stride` wholes, one behind the other.
    """
    rank, size = _find_tensor_rank(described)
    dimension = int(getattr(described, SPLIT_DIMENSION, 0))
    stride = max(int(getattr(described, SPLIT_STRIDE, 1)), 1)
    if size == 1:
        yield HeldBlock(tensor, tuple(tensor.shape), (0,) * tensor.dim(), is_placed=True)
        return
    whole = list(tensor.shape)
    whole[dimension] *= size
    pieces = tensor.chunk(stride, dim=dimension)
    length = pieces[0].shape[dimension]
    for number, piece in enumerate(pieces):
        starts = [0] * tensor.dim()
        starts[dimension] = (number * size + rank) * length
        yield HeldBlock(piece, tuple(whole), tuple(starts), is_placed=True)


def _find_tensor_rank(described: Tensor) -> tuple[int, int]:
    """Find this rank's number among those that split a weight of Megatron-Core, and how many they are."""
    state = sys.modules.get(MEGATRON_STATE)
    if state is None:
        return 0, 1
    if getattr(described, IS_REPLICATED_OVER_DATA, True):
        return state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    return state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()


def widen(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, as float32, or float64 where it is that.

    Args:
        tensor: Of any type of numbers.
    """
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to("cpu", wide, copy=True).contiguous()
