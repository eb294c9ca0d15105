"""Memory in closed form beside the rehearsed one, over plans that turn every flag which memory depends on.

python tests/estimate_grid.py [WORD ...]    the table; of plans only whose flags or names hold all words
"""

import sys
from dataclasses import dataclass
from functools import cached_property

import torch
from support.launch import plan_of

from megatron_lite.config.plan import Plan
from megatron_lite.config.world import World
from megatron_lite.formats.run_record import MemoryPrediction
from megatron_lite.planner.memory import predict_memory
from megatron_lite.rehearsal import Rehearsal, rehearse
from megatron_lite.units import size

ALWAYS = (
    "--max-position-embeddings 2048 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 50256 "
)
SEED = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 4 --fp16 "
FEWER = SEED + "--num-layers 6 "  # layers are alike: what one takes is seen
MEDIUM = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 4 "
SHORT = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --micro-batch-size 1 "  # states decide
)
LARGE = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 "
    "--hidden-dropout 0 --attention-dropout 0 "
)
BYTES = "--vocab-size 256 --padded-vocab-size 512 "  # logits are small: layers decide
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
)
GROUPED = "--group-query-attention --num-query-groups 2 "
ZERO1, ZERO3 = "--use-distributed-optimizer ", "--use-torch-fsdp2 "
HEADS = "--cp-comm-type a2a "
TP, SP, CP = "--tensor-model-parallel-size ", "--sequence-parallel ", "--context-parallel-size "
PP = "--pipeline-model-parallel-size "
CHUNKS = "--num-virtual-stages-per-pipeline-rank "
BUBBLE = "--pipeline-schedule ZeroBubble "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers "
UNFUSED = "--attention-backend unfused "

GRID = {  # name: (flags, ranks), and which of them if not the first
    "857m script, 1 rank": (SEED, 1),
    "857m script, 4 ranks": (FEWER, 4),
    "857m script, 4 ranks, 4 micro-batches": (FEWER + "--global-batch-size 64", 4),
    "857m script, recompute": (FEWER + FULL, 1),
    "857m script, recompute a block": (FEWER + BLOCK + "2", 1),
    "857m script, unfused": (FEWER + UNFUSED, 1),
    "857m script, unfused, selective": (FEWER + UNFUSED + "--recompute-activations", 1),
    "1.3B, fp16, recompute": (LARGE + "--fp16 " + FULL, 1),
    "1.3B, llama, short": (LARGE + LLAMA + "--bf16 --seq-length 256 --global-batch-size 2", 1),
    "medium, fp32": (MEDIUM, 1),
    "medium, fp32, 2 ranks": (MEDIUM, 2),
    "medium, fp32, sgd": (MEDIUM + "--optimizer sgd", 1),
    "medium, bf16": (MEDIUM + "--bf16", 1),
    "medium, bf16, 2 ranks, 3 micro-batches": (MEDIUM + "--bf16 --global-batch-size 24", 2),
    "medium, bf16, reduced in bf16": (MEDIUM + "--bf16 --grad-reduce-in-bf16 --global-batch-size 8", 1),
    "medium, fp16, summed in fp32": (MEDIUM + "--fp16 --accumulate-allreduce-grads-in-fp32", 1),
    "medium, llama": (MEDIUM + LLAMA + GROUPED + "--bf16", 1),
    "medium, no positions, per token": (MEDIUM + "--position-embedding-type none --bf16 --calculate-per-token-loss", 1),
    "bytes, bf16, recompute": (MEDIUM + BYTES + "--bf16 " + FULL, 1),
    "bytes, bf16, recompute a block": (MEDIUM + BYTES + "--bf16 " + BLOCK + "2", 1),
    "bytes, fp32, no dropout": (MEDIUM + BYTES + "--hidden-dropout 0 --attention-dropout 0", 1),
    "bytes, fp32, grouped": (MEDIUM + BYTES + "--group-query-attention --num-query-groups 4", 1),
    "bytes, squared relu": (MEDIUM + BYTES + "--bf16 --squared-relu --hidden-dropout 0", 1),
    "bytes, part rotated, interleaved": (
        MEDIUM + BYTES + "--bf16 --position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved",
        1,
    ),
    "bytes, norm weights minus one": (MEDIUM + BYTES + "--bf16 --apply-layernorm-1p", 1),
    "bytes, wide heads, exact gelu": (MEDIUM + BYTES + "--bf16 --kv-channels 128 --no-bias-gelu-fusion", 1),
    "bytes, heads of 100 channels": (MEDIUM + BYTES + "--bf16 --kv-channels 100", 1),
    "bytes, documents apart": (MEDIUM + BYTES + "--bf16 --reset-attention-mask", 1),
    "bytes, unfused, softmax in fp32": (
        MEDIUM + "--num-layers 6 " + BYTES + UNFUSED + "--bf16 --attention-softmax-in-fp32",
        1,
    ),
    "bytes, unfused, scaled by layer": (
        MEDIUM + BYTES + "--attention-backend local --fp16 --apply-query-key-layer-scaling --attention-dropout 0",
        1,
    ),
    "bytes, unfused, grouped, 1 sequence": (MEDIUM + BYTES + UNFUSED + GROUPED + "--bf16 --micro-batch-size 1", 1),
    "bytes, unfused, recompute": (MEDIUM + BYTES + UNFUSED + "--bf16 " + FULL, 1),
    "bytes, llama, recompute": (MEDIUM + BYTES + LLAMA + GROUPED + "--bf16 " + FULL, 1),
    "bytes, llama, fp32, norms of heads": (MEDIUM + BYTES + LLAMA + "--qk-layernorm", 1),
    "short, fp16": (SHORT + "--fp16", 1),
    "short, bf16, 2 ranks": (SHORT + BYTES + "--bf16", 2),
    "short, fp32, 2 micro-batches": (SHORT + "--global-batch-size 2", 1),
    "short, fp32, untied, plain sgd": (
        SHORT + "--optimizer sgd --sgd-momentum 0 --untie-embeddings-and-output-weights",
        1,
    ),
    "short, sgd, decay that grows": (
        SHORT + BYTES + "--optimizer sgd --weight-decay-incr-style linear "
        "--start-weight-decay 0 --end-weight-decay 0.1",
        1,
    ),
    "857m script, zero1, 4 ranks": (FEWER + ZERO1, 4),
    "857m script, zero3, 4 ranks, 4 micro-batches": (FEWER + ZERO3 + "--global-batch-size 64", 4),
    "1.3B, llama, short, zero3": (LARGE + LLAMA + ZERO3 + "--bf16 --seq-length 256 --global-batch-size 8", 4),
    "bytes, recompute, zero1": (MEDIUM + BYTES + ZERO1 + "--bf16 " + FULL, 4),
    "short, fp16, zero1": (SHORT + ZERO1 + "--fp16", 2),
    "short, bf16, zero3": (SHORT + BYTES + ZERO3 + "--bf16", 4),
    "857m script, tp4, sequence parallel, 8 ranks": (FEWER + TP + "4 " + SP, 8),
    "medium, fp32, tp2": (MEDIUM + TP + "2", 2),
    "medium, bf16, tp2, 3 micro-batches": (MEDIUM + TP + "2 --bf16 --global-batch-size 96", 4),
    "medium, llama, tp2, sequence parallel, zero3": (MEDIUM + LLAMA + GROUPED + TP + "2 " + SP + ZERO3 + "--bf16", 4),
    "bytes, recompute, tp2, sequence parallel": (MEDIUM + BYTES + "--bf16 " + FULL + TP + "2 " + SP, 2),
    "857m script, cp4": (FEWER + CP + "4", 4),
    "857m script, tp2, cp2, zero1": (FEWER + TP + "2 " + SP + CP + "2 " + ZERO1, 4),
    "medium, fp32, cp2": (MEDIUM + CP + "2", 2),
    "bytes, llama, cp2": (MEDIUM + BYTES + LLAMA + "--bf16 " + CP + "2", 2),
    "medium, fp32, cp2, heads": (MEDIUM + CP + "2 " + HEADS, 2),
    "bytes, llama, cp2, heads": (MEDIUM + BYTES + LLAMA + "--bf16 " + CP + "2 " + HEADS, 2),
    "bytes, llama, grouped, cp2, heads": (MEDIUM + BYTES + LLAMA + GROUPED + "--bf16 " + CP + "2 " + HEADS, 2),
    "857m script, tp2, cp4, heads and positions": (
        FEWER + TP + "2 " + SP + CP + "4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 " + ZERO1,
        8,
    ),
    "bytes, unfused, cp2, heads": (MEDIUM + BYTES + UNFUSED + "--bf16 " + CP + "2 " + HEADS, 2),
    "bytes, unfused, cp2": (MEDIUM + BYTES + UNFUSED + "--bf16 " + CP + "2", 2),
    "short, fp16, tp2": (SHORT + "--fp16 " + TP + "2", 2),
    "857m script, pp2": (FEWER + PP + "2 --global-batch-size 32", 2),
    "857m script, pp2, last stage": (FEWER + PP + "2 --global-batch-size 32", 2, 1),
    "medium, bf16, pp4": (MEDIUM + PP + "4 --bf16 --global-batch-size 32", 4),
    "medium, bf16, pp4, second stage": (MEDIUM + PP + "4 --bf16 --global-batch-size 32", 4, 1),
    "medium, llama, tp4 of 2 query groups": (MEDIUM + LLAMA + GROUPED + TP + "4 --bf16", 4),
    "medium, llama, one query group, tp2": (
        MEDIUM + LLAMA + GROUPED + "--num-query-groups 1 --bf16 " + TP + "2 " + SP,
        2,
    ),
    "medium, llama, tp2, pp2": (MEDIUM + LLAMA + GROUPED + TP + "2 " + SP + PP + "2 --bf16 --global-batch-size 32", 4),
    "857m script, pp2, chunks": (FEWER + PP + "2 " + CHUNKS + "3 --global-batch-size 32", 2),
    "medium, bf16, pp2, chunks, last stage": (MEDIUM + PP + "2 " + CHUNKS + "2 --bf16 --global-batch-size 32", 2, 1),
    "857m script, pp2, zero bubble": (FEWER + PP + "2 " + BUBBLE + "--global-batch-size 32", 2),
    "medium, bf16, pp4, zero bubble, last stage": (MEDIUM + PP + "4 " + BUBBLE + "--bf16 --global-batch-size 64", 4, 3),
    "medium, llama, tp2, pp2, zero bubble, last stage": (
        MEDIUM + LLAMA + GROUPED + TP + "2 " + SP + PP + "2 " + BUBBLE + "--bf16 --global-batch-size 32",
        4,
        3,
    ),
    "bytes, recompute, pp2, zero bubble, last stage": (
        MEDIUM + BYTES + "--bf16 " + FULL + PP + "2 " + BUBBLE + "--global-batch-size 32",
        2,
        1,
    ),
    "bytes, recompute, pp2": (MEDIUM + BYTES + "--bf16 " + FULL + PP + "2 --global-batch-size 32", 2),
    "bytes, pp2, zero1, last stage": (MEDIUM + BYTES + "--bf16 " + ZERO1 + PP + "2 --global-batch-size 64", 4, 2),
    "short, fp16, pp2": (SHORT + "--fp16 " + PP + "2 --global-batch-size 8", 2),
    "tiny": (
        "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --micro-batch-size 2 " + BYTES,
        1,
    ),
}
# what a CPU's own kernels hold: masks of context parallel ranks, scores in fp32, GELU in pieces
CPU_BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --hidden-dropout 0 --vocab-size 511 "
)
NO_DROPOUT = "--attention-dropout 0 "
CPU_GRID = {
    "cpu, context, long, bf16": (
        CPU_BASE + NO_DROPOUT + "--seq-length 2048 --micro-batch-size 1 --bf16 " + CP + "2",
        2,
    ),
    "cpu, context, fp32": (CPU_BASE + NO_DROPOUT + "--seq-length 2048 " + CP + "2", 2),
    "cpu, context, unfused, bf16": (CPU_BASE + NO_DROPOUT + "--seq-length 1024 --bf16 " + UNFUSED + CP + "2", 2),
    "cpu, context 4, bf16": (CPU_BASE + NO_DROPOUT + "--seq-length 512 --bf16 " + CP + "4", 4),
    "cpu, context, dropout, bf16": (CPU_BASE + "--seq-length 1024 --bf16 " + CP + "2", 2),
    "cpu, unfused, bf16": (CPU_BASE + NO_DROPOUT + "--seq-length 1024 --bf16 " + UNFUSED, 1),
    "cpu, dropout, bf16": (CPU_BASE + "--seq-length 512 --bf16", 1),
    "cpu, unfused, documents, bf16": (
        CPU_BASE + NO_DROPOUT + "--seq-length 512 --bf16 --reset-attention-mask " + UNFUSED,
        1,
    ),
}
# layers of multi-token prediction on the last stage
FURTHER = MEDIUM + LLAMA + "--mtp-num-layers "
FURTHER_GRID = {
    "further, bf16": (FURTHER + "1 --bf16", 1),
    "further, two, tied, gpt": (MEDIUM + "--bf16 --mtp-num-layers 2", 1),
    "further, two, bytes, bf16": (FURTHER + "2 --bf16 " + BYTES, 1),
    "further, bytes, fp32, 2 micro-batches": (FURTHER + "1 --global-batch-size 8 " + BYTES, 1),
    "further, bytes, recompute": (FURTHER + "2 --bf16 " + BYTES + FULL, 1),
    "further, bytes, ddp": (FURTHER + "1 --bf16 " + BYTES, 2),
    "further, bytes, zero1": (FURTHER + "1 --bf16 --global-batch-size 32 " + BYTES + ZERO1, 4),
    "further, tp2, sequence parallel": (FURTHER + "1 --bf16 " + TP + "2 " + SP, 2),
    "further, pp2, last stage": (FURTHER + "1 --bf16 --global-batch-size 16 " + PP + "2", 2, 1),
    "further, pp2, bytes": (FURTHER + "1 --bf16 --global-batch-size 16 " + BYTES + PP + "2", 2),
}
GRID |= FURTHER_GRID
GRID |= CPU_GRID
# mixtures of experts, of which each expert gets as many tokens
EP, ETP = "--expert-model-parallel-size ", "--expert-tensor-parallel-size "
SENT, GATHERED = "--moe-token-dispatcher-type alltoall ", "--moe-token-dispatcher-type allgather "
MIXED = (
    MEDIUM + BYTES + LLAMA + "--num-layers 3 --hidden-size 256 --ffn-hidden-size 512 --num-experts 8 "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
)
FINE = (
    "--num-layers 4 --moe-layer-freq [0]+[1]*3 --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 128 "
    "--moe-shared-expert-intermediate-size 256 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-dtype fp32 "
)
STATES = SHORT + BYTES + LLAMA + "--ffn-hidden-size 1024 --num-experts 8 --moe-router-topk 2 --bf16 "
EXPERT_GRID = {
    "experts, 1 rank": (MIXED + "--bf16", 1),
    "cpu, experts, fp32": (MIXED, 1),
    "cpu, experts, sent, ep2, bf16": (MIXED + "--bf16 " + EP + "2 " + SENT, 2),
    "cpu, experts, gathered, ep2": (MIXED + EP + "2 " + GATHERED, 2),
    "experts, fp32, dp2, 2 micro-batches": (MIXED + "--global-batch-size 16", 2),
    "experts, sent, ep2": (MIXED + "--bf16 " + EP + "2 " + SENT, 2),
    "experts, gathered, ep2": (MIXED + "--bf16 " + EP + "2 " + GATHERED, 2),
    "experts, ep4, zero1, 8 ranks": (MIXED + "--bf16 " + EP + "4 " + SENT + ZERO1, 8),
    "experts, ep2, zero1, no replicas": (MIXED + "--bf16 " + EP + "2 " + SENT + ZERO1, 2),
    "experts, ep2, zero3": (MIXED + "--bf16 " + EP + "2 " + SENT + ZERO3 + "--global-batch-size 32", 4),
    "experts, tp2, ep2, etp1": (MIXED + "--bf16 " + TP + "2 " + SP + EP + "2 " + ETP + "1 " + SENT, 2),
    "experts, tp2, etp2, gathered": (MIXED + "--bf16 " + TP + "2 " + SP + ETP + "2 " + GATHERED, 2),
    "experts, tp2, ep2, etp2, zero1": (MIXED + "--bf16 " + TP + "2 " + SP + EP + "2 " + ETP + "2 " + SENT + ZERO1, 4),
    "experts, ep2, recompute": (MIXED + "--bf16 " + EP + "2 " + SENT + FULL, 2),
    "experts, ep2, cp2": (MIXED + "--bf16 " + EP + "2 " + SENT + CP + "2", 2),
    "experts, ep2, pp2": (MIXED + "--bf16 " + EP + "2 " + SENT + PP + "2 --num-layers 4 --global-batch-size 32", 4),
    "experts, ep2, pp2, last stage": (
        MIXED + "--bf16 " + EP + "2 " + SENT + PP + "2 --num-layers 4 --global-batch-size 32",
        4,
        2,
    ),
    "fine experts, shared, some dense": (MIXED + "--bf16 " + EP + "2 " + SENT + FINE, 2),
    "experts, capacity, ep2": (MIXED + "--bf16 " + EP + "2 " + SENT + "--moe-expert-capacity-factor 0.5", 2),
    "experts' states, ep2": (STATES + EP + "2 " + SENT + "--global-batch-size 4", 2),
    "experts' states, ep2, zero1": (STATES + EP + "2 " + SENT + ZERO1 + "--global-batch-size 4", 4),
}
# latent attention: queries of hidden states or of a latent vector of their own; values narrower than keys, or as wide
LATENT = (
    MEDIUM + BYTES + LLAMA + "--multi-latent-attention --kv-lora-rank 128 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
)
NARROW, WIDE = "--v-head-dim 64 --qk-layernorm ", "--v-head-dim 96 --qk-layernorm "
OWN_QUERIES = "--q-lora-rank 192 "
DEEPSEEK = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 256 "
    "--moe-layer-freq [0]+[1]*3 --moe-router-score-function sigmoid "
)
LATENT_GRID = {
    "latent, bf16": (LATENT + NARROW + "--bf16", 1),
    "latent, bf16, latent queries": (LATENT + NARROW + OWN_QUERIES + "--bf16", 1),
    "latent, fp32, wide values, 2 ranks": (LATENT + WIDE + OWN_QUERIES, 2),
    "latent, without norms, dropout": (
        LATENT + "--v-head-dim 64 --bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --normalization LayerNorm",
        1,
    ),
    "latent, unfused": (LATENT + NARROW + UNFUSED + "--bf16", 1),
    "latent, unfused, wide values": (LATENT + WIDE + UNFUSED + OWN_QUERIES + "--bf16", 1),
    "latent, documents apart": (LATENT + NARROW + OWN_QUERIES + "--bf16 --reset-attention-mask", 1),
    "latent, recompute": (LATENT + NARROW + OWN_QUERIES + "--bf16 " + FULL, 1),
    "latent, heads of 100 channels": (LATENT + NARROW + "--qk-head-dim 68 --bf16", 1),
    "latent, tp2": (LATENT + NARROW + OWN_QUERIES + "--bf16 " + TP + "2", 2),
    "latent, tp2, sequence parallel, zero1": (LATENT + NARROW + OWN_QUERIES + "--bf16 " + TP + "2 " + SP + ZERO1, 4),
    "latent, cp2": (LATENT + NARROW + "--bf16 " + CP + "2", 2),
    "latent, zero3": (LATENT + NARROW + OWN_QUERIES + "--bf16 " + ZERO3, 4),
    "latent, pp2": (LATENT + NARROW + OWN_QUERIES + "--bf16 " + PP + "2 --global-batch-size 32", 2),
    "latent, pp2, zero bubble, last stage": (
        LATENT + NARROW + OWN_QUERIES + "--bf16 " + PP + "2 " + BUBBLE + "--global-batch-size 32",
        2,
        1,
    ),
    "latent, experts, ep2": (LATENT + NARROW + OWN_QUERIES + DEEPSEEK + "--bf16 " + EP + "2 " + SENT, 2),
    "latent, experts, tp2, ep2, zero1": (
        LATENT + NARROW + OWN_QUERIES + DEEPSEEK + "--bf16 " + TP + "2 " + SP + EP + "2 " + ETP + "1 " + SENT + ZERO1,
        4,
    ),
}
QUICK_LATENT = (
    "latent, bf16, latent queries",
    "latent, recompute",
    "latent, experts, ep2",
)
QUICK_EXPERTS = (
    "cpu, experts, gathered, ep2",
    "experts, sent, ep2",
    "experts, ep2, zero3",
    "experts, tp2, ep2, etp2, zero1",
)
QUICK = (
    "tiny",
    "short, fp16",
    "bytes, llama, recompute",
    "short, bf16, zero3",
    "short, fp16, tp2",
    "short, fp16, pp2",
    "further, bytes, recompute",
    "bytes, llama, grouped, cp2, heads",
)
# with the slow tests, whatever half of the grid these have
NAMED = ("short, bf16, 2 ranks", "bytes, unfused, grouped, 1 sequence", "further, pp2, last stage")
QUICK_ON_CPU = ("tiny", "cpu, context, long, bf16", "cpu, dropout, bf16")


def plan_for(words: str, ranks: int = 1, device: str = "cuda", rank: int = 0) -> Plan:
    """Of the trainer's flags, as it checks and resolves them; the last one of a name wins."""
    gpus, threads = ranks if device == "cuda" else 0, torch.get_num_threads()
    world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks, gpus=gpus, threads=threads)
    return plan_of([*ALWAYS.split(), *words.split()], world)


def find_device(name: str) -> str:
    """The device that a plan of the grids is for."""
    return "cpu" if name.startswith("cpu, ") else "cuda"


@dataclass(frozen=True)
class Case:
    """One plan, predicted in two ways."""

    name: str
    device: str = "cuda"

    @cached_property
    def plan(self) -> Plan:
        words, ranks, *rank = (GRID | EXPERT_GRID | LATENT_GRID)[self.name]
        return plan_for(words, ranks, self.device, *rank)

    @cached_property
    def formula(self) -> MemoryPrediction:
        return predict_memory(self.plan)

    @cached_property
    def exact(self) -> Rehearsal:
        return rehearse(self.plan)

    @property
    def error(self) -> float:
        """Share by which the formula is above the rehearsal."""
        return self.formula.peak.num_bytes / self.exact.allocated_peak_bytes - 1

    @property
    def exact_phase(self) -> str:
        """A Phase's value: computing again is part of backward."""
        return "backward" if self.exact.phase == "recompute" else self.exact.phase

    @property
    def names_the_phase(self) -> bool:
        """Or a moment of the phase that the rehearsal names is within 5% of the formula's highest one."""
        there = [moment.num_bytes for moment in self.formula.moments if moment.phase == self.exact_phase]
        return max(there, default=0) >= 0.95 * self.formula.peak.num_bytes

    def line(self) -> str:
        peak = self.formula.peak
        return (
            f"{self.name:40} {size(peak.num_bytes):>10} {size(self.exact.allocated_peak_bytes):>10} {100 * self.error:+6.2f}%"
            f"  {'' if self.names_the_phase else 'NOT '}{peak.phase}: {peak.where} | {self.exact.where}"
        )


def main(words: list[str]):
    for name, (flags, *_) in (GRID | EXPERT_GRID | LATENT_GRID).items():
        if all(word in f"{name} {flags}" for word in words):
            print(Case(name, find_device(name)).line(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
