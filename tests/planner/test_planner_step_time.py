"""The least time of a step: against public measurements, by hand, and in what it must do when something changes."""

import pytest
from support.command_lines import plan
from support.wording import wording

from megatron_lite.config.world import World
from megatron_lite.formats.hardware import match_processor
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.step_time import compute_duration, predict_time

SEED = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 4 --global-batch-size 16 --fp16 --torch-compile none"
)
ONE, FOUR, EIGHT = World(gpus=1), World(size=4, local_size=4, gpus=4), World(size=8, local_size=8, gpus=8)


def gpt(layers: int, hidden: int, heads: int, seq: int, micro: int, batch: int, more: str = "--bf16") -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {seq} "
        f"--max-position-embeddings {seq} --micro-batch-size {micro} --global-batch-size {batch} "
        f"--hidden-dropout 0 --attention-dropout 0 {more}"
    )  # compiled, as GPUs have it


def predict(changes: str, gpu: str = "H200", world: World = ONE, vocab_size: int = 50257):
    return predict_time(plan(changes, world, vocab_size), find_processor(gpu))


# Public measurements: ms per step, and how many times the bound that is. No run may be faster than its bound. Sources:
# llm.c: scripts/run_gpt2_*.sh, and records/2024-10-13_llmc of modded-nanogpt, whose others are in records too, 1.5B in
# 2024-10-20_ScaleUp1B; nanoGPT: issue 110; Megatron-LM: median of the functional tests' golden values (deterministic
# mode); llm-foundry: scripts/train/benchmarking (tokens/s, here ms of 64 sequences); torchtitan: pull 533; nanochat:
# pull 147. What they do otherwise (Muon, ZeRO-1, FSDP) changes little of the bound: the optimizer is 13% of it at most.
MODERN = "--bf16 --position-embedding-type rope --disable-bias-linear --normalization RMSNorm --squared-relu"
MEASURED = [
    ("llm.c 124M", gpt(12, 768, 12, 1024, 64, 512), "H100", EIGHT, 140, 2.01),
    ("modded-nanogpt 124M, #7", gpt(12, 768, 6, 1024, 64, 512, MODERN), "H100", EIGHT, 141.8, 2.04),
    ("modded-nanogpt 1.5B", gpt(52, 1536, 12, 1024, 4, 480, MODERN), "H100", EIGHT, 1720, 2.44),
    ("llm.c 1558M", gpt(48, 1600, 25, 1024, 16, 1024), "H100", EIGHT, 2800, 1.89),
    ("llm-foundry 1.3B", gpt(24, 2048, 16, 2048, 8, 64), "H100", EIGHT, 8 * 2048 / 45.5, 2.13),
    ("torchtitan 124M", gpt(12, 768, 12, 8192, 5, 20), "H100", FOUR, 5 * 8192 / 111.8, 5.79),
    ("Megatron-LM 64M", gpt(12, 512, 8, 1024, 4, 32, "--fp16 --attention-backend local"), "H100", EIGHT, 51, 11.31),
    ("llm.c 124M", gpt(12, 768, 12, 1024, 64, 512), "A100", EIGHT, 300, 1.53),
    ("llm.c 350M", gpt(24, 1024, 16, 1024, 64, 512), "A100", EIGHT, 820, 1.53),
    ("llm.c 774M", gpt(36, 1280, 20, 1024, 32, 512), "A100", EIGHT, 1700, 1.49),
    ("nanoGPT 124M", gpt(12, 768, 12, 1024, 12, 480), "A100 40GB", EIGHT, 562, 2.93),
    ("llm-foundry 125M", gpt(12, 768, 12, 2048, 8, 64), "A100 40GB", EIGHT, 8 * 2048 / 143, 2.00),
    ("llm-foundry 350M", gpt(24, 1024, 16, 2048, 8, 64), "A100 40GB", EIGHT, 8 * 2048 / 58.8, 1.80),
    ("llm-foundry 1.3B", gpt(24, 2048, 16, 2048, 8, 64), "A100 40GB", EIGHT, 8 * 2048 / 20.5, 1.57),
    ("nanochat d20", gpt(20, 1280, 10, 2048, 16, 128, MODERN), "A100", EIGHT, 16 * 2048 / 66, 1.38),
]


@pytest.mark.parametrize(
    ("run", "flags", "gpu", "world", "measured_ms", "times_the_bound"),
    MEASURED,
    ids=[f"{run} {gpu}" for run, _, gpu, *_ in MEASURED],
)
def test_no_public_measurement_is_faster_than_its_bound(run, flags, gpu, world, measured_ms, times_the_bound):
    ratio = measured_ms / predict(flags, gpu, world).step_ms
    assert ratio > 1 and ratio == pytest.approx(times_the_bound, abs=0.006), run


def row(prediction, name: str):
    return next(one for one in prediction.rows if one.name == name)


def names(prediction) -> list[str]:
    return [one.name for one in prediction.rows]


def test_a_step_by_hand():
    seen = predict(SEED)
    tokens, layers = 16 * 2048, 24
    weights = 24 * 12 * 1024**2 + 50304 * 1024
    by_hand = {
        "matrix products": 6 * tokens * weights / 989.5e12,
        "attention": 3.5 * layers * 16 * 2 * 2048**2 * 1024 / 989.5e12,
        # per token and layer in fp16: 2 x 6 x 1024 + 4096 + 2 x 4096 numbers, and two masks of a byte, written and read
        "norms, activations, dropout": layers * tokens * (2 * 24576 + 4 * 1024) / 4.8e12,
        "loss": tokens * 3 * 2 * 50304 / 4.8e12,
        "gradients' norm, optimizer": 355_919_872 * 30 / 4.8e12,
    }
    assert names(seen) == list(by_hand)
    assert [one.ms for one in seen.rows] == pytest.approx([1000 * seconds for seconds in by_hand.values()])
    assert seen.step_ms == pytest.approx(94.91, abs=0.01)
    assert (seen.gpu, seen.tokens, seen.peak_tflops, seen.notes) == ("H200", tokens, 989.5, ())
    assert seen.flops_causal == 79_396_765_433_856 and seen.flops_full > seen.flops_causal
    assert seen.tokens_per_s == pytest.approx(tokens / 0.09491, rel=1e-3)
    assert row(seen, "matrix products").formula == "6 x 32,768 tokens x 353,501,184 weights at 989.5 TFLOP/s"
    assert row(seen, "loss").formula == "32,768 tokens x 301,824 bytes at 4,800 GB/s"
    useful_ms = row(seen, "matrix products").ms + row(seen, "attention").ms * 3 / 3.5  # without the repeated product
    assert useful_ms == pytest.approx(seen.flops_causal / 989.5e9)
    assert seen == predict(SEED, world=World()), "the machine that plans does not matter"


def test_ranks_share_the_work_but_not_the_optimizer():
    alone, four = predict(SEED), predict(SEED, world=FOUR)
    shared = ("matrix products", "attention", "norms, activations, dropout", "loss")
    assert [row(four, name).ms * 4 for name in shared] == pytest.approx([row(alone, name).ms for name in shared])
    assert row(four, "gradients' norm, optimizer") == row(alone, "gradients' norm, optimizer")
    assert (four.tokens, four.flops_causal) == (alone.tokens, alone.flops_causal // 4)


OPTIMIZERS = {
    "--fp16": 30, "--bf16": 34, "--bf16 --grad-reduce-in-bf16": 30, "--seed 1": 32, "--optimizer sgd --fp16": 22,
    "--optimizer sgd --sgd-momentum 0": 16, "--fp16 --accumulate-allreduce-grads-in-fp32": 34,
}  # fmt: skip
ROUTES = {
    ("A100", 8): "2 x 7/8 over the link between GPUs at 300 GB/s",
    ("A100 40GB", 16): "2 x 15/16 over the link between GPUs at 300 GB/s",
    ("A100 PCIe", 2): "2 x 1/2 over the link between GPUs at 300 GB/s",
    ("A100 PCIe", 4): "2 x 1/2/2 over PCIe at 32 GB/s",
    ("L40S", 2): "2 x 1/2 over PCIe at 32 GB/s",
    ("MI300X", 8): "2 x 7/8 over the link between GPUs at 448 GB/s",
    ("MI300X", 2): "2 x 1/2 over the link between GPUs at 64 GB/s",
    ("B200", 8): "once over the link between GPUs at 900 GB/s",
}


def test_bytes_of_the_optimizer_and_routes_between_gpus():
    for flags, num_bytes in OPTIMIZERS.items():
        assert f"x {num_bytes} bytes at" in row(predict(flags), "gradients' norm, optimizer").formula
    for (gpu, ranks), words in ROUTES.items():
        seen = predict(SEED + " --global-batch-size 64", gpu, World(size=ranks, local_size=ranks, gpus=ranks))
        assert words in row(seen, "all-reduce, not overlapped").formula


def test_the_last_gradient_is_not_hidden():
    exposed = row(predict(SEED, world=FOUR), "all-reduce, not overlapped")
    assert exposed.ms == pytest.approx(2 * 50304 * 1024 / 450e9 * 1000) and exposed.bound == "link"
    assert exposed.formula == wording("planner/gb-of-gradients-once", 0.71, 450, 1.58, 103)


def test_a_slow_link_outlasts_backward():
    flags = SEED + " --micro-batch-size 1 --global-batch-size 8"
    seen = predict(flags, "4090", EIGHT)
    rest, backward = "norms, activations, dropout", {"matrix products": 2 / 3, "attention": 2.5 / 3.5, "loss": 2 / 3}
    backward |= {rest: 30720 / 53248}
    backward_ms = sum(row(seen, name).ms * share for name, share in backward.items())
    whole_ms = 355_919_872 * 2 * (2 * 7 / 8) / 32e9 * 1000
    exposed = row(seen, "all-reduce, not overlapped")
    assert exposed.ms == pytest.approx(whole_ms - backward_ms) and exposed.ms > 10
    assert wording("planner/backward-of-one-micro", f"{backward_ms:.2f}") in exposed.formula


def test_stored_scores_cost_more_than_fused_attention():
    fused, stored = predict(SEED), predict(SEED + " --attention-backend local")
    assert row(stored, "attention").ms == pytest.approx(row(fused, "attention").ms * 2 * 3 / 3.5)
    assert row(stored, "attention's scores").ms == pytest.approx(24 * 16 * 16 * 2048**2 * 5 * 2 / 4.8e9)


RECOMPUTE = " --recompute-granularity full --recompute-method "


def test_recomputation_takes_time_but_is_no_useful_work():
    plain, every = predict(SEED), predict(SEED + RECOMPUTE + "uniform --recompute-num-layers 1")
    assert row(every, "recomputed products").ms == pytest.approx(2 * 32768 * 24 * 12 * 1024**2 / 989.5e9)
    assert row(every, "recomputed attention").ms == pytest.approx(row(plain, "attention").ms / 3.5)
    assert every.step_ms > plain.step_ms and every.flops_causal == plain.flops_causal
    half = predict(SEED + RECOMPUTE + "block --recompute-num-layers 12")
    assert half.step_ms - plain.step_ms == pytest.approx((every.step_ms - plain.step_ms) / 2)
    assert names(predict(SEED + " --recompute-granularity selective")) == names(plain)  # fused kernels do it anyway


def test_what_no_dropout_follows_is_not_computed_again_and_compilation_saves_masks():
    eager, compiled = predict(SEED), predict(SEED.removesuffix(" --torch-compile none"))
    saved_ms = row(eager, "norms, activations, dropout").ms - row(compiled, "norms, activations, dropout").ms
    assert saved_ms == pytest.approx(24 * 32768 * 4 * 1024 / 4.8e9)
    flags = SEED + " --hidden-dropout 0" + RECOMPUTE + "uniform --recompute-num-layers 1"
    assert row(predict(flags), "recomputed products").ms == pytest.approx(2 * 32768 * 24 * 8 * 1024**2 / 989.5e9)


def test_selective_recomputation_repeats_stored_scores():
    stored = predict(SEED + " --attention-backend local")
    again = predict(SEED + " --attention-backend local --recompute-granularity selective")
    assert names(again) == [*names(stored)[:-1], "recomputed attention", "recomputed scores", names(stored)[-1]]
    assert row(again, "recomputed attention").ms == pytest.approx(row(stored, "attention").ms / 3)
    assert row(again, "recomputed scores").ms == pytest.approx(row(stored, "attention's scores").ms * 2 / 5)


BY_MEMORY = ("norms, activations, dropout", "loss", "gradients' norm, optimizer")
PRODUCTS, REDUCED = "matrix products, attention", "all-reduce, not overlapped"
MEMORY = ", ".join(BY_MEMORY)
UNKNOWN = [  # flags, GPU, nodes, ranks of each, rows that are missing, the note
    ("--bf16", "Tesla V100-SXM2-16GB", 1, 1, PRODUCTS,
     f"V100 SXM2 16 GB: no known peak in bf16 (--fp16 has one); not in the bound: {PRODUCTS}"),
    ("--fp16", "NVIDIA A100-PG509-200", 1, 1, MEMORY,
     f"A100, board unknown: no known memory bandwidth; not in the bound: {MEMORY}"),
    ("", "Tesla V100-DGXS-32GB", 1, 1, PRODUCTS,
     f"V100 of a DGX Station: no known peak in fp32; not in the bound: {PRODUCTS}"),
    ("--fp16", "AMD Instinct MI250X", 1, 4, REDUCED,
     "MI250X (one die): no known speed between GPUs; not in the bound: the gradients"),
    ("--fp16", "NVIDIA L40S", 4, 1, REDUCED,
     "4 nodes: no known network of L40S, --network N names it; not in the bound: the gradients"),
    ("--fp16 !--train-iters --train-samples 1000 --rampup-batch-size 4 2 100", "NVIDIA H200", 1, 1, "none",
     "--rampup-batch-size: the bound is for the final global batch of 8"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "device", "nodes", "ranks", "missing", "note"), UNKNOWN)
def test_what_is_not_known_is_missing_and_said(flags, device, nodes, ranks, missing, note):
    world = World(size=nodes * ranks, local_size=ranks, gpus=ranks)
    seen = predict_time(plan(flags, world), match_processor(device))
    known = set(names(predict_time(plan(flags, world), match_processor("NVIDIA H200"))))
    without = {name for name in (*BY_MEMORY, *PRODUCTS.split(", "), REDUCED) if name in missing}
    assert note in seen.notes and without & set(names(seen)) == set()
    assert seen.rows and set(names(seen)) == known - without and seen.tokens_per_s > 0


def test_a_rank_that_knows_no_computation_hides_everything_but_the_last_gradient():
    seen = predict("--bf16 --global-batch-size 8", "V100 PCIe", FOUR)
    assert seen.peak_tflops == 0.0
    last_ms = row(seen, "all-reduce, not overlapped").ms
    assert last_ms == pytest.approx(4 * 50304 * 64 * 1.5 / 16e6)


def test_a_fallback_that_stores_scores_is_seen():
    """No fused kernel takes heads that are not a multiple of 16 bytes and, in fp32, cannot be flash's."""
    flags = "--hidden-size 60 --num-attention-heads 6 --reset-attention-mask"
    assert "attention's scores" in names(predict(flags))
    assert "attention's scores" not in names(predict(flags.replace("60", "96")))


# how long a whole training takes, and its arithmetic
GPT2 = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 64 --global-batch-size 512 --train-iters 19073 --bf16"
)


@pytest.mark.parametrize("depths", [1, 2])
def test_work_of_further_tokens_is_what_counts(depths):
    seen, plain = predict(f"{SEED} --mtp-num-layers {depths}"), predict(SEED)
    useful_ms = row(seen, "matrix products").ms + row(seen, "attention").ms * 3 / 3.5  # without the repeated product
    assert useful_ms == pytest.approx(seen.flops_causal / 989.5e9)
    assert row(seen, "loss").ms == pytest.approx((1 + depths) * row(plain, "loss").ms)


def test_length_of_a_training_and_conventions_of_its_flops():
    # llm.c's 124M: 19,073 steps of 524,288 tokens at 140 ms
    shape = plan(GPT2, EIGHT, 50257).shape
    seen = compute_duration(shape, 19_073 * 524_288, 8, tokens_per_s=524_288 / 0.140)
    assert seen.seconds == pytest.approx(19_073 * 0.140)
    assert seen.days == pytest.approx(19_073 * 0.140 / 86_400)
    assert seen.gpu_hours == pytest.approx(8 * 19_073 * 0.140 / 3600)
    seen = compute_duration(shape, 10**9, 8, tokens_per_s=1.0)
    parameters = 124_475_904
    weights, scores = 12 * 12 * 768**2 + 50304 * 768, 12 * 1024 * 768
    assert seen.flops_6nd == 6 * parameters * 10**9
    assert seen.flops_causal == 6 * (weights + scores) * 10**9
    assert seen.flops_full == 6 * (weights + 2 * scores) * 10**9


def test_stages_of_a_node_hand_on_within_it():
    """4 stages: on a node 6 hops over its links; two on each of two nodes, 2 hops over the network and 4 within. Both ends share an
    embedding: 2 ranks, whatever the number of stages."""
    flags = SEED + " --pipeline-model-parallel-size 4"
    near, far = (predict(flags, world=World(size=4, local_size=local, gpus=local)) for local in (4, 2))
    sent = 4 * 2048 * 1024 * 2
    assert row(near, "way through the stages").ms == pytest.approx(6 * sent / 450e6)
    assert row(far, "way through the stages").ms == pytest.approx(2 * sent / 50e6 + 4 * sent / 450e6)
    matrix = 2 * 50304 * 1024
    assert row(near, "tied embedding's gradients").ms == pytest.approx(matrix / 450e6)
    assert row(far, "tied embedding's gradients").ms == pytest.approx(2 / 2 * matrix / 50e6)
