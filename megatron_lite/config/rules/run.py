"""What flags of ranks, data, logging, checkpoints and profiling must satisfy together."""

from collections.abc import Iterator

from megatron_lite.config.args import Args, DataArgs, ParallelArgs
from megatron_lite.config.data_paths import OF_A_MODEL, TOKENIZER, TOKENIZERS, read_argument_files, split_shares
from megatron_lite.config.flags import dashed
from megatron_lite.config.layout import ZERO_BUBBLE, count_chunks, count_data_ranks, count_stage_layers
from megatron_lite.config.world import World
from megatron_lite.errors import DataError

SOURCES = (
    "data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path",
    "mock_data", "external_dataloader",
)  # fmt: skip
OF_SPLITS = [dashed(name) for name in SOURCES[2:6]]


def rank_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among parallel sizes and the backend."""
    p = args.parallel
    if p.expert_model_parallel_size != 1:
        yield f"--expert-model-parallel-size {p.expert_model_parallel_size} is refused: there are no experts; give 1."
    instances = p.num_distributed_optimizer_instances
    m = args.model
    needed = (m.num_layers, m.num_attention_heads, m.hidden_size, m.seq_length, args.training.micro_batch_size)
    # where one is missing, required_rules say it
    if None not in needed:
        yield from _check_shares(args, world)
    replicas = count_data_ranks(p, world) * max(p.context_parallel_size, 1)
    if instances > 0 and replicas % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances}: must divide the number of data and context parallel ranks, {replicas}; "
            "a group per node is usual."
        )
    if p.use_distributed_optimizer and p.use_torch_fsdp2:
        yield "--use-distributed-optimizer and --use-torch-fsdp2 exclude each other; keep the latter to shard weights too."
    if p.distributed_backend == "nccl" and not world.gpus:
        yield "--distributed-backend nccl needs a GPU and this machine shows none; drop it, or give gloo for CPUs."
    elif world.gpus and world.local_size > world.gpus:
        yield (
            f"torchrun --nproc_per_node {world.local_size}: more ranks than GPUs here, which are {world.gpus}; "
            f"give {world.gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )


def _check_shares(args: Args, world: World) -> Iterator[str]:
    """Mistakes among what ranks of a kind are to share out."""
    if args.parallel.tensor_model_parallel_size > 1:
        yield from _check_tensor_parallel(args, world)
    if args.parallel.context_parallel_size > 1:
        yield from _check_context_parallel(args, world)
    yield from _check_pipeline_parallel(args, world)


def _check_tensor_parallel(args: Args, world: World) -> Iterator[str]:
    """Mistakes among what tensor parallel ranks are to split."""
    m, size = args.model, args.parallel.tensor_model_parallel_size
    name = f"--tensor-model-parallel-size {size}"
    if world.size % size:
        yield f"{name}: does not divide the number of ranks, {world.size}; start a multiple of {size}, or change it."
        return
    groups = m.num_query_groups if m.group_query_attention else m.num_attention_heads
    given = "num-query-groups" if m.group_query_attention else "num-attention-heads"
    heads = m.num_attention_heads
    if 0 < groups < size and size % groups == 0:  # ranks share them
        given, groups, sharing = "num-attention-heads", heads, size // groups
        width = m.kv_channels or m.hidden_size // max(heads, 1)
        if 2 * width % sharing:
            yield f"{name}: {sharing} ranks cannot share a query group of heads of {width} channels; change --num-query-groups."
    split = {
        given: groups,
        "ffn-hidden-size" if m.ffn_hidden_size else "hidden-size": m.ffn_hidden_size or m.hidden_size,
    }
    if args.parallel.sequence_parallel:
        split["seq-length"] = m.seq_length
    for flag, value in (split | {"padded-vocab-size": m.padded_vocab_size}).items():
        if value and value % size:
            yield f"{name}: does not divide --{flag} {value}; change one of them."


def _check_context_parallel(args: Args, world: World) -> Iterator[str]:
    """Mistakes among what context parallel ranks are to share out."""
    size, length, tensor = (
        args.parallel.context_parallel_size,
        args.model.seq_length,
        args.parallel.tensor_model_parallel_size,
    )
    name = f"--context-parallel-size {size}"
    if world.size % (size * max(tensor, 1)):
        ranks = f"times --tensor-model-parallel-size {tensor}: does not divide the number of ranks, {world.size}"
        yield f"{name} {ranks}; start a multiple of {size * tensor}, or change one."
        return
    pieces = 2 * size * (tensor if args.parallel.sequence_parallel else 1)
    if length and length % pieces:
        yield f"{name}: --seq-length {length} is not divisible by {pieces}, its pieces on all ranks; change one of them."
    if args.data.reset_attention_mask:
        yield f"{name} does not go with --reset-attention-mask, whose documents may lie on several ranks; drop one of them."


def _refuse_chunks_of_one_stage(p: ParallelArgs) -> Iterator[str]:
    """Megatron-LM, too, stops at chunks of stages where there is one stage."""
    chunks = (
        ("--num-layers-per-virtual-pipeline-stage", p.num_layers_per_virtual_pipeline_stage),
        ("--num-virtual-stages-per-pipeline-rank", p.num_virtual_stages_per_pipeline_rank),
    )
    for flag, number in chunks:
        if number is not None:
            yield f"{flag} {number} needs --pipeline-model-parallel-size above 1; give that, or drop it."


def _check_pipeline_parallel(args: Args, world: World) -> Iterator[str]:
    """Mistakes among stages, and the layers that they are to share out."""
    p, layers = args.parallel, args.model.num_layers
    stages = p.pipeline_model_parallel_size
    if stages <= 1:
        yield from _refuse_chunks_of_one_stage(p)
        return
    name = f"--pipeline-model-parallel-size {stages}"
    within = max(p.tensor_model_parallel_size, 1) * max(p.context_parallel_size, 1)
    if world.size % (stages * within):
        sizes = "times tensor and context parallel sizes: does" if within > 1 else "does"
        yield f"{name}: {sizes} not divide the number of ranks, {world.size}; start a multiple of {stages * within}, or change it."
        return
    given = _list_sizes_of_ends(p)
    counts = count_stage_layers(p, layers)
    if sum(counts) != layers or min(counts) < 1:
        left = f" without the {sum(given.values())} of {' and '.join(given)}" if given else ""
        yield f"{name}: --num-layers {layers}{left} cannot be split evenly; change one of them."
        return
    yield from _check_chunks(p, counts, count_chunks(p, layers), given)
    if count_chunks(p, layers) > 1:
        yield from _check_batch_of_chunks(args, world)
    if p.pipeline_schedule == ZERO_BUBBLE:
        yield from _check_split_backward(args)
    if p.use_torch_fsdp2:
        yield (
            f"{name} and --use-torch-fsdp2 exclude each other, as in Megatron-LM: each micro-batch would gather the weights of a stage "
            "again; give --use-distributed-optimizer instead."
        )


def _list_sizes_of_ends(p: ParallelArgs) -> dict[str, int]:
    """Numbers of layers of the first and the last stage, by their flags; only those that are given."""
    flags = {
        "--decoder-first-pipeline-num-layers": p.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": p.decoder_last_pipeline_num_layers,
    }
    return {flag: number for flag, number in flags.items() if number is not None}


def _check_chunks(p: ParallelArgs, counts: list[int], chunks: int, given: dict[str, int]) -> Iterator[str]:
    """Mistakes among chunks of stages.

    Args:
        counts: Layers of each stage.
        chunks: Of each stage.
        given: Layers of the first and the last stage, by their flags.
    """
    of_layers, of_chunks = p.num_layers_per_virtual_pipeline_stage, p.num_virtual_stages_per_pipeline_rank
    each = f"--num-layers-per-virtual-pipeline-stage {of_layers}"
    if of_layers is not None and of_chunks is not None:
        yield f"{each} and --num-virtual-stages-per-pipeline-rank {of_chunks} say the same; drop one of them."
    elif of_layers is not None and given:
        yield f"{each} and {next(iter(given))} exclude each other; give --num-virtual-stages-per-pipeline-rank instead."
    elif of_layers is not None and counts[0] != of_layers * chunks:
        yield f"{each}: does not divide the {counts[0]} layers of each stage; change it."
    elif any(count % chunks for count in counts):
        numbers = " and ".join(map(str, sorted(set(counts))))
        yield f"--num-virtual-stages-per-pipeline-rank {chunks}: does not divide the {numbers} layers of the stages; change it."


def _check_batch_of_chunks(args: Args, world: World) -> Iterator[str]:
    """Stages of several chunks take as many micro-batches at once as there are stages."""
    training, stages = args.training, args.parallel.pipeline_model_parallel_size
    one_pass = training.micro_batch_size * count_data_ranks(args.parallel, world)
    samples = one_pass * stages
    if samples <= 0:
        return
    batches = (training.global_batch_size or one_pass, *training.rampup_batch_size[:2])
    # batches that one pass does not divide are another rule's
    if any(batch % samples and not batch % one_pass for batch in batches):
        also = " for it and for --rampup-batch-size" if training.rampup_batch_size else ""
        yield (
            f"--global-batch-size {batches[0]}: stages of several chunks take as many micro-batches at once as there are stages; give a "
            f"multiple of {samples}{also}."
        )


def _check_split_backward(args: Args) -> Iterator[str]:
    """What does not go with a schedule in which backward is split."""
    p = args.parallel
    no_order = "no order of both is known here in which no stage waits for ever"
    sharded = "sharded gradients are complete only in backward"
    compiled = "a compiled layer's backward is one piece"
    splits = (
        ("--use-distributed-optimizer", p.use_distributed_optimizer, sharded),
        ("--torch-compile layers", args.training.torch_compile == "layers", compiled),
        ("--num-virtual-stages-per-pipeline-rank", p.num_virtual_stages_per_pipeline_rank, no_order),
        ("--num-layers-per-virtual-pipeline-stage", p.num_layers_per_virtual_pipeline_stage, no_order),
    )
    for flag, is_given, why in splits:
        if is_given:
            yield f"--pipeline-schedule {ZERO_BUBBLE} and {flag} exclude each other: {why}; drop one of them."


def data_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among data sources and tokenizers (whether files exist is asked elsewhere)."""
    d, skip_train = args.data, args.training.skip_train
    named = [dashed(name) for name in SOURCES if getattr(d, name)]  # data comes from one place
    of_splits = [flag for flag in named if flag in OF_SPLITS]
    given = [flag for flag in named if flag not in of_splits[1:]]
    if len(of_splits) > 1 and d.per_split_data_args_path:
        yield f"{of_splits[0]} and {of_splits[-1]} exclude each other; keep one."
    if d.dataloader_type == "external" and d.external_dataloader is None:
        yield "--external-dataloader is missing; --dataloader-type external takes FILE.py:FUNCTION from it."
    elif d.external_dataloader is not None and d.dataloader_type != "external":
        yield f"--external-dataloader {d.external_dataloader}: needs --dataloader-type external; add it, or drop this."
    elif not given:
        yield "--data-path is missing; give the prefix of a .bin/.idx pair, or --mock-data."
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; keep one."
    if of_splits and d.split is not None:
        yield f"--split {d.split} does not go with {of_splits[0]}; drop one."
    try:
        untrained = not read_argument_files(d).train_data_path
    except DataError as error:
        yield f"{error}."
    else:
        if of_splits and untrained and not skip_train:
            yield (
                f'--per-split-data-args-path {d.per_split_data_args_path}: names no data for "train"; add it.'
                if d.per_split_data_args_path
                else f"--train-data-path is missing beside {of_splits[0]}; give it too."
            )
    if d.split is not None:
        try:
            if not split_shares(d.split)[0] and not skip_train:
                yield f"--split {d.split}: no share is left for training; give one, such as 969,30,1."
        except DataError as error:
            yield f"{error}."
    yield from _check_tokenizer(d)


def _check_tokenizer(d: DataArgs) -> Iterator[str]:
    kind = d.tokenizer_type or TOKENIZER
    if kind not in TOKENIZERS:
        yield (
            f"--tokenizer-type {kind} is refused: there are {', '.join(TOKENIZERS)}; data that is already tokenized "
            "trains with --tokenizer-type NullTokenizer --vocab-size N."
        )
    read = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), **dict.fromkeys(OF_A_MODEL, ("tokenizer_model",))}
    for name in read.get(kind, ()):
        if getattr(d, name) is None:
            yield f"{dashed(name)} is missing; --tokenizer-type {kind} reads it."
    if kind == "NullTokenizer" and d.vocab_size is None:
        yield "--vocab-size is missing; --tokenizer-type NullTokenizer needs it."
    if d.tokenizer_special_tokens and kind not in ("TikTokenizer", "HuggingFaceTokenizer"):
        first = f"--tokenizer-special-tokens {d.tokenizer_special_tokens[0]}"
        yield f"{first}: --tokenizer-type {kind} has those of its files only; drop it."


def watch_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among intervals and checkpoints."""
    w, c = args.watch, args.checkpoint
    memory, log = w.log_memory_interval, w.log_interval
    if memory is not None and (memory < 1 or memory % max(log, 1)):
        yield f"--log-memory-interval {memory}: must be a multiple of --log-interval {log}."
    if c.save_retain_interval is not None and c.save_interval and c.save_retain_interval % c.save_interval:
        yield (
            f"--save-retain-interval {c.save_retain_interval}: must be a multiple of --save-interval "
            f"{c.save_interval}, or checkpoints to keep would never be written."
        )
    if c.ckpt_step is not None and c.ckpt_step < 0:
        yield f"--ckpt-step {c.ckpt_step}: names an iteration, at least 0, of the folder that --load gives; change it."
    is_half = args.precision.fp16 or args.precision.bf16
    if c.load_main_params_from_ckpt and not c.no_load_optim:
        yield "--load-main-params-from-ckpt needs --no-load-optim; add that, or drop it to load masters and moments."
    elif c.load_main_params_from_ckpt and is_half and not args.parallel.use_distributed_optimizer:
        yield "--load-main-params-from-ckpt needs --use-distributed-optimizer, as in Megatron-LM; add that, or drop it."


def profile_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among windows, ranks and ways of profiling."""
    p = args.profile
    if p.profile_gzip and p.no_profile_gzip:
        yield "--profile-gzip and --no-profile-gzip exclude each other; keep one, or none: large traces are compressed."
    if not p.is_on:
        return
    if p.profile_step_start < 0:
        yield f"--profile-step-start {p.profile_step_start}: must be at least 0."
    if p.profile_step_end <= max(p.profile_step_start, 1):
        yield (
            f"--profile-step-end {p.profile_step_end}: must be greater than --profile-step-start "
            f"{p.profile_step_start} and than 1; the end is not profiled itself."
        )
    if p.memory_history_events < 1:
        yield f"--memory-history-events {p.memory_history_events}: must be at least 1; 1000000 when left out."
    outside = [rank for rank in p.profile_ranks if not -1 <= rank < world.size]
    if outside:
        yield f"--profile-ranks {outside[0]}: there are ranks 0 to {world.size - 1}; -1 means all."
    if p.use_pytorch_profiler and world.under_nsys and world.gpus:
        # CUPTI serves one of the two, and torch's trace would silently lack all kernels
        unusable = "--use-pytorch-profiler does not work under nsys, which holds the GPU's counters"
        yield f"{unusable}; drop it, or start without nsys."
