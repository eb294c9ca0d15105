"""What the files and folders that flags name must satisfy. Looks, and writes nothing."""

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_lite.config.args import Args
from megatron_lite.config.data_paths import prefixes
from megatron_lite.config.world import World


def machine_rules(args: Args, world: World) -> Iterator[str]:
    """Files that cannot be read and folders that cannot be written."""
    d, c, w = args.data, args.checkpoint, args.watch
    if (d.tokenizer_type or "GPT2BPETokenizer") == "GPT2BPETokenizer":
        for name, path in (("--vocab-file", d.vocab_file), ("--merge-file", d.merge_file)):
            if path is not None:
                yield from _readable(name, path)
    for name, words in (("--data-path", d.data_path), ("--train-data-path", d.train_data_path),
                        ("--valid-data-path", d.valid_data_path), ("--test-data-path", d.test_data_path)):
        for prefix in prefixes(words):
            yield from _data(name, prefix)
    for name, path in (("--save", c.save), ("--tensorboard-dir", w.tensorboard_dir), ("--run-dir", w.run_dir)):
        if path is not None:
            yield from _writable(name, path)
    if c.load is not None and Path(c.load).is_file():
        yield f"--load {c.load}: is a file; give the folder that holds latest_checkpointed_iteration.txt."


def _data(name: str, prefix: str) -> Iterator[str]:
    missing = [prefix + ending for ending in (".bin", ".idx") if not Path(prefix + ending).is_file()]
    if not missing:
        for ending in (".bin", ".idx"):
            yield from _readable(name, prefix + ending)
    elif Path(prefix).suffix in (".bin", ".idx"):
        yield f"{name} {prefix}: give the prefix without its ending: {Path(prefix).with_suffix('')}."
    elif Path(f"{prefix}_text_document.idx").is_file():
        yield f"{name} {prefix}: there is no {missing[0]}; did you mean {prefix}_text_document?"
    else:
        yield f"{name} {prefix}: there is no {missing[0]}; check the prefix, or make it with megatron-lite preprocess."


def _readable(name: str, path: str) -> Iterator[str]:
    if not Path(path).exists():
        yield f"{name} {path}: there is no such file; check the path."
    elif Path(path).is_dir():
        yield f"{name} {path}: is a folder; give the file."
    elif not os.access(path, os.R_OK):
        yield f"{name} {path}: may not be read; change its permissions."


def _writable(name: str, path: str) -> Iterator[str]:
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield f"{name} {path}: {place} is a file; give a folder."
    elif not os.access(place, os.W_OK | os.X_OK):
        yield f"{name} {path}: {place} may not be written; choose another folder, or change its permissions."
