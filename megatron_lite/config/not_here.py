"""Megatron-LM's remaining options, of any of its versions: real names, so that none of them is taken for a typo.

None is a knob here, and leaving one out unasked would change numbers or lose what it was given for. All are refused with
the same first words; the answer of a family is what one may do besides leaving it out. Empty: nothing.
"""

from megatron_lite.config.family import Family, named

FIRST_WORDS = "is a flag of Megatron-LM that this trainer does not have; leave it out"


NOT_HERE = (
    Family(named("use-legacy-models"), "the model here computes what Megatron's core models do"),
    Family(
        named("""
        fp4-format fp8-e4m3 fp8-hybrid te-precision-config-file kitchen-config-file kitchen-recipe-number
        use-kitchen-attention kitchen-attention-backend
        """),
        "and use --bf16 or --fp16",
    ),
    Family(
        named(
            "window-size window-attn-skip-freq softmax-type qk-l2-norm qk-clip qk-clip-alpha qk-clip-threshold "
            "attention-output-gate no-rope-freq"
        ),
        "every layer attends to all tokens before, with a plain softmax and the same positions",
    ),
    Family(
        named("""
        rope-type yarn-rotary-scaling-factor yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow
        yarn-mscale yarn-mscale-all-dim yarn-correction-range-round-to-int mrope-section
        """),
        "or scale positions linearly by --rotary-seq-len-interpolation-factor",
    ),
    Family(
        named("quick-geglu glu-linear-offset activation-func-clamp-value"),
        "and choose GELU (when nothing is said), --swiglu or --squared-relu",
    ),
    Family(
        named("openai-gelu"), "GELU is the tanh formula unless --no-bias-gelu-fusion or --disable-bias-linear is given"
    ),
    Family(named("mtp-num-layers mtp-standalone"), "each position predicts the next token only"),
    Family(
        named("mtp-loss-scaling-factor mtp-use-repeated-layer"),
        "it goes with --mtp-num-layers, which is not here either",
    ),
    Family(
        named("embedding-init-method-std init-method-xavier-uniform"),
        "all matrices begin with the standard deviation of --init-method-std",
    ),
    Family(named("fp16-lm-cross-entropy"), "the loss is taken in fp32"),
    Family(
        named("disable-bf16-reduced-precision-matmul batch-invariant-mode"),
        "matrix products are torch's, as it sets them",
    ),
    Family(
        named("ddp-reduce-scatter-with-fp32-accumulation"),
        "or give --accumulate-allreduce-grads-in-fp32, which reduces in fp32",
    ),
    Family(
        named("""
        experimental-attention-variant dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-loss-coeff
        dsa-indexer-use-sparse-loss linear-attention-type linear-attention-freq linear-conv-kernel-dim linear-key-head-dim
        linear-value-head-dim linear-num-key-heads linear-num-value-heads is-hybrid-model hybrid-attention-ratio
        hybrid-mlp-ratio hybrid-override-pattern hybrid-layer-pattern heterogeneous-layers-config-path
        heterogeneous-layers-config-encoded-json moe-use-upcycling moe-upcycling-granularity use-mup
        """),
        "or train that model with Megatron-LM",
    ),
    Family(
        named("retro-project-dir retro-add-retriever retro-workdir"),
        "or train with retrieval by Megatron-LM",
    ),
    Family(
        named("""
        perform-rl-step grpo-entropy-term-weight grpo-filter-groups-with-same-reward grpo-default-temperature
        grpo-default-top-p langrl-inference-server-type langrl-inference-server-conversation-template
        langrl-external-server no-langrl-external-server rl-prompts-per-eval rl-default-temperature rl-default-top-p
        rl-default-top-k rl-offload-optimizer-during-inference rl-offload-kv-cache-during-training
        rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-partial-rollouts rl-inference-logprobs-is-correction
        rl-importance-sampling-truncation-coef rl-calculate-intra-group-similarity rl-use-sequence-packing
        rl-sequence-packing-bin-size rl-sequence-packing-max-sequences-per-bin rl-sequence-packing-algo
        rl-training-cuda-graphs rl-inference-tensor-model-parallel-size rl-inference-pipeline-model-parallel-size
        rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
        rl-inference-model-unified-memory-level rl-offload-inference-model-weights-when-idle refit-method
        rl-verify-model-weights-swap rl-parallel-generation-tasks rl-skip-bos-token
        """),
        "or train by reinforcement with Megatron-LM",
    ),
    Family(named("sft sft-tokenizer-prompt-format"), "or fine-tune on conversations with Megatron-LM"),
    Family(
        named("""
        fim-data fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix fim-prefix-token
        fim-middle-token fim-suffix-token fim-pad-token fim-eod-token
        """),
        "or write such documents with megatron-lite preprocess",
    ),
    Family(
        named("multiple-validation-sets validation-set-names"),
        "and evaluate on each with --skip-train and its --valid-data-path",
    ),
    Family(named("start-eval-at-iter"), "validations come every --eval-interval iterations"),
    Family(
        named("eval-global-batch-size eval-micro-batch-size"),
        "a validation has the batches of --global-batch-size and --micro-batch-size",
    ),
    Family(
        named("phase-transition-iterations"),
        "and train each phase in a run of its own, the next from the last's --load",
    ),
    Family(named("mid-level-dataset-surplus allow-ambiguous-pad-tokens object-storage-cache-path"), ""),
    Family(named("hybrid-context-parallel"), "a sequence stays on one rank"),
    Family(
        named("vocab-extra-ids"),
        "and set the size of the vocabulary by --padded-vocab-size",
    ),
    Family(
        named(
            "tokenizer-metadata tokenizer-sentencepiece-legacy tokenizer-hf-no-use-fast "
            "no-tokenizer-sentencepiece-ignore-extra-whitespaces"
        ),
        "the tokenizer is what --tokenizer-type and --tokenizer-model say",
    ),
    Family(
        named("non-persistent-save-interval"),
        "and write checkpoints more often by --save-interval, with --async-save, and fewer kept by --save-retain-interval",
    ),
    Family(named("replication"), "checkpoints are on the disk of --save only"),
    Family(
        named("ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format"),
        "and use megatron-lite convert, or --load of one format and --save of another",
    ),
    Family(named("load-main-params-from-ckpt"), "a checkpoint that holds fp32 masters gives them back"),
    Family(
        named(
            "save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval "
            "save-dgrads-interval"
        ),
        "only checkpoints are saved",
    ),
    Family(named("no-weight-decay-cond-type apply-wd-to-qk-layernorm"), "biases and norms get no weight decay"),
    Family(
        named("adlr-autoresume"),
        "and end a job in time by --exit-signal-handler or --exit-duration-in-mins",
    ),
    Family(
        named("inprocess-restart enable-ft-package calc-ft-timeouts ft-num-warmup-iters"),
        "torchrun begins again from the last checkpoint, as often as its own max-restarts says",
    ),
    Family(named("error-injection-rate error-injection-type test-mode"), "it exists to test Megatron-LM itself"),
    Family(named("run-workload-inspector-server"), "touch RUN/profile.now profiles a run that is going on"),
    Family(named("fake-process-group"), "megatron-lite plan says what a rank of a larger run would need"),
    Family(named("dump-param-to-param-group-map"), ""),
)
