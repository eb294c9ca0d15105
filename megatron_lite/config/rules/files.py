"""Rules for the files and folders that flags name. They read only."""

import os
from collections.abc import Iterator

from megatron_lite.config.args import Args, DataArgs
from megatron_lite.config.data_paths import TOKENIZER, find_written_prefix, parse_blend, read_argument_files
from megatron_lite.config.plan import LAYERS
from megatron_lite.config.world import World
from megatron_lite.errors import DataError
from megatron_lite.machine import find_missing_compiler


def file_rules(args: Args, world: World) -> Iterator[str]:
    """Files that cannot be read and folders that cannot be written."""
    d = args.data
    c = args.checkpoint
    w = args.watch
    p = args.profile
    t = args.training
    if (d.tokenizer_type or TOKENIZER) == "GPT2BPETokenizer":
        yield from _check_readable("--vocab-file", d.vocab_file)
        yield from _check_readable("--merge-file", d.merge_file)
    yield from _check_data(d)
    yield from _check_writable("--save", c.save)
    yield from _check_writable("--tensorboard-dir", w.tensorboard_dir)
    yield from _check_writable("--run-dir", w.run_dir if c.save or w.tensorboard_dir or w.run_dir else "runs")
    if p.record_memory_history:
        yield from _check_writable("--memory-snapshot-path", os.path.dirname(p.memory_snapshot_path) or ".")
    for name, path in (("--load", c.load), ("--pretrained-checkpoint", c.pretrained_checkpoint)):
        if path is not None and os.path.isfile(path):
            yield f"{name} {path}: is a file; give the folder that holds latest_checkpointed_iteration.txt."
    fresh = c.load is None or not os.path.exists(c.load)
    if fresh and c.pretrained_checkpoint is not None and not os.path.exists(c.pretrained_checkpoint):
        yield f"--pretrained-checkpoint {c.pretrained_checkpoint}: there is no such folder; check the path, or drop it."
    elif fresh and c.load is not None and c.exit_on_missing_checkpoint and c.pretrained_checkpoint is None:
        yield f"--load {c.load}: there is no such folder, which --exit-on-missing-checkpoint wants; check the path."
    # where inductor was asked for; where it was not, the lack of what it needs decides against compiling
    asked = t.torch_compile == LAYERS and t.torch_compile_backend == "inductor"
    if asked and (missing := find_missing_compiler(bool(world.gpus), os.environ)):
        yield f"--torch-compile: {missing}, or take --torch-compile none."


def _check_data(typed: DataArgs) -> Iterator[str]:
    try:
        d = read_argument_files(typed)
    except DataError:
        return  # the rules of data say it
    if typed.mock_data and d is not typed:
        return  # a file of words beside it is a mistake of another kind
    whole = "--data-args-path" if typed.data_args_path else "--data-path"
    split = "--per-split-data-args-path" if typed.per_split_data_args_path else None
    for name, words in (
        (whole, d.data_path),
        (split or "--train-data-path", d.train_data_path),
        (split or "--valid-data-path", d.valid_data_path),
        (split or "--test-data-path", d.test_data_path),
    ):
        try:
            prefixes, _ = parse_blend(words, name)
        except DataError as error:
            yield f"{error}."
            continue
        for prefix in prefixes:
            yield from _check_pair(name, prefix)


def _check_pair(name: str, prefix: str) -> Iterator[str]:
    missing = [prefix + ending for ending in (".bin", ".idx") if not os.path.isfile(prefix + ending)]
    if not missing:
        yield from _check_readable(name, prefix + ".bin")
        yield from _check_readable(name, prefix + ".idx")
    elif prefix.endswith((".bin", ".idx")):
        yield f"{name} {prefix}: is a file's name; give the prefix without its ending: {prefix[:-4]}."
    elif written := find_written_prefix(prefix):
        yield f"{name} {prefix}: there is no {missing[0]}; did you mean {written}?"
    elif os.path.isdir(missing[0]):
        yield f"{name} {prefix}: {missing[0]} is a folder; give the prefix of a .bin/.idx pair of files."
    else:
        yield f"{name} {prefix}: there is no {missing[0]}; check the prefix, or make it with megatron-lite preprocess."


def _check_readable(name: str, path: str | None) -> Iterator[str]:
    if path is None:
        return
    if not os.path.exists(path):
        yield f"{name} {path}: there is no such file; check the path."
    elif os.path.isdir(path):
        yield f"{name} {path}: is a folder; give the file."
    elif not os.access(path, os.R_OK):
        yield f"{name} {path}: may not be read; change its permissions."


def _check_writable(name: str, path: str | None) -> Iterator[str]:
    if path is None:
        return
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        yield f"{name} {path}: {place} is a file; give a folder."
    elif not os.access(place, os.W_OK | os.X_OK):
        yield f"{name} {path}: {place} may not be written; choose another folder, or change its permissions."
