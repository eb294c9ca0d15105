"""What flags of ranks, data, logging, checkpoints and profiles must satisfy."""

from collections.abc import Iterator

from megatron_lite.config.args import Args
from megatron_lite.config.data_defaults import TOKENIZER, TOKENIZERS
from megatron_lite.config.data_paths import split_shares
from megatron_lite.config.world import World
from megatron_lite.errors import DataError


def rank_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among parallel sizes and the backend."""
    p = args.parallel
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                 "expert_model_parallel_size"):
        value = getattr(p, name)
        if value != 1:
            yield f"--{name.replace('_', '-')} {value} is refused: ranks are data parallel only; give 1."
    if p.distributed_backend == "nccl" and not world.gpus:
        yield "--distributed-backend nccl needs a GPU and this machine shows none; drop it, or give gloo for CPUs."
    elif world.gpus and world.local_size > world.gpus:
        yield (f"torchrun --nproc_per_node {world.local_size}: more ranks than GPUs here, which are {world.gpus}; "
               f"give {world.gpus}, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU.")
    if p.distributed_timeout_minutes < 1:
        yield f"--distributed-timeout-minutes {p.distributed_timeout_minutes}: must be at least 1."
    if p.ddp_bucket_size is not None and p.ddp_bucket_size < 1:
        yield f"--ddp-bucket-size {p.ddp_bucket_size}: must be at least 1, or leave it out."


def data_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among data sources and tokenizers (whether files exist is asked elsewhere)."""
    d = args.data
    own = [f"--{split}-data-path" for split in ("train", "valid", "test") if getattr(d, f"{split}_data_path")]
    sources = [name for name, used in (("--data-path", d.data_path), (own[0] if own else "", own),
                                       ("--mock-data", d.mock_data)) if used]
    if not sources:
        yield "--data-path is missing; give the prefix of a .bin/.idx pair, or --mock-data."
    if len(sources) > 1:
        yield f"{' and '.join(sources)} exclude each other; keep one."
    if own and not d.train_data_path and not args.training.skip_train:
        yield f"--train-data-path is missing beside {own[0]}; give it too."
    if own and d.split is not None:
        yield f"--split {d.split} does not go with {own[0]}; drop one."
    if d.split is not None:
        yield from _split(d.split, args.training.skip_train)
    yield from _tokenizer(args)
    if d.num_workers < 0:
        yield f"--num-workers {d.num_workers}: must be at least 0."


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
        yield (f"--tokenizer-type {kind} is refused: there are {', '.join(TOKENIZERS)}; data that is already tokenized "
               "trains with --tokenizer-type NullTokenizer --vocab-size N.")
    if kind == "GPT2BPETokenizer":
        for name in ("vocab_file", "merge_file"):
            if getattr(d, name) is None:
                yield f"--{name.replace('_', '-')} is missing; --tokenizer-type GPT2BPETokenizer reads it."
    if kind == "NullTokenizer" and d.vocab_size is None:
        yield "--vocab-size is missing; --tokenizer-type NullTokenizer needs it."
    if d.vocab_size is not None and d.vocab_size < 1:
        yield f"--vocab-size {d.vocab_size}: must be at least 1."


def watch_rules(args: Args, world: World) -> Iterator[str]:
    """Mistakes among intervals, checkpoints and profile windows."""
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
    if c.save_interval is not None and c.save_interval < 1:
        yield f"--save-interval {c.save_interval}: must be at least 1."
    if c.exit_on_missing_checkpoint and c.load is None:
        yield "--exit-on-missing-checkpoint needs --load, the folder to read; add it, or drop this."
    if c.finetune and c.load is None and c.pretrained_checkpoint is None:
        yield "--finetune needs --load or --pretrained-checkpoint, the weights to start from."
    yield from _profile(args, world)


def _profile(args: Args, world: World) -> Iterator[str]:
    p = args.profile
    if not (p.profile or p.use_pytorch_profiler or p.record_memory_history):
        return
    if p.profile_step_start < 0:
        yield f"--profile-step-start {p.profile_step_start}: must be at least 0."
    if p.profile_step_end <= max(p.profile_step_start, 1):
        yield (f"--profile-step-end {p.profile_step_end}: must be greater than --profile-step-start "
               f"{p.profile_step_start} and than 1; the end is not profiled itself.")
    outside = [rank for rank in p.profile_ranks if not -1 <= rank < world.size]
    if outside:
        yield f"--profile-ranks {outside[0]}: there are ranks 0 to {world.size - 1}; -1 means all."
    if p.use_pytorch_profiler and world.under_nsys and world.gpus:
        # CUPTI serves one of the two, and torch's trace would silently lack all kernels
        yield ("--use-pytorch-profiler does not work under nsys, which holds the GPU's counters; drop it, or start "
               "without nsys.")
