"""Options of the other trainings that share Megatron-LM's parser: training a GPT reads none of them."""

from megatron_lite.config.family import named

OTHER_TRADES = named("""
    inference-batch-times-seqlen-threshold max-tokens-to-oom output-bert-embeddings bert-embedder-type flash-decode
    use-legacy-static-engine inference-max-batch-size inference-dynamic-batching
    inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-paused-buffer-size-gb
    inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-block-size
    inference-dynamic-batching-buffer-guaranteed-fraction inference-dynamic-batching-buffer-overflow-factor
    inference-dynamic-batching-max-requests inference-dynamic-batching-max-requests-override
    inference-dynamic-batching-max-tokens inference-dynamic-batching-max-tokens-override
    inference-dynamic-batching-num-cuda-graphs inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-unified-memory-level
    inference-dynamic-batching-cuda-graph-max-tokens inference-dynamic-batching-cuda-graph-mixed-prefill-count
    inference-logging-step-interval inference-wandb-logging no-inference-wandb-logging
    inference-wandb-logging-step-interval inference-coordinator-port inference-fuse-tp-communication
    decode-only-cuda-graphs symmetric-ar-type nccl-all-reduce-for-prefill mlp-chunks-for-prefill disable-chunked-prefill
    enable-chunked-prefill retro-cyclic-train-iters retro-encoder-layers retro-encoder-hidden-dropout
    retro-encoder-attention-dropout retro-num-neighbors retro-num-retrieved-chunks retro-attention-gate
    retro-no-verify-neighbor-count decoder-num-layers bert-no-binary-head retriever-seq-length sample-rate ict-head-size
    biencoder-projection-dim biencoder-shared-query-context-model ict-load bert-load titles-data-path query-in-block-prob
    use-one-sent-docs evidence-data-path retriever-report-topk-accuracies retriever-score-scaling block-data-path
    embedding-path indexer-batch-size indexer-log-interval num-classes num-channels classes-fraction
    data-per-class-fraction head-lr-mult vision-pretraining vision-pretraining-type vision-backbone-type
    swin-backbone-type mask-type mask-factor iter-per-epoch dino-local-img-size dino-local-crops-number
    dino-head-hidden-size dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp
    dino-teacher-temp dino-warmup-teacher-temp-epochs mamba-state-dim mamba-num-groups mamba-num-heads
    disable-mamba-mem-eff-path
    """)
