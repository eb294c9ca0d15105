"""Megatron-LM's flags that are not knobs here: accepted without effect, respelled, or refused.

Each entry says why; a refusal also says the way out. Nothing of this is silent: what a command line
uses of these tables is printed once at the start, or stops the run.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Flags that share one answer."""

    flags: tuple[str, ...]
    answer: str


ACCEPTED = (
    Family(
        ("--overlap-grad-reduce",),
        "gradients are always reduced while backward runs",
    ),
    Family(
        ("--use-distributed-optimizer", "--overlap-param-gather", "--data-parallel-sharding-strategy"),
        "optimizer state is kept whole on every rank: same numbers, more memory per rank",
    ),
    Family(
        ("--sequence-parallel", "--tp-comm-overlap", "--no-async-tensor-model-parallel-allreduce",
         "--disable-async-tensor-model-parallel-allreduce", "--expert-tensor-parallel-size", "--cp-comm-type"),
        "as in Megatron, it matters only with tensor, context or expert parallel sizes above 1",
    ),
    Family(
        ("--no-masked-softmax-fusion", "--no-rope-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion",
         "--cross-entropy-loss-fusion", "--no-gradient-accumulation-fusion"),
        "fusion changes speed, not results, and is chosen here by itself",
    ),
    Family(
        ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-token-dispatcher-type", "--moe-aux-loss-coeff",
         "--moe-router-load-balancing-type", "--moe-grouped-gemm", "--moe-layer-freq", "--moe-router-score-function",
         "--moe-router-dtype", "--moe-shared-expert-intermediate-size", "--moe-permute-fusion",
         "--moe-router-enable-expert-bias", "--moe-router-topk-scaling-factor", "--moe-router-bias-update-rate",
         "--moe-router-pre-softmax"),
        "it matters only with --num-experts",
    ),
    Family(
        ("--fp8-amax-compute-algo", "--fp8-amax-history-len", "--fp8-param-gather"),
        "it matters only with --fp8-format",
    ),
    Family(
        ("--optimizer-offload-fraction",),
        "it matters only with --optimizer-cpu-offload",
    ),
    Family(
        ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--kv-lora-rank", "--q-lora-rank", "--v-head-dim",
         "--qk-head-dim", "--qk-pos-emb-head-dim"),
        "it matters only with --multi-latent-attention",
    ),
    Family(
        ("--auto-detect-ckpt-format", "--dist-ckpt-strictness", "--use-dist-ckpt"),
        "the format of a checkpoint is recognised",
    ),
    Family(
        ("--num-dataset-builder-threads", "--no-mmap-bin-files", "--no-create-attention-mask-in-dataloader"),
        "indices are built by one thread in moments, .bin files are mapped, masks are made by the attention kernel",
    ),
    Family(
        ("--use-mcore-models",),
        "there is one implementation here",
    ),
    Family(
        ("--legacy-tokenizer", "--tokenizer-hf-use-fast"),
        "tokenizers are those that Megatron 0.16 has without it, and fast ones where there are: no <s> before a text, "
        "and </s> ends a document",
    ),
    Family(
        ("--local-rank",),
        "the launcher's environment (LOCAL_RANK) says it",
    ),
    Family(
        ("--trust-remote-code",),
        "code that a tokenizer's repository brings along is never run; a tokenizer that needs it is refused",
    ),
    Family(
        ("--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
        "Weights & Biases is not written; TensorBoard and steps.jsonl are",
    ),
    Family(
        ("--log-straggler",),
        "ranks are always compared, and one that is slower than the others is named",
    ),
    Family(
        ("--log-energy", "--log-device-memory-used", "--log-max-attention-logit"),
        "that measurement is not taken here; nothing else depends on it",
    ),
    Family(
        ("--logging-level",),
        "what is said is said once and on one level",
    ),
    Family(
        ("--rerun-mode",),
        "no step is run again to tell hardware faults; a NaN or Inf stops the run",
    ),
    Family(
        ("--check-for-spiky-loss",),
        "losses are logged but not compared with earlier ones; a NaN or Inf stops the run",
    ),
    Family(
        ("--check-weight-hash-across-dp-replicas-interval",),
        "replicas start equal and apply the same reduced gradients; they are not compared",
    ),
    Family(
        ("--no-manual-gc-eval", "--disable-manual-gc-eval"),
        "no garbage is collected around evaluations anyway",
    ),
    Family(
        ("--empty-unused-memory-level",),
        "the allocator keeps its cache between steps, which is faster",
    ),
    Family(
        ("--train-sync-interval",),
        "the host is never more than a few steps ahead of the device",
    ),
    Family(
        ("--apply-residual-connection-post-layernorm",),
        "Megatron's own layers ignore it too",
    ),
    Family(
        ("--inference-max-seq-length", "--inference-max-requests", "--decoder-seq-length", "--img-h", "--img-w",
         "--patch-dim", "--mamba-head-dim"),
        "it does not concern the training of a GPT",
    ),
)

RETIRED = (
    Family(("--log-batch-size-to-tensorboard",), "the batch size is always written"),
    Family(("--data-impl",), "all data is memory-mapped .bin/.idx"),
    Family(("--DDP-impl",), "data parallel is torch's DistributedDataParallel"),
    Family(("--no-query-key-layer-scaling",), "that scaling is off unless asked for"),
    Family(("--no-contiguous-buffers-in-local-ddp", "--use-contiguous-buffers-in-local-ddp"),
           "gradient buckets are always contiguous"),
    Family(("--no-scaled-masked-softmax-fusion", "--fused-layer-norm", "--no-persist-layer-norm"),
           "fusion is chosen by itself"),
    Family(("--distribute-saved-activations", "--distribute-checkpointed-activations"),
           "it concerned tensor parallel sizes above 1"),
    Family(("--no-initialization", "--lazy-mpu-init", "--short-seq-prob", "--mask-prob"),
           "it does not concern the training of a GPT"),
)

RESPELLED = {
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--use-flash-attn": ("--attention-backend", "auto"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--checkpoint-activations": (
        "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
    ),
    "--batch-size": ("--micro-batch-size",),
    "--warmup": ("--lr-warmup-fraction",),
    "--model-parallel-size": ("--tensor-model-parallel-size",),
    "--checkpoint-num-layers": ("--recompute-num-layers",),
    "--override-lr-scheduler": ("--override-opt-param-scheduler",),
    "--use-checkpoint-lr-scheduler": ("--use-checkpoint-opt-param-scheduler",),
}

REFUSED = (
    Family(("--num-experts", "--multi-latent-attention", "--spec"),
           "this trainer builds dense GPTs only; drop it, or train that model with Megatron-LM"),
    Family(("--hierarchical-context-parallel-sizes",), "a sequence stays on one rank; drop it"),
    Family(("--fp8-format",), "there is no FP8 here; drop it and use --bf16 or --fp16"),
    Family(("--num-layers-per-virtual-pipeline-stage",),
           "as in Megatron, it needs --pipeline-model-parallel-size above 1, which is not built yet; drop it"),
    Family(("--use-torch-fsdp2",), "weights are not sharded yet; drop it to train with plain data parallel"),
    Family(("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--cpu-offloading-num-layers"),
           "weights, moments and activations stay on the training device, masters and moments in fp32; drop it"),
    Family(("--use-rope-scaling",), "frequency scaling of Llama 3.1 is not built; drop it, or use "
           "--rotary-seq-len-interpolation-factor for linear interpolation"),
    Family(("--decoupled-lr", "--decoupled-min-lr"), "all parameters share one learning rate; drop it"),
    Family(("--data-parallel-random-init",),
           "replicas start equal, or averaging their gradients would mean nothing; drop it"),
    Family(("--decrease-batch-size-if-needed", "--step-batch-size-schedule"),
           "the batch size is constant or grows by --rampup-batch-size; drop it, or use that"),
    Family(("--fp32-residual-connection",), "the residual stream has the model's precision; drop it, or train in fp32"),
    Family(("--full-validation",), "a validation is --eval-iters batches; drop it and raise --eval-iters"),
    Family(("--iterations-to-skip",), "every batch that is drawn is trained on; drop it"),
    Family(("--use-checkpoint-args",), "the command line describes the model; drop it and give the model's flags"),
    Family(("--grpo-clamp-eps-lower", "--grpo-clamp-eps-upper", "--grpo-group-size", "--grpo-iterations",
            "--grpo-kl-beta", "--grpo-prompts-per-step", "--langrl-env-config"),
           "this trainer pretrains; drop it, or train by reinforcement with Megatron-LM"),
)

HARMLESS = {"--cpu-offloading-num-layers": ["0"], "--iterations-to-skip": []}  # values with which a refused flag passes


def answers(families: tuple[Family, ...]) -> dict[str, str]:
    """{flag: answer} of a table."""
    return {name: family.answer for family in families for name in family.flags}
