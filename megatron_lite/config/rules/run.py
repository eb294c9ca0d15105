"""Rules for the flags of ranks, data, logging, checkpoints and profiling."""

import math
from collections.abc import Iterator

from megatron_lite.config.args import Args, DataArgs, ParallelArgs, TrainingArgs
from megatron_lite.config.data_paths import OF_A_MODEL, TOKENIZER, TOKENIZERS, read_argument_files, split_shares
from megatron_lite.config.flags import dashed
from megatron_lite.config.layout import (
    LAYER_LETTERS,
    count_accounted,
    count_chunks,
    count_data_ranks,
    count_inner_ranks,
    count_whole_stages,
    expand_layout,
)
from megatron_lite.config.plan import parse_batch_steps
from megatron_lite.config.world import World
from megatron_lite.errors import DataError
from megatron_lite.pipeline_schedule import ZERO_BUBBLE

SOURCES_OF_SPLITS = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
SOURCES = ("data_path", "data_args_path", *SOURCES_OF_SPLITS, "mock_data", "external_dataloader")
OF_SPLITS = [dashed(name) for name in SOURCES_OF_SPLITS]


def rank_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among parallel sizes and the backend."""
    p = args.parallel
    instances = p.num_distributed_optimizer_instances
    m = args.model
    needed = (m.num_layers, m.num_attention_heads, m.hidden_size, m.seq_length, args.training.micro_batch_size)
    # where one is missing, required_rules say it
    if None not in needed:
        yield from _check_shares(args, world)
    replicas = count_data_ranks(p, world) * max(p.context_parallel_size, 1)
    if instances > 0 and replicas % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances}: must divide the number of data and context parallel "
            f"ranks, {replicas}; a group per node is usual."
        )
    if p.use_megatron_fsdp and p.use_torch_fsdp2:
        both = "--use-megatron-fsdp and --use-torch-fsdp2"
        yield f"{both} exclude each other: both are torch's fully_shard here; keep one."
    if p.use_megatron_fsdp and p.megatron_fsdp_main_grads_dtype == "fp32" and args.precision.grad_reduce_in_bf16:
        yield "--megatron-fsdp-main-grads-dtype fp32 and --grad-reduce-in-bf16 exclude each other; keep one."
    yield from _check_context_exchange(args)
    if p.use_distributed_optimizer and p.use_torch_fsdp2:
        both = "--use-distributed-optimizer and --use-torch-fsdp2"
        yield f"{both} exclude each other; keep the latter to shard weights too."
    if p.distributed_backend == "nccl" and not world.gpus:
        yield "--distributed-backend nccl needs a GPU and this machine shows none; drop it, or give gloo for CPUs."
    elif world.gpus and world.local_size > world.gpus:
        yield (
            f"torchrun --nproc_per_node {world.local_size}: more ranks than GPUs here, which are {world.gpus}; "
            f"give {world.gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )


def _check_context_exchange(args: Args) -> Iterator[str]:
    """Mistakes among the ways in which context parallel ranks are to exchange, which Megatron-LM stops at, too."""
    p = args.parallel
    layers = args.model.num_layers or 1
    kinds = p.cp_comm_type
    sizes = p.hierarchical_context_parallel_sizes
    shown = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
    if sizes and math.prod(sizes) != p.context_parallel_size:
        yield f"{shown}: their product must be --context-parallel-size {p.context_parallel_size}; change one of them."
    if "a2a+p2p" in kinds and not sizes:
        yield "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes; give them, or another type."
    if len(sizes) not in (0, 2) and "a2a+p2p" in kinds:
        yield f"{shown}: --cp-comm-type a2a+p2p needs two sizes, of the inner and the outer exchange; give those."
    if p.context_parallel_size > 1 and len(kinds) not in (1, layers):
        yield f"--cp-comm-type {' '.join(kinds)}: needs one type, or one for each of --num-layers {layers}; change it."
    if p.context_parallel_size > 1 and args.model.num_attention_heads:
        yield from _check_exchanged_heads(args)


def _check_exchanged_heads(args: Args) -> Iterator[str]:
    """Mistakes among heads of a tensor parallel rank that context parallel ranks are to share out in attention.

    Transformer Engine stops at the same ones (AttnFuncWithCPAndQKVOA2A in context_parallel.py).
    """
    p = args.parallel
    m = args.model
    tensor = max(p.tensor_model_parallel_size, 1)
    heads = m.num_attention_heads
    groups = m.num_query_groups if m.group_query_attention and not args.latent.multi_latent_attention else heads
    ranks_of_kinds = {"a2a": p.context_parallel_size, "a2a+p2p": count_inner_ranks(p)}
    for kind, ranks in ranks_of_kinds.items():
        if kind not in p.cp_comm_type:
            continue
        for name, number in {"num-attention-heads": heads, "num-query-groups": groups}.items():
            of_rank = max(number // tensor, 1)
            if of_rank % ranks:
                shared = f"{ranks} ranks cannot share out the {of_rank} of each tensor parallel rank"
                yield f"--cp-comm-type {kind}: {shared}, of --{name} {number}; change one, or give all_gather."
                break


def _check_shares(args: Args, world: World) -> Iterator[str]:
    """Mistakes among what ranks of a kind are to share out."""
    if args.parallel.tensor_model_parallel_size > 1:
        yield from _check_tensor_parallel(args, world)
    if args.parallel.context_parallel_size > 1:
        yield from _check_context_parallel(args, world)
    yield from _check_pipeline_parallel(args, world)


def _check_tensor_parallel(args: Args, world: World) -> Iterator[str]:
    """Mistakes among what tensor parallel ranks are to split."""
    m = args.model
    size = args.parallel.tensor_model_parallel_size
    name = f"--tensor-model-parallel-size {size}"
    if world.size % size:
        yield f"{name}: does not divide the number of ranks, {world.size}; start a multiple of {size}, or change it."
        return
    groups = m.num_query_groups if m.group_query_attention else m.num_attention_heads
    given = "num-query-groups" if m.group_query_attention else "num-attention-heads"
    heads = m.num_attention_heads
    if 0 < groups < size and size % groups == 0:  # ranks share them
        sharing = size // groups
        given = "num-attention-heads"
        groups = heads
        width = m.kv_channels or m.hidden_size // max(heads, 1)
        if 2 * width % sharing:
            unshared = f"{sharing} ranks cannot share a query group of heads of {width} channels"
            yield f"{name}: {unshared}; change --num-query-groups."
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
    size = args.parallel.context_parallel_size
    length = args.model.seq_length
    tensor = args.parallel.tensor_model_parallel_size
    name = f"--context-parallel-size {size}"
    if world.size % (size * max(tensor, 1)):
        ranks = f"times --tensor-model-parallel-size {tensor}: does not divide the number of ranks, {world.size}"
        yield f"{name} {ranks}; start a multiple of {size * tensor}, or change one."
        return
    pieces = 2 * size * (tensor if args.parallel.sequence_parallel else 1)
    if length and length % pieces:
        undivided = f"--seq-length {length} is not divisible by {pieces}"
        yield f"{name}: {undivided}, its pieces on all ranks; change one of them."


def _list_chunk_flags(p: ParallelArgs) -> dict[str, int | None]:
    """The flags that cut stages into chunks, and their values."""
    return {
        "--num-layers-per-virtual-pipeline-stage": p.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": p.num_virtual_stages_per_pipeline_rank,
    }


def _refuse_chunks_of_one_stage(p: ParallelArgs) -> Iterator[str]:
    """Megatron-LM, too, stops at chunks of stages where there is one stage."""
    chunks = {**_list_chunk_flags(p), "--pipeline-model-parallel-layout": p.pipeline_model_parallel_layout}
    for flag, number in chunks.items():
        if number is not None:
            yield f"{flag} {number} needs --pipeline-model-parallel-size above 1; give that, or drop it."


def _check_pipeline_parallel(args: Args, world: World) -> Iterator[str]:
    """Mistakes among stages, and the layers that they are to share out."""
    p = args.parallel
    layers = args.model.num_layers
    stages = p.pipeline_model_parallel_size
    if stages <= 1:
        yield from _refuse_chunks_of_one_stage(p)
        return
    name = f"--pipeline-model-parallel-size {stages}"
    within = max(p.tensor_model_parallel_size, 1) * max(p.context_parallel_size, 1)
    if world.size % (stages * within):
        sizes = "times tensor and context parallel sizes: does" if within > 1 else "does"
        remedy = f"start a multiple of {stages * within}, or change it"
        yield f"{name}: {sizes} not divide the number of ranks, {world.size}; {remedy}."
        return
    if mistake := _find_wrong_shares(p, layers):
        yield mistake
        return
    if count_chunks(p, layers) > 1:
        yield from _check_batch_of_chunks(args, world)
    if p.pipeline_schedule == ZERO_BUBBLE:
        yield from _check_split_backward(args)
    if p.shards_weights:
        flag = "--use-megatron-fsdp" if p.use_megatron_fsdp else "--use-torch-fsdp2"
        yield (
            f"{name} and {flag} exclude each other, as in Megatron-LM: each micro-batch would gather the weights of a "
            "stage again; give --use-distributed-optimizer instead."
        )


def _list_sizes_of_ends(p: ParallelArgs) -> dict[str, int]:
    """Numbers of layers of the first and the last stage, by their flags; only those that are given."""
    flags = {
        "--decoder-first-pipeline-num-layers": p.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": p.decoder_last_pipeline_num_layers,
    }
    return {flag: number for flag, number in flags.items() if number is not None}


def _list_accounted(p: ParallelArgs) -> list[str]:
    """The flags by which the embedding and the loss count as layers; only those that are given."""
    flags = {
        "--account-for-embedding-in-pipeline-split": p.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": p.account_for_loss_in_pipeline_split,
    }
    return [flag for flag, is_given in flags.items() if is_given]


def _find_wrong_shares(p: ParallelArgs, layers: int) -> str | None:
    """Describe what is wrong with the flags that share out layers among stages and chunks; None if they fit."""
    given = _list_sizes_of_ends(p)
    accounted = _list_accounted(p)
    if p.pipeline_model_parallel_layout is not None:
        return _find_wrong_layout(p, layers)
    of_layers = p.num_layers_per_virtual_pipeline_stage
    of_chunks = p.num_virtual_stages_per_pipeline_rank
    each = f"--num-layers-per-virtual-pipeline-stage {of_layers}"
    if given and accounted:
        return f"{next(iter(given))} and {accounted[0]} exclude each other; drop one of them."
    if of_layers is not None and of_chunks is not None:
        return f"{each} and --num-virtual-stages-per-pipeline-rank {of_chunks} say the same; drop one of them."
    if of_layers is not None and given:
        return (
            f"{each} and {next(iter(given))} exclude each other; give --num-virtual-stages-per-pipeline-rank instead."
        )
    stages = p.pipeline_model_parallel_size
    shared = layers + sum(count_accounted(p))
    counts = count_whole_stages(p, layers)
    if sum(counts) != shared or min(counts) < 1:
        left = f" without the {sum(given.values())} of {' and '.join(given)}" if given else ""
        more = f" with one more for {' and '.join(accounted)} each" if accounted else ""
        uneven = f"--num-layers {layers}{left}{more} cannot be split evenly"
        return f"--pipeline-model-parallel-size {stages}: {uneven}; change one of them."
    chunks = count_chunks(p, layers)
    if of_layers is not None and counts[0] != of_layers * chunks:
        return f"{each}: does not divide the {counts[0]} layers of each stage; change it."
    if any(count % chunks for count in counts):
        numbers = " and ".join(map(str, sorted(set(counts))))
        undivided = f"does not divide the {numbers} layers of the stages"
        return f"--num-virtual-stages-per-pipeline-rank {chunks}: {undivided}; change it."
    return None


def _find_wrong_layout(p: ParallelArgs, layers: int) -> str | None:
    """Describe what is wrong with --pipeline-model-parallel-layout; None if nothing is."""
    stages = p.pipeline_model_parallel_size
    name = f"--pipeline-model-parallel-layout {p.pipeline_model_parallel_layout}"
    others = [flag for flag, number in _list_chunk_flags(p).items() if number is not None]
    others += [*_list_sizes_of_ends(p), *_list_accounted(p)]
    if others:
        return f"{name} and {others[0]} exclude each other; drop one of them."
    try:
        pieces = expand_layout(p.pipeline_model_parallel_layout or "")
    except ValueError:
        return f"{name}: repeats more layers than any model has; correct it."
    letters = "".join(pieces)
    unknown = sorted(set(letters) - set(LAYER_LETTERS))
    if unknown:
        letters_of_layouts = "write E for the embedding, t for a layer, m for one of --mtp-num-layers, L for the loss"
        return f"{name}: {unknown[0]} is no letter of a layout; {letters_of_layouts}."
    has_its_ends = pieces[0].startswith("E") and pieces[-1].endswith("L")
    if not has_its_ends or letters.count("E") != 1 or letters.count("L") != 1:
        return f"{name}: begins with the one E and ends with the one L; write it so."
    if letters.count("t") != layers:
        return f"{name}: has {letters.count('t')} layers t, not those of --num-layers {layers}; change one of them."
    if len(pieces) % stages:
        chunks = f"{len(pieces)} pieces are no multiple of --pipeline-model-parallel-size {stages}"
        return f"{name}: {chunks}; change one of them."
    empty = next((stage for stage in range(stages) if not "".join(pieces[stage::stages])), None)
    if empty is not None:
        return f"{name}: stage {empty + 1} of {stages} has nothing; give it a layer."
    return None


def _list_batches(training: TrainingArgs, one_pass: int, seq_length: int) -> Iterator[tuple[str, int]]:
    """List (flag, size) of all global batches of a run.

    Args:
        training: The flags of training.
        one_pass: Samples of one micro-batch of all data parallel ranks.
        seq_length: Tokens of a sample.
    """
    if training.step_batch_size_schedule is not None:
        try:
            steps = parse_batch_steps(training.step_batch_size_schedule, max(seq_length, 1))
        except (ValueError, OverflowError):
            return  # another rule says it
        yield from (("--step-batch-size-schedule", size) for _, size in steps)
        return
    final = training.global_batch_size or one_pass
    yield "--global-batch-size", final
    ramp = training.rampup_batch_size
    if len(ramp) == 3 and min(ramp) > 0:
        yield from (("--rampup-batch-size", size) for size in range(ramp[0], final, ramp[1]))


def _check_batch_of_chunks(args: Args, world: World) -> Iterator[str]:
    """Mistakes among batches of a pipeline whose stages have several chunks.

    Such stages take a group of micro-batches at once; the last group of a step must fill all stages, too.
    """
    training = args.training
    p = args.parallel
    stages = p.pipeline_model_parallel_size
    group = p.microbatch_group_size_per_virtual_pipeline_stage
    one_pass = training.micro_batch_size * count_data_ranks(p, world)
    if one_pass <= 0:
        return
    name = f"--microbatch-group-size-per-virtual-pipeline-stage {group}"
    if group is not None and group < stages:
        yield f"{name}: must be at least --pipeline-model-parallel-size {stages}; raise it, or drop it."
        return
    at_once = group or stages
    for flag, batch in _list_batches(training, one_pass, args.model.seq_length):
        passes, rest = divmod(batch, one_pass)
        if rest:
            continue  # batches that one pass does not divide are another rule's
        if passes < at_once and group is not None:
            yield f"{name}: is more than the {passes} micro-batches of {flag} {batch}; lower it, or raise the batch."
            return
        if passes < at_once or 0 < passes % at_once < stages:
            multiple = f"give a multiple of {one_pass * at_once}"
            as_many = (
                "as there are stages"
                if group is None
                else f"as {name} says, and at the end no fewer than there are stages"
            )
            yield f"{flag} {batch}: stages of several chunks take as many micro-batches at once {as_many}; {multiple}."
            return


def _check_split_backward(args: Args) -> Iterator[str]:
    """A schedule in which backward is split wants whole gradients, and layers whose backward is in pieces."""
    p = args.parallel
    no_order = "no order of both is known here in which no stage waits for ever"
    sharded = "sharded gradients are complete only in backward"
    compiled = "a compiled layer's backward is one piece"
    chunks = count_chunks(p, args.model.num_layers)
    drawn = p.pipeline_model_parallel_layout is not None and chunks > 1
    drawn_flag = f"--pipeline-model-parallel-layout {p.pipeline_model_parallel_layout} of {chunks} chunks"
    splits = (
        ("--use-distributed-optimizer", p.use_distributed_optimizer, sharded),
        ("--use-megatron-fsdp", p.use_megatron_fsdp and p.shards_state, sharded),
        ("--torch-compile layers", args.training.torch_compile == "layers", compiled),
        ("--num-virtual-stages-per-pipeline-rank", p.num_virtual_stages_per_pipeline_rank, no_order),
        ("--num-layers-per-virtual-pipeline-stage", p.num_layers_per_virtual_pipeline_stage, no_order),
        (drawn_flag, drawn, no_order),
    )
    for flag, is_given, why in splits:
        if is_given:
            yield f"--pipeline-schedule {ZERO_BUBBLE} and {flag} exclude each other: {why}; drop one of them."


def data_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among data sources and tokenizers (whether files exist is asked elsewhere)."""
    d = args.data
    skip_train = args.training.skip_train
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
    yield from _check_infilling(d)
    yield from _check_document_masking(d)
    yield from _check_tokenizer(d)


def _check_document_masking(d: DataArgs) -> Iterator[str]:
    """Sources of samples that do not know where documents begin."""
    if not d.dataloader_inter_document_masking:
        return
    name = "--dataloader-inter-document-masking"
    if d.fim_data:
        yield f"{name} and --fim-data exclude each other: a rearranged sample has lost its documents; drop one of them."
    if d.external_dataloader is not None:
        flag = f"--external-dataloader {d.external_dataloader}"
        yield f"{name} and {flag} exclude each other: only files tell lengths of documents; use --reset-attention-mask."


def _check_infilling(d: DataArgs) -> Iterator[str]:
    if not d.fim_data:
        return
    if d.mock_data or d.external_dataloader is not None:
        flag = "--mock-data" if d.mock_data else f"--external-dataloader {d.external_dataloader}"
        yield f"--fim-data and {flag} exclude each other: it rearranges documents of files; drop one of them."
    kind = d.tokenizer_type or TOKENIZER
    if kind == "NullTokenizer":
        yield "--fim-data cuts texts, and --tokenizer-type NullTokenizer knows none; give the data's own tokenizer."
    if d.fim_split_sample is not None and d.fim_fragment_rate is None:
        yield f"--fim-split-sample {d.fim_split_sample} needs --fim-fragment-rate; add it."


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
    w = args.watch
    c = args.checkpoint
    memory = w.log_memory_interval
    log = w.log_interval
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
