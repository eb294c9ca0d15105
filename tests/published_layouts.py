"""Published runs on many GPUs: model, layout and how fast they were. What plan says of them stands in docs/published_runs.md.

python tests/published_layouts.py            the table: measured, at best, their ratio, memory
python tests/published_layouts.py --search   and at which place a search has each layout; minutes
"""

import argparse
from dataclasses import dataclass, replace

from support.command_lines import plan_on_paper

from megatron_lite.config.model_size import step_flops
from megatron_lite.config.plan import Plan, plan_stages
from megatron_lite.config.world import World
from megatron_lite.planner.find_processors import find_processor
from megatron_lite.planner.memory import predict_memory
from megatron_lite.planner.search import search
from megatron_lite.planner.step_time import predict_time
from megatron_lite.units import GIB

ALL_AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --sequence-parallel --attention-backend local"


@dataclass(frozen=True)
class Published:
    """One row of a paper's table."""

    name: str
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    step_ms: float
    words: str = ALL_AGAIN
    micro_batch: int = 1
    length: int = 2048
    vocabulary: int = 51_200
    gpu: str = "A100-80"
    precision: str = "--fp16"
    fits: bool = True  # what it kept for backward is known, so that memory can be compared

    def plan(self) -> Plan:
        flags = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads {self.heads} "
            f"--seq-length {self.length} --max-position-embeddings {self.length} --micro-batch-size {self.micro_batch} "
            f"--global-batch-size {self.batch} {self.precision} --tensor-model-parallel-size {self.tensor} "
            f"--pipeline-model-parallel-size {self.pipeline} {self.words}"
        )
        return plan_on_paper(flags, World(size=self.gpus, local_size=8, gpus=8), self.vocabulary)


def from_flops(
    name: str, heads: int, hidden: int, layers: int, tensor: int, pipeline: int, gpus: int, batch: int, tflops: int
):
    """A step of so many TFLOP/s per GPU by the paper's own count, which holds the recomputation: 96*B*s*l*h^2*(1 + s/6h + V/16lh)."""
    length, vocabulary = 2048, 51_200
    flops = 96 * batch * length * layers * hidden**2
    flops *= 1 + length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return Published(name, heads, hidden, layers, tensor, pipeline, gpus, batch, flops / gpus / tflops / 1e9)


# Narayanan et al. 2021 (arXiv 2104.04473), table 1: weak scaling on A100 80 GB; the micro-batch is not given, 1 taken
SC21 = [
    from_flops("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137), from_flops("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    from_flops("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142), from_flops("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    from_flops("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138), from_flops("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    from_flops("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148), from_flops("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    from_flops("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163), from_flops("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
]  # fmt: skip
CHUNKS3 = "--num-virtual-stages-per-pipeline-rank 3"
# Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5: seconds of an iteration, all recomputed, and with sequence parallelism
# and selective recomputation
KORTHIKANTI = [
    Published("22B", 64, 6144, 48, 8, 1, 8, 4, 1420, ALL_AGAIN, 4),
    Published("22B, sp, selective", 64, 6144, 48, 8, 1, 8, 4, 1100, SELECTIVE, 4),
    Published("175B", 96, 12288, 96, 8, 8, 64, 64, 18_130, f"{ALL_AGAIN} {CHUNKS3}"),
    Published("175B, sp, selective", 96, 12288, 96, 8, 8, 64, 64, 13_750, f"{SELECTIVE} {CHUNKS3}"),
    Published("530B", 128, 20480, 105, 8, 35, 280, 280, 49_050, f"{ALL_AGAIN} {CHUNKS3}"),
    Published("530B, sp, selective", 128, 20480, 105, 8, 35, 280, 280, 37_830, f"{SELECTIVE} {CHUNKS3}"),
    Published("1T", 160, 25600, 128, 8, 64, 512, 512, 94_420, ALL_AGAIN),
    Published("1T, sp, selective", 160, 25600, 128, 8, 64, 512, 512, 71_490, SELECTIVE),
]
FFN = {4096: 14_336, 8192: 28_672, 16_384: 53_248}  # of Llama 3, by hidden size


def llama(
    name: str, heads: int, hidden: int, layers: int, tensor: int, pipeline: int, gpus: int, batch: int, step_ms: float,
    words: str, micro_batch: int = 1, length: int = 8192,
):  # fmt: skip
    """Llama 3 in bf16 on H100s; the sources do not say what of its activations was computed again, or in words that no flag has."""
    words += f" {MODEL} --ffn-hidden-size {FFN[hidden]} --num-query-groups 8"
    parts = (tensor, pipeline, gpus, batch, step_ms, words, micro_batch, length, 128_256, "H100", "--bf16")
    return Published(name, heads, hidden, layers, *parts, fits=False)


LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 --hidden-dropout 0"
MODEL = f"{LLAMA} --untie-embeddings-and-output-weights --group-query-attention"
ZERO3 = "--use-torch-fsdp2"
# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: tokens per second and GPU, without torch.compile and float8,
# on H100s of 96 GB and 500 W
TORCHTITAN = [
    llama("8B", 32, 4096, 32, 1, 1, 8, 16, 2 * 8192 / 5.762, ZERO3, 2),
    llama("8B", 32, 4096, 32, 1, 1, 128, 256, 2 * 8192 / 5.605, ZERO3, 2),
]
# NeMo AutoModel's performance summary of 2026, DGX H100: seconds of a step; groups of 32 ranks share the model out
HSDP = f"{ZERO3} --context-parallel-size 2 --num-distributed-optimizer-instances 2"
NEMO = [llama("70B", 64, 8192, 80, 1, 1, 64, 128, 18_900, HSDP)]


def from_tflops(name: str, gpus: int, length: int, batch: int, tflops: int, words: str = "") -> Published:
    """Of 405B a step of so many TFLOP/s per GPU. Its 126 layers, 7 to 9 chunks of one each, are 128 here: no flags say other numbers."""
    words += " --use-distributed-optimizer --sequence-parallel --num-virtual-stages-per-pipeline-rank 8"
    one = llama(name, 128, 16_384, 128, 8, 16, gpus, batch, 1.0, words, 1, length)
    flops = step_flops(replace(one.plan().shape, num_layers=126), batch, causal=True)
    return replace(one, step_ms=flops / gpus / tflops / 1e9)


# Grattafiori et al. 2024 (arXiv 2407.21783), table 4; Balaji's talk at SC24 shows the same
LLAMA3 = [
    from_tflops("405B", 8192, 8192, 2048, 430), from_tflops("405B", 16_384, 8192, 2048, 400),
    from_tflops("405B, 131,072 tokens", 16_384, 131_072, 128, 380, "--context-parallel-size 16"),
]  # fmt: skip


def nanotron(model: str, micro_batch: int, tensor: int, pipeline: int, zero: int, tokens_per_second: int) -> Published:
    """A step of 256 sequences on 8 H100s, 131,072 words, one query group per head, gradients added in fp32."""
    words = f"{MODEL} --ffn-hidden-size {FFN[4096]}" if model == "8B" else f"{LLAMA} --ffn-hidden-size 8192"
    words += " --accumulate-allreduce-grads-in-fp32" + " --use-distributed-optimizer" * zero
    words = words.replace("--group-query-attention", "") + " --sequence-parallel" * (tensor > 1)
    hidden, layers = (4096, 32) if model == "8B" else (2048, 16)
    step_ms = 256 * 4096 / 8 / tokens_per_second * 1000
    parts = (tensor, pipeline, 8, 256, step_ms, words, micro_batch, 4096, 131_072, "H100", "--bf16")
    name = f"{model}, micro-batch {micro_batch}" + ", ZeRO-1" * zero
    return Published(name, 32, hidden, layers, *parts)


# The Ultra-Scale Playbook's interactive table of benchmarks (2025), its column of one node: micro-batch, tp, pp, ZeRO stage, tokens per
# second and GPU; all of 8B but one that filled the memory, and the fastest of 1B; models as in nanotron's scripts/scaling_benchmarks.py
NANOTRON = [
    nanotron("8B", 1, 1, 4, 1, 7503), nanotron("8B", 1, 2, 1, 1, 7141), nanotron("8B", 2, 2, 2, 1, 7016), nanotron("8B", 1, 1, 8, 0, 6807),
    nanotron("8B", 1, 2, 2, 0, 6766), nanotron("8B", 1, 2, 2, 1, 6753), nanotron("8B", 1, 2, 4, 0, 6689), nanotron("8B", 1, 4, 1, 0, 6268),
    nanotron("8B", 1, 4, 1, 1, 6238), nanotron("8B", 8, 8, 1, 0, 5909), nanotron("8B", 1, 4, 2, 0, 5883), nanotron("8B", 1, 8, 1, 0, 3616),
    nanotron("1B", 2, 1, 1, 0, 40_150), nanotron("1B", 1, 1, 1, 0, 39_273), nanotron("1B", 1, 1, 1, 1, 39_006),
    nanotron("1B", 4, 1, 2, 1, 38_895), nanotron("1B", 8, 2, 1, 0, 37_628), nanotron("1B", 1, 1, 4, 1, 37_097),
]  # fmt: skip


def from_tokens(
    name: str, gpu: str, layers: int, layout: tuple[int, int, int], batch: int, micro_batch: int, tokens_per_second: int,
    words: str,
) -> Published:  # fmt: skip
    """A step in fp8 of so many tokens per second and GPU, of sequences of 8,192. layout: tensor and pipeline ranks, GPUs."""
    heads, hidden = {32: (32, 4096), 80: (64, 8192), 126: (128, 16_384)}[layers]
    tensor, pipeline, gpus = layout
    step_ms = batch * 8192 / gpus / tokens_per_second * 1000
    words += " --sequence-parallel" * (tensor > 1)
    one = llama(f"{name} on {gpu}", heads, hidden, layers, tensor, pipeline, gpus, batch, step_ms, words, micro_batch)
    return replace(one, gpu=gpu)


# NVIDIA's Megatron Bridge, docs/performance-summary.md: tables of the 25.11 NeMo container (2025-11), pre-training in FP8-CS (scales of
# whole tensors) and FP8-MX on DGX H100 and DGX B200; what of activations was computed again is not said
ZERO1 = "--use-distributed-optimizer"
TENSORWISE, MXFP8 = (f"--fp8-format hybrid --fp8-recipe {recipe}" for recipe in ("tensorwise", "mxfp8"))
# 126 layers, embedding and loss are 128 parts of 8 stages with 8 chunks
OF_405B = (
    f"{ZERO1} --context-parallel-size 2 --num-virtual-stages-per-pipeline-rank 8 "
    "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
)
BRIDGE = [
    from_tokens("8B, fp8", "H100", 32, (1, 1, 8), 128, 1, 14_451, f"{TENSORWISE} {ZERO3}"),
    from_tokens(
        "70B, fp8",
        "H100",
        80,
        (4, 8, 64),
        128,
        1,
        1602,
        f"{TENSORWISE} {ZERO1} --num-virtual-stages-per-pipeline-rank 5",
    ),
    from_tokens("405B, fp8", "H100", 126, (8, 8, 1024), 512, 1, 292, f"{TENSORWISE} {OF_405B}"),
    from_tokens("8B, fp8", "B200", 32, (1, 1, 8), 128, 2, 30_624, f"{TENSORWISE} {ZERO1}"),
    from_tokens("8B, mxfp8", "B200", 32, (1, 1, 8), 128, 2, 29_521, f"{MXFP8} {ZERO1}"),
    from_tokens("405B, fp8", "B200", 126, (4, 8, 128), 64, 1, 661, f"{TENSORWISE} {OF_405B}"),
    from_tokens("405B, mxfp8", "B200", 126, (4, 8, 128), 64, 1, 624, f"{MXFP8} {OF_405B}"),
]
PUBLISHED = {
    "SC21": SC21, "Korthikanti 2022": KORTHIKANTI, "torchtitan 2024": TORCHTITAN, "NeMo 2026": NEMO, "Llama 3": LLAMA3,
    "nanotron 2025": NANOTRON, "Megatron Bridge 2025": BRIDGE,
}  # fmt: skip


def measure(run: Published) -> tuple[float, float]:
    """(least milliseconds of a step, GiB of the stage that holds most)."""
    one, gpu = run.plan(), find_processor(run.gpu)
    peak = max(predict_memory(stage, gpu).peak.num_bytes for stage in plan_stages(one))
    return predict_time(one, gpu).step_ms, peak / GIB


def find_place(run: Published) -> str:
    """Of the published layout among those that a search finds, the fastest first."""
    found = search(run.plan(), find_processor(run.gpu), 0.0)
    layouts = [one.plan.layout.sizes for one in found.best_of_layouts]
    place = layouts.index(run.plan().layout.sizes) if run.plan().layout.sizes in layouts else None
    best = found.fitting[0]
    first = f"{best.plan.layout.sizes} at {best.step_ms:,.0f} ms"
    return f"{'not found' if place is None else place + 1} of {len(layouts)}, first {first}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--search", action="store_true")
    options = parser.parse_args()
    print("| source | model | GPUs | tp x pp | measured ms | at best ms | ratio | peak GiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for source, runs in PUBLISHED.items():
        for run in runs:
            best_ms, gib = measure(run)
            cells = (
                f"{source} | {run.name} | {run.gpus:,} | {run.tensor} x {run.pipeline} | {run.step_ms:,.0f} | {best_ms:,.0f} | "
                f"{run.step_ms / best_ms:.2f} | {f'{gib:.1f}' if run.fits else ''}"
            )
            print(f"| {cells}{f' | {find_place(run)}' if options.search else ''} |", flush=True)


if __name__ == "__main__":
    main()
