"""Whatever stands in a trace: no error, and rows that sum to the step."""

import numpy as np
import pytest
from trace_maker import AUTOGRAD, GLOO, MAIN, MadeTrace

from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.read import read_traces

OPERATORS = [
    "aten::mm",
    "aten::item",
    "aten::to",
    "autograd::engine::evaluate_function: X",
    "c10d::allreduce_",
    "",
    "\x00<b>",
]
CALLS = ["cudaStreamSynchronize", "cudaMalloc", "cudaStreamWaitEvent", "cudaEventQuery", "cudaMemcpyAsync", "INVALID"]
RANGES = [
    "forward",
    "backward",
    "data",
    "save",
    "eval",
    "gloo:all_reduce",
    "nccl:all_reduce",
    "layers.0 forward",
    "step 7",
    "##",
    "enumerate(DataLoader)#x.__next__",
    "Optimizer.step#Y.step",
]
FRAMES = [
    "train.py(3): step",
    "<built-in function collect>",
    "torch/nn/module.py(1): call",
    "nn.Module: X_0",
    "(",
    ".py(1): ",
]
KERNELS = ["gemm", "ncclDevKernel_AllReduce", "", "Memcpy HtoD (Pageable -> Device)"]


def soup(random, gpu: bool, marked: bool) -> MadeTrace:
    """Ranges that cross each other, empty ones, work before its launch, whole kinds missing."""
    made = MadeTrace(device="NVIDIA A100" if gpu else None)

    def some(most):
        for _ in range(random.integers(0, most)):
            start = float(random.integers(0, 2000))
            yield start, start + float(random.choice([0, 1, 30, 400])), int(random.choice([MAIN, AUTOGRAD, GLOO]))

    for number in range(random.integers(1, 5) if marked else 0):
        made.step(number * int(random.integers(1, 3)), number * 500, number * 500 + float(random.integers(0, 700)))
    for start, end, thread in some(40):
        made.op(random.choice(OPERATORS), start, end, thread, sequence=int(random.integers(-1, 3)))
    for start, end, thread in some(20):
        made.annotation(random.choice(RANGES), start, end, thread)
    for start, end, thread in some(20):
        made.frame(random.choice(FRAMES), start, end, thread)
    for start, end, thread in some(20 if gpu else 1):
        made.runtime(random.choice(CALLS), start, end, thread)
    for start, end, thread in some(60 if gpu else 1):
        launched = random.choice([None, start - 20, start + 50, start - 300])
        made.kernel(random.choice(KERNELS), start, end, launched, stream=int(random.integers(7, 10)), thread=thread)
    return made


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_any_soup_of_events_gives_figures(tmp_path, gpu, seed):
    made = soup(np.random.default_rng(seed), gpu, marked=seed % 3 > 0)
    made.annotation("at least one event", 5, 6)
    [trace] = read_traces(made.write(tmp_path))
    placing = attribute_events(trace)
    time = rank_time(trace, placing)
    assert sum(time.rows.values()) == pytest.approx(time.step_ms, abs=1e-9)
    assert all(ms >= 0 for ms in time.rows.values())
    assert time.busy_ms <= time.step_ms + 1e-9
    assert all(0 <= phase.device_ms <= phase.device_sum_ms + 1e-9 for phase in time.phases)
    assert time.overlap is None or 0 <= time.overlap <= 1 + 1e-9
    assert placing.step.max(initial=-1) < len(placing.steps)
    assert placing.phase.max(initial=-1) < len(placing.phases)
    ends = [step.end_ns for step in placing.steps]
    assert ends == sorted(ends)
    assert all(step.end_ns >= step.start_ns for step in placing.steps)
