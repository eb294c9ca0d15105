"""Matrix products of linear layers in ways that some CPUs are faster in, to the same numbers (docs/decisions/041).

In fp32 torch multiplies matrices by Intel's MKL, which leaves AVX-512 unused on AMD's processors, and convolves by
oneDNN, which does not: there a product is a convolution with filters of one pixel. 16-bit numbers that a processor has
no instructions for are multiplied in fp32.

Letters: M rows (tokens), H input channels, W output channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.config.cpu_kernel_rules import WIDENED_BLOCK, find_slow_precisions, mkl_lacks_avx512
from megatron_lite.model.gpt import DTYPES
from megatron_lite.model.products import LinearByHand, Products

CONVOLVES = mkl_lacks_avx512() and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
WIDENED = tuple(DTYPES[name] for name in find_slow_precisions())
IMAGES = 16  # of fewer, torch convolves by MKL where a process has one thread
# of a smaller product, MKL's is faster
MIN_ROWS = 512
MIN_MULTIPLICATIONS = 2**23
# more filters' gradients are faster in blocks
MAX_FILTERS = 1536
FILTER_BLOCK = 512
# places among the gradients of a convolution
OF_INPUT = 0
OF_WEIGHT = 1


def linear(input_H: Tensor, weight_WH: Tensor, bias_W: Tensor | None = None) -> Tensor:
    """Multiply as nn.Linear does, so that autograd can differentiate it.

    Args:
        input_H: Inputs, [..., H].
        weight_WH: The weight.
        bias_W: The bias, if the layer has one.

    Returns:
        input @ weight^T + bias, [..., W].
    """
    if not (is_widened(input_H.dtype) or _convolves(input_H, weight_WH.numel())):
        return F.linear(input_H, weight_WH, bias_W)
    if torch.compiler.is_compiling():  # layers that compute a gradient in Python are not cached
        return multiply(input_H, weight_WH, bias_W)
    result_W: Tensor = LinearByHand.apply(  # type: ignore[no-untyped-call]
        input_H, weight_WH, bias_W, PRODUCTS, None
    )
    return result_W


def multiply(input_H: Tensor, weight_WH: Tensor, bias_W: Tensor | None = None) -> Tensor:
    """Multiply as nn.Linear does, where no gradient is wanted.

    Args:
        input_H: Inputs, [..., H].
        weight_WH: The weight.
        bias_W: The bias, if the layer has one.

    Returns:
        input @ weight^T + bias, [..., W].
    """
    if is_widened(input_H.dtype):
        return _multiply_widened(input_H, weight_WH, bias_W)
    if not _convolves(input_H, weight_WH.numel()):
        return F.linear(input_H, weight_WH, bias_W)
    filters = _to_filters(weight_WH)
    images = F.conv2d(_to_images(input_H), filters, bias_W)
    rows = _to_rows(images)
    return rows.view(*input_H.shape[:-1], -1)


def _multiply_widened(input_H: Tensor, weight_WH: Tensor, bias_W: Tensor | None) -> Tensor:
    """Do what multiply does in fp32, a block of output channels at a time."""
    wide_H = input_H.float()
    result_W = input_H.new_empty(*input_H.shape[:-1], len(weight_WH))
    for start in range(0, len(weight_WH), WIDENED_BLOCK):
        block = slice(start, start + WIDENED_BLOCK)
        bias = None
        if bias_W is not None:
            bias = bias_W[block].float()
        weight = weight_WH[block].float()
        result_W[..., block] = multiply(wide_H, weight, bias)
    return result_W


def compute_input_gradient(gradient_W: Tensor, weight_WH: Tensor, like_H: Tensor | None = None) -> Tensor:
    """Compute the gradient of a linear layer's input.

    Args:
        gradient_W: Gradient of the layer's output, [..., W].
        weight_WH: Weight of the layer.
        like_H: A tensor of the result's size, where there is one, so that none is made.

    Returns:
        gradient @ weight, [..., H].
    """
    if is_widened(gradient_W.dtype):
        return _compute_widened_input_gradient(gradient_W, weight_WH)
    if not _convolves(gradient_W, weight_WH.numel()):
        return gradient_W @ weight_WH
    size_H = (*gradient_W.shape[:-1], weight_WH.shape[1])
    if like_H is None:
        like_H = gradient_W.new_empty(size_H)
    return _to_rows(_differentiate(gradient_W, like_H, weight_WH, OF_INPUT)).view(size_H)


def _compute_widened_input_gradient(gradient_W: Tensor, weight_WH: Tensor) -> Tensor:
    """Do what compute_input_gradient does in fp32, a block of output channels at a time."""
    total_H: Tensor | None = None
    blocks_W = gradient_W.split(WIDENED_BLOCK, -1)
    blocks_WH = weight_WH.split(WIDENED_BLOCK)
    for block_W, block_WH in zip(blocks_W, blocks_WH):
        part_H = compute_input_gradient(block_W.float(), block_WH.float(), total_H)
        total_H = part_H if total_H is None else total_H.add_(part_H)
    assert total_H is not None
    return total_H.to(gradient_W.dtype)


def compute_weight_gradient(gradient_MW: Tensor, input_MH: Tensor) -> Tensor:
    """Compute the gradient of a linear layer's weight, gradient^T @ input: [W, H]."""
    filters = gradient_MW.shape[1]
    channels = input_MH.shape[1]
    if is_widened(gradient_MW.dtype):
        return _compute_widened_weight_gradient(gradient_MW, input_MH)
    if not _convolves(gradient_MW, filters * channels):
        return gradient_MW.t() @ input_MH
    result_WH = gradient_MW.new_empty(filters, channels)
    if filters <= MAX_FILTERS:
        return _differentiate(gradient_MW, input_MH, result_WH, OF_WEIGHT).flatten(1)
    blocks_MW = gradient_MW.split(FILTER_BLOCK, 1)
    blocks_WH = result_WH.split(FILTER_BLOCK)
    for block_MW, block_WH in zip(blocks_MW, blocks_WH):
        block_WH.copy_(_differentiate(block_MW, input_MH, block_WH, OF_WEIGHT).flatten(1))
    return result_WH


def _compute_widened_weight_gradient(gradient_MW: Tensor, input_MH: Tensor) -> Tensor:
    """Do what compute_weight_gradient does in fp32, a block of output channels at a time."""
    wide_MH = input_MH.float()
    result_WH = input_MH.new_empty(gradient_MW.shape[1], input_MH.shape[1])
    blocks_MW = gradient_MW.split(WIDENED_BLOCK, 1)
    blocks_WH = result_WH.split(WIDENED_BLOCK)
    for block_MW, block_WH in zip(blocks_MW, blocks_WH):
        block_WH.copy_(compute_weight_gradient(block_MW.float(), wide_MH))
    return result_WH


PRODUCTS = Products(linear, multiply, compute_input_gradient, compute_weight_gradient)


def is_widened(dtype: torch.dtype) -> bool:
    """Whether numbers of this format are multiplied in fp32."""
    return dtype in WIDENED


def describe_products(dtype: torch.dtype, device: str) -> str:
    """Name how linear layers are multiplied, as in "in fp32, as oneDNN's convolutions".

    Returns:
        An empty text for torch's own products.
    """
    if device != "cpu":
        return ""
    told = []
    if is_widened(dtype):
        told.append("in fp32")
    if CONVOLVES and (told or dtype == torch.float32):
        told.append("as oneDNN's convolutions")
    return ", ".join(told)


def _convolves(rows_H: Tensor, elements: int) -> bool:
    """Whether to multiply these rows by a matrix of so many elements as a convolution."""
    if not (CONVOLVES and rows_H.dtype == torch.float32):
        return False
    rows = rows_H.shape[:-1].numel()
    return rows >= MIN_ROWS and rows % IMAGES == 0 and rows * elements >= MIN_MULTIPLICATIONS


def _differentiate(gradient_W: Tensor, input_H: Tensor, weight_WH: Tensor, place: int) -> Tensor:
    """Compute the gradient of a convolution's input or weight, of which then only the sizes count.

    Args:
        gradient_W: Gradient of the convolution's output, [..., W].
        input_H: Input of the convolution, [..., H].
        weight_WH: Filters of the convolution.
        place: OF_INPUT or OF_WEIGHT.
    """
    wanted = [place == OF_INPUT, place == OF_WEIGHT, False]
    stride = (1, 1)
    padding = (0, 0)
    dilation = (1, 1)
    groups = 1
    found: list[Tensor] = torch.ops.aten.convolution_backward(
        _to_images(gradient_W),
        _to_images(input_H),
        _to_filters(weight_WH),
        None,
        stride,
        padding,
        dilation,
        False,
        padding,
        groups,
        wanted,
    )
    return found[place]


def _to_images(rows_H: Tensor) -> Tensor:
    """Rows as images of one line, in the layout in which the channels of a pixel are neighbors."""
    images: Tensor = rows_H.flatten(0, -2).unflatten(0, (IMAGES, 1, -1))
    return images.permute(0, 3, 1, 2)


def _to_rows(images: Tensor) -> Tensor:
    return images.permute(0, 2, 3, 1).flatten(0, 2)


def _to_filters(weight_WH: Tensor) -> Tensor:
    return weight_WH[..., None, None]
