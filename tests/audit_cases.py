"""For each point of the audit made runs that pass, fail and do not show it.

Runs are functions of an empty folder, as in finding_cases.
"""

from finding_cases import (
    CASES,
    NEVER_GOOD,
    PAGEABLE,
    both,
    cpu,
    cpu_reads,
    every,
    gpu,
    memory,
    on_a_gpu_of,
    on_cpu,
    on_gpu,
    ordinary_steps,
    profiled_steps,
    recorded,
    remembered,
    run,
)
from trace_maker import cpu_run, gpu_run
from training_maker import ADD, FP32_GEMM, Step

from megatron_lite.analysis.audit.answers import Answer

PASS, FAIL, NOT_SEEN = Answer.PASS, Answer.FAIL, Answer.NOT_SEEN
OWN_DATA = {"dataloader_type": "single", "shape": {"max_position_embeddings": 2048}}
LOST_RUN = recorded(steps=ordinary_steps(loss=lambda index: 3.0 - index / 1000 if index < 30 else None), **OWN_DATA)


FOUR_SUMS = [(ADD, 500, "aten::add")] * 4
WITHOUT_UNITS = recorded(device="cpu", world=1, hardware={"bf16_products": False})


def fp16(*args, **columns):
    return recorded(precision="fp16", steps=ordinary_steps(*args, **columns), **OWN_DATA)


NEVER_GOOD_RUN = fp16(14, **NEVER_GOOD)


def failing(code):
    return CASES[code][0]


def slow_copies(step: Step):
    """The host stands in the copy of a pinned batch until the device has nothing left."""
    asked = step.host
    began, _ = step.gap(600)
    step.made.annotation("data_to_device", asked, began + 350)
    step.made.sync(asked + 5, began + 300, operator="aten::to")


def steps_of(ms: float, memory: bool):
    """Of `ms` and a little noise; the peak takes as many GiB."""
    columns = {"peak_memory_bytes": int(ms * 2**30)} if memory else {}
    return ordinary_steps(ms=lambda index: ms + index % 3 / 10, **columns)


def rates(held: bool):
    """A schedule that falls with every update; the 8th step is skipped."""
    return ordinary_steps(
        skipped=lambda index: index == 7, next_lr=lambda index: 1e-4 - 1e-6 * (index - (held and index >= 7))
    )


compiled = recorded(
    compiled=True, steps=ordinary_steps(ms=lambda index: 10.0 if index else 900.0, compiling=every(1, False, True))
)
# number: (passes, fails, its code, is not seen)
POINTS = {
    1: (recorded(steps=ordinary_steps(gpu_ms=9.0)), run, "", memory),
    2: (run, recorded(steps=ordinary_steps(6, profiled=True)), "", memory),
    3: (gpu, failing("sync-in-step"), "sync-in-step", run),
    4: (gpu, failing("starved-loader"), "starved-loader", memory),
    5: (gpu, failing("unpinned-copies"), "unpinned-copies", cpu),
    6: (gpu, failing("small-copies"), "small-copies", cpu),
    7: (gpu, failing("copy-share"), "copy-share", run),
    8: (gpu, failing("launch-bound"), "launch-bound", run),
    9: (gpu, failing("no-tensor-cores"), "no-tensor-cores", run),
    10: (None, failing("fp32-products"), "fp32-products", run),
    11: (fp16(loss_scale=65536.0), failing("overflow-storm"), "overflow-storm", gpu),
    12: (both(remembered(), on_a_gpu_of(80)), failing("memory-growth"), "memory-growth", gpu),
    13: (both(gpu, run), failing("reduce-every-micro-batch"), "reduce-every-micro-batch", gpu),
    14: (both(gpu, recorded(steps=profiled_steps(10.5))), failing("profiler-overhead"), "profiler-overhead", gpu),
    15: (compiled, failing("recompilation"), "recompilation", run),
    16: (both(gpu, recorded(**OWN_DATA)), failing("vocabulary-padding"), "vocabulary-padding", gpu),
    17: (recorded(**OWN_DATA), fp16(skipped=every(5, True, False)), "overflow-storm", gpu),
    18: (None, None, "", run),
}
# other ways to the answers: (number, answer, code, made run, what it must say)
MORE = [
    (11, FAIL, "overflow-storm", NEVER_GOOD_RUN, "all 14 steps were skipped"),
    (11, NOT_SEEN, "", fp16(14, skipped=lambda index: index < 13), "13 of 14"),
    (13, FAIL, "overflow-storm", NEVER_GOOD_RUN, "no update at all: all 14 steps were skipped"),
    (13, FAIL, "no-learning", recorded(steps=ordinary_steps(loss=None)), "not finite in all 40 updates"),
    (17, FAIL, "overflow-storm", NEVER_GOOD_RUN, "all 14 steps were skipped"),
    (17, FAIL, "no-learning", LOST_RUN, "not finite in 10 of 40 updates (iteration 31, 32, 33, ...)"),
    (1, PASS, "", recorded(device="cpu"), "39 of 40 steps count"),
    (1, PASS, "", gpu, "11 steps ran before the first that counts"),
    (1, NOT_SEEN, "", cpu, "no work of a GPU"),
    (2, PASS, "", gpu, "4 steady steps"),
    (2, NOT_SEEN, "", on_gpu(steps=1), "1 steady step of 1"),
    (3, PASS, "", on_cpu(), "no read waits; 0 values read"),
    (3, PASS, "", on_cpu(change=cpu_reads), "no read waits; 84 values read"),
    (3, PASS, "", CASES["sync-in-step"][1], "1 synchronizations per step"),
    (3, FAIL, "sync-in-step", on_gpu(before_forward=slow_copies), "aten::to"),
    (4, PASS, "", run, "in the phase data"),
    (5, FAIL, "unpinned-copies", on_gpu(copy=PAGEABLE), "from pageable memory"),
    (5, FAIL, "sync-in-step", on_gpu(before_forward=slow_copies), "1 wait of the host for them"),
    (5, NOT_SEEN, "", on_gpu(copy="CopyHostToDevice"), "do not say"),
    (5, NOT_SEEN, "", on_gpu(copy="Memcpy DtoD (Device -> Device)"), "no copy from the host"),
    (6, NOT_SEEN, "", cpu, "nothing is copied to one"),
    (8, FAIL, "unfused-elementwise", both(on_gpu(forward=FOUR_SUMS), recorded(compiled=True)), "15% would be"),
    (9, FAIL, "fp32-products", on_gpu(gemm=FP32_GEMM, dtypes=["float", "float"]), "0 ms of"),
    (9, FAIL, "matmul-shapes", failing("matmul-shapes"), "MLP"),
    (9, PASS, "", on_cpu(), "are multiples of 64"),
    (9, NOT_SEEN, "", lambda folder: cpu_only(folder), "--pytorch-profiler-collect-shapes"),
    (10, FAIL, "fp32-products", both(on_cpu(dtype="float"), WITHOUT_UNITS), "in fp32"),
    (10, NOT_SEEN, "", both(gpu, recorded(precision="fp32")), "in bf16 or fp16"),
    (11, PASS, "", run, "bf16 has the range of fp32"),
    (12, NOT_SEEN, "", run, "does not grow over 39 ordinary steps"),
    (12, NOT_SEEN, "", remembered(steps=1, logits_gib=0.1, layer_gib=0.1), "peak of"),
    (13, FAIL, "", recorded(steps=ordinary_steps(batch_size=10, consumed_samples=None)), "no multiple of 8"),
    (13, FAIL, "", recorded(batch=16), "the plan has 16 samples"),
    (13, FAIL, "", both(on_gpu(micro_batches=2), run), "2 backward passes per step"),
    (13, FAIL, "", fp16(consumed_samples=lambda index: 4 * index), "has 8 samples and counts 4"),
    (13, FAIL, "", recorded(steps=rates(held=False)), "iteration 8, which was skipped"),
    (13, PASS, "", recorded(steps=rates(held=True)), "held in skipped ones"),
    (14, NOT_SEEN, "", run, "a trace"),
    (15, FAIL, "graph-breaks", failing("graph-breaks"), "different functions"),
    (16, NOT_SEEN, "", lambda folder: changing_shapes(folder), "not the same in each"),
    (16, NOT_SEEN, "", on_gpu(steps=1), "--profile-step-end"),
    (16, NOT_SEEN, "", recorded(dataloader_type="external"), "2,048 positions"),
    (17, NOT_SEEN, "", recorded(**OWN_DATA | {"dataloader_type": "external"}), "tokens/s"),
    (17, NOT_SEEN, "", recorded(eod_mask_loss=True, **OWN_DATA), "--eod-mask-loss"),
]


def cpu_only(folder):
    """Without shapes."""
    made = cpu_run()
    for event in made.events:
        event["args"] = {}
    made.write(folder)


def changing_shapes(folder):
    made = gpu_run(steps=4)
    for number, event in enumerate(event for event in made.events if event["name"] == "aten::mm"):
        event["args"]["Input Dims"] = [[64, 128 + number], [128 + number, 256]]
    made.write(folder)
