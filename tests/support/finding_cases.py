"""For each rule a made run that it must find, and a near miss that it must not: CODE -> (trigger, near miss).

Both are functions of an empty folder, into which they write traces, run.json and steps.jsonl, or a snapshot.
"""

import json
from pathlib import Path

import msgspec

from megatron_lite.config.world import World
from megatron_lite.formats.hardware_record import ClockLimit
from megatron_lite.formats.run_record import Prediction
from megatron_lite.planner.categories import predict_categories
from support.command_lines import plan as resolved_plan
from support.snapshot_maker import LOSS, MadeSnapshot
from support.trace_maker import AUTOGRAD, COMPUTE_STREAM, GLOO, MadeTrace
from support.training_maker import (
    ADD,
    BF16_GEMM,
    CAST,
    FP32_GEMM,
    SIMT_GEMM,
    SOFTMAX,
    STEPS,
    Step,
    cpu,
    gpu,
    ordinary_steps,
    rank_lines,
    run,
)

FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, at::detail::Array<char*, 1>>"
MIB, GIB = 2**20, 2**30
THINK, PINNED = "train.py(7): think", "Memcpy HtoD (Pinned -> Device)"
PAGEABLE = "Memcpy HtoD (Pageable -> Device)"
SCORES = [[4, 16, 2048, 2048], []]
ODD = [[8192, 1000], [1000, 4000]]
ODD_SHAPE = {"hidden_size": 1000, "ffn_hidden_size": 4000}
LOOP = ("aten::lerp_", "aten::addcmul_", "aten::sqrt", "aten::addcdiv_")
# two ranks with half of the experts each, which are nearly all of the model
EP2 = {
    "shape": {
        "experts": {"number": 2, "topk": 2, "ffn_hidden_size": 65536, "layers": [True] * 24, "capacity_factor": 1.0}
    },
    "plan": {"layout": {"tensor": 1, "context": 1, "data": 2, "pipeline": 1, "expert": 2, "expert_tensor": 1}},
}
HOT = int(ClockLimit.HW_SLOWDOWN | ClockLimit.HW_THERMAL)
CAPPED = int(ClockLimit.SW_POWER_CAP)
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
THIN = [[2048, 4096], [4096, 16384]]  # 0.28 ms at the peak


def prepared(write):
    """A function of a folder (or a step) and more becomes one of the rest, which returns a function of the folder."""
    return lambda *args, **parts: lambda target: write(target, *args, **parts)


on_gpu, on_cpu, recorded = prepared(gpu), prepared(cpu), prepared(run)


def pipeline_run(micro_batches: int, waits_ms: list[float], forward_ms: tuple[float, ...] = (), **stage):
    """A run of a rank per stage, whose typical steps of 10 ms wait so long for other stages. Four have 6 layers each."""
    stages = len(waits_ms)
    layout = {"tensor": 1, "context": 1, "data": 1, "pipeline": stages, "pipeline_rank": stages - 1}
    plan = {"layout": layout, "stage": {"number": stages - 1, "stages": stages, "chunks": [[0, 6]], **stage}}
    if stages > 1:
        plan |= {"stages_of_ranks": list(range(stages)), "stage_layers": [6] * stages}
    lines = rank_lines(list(forward_ms) or [3.0] * stages)
    for line in lines:
        line["phases_ms"] = line["phases_ms"] | {"pipeline_wait": waits_ms}
    return recorded(ranks=lines, world=stages, batch=4 * micro_batches, plan=plan)


def sampled(forward_ms=(3.0, 3.0), **figures):
    """A run of two ranks whose hardware was sampled 20 times per console line."""
    hardware = {"samples": [20], "idle": [0], "max_sm_clock_mhz": [1980]} | figures
    return recorded(ranks=rank_lines(list(forward_ms), hardware=hardware))


@prepared
def both(folder: Path, *parts):
    """Several things of one run, into one folder."""
    for part in parts:
        part(folder)


@prepared
def waits(step: Step, us: float):
    """The host waits until the device has nothing left, and then takes `us` to go on."""
    asked = step.host
    began, _ = step.gap(us)
    step.made.sync(asked, began + us / 2, operator="aten::item")


@prepared
def works_behind_a_wait(step: Step, us: float):
    """The host waits until the device has nothing left, and then works for `us` without a call to it."""
    asked = step.host
    began, _ = step.gap(us)
    step.made.sync(asked, began + 8, operator="aten::item")


@prepared
def saves_to_the_host(step: Step, copies: int, frame: str = "torch/serialization.py(944): save"):
    """Weights are copied to the host one after the other, and nothing else runs; without a frame nothing says why."""
    began = max(step.host, step.gpu)
    for index in range(copies):
        at = began + 400 * index
        step.made.copy("Memcpy DtoH (Device -> Pageable)", at + 10, at + 390, at, 2**20)
    step.host = began + 400 * copies
    step.gpu = step.host + 12
    if frame:
        step.made.frame(frame, began - 1, step.host)


def waits_with_a_full_queue(step: Step):
    step.made.sync(step.host, step.host + 30, operator="aten::item")


@prepared
def host_does(step: Step, name: str, us: float, category="python_function", thread=100):
    """The device is idle for `us` while the host is in `name`."""
    start, end = step.gap(us)
    step.made.add(category, name, start, end, thread)


@prepared
def in_the_first_step(step: Step, change):
    """The change in the first step alone; to be made before its data."""
    if not step.made.events:
        change(step)


@prepared
def spaced_kernels(step: Step, number: int, gap_us: float):
    """Launched long before they run, each so long after the one before."""
    for _ in range(number):
        step.gpu += gap_us
        step.kernel(ADD, 30, "aten::add")


@prepared
def loads(step: Step, us: float):
    start, end = step.gap(us)
    step.made.annotation("data", start, end)


@prepared
def small_kernels(step: Step, number: int, us: float, every_us: float):
    """Launched one by one, each after the one before has ended."""
    for _ in range(number):
        step.host = max(step.host, step.gpu) + every_us
        step.kernel(ADD, us, "aten::add", late=True)


@prepared
def small_copies(step: Step, number: int):
    for index in range(number):
        start = step.gpu + 2 * index
        step.made.copy("Memcpy HtoD (Pinned -> Device)", start, start + 1, step.host, 512, call_end=step.host + 6)
        step.host += 8
    step.gpu += 2 * number


@prepared
def waits_for_stream(step: Step, us: float):
    """The next kernel is launched in time and waits for an event of another stream."""
    step.made.runtime("cudaStreamWaitEvent", step.host, step.host + 2)
    step.host += 3
    step.gpu += us


@prepared
def zeroes(step: Step, where: str):
    began = step.host
    for _ in range(8):
        step.kernel(FILL, 40, "aten::zero_")
    step.made.annotation(where, began, step.host)


def micro_batch_run(**more):
    return recorded(batch=32, world=1, **more)


def cpu_reads(made, at):
    for index in range(84):
        made.op("aten::item", at + 3000 + index / 2, at + 3000.4 + index / 2)


@prepared
def python_works(folder: Path, us: float, name: str | None = None, every: int = 1):
    """On a CPU: in forward no operator for so long, in every n-th step; operators take 6,000 us."""
    made = MadeTrace(0, 1, device=None)
    host = 0.0
    for index in range(STEPS):
        at, works = host, us if index % every == 0 else 0.0
        made.op("aten::sum", host, host + 3_000)
        if name and works:
            made.frame(name, host + 3_000, host + 3_000 + works)
        made.annotation("forward", host, host + 3_010 + works)
        host += 3_020 + works
        made.op("aten::mm", host, host + 3_000)
        made.annotation("backward", host, host + 3_000)
        host += 3_000
        made.step(10 + index, at, host)
    made.write(folder)


@prepared
def reads_states(
    folder: Path,
    tensors: int = 6,
    us: float = 2_000,
    computes: bool = False,
    thinks_us: float = 0,
    gradients: int = 6,
):
    """On a CPU: backward adds to gradients; behind 6,000 us of operators tensors are detached, and `us` go by.

    Then an operator computes, and Python works for `thinks_us`.
    """
    made = MadeTrace(0, 1, device=None)
    at = 0.0
    for index in range(STEPS):
        made.op("aten::mm", at + 10, at + 6_000)
        for node in range(gradients):
            began = at + 3_000 + 20 * node
            made.op("torch::autograd::AccumulateGrad", began, began + 5, AUTOGRAD)
        for tensor in range(tensors):
            began = at + 6_010 + 20 * tensor
            made.op("aten::detach", began, began + 18)
            if computes:
                made.op("aten::mul_", began + 18.5, began + 19.5)
        end = at + 6_010 + 20 * tensors + us
        made.op("aten::sum", end, end + 10)
        end += thinks_us + 20
        made.step(10 + index, at, end)
        at = end
    made.write(folder)


@prepared
def allocates(folder: Path, rises: list[int], between: int = 0):
    """A trace whose steps begin with so many MiB more each, and need 64 MiB for a while."""
    made = MadeTrace(0, 1, device="NVIDIA H100 80GB HBM3")
    level = 1000
    for index, rise in enumerate(rises):
        at = 10_000.0 * index
        made.kernel(BF16_GEMM, at + 50, at + 9_900, at + 10)
        level += rise
        made.memory(at + 100, rise * MIB, level * MIB)
        made.memory(at + 200, 64 * MIB, (level + 64 + between * (index % 2)) * MIB)
        made.memory(at + 5_000, -64 * MIB, level * MIB)
        made.step(10 + index, at, at + 9_990)
    made.write(folder)


@prepared
def python_in_pieces(folder: Path, number: int, us: float):
    """On a CPU: in forward so many pieces without an operator; operators take 6,000 us."""
    made = MadeTrace(0, 1, device=None)
    host = 0.0
    for index in range(STEPS):
        at = host
        for _ in range(number):
            made.op("aten::sum", host, host + 6_000 / number)
            host += 6_000 / number + us
        made.annotation("forward", at, host)
        made.step(10 + index, at, host)
        host += 10
    made.write(folder)


@prepared
def gloo_after_backward(folder: Path, number: int, elements: int | None = None):
    """On a CPU: a rank of two whose backward ends with so many collectives of 100 us; operators take 6,000 us."""
    made = MadeTrace(0, 2, device=None)
    shapes = {"Input Dims": [[elements]], "Input type": ["float"]} if elements else {}
    host = 0.0
    for index in range(STEPS):
        at = host
        made.op("aten::mm", host, host + 3_000)
        made.annotation("forward", host, host + 3_000)
        made.op("aten::mm", host + 3_010, host + 6_010)
        for one in range(number):
            began = host + 6_010 + 100 * one
            made.add("user_annotation", "gloo:all_reduce", began, began + 100, GLOO, **shapes)
        made.annotation("backward", host + 3_005, host + 6_010 + 100 * number)
        host += 6_020 + 100 * number
        made.step(10 + index, at, host)
    made.write(folder)


@prepared
def small_operators(folder: Path, busy_us: float):
    """200 of them, every 25 us, in a step without anything else."""
    made = MadeTrace(0, 1, device=None)
    for index in range(STEPS):
        at = index * 5_000.0
        made.step(10 + index, at, at + 5_000)
        made.annotation("forward", at, at + 5_000)
        for one in range(200):
            made.op("aten::add", at + 25 * one, at + 25 * one + busy_us)
    made.write(folder)


def compiles(made, at):
    made.op("_compile.compile_inner (dynamo_timed)", at + 100, at + 2500)


NODE = "autograd::engine::evaluate_function: "


def checks_for_nan(made, at, every=1):
    """Anomaly mode: a check after each operation of backward; with every=5 hooks at few of them."""
    for index in range(20):
        start = at + 3500 + 100 * index
        made.op(f"{NODE}MulBackward0", start, start + 90)
        made.op("MulBackward0", start + 1, start + 30)
        if index % every == 0:
            made.op("aten::isnan", start + 40, start + 60)
            made.op("aten::_is_any_true", start + 61, start + 80)
            made.op("aten::item", start + 81, start + 83)


def hooks_look_for_nan(made, at):
    checks_for_nan(made, at, every=5)


@prepared
def launches_wait(folder: Path, us: float):
    """Each launch call of 30 kernels of 100 us takes so long."""
    made = MadeTrace(0, 1, device="NVIDIA H100 80GB HBM3")
    for index in range(STEPS):
        at = 10.0 + 5_000 * index
        made.step(10 + index, at, at + 4_900)
        for one in range(30):
            start = at + 150 * one
            made.kernel(BF16_GEMM, start + 4, start + 104, start, call_end=start + us)
    made.write(folder)


def searches_for_unused(made, at):
    made.op("torch.distributed.ddp.reducer::search_unused_parameters", at + 3010, at + 3030)


BLOCK = [[[512, 64], [256, 64]], [[512, 256], [64, 256]]] * 3


@prepared
def passes(folder: Path, number: int, sequences=(100, None), weights=BLOCK, shapes=True, gpu=False, cast=False):
    """Forward passes of 6 products of 300 us, then one backward, whose operations belong to the first sequence numbers.

    sequences: the first sequence number of each pass; None: under no_grad. A step takes about 10,000 us. cast: the first
    pass casts the weights for the second, too, so that backward goes through its casts.
    """
    made = MadeTrace(0, 1, device="NVIDIA H100 80GB HBM3" if gpu else None)
    for index in range(STEPS):
        at = 10.0 + 12_000 * index
        made.step(10 + index, at, at + 11_900)
        host = at + 10
        for first in sequences[:number]:
            for place, dims in enumerate(weights):
                made.op("aten::linear", host, host + 290, dims=dims if shapes else None)
                if cast and first == sequences[0]:
                    made.op("aten::to", host + 1, host + 4, sequence=1000 * index + 700 + place)
                if first is not None:
                    made.op("aten::addmm", host + 5, host + 280, sequence=1000 * index + first + place)
                if gpu:
                    made.kernel(BF16_GEMM, host + 20, host + 290, host + 10)
                host += 300
        for place in reversed(range(len(weights))):
            node = {"sequence": 1000 * index + 100 + place, "forward_thread": 1}
            if cast:
                kept = node | {"sequence": 1000 * index + 700 + place}
                made.op(f"{NODE}ToCopyBackward0", host + 591, host + 598, AUTOGRAD, **kept)
            made.op(f"{NODE}AddmmBackward0", host, host + 590, AUTOGRAD, **node)
            made.op("AddmmBackward0", host + 2, host + 588, AUTOGRAD, **node)
            made.op("aten::mm", host + 5, host + 580, AUTOGRAD)
            if gpu:
                made.kernel(BF16_GEMM, host + 20, host + 590, host + 10, thread=AUTOGRAD)
            host += 600
        made.annotation("Optimizer.step#AdamW.step", host, host + 500)
        made.op("aten::_fused_adamw_", host + 5, host + 490)
        if gpu:
            made.kernel(ADD, host + 20, host + 490, host + 10)
    made.write(folder)


@prepared
def checkpointed(folder: Path, peak_gib: int, again=True):
    """A watched job on a GPU of 80 GiB: 6 layers, each of which runs forward again inside backward."""
    made = MadeTrace(0, 1, device="NVIDIA H100 80GB HBM3")
    for index in range(STEPS):
        at = 10.0 + 12_000 * index
        made.step(10 + index, at, at + 11_900)
        for place in range(6):
            start = at + 10 + 300 * place
            made.op("aten::linear", start, start + 290, sequence=1000 * index + place)
            made.kernel(BF16_GEMM, start + 20, start + 290, start + 10)
        for place in reversed(range(6)):
            start = at + 2_000 + 900 * (5 - place)
            node = {"sequence": 1000 * index + place, "forward_thread": 1}
            made.op(f"{NODE}AddmmBackward0", start, start + 890, AUTOGRAD, **node)
            if again:
                made.op("aten::linear", start + 5, start + 290, AUTOGRAD, sequence=1000 * index + 500 + place)
            made.kernel(BF16_GEMM, start + 20, start + 290, start + 10, thread=AUTOGRAD)
            made.op("aten::mm", start + 295, start + 880, AUTOGRAD)
            made.kernel(BF16_GEMM, start + 310, start + 880, start + 300, thread=AUTOGRAD)
    made.write(folder)
    run(folder, steps=ordinary_steps(peak_memory_bytes=peak_gib * GIB))
    record = json.loads((folder / "run.json").read_text())
    del record["plan"]
    (folder / "run.json").write_text(json.dumps(record | {"command": ["python", "train.py"]}))


@prepared
def distilled(folder: Path):
    """A teacher of another size runs without gradients before the trained pass."""
    made = MadeTrace(0, 1, device=None)
    for index in range(STEPS):
        at = 10.0 + 9_000 * index
        made.step(10 + index, at, at + 8_900)
        for place in range(6):
            made.op("aten::linear", at + 300 * place, at + 300 * place + 290, dims=[[512, 128], [128, 128]])
        for place in range(6):
            start = at + 2_000 + 300 * place
            made.op("aten::linear", start, start + 290, dims=BLOCK[place], sequence=100 * index + place)
        for place in range(6):
            start, node = at + 4_000 + 600 * place, {"sequence": 100 * index + 5 - place, "forward_thread": 1}
            made.op(f"{NODE}AddmmBackward0", start, start + 590, AUTOGRAD, **node)
    made.write(folder)


def reorders(made, at, name="aten::contiguous", us=900.0):
    """A transposed tensor is copied."""
    made.op(name, at + 3010, at + 3012 + us, dims=[[8, 512, 64]])
    made.op("aten::clone", at + 3010.5, at + 3011.5 + us)
    made.op("aten::copy_", at + 3011, at + 3011 + us)


def reorders_little(made, at):
    reorders(made, at, us=40.0)


def only_views(made, at):
    made.op("aten::reshape", at + 3010, at + 3910, dims=[[8, 512, 64]])
    made.op("aten::view", at + 3011, at + 3900)


DOUBLE = ["double", "double"]


def computes_in_fp64(made, at):
    made.op("aten::mm", at + 3010, at + 3900, dims=[[64, 64], [64, 64]], dtypes=DOUBLE)


def sums_in_fp64(made, at):
    made.op("aten::add", at + 3010, at + 3050, dims=[[64, 64], [64, 64]], dtypes=DOUBLE)
    made.op("aten::mul", at + 3055, at + 3900, dims=[[], [1]], dtypes=DOUBLE)  # numbers, not tensors


def looks_ahead(made, at):
    made.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", at + 3010, at + 3030)


def math_attention(made, at):
    made.op("aten::_scaled_dot_product_attention_math", at + 100, at + 1500)


def breaks(made, at, regions):
    for start, name in enumerate(regions):
        made.annotation(f"Torch-Compiled Region: {name}", at + 100 + 500 * start, at + 500 + 500 * start)


def more_than_a_layer_and_the_loss(made, at):
    breaks(made, at, ("0/0", "1/0", "2/0", "3/0"))


def resumes(made, at):
    made.frame("model.py(31): torch_dynamo_resume_in_forward_at_31", at + 100, at + 1000)


def layers_and_the_loss(made, at):
    breaks(made, at, ("0/0", "0/0", "1/0", "2/0"))  # two layers, the loss forward and backward


def every(n: int, value, otherwise):
    """A column that has `value` in every n-th step but the first."""
    return lambda index: value if index and index % n == 0 else otherwise


@prepared
def ranks_late(folder: Path, late_us: float, ranks: int = 3):
    """Rank 1 comes `late_us` later to its collectives; the others wait."""
    for rank in range(ranks):
        late = rank == 1
        gpu(folder, rank, ranks, reduce="late", late_us=late_us if late else 0, wait_us=0 if late else late_us)


@prepared
def moving(folder: Path, late_us: list[list[float]], pairs: bool = False):
    """Ranks that compute so much longer, by step; the all-reduce of each step begins when all have come.

    With `pairs`, two neighbors each reduce before all do, so that a late rank delays its pair first.
    """
    world = len(late_us[0])
    traces = [MadeTrace(rank, world, device="NVIDIA H100 80GB HBM3") for rank in range(world)]
    at = 10.0
    for index, late in enumerate([late_us[0], *late_us]):  # the first step does not count
        end = at + 8_000 + max(late) + 300 * (1 + pairs)
        for rank, (made, us) in enumerate(zip(traces, late)):
            computed = at + 8_000 + us
            made.kernel(BF16_GEMM, at + 20, computed, at + 5)
            made.annotation("forward", at + 1, at + 30)
            if pairs:
                pair = rank // 2
                together = at + 8_000 + max(late[2 * pair : 2 * pair + 2]) + 300
                made.collective(computed, together, at + 35, elements=2**20, group=str(1 + pair), group_size=2)
                computed = together
            made.collective(computed, end, at + 40, elements=2**20)
            made.annotation("backward", at + 31, at + 60)
            made.step(10 + index, at, end + 20)
        at += end - at + 30
    for made in traces:
        made.write(folder)


ALL_REDUCE: dict = {}


@prepared
def orders(folder: Path, second: list[dict]):
    """Two ranks; the first gathers, then reduces in each step. Both collectives are of one group and end at once."""
    for rank, calls in enumerate([[GATHER, ALL_REDUCE], second]):
        made = MadeTrace(rank, 2, device="NVIDIA H100 80GB HBM3")
        for index in range(STEPS):
            at = 10.0 + 9_000 * index
            made.kernel(BF16_GEMM, at + 20, at + 8_000, at + 5)
            for place, call in enumerate(calls):
                began = at + 8_000 + 200 * place
                made.collective(began, began + 190, at + 40 + 10 * place, elements=2**16, **call)
            made.step(10 + index, at, at + 8_950)
        made.write(folder)


@prepared
def split_layers(folder: Path, near: int, reduce="tail"):
    """Two ranks that split layers, so many on a node, and sum up for 0.8 ms without overlap."""
    group = {"pg_name": "0", "pg_desc": "mesh_tensor", "pg_size": 2, "ranks": [0, 1]}
    for rank in range(2):
        told = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": [group]}
        gpu(folder, rank, 2, reduce=reduce, header={"distributedInfo": told})
    run(folder, plan={"layout": {"tensor": 2, "pipeline": 1, "data": 1}, "world": {"size": 2, "local_size": near}})


DISPATCH = {"name": None, "kernel": "void deep_ep::internode_ll::dispatch<3, 10, 7168>(void*)"}
BROADCAST = {"name": "broadcast", "kernel": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}


@prepared
def exchanges(step: Step, us: float, collective=None):
    """A collective of `us`, while the device does nothing else."""
    step.made.collective(step.gpu, step.gpu + us, step.host + 5, thread=100, **(collective or {}))
    step.host, step.gpu = step.host + 20, step.gpu + us


GATHER = {"name": "_allgather_base", "kernel": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}


def shards(used_gib: int, reduce="tail", twice=True):
    """A rank of two that share out weights and gather them, 0.8 ms of it in sight, with 2 GiB of weights and gradients."""
    return both(
        on_gpu(reduce=reduce, collective=GATHER),
        recorded(
            steps=ordinary_steps(peak_memory_bytes=used_gib * GIB),
            parameters=GIB // 2,
            batch=32,
            plan={"sharding": {"ranks": 2, "index": 0, "gathers_twice": twice}},
        ),
    )


def cores(wait_ms, switches, cpu_ms=(6.0, 9.5)):
    """What two ranks got of their cores in steps of 10 ms."""
    return {"core_wait_ms": wait_ms, "involuntary_switches": switches, "cpu_ms": list(cpu_ms)}


BUSY = rank_lines([3.0, 6.0], **cores([0.5, 3.5], [1, 4]))


def profiled_steps(ms: float):
    return ordinary_steps(ms=lambda index: ms if 20 <= index < 24 else 10.0, profiled=lambda index: 20 <= index < 24)


def steps_with_evaluation(ms: float):
    return ordinary_steps(ms=lambda index: 10 + ms * (index % 10 == 9), phase_eval=lambda index: ms * (index % 10 == 9))


def saves_every(n: int, steps: int = 14):
    ms = every(n, 30.0, 0.0)
    return recorded(steps=ordinary_steps(steps, ms=lambda index: 10 + ms(index), phase_save=ms))


def scale(values):
    return lambda index: values[min(index, len(values) - 1)]


def memory(folder: Path, steps=3, layers=8, layer_gib=1.0, logits_gib=1.0, kept_mib=0.0, oom=False, frames=None):
    """Parameters of 2 GiB, gradients of 2, moments of 4, and per step the layers' activations and the logits."""
    made = MadeSnapshot()
    made.alloc(2 * GIB, "setup")
    moments = None
    for number in range(1, steps + 1):
        made.step(number)
        tags = [f"step {number}/forward/decoder.layers.{k}" for k in range(layers)]
        held = [made.alloc(int(layer_gib * GIB), tag, frames) for tag in tags]
        held.append(made.alloc(int(logits_gib * GIB), f"step {number}/forward", LOSS))
        if kept_mib:
            made.alloc(int(kept_mib * MIB), f"step {number}/forward")
        gradients = made.alloc(2 * GIB, f"step {number}/backward")
        made.free(*reversed(held))
        moments = moments or made.alloc(4 * GIB, f"step {number}/optimizer_step")
        made.free(gradients)
    if oom:
        made.out_of_memory(8 * GIB, 2**20)
    made.write(folder)


remembered = prepared(memory)


@prepared
def planned(folder: Path, room_gib=80, split="", **flags):
    """Beside a trace the whole plan of 24 layers of 2048 on one GPU, or two that split them, as formulas need it."""
    from megatron_lite.train.run_record import record_plan  # torch: not for the fast tests

    run(folder)
    record = json.loads((folder / "run.json").read_text())
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    plan = resolved_plan(
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 "
        f"--max-position-embeddings 4096 --bf16 {words} {split}",
        World(gpus=1, size=2 if split else 1),
        vocab_size=50257,
    )
    record["hardware"]["memory_bytes"] = int(room_gib * GIB)
    record["plan"] = msgspec.to_builtins(record_plan(plan))
    record["prediction"] = msgspec.to_builtins(Prediction(categories=predict_categories(plan)))
    (folder / "run.json").write_text(json.dumps(record))


@prepared
def holes(folder: Path, freed: int):
    """A segment of 8 pieces, `freed` of which lie free between live ones; a larger request does not fit there."""
    made = MadeSnapshot()
    made.step(1)
    start = made.segment(8 * GIB)
    pieces = [made.alloc(GIB, "step 1/forward", at=start + k * GIB) for k in range(8)]
    made.free(*pieces[1::2][:freed])
    made.alloc(2 * GIB, "step 1/forward")
    made.write(folder)


PARTITION = "/site-packages/deepspeed/runtime/zero/partition_parameters.py"
GATHERING = [{"filename": PARTITION, "line": 1234, "name": "_all_gather_dtype"}]


@prepared
def graph_pools(folder: Path, gib: float, pools=1):
    """Graphs were captured, each with a pool of its own, whose memory no tensor holds any more; a weight of 8 GiB."""
    made = MadeSnapshot()
    made.step(1)
    made.alloc(8 * GIB, "setup")
    for number in range(1, pools + 1):
        segment = made.segment(int(gib * GIB), pool=(number, 0))
        made.free(made.alloc(int(gib * GIB), "step 1/forward", at=segment))
    made.alloc(GIB, "step 1/forward")
    made.write(folder)


@prepared
def streams(folder: Path, waits: bool):
    """A weight, and activations that the program drops while another stream may use them."""
    made = MadeSnapshot()
    made.step(1)
    made.alloc(4 * GIB, "setup")
    dropped = [made.alloc(GIB, "step 1/forward") for _ in range(4)]
    made.give_back(*dropped) if waits else made.free(*dropped)
    kept = [made.alloc(GIB, "step 1/forward") for _ in range(4)]
    if waits:
        made.complete(*dropped)
    made.free(*kept)
    made.write(folder)


@prepared
def gathering(folder: Path, kept: int):
    """12 layers of a ZeRO-3 run, each gathered before it runs, of which so many stay whole at a time."""
    made, whole = MadeSnapshot(), []
    made.step(1)
    made.alloc(8 * GIB, "setup")
    for number in range(12):
        whole.append(made.alloc(GIB, "step 1/forward", GATHERING))
        made.alloc(GIB // 4, f"step 1/forward/decoder.layers.{number}")
        if len(whole) > kept:
            made.free(whole.pop(0))
    made.alloc(GIB // 4, "step 1/backward")
    made.write(folder)


def on_a_gpu_of(gib: int, **more):
    return recorded(hardware={"memory_bytes": gib * GIB}, **more)


IN_SOFTMAX, IN_GELU = ([{"filename": "model.py", "line": 6, "name": name}] for name in ("softmax", "gelu"))
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SPLIT = "--tensor-model-parallel-size 2"
SHARED = f"{SPLIT} --sequence-parallel"
HALVED = [2.0**16 / 2**k for k in range(40)]

# codes whose made cause has a remedy that a change of the graph stands for
EDITED = {
    "all-reduce-tail",
    "allocator-stalls",
    "below-roofline",
    "fp32-products",
    "gc-pauses",
    "graph-capture",
    "late-at-times",
    "late-in-turns",
    "launch-bound",
    "log-stalls",
    "needless-recompute",
    "no-overlap",
    "reduce-every-micro-batch",
    "save-and-eval",
    "save-in-step",
    "small-buckets",
    "startup-in-step",
    "starved-loader",
    "straggler",
    "sync-in-step",
    "tensor-across-nodes",
    "unfused-elementwise",
    "unfused-optimizer",
    "zeroed-gradients",
}

CASES = {
    "sync-in-step": (on_gpu(before_backward=waits(600)), on_gpu(before_backward=waits(20))),
    "starved-loader": (on_gpu(before_data=loads(1500)), on_gpu(before_data=loads(100))),
    "too-many-workers": tuple(
        both(on_gpu(before_data=loads(1500)), recorded(num_workers=workers, hardware={"cpus": 16}))
        for workers in (64, 4)
    ),
    "slow-steps": tuple(
        recorded(steps=ordinary_steps(ms=lambda at, late=late: late if at % 8 == 7 else 10.0), device="cpu")
        for late in (90.0, 12.0)
    ),
    "slowing-steps": tuple(
        recorded(steps=ordinary_steps(ms=lambda at, more=more: 10.0 + more * at), device="cpu") for more in (0.5, 0.01)
    ),
    "unpinned-copies": tuple(on_gpu(copy=copy, copy_stream=COMPUTE_STREAM, copy_us=400) for copy in (PAGEABLE, PINNED)),
    "small-copies": (on_gpu(before_forward=small_copies(64)), on_gpu(before_forward=small_copies(8))),
    "exposed-copies": (on_gpu(copy_stream=COMPUTE_STREAM, copy_us=900), on_gpu(copy_us=900)),
    "launch-bound": tuple(on_gpu(before_forward=small_kernels(300, *times)) for times in ((4, 20), (40, -20))),
    "host-gaps": (on_gpu(before_forward=host_does(THINK, 1500)), on_gpu(before_forward=host_does(THINK, 300))),
    "tiny-micro-batches": tuple(
        both(on_cpu(micro_batches=number, between_us=120), micro_batch_run(device="cpu", shape={"seq_length": 64}))
        for number in (8, 2)
    ),
    "one-time-costs": tuple(
        on_gpu(before_data=in_the_first_step(host_does("cuModuleLoadData", us, "cuda_runtime"))) for us in (6000, 500)
    ),
    "graph-capture": tuple(
        on_gpu(before_forward=host_does("cudaGraphInstantiate", us, "cuda_runtime")) for us in (500, 30)
    ),
    "startup-in-step": tuple(
        on_gpu(before_forward=host_does("cublasCreate_v2", us, "cuda_runtime")) for us in (1500, 30)
    ),
    "cpu-optimizer": tuple(
        on_gpu(before_optimizer=host_does("Optimizer.step#DeepSpeedCPUAdam.step", us, "user_annotation"))
        for us in (1500, 100)
    ),
    "save-in-step": tuple(
        on_gpu(before_optimizer=host_does("torch/serialization.py(944): save", us)) for us in (1500, 200)
    ),
    "clip-on-host": tuple(
        on_gpu(before_optimizer=host_does("clip_grad_norm", us, "user_annotation")) for us in (900, 100)
    ),
    "process-wait": tuple(on_gpu(before_data=host_does("queue.py(154): get", us)) for us in (1500, 200)),
    "python-in-function": tuple(
        on_gpu(before_backward=host_does("MyFunctionBackward", us, "cpu_op", AUTOGRAD)) for us in (1500, 200)
    ),
    "short-gaps": tuple(on_gpu(before_forward=spaced_kernels(300, us)) for us in (9, 1)),
    "gc-pauses": tuple(on_gpu(before_optimizer=host_does("Python GC", us)) for us in (500, 30)),
    "allocator-stalls": tuple(on_gpu(before_forward=host_does("cudaMalloc", us, "cuda_runtime")) for us in (500, 30)),
    "stream-waits": (on_gpu(before_backward=waits_for_stream(900)), on_gpu(before_backward=waits_for_stream(100))),
    "log-stalls": tuple(recorded(steps=ordinary_steps(phase_log=ms), device="cpu") for ms in (2.0, 0.2)),
    "save-and-eval": (recorded(steps=steps_with_evaluation(30)), recorded(steps=steps_with_evaluation(2))),
    "no-tensor-cores": (on_gpu(gemm=SIMT_GEMM), gpu),
    "fp32-products": (on_gpu(gemm=FP32_GEMM, dtypes=["float", "float"]), gpu),
    "slow-16-bit-products": tuple(
        both(on_cpu(dtype="c10::Half"), recorded(device="cpu", precision="fp16", hardware={"fp16_products": units}))
        for units in (False, True)
    ),
    "matmul-shapes": (both(on_gpu(dims=ODD), recorded(shape=ODD_SHAPE)), on_gpu(dims=[[8192, 1088], [1088, 4096]])),
    "below-roofline": (on_gpu(dims=THIN), gpu),
    "zeroed-gradients": tuple(
        on_gpu(before_data=zeroes(place)) for place in ("Optimizer.zero_grad#AdamW.zero_grad", "init")
    ),
    "vocabulary-padding": (
        both(on_gpu(dims=[[8192, 4096], [4096, 65536]]), recorded(shape={"padded_vocab_size": 65536})),
        both(on_gpu(dims=[[8192, 4096], [4096, 50304]]), run),
    ),
    "attention-scores": (
        on_gpu(forward=[(SOFTMAX, 900, "aten::_softmax", SCORES, ["c10::BFloat16", "Scalar"])]),
        on_gpu(forward=[(SOFTMAX, 900, "aten::_log_softmax", [[8192, 50304]], ["float"])]),
    ),
    "attention-dropout": (
        both(on_cpu(change=math_attention), recorded(device="cpu", attention_dropout=0.1)),
        both(on_cpu(change=math_attention), recorded(device="cpu")),
    ),
    "copy-share": (on_gpu(forward=[(CAST, 1500, "aten::copy_")]), on_gpu(forward=[(CAST, 500, "aten::copy_")])),
    "unfused-elementwise": (
        on_gpu(forward=[(ADD, 500, "aten::add")] * 4),
        both(on_gpu(forward=[(ADD, 500, "aten::add")] * 4), recorded(compiled=True)),
    ),
    "unfused-optimizer": (on_gpu(optimizer=LOOP * 8), gpu),
    "all-reduce-tail": (on_gpu(reduce="tail"), gpu),
    "no-overlap": (on_gpu(reduce="after"), on_gpu(reduce="tail")),
    "small-buckets": (on_gpu(reduce="buckets"), on_gpu(reduce="tail")),
    "reduce-every-micro-batch": (on_gpu(micro_batches=4, reduce="every"), on_gpu(micro_batches=4)),
    "straggler": (ranks_late(1500), ranks_late(100)),
    "pipeline-bubble": (pipeline_run(4, [4.0, 3.0, 3.0, 3.5]), pipeline_run(64, [4.0, 3.0, 3.0, 3.5])),
    "tensor-across-nodes": (split_layers(1), split_layers(2)),
    "late-in-turns": (moving([[1500, 0], [0, 1500]] * 4), moving([[100, 0], [0, 100]] * 4)),
    "late-at-times": (moving(([[0, 0]] * 3 + [[0, 4000]]) * 3), moving([[0, 0]] * 6 + [[0, 4000]] + [[0, 0]] * 3)),
    "collective-order": (orders([ALL_REDUCE, GATHER]), orders([GATHER, ALL_REDUCE])),
    "parameter-gather": (shards(60), shards(60, "overlap")),
    "exposed-experts": (on_gpu(reduce="after", collective=DISPATCH), on_gpu(reduce="overlap", collective=DISPATCH)),
    "exposed-tensor-parallel": (split_layers(2), split_layers(2, "overlap")),
    "optimizer-communication": (on_gpu(before_optimizer=exchanges(1500)), on_gpu(before_optimizer=exchanges(300))),
    "exposed-communication": (
        on_gpu(before_forward=exchanges(1500, BROADCAST)),
        on_gpu(before_forward=exchanges(300, BROADCAST)),
    ),
    "needless-sharding": (shards(30), shards(60)),
    # of 5.5 + 3 ms for 6 layers; the loss of the last stage takes as long as three layers more
    "unbalanced-stages": (
        pipeline_run(64, [4.0, 4.0, 4.0, 0.1], (3.0, 3.0, 3.0, 7.25)),
        pipeline_run(64, [4.0, 4.0, 4.0, 0.1], (3.0, 3.0, 3.0, 3.3)),
    ),
    "max-connections": (
        both(on_gpu(reduce="tail"), recorded(environment=ONE_CONNECTION)),
        both(on_gpu(reduce="tail"), recorded(environment=ONE_CONNECTION, plan={"layout": {"tensor": 2}})),
    ),
    "recompilation": tuple(
        recorded(steps=ordinary_steps(ms=every(n, 500.0, 10.0), compiling=every(n, True, False))) for n in (8, 30)
    ),
    "graph-breaks": tuple(
        both(on_cpu(change=regions), recorded(device="cpu", world=1, compiled=True))
        for regions in (more_than_a_layer_and_the_loss, layers_and_the_loss)
    ),
    "first-step": tuple(
        recorded(steps=ordinary_steps(ms=lambda index, first=first: 10.0 if index else first))
        for first in (20_000.0, 2_000.0)
    ),
    "profiler-overhead": (recorded(steps=profiled_steps(15.0)), recorded(steps=profiled_steps(11.0))),
    "busy-machine": (
        recorded(ranks=BUSY, device="cpu", hardware={"cpus": 8}),
        recorded(ranks=rank_lines([3.0, 3.0], **cores([0.3, 0.4], [1, 2])), device="cpu"),
    ),
    "debug-switches": (
        recorded(environment={"CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
        recorded(environment={"CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}),
    ),
    "forward-without-backward": (passes(2), passes(1)),
    "fp64-compute": (on_cpu(change=computes_in_fp64), on_cpu(change=sums_in_fp64)),
    "layout-copies": (on_cpu(change=reorders), on_cpu(change=reorders_little)),
    "expert-imbalance": tuple(
        recorded(
            steps=ordinary_steps(routing={"expert_tokens": [60, 40], "busiest": [1.2], "busiest_ranks": of_rank}), **EP2
        )
        for of_rank in (1.5, 1.1)
    ),
    "dropped-tokens": tuple(
        recorded(steps=ordinary_steps(routing={"expert_tokens": [50, 50], "busiest": [1.0], "dropped": number}), **EP2)
        for number in (10, 0)
    ),
    "hard-clipping": (
        recorded(steps=ordinary_steps(grad_norm=lambda index: 3.0 if index == 5 else 40.0), clip_grad=1.0),
        recorded(steps=ordinary_steps(grad_norm=lambda index: 40.0 if index < 10 else 3.0), clip_grad=1.0),
    ),
    "unused-parameters": (on_cpu(change=searches_for_unused), on_cpu(change=looks_ahead)),
    "gpu-slowed": (
        sampled(sm_clock_mhz=[1980, 1095], slowed=[0, 0.9], clock_limits=[0, HOT]),
        # a GPU that waits: its low clock is of no sample in which it works
        sampled(sm_clock_mhz=[1980, 1975], slowed=[0], clock_limits=[0, 1], idle=[0, 0.8]),
    ),
    "gpu-low-clock": (
        sampled(sm_clock_mhz=[1980, 1410], power_capped=[0, 1], clock_limits=[0, CAPPED], power_limit_w=[700, 500]),
        # a power limit at full load
        sampled(sm_clock_mhz=[1755, 1740], power_capped=[1], clock_limits=[CAPPED]),
    ),
    "gpu-errors": (
        sampled(sm_clock_mhz=[1980], ecc_uncorrected=[0, 2], xids=[0, 1], last_xid=[None, 48]),
        sampled(sm_clock_mhz=[1980], ecc_uncorrected=[0], ecc_corrected=[0, 4], xids=[0]),
    ),
    "gpu-wear": (
        sampled(remapped_rows=[0, 1], repair=[0, 1]),
        sampled(remapped_rows=[0], repair=[0], nvlink_errors=[0]),
    ),
    "narrow-pcie": (
        sampled(pcie_width=[16, 8], max_pcie_width=[16]),
        sampled(pcie_width=[16, 8], max_pcie_width=[16, 8]),
    ),
    "cpu-quota": (sampled(quota_used_up=[0.02, 0.63]), sampled(quota_used_up=[0.02, 0.08])),
    "stolen-time": (sampled(stolen=[0.12]), sampled(stolen=[0.03])),
    "host-memory-pressure": (
        sampled(memory_pressure=[0.31], swapped_bytes=[2**33]),
        sampled(memory_pressure=[0.0], swapped_bytes=[2**33]),
    ),
    "hot-cpu": (
        sampled(cpu_slowdowns=[400], cpu_mhz=[1200], max_cpu_mhz=[3800]),
        sampled(cpu_slowdowns=[400], cpu_mhz=[2900], max_cpu_mhz=[3800]),
    ),
    "too-many-threads": tuple(recorded(device="cpu", hardware={"threads": n, "cpus": 8}) for n in (8, 4)),
    "overflow-storm": (
        recorded(steps=ordinary_steps(skipped=every(6, True, False)), precision="fp16"),
        recorded(steps=ordinary_steps(skipped=lambda index: index < 15), precision="fp16"),
    ),
    "scale-collapse": tuple(
        recorded(steps=ordinary_steps(loss_scale=scale(values)), precision="fp16") for values in (HALVED, HALVED[:6])
    ),
    "no-learning": (recorded(steps=ordinary_steps(loss=lambda index: 3.0 + index / 1000)), run),
    "memory-growth": (
        recorded(steps=ordinary_steps(host_memory_bytes=lambda index: 2**31 + index * 2**22)),
        recorded(steps=ordinary_steps(host_memory_bytes=lambda index: 2**31 + min(index, 4) * 2**22)),
    ),
    "fragmentation": (holes(4), holes(0)),
    "private-pool": (graph_pools(12), graph_pools(0.1)),
    "awaiting-free": (streams(waits=True), streams(waits=False)),
    "gathered-parameters": (gathering(kept=12), gathering(kept=2)),
    "logits-peak": (both(remembered(logits_gib=8), on_a_gpu_of(32)), both(remembered(logits_gib=8), on_a_gpu_of(80))),
    "recompute-activations": (
        both(remembered(layer_gib=2), on_a_gpu_of(32)),
        both(remembered(layer_gib=2), on_a_gpu_of(32, recompute_granularity="full")),
    ),
    "state-kept-whole": tuple(
        both(remembered(), on_a_gpu_of(12, plan={"layout": {"data": ranks, "context": 1}})) for ranks in (4, 1)
    ),
    "sequence-parallel-off": tuple(both(remembered(), planned(room_gib=20, split=words)) for words in (SPLIT, SHARED)),
    "needless-recompute": (both(on_gpu(), planned(**FULL)), both(on_gpu(), planned(micro_batch_size=8, **FULL))),
    "out-of-memory": (remembered(oom=True), memory),
    "attention-memory": (remembered(frames=IN_SOFTMAX, logits_gib=0.5), remembered(frames=IN_GELU, logits_gib=0.5)),
    "micro-batch-headroom": tuple(
        both(on_gpu(micro_batches=4), micro_batch_run(steps=ordinary_steps(peak_memory_bytes=peak)))
        for peak in (12 * 10**9, 70 * 10**9)
    ),
}
UNKNOWN_OR_AMD = (
    "igemm_fwd_gtcx3_nhwc_fp16_bx0_ex0_bt128x128x32_wt32x32x8_ws1x1_wr2x2",
    "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm<ck::half_t> >(x)",
    "hgemm_bf16_t32x32x64x6_ksd_w1x2x1",
)
NEVER_GOOD = {"skipped": True, "loss": None, "grad_norm": None}
# a second way in which a rule can see its cause, or a second near miss
MORE_TRIGGERS = [
    ("needless-recompute", checkpointed(12)),
    ("forward-without-backward", passes(2, (500, 100))),
    ("forward-without-backward", passes(2, (100, None), shapes=False)),
    ("forward-without-backward", passes(2, gpu=True)),
    ("forward-without-backward", passes(2, (500, 100), cast=True)),
    ("fp64-compute", on_gpu(forward=[("volta_dgemm_64x64_nn", 900, "aten::mm", *[None] * 2)])),
    ("fp64-compute", on_gpu(forward=[(ADD, 900, "aten::add", [[64, 64]] * 2, DOUBLE)])),
    ("debug-switches", on_cpu(change=checks_for_nan)),
    ("debug-switches", launches_wait(106)),
    ("straggler", recorded(ranks=rank_lines([3.0, 9.0], **cores([0.5, 3.5], [1, 4])))),
    ("profiler-overhead", recorded(steps=profiled_steps(15.0), ranks=BUSY)),
    ("busy-machine", recorded(ranks=rank_lines([3.0, 3.0], **cores([None, None], [1, 4])))),
    ("overflow-storm", recorded(steps=ordinary_steps(14, **NEVER_GOOD), precision="fp16")),
    ("scale-collapse", recorded(steps=ordinary_steps(loss_scale=scale(HALVED), **NEVER_GOOD), precision="fp16")),
    ("recompilation", recorded(steps=ordinary_steps(ms=500.0, compiling=True, compile_ms=490.0), compiled=True)),
    ("no-learning", recorded(steps=ordinary_steps(loss=lambda index: 3.0 if index < 30 else None))),
    ("graph-breaks", on_cpu(change=resumes)),
    ("memory-growth", remembered(kept_mib=64, steps=5)),
    ("host-gaps", python_works(4_000)),
    ("host-gaps", python_works(4_000, "train.py(7): think")),
    ("host-gaps", small_operators(busy_us=5)),
    ("host-gaps", on_gpu(before_backward=works_behind_a_wait(3_000))),
    ("late-at-times", moving([[0, 4000], [0, 0]] * 2)),  # 2 of 4 steps, equally late
    ("late-at-times", moving([[0, 0, 4000], [0, 0, 0], [0, 0, 4000], [0, 0, 4000], [0, 0, 0]])),
    ("save-in-step", on_gpu(before_optimizer=saves_to_the_host(4))),
    ("save-in-step", reads_states()),
    ("exposed-copies", on_gpu(before_optimizer=saves_to_the_host(4, ""))),
    ("memory-growth", allocates([8] * 5)),
    ("memory-growth", allocates([8, 9, 30, 7, 12], between=50)),
    ("short-gaps", python_in_pieces(5, 600)),
    (
        "recompilation",
        on_gpu(before_forward=host_does("_compile.compile_inner (dynamo_timed)", 900, "user_annotation")),
    ),
    ("log-stalls", on_gpu(before_data=host_does("wandb/sdk/wandb_run.py(1500): log", 900))),
    ("starved-loader", on_gpu(before_data=host_does("nvidia/dali/plugin/pytorch/__init__.py(235): __next__", 1500))),
    ("starved-loader", on_gpu(before_data=host_does("enumerate(DataPipe)#Batcher", 1500, "user_annotation"))),
    ("process-wait", on_gpu(before_data=host_does("torch/distributed/distributed_c10d.py(9): barrier", 1500))),
    ("log-stalls", recorded(steps=ordinary_steps(phase_log=2.0), device="cpu", log_params_norm=True)),
    ("save-and-eval", saves_every(2)),
    ("unbalanced-stages", pipeline_run(64, [4.0, 0.1, 4.0, 4.0], (3.0, 6.0, 3.0, 3.0))),  # a slow place
    ("small-buckets", gloo_after_backward(25, elements=65_536)),
    ("small-buckets", both(gloo_after_backward(25), recorded(device="cpu", parameters=4_000_000))),
    ("starved-loader", recorded(steps=ordinary_steps(phase_data=3.0))),
    ("straggler", recorded(ranks=rank_lines([3.0, 3.0, 5.0, 3.0]), world=4)),
    ("gpu-slowed", sampled(clock_limits=[0, HOT], slowed=[0, 0.9])),  # a driver that tells no clock
    ("gpu-slowed", sampled(sm_clock_mhz=[1095], clock_limits=[HOT], slowed=[0.9])),  # all of them
    ("gpu-low-clock", sampled(sm_clock_mhz=[1410], clock_limits=[int(ClockLimit.APPLICATION_CLOCKS)])),
    ("gpu-low-clock", sampled(sm_clock_mhz=[1000], power_capped=[1], clock_limits=[CAPPED])),
    ("gpu-low-clock", sampled(sm_clock_mhz=[1980, 1500], clock_limits=[0])),
    ("gpu-errors", sampled(clock_limits=[0], lost=[None, 1])),
    ("gpu-errors", sampled(xids=[0, 1], last_xid=[None, 31])),
    ("gpu-wear", sampled(nvlink_errors=[0, 9])),
    ("host-memory-pressure", sampled(memory_pressure=[0.02], swapped_bytes=[2**33])),
    ("recompilation", on_cpu(change=compiles)),
    ("unfused-optimizer", on_cpu(optimizer=("aten::_foreach_lerp_", "aten::_foreach_addcdiv_"))),
    ("fp32-products", both(on_cpu(dtype="float"), recorded(device="cpu", precision="fp32"))),
    ("matmul-shapes", both(on_cpu(dims=ODD), recorded(device="cpu", shape=ODD_SHAPE))),
]
MORE_NEAR_MISSES = [
    ("needless-recompute", checkpointed(60)),
    ("needless-recompute", checkpointed(12, again=False)),
    ("forward-without-backward", passes(2, (100, 100))),  # one pass, twice as long
    ("forward-without-backward", distilled()),
    ("layout-copies", on_cpu(change=only_views)),
    ("hard-clipping", recorded(steps=ordinary_steps(grad_norm=40.0), clip_grad=0.0)),
    ("hard-clipping", recorded(steps=ordinary_steps(8, grad_norm=40.0), clip_grad=1.0)),
    ("debug-switches", on_cpu(change=hooks_look_for_nan)),
    ("debug-switches", launches_wait(5)),
    ("needless-sharding", shards(30, twice=False)),
    ("needless-sharding", shards(30, "overlap")),
    ("sequence-parallel-off", both(remembered(), planned(split=SPLIT))),
    ("pipeline-bubble", pipeline_run(4, [4.0, 0.1, 3.0, 3.5])),
    ("unbalanced-stages", pipeline_run(64, [1.0, 1.0, 1.0, 0.5], (3.0, 3.9, 3.0, 3.0))),
    ("pipeline-bubble", pipeline_run(16, [0.9, 0.9, 0.9, 0.9], splits_backward=True)),
    ("busy-machine", recorded(ranks=rank_lines([3.0, 3.0]))),
    ("busy-machine", recorded(ranks=rank_lines([3.0, 3.0], **cores([None, None], [0, 0])))),
    ("gpu-slowed", sampled(sm_clock_mhz=[1980, 1095], slowed=[0, 0.04], clock_limits=[0, HOT])),  # for a moment
    ("gpu-slowed", sampled(sm_clock_mhz=[1980, 1930], slowed=[0, 0.4], clock_limits=[0, HOT])),  # without effect
    ("gpu-slowed", sampled(sm_clock_mhz=[1980, 345], slowed=[0], clock_limits=[0])),
    ("gpu-slowed", sampled(idle=[0.98], sm_clock_mhz=[1980, 1095], slowed=[0, 1], clock_limits=[0, HOT])),
    ("gpu-low-clock", sampled(sm_clock_mhz=[1980, 1095], slowed=[0, 0.9], clock_limits=[0, HOT])),  # gpu-slowed has it
    ("gpu-low-clock", sampled(sm_clock_mhz=[1300], power_capped=[0.2], clock_limits=[CAPPED])),
    ("hot-cpu", sampled(cpu_slowdowns=[4], cpu_mhz=[1200], max_cpu_mhz=[3800])),
    ("straggler", recorded(ranks=BUSY)),  # 3.0 ms later, and 3.5 without a core
    ("profiler-overhead", recorded(steps=profiled_steps(13.0), ranks=BUSY)),
    ("overflow-storm", recorded(steps=ordinary_steps(skipped=lambda index: index < 39), precision="fp16")),
    ("no-learning", recorded(steps=ordinary_steps(14, loss=3.0))),
    ("no-learning", recorded(steps=ordinary_steps(loss=3.0), mock_data=True)),
    ("no-learning", recorded(steps=ordinary_steps(loss=3.0, iteration=lambda index: 101 + index))),
    ("no-learning", recorded(steps=ordinary_steps(14, **NEVER_GOOD), precision="fp16")),
    ("sync-in-step", on_cpu(change=cpu_reads)),
    ("host-gaps", on_cpu(change=cpu_reads)),
    ("host-gaps", python_works(900)),
    ("host-gaps", python_works(9_000, every=3)),  # a machine that others use
    ("host-gaps", small_operators(busy_us=20)),
    ("host-gaps", on_gpu(before_backward=works_behind_a_wait(900))),
    ("host-gaps", reads_states()),  # save-in-step tells it
    ("late-at-times", moving([[0, 4000], [0, 0], [0, 1500], [0, 0]])),  # few steps, and not equally late
    ("late-at-times", moving([[0, 4000], [0, 0], [0, 0], [0, 0]])),
    ("exposed-copies", on_gpu(before_optimizer=saves_to_the_host(4))),  # save-in-step tells them
    ("save-in-step", reads_states(tensors=3)),  # fewer than there are gradients
    ("save-in-step", reads_states(computes=True)),  # an average of weights
    ("save-in-step", reads_states(us=200)),
    ("save-in-step", reads_states(gradients=0)),  # results of a run that does not learn
    ("memory-growth", allocates([8, 8, 8, 0, 8])),
    ("memory-growth", allocates([8] * 4)),  # of 4 steps the first does not count
    ("host-gaps", on_gpu(before_backward=host_does("MyFunctionBackward", 1500, "cpu_op", AUTOGRAD))),
    ("host-gaps", on_gpu(before_data=host_does("train.py(30): get_batch", 1500))),
    ("short-gaps", python_works(900)),
    ("short-gaps", small_operators(busy_us=5)),
    ("graph-capture", on_gpu(before_data=in_the_first_step(host_does("cudaGraphInstantiate", 6000, "cuda_runtime")))),
    ("startup-in-step", on_gpu(before_data=in_the_first_step(host_does("cuModuleLoadData", 6000, "cuda_runtime")))),
    ("recompilation", on_gpu(before_data=in_the_first_step(host_does("entire_frame_compile", 6000, "cpu_op")))),
    ("one-time-costs", on_gpu(before_forward=host_does("cudaGraphInstantiate", 500, "cuda_runtime"))),
    ("python-in-function", on_gpu(before_backward=host_does("aten::_index_put_impl_", 1500, "cpu_op", AUTOGRAD))),
    ("python-in-function", on_gpu(before_backward=host_does("MulBackward0", 1500, "cpu_op", AUTOGRAD))),
    ("cpu-optimizer", on_gpu(before_optimizer=host_does("Optimizer.step#AdamW.step", 1500, "user_annotation"))),
    ("small-buckets", gloo_after_backward(25, elements=2_000_000)),
    ("small-buckets", both(gloo_after_backward(25), recorded(device="cpu"))),
    ("small-buckets", gloo_after_backward(25)),
    ("save-and-eval", saves_every(13)),
    ("memory-growth", remembered(steps=5)),
    ("recompute-activations", both(remembered(layer_gib=2), on_a_gpu_of(80))),
    ("state-kept-whole", both(remembered(), on_a_gpu_of(80, plan={"layout": {"data": 4, "context": 1}}))),
    (
        "state-kept-whole",
        both(remembered(), on_a_gpu_of(12, plan={"layout": {"data": 4, "context": 1}, "sharding": {"ranks": 4}})),
    ),
    ("micro-batch-headroom", both(on_gpu(micro_batches=4), micro_batch_run())),
    (
        "fp32-products",
        both(on_cpu(dtype="float"), recorded(device="cpu", precision="fp32", hardware={"bf16_products": False})),
    ),
    ("straggler", recorded(ranks=rank_lines([3.0, 3.0, 3.1, 3.0]), world=4)),
    *[("no-tensor-cores", on_gpu(gemm=name)) for name in UNKNOWN_OR_AMD],
    ("sync-in-step", on_gpu(before_optimizer=waits_with_a_full_queue)),
]
CLEAN = {
    "a GPU rank of two, with its run": both(gpu, recorded(batch=8)),
    "a CPU rank, with its run": both(cpu, recorded(device="cpu", world=1, batch=4)),
    "four ranks alike": both(*(on_gpu(rank=rank, world_size=4) for rank in range(4))),
    "a run alone": run,
}
# Known answers: code | ms per step of the first trigger, by how it is made | what the finding must say: flag and value, place, amount.
_ANSWERS = """
busy-machine | 3.5 | rank 1 waits for a CPU core for 3.5 ms of a step of 10.0 ms; ranks from 0 on: 5%, 35%
sync-in-step | 0.61 | aten::item
starved-loader | 1.5 | the device waits for the data loader 1.5 ms
too-many-workers | 1.5 | 64 workers x 2 ranks
unpinned-copies | 0.4 |
exposed-copies | 0.9 |
host-gaps | 1.5 | train.py(7): think
gc-pauses | 0.5 |
one-time-costs |  | loading of CUDA modules: 1 time, 6.0 ms, most of it in ProfilerStep#10
graph-capture | 0.5 |
startup-in-step | 1.5 | handles of libraries
cpu-optimizer | 1.5 | an optimizer made for the CPU
save-in-step | 1.5 | torch.save
clip-on-host | 0.9 |
process-wait | 1.5 | a queue of another process
python-in-function | 1.5 | Python inside MyFunctionBackward
short-gaps | 2.7 | of launch latency
allocator-stalls | 0.5 |
stream-waits | 0.9 |
log-stalls | 2 |
save-and-eval | 3 |
no-tensor-cores | 7.5 |
attention-scores | 0.9 | 2048 x 2048
attention-dropout | 1.4 |
copy-share | 1.5 |
unfused-elementwise | 2 |
unfused-optimizer | 0.8 | a loop over 8 tensors
zeroed-gradients | 0.32 |
all-reduce-tail | 0.8 |
no-overlap | 1.2 | bucket_cap_mb
small-buckets | 0.96 |
reduce-every-micro-batch | 1.5 |
straggler | 1.5 | rank 1
pipeline-bubble | 3.0 | --pipeline-schedule ZeroBubble
parameter-gather | 0.8 | 2 all-gathers of weights per step; not overlapped with compute: 0.8 ms
needless-sharding | 0.7 | would be 31.00 GiB of
sequence-parallel-off |  | 2 ranks keep
tensor-across-nodes | 0.8 | --pipeline-model-parallel-size 2
unbalanced-stages | 2.8333333 | --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 4
max-connections | 0.8 | 2 ranks
recompilation | 49 | iterations 9, 17, 25, 33
first-step | 499.75 | 20,000.0 ms
overflow-storm | 1.5 |
forward-without-backward | 1.79 | 1 more forward pass per step of the trained layers, under torch.no_grad()
fp64-compute | 0.89 | aten::mm in fp64: 1 time per step
layout-copies | 0.902 | aten::contiguous [8, 512, 64]
expert-imbalance | 2.706 | of 2 ranks with experts, the busiest has 1.50 times
dropped-tokens |  | 9.1% of the assignments
hard-clipping |  | 40 times --clip-grad 1
unused-parameters |  | 1 search per step
matmul-shapes |  | --hidden-size 1024 (now 1000)
vocabulary-padding |  | 50,257 of 65,536
micro-batch-headroom |  | --micro-batch-size 16 (now 4)
logits-peak |  | --micro-batch-size 2 (now 4)
fragmentation |  | 10.00 GiB are reserved for tensors of 6.00 GiB
out-of-memory |  | 8.00 GiB were asked for
attention-memory |  | 8.00 GiB of the peak
debug-switches |  | DETAIL
profiler-overhead |  | 1.50 x
scale-collapse |  | from 65,536 to
"""
ANSWERS = {
    code: (cost, words)
    for code, cost, words in (map(str.strip, line.split("|")) for line in _ANSWERS.strip().splitlines())
}
