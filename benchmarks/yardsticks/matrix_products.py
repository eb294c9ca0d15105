"""How fast this machine multiplies the very matrices of a model: the ceiling of a training's rate.

    python -m benchmarks.yardsticks.matrix_products --device cpu --precision bf16 --seconds 2 --rows 2048 \\
      --shapes 384x1152x6 384x50304x1

--rows: tokens of a micro-batch. A shape is INxOUTxTIMES: a linear map from IN to OUT numbers that the model has TIMES times.
Of each the three products of a training are timed (forward, gradient of its input, gradient of its weights), on random
numbers, into memory that is there. Prints TFLOP/s: all operations over the sum of each product's least time.
"""

import argparse
import time

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = 2  # runs of each product
IN_A_ROW = 10  # products between two marks of a GPU


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), required=True)
    add("--precision", choices=sorted(DTYPES), required=True)
    add("--rows", type=int, required=True)
    add("--shapes", nargs="+", metavar="INxOUTxTIMES", required=True)
    add("--seconds", type=float, required=True, help="of all products together")
    args = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    torch.manual_seed(1)
    share_s = args.seconds / (3 * len(shapes))
    flops = seconds = 0.0
    for width_in, width_out, times in shapes:
        products = _products(args.rows, width_in, width_out, DTYPES[args.precision], args.device)
        flops += times * 3 * 2 * args.rows * width_in * width_out
        seconds += times * sum(_least_s(*product, share_s) for product in products)
    print(flops / seconds / 1e12)


def _products(
    rows: int, width_in: int, width_out: int, dtype: torch.dtype, device: str
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(left, right, result) of forward, of the input's and of the weights' gradient, laid out as autograd hands them over."""
    x, gradient = (torch.randn(rows, width, device=device).to(dtype) for width in (width_in, width_out))
    weight = torch.randn(width_out, width_in, device=device).to(dtype)
    factors = ((x, weight.t()), (gradient, weight), (gradient.t(), x))
    return [
        (left, right, torch.empty(len(left), right.shape[1], dtype=dtype, device=device)) for left, right in factors
    ]


def _least_s(left: Tensor, right: Tensor, result: Tensor, share_s: float) -> float:
    """Seconds of one product, the least of all tries. A GPU's are of several in a row between its own clock's marks: with a launch and
    a wait for each the host's clock would show those."""
    once = _on_gpu if left.is_cuda else _on_cpu
    for _ in range(WARM_UP):
        once(left, right, result)
    began, least = time.perf_counter(), float("inf")
    while least == float("inf") or time.perf_counter() - began < share_s:  # once at least, however busy the machine is
        least = min(least, once(left, right, result))
    return least


def _on_cpu(left: Tensor, right: Tensor, result: Tensor) -> float:
    started = time.perf_counter()
    torch.mm(left, right, out=result)
    return time.perf_counter() - started


def _on_gpu(left: Tensor, right: Tensor, result: Tensor) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(IN_A_ROW):
        torch.mm(left, right, out=result)
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1000 / IN_A_ROW


if __name__ == "__main__":
    main()
