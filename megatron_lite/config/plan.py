"""The plan of a run: its flags with every default filled in and every derived number computed. run.json holds it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_lite.config.args import Args, ModelArgs, OptimizerArgs, PrecisionArgs
from megatron_lite.config.expert_layers import parse_expert_layers, parse_window_layers
from megatron_lite.config.fp8 import Fp8
from megatron_lite.config.layout import (
    Layout,
    Sharding,
    count_chunk_layers,
    plan_expert_sharding,
    plan_layout,
    plan_sharding,
    plan_stage,
)
from megatron_lite.config.shape import (
    SINKHORN,
    ExpertShape,
    LatentShape,
    ModelShape,
    RankShape,
    choose_losses,
    recomputed_layers,
)
from megatron_lite.config.world import World
from megatron_lite.errors import ConfigError
from megatron_lite.pipeline_schedule import ZERO_BUBBLE, Stage

MAX_TOKENS = 2**53  # of a schedule
AUTO = "auto"
LAYERS = "layers"
NONE = "none"


@dataclass(frozen=True)
class Compilation:
    """Parts of the model that torch.compile compiles."""

    layers: bool  # each by itself
    why: str = ""  # of an automatic choice, with the remedy; empty: the flag says it
    # too: on GPUs, where one kernel then does what several passes do; a CPU is slower with it compiled
    loss: bool = False

    @property
    def target(self) -> str:
        """The value of --torch-compile that asks for this."""
        return LAYERS if self.layers else NONE


def choose_compilation(args: Args, world: World) -> Compilation:
    """Choose what --torch-compile asks for; for auto, layers on a GPU that kernels can be compiled for."""
    asked = args.training.torch_compile
    if asked != AUTO:
        return Compilation(asked == LAYERS, loss=asked == LAYERS and world.gpus > 0)
    why = "" if args.model.model is None else "the code of --model may call it"
    if not world.gpus and not why:
        why = "on a CPU its start takes longer than a short run gains; --torch-compile layers compiles"
    elif args.experts.num_experts is not None:
        why = "experts' tokens vary in number"
    elif args.parallel.pipeline_schedule == ZERO_BUBBLE:
        why = f"--pipeline-schedule {ZERO_BUBBLE} is given, and a compiled layer's backward is one piece"
    elif args.training.deterministic_mode:
        picked = "--deterministic-mode is given, and compiled kernels may be picked by timing them"
        why = f"{picked}; --torch-compile layers compiles all the same"
    elif world.no_compiler and args.training.torch_compile_backend == "inductor":
        why = f"{world.no_compiler}; layers would be faster compiled"
    return Compilation(not why, why or "automatic on a GPU; --torch-compile none trains without", loss=not why)


@dataclass(frozen=True)
class BatchSchedule:
    """Megatron's batch sizes: constant, or growing in equal steps over the first `ramp_samples`."""

    final: int  # global batch size at the end
    start: int = 0  # 0: no ramp-up
    increment: int = 0
    ramp_samples: int = 0
    # of --step-batch-size-schedule: (consumed samples from which a global batch holds, that batch), the first from 0 on
    steps: tuple[tuple[int, int], ...] = ()

    def size(self, consumed: int) -> int:
        """Global batch of the step that starts after `consumed` samples."""
        if self.steps:
            return next(size for first, size in reversed(self.steps) if consumed >= first)
        if not self.start or consumed > self.ramp_samples or self.start == self.final:
            return self.final
        samples_per_increment = self.ramp_samples / ((self.final - self.start) // self.increment)
        return min(self.start + int(consumed / samples_per_increment) * self.increment, self.final)

    def iterations(self, samples: int) -> int:
        """Number of full steps in `samples` samples."""
        iterations = 0
        consumed = 0
        while self.steps and consumed < samples:
            # as in Megatron-LM, the last step may take more
            consumed += self.size(consumed)
            iterations += 1
        if self.steps:
            return iterations
        while self.start and consumed <= self.ramp_samples and consumed + self.size(consumed) <= samples:
            consumed += self.size(consumed)
            iterations += 1
        return iterations + (samples - consumed) // self.final

    def samples(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        if not self.start:
            return iterations * self.final
        consumed = 0
        for _ in range(iterations):
            consumed += self.size(consumed)
        return consumed


FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Read --step-batch-size-schedule, whose entries are TOKENS:BATCH: "0:768 250B:1536".

    Args:
        text: The flag's value.
        seq_length: Tokens of a sample.

    Returns:
        ((consumed samples, global batch), ...).

    Raises:
        ValueError: An entry cannot be read, or entries are not in order from 0 on.
    """
    steps = []
    for entry in text.replace(",", " ").split():
        tokens, size = (_read_number(word) for word in entry.split(":"))
        steps.append((tokens // seq_length, size))
    starts = [first for first, _ in steps]
    is_in_order = starts[:1] == [0] and starts == sorted(set(starts))
    if not is_in_order or any(size < 1 for _, size in steps):
        raise ValueError(text)
    return tuple(steps)


def _read_number(word: str) -> int:
    """Read a number of tokens that may end with K, M, B or T: "1.5K" -> 1500."""
    factor = FACTORS.get(word[-1:].upper(), 1)
    number = float(word[:-1] if factor > 1 else word)
    if not 0 <= number * factor <= MAX_TOKENS:
        raise ValueError(word)
    return int(number * factor)


@dataclass(frozen=True)
class LearningRatePlan:
    """Learning rate and weight decay as functions of the samples that successful steps consumed."""

    style: str
    init: float
    peak: float
    floor: float
    warmup_samples: float
    decay_samples: int
    wsd_style: str
    wsd_samples: int
    weight_decay_style: str
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_samples: int

    def scale_to_width(self, o: OptimizerArgs, width: float) -> "LearningRatePlan":
        """The same with the rates that --use-mup gives to parameters of a model `width` times as wide as its base.

        Adam's matrices learn more slowly, SGD's vectors faster.
        """
        factor = width if o.optimizer == "sgd" else 1 / width
        return replace(self, peak=self.peak * factor, floor=self.floor * factor)

    def decouple(self, o: OptimizerArgs) -> "LearningRatePlan | None":
        """The same with the rates of --decoupled-lr; None without that flag."""
        if o.decoupled_lr is None:
            return None
        floor = self.floor if o.decoupled_min_lr is None else o.decoupled_min_lr
        return replace(self, peak=o.decoupled_lr, floor=floor)


@dataclass(frozen=True)
class Plan:
    """Everything that is decided about a run before it starts. Frozen."""

    args: Args
    world: World
    layout: Layout
    stage: Stage  # of the pipeline: this rank's layers
    shape: ModelShape
    vocab_size: int  # before padding
    device: str  # cuda | cpu
    backend: str  # nccl | gloo
    precision: str  # fp32 | fp16 | bf16
    fp32_gradients: bool  # 16-bit gradients are accumulated and reduced in fp32
    batch: BatchSchedule
    train_iters: int
    train_samples: int
    learning_rate: LearningRatePlan
    profile_window: range  # iterations of this run, from 1; empty without --profile
    profile_ranks: frozenset[int]
    compilation: Compilation
    sharding: Sharding | None  # None: every rank keeps everything
    loader_workers: int  # processes per rank
    fp8: Fp8 | None = None  # of linear layers: a plan's on paper, never a run's

    @property
    def samples_per_pass(self) -> int:
        """Samples of one micro-batch of all data parallel ranks."""
        return self.args.training.micro_batch_size * self.layout.data

    @cached_property
    def rank_shape(self) -> RankShape:
        """Share of `shape` that this rank computes."""
        layout = self.layout
        return self.shape.split(layout.tensor, layout.context, layout.expert, layout.expert_tensor)

    @cached_property
    def expert_sharding(self) -> Sharding | None:
        """How replicas of experts share out their state; None: every rank keeps all of its own."""
        return plan_expert_sharding(self.args.parallel, self.layout)

    def count_head_ranks(self, layer: int) -> int:
        """Count the ranks that share out heads, instead of positions, while attention of a layer computes.

        Args:
            layer: The layer's number, from 0.
        """
        kinds = self.args.parallel.cp_comm_type
        return self.layout.count_head_ranks(kinds[0] if len(kinds) == 1 else kinds[layer])

    @cached_property
    def min_head_ranks(self) -> int:
        """The fewest such ranks of any layer of this stage: of the layer whose attention keeps most."""
        if self.layout.context == 1:
            return 1
        return min(map(self.count_head_ranks, self.stage.layers), default=1)

    @property
    def attends_in_chunks(self) -> bool:
        """Whether queries of some layers are those of two chunks of a sequence, which see earlier keys as well."""
        return self.layout.context > self.min_head_ranks

    @cached_property
    def attention_shape(self) -> RankShape:
        """The share of `shape` of which this rank computes attention: `rank_shape`, but for heads and positions."""
        return self.rank_shape.exchange_heads(self.min_head_ranks)

    @property
    def masks_attention(self) -> bool:
        """Whether attention has a mask that is not just causal, in any layer."""
        return self.args.data.separates_documents or self.shape.window is not None

    @property
    def fp8_layers(self) -> tuple[int, ...]:
        """The layers of this stage, counted from 0, whose linear layers multiply in fp8."""
        fp8 = self.fp8
        if fp8 is None:
            return ()
        return tuple(layer for layer in self.stage.layers if fp8.covers(layer, self.shape.num_layers))

    @property
    def keeps_fp8_weights(self) -> bool:
        """Whether weights of linear layers are kept and gathered in fp8. Where layers give their weights back after
        forward they are gathered in 16 bits (Megatron-LM takes --fp8-param-gather back for torch's FSDP)."""
        if self.fp8 is None or self.sharding is None or self.sharding.gathers_twice:
            return False
        return self.fp8.fp8_param_gather

    def count_recomputed(self, layers: int) -> int:
        """How many of a chunk's layers, from its first on, forget their activations."""
        m = self.args.model
        return recomputed_layers(m.recompute_granularity, m.recompute_method, m.recompute_num_layers, layers)

    @property
    def recomputes_further_layers(self) -> bool:
        """Whether layers of multi-token prediction forget their activations: as in Megatron-LM, not with
        --recompute-method block."""
        m = self.args.model
        return m.recompute_granularity == "full" and m.recompute_method == "uniform"

    @property
    def further_layers(self) -> int:
        """Layers of multi-token prediction of this stage: all of them are on the last one."""
        return self.shape.mtp_num_layers if self.stage.is_last else 0

    @property
    def recomputed_further_layers(self) -> int:
        """How many of those forget their activations."""
        return self.further_layers if self.recomputes_further_layers else 0

    @property
    def further_expert_layers(self) -> int:
        """How many of those have experts: all, where the decoder's last layer has some."""
        return self.further_layers if self.shape.has_experts(self.shape.num_layers) else 0

    @property
    def recomputed_layers(self) -> int:
        """How many layers of this stage, of all its chunks, forget their activations."""
        return sum(self.count_recomputed(len(chunk)) for chunk in self.stage.chunks)

    @property
    def evaluation_micro_batch(self) -> int:
        """Samples of one micro-batch of an evaluation on one rank."""
        return self.args.training.eval_micro_batch_size or self.args.training.micro_batch_size

    def count_evaluation_passes(self, samples: int) -> int:
        """How many micro-batches of an evaluation hold `samples`.

        The last one may be filled up with earlier samples.
        """
        of_a_rank = -(-samples // self.layout.data)
        return -(-of_a_rank // self.evaluation_micro_batch)

    @property
    def evaluation_samples(self) -> int:
        """Samples of one evaluation, where --full-validation does not take all that there are."""
        training = self.args.training
        # Megatron-LM's --global-batch-size is one pass where a schedule stands in its place
        usual = self.samples_per_pass if self.batch.steps else self.batch.final
        return self.args.watch.eval_iters * (training.eval_global_batch_size or usual)

    @property
    def final_micro_batches(self) -> int:
        """Micro-batches per rank in a step of the final global batch."""
        return self.batch.final // self.samples_per_pass

    def micro_batches(self, consumed: int) -> int:
        """Micro-batches per rank in the step that starts after `consumed` samples."""
        return self.batch.size(consumed) // self.samples_per_pass


def resolve(args: Args, world: World, vocab_size: int) -> Plan:
    """Plan a run.

    Args:
        args: Flags, checked.
        world: This rank, and how many there are.
        vocab_size: Entries of the tokenizer's vocabulary, before padding.

    Raises:
        ConfigError: The vocabulary does not fit, or --train-samples gives no iteration.
    """
    t = args.training
    p = args.profile
    layout = plan_layout(args.parallel, world, has_experts=args.experts.num_experts is not None)
    batch = _plan_batches(args, layout)
    iterations = batch.iterations(t.train_samples or 0) if t.train_iters is None else t.train_iters
    if not iterations:
        less = f"--train-samples {t.train_samples} is less than one global batch of {batch.size(0)}"
        raise ConfigError([f"{less}; raise it."])
    samples = batch.samples(iterations)
    return Plan(
        args=args,
        world=world,
        layout=layout,
        stage=plan_stage(args.parallel, layout, args.model.num_layers),
        shape=_build_shape(args, vocab_size),
        vocab_size=vocab_size,
        device="cuda" if world.gpus else "cpu",
        backend=args.parallel.distributed_backend or ("nccl" if world.gpus else "gloo"),
        precision=_name_precision(args.precision),
        fp32_gradients=_sums_in_fp32(args),
        batch=batch,
        train_iters=iterations,
        train_samples=samples,
        learning_rate=_build_learning_rate(args, batch, samples),
        profile_window=range(max(p.profile_step_start, 1), p.profile_step_end) if p.is_on else range(0),
        profile_ranks=world.select_ranks(p.profile_ranks),
        compilation=choose_compilation(args, world),
        sharding=plan_sharding(args.parallel, layout),
        loader_workers=_count_loader_workers(args, world),
    )


def _name_precision(precision: PrecisionArgs) -> str:
    """The type of weights in forward and backward."""
    if precision.fp16:
        return "fp16"
    return "bf16" if precision.bf16 else "fp32"


def _sums_in_fp32(args: Args) -> bool:
    """Whether gradients of 16 bits are accumulated and reduced in fp32."""
    precision = args.precision
    parallel = args.parallel
    # Megatron turns this on by itself for bf16, whose 8 bits of mantissa lose small gradients in a sum
    if precision.bf16 and not precision.grad_reduce_in_bf16:
        return True
    fsdp_in_fp32 = parallel.use_megatron_fsdp and parallel.megatron_fsdp_main_grads_dtype == "fp32"
    in_16_bits = precision.fp16 or precision.bf16
    return in_16_bits and (precision.accumulate_allreduce_grads_in_fp32 or fsdp_in_fp32)


def _count_loader_workers(args: Args, world: World) -> int:
    """Processes of the loader, per rank."""
    if args.data.num_workers is not None:
        return args.data.num_workers
    # 2 is Megatron's default; where computing needs the cores, reading a batch takes 1 ms of them
    return 2 if world.gpus else 0


def _plan_batches(args: Args, layout: Layout) -> BatchSchedule:
    t = args.training
    if t.step_batch_size_schedule is None:
        final = t.global_batch_size or t.micro_batch_size * layout.data
        start, increment, samples = t.rampup_batch_size or (0, 0, 0)
        return BatchSchedule(final, start, increment, samples)
    steps = parse_batch_steps(t.step_batch_size_schedule, args.model.seq_length)
    # the run ends before later ones
    steps = tuple(step for step in steps if step[0] < (t.train_samples or 1))
    return BatchSchedule(steps[-1][1], start=steps[0][1], steps=steps)


def plan_stages(plan: Plan) -> list[Plan]:
    """The plans of one rank of each stage of the pipeline."""
    return [_plan_rank(plan, rank) for rank in plan.layout.list_stages()]


def _plan_rank(plan: Plan, rank: int) -> Plan:
    """The same run as this rank has it."""
    parallel = plan.args.parallel
    layout = plan.layout.locate(rank)
    stage = plan_stage(parallel, layout, plan.args.model.num_layers)
    world = replace(plan.world, rank=rank)
    return replace(plan, world=world, layout=layout, stage=stage, sharding=plan_sharding(parallel, layout))


def list_stage_kinds(plan: Plan) -> list[tuple[Plan, int]]:
    """List (plan of one rank, number of stages) of each kind of stage.

    Those of a kind are alike in the layers of their chunks and in being first or last.
    """
    ranks = plan.layout.list_stages()
    found: dict[tuple[tuple[int, ...], bool, bool], list[int]] = {}
    # the layers of each chunk, stage by stage
    sizes_of_stages = zip(*count_chunk_layers(plan.args.parallel, plan.args.model.num_layers))
    for rank, sizes in zip(ranks, sizes_of_stages):
        kind = (sizes, rank == ranks[0], rank == ranks[-1])
        found.setdefault(kind, []).append(rank)
    return [(_plan_rank(plan, alike[0]), len(alike)) for alike in found.values()]


ShapeFields = dict[str, Any]  # of ModelShape, some of them


def _build_shape(args: Args, vocab_size: int) -> ModelShape:
    """The model's sizes. ConfigError where its vocabulary is smaller than the tokenizer's."""
    m = args.model
    latent = _build_latent_shape(args)
    ffn_hidden_size = m.ffn_hidden_size or _choose_mlp_width(m)
    head_width = m.kv_channels or m.hidden_size // m.num_attention_heads
    scales_rope = m.use_rope_scaling and m.position_embedding_type != "yarn"
    return ModelShape(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_query_groups=m.num_query_groups if m.group_query_attention else m.num_attention_heads,
        kv_channels=latent.head_width if latent else head_width,
        ffn_hidden_size=ffn_hidden_size,
        seq_length=m.seq_length,
        max_position_embeddings=m.max_position_embeddings or m.seq_length,
        padded_vocab_size=_pad_vocabulary(args, vocab_size),
        position_embedding=_name_positions(m),
        rotary_percent=m.rotary_percent,
        rotary_base=m.rotary_base,
        # latent attention's channels turn as neighbors
        rotary_interleaved=m.rotary_interleaved or latent is not None,
        rotary_seq_len_interpolation_factor=m.rotary_seq_len_interpolation_factor,
        rope_scaling_factor=m.rope_scaling_factor if scales_rope else None,
        **_plan_yarn(args),
        normalization=m.normalization,
        norm_epsilon=m.norm_epsilon,
        layernorm_1p=m.apply_layernorm_1p,
        activation=_name_activation(m),
        linear_bias=m.add_bias_linear,
        qkv_bias=latent is None and (m.add_bias_linear or m.add_qkv_bias),
        qk_layernorm=m.qk_layernorm,
        tied_embeddings=not m.untie_embeddings_and_output_weights,
        hidden_dropout=m.hidden_dropout,
        attention_dropout=m.attention_dropout,
        query_key_layer_scaling=m.apply_query_key_layer_scaling,
        experts=_build_expert_shape(args, ffn_hidden_size),
        softmax_in_fp32=m.attention_softmax_in_fp32,
        init_method_std=m.init_method_std,
        latent=latent,
        **_scale_to_width(m),
        window=None if m.window_size is None else parse_window(m.window_size),
        window_layers=write_window_layers(m),
        softmax_type=m.softmax_type,
        mtp_num_layers=m.mtp_num_layers or 0,
        mtp_loss_scaling_factor=m.mtp_loss_scaling_factor,
    )


def _name_positions(m: ModelArgs) -> str:
    """ModelShape.position_embedding of the flags; YaRN is a kind of rotary embedding."""
    if m.position_embedding_type == "yarn":
        return "rope"
    if m.position_embedding_type == "learned_absolute" and not m.add_position_embedding:
        return "none"
    return m.position_embedding_type


def _choose_mlp_width(m: ModelArgs) -> int:
    """The width of the MLP where no flag gives it."""
    if not m.swiglu:
        return 4 * m.hidden_size
    # a gated MLP has three matrices, so 8/3 x keeps its size, in steps of 64
    return int(4 * m.hidden_size * 2 / 3) // 64 * 64


def _name_activation(m: ModelArgs) -> str:
    """ModelShape.activation of the flags."""
    if m.swiglu:
        return "swiglu"
    if m.squared_relu:
        return "squared_relu"
    # the fused bias-GELU kernel is the only place where Megatron uses the tanh formula
    return "gelu_tanh" if m.bias_gelu_fusion and m.add_bias_linear else "gelu_erf"


def _pad_vocabulary(args: Args, vocab_size: int) -> int:
    """Rows of the embedding: what the flag says, or the vocabulary filled up to a multiple that all ranks can split."""
    m = args.model
    multiple = m.make_vocab_size_divisible_by * args.parallel.tensor_model_parallel_size
    padded = m.padded_vocab_size or -(-vocab_size // multiple) * multiple
    if padded < vocab_size:
        smaller = f"--padded-vocab-size {padded} is smaller than the vocabulary of {vocab_size}"
        raise ConfigError([f"{smaller}; raise or drop it."])
    return padded


def parse_window(text: str) -> int | None:
    """The tokens before a token that it attends to, of --window-size BEFORE,AFTER; None for all.

    Raises ValueError where there are not two numbers from -1 on, or a token would attend to later ones.
    """
    before, after = (int(word) for word in text.strip("()").split(","))
    if before < -1 or after not in (0, -1):
        raise ValueError(text)
    return None if before == -1 else before


def write_window_layers(m: ModelArgs) -> str:
    """ModelShape.window_layers of the flags."""
    if m.window_size is None or parse_window(m.window_size) is None:
        return ""
    layers = parse_window_layers(m.window_attn_skip_freq, m.num_layers)
    return "" if all(layers) else "".join(str(int(has_window)) for has_window in layers)


def _plan_yarn(args: Args) -> ShapeFields:
    """YaRN's fields of ModelShape, by latent attention's flags or by those of other attention."""
    m = args.model
    latent = args.latent
    shared: ShapeFields = {"yarn_mscale": m.mscale, "yarn_mscale_all_dim": m.mscale_all_dim}
    if latent.multi_latent_attention:
        return shared | {
            "yarn_scaling_factor": m.rotary_scaling_factor if latent.rope_type != "rope" else None,
            "yarn_original_max_position_embeddings": latent.original_max_position_embeddings,
            "yarn_beta_fast": latent.beta_fast,
            "yarn_beta_slow": latent.beta_slow,
        }
    return shared | {
        "yarn_scaling_factor": m.rotary_scaling_factor if m.position_embedding_type == "yarn" else None,
        "yarn_original_max_position_embeddings": m.yarn_original_max_position_embeddings or 4096,
        "yarn_beta_fast": m.yarn_beta_fast or 32.0,
        "yarn_beta_slow": m.yarn_beta_slow or 1.0,
        "yarn_round_to_int": m.yarn_correction_range_round_to_int,
    }


def _build_latent_shape(args: Args) -> LatentShape | None:
    """Latent attention's sizes; None for another attention."""
    m = args.model
    latent = args.latent
    if not latent.multi_latent_attention:
        return None
    return LatentShape(
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        qk_head_dim=latent.qk_head_dim,
        qk_pos_emb_head_dim=latent.qk_pos_emb_head_dim,
        v_head_dim=latent.v_head_dim,
        scaling_factor=m.rotary_scaling_factor,
        mscale_all_dim=m.mscale_all_dim,
    )


def _build_expert_shape(args: Args, ffn_hidden_size: int) -> ExpertShape | None:
    """The experts of the flags; None for a dense model.

    Args:
        ffn_hidden_size: The width of the MLP, which experts have if no other is given.
    """
    e = args.experts
    if e.num_experts is None:
        return None
    kinds = e.moe_router_load_balancing_type
    capacity = e.moe_expert_capacity_factor
    return ExpertShape(
        number=e.num_experts,
        layers=parse_expert_layers(e.moe_layer_freq, args.model.num_layers),
        topk=e.moe_router_topk,
        ffn_hidden_size=e.moe_ffn_hidden_size or ffn_hidden_size,
        shared_ffn_hidden_size=e.moe_shared_expert_intermediate_size or 0,
        shared_gate=e.moe_shared_expert_gate,
        score_function=e.moe_router_score_function,
        pre_softmax=e.moe_router_pre_softmax,
        scaling_factor=e.moe_router_topk_scaling_factor,
        groups=e.moe_router_num_groups,
        group_topk=e.moe_router_group_topk,
        router_dtype=e.moe_router_dtype,
        expert_bias=e.moe_router_enable_expert_bias,
        balancing=choose_losses(kinds, e.moe_aux_loss_coeff),
        sinkhorn=SINKHORN in kinds,
        z_loss_coeff=e.moe_z_loss_coeff,
        input_jitter=e.moe_input_jitter_eps,
        forced_balance=e.moe_router_force_load_balancing,
        capacity_factor=None if capacity is not None and capacity < 0 else capacity,
        drop_policy=e.moe_token_drop_policy,
        probs_on_input=e.moe_apply_probs_on_input,
    )


def _scale_to_width(m: ModelArgs) -> ShapeFields:
    """Fields of ModelShape that --use-mup sets; none without it."""
    if not m.use_mup:
        return {}
    width = m.hidden_size / (m.mup_base_hidden_size or m.hidden_size)
    channels = m.kv_channels or m.hidden_size // m.num_attention_heads
    # as in Megatron-LM, 1 stands for "not given"
    output = 1 / width if m.mup_output_mult == 1 else m.mup_output_mult
    return {
        "mup_width_mult": width,
        "embedding_scale": m.mup_embedding_mult,
        "logits_scale": output,
        "softmax_scale": (m.mup_base_head_dim or 1.0) ** 0.5 / channels**m.mup_attn_scale_power,
    }


def _build_learning_rate(args: Args, batch: BatchSchedule, total_samples: int) -> LearningRatePlan:
    o = args.optimizer
    t = args.training
    if t.train_iters is not None:
        length = total_samples
        decay = (o.lr_decay_iters or t.train_iters) * batch.final
        warmup = o.lr_warmup_iters * batch.final
        wsd = (o.lr_wsd_decay_iters or 0) * batch.final
    else:
        length = t.train_samples or 0
        decay = o.lr_decay_samples or length
        warmup = o.lr_warmup_samples
        wsd = o.lr_wsd_decay_samples or 0
    first = o.start_weight_decay or 0.0
    last = o.end_weight_decay or 0.0
    if o.weight_decay_incr_style == "constant":
        first = last = o.weight_decay
    return LearningRatePlan(
        style=o.lr_decay_style,
        init=o.lr_warmup_init,
        peak=o.lr or 0.0,
        floor=o.min_lr,
        warmup_samples=warmup if o.lr_warmup_fraction is None else o.lr_warmup_fraction * decay,
        decay_samples=decay,
        wsd_style=o.lr_wsd_decay_style,
        wsd_samples=wsd,
        weight_decay_style=o.weight_decay_incr_style,
        start_weight_decay=first,
        end_weight_decay=last,
        weight_decay_samples=length,
    )
