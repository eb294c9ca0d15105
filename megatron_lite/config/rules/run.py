"""What flags of ranks, data, logging and checkpoints must satisfy."""

from collections.abc import Iterator

from megatron_lite.config.args import Args, DataArgs
from megatron_lite.config.data_paths import OF_A_MODEL, TOKENIZER, TOKENIZERS, split_shares, with_files_read
from megatron_lite.config.flags import dashed
from megatron_lite.config.world import World
from megatron_lite.errors import DataError

MAX_TIMEOUT_MINUTES = 1_000_000  # two years; its nanoseconds must have 63 bits
MAX_WORKERS = 1024
MAX_IDS = 2**31 - 2  # int32 holds the last of them, and the end of document


def rank_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among parallel sizes and the backend."""
    p = args.parallel
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    ):
        value = getattr(p, name)
        if value != 1:
            yield f"--{name.replace('_', '-')} {value} is refused: ranks are data parallel only; give 1."
    if p.distributed_backend == "nccl" and not world.gpus:
        yield "--distributed-backend nccl needs a GPU and this machine shows none; drop it, or give gloo for CPUs."
    elif world.gpus and world.local_size > world.gpus:
        yield (
            f"torchrun --nproc_per_node {world.local_size}: more ranks than GPUs here, which are {world.gpus}; "
            f"give {world.gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    if not 1 <= p.distributed_timeout_minutes <= MAX_TIMEOUT_MINUTES:
        yield f"--distributed-timeout-minutes {p.distributed_timeout_minutes}: must be at least 1 and at most {MAX_TIMEOUT_MINUTES}."
    if p.ddp_bucket_size is not None and p.ddp_bucket_size < 1:
        yield f"--ddp-bucket-size {p.ddp_bucket_size}: must be at least 1, or leave it out."


def data_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among data sources and tokenizers (whether files exist is asked elsewhere)."""
    d = args.data
    yield from _sources(d)
    own = _of_splits(d)
    if own and d.split is not None:
        yield f"--split {d.split} does not go with {own[0]}; drop one."
    try:
        untrained = not with_files_read(d).train_data_path
    except DataError as error:
        yield f"{error}."
    else:
        if own and untrained and not args.training.skip_train:
            yield (
                f'--per-split-data-args-path {d.per_split_data_args_path}: names no data for "train"; add it.'
                if d.per_split_data_args_path
                else f"--train-data-path is missing beside {own[0]}; give it too."
            )
    if d.split is not None:
        yield from _split(d.split, args.training.skip_train)
    yield from _tokenizer(args)
    if d.num_workers is not None and not 0 <= d.num_workers <= MAX_WORKERS:
        yield f"--num-workers {d.num_workers}: must be at least 0 and at most {MAX_WORKERS}."


def _given(d: DataArgs, fields: tuple[str, ...]) -> list[str]:
    return [dashed(name) for name in fields if getattr(d, name)]


def _of_splits(d: DataArgs) -> list[str]:
    """The flags given that name data for one split each."""
    return _given(d, ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path"))


def _sources(d: DataArgs) -> Iterator[str]:
    """Data comes from one place."""
    whole, of_splits = ("data_path", "data_args_path"), _of_splits(d)
    if len(of_splits) > 1 and d.per_split_data_args_path:
        yield f"{of_splits[0]} and {of_splits[-1]} exclude each other; keep one."
    given = [*_given(d, whole), *of_splits[:1], *_given(d, ("mock_data", "external_dataloader"))]
    if d.dataloader_type == "external" and d.external_dataloader is None:
        yield "--external-dataloader is missing; --dataloader-type external takes FILE.py:FUNCTION from it."
    elif d.external_dataloader is not None and d.dataloader_type != "external":
        yield f"--external-dataloader {d.external_dataloader}: needs --dataloader-type external; add it, or drop this."
    elif not given:
        yield "--data-path is missing; give the prefix of a .bin/.idx pair, or --mock-data."
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; keep one."


def _split(split: str, skip_train: bool) -> Iterator[str]:
    try:
        shares = split_shares(split)
    except DataError as error:
        yield f"{error}."
        return
    if not shares[0] and not skip_train:
        yield f"--split {split}: no share is left for training; give one, such as 969,30,1."


def _tokenizer(args: Args) -> Iterator[str]:
    d = args.data
    kind = d.tokenizer_type or TOKENIZER
    if kind not in TOKENIZERS:
        yield (
            f"--tokenizer-type {kind} is refused: there are {', '.join(TOKENIZERS)}; data that is already tokenized "
            "trains with --tokenizer-type NullTokenizer --vocab-size N."
        )
    if kind == "GPT2BPETokenizer":
        for name in ("vocab_file", "merge_file"):
            if getattr(d, name) is None:
                yield f"--{name.replace('_', '-')} is missing; --tokenizer-type GPT2BPETokenizer reads it."
    if kind in OF_A_MODEL and d.tokenizer_model is None:
        yield f"--tokenizer-model is missing; --tokenizer-type {kind} reads it."
    if kind == "NullTokenizer" and d.vocab_size is None:
        yield "--vocab-size is missing; --tokenizer-type NullTokenizer needs it."
    for flag, value, least in (
        ("vocab-size", d.vocab_size, 1),
        ("tiktoken-num-special-tokens", d.tiktoken_num_special_tokens, 0),
    ):
        if value is not None and not least <= value <= MAX_IDS:
            yield f"--{flag} {value}: must be at least {least} and at most {MAX_IDS}."
    if d.tokenizer_special_tokens and kind not in ("TikTokenizer", "HuggingFaceTokenizer"):
        yield (
            f"--tokenizer-special-tokens {d.tokenizer_special_tokens[0]}: --tokenizer-type {kind} has those of its "
            "files only; drop it."
        )


def watch_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among intervals and checkpoints."""
    w, c = args.watch, args.checkpoint
    for name in ("log_interval", "eval_interval", "tensorboard_log_interval", "tensorboard_queue_size"):
        if getattr(w, name) < 1:
            yield f"--{name.replace('_', '-')} {getattr(w, name)}: must be at least 1."
    if w.eval_iters < 0:
        yield f"--eval-iters {w.eval_iters}: must be at least 0; 0 switches evaluation off."
    if w.log_memory_interval is not None and (
        w.log_memory_interval < 1 or w.log_memory_interval % max(w.log_interval, 1)
    ):
        yield f"--log-memory-interval {w.log_memory_interval}: must be a multiple of --log-interval {w.log_interval}."
    for name in ("save_interval", "save_retain_interval"):
        if getattr(c, name) is not None and getattr(c, name) < 1:
            yield f"--{name.replace('_', '-')} {getattr(c, name)}: must be at least 1."
    if c.save_retain_interval is not None and c.save_interval and c.save_retain_interval % c.save_interval:
        yield (
            f"--save-retain-interval {c.save_retain_interval}: must be a multiple of --save-interval "
            f"{c.save_interval}, or checkpoints to keep would never be written."
        )
    if c.ckpt_step is not None and (c.ckpt_step < 0 or c.load is None):
        yield f"--ckpt-step {c.ckpt_step}: names an iteration, at least 0, of the folder that --load gives; add it."
    if c.exit_on_missing_checkpoint and c.load is None:
        yield "--exit-on-missing-checkpoint needs --load, the folder to read; add it, or drop this."
    if c.finetune and c.load is None and c.pretrained_checkpoint is None:
        yield "--finetune needs --load or --pretrained-checkpoint, the weights to start from."


def profile_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among windows, ranks and ways of profiling."""
    p = args.profile
    if p.profile_gzip and p.no_profile_gzip:
        yield "--profile-gzip and --no-profile-gzip exclude each other; keep one, or none: large traces are compressed."
    if not (p.profile or p.use_pytorch_profiler or p.record_memory_history):
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
        yield (
            "--use-pytorch-profiler does not work under nsys, which holds the GPU's counters; drop it, or start "
            "without nsys."
        )
