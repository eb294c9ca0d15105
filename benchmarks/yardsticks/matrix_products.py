"""How fast this machine multiplies the very matrices of a model: the ceiling of a training's rate.

    python -m benchmarks.yardsticks.matrix_products --device cpu --precision bf16 --seconds 2 --rows 2048 \\
      --shapes 384x1152x6 384x50304x1

--rows: tokens of a micro-batch. A shape is INxOUTxTIMES: a linear map from IN to OUT numbers that the model has TIMES times.
Of each the three products of a training are timed (forward, gradient of its input, gradient of its weights), on random
numbers, into memory that is there, by torch.mm and on a CPU also as the trainer computes it; the faster one counts.
Prints TFLOP/s: all operations over the sum of each product's least time.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from megatron_lite.cpu_kernels import products
from megatron_lite.process_state import keep_freed_memory

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
    keep_freed_memory()
    share_s = args.seconds / (3 * len(shapes))
    flops = seconds = 0.0
    for width_in, width_out, times in shapes:
        products_of_map = _products(args.rows, width_in, width_out, DTYPES[args.precision], args.device)
        flops += times * 3 * 2 * args.rows * width_in * width_out
        seconds += times * sum(
            min(_least_s(way, share_s / len(ways), args.device == "cuda") for way in ways) for ways in products_of_map
        )
    print(flops / seconds / 1e12)


def _products(
    rows: int, width_in: int, width_out: int, dtype: torch.dtype, device: str
) -> list[list[Callable[[], object]]]:
    """Ways to compute forward, the input's and the weights' gradient, laid out as autograd hands them over: torch's, and on a CPU the trainer's."""
    x, gradient = (torch.randn(rows, width, device=device).to(dtype) for width in (width_in, width_out))
    weight = torch.randn(width_out, width_in, device=device).to(dtype)
    factors = ((x, weight.t()), (gradient, weight), (gradient.t(), x))
    results = [torch.empty(len(left), right.shape[1], dtype=dtype, device=device) for left, right in factors]
    found = [[partial(torch.mm, *two, out=result)] for two, result in zip(factors, results)]
    if device == "cpu":
        found[0].append(partial(products.multiply, x, weight))
        found[1].append(partial(products.compute_input_gradient, gradient, weight, x))
        found[2].append(partial(products.compute_weight_gradient, gradient, x))
    return found


def _least_s(compute: Callable[[], object], share_s: float, on_gpu: bool) -> float:
    """Seconds of one product, the least of all tries. A GPU's are of several in a row between its own clock's marks: with a launch and
    a wait for each the host's clock would show those."""
    once = _on_gpu if on_gpu else _on_cpu
    for _ in range(WARM_UP):
        once(compute)
    began, least = time.perf_counter(), float("inf")
    while least == float("inf") or time.perf_counter() - began < share_s:  # once at least, however busy the machine is
        least = min(least, once(compute))
    return least


def _on_cpu(compute: Callable[[], object]) -> float:
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started


def _on_gpu(compute: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(IN_A_ROW):
        compute()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1000 / IN_A_ROW


if __name__ == "__main__":
    main()
