"""Every knob of the trainer, grouped by concern: what the user typed, nothing derived.

Names, defaults and meanings are Megatron-LM's (0.16) unless the help says otherwise.
"""

from dataclasses import dataclass, field

from megatron_lite.config.flags import Range, flag

MAX_SIZE = 2**31 - 1
SIZE = Range(at_least=1, at_most=MAX_SIZE)
AT_LEAST_0 = Range(at_least=0)
AT_LEAST_1 = Range(at_least=1)
ABOVE_0 = Range(above=0)
PART = Range(above=0, at_most=1)
SHARE = Range(at_least=0, below=1)
LENGTH = Range(at_least=1, remedy="to only evaluate use --skip-train")
OFF = Range(at_least=0, remedy="0 switches it off")
EXPLICIT_BACKENDS = ("unfused", "local")  # values of --attention-backend that write scores down


@dataclass(frozen=True)
class ModelArgs:
    """Flags of the model: its sizes, and the kind of its layers."""

    model: str | None = flag(None, "FUNCTION(shape) builds the model, not a GPT. (ours)", value="FILE.py:FUNCTION")
    num_layers: int = flag(
        None, "Transformer layers. Required.", Range(at_least=1, at_most=100000), aliases=("--encoder-num-layers",)
    )
    hidden_size: int = flag(None, "Width of the residual stream. Required.", SIZE)
    num_attention_heads: int = flag(None, "Attention heads per layer. Required.", SIZE)
    seq_length: int = flag(None, "Tokens per training sample. Required.", SIZE, aliases=("--encoder-seq-length",))
    max_position_embeddings: int | None = flag(None, "Rows of the learned position table; at least seq-length.", SIZE)
    ffn_hidden_size: int | None = flag(None, "Width of the MLP; 4 x hidden, with --swiglu 8/3 x in steps of 64.", SIZE)
    kv_channels: int | None = flag(None, "Width of one head; hidden / heads when left out.", SIZE)
    group_query_attention: bool = flag(False, "Share keys and values between groups of heads.")
    num_query_groups: int = flag(1, "Key/value heads, with --group-query-attention.", Range(at_most=MAX_SIZE))
    position_embedding_type: str = flag(
        "learned_absolute",
        "Learned table, rotary (with YaRN's frequencies), or none.",
        choices=("learned_absolute", "rope", "yarn", "none"),
    )
    rotary_percent: float = flag(1.0, "Share of a head's channels that rotate.", PART)
    rotary_base: int = flag(10000, "Base of the rotary frequencies.", Range(at_least=1, remedy="10000 is usual"))
    rotary_interleaved: bool = flag(False, "Rotate neighboring channels instead of halves.")
    rotary_seq_len_interpolation_factor: int | None = flag(None, "Divide rotary positions by this.", AT_LEAST_1)
    use_rope_scaling: bool = flag(False, "Llama 3.1's rotary frequencies, for sequences beyond 8192 positions.")
    rope_scaling_factor: float = flag(8.0, "With --use-rope-scaling: how many times as long.", ABOVE_0)
    rotary_scaling_factor: float = flag(
        1.0,
        "With yarn, or latent attention: how many times as long.",
        ABOVE_0,
        aliases=("--yarn-rotary-scaling-factor",),
    )
    yarn_original_max_position_embeddings: int | None = flag(
        None, "With yarn: positions of pretraining; 4096 when left out.", SIZE
    )
    yarn_beta_fast: float | None = flag(
        None, "With yarn: turns within them from which on frequencies stay; 32 when left out.", ABOVE_0
    )
    yarn_beta_slow: float | None = flag(
        None, "With yarn: turns below which they are divided by the factor; 1 when left out.", ABOVE_0
    )
    mscale: float = flag(1.0, "With those: how much attention is sharpened.", AT_LEAST_0, aliases=("--yarn-mscale",))
    mscale_all_dim: float = flag(
        0.0,
        "With yarn: how much of that is taken back; latent attention sharpens scores by it.",
        AT_LEAST_0,
        aliases=("--yarn-mscale-all-dim",),
    )
    yarn_correction_range_round_to_int: bool = flag(
        True,
        "With yarn: channels where blending begins and ends are fractions.",
        off="--no-yarn-correction-range-round-to-int",
    )
    add_position_embedding: bool = flag(True, "No effect with rope; refused without.", off="--no-position-embedding")
    normalization: str = flag("LayerNorm", "Norm of the residual stream.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "Epsilon of the norms.", ABOVE_0)
    apply_layernorm_1p: bool = flag(False, "Keep norm weights minus one.")
    swiglu: bool = flag(False, "Gated SiLU MLP.")
    squared_relu: bool = flag(False, "Squared ReLU MLP.")
    bias_gelu_fusion: bool = flag(
        True, "As in Megatron, also changes GELU from the tanh formula to the exact one.", off="--no-bias-gelu-fusion"
    )
    add_bias_linear: bool = flag(
        True, "No biases in linear layers; as in Megatron, GELU becomes the exact one.", off="--disable-bias-linear"
    )
    add_qkv_bias: bool = flag(False, "Bias in the QKV projection, also with --disable-bias-linear.")
    qk_layernorm: bool = flag(False, "Normalize queries and keys per head.")
    untie_embeddings_and_output_weights: bool = flag(False, "A separate output matrix.")
    hidden_dropout: float = flag(0.1, "Dropout of embeddings and of each block's two outputs.", SHARE)
    attention_dropout: float = flag(0.1, "Dropout of attention probabilities.", SHARE)
    init_method_std: float = flag(0.02, "Std of initial weights; output projections: std / sqrt(2 x layers).", ABOVE_0)
    use_mup: bool = flag(
        False, "Maximal update parametrization: initial weights, scales and learning rates that suit any width."
    )
    mup_base_hidden_size: int | None = flag(
        None, "With --use-mup: the width that --lr is for; --hidden-size when left out.", SIZE
    )
    mup_embedding_mult: float = flag(1.0, "With --use-mup: factor of the embeddings' output.", ABOVE_0)
    mup_output_mult: float = flag(
        1.0, "With --use-mup: factor of the logits; base width / width when left out, or 1.", ABOVE_0
    )
    mup_base_head_dim: float | None = flag(
        None, "With --use-mup: width of a head for which scores are scaled as without it.", ABOVE_0
    )
    mup_attn_scale_power: float = flag(1.0, "With --use-mup: scores are divided by the head's width to this power.")
    make_vocab_size_divisible_by: int = flag(128, "The vocabulary is padded to a multiple of this.", SIZE)
    padded_vocab_size: int | None = flag(None, "The padded vocabulary outright.", SIZE)
    attention_backend: str = flag(
        "auto",
        "Attention kernel: flash, fused (cuDNN), unfused, local, or the fastest that fits.",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    explain_attention: bool = flag(False, "Say why faster attention kernels were rejected. (ours)")
    attention_softmax_in_fp32: bool = flag(False, "fp32 softmax in explicit attention (the kernels always do).")
    window_size: str | None = flag(
        None, "A token attends to so many before it, and to none after it.", value="BEFORE,0"
    )
    window_attn_skip_freq: str | None = flag(
        None,
        "With --window-size: every N-th layer attends to all tokens before, or those with a 0 in a pattern.",
        value="N or [1,1,0]*8",
    )
    softmax_type: str = flag(
        "vanilla",
        "What attention's softmax is divided by, too: nothing, 1, or an exponential that each head learns.",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    apply_query_key_layer_scaling: bool = flag(False, "Scale scores by 1/layer inside explicit attention's softmax.")
    transformer_impl: str = flag(
        "transformer_engine", "Both name the one implementation here.", choices=("local", "transformer_engine")
    )
    recompute_granularity: str | None = flag(
        None, "Recompute whole layers (full) or core attention (selective) in backward.", choices=("full", "selective")
    )
    recompute_method: str | None = flag(None, "Which layers a full recompute covers.", choices=("uniform", "block"))
    recompute_num_layers: int | None = flag(
        None, "Layers per recomputed chunk (uniform) or from the first on (block).", Range(at_most=MAX_SIZE)
    )
    mtp_num_layers: int | None = flag(
        None,
        "Multi-token prediction: tokens after the next one that are predicted, by a layer each.",
        Range(at_least=0, at_most=100000),
    )
    mtp_loss_scaling_factor: float = flag(0.1, "What the mean of their losses is multiplied by.", AT_LEAST_0)


@dataclass(frozen=True)
class LatentArgs:
    """Flags of latent attention, whose keys and values are made from one vector."""

    multi_latent_attention: bool = flag(
        False, "DeepSeek's attention, whose keys and values are made from one vector of few channels."
    )
    q_lora_rank: int | None = flag(None, "Channels of that which queries are made from; none when left out.", SIZE)
    kv_lora_rank: int = flag(32, "Channels of that which keys and values are made from.", SIZE)
    qk_head_dim: int = flag(128, "Channels of a head's query and key that do not rotate.", SIZE)
    qk_pos_emb_head_dim: int = flag(64, "Those that rotate; of keys all heads share them.", SIZE)
    v_head_dim: int = flag(128, "Channels of a head's value.", SIZE)
    rope_type: str | None = flag(
        None, "Its rotary frequencies: plain ones, or YaRN's, which it has when left out.", choices=("rope", "yarn")
    )
    original_max_position_embeddings: int = flag(4096, "With its yarn: positions of pretraining.", SIZE)
    beta_fast: float = flag(32.0, "With its yarn: turns within them from which on frequencies stay.", ABOVE_0)
    beta_slow: float = flag(1.0, "With its yarn: turns below which they are divided by the factor.", ABOVE_0)


@dataclass(frozen=True)
class ExpertArgs:
    """Flags of experts, their routers and the exchange of tokens."""

    num_experts: int | None = flag(None, "Experts in the place of a layer's MLP.", SIZE)
    moe_layer_freq: str = flag(
        "1",
        "Layers with experts: the first of every N, or a pattern with a 0 or 1 for each layer: '([0]*3+[1]*13)'.",
        value="N|PATTERN",
    )
    moe_ffn_hidden_size: int | None = flag(None, "Width of one expert; that of the MLP when left out.", SIZE)
    moe_router_topk: int = flag(2, "Experts of each token.", AT_LEAST_1)
    moe_router_score_function: str = flag(
        "softmax", "How a router's numbers become shares.", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(False, "Softmax over all experts, then choose; else over the chosen ones.")
    moe_router_topk_scaling_factor: float | None = flag(None, "Multiply a token's shares by this.", ABOVE_0)
    moe_router_num_groups: int | None = flag(None, "Groups of experts, of which a token's come from some.", SIZE)
    moe_router_group_topk: int | None = flag(None, "How many of those groups.", SIZE)
    moe_router_dtype: str | None = flag(None, "Precision in which tokens are routed.", choices=("fp32", "fp64"))
    moe_router_enable_expert_bias: bool = flag(
        False, "Balance experts by a bias that is added to scores where experts are chosen, and there only."
    )
    moe_router_bias_update_rate: float = flag(1e-3, "Step of that bias, up or down.", AT_LEAST_0)
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",),
        "Loss that balances experts: aux_loss, seq_aux_loss, global_aux_loss, several of them, sinkhorn, or none.",
        value="KIND ...",
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), "Its factor, one of each.", value="FACTOR ...")
    moe_z_loss_coeff: float | None = flag(None, "Factor of the loss that keeps a router's numbers small.", AT_LEAST_0)
    moe_input_jitter_eps: float | None = flag(None, "Multiply a router's input by 1 - this to 1 + this.", SHARE)
    moe_router_force_load_balancing: bool = flag(False, "Route tokens at random, for measurements of speed.")
    moe_expert_capacity_factor: float | None = flag(
        None, "Drop tokens of an expert beyond this times its even share; below 0: none."
    )
    moe_token_drop_policy: str = flag(
        "probs", "Which tokens are dropped: those of the smallest shares, or the last.", choices=("probs", "position")
    )
    moe_shared_expert_intermediate_size: int | None = flag(None, "Width of an expert that all tokens pass.", SIZE)
    moe_shared_expert_gate: bool = flag(False, "Weigh its output by a sigmoid of the token.")
    moe_apply_probs_on_input: bool = flag(False, "Weigh an expert's input, not what it activates; of one expert each.")
    moe_token_dispatcher_type: str = flag(
        "allgather",
        "How tokens get to the ranks of their experts; flex is alltoall here.",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_per_layer_logging: bool = flag(False, "Chart each layer's balancing losses.")


@dataclass(frozen=True)
class TrainingArgs:
    """Flags of batches, length of training, recomputation and compilation."""

    micro_batch_size: int = flag(None, "Samples per rank per forward and backward. Required.", SIZE)
    global_batch_size: int | None = flag(
        None,
        "Samples per optimizer step over all ranks; micro-batch x ranks when left out.",
        Range(at_most=MAX_SIZE),
    )
    rampup_batch_size: tuple[int, ...] = flag(
        (), "Grow the global batch over the first samples; with --train-samples.", value="START INCREMENT SAMPLES"
    )
    step_batch_size_schedule: str | None = flag(
        None,
        "Global batches from a number of tokens on, in place of --global-batch-size: '0:768 250B:1536'; "
        "with --train-samples.",
        value="'TOKENS:BATCH ...'",
    )
    eval_global_batch_size: int | None = flag(
        None, "Samples of an evaluation's batch; --global-batch-size when left out.", SIZE
    )
    eval_micro_batch_size: int | None = flag(
        None, "Samples per rank per forward of an evaluation; --micro-batch-size when left out.", SIZE
    )
    train_iters: int | None = flag(None, "Optimizer steps to run. Required, or --train-samples.", LENGTH)
    train_samples: int | None = flag(None, "Samples to train on; excludes --train-iters.", LENGTH)
    iterations_to_skip: tuple[int, ...] = flag(
        (), "Iterations whose batches are drawn, but not trained on.", AT_LEAST_1, value="N ..."
    )
    seed: int = flag(1234, "Seed of weights, dropout and data order.", Range(at_least=0, below=4294967296))
    calculate_per_token_loss: bool = flag(False, "Normalize gradients by the unmasked tokens of the global batch.")
    skip_train: bool = flag(False, "Only evaluate.")
    exit_interval: int | None = flag(None, "Save and leave at a multiple of this iteration.", OFF, zero_is_off=True)
    exit_duration_in_mins: int | None = flag(None, "Save and leave after this many minutes.", OFF, zero_is_off=True)
    exit_signal_handler: bool = flag(
        False,
        "On the exit signal: finish the step (on GPUs the two after it), save, exit 0; torchrun waits "
        "--shutdown-timeout, 30 s.",
    )
    exit_signal: str = flag("SIGTERM", "The signal of --exit-signal-handler.", value="NAME")
    rerun_mode: str = flag(
        "validate_results",
        "With --error-injection-rate: whether errors are injected (validate_results). No step is ever run again.",
        choices=("disabled", "validate_results", "report_stats"),
    )
    error_injection_rate: int = flag(
        0,
        "End as if one in so many results of a rank's micro-batches were wrong, to test a job; 0: never.",
        AT_LEAST_0,
    )
    error_injection_type: str = flag(
        "transient_error",
        "transient_error ends with exit code 17, the others with 16; all save before.",
        choices=("correct_result", "transient_error", "persistent_error"),
    )
    manual_gc: bool = flag(False, "Run Python's garbage collector only at --manual-gc-interval.")
    manual_gc_interval: int = flag(0, "Iterations between collections; 0: never while training.", AT_LEAST_0)
    deterministic_mode: bool = flag(False, "Refuse nondeterministic kernels.")
    torch_compile: str = flag(
        "auto",
        "What torch.compile compiles: the transformer layers, with the loss on GPUs, or nothing. auto: layers on GPUs, "
        "none on CPUs. Without a value: layers. (ours)",
        choices=("auto", "layers", "none"),
        as_switch=("layers", "none"),
    )
    torch_compile_backend: str = flag(
        "inductor",
        "What it compiles with; aot_eager: nothing, for finding errors. (ours)",
        choices=("inductor", "aot_eager"),
    )


@dataclass(frozen=True)
class PrecisionArgs:
    """Flags of precision and loss scale."""

    fp16: bool = flag(False, "float16 model, fp32 masters, dynamic loss scale.")
    bf16: bool = flag(False, "bfloat16 model, fp32 masters, gradients accumulated in fp32.")
    loss_scale: float | None = flag(None, "A fixed fp16 loss scale; dynamic when left out or 0.", AT_LEAST_0)
    initial_loss_scale: float = flag(2.0**32, "First dynamic loss scale.", ABOVE_0)
    min_loss_scale: float = flag(1.0, "Floor of the dynamic loss scale.", ABOVE_0)
    loss_scale_window: float = flag(1000, "Clean iterations until the loss scale doubles.", SIZE)
    hysteresis: int = flag(2, "Overflows tolerated before the loss scale halves.", SIZE)
    accumulate_allreduce_grads_in_fp32: bool = flag(False, "Accumulate and reduce 16-bit gradients in fp32.")
    grad_reduce_in_bf16: bool = flag(False, "With --bf16: accumulate and reduce gradients in bf16.")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "Do not stop at a NaN or Inf loss or gradient.", off="--no-check-for-nan-in-loss-and-grad"
    )


@dataclass(frozen=True)
class OptimizerArgs:
    """Flags of the optimizer, and of the schedule of learning rate and weight decay."""

    optimizer: str = flag(
        "adam",
        "adam is AdamW; muon makes the momentum of matrices orthogonal, with AdamW for all else.",
        choices=("adam", "sgd", "muon"),
    )
    lr: float | None = flag(None, "Peak learning rate. Required.", Range(at_least=0, remedy="6e-5 is usual"))
    min_lr: float = flag(0.0, "Floor of the learning rate.")
    decoupled_lr: float | None = flag(
        None, "Peak learning rate of the word embedding and the output matrix, in place of --lr.", AT_LEAST_0
    )
    decoupled_min_lr: float | None = flag(None, "Its floor; --min-lr when left out.", AT_LEAST_0)
    lr_decay_style: str = flag(
        "linear", "Shape of the decay.", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(None, "Iterations of the decay; all of them when left out.", AT_LEAST_1)
    lr_decay_samples: int | None = flag(None, "The same in samples, with --train-samples.", AT_LEAST_1)
    lr_warmup_fraction: float | None = flag(None, "Warm-up as a share of the decay.", SHARE)
    lr_warmup_iters: int = flag(0, "Warm-up in iterations.", AT_LEAST_0)
    lr_warmup_samples: int = flag(0, "Warm-up in samples, with --train-samples.", AT_LEAST_0)
    lr_warmup_init: float = flag(0.0, "Learning rate at the first step of the warm-up.")
    lr_wsd_decay_style: str = flag(
        "exponential", "Shape of WSD's last phase.", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "Length of WSD's last phase in iterations.", AT_LEAST_0)
    lr_wsd_decay_samples: int | None = flag(None, "The same in samples.", AT_LEAST_0)
    weight_decay: float = flag(0.01, "Decoupled weight decay of matrices; biases and norms get none.", AT_LEAST_0)
    apply_wd_to_qk_layernorm: bool = flag(False, "With --qk-layernorm: its norms decay, too.")
    start_weight_decay: float | None = flag(None, "First weight decay, when it grows.")
    end_weight_decay: float | None = flag(None, "Last weight decay, when it grows.")
    weight_decay_incr_style: str = flag(
        "constant", "How weight decay moves from start to end.", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = flag(0.9, "Decay of the first moment.", SHARE)
    adam_beta2: float = flag(0.999, "Decay of the second moment.", SHARE)
    adam_eps: float = flag(1e-8, "Epsilon of Adam.", ABOVE_0)
    sgd_momentum: float = flag(0.9, "Momentum of SGD.", SHARE)
    muon_momentum: float = flag(0.9, "Momentum of Muon.", SHARE)
    muon_nesterov: bool = flag(False, "With muon: Nesterov's momentum.", aliases=("--muon-use-nesterov",))
    muon_split_qkv: bool = flag(True, "With muon: queries, keys and values are one matrix.", off="--muon-no-split-qkv")
    muon_scale_mode: str = flag(
        "spectral",
        "With muon: updates are scaled by the larger size's root, that of rows / columns, or that where it is above 1.",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = flag(1.0, "With muon: a further factor of updates.", ABOVE_0)
    muon_num_ns_steps: int = flag(5, "With muon: Newton-Schulz steps.", Range(at_least=1, at_most=99))
    muon_coefficient_type: str = flag("quintic", "With muon: their polynomials.", choices=("simple", "quintic", "aol"))
    muon_fp32_matmul_prec: str = flag(
        "medium", "With muon: their products, of bf16 (medium) or fp32 numbers.", choices=("medium", "high")
    )
    muon_tp_mode: str = flag(
        "duplicated",
        "With muon and tensor parallel ranks: blockwise takes each rank's part for a matrix; others are refused there.",
        choices=("blockwise", "duplicated", "distributed"),
    )
    muon_scalar_optimizer: str = flag("adam", "With muon: for what is no matrix.", choices=("adam",))
    clip_grad: float = flag(1.0, "Limit of the gradients' global norm; 0: no clipping.", AT_LEAST_0)
    override_opt_param_scheduler: bool = flag(
        False, "The command line's schedule wins over the checkpoint's.", aliases=("--override-opt_param-scheduler",)
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "The checkpoint's schedule wins over the command line's.",
        aliases=("--use-checkpoint-opt_param-scheduler",),
    )


@dataclass(frozen=True)
class ParallelArgs:
    """Flags of ranks: how they divide the work, and what each keeps."""

    distributed_backend: str | None = flag(None, "nccl with GPUs, else gloo, when left out.", choices=("nccl", "gloo"))
    distributed_timeout_minutes: int = flag(10, "Time-out of a collective.", Range(at_least=1, at_most=1000000))
    ddp_bucket_size: int | None = flag(None, "Parameters per gradient bucket; 25 MiB when left out.", AT_LEAST_1)
    use_distributed_optimizer: bool = flag(
        False, "Each rank keeps its share of the fp32 weights and moments (ZeRO-1), not all of them."
    )
    use_torch_fsdp2: bool = flag(
        False, "Each rank also keeps only its share of the model; layers are gathered where they are used."
    )
    torch_fsdp2_reshard_after_forward: bool = flag(
        True,
        "With --use-torch-fsdp2: layers stay gathered from forward to backward.",
        off="--torch-fsdp2-no-reshard-after-forward",
    )
    use_megatron_fsdp: bool = flag(
        False,
        "The same by torch's fully_shard, as --data-parallel-sharding-strategy says.",
        aliases=("--use-custom-fsdp",),
    )
    data_parallel_sharding_strategy: str = flag(
        "optim_grads_params",
        "With --use-megatron-fsdp: nothing is shared out, masters and moments, gradients too, or weights too.",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    megatron_fsdp_main_params_dtype: str = flag(
        "fp32", "With --use-megatron-fsdp: of the weights that are shared out.", choices=("fp32",)
    )
    megatron_fsdp_main_grads_dtype: str = flag(
        "auto",
        "With --use-megatron-fsdp: of gradients; fp32 as --accumulate-allreduce-grads-in-fp32.",
        choices=("auto", "fp32"),
    )
    megatron_fsdp_grad_comm_dtype: str = flag(
        "auto",
        "With --use-megatron-fsdp: of gradients on their way, which is that of gradients.",
        choices=("auto", "fp32"),
    )
    num_distributed_optimizer_instances: int = flag(
        1, "Groups of ranks that each hold all shares, such as one per node.", AT_LEAST_1
    )
    tensor_model_parallel_size: int = flag(1, "Ranks that split each layer: heads, MLP and vocabulary.", AT_LEAST_1)
    sequence_parallel: bool = flag(
        False, "With tensor parallel ranks: between attention and MLP each keeps its share of the tokens only."
    )
    pipeline_model_parallel_size: int = flag(
        1, "Ranks that have some of the layers each, and hand hidden states on (1F1B).", AT_LEAST_1
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first of them, if not as many as others.", AT_LEAST_1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last of them, if not as many as others.", AT_LEAST_1
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "Count the embedding as one of the first stage's layers, which then has one less."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "Count the loss as one of the last stage's layers, which then has one less."
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "What each stage has, in order, and each chunk of it in further rounds: E the embedding, t a layer, L the "
        "loss, | to the next; (tt|)*3 repeats, as t*2 does.",
        value="LAYOUT",
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers of each chunk of a stage, interleaved with those of other stages.", AT_LEAST_1
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "The same by the number of chunks of each stage.", AT_LEAST_1
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Micro-batches that go through one chunk of a stage before they go through the next; as many as stages when "
        "left out.",
        AT_LEAST_1,
    )
    pipeline_schedule: str = flag(
        "1F1B", "ZeroBubble: gradients of weights fill what stages would wait.", choices=("1F1B", "ZeroBubble")
    )
    use_tp_pp_dp_mapping: bool = flag(
        False, "Ranks of a pipeline are neighbors of each other, rather than those of data parallel ones."
    )
    context_parallel_size: int = flag(1, "Ranks that split the positions of each sequence.", AT_LEAST_1)
    cp_comm_type: tuple[str, ...] = flag(
        ("p2p",),
        "How they exchange in attention, for all layers or for each: a2a exchanges heads for positions; p2p and "
        "all_gather gather keys and values; a2a+p2p exchanges heads among neighbors, and gathers among the others.",
        choices=("p2p", "a2a", "allgather", "all_gather", "a2a+p2p"),
        value="TYPE ...",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = flag(
        (), "With a2a+p2p: ranks of the inner and the outer exchange.", AT_LEAST_1, value="INNER OUTER"
    )
    expert_model_parallel_size: int = flag(1, "Ranks that have some of the experts each.", AT_LEAST_1)
    expert_tensor_parallel_size: int | None = flag(
        None, "Ranks that split each expert; as many as split a layer when left out.", AT_LEAST_1
    )
    use_cpu_initialization: bool = flag(False, "Initialize weights on the CPU.")

    @property
    def shards_weights(self) -> bool:
        """Whether each rank keeps only its share of the model, which is gathered in forward and again in backward."""
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy == "optim_grads_params"
        return self.use_torch_fsdp2

    @property
    def shards_state(self) -> bool:
        """Whether each rank keeps only its share of masters and moments, at least."""
        if self.use_megatron_fsdp:
            return self.data_parallel_sharding_strategy != "no_shard"
        return self.use_distributed_optimizer or self.use_torch_fsdp2


@dataclass(frozen=True)
class DataArgs:
    """Flags of data sets, tokenizers and loaders."""

    data_path: tuple[str, ...] = flag(
        (), "Prefix of a .bin/.idx pair, several, or each with its weight before it.", value="[WEIGHT] PREFIX ..."
    )
    train_data_path: tuple[str, ...] = flag(
        (), "The same for training only; with --valid-data-path/--test-data-path.", value="[WEIGHT] PREFIX ..."
    )
    valid_data_path: tuple[str, ...] = flag((), "The same for validation only.", value="[WEIGHT] PREFIX ...")
    test_data_path: tuple[str, ...] = flag((), "The same for the test only.", value="[WEIGHT] PREFIX ...")
    data_args_path: str | None = flag(None, "A file with the arguments of --data-path.", value="FILE")
    per_split_data_args_path: str | None = flag(
        None,
        'A JSON file with the arguments of each split: {"train": [...], "valid": [...], "test": [...]}.',
        value="FILE",
    )
    external_dataloader: str | None = flag(
        None,
        "With --dataloader-type external: a function that yields int [micro-batch, seq-length + 1] arrays, called "
        "as FUNCTION(split, consumed=, micro_batch_size=, seq_length=, rank=, num_ranks=, seed=). (ours)",
        value="FILE.py:FUNCTION",
    )
    split: str | None = flag(None, "Shares of train, validation and test; 969,30,1 when left out.", value="A,B,C")
    mock_data: bool = flag(False, "Synthetic data instead of files.")
    data_cache_path: str | None = flag(
        None, "Folder for the index files of the data; when left out, large ones go to PREFIX/cache.", value="FOLDER"
    )
    tokenizer_type: str | None = flag(
        None,
        "GPT2BPETokenizer (when left out), HuggingFaceTokenizer, SentencePieceTokenizer, "
        "GPTSentencePieceTokenizer, Llama2Tokenizer, TikTokenizer, NullTokenizer, or ByteTokenizer: 256 bytes and EOD "
        "(ours).",
        value="NAME",
    )
    tokenizer_model: str | None = flag(
        None,
        "The SentencePiece .model or TikTokenizer's .json; for HuggingFaceTokenizer a folder or a hub's name.",
        value="FILE",
    )
    tiktoken_pattern: str | None = flag(None, "How TikTokenizer splits text [v2].", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = flag(
        1000, "TikTokenizer's ids below its first byte.", Range(at_least=0, at_most=2147483646)
    )
    tokenizer_special_tokens: tuple[str, ...] = flag(
        (),
        "Names of TikTokenizer's first ids; tokens to add to HuggingFaceTokenizer.",
        value="TOKEN ...",
        aliases=("--tiktoken-special-tokens",),
    )
    tokenizer_hf_include_special_tokens: bool = flag(
        False, "Keep what a HuggingFaceTokenizer puts around each text, such as <s>."
    )
    vocab_file: str | None = flag(None, "GPT-2 style vocab.json.", value="FILE")
    merge_file: str | None = flag(None, "GPT-2 style merges.txt.", value="FILE")
    vocab_size: int | None = flag(
        None,
        "Vocabulary before padding, for NullTokenizer (without its EOD) and TikTokenizer.",
        Range(at_least=1, at_most=2147483646),
    )
    dataloader_type: str = flag(
        "single",
        "In order once (single), shuffled anew each epoch (cyclic), or from --external-dataloader (external).",
        choices=("single", "cyclic", "external"),
    )
    data_sharding: bool = flag(True, "cyclic: one permutation over all ranks.", off="--no-data-sharding")
    num_workers: int | None = flag(
        None, "Loader processes per rank [2; 0 on a CPU, whose cores they would take].", Range(at_least=0, at_most=1024)
    )
    fim_data: bool = flag(False, "Rearrange documents so that their middle comes last (fill in the middle).")
    fim_rate: float = flag(0.5, "With --fim-data: share of the documents.", PART)
    fim_spm_rate: float = flag(0.5, "With --fim-data: share of those whose suffix comes first (SPM).", PART)
    fim_split_sample: str | None = flag(
        None, "With --fim-data: a token that divides documents; fragments are rearranged.", value="TOKEN"
    )
    fim_fragment_rate: float | None = flag(
        None, "With --fim-split-sample: share of the fragments.", Range(at_least=0, at_most=1)
    )
    fim_no_prefix: str | None = flag(None, "With --fim-data: leave what begins so as it is.", value="TEXT")
    fim_prefix_token: str = flag("<fim_prefix>", "With --fim-data: before the beginning.", value="TOKEN")
    fim_middle_token: str = flag("<fim_middle>", "With --fim-data: before the middle.", value="TOKEN")
    fim_suffix_token: str = flag("<fim_suffix>", "With --fim-data: before the end.", value="TOKEN")
    fim_pad_token: str = flag("<fim_pad>", "With --fim-data: fills up samples.", value="TOKEN")
    fim_eod_token: str = flag("<|endoftext|>", "With --fim-data: ends a document.", value="TOKEN")
    reset_position_ids: bool = flag(False, "Positions restart after each end of document.")
    reset_attention_mask: bool = flag(False, "No attention across documents.")
    dataloader_inter_document_masking: bool = flag(
        False, "No attention across documents of the files, whatever tokens end them; positions restart with each."
    )
    eod_mask_loss: bool = flag(False, "No loss where the input is an end of document.")

    @property
    def separates_documents(self) -> bool:
        """Whether attention stays within documents."""
        return self.reset_attention_mask or self.dataloader_inter_document_masking

    @property
    def restarts_positions(self) -> bool:
        """Whether positions count from the start of a document."""
        return self.reset_position_ids or self.dataloader_inter_document_masking


@dataclass(frozen=True)
class WatchArgs:
    """Flags of logging and evaluation."""

    log_interval: int = flag(100, "Iterations between console lines.", AT_LEAST_1)
    log_throughput: bool = flag(False, "TFLOP/s per GPU in the console line.")
    log_progress: bool = flag(False, "A line per checkpoint in SAVE/progress.txt.")
    log_params_norm: bool = flag(False, "Log the L2 norm of the parameters.")
    log_num_zeros_in_grad: bool = flag(False, "Log the number of zeros in the gradients.")
    step_timeline: bool = flag(
        True, "Only each step's time: not of its phases, no memory, no ranks. (ours)", off="--no-step-timeline"
    )
    hardware_samples: bool = flag(
        True, "No clocks, temperatures and errors of GPU and host beside steps. (ours)", off="--no-hardware-samples"
    )
    timing_log_level: int = flag(
        0, "1: print times of a step's main phases; 2: of all. On a GPU its own time.", choices=("0", "1", "2")
    )
    timing_log_option: str = flag("minmax", "How those times are printed.", choices=("max", "minmax", "all"))
    eval_interval: int = flag(1000, "Iterations between validations; 0: one at the end.", OFF)
    eval_iters: int = flag(
        100, "Global batches per validation; 0: none.", Range(at_least=0, remedy="0 switches evaluation off")
    )
    full_validation: bool = flag(False, "Each validation takes all samples of one epoch, in place of --eval-iters.")
    tensorboard_dir: str | None = flag(None, "TensorBoard folder.", value="FOLDER")
    tensorboard_log_interval: int = flag(1, "Iterations between TensorBoard points.", AT_LEAST_1)
    tensorboard_queue_size: int = flag(1000, "TensorBoard's event queue.", AT_LEAST_1)
    log_timers_to_tensorboard: bool = flag(
        False, "Times to TensorBoard: of iterations, and --timing-log-level's in seconds, NAME-time and -min of ranks."
    )
    log_validation_ppl_to_tensorboard: bool = flag(False, "Validation perplexity to TensorBoard.")
    log_memory_to_tensorboard: bool = flag(False, "The GPU allocator's counters and host memory to TensorBoard.")
    log_world_size_to_tensorboard: bool = flag(False, "The number of ranks to TensorBoard.")
    log_loss_scale_to_tensorboard: bool = flag(
        True,
        "No loss scale to TensorBoard.",
        off="--no-log-loss-scale-to-tensorboard",
        aliases=("--disable-log-loss-scale-to-tensorboard",),
    )
    wandb_project: str = flag("", "Weights & Biases project that gets what TensorBoard gets.", value="NAME")
    wandb_exp_name: str = flag("", "The run's name there.", value="NAME")
    wandb_save_dir: str = flag("", "Folder of its files [RUN].", value="FOLDER")
    wandb_entity: str = flag("", "User or team there.", value="NAME")
    mlflow_experiment: str = flag("", "MLflow experiment that gets the same. (ours)", value="NAME")
    log_memory_interval: int | None = flag(None, "Iterations between memory lines; a multiple of --log-interval.")
    run_dir: str | None = flag(
        None,
        "Folder of run.json and steps.jsonl; else --tensorboard-dir, else --save, else runs/TIME. (ours)",
        value="FOLDER",
    )

    def count_validations(self, iterations: int) -> int:
        """How many there are between steps in the first `iterations`."""
        return iterations // self.eval_interval if self.eval_interval else 0


@dataclass(frozen=True)
class CheckpointArgs:
    """Flags of checkpoints: where, when and in which form."""

    save: str | None = flag(None, "Folder to write checkpoints to.", value="FOLDER")
    load: str | None = flag(None, "Folder of the checkpoint to continue; fresh start if it holds none.", value="FOLDER")
    save_interval: int | None = flag(
        None, "Iterations between checkpoints.", OFF, aliases=("--persistent-save-interval",), zero_is_off=True
    )
    save_retain_interval: int | None = flag(
        None, "Keep checkpoints of multiples of this; others go once a newer one is there.", OFF, zero_is_off=True
    )
    ckpt_format: str = flag(
        "torch_dist",
        "torch_dist, torch_dcp, fsdp_dtensor: Megatron's torch_dist, a file per rank; torch: Megatron's one file.",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    )
    async_save: bool = flag(False, "Write checkpoints in a thread, from a copy in host memory, while training goes on.")
    exit_on_save_failure: bool = flag(
        True, "Go on training when a checkpoint cannot be written. (ours)", off="--no-exit-on-save-failure"
    )
    ckpt_step: int | None = flag(None, "The iteration to load, instead of the newest.")
    finetune: bool = flag(False, "Load weights only, start at iteration 0.")
    pretrained_checkpoint: str | None = flag(None, "Weights to start from when --load holds nothing.", value="FOLDER")
    load_main_params_from_ckpt: bool = flag(
        False, "With --no-load-optim and --use-distributed-optimizer: masters get the stored weights before rounding."
    )
    no_load_optim: bool = flag(False, "Do not load the optimizer.")
    no_load_rng: bool = flag(False, "Do not load random-number states.")
    no_save_optim: bool = flag(False, "Do not save the optimizer.")
    no_save_rng: bool = flag(False, "Do not save random-number states.")
    exit_on_missing_checkpoint: bool = flag(False, "Stop when --load holds no checkpoint.")
    use_checkpoint_args: bool = flag(
        False, "Take the model's flags from the checkpoint of --load or --pretrained-checkpoint."
    )
    use_mp_args_from_checkpoint_args: bool = flag(False, "With --use-checkpoint-args: the sizes of parallelism, too.")
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True,
        "With --use-checkpoint-args: the tokenizer stays that of the command line.",
        off="--no-use-tokenizer-model-from-checkpoint-args",
        aliases=("--disable-use-tokenizer-model-from-checkpoint-args",),
    )


@dataclass(frozen=True)
class ProfileArgs:
    """Flags of profilers: which, and in which window."""

    profile: bool = flag(False, "Profile the window: for Nsight Systems, or with --use-pytorch-profiler.")
    use_pytorch_profiler: bool = flag(False, "A torch.profiler trace instead of Nsight Systems; implies --profile.")
    profile_step_start: int = flag(10, "First profiled iteration of this run, counted from 1.")
    profile_step_end: int = flag(12, "The iteration to stop before.")
    profile_ranks: tuple[int, ...] = flag((0,), "Ranks to profile; -1: all.", value="RANK ...")
    pytorch_profiler_collect_shapes: bool = flag(False, "Record operator shapes.")
    pytorch_profiler_collect_callstack: bool = flag(False, "Record Python stacks.")
    pytorch_profiler_collect_chakra: bool = flag(False, "A Chakra execution trace of the window too, in chakra/.")
    pytorch_profiler_collect_memory: bool = flag(False, "Record what operators allocate. (ours)")
    pytorch_profiler_collect_flops: bool = flag(False, "FLOPs of matrix products in the operator table. (ours)")
    profile_modules: bool = flag(
        False, "Ranges of each layer, attention and MLP, forward and backward, in the trace. (ours)"
    )
    profile_gzip: bool = flag(False, "Compress every trace; without it, those of 16 MiB and more. (ours)")
    no_profile_gzip: bool = flag(False, "Compress no trace. (ours)")
    profile_on_demand: bool = flag(
        True,
        "Do not watch for the file RUN/profile.now, which profiles a run going on. (ours)",
        off="--no-profile-on-demand",
    )
    report: bool = flag(
        True,
        "Do not end a profiled run with megatron-lite report, which takes a minute at most. (ours)",
        off="--no-report",
    )
    nvtx_ranges: bool = flag(False, "NVTX ranges for all steps and on all ranks; those of --profile have them anyway.")
    record_shapes: bool = flag(False, "NVTX ranges for every operator with its shapes, on the Nsight Systems path.")
    record_memory_history: bool = flag(
        False,
        "Record every allocation with its Python stack; a snapshot for pytorch.org/memory_viz at the window's end.",
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle", "File of that snapshot; with several ranks _rankN is put before the ending.", value="FILE"
    )
    memory_history_events: int = flag(
        1_000_000, "Allocations and frees that a snapshot holds at most, the newest ones. (ours)"
    )

    @property
    def is_on(self) -> bool:
        """Whether a window is profiled, in any way."""
        return self.profile or self.use_pytorch_profiler or self.record_memory_history


@dataclass(frozen=True)
class Args:
    """Flags of the trainer, by group; --help shows a group under its title."""

    model: ModelArgs = field(default_factory=ModelArgs, metadata={"title": "Model"})
    latent: LatentArgs = field(default_factory=LatentArgs, metadata={"title": "Latent attention"})
    experts: ExpertArgs = field(default_factory=ExpertArgs, metadata={"title": "Mixture of experts"})
    training: TrainingArgs = field(default_factory=TrainingArgs, metadata={"title": "Training"})
    precision: PrecisionArgs = field(default_factory=PrecisionArgs, metadata={"title": "Precision"})
    optimizer: OptimizerArgs = field(default_factory=OptimizerArgs, metadata={"title": "Optimizer and schedule"})
    parallel: ParallelArgs = field(default_factory=ParallelArgs, metadata={"title": "Ranks"})
    data: DataArgs = field(default_factory=DataArgs, metadata={"title": "Data"})
    watch: WatchArgs = field(default_factory=WatchArgs, metadata={"title": "Logging and evaluation"})
    checkpoint: CheckpointArgs = field(default_factory=CheckpointArgs, metadata={"title": "Checkpoints"})
    profile: ProfileArgs = field(default_factory=ProfileArgs, metadata={"title": "Profiling"})
