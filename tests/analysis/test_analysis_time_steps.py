"""Where steps are without the profiler's marks: which ranges are steps, which thread runs the loop, and what is left out."""

import pytest
from support.trace_maker import AUTOGRAD, MAIN, MadeTrace, measure, place

from megatron_lite.analysis.time.range_names import drop_numbers
from megatron_lite.phase_names import find_meaning, find_step_family

LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
ENGINE = "autograd::engine::evaluate_function: AddmmBackward0"


def steps_of(made: MadeTrace, folder) -> list[str]:
    return [step.name for step in place(made, folder)[1].steps]


@pytest.mark.parametrize(
    "names",
    [
        ["execute_context_1(512)_generation_15(15)", "execute_context_0(0)_generation_15(15)"],
        ["execute_new_1_cached_8", "execute_new_0_cached_9"],
        ["execute_3_context_3(sq128sk256)_generation_2(sq1sk300)", "execute_4_context_0(sq0)_generation_5(sq5)"],
        ["step[EXTEND bs=2 toks=107]", "step[DECODE bs=4]"],
        ["[Executor] _forward_step 7: 1 ctx reqs, 12 ctx tokens, 3 gen reqs", "[Executor] _forward_step 8: 0 ctx reqs"],
        ["forward_extend", "forward_decode"],
        ["train_step", "train_step"],
    ],
)
def test_names_of_servers_steps_whose_numbers_change(tmp_path, names):
    made = MadeTrace()
    for index in range(8):
        at = 1000.0 * index
        # a third of the loop: the scheduler takes the rest
        made.annotation(names[index % 2], at, at + 330)
        made.kernel("k", at + 100, at + 400, at + 50)
    time = measure(made, tmp_path)
    assert len(time.steps) == 8 and time.step_ms == pytest.approx(1.0)
    assert time.rows["compute"] == pytest.approx(0.3)
    assert not [phase for phase in time.phases if phase.name in names], "a step is no phase"


def test_names_that_count_calls_are_one_name(tmp_path):
    made = MadeTrace()
    for index in range(6):
        at = 1000.0 * index
        made.annotation(f"handle {index * 7 + 3} requests", at, at + 900)
        made.kernel("k", at + 100, at + 400, at + 50)
    time = measure(made, tmp_path)
    assert len(time.steps) == 6 and "handle N requests" in time.notes[0]


def test_parts_of_a_model_are_no_steps(tmp_path):
    made = MadeTrace()
    for layer in range(6):
        made.annotation(f"layer_{layer}", 1000.0 * layer, 1000.0 * layer + 990)
        made.kernel("k", 1000.0 * layer + 100, 1000.0 * layer + 400, 1000.0 * layer + 50)
    assert steps_of(made, tmp_path) == ["whole trace"]


def test_variants_of_a_name_are_one_phase(tmp_path):
    made = MadeTrace()
    for index in range(3):
        at = 1000.0 * index
        made.step(index, at, at + 990)
        made.annotation(f"decode {index} of 3", at + 10, at + 500)
        made.annotation(f"layer_{index}", at + 500, at + 900)
        made.kernel("k", at + 100, at + 400, at + 50)
        made.kernel("k", at + 600, at + 700, at + 550)
    _, placing = place(made, tmp_path)
    assert set(placing.phases) == {"decode N of N", "layer_0", "layer_1", "layer_2"}


def test_a_range_inside_its_own_name_does_not_come_back(tmp_path):
    made = MadeTrace().add_all(
        ("annotation", "bench", 0, 10_000),
        ("annotation", "bench", 10, 9_990),
        ("annotation", "other", 9_991, 9_995),
        ("kernel", "k", 9000, 9500, 20),
    )
    assert steps_of(made, tmp_path) == ["whole trace"]
    made.annotation("bench", 10_100, 20_000)
    made.kernel("k", 19_000, 19_500, 10_200)
    assert steps_of(made, tmp_path) == ["bench", "bench"]


@pytest.mark.parametrize("word", ["warmup", "warm-up", "Warm_Up", "warming up"])
def test_a_warm_up_is_left_out(tmp_path, word):
    made = MadeTrace().add_all(
        ("annotation", f"bench|{word}|forward", 0, 10_000),
        ("annotation", f"bench|{word}|forward", 10, 9_990),
        ("kernel", "cold", 9000, 9500, 20),
        ("annotation", "bench|measure|forward", 10_100, 10_500),
        ("kernel", "k", 10_200, 10_480, 10_150),
    )
    time = measure(made, tmp_path)
    assert [step.name for step in time.steps] == ["bench|measure|forward"]
    assert time.rows["compute"] == pytest.approx(0.28) and time.step_ms < 0.5


def test_a_repeated_warm_up_gives_way_to_the_measured_ranges(tmp_path):
    made = MadeTrace()
    for index, name in enumerate(["warmup", "warmup", "warmup", "timed", "timed"]):
        made.annotation(name, 1000.0 * index, 1000.0 * index + 900)
        made.kernel("k", 1000.0 * index + 100, 1000.0 * index + 400, 1000.0 * index + 50)
    assert steps_of(made, tmp_path) == ["timed", "timed"]


def train(made: MadeTrace, at: float, *, draw=True, optimizers=1, loader_us=600.0, update=True) -> None:
    """An iteration of 1,000 us without a mark: the loader, a forward operator, a backward pass of many events, an update."""
    if draw:
        made.annotation(LOADER, at, at + loader_us)
    made.op("aten::linear", at + loader_us + 10, at + loader_us + 30, sequence=1)
    made.kernel("gemm", at + loader_us + 20, at + loader_us + 80, at + loader_us + 12)
    for index in range(10):
        made.op(ENGINE, at + loader_us + 100 + 10 * index, at + loader_us + 109 + 10 * index, AUTOGRAD)
        made.op("aten::t", at + loader_us + 101 + 10 * index, at + loader_us + 102 + 10 * index, AUTOGRAD)
    made.kernel("gemm", at + loader_us + 110, at + loader_us + 210, at + loader_us + 105, thread=AUTOGRAD)
    for index in range(optimizers if update else 0):
        begin = at + loader_us + 250 + 40 * index
        made.annotation("Optimizer.step#SGD.step", begin, begin + 30)
        made.kernel("update", begin + 10, begin + 20, begin + 5)


def test_the_loop_is_the_main_threads_and_its_updates_are_steps(tmp_path):
    made = MadeTrace()
    for index in range(5):
        train(made, 1000.0 * index)
    trace, placing = place(made, tmp_path)
    assert trace.threads[placing.main_thread][1] == str(MAIN)
    time = measure(made, tmp_path)
    assert [step.name for step in time.steps] == [f"update {number}" for number in range(1, 6)]
    assert time.step_ms == pytest.approx(1.0) and time.rows["data_wait"] > 0.55


@pytest.mark.parametrize(
    ("iterations", "steps"),
    [
        ([{"optimizers": 2}] * 4, 4),  # of two groups of parameters
        ([{"update": False}, {}] * 4, 4),  # gradients of two batches are added up
        ([{}, {"draw": False}] * 4, 4),  # two networks learn from one batch in turns
        ([{}], 1),
    ],
)
def test_what_a_step_without_marks_is(tmp_path, iterations, steps):
    made = MadeTrace()
    for index, iteration in enumerate(iterations):
        train(made, 1000.0 * index, **iteration)
    assert len(steps_of(made, tmp_path)) == steps


def test_batches_are_steps_where_nothing_is_updated(tmp_path):
    made = MadeTrace(device=None)
    for index in range(4):
        made.annotation(LOADER, 1000.0 * index, 1000.0 * index + 200)
        made.op("aten::mm", 1000.0 * index + 250, 1000.0 * index + 900)
    made.annotation(LOADER, 4000, 4010)  # the loader says that it is empty
    time = measure(made, tmp_path)
    assert [step.name for step in time.steps] == ["batch 1", "batch 2", "batch 3", "batch 4"]
    assert time.rows["data_wait"] == pytest.approx(0.2, rel=0.05)


def test_the_main_thread_is_not_autograds_even_without_ranges(tmp_path):
    made = MadeTrace()
    made.op("aten::linear", 10, 30)
    made.op("aten::relu", 40, 50)
    for index in range(10):
        made.op(ENGINE, 100 + 10 * index, 109 + 10 * index, AUTOGRAD)
        made.op("aten::t", 101 + 10 * index, 102 + 10 * index, AUTOGRAD)
    trace, placing = place(made, tmp_path)
    assert trace.threads[placing.main_thread][1] == str(MAIN)


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("[pl][profile][Strategy]SingleDeviceStrategy.training_step", "forward"),
        ("[pl][profile][Strategy]DDPStrategy.backward", "backward"),
        ("[pl][profile][LightningModule]M.optimizer_step", "optimizer_step"),
        ("[pl][profile][LightningModule]M.optimizer_zero_grad", "Optimizer.zero_grad"),
        ("[pl][profile][LightningModule]M.configure_gradient_clipping", "clip_grad"),
        ("[pl][profile][_TrainingEpochLoop].train_dataloader_next", "data"),
        ("[pl][profile][Strategy]DDPStrategy.validation_step", "eval"),
        ("[pl][profile]run_training_batch", "-"),
        ("[pl][module]torch.nn.modules.linear.Linear: l.0", "-"),
        ("[pl][profile][LightningModule]M.on_train_batch_end", ""),
        ("DeepSpeedEngine.forward", "forward"),
        ("DeepSpeedEngine.backward", "backward"),
        ("DeepSpeedEngine.step", "optimizer_step"),
        ("DeepSpeedEngine._take_model_step", "optimizer_step"),
        ("DeepSpeedZeroOptimizer_Stage3.step", "optimizer_step"),
        ("DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads", "clip_grad"),
        ("DeepSpeedEngine.allreduce_gradients", "grad_sync"),
        ("PartitionedParameterCoordinator.fetch_sub_module", "-"),
        ("FSDP::pre_forward (layers.0)", "forward"),
        ("FSDP::post_backward_reduce (layers.0)", "backward"),
        ("FSDP::all_gather (layers.0)", "-"),
        ("FullyShardedDataParallel.forward", "forward"),
        ("FullyShardedDataParallel._pre_forward", "forward"),
        ("FullyShardedDataParallel._post_backward_hook", "backward"),
        ("DataParallel.forward", "forward"),
        ("PP:0F3", "forward"),
        ("PP:1B12", "backward"),
        ("PP:0RECV_F1", "pipeline_wait"),
        ("Forward 2", "forward"),
        ("## Call CompiledFxGraph fa2gshbw ##", "-"),
        ("Torch-Compiled Region: 0/0", "-"),
        ("gpu_model_runner: forward", "forward"),
        ("forward_table", ""),
        ("backwards_compatible", ""),
        ("my_step", ""),
    ],
)
def test_names_that_others_give_to_phases(name, meaning):
    assert find_meaning(name) == meaning


@pytest.mark.parametrize("name", ["steps", "stepping", "pre_execute_context", "training_step_and_backward", "execute"])
def test_near_misses_of_steps(name):
    assert find_step_family(name) == -1


def test_numbers_of_calls_and_of_parts():
    assert drop_numbers("step[EXTEND bs=2 toks=107]") == "step[EXTEND bs=N toks=N]"
    assert drop_numbers("transformer.layers.12.attention") == "transformer.layers.12.attention"
