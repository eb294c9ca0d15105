"""One process and its GPU, simulated: a host that issues operations, streams that run them in order, and what torch.profiler would record.

The rules: an operation costs the host `op_us` and its launch LAUNCH_US. A kernel starts when its stream is free, LAUNCH_LATENCY_US
behind its launch at the earliest. At most QUEUE launches wait: the next launch call lasts until one of them has started. A host that
waits for the device goes on SYNC_US after the device has ended. All times are microseconds and vary by a few percent, by a seed.
"""

import contextlib
import gzip
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAIN_THREAD, AUTOGRAD_THREAD = 4100, 4188
COMPUTE_STREAM, NCCL_STREAM, COPY_STREAM = 7, 24, 28
LAUNCH_US = 4.5
RANGE_US = 0.4  # before, behind and between what lies inside of an operation or a range
LAUNCH_LATENCY_US = 6.0
BETWEEN_KERNELS_US = 0.9
SYNC_US = 8.0
QUEUE = 1024
VARIATION = 0.03
EPOCH_US = 5_211_340_000.0
PINNED_BYTES_PER_US = 24_000.0
PAGEABLE_BYTES_PER_US = 5_500.0
PROCESS = 51200


@dataclass(frozen=True)
class Gpu:
    """What a GPU does per microsecond.

    Attributes:
        name: As the driver calls it.
        memory_bytes: Of the device.
        flops: Of matrix products by type, as libraries reach them.
        bytes_per_us: Of memory, as elementwise kernels reach it.
        matmul: Name of the kernel of a product, by type.
    """

    name: str
    memory_bytes: int
    flops: dict[str, float]
    bytes_per_us: float
    matmul: dict[str, str]


DOUBLE_PRODUCT = (
    "void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x4_tn_align1>"
    "(cutlass_80_tensorop_d884gemm_64x64_16x4_tn_align1::Params)"
)
H100 = Gpu(
    "NVIDIA H100 80GB HBM3",
    85_017_493_504,
    {"c10::BFloat16": 620e6, "float": 46e6, "double": 48e6},
    2_700_000.0,
    {
        "c10::BFloat16": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "float": "ampere_sgemm_128x128_tn",
        "double": DOUBLE_PRODUCT,
    },
)
A100 = Gpu(
    "NVIDIA A100-SXM4-80GB",
    85_031_714_816,
    {"c10::BFloat16": 235e6, "float": 17e6, "double": 16e6},
    1_550_000.0,
    {
        "c10::BFloat16": "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
        "float": "ampere_sgemm_128x64_tn",
        "double": DOUBLE_PRODUCT,
    },
)


class Rank:
    """A process with one GPU.

    Attributes:
        number: The rank.
        host_us: Where its host is.
        free_us: When each stream has run all that it was given.
        op_us: What an operation costs the host, beside the launch.
        slowness: Factor on the length of all kernels.
    """

    def __init__(self, number: int, world_size: int, gpu: Gpu, seed: int) -> None:
        self.number = number
        self.world_size = world_size
        self.gpu = gpu
        self.random = random.Random(1000 * seed + number)
        self.host_us = 50.0 * self.random.random()
        self.free_us: dict[int, float] = {}
        self.op_us = 8.0
        self.slowness = 1.0
        self.thread = MAIN_THREAD
        self.recording = False
        self.events: list[dict] = []
        self.allocated_bytes = 9 << 30
        self._starts: deque[float] = deque()
        self._open: list[tuple[str, str, float, int, dict]] = []
        self._external_id = 0
        self._frames = 0
        self._correlation = 7000
        self._collectives = 0
        self.has_stacks = False
        # whether operations are recorded for backward, the numbers of those that are, and what autograd does behind each node
        self.grad_mode = False
        self.saved: list[int] = []
        self.check_node: Callable[[], None] = lambda: None
        self._sequence = 0

    # --- the host

    def vary(self, us: float) -> float:
        """A duration as it turns out this time."""
        return us * max(0.5, self.random.gauss(1.0, VARIATION))

    def python(self, us: float, frame: str = "") -> None:
        """Let the host work in Python; only a trace with stacks holds the frame's name."""
        start = self.host_us
        self.host_us += self.vary(us)
        if frame and self.has_stacks:
            self.record("python_function", frame, start, self.host_us)
            self.host_us += RANGE_US

    def host_op(self, name: str, us: float, dims: Sequence = (), dtypes: Sequence[str] = ()) -> None:
        """Let the host run an operation of the CPU."""
        self.open(name, "cpu_op", dims, dtypes)
        self.host_us += self.vary(us)
        self.close()

    def runtime(self, name: str, us: float) -> None:
        """Let the host be in a call of the driver."""
        start = self.host_us
        self.host_us += self.vary(us)
        self.record("cuda_runtime", name, start, self.host_us, correlation=self.next_correlation())
        self.host_us += RANGE_US

    def open(self, name: str, category: str = "user_annotation", dims: Sequence = (), dtypes: Sequence = ()) -> None:
        """Begin a range or an operation, which `close` ends."""
        self._external_id += 1
        more: dict[str, object] = {"External id": self._external_id, "Record function id": 0}
        if category == "cpu_op" and self.grad_mode:
            # the number that the next operation for backward gets, whichever that is
            more |= {"Sequence number": self._sequence + 1, "Fwd thread id": 0}
        if category == "cpu_op" and dims:
            strides = [[math.prod(shape[place + 1 :]) for place in range(len(shape))] for shape in dims]
            more |= {"Input Dims": list(dims), "Input type": list(dtypes), "Input Strides": strides}
            more |= {"Concrete Inputs": [""] * len(dims)}
        self._open.append((category, name, self.host_us, self.thread, more))
        self.host_us += RANGE_US

    def close(self, **more: object) -> None:
        """End the range or operation that was begun last."""
        category, name, start, thread, known = self._open.pop()
        self.host_us += RANGE_US
        self.record(category, name, start, self.host_us, thread=thread, **known, **more)
        self.host_us += RANGE_US

    @contextlib.contextmanager
    def node(self, name: str) -> Iterator[None]:
        """Run a node of autograd's graph; it belongs to the operation that was recorded last."""
        numbers = {"Sequence number": self.saved.pop(), "Fwd thread id": 1} if self.saved else {}
        self.open(f"autograd::engine::evaluate_function: {name}", "cpu_op")
        self.open(name, "cpu_op")
        yield
        self.close(**numbers)
        self.check_node()
        self.close(**numbers)

    @contextlib.contextmanager
    def recording_again(self) -> Iterator[None]:
        """Record operations for backward inside of backward, whose graph nobody goes through: a recomputation."""
        kept = list(self.saved)
        self.grad_mode = True
        yield
        self.grad_mode = False
        self.saved = kept

    def synchronize(self, call: str = "cudaStreamSynchronize", stream: int | None = COMPUTE_STREAM) -> None:
        """Let the host wait for a stream, or for all of them."""
        streams = self.free_us.values() if stream is None else [self.free_us.get(stream, 0.0)]
        start = self.host_us
        self.host_us = max([start, *streams]) + self.vary(SYNC_US)
        self.record("cuda_runtime", call, start, self.host_us, correlation=self.next_correlation())

    def read_value(self, num_bytes: int = 4) -> None:
        """Let the host read a tensor: `.item()`."""
        self.open("aten::item", "cpu_op")
        self.host_us += 2.0
        self.open("aten::_local_scalar_dense", "cpu_op")
        self.copy("Memcpy DtoH (Device -> Pageable)", num_bytes, 1.5)
        self.synchronize()
        self.close()
        self.close()

    # --- the device

    def kernel(
        self,
        op: str,
        kernel: str,
        us: float,
        dims: Sequence = (),
        dtypes: Sequence[str] = (),
        stream: int = COMPUTE_STREAM,
    ) -> None:
        """Issue an operation with one kernel.

        Args:
            op: The operation.
            kernel: Its kernel.
            us: Its length on this GPU.
            dims: Shapes of the arguments.
            dtypes: Their types.
            stream: Where it runs.
        """
        self.open(op, "cpu_op", dims, dtypes)
        if self.grad_mode:
            self._sequence += 1
            self.saved.append(self._sequence)
        self.host_us += self.vary(self.op_us)
        self.launch(kernel, self.vary(us * self.slowness), stream)
        self.host_us += 1.0
        self.close()

    def launch(self, kernel: str, us: float, stream: int, category: str = "kernel", **more: object) -> None:
        """Launch a kernel or a copy of exactly this length."""
        call = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync"}[category]
        called = self.host_us
        if len(self._starts) >= QUEUE:
            self.host_us = max(self.host_us, self._starts.popleft())
        self.host_us += self.vary(LAUNCH_US)
        start = max(called + LAUNCH_LATENCY_US, self.host_us, self.free_us.get(stream, 0.0) + BETWEEN_KERNELS_US)
        self.free_us[stream] = start + us
        self._starts.append(start)
        self.record_launch(call, called, category, kernel, start, start + us, stream, **more)

    def copy(self, name: str, num_bytes: int, us: float, stream: int = COMPUTE_STREAM) -> None:
        """Copy between host and device; the host is held up by pageable memory."""
        self.launch(name, self.vary(us), stream, "gpu_memcpy", bytes=num_bytes)

    def copy_to_device(self, num_bytes: int, pinned: bool = True, stream: int = COMPUTE_STREAM) -> None:
        """Copy a batch."""
        self.open("aten::_to_copy", "cpu_op")
        self.open("aten::copy_", "cpu_op")
        if pinned:
            self.copy("Memcpy HtoD (Pinned -> Device)", num_bytes, num_bytes / PINNED_BYTES_PER_US, stream)
        else:
            self.copy("Memcpy HtoD (Pageable -> Device)", num_bytes, num_bytes / PAGEABLE_BYTES_PER_US, stream)
            self.synchronize(stream=stream)
        self.close()
        self.close()

    def wait_for_stream(self, stream: int, by: int = COMPUTE_STREAM) -> None:
        """Let a stream wait for all that another one has been given."""
        self.runtime("cudaEventRecord", 1.2)
        self.runtime("cudaStreamWaitEvent", 1.0)
        self.free_us[by] = max(self.free_us.get(by, 0.0), self.free_us.get(stream, 0.0))

    def matmul(
        self,
        m: int,
        k: int,
        n: int,
        dtype: str,
        op: str = "aten::mm",
        efficiency: float = 1.0,
        kernel: str = "",
        batch: int = 1,
    ) -> None:
        """Issue the product of (m, k) by (k, n), or a batch of such products."""
        us = 2.0 * batch * m * k * n / self.gpu.flops[dtype] / efficiency + 2.0
        dims: list[list[int]] = [[m, k], [k, n]]
        if op == "aten::addmm":
            dims = [[n], *dims]
        elif op == "aten::bmm":
            dims = [[batch, *shape] for shape in dims]
        self.kernel(op, kernel or self.gpu.matmul[dtype], us, dims, [dtype] * len(dims))

    def linear(self, m: int, k: int, n: int, dtype: str) -> None:
        """Issue a linear layer with a bias."""
        with self.inside("aten::linear", [[m, k], [n, k], [n]], [dtype] * 3):
            self.matmul(m, k, n, dtype, "aten::addmm")

    def layer_norm(self, kernel: str, dims: list[int], dtype: str) -> None:
        """Issue a layer norm."""
        with self.inside("aten::layer_norm", [dims, [], dims[-1:], dims[-1:]], [dtype, "ScalarList", dtype, dtype]):
            self.elementwise("aten::native_layer_norm", kernel, dims, dtype)

    @contextlib.contextmanager
    def inside(self, *names: str | list) -> Iterator[None]:
        """Be inside of operations: names, the outermost first, then shapes and types of their arguments."""
        *outer, dims, dtypes = names
        for name in outer:
            self.open(str(name), "cpu_op", dims, dtypes)
        yield
        for _ in outer:
            self.close()

    def elementwise(self, op: str, kernel: str, dims: Sequence[int], dtype: str, passes: float = 2.0) -> None:
        """Issue a kernel that reads and writes a tensor, `passes` times together."""
        width = {"c10::BFloat16": 2, "float": 4, "double": 8}[dtype]
        num_bytes = width * passes
        for size in dims:
            num_bytes *= size
        self.kernel(op, kernel, num_bytes / self.gpu.bytes_per_us + 1.5, [list(dims)], [dtype])

    # --- the record

    def next_correlation(self) -> int:
        self._correlation += 1
        return self._correlation

    def record(
        self, category: str, name: str, start: float, end: float, thread: int | None = None, **args: object
    ) -> None:
        """Add an event of the host."""
        if not self.recording:
            return
        kept = dict(args)
        if category == "python_function":
            self._frames += 1
            kept |= {"Python id": self._frames, "Python parent id": None}
        elif category == "cuda_runtime":
            kept = {"External id": self._find_external_id(), "cbid": 211} | kept
        event = {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": thread or self.thread}
        self.events.append(event | {"ts": EPOCH_US + start, "dur": end - start, "args": kept})

    def _find_external_id(self) -> int:
        """Number of the operation that the host is in."""
        return self._open[-1][4]["External id"] if self._open else 0

    def record_launch(
        self,
        call: str,
        called: float,
        category: str,
        name: str,
        start: float,
        end: float,
        stream: int,
        **more: object,
    ) -> None:
        """Add a launch, its device work, and the arrow between them."""
        if not self.recording:
            return
        correlation = self.next_correlation()
        self.record("cuda_runtime", call, called, self.host_us, correlation=correlation)
        args = {
            "External id": self._find_external_id(),
            "device": 0,
            "context": 1,
            "stream": stream,
            "correlation": correlation,
        }
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": EPOCH_US + start}
        if category == "kernel":
            args |= {"registers per thread": 128, "grid": [132, 1, 1], "block": [256, 1, 1], "queued": 0}
        self.events.append(event | {"dur": end - start, "args": args | more})
        arrow = {"id": correlation, "cat": "ac2g", "name": "ac2g"}
        self.events.append({"ph": "s", "pid": PROCESS, "tid": self.thread, "ts": EPOCH_US + called} | arrow)
        self.events.append({"ph": "f", "pid": 0, "tid": stream, "ts": EPOCH_US + start, "bp": "e"} | arrow)

    def record_memory(self, num_bytes: int) -> None:
        """Add what the allocator gave (or took back, below 0)."""
        self.allocated_bytes += num_bytes
        if not self.recording:
            return
        args = {
            "Total Reserved": self.allocated_bytes + (2 << 30),
            "Total Allocated": self.allocated_bytes,
            "Bytes": num_bytes,
            "Addr": 140_000_000 + len(self.events),
            "Device Id": 0,
            "Device Type": 1,
        }
        event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": PROCESS}
        self.events.append(event | {"tid": self.thread, "ts": EPOCH_US + self.host_us, "args": args})

    def next_collective(self) -> int:
        self._collectives += 1
        return self._collectives

    def write(self, folder: Path) -> Path:
        """Write the trace as torch.profiler names and writes it."""
        names = [("process_name", PROCESS, {"name": "python3"}), ("process_labels", PROCESS, {"labels": "CPU"})]
        names += [("process_name", 0, {"name": "python3"}), ("process_labels", 0, {"labels": "GPU 0"})]
        first = min(event["ts"] for event in self.events)
        meta = [{"ph": "M", "name": name, "pid": pid, "tid": 0, "ts": first, "args": args} for name, pid, args in names]
        last = max(event["ts"] + event.get("dur", 0.0) for event in self.events)
        span = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
        span |= {"ts": first, "dur": last - first, "args": {"Op count": 0}}
        device = {"id": 0, "name": self.gpu.name, "totalGlobalMem": self.gpu.memory_bytes}
        device |= {"computeMajor": 9 if self.gpu is H100 else 8, "computeMinor": 0}
        device |= {"numSms": 132 if self.gpu is H100 else 108, "warpSize": 32}
        header: dict[str, object] = {"schemaVersion": 1, "deviceProperties": [device], "cuda_runtime_version": 12080}
        header |= {"record_shapes": 1, "with_stack": int(self.has_stacks), "displayTimeUnit": "ms"}
        header |= {"baseTimeNanoseconds": 1_759_000_000_000_000_000}
        if self.world_size > 1:
            info = {"backend": "nccl", "rank": self.number, "world_size": self.world_size}
            group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl"}
            group |= {"pg_size": self.world_size, "ranks": list(range(self.world_size))}
            header["distributedInfo"] = info | {"pg_count": 1, "pg_config": [group], "nccl_version": "2.27.5"}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.number}.1759000000000000000.pt.trace.json.gz"
        rounded = [
            event | {key: round(event[key], 3) for key in ("ts", "dur") if key in event}
            for event in [*meta, *self.events, span]
        ]
        text = json.dumps(header | {"traceEvents": rounded, "traceName": path.name.removesuffix(".gz")})
        # without a time in the header, so that the same run is the same file
        path.write_bytes(gzip.compress(text.encode(), compresslevel=6, mtime=0))
        return path
