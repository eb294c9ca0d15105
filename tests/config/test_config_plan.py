"""From checked flags to what will happen."""

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
from support.command_lines import plan, read, read_table

from megatron_lite.config.flags import replace_fields
from megatron_lite.config.plan import BatchSchedule, list_stage_kinds, plan_stages
from megatron_lite.config.world import World, read_world

GPT2 = 50257


def shape(changes, vocab_size=GPT2):
    return plan(changes, vocab_size=vocab_size).shape


def test_seed_script_is_the_model_that_it_always_was():
    s = shape(
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
    )
    assert (s.ffn_hidden_size, s.kv_channels, s.num_query_groups, s.padded_vocab_size) == (4096, 64, 16, 50304)
    assert (s.tied_embeddings, s.linear_bias, s.qkv_bias, s.activation) == (True, True, True, "gelu_tanh")
    v, h, n, t = s.padded_vocab_size, s.hidden_size, s.num_layers, s.max_position_embeddings
    assert v * h + t * h + n * (12 * h * h + 13 * h) + 2 * h == 355_919_872


@pytest.mark.parametrize(("hidden", "ffn"), [(1008, 2688), (64, 128), (4096, 10880), (1024, 2688), (96, 256), (24, 64)])
def test_gated_mlp_is_eight_thirds_wide_in_steps_of_64(hidden, ffn):
    assert shape(f"--swiglu --hidden-size {hidden}").ffn_hidden_size == ffn
    assert ffn % 64 == 0 and ffn <= hidden * 8 / 3 < ffn + 64
    assert shape(f"--hidden-size {hidden}").ffn_hidden_size == 4 * hidden
    assert shape(f"--swiglu --hidden-size {hidden} --ffn-hidden-size 77").ffn_hidden_size == 77


SHAPES = read_table("""
NOTHING | activation gelu_tanh, linear_bias True, qkv_bias True, position_embedding learned_absolute, num_query_groups 4
--no-bias-gelu-fusion | activation gelu_erf
--disable-bias-linear | activation gelu_erf, linear_bias False, qkv_bias False
--disable-bias-linear --add-qkv-bias | activation gelu_erf, linear_bias False, qkv_bias True
--add-qkv-bias | linear_bias True, qkv_bias True
--swiglu | activation swiglu
--squared-relu | activation squared_relu
--swiglu --disable-bias-linear | activation swiglu
--squared-relu --no-bias-gelu-fusion | activation squared_relu
--position-embedding-type rope | position_embedding rope
--position-embedding-type rope --no-position-embedding | position_embedding rope
--position-embedding-type none | position_embedding none
--use-rotary-position-embeddings | position_embedding rope
--group-query-attention --num-query-groups 2 --kv-channels 24 | num_query_groups 2, kv_channels 24, qkv_width 192, attention_width 96
# only with --group-query-attention
--num-query-groups 2 | num_query_groups 4
--group-query-attention | num_query_groups 1
!--max-position-embeddings --position-embedding-type rope | max_position_embeddings 32
--max-position-embeddings 99 | max_position_embeddings 99
""", NOTHING="--lr 1")  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), SHAPES)
def test_shape(changes, expected):
    found = shape(changes)
    assert all(f"{getattr(found, name)}" == value for name, value in (pair.split() for pair in expected.split(", ")))


@pytest.mark.parametrize(
    ("vocab_size", "changes", "padded"),
    [
        (50257, "", 50304),
        (50304, "", 50304),
        (1, "", 128),
        (257, "--make-vocab-size-divisible-by 1", 257),
        (257, "--make-vocab-size-divisible-by 100", 300),
        (257, "--padded-vocab-size 333", 333),
        (257, "--padded-vocab-size 257", 257),
    ],
)
def test_padded_vocabulary(vocab_size, changes, padded):
    p = plan(changes, vocab_size=vocab_size)
    assert (p.shape.padded_vocab_size, p.vocab_size) == (padded, vocab_size)


PRECISIONS = {
    "": ("fp32", False), "--accumulate-allreduce-grads-in-fp32": ("fp32", False), "--fp16": ("fp16", False),
    "--fp16 --accumulate-allreduce-grads-in-fp32": ("fp16", True), "--bf16": ("bf16", True),
    "--bf16 --grad-reduce-in-bf16": ("bf16", False), "--bf16 --accumulate-allreduce-grads-in-fp32": ("bf16", True),
}  # fmt: skip
WINDOWS = {
    "": [], "--profile-step-start 3 --profile-step-end 9": [], "--profile": [10, 11],
    "--use-pytorch-profiler --profile-step-start 110 --profile-step-end 112": [110, 111],
    "--record-memory-history --profile-step-start 0 --profile-step-end 2": [1],
}  # fmt: skip


def test_precision_device_and_window():
    for changes, expected in PRECISIONS.items():
        p = plan(changes)
        assert (p.precision, p.fp32_gradients) == expected, changes
    for changes, gpus, expected in (
        ("", 0, ("cpu", "gloo")),
        ("", 2, ("cuda", "nccl")),
        ("--distributed-backend gloo", 1, ("cuda", "gloo")),
        ("--distributed-backend nccl", 1, ("cuda", "nccl")),
    ):
        p = plan(changes, World(gpus=gpus))
        assert (p.device, p.backend) == expected
    for changes, window in WINDOWS.items():  # half open, and counted from 1
        assert list(plan(changes).profile_window) == window
    for ranks, expected in (("0", {0}), ("-1", {0, 1, 2, 3}), ("3 1", {1, 3}), ("2 -1", {0, 1, 2, 3})):
        assert plan(f"--profile --profile-ranks {ranks}", World(size=4)).profile_ranks == expected


def test_batches_that_grow_and_stay():
    p = plan("!--global-batch-size --micro-batch-size 3", World(size=4))
    assert (p.batch.final, p.samples_per_pass, p.micro_batches(0)) == (12, 12, 1)
    assert plan("--global-batch-size 24", World(size=4)).micro_batches(0) == 3
    batch = BatchSchedule(8, 2, 2, 90)
    assert [batch.size(n) for n in (0, 29, 30, 59, 60, 89, 90, 91, 10**9)] == [2, 2, 4, 4, 6, 6, 8, 8, 8]
    constant = BatchSchedule(16)
    assert {constant.size(n) for n in range(0, 500, 7)} == {16}
    assert (constant.iterations(100), constant.samples(6), constant.iterations(15)) == (6, 96, 0)


def slow_sizes(start, increment, ramp_samples, final, samples):
    """The global batch of each step, one after the other, while whole batches are left."""
    each = ramp_samples / ((final - start) // increment) if final > start else 1
    sizes, consumed = [], 0
    while True:
        size = final
        if consumed <= ramp_samples and final > start:
            size = start
            for step in range(1, (final - start) // increment + 1):
                if consumed >= each * step:
                    size = start + step * increment
        if consumed + size > samples:
            return sizes
        sizes.append(size)
        consumed += size


@pytest.mark.parametrize("ramp", [(2, 2, 100), (4, 4, 37), (2, 6, 1), (8, 2, 5), (2, 2, 5000), (2, 2, 8), (4, 2, 799)])
@pytest.mark.parametrize("samples", [8, 99, 800, 3001])
def test_growing_batches_against_counting_them_out(ramp, samples):
    sizes = slow_sizes(*ramp, final=8, samples=samples)
    p = plan(f"!--train-iters --train-samples {samples} --rampup-batch-size {ramp[0]} {ramp[1]} {ramp[2]}")
    consumed = [sum(sizes[:i]) for i in range(len(sizes))]
    assert [p.batch.size(samples) for samples in consumed] == sizes
    assert [p.micro_batches(samples) for samples in consumed] == [size // 2 for size in sizes]
    assert p.train_iters == len(sizes) and p.train_samples == sum(sizes) <= samples
    assert p.batch.samples(5) == sum(p.batch.size(p.batch.samples(i)) for i in range(5))


@pytest.mark.parametrize(
    ("schedule", "samples", "sizes"),
    [
        # 32 tokens a sample; the last step may take more than --train-samples, as in Megatron-LM
        ("0:2 320:4 960:8", 50, [2] * 5 + [4] * 5 + [8] * 3),
        ("0:8,0.64K:16", 41, [8, 8, 8, 16, 16]),
        ("0:4 33:8", 9, [4, 8]),
        ("0:8 1M:2000", 24, [8, 8, 8]),
    ],
)
def test_batches_of_a_schedule_by_tokens(schedule, samples, sizes):
    """As Megatron-Core 0.19.0's StepBatchsizeNumMicroBatchesCalculator steps through them."""
    words = f"!--train-iters !--global-batch-size --train-samples {samples} --step-batch-size-schedule"
    p = plan([*words.split(), schedule])
    consumed = [sum(sizes[:i]) for i in range(len(sizes))]
    assert [p.batch.size(done) for done in consumed] == sizes
    assert p.train_iters == len(sizes) and p.train_samples == sum(sizes)
    assert [p.batch.samples(i) for i in range(len(sizes))] == consumed
    assert p.batch.final == sizes[-1], "a batch that the run does not reach describes no step of it"


def test_evaluations_have_batches_of_their_own():
    assert plan("--eval-iters 3").evaluation_samples == 24
    assert plan("--eval-iters 3 --eval-global-batch-size 2").evaluation_samples == 6
    words = "!--train-iters !--global-batch-size --train-samples 80 --eval-iters 3 --step-batch-size-schedule 0:8"
    assert plan(words).evaluation_samples == 6  # one pass: the --global-batch-size that Megatron-LM then has
    assert plan(f"{words} --eval-global-batch-size 4").evaluation_samples == 12


def test_a_plan_can_be_written_down():
    written = json.loads(json.dumps(dataclasses.asdict(plan("--profile")), default=str))
    assert written["shape"]["hidden_size"] == 64 and written["args"]["optimizer"]["lr"] == 1e-3


def test_an_equal_shape_from_another_process_is_found_in_a_set():
    """Python hashes texts otherwise in each process."""
    script = (
        "import pickle, sys; shape = pickle.load(sys.stdin.buffer); hash(shape); pickle.dump(shape, sys.stdout.buffer)"
    )
    shape = plan().rank_shape
    sent = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(shape), capture_output=True, check=True)
    received = pickle.loads(sent.stdout)
    assert received == shape and received in {shape}


def test_the_launcher_says_who_one_is():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert read_world(4, 2, torchrun) == World(5, 8, 1, 4, 4, threads=2)
    assert read_world(0, 1, {}) == World() and World().is_first and World().is_last
    assert not read_world(0, 1, torchrun).is_first and read_world(0, 1, {**torchrun, "RANK": "7"}).is_last
    own_gpu_only = read_world(1, 1, {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"})
    assert own_gpu_only.local_size == 1 and own_gpu_only.gpu == 0
    assert read_world(4, 1, torchrun).gpu == 1
    assert read_world(1, 1, {"NSYS_PROFILING_SESSION_ID": "123"}).under_nsys


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--use-tp-pp-dp-mapping --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
        "--pipeline-model-parallel-layout Et|t|t|tttttL",
    ],
)
def test_kinds_of_stages_stand_for_all_stages(words):
    one = plan(
        f"--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 16 {words}",
        World(size=8, local_size=8, gpus=8),
    )
    alike = {}
    for stage in plan_stages(one):
        sizes = tuple(map(len, stage.stage.chunks))
        alike.setdefault((sizes, stage.stage.is_first, stage.stage.is_last), []).append(stage)
    assert list_stage_kinds(one) == [(stages[0], len(stages)) for stages in alike.values()]


def test_changed_fields_are_those_of_a_new_command_line():
    before = plan().args
    changes = {"micro_batch_size": 4, "bf16": True, "tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
    words = "--micro-batch-size 4 --bf16 --tensor-model-parallel-size 2 --use-distributed-optimizer"
    assert replace_fields(before, changes) == read(words).args
    assert before == plan().args
