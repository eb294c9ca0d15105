"""Planted causes: runs, traces and snapshots whose right answer is known from how they were made, and what the report says.

    python planted_causes.py                  # the made ones: CAUSE | KIND | EXPECTED | FIRST FINDING | RESULT
    python planted_causes.py --real FOLDER    # those of planted_programs.py and planted_trainings.py, too: runs each
                                              # into FOLDER (half an hour, on a machine that does nothing else)

The summary counts them, and the certain findings, of which those of something else than what was planted make up the lack of
precision. A result is "first" (the first finding, or the verdict of an INCONCLUSIVE report, names the cause), "second", "later",
"symptom" (others are found, the cause is not), "missed" (nothing is found), "not shown" (the recording does not hold it: NOT_SHOWN), and "false" where a certain finding names what
was not planted. A clean run is "silent" or "false".
"""

import argparse
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support.finding_cases import moving
from support.paths import REPO, TESTS
from support.snapshot_maker import BACKWARD, LOSS, STEP, MadeSnapshot, forward_stack, frames
from support.snapshot_maker import write as write_snapshot
from support.trace_maker import AUTOGRAD, MadeTrace, write
from support.training_maker import BF16_GEMM, FUSED_ADAM
from support.training_maker import Step as Place
from support.waiting import LIMIT_S

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.report import Report

GIB, MIB = 2**30, 2**20
H100 = "NVIDIA H100 80GB HBM3"
LAYERS, STEPS = 6, 5
GELU = "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
DGEMM = "void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x3_nn_align1>(cutlass_80_tensorop_d884gemm::Params)"
ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NORM = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float>>>"


NSYS_TABLES = """
CREATE TABLE StringIds (id, value);
CREATE TABLE NVTX_EVENTS (start, end, eventType, text, globalTid, textId);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, end, deviceId, streamId, correlationId, globalPid, graphId);
"""


class Loop:
    """A training loop on one GPU as torch.profiler records one that names no phases: per step a batch of a DataLoader,
    LAYERS layers forward and backward of 400 us products, a fused AdamW. The host is far ahead. A cause overrides a part."""

    marked = True
    dtypes = ("c10::BFloat16", "c10::BFloat16")
    gemm = BF16_GEMM

    def __init__(self, rank: int | None = None, world_size: int = 1, device: str | None = H100, **header):
        self.made = MadeTrace(rank, world_size, device=device, **header)
        self.place = Place(self.made, 10.0, 120.0)

    def product(self, us: float, thread=100, sequence: int | None = None):
        """sequence: its number among what autograd records, which the backward of it has, too; None: without gradients."""
        dims, first = [[8192, 4096], [4096, 4096]], len(self.made.events)
        self.place.kernel(self.gemm, us, "aten::mm", dims, list(self.dtypes), thread)
        if sequence is not None:
            self.made.events[first]["args"] |= {"Sequence number": sequence, "Fwd thread id": 0}

    def data(self, number: int):
        self.made.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", self.host, self.host + 15)
        self.place.host += 20
        self.made.copy("Memcpy HtoD (Pinned -> Device)", self.gpu, self.gpu + 15, self.host + 2, 65536)
        self.place.gpu += 15
        self.place.host += 10

    def layer(self, number: int, index: int):
        self.product(400, sequence=self.number_in_graph(number, index))
        self.place.kernel(GELU, 40, "aten::gelu")

    def number_in_graph(self, number: int, index: int) -> int:
        return 100 * number + index + 1

    def without_gradients(self, layers: int):
        for _ in range(layers):
            self.product(400)
            self.place.kernel(GELU, 40, "aten::gelu")

    def backward_layer(self, number: int, index: int):
        began = self.host
        self.product(400, thread=AUTOGRAD)
        self.product(400, thread=AUTOGRAD)
        self.check(number, index)
        node = "autograd::engine::evaluate_function: MmBackward0"
        of_forward = {"sequence": self.number_in_graph(number, index), "forward_thread": 1}
        self.made.op(node, began - 0.2, self.host - 0.5, AUTOGRAD, **of_forward)

    def check(self, number: int, index: int):
        """Inside the operation of backward."""

    def reduce(self, number: int):
        """Between ranks."""

    def optimizer(self, number: int):
        began = self.host
        self.update(number)
        self.made.annotation("Optimizer.step#AdamW.step", began - 1, self.host)

    def update(self, number: int):
        self.place.kernel(FUSED_ADAM, 500, "aten::_fused_adamw_")

    def after(self, number: int):
        """Behind the optimizer, inside the step."""

    @property
    def host(self) -> float:
        return self.place.host

    @property
    def gpu(self) -> float:
        return self.place.gpu

    def one_step(self, number: int):
        self.data(number)
        for index in range(LAYERS):
            self.layer(number, index)
        for index in reversed(range(LAYERS)):
            self.backward_layer(number, index)
        self.reduce(number)
        self.optimizer(number)
        self.after(number)

    def make(self, steps: int = STEPS) -> MadeTrace:
        for number in range(steps):
            began = self.host
            self.one_step(number)
            # as the queue of launches is full, the host is never more than a step ahead
            self.place.host = max(self.host, self.gpu - 6000)
            if self.marked:
                self.made.step(number + 7, began - 1, self.host + 1)
            self.place.host += 5
        return self.made

    def host_works(self, us: float, name: str, category="cpu_op", thread=100):
        """While the host is in it, the device runs dry and idles for `us`."""
        start, end = self.place.gap(us)
        self.made.add(category, name, start, end, thread)
        return start, end

    def communicates(self, us: float, kernel: str, name: str, **more):
        """A collective while the device does nothing else."""
        self.made.collective(self.gpu, self.gpu + us, self.host, name=name, kernel=kernel, elements=2**24, **more)
        self.place.host += 12
        self.place.gpu += us


class CapturesEachStep(Loop):
    def after(self, number):
        start, end = self.place.gap(3000)
        self.made.runtime("cudaStreamBeginCapture", start, start + 20)
        for index in range(40):
            self.made.op("aten::mm", start + 30 + 40 * index, start + 55 + 40 * index)
        self.made.runtime("cudaStreamEndCapture", start + 1700, start + 1900)
        self.made.runtime("cudaGraphInstantiate", start + 1900, end - 20)


class AdamOnHost(Loop):
    def update(self, number):
        start, _ = self.place.gap(9000)
        for index in range(6):
            at = start + 1500 * index
            self.made.op("aten::_foreach_addcdiv_" if index % 2 else "aten::_foreach_lerp_", at, at + 1450)


class SmallGaps(Loop):
    """Between any two kernels the device waits 0.25 ms for the host, which no operator explains."""

    def layer(self, number, index):
        for _ in range(2):
            self.place.gap(250)
            super().layer(number, index)

    def backward_layer(self, number, index):
        self.place.gap(250)
        super().backward_layer(number, index)


class PythonBackward(Loop):
    def backward_layer(self, number, index):
        if index == 3:
            start, end = self.place.gap(4000)
            self.made.op("MyScanBackward", start, end, AUTOGRAD, sequence=99)
            self.made.op(
                "autograd::engine::evaluate_function: MyScanBackward", start - 2, end + 2, AUTOGRAD, sequence=99
            )
        super().backward_layer(number, index)


class ExpertsExchanged(Loop):
    def layer(self, number, index):
        self.communicates(500, ALL_TO_ALL, "all_to_allv", thread=100)
        super().layer(number, index)
        self.communicates(500, ALL_TO_ALL, "all_to_allv", thread=100)


class GathersInSight(Loop):
    def layer(self, number, index):
        self.made.annotation(f"FSDP::all_gather (layers.{index})", self.host - 1, self.host + 14)
        self.communicates(450, GATHER, "_allgather_base", thread=100)
        super().layer(number, index)

    def backward_layer(self, number, index):
        self.communicates(450, GATHER, "_allgather_base")
        super().backward_layer(number, index)
        self.communicates(300, SCATTER, "_reduce_scatter_base")


class ReducesOnComputeStream(Loop):
    def backward_layer(self, number, index):
        super().backward_layer(number, index)
        self.communicates(500, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce",
                          stream=7)  # fmt: skip


class SecondForward(Loop):
    """The model runs twice per step: once under no_grad, for a metric."""

    def layer(self, number, index):
        if index == 0:
            self.without_gradients(LAYERS)
        super().layer(number, index)


class DoubleBlock(Loop):
    def layer(self, number, index):
        super().layer(number, index)
        if index == 2:
            self.place.kernel(DGEMM, 4000, "aten::mm", [[4096, 4096], [4096, 4096]], ["double", "double"])


class Copies(Loop):
    def layer(self, number, index):
        super().layer(number, index)
        began = self.host
        self.place.kernel(COPY, 350, "aten::copy_", [[8, 2048, 32, 128]] * 2, list(self.dtypes))
        self.made.op("aten::contiguous", began - 3, self.host)


class ClipsWithItem(Loop):
    def optimizer(self, number):
        for _ in range(30):
            self.place.kernel(NORM, 20, "aten::linalg_vector_norm")
            asked = self.host
            began, _ = self.place.gap(120)
            self.made.sync(asked, began + 80, operator="aten::item")
        super().optimizer(number)


class ReadsLoss(Loop):
    """loss.item() directly after forward: the queue is empty when backward begins, which the host then builds slowly."""

    def backward_layer(self, number, index):
        if index == LAYERS - 1:
            asked = self.host
            began, _ = self.place.gap(2500)
            self.made.sync(asked, began + 20, operator="aten::item")
        super().backward_layer(number, index)


class AllocatesEachStep(Loop):
    def layer(self, number, index):
        start, end = self.place.gap(900)
        self.made.runtime("cudaFree", start, start + 500)
        self.made.runtime("cudaMalloc", start + 500, end - 10)
        super().layer(number, index)


class UnmarkedLoader(Loop):
    marked = False

    def data(self, number):
        start, end = self.place.gap(7000)
        self.made.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, end)
        super().data(number)


class SavesEachStep(Loop):
    def after(self, number):
        start, end = self.place.gap(20_000)
        self.made.frame("<built-in method write of _io.BufferedWriter object at 0x7f>", start + 200, end - 100)
        self.made.frame("torch/serialization.py(900): _save", start + 100, end - 50)
        self.made.frame("torch/serialization.py(944): save", start, end)


class EvaluatesEachStep(Loop):
    def after(self, number):
        began = self.host
        self.without_gradients(3 * LAYERS)
        self.made.frame("train.py(88): evaluate", began - 2, self.host)


class StartsUp(Loop):
    """The first step alone: modules are loaded, a library's handle is made."""

    def data(self, number):
        if number == 0:
            start, end = self.place.gap(60_000)
            self.made.runtime("cudaGetDeviceProperties_v2", start, start + 30_000)
            self.made.runtime("cudaLibraryLoadData", start + 30_000, end - 10)
        super().data(number)


class Anomaly(Loop):
    def check(self, number, index):
        for _ in range(2):
            self.place.kernel(GELU, 30, "aten::isnan", thread=AUTOGRAD)
            self.place.kernel(NORM, 25, "aten::_is_any_true", thread=AUTOGRAD)
            asked = self.host
            began, _ = self.place.gap(100)
            self.made.sync(asked, began + 70, operator="aten::item", thread=AUTOGRAD)


class Recomputes(Loop):
    """Needlessly: the peak that the trace records leaves most of the GPU free."""

    def check(self, number, index):
        began, first = self.host, len(self.made.events)
        self.place.kernel(self.gemm, 400, "aten::linear", [[8192, 4096], [4096, 4096]], list(self.dtypes), AUTOGRAD)
        self.made.events[first]["args"] |= {
            "Sequence number": 50 + self.number_in_graph(number, index),
            "Fwd thread id": 0,
        }
        self.made.frame("torch/utils/checkpoint.py(1100): unpack_hook", began - 1, self.host, AUTOGRAD)
        self.made.memory(self.host, 2**20, 9 * GIB)


class SingleProducts(Loop):
    gemm, dtypes = "ampere_sgemm_128x64_tn", ("float", "float")


class OneByOneOptimizer(Loop):
    def update(self, number):
        for index in range(240):
            op = ("aten::lerp_", "aten::mul_", "aten::addcmul_", "aten::sqrt", "aten::add_", "aten::addcdiv_")[
                index % 6
            ]
            self.place.kernel(GELU.replace("Gelu", "Add"), 20, op)


class WaitsForEvents(Loop):
    """A copy of activations to the host on another stream, for which the next layer waits."""

    def layer(self, number, index):
        super().layer(number, index)
        self.made.copy("Memcpy DtoH (Device -> Pinned)", self.gpu, self.gpu + 500, self.host, 64 * MIB, stream=31)
        self.made.runtime("cudaStreamWaitEvent", self.host + 5, self.host + 6)
        self.place.host += 10
        self.place.gpu += 500


class PageableCopies(Loop):
    def data(self, number):
        super().data(number)
        self.made.copy(
            "Memcpy HtoD (Pageable -> Device)",
            self.gpu,
            self.gpu + 3000,
            self.host,
            200 * MIB,
            call_end=self.gpu + 2990,
        )
        self.place.gpu += 3000
        self.place.host = self.gpu - 5


class UnknownCollective(Loop):
    def layer(self, number, index):
        super().layer(number, index)
        self.communicates(
            600, "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>(Params)", None, thread=100
        )


class ReducesInOptimizer(Loop):
    def update(self, number):
        self.communicates(2500, SCATTER, "_reduce_scatter_base", thread=100)
        super().update(number)
        self.communicates(2500, GATHER, "_allgather_base", thread=100)


class CollectsGarbage(Loop):
    def after(self, number):
        start, end = self.place.gap(12_000)
        self.made.frame("<built-in function collect>", start + 2, end - 2)
        self.made.frame("trainer.py(40): on_step_end", start, end)


# ---- what needs more than a loop


def looped(kind: type[Loop], **given) -> Callable[[Path], object]:
    return lambda folder: kind(**given).make().write(folder)


def two_gpus(folder: Path):
    """Pipeline in one process: GPU 1 works only while GPU 0 is idle."""

    class Alternating(Loop):
        def layer(self, number, index):
            super().layer(number, index)
            self.made.kernel(BF16_GEMM, self.gpu, self.gpu + 900, self.host, device=1)
            self.place.gpu += 900

    Alternating().make().write(folder)


def graph_at_default(folder: Path, recorded: bool = True):
    """nsys records graphs as a whole (its default): the export holds graph launches, no kernels of theirs. The host waits
    for each graph before it launches the next one. Not `recorded`: nor the graphs themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    thread = 1 << 48 | 77 << 24 | 77
    with closing(sqlite3.connect(folder / "report.sqlite")) as database:
        database.executescript(NSYS_TABLES)
        texts = [
            (1, "cudaGraphLaunch_v10000"),
            (2, "cudaStreamSynchronize_v3020"),
            (3, "void gemm<float>(int)"),
            (4, "gemm"),
        ]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", texts)
        for step in range(6):
            at = 1_000_000 + step * 12_000_000
            launched, synchronized, single = 10 * step + 1, 10 * step + 2, 10 * step + 3
            database.execute(
                "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, NULL)", (at, at + 11_900_000, f"step {step}", thread)
            )
            for start, end, correlation, name in (
                (at + 50_000, at + 60_000, single, 1),
                (at + 100_000, at + 160_000, launched, 1),
                (at + 200_000, at + 11_050_000, synchronized, 2),
            ):
                row = (start, end, thread, correlation, name)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row)
            row = (at + 70_000, at + 90_000, 0, 7, single, 77 << 24, 3, 4)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            row = (at + 200_000, at + 11_000_000, 0, 7, launched, 77 << 24, step)
            if not recorded:
                continue
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        database.commit()


def without_kernels(runtime: str, category: str, device_types: str):
    """Launches of an accelerator whose device work was not recorded."""

    def make(folder: Path):
        made = MadeTrace(None, 1, device=None)
        for step in range(5):
            at = step * 10_000.0
            made.step(step, at, at + 9_900)
            for index in range(40):
                made.op("aten::mm", at + 200 * index + 10, at + 200 * index + 60)
                made.add(
                    category, runtime, at + 200 * index + 20, at + 200 * index + 30, correlation=made.correlation()
                )
        made.write(folder)

    return make


def merged(folder: Path):
    """Four ranks' traces in one file, as a merging script leaves them: processes renumbered. Rank 2 is late."""
    events = []
    for rank in range(4):

        class Late(Loop):
            def reduce(self, number, late=rank == 2):
                if late:
                    self.product(3000)
                kernel = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
                self.communicates(300 if late else 3300, kernel, "allreduce")

        made = Late(rank, 4).make()
        for event in made.events:
            event["pid"] = f"rank{rank}_{event['pid']}"
            if "device" in event.get("args", {}):
                event["args"]["device"] = rank
        events += made.events
    data = MadeTrace(None, 4, device=H100).data()
    data.pop("distributedInfo", None)
    write(data | {"traceEvents": events}, folder / "merged.json")


def warm_up(folder: Path):
    """A range of the warm-up, one of what is measured; no steps. In the measured one the host sleeps between batches."""
    loop = Loop(None, 1)
    began = loop.host
    loop.one_step(0)
    loop.made.annotation("warmup", began, loop.host)
    loop.place.gap(500)
    began = loop.host
    for number in range(8):
        loop.one_step(number + 1)
        loop.host_works(6000, "bench.py(31): postprocess", "python_function")
    loop.made.annotation("measure", began, loop.host)
    loop.made.write(folder)


def server(folder: Path):
    """vLLM: the host prepares each step while the GPU idles."""
    made = MadeTrace(None, 1, device=H100)
    at = 100.0
    for step in range(20):
        began = at
        made.frame("vllm/v1/core/sched/scheduler.py(180): schedule", at, at + 9_000)
        at += 9_000
        made.graph([(BF16_GEMM, at + 20 + 100 * index, at + 115 + 100 * index) for index in range(60)], at + 10)
        made.sync(at + 30, at + 6_100, "cudaEventSynchronize")
        at += 6_150
        made.annotation(f"execute_context_0(0)_generation_{step + 4}({step + 4})", began, at)
        at += 50
    made.write(folder)


def orders(folder: Path):
    """Rank 1 reduces the two heads' gradients in the other order."""
    for rank in range(2):

        class Other(Loop):
            def reduce(self, number, swapped=rank == 1):
                calls = [(GATHER, "_allgather_base"), (SCATTER, "_reduce_scatter_base")]
                for kernel, name in reversed(calls) if swapped else calls:
                    self.communicates(900, kernel, name)

        Other(rank, 2).make().write(folder)


def private_pool(folder: Path):
    made = MadeSnapshot()
    made.step(1)
    held = [made.alloc(2 * GIB, frames=forward_stack(12)) for _ in range(3)]
    pools = [made.segment(4 * GIB, pool=(0, 5)) for _ in range(4)]
    for pool in pools:
        block = made.alloc(3 * GIB, at=pool, frames=forward_stack(44, "capture"))
        made.free(block)
    made.step(2)
    made.alloc(1 * GIB, frames=LOSS)
    made.free(*held)
    made.write(folder)


def stream_held(folder: Path):
    """record_stream on buffers that a copy stream reads: they wait at the peak."""
    made = MadeSnapshot()
    made.alloc(2 * GIB, frames=frames("/home/me/model.py:1 __init__", "/home/me/train.py:40 main"))
    waiting = []
    for number in range(1, 4):
        made.step(number)
        held = made.alloc(2 * GIB, frames=forward_stack(12))
        for _ in range(3):
            buffer = made.alloc(3 * GIB, frames=frames("/home/me/prefetch.py:20 preload", "/home/me/train.py:40 main"))
            made.give_back(buffer)
            waiting.append(buffer)
        logits = made.alloc(64 * MIB, frames=LOSS)
        made.free(held, logits)
        made.complete(*waiting)
        waiting.clear()
    made.write(folder)


def second_device_fails(folder: Path):
    first, second = MadeSnapshot(), MadeSnapshot()
    first.step(1)
    first.alloc(40 * GIB, frames=forward_stack(9))
    second.alloc(70 * GIB, frames=forward_stack(12))
    second.out_of_memory(12 * GIB, 6 * GIB, frames=LOSS)
    folder.mkdir(parents=True, exist_ok=True)
    data = first.data()
    other = second.data()
    data["device_traces"] += other["device_traces"]
    data["segments"] += [segment | {"device": 1} for segment in other["segments"]]
    write_snapshot(data, folder / "snapshot.pickle")


def growing(folder: Path):
    made = MadeSnapshot()
    made.alloc(GIB, frames=frames("/home/me/model.py:1 __init__", "/home/me/train.py:40 main"))
    for number in range(1, 9):
        made.step(number)
        held = [made.alloc(GIB, frames=forward_stack(12)) for _ in range(3)]
        made.alloc(300 * MIB, frames=frames("/home/me/train.py:71 log_loss", "/home/me/train.py:40 main"))
        made.free(*held, frames=BACKWARD)
    made.write(folder)


def shattered(folder: Path):
    """Segments of 512 MiB, each kept by 8 MiB; a request of 2 GiB then fails with 6 GiB free inside."""
    made = MadeSnapshot()
    made.step(1)
    parts = []
    for _ in range(16):
        base = made.segment(512 * MIB)
        small = made.alloc(8 * MIB, at=base, frames=forward_stack(12))
        parts.append((small, made.alloc(500 * MIB, at=base + 8 * MIB, frames=forward_stack(13))))
    made.step(2)
    made.free(*(large for _, large in parts), frames=BACKWARD)
    made.out_of_memory(2 * GIB, GIB, frames=LOSS)
    made.write(folder)


def clean_snapshot(folder: Path):
    made = MadeSnapshot()
    made.alloc(2 * GIB, frames=frames("/home/me/model.py:1 __init__", "/home/me/train.py:40 main"))
    moments = None
    for number in range(1, 5):
        made.step(number)
        held = [made.alloc(GIB, frames=forward_stack(10 + index)) for index in range(8)]
        gradients = made.alloc(2 * GIB, frames=BACKWARD)
        made.free(*reversed(held), frames=BACKWARD)
        moments = moments or made.alloc(4 * GIB, frames=STEP)
        made.free(gradients, frames=STEP)
    made.write(folder)


def clean_ranks(folder: Path):
    class Overlapping(Loop):
        def reduce(self, number):
            kernel = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            self.made.collective(self.gpu - 3000, self.gpu - 300, self.host - 30, elements=2**24, kernel=kernel)

    for rank in range(2):
        Overlapping(rank, 2).make().write(folder)


INCONCLUSIVE = "INCONCLUSIVE"


@dataclass(frozen=True)
class Cause:
    """How it is planted and which answers name it; none: a clean run."""

    kind: str  # of the issue of causes: what was not read, which range stands for all, ...
    codes: tuple[str, ...]
    make: Callable[[Path], object]
    true_besides: tuple[str, ...] = ()  # what a report may say for certain besides: true as well, and less costly


MADE = {
    "waits between graphs at nsys' default level": Cause("A1", ("sync-in-step",), graph_at_default),
    "graphs that nsys did not record": Cause("A1", (INCONCLUSIVE,), partial(graph_at_default, recorded=False)),
    "XPU launches without kernels": Cause("A1", (INCONCLUSIVE,), without_kernels("urEnqueueKernelLaunch", "xpu_runtime", "xpu")),
    "MUSA launches without kernels": Cause("A1", (INCONCLUSIVE,), without_kernels("musaLaunchKernel", "privateuse1_runtime", "musa")),
    "HIP launches without kernels": Cause("A1", (INCONCLUSIVE,), without_kernels("hipLaunchKernel", "cuda_runtime", "hip")),
    "two GPUs take turns": Cause("A2", ("stream-waits",), two_gpus),
    "a late rank in a merged file": Cause("A2", ("straggler",), merged),
    "a sleeping host in a measured range": Cause("A2", ("host-gaps",), warm_up),
    "OOM on the second device": Cause("A2", ("out-of-memory",), second_device_fails),
    "a loader without marks": Cause("A3", ("starved-loader",), looped(UnmarkedLoader)),
    "graph capture in each step": Cause("A3", ("graph-capture",), looped(CapturesEachStep)),
    "Adam on the host": Cause("A3", ("cpu-optimizer",), looped(AdamOnHost)),
    "small gaps": Cause("A3", ("short-gaps", "launch-bound", "host-gaps"), looped(SmallGaps)),
    "Python in a backward": Cause("A3", ("python-in-function",), looped(PythonBackward)),
    "clipping with item": Cause("A3", ("clip-on-host", "sync-in-step"), looped(ClipsWithItem)),
    "loss read before backward": Cause("A3", ("sync-in-step",), looped(ReadsLoss)),
    "cudaMalloc in each layer": Cause("A3", ("allocator-stalls",), looped(AllocatesEachStep)),
    "saving in each step": Cause("A3", ("save-in-step",), looped(SavesEachStep)),
    "evaluating in each step": Cause("A3", ("save-in-step", "forward-without-backward"), looped(EvaluatesEachStep)),
    "start-up in the first step": Cause("A3", ("startup-in-step", "one-time-costs"), looped(StartsUp)),
    "collecting garbage": Cause("A3", ("gc-pauses",), looped(CollectsGarbage)),
    "experts' exchange": Cause("A4", ("exposed-experts",), looped(ExpertsExchanged, rank=0, world_size=8)),
    "FSDP's gathers in sight": Cause("A4", ("parameter-gather",), looped(GathersInSight, rank=0, world_size=8)),
    "NCCL on the compute stream": Cause("A4", ("no-overlap", "exposed-communication"), looped(ReducesOnComputeStream, rank=0, world_size=8)),
    "a product's own all-reduce": Cause("A4", ("exposed-tensor-parallel", "exposed-communication"), looped(UnknownCollective, rank=0, world_size=8)),
    "exchange in the optimizer": Cause("A4", ("optimizer-communication",), looped(ReducesInOptimizer, rank=0, world_size=8)),
    "private pools": Cause("A4", ("private-pool",), private_pool),
    "blocks held for a stream": Cause("A4", ("awaiting-free",), stream_held),
    "memory in pieces": Cause("A4", ("fragmentation", "out-of-memory"), shattered),
    "memory that grows": Cause("A4", ("memory-growth",), growing),
    "offloaded activations": Cause("A4", ("stream-waits", "exposed-copies"), looped(WaitsForEvents)),
    "a server's scheduler": Cause("A5", ("host-gaps", "sync-in-step"), server),
    "collectives in another order": Cause("A8", ("collective-order",), orders, ("no-overlap",)),
    "a rank late at times beside a straggler": Cause(
        "A8",
        ("straggler",),
        moving([[0, 6000 if step % 5 == 2 else 0, 0, 2000] for step in range(20)]),
        ("late-at-times",),
    ),
    "a late rank through two groups": Cause("A8", ("straggler",), moving([[0, 0, 3000, 0]] * 12, pairs=True)),
    "different ranks late in some steps": Cause(
        "A8", ("late-in-turns",), moving([[3000 if step % 6 == 3 * rank + 1 else 0 for rank in (0, 1)] for step in range(18)])
    ),
    "a second forward": Cause("A9", ("forward-without-backward",), looped(SecondForward)),
    "fp64 in a block": Cause("A9", ("fp64-compute",), looped(DoubleBlock)),
    "contiguous copies": Cause("A9", ("layout-copies", "copy-share"), looped(Copies)),
    "anomaly mode": Cause("A9", ("debug-switches",), looped(Anomaly)),
    "needless recomputation": Cause("A9", ("needless-recompute",), looped(Recomputes)),
    "fp32 products": Cause("others", ("fp32-products",), looped(SingleProducts)),
    "an optimizer in a loop": Cause("others", ("unfused-optimizer",), looped(OneByOneOptimizer)),
    "pageable copies": Cause("others", ("unpinned-copies",), looped(PageableCopies)),
    "clean: a GPU": Cause("clean", (), looped(Loop)),
    "clean: two ranks": Cause("clean", (), clean_ranks),
    "clean: a snapshot": Cause("clean", (), clean_snapshot),
}  # fmt: skip


def answers(report: Report) -> list[str]:
    """What the report names, what counts most first."""
    found = [finding.code for finding in report.findings]
    return [INCONCLUSIVE, *found] if report.verdict.bound == "inconclusive" else found


def judge(report: Report, codes: tuple[str, ...]) -> str:
    found = answers(report)
    if not codes:
        return "false" if any(finding.certain for finding in report.findings) else "silent"
    places = [found.index(code) for code in codes if code in found]
    if places:
        return ("first", "second")[min(places)] if min(places) < 2 else "later"
    return "symptom" if found else "missed"


WATCHED, MARKED, UNMARKED, STACKS = "watch", "trace", "unmarked trace", "trace with stacks"
OWN = "--profile"
IN_TRACE = {MARKED: [], UNMARKED: ["--unmarked"], STACKS: ["--stacks"]}
PROGRAMS = TESTS / "support" / "planted_programs.py"
TRAINER = REPO / "pretrain_gpt.py"
LOADER = ("starved-loader",)
SAVING = ("save-in-step", "save-and-eval")
GAPS = ("host-gaps",)
REAL = (  # program of planted_programs.py, how it is recorded, kind, codes
    ("slow_samples", WATCHED, "A3", LOADER),
    ("slow_samples", UNMARKED, "A3", LOADER),
    ("slow_samples", MARKED, "A3", LOADER),
    ("slow_collate", WATCHED, "A3", LOADER),
    ("slow_collate", UNMARKED, "A3", LOADER),
    ("slow_worker", UNMARKED, "A3", LOADER),
    ("hand_made_loader", WATCHED, "A3", (*LOADER, *GAPS)),
    ("hand_made_loader", STACKS, "A3", LOADER),
    ("save_each_step", WATCHED, "A3", SAVING),
    ("save_each_step", STACKS, "A3", SAVING),
    ("evaluate_each_step", WATCHED, "A9", (*SAVING, "forward-without-backward")),
    ("evaluate_each_step", STACKS, "A9", (*SAVING, "forward-without-backward")),
    ("anomaly", WATCHED, "A9", ("debug-switches",)),
    ("anomaly", UNMARKED, "A9", ("debug-switches",)),
    ("fp64_block", MARKED, "A9", ("fp64-compute",)),
    ("fp64_model", WATCHED, "A9", ("fp64-compute",)),
    ("contiguous_copies", MARKED, "A9", ("layout-copies", "copy-share")),
    ("second_forward", WATCHED, "A9", ("forward-without-backward",)),
    ("second_forward", STACKS, "A9", ("forward-without-backward",)),
    ("lbfgs_slow_closure", WATCHED, "A2", GAPS),
    ("lbfgs_slow_closure", MARKED, "A2", GAPS),
    ("python_backward", WATCHED, "A3", ("python-in-function",)),
    ("python_backward", MARKED, "A3", ("python-in-function",)),
    ("gc_thresholds", WATCHED, "A9", ("gc-pauses",)),
    ("gc_thresholds", STACKS, "A9", ("gc-pauses",)),
    ("sleep_in_forward", WATCHED, "A3", GAPS),
    ("sleep_in_forward", UNMARKED, "A3", GAPS),
    ("python_metrics", STACKS, "A3", (*GAPS, "log-stalls")),
    ("python_metrics", UNMARKED, "A3", GAPS),
    ("loop_optimizer", WATCHED, "others", ("unfused-optimizer",)),
    ("loop_optimizer", MARKED, "others", ("unfused-optimizer",)),
    ("kept_zeros", WATCHED, "others", ("zeroed-gradients",)),
    ("same_batch", WATCHED, "A9", ("repeated-batch", "same-batch")),
    ("leak", WATCHED, "others", ("memory-growth",)),
    ("recompiling", WATCHED, "others", ("recompilation",)),
    ("needless_checkpoint", WATCHED, "A9", ("needless-recompute",)),
    ("needless_checkpoint", MARKED, "A9", ("needless-recompute",)),
    ("many_threads", WATCHED, "A7", ("too-many-threads",)),
    ("many_workers", WATCHED, "others", ("too-many-workers",)),
    ("clipped_hard", WATCHED, "A9", ("hard-clipping",)),
    ("prints_a_lot", WATCHED, "A3", (*GAPS, "log-stalls")),
    ("unused_parameters", WATCHED, "A9", ("unused-parameters",)),
    ("unused_parameters", MARKED, "A9", ("unused-parameters",)),
    ("late_in_turns", WATCHED, "A8", ("late-in-turns",)),
    ("late_every_fifth", WATCHED, "A8", ("late-at-times",)),
    ("slow_rank", WATCHED, "A8", ("straggler",)),
    ("slow_rank", MARKED, "A8", ("straggler",)),
    ("reduce_each_micro_batch", WATCHED, "others", ("reduce-every-micro-batch",)),
    ("object_gathers", WATCHED, "A9", ("process-wait", "exposed-communication")),
    ("sums_by_hand", WATCHED, "A4", ("no-overlap", "exposed-communication", "small-buckets")),
    ("sums_by_hand", MARKED, "A4", ("no-overlap", "exposed-communication", "small-buckets")),
    ("sharded", WATCHED, "A4", ("parameter-gather", "exposed-communication", "needless-sharding")),
    ("lightning_slow_step", WATCHED, "A2", GAPS),
    ("lightning_slow_loader", WATCHED, "A3", LOADER),
    ("hf_slow_collator", WATCHED, "A3", LOADER),
    ("hf_saves_each_step", WATCHED, "A3", SAVING),
    ("accelerate_slow_loader", WATCHED, "A3", LOADER),
    ("accelerate_slow_loader", UNMARKED, "A3", LOADER),
    ("clean_loop", WATCHED, "clean", ()),
    ("clean_loop", MARKED, "clean", ()),
    ("clean_loop", UNMARKED, "clean", ()),
    ("clean_cnn", WATCHED, "clean", ()),
    ("clean_nanogpt", WATCHED, "clean", ()),
    ("clean_nanogpt", STACKS, "clean", ()),
    ("clean_ddp", WATCHED, "clean", ()),
    ("clean_ddp", MARKED, "clean", ()),
    ("own_trainer", OWN, "clean", ()),
    ("own_trainer_of_two_ranks", OWN, "clean", ()),
    ("clean_lightning", WATCHED, "clean", ()),
    ("clean_hf", WATCHED, "clean", ()),
)
# What a recording does not hold; docs/explaining.md says so, too
NOT_SHOWN = {
    ("gc_thresholds", STACKS): "torch.profiler records collections only if asked (record_python_gc_info)",
    ("same_batch", WATCHED): "neither a trace nor a step's record tells batches apart",
    ("needless_checkpoint", MARKED): "a trace of a CPU does not say how much memory was free",
}


def list_own_trainer_flags(folder: Path) -> list[str]:
    """A run of this repository's trainer, profiled by its own flags as README shows it."""
    words = (
        "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 --mock-data "
        "--tokenizer-type NullTokenizer --vocab-size 511 --num-workers 0 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 "
        "--train-iters 30 --eval-iters 0 --log-interval 5 --profile --use-pytorch-profiler --profile-ranks -1 "
        "--profile-step-start 15 --profile-step-end 21"
    )
    return [*words.split(), "--run-dir", str(folder), "--tensorboard-dir", str(folder / "tensorboard")]


def run_program(program: str, how: str, folder: Path):
    """Run one of planted_programs.py, or this repository's trainer; what is recorded lies in `folder` afterwards."""
    # late: it imports torch
    from support.planted_programs import RANKS

    python = Path(sys.executable)
    launch = [str(python), str(PROGRAMS), program]
    if how == OWN:
        launch = [str(python), str(TRAINER), *list_own_trainer_flags(folder)]
    if program in RANKS or program == "own_trainer_of_two_ranks":
        launch = [str(python.with_name("torchrun")), "--standalone", "--nproc-per-node", "2", *launch[1:]]
    if how == WATCHED:
        watch = [str(python.with_name("megatron-lite")), "watch", "--no-report", "--run-dir", str(folder), "--"]
        launch = [*watch, *launch]
    elif how != OWN:
        launch += ["--trace", str(folder), *IN_TRACE[how]]
    # a second thread gains such small models nothing, and spins where other jobs have the cores
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if how == OWN else None
    ended = subprocess.run(launch, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    if ended.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"{program}, {how}: {ended.stderr[-2000:]}")


# One small layer, so that what is planted is large beside it.
TRAINING = (
    "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 8 --train-iters 16 --lr 1e-4 "
    "--bf16 --tokenizer-type NullTokenizer --vocab-size 1023 --mock-data --num-workers 0 --eval-iters 0 --log-interval 2 "
    "--profile --use-pytorch-profiler --profile-step-start 9 --profile-step-end 12 --profile-ranks -1 "
    "--pytorch-profiler-collect-shapes --no-report"
)


def list_training_flags(own: str, has_bf16_products: bool) -> list[str]:
    """TRAINING with a cause's own flags behind it; !--flag takes one out."""
    words = own.split()
    left_out = {word[1:] for word in words if word.startswith("!")}
    if not has_bf16_products:
        # bf16 without units for it would be the most costly cause of all
        left_out.add("--bf16")
    kept = [word for word in TRAINING.split() if word not in left_out]
    return [*kept, *(word for word in words if not word.startswith("!"))]


def run_training(name: str, folder: Path):
    """Run one of planted_trainings.py; what is recorded lies in `folder` afterwards."""
    # late: it imports torch
    from planted_trainings import CAUSES, CLEAN_RUNS, has_bf16_products

    planted = (CAUSES | CLEAN_RUNS)[name]
    python = Path(sys.executable)
    launch = [str(python)]
    if planted.ranks > 1:
        launch = [str(python.with_name("torchrun")), "--standalone", "--nproc-per-node", str(planted.ranks)]
    flags = list_training_flags(planted.flags, has_bf16_products())
    launch += [str(TESTS / "planted_trainings.py"), name, *flags, "--run-dir", str(folder)]
    ended = subprocess.run(launch, check=False, capture_output=True, text=True, timeout=LIMIT_S, cwd=REPO)
    if ended.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"{name}: {ended.stderr[-2000:]}")


def list_real_causes() -> dict[str, Cause]:
    """Every program in each way that it is recorded, and every training that this machine can show."""
    # late: it imports torch
    from planted_trainings import CAUSES, CLEAN_RUNS, NEED_BF16_PRODUCTS, has_bf16_products

    causes = {
        f"{program}, {how}": Cause(kind, codes, partial(run_program, program, how))
        for program, how, kind, codes in REAL
    }
    for name, planted in CAUSES.items():
        if name not in NEED_BF16_PRODUCTS or has_bf16_products():
            causes[f"training: {name}"] = Cause("training", (planted.code,), partial(run_training, name))
    for name in CLEAN_RUNS:
        causes[f"training: {name}"] = Cause("clean", (), partial(run_training, name))
    return causes


def row(name: str, cause: Cause, report: Report) -> list[str]:
    """CAUSE | KIND | EXPECTED | FINDINGS, those that are certain with a star | VERDICT | RESULT."""
    found = " ".join(finding.code + "*" * finding.certain for finding in report.findings)
    said = f"{report.verdict.word} ({report.verdict.confidence})"
    return [name, cause.kind, " or ".join(cause.codes) or "none", found or "none", said, judge(report, cause.codes)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only causes with this in their names")
    parser.add_argument(
        "--real", type=Path, help="folder for runs of programs and trainings; those that are there are not run"
    )
    given = parser.parse_args()
    causes = dict(MADE)
    if given.real:
        causes |= list_real_causes()
    counts: Counter = Counter()
    with tempfile.TemporaryDirectory() as passing:
        for name, cause in causes.items():
            if given.k not in name:
                continue
            place = (Path(passing) if name in MADE else given.real) / name.replace(", ", "-").replace(
                ": ", "-"
            ).replace(" ", "_")
            if not place.exists():
                if name in MADE:
                    place.mkdir()
                try:
                    cause.make(place)
                except RuntimeError as error:
                    counts["failed"] += 1
                    print(f"{name} | {cause.kind} | failed: {error}", flush=True)
                    continue
            report = analyze([place])
            cells = row(name, cause, report)
            if cells[-1] in ("symptom", "missed") and tuple(name.split(", ")) in NOT_SHOWN:
                cells[-1] = "not shown"
            counts[cells[-1]] += 1
            certain = [finding for finding in report.findings if finding.certain]
            expected = {*cause.codes, *cause.true_besides}
            counts["certain findings"] += len(certain)
            counts["certain findings of something else"] += sum(one.code not in expected for one in certain)
            print(" | ".join(cells), flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
