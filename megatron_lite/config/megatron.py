"""Megatron-LM's flags that are not knobs here: accepted without effect, respelled, or refused.

Each entry says why; a refusal also says the way out. Nothing of this is silent: what a command line
uses of these tables is printed once at the start, or stops the run.
"""

from megatron_lite.config.family import Family
from megatron_lite.config.other_trades import OTHER_TRADES

ACCEPTED = (
    Family(
        ("--overlap-grad-reduce",),
        "gradients are always reduced while backward runs",
    ),
    Family(
        ("--use-distributed-optimizer", "--overlap-param-gather", "--data-parallel-sharding-strategy",
         "--overlap-param-gather-with-optimizer-step", "--num-distributed-optimizer-instances"),
        "optimizer state is kept whole on every rank: same numbers, more memory per rank",
    ),
    Family(
        ("--sequence-parallel", "--tp-comm-overlap", "--no-async-tensor-model-parallel-allreduce",
         "--disable-async-tensor-model-parallel-allreduce", "--expert-tensor-parallel-size", "--cp-comm-type"),
        "as in Megatron, it matters only with tensor, context or expert parallel sizes above 1",
    ),
    Family(
        ("--tp-comm-overlap-cfg", "--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-rs",
         "--tp-comm-overlap-rs-dgrad", "--disable-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-wgrad",
         "--disable-tp-comm-split-ag", "--disable-tp-comm-split-rs", "--tp-comm-bootstrap-backend",
         "--no-clone-scatter-output-in-embedding", "--use-tp-pp-dp-mapping", "--max-seqlen-per-dp-cp-rank",
         "--tp-comm-atomic-ag", "--tp-comm-atomic-rs"),
        "it matters only with tensor or context parallel sizes above 1",
    ),
    Family(
        ("--overlap-p2p-communication", "--no-overlap-p2p-communication", "--overlap-p2p-communication-warmup-flush",
         "--no-scatter-gather-tensors-in-pipeline", "--use-ring-exchange-p2p", "--defer-embedding-wgrad-compute",
         "--wgrad-deferral-limit", "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
         "--pipeline-model-parallel-layout", "--account-for-embedding-in-pipeline-split",
         "--account-for-loss-in-pipeline-split", "--microbatch-group-size-per-virtual-pipeline-stage",
         "--pipeline-model-parallel-comm-backend", "--pipeline-model-parallel-split-rank",
         "--standalone-embedding-stage", "--align-grad-reduce", "--no-align-grad-reduce", "--align-param-gather",
         "--no-align-param-gather", "--batch-p2p-comm", "--batch-p2p-sync", "--no-batch-p2p-sync",
         "--deallocate-pipeline-outputs", "--variable-seq-lengths"),
        "it matters only with --pipeline-model-parallel-size above 1",
    ),
    Family(
        ("--ddp-num-buckets", "--ddp-pad-buckets-for-high-nccl-busbw", "--ddp-average-in-collective",
         "--no-gradient-reduce-div-fusion", "--delay-grad-reduce", "--no-delay-grad-reduce", "--delay-param-gather",
         "--create-all-gather-group"),
        "gradients are averaged in buckets of --ddp-bucket-size while backward runs",
    ),
    Family(
        ("--use-nccl-ub", "--nccl-ub", "--disable-symmetric-registration", "--use-sharp", "--sharp-enabled-group",
         "--nccl-communicator-config-path", "--high-priority-stream-groups", "--disable-gloo-process-groups",
         "--enable-gloo-process-groups"),
        "it changes how ranks are connected, no number; NCCL's own environment variables count here as anywhere",
    ),
    Family(
        ("--flight-recorder-dump-path", "--flight-recorder-trace-buffer-size", "--no-flight-recorder-dump-on-timeout",
         "--flight-recorder-include-stack-trace", "--no-flight-recorder-include-only-active",
         "--no-flight-recorder-extra-dump-on-exec"),
        "torch's flight recorder is set by its own TORCH_FR_ and TORCH_NCCL_ environment variables",
    ),
    Family(
        ("--distributed-timeout-seconds-after-init",),
        "--distributed-timeout-minutes holds from the first collective to the last",
    ),
    Family(
        ("--use-torch-optimizer-for-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--no-pin-cpu-grads",
         "--no-pin-cpu-params"),
        "it changes only --optimizer-cpu-offload",
    ),
    Family(
        ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype",
         "--no-store-param-remainders"),
        "it matters only with --use-precision-aware-optimizer",
    ),
    Family(
        ("--init-model-with-meta-device", "--fsdp-double-buffer", "--suggested-communication-unit-size",
         "--enable-full-sharding-in-hsdp", "--outer-dp-sharding-strategy", "--fsdp-manual-registration",
         "--torch-fsdp2-no-reshard-after-forward", "--no-strict-fsdp-dtensor-load"),
        "it matters only with weights that are sharded over the ranks (FSDP)",
    ),
    Family(
        ("--enable-cuda-graph", "--external-cuda-graph", "--cuda-graph-impl", "--cuda-graph-scope",
         "--cuda-graph-modules", "--cuda-graph-warmup-steps"),
        "CUDA graphs change speed, not results, and none are recorded; --torch-compile is what makes a step faster",
    ),
    Family(
        ("--te-rng-tracker", "--use-te-rng-tracker", "--inference-rng-tracker"),
        "random numbers are torch's own",
    ),
    Family(
        ("--disable-jit-fuser", "--use-te-activation-func", "--cross-entropy-fusion-impl", "--onnx-safe",
         "--bias-activation-fusion", "--memory-efficient-layer-norm", "--fused-single-qkv-rope"),
        "how kernels are fused changes speed, not results, and is chosen here by itself",
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
         "--moe-router-pre-softmax", "--moe-shared-expert-overlap", "--moe-shared-expert-gate",
         "--moe-use-legacy-grouped-gemm", "--moe-layer-recompute", "--moe-extended-tp", "--moe-router-fusion",
         "--moe-router-num-groups", "--moe-router-group-topk", "--moe-router-force-load-balancing",
         "--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization", "--moe-z-loss-coeff",
         "--moe-input-jitter-eps", "--moe-per-layer-logging", "--moe-enable-deepep", "--moe-deepep-num-sms",
         "--moe-hybridep-num-sms", "--moe-flex-dispatcher-backend", "--moe-expert-capacity-factor",
         "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy", "--moe-apply-probs-on-input",
         "--moe-enable-routing-replay", "--moe-latent-size", "--moe-pad-experts-for-cuda-graph-inference",
         "--moe-router-topk-limited-devices", "--moe-routing-trace-path", "--moe-routing-trace-max-training-iters",
         "--moe-routing-trace-capture-logits", "--moe-routing-trace-capture-hidden-states",
         "--moe-routing-trace-dump-weights", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute",
         "--ep-overlap-early-attn-memory-release", "--use-fused-weighted-squared-relu"),
        "it matters only with --num-experts",
    ),
    Family(
        ("--fp8-amax-compute-algo", "--fp8-amax-history-len", "--fp8-param-gather", "--fp8-recipe", "--fp8-margin",
         "--fp8-interval", "--no-fp8-wgrad", "--fp8-quantizer-factory", "--first-last-layers-bf16",
         "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16", "--keep-fp8-transpose-cache",
         "--reuse-grad-buf-for-mxfp8-param-ag"),
        "it matters only with --fp8-format",
    ),
    Family(
        ("--fp4-recipe", "--fp4-quantizer-factory", "--fp4-param-gather"),
        "it matters only with --fp4-format",
    ),
    Family(
        ("--muon-momentum", "--muon-no-split-qkv", "--muon-use-nesterov", "--muon-scale-mode", "--muon-num-ns-steps",
         "--muon-fp32-matmul-prec", "--muon-tp-mode", "--muon-extra-scale-factor"),
        "it matters only with --optimizer muon",
    ),
    Family(
        ("--rope-scaling-factor",),
        "it matters only with --use-rope-scaling",
    ),
    Family(
        ("--relative-attention-num-buckets", "--relative-attention-max-distance"),
        "it matters only with --position-embedding-type relative",
    ),
    Family(
        ("--offload-modules", "--min-offloaded-tensor-size"),
        "it matters only with --fine-grained-activation-offloading",
    ),
    Family(
        ("--non-persistent-ckpt-type", "--non-persistent-global-ckpt-dir", "--non-persistent-local-ckpt-dir",
         "--non-persistent-local-ckpt-algo", "--replication-jump", "--replication-factor"),
        "it matters only with --non-persistent-save-interval",
    ),
    Family(
        ("--inprocess-max-iterations", "--inprocess-monitor-thread-interval", "--inprocess-monitor-process-interval",
         "--inprocess-progress-watchdog-interval", "--inprocess-heartbeat-interval", "--inprocess-soft-timeout",
         "--inprocess-hard-timeout", "--inprocess-heartbeat-timeout", "--inprocess-barrier-timeout",
         "--inprocess-completion-timeout", "--inprocess-last-call-wait", "--inprocess-termination-grace-time",
         "--inprocess-granularity", "--inprocess-active-world-size", "--inprocess-empty-cuda-cache"),
        "it matters only with --inprocess-restart",
    ),
    Family(
        ("--adlr-autoresume-interval",),
        "it matters only with --adlr-autoresume",
    ),
    Family(
        ("--optimizer-offload-fraction",),
        "it matters only with --optimizer-cpu-offload",
    ),
    Family(
        ("--cpu-offloading-activations", "--cpu-offloading-weights", "--cpu-offloading-double-buffering"),
        "it matters only with --cpu-offloading-num-layers",
    ),
    Family(
        ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim", "--kv-lora-rank", "--q-lora-rank", "--v-head-dim",
         "--qk-head-dim", "--qk-pos-emb-head-dim", "--cache-mla-latents",
         "--original-max-position-embeddings", "--beta-fast", "--beta-slow"),
        "it matters only with --multi-latent-attention",
    ),
    Family(
        ("--auto-detect-ckpt-format", "--dist-ckpt-strictness", "--use-dist-ckpt"),
        "the format of a checkpoint is recognised",
    ),
    Family(
        ("--ckpt-fully-parallel-save", "--no-ckpt-fully-parallel-save", "--ckpt-fully-parallel-load",
         "--ckpt-fully-parallel-load-exchange-algo", "--ckpt-fully-parallel-save-process-group",
         "--ckpt-fully-parallel-load-process-group", "--ckpt-assume-constant-structure",
         "--no-ckpt-load-validate-sharding-integrity", "--use-persistent-ckpt-worker", "--async-strategy",
         "--async-ckpt-cpu-priority", "--async-ckpt-io-priority", "--async-ckpt-use-cpu-shm", "--dist-ckpt-format",
         "--dist-ckpt-save-pre-mcore-014", "--dist-ckpt-optim-fully-reshardable",
         "--distrib-optim-fully-reshardable-mem-efficient", "--verify-integrity", "--no-save-tokenizer-assets"),
        "ranks share the writing of a checkpoint as --ckpt-format says, with checksums, and any number of ranks reads it",
    ),
    Family(
        ("--no-use-tokenizer-model-from-checkpoint-args",),
        "the command line names the tokenizer anyway",
    ),
    Family(
        ("--num-dataset-builder-threads", "--no-mmap-bin-files", "--no-create-attention-mask-in-dataloader"),
        "indices are built by one thread in moments, .bin files are mapped, masks are made by the attention kernel",
    ),
    Family(
        ("--per-dataset-sequences-path", "--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap",
         "--disable-msc", "--enable-msc"),
        "it changes how fast data is found, not which; files are read where they lie",
    ),
    Family(
        ("--use-mcore-models", "--enable-experimental"),
        "there is one implementation here",
    ),
    Family(
        ("--legacy-tokenizer", "--tokenizer-hf-use-fast"),
        "tokenizers are those that Megatron 0.16 has without it, and fast ones where there are: no <s> before a text, "
        "and </s> ends a document",
    ),
    Family(
        ("--local-rank", "--local_rank"),
        "the launcher's environment (LOCAL_RANK) says it",
    ),
    Family(
        ("--trust-remote-code",),
        "code that a tokenizer's repository brings along is never run; a tokenizer that needs it is refused",
    ),
    Family(
        ("--wandb-project", "--wandb-exp-name", "--wandb-save-dir", "--wandb-entity"),
        "Weights & Biases is not written; TensorBoard and steps.jsonl are",
    ),
    Family(
        ("--no-one-logger", "--enable-one-logger", "--one-logger-project", "--one-logger-run-name", "--one-logger-async",
         "--app-tag-run-name", "--app-tag-run-version", "--config-logger-dir"),
        "there is no such logger here; run.json and steps.jsonl say what ran",
    ),
    Family(
        ("--no-barrier-with-level-1-timing",),
        "no barrier is set up for the times",
    ),
    Family(
        ("--exit-signal-handler-for-dataloader", "--exit-signal-handler-for-training"),
        "loader processes end with the trainer",
    ),
    Family(
        ("--log-straggler", "--disable-straggler-on-startup", "--straggler-ctrlr-port", "--straggler-minmax-count"),
        "ranks are always compared, and one that is slower than the others is named",
    ),
    Family(
        ("--log-energy", "--log-device-memory-used", "--log-max-attention-logit", "--gpu-sniff-test-interval"),
        "that measurement is not taken here; nothing else depends on it",
    ),
    Family(
        ("--logging-level",),
        "what is said is said once and on one level",
    ),
    Family(
        ("--rerun-mode", "--result-rejected-tracker-filename"),
        "no step is run again to tell hardware faults; a NaN or Inf stops the run",
    ),
    Family(
        ("--check-for-spiky-loss", "--check-for-large-grads"),
        "losses and gradients are logged but not compared with earlier ones; a NaN or Inf stops the run",
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
         "--patch-dim", "--mamba-head-dim", *OTHER_TRADES),
        "it does not concern the training of a GPT",
    ),
)

RETIRED = (
    Family(("--log-batch-size-to-tensorboard",), "the batch size is always written"),
    Family(("--log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"),
           "the learning rate is always written"),
    Family(("--data-impl", "--mmap-warmup"), "all data is memory-mapped .bin/.idx"),
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
    "--checkpoint-granularity": ("--recompute-granularity",),
    "--checkpoint-method": ("--recompute-method",),
    "--checkpoint-num-layers": ("--recompute-num-layers",),
    "--encoder-num-layers": ("--num-layers",),
    "--layernorm-epsilon": ("--norm-epsilon",),
    "--override-lr-scheduler": ("--override-opt-param-scheduler",),
    "--use-checkpoint-lr-scheduler": ("--use-checkpoint-opt-param-scheduler",),
}

REFUSED = (
    Family(("--num-experts", "--multi-latent-attention", "--spec"),
           "this trainer builds dense GPTs only; drop it, or train that model with Megatron-LM"),
    Family(("--hierarchical-context-parallel-sizes",), "a sequence stays on one rank; drop it"),
    Family(("--fp8-format",), "there is no FP8 here; drop it and use --bf16 or --fp16"),
    Family(("--recompute-modules",), "selective recomputation is of core_attn only; drop it, or recompute whole layers "
           "with --recompute-granularity full"),
    Family(("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
           "as in Megatron, it needs --pipeline-model-parallel-size above 1, which is not built yet; drop it"),
    Family(("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp"), "weights are not sharded yet; drop it to train with plain data parallel"),
    Family(("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--cpu-offloading-num-layers",
            "--fine-grained-activation-offloading"),
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
    Family(("--use-checkpoint-args", "--use-mp-args-from-checkpoint-args"), "the command line describes the model; drop it and give the model's flags"),
    Family(("--grpo-clamp-eps-lower", "--grpo-clamp-eps-upper", "--grpo-group-size", "--grpo-iterations",
            "--grpo-kl-beta", "--grpo-prompts-per-step", "--langrl-env-config"),
           "this trainer pretrains; drop it, or train by reinforcement with Megatron-LM"),
)

# Values with which a refused flag passes, since they are what happens here anyway.
HARMLESS = {
    "--cpu-offloading-num-layers": ("0",),
    "--iterations-to-skip": (),
    "--recompute-modules": ("core_attn",),
    "--vocab-extra-ids": ("0",),
    "--mtp-num-layers": ("0",),
    "--rope-type": ("rope",),
    "--softmax-type": ("vanilla",),
    "--glu-linear-offset": ("0.0",),
    "--hybrid-attention-ratio": ("0.0",),
    "--hybrid-mlp-ratio": ("0.0",),
    "--mid-level-dataset-surplus": ("0.005",),
    "--error-injection-rate": ("0",),
}
