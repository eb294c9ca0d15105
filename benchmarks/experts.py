"""A layer of experts beside Megatron-Core's own, forward and backward on the CPU, same weights and tokens.

python -m benchmarks.experts [--threads N] [--rounds N]     needs megatron-core

The two alternate; CPU time of this process counts, so that other programs on the machine matter little. Memory is the
most that tensors took at once beside weights, as torch's profiler sees it: gradients begin as None.
"""

import argparse
import contextlib
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megatron_lite.cpu_kernels.install import choose_cpu_kernels, install_kernels
from megatron_lite.process_state import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # its makers of models are the tests'

from support.expert_variants import PLAIN_EXPERTS, mix
from support.megatron_core import as_theirs, reference
from support.model_variants import build

# experts, experts of a token, hidden size, width of an expert, tokens
SHAPES = [(8, 2, 256, 512, 1024), (16, 4, 256, 256, 1024), (8, 2, 512, 1024, 512)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
MIB = 2**20


@contextlib.contextmanager
def megatron_on_cpu():
    """One gloo rank, and the places where Megatron-Core's router and random states ask for CUDA."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
    torch.cuda.current_device = lambda: "cpu"
    tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


Pair = tuple[Callable[[], None], Callable[[], None]]


def make_layers(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> dict[str, Pair]:
    """{name: (forget gradients, a forward and backward)} of both layers, with the same weights and tokens."""
    number, topk, hidden, width, tokens = shape
    experts = replace(PLAIN_EXPERTS, number=number, topk=topk, ffn_hidden_size=width, layers=(True,))
    experts = replace(experts, balancing=(("aux_loss", 0.01),))
    sizes = mix(experts, num_layers=1, hidden_size=hidden, kv_channels=hidden // 4)
    ours, theirs = build(sizes).to(dtype), reference(sizes).to(dtype)
    install_kernels(ours, choose_cpu_kernels(sizes, PRECISIONS[dtype]))
    weights = as_theirs(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    theirs.load_state_dict({name: weight.detach() for name, weight in weights.items()}, strict=False)
    x_BTH = torch.randn(1, tokens, hidden, dtype=dtype)

    def run(layer: nn.Module, x: Tensor) -> None:
        out = layer(x.clone().requires_grad_())
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    x_TBH = x_BTH.transpose(0, 1).contiguous()
    our_mlp, their_mlp = ours.decoder.layers[0].mlp, theirs.decoder.layers[0].mlp
    return {
        "ours": (our_mlp.zero_grad, lambda: run(our_mlp, x_BTH)),
        "theirs": (their_mlp.zero_grad, lambda: run(their_mlp, x_TBH)),
    }


def measure_peak(clear: Callable[[], None], run: Callable[[], None]) -> float:
    """Bytes that tensors took at once beyond those before, in one forward and backward."""
    clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    held = highest = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    keep_freed_memory()  # as the trainer does
    torch.set_num_threads(options.threads)
    print(
        f"{'':6}{'E, K, hidden, width, tokens':32}{'ours':>9}{'theirs':>9}{'ratio':>7}{'ours':>9}{'theirs':>9}{'ratio':>7}"
    )
    with megatron_on_cpu():
        for name, dtype in DTYPES.items():
            for shape in SHAPES:
                layers = make_layers(shape, dtype)
                spent: dict[str, list[float]] = {side: [] for side in layers}
                for number in range(options.rounds + 2):
                    for side, (clear, run) in layers.items():
                        clear()
                        started = time.process_time()
                        run()
                        if number >= 2:
                            spent[side].append(1000 * (time.process_time() - started))
                times = [statistics.median(spent[side]) for side in ("ours", "theirs")]
                peaks = [measure_peak(*layers[side]) / MIB for side in ("ours", "theirs")]
                figures = (*times, times[0] / times[1], *peaks, peaks[0] / peaks[1])
                texts = "".join(f"{figure:{9 if place % 3 < 2 else 7}.2f}" for place, figure in enumerate(figures))
                print(f"{name:6}{', '.join(map(str, shape)):32}{texts}")


if __name__ == "__main__":
    main()
