"""Made runs of a training, as files of a folder: traces with a GPU and without, run.json and steps.jsonl.

The clean step of `gpu`, in us: a copy 20, forward 3,000, backward 5,500 with an all-reduce beside it, optimizer 800;
the host is far ahead. A change gets a `Step`, before the part that it is named after.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from support.trace_maker import AUTOGRAD, COPY_STREAM, MadeTrace

STEP_US, STEPS = 10_000.0, 5
BF16_GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
FP32_GEMM = "ampere_sgemm_128x64_tn"
SIMT_GEMM = "cutlass_80_simt_hgemm_128x128_8x4_nn_align1"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, char*>"
CAST = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 11, false, false>"
FUSED_ADAM = (
    "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, "
    "FusedAdamMathFunctor<float, 4>>"
)
HALF = ["c10::BFloat16", "c10::BFloat16"]
PROJECTION = [[8192, 4096], [4096, 16384]]  # 1.1 ms at an H100's peak in bf16


@dataclass
class Step:
    """Where host and device are while a step is being made; us of the trace."""

    made: MadeTrace
    host: float
    gpu: float

    def kernel(self, name: str, us: float, op: str = "aten::op", dims=None, dtypes=None, thread=100, late=False):
        """The next kernel. late: launched only when the one before it has long ended."""
        self.made.op(op, self.host, self.host + 20, thread, dims=dims, dtypes=dtypes)
        start = max(self.gpu, self.host + 12) if late else self.gpu
        self.made.kernel(name, start, start + us, self.host + 5, thread=thread)
        self.host, self.gpu = self.host + 25, start + us

    def gap(self, us: float) -> tuple[float, float]:
        """The device runs dry and stays idle for about `us`; returns when, for what the host did meanwhile."""
        began = self.gpu
        self.host, self.gpu = began + us, began + us + 12
        return began, began + us


@dataclass
class Clean:
    """What a step consists of, and changes: before data, forward, backward, optimizer, or at the end."""

    gemm: str = BF16_GEMM
    dims: list = field(default_factory=lambda: PROJECTION)
    dtypes: list = field(default_factory=lambda: HALF)
    forward: list[tuple] = field(default_factory=list)  # more kernels: (name, us, operator, dims, dtypes)
    optimizer: tuple[str, ...] = ("aten::_fused_adamw_",)
    copy: str = "Memcpy HtoD (Pinned -> Device)"
    copy_stream: int = COPY_STREAM
    copy_us: float = 20
    micro_batches: int = 1
    reduce: str = "overlap"  # | none | tail | every | after | late | buckets
    collective: dict = field(default_factory=dict)  # what those of gradients are instead: name, kernel, group
    late_us: float = 0  # how much longer backward takes
    wait_us: float = 0  # how long "late" waits for another rank
    changes: dict = field(default_factory=dict)


def gpu(folder: Path, rank=0, world_size=2, steps=STEPS, header: dict | None = None, **parts) -> Path:
    """A rank's trace."""
    clean = Clean(changes={name: parts.pop(name) for name in [*parts] if name.startswith("before_")}, **parts)
    made = MadeTrace(rank, world_size, device="NVIDIA H100 80GB HBM3", **(header or {}))
    step = Step(made, 10, 200)
    for index in range(steps):
        _step(made, clean, 10 + index, step)
    return made.write(folder)


def _step(made: MadeTrace, clean: Clean, number: int, step: Step):
    at = step.host
    _change(clean, "data", step)
    made.annotation("data", step.host, step.host + 10)
    made.annotation("data_to_device", step.host + 10, step.host + 30)
    alone = clean.copy_stream != COPY_STREAM
    made.copy(clean.copy, step.gpu, step.gpu + clean.copy_us, step.host + 12, 65536 * 2, stream=clean.copy_stream)
    step.host, step.gpu = step.host + 30, step.gpu + (clean.copy_us if alone else 0)
    for index in range(clean.micro_batches):
        _micro_batch(made, clean, step, last=index == clean.micro_batches - 1)
    began = step.host
    _change(clean, "optimizer", step)
    for op in clean.optimizer:
        step.kernel(FUSED_ADAM if "fused" in op else ADD, 800 / len(clean.optimizer), op)
    made.annotation("optimizer_step", began, step.host)
    made.step(number, at, step.host + 2)
    step.host, step.gpu = step.host + 5, step.gpu + 8


def _micro_batch(made: MadeTrace, clean: Clean, step: Step, last: bool):
    share = 1 / clean.micro_batches
    began = step.host
    _change(clean, "forward", step)
    step.kernel(clean.gemm, 2000 * share, "aten::mm", clean.dims, clean.dtypes)
    step.kernel(FLASH, 1000 * share, "aten::_flash_attention_forward")
    for kernel in clean.forward:
        step.kernel(*kernel)
    made.annotation("forward", began, step.host)
    began, device = step.host, step.gpu
    _change(clean, "backward", step)
    node = step.host
    for part in (3000, 2500):
        step.kernel(clean.gemm, part * share + clean.late_us / 2, "aten::mm", clean.dims, clean.dtypes, thread=AUTOGRAD)
    made.op("autograd::engine::evaluate_function: MmBackward0", node - 1, step.host, AUTOGRAD)
    _reduce(made, clean, step, device, last)
    made.annotation("backward", began, step.host)


def _reduce(made: MadeTrace, clean: Clean, step: Step, began: float, last: bool):
    """Gradients of 64 MiB in two buckets, beside the second half of backward and after it."""
    if clean.reduce == "none" or not (last or clean.reduce == "every"):
        return
    middle, end, launched = (began + step.gpu) / 2, step.gpu, step.host - 10
    spans = {
        "overlap": [(middle, middle + 1000), (middle + 1000, end - 100)],
        "tail": [(middle, middle + 1000), (end - 200, end + 800)],
        "every": [(middle, middle + 200), (end - 100, end + 500)],
        "after": [(end, end + 600), (end + 600, end + 1200)],
        "late": [(end, end + clean.wait_us + 300)],
        "buckets": [(end + 40 * index, end + 40 * index + 40) for index in range(24)],
    }[clean.reduce]
    for start, until in spans:
        elements = 4096 if clean.reduce == "buckets" else 2**23
        made.collective(start, until, launched, elements=elements, **clean.collective)
    step.gpu = max(end, spans[-1][1])


def _change(clean: Clean, where: str, step: Step):
    change = clean.changes.get(f"before_{where}")
    if change:
        change(step)


def cpu(
    folder: Path,
    steps=STEPS,
    change=None,
    rank=0,
    optimizer=("aten::_fused_adamw_",),
    dtype="c10::BFloat16",
    dims=None,
    micro_batches=1,
    between_us=50.0,
) -> Path:
    """A CPU rank's trace: per step, in us, forward 3,000, backward 5,500, optimizer 800; `change(made, at)` adds."""
    made = MadeTrace(rank, 1, device=None)
    for index in range(steps):
        at = index * STEP_US
        made.step(10 + index, at, at + STEP_US - 5)
        made.annotation("data", at, at + 20)
        host, share = at + 20, 1 / micro_batches
        for _ in range(micro_batches):
            host = _cpu_range(made, "forward", host, [("aten::mm", 3000 * share)], between_us, dims, dtype)
            host = _cpu_range(made, "backward", host, [("aten::mm", 5500 * share)], between_us, dims, dtype)
        _cpu_range(made, "optimizer_step", host, [(op, 800 / len(optimizer)) for op in optimizer], 0, None, dtype)
        if change:
            change(made, at + 20)
    return made.write(folder)


def _cpu_range(made: MadeTrace, name: str, host: float, ops, between_us: float, dims, dtype: str) -> float:
    began = host
    for op, us in ops:
        shapes = {"dims": dims or PROJECTION, "dtypes": [dtype] * 2} if op == "aten::mm" else {}
        made.op(op, host, host + us, **shapes)
        host += us + between_us
    made.annotation(name, began, host)
    return host


ARGS = {"micro_batch_size": 4, "log_interval": 100, "recompute_granularity": None, "attention_dropout": 0.0}
ARGS |= {"loss_scale": None, "async_save": False, "manual_gc": False}
SHAPE = {"num_layers": 24, "hidden_size": 4096, "ffn_hidden_size": 16384, "kv_channels": 128}
SHAPE |= {"num_attention_heads": 32, "num_query_groups": 32, "seq_length": 2048, "padded_vocab_size": 50304}
MACHINES = {
    "cuda": {"device": "NVIDIA H100 80GB HBM3", "memory_bytes": 85 * 10**9, "cpus": 64},
    "cpu": {"device": "cpu", "threads": 1, "bf16_products": True, "cpus": 8},
}


def run(
    folder: Path,
    steps: list[dict] | None = None,
    ranks: list[dict] | None = None,
    *,
    device="cuda",
    precision="bf16",
    world=2,
    batch=8,
    vocabulary=50257,
    shape=None,
    hardware=None,
    environment=None,
    parameters=355_919_872,
    num_workers=2,
    compiled=False,
    plan=None,
    **args,
) -> Path:
    """A run folder: run.json and steps.jsonl. `steps`: `ordinary_steps()` if not given. `ranks`: lines of all ranks."""
    record = {
        "schema": 1,
        "status": "finished",
        "started": "2026-01-01T00:00:00+0000",
        "parameters": parameters,
        "plan": {
            "args": {"all": ARGS | args},
            "settings": ARGS | args,
            "world": {"rank": world - 1, "size": world, "local_size": world},
            "shape": SHAPE | (shape or {}),
            "vocab_size": vocabulary,
            "device": device,
            "precision": precision,
            "batch": {"final": batch, "start": 0},
            "compilation": {"layers": compiled, "why": ""},
            "loader_workers": num_workers,
        }
        | (plan or {}),
        "hardware": MACHINES[device] | (hardware or {}),
        "environment": environment or {},
    }
    decided = record["plan"]
    if "micro_batches" not in decided:
        sharing = decided.get("layout", {}).get("data") or decided["world"]["size"]
        decided["micro_batches"] = batch // ((ARGS | args)["micro_batch_size"] * sharing) or None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record))
    lines = (ordinary_steps() if steps is None else steps) + [{"kind": "ranks", "ranks": line} for line in ranks or []]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def ordinary_steps(number: int = 40, **columns) -> list[dict]:
    """`columns`: a value of each step, or a function of its index from 0; phases as phase_NAME."""
    found = []
    for index in range(number):
        value = {name: one(index) if callable(one) else one for name, one in columns.items()}
        phases = {"data": 0.1, "forward": 3.0, "backward": 5.5, "optimizer_step": 0.8}
        phases |= {name.removeprefix("phase_"): value.pop(name) for name in [*value] if name.startswith("phase_")}
        line = {
            "kind": "step",
            "iteration": index + 1,
            "step": index + 1,
            "consumed_samples": 8 * (index + 1),
            "batch_size": 8,
        }
        line |= {"ms": 10.0, "phases_ms": phases, "loss": 3.0 - index / 1000, "grad_norm": 1.0, "loss_scale": 1.0}
        found.append(line | {"skipped": False, "next_lr": 1e-4, "host_memory_bytes": 2**31, **value})
    return found


def rank_lines(forward_ms: list[float], lines: int = 6, **more) -> list[dict]:
    """Console lines of all ranks. `more`: further lists."""
    ranks = len(forward_ms)
    phases = {"data": [0.1] * ranks, "forward": forward_ms, "backward": [5.5] * ranks}
    line = {"steps": [5] * ranks, "step_ms": [10.0] * ranks, "phases_ms": phases, "host_memory_bytes": [2**31] * ranks}
    return [{"iterations": [1 + 5 * k, 5 + 5 * k], **line, **more} for k in range(lines)]
