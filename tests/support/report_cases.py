"""Reports made by hand, for the renderers: of a GPU run with every part, of a CPU run, of a run folder alone."""

import dataclasses
import sys

import msgspec
import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.checks import answer_checks
from megatron_lite.analysis.findings.rules import judge
from megatron_lite.analysis.gains import describe_next_steps
from megatron_lite.analysis.kernels.kernel_results import (
    KernelRow,
    OperatorRow,
    RankKernels,
    Role,
    RooflineRow,
    TensorCores,
)
from megatron_lite.analysis.memory.memory_results import (
    OUTSIDE,
    CurvePoint,
    Fragmentation,
    Held,
    Layer,
    MeasuredCategory,
    SiteBytes,
    Snapshot,
    SnapshotGrowth,
    StepMemory,
    TraceMemory,
)
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.rank_results import CollectiveRow, GroupRow, RankComparison, RankRow, Straggler
from megatron_lite.analysis.report import Gains, OrderedChange, Report
from megatron_lite.analysis.run.run_results import Run, Steps
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.time.time_results import HostSite, PhaseTime, Placing, RankTime, Span, Step, SyncSite
from megatron_lite.analysis.trace.columns import Events, MemoryEvents, Trace
from megatron_lite.analysis.verdict import build_verdict
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.formats.run_record import RunRecord

PYTHON = sys.executable
HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m\u202e&\"'\ud800"
ROWS = {"compute": 60.0, "exposed_communication": 20.0, "host": 10.0, "sync": 6.0, "data_wait": 1.5}
ROWS |= {"launch": 1.5, "unexplained": 1.0}


def trace(
    rank: int | None, device: str | None = "NVIDIA H100 80GB HBM3", notes=(), source="rank0.pt.trace.json"
) -> Trace:
    """A trace without events: renderers must not need them."""
    none = {field.name: np.zeros(0, np.int64) for field in dataclasses.fields(Events)}
    memory = {field.name: np.zeros(0, np.int64) for field in dataclasses.fields(MemoryEvents)}
    told = {"source": source, "writer": "pytorch", "rank": rank, "world_size": 2, "notes": tuple(notes)}
    told |= {"devices": (device,) if device else (), "base_ns": 0, "with_stack": True, "with_shapes": True}
    nothing = dict.fromkeys(("names", "threads", "shapes", "collectives"), ())
    return Trace(**told, **nothing, events=Events(**none), memory=MemoryEvents(**memory))


def placing() -> Placing:
    """Of no event."""
    return Placing((), np.zeros(0, np.int32), (), np.zeros(0, np.int16), np.zeros(0, np.int64))


def steps(number: int, ms: float = 100.0, steady: int | None = None) -> tuple[Step, ...]:
    first_steady, made = number - (number if steady is None else steady), []
    for at in range(number):
        times, counts = (int(at * ms * 1e6), int((at + 1) * ms * 1e6)), at >= first_steady
        made.append(Step(f"ProfilerStep#{at}", at, *times, *times, counts, "" if counts else "first of the window"))
    return tuple(made)


def rank_time(
    rank: int | None = 0,
    device: str | None = "NVIDIA H100 80GB HBM3",
    rows=None,
    number=4,
    steady=None,
    name="forward",
    step_ms=100.0,
) -> RankTime:
    rows = ROWS if rows is None else rows
    phases = tuple(
        PhaseTime(phase, host, device_ms, device_ms, device_ms + 2, 1.0, device_ms - 1, 1.0, 0.0, 300.0)
        for phase, host, device_ms in (("data_to_device", 28.0, 0.03), (name, 7.0, 26.0), ("backward", 11.0, 47.0))
    )
    sync = SyncSite("cudaStreamSynchronize", "aten::item", f"train.py(12): {name}", "forward", 4.0, 30.0, 6.0)
    ends = (("forward", 0, 30), ("backward", 30, 90), (name, 90, 99))
    begin = 100  # ms: of the step that the timeline shows
    spans = tuple(Span(phase, (begin + start) * 1_000_000, (begin + end) * 1_000_000) for phase, start, end in ends)
    times = {"step_ms": step_ms, "busy_ms": 82.0, "communication_ms": 35.0, "copy_ms": 0.2, "overlap": 0.43}
    times |= {"loader_host_ms": 3.0, "spilled_ms": 0.0, "median_kernel_us": 9.0, "median_queue_us": 40.0}
    times |= {"launches": 900.0, "median_launch_interval_us": 7.0, "launch_bound": False}
    seen = {"phases": phases, "syncs": (sync,), "hosts": (HostSite("aten::addmm", "forward", 8.0),), "notes": ()}
    seen |= {"timeline": spans, "timeline_step": 1, "steps": steps(number, step_ms, steady)}
    return RankTime(rank=rank, device=device, on_gpu=device is not None, rows=rows, **times, **seen)


def rank_kernels(rank: int | None = 0, name="ampere_bf16_s16816gemm", on_gpu=True) -> RankKernels:
    gemm = KernelRow(name, name, Role.GEMM, "forward", "aten::addmm", 96.0, 40.0, 0.6, TensorCores.YES, "bf16")
    shares = {at: {"ms": 40.0 / (at + 1), "share": 0.6 / (at + 1)} for at in range(12)}
    kernels = tuple(dataclasses.replace(gemm, short=f"{name}_{at}", **shares[at]) for at in shares)
    gemm_row = RooflineRow(
        "aten::addmm", "forward", "", (), Role.GEMM, "bf16", 24.0, 8.0, 1.6e12, 2e9, 200.0, 250.0, 3.0, "compute", 0.375
    )
    roofline = []
    for at in range(6):
        sizes = {"shape": f"[{8192 >> at}, 1024] x [1024, 4096] bf16", "dims": (8192 >> at, 4096, 1024)}
        times = {"ms": 8.0 / (at + 1), "flops": 1.6e12 / (at + 1), "bound_ms": 3.0 / (at + 1)}
        times |= {"achieved_tflops": 200.0 + at}
        roofline.append(dataclasses.replace(gemm_row, **sizes, **times))
    add = ("aten::add", "forward", "[8192, 4096] bf16", (), Role.ELEMENTWISE, "bf16")
    roofline.append(RooflineRow(*add, 48.0, 3.0, 0.0, 6e9, 0.0, 2000.0, 2.0, "memory", 0.66))
    roles = {Role.GEMM: 40.0, Role.ATTENTION: 10.0, Role.COMMUNICATION: 35.0, Role.ELEMENTWISE: 8.0}
    roles |= {Role.OPTIMIZER: 5.0, Role.NORM: 2.0}
    operators = (
        OperatorRow("aten::addmm", Role.GEMM, 96.0, 31.0, 40.0, "forward"),
        OperatorRow(name, Role.OTHER, 3.0, 2.0, 0.0, "backward"),
    )
    if not on_gpu:
        told = {"achieved_tflops": 0.02, "peak_dtype": "fp32", "notes": ("no peak known for this processor",)}
        roles = {Role.GEMM: 31.0, Role.OTHER: 2.0}
        return RankKernels(rank, operators=operators, roles=roles, matrix_ms=31.0, model_flops=1e9, **told)
    sums = (100.0, 50.0, 45.0, 3.0, tuple(roofline), 3.1e13, 310.0, 989.0, "bf16", 0.31)
    return RankKernels(rank, kernels, operators, roles, *sums)


def ranks_of(name="all_reduce") -> RankComparison:
    rows = tuple(
        RankRow(rank, f"node{rank}", 100.0, 60.0 + rank, 35.0, 20.0, 5.0 - rank, 1.5, 10.0, 0.5 * rank, 4.0 * rank)
        for rank in (0, 1)
    )
    groups = (GroupRow("data", 12.0, 300.0 * 2**20, 35.0, 20.0, 1, 21.0),)
    collectives = (
        CollectiveRow(
            name, "data", "ring, LL128", "backward", 2, 12.0, 25 * 2**20, "BFloat16", 35.0, 15.0, 20.0, 20.0, 140.0
        ),
    )
    return RankComparison(2, (0, 1), (), rows, groups, collectives, Straggler(1, 4.0, 0.8, "compute", 3.5), True, 1, ())


def snapshot(name="gpt.py:81 forward") -> Snapshot:
    sizes = dict.fromkeys(CATEGORIES, 0) | dict(zip(CATEGORIES, (2, 2, 4, 8, 12, 3, 1)))
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])
    held = tuple(Held(category, number * 2**30, 10) for category, number in largest if number)
    halves = [tuple(number * unit for number in sizes.values()) for unit in (2**29, 2**30)]
    curve = tuple(
        CurvePoint(at * 1000, (20 + at % 12) * 2**30, 34 * 2**30, halves[at % 12 > 0 or at == 0]) for at in range(200)
    )
    ends = [(f"step {at}", at * 50_000, (at + 1) * 50_000) for at in range(4)]
    growth = SnapshotGrowth(12 * 2**20, 4, (SiteBytes("train.py:9 log", "other", "log", "", 12 * 2**20, 1),))
    told = {"source": "snapshot.pickle", "rank": 0, "simulated": False, "events": 120_000, "notes": ()}
    told |= {"complete": True}
    told |= {"peak_bytes": 32 * 2**30, "peak_time_us": 11000, "peak_phase": "backward", "held": held, "curve": curve}
    told |= {"sites": (SiteBytes(name, "activations", "forward", "layers.3.mlp", 2**30, 24),) * 6, "oom": None}
    told |= {"layers": (Layer(OUTSIDE, 2**28), *(Layer(f"layers.{at}", 2**29) for at in range(24))), "growth": growth}
    told |= {"steps": tuple(StepMemory(*end, 16 * 2**30, 32 * 2**30) for end in ends)}
    return Snapshot(**told, fragmentation=Fragmentation(36 * 2**30, 32 * 2**30, 2**29, False, 33 * 2**30))


def ledger() -> tuple[MeasuredCategory, ...]:
    """One that agrees, one that does not, one of nothing."""
    return (
        MeasuredCategory("parameters", "2 bytes x 1,073,741,824 parameters", 2 * 2**30, 2 * 2**30),
        MeasuredCategory("activations", "24 layers", 8 * 2**30, 12 * 2**30),
        MeasuredCategory("master weights", "0 bytes x 1,073,741,824 parameters", 0, 0),
    )


def traced_memory(name="aten::log_softmax", given=True) -> TraceMemory:
    return TraceMemory(
        "rank0.json", 0, 0, 3 * 2**30, 5_000, "forward", name, 4 * 2**30, ((0, 0), (5_000, 3 * 2**30)), given
    )


PLAN = {"shape": {"num_layers": 24, "hidden_size": 1024}, "world": {"size": 2}}


def record_of(plan: dict | None = PLAN, status: str = "finished", **fields) -> RunRecord:
    """What a run says of itself."""
    return msgspec.convert({"plan": plan, "status": status, **fields}, RunRecord)


def run_of(steps=3) -> Run:
    columns = {field.name: np.full(steps, np.nan) for field in dataclasses.fields(Steps)}
    flags = ("ordinary", "undisturbed", "profiled", "compiling", "evaluating", "saving", "skipped", "not_finite")
    columns |= {name: np.zeros(steps, bool) for name in flags} | {"phases_ms": {}, "gpu_phases_ms": {}}
    columns |= {"iterations": np.arange(1, steps + 1), "ordinary": np.arange(steps) > 0}
    columns |= {"step_ms": np.where(columns["ordinary"], 95.5, 900.0), "steps": steps, "folder": "run-1", "ranks": None}
    columns |= {"record": record_of(), "notes": ()}
    times = {"first_step_ms": 900.0, "steady_step_ms": 95.5, "profiled_step_ms": 99.0, "before_profile_ms": 95.0}
    speeds = {"tokens_per_second": 171_000.0, "mfu_causal": 0.33, "mfu_full": 0.35, "model_tflops": 326.0}
    return Run(**columns, **times, **speeds, step_spread_ms=0.7)


def findings(name="sync-in-step") -> tuple[Finding, ...]:
    title, seen = "the host waits for the device inside the step", ".item() 4 times per step in forward, 7.5 ms each"
    evidence, flags = (Evidence(seen, "train.py(12): forward"),), ("--log-interval 100",)
    first = Finding(name, title, 6.0, None, evidence, "read the loss every 100 steps", flags, 6.0, None, rank=0)
    evidence, flags = (Evidence("[4, 1024, 50304] in fp32, three times"),), ("--micro-batch-size 2",)
    costs = {"cost_ms": None, "cost_bytes": 3 * 2**30, "gain_ms": None, "gain_bytes": 2 * 2**30}
    memory = Finding(
        "logits-peak", "the logits are the peak", evidence=evidence, advice="a smaller micro-batch", flags=flags,
        certain=False, **costs,
    )  # fmt: skip
    return (first, *(dataclasses.replace(first, code=f"cause-{at}", cost_ms=5.0 / (at + 1)) for at in range(6)), memory)


def gains_of(name="cause-1") -> Gains:
    """Of a step of 100 ms: the first finding's remedy, and one more."""
    first = OrderedChange(name, f"take the Python work out of {name}", 4.5, 4.5, 95.5)
    return Gains(100.0, (first, OrderedChange("cause-2", "load with 2 workers", 0.0, 5.25, 90.25)), "low", (name,))


def report(device: str | None = "NVIDIA H100 80GB HBM3", name: str | None = None, **facts) -> Report:
    """Every part filled in; `name` stands wherever a foreign string can; `facts` replaces parts of Facts."""
    on_gpu = device is not None
    foreign = {} if name is None else {"name": name}
    notes = (name,) if name else ()
    seen = tuple(
        RankFacts(
            trace=trace(rank, device, notes),
            placing=placing(),
            time=rank_time(rank, device, **foreign),
            kernels=rank_kernels(rank, on_gpu=on_gpu, **foreign),
        )
        for rank in (0, 1)
    )
    parts = {"ranks_seen": seen, "ranks": ranks_of(**foreign), "snapshots": (snapshot(**foreign),), "run": run_of()}
    whole = Facts(**parts | {"gaps": notes, "ledger": ledger(), "traced_memory": ()} | facts)
    found = findings(**foreign) if whole.ranks_seen else ()
    title = name or "run-1: 2 ranks, NVIDIA H100, GPT 24 x 1024"
    looks = judge(whole).looks
    answered = answer_checks(whole, found, looks)
    gains = gains_of(**foreign) if found else None
    verdict = dataclasses.replace(build_verdict(whole, found), next_steps=describe_next_steps(gains))
    return Report(("run-1",), title, verdict, found, whole, 0.42, looks, answered, gains)
