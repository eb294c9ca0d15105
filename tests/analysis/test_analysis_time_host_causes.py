"""What the host did, by names: each cause has its row, one-time costs are no cost of each step, and what no name
tells stays the host's."""

import pytest
from support.trace_maker import AUTOGRAD, MAIN, MadeTrace, gpu_run, measure

from megatron_lite.analysis.time.host_names import AFTER_SYNCS, CAUSES, PATTERNS, name_cause
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.analysis.verdict import LOSSES
from megatron_lite.report import palette

NAMES = """
data_wait | range | enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__
data_wait | range | enumerate(DataPipe)#BatcherIterDataPipe
data_wait | range | [pl][profile][_TrainingEpochLoop].train_dataloader_next
data_wait | range | next(data_iter)
data_wait | range | train.next(data_iter)
data_wait | range | get_batch
data_wait | range | Fetching next batch
data_wait | range | aten::pin_memory
data_wait | range | IteratorGetNext
data_wait | frame | torch/utils/data/dataloader.py(701): __next__
data_wait | frame | torch/utils/data/dataloader.py(1448): _next_data
data_wait | frame | torch/utils/data/dataloader.py(1015): __init__
data_wait | frame | torch/utils/data/_utils/collate.py(377): default_collate
data_wait | frame | torchdata/stateful_dataloader/stateful_dataloader.py(444): __next__
data_wait | frame | nvidia/dali/plugin/pytorch/__init__.py(235): __next__
data_wait | frame | /usr/lib/python3/dist-packages/nvidia/dali/pipeline.py(1211): share_outputs
data_wait | frame | webdataset/pipeline.py(70): iterator
data_wait | frame | ffcv/loader/epoch_iterator.py(142): __next__
data_wait | frame | tensorflow/python/data/ops/iterator_ops.py(826): __next__
data_wait | frame | datasets/arrow_dataset.py(2777): __getitem__
data_wait | frame | datasets/iterable_dataset.py(2090): __iter__
data_wait | frame | streaming/base/dataset.py(1479): __iter__
data_wait | frame | accelerate/data_loader.py(567): __iter__
data_wait | frame | lightning/pytorch/loops/fetchers.py(134): __next__
data_wait | frame | megatron/training/utils.py(300): get_batch_on_this_tp_rank
data_wait | frame | pretrain_gpt.py(120): get_batch
data_wait | frame | deepspeed/runtime/dataloader.py(33): __next__
data_wait | frame | torchvision/datasets/folder.py(245): __getitem__
data_wait | frame | PIL/Image.py(1000): convert
data_wait | frame | /home/me/project/input_reader.py(12): __next__
data_wait | frame | train.py(116): get_batch
data_wait | frame | <built-in function next>
process_wait | frame | queue.py(154): get
process_wait | frame | multiprocessing/connection.py(246): recv
process_wait | frame | torch/distributed/distributed_c10d.py(4800): barrier
process_wait | frame | torch/distributed/distributed_c10d.py(3000): all_gather_object
process_wait | range | gloo:all_reduce
save | frame | torch/serialization.py(944): save
save | frame | torch/distributed/checkpoint/state_dict_saver.py(90): save
save | frame | safetensors/torch.py(302): save_file
save | frame | deepspeed/runtime/engine.py(3200): save_checkpoint
save | frame | transformers/modeling_utils.py(3500): save_pretrained
save | frame | train.py(80): save_checkpoint
save | frame | main.py(330): validate
save | range | save checkpoint
save | range | torch.save
garbage_collector | range | Python GC
garbage_collector | frame | <built-in function collect>
allocator | call | cudaMalloc
allocator | call | cudaHostAlloc
allocator | call | cuMemCreate
allocator | call | hipFree
allocator | call | cuMemAlloc_v2
startup | call | cuModuleLoadDataEx
startup | call | cuLibraryLoadData
startup | call | hipModuleLoadData
startup | call | cuDevicePrimaryCtxRetain
startup | call | cuCtxCreate_v2
startup | call | cudaStreamCreateWithPriority
startup | call | cublasCreate_v2
startup | call | cublasLtCreate
startup | call | cudnnCreate
startup | call | rocblas_create_handle
startup | call | ncclCommInitRankConfig
startup | overhead | Lazy Function Loading
startup | overhead | Runtime Triggered Module Loading
startup | frame | torch/cuda/__init__.py(330): _lazy_init
startup | frame | torch/distributed/distributed_c10d.py(1600): init_process_group
startup | frame | <frozen importlib._bootstrap>(1022): _find_and_load
profiler | overhead | Command Buffer Full
profiler | overhead | Instrumentation
compile | range | _compile.compile_inner (dynamo_timed)
compile | range | CachingAutotuner.benchmark_all_configs
compile | range | entire_frame_compile
compile | frame | torch/_dynamo/convert_frame.py(1180): _compile
compile | frame | torch/_inductor/async_compile.py(400): wait
compile | frame | torch/_inductor/runtime/triton_heuristics.py(900): autotune_to_one_config
compile | frame | triton/compiler/compiler.py(226): compile
compile | frame | triton/runtime/autotuner.py(150): _bench
compile | frame | torch/utils/cpp_extension.py(1700): _jit_compile
compile | frame | flashinfer/jit/core.py(70): build_and_load
compile | call | nvrtcCompileProgram
compile | call | cudnnFindConvolutionForwardAlgorithmEx
graph_capture | call | cudaStreamBeginCapture
graph_capture | call | cudaStreamEndCapture
graph_capture | call | cudaGraphInstantiate
graph_capture | call | cudaGraphInstantiateWithFlags
graph_capture | call | cuGraphInstantiateWithFlags
graph_capture | call | hipGraphInstantiate
graph_capture | call | hipStreamBeginCapture
graph_capture | frame | torch/cuda/graphs.py(80): capture_begin
graph_capture | frame | vllm/v1/worker/gpu_model_runner.py(2400): capture_model
cpu_optimizer | range | Optimizer.step#DeepSpeedCPUAdam.step
cpu_optimizer | range | Optimizer.step#CPUOffloadOptimizer.step
cpu_optimizer | frame | deepspeed/ops/adam/cpu_adam.py(110): step
cpu_optimizer | frame | <built-in method adam_update of PyCapsule object at 0x7f>
clip_grad | frame | torch/nn/utils/clip_grad.py(165): clip_grad_norm_
clip_grad | frame | deepspeed/runtime/zero/stage3.py(2000): unscale_and_clip_grads
clip_grad | frame | torch/distributed/fsdp/fully_sharded_data_parallel.py(1050): clip_grad_norm_
log | frame | wandb/sdk/wandb_run.py(1500): log
log | frame | torch/utils/tensorboard/writer.py(350): add_scalar
log | frame | tqdm/std.py(1100): update
log | frame | torchmetrics/metric.py(300): forward
log | frame | <built-in function print>
"""
UNNAMED = """
call | cudaLaunchKernel
call | cudaGraphLaunch
call | cudaStreamSynchronize
call | cudaStreamIsCapturing
call | cudaStreamGetCaptureInfo_v2
call | cudaThreadExchangeStreamCaptureMode
call | cudaMemcpyAsync
call | cudaFuncSetAttribute
call | cudaEventRecord
range | forward
range | aten::mm
range | aten::_foreach_norm
range | Optimizer.step#AdamW.step
range | TorchDynamo Cache Lookup
range | Torch-Compiled Region: 0/0
range | ## Call CompiledFxGraph abc ##
range | autograd::engine::evaluate_function: MulBackward0
range | ProfilerStep#12
range | prepare_inputs
range | validate_shapes
range | logits
range | catalog
frame | train.py(12): train_step
frame | torch/nn/modules/module.py(1751): _call_impl
frame | torch/nn/functional.py(2300): linear
frame | triton/runtime/jit.py(600): run
frame | torch/_dynamo/eval_frame.py(700): _fn
frame | torch/optim/adamw.py(200): step
frame | huggingface_hub/file_download.py(100): exists
frame | pydantic/main.py(200): validate
frame | torch/utils/data/dataloader.py(20): helper
overhead | Buffer Flush
overhead | Activity Buffer Request
"""


def lines_of(table: str) -> list[tuple[str, ...]]:
    return [tuple(map(str.strip, line.split(" | "))) for line in table.strip().splitlines()]


@pytest.mark.parametrize(("cause", "seen_as", "name"), lines_of(NAMES), ids=lambda part: part[-40:])
def test_a_name_of_practice_tells_its_cause(cause, seen_as, name):
    found = name_cause(name, seen_as)
    assert found is not None
    assert found[0] == cause


@pytest.mark.parametrize(("seen_as", "name"), lines_of(UNNAMED), ids=lambda part: part[-40:])
def test_an_ordinary_name_tells_none(seen_as, name):
    assert name_cause(name, seen_as) is None


def test_every_cause_has_a_row_a_color_a_verdict_and_patterns():
    named = {row.cause for rows in PATTERNS.values() for row in rows}
    assert named == {*CAUSES, *AFTER_SYNCS}
    assert named <= set(ROW_TITLES) and named <= set(LOSSES) and named <= set(palette.ROWS)
    assert set(ROW_TITLES) == set(palette.ROWS)


def unmarked_loop(wait_us: float, name="enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", category=""):
    """Six steps without marks, of 4 ms computing behind `wait_us` in the loader; autograd's thread has most events."""
    made, host = MadeTrace(), 0.0
    for _ in range(6):
        made.add(category or "user_annotation", name, host, host + wait_us)
        at = host + wait_us + 20
        made.op("aten::linear", at, at + 30)
        made.kernel("sm90_xmma_gemm_bf16", at + 10, at + 1010, at + 1)
        for node in range(8):
            begun = at + 60 + 10 * node
            made.op("autograd::engine::evaluate_function: AddmmBackward0", begun, begun + 9, AUTOGRAD)
            made.op("aten::t", begun + 1, begun + 2, AUTOGRAD)
        made.kernel("sm90_xmma_gemm_bf16", at + 1010, at + 4010, at + 100, thread=AUTOGRAD)
        made.runtime("cudaDeviceSynchronize", at + 200, at + 4020)
        host = at + 4040
    return made


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", ""),
        ("enumerate(DataPipe)#ShufflerIterDataPipe", ""),
        ("torch/utils/data/dataloader.py(701): __next__", "python_function"),
        ("nvidia/dali/plugin/pytorch/__init__.py(235): __next__", "python_function"),
        ("train.py(30): get_batch", "python_function"),
    ],
)
def test_a_wait_for_the_loader_is_told_without_marks_of_steps(tmp_path, name, category):
    time = measure(unmarked_loop(6_000, name, category), tmp_path)
    per_wait = time.rows["data_wait"] * len(time.steps) / 6
    assert per_wait == pytest.approx(6.0, rel=0.18)  # the first may lie before the first step on the device
    assert time.rows["host"] < 0.02 * time.step_ms


def test_a_loader_that_is_not_awaited_costs_nothing(tmp_path):
    time = measure(gpu_run(), tmp_path)
    assert time.rows["data_wait"] < 0.05 * time.step_ms


def test_an_iterator_that_yields_steps_of_training_is_no_loader(tmp_path):
    made = unmarked_loop(10)
    made.add("python_function", "<built-in function next>", 5, 24_000)
    time = measure(made, tmp_path)
    assert time.rows["data_wait"] < 0.05 * time.step_ms


def stepping(between, steps=6, first=3, step_us=10_000.0, only=None) -> MadeTrace:
    """Steps of 6 ms computing; `between(made, at)` adds what the host does for 3 ms from `at` on, in all steps or in `only`."""
    made = MadeTrace()
    for index in range(steps):
        at = index * step_us
        made.step(first + index, at, at + step_us - 10)
        if only is None or index in only:
            between(made, at + 100)
        made.op("aten::mm", at + 3_110, at + 3_130)
        made.kernel("ampere_sgemm_128x64_tn", at + 3_130, at + 9_130, at + 3_115)
    return made


def captures(made: MadeTrace, at: float):
    made.runtime("cudaStreamBeginCapture", at, at + 10)
    made.runtime("cudaStreamEndCapture", at + 1_990, at + 2_000)
    made.runtime("cudaGraphInstantiate", at + 2_000, at + 3_000)


def loads_modules(made: MadeTrace, at: float):
    made.runtime("cuModuleLoadData", at, at + 3_000)


def lazy_loading(made: MadeTrace, at: float):
    made.runtime("cudaLaunchKernel", at, at + 3_000)
    made.add("overhead", "Lazy Function Loading", at + 1, at + 3_000, thread=0, pid=-1)


def compiles(made: MadeTrace, at: float):
    made.annotation("_compile.compile_inner (dynamo_timed)", at, at + 3_000)


def writes(made: MadeTrace, at: float):
    made.frame("torch/serialization.py(944): save", at, at + 3_000)


def waits_for_ranks(made: MadeTrace, at: float):
    made.frame("torch/distributed/distributed_c10d.py(4800): barrier", at, at + 3_000)


def logs(made: MadeTrace, at: float):
    made.frame("wandb/sdk/wandb_run.py(1500): log", at, at + 3_000)


def clips(made: MadeTrace, at: float):
    made.annotation("clip_grad_norm", at, at + 3_000)


def cpu_adam(made: MadeTrace, at: float):
    made.annotation("Optimizer.step#DeepSpeedCPUAdam.step", at, at + 3_000)


def adam_on_the_cpu(made: MadeTrace, at: float):
    made.annotation("Optimizer.step#AdamW.step", at, at + 3_000)
    for number in range(6):
        made.op("aten::addcdiv_", at + 500 * number, at + 500 * number + 495)


@pytest.mark.parametrize(
    ("row", "work"),
    [
        ("graph_capture", captures),
        ("startup", loads_modules),
        ("startup", lazy_loading),
        ("compile", compiles),
        ("save", writes),
        ("process_wait", waits_for_ranks),
        ("log", logs),
        ("clip_grad", clips),
        ("cpu_optimizer", cpu_adam),
        ("cpu_optimizer", adam_on_the_cpu),
    ],
)
def test_each_cause_has_its_row(tmp_path, row, work):
    time = measure(stepping(work), tmp_path)
    assert time.rows[row] == pytest.approx(3.0, rel=0.05)
    assert time.rows["host"] < 1.2


def test_an_update_on_the_gpu_and_its_step_counters_are_no_optimizer_on_the_cpu(tmp_path):
    def update(made: MadeTrace, at: float):
        made.annotation("Optimizer.step#AdamW.step", at, at + 3_000)
        made.op("aten::_foreach_add_", at, at + 1_000)
        for number in range(100):
            made.op("aten::add_", at + 10 * number, at + 10 * number + 3)
        made.op("aten::_foreach_addcdiv_", at + 1_100, at + 1_300)
        made.kernel("multi_tensor_apply_kernel", at + 1_200, at + 1_400, at + 1_150)

    assert measure(stepping(update), tmp_path).rows["cpu_optimizer"] == 0


@pytest.mark.parametrize(
    ("work", "why"),
    [(captures, "captured"), (loads_modules, "starts"), (lazy_loading, "starts"), (compiles, "compiled")],
)
def test_what_is_paid_once_is_in_no_typical_step(tmp_path, work, why):
    time = measure(stepping(work, only={2}), tmp_path)
    assert [step.name for step in time.steps if why in step.why_not] == ["ProfilerStep#5"]
    assert all(time.rows[row] == 0 for row in ("startup", "compile", "graph_capture"))
    assert all(one.once and one.step == "ProfilerStep#5" for one in time.named)
    assert sum(one.trace_ms for one in time.named) == pytest.approx(3.0, rel=0.4)


def test_what_comes_in_every_step_is_not_paid_once(tmp_path):
    time = measure(stepping(captures), tmp_path)
    assert not any(one.once for one in time.named)
    assert len(time.steady_steps) >= 4


def test_in_a_trace_without_marks_what_stops_early_is_paid_once(tmp_path):
    made = unmarked_loop(10)
    made.runtime("cudaStreamCreateWithPriority", 0, 10)
    early = measure(made, tmp_path / "early")
    assert [one.once for one in early.named if one.cause == "startup"] == [True]


def test_work_on_a_thread_that_drives_no_device_is_no_cause(tmp_path):
    def elsewhere(made: MadeTrace, at: float):
        made.frame("torch/utils/data/dataloader.py(701): __next__", at, at + 3_000, thread=777)

    time = measure(stepping(elsewhere), tmp_path)
    assert time.rows["data_wait"] == 0
    assert time.rows["host"] > 2.5
    assert MAIN != 777
