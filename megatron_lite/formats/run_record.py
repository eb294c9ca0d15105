"""run.json: what a run was asked to do, on what it ran, what was predicted of it, and how it ended.

The trainer writes it when the run starts, so that a run that is killed has one, and again when it ends. `megatron-lite
watch` writes it for a script of others: such a record has a command and no plan.

Every field may be null or absent, since files are damaged and parts are not known. Sizes and counts are positive.
"""

import json
from typing import Annotated, Any

import msgspec

from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.step_records import MAX_NUMBER, Count

RUN_SCHEMA = 1

Size = Annotated[int, msgspec.Meta(gt=0, lt=MAX_NUMBER)]
# a run has no more; a reader lists ranks by their number
MAX_RANKS = 2**20
Ranks = Annotated[int, msgspec.Meta(gt=0, le=MAX_RANKS)]
Flops = Annotated[float, msgspec.Meta(gt=0)]


class Process(msgspec.Struct, frozen=True):
    """The process that writes, for whoever asks later whether it still exists (process_state.py)."""

    # name of the machine
    host: str | None = None
    # names the kernel's PID namespace; null where the system has none
    pids: str | None = None
    # the process' id
    pid: int | None = None
    # clock ticks from the machine's boot to the process' start
    started_ticks: int | None = None


class WorldRecord(msgspec.Struct, frozen=True):
    """The job's processes, one per rank, and the one that writes."""

    # of the writing process, from 0
    rank: Count | None = None
    size: Ranks | None = None
    # the rank among those of its machine
    local_rank: Count | None = None
    # ranks of one machine
    local_size: Size | None = None
    # GPUs that the process sees
    gpus: Count | None = None
    # that its operations on CPU tensors use
    threads: Count | None = None
    # Nsight Systems watched the process
    under_nsys: bool | None = None
    # why torch.compile can make no kernels for this process's GPU; empty if it can
    no_compiler: str | None = None


class LayoutRecord(msgspec.Struct, frozen=True):
    """Sizes of the dimensions in which ranks divide the work, and the writing rank's place in each."""

    # ranks that split each layer
    tensor: Size | None = None
    # ranks that share the positions of each sequence
    context: Size | None = None
    # of those, neighbors that exchange attention heads with --cp-comm-type a2a+p2p; 1 elsewhere
    inner_context: Size | None = None
    # ranks that share each batch
    data: Size | None = None
    # ranks that have some of the layers each
    pipeline: Size | None = None
    tensor_rank: Count | None = None
    context_rank: Count | None = None
    data_rank: Count | None = None
    pipeline_rank: Count | None = None
    # --use-tp-pp-dp-mapping
    data_is_outermost: bool | None = None
    # tensor parallel ranks share the tokens between attention and MLP
    sequence_parallel: bool | None = None
    # ranks of a stage that have some of the experts each; 1 without experts
    expert: Size | None = None
    # ranks that split each expert; 1 without experts
    expert_tensor: Size | None = None


class StageRecord(msgspec.Struct, frozen=True):
    """The writing rank's stage of the pipeline."""

    # from 0
    number: Count | None = None
    stages: Size | None = None
    # [first, end) of the layers of each chunk
    chunks: tuple[tuple[int, int], ...] = ()
    # backward is split into gradients of inputs and of weights
    splits_backward: bool | None = None
    # micro-batches that go through one chunk before they go through the next; 0: as many as there are stages
    micro_batch_group_size: Count = 0


class ExpertsRecord(msgspec.Struct, frozen=True):
    """A mixture of experts in the place of some layers' MLP."""

    # of one layer, on all ranks
    number: Size | None = None
    # which layers have experts
    layers: tuple[bool, ...] = ()
    # experts of each token
    topk: Size | None = None
    # width of one expert
    ffn_hidden_size: Size | None = None
    # width of the expert that all tokens pass; 0: there is none
    shared_ffn_hidden_size: Count | None = None
    # its output is weighed by a sigmoid of the token
    shared_gate: bool | None = None
    # softmax or sigmoid
    score_function: str | None = None
    # softmax over all experts, not over the chosen ones
    pre_softmax: bool | None = None
    # of a token's shares; null: none
    scaling_factor: float | None = None
    # groups of experts, of which a token's come from group_topk; null: none
    groups: Size | None = None
    group_topk: Size | None = None
    # fp32 or fp64; null: that of hidden states
    router_dtype: str | None = None
    # experts are balanced by a bias of scores
    expert_bias: bool | None = None
    # kind and coefficient of each loss that balances experts
    balancing: tuple[tuple[str, float], ...] = ()
    # experts are balanced by Sinkhorn's algorithm
    sinkhorn: bool | None = None
    # of the loss that keeps a router's numbers small; null: none
    z_loss_coeff: float | None = None
    # of a router's input; null: none
    input_jitter: float | None = None
    # tokens are routed at random
    forced_balance: bool | None = None
    # tokens beyond this times an expert's even share are dropped; null: none are
    capacity_factor: float | None = None
    # probs or position
    drop_policy: str | None = None
    # an expert's input is weighed, not what it activates
    probs_on_input: bool | None = None
    # that have some of the experts each: 1 here, as the shape is of the whole model
    ranks: Size | None = None


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention, in channels."""

    # of the vector that queries are made from; null: they have none
    q_lora_rank: Size | None = None
    # of the vector that keys and values are made from
    kv_lora_rank: Size | None = None
    # of a head's query and key that do not rotate
    qk_head_dim: Size | None = None
    # of those that do; of keys all heads share them
    qk_pos_emb_head_dim: Size | None = None
    # of a head's value
    v_head_dim: Size | None = None
    # how many times as long sequences are as those of pretraining
    scaling_factor: float | None = None
    # how much scores are sharpened by it
    mscale_all_dim: float | None = None


class Shape(msgspec.Struct, frozen=True):
    """The sizes of the model."""

    num_layers: Size | None = None
    hidden_size: Size | None = None
    num_attention_heads: Size | None = None
    # key/value heads
    num_query_groups: Size | None = None
    # width of one head
    kv_channels: Size | None = None
    ffn_hidden_size: Size | None = None
    # tokens of a sample
    seq_length: Size | None = None
    max_position_embeddings: Size | None = None
    padded_vocab_size: Size | None = None
    # learned_absolute, rope or none
    position_embedding: str | None = None
    rotary_percent: float | None = None
    rotary_base: float | None = None
    rotary_interleaved: bool | None = None
    rotary_seq_len_interpolation_factor: float | None = None
    # of Llama 3.1's scaling of rotary frequencies; null: they are not scaled so
    rope_scaling_factor: float | None = None
    # of YaRN's; null: they are not scaled so
    yarn_scaling_factor: float | None = None
    yarn_original_max_position_embeddings: Size | None = None
    # turns within that length from which on frequencies stay
    yarn_beta_fast: float | None = None
    # turns below which they are divided by the factor
    yarn_beta_slow: float | None = None
    yarn_mscale: float | None = None
    yarn_mscale_all_dim: float | None = None
    # the channels where blending begins and ends are whole ones
    yarn_round_to_int: bool | None = None
    # LayerNorm or RMSNorm
    normalization: str | None = None
    norm_epsilon: float | None = None
    # norm weights are stored minus one
    layernorm_1p: bool | None = None
    # gelu_tanh, gelu_erf, swiglu or squared_relu
    activation: str | None = None
    linear_bias: bool | None = None
    qkv_bias: bool | None = None
    qk_layernorm: bool | None = None
    tied_embeddings: bool | None = None
    hidden_dropout: float | None = None
    attention_dropout: float | None = None
    query_key_layer_scaling: bool | None = None
    softmax_in_fp32: bool | None = None
    init_method_std: float | None = None
    # null: a dense model
    experts: ExpertsRecord | None = None
    # tokens before itself that a token attends to; null: all
    window: Count | None = None
    # a 0 or 1 for each layer: whether it has that window; empty: all of them
    window_layers: str | None = None
    # null: keys and values are projections of hidden states
    latent: Latent | None = None
    # of --use-mup: how many times as wide the model is as the one that its learning rates are for
    mup_width_mult: float | None = None
    # factor of the embeddings' output
    embedding_scale: float | None = None
    # factor of the logits
    logits_scale: float | None = None
    # factor of attention's scores; null: 1 / sqrt(kv_channels)
    softmax_scale: float | None = None
    # of attention: vanilla, off-by-one or learnable
    softmax_type: str | None = None
    # tokens after the next one that are predicted, too, by a layer each
    mtp_num_layers: Count | None = None
    # factor of the mean of their losses
    mtp_loss_scaling_factor: float | None = None


class BatchRecord(msgspec.Struct, frozen=True):
    """Global batch sizes, in samples."""

    # at the end of a ramp-up
    final: Size | None = None
    # 0 without a ramp-up
    start: Count | None = None
    increment: Count | None = None
    ramp_samples: Count | None = None
    # of --step-batch-size-schedule: [consumed samples from which a batch holds, the batch]
    steps: tuple[tuple[Count, Size], ...] = ()


class CompilationRecord(msgspec.Struct, frozen=True):
    """What torch.compile compiles."""

    # each layer by itself
    layers: bool | None = None
    # of an automatic choice; empty if the flag says it
    why: str | None = None
    loss: bool | None = None


class ShardingRecord(msgspec.Struct, frozen=True):
    """How replicas share fp32 weights, gradients and moments: each parameter by rows."""

    # ranks that together hold the whole
    ranks: Size | None = None
    index: Count | None = None
    # layers give back after forward what they gathered (ZeRO-3), or keep it until backward (ZeRO-1)
    gathers_twice: bool | None = None


class Settings(msgspec.Struct, frozen=True):
    """The flags that a report asks for, as resolved. Null: the flag is left out, or not known."""

    # samples per rank, forward and backward
    micro_batch_size: Size | None = None
    # tokens of a sample
    seq_length: Size | None = None
    # width of a head; null: hidden size / heads
    kv_channels: Size | None = None
    # rows of the table of positions; null: as many as a sample has tokens
    max_position_embeddings: Size | None = None
    hidden_dropout: float | None = None
    attention_dropout: float | None = None
    # full or selective; null: nothing is recomputed
    recompute_granularity: str | None = None
    # a fixed loss scale; null or 0: a dynamic one
    loss_scale: float | None = None
    # limit of the gradients' norm; 0: no clipping
    clip_grad: float | None = None
    seed: Count | None = None
    # single, cyclic or external
    dataloader_type: str | None = None
    # random tokens in the place of files
    mock_data: bool | None = None
    # tokens that end a document have no loss
    eod_mask_loss: bool | None = None
    # parameters of a bucket of gradients; null: torch's own number
    ddp_bucket_size: Size | None = None
    grad_reduce_in_bf16: bool | None = None
    # groups of ranks that shard the optimizer's state each among themselves
    num_distributed_optimizer_instances: Size | None = None
    # the stages' layers, as drawn by the user
    pipeline_model_parallel_layout: str | None = None
    # the embedding counts as a layer where stages are divided
    account_for_embedding_in_pipeline_split: bool | None = None
    # so does the loss
    account_for_loss_in_pipeline_split: bool | None = None
    # Python's garbage collector runs at fixed steps only
    manual_gc: bool | None = None
    # iterations between console lines
    log_interval: Size | None = None
    log_params_norm: bool | None = None
    log_num_zeros_in_grad: bool | None = None
    # checkpoints are written in the background
    async_save: bool | None = None
    # folder of TensorBoard's files, and of traces
    tensorboard_dir: str | None = None
    record_memory_history: bool | None = None
    # a pattern of snapshots' names
    memory_snapshot_path: str | None = None
    pytorch_profiler_collect_callstack: bool | None = None
    pytorch_profiler_collect_memory: bool | None = None
    pytorch_profiler_collect_shapes: bool | None = None


class PlanRecord(msgspec.Struct, frozen=True):
    """Everything that was decided about a run before it started."""

    # all flags as resolved, by group and name, for lists of what differs: args["training"]["micro_batch_size"]
    args: dict[str, dict[str, Any]] = {}
    # those that a report asks for
    settings: Settings = Settings()
    # the job's processes
    world: WorldRecord = WorldRecord()
    # how ranks divide the work
    layout: LayoutRecord = LayoutRecord()
    # the writing rank's stage of the pipeline
    stage: StageRecord = StageRecord()
    # the model's sizes; null of a run with --model
    shape: Shape | None = None
    # entries of the vocabulary before padding
    vocab_size: Size | None = None
    # cuda or cpu
    device: str | None = None
    # nccl or gloo
    backend: str | None = None
    # fp32, fp16 or bf16
    precision: str | None = None
    # 16-bit gradients are accumulated and reduced in fp32
    fp32_gradients: bool | None = None
    # global batch sizes
    batch: BatchRecord = BatchRecord()
    # steps of the whole training
    train_iters: Size | None = None
    # samples of the whole training
    train_samples: Size | None = None
    # learning rate and weight decay as functions of consumed samples, by the names of config/plan.py
    learning_rate: dict[str, Any] = {}
    # [first, end) of this start's iterations that are profiled
    profile_window: tuple[int, int] | None = None
    # ranks that are profiled
    profile_ranks: list[int] = []
    # what torch.compile compiles
    compilation: CompilationRecord = CompilationRecord()
    # how replicas share the model's state; null where every rank keeps everything
    sharding: ShardingRecord | None = None
    # processes per rank that read data
    loader_workers: Count | None = None
    # layers of this stage, in all its chunks, that forget their activations and run again in backward
    recomputed_layers: Count | None = None
    # micro-batches per rank and step, after a ramp-up
    micro_batches: Size | None = None
    # the pipeline stage of each rank; [] without a pipeline
    stages_of_ranks: tuple[Count, ...] = ()
    # how many layers each stage has, which may be none; [] without a pipeline
    stage_layers: tuple[Count, ...] = ()
    # of each stage, what each of its chunks computes beside the mean of them, by matrix products;
    # [] where they have as many layers
    chunk_weights: tuple[tuple[float, ...], ...] = ()


class Model(msgspec.Struct, frozen=True):
    """The code of --model."""

    function: str | None = None
    file: str | None = None
    sha256: str | None = None


class Hardware(msgspec.Struct, frozen=True):
    """What the writing process ran on."""

    # that the process may use
    cpus: Size | None = None
    # the GPU's name, or cpu
    device: str | None = None
    # of the GPU
    memory_bytes: Size | None = None
    # version of CUDA that torch was built with
    cuda: str | None = None
    # that the table of GPUs has for the run's precision; null for unknown
    peak_tflops: Flops | None = None
    # on a CPU: its name, the threads of torch, and whether it multiplies such matrices faster than fp32 ones
    processor: str | None = None
    threads: Size | None = None
    bf16_products: bool | None = None
    fp16_products: bool | None = None
    # highest clocks and limits of power and heat, as NVML and the kernel tell them before the first step
    limits: HardwareFigures | None = None
    # the process has an instance of a GPU (MIG), whose figures in steps.jsonl are the whole GPU's
    mig: bool | None = None
    # by figure of steps.jsonl's hardware, why it is not read; "gpu" where none of the GPU's is
    unread: dict[str, str] = {}


class LedgerRow(msgspec.Struct, frozen=True):
    """Bytes of one kind of tensors on one rank at one moment."""

    category: str
    name: str
    num_bytes: int
    # with the numbers put in
    formula: str


class Moment(msgspec.Struct, frozen=True):
    """One point of a step at which memory may be highest."""

    phase: str
    where: str
    # largest first
    rows: tuple[LedgerRow, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.num_bytes for row in self.rows)


class MemoryPrediction(msgspec.Struct, frozen=True):
    """The moments of one step of one rank, in the order of the step."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment that holds the most bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes)


class TimeRow(msgspec.Struct, frozen=True):
    """One part of a step, at the least that the hardware allows."""

    name: str
    ms: float
    # compute, memory or link: the limit of the hardware
    bound: str
    formula: str


class TimePrediction(msgspec.Struct, frozen=True):
    """The shortest possible step of one rank on a named GPU."""

    gpu: str
    # in the order of a step; they add up to it
    rows: tuple[TimeRow, ...]
    # of all ranks, per step
    tokens: int
    # of one rank, per step; Megatron's convention, which counts half of the attention matrix
    flops_causal: int
    # with all of the attention matrix
    flops_full: int
    # 0 for a GPU that no table has
    peak_tflops: float
    # what is not in it
    notes: tuple[str, ...] = ()

    @property
    def step_ms(self) -> float:
        """Sum of the rows."""
        return sum(row.ms for row in self.rows)

    @property
    def tokens_per_s(self) -> float:
        """The most tokens per second, of all ranks together."""
        return 1000 * self.tokens / self.step_ms


class CategoryBytes(msgspec.Struct, frozen=True):
    """What a formula says of one category of a memory snapshot, at the moment at which that category is highest."""

    category: str
    # with the numbers put in
    formula: str
    num_bytes: int


class CategoryPrediction(msgspec.Struct, frozen=True):
    """What formulas say of the categories of memory snapshots."""

    # by stage of the pipeline, from the first, those of one of its ranks
    of_stages: tuple[tuple[CategoryBytes, ...], ...]
    # of the writing rank, all categories together, if every layer kept its activations
    without_recomputation: int
    # of the writing rank: what tensor parallel ranks save by sharing out the tokens between attention and MLP
    saved_by_sequence_parallelism: int


class Prediction(msgspec.Struct, frozen=True):
    """What was predicted of the writing rank before its first step."""

    # most that tensors hold
    peak_bytes: Size | None = None
    # memory of the GPU, or of the machine on CPUs
    room_bytes: Size | None = None
    memory: MemoryPrediction | None = None
    # null on CPUs, and for a GPU that no table has
    time: TimePrediction | None = None
    # to be held against memory snapshots
    categories: CategoryPrediction | None = None
    # why a part of it is missing
    failures: tuple[str, ...] = ()


class Updated(msgspec.Struct, frozen=True):
    """What the first optimizer of a watched script updates on the writing rank."""

    parameters: Size | None = None
    # of the job
    ranks: Size | None = None


class Watched(msgspec.Struct, omit_defaults=True):
    """What `megatron-lite watch` saw of a script. A field that is not known is absent."""

    # ranks of this machine, where the launcher says it
    local_ranks: Size | None = None
    # processes of its first DataLoader
    loader_workers: Count | None = None
    # the limit of torch.nn.utils.clip_grad_norm_
    clip_grad: float | None = None
    # memory of the machine
    host_memory_bytes: Size | None = None
    # the most memory that the writing rank's process held
    peak_host_bytes: Size | None = None


class RunRecord(msgspec.Struct, frozen=True):
    """One start of a run."""

    # of this format; raised when a reader of the old form would be wrong
    schema: int | None = None
    # running, finished, interrupted, "failed: ..." or why it left early
    status: str | None = None
    # as 2026-11-26T08:00:00+0000
    started: str | None = None
    # likewise; null of a run that has not ended
    ended: str | None = None
    # the process that writes
    process: Process | None = None
    # null of a watched script
    plan: PlanRecord | None = None
    # null without --model
    model: Model | None = None
    # of a watched script; null of this trainer's runs
    command: list[str] | None = None
    # of the whole model; null of a run with --model
    parameters: Size | None = None
    # FLOPs of forward and backward of one sample, with half of the attention's scores; null of a run with --model
    sample_flops_causal: Flops | None = None
    # the same with all of the attention's scores
    sample_flops_full: Flops | None = None
    # null if nothing was predicted
    prediction: Prediction | None = None
    # of python, torch and numpy
    versions: dict[str, str] = {}
    # what the writing process ran on
    hardware: Hardware = Hardware()
    # environment variables that change how a run behaves, as far as they were set
    environment: dict[str, str] = {}
    # where the run writes what: steps, tensorboard, checkpoints
    artefacts: dict[str, str] = {}
    # of a watched script: what was seen of it
    watched: Watched | None = None
    # of a watched script: what its first optimizer updates
    updated: Updated | None = None
    # of a watched script: no optimizer of torch stepped, and a step ends where weights were updated by hand
    steps_by_hand: bool = False


def encode_run(record: RunRecord) -> str:
    """The text of run.json."""
    known = msgspec.structs.replace(record, schema=RUN_SCHEMA)
    # not msgspec's encoder, which refuses half a character, as paths may hold
    return json.dumps(msgspec.to_builtins(known, enc_hook=str), indent=1) + "\n"
