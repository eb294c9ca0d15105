"""The three conversions, from folder to folder."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megatron_lite.checkpoint.find import chosen, open_newest
from megatron_lite.checkpoint.record import Record
from megatron_lite.checkpoint.write import write_alone
from megatron_lite.convert.export import Export
from megatron_lite.convert.take_in import take_in
from megatron_lite.convert.tokenizer_files import TokenizerFiles
from megatron_lite.errors import UserError
from megatron_lite.run_folder import RELEASE, sync_folder

OURS = "megatron_lite"


def to_hugging_face(
    load: Path,
    step: int | None,
    save_hf: Path,
    precision: str | None,
    tokenizer: TokenizerFiles,
    true_vocab_size: int | None,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Record:
    """The newest checkpoint of `load`, or that of iteration `step`, as the Hugging Face folder `save_hf`.

    progress(done, total) is called for each tensor.
    """
    require_new("--save-hf", save_hf)
    stored = open_newest(load, step, say)
    with new_folder("--save-hf", Path(os.path.abspath(save_hf))) as unfinished:
        export = Export(load, stored, precision or stored.record.precision, tokenizer, true_vocab_size, say, progress)
        export.write(unfinished)
    return stored.record


def from_hugging_face(load_hf: Path, save: Path, divisible_by: int, precision: str | None) -> Record:
    """The Hugging Face folder `load_hf` as SAVE/release."""
    require_new("--save", save)
    record, tensors = take_in(load_hf, divisible_by, precision)
    write_alone(save, record, tensors, release=True)
    return record


def to_own_format(load: Path, step: int | None, save: Path, say: Callable[[str], None]) -> tuple[Record, Path]:
    """A checkpoint in any format that can be read, Megatron-LM's too, in this trainer's own: all that it holds.

    Random states are those of a trainer's own generators: another trainer's are left out. A release stays one. Returns
    the new checkpoint's folder, too.
    """
    require_new("--save", save)
    stored = open_newest(load, step, say)
    record, names = stored.record, stored.names()
    if record.trainer != OURS:
        record = replace(record, ranks=0, trainer=OURS)
        names = {name for name in names if not name.startswith("random.")}
    tensors = {name: torch.empty(stored.size_of(name), dtype=stored.dtype_of(name)) for name in sorted(names)}
    stored.read_into(tensors)
    is_release = step is None and chosen(load, step).name == RELEASE
    return record, write_alone(save, record, tensors, is_release, stored.arguments)


def require_new(flag: str, folder: Path):
    """UserError unless `folder` is empty or does not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{flag} {folder}: exists already, and nothing is overwritten; name a new folder.")


@contextlib.contextmanager
def new_folder(flag: str, folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder` that takes its name when the block ends well, and goes when it fails."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in unfinished.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(unfinished)
        os.replace(unfinished, folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise UserError(
            f"{flag} {folder}: cannot be written ({error.strerror}); make room or choose another folder."
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
