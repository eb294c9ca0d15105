"""Makes small traces in Kineto's form (Chrome JSON, as PyTorch >= 2.1 writes it) with known answers. Times: microseconds.

    made = MadeTrace()
    made.step(3, 0, 1000)                                    # ProfilerStep#3
    with made.phase("forward", 100, 300):                    # or made.annotation(...)
        made.op("aten::mm", 110, 150, dims=[[8, 4], [4, 16]])
        made.kernel("ampere_sgemm_128x64_tn", 200, 400, launched=120)   # adds the launch call and joins both
    read_traces(made.write(tmp_path))

Whole runs with the trainer's phases: `gpu_run` and `cpu_run`.
"""

import contextlib
import gzip
import json
from pathlib import Path

import pytest

from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.time.time_results import ROW_TITLES, Placing, RankTime
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.read import read_traces

MAIN, AUTOGRAD, GLOO = 100, 101, 102  # threads
COMPUTE_STREAM, NCCL_STREAM, COPY_STREAM = 7, 20, 24
LAUNCH_US = 5.0
BASE_US = 1_000_000.0  # real files never begin at 0


class MadeTrace:
    """Events of one rank, added one by one."""

    def __init__(self, rank: int | None = 0, world_size=1, device: str | None = "NVIDIA A100-SXM4-80GB", **header):
        """`device` None: a CPU-only trace. `header`: further top-level keys."""
        self.rank, self.world_size, self.device, self.header = rank, world_size, device, header
        self.events: list[dict] = []
        self._correlation = self._sequence = 0

    def add(self, category: str, name: str, start: float, end: float, thread=MAIN, pid=1, **args):
        """Any event; returns it, to be changed at will."""
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": thread, "ts": BASE_US + start}
        self.events.append(event | {"dur": end - start, "args": args})
        return self.events[-1]

    def add_all(self, *calls: tuple):
        """("op", "aten::mm", 110, 150), ...: each the name of a method and its arguments, in a dict those by name."""
        for method, *given in calls:
            named = given.pop() if isinstance(given[-1], dict) else {}
            getattr(self, method)(*given, **named)
        return self

    def annotation(self, name: str, start: float, end: float, thread=MAIN):
        return self.add("user_annotation", name, start, end, thread)

    def step(self, number: int, start: float, end: float):
        return self.annotation(f"ProfilerStep#{number}", start, end)

    @contextlib.contextmanager
    def phase(self, name: str, start: float, end: float):
        """An annotation around what is added in the block; only for the eye: times say what lies where."""
        yield self.annotation(name, start, end)

    def op(
        self, name, start, end, thread=MAIN, dims=None, dtypes=None, sequence=None, forward_thread=None, values=None
    ):
        """An operator. `dims`: a list per argument; `dtypes`: "float" for each tensor if not given; `values`: texts."""
        args = {"External id": len(self.events)}
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": dtypes or ["float" if d else "Scalar" for d in dims]}
        if sequence is not None:
            args |= {"Sequence number": sequence, "Fwd thread id": forward_thread or 0}
        if values is not None:
            args |= {"Concrete Inputs": values}
        return self.add("cpu_op", name, start, end, thread, **args)

    def runtime(self, name: str, start: float, end: float, thread=MAIN, correlation: int | None = None):
        """A call of the CUDA runtime, such as cudaStreamSynchronize or cudaMalloc; a fresh correlation if none is given."""
        return self.add("cuda_runtime", name, start, end, thread, correlation=correlation or self.correlation())

    def correlation(self) -> int:
        self._correlation += 1
        return self._correlation

    def device_work(
        self, category, name, start, end, launched: float | None, *, stream=COMPUTE_STREAM, thread=MAIN,
        call="cudaLaunchKernel", call_end: float | None = None, correlation: int | None = None, **args,
    ):  # fmt: skip
        """Work on the GPU. `launched`: start of its launch call; None: the call lies outside of the trace."""
        correlation = correlation or self.correlation()
        if launched is not None:
            self.runtime(call, launched, call_end or launched + LAUNCH_US, thread, correlation)
        args = {"device": 0, "context": 1, "stream": stream, "correlation": correlation} | args
        return self.add(category, name, start, end, stream, pid=0, **args)

    def kernel(self, name: str, start: float, end: float, launched: float | None, **kind):
        return self.device_work("kernel", name, start, end, launched, **kind)

    def graph(self, kernels: list[tuple[str, float, float]], launched: float):
        """A CUDA graph: one call, many kernels (name, start, end)."""
        correlation = self.correlation()
        self.runtime("cudaGraphLaunch", launched, launched + LAUNCH_US, MAIN, correlation)
        for name, start, end in kernels:
            self.kernel(name, start, end, None, correlation=correlation)

    def copy(self, name: str, start: float, end: float, launched: float | None, num_bytes: int, **kind):
        """`name`: "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)", ..."""
        kind = {"call": "cudaMemcpyAsync", "bytes": num_bytes} | kind
        return self.device_work("gpu_memcpy", name, start, end, launched, **kind)

    def memset(self, start: float, end: float, launched: float | None, num_bytes: int, **kind):
        kind = {"call": "cudaMemsetAsync", "bytes": num_bytes} | kind
        return self.device_work("gpu_memset", "Memset (Device)", start, end, launched, **kind)

    def collective(
        self, start: float, end: float, launched: float | None, *, name="allreduce", elements=1024, dtype="Float",
        kernel="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", group="0",
        group_size: int | None = None, thread=AUTOGRAD, stream=NCCL_STREAM,
    ):  # fmt: skip
        """An NCCL kernel with what PyTorch writes beside it, and its host annotation."""
        self._sequence += 1
        if launched is not None:
            span = f"nccl:{name.replace('allreduce', 'all_reduce')}" if name else "Buffer::dispatch"
            self.annotation(span, launched - 1, launched + LAUNCH_US + 1, thread)
        said = {
            "Collective name": name, "In msg nelems": elements, "Out msg nelems": elements, "dtype": dtype,
            "Group size": group_size or self.world_size, "Process Group Name": group, "Seq": self._sequence,
        }  # fmt: skip
        return self.kernel(
            kernel, start, end, launched, stream=stream, thread=thread, call="cudaLaunchKernelExC", **said
        )

    def gloo(self, start: float, end: float, name="gloo:all_reduce", thread=GLOO):
        return self.annotation(name, start, end, thread)

    def sync(self, start: float, end: float, call="cudaStreamSynchronize", thread=MAIN, operator: str | None = None):
        """The host waits for the device, under an operator (aten::item) if one is named."""
        if operator:
            self.op(operator, start - 2, end + 1, thread)
        return self.runtime(call, start, end, thread)

    def frame(self, name: str, start: float, end: float, thread=MAIN):
        """A Python frame: "train.py(12): train_step", "<built-in method ...>", "nn.Module: Linear_0"."""
        return self.add("python_function", name, start, end, thread)

    def memory(self, time: float, num_bytes: int, allocated: int, reserved: int | None = None, device: int = 0):
        args = {"Bytes": num_bytes, "Total Allocated": allocated, "Total Reserved": reserved or allocated, "Addr": 1}
        args |= {"Device Type": 1, "Device Id": device} if self.device else {"Device Type": 0, "Device Id": -1}
        event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": MAIN}
        self.events.append(event | {"ts": BASE_US + time, "args": args})

    def data(self) -> dict:
        """The file's content."""
        devices = [{"id": 0, "name": self.device, "totalGlobalMem": 85 << 30, "numSms": 108}] if self.device else []
        header = {"schemaVersion": 1, "deviceProperties": devices, "displayTimeUnit": "ms"}
        header["baseTimeNanoseconds"] = 1_700_000_000_000_000_000
        if self.rank is not None:
            backend = "nccl" if self.device else "gloo"
            header["distributedInfo"] = {"backend": backend, "rank": self.rank, "world_size": self.world_size}
        if any(event.get("cat") == "python_function" for event in self.events):
            header["with_stack"] = 1
        if any("Input Dims" in event["args"] for event in self.events):
            header["record_shapes"] = 1
        return header | self.header | {"traceEvents": self.events, "traceName": "made.json"}

    def write(self, folder: Path) -> Path:
        """As a file named in the trainer's way."""
        return write(self.data(), folder / f"host_rank{self.rank or 0}.1700000000000000000.pt.trace.json")


def write(data: dict, path: Path) -> Path:
    """JSON, compressed where the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def place(made: MadeTrace, folder: Path) -> tuple[Trace, Placing]:
    [trace] = read_traces(made.write(folder))
    return trace, attribute_events(trace)


def measure(made: MadeTrace, folder: Path) -> RankTime:
    """Where its steps go; holds what is true of every trace."""
    time = rank_time(*place(made, folder))
    assert set(time.rows) <= set(ROW_TITLES)
    assert sum(time.rows.values()) == pytest.approx(time.step_ms, abs=1e-9)
    assert all(ms >= 0 for ms in time.rows.values())
    return time


def gpu_run(
    steps=4,
    step_us=1000.0,
    first=10,
    gpu_lag_us=50.0,
    rank=0,
    world_size=1,
    all_reduce_us=0.0,
    data_us=40.0,
    item=False,
) -> MadeTrace:
    """Steps as this trainer makes them; the GPU starts `gpu_lag_us` after the host's step. Per step, on the device:

    copy 10, forward 200, backward 400, all_reduce `all_reduce_us` from the middle of backward on (so what is above 200
    is exposed), optimizer 100, and the rest idle. `item`: the host waits for the optimizer (aten::item).
    """
    made = MadeTrace(rank, world_size)
    for index in range(steps):
        _gpu_step(made, index * step_us, first + index, step_us, gpu_lag_us + data_us, all_reduce_us, data_us, item)
    return made


def _gpu_step(made, at, number, step_us, gpu, all_reduce_us, data_us, item):
    host = at + data_us
    gpu += at
    made.step(number, at, at + step_us - 10)
    made.annotation("data", at + 1, host)
    made.annotation("data_to_device", host, host + 20)
    made.copy("Memcpy HtoD (Pinned -> Device)", gpu, gpu + 10, host + 5, 4096)
    with made.phase("forward", host + 20, host + 60):
        made.op("aten::mm", host + 25, host + 40, dims=[[64, 128], [128, 256]])
        made.kernel("ampere_sgemm_128x64_tn", gpu + 10, gpu + 210, host + 30)
    with made.phase("backward", host + 60, host + 120):
        made.op("autograd::engine::evaluate_function: MmBackward0", host + 70, host + 100, AUTOGRAD, sequence=1)
        made.op("aten::mm", host + 72, host + 90, AUTOGRAD, dims=[[128, 64], [64, 256]])
        made.kernel("ampere_sgemm_128x64_nt", gpu + 210, gpu + 610, host + 75, thread=AUTOGRAD)
        if all_reduce_us:
            made.collective(gpu + 410, gpu + 410 + all_reduce_us, host + 95, elements=32768)
    after = gpu + max(610, 410 + all_reduce_us)
    made.annotation("grad_sync", host + 120, host + 125)
    with made.phase("optimizer_step", host + 125, host + 160):
        made.annotation("Optimizer.step#AdamW.step", host + 126, host + 159)
        made.op("aten::_fused_adamw_", host + 130, host + 145)
        made.kernel("void at::native::multi_tensor_apply_kernel<FusedAdam>", after, after + 100, host + 135)
    if item:
        made.sync(host + 170, after + 105, operator="aten::item")


def cpu_run(steps=4, step_us=1000.0, first=10, rank=0, world_size=2, gloo_us=300.0) -> MadeTrace:
    """Steps on a CPU. Per step: data 100, forward 200 (operators 150), backward 300 (operators 250) with a gloo all_reduce
    that begins 100 before backward ends, grad_sync as long as gloo still runs, optimizer 100 (all operator)."""
    made = MadeTrace(rank, world_size, device=None)
    for index in range(steps):
        at = index * step_us
        end_of_sync = max(at + 610, at + 500 + gloo_us)
        made.step(first + index, at, at + step_us - 5)
        made.annotation("data", at, at + 100)
        made.annotation("forward", at + 100, at + 300)
        made.op("aten::mm", at + 110, at + 260, dims=[[64, 128], [128, 256]])
        made.annotation("backward", at + 300, at + 600)
        made.op("autograd::engine::evaluate_function: MmBackward0", at + 310, at + 560, sequence=1)
        made.op("aten::mm", at + 315, at + 550)
        made.gloo(at + 500, at + 500 + gloo_us)
        made.annotation("grad_sync", at + 600, end_of_sync)
        made.annotation("optimizer_step", end_of_sync, end_of_sync + 100)
        made.op("aten::_fused_adamw_", end_of_sync, end_of_sync + 100)
    return made
